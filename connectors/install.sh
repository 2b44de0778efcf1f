#!/usr/bin/env bash
# usage: install.sh BUILT PREFIX [NAME]...     default: files valkey nixl
# Installs connectors that build.sh has built in the folder BUILT, with files for pkg-config and CMake. No
# installed file contains PREFIX.
set -euo pipefail
built=$(cd "$1" && pwd) prefix=$(mkdir -p "$2" && cd "$2" && pwd)
names=("${@:3}")
[ ${#names[@]} -gt 0 ] || names=(files valkey nixl)
cd "$(dirname "$0")"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' ../Cargo.toml | head -n 1)
mkdir -p "$prefix"/{include,lib/pkgconfig,share/doc/pagedllm}
for name in "${names[@]}"; do
    library=libpagedllm_$name.so cmake=$prefix/lib/cmake/pagedllm_$name
    strip --strip-unneeded -o "$prefix/lib/$library.$version" "$built/$library.1"
    chmod 755 "$prefix/lib/$library.$version"
    ln -sf "$library.$version" "$prefix/lib/$library.1"
    ln -sf "$library.1" "$prefix/lib/$library"
    install -m 644 "$name/pagedllm_$name.h" "$prefix/include/"
    mkdir -p "$cmake"
    values="s/@VERSION@/$version/g; s/@NAME@/$name/g"
    sed "$values" connector.pc.in > "$prefix/lib/pkgconfig/pagedllm_$name.pc"
    sed "$values" connectorConfig.cmake.in > "$cmake/pagedllm_${name}Config.cmake"
    sed "$values" ../scripts/package/pagedllmConfigVersion.cmake.in > "$cmake/pagedllm_${name}ConfigVersion.cmake"
done
install -m 644 licences.txt "$prefix/share/doc/pagedllm/licences-of-connectors.txt"
