#!/usr/bin/env bash
# usage: check.sh PROGRAM LOAD [WITHOUT]
# Checks a server program with bad input, with the official clients, and with the load of
# examples/server-go/load. SERVER_FLAGS has further flags of the program. WITHOUT lists the endpoints that it lacks, separated by commas.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=$1
load=$2
without=${3:-}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
fail() {
    [ ! -e "$work/log" ] || tail -n 20 "$work/log" >&2
    echo "$1" >&2
    exit 1
}

python3 -B tests/servers/hostile.py "$program" || fail "the tests of bad input failed"

PAGEDLLM_API_KEYS=test "$program" -model tiny=examples/model -format hermes -address 127.0.0.1:0 -kv-bytes 256MiB -write-timeout 5s ${SERVER_FLAGS:-} 2> "$work/log" &
server=$!
for _ in $(seq 300); do
    url=$(sed -n 's|.*msg="listening on \(http://[^"]*\)".*|\1|p' "$work/log")
    [ -z "$url" ] || break
    kill -0 "$server" 2>/dev/null || fail "the server has ended"
    sleep 0.1
done
[ -n "$url" ] || fail "the server did not start within 30 s"

PYTHONPATH=build/servers python3 -B tests/servers/conformance.py "$url" --key test --model tiny ${without:+--without "$without"} || fail "the tests with Python clients failed"
node_folder=tests/servers/node
[ "$node_folder/node_modules/.package-lock.json" -nt "$node_folder/package-lock.json" ] || npm ci --prefix "$node_folder" --ignore-scripts --no-audit --no-fund --loglevel=error
SERVER_URL=$url SERVER_KEY=test SERVER_WITHOUT=$without node --test "$node_folder"/*.test.js || fail "the tests with Node's client failed"
"$load" -url "$url" -key test -process "$server" -streams "${STREAMS:-200}" -vanishing "${VANISHING:-40}" || fail "the load failed"

# A signal ends the server without an error.
kill -TERM "$server"
wait "$server" || fail "the server ended with an error"
server=
echo "$(basename "$program"): bad input, conformance, load and shutdown passed"
