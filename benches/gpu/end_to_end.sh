#!/usr/bin/env bash
# usage: [LAYERS=N] end_to_end.sh
# How fast are engines: a LLaMA-3-8B of random weights beside transformers, serving, NCCL with one rank, and the threads of
# the CPU engine. LAYERS=8 shortens the model, for a GPU with less than 64 GB.
. "$(dirname "$0")/common.sh"

# The model of 16 GB is written and read three times. It is in memory if there is enough.
free_gb=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9)
[ "${free_gb:-0}" -lt 40 ] || model=/dev/shm/${work##*/}

with_model() { # COMMAND PART SECONDS ARGUMENTS...
    if [ -f "$model/model.safetensors.index.json" ]; then "$@"; else report "$2" skipped "the model has no weights"; fi
}

peer ceilings 30 torch peers.py ceilings "$work/ceilings"
peer weights 110 torch peers.py weights "$model" ${LAYERS:+"$LAYERS"} & # beside a part that is not timed
ours nccl 60
wait
with_model ours engine 110 "--model=$model"
with_model ours serving 100 "--model=$model"
with_model peer generate 80 torch,transformers peers.py generate "$model" "$lines/engine.jsonl"
rm -rf "$model"
part cpu 100 "$built/cpu" --scaling --models "$work/models" ${SMALL:+--quick}
finish
