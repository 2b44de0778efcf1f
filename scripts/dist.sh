#!/usr/bin/env bash
# usage: dist.sh OUT_DIR
# Makes a tarball and a Debian package of the built library.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
glibc=$(sed -n 's/^GLIBC_FLOOR := //p' Makefile)
machine=$(uname -m)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

name=libpagedllm-$version-linux-$machine
scripts/install.sh "$work/$name"
tar -C "$work" --owner=0 --group=0 --sort=name -czf "$out/$name.tar.gz" "$name"

root=$work/deb
mkdir -p "$root/DEBIAN" "$root/usr"
cp -a "$work/$name/." "$root/usr/"
case $machine in x86_64) architecture=amd64 ;; aarch64) architecture=arm64 ;; *) architecture=$machine ;; esac
cat > "$root/DEBIAN/control" <<CONTROL
Package: libpagedllm
Version: $version
Architecture: $architecture
Maintainer: libpagedllm <libpagedllm@localhost>
Section: libs
Priority: optional
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: libc6 (>= $glibc), libgcc-s1
Description: LLM serving inside your own process
 Continuous batching over a paged KV cache behind a stable C ABI: the library,
 its headers for C and C++, pkg-config and CMake files, and its wrappers.
CONTROL
printf '#!/bin/sh\nldconfig\n' > "$root/DEBIAN/postinst"
cp "$root/DEBIAN/postinst" "$root/DEBIAN/postrm"
chmod 755 "$root/DEBIAN/postinst" "$root/DEBIAN/postrm"
dpkg-deb --root-owner-group --build "$root" "$out/libpagedllm_${version}_$architecture.deb" >/dev/null
ls -l "$out/$name.tar.gz" "$out/libpagedllm_${version}_$architecture.deb" | awk '{print $5, $9}'
