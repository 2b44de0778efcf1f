#!/usr/bin/env bash
# usage: rust.sh MODEL EXPECTED
# Builds the example in an empty folder with this repository as a dependency, as a host in Rust does.
# The build has no CUDA kernels and a target folder of its own, which stays for the next run.
set -euo pipefail
model=$(realpath "$1") expected=$(realpath "$2")
root=$(cd "$(dirname "$0")/../.." && pwd)
export CARGO_TARGET_DIR=$root/build/rust NVCC= CARGO_PROFILE_DEV_DEBUG=0
unset RUSTFLAGS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
started=$(date +%s%N)
mkdir "$work/program"
cd "$work/program"
cargo init --quiet --vcs none --name program
cp "$root/examples/rust/src/main.rs" src/
cp "$root/Cargo.lock" .  # the versions that the library is tested with
cargo add --quiet --offline --path "$root"
cargo build --quiet
milliseconds=$((($(date +%s%N) - started) / 1000000))
"$CARGO_TARGET_DIR/debug/program" "$model" | diff - "$expected"
echo "rust: the crate in an empty folder: built and run in $milliseconds ms (a build before this one makes it short)"
