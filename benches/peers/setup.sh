#!/usr/bin/env bash
# Installs the other engines of `make bench-peers` and converts the models for them, under $PEERS_HOME. A second run adds what is missing.
# Needs python3 with venv and headers, a C++ compiler, cargo and the network.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
home=${PEERS_HOME:-$HOME/.cache/pagedllm-peers}
models=${CARGO_TARGET_DIR:-$root/target}/bench-models

missing() {
    echo "$1. Run: sudo apt-get install -y $2" >&2
    exit 1
}
python3 -c 'import ensurepip, sysconfig, os; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing "Python lacks venv or headers" "python3-venv python3-dev"
command -v c++ >/dev/null || missing "a C++ compiler is missing" build-essential

mkdir -p "$home"/models/{openvino,vllm,llama_cpp}
export UV_CACHE_DIR=$home/uv-cache HF_HUB_OFFLINE=1
# Builds llama.cpp for the instructions of this machine, without image input.
export CMAKE_ARGS="-DGGML_NATIVE=ON -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF"

[ -x "$home/uv/bin/uv" ] || { python3 -m venv "$home/uv" && "$home/uv/bin/pip" install -q uv==0.13.9; }

# install NAME [ARGUMENTS]: installs the pinned requirements in a virtual environment. Repeats it if they change.
install() {
    local venv=$home/venv-$1 pins=$here/requirements-$1.txt
    cmp -s "$pins" "$venv/installed.txt" && return
    echo "installing $1"
    [ -d "$venv" ] || python3 -m venv "$venv"
    "$home/uv/bin/uv" pip install -q --python "$venv/bin/python" -r "$pins" "${@:2}"
    cp "$pins" "$venv/installed.txt"
}

# convert PATH COMMAND...: runs the command with a temporary path as last argument, and renames it when it is complete.
convert() {
    local path=$1 unfinished=${1%/*}/unfinished-${1##*/}
    [ -e "$path" ] && return
    echo "converting $path"
    rm -rf "$unfinished"
    "${@:2}" "$unfinished"
    mv "$unfinished" "$path"
}

from_here() { "$home/venv-$1/bin/python" "$here/$1_models.py" "$2" "$4" "$3"; }

to_openvino() {
    local options=(--weight-format "$2")
    [ "$2" = bf16 ] && options=(--weight-format fp16) # OpenVINO selects the arithmetic by the instructions of the machine
    [ "$2" = int4 ] && options+=(--group-size 128 --ratio 1.0 --sym)
    "$home/venv-openvino/bin/optimum-cli" export openvino -m "$1" --task text-generation-with-past --disable-convert-tokenizer "${options[@]}" "$3"
}

install openvino
install vllm --override "$here/overrides-vllm.txt"
install llama_cpp
cc -O3 -pthread "$here/bandwidth.c" -o "$home/bandwidth"
for model in S M; do
    (cd "$root" && [ -f "$models/$model/model.safetensors" ] || cargo bench --locked --bench cpu -- --quick --model $model)
    for format in bf16 int8 int4; do
        convert "$home/models/openvino/$model-$format" to_openvino "$models/$model" $format
        convert "$home/models/llama_cpp/$model-$format.gguf" from_here llama_cpp "$models/$model" $format
        case $format in
        bf16) ln -sfn "$models/$model" "$home/models/vllm/$model-$format" ;;
        *) convert "$home/models/vllm/$model-$format" from_here vllm "$models/$model" $format ;;
        esac
    done
    ln -sfn $model-int8.gguf "$home/models/llama_cpp/$model-q8_0.gguf"
    ln -sfn $model-int4.gguf "$home/models/llama_cpp/$model-q4_0.gguf"
    convert "$home/models/llama_cpp/$model-q4_k_m.gguf" from_here llama_cpp "$home/models/llama_cpp/$model-bf16.gguf" q4_k_m
done
