#!/usr/bin/env bash
# usage: go.sh TREE MODEL EXPECTED
# Fetches the Go module by its version, as users do, and builds programs with the installed library in
# TREE: shared, found by pkg-config, and static.
set -euo pipefail
tree=$(realpath "$1") model=$(realpath "$2") expected=$(realpath "$3")
root=$(cd "$(dirname "$0")/../.." && pwd)
version=v$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
module=github.com/libpagedllm/libpagedllm
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
# The host's build environment must not find the library of this tree.
unset CGO_CFLAGS CGO_LDFLAGS GOFLAGS
export GOSUMDB=off

# The proxy: Go itself makes its files from a repository with the tag of RELEASING.md. git takes that
# repository in place of the one on GitHub.
mkdir -p "$work/repository/bindings"
cp -r "$root/bindings/go" "$work/repository/bindings/"
cp "$root/LICENSE" "$work/repository/"
git -C "$work/repository" init -q
git -C "$work/repository" add -A
git -C "$work/repository" -c user.name=test -c user.email=test@localhost -c commit.gpgsign=false commit -qm release
git -C "$work/repository" tag "bindings/go/$version"
env GIT_CONFIG_COUNT=1 "GIT_CONFIG_KEY_0=url.file://$work/repository.insteadOf" "GIT_CONFIG_VALUE_0=https://$module" \
    GOPROXY=direct "GOMODCACHE=$work/cache" go mod download "$module/bindings/go@$version"

started=$(date +%s%N)
export GOPROXY="file://$work/cache/cache/download" "GOMODCACHE=$work/modules"
mkdir "$work/program"
cd "$work/program"
cp "$root/examples/go/hello/main.go" .
go mod init example.com/program 2>/dev/null
go get "$module/bindings/go@$version" 2>/dev/null
export PKG_CONFIG_PATH=$tree/lib/pkgconfig
go build -tags pagedllm_pkgconfig -o shared .
LD_LIBRARY_PATH=$tree/lib ./shared "$model" 2>/dev/null | diff - "$expected"
milliseconds=$((($(date +%s%N) - started) / 1000000))
CGO_CFLAGS="-O2 -I$tree/include" CGO_LDFLAGS="-L$tree/lib" go build -tags pagedllm_static -o static .
./static "$model" 2>/dev/null | diff - "$expected"
if ldd static | grep -q libpagedllm; then echo "the static program loads libpagedllm" >&2; exit 1; fi
if ./shared "$model" 2> error; then echo "the program ran without its library" >&2; exit 1; fi
grep -qF libpagedllm.so.1 error || { cat error >&2; exit 1; }
bytes=$(stat -c %s "$work/cache/cache/download/$module/bindings/go/@v/$version.zip")
echo "go: $module/bindings/go@$version, $bytes bytes: fetched, built and run in $milliseconds ms"
