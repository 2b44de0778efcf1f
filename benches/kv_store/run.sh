#!/usr/bin/env bash
# Benchmarks of the KV stores of connectors/; benches/README.md describes them. Run it on an idle machine.
# usage: run.sh [--quick] [ttft | interference | hits]...    default: all parts
# PAGEDLLM_LIB_DIR  where libpagedllm.so is; default: target/release of this repository
# CONNECTORS        where the connectors are; default: they are built
# BENCH_MODELS      folder of the models; default: target/bench-models
# STORE_PARENT      folder for the files, on the disk to measure; default: build
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-$PWD/target}
lib=${PAGEDLLM_LIB_DIR:-$target/release}
models=${BENCH_MODELS:-$target/bench-models}
quick= parts=()
for argument in "$@"; do [ "$argument" = --quick ] && quick=1 || parts+=("$argument"); done
[ ${#parts[@]} -gt 0 ] || parts=(ttft interference hits)

out=$PWD/build/kv-store-bench
connectors=${CONNECTORS:-$out}
[ -n "${CONNECTORS:-}" ] || connectors/build.sh "$out"
mkdir -p "$out"
for program in owner ttft interference hits; do
    sources=("benches/kv_store/$program.c" benches/kv_store/common.c)
    cc -std=gnu11 -O2 -Wall -Wextra -Werror -Iinclude -Iconnectors/files -Iconnectors/valkey -Iconnectors/nixl "${sources[@]}" -o "$out/$program" \
        -L"$connectors" -lpagedllm_files -lpagedllm_valkey -lpagedllm_nixl -L"$lib" -lpagedllm -lm -Wl,-rpath,"$connectors:$lib"
done

# NIXL over TCP. Without its library, the rows of NIXL have no numbers.
if tests/connectors/nixl.sh build/nixl && [ ! -e build/nixl/unavailable ]; then
    export NIXL_LIBRARY=$PWD/build/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
fi
export UCX_TLS=tcp,self UCX_MODULES=^ib NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal

work=$(mktemp -d -p "${STORE_PARENT:-$PWD/build}")
server=
stop_server() { [ -z "$server" ] || { kill "$server"; wait "$server" || true; }; }
trap 'stop_server; rm -rf "$work"' EXIT
program=$(command -v valkey-server || command -v redis-server)
"$program" --version

# usage: measure PROGRAM SHAPE ARGUMENT..., with an empty directory and a server without values
measure() {
    local model=$models/$2
    if [ "$2" = bundled ]; then model=$work/bundled; fi
    [ -f "$model/model.safetensors" ] || cargo bench --locked --bench cpu -- --quick --model "$2"
    "$program" --port 0 --unixsocket "$work/socket" --save "" --dir "$work" --logfile "$work/log" &
    server=$!
    while [ ! -S "$work/socket" ]; do kill -0 "$server"; sleep 0.05; done
    printf '\n%s, model %s:\n\n' "$1" "$2"
    "$out/$1" "$model" "$work/store" "$work/socket" "${@:3}"
    stop_server
    server=
    rm -rf "$work/store" "$work/socket"
}

# The bundled model with longer positions.
mkdir "$work/bundled"
ln -s "$PWD"/examples/model/* "$work/bundled"
rm "$work/bundled/config.json"
sed 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 4096/' examples/model/config.json > "$work/bundled/config.json"

for part in "${parts[@]}"; do
    case $part$quick in
        # LENGTH PROMPTS REPETITIONS
        ttft) measure ttft S 2000 2 4; measure ttft M 2000 1 3 ;;
        ttft1) measure ttft bundled 500 1 1 ;;
        # LENGTH DECODES SECONDS BETWEEN REPETITIONS
        interference) measure interference S 2000 4 20 10 2 ;;
        interference1) measure interference bundled 500 2 0.6 0.5 2 ;;
        # TURNS TURNS_PER_LIFE
        hits) measure hits bundled 400 50; measure hits S 24 8 ;;
        hits1) measure hits bundled 16 8 ;;
        *) echo "unknown part $part; use ttft, interference or hits" >&2; exit 2 ;;
    esac
done
