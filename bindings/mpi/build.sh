#!/bin/sh
# Compiles the communicator with the compiler of an MPI.
# usage: build.sh OUT     MPICC: the compiler, default: mpicc
set -eu
out=${1:?usage: build.sh OUT}
here=$(cd "$(dirname "$0")" && pwd)
# The header is that of the repository, or of the installed tree.
include=$here/../../include
[ -e "$include/pagedllm.h" ] || include=$here/../../../include
mkdir -p "$out"
"${MPICC:-mpicc}" -std=c11 -O2 -fPIC -I"$include" -I"$here" -c "$here/pagedllm_mpi.c" -o "$out/pagedllm_mpi.o"
ar rcs "$out/libpagedllm_mpi.a" "$out/pagedllm_mpi.o"
rm "$out/pagedllm_mpi.o"
cp "$here/pagedllm_mpi.h" "$out"
