#!/bin/bash
# Runs libFuzzer on the reader of GGUF files. It begins with the headers of the models of tests/data.
#   usage: run.sh SECONDS
set -euo pipefail
seconds=${1:?usage: run.sh SECONDS}
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
build=${BUILD_DIR:-$root/build/fuzz}
corpus=$build/gguf
mkdir -p "$corpus" "$build/findings"

# The headers have up to 5,400 bytes.
for model in "$root"/tests/data/gguf_*/model.gguf; do
    head -c 5400 "$model" > "$corpus/$(basename "$(dirname "$model")")"
done
for tokenizer in "$root"/tests/data/gguf_tokenizers/*.gguf; do
    cp "$tokenizer" "$corpus"
done

coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
cd "$here"
# With a target, these flags do not apply to build scripts.
target=$(rustc +nightly -vV | sed -n 's/^host: //p')
RUSTFLAGS="$coverage -Zsanitizer=address" cargo +nightly build --release --target "$target" --target-dir "$build/target"
export TMPDIR=$build/findings # of the file that is opened
"$build/target/$target/release/gguf" -max_total_time="$seconds" -max_len=16384 -rss_limit_mb=1024 -timeout=10 -print_final_stats=1 \
    -artifact_prefix="$build/findings/" "$corpus"
rm -f "$build"/findings/pagedllm-fuzz-*
