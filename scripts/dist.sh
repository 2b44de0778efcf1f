#!/usr/bin/env bash
# usage: dist.sh OUT_DIR
# Makes a tarball and six Debian packages of what is built: the library, the two KV stores, what development
# needs, in two packages, and the tool. One store needs hiredis, so it has packages of its own.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
[ -f build/connectors/libpagedllm_valkey.so.1 ] || { echo "build/connectors is missing: run 'make connectors' first" >&2; exit 1; }
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
root=$work/libpagedllm-dev/usr
mkdir -p "$root"
cp -a "$work/$name/." "$root/"

# usage: move PACKAGE FILE..., with files of the development package
move() {
    local package=$1 file
    for file in "${@:2}"; do
        mkdir -p "$work/$package/usr/$(dirname "$file")"
        mv "$root/$file" "$work/$package/usr/$file"
    done
}

# usage: shared_library PACKAGE NAME
shared_library() {
    local file
    for file in "$root/lib/$2".so.*; do move "$1" "lib/$(basename "$file")"; done
    mkdir -p "$work/$1/DEBIAN"
    echo "activate-noawait ldconfig" > "$work/$1/DEBIAN/triggers"
    echo "$2 1 $1 (>= $version)" > "$work/$1/DEBIAN/shlibs"
}

# Prints the package with the hiredis that the store is linked with, which differs between releases of Debian
# and Ubuntu.
hiredis_package() {
    mkdir -p "$work/shlibs/debian"
    touch "$work/shlibs/debian/control"
    (cd "$work/shlibs" && dpkg-shlibdeps -O -e"$root/lib/libpagedllm_valkey.so.$version" 2>/dev/null) | grep -oE 'libhiredis[^,]*'
}
hiredis=$(hiredis_package) || { echo "no package has the libhiredis of build/connectors" >&2; exit 1; }
cplusplus="libc6 (>= $glibc), libgcc-s1, libstdc++6 (>= 12)"

move pagedllm bin/pagedllm share/man/man1/pagedllm.1 share/doc/pagedllm/licences-of-tool.txt
gzip -9n "$work/pagedllm/usr/share/man/man1/pagedllm.1"  # as the policy of Debian wants it
shared_library $runtime libpagedllm
move $runtime share/doc/pagedllm/{LICENSE,licences.md,licences-of-dependencies.txt}
shared_library libpagedllm-files1 libpagedllm_files
move libpagedllm-files1 share/doc/pagedllm/licences-of-connectors.txt
shared_library libpagedllm-valkey1 libpagedllm_valkey
move libpagedllm-valkey-dev include/pagedllm_valkey.h lib/libpagedllm_valkey.so lib/pkgconfig/pagedllm_valkey.pc lib/cmake/pagedllm_valkey
find "$root" -type d -empty -delete

debian_package $runtime libs "libc6 (>= $glibc), libgcc-s1" "shared library" "the shared library"
debian_package libpagedllm-files1 libs "$cplusplus" "KV store in files" "the shared library of a KV store in a directory"
debian_package libpagedllm-valkey1 libs "$hiredis, $cplusplus" "KV store in Valkey" \
    "the shared library of a KV store in a Valkey or Redis server"
debian_package libpagedllm-dev libdevel "$runtime (= $version), libpagedllm-files1 (= $version)" "development files" \
    "the headers for C and C++, the static library, files for pkg-config and CMake, and the wrappers for Go, Python, Node and Java"
debian_package libpagedllm-valkey-dev libdevel "libpagedllm-dev (= $version), libpagedllm-valkey1 (= $version)" \
    "development files for the KV store in Valkey" "the header of the KV store in Valkey, and its files for pkg-config and CMake"
debian_package pagedllm utils "$runtime (= $version), libc6 (>= $glibc), libstdc++6 (>= 11)" "command-line tool" \
    "the command pagedllm, which chats with models, measures them and prints the memory that they need"
ls -l "$out/$name.tar.gz" "$out"/libpagedllm*.deb "$out"/pagedllm_*.deb | awk '{print $5, $9}'
