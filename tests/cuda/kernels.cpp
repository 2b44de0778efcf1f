// The library's kernels for the host, and their names: build.sh reads kernels.inc off the kernels.
#include "all.cu"
#include "kernel_table.h"

const Kernel kernel_table[] = {
#include "kernels.inc"
    {nullptr, nullptr},
};
