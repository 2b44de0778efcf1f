#!/usr/bin/env bash
# usage: node.sh PACKAGE_DIR MODEL EXPECTED
# Installs the npm package in an empty folder, without the library of this tree, and runs programs.
set -euo pipefail
package=$(realpath "$1"/pagedllm-*.tgz) model=$(realpath "$2") expected=$(realpath "$3")
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
unset PAGEDLLM_LIBRARY

started=$(date +%s%N)
npm install --no-audit --no-fund --silent "$package"
sed "s#'../../bindings/node/pagedllm.js'#'pagedllm'#" "$examples/node/hello.js" > hello.js
node hello.js "$model" 2>/dev/null | diff - "$expected"
milliseconds=$((($(date +%s%N) - started) / 1000000))
for file in libpagedllm.so pagedllm.d.ts abi.d.ts LICENSE licences-of-dependencies.txt; do
    [ -s "node_modules/pagedllm/$file" ] || { echo "the package lacks $file" >&2; exit 1; }
done

# Each failure to load is an error with the file and the remedy.
check_failure() {
    if node -e "require('pagedllm')" 2> error; then echo "a wrong library was loaded" >&2; exit 1; fi
    grep -qF "$1" error || { echo "the error lacks '$1':" >&2; cat error >&2; exit 1; }
}
export PAGEDLLM_LIBRARY=$work/wrong.so
check_failure "set PAGEDLLM_LIBRARY to the path of the library"
case $(uname -m) in aarch64) other='\x3e' ;; *) other='\xb7' ;; esac
head -c 4096 node_modules/pagedllm/libpagedllm.so > wrong.so
printf "$other" | dd of=wrong.so bs=1 seek=18 conv=notrunc status=none
check_failure "is for another machine"
echo 'unsigned pllm_abi_version(void) { return 1; } const char *pllm_version(void) { return "0.0.1"; }' | cc -shared -x c - -o wrong.so
check_failure "is version 0.0.1, which has no pllm_"
echo "node: $(basename "$package"), $(stat -c %s "$package") bytes: installed and run in $milliseconds ms"
