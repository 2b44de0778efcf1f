#!/usr/bin/env bash
# usage: wheel.sh OUT_DIR
# Makes a wheel with the built library. auditwheel derives the manylinux tag from the symbols that the
# library needs.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
tools=$PWD/build/wheel-tools
export PYTHONPATH=$tools PATH=$tools/bin:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

strip --strip-unneeded -o "$work/libpagedllm.so" target/release/libpagedllm.so
cp LICENSE "$work/"
python3 scripts/licences.py --texts > "$work/licences-of-dependencies.txt"
(cd bindings/python && PAGEDLLM_WHEEL_FILES=$work python3 -m hatchling build -t wheel -d "$work/built") >/dev/null

rm -f "$out"/pagedllm-*.whl
python3 -m auditwheel repair --plat auto --wheel-dir "$out" "$work"/built/*.whl >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
# The repaired wheel contains no other library: libpagedllm needs only what each manylinux system has.
files=$(python3 -m zipfile -l "$out"/pagedllm-*.whl | awk '/\.so/ {print $1}')
[ "$files" = pagedllm/libpagedllm.so ] || { echo "the wheel contains other libraries: $files" >&2; exit 1; }
ls -l "$out"/pagedllm-*.whl | awk '{print $5, $9}'
