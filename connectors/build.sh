#!/usr/bin/env bash
# usage: build.sh OUT [SANITIZERS]
# Builds the connectors into the folder OUT. CXX and CXXFLAGS are used if they are set.
set -euo pipefail
mkdir -p "$1"
out=$(cd "$1" && pwd) sanitizers=${2:-}
cd "$(dirname "$0")"
read -ra flags <<< "${CXXFLAGS:--O2 -g1}"
flags+=(-std=c++17 -fPIC -shared -fvisibility=hidden -pthread -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror
    -I../include -Icommon -Wl,--version-script=exports.map -Wl,-z,defs -Wl,--as-needed)
[ -z "$sanitizers" ] || flags+=("-fsanitize=$sanitizers" -fno-sanitize-recover=all -fno-omit-frame-pointer)
# The runtime of a sanitizer of clang is in the program only.
[ -z "$sanitizers" ] || flags=("${flags[@]/-Wl,-z,defs/-Wl,-z,now}")

# liburing is linked statically: without it at run time, or on an older kernel, the store uses threads.
uring=()
if pkg-config --atleast-version=2.2 liburing 2>/dev/null; then
    uring=(-DPLLM_FILES_URING $(pkg-config --cflags liburing))
    archive=$(pkg-config --variable=libdir liburing)/liburing.a
    if [ -e "$archive" ]; then uring+=("$archive" -Wl,--exclude-libs,ALL); else uring+=($(pkg-config --libs liburing)); fi
else
    echo "libpagedllm_files.so: built without io_uring, because liburing 2.2 is not installed (apt-get install liburing-dev)"
fi
pkg-config --exists hiredis || { echo "hiredis is missing. Run: sudo apt-get install -y libhiredis-dev" >&2; exit 1; }

# usage: library NAME FLAG..., with the sources of the folder NAME
library() {
    local name=$1 target=$out/libpagedllm_$1.so
    ${CXX:-c++} "$name"/*.cpp "${flags[@]}" "${@:2}" -Wl,-soname,"libpagedllm_$name.so.1" -o "$target.1"
    ln -sf "libpagedllm_$name.so.1" "$target"
}
library files "${uring[@]}"
library valkey $(pkg-config --cflags --libs hiredis)
# NIXL is loaded when a store is opened.
library nixl $(pkg-config --cflags --libs hiredis) -ldl
