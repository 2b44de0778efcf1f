#!/usr/bin/env bash
# Tests the C++ wrapper: the header alone, the README's program, and all tests with each compiler
# and sanitizer.
# usage: run.sh [none | address,undefined | thread]...     default: all three
# COMPILERS            default: g++ and, if it is installed, clang++
# PAGEDLLM_LIB_DIR     where libpagedllm.so is; default: target/release of this repository
# CONNECTORS_DIR       where libpagedllm_files.so is; default: build/connectors of this repository
# PAGEDLLM_INCLUDE_DIR where pagedllm.h is; default: include of this repository
# BUILD                where to build; default: build/cpp of this repository
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
lib=${PAGEDLLM_LIB_DIR:-$root/target/release}
include=${PAGEDLLM_INCLUDE_DIR:-$root/include}
connectors=${CONNECTORS_DIR:-$root/build/connectors}
build=${BUILD:-$root/build/cpp}
[ $# -gt 0 ] || set -- none address,undefined thread

if [ -z "${COMPILERS:-}" ]; then
    COMPILERS=g++
    if command -v clang++ >/dev/null; then COMPILERS+=" clang++"; else
        echo "skipped: clang++, because it is not installed (apt-get install clang)"
    fi
fi

check_header() {
    local compile=("$1" -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -fsyntax-only "-I$include" "-I$root/bindings/cpp")
    for std in c++17 c++20; do
        for mode in "" "-fno-exceptions -fno-rtti"; do "${compile[@]}" -std=$std $mode "$root/bindings/cpp/tests/header_alone.cpp"; done
    done
    # C++20 has more static assertions.
    "${compile[@]}" -std=c++20 -DPAGEDLLM_MODEL_DIR='""' "$root/bindings/cpp/tests/handles_test.cpp"
    sed -n '/^```cpp$/,/^```$/{/^```/!p}' "$root/bindings/cpp/README.md" | "${compile[@]}" -std=c++17 -x c++ -
    echo "$1: the header stands alone"
}

run_tests() {
    local dir=$build/$1-$2
    cmake -S "$root/bindings/cpp/tests" -B "$dir" -DCMAKE_CXX_COMPILER="$1" -DSANITIZE="$2" \
        -DPAGEDLLM_LIB_DIR="$lib" -DPAGEDLLM_INCLUDE_DIR="$include" -DCONNECTORS_DIR="$connectors" >/dev/null
    cmake --build "$dir" --parallel 2 >"$dir/build.log" 2>&1 || { cat "$dir/build.log"; return 1; }
    echo "$1, sanitizer $2:"
    ctest --test-dir "$dir" --output-on-failure
}

for compiler in $COMPILERS; do
    check_header "$compiler"
    for sanitizer in "$@"; do run_tests "$compiler" "$sanitizer"; done
done
