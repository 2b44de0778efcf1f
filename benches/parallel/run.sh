#!/usr/bin/env bash
# Tokens per second of one model in one process with two threads, and in two processes with one thread
# each; benches/README.md describes it. Run it on an idle machine.
# usage: run.sh [SHAPE] [REPETITIONS]
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-$PWD/target}
lib=${PAGEDLLM_LIB_DIR:-$target/release}
shape=${1:-S} repetitions=${2:-5}
model=${BENCH_MODELS:-$target/bench-models}/$shape
[ -f "$model/model.safetensors" ] || cargo bench --locked --bench cpu -- --quick --model "$shape"
work=$(mktemp -d)
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -rf "$work"' EXIT
cc -std=gnu11 -O2 -Wall -Wextra -Werror -Iinclude benches/parallel/throughput.c -o "$work/throughput" -L"$lib" -lpagedllm -Wl,-rpath,"$lib"

# Prints the speeds of a division.
measure() {
    local threads=$1 tensor=$2 pipeline=$3 rank
    local size=$((tensor * pipeline))
    [ "$size" -gt 1 ] || { "$work/throughput" "$model" "$threads" 1 1; return; }
    for ((rank = 1; rank < size; rank++)); do
        "$work/throughput" "$model" "$threads" "$tensor" "$pipeline" "$rank" "$work/group" &
    done
    "$work/throughput" "$model" "$threads" "$tensor" "$pipeline" 0 "$work/group"
    wait
}

# The divisions take turns, so that all of them see the same machine.
for ((i = 0; i < repetitions; i++)); do
    for division in "2 1 1" "1 1 1" "1 2 1" "1 1 2"; do
        # shellcheck disable=SC2086
        echo "$division $(measure $division)"
    done
done | python3 benches/parallel/table.py
