#!/usr/bin/env bash
# Runs threads of a host over the whole C API with ThreadSanitizer. The library, the standard library of
# Rust and the C code of dependencies are built with it, so that it sees all locks.
#   usage: tsan.sh [SECONDS]    seconds of random programs; default: 120
#   CLANG, NIGHTLY              the C compiler and the toolchain; default: clang, nightly
#   SEED                        the first seed of the programs; default: 1
set -euo pipefail
seconds=${1:-120}
clang=${CLANG:-clang}
nightly=${NIGHTLY:-nightly}
cd "$(dirname "$0")/../../.."
target=$(uname -m)-unknown-linux-gnu
build=build/tsan
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}"

echo "== the library, with $(rustc "+$nightly" --version)"
# clang's own runtime may be older than the code that rustc generates.
CC=$clang CFLAGS=-fsanitize=thread RUSTFLAGS=-Zsanitizer=thread \
    cargo "+$nightly" rustc --locked --release --lib --crate-type staticlib -Zbuild-std --target "$target" --target-dir target/tsan
runtime=$(find "$(rustc "+$nightly" --print sysroot)/lib/rustlib/$target/lib" -name 'librustc*_rt.tsan.a')
mkdir -p "$build"

# link OUTPUT SOURCE...
link() {
    "$clang" -std=gnu11 -O1 -g -pthread -Wall -Wextra -Werror -Iinclude -fsanitize=thread -fno-sanitize-link-runtime "${@:2}" -o "$1" \
        "target/tsan/$target/release/libpagedllm.a" -Wl,--whole-archive "$runtime" -Wl,--no-whole-archive -Wl,--export-dynamic \
        -ldl -lm -lrt -lresolv
}
mapfile -t fuzz < <(ls tests/ffi/c/fuzz/*.c | grep -v libfuzzer.c)
mapfile -t boundary < <(ls tests/ffi/c/boundary/*.c | grep -v -e allocator.c -e dlopen.c)
link "$build/fuzz" "${fuzz[@]}"
link "$build/boundary" "${boundary[@]}"
link "$build/proof" tests/ffi/c/tsan_proof.c

echo "== a race between the host and the library is reported"
if "$build/proof" examples/model >"$build/proof.log" 2>&1 || ! grep -q 'SUMMARY: ThreadSanitizer: data race' "$build/proof.log"; then
    cat "$build/proof.log"
    exit 1
fi
grep SUMMARY "$build/proof.log"

echo "== tests of many threads"
for name in $(grep -ho 'TEST([a-z_]*)' tests/ffi/c/boundary/{threads,engines,queues,sequence_threads,sequence_queues,events,hooks}.c |
    sed 's/TEST(\(.*\))/\1/'); do
    BOUNDARY_TIMEOUT_FACTOR=10 "$build/boundary" --supervise "$build/boundary" examples/model tests/data/llama "$name"
    echo "passed   $name"
done

echo "== random programs, of which a quarter has several threads"
FUZZ_CALL_TIMEOUT=300 "$build/fuzz" examples/model tests/data/llama "$seconds" "${SEED:-1}"
echo "no race was found"
