#!/usr/bin/env bash
# usage: run.sh TREE MODEL EXPECTED
# Builds programs against an installed tree as its users would, in an empty folder: C, C++ by pkg-config and by CMake, Go; shared and static;
# Python and Node.
set -euo pipefail
tree=$(cd "$1" && pwd) model=$(cd "$2" && pwd) expected=$(realpath "$3")
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$examples/c/hello.c" "$examples/cpp/hello.cpp" "$here/CMakeLists.txt" "$work/"
cp -r "$examples/go/hello" "$work/go"
cd "$work"

export PKG_CONFIG_PATH=$tree/lib/pkgconfig
flags=$(pkg-config --cflags pagedllm)
shared="$(pkg-config --libs pagedllm) -Wl,-rpath,$tree/lib"
static="$tree/lib/libpagedllm.a -lm -lgcc_s"

answers() {
    "$@" "$model" 2>/dev/null | diff - "$expected"
    echo "consumer: $name answers as expected"
}
name="C, pkg-config, shared";   cc -std=c11 hello.c -o c_shared $flags $shared;          answers ./c_shared
name="C, static";               cc -std=c11 hello.c -o c_static $flags $static;          answers ./c_static
name="C++, pkg-config, shared"; c++ -std=c++17 hello.cpp -o cpp_shared $flags $shared -pthread; answers ./cpp_shared

cmake -S . -B cmake -DCMAKE_PREFIX_PATH="$tree" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build cmake >/dev/null
name="C++, CMake, shared"; answers cmake/hello
name="C++, CMake, static"; answers cmake/hello_static

cd go
cat > go.mod <<MOD
module consumer

go 1.23

require github.com/libpagedllm/libpagedllm/bindings/go v0.0.0

replace github.com/libpagedllm/libpagedllm/bindings/go => $tree/share/pagedllm/go
MOD
export CGO_CFLAGS=$flags GOFLAGS=-mod=mod
CGO_LDFLAGS=$shared go build -o hello . ;                                            name="Go, shared"; answers ./hello
CGO_LDFLAGS="-L$tree/lib" go build -tags pagedllm_static -o hello_static . ;         name="Go, static"; answers ./hello_static

# The examples look for the wrapper beside them: here that is the installed one, which finds the installed library.
unset PAGEDLLM_LIBRARY
mkdir -p "$work/bindings" "$work/examples"
cp -r "$examples/python" "$examples/node" "$work/examples/"
ln -s "$tree/share/pagedllm/python" "$tree/share/pagedllm/node" "$work/bindings/"
(cd "$tree/share/pagedllm/node" && npm ci --ignore-scripts --no-audit --no-fund --silent)
name="Python"; answers python3 "$work/examples/python/hello.py"
name="Node";   answers node "$work/examples/node/hello.js"

for program in "$work/c_static" "$work/cmake/hello_static" ./hello_static; do
    if ldd "$program" | grep -q libpagedllm; then echo "$program is not static" >&2; exit 1; fi
done
