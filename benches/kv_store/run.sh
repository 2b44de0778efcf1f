#!/usr/bin/env bash
# Time to first token with the KV stores of connectors/; benches/README.md describes it. Run it on an
# idle machine.
# usage: run.sh [S | M]... [PROMPTS]
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-$PWD/target}
lib=${PAGEDLLM_LIB_DIR:-$target/release}
models=${BENCH_MODELS:-$target/bench-models}
prompts=3 shapes=()
for argument in "$@"; do case $argument in [0-9]*) prompts=$argument ;; *) shapes+=("$argument") ;; esac; done
[ ${#shapes[@]} -gt 0 ] || shapes=(S M)
out=$PWD/build/connectors
connectors/build.sh "$out"
cc -std=gnu11 -O2 -Wall -Wextra -Werror -Iinclude -Iconnectors/files -Iconnectors/valkey benches/kv_store/ttft.c -o "$out/ttft" \
    -L"$out" -lpagedllm_files -lpagedllm_valkey -L"$lib" -lpagedllm -Wl,-rpath,"$out:$lib"
# STORE_PARENT should be on the disk to measure.
work=$(mktemp -d -p "${STORE_PARENT:-$PWD/build}")
server=
trap '[ -z "$server" ] || { kill "$server"; wait "$server"; }; rm -rf "$work"' EXIT
program=$(command -v valkey-server || command -v redis-server)
"$program" --port 0 --unixsocket "$work/socket" --save "" --dir "$work" --logfile "$work/log" &
server=$!
"$program" --version
for shape in "${shapes[@]}"; do
    [ -f "$models/$shape/model.safetensors" ] || cargo bench --locked --bench cpu -- --quick --model "$shape"
    echo "Model $shape, $prompts prompts:"
    "$out/ttft" "$models/$shape" "$work/$shape" "$work/socket" "$prompts"
done
