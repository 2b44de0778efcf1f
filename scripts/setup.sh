#!/usr/bin/env bash
# Brings what the build needs to a fresh Debian or Ubuntu: a C and C++ compiler, python3, Rust of the stated minimum version.
# What it may not install itself (no root, no network) it names with the exact line.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$HOME/.cargo/bin:$PATH"

missing=()
command -v cc >/dev/null && command -v c++ >/dev/null || missing+=(build-essential)
command -v python3 >/dev/null || missing+=(python3)
command -v cargo >/dev/null || command -v curl >/dev/null || missing+=(curl ca-certificates)

if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}"
    else
        echo "missing: ${missing[*]}. Run: sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
fi

needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rustup_line="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
if ! command -v cargo >/dev/null; then
    echo "installing Rust with rustup into $HOME/.cargo"
    bash -o pipefail -c "$rustup_line" || { echo "Rust $needed or newer is missing. Run: $rustup_line" >&2; exit 1; }
fi
have=$(cargo --version | cut -d' ' -f2)
if [ "$(printf '%s\n%s\n' "$needed" "$have" | sort -V | head -n 1)" != "$needed" ]; then
    echo "Rust $have is installed, $needed or newer is needed. Run: rustup update stable   (without rustup: $rustup_line)" >&2
    exit 1
fi
# The linters come with rustup's default profile; a minimal one lacks them.
if ! cargo clippy --version >/dev/null 2>&1 || ! cargo fmt --version >/dev/null 2>&1; then
    rustup component add clippy rustfmt || { echo "clippy and rustfmt are missing. Run: rustup component add clippy rustfmt" >&2; exit 1; }
fi
