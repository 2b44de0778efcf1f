#!/usr/bin/env bash
# usage: packages.sh DIST MODEL EXPECTED
# Checks that the tarball and the Debian package have the same tree, that the tree works in any
# folder, and that it has no tests.
set -euo pipefail
dist=$(cd "$1" && pwd) model=$2 expected=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tar" "$work/deb"
tar -C "$work/tar" --strip-components=1 -xzf "$dist"/libpagedllm-*.tar.gz
dpkg-deb -x "$dist"/libpagedllm_*.deb "$work/deb"
dpkg-deb --info "$dist"/libpagedllm_*.deb | grep -E '^ (Package|Version|Depends):'
diff -r --no-dereference "$work/tar" "$work/deb/usr"
for text in licences-of-dependencies.txt LICENSE; do [ -s "$work/tar/share/doc/pagedllm/$text" ]; done
tests=$(find "$work/tar" -name tests -o -name '*test*')
if [ -n "$tests" ]; then
    echo "the packages have tests: $tests" >&2
    exit 1
fi
"$here/run.sh" "$work/tar" "$model" "$expected" >/dev/null
echo "packages: the tree of the tarball and of the Debian package works in any folder"
