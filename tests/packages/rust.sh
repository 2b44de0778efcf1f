#!/usr/bin/env bash
# usage: rust.sh MODEL EXPECTED
# Builds the example in an empty folder, with the crate of this repository as a dependency, and runs it. The builds of
# the other dependencies are those of `cargo test`, with the versions of the library's Cargo.lock.
set -euo pipefail
model=$(realpath "$1") expected=$(realpath "$2")
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

started=$(date +%s%N)
cp -r "$root/examples/rust/." .
cp "$root/Cargo.lock" .
sed -i "s|path = \"../..\"|path = \"$root\"|" Cargo.toml
# The model is small, so the library needs no optimization.
{ awk '/^\[profile\.dev/ { copied = 1 } /^\[profile\.release/ || /^\[\[/ { copied = 0 } copied' "$root/Cargo.toml"
  echo 'pagedllm = { opt-level = 0 }'; } >> Cargo.toml
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target} NVCC= PAGEDLLM_DENY_SPILLS=1
cargo build --quiet
"$CARGO_TARGET_DIR/debug/hello" "$model" | diff - "$expected"
echo "rust: the crate as a dependency: built and run in $((($(date +%s%N) - started) / 1000000)) ms"
