#!/usr/bin/env bash
# usage: [PARTS="NAME ..."] run.sh
# Run it on a machine with a GPU, python3, torch and transformers. It runs the archive of build.sh in less than eight
# minutes. If a part fails, the report names it and the other parts run. Prints a table. Writes the table, results.json
# and log.txt to $OUT or target/gpu/results. With PARTS, only these parts run.
set -uo pipefail
DEADLINE=465 # seconds for all parts
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
results=${OUT:-$root/target/gpu/results}

work=$(mktemp -d) || exit 1
# The model of 16 GB is written and read twice. It is in memory if there is enough.
model=$work/llama-8b
free_gb=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9)
[ "${free_gb:-0}" -ge 40 ] && model=/dev/shm/${work##*/}
trap 'rm -rf "$work" "$model"' EXIT
lines=$work/lines
built=$work/built
mkdir -p "$results" "$lines" "$built" "$work/lib"
tar -C "$built" -xJf "$root/target/gpu/built.tar.xz" || { echo "target/gpu/built.tar.xz is missing; run build.sh on a machine with Rust" >&2; exit 1; }
cp "$built/commit" "$lines/"
log=$results/log.txt
: >"$log"

# torch contains cuBLASLt with a versioned name, outside the search path of libraries.
blas=$(python3 -c 'import glob, nvidia; print([f for p in nvidia.__path__ for f in glob.glob(p + "/*/lib/libcublasLt.so.*")][0])' 2>>"$log")
[ -n "$blas" ] || blas=$(find /usr/local/cuda*/ -name 'libcublasLt.so.*' 2>/dev/null | head -1)
[ -z "$blas" ] || ln -s "$blas" "$work/lib/libcublasLt.so"
export LD_LIBRARY_PATH=$work/lib:${LD_LIBRARY_PATH:-}
export PAGEDLLM_CUDA_DEVICE=0 PYTHONPATH=$built PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

report() { # PART error|skipped REASON
    echo "{\"part\": \"$1\", \"$2\": \"$3\"}" >>"$lines/run.jsonl"
}

part() { # NAME SECONDS COMMAND...: keeps the output lines, and reports a failure
    local name=$1 limit=$2 left=$((DEADLINE - SECONDS)) start=$SECONDS code
    shift 2
    [[ -z ${PARTS:-} || " $PARTS " == *" $name "* ]] || return
    [ "$limit" -le "$left" ] || limit=$left
    [ "$limit" -ge 5 ] || { report "$name" error "no time was left"; return; }
    echo "== $name: $*" >>"$log"
    timeout -k 5 "$limit" "$@" 2>>"$log" | tee -a "$log" >"$lines/$name.jsonl"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || report "$name" error "exit status $code after $((SECONDS - start)) of $limit s; see log.txt"
    echo "$name: $((SECONDS - start)) s, exit status $code"
}

ours() { # PART SECONDS [ARGUMENTS]
    local ceilings=()
    read -ra ceilings <"$work/ceilings"
    part "$1" "$2" "$built/gpu" "$1" "${ceilings[@]}" "--models=$work/models" "${@:3}"
}

sanitized() { # TOOL SECONDS
    command -v compute-sanitizer >/dev/null || { report "$1" skipped "this machine has no compute-sanitizer"; return; }
    part "$1" "$2" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 "$built/cuda" --test-threads=1 "${SANITIZED[@]}"
}

# Tests of injected faults need tests/cuda and are left out.
ON_DEVICE=(models_have_the_outputs_of_the_cpu a_repeated_run_has_the_same_bits swapped_sequences_continue_with_the_same_bits
    a_batch_invariant_sequence_has_the_same_bits_in_any_batch fp8_weights_equal_rounded_weights_on_the_cpu
    every_kv_dtype_has_outputs_close_to_the_cpu device_and_host_sample_the_same_tokens
    steps_in_flight_do_not_change_outputs a_step_in_flight_can_add_a_part_of_attention
    an_imported_sequence_does_not_take_a_result_in_flight)
SANITIZED=(attention_on_tensor_cores attention_over_latents embeddings strips_and_selected_rows copied_and_swapped_blocks products_in_fp8
    sampling_equals_the_sampler_of_the_host a_recorded_step_continues)

: >"$work/ceilings"
part ceilings 60 python3 "$here/peers.py" ceilings "$work/ceilings"
# Writes the weights while parts run that are not timed.
part weights 120 python3 "$here/peers.py" weights "$model" ${LAYERS:+"$LAYERS"} &
part probe 20 "$built/gpu" probe
part kernels 110 "$built/cuda" --test-threads=8
part engine_tests 60 "$built/cuda_engine" --test-threads=2 "${ON_DEVICE[@]}"
wait
ours decode-attention 50
ours prefill-attention 40
part attention_peer 30 python3 "$here/peers.py" attention "$lines/prefill-attention.jsonl"
ours products 90
part products_peer 50 python3 "$here/peers.py" products "$lines/products.jsonl"
ours draws 30
if [ -f "$model/model.safetensors.index.json" ]; then
    ours engine 110 "--model=$model"
    part generate 60 python3 "$here/peers.py" generate "$model" "$lines/engine.jsonl"
else
    report engine error "the model has no weights"
fi
rm -rf "$model"
part models 120 python3 "$here/models.py"
ours determinism 60
sanitized memcheck 60
sanitized racecheck 150
python3 "$here/report.py" "$lines" "$results" | tee -a "$log"
