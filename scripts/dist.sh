#!/usr/bin/env bash
# usage: dist.sh OUT_DIR
# Makes a tarball and three Debian packages of the built library: the runtime, what development needs, and the tool.
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

case $machine in x86_64) architecture=amd64 ;; aarch64) architecture=arm64 ;; *) architecture=$machine ;; esac

# usage: debian_package NAME SECTION DEPENDS SUMMARY DESCRIPTION, with the files in $work/NAME/usr
debian_package() {
    local root=$work/$1
    mkdir -p "$root/DEBIAN"
    cat > "$root/DEBIAN/control" <<CONTROL
Package: $1
Source: libpagedllm
Version: $version
Architecture: $architecture
Maintainer: libpagedllm <libpagedllm@localhost>
Section: $2
Priority: optional
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: $3
Conflicts: libpagedllm
Replaces: libpagedllm
Description: LLM serving inside your own process ($4)
 Continuous batching over a paged KV cache behind a stable C ABI.
 This package contains $5.
CONTROL
    dpkg-deb --root-owner-group --build "$root" "$out/${1}_${version}_$architecture.deb" >/dev/null
}

# Releases of one ABI series replace each other, so the runtime package has the number of the soname.
rm -f "$out"/libpagedllm*.deb "$out"/pagedllm_*.deb
runtime=libpagedllm1
mkdir -p "$work/$runtime/usr/lib" "$work/$runtime/usr/share/doc/pagedllm" "$work/$runtime/DEBIAN" "$work/libpagedllm-dev/usr"
cp -a "$work/$name/." "$work/libpagedllm-dev/usr/"
mkdir -p "$work/pagedllm/usr/share/doc/pagedllm"
mv "$work/libpagedllm-dev/usr/bin" "$work/pagedllm/usr/"
mv "$work/libpagedllm-dev/usr/share/man" "$work/pagedllm/usr/share/"
gzip -9n "$work/pagedllm/usr/share/man/man1/pagedllm.1"  # as the policy of Debian wants it
mv "$work/libpagedllm-dev/usr/share/doc/pagedllm/licences-of-tool.txt" "$work/pagedllm/usr/share/doc/pagedllm/"
mv "$work/libpagedllm-dev/usr/lib"/libpagedllm.so.* "$work/$runtime/usr/lib/"
mv "$work/libpagedllm-dev/usr/share/doc/pagedllm"/{LICENSE,licences*} "$work/$runtime/usr/share/doc/pagedllm/"
echo "activate-noawait ldconfig" > "$work/$runtime/DEBIAN/triggers"
echo "libpagedllm 1 $runtime (>= $version)" > "$work/$runtime/DEBIAN/shlibs"
debian_package $runtime libs "libc6 (>= $glibc), libgcc-s1" "shared library" "the shared library"
debian_package libpagedllm-dev libdevel "$runtime (= $version)" "development files" \
    "the headers for C and C++, the static library, files for pkg-config and CMake, and the wrappers for Go, Python, Node and Java"
debian_package pagedllm utils "$runtime (= $version), libc6 (>= $glibc), libstdc++6 (>= 11)" "command-line tool" \
    "the command pagedllm, which chats with models, measures them and prints the memory that they need"
ls -l "$out/$name.tar.gz" "$out"/libpagedllm*.deb "$out"/pagedllm_*.deb | awk '{print $5, $9}'
