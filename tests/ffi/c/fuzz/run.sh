#!/bin/sh
# Builds the fuzzer with sanitizers, proves that its checks can fail, and runs it.
#   usage: run.sh SECONDS [SEED]
#   CC, CLANG               the compilers; if clang has libFuzzer, it runs for a quarter of the time
#   INCLUDE_DIR, LIB_DIR    folders of pagedllm.h and libpagedllm.so; default: this repository's
#   BUILD_DIR               folder of the programs and of libFuzzer's corpus; default: build/fuzz
#   FUZZ_CALL_TIMEOUT=30    seconds without CPU time, or of CPU time, after which a call hangs
set -eu
seconds=${1:?usage: run.sh SECONDS [SEED]}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
cc=${CC:-gcc}
clang=${CLANG:-clang}
include=${INCLUDE_DIR:-$root/include}
lib=${LIB_DIR:-$root/target/release}
build=${BUILD_DIR:-$root/build/fuzz}
export PLLM_MODEL="$root/examples/model" PLLM_GOLDEN="$root/tests/data/llama"

options="-std=gnu11 -O1 -g -pthread -Wall -Wextra -Wpedantic -Werror -I$include"
link="-L$lib -lpagedllm -lm -Wl,-rpath,$lib"
fuzz="$build/fuzz $PLLM_MODEL $PLLM_GOLDEN"
mkdir -p "$build"
cd "$here"
parts=$(ls ./*.c | grep -v -e main.c -e libfuzzer.c)

# shellcheck disable=SC2086
$cc $options -fsanitize=address,undefined -fno-sanitize-recover=undefined main.c $parts \
    -o "$build/fuzz" $link

echo "== every function of the header is called"
grep -o '\bpllm_[a-z_]*(' "$include/pagedllm.h" | tr -d '(' | sort -u >"$build/functions.header"
"$build/fuzz" --functions | sort -u | diff "$build/functions.header" -

echo "== every check can fail"
"$build/fuzz" --mutations | while IFS='|' read -r name report; do
    timeout=10
    if [ "$name" = call_hangs ]; then timeout=2; fi
    if FUZZ_CALL_TIMEOUT=$timeout $fuzz --mutation "$name" >"$build/mutation" 2>&1; then
        echo "$name: no finding"
        exit 1
    fi
    if ! grep -qF "$report" "$build/mutation"; then
        echo "$name: another finding:"
        cat "$build/mutation"
        exit 1
    fi
    echo "found: $name"
done

echo "== the same programs have the same results"
first=$($fuzz --hash 200 1)
second=$($fuzz --hash 200 1)
[ "$first" = "$second" ] || { echo "$first, then $second"; exit 1; }

echo "== $seconds s of programs"
# shellcheck disable=SC2086
$fuzz "$seconds" ${2:-}

echo "== libFuzzer"
entry='int LLVMFuzzerTestOneInput(const char *data, unsigned long size)'
if echo "$entry; $entry { return !data && size; }" |
    $clang -x c - -fsanitize=fuzzer,address -o "$build/has_libfuzzer" 2>/dev/null; then
    # shellcheck disable=SC2086
    $clang $options -fsanitize=fuzzer,address libfuzzer.c $parts -o "$build/libfuzzer" $link
    mkdir -p "$build/corpus"
    "$build/libfuzzer" "$build/corpus" -max_total_time=$(((seconds + 3) / 4)) \
        -timeout=1200 -max_len=3072 -len_control=0 \
        -rss_limit_mb=4096 -malloc_limit_mb=1000000 \
        -artifact_prefix="$build/found-" -print_final_stats=1 >"$build/libfuzzer.log" 2>&1 || {
        cat "$build/libfuzzer.log"
        exit 1
    }
    grep '^stat::' "$build/libfuzzer.log"
else
    echo "skipped: $clang is not installed, or has no libFuzzer"
fi
