#!/usr/bin/env bash
# usage: run.sh MODEL
# Compiles the wrapper for Java and its tests, and runs them and the example.
# PAGEDLLM_LIBRARY where libpagedllm.so is; default: target/release of this repository
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
. "$root/bindings/java/tests/jdk.sh"
export PAGEDLLM_LIBRARY=${PAGEDLLM_LIBRARY:-$root/target/release/libpagedllm.so}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${javac[@]}" -d "$work" "$root/bindings/java/pagedllm/PagedLlm.java" "$root/bindings/java/tests/PagedLlmTest.java" "$root/examples/java/Hello.java"
"${java[@]}" -Xcheck:jni -cp "$work" PagedLlmTest "$1"
"${java[@]}" -cp "$work" Hello "$1" | diff - "$root/examples/hello.expected"
