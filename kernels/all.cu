// All kernels, compiled into one fatbin.
#include "attention.cu"
#include "blocks.cu"
#include "cache.cu"
#include "draw.cu"
#include "elementwise.cu"
#include "experts.cu"
#include "matmul.cu"
#include "norm.cu"
