#!/usr/bin/env bash
# usage: cpp.sh
# Builds examples/server-cpp, and checks it (check.sh).
# SANITIZE         address,undefined | thread | none (default)
# PAGEDLLM_LIB_DIR where libpagedllm.so is; default: target/release of this repository
set -euo pipefail
cd "$(dirname "$0")/../.."
sanitize=${SANITIZE:-none}
build=build/server-cpp-$sanitize
lib=${PAGEDLLM_LIB_DIR:-$PWD/target/release}
cmake -S examples/server-cpp -B "$build" -DSANITIZE="$sanitize" -DPAGEDLLM_LIB_DIR="$lib" >/dev/null
cmake --build "$build" --parallel 2 >"$build/build.log" 2>&1 || { cat "$build/build.log"; exit 1; }
(cd examples/server-go && go build -o "../../$build/load" ./load)
export TSAN_OPTIONS=halt_on_error=1:suppressions=$PWD/tests/servers/tsan.supp
SERVER_FLAGS="-drain 0s -max-logprobs 100" tests/servers/check.sh "$build/server-cpp" "$build/load" messages,responses
