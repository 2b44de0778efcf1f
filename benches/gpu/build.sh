#!/usr/bin/env bash
# usage: build.sh
# On a machine with Rust: all that run.sh needs elsewhere and cannot build there, in target/gpu/built.tar.gz.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v nvcc >/dev/null || [ -n "${NVCC:-}${CUDA_HOME:-}" ] || scripts/cuda-toolkit.sh

out=target/gpu
built=$out/built
rm -rf "$built" "$built.tar.gz"
mkdir -p "$built"
cargo build --release --locked --lib
mapfile -t programs < <(cargo test --release --locked --no-run --bench gpu --test cuda --test cuda_engine --message-format=json |
    grep -oP '"executable":"\K[^"]+')
[ "${#programs[@]}" = 3 ] || { echo "3 programs were expected, not ${programs[*]}" >&2; exit 1; }
kernels=$(ls -t target/release/build/pagedllm-*/out/kernels.fatbin | head -1)
[ -s "$kernels" ] || { echo "the library was built without kernels: is there an nvcc?" >&2; exit 1; }

for program in "${programs[@]}"; do
    name=${program##*/}
    strip -o "$built/${name%-*}" "$program" # without the number that cargo gives it
done
strip -o "$built/libpagedllm.so" target/release/libpagedllm.so
cp bindings/python/pagedllm.py "$built/"
git describe --always --dirty --abbrev=12 >"$built/commit"
tar -C "$built" -czf "$built.tar.gz" .
rm -r "$built"
ls -lh "$built.tar.gz"
