#!/usr/bin/env bash
# usage: with_engine.sh ENGINE MODEL HANGING_DISK
# An engine in one process stores the blocks of a prompt, and engines in later processes read them. All
# have the tokens and the bits of an engine without a store.
set -euo pipefail
engine=$1 model=$2 hanging_disk=$3
work=$(mktemp -d)
server= holder=
stop_server() {
    if [ -n "$server" ]; then kill -CONT "$server" && kill -KILL "$server" && wait "$server" || true; fi 2>/dev/null
    server=
}
stop_holder() {
    if [ -n "$holder" ]; then kill -KILL "$holder" && wait "$holder" || true; fi 2>/dev/null
    holder=
}
trap 'stop_holder; stop_server; rm -rf "$work"' EXIT

# usage: check NAME CONDITION STORE PLACE. The condition is about the variables hits and failures.
check() {
    timeout --signal=KILL 60 "$engine" "$model" "${@:3}" > "$work/output" 2> "$work/statistics" || { cat "$work/statistics"; return 1; }
    local hits failures
    read -r _ hits _ failures < "$work/statistics"
    diff "$work/expected" "$work/output" || { echo "$3: $1: the output differs"; return 1; }
    (($2)) || { echo "$3: $1: $hits hits, $failures failures, expected $2"; return 1; }
    echo "$3: $1: $hits hits, $failures failures"
}

start_server() {
    local program
    rm -f "$work/socket"
    program=$(command -v valkey-server || command -v redis-server)
    "$program" --port 0 --unixsocket "$work/socket" --save "" --dir "$work" --logfile "$work/log" &
    server=$!
    for _ in {1..200}; do [ ! -S "$work/socket" ] || return 0; sleep 0.05; done
    cat "$work/log"
    return 1
}

"$engine" "$model" none > "$work/expected" 2> "$work/statistics" || { cat "$work/statistics"; exit 1; }
[ "$(wc -l < "$work/expected")" = 24 ]

store=$work/store
check "the first process computes" "hits == 0 && failures == 0" files "$store"
check "the second process has hits" "hits == 31 && failures == 0" files "$store"
find "$store" -type f -path '*/?/*' | sort | head -5 | while read -r file; do truncate -s -1 "$file"; done
check "truncated values cost hits" "hits < 31 && failures > 0" files "$store"
check "they are replaced" "hits == 31 && failures == 0" files "$store"
find "$store" -type f -path '*/?/*' | while read -r file; do printf x | dd of="$file" bs=1 seek=1000 conv=notrunc status=none; done
check "damaged values cost hits" "hits == 0 && failures > 0" files "$store"
check "they are replaced" "hits == 31 && failures == 0" files "$store"
"$engine" "$model" files "$store" > "$work/one" 2> /dev/null &
first=$!
check "two processes use the store at the same time" "hits == 31 && failures == 0" files "$store"
wait "$first"
diff "$work/expected" "$work/one"

# The disk hangs in one call, which never returns: each process computes, and ends after 2 seconds and twice
# the timeout. io_uring does not use pread and pwrite, so those are tested with threads.
# usage: check_hanging CALL CONDITION STORE
check_hanging() {
    local begin=$SECONDS
    STORE_TIMEOUT_MS=500 HANGING_CALL=$1 LD_PRELOAD=$hanging_disk check "a disk that hangs in $1 costs hits" "$2" "$3" "$store"
    ((SECONDS - begin <= 20)) || { echo "$3: the engine was freed after $((SECONDS - begin)) seconds only"; return 1; }
}
store=$work/hanging
check_hanging pwritev "hits == 0" files-threads
check "no value was written" "hits == 0 && failures == 0" files-threads "$store"
check_hanging preadv "hits == 0 && failures > 0" files-threads
check_hanging utimensat "hits == 0 && failures > 0" files-threads
check_hanging utimensat "hits == 0 && failures > 0" files
check "the values are still there" "hits == 31 && failures == 0" files "$store"

start_server
check "the first process computes" "hits == 0 && failures == 0" valkey "$work/socket"
check "the second process has hits" "hits == 31 && failures == 0" valkey "$work/socket"
kill -STOP "$server"
check "a server that hangs costs hits" "hits == 0 && failures > 0" valkey "$work/socket"
stop_server
check "a server that is not there costs hits" "hits == 0 && failures > 0" valkey "$work/socket"

# The values of NIXL are in the process that has computed them.
[ -n "${NIXL_LIBRARY:-}" ] || exit 0
start_server
mkfifo "$work/hold"
exec 9<> "$work/hold"
"$engine" "$model" nixl "$work/socket" hold < "$work/hold" > "$work/one" 2> "$work/holds" &
holder=$!
for _ in {1..600}; do [ ! -s "$work/holds" ] || break; sleep 0.05; done
diff "$work/expected" "$work/one"
check "another process has hits" "hits == 31 && failures == 0" nixl "$work/socket"
stop_holder
check "a process that was killed costs hits" "hits == 0" nixl "$work/socket"
stop_server
check "an index that is not there costs hits" "hits == 0 && failures > 0" nixl "$work/socket"
