#!/usr/bin/env bash
# usage: go.sh
# Builds examples/server-go, starts it with the bundled model, and checks it with the official clients
# and with the load of examples/server-go/load.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
(cd examples/server-go && go build -o "$work/server" . && go build -o "$work/load" ./load)

PAGEDLLM_API_KEYS=test "$work/server" -model tiny=examples/model -format hermes -address 127.0.0.1:0 -kv-bytes 256MiB -write-timeout 5s -drain 0s -max-logprobs 100 2> "$work/log" &
server=$!
for _ in $(seq 300); do
    url=$(sed -n 's|.*msg="listening on \(http://[^"]*\)".*|\1|p' "$work/log")
    [ -z "$url" ] || break
    kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.1
done
[ -n "$url" ] || { echo "the server did not start within 30 s" >&2; cat "$work/log" >&2; exit 1; }

PYTHONPATH=build/servers python3 -B tests/servers/conformance.py "$url" --key test --model tiny || { tail -n 20 "$work/log" >&2; exit 1; }
(cd tests/servers/node && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error)
SERVER_URL=$url SERVER_KEY=test node --test tests/servers/node/*.test.js || { tail -n 20 "$work/log" >&2; exit 1; }
"$work/load" -url "$url" -key test -process "$server" -streams "${STREAMS:-200}" -vanishing "${VANISHING:-40}" || { tail -n 20 "$work/log" >&2; exit 1; }

# A signal ends the server without an error.
kill -TERM "$server"
wait "$server"
server=
echo "server-go: conformance, load and shutdown passed"
