#!/usr/bin/env bash
# usage: node-package.sh OUT_DIR
# Makes an npm package with the built library, for the machine that runs it.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
case $(uname -m) in x86_64) cpu=x64 ;; aarch64) cpu=arm64 ;; *) cpu=$(uname -m) ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp bindings/node/{pagedllm.js,pagedllm.d.ts,abi.js,abi.d.ts,runtime.js,README.md} LICENSE "$work/"
strip --strip-unneeded -o "$work/libpagedllm.so" target/release/libpagedllm.so
python3 scripts/licences.py --texts > "$work/licences-of-dependencies.txt"
# `prepare` is for the folder in the repository. npm refuses to install the package on another machine.
node -e '
  const [version, cpu, out] = process.argv.slice(1);
  const { private: _, scripts, ...description } = require("./bindings/node/package.json");
  Object.assign(description, { version, cpu: [cpu], libc: ["glibc"] });
  description.files.push("libpagedllm.so", "licences-of-dependencies.txt");
  require("fs").writeFileSync(out, JSON.stringify(description, null, 2) + "\n");
' "$version" "$cpu" "$work/package.json"
rm -f "$out"/pagedllm-*.tgz
npm pack --silent --pack-destination "$out" "$work" >/dev/null
ls -l "$out"/pagedllm-*.tgz | awk '{print $5, $9}'
