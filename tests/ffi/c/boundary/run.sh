#!/bin/sh
# Builds and runs the boundary's three programs: all cases, a host with its own allocator, a plugin's life.
#   CC, CFLAGS              the compiler, and what is added to its options (such as -fsanitize=address,undefined)
#   INCLUDE_DIR, LIB_DIR    where pagedllm.h and libpagedllm.so are; default: this repository's
#   BUILD_DIR               where the programs go; default: build/boundary in this repository
#   BOUNDARY_PATIENCE=10    ten times as long for each case
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
cc=${CC:-cc}
cflags=${CFLAGS:-}
include=${INCLUDE_DIR:-$root/include}
lib=${LIB_DIR:-$root/target/release}
build=${BUILD_DIR:-$root/build/boundary}
model=$root/examples/model
golden=$root/tests/goldens/llama

options="-std=c11 -O1 -g -pthread -Wall -Wextra -Wpedantic -Werror -I$include"
link="-L$lib -lpagedllm -lm -Wl,-rpath,$lib"
mkdir -p "$build"
cd "$here"
# shellcheck disable=SC2086
$cc $options $cflags main.c common.c lifetime.c threads.c queues.c sequences.c events.c host.c versions.c load.c -o "$build/boundary" $link
# These two bring their own malloc, and their own way to load: sanitizers would be in the way.
# shellcheck disable=SC2086
$cc $options allocator.c -o "$build/allocator" $link
# shellcheck disable=SC2086
$cc $options dlopen.c -o "$build/dlopen" -ldl

# A locale with decimal commas, made here so that none needs to be installed.
[ -d "$build/de_DE.UTF-8" ] || localedef -i de_DE -f UTF-8 "$build/de_DE.UTF-8" || true
export LOCPATH="$build"

failed=0
"$build/boundary" "$model" "$golden" || failed=1
"$build/allocator" "$model" || failed=1
"$build/dlopen" "$lib/libpagedllm.so" "$model" || failed=1
exit $failed
