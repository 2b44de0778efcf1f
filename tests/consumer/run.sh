#!/usr/bin/env bash
# usage: run.sh TREE MODEL EXPECTED
# Builds and runs programs against an installed tree in an empty folder: C and C++ with pkg-config,
# C++ with CMake, Go, each shared and static; the KV stores with pkg-config and CMake; Python and Node.
set -euo pipefail
tree=$(cd "$1" && pwd) model=$(cd "$2" && pwd) expected=$(realpath "$3")
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/../connectors/engine.c" "$examples/c/hello.c" "$examples/cpp/hello.cpp" "$here/CMakeLists.txt" "$work/"
cp -r "$examples/go/hello" "$work/go"
cd "$work"

export PKG_CONFIG_PATH=$tree/lib/pkgconfig
flags=$(pkg-config --cflags pagedllm)
shared="$(pkg-config --libs pagedllm) -Wl,-rpath,$tree/lib"
static="$tree/lib/libpagedllm.a -lm -lgcc_s"

check_output() {
    "$@" "$model" 2>/dev/null | diff - "$expected"
    echo "consumer: $name has the expected output"
}
name="C, pkg-config, shared";   cc -std=c11 hello.c -o c_shared $flags $shared;          check_output ./c_shared
name="C, static";               cc -std=c11 hello.c -o c_static $flags $static;          check_output ./c_static
name="C++, pkg-config, shared"; c++ -std=c++17 hello.cpp -o cpp_shared $flags $shared -pthread; check_output ./cpp_shared

cmake -S . -B cmake -DCMAKE_PREFIX_PATH="$tree" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build cmake >/dev/null
name="C++, CMake, shared"; check_output cmake/hello
name="C++, CMake, static"; check_output cmake/hello_static

# usage: check_stores ENGINE. A store in files has hits in the second process. Without a server, the other
# store fails, and the engine computes the same.
check_stores() {
    local store=$work/store-$RANDOM output=$work/output
    "$1" "$model" none > "$work/alone" 2>/dev/null
    [ -s "$work/alone" ]
    for run in "files $store" "files $store" "valkey $work/no-server"; do
        "$1" "$model" $run > "$output" 2> "$work/statistics"
        diff "$work/alone" "$output"
        awk '{print $2, ($4 > 0)}' "$work/statistics"
    done | diff - <(printf '%s\n' "0 0" "31 0" "0 1")
    echo "consumer: $name has the expected hits"
}
stores="$(pkg-config --cflags --libs pagedllm_files pagedllm_valkey) $(pkg-config --cflags pagedllm)"
name="KV stores, pkg-config"; cc -std=c11 engine.c -o engine $stores $shared; check_stores ./engine
name="KV stores, CMake"; check_stores cmake/engine

cd go
cat > go.mod <<MOD
module consumer

go 1.23

require github.com/libpagedllm/libpagedllm/bindings/go v0.0.0

replace github.com/libpagedllm/libpagedllm/bindings/go => $tree/share/pagedllm/go
MOD
export CGO_CFLAGS=$flags GOFLAGS=-mod=mod
CGO_LDFLAGS=$shared go build -o hello . ;                                            name="Go, shared"; check_output ./hello
CGO_LDFLAGS="-L$tree/lib" go build -tags pagedllm_static -o hello_static . ;         name="Go, static"; check_output ./hello_static

# The example loads the wrapper from ../../bindings: here the installed one, which finds its library.
unset PAGEDLLM_LIBRARY
mkdir -p "$work/bindings" "$work/examples"
cp -r "$examples/python" "$work/examples/"
ln -s "$tree/share/pagedllm/python" "$work/bindings/"
name="Python"; check_output python3 "$work/examples/python/hello.py"

# As bindings/node/README.md says: npm 12 does not run the script that installs koffi.
mkdir "$work/project"
cd "$work/project"
wrapper=$tree/share/pagedllm/node
[ "$(npm --version | cut -d. -f1)" -lt 12 ] || npm ci --prefix "$wrapper" --no-audit --no-fund --silent
npm install --no-audit --no-fund --silent "$wrapper"
sed "s#'../../bindings/node/pagedllm.js'#'pagedllm'#" "$examples/node/hello.js" > hello.js
name="Node, npm install"; check_output node hello.js
"$here/../tool/installed.sh" "$tree/bin/pagedllm" "$model"
echo "consumer: the installed tool has the expected output"
cd "$work/go"

for program in "$work/c_static" "$work/cmake/hello_static" ./hello_static; do
    if ldd "$program" | grep -q libpagedllm; then echo "$program is not static" >&2; exit 1; fi
done
