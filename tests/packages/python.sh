#!/usr/bin/env bash
# usage: python.sh WHEEL_DIR MODEL EXPECTED
# Installs the wheel in an empty folder, without the library of this tree, and runs programs with it.
set -euo pipefail
wheel=$(realpath "$1"/pagedllm-*.whl) model=$(realpath "$2") expected=$(realpath "$3")
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
unset PAGEDLLM_LIBRARY PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1

started=$(date +%s%N)
python3 -m venv env
env/bin/pip install --quiet --no-index "$wheel"
mkdir -p a/program
cp "$examples/python/hello.py" a/program/  # away from the wrapper of the tree
env/bin/python a/program/hello.py "$model" | diff - "$expected"
milliseconds=$((($(date +%s%N) - started) / 1000000))
loaded=$(env/bin/python -c 'import pagedllm; print(pagedllm._lib._name)')
[ "$loaded" = "$(realpath env/lib/python3.*/site-packages)/pagedllm/libpagedllm.so" ] || { echo "loaded $loaded" >&2; exit 1; }

echo "What is 7 + 5?" | env/bin/python -m pagedllm chat "$model" --temperature 0 | diff - <(echo 12)
echo "python: $(basename "$wheel"), $(stat -c %s "$wheel") bytes: installed and run in $milliseconds ms"
