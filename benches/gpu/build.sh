#!/usr/bin/env bash
# usage: [WHEELS=DIR] [MAX_BYTES=N] build.sh
# Run it on a machine with Rust. It builds everything that the other scripts need on a GPU machine: target/gpu/built.tar.xz.
# WHEELS is a folder of Python wheels that travel too. Fails if the archive and the tracked files exceed MAX_BYTES (64 MiB).
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v nvcc >/dev/null || [ -n "${NVCC:-}${CUDA_HOME:-}" ] || scripts/cuda-toolkit.sh

target=${CARGO_TARGET_DIR:-target}
built=$target/gpu/built
rm -rf "$built" "$built.tar.xz"
mkdir -p "$built"
cargo build --release --locked --lib
mapfile -t programs < <(cargo test --release --locked --no-run --bench gpu --bench cpu --test cuda --test cuda_blocks --test cuda_engine \
    --message-format=json | grep -oP '"executable":"\K[^"]+')
[ "${#programs[@]}" = 5 ] || { echo "expected 5 programs, cargo built ${programs[*]}" >&2; exit 1; }
kernels=$(ls -t "$target"/release/build/pagedllm-*/out/kernels.rs | head -1)
grep -q "Image {" "$kernels" || { echo "the library was built without kernels; install nvcc or set NVCC" >&2; exit 1; }

for program in "${programs[@]}"; do
    name=${program##*/}
    strip -o "$built/${name%-*}" "$program" # without cargo's hash
done
strip -o "$built/libpagedllm.so" "$target/release/libpagedllm.so"
cp -r bindings/python/pagedllm "$built/"
ln -s ../libpagedllm.so "$built/pagedllm/"
[ -z "${WHEELS:-}" ] || cp -r "$WHEELS" "$built/wheels"
git describe --always --dirty --abbrev=12 >"$built/commit"
# The programs contain the same library, which is stored once if the dictionary covers all of them.
tar -C "$built" -c . | xz -T0 --lzma2=preset=6,dict=256MiB >"$built.tar.xz"
rm -r "$built"

archive=$(stat -c %s "$built.tar.xz")
tracked=$(git ls-tree -rl HEAD | awk '{ sum += $4 } END { print sum }')
max=${MAX_BYTES:-$((64 << 20))}
echo "$built.tar.xz: $archive bytes; tracked files: $tracked bytes; limit of both: $max bytes"
[ $((archive + tracked)) -le "$max" ] || { echo "they exceed the limit by $((archive + tracked - max)) bytes" >&2; exit 1; }
