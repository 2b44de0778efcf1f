#!/usr/bin/env bash
# usage: go.sh
# Builds examples/server-go, and checks it (check.sh), its KV events and its page.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
(cd examples/server-go && go build -o "$build/server-go" . && go build -o "$build/load" ./load)
SERVER_FLAGS="-drain 0s -max-logprobs 100" tests/servers/check.sh "$build/server-go" "$build/load"
SERVER_FLAGS="-drain 0s" PYTHONPATH=build/servers python3 -B tests/servers/kv_events.py "$build/server-go"
SERVER_FLAGS="-drain 0s" PYTHONPATH=build/servers python3 -B tests/servers/page.py "$build/server-go"
