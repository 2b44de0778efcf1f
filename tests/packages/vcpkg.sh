#!/usr/bin/env bash
# usage: vcpkg.sh MODEL EXPECTED
# Checks the manifest of the vcpkg port, runs its portfile with replacements for the functions of vcpkg, and
# builds the example with the result in an empty folder. vcpkg itself is not needed and not run.
# BUILT where the libraries were built; default: target/release of this repository
set -euo pipefail
model=$(realpath "$1") expected=$(realpath "$2")
root=$(cd "$(dirname "$0")/../.." && pwd)
port=$root/packaging/vcpkg/ports/pagedllm
built=${BUILT:-$root/target/release}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 - "$port/vcpkg.json" "$root/Cargo.toml" <<'PYTHON'
import json
import re
import sys

manifest = json.load(open(sys.argv[1]))
version = re.search(r'^version = "(.*)"', open(sys.argv[2]).read(), re.M)[1]
assert manifest["version"] == version, f"the port has version {manifest['version']}, Cargo.toml {version}"
known = {"name", "version", "description", "homepage", "license", "supports"}
assert set(manifest) == known, f"other members than {known}: {set(manifest)}"
assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", manifest["name"])
PYTHON

cp "$root/examples/cpp/hello.cpp" "$work/"
cat > "$work/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(consumer C CXX)
find_package(pagedllm CONFIG REQUIRED)
find_package(Threads REQUIRED)
add_executable(hello hello.cpp)
target_compile_features(hello PRIVATE cxx_std_17)
target_link_libraries(hello PRIVATE pagedllm::pagedllm Threads::Threads)
CMAKE
for linkage in dynamic static; do
    out=$work/$linkage
    cmake -DPORT_DIR="$port" -DBUILT="$built" -DLINKAGE=$linkage -DOUT="$out" -P "$root/tests/packages/vcpkg/run.cmake" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
    libraries=$(cd "$out/packages/lib" && ls -d libpagedllm.* | tr '\n' ' ')
    case $linkage:$libraries in
        "static:libpagedllm.a " | "dynamic:libpagedllm.so libpagedllm.so."*" libpagedllm.so.1 ") ;;
        *) echo "vcpkg: the $linkage package has $libraries" >&2; exit 1 ;;
    esac
    for file in include/pagedllm.h include/pagedllm.hpp share/pagedllm/{copyright,usage}; do
        [ -s "$out/packages/$file" ] || { echo "vcpkg: the package lacks $file" >&2; exit 1; }
    done
    cmake -S "$work" -B "$out/build" -DCMAKE_PREFIX_PATH="$out/packages" -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build "$out/build" >/dev/null
    LD_LIBRARY_PATH=$out/packages/lib "$out/build/hello" "$model" 2>/dev/null | diff - "$expected"
    flags=$(PKG_CONFIG_PATH=$out/packages/lib/pkgconfig pkg-config --cflags --libs pagedllm)
    # shellcheck disable=SC2086
    c++ -std=c++17 "$work/hello.cpp" -o "$out/hello" $flags -pthread
    LD_LIBRARY_PATH=$out/packages/lib "$out/hello" "$model" 2>/dev/null | diff - "$expected"
    echo "vcpkg: the $linkage package of the port has the expected output (without vcpkg)"
done
