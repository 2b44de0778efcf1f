#!/usr/bin/env bash
# usage: packages.sh DIST MODEL EXPECTED
# Checks that the tarball and the three Debian packages have the same tree, that the tree works in any
# folder, that programs run with the runtime package alone, and that the tree has no tests.
set -euo pipefail
dist=$(cd "$1" && pwd) model=$2 expected=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tar" "$work/deb"
tar -C "$work/tar" --strip-components=1 -xzf "$dist"/libpagedllm-*.tar.gz
runtime=$(ls "$dist"/libpagedllm1_*.deb) development=$(ls "$dist"/libpagedllm-dev_*.deb) tool=$(ls "$dist"/pagedllm_*.deb)
for package in "$runtime" "$development" "$tool"; do
    dpkg-deb --info "$package" | grep -E '^ (Package|Version|Depends):'
    dpkg-deb --fsys-tarfile "$package" | tar -t | grep -v '/$' >> "$work/files"
done
twice=$(sort "$work/files" | uniq -d)
if [ -n "$twice" ]; then
    echo "two packages have $twice" >&2
    exit 1
fi
dpkg-deb -x "$runtime" "$work/runtime"
for package in "$runtime" "$development" "$tool"; do dpkg-deb -x "$package" "$work/deb"; done
cc -std=c11 "$here/../../examples/c/hello.c" -I"$work/deb/usr/include" -L"$work/deb/usr/lib" -lpagedllm -o "$work/hello"
LD_LIBRARY_PATH=$work/runtime/usr/lib "$work/hello" "$model" 2>/dev/null | diff - "$expected"
for package in "$runtime" "$tool"; do dpkg-deb -x "$package" "$work/tool"; done
"$here/../tool/installed.sh" "$work/tool/usr/bin/pagedllm" "$model"
# The versions of glibc and libstdc++ that the package of the tool depends on.
for version in GLIBC_:"$(sed -n 's/^GLIBC_FLOOR := //p' "$here/../../Makefile")" GLIBCXX_:3.4.29; do
    needed=$(objdump -T "$work/tool/usr/bin/pagedllm" | grep -oE "${version%:*}[0-9.]+" | sed "s/${version%:*}//" | sort -V | tail -n 1)
    if [ "$(printf '%s\n%s\n' "$needed" "${version#*:}" | sort -V | tail -n 1)" != "${version#*:}" ]; then
        echo "the tool needs ${version%:*}$needed, its package has ${version#*:}" >&2
        exit 1
    fi
done
gunzip "$work/deb/usr/share/man/man1/pagedllm.1.gz"  # the tarball has it as text
diff -r --no-dereference "$work/tar" "$work/deb/usr"
for text in licences-of-dependencies.txt licences-of-tool.txt LICENSE; do [ -s "$work/tar/share/doc/pagedllm/$text" ]; done
tests=$(find "$work/tar" -name tests -o -name '*test*')
if [ -n "$tests" ]; then
    echo "the packages have tests: $tests" >&2
    exit 1
fi
"$here/run.sh" "$work/tar" "$model" "$expected" >/dev/null
echo "packages: the tree of the tarball and of the Debian packages works in any folder"
