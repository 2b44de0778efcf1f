// The kernels of the library for the host, and their names. build.sh generates kernels.inc.
#include "all.cu"
#include "kernel_table.h"

const Kernel kernel_table[] = {
#include "kernels.inc"
    {nullptr, nullptr},
};
