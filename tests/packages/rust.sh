#!/usr/bin/env bash
# usage: rust.sh MODEL EXPECTED
# Builds the example in an empty folder with this repository as a dependency, as a host in Rust does.
# The build has no CUDA kernels, does not optimize the library, and has a target folder of its own, which
# stays for the next run. It begins with the dependencies that `make lib` built: the program has the
# profile of the library, because otherwise all would be compiled again.
set -euo pipefail
model=$(realpath "$1") expected=$(realpath "$2")
root=$(cd "$(dirname "$0")/../.." && pwd)
export CARGO_TARGET_DIR=$root/build/rust NVCC=
unset RUSTFLAGS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Copies the files, without those of the library itself. Cargo writes to some of them.
if [ ! -e "$CARGO_TARGET_DIR/release" ] && [ -e "$root/target/release/.fingerprint" ]; then
    rm -rf "$CARGO_TARGET_DIR"
    mkdir -p "$CARGO_TARGET_DIR/unfinished"
    cp -a --reflink=auto "$root"/target/release/{.fingerprint,build,deps} "$CARGO_TARGET_DIR/unfinished/"
    find "$CARGO_TARGET_DIR/unfinished" -name '*pagedllm*' -prune -exec rm -r {} +
    mv "$CARGO_TARGET_DIR/unfinished" "$CARGO_TARGET_DIR/release"
fi
started=$(date +%s%N)
mkdir "$work/program"
cd "$work/program"
cargo init --quiet --vcs none --name program
cp "$root/examples/rust/src/main.rs" src/
cp "$root/Cargo.lock" .  # the versions that the library is tested with
cargo add --quiet --offline --path "$root"
sed -n '/^\[profile\.release/,/^$/p' "$root/Cargo.toml" >> Cargo.toml
printf '[profile.release.package.pagedllm]\nopt-level = 0\ndebug = 0\n' >> Cargo.toml
cargo build --quiet --release
milliseconds=$((($(date +%s%N) - started) / 1000000))
"$CARGO_TARGET_DIR/release/program" "$model" | diff - "$expected"
echo "rust: the crate in an empty folder: built and run in $milliseconds ms (a build before this one makes it short)"
