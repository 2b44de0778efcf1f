#!/usr/bin/env bash
# usage: symbols.sh LIBRARY GLIBC_FLOOR   what the shared library shows, asks for and weighs
set -euo pipefail
library=$1 floor=$2
header=$(dirname "$0")/../../../include/pagedllm.h
fail() { echo "symbols: $1" >&2; exit 1; }

shown=$(nm -D --defined-only "$library" | awk '{print $3}' | sort)
promised=$(grep -oE '\bpllm_[a-z_]+\(' "$header" | tr -d '(' | sort -u)
[ "$shown" = "$promised" ] || fail "the library shows other symbols than the header: $(diff <(echo "$shown") <(echo "$promised") | grep '^[<>]' | tr '\n' ' ')"

# An intrinsic that is a function of its own is one that the compiler did not inline into its kernel: docs/design-notes.md.
slipped=$(nm -C "$library" | grep -E 'core_arch::x86::(avx512|avx2|fma|f16c)' || true)
[ -z "$slipped" ] || fail "intrinsics are called, not inlined: $slipped"

soname=$(readelf -d "$library" | sed -n 's/.*soname: \[\(.*\)\]/\1/p')
expected=libpagedllm.so.$(sed -n 's/^#define PLLM_ABI_VERSION //p' "$header")
[ "$soname" = "$expected" ] || fail "the soname is $soname, PLLM_ABI_VERSION demands $expected"

needs=$(objdump -T "$library" | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -V | tail -n 1)
[ "$(printf '%s\n%s\n' "$needs" "$floor" | sort -V | tail -n 1)" = "$floor" ] || fail "it asks for glibc $needs, and $floor is promised"

stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip --strip-unneeded -o "$stripped" "$library"
bytes=$(stat -c %s "$stripped")
[ "$bytes" -lt 25000000 ] || fail "it has $bytes bytes stripped, 25 MB are allowed"
echo "symbols: $(echo "$shown" | wc -l) functions, all in the header; glibc $needs or newer; $bytes bytes stripped"
