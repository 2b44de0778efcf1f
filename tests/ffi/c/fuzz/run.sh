#!/bin/sh
# Builds the fuzzer with the address and undefined behaviour sanitizers, proves that its checks can fail, and runs it.
#   usage: run.sh SECONDS [SEED]
#   CC, CLANG               the compilers; clang, where it has libFuzzer, drives the same programs for a quarter of the time
#   INCLUDE_DIR, LIB_DIR    where pagedllm.h and libpagedllm.so are; default: this repository's
#   BUILD_DIR               where the programs go, and what libFuzzer finds; default: build/fuzz in this repository
#   FUZZ_PATIENCE=30        after so many seconds a call hangs
set -eu
seconds=${1:?usage: run.sh SECONDS [SEED]}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
cc=${CC:-gcc}
clang=${CLANG:-clang}
include=${INCLUDE_DIR:-$root/include}
lib=${LIB_DIR:-$root/target/release}
build=${BUILD_DIR:-$root/build/fuzz}
export PLLM_MODEL="$root/examples/model" PLLM_GOLDEN="$root/tests/goldens/llama"

options="-std=gnu11 -O1 -g -pthread -Wall -Wextra -Wpedantic -Werror -I$include"
link="-L$lib -lpagedllm -lm -Wl,-rpath,$lib"
parts="program.c ledger.c questions.c input.c report.c"
fuzz="$build/fuzz $PLLM_MODEL $PLLM_GOLDEN"
mkdir -p "$build"
cd "$here"

# shellcheck disable=SC2086
$cc $options -fsanitize=address,undefined -fno-sanitize-recover=undefined main.c $parts -o "$build/fuzz" $link

echo "== every function of the header is called"
grep -o '\bpllm_[a-z_]*(' "$include/pagedllm.h" | tr -d '(' | sort -u >"$build/functions.header"
"$build/fuzz" --functions | sort -u | diff "$build/functions.header" -

echo "== every check can fail"
"$build/fuzz" --sabotages | while IFS='|' read -r name report; do
    if FUZZ_PATIENCE=10 $fuzz --sabotage "$name" >"$build/sabotage" 2>&1; then
        echo "$name: nothing was found"
        exit 1
    fi
    if ! grep -qF "$report" "$build/sabotage"; then
        echo "$name: something else was found:"
        cat "$build/sabotage"
        exit 1
    fi
    echo "found: $name"
done

echo "== the same programs give the same results"
first=$($fuzz --hash 200 1)
second=$($fuzz --hash 200 1)
[ "$first" = "$second" ] || { echo "$first, then $second"; exit 1; }

echo "== $seconds s of programs"
# shellcheck disable=SC2086
$fuzz "$seconds" ${2:-}

echo "== libFuzzer"
if echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n); int LLVMFuzzerTestOneInput(const char *d, unsigned long n) {
        return !d && n; }' | $clang -x c - -fsanitize=fuzzer,address -o "$build/has_libfuzzer" 2>/dev/null; then
    # shellcheck disable=SC2086
    $clang $options -fsanitize=fuzzer,address libfuzzer.c $parts -o "$build/libfuzzer" $link
    mkdir -p "$build/corpus"
    "$build/libfuzzer" "$build/corpus" -max_total_time=$(((seconds + 3) / 4)) -timeout="${FUZZ_PATIENCE:-30}" \
        -max_len=3072 -len_control=0 -rss_limit_mb=4096 -malloc_limit_mb=1000000 \
        -artifact_prefix="$build/found-" -print_final_stats=1 >"$build/libfuzzer.log" 2>&1 || {
        cat "$build/libfuzzer.log"
        exit 1
    }
    grep '^stat::' "$build/libfuzzer.log"
else
    echo "skipped: $clang is not there, or has no libFuzzer"
fi
