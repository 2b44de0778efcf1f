#!/usr/bin/env bash
# usage: install.sh BUILT PREFIX
# Installs the connectors that build.sh has built in the folder BUILT. No installed file contains PREFIX.
set -euo pipefail
built=$(cd "$1" && pwd) prefix=$(mkdir -p "$2" && cd "$2" && pwd)
cd "$(dirname "$0")"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' ../Cargo.toml | head -n 1)
mkdir -p "$prefix"/{include,lib/pkgconfig}
for name in files valkey nixl; do
    install -m 755 "$built/libpagedllm_$name.so.1" "$prefix/lib/libpagedllm_$name.so.$version"
    ln -sf "libpagedllm_$name.so.$version" "$prefix/lib/libpagedllm_$name.so.1"
    ln -sf "libpagedllm_$name.so.1" "$prefix/lib/libpagedllm_$name.so"
    install -m 644 "$name/pagedllm_$name.h" "$prefix/include/"
    sed "s/@VERSION@/$version/; s/@NAME@/$name/g" connector.pc.in > "$prefix/lib/pkgconfig/pagedllm_$name.pc"
done
