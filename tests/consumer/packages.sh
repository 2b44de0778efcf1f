#!/usr/bin/env bash
# usage: packages.sh DIST MODEL EXPECTED
# Checks that the trees in the tarball and in the Debian package work in any folder.
set -euo pipefail
dist=$(cd "$1" && pwd) model=$2 expected=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tar" "$work/deb"
tar -C "$work/tar" --strip-components=1 -xzf "$dist"/libpagedllm-*.tar.gz
dpkg-deb -x "$dist"/libpagedllm_*.deb "$work/deb"
dpkg-deb --info "$dist"/libpagedllm_*.deb | grep -E '^ (Package|Version|Depends):'
for tree in "$work/tar" "$work/deb/usr"; do
    "$here/run.sh" "$tree" "$model" "$expected" >/dev/null
    [ -s "$tree/share/doc/pagedllm/licences-of-dependencies.txt" ] && [ -s "$tree/share/doc/pagedllm/LICENSE" ]
done
echo "packages: tarball and Debian package work in any folder"
