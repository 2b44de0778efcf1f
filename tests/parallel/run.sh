#!/usr/bin/env bash
# Engines whose workers are processes: their answers, and what remains when one of them is killed, hangs
# or has no memory. With mpirun, the example runs on MPI, too.
# usage: run.sh LIB_DIR OUT MODEL_DIR
set -euo pipefail
lib=$1 out=$2 model=$3
cd "$(dirname "$0")/../.."
mkdir -p "$out"
flags=(-std=gnu11 -O1 -Wall -Wextra -Werror -Iinclude)
cc "${flags[@]}" examples/c/parallel.c -o "$out/parallel" -L"$lib" -lpagedllm -Wl,-rpath,"$lib"
cc "${flags[@]}" tests/parallel/faults.c -o "$out/faults" -L"$lib" -lpagedllm -Wl,-rpath,"$lib"
work=$(mktemp -d)
trap 'jobs -p | xargs -r kill -9 2>/dev/null || true; wait 2>/dev/null; rm -rf "$work"' EXIT
group=$work/group expected="The capital of France is Paris."

fail() {
    echo "tests/parallel: $*" >&2
    tail -n 20 "$work"/*.log >&2
    exit 1
}

# Waits until a process has printed a line that begins with a text.
await() {
    local log=$1 text=$2
    until grep -q "^$text" "$log" 2>/dev/null; do
        [ -n "$(jobs -pr)" ] || fail "all processes have ended before \"$text\""
        sleep 0.05
    done
}

has() { grep -q "$2" "$1" || fail "no \"$2\" in $1"; }

answer=$("$out/parallel" "$model" cpu,cpu 2>"$work/0.log") || fail "a list of devices failed"
[ "$answer" = "$expected" ] || fail "a list of devices answered \"$answer\""
echo "one process, cpu,cpu: $answer"

for division in "2 1" "4 1" "1 2" "2 2"; do
    read -r tensor pipeline <<<"$division"
    for ((rank = 1; rank < tensor * pipeline; rank++)); do
        "$out/parallel" "$model" "$tensor" "$pipeline" "$rank" "$group" 2>"$work/$rank.log" &
    done
    answer=$("$out/parallel" "$model" "$tensor" "$pipeline" 0 "$group" 2>"$work/0.log") || fail "$division failed"
    [ "$answer" = "$expected" ] || fail "$division answered \"$answer\""
    for job in $(jobs -p); do wait "$job" || fail "a worker of $division failed"; done
    echo "$tensor x $pipeline processes: $answer"
done

# Starts both ranks: start TIMEOUT_MS [KIB], the memory of the worker. The ids are in $engine and $worker.
start() {
    rm -f "$work"/*.log
    "$out/faults" "$model" 0 "$group" "$1" >"$work/engine.log" 2>&1 &
    engine=$!
    "$out/faults" "$model" 1 "$group" "$@" >"$work/worker.log" 2>&1 &
    worker=$!
}

start 60000
await "$work/engine.log" ready
kill -9 "$worker"
wait "$engine" || fail "the engine did not survive its worker"
has "$work/engine.log" "rank 1 has ended"
has "$work/engine.log" "code 9, finish 4"
has "$work/engine.log" "alive, and alone: finish 2"
echo "a killed worker: $(grep "step failed" "$work/engine.log")"

start 15000
await "$work/engine.log" ready
kill -STOP "$worker"
wait "$engine" || fail "the engine did not survive a worker that hangs"
kill -9 "$worker"
has "$work/engine.log" "rank 1 has not done its part within"
has "$work/engine.log" "code 9, finish 4"
has "$work/engine.log" "alive, and alone: finish 2"
echo "a worker that hangs: $(grep "step failed" "$work/engine.log")"

start 60000
await "$work/engine.log" ready
kill -9 "$engine"
code=0 && wait "$worker" || code=$?
[ "$code" = 3 ] || fail "the worker ended with $code"
has "$work/worker.log" "refused 9: .*rank 0 has ended"
echo "a killed engine: $(grep refused "$work/worker.log")"

# Too little for the weights.
start 60000 1000
await "$work/engine.log" "ready\|refused"
has "$work/engine.log" refused
for process in "$engine" "$worker"; do
    code=0 && wait "$process" || code=$?
    [ "$code" = 3 ] || fail "a process ended with $code"
done
has "$work/engine.log" "refused 8"
has "$work/worker.log" "refused 8"
echo "a worker without memory: $(grep refused "$work/engine.log")"

for mpi in openmpi mpich; do
    command -v "mpicc.$mpi" >/dev/null || { echo "skipped $mpi: mpicc.$mpi is not installed"; continue; }
    MPICC=mpicc.$mpi bindings/mpi/build.sh "$out/$mpi"
    "mpicc.$mpi" "${flags[@]}" -DPAGEDLLM_MPI -I"$out/$mpi" examples/c/parallel.c -o "$out/parallel_$mpi" \
        -L"$out/$mpi" -lpagedllm_mpi -L"$lib" -lpagedllm -Wl,-rpath,"$lib"
    options=()
    [ "$mpi" = mpich ] || options=(--allow-run-as-root --oversubscribe)
    for division in "2 1" "1 2" "2 2"; do
        read -r tensor pipeline <<<"$division"
        answer=$(timeout 600 "mpirun.$mpi" "${options[@]}" -n $((tensor * pipeline)) "$out/parallel_$mpi" "$model" $division \
            2>"$work/mpi.log") || fail "$mpi $division failed"
        [ "$answer" = "$expected" ] || fail "$mpi $division answered \"$answer\""
        echo "$mpi, ${division/ / x }: $answer"
    done
done
