#!/usr/bin/env bash
# Tests the connectors: each store alone, with an engine, in examples/disaggregated and in benches/kv_store.
# usage: run.sh [none | address,undefined | thread]...     default: none
# PAGEDLLM_LIB_DIR     where libpagedllm.so is; default: target/release of this repository
# BUILD                where to build; default: build/connectors-tests of this repository
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/connectors
lib=${PAGEDLLM_LIB_DIR:-$root/target/release}
build=${BUILD:-$root/build/connectors-tests}
[ $# -gt 0 ] || set -- none
warnings=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -g1 -O1)
include=("-I$root/include" "-I$root/connectors/files" "-I$root/connectors/valkey" "-I$root/connectors/nixl" $(pkg-config --cflags hiredis))

# NIXL over TCP. Its errors and those of UCX are expected.
nixl=$root/build/nixl
"$here/nixl.sh" "$nixl"
export UCX_TLS=tcp,self NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal
if [ -e "$nixl/unavailable" ]; then
    echo "skipped: most tests of the store nixl, because $(cat "$nixl/unavailable")"
    filter='NixlWithoutLibrary.*'
else
    export NIXL_LIBRARY=$nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
    filter='*'
fi

# usage: test_stores SANITIZERS
test_stores() {
    local out=$build/${1//,/-} sanitize=()
    [ "$1" = none ] || sanitize=("-fsanitize=$1" -fno-sanitize-recover=all)
    CXXFLAGS="-O1 -g1" "$root/connectors/build.sh" "$out" "${1#none}"
    for store in files valkey nixl; do
        ${CXX:-c++} -std=c++17 "${warnings[@]}" "${sanitize[@]}" "${include[@]}" "$here/${store}_test.cpp" -o "$out/${store}_test" \
            -L"$out" -lpagedllm_files -lpagedllm_valkey -lpagedllm_nixl -Wl,-rpath,"$out" $(pkg-config --libs hiredis) -lgtest -lgtest_main -pthread
        echo "store $store, sanitizer $1:"
        TSAN_OPTIONS=die_after_fork=0 "$out/${store}_test" --gtest_brief=1 \
            --gtest_filter="$([ "$store" = nixl ] && echo "$filter" || echo '*')"
    done
}

for sanitizers in "$@"; do test_stores "$sanitizers"; done

# The headers stand alone in C.
for header in files/pagedllm_files.h valkey/pagedllm_valkey.h nixl/pagedllm_nixl.h; do
    ${CC:-cc} -std=c11 "${warnings[@]}" "${include[@]}" -fsyntax-only -x c "$root/connectors/$header"
done

# The examples of docs/kv-stores.md compile.
{
    printf '#include <%s>\n' pagedllm_files.h pagedllm_valkey.h pagedllm_nixl.h
    echo 'int report(const char *text);'
    awk '/^```c$/ { n++; print "int example_" n "(pllm_engine_options options);"; print "int example_" n "(pllm_engine_options options) {"; on = 1; next }
         on && /^```$/ { print "return (int)options.struct_size; }"; on = 0 }
         on && !/^#include/' "$root/docs/kv-stores.md"
} | ${CC:-cc} -std=c11 "${warnings[@]}" "${include[@]}" -fsyntax-only -x c -

# Programs find the installed libraries.
out=$build/none
[ -e "$out/libpagedllm_nixl.so" ] || "$root/connectors/build.sh" "$out"
"$root/connectors/install.sh" "$out" "$build/installed"
export PKG_CONFIG_PATH=$build/installed/lib/pkgconfig
${CC:-cc} -std=c11 -DWITH_NIXL "${warnings[@]}" "-I$root/include" $(pkg-config --cflags pagedllm_files pagedllm_valkey pagedllm_nixl) "$here/engine.c" -o "$build/engine" \
    $(pkg-config --libs pagedllm_files pagedllm_valkey pagedllm_nixl) -L"$lib" -lpagedllm -Wl,-rpath,"$build/installed/lib:$lib"
${CC:-cc} -std=gnu11 "${warnings[@]}" -fPIC -shared "$here/hanging_disk.c" -o "$build/hanging_disk.so" -ldl
"$here/with_engine.sh" "$build/engine" "$root/examples/model" "$build/hanging_disk.so"

CONNECTORS=$out PAGEDLLM_LIBRARY=$lib/libpagedllm.so python3 -B "$here/disaggregated_test.py"

# The benchmarks run. Their numbers need an idle machine.
CONNECTORS=$out PAGEDLLM_LIB_DIR=$lib "$root/benches/kv_store/run.sh" --quick > "$build/bench.log" 2>&1 || { cat "$build/bench.log"; exit 1; }
echo "benchmarks: $(grep -c '^| ' "$build/bench.log") rows"
