#!/usr/bin/env bash
# Cost of polling from C++ and Go; benches/README.md describes it. Run it on an idle machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --locked --example scripted
out=$PWD/build/polling
mkdir -p "$out"
# The library with the scripted engine replaces the library.
cp target/release/examples/libscripted.so "$out/libpagedllm.so.1"
ln -sf libpagedllm.so.1 "$out/libpagedllm.so"
link="-L$out -lpagedllm -Wl,-rpath,$out"
c++ -std=c++17 -O2 -Wall -Wextra -Werror -Iinclude -Ibindings/cpp benches/polling/poll.cpp -o "$out/poll_cpp" $link -pthread
(cd benches/polling/go && CGO_CFLAGS="-I$PWD/../../../include -O2" CGO_LDFLAGS="-L$out -Wl,-rpath,$out" go build -tags pagedllm_scripted -o "$out/poll_go" .)
echo "| Host | How | Streams | Time between steps | Events per second | Host CPU per event, us |"
echo "| --- | --- | --- | --- | --- | --- |"
"$out/poll_cpp"
"$out/poll_go"
