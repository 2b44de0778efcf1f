#!/usr/bin/env bash
# Runs the stages of `make test`, two at a time, and repeats at the end which ones failed and where:
# the whole output is long, and is kept in build/test.log.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
log=build/test.log
# Machine code for one architecture: that for all takes minutes (`make lib`).
export CARGO_INCREMENTAL=0 PAGEDLLM_CUDA_ARCHS=80
# Builds of two profiles and tests/ptx share the PTX of the kernels.
export PAGEDLLM_PTX_CACHE=$PWD/target/ptx
make --no-print-directory --keep-going --jobs=2 --output-sync=target stages 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
if [ "$status" = 0 ]; then
    echo "make test: everything passed"
    exit 0
fi
echo
echo "make test: these lines of $log name a failure:"
# Rust's names of failed tests and its panics, Python's, Go's, TAP's and ctest's failures, the reports
# of sanitizers, and the stages of make.
grep --text --line-number --after-context=1 --no-group-separator --extended-regexp \
    '^test .* FAILED$|^thread .* panicked at|^error(\[|:)|^(FAIL|ERROR):|^ *--- FAIL|^not ok|\*\*\*(Failed|Exception|Timeout)|ERROR: (Address|Leak|Undefined)|WARNING: ThreadSanitizer|^make.*\*\*\*' "$log" |
    cut -c 1-200 | tail -n 100
exit "$status"
