"""Prefill and decode apart: two prefill engines, two decode engines, a KV store and a router.

It prints the address of the router. For example:
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 40}'
The libraries of the stores are made by `make connectors`. PAGEDLLM_LIBRARY is the path of
libpagedllm.so; default: target/release of this repository.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import router
import web

HERE = pathlib.Path(__file__).resolve().parent
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")


def arguments():
    parser = argparse.ArgumentParser(prog="python3 examples/disaggregated", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=HERE.parent / "model", help="model directory (default: examples/model)")
    parser.add_argument("--store", choices=("valkey", "files"), default="valkey" if SERVER else "files",
                        help="what carries the KV blocks (default here: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port of the router, 0 for a free one (default: %(default)s)")
    parser.add_argument("--connectors", metavar="DIR", help="folder of the libraries of the stores (default: build/connectors)")
    parser.add_argument("--threads", default=max(1, (os.cpu_count() or 1) // 4),
                        help="threads of each engine (default here: %(default)s)")
    parser.add_argument("--store-timeout-ms", default=1000,
                        help="time for which a request waits for the store (default: %(default)s)")
    parser.add_argument("--prefill-wait-ms", type=int, default=5000,
                        help="time for which a decode engine waits for each next block of a prompt, in addition to twice the "
                             "predicted time of the prompt (default: %(default)s)")
    given = parser.parse_args()
    if given.store == "valkey" and SERVER is None:
        parser.error("neither valkey-server nor redis-server is installed; install one, or use --store files")
    return given


def start(command, cleanup):
    process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    return process


def start_store(kind, folder, cleanup):
    """Return the name of the store for the instances, and the id of its process, if it has one."""
    if kind == "files":
        return f"files:{folder}/kv", None
    path = f"{folder}/socket"
    process = start([SERVER, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder, "--logfile", f"{folder}/log",
                     "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"], cleanup)
    while not os.path.exists(path):
        if process.poll() is not None:
            sys.exit(f"{SERVER} has ended with status {process.returncode}; run it alone to see why, or use --store files")
        time.sleep(0.01)
    return f"valkey:{path}", process.pid


def start_instances(given, store, cleanup):
    options = ["--threads", given.threads, "--store-timeout-ms", given.store_timeout_ms]
    options += ["--connectors", given.connectors] if given.connectors else []
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    processes = [start([sys.executable, HERE / "instance.py", name, given.model, store, *options], cleanup) for name in names]
    for name, process in zip(names, processes):
        port = process.stdout.readline().decode().strip()
        if not port:
            sys.exit(f"the engine {name} has not started; its status is {process.wait()}")
        yield router.Instance(name, f"http://127.0.0.1:{port}", process.pid)


def main():
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="disaggregated-"))
        store, pid = start_store(given.store, folder, cleanup)
        instances = list(start_instances(given, store, cleanup))
        router.Handler.router, router.Handler.store = router.Router(instances, given.prefill_wait_ms), {"name": store, "pid": pid}
        try:
            server = web.Server(("127.0.0.1", given.port), router.Handler)
        except OSError as error:
            sys.exit(f"port {given.port} cannot be used ({error.strerror}); pass another --port, or 0 for a free one")
        for one in instances:
            print(f"{one.name}: {one.url}, process {one.pid}")
        print(f"store: {store}\nrouter: http://127.0.0.1:{server.server_port}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
