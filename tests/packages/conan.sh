#!/usr/bin/env bash
# usage: conan.sh MODEL EXPECTED
# Packages the built library with the Conan recipe, shared and static, and builds the example with each
# package in an empty folder. The packages are built by `make lib`; FROM_SOURCE=1 lets the recipe build
# them, which takes minutes.
set -euo pipefail
model=$(realpath "$1") expected=$(realpath "$2")
root=$(cd "$(dirname "$0")/../.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CONAN_HOME=$work/home PYTHONPATH=$root/build/conan
conan() { python3 -B "$root/build/conan/bin/conan" "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }; }
conan profile detect

cp "$root/examples/cpp/hello.cpp" "$work/"
cat > "$work/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(consumer C CXX)
find_package(pagedllm REQUIRED CONFIG)
find_package(Threads REQUIRED)
add_executable(hello hello.cpp)
target_compile_features(hello PRIVATE cxx_std_17)
target_link_libraries(hello PRIVATE pagedllm::pagedllm Threads::Threads)
CMAKE
printf '[requires]\npagedllm/%s\n[generators]\nCMakeDeps\nCMakeToolchain\n' "$version" > "$work/conanfile.txt"

for shared in True False; do
    how=export-pkg
    [ -z "${FROM_SOURCE:-}" ] || how=create
    conan $how "$root/packaging/conan" -o "&:shared=$shared" --test-folder ""
    cp -r "$root/packaging/conan/test_package" "$work/test-$shared"
    conan test "$work/test-$shared" "pagedllm/$version" -o "pagedllm/*:shared=$shared"
    started=$(date +%s%N)
    folder=$work/$shared
    conan install "$work" -of "$folder" -o "pagedllm/*:shared=$shared"
    cmake -S "$work" -B "$folder" -DCMAKE_TOOLCHAIN_FILE="$folder/conan_toolchain.cmake" -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build "$folder" >/dev/null
    (. "$folder/conanrun.sh" && "$folder/hello" "$model" 2>/dev/null) | diff - "$expected"
    milliseconds=$((($(date +%s%N) - started) / 1000000))
    linked=$(readelf -d "$folder/hello" | grep -c libpagedllm || true)
    [ "$linked" = "$([ $shared = True ] && echo 1 || echo 0)" ] || { echo "shared=$shared links $linked shared libraries" >&2; exit 1; }
    echo "conan: pagedllm/$version, shared=$shared: installed, built and run in $milliseconds ms"
done

# Another operating system is refused, with the reason.
if python3 -B "$root/build/conan/bin/conan" export-pkg "$root/packaging/conan" -s os=Windows --test-folder "" >"$work/log" 2>&1; then
    echo "the recipe accepted Windows" >&2
    exit 1
fi
grep -qF "pagedllm runs on Linux" "$work/log" || { cat "$work/log" >&2; exit 1; }
