#!/usr/bin/env bash
# usage: java.sh TREE MODEL EXPECTED
# Compiles the example with the installed wrapper in an empty folder, and runs it with the installed library.
set -euo pipefail
tree=$(realpath "$1") model=$(realpath "$2") expected=$(realpath "$3")
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/bindings/java/tests/jdk.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
unset PAGEDLLM_LIBRARY

started=$(date +%s%N)
cp "$root/examples/java/Hello.java" .
"${javac[@]}" -d classes "$tree/share/pagedllm/java/pagedllm/PagedLlm.java" Hello.java
LD_LIBRARY_PATH=$tree/lib "${java[@]}" -cp classes Hello "$model" | diff - "$expected"
milliseconds=$((($(date +%s%N) - started) / 1000000))

# Each failure to load names the remedy.
check_failure() {
    if PAGEDLLM_LIBRARY=$1 "${java[@]}" -cp classes Hello "$model" 2> error; then echo "a wrong library was loaded" >&2; exit 1; fi
    grep -qF "$2" error || { echo "the error lacks '$2':" >&2; cat error >&2; exit 1; }
}
check_failure "$work/missing.so" "set PAGEDLLM_LIBRARY to the path of the library"
echo 'unsigned pllm_abi_version(void) { return 7; }' | cc -shared -x c - -o other.so
check_failure "$work/other.so" "has ABI version 7"
echo 'unsigned pllm_abi_version(void) { return 1; }' | cc -shared -x c - -o old.so
check_failure "$work/old.so" "use the file and the library of one release"
echo "java: PagedLlm.java, $(stat -c %s "$tree/share/pagedllm/java/pagedllm/PagedLlm.java") bytes: compiled and run in $milliseconds ms"
