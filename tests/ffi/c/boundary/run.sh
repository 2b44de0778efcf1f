#!/bin/sh
# Builds and runs three programs: the tests, a host with its own allocator, and a plugin.
#   CC, CFLAGS              the compiler, and more options (for example -fsanitize=address,undefined)
#   INCLUDE_DIR, LIB_DIR    folders of pagedllm.h and libpagedllm.so; default: this repository's
#   BUILD_DIR               folder of the programs; default: build/boundary in this repository
#   BOUNDARY_TIMEOUT_FACTOR=10    multiplies the limits of supervise.c
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
cc=${CC:-cc}
cflags=${CFLAGS:-}
include=${INCLUDE_DIR:-$root/include}
lib=${LIB_DIR:-$root/target/release}
build=${BUILD_DIR:-$root/build/boundary}
model=$root/examples/model
golden=$root/tests/data/llama

options="-std=c11 -O1 -g -pthread -Wall -Wextra -Wpedantic -Werror -I$include"
link="-L$lib -lpagedllm -lm -Wl,-rpath,$lib"
mkdir -p "$build"
cd "$here"
tests=$(ls ./*.c | grep -v -e allocator.c -e dlopen.c)
# shellcheck disable=SC2086
$cc $options $cflags $tests -o "$build/boundary" $link
# These two are built without sanitizers: one has its own malloc, the other one loads the library.
# shellcheck disable=SC2086
$cc $options allocator.c -o "$build/allocator" $link
# shellcheck disable=SC2086
$cc $options dlopen.c -o "$build/dlopen" -ldl

# A locale with decimal commas, so that none needs to be installed.
[ -d "$build/de_DE.UTF-8" ] || localedef -i de_DE -f UTF-8 "$build/de_DE.UTF-8" || true
export LOCPATH="$build"

failed=0
"$build/boundary" "$model" "$golden" || failed=1
"$build/boundary" --supervise "$build/allocator" "$model" || failed=1
"$build/boundary" --supervise "$build/dlopen" "$lib/libpagedllm.so" "$model" || failed=1
exit $failed
