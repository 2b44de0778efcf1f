# Sourced by the scripts of this folder. They run on a machine with a GPU and python3, from the archive of build.sh.
# A part is a command with a limit in seconds. If it fails or exceeds its limit, the report names it and the other parts
# run. test_gpu.py checks that the limits of a script add up to at most nine minutes.
#
# PARTS="NAME ..." runs only these parts; the name of no part is an error in the report. SMALL=1 selects sizes for a machine
# without a GPU. Results are in $OUT or target/gpu/results: SCRIPT.txt is a table, SCRIPT.json the same as JSON, SCRIPT.log
# what all parts printed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=$(basename "$0" .sh)
target=${CARGO_TARGET_DIR:-$here/../../target}/gpu
results=${OUT:-$target/results}
log=$results/$script.log
work=$(mktemp -d) || exit 1
model=$work/model
trap 'rm -rf "$work" "$model"' EXIT
lines=$work/lines
built=$work/built
mkdir -p "$results" "$lines" "$built" "$work/lib" "$work/python"
: >"$log"

is_selected() { # PART
    echo "$1" >>"$work/names"
    [[ -z ${PARTS:-} || " $PARTS " == *" $1 "* ]]
}

report() { # PART error|skipped REASON
    is_selected "$1" && echo "{\"part\": \"$1\", \"$2\": \"$3\"}" >>"$lines/run.jsonl"
}

part() { # NAME SECONDS COMMAND...: keeps the output lines, and reports a failure
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    is_selected "$name" || return
    timeout -k 5 "$limit" "$@" >"$lines/$name.jsonl" 2>"$work/$name.err"
    code=$?
    [ "$code" = 0 ] || report "$name" error "exit status $code after $((SECONDS - start)) of $limit s; see $script.log"
    { # other parts may end at the same time
        flock 9
        echo "== $name: $*"
        cat "$lines/$name.jsonl" "$work/$name.err"
    } 9>>"$log" >&9
    echo "$name: $((SECONDS - start)) of $limit s, exit status $code"
}

ours() { # PART SECONDS [ARGUMENTS]: a part of the benchmark
    local ceilings=()
    [ ! -f "$work/ceilings" ] || read -ra ceilings <"$work/ceilings"
    part "$1" "$2" "$built/gpu" "$1" "${ceilings[@]}" "--models=$work/models" ${SMALL:+--small} "${@:3}"
}

peer() { # NAME SECONDS PACKAGES SCRIPT [ARGUMENTS]: a Python script that needs these packages
    local missing
    missing=$(python3 -c 'import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1].split(",") if not find_spec(name)), sep=" and no ")' "$3")
    if [ -n "$missing" ]; then
        report "$1" skipped "python3 has no $missing"
    else
        part "$1" "$2" python3 "$here/$4" "${@:5}"
    fi
}

finish() {
    local name
    for name in ${PARTS:-}; do
        grep -qx "$name" "$work/names" || report "$name" error "$script.sh has no part of this name"
    done
    python3 "$here/report.py" "$script" "$lines" "$results" | tee -a "$log"
}

# The libraries in torch's packages have versioned names, outside the search path of libraries.
link_library() { # NAME PATTERN
    local file
    file=$(python3 -c 'import glob, sys, nvidia
print([f for p in nvidia.__path__ for f in glob.glob(p + "/*/lib/" + sys.argv[1])][0])' "$2" 2>>"$log")
    [ -n "$file" ] || file=$(find /usr/local/cuda*/ -name "$2" 2>/dev/null | head -1)
    [ -z "$file" ] || ln -s "$file" "$work/lib/$1"
}

[ -f "$target/built.tar.xz" ] || { echo "$target/built.tar.xz is missing; run build.sh on a machine with Rust" >&2; exit 1; }
tar -C "$built" -xJf "$target/built.tar.xz" || { echo "$target/built.tar.xz cannot be unpacked to $built" >&2; exit 1; }
cp "$built/commit" "$lines/"
for wheel in "$built"/wheels/*.whl; do [ ! -f "$wheel" ] || python3 -m zipfile -e "$wheel" "$work/python"; done
export PAGEDLLM_CUDA_DEVICE=0 PYTHONPATH=$built:$work/python PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
link_library libcublasLt.so 'libcublasLt.so.*'
link_library libnccl.so.2 libnccl.so.2
export LD_LIBRARY_PATH=$work/lib:${LD_LIBRARY_PATH:-}
