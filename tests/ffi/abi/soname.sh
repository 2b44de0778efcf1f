#!/usr/bin/env bash
# usage: soname.sh LIBDIR
# Checks that a program that was linked with an earlier series does not start.
set -euo pipefail
libdir=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Both series have the function that the program calls, so only the soname can prevent the start.
echo 'const char *pllm_version(void) { return "0.2.0"; }' > "$work/stub.c"
echo 'const char *pllm_version(void); int main(void) { return !pllm_version(); }' > "$work/program.c"
for series in 0 1; do
    cc -shared -fPIC -Wl,-soname,libpagedllm.so.$series "$work/stub.c" -o "$work/libstub.so"
    cc "$work/program.c" "$work/libstub.so" -o "$work/program.$series"
done

LD_LIBRARY_PATH=$libdir "$work/program.1" || { echo "soname: a program of this series does not start" >&2; exit 1; }
if LD_LIBRARY_PATH=$libdir "$work/program.0" 2> "$work/error"; then
    echo "soname: a program of series 0 started with this library" >&2
    exit 1
fi
grep -q 'libpagedllm.so.0: cannot open shared object file' "$work/error" || { cat "$work/error" >&2; exit 1; }
echo "soname: a program of series 0 is not loaded: $(sed 's/.*: //' "$work/error")"
