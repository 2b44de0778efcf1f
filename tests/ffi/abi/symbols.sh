#!/usr/bin/env bash
# usage: symbols.sh LIBRARY MIN_GLIBC
# Checks the exported symbols, the soname, the required glibc and the size of the shared library.
set -euo pipefail
library=$1 min_glibc=$2
header=$(dirname "$0")/../../../include/pagedllm.h
fail() { echo "symbols: $1" >&2; exit 1; }

exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sort)
declared=$(grep -oE '\bpllm_[a-z_]+\(' "$header" | tr -d '(' | sort -u)
[ "$exported" = "$declared" ] || fail "exported symbols differ from the header: $(diff <(echo "$exported") <(echo "$declared") | grep '^[<>]' | tr '\n' ' ')"

# An intrinsic with a symbol was not inlined into its kernel, see docs/design-notes.md.
intrinsics=$(nm -C "$library" | grep -E 'core_arch::x86::(avx512|avx2|fma|f16c)' || true)
[ -z "$intrinsics" ] || fail "intrinsics are not inlined: $intrinsics"

soname=$(readelf -d "$library" | sed -n 's/.*soname: \[\(.*\)\]/\1/p')
expected=libpagedllm.so.$(sed -n 's/^#define PLLM_ABI_VERSION //p' "$header")
[ "$soname" = "$expected" ] || fail "the soname is $soname, expected $expected"

required=$(objdump -T "$library" | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -V | tail -n 1)
[ "$(printf '%s\n%s\n' "$required" "$min_glibc" | sort -V | tail -n 1)" = "$min_glibc" ] || fail "the library requires glibc $required, the maximum is $min_glibc"

stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip --strip-unneeded -o "$stripped" "$library"
bytes=$(stat -c %s "$stripped")
[ "$bytes" -lt 25000000 ] || fail "$bytes bytes stripped, the maximum is 25000000"
echo "symbols: $(echo "$exported" | wc -l) functions, equal to the header; glibc $required or newer; $bytes bytes stripped"
