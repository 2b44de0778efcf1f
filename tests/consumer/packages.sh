#!/usr/bin/env bash
# usage: packages.sh DIST MODEL EXPECTED
# Checks that the tarball and the six Debian packages have the same tree, that the tree works in any
# folder, that programs run with the runtime packages that they need, and that the tree has no tests.
set -euo pipefail
dist=$(cd "$1" && pwd) model=$2 expected=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tar" "$work/deb"
tar -C "$work/tar" --strip-components=1 -xzf "$dist"/libpagedllm-*.tar.gz
# usage: file_of PACKAGE
file_of() { ls "$dist/$1"_*.deb; }
names=(libpagedllm1 libpagedllm-files1 libpagedllm-valkey1 libpagedllm-dev libpagedllm-valkey-dev pagedllm)
for name in "${names[@]}"; do
    package=$(file_of "$name")
    dpkg-deb -x "$package" "$work/deb"
    dpkg-deb -x "$package" "$work/$name"
    dpkg-deb --info "$package" | grep -E '^ (Package|Version|Depends):'
    dpkg-deb --fsys-tarfile "$package" | tar -t | grep -v '/$' >> "$work/files"
done
twice=$(sort "$work/files" | uniq -d)
if [ -n "$twice" ]; then
    echo "two packages have $twice" >&2
    exit 1
fi
cc -std=c11 "$here/../../examples/c/hello.c" -I"$work/deb/usr/include" -L"$work/deb/usr/lib" -lpagedllm -o "$work/hello"
LD_LIBRARY_PATH=$work/libpagedllm1/usr/lib "$work/hello" "$model" 2>/dev/null | diff - "$expected"

# Programs without the store in Valkey need neither its packages nor hiredis.
for name in libpagedllm1 libpagedllm-files1 libpagedllm-dev; do dpkg-deb -x "$(file_of "$name")" "$work/files-store"; done
cat > "$work/files.c" <<'CODE'
#include <pagedllm_files.h>
#include <stdio.h>
int main(int argc, char **argv) {
    pllm_files_store_options options;
    pllm_kv_store store = {.struct_size = sizeof store};
    char error[256] = "";
    pllm_files_store_options_init(&options, sizeof options);
    options.directory = argv[argc - 1];
    int code = pllm_files_store_open(&options, &store, error, sizeof error);
    if (code == 0) store.close(store.user_data);
    return puts(error) < 0 || code != 0;
}
CODE
cc -std=c11 "$work/files.c" -o "$work/files-store/program" \
    $(PKG_CONFIG_PATH=$work/files-store/usr/lib/pkgconfig pkg-config --cflags --libs pagedllm_files)
LD_LIBRARY_PATH=$work/files-store/usr/lib "$work/files-store/program" "$work/store"
[ -f "$work/store/pagedllm-kv-store" ]
hiredis=$(objdump -p "$work/libpagedllm-valkey1/usr/lib/libpagedllm_valkey.so.1" | sed -n 's/.*NEEDED *libhiredis\.so\.\(.*\)/\1/p')
dpkg-deb --field "$(file_of libpagedllm-valkey1)" Depends | grep -q "libhiredis$hiredis"
for name in libpagedllm1 libpagedllm-files1; do
    if objdump -p "$work/$name"/usr/lib/*.so.1 | grep -q 'NEEDED.*hiredis'; then echo "$name needs hiredis" >&2; exit 1; fi
done
for name in libpagedllm1 pagedllm; do dpkg-deb -x "$(file_of "$name")" "$work/tool"; done
"$here/../tool/installed.sh" "$work/tool/usr/bin/pagedllm" "$model"
# The versions of glibc and libstdc++ that the packages depend on. GLIBCXX_3.4.29 is that of GCC 11, and 3.4.30
# that of GCC 12.
floor=$(sed -n 's/^GLIBC_FLOOR := //p' "$here/../../Makefile")
while read -r file symbol version; do
    needed=$(objdump -T "$work/deb/usr/$file" | grep -oE "${symbol}_[0-9.]+" | sed "s/${symbol}_//" | sort -V | tail -n 1)
    if [ "$(printf '%s\n%s\n' "$needed" "$version" | sort -V | tail -n 1)" != "$version" ]; then
        echo "$file needs ${symbol}_$needed, its package has $version" >&2
        exit 1
    fi
done <<VERSIONS
bin/pagedllm GLIBC $floor
bin/pagedllm GLIBCXX 3.4.29
lib/libpagedllm_files.so.1 GLIBC $floor
lib/libpagedllm_files.so.1 GLIBCXX 3.4.30
lib/libpagedllm_valkey.so.1 GLIBC $floor
lib/libpagedllm_valkey.so.1 GLIBCXX 3.4.30
VERSIONS
gunzip "$work/deb/usr/share/man/man1/pagedllm.1.gz"  # the tarball has it as text
diff -r --no-dereference "$work/tar" "$work/deb/usr"
for text in licences-of-dependencies.txt licences-of-tool.txt licences-of-connectors.txt LICENSE; do [ -s "$work/tar/share/doc/pagedllm/$text" ]; done
tests=$(find "$work/tar" -name tests -o -name '*test*')
if [ -n "$tests" ]; then
    echo "the packages have tests: $tests" >&2
    exit 1
fi
"$here/run.sh" "$work/tar" "$model" "$expected" >/dev/null
echo "packages: the tree of the tarball and of the Debian packages works in any folder"
