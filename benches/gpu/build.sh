#!/usr/bin/env bash
# usage: build.sh
# Run it on a machine with Rust. It builds everything that run.sh needs on a GPU machine: target/gpu/built.tar.xz.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v nvcc >/dev/null || [ -n "${NVCC:-}${CUDA_HOME:-}" ] || scripts/cuda-toolkit.sh

out=target/gpu
built=$out/built
rm -rf "$built" "$built.tar.xz"
mkdir -p "$built"
cargo build --release --locked --lib
mapfile -t programs < <(cargo test --release --locked --no-run --bench gpu --test cuda --test cuda_engine --message-format=json |
    grep -oP '"executable":"\K[^"]+')
[ "${#programs[@]}" = 3 ] || { echo "expected 3 programs, cargo built ${programs[*]}" >&2; exit 1; }
kernels=$(ls -t target/release/build/pagedllm-*/out/kernels.rs | head -1)
grep -q "Image {" "$kernels" || { echo "the library was built without kernels; install nvcc or set NVCC" >&2; exit 1; }

for program in "${programs[@]}"; do
    name=${program##*/}
    strip -o "$built/${name%-*}" "$program" # without cargo's hash
done
strip -o "$built/libpagedllm.so" target/release/libpagedllm.so
cp -r bindings/python/pagedllm "$built/"
ln -s ../libpagedllm.so "$built/pagedllm/"
git describe --always --dirty --abbrev=12 >"$built/commit"
# The programs contain the same library, which is stored once if the dictionary covers all of them.
tar -C "$built" -c . | xz -T0 --lzma2=preset=6,dict=128MiB >"$built.tar.xz"
rm -r "$built"
ls -lh "$built.tar.xz"
