#!/bin/bash
# build.sh OUT_DIR: builds libcuda.so, libcublasLt.so.12 and libnccl.so.2 for machines without a device, if their sources are newer, and
# cuda-12.0/libcuda.so, a driver without the functions that are newer than CUDA 12.0.
# build.sh OUT_DIR test: runs the tests of the shim instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernels=$here/../../kernels
mkdir -p "$1"
cd "$1"
exec 9> .lock
flock 9 # several tests may build at the same time

# Kernels access numbers through other types, which nvcc allows. Misaligned accesses trap, as on a device.
FLAGS=(-std=c++17 -O2 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -pthread -I"$here" -I"$kernels" -I.)
KERNEL_FLAGS=(-fno-strict-aliasing -fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error -Wno-unknown-pragmas)

is_new() {
    local source
    [ -f "$1" ] || return 1
    for source in "$here"/*.{h,cpp,sh} "$kernels"/*.cu*; do [ "$source" -nt "$1" ] && return 1; done
    return 0
}

list_kernels() {
    g++ "${FLAGS[@]}" "${KERNEL_FLAGS[@]}" -E -P -x c++ "$kernels/all.cu" |
        grep -oP 'extern "C"\s+void\s+\K[a-z]\w*' | sed 's/.*/KERNEL(&)/' > kernels.inc
}

build_libraries() {
    list_kernels
    g++ "${FLAGS[@]}" "${KERNEL_FLAGS[@]}" -c "$here/kernels.cpp" -o kernels.o &
    g++ "${FLAGS[@]}" -c "$here/shim.cpp" -o shim.o
    g++ "${FLAGS[@]}" -c "$here/libcuda.cpp" -o libcuda.o
    wait $!
    g++ "${FLAGS[@]}" -shared -Wl,-soname,libcuda.so kernels.o shim.o libcuda.o -o libcuda.so
    mkdir -p cuda-12.0
    g++ "${FLAGS[@]}" -DSHIM_CUDA_12_0 -shared -Wl,-soname,libcuda.so kernels.o shim.o "$here/libcuda.cpp" -o cuda-12.0/libcuda.so
    g++ "${FLAGS[@]}" -O3 -shared -Wl,-soname,libcublasLt.so.12 "$here/libcublaslt.cpp" -L. -l:libcuda.so -Wl,-rpath,'$ORIGIN' \
        -o libcublasLt.so.12
    g++ "${FLAGS[@]}" -shared -Wl,-soname,libnccl.so.2 "$here/libnccl.cpp" -L. -l:libcuda.so -Wl,-rpath,'$ORIGIN' -o libnccl.so.2
}

if [ "${2:-}" = test ]; then
    g++ "${FLAGS[@]}" "${KERNEL_FLAGS[@]}" "$here"/{shim_test,shim,libcublaslt}.cpp -o shim_test
    ./shim_test
elif ! is_new built; then
    touch building # older than any source that changes during the build
    build_libraries
    mv building built
fi
