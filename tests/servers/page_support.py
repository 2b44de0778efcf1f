"""What the tests of the page need besides the browser: a server that they control, and load."""

import http.server
import json
import queue
import threading
import urllib.parse

import hostile

PROMPT = "Once upon a time, there was a brave dog named Hugo. Hugo lived in a village. One day, Hugo found a red ball. "
SNAPSHOT = {
    "time": 12.5, "block_size": 16, "layer_groups": 1,
    "counts": {"waiting": 1, "running": 2, "paused": 0, "idle": 0, "swapped": 1, "steps": 812, "generated_tokens": 9000, "prompt_tokens": 1000, "prompt_tokens_cached": 200, "prefix_queries": 1200, "prefix_hits": 300, "preemptions": 4},
    "pool": {"blocks": 40, "free": 20, "cached": 9, "used": 11, "runs": [[7, "used", 2, 41], [9, "cached"], [3, "used", 1, 42], [1, "used", 1, 0], [20, "free"]]},
    "host_tier": {"blocks": 8, "free": 6, "cached": 0, "used": 2, "runs": [[2, "used", 1, 43], [6, "free"]]},
    "sequences": [
        {"sequence": 43, "request": 43, "state": "waiting", "tokens": 30, "max_len": 60, "computed_tokens": 30, "cached_tokens": 0, "generated_tokens": 5, "blocks": 2, "tier": "host"},
        {"sequence": 41, "request": 41, "state": "running", "tokens": 120, "max_len": 400, "computed_tokens": 119, "cached_tokens": 32, "generated_tokens": 20, "blocks": 8, "tier": "pool"},
        {"sequence": 42, "request": 41, "state": "running", "tokens": 150, "max_len": 400, "computed_tokens": 149, "cached_tokens": 32, "generated_tokens": 50, "blocks": 10, "tier": "pool"},
    ],
    "sequences_omitted": 5,
    "steps": [
        {"start": 12.1, "seconds": 0.002, "prefill_tokens": 64, "decode_tokens": 1, "sequences": 2},
        {"start": 12.2, "seconds": 0.0003, "prefill_tokens": 0, "decode_tokens": 3, "sequences": 3},
    ],
}


def delta(**members):
    return {"choices": [{"index": 0, "delta": members, "finish_reason": None}]}


def call_delta(arguments, **members):
    function = {"arguments": arguments, **({"name": members.pop("name")} if "name" in members else {})}
    return delta(tool_calls=[{"index": 0, "function": function, **members}])


class Stub(http.server.ThreadingHTTPServer):
    """A server with the page of the real one. The test decides when each event of an answer is sent."""

    daemon_threads = True

    def __init__(self, server):
        super().__init__(("127.0.0.1", 0), StubHandler)
        _, self.page_headers, self.page = server.ask("/")
        self.events = queue.Queue()
        self.requests = []
        self.model = "tiny"
        self.snapshot = SNAPSHOT
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def send(self, *events):
        for event in events:
            self.events.put(event)

    def stop(self):
        self.shutdown()
        self.server_close()


class StubHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, kind, body, headers=()):
        self.send_response(200)
        for name, value in [("Content-Type", kind), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path
        if path == "/":
            names = ["Content-Security-Policy", "X-Content-Type-Options"]
            return self.answer("text/html; charset=utf-8", self.server.page, [(name, self.server.page_headers[name]) for name in names])
        value = self.server.snapshot if path == "/engine/snapshot" else {"data": [{"id": self.server.model, "max_model_len": 1024}]}
        self.answer("application/json", json.dumps(value).encode())

    def do_POST(self):
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer("text/event-stream", b"")
        while (event := self.server.events.get()) is not None:
            try:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            except OSError:
                return
        self.wfile.write(b"data: [DONE]\n\n")


class Load:
    """Streams that keep an engine busy until the end of a `with` statement."""

    def __init__(self, server, *bodies):
        self.server, self.ended = server, threading.Event()
        self.streams = [hostile.Background(lambda body=body: self.run(body)) for body in bodies]

    def run(self, body):
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 1, "stream": True, **body}
        while not self.ended.is_set():
            connection = self.server.connect()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            while not self.ended.is_set() and answer.read1(65536):
                pass
            connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended.set()
        for stream in self.streams:
            stream.join(60)
        self.server.wait_for(lambda: self.server.running() == 0)
