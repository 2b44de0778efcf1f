#!/bin/bash
# build.sh OUT_DIR: libcuda.so and libcublasLt.so for machines without a device, where they are not newer than all that they are made of.
# build.sh OUT_DIR test: runs the shim's own tests instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernels=$here/../../kernels
mkdir -p "$1"
cd "$1"
exec 9> .lock
flock 9 # several tests may want them at the same time

# Kernels read numbers as other types, as nvcc lets them. What a device does not forgive, an address that is not aligned, traps.
FLAGS=(-std=c++17 -O2 -g -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -pthread -I"$here" -I"$kernels" -I.)
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
    g++ "${FLAGS[@]}" -O3 -shared -Wl,-soname,libcublasLt.so "$here/libcublaslt.cpp" -L. -l:libcuda.so -Wl,-rpath,'$ORIGIN' \
        -o libcublasLt.so
}

if [ "${2:-}" = test ]; then
    g++ "${FLAGS[@]}" "${KERNEL_FLAGS[@]}" "$here"/{shim_test,shim,libcublaslt}.cpp -o shim_test
    ./shim_test
elif ! is_new built; then
    touch building # as old as the oldest source that it may have missed
    build_libraries
    mv building built
fi
