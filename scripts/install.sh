#!/usr/bin/env bash
# usage: install.sh PREFIX
# Installs the built library, its headers and wrappers, and the built tool and KV stores into PREFIX. No
# installed file contains PREFIX, so the tree can be moved.
# BUILT where the libraries were built; default: target/release
set -euo pipefail
prefix=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
built=${BUILT:-target/release}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$prefix"/{include,lib/pkgconfig,lib/cmake/pagedllm,share/doc/pagedllm,share/pagedllm/{go,python/pagedllm,node,java/pagedllm,mpi}}

# The shared library without line tables.
strip --strip-unneeded -o "$work/libpagedllm.so" "$built/libpagedllm.so"
install -m 755 "$work/libpagedllm.so" "$prefix/lib/libpagedllm.so.$version"
ln -sf "libpagedllm.so.$version" "$prefix/lib/libpagedllm.so.1"
ln -sf libpagedllm.so.1 "$prefix/lib/libpagedllm.so"

# The static library is one object that exports the ABI only. Its other symbols cannot conflict with
# another Rust library in the same program.
functions=$(grep -oE '\bpllm_[a-z_]+\(' include/pagedllm.h | tr -d '(' | sort -u)
ld -r --gc-sections $(printf -- '-u %s ' $functions) --whole-archive "$built/libpagedllm.a" -o "$work/whole.o"
objcopy --wildcard --keep-global-symbol='pllm_*' --strip-debug -R .llvmbc -R .llvmcmd "$work/whole.o" "$work/pagedllm.o"
rm -f "$work/libpagedllm.a"
ar rcs "$work/libpagedllm.a" "$work/pagedllm.o"
install -m 644 "$work/libpagedllm.a" "$prefix/lib/libpagedllm.a"

install -m 644 include/pagedllm.h bindings/cpp/pagedllm.hpp "$prefix/include/"
for template in scripts/package/*.in; do
    name=$(basename "$template" .in)
    sed "s/@VERSION@/$version/g" "$template" > "$work/$name"
    case $name in
        *.pc) install -m 644 "$work/$name" "$prefix/lib/pkgconfig/" ;;
        *.cmake) install -m 644 "$work/$name" "$prefix/lib/cmake/pagedllm/" ;;
    esac
done

tool=build/tool/bin/pagedllm
if [ -f "$tool" ]; then
    mkdir -p "$prefix/bin" "$prefix/share/man/man1"
    install -m 755 -s "$tool" "$prefix/bin/pagedllm"
    install -m 644 docs/pagedllm.1 "$prefix/share/man/man1/"
    install -m 644 examples/pagedllm/licences.txt "$prefix/share/doc/pagedllm/licences-of-tool.txt"
else
    echo "bin/pagedllm is not installed ($tool is missing): run 'make tool' first" >&2
fi

connectors=build/connectors
if [ -f "$connectors/libpagedllm_valkey.so.1" ]; then
    # Without the store for NIXL, which `make install-connectors` installs.
    connectors/install.sh "$connectors" "$prefix" files valkey
else
    echo "the KV stores are not installed ($connectors is missing): run 'make connectors' first" >&2
fi

# Wrappers as source. The host's build compiles or loads them.
install -m 644 bindings/go/README.md "$prefix/share/pagedllm/go/"
install -m 644 bindings/go/go.mod bindings/go/*.h $(ls bindings/go/*.go | grep -vE '_test.go|scripted.go') "$prefix/share/pagedllm/go/"
install -m 644 bindings/python/README.md "$prefix/share/pagedllm/python/"
install -m 644 bindings/python/pagedllm/{*.py,py.typed} "$prefix/share/pagedllm/python/pagedllm/"
install -m 644 bindings/node/{pagedllm.js,pagedllm.d.ts,abi.js,abi.d.ts,runtime.js,package.json,package-lock.json,README.md} "$prefix/share/pagedllm/node/"
install -m 644 bindings/mpi/{pagedllm_mpi.c,pagedllm_mpi.h,README.md} "$prefix/share/pagedllm/mpi/"
install -m 755 bindings/mpi/build.sh "$prefix/share/pagedllm/mpi/"
install -m 644 bindings/java/README.md "$prefix/share/pagedllm/java/"
install -m 644 bindings/java/pagedllm/PagedLlm.java "$prefix/share/pagedllm/java/pagedllm/"

install -m 644 README.md CHANGELOG.md LICENSE docs/manual.md docs/licences.md "$prefix/share/doc/pagedllm/"
python3 scripts/licences.py --texts > "$prefix/share/doc/pagedllm/licences-of-dependencies.txt"
