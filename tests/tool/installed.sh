#!/usr/bin/env bash
# usage: installed.sh TOOL MODEL
# Runs an installed tool in an empty folder. It must find its library by itself, and have its man page.
set -euo pipefail
tool=$(realpath "$1") model=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
unset LD_LIBRARY_PATH
printf 'What is the capital of France?\nWhat is 7 + 5?\n' | "$tool" chat "$model" | diff - <(printf 'The capital of France is Paris.\n12\n')
"$tool" plan "$model" | grep -q '^weights '
page=$(ls "$(dirname "$tool")"/../share/man/man1/pagedllm.1*)
zcat -f "$page" | grep -q '^.TH PAGEDLLM 1 '
