#!/usr/bin/env bash
# usage: setup.sh demo|test|tool|tsan|paper|wheel|connectors|ptx
# Installs the packages and tools for `make lib`, `make test`, `make tool`, `make test-tsan`, `make paper`, `make wheel`, `make connectors` or `make test-ptx` on Debian or Ubuntu.
# If it cannot install one (no root, no network), it prints the command that does.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-test}
export PATH="$HOME/.cargo/bin:$HOME/.local/go/bin:$PATH"

missing=()
command_of() { command -v "$1" >/dev/null || missing+=("${@:2}"); }
header_of() { [ -e "/usr/include/$1" ] || missing+=("$2"); }

install_missing() {
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
    else
        echo "missing: ${missing[*]}. Run: sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
    missing=()
}

older() { [ "$1" != "$2" ] && [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

command_of cc build-essential
command_of c++ build-essential
command_of cargo curl ca-certificates
if [ "$what" = test ]; then
    command_of curl curl ca-certificates
    command_of python3 python3
    command_of git git
    command_of cmake cmake
    command_of clang++ clang
    command_of valgrind valgrind
    command_of abidiff abigail-tools
    command_of node nodejs
    command_of npm npm
    command_of dpkg-deb dpkg-dev
    command_of chromium chromium
    command_of groff groff-base
    [ -e /usr/share/i18n/locales/de_DE ] || missing+=(locales)
    header_of gtest/gtest.h libgtest-dev
    header_of asio.hpp libasio-dev
    header_of uv.h libuv1-dev
    header_of boost/beast.hpp libboost-dev
    command_of mpicc.openmpi openmpi-bin libopenmpi-dev
    command_of mpirun.openmpi openmpi-bin
    command_of mpicc.mpich mpich libmpich-dev
    python3 -c "import ensurepip" 2>/dev/null || missing+=(python3-venv)
fi
if [ "$what" = test ] || [ "$what" = tool ]; then
    header_of CLI/CLI.hpp libcli11-dev
    header_of rapidjson/document.h rapidjson-dev
fi
if [ "$what" = test ] || [ "$what" = connectors ]; then
    command_of pkg-config pkg-config
    header_of liburing.h liburing-dev
    header_of hiredis/hiredis.h libhiredis-dev
fi
# Newer releases of Debian and Ubuntu have Valkey, older ones have Redis only.
if [ "$what" = test ] && ! command -v valkey-server >/dev/null && ! command -v redis-server >/dev/null; then
    apt-cache show valkey-server >/dev/null 2>&1 && missing+=(valkey-server) || missing+=(redis-server)
fi
[ "$what" != tsan ] || command_of clang clang
[ "$what" != paper ] && [ "$what" != wheel ] && [ "$what" != ptx ] || command_of python3 python3
install_missing
if [ "$what" = test ] || [ "$what" = paper ] || [ "$what" = wheel ] || [ "$what" = ptx ]; then
    python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
    install_missing
fi
# Installs the Python packages of a requirements file into a folder of build/. They do not change the
# system's Python. The third argument has options of pip.
python_packages() {
    cmp -s "$1" "build/$2/requirements.txt" && return
    pip_line="python3 -m pip install --quiet --upgrade ${3:-} --target build/$2 -r $1"
    $pip_line || { echo "Python packages are missing. Run: $pip_line" >&2; exit 1; }
    cp "$1" "build/$2/requirements.txt"
}
if [ "$what" = test ]; then
    # The sanitizers of clang are in a separate package, named after the version of clang.
    clang_version=$(clang -dumpversion | cut -d. -f1)
    [ -n "$(find "$(clang -print-resource-dir)" -name '*asan*.a' -print -quit 2>/dev/null)" ] || missing+=("libclang-rt-$clang_version-dev")
    install_missing
fi

needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rustup_line="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
if ! command -v cargo >/dev/null; then
    echo "installing Rust with rustup into $HOME/.cargo"
    bash -o pipefail -c "$rustup_line" || { echo "Rust $needed or newer is missing. Run: $rustup_line" >&2; exit 1; }
fi
have=$(cargo --version | cut -d' ' -f2)
if older "$have" "$needed"; then
    echo "Rust $have is installed, $needed or newer is needed. Run: rustup update stable   (without rustup: $rustup_line)" >&2
    exit 1
fi
if [ "$what" = tsan ]; then
    # The standard library is built with the sanitizer too, which needs its source and an unstable option.
    nightly_line="rustup toolchain install nightly --profile minimal --component rust-src"
    if ! [ -d "$(rustc +nightly --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library" ]; then
        $nightly_line || { echo "a nightly toolchain with rust-src is missing. Run: $nightly_line" >&2; exit 1; }
    fi
fi
[ "$what" != wheel ] && [ "$what" != test ] || python_packages scripts/wheel/requirements.txt wheel-tools
[ "$what" != paper ] || python_packages benches/paper/requirements.txt paper
[ "$what" != ptx ] && [ "$what" != test ] || python_packages tests/ptx/requirements.txt ptx
[ "$what" != ptx ] && [ "$what" != test ] || scripts/cuda-toolkit.sh
[ "$what" = test ] || exit 0

# The minimal profile of rustup has no clippy and no rustfmt.
if ! cargo clippy --version >/dev/null 2>&1 || ! cargo fmt --version >/dev/null 2>&1; then
    rustup component add clippy rustfmt || { echo "clippy and rustfmt are missing. Run: rustup component add clippy rustfmt" >&2; exit 1; }
fi

needed=$(sed -n 's/^go //p' bindings/go/go.mod)
case $(uname -m) in aarch64) architecture=arm64 ;; *) architecture=amd64 ;; esac
go_line="mkdir -p ~/.local && curl -sSfL https://go.dev/dl/go1.23.12.linux-$architecture.tar.gz | tar -C ~/.local -xz"
have=$(go env GOVERSION 2>/dev/null | sed 's/^go//' || true)
if [ -z "$have" ] || older "$have" "$needed"; then
    echo "installing Go into $HOME/.local/go"
    bash -o pipefail -c "$go_line" || { echo "Go $needed or newer is missing. Run: $go_line" >&2; exit 1; }
fi
# Random tests compare with these packages.
python_packages tests/data/templates/requirements.txt references
python_packages tests/servers/requirements.txt servers
python_packages packaging/conan/requirements.txt conan
tests/connectors/nixl.sh build/nixl || { echo "NIXL is missing. Run: tests/connectors/nixl.sh build/nixl" >&2; exit 1; }
# Only the file of the package is needed.
python_packages tests/data/published/requirements.txt models --no-deps
# Java 22 or newer, which older releases of Debian and Ubuntu do not have.
java_release=$(javac -version 2>/dev/null | sed -n 's/^javac \([0-9]*\).*/\1/p')
if [ "${java_release:-0}" -lt 22 ]; then
    python_packages bindings/java/tests/requirements.txt java
    command_of mvn maven
    install_missing
    ecj=org.eclipse.jdt:ecj:3.44.0
    ecj_line="mvn -q -B dependency:copy -Dartifact=$ecj -DoutputDirectory=$PWD/build/java"
    [ -e "build/java/ecj-${ecj##*:}.jar" ] || $ecj_line || { echo "a compiler for Java 22 is missing. Run: $ecj_line" >&2; exit 1; }
fi
if older "$(node --version | sed 's/^v//')" 18; then
    echo "Node $(node --version) is installed, 18 or newer is needed; install it from https://nodejs.org" >&2
    exit 1
fi
