#!/usr/bin/env bash
# Tests the communicator of bindings/mpi with Open MPI and MPICH, on 2 and 3 ranks.
# usage: run.sh [IMPLEMENTATION]...     default: openmpi mpich
# BUILD     where to build; default: build/mpi-tests of this repository
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build/mpi-tests}
[ $# -gt 0 ] || set -- openmpi mpich
warnings=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
# Limits at which messages of the test consist of blocks, as otherwise only those above 2 GiB.
small=(-DPLLM_MPI_MAX_COUNT=1000 -DPLLM_MPI_BLOCK=64)
mkdir -p "$build"

# usage: ranks IMPLEMENTATION COUNT PROGRAM...
ranks() {
    local options=()
    # The tests may run as root, on fewer CPUs than ranks, and on one host without a remote shell.
    [ "$1" != openmpi ] || options=(--allow-run-as-root --oversubscribe --mca plm isolated
        --mca btl_vader_single_copy_mechanism none)
    timeout 300 "mpirun.$1" "${options[@]}" -n "${@:2}"
}

for implementation in "$@"; do
    for limits in default small; do
        program=$build/$implementation-$limits options=()
        [ "$limits" = default ] || options=("${small[@]}")
        "mpicc.$implementation" -std=c11 -O1 -g1 "${warnings[@]}" "${options[@]}" "-I$root/include" "-I$root/bindings/mpi" \
            "$root/bindings/mpi/pagedllm_mpi.c" "$root/tests/mpi/communicator_test.c" -o "$program"
        for count in 2 3; do
            for seed in 1 2; do
                passed=$(ranks "$implementation" "$count" "$program" "$seed" | grep -c ': passed$' || true)
                [ "$passed" = "$count" ] || { echo "$implementation, $limits limits, seed $seed: $passed of $count ranks passed"; exit 1; }
            done
            echo "$implementation, $limits limits, $count ranks: passed"
        done
    done
    # A program that starts MPI without threads gets an error.
    "mpicc.$implementation" -std=c11 "${warnings[@]}" "-I$root/include" "-I$root/bindings/mpi" \
        "$root/bindings/mpi/pagedllm_mpi.c" "$root/tests/mpi/single_test.c" -o "$build/$implementation-single"
    ranks "$implementation" 1 "$build/$implementation-single"
done
# The library is built, and the example of the README compiles with it.
MPICC=mpicc.$1 "$root/bindings/mpi/build.sh" "$build/lib"
awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' "$root/bindings/mpi/README.md" >"$build/example.c"
"mpicc.$1" -std=c11 "${warnings[@]}" "-I$root/include" "-I$build/lib" "$build/example.c" -o "$build/example" "-L$build/lib" -lpagedllm_mpi
ranks "$1" 2 "$build/example"
# The header stands alone in C and C++.
for language in c c++; do
    "mpicc.$1" "-x$language" -Wall -Wextra -Werror -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX "-I$root/include" -fsyntax-only "$root/bindings/mpi/pagedllm_mpi.h"
done
