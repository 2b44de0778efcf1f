#!/usr/bin/env python3
"""Checks a server with bad input, hostile clients, full queues and signals.

usage: hostile.py PROGRAM [TEST ...]

PROGRAM is server-go or server-cpp, or another program with the same flags. The script starts it with the
bundled model, and with the further flags in SERVER_FLAGS.
"""

import functools
import http.client
import json
import os
import pathlib
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from random import Random

MODEL = pathlib.Path(__file__).parents[2] / "examples/model"
KEY = "test"
FRANCE = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4, "stop": "."}
PARIS = " Paris"
CHAT = {"messages": [{"role": "user", "content": "What is 7 + 5?"}], "temperature": 0}
# Ends only at its length, after some hundred milliseconds or more.
LONG = {"prompt": "Count", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stop": None}
# 32 sequences of the maximum length.
MANY = {**LONG, "max_tokens": 1000, "n": 32}
# An answer with log probabilities is larger than the buffers of a connection.
HUGE = {**CHAT, "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 100}
FUNCTION = {"type": "function", "function": {"name": "f"}}
program = ""

# Path, body, status, code of the error.
BAD_INPUT = [
    ("/v1/completions", '{"prompt": "a", ', 400, None),
    ("/v1/completions", '{"prompt": "a"} {}', 400, None),
    ("/v1/completions", '{"prompt": {"a": 1}}', 400, None),
    ("/v1/completions", '{"prompt": ""}', 400, None),
    ("/v1/completions", '{"prompt": []}', 400, None),
    ("/v1/completions", '{"prompt": [-1]}', 400, None),
    ("/v1/completions", '{"prompt": ["a", 1]}', 400, None),
    ("/v1/completions", '{"prompt": [99999]}', 400, None),
    ("/v1/completions", '{"prompt": "a", "n": -1}', 400, None),
    ("/v1/completions", '{"prompt": "a", "n": "2"}', 400, None),
    ("/v1/completions", '{"prompt": "a", "n": 1.5}', 400, None),
    ("/v1/completions", '{"prompt": "a", "n": 1000000}', 400, None),
    ("/v1/completions", '{"prompt": "a", "n": 99999999999999999999}', 400, None),
    ("/v1/completions", '{"prompt": "a", "max_tokens": -1}', 400, None),
    ("/v1/completions", '{"prompt": "a", "top_p": 2}', 400, None),
    ("/v1/completions", '{"prompt": "a", "temperature": 1e400}', 400, None),
    ("/v1/completions", '{"prompt": "a", "temperature": NaN}', 400, None),
    ("/v1/completions", '{"prompt": "a", "seed": "x"}', 400, None),
    ("/v1/completions", '{"prompt": "a", "stop": 5}', 400, None),
    ("/v1/completions", '{"prompt": "a", "logit_bias": {"x": 1}}', 400, None),
    ("/v1/completions", '{"prompt": "a", "logprobs": 1000}', 400, None),
    ("/v1/completions", '{"prompt": "a", "logprobs": 100, "n": 64, "max_tokens": 1000}', 400, None),
    ("/v1/completions", '{"prompt": "a", "stream_options": {"include_usage": true}}', 400, None),
    ("/v1/completions", '{"prompt": "a", "suffix": "b"}', 400, "unsupported_parameter"),
    ("/v1/completions", '{"prompt": "a", "colour": 1}', 400, "unknown_parameter"),
    ("/v1/completions", '{"prompt": "a", "dry": {"colour": 1}}', 400, "unknown_parameter"),
    ("/v1/completions", '{"prompt": "a", "model": "none"}', 404, "model_not_found"),
    ("/v1/completions", '{"prompt": "' + "a b " * 5000 + '"}', 400, "context_length_exceeded"),
    ("/v1/completions", '{"prompt": "a", "structured_outputs": {"regex": "("}}', 400, None),
    ("/v1/completions", '{"prompt": "a", "structured_outputs": {"regex": "a", "json_object": true}}', 400, None),
    ("/v1/completions", b'{"prompt": "\xff"}', 400, None),
    ("/v1/completions", "[" * 100000, 400, None),
    ("/v1/completions", '{"a":' * 50000, 400, None),
    ("/v1/completions", "", 400, None),
    ("/v1/completions", '{"prompt": "a", "logit_bias": {"5": 1e300}}', 400, None),
    ("/v1/completions", '{"prompt": "a", "presence_penalty": 1e300}', 400, None),
    ("/v1/completions", '{"prompt": "a", "deadline_ms": -5}', 400, None),
    ("/v1/completions", '{"prompt": "a", "model": "' + "x" * 100_000 + '"}', 404, "model_not_found"),
    ("/v1/chat/completions", "{}", 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "n": 2_000_000_000}), 400, None),
    ("/v1/chat/completions", '{"messages": [{"role": "king", "content": "a"}]}', 400, None),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}', 400, "unsupported_parameter"),
    ("/v1/chat/completions", '{"messages": "hello"}', 400, None),
    ("/v1/chat/completions", '{"messages": [1]}', 400, None),
    ("/v1/chat/completions", '{"messages": [], "tools": [{"type": "web"}]}', 400, "unsupported_parameter"),
    ("/v1/chat/completions", json.dumps({**CHAT, "top_logprobs": 3}), 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "response_format": {"type": "xml"}}), 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "response_format": {"type": "json_schema"}}), 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}), 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "tool_choice": "required"}), 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "tool_choice": "perhaps"}), 400, None),
    ("/v1/chat/completions", json.dumps({**CHAT, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}), 400, None),
    ("/tokenize", "{}", 400, None),
    ("/detokenize", '{"tokens": [4000000000]}', 400, None),
    ("/nothing", "{}", 404, None),
]


class Server:
    """A process of the program under test."""

    def __init__(self, *flags, descriptors=None, keys="other " + KEY):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [program, "-model", f"tiny={MODEL}", "-format", "hermes", "-address", "127.0.0.1:0", "-kv-bytes", "256MiB", *os.environ.get("SERVER_FLAGS", "").split(), *flags]
        limit = descriptors and functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        self.process = subprocess.Popen(command, stderr=self.log, env={**os.environ, "PAGEDLLM_API_KEYS": keys}, preexec_fn=limit)
        for _ in range(600):
            found = re.search(r"listening on http://127.0.0.1:(\d+)", self.text())
            if found or self.process.poll() is not None:
                break
            time.sleep(0.1)
        if not found:
            self.process.kill()
            raise RuntimeError("the server did not start within 60 s:\n" + self.text())
        self.port = int(found[1])

    def text(self):
        return pathlib.Path(self.log.name).read_text()

    def stop(self):
        """Ends the process, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path, body=None, method=None, **headers):
        """Returns the status, the headers and the body of an answer."""
        connection = self.connect()
        try:
            body = json.dumps(body) if isinstance(body, dict) else body
            headers = {"Authorization": "Bearer " + KEY, "Content-Type": "application/json", **headers}
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def complete(self, **options):
        status, _, body = self.ask("/v1/completions", {**FRANCE, **options})
        assert status == 200, body
        return json.loads(body)["choices"][0]["text"]

    def raw(self, data, buffer=None):
        connection = socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    def metric(self, name, label=""):
        text = self.ask("/metrics")[2].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(name + r"[ {]", line) and label in line)

    def wait_for(self, condition):
        for _ in range(600):
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError("the condition did not become true within 30 s\n" + self.text()[-2000:])

    def running(self):
        return self.metric("pagedllm_num_requests_running")

    def in_progress(self):
        return self.metric("pagedllm_http_requests_in_progress")

    def aborted(self):
        return self.metric("pagedllm_request_success_total", 'finished_reason="abort"')


def raw_post(body, path="/v1/completions", headers=""):
    """Returns the bytes of a request."""
    text = body if isinstance(body, str) else json.dumps(body)
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n{headers}\r\n{text}").encode()


def huge_post():
    return raw_post(HUGE, "/v1/chat/completions")


class Background(threading.Thread):
    """A call whose result is read later."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call = call
        self.start()

    def run(self):
        self.result = self.call()

    def wait(self):
        self.join(60)
        return self.result


class Hostile(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("-max-body", "1MiB", "-header-timeout", "1s", "-read-timeout", "1s", "-write-timeout", "1s", "-max-results", "64")
        cls.addClassCleanup(cls.server.stop)

    def tearDown(self):
        self.assertIsNone(self.server.process.poll(), self.server.text())
        self.assertEqual(self.server.complete(), PARIS)

    def test_bad_input_is_refused_and_other_streams_continue(self):
        alone = self.server.complete(**LONG)
        other = Background(lambda: self.server.ask("/v1/completions", {**LONG, "stream": True}))
        for path, body, status, code in BAD_INPUT:
            answer = self.server.ask(path, body)
            error = json.loads(answer[2])["error"]
            self.assertEqual((answer[0], error["code"]), (status, code), (body[:100], error))
            self.assertTrue(0 < len(error["message"]) < 1000, body[:100])
        events = [line[6:] for line in other.wait()[2].decode().splitlines() if line.startswith("data: ")]
        self.assertEqual(events.pop(), "[DONE]")
        self.assertEqual("".join(json.loads(event)["choices"][0]["text"] for event in events), alone)

    def test_random_changes_of_valid_requests_are_answered(self):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        messages = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12"}]}]
        seeds = [
            ("/v1/completions", {**FRANCE, "n": 2, "logit_bias": {"5": 1}, "logprobs": 2, "echo": True, "dry": {"multiplier": 0.5}}),
            ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "beam": {"width": 2}, "prompt_logprobs": 1}),
            ("/v1/chat/completions", {"messages": messages, "tools": [tool], "tool_choice": "auto", "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
            ("/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 3, "stream": True}),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": tool["function"]["parameters"]}}}),
            ("/tokenize", {"messages": messages, "return_token_strs": True}),
            ("/detokenize", {"tokens": [1, 2, 3]}),
        ]
        random = Random(1)
        pieces = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b"1e9", b"true", b'""', b"\\u0000", b"\\ud800", b"\xff", b"{}", b"[]", b'"stream":true,']
        statuses = set()
        for i in range(300):
            path, body = seeds[i % len(seeds)]
            text = bytearray(json.dumps(body).encode())
            for _ in range(random.randint(1, 3)):
                at = random.randrange(len(text))
                text[at:at + random.choice((0, 1, 1, 5))] = random.choice(pieces)
            status, _, answer = self.server.ask(path, bytes(text))
            self.assertTrue(answer)
            statuses.add(status)
            self.assertIn(status, (200, 400, 404, 429), (bytes(text), answer))
        self.assertLessEqual({200, 400}, statuses)

    def test_a_huge_body_is_refused_without_being_read(self):
        for chunked in (False, True):
            connection = self.server.connect()
            try:
                body = (bytes(1 << 20) for _ in range(100)) if chunked else bytes(100 << 20)
                headers = {"Authorization": "Bearer " + KEY, "Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", body, headers, encode_chunked=chunked)
                self.assertEqual(connection.getresponse().status, 413)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the server has closed the connection while the client was writing
            finally:
                connection.close()

    def test_slow_senders_are_disconnected(self):
        whole = raw_post(FRANCE)
        for name, data, begin in [
            ("nothing", b"", b""),
            ("nothing of the header's end", whole[:30], b""),
            ("a header without its body", whole[:-20], b"HTTP/1.1 408 "),
            ("no HTTP", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n", b"HTTP/1.1 400 "),
            ("a refused key", whole[:-20].replace(KEY.encode(), b"none"), b""),
        ]:
            start = time.monotonic()
            with self.server.raw(data) as connection:
                answer = b""
                while data := connection.recv(65536):
                    answer += data
            self.assertTrue(answer.startswith(begin), (name, answer))
            self.assertLess(time.monotonic() - start, 20, name)

    def test_a_drop_in_each_second_does_not_renew_the_deadline(self):
        start = time.monotonic()
        with self.server.raw(b"GET /health HTTP/1.1\r\n") as connection, self.assertRaises((BrokenPipeError, ConnectionResetError)):
            for i in range(100):
                connection.sendall(f"X-{i}: 1\r\n".encode())
                time.sleep(0.2)
        self.assertLess(time.monotonic() - start, 15)

    def test_pipelined_requests_are_answered_in_order(self):
        data = raw_post({**FRANCE, "stream": True}) + raw_post(FRANCE) + raw_post('{"n": ') + raw_post(FRANCE, headers="Connection: close\r\n")
        with self.server.raw(data) as connection:
            stream = connection.makefile("rb").read().decode()
        statuses = [int(status) for status in re.findall(r"HTTP/1\.1 (\d+) ", stream)]
        self.assertEqual(statuses, [200, 200, 400, 200], stream)
        self.assertLess(stream.index("data: [DONE]"), stream.index('"text_completion"', stream.index("data: [DONE]")))

    def test_many_pipelined_requests_are_answered(self):
        count = 300
        data = raw_post({**FRANCE, "max_tokens": 1}) * count + raw_post(FRANCE, headers="Connection: close\r\n")
        with self.server.raw(b"") as connection:
            sender = Background(lambda: connection.sendall(data))
            stream = connection.makefile("rb").read()
            sender.wait()
        self.assertEqual(stream.count(b"HTTP/1.1 200 "), count + 1)

    def test_a_body_that_no_endpoint_needs_is_not_waited_for(self):
        # A body of /health needs no key, and does not count against -max-bodies.
        with self.server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n") as connection:
            self.assertRegex(connection.makefile("rb").readline(), b"^HTTP/1.1 (200|413) ")

    def test_errors_and_the_log_are_text_whatever_a_client_sends(self):
        for path in ("/%ff", "/v1/models/%c3", "/%0aFAKE%1b%5b2J%7f", "/v1/models/" + "x" * 20_000):
            status, _, body = self.server.ask(path, "{}" if path == "/%ff" else None)
            self.assertEqual(status, 404)
            self.assertLess(len(json.loads(body.decode())["error"]["message"]), 1000)
        status, _, body = self.server.ask("/v1/completions", FRANCE, **{"Content-Type": b"text/\xff"})
        self.assertEqual(status, 415)
        self.assertIn("text/", json.loads(body.decode())["error"]["message"])
        self.assertIn("FAKE", self.server.text())
        for line in self.server.text().splitlines():
            self.assertRegex(line, r"^time=[^\x00-\x1f\x7f]*$")

    def test_small_requests_do_not_wait_for_large_ones(self):
        large = raw_post({"prompt": "a b " * 50_000}, "/tokenize")
        clients = [self.server.raw(large) for _ in range(16)]
        self.assertEqual(self.server.ask("/health")[0], 200)
        answered = select.select(clients, [], [], 0)[0]
        for client in clients:
            self.assertRegex(client.makefile("rb").readline(), b"^HTTP/1.1 200 ")
            client.close()
        self.assertLess(len(answered), 12)

    def test_keys_are_required(self):
        for headers, status in [
            ({"Authorization": "Bearer " + KEY}, 200), ({"Authorization": "bearer other"}, 200), ({"Authorization": "", "X-Api-Key": KEY}, 200),
            ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer "}, 401), ({"Authorization": KEY}, 401),
            ({"Authorization": "Bearer " + KEY + "x"}, 401), ({"Authorization": "Bearer " + KEY[:-1]}, 401), ({"Authorization": ""}, 401),
        ]:
            got, answer_headers, body = self.server.ask("/v1/models", **headers)
            self.assertEqual(got, status, headers)
            if status == 401:
                self.assertEqual(json.loads(body)["error"]["type"], "authentication_error")
                self.assertTrue(answer_headers["WWW-Authenticate"])
        self.assertEqual(self.server.ask("/health", Authorization="")[0], 200)

    def test_methods_types_and_versions_of_http(self):
        status, headers, _ = self.server.ask("/v1/completions", method="GET")
        self.assertEqual((status, headers["Allow"]), (405, "POST"))
        self.assertEqual(self.server.ask("/v1/completions", FRANCE, **{"Content-Type": "text/plain"})[0], 415)
        self.assertEqual(self.server.ask("/v1/completions", FRANCE, **{"Content-Type": "Application/JSON; charset=utf-8"})[0], 200)
        status, headers, body = self.server.ask("/health", method="HEAD")
        self.assertEqual((status, body), (200, b""))
        trace = "0af7651916cd43dd8448eb211c80319c"
        _, headers, _ = self.server.ask("/health", traceparent=f"00-{trace}-b7ad6b7169203331-01")
        self.assertEqual(headers["traceresponse"].split("-")[1], trace)
        with self.server.raw(raw_post({**FRANCE, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")) as connection:
            answer = connection.makefile("rb").read()
        self.assertTrue(answer.endswith(b"data: [DONE]\n\n"), answer)
        self.assertNotIn(b"chunked", answer)
        head, body = raw_post(FRANCE, headers="Expect: 100-continue\r\nConnection: close\r\n").split(b"\r\n\r\n")
        with self.server.raw(head + b"\r\n\r\n") as connection:
            self.assertTrue(connection.recv(1000).startswith(b"HTTP/1.1 100 "))
            connection.sendall(body)
            self.assertIn(b"200 OK", connection.makefile("rb").read())

    def test_long_headers_are_refused(self):
        for data in (b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n"):
            try:
                with self.server.raw(data) as connection:
                    self.assertIn(b" 431 ", connection.makefile("rb").readline())
            except (BrokenPipeError, ConnectionResetError):
                pass  # the server has closed the connection while the client was writing

    def test_a_slow_reader_is_disconnected_and_others_are_undisturbed(self):
        before = self.server.aborted()
        with self.server.raw(huge_post(), buffer=4096):
            self.server.wait_for(lambda: self.server.in_progress() > 0)
            self.assertEqual(self.server.complete(), PARIS)
            self.server.wait_for(lambda: self.server.aborted() > before)

    def test_a_client_that_hangs_up_aborts_its_request(self):
        for stream in (True, False):
            before = self.server.aborted()
            with self.server.raw(raw_post({**MANY, "stream": stream})):
                self.server.wait_for(lambda: self.server.running() > 0)
            self.server.wait_for(lambda: self.server.aborted() > before)
            self.server.wait_for(lambda: self.server.running() == 0)

    def test_clients_that_hang_up_while_their_requests_are_read_leave_nothing(self):
        for i in range(40):
            # Tokenizing the longer prompts takes some milliseconds.
            self.server.raw(raw_post({**LONG, "prompt": "a " * (1 << i % 16), "stream": i % 2 == 0})).close()
        self.server.wait_for(lambda: self.server.in_progress() == 0)
        self.server.wait_for(lambda: self.server.running() == 0)


class Full(unittest.TestCase):
    def start(self, *flags, **options):
        server = Server(*flags, **options)
        self.addCleanup(server.stop)
        return server

    def test_a_full_queue_is_429(self):
        server = self.start("-max-seqs", "32", "-max-waiting", "1")
        with server.raw(raw_post(MANY)):
            server.wait_for(lambda: server.running() == 32)
            waiting = server.raw(raw_post(MANY))
            self.addCleanup(waiting.close)
            server.wait_for(lambda: server.metric("pagedllm_num_requests_waiting") > 0)
            status, headers, answer = server.ask("/v1/completions", FRANCE)
            self.assertEqual((status, json.loads(answer)["error"]["type"]), (429, "rate_limit_error"))
            self.assertGreaterEqual(int(headers["Retry-After"]), 1)
            # A request that can never fit is an error of the client.
            self.assertEqual(server.ask("/v1/completions", {"prompt": "a b " * 5000})[0], 400)

    def test_too_many_requests_are_429(self):
        server = self.start("-max-requests", "1")
        with server.raw(raw_post(MANY)):
            server.wait_for(lambda: server.in_progress() == 1)
            status, headers, _ = server.ask("/v1/completions", FRANCE)
            self.assertEqual((status, headers["Retry-After"]), (429, "1"))
            self.assertEqual(server.ask("/health")[0], 200)
        server.wait_for(lambda: server.ask("/v1/completions", FRANCE)[0] == 200)

    def test_too_large_requests_are_429(self):
        server = self.start("-max-body", "1MiB", "-max-bodies", "1MiB")
        with server.raw(raw_post(" " * 600_000)[:-1]):  # waits for its last byte
            server.wait_for(lambda: server.in_progress() == 1)
            self.assertEqual(server.ask("/v1/completions", json.dumps(FRANCE) + " " * 600_000)[0], 429)
            self.assertEqual(server.ask("/v1/completions", FRANCE)[0], 200)

    def test_too_many_log_probabilities_are_429(self):
        # Each answer can have 40 x 1000 x 101 of them, and four such requests are accepted.
        server = self.start("-max-seqs", "1")
        body = {**LONG, "prompt": ["Count"] * 40, "max_tokens": 1000, "logprobs": 100}
        clients = [server.raw(raw_post(body)) for _ in range(4)]
        server.wait_for(lambda: server.metric("pagedllm_num_requests_waiting") + server.running() > 3 * 40)
        status, headers, _ = server.ask("/v1/completions", body)
        self.assertEqual((status, headers["Retry-After"]), (429, "1"))
        for client in clients:
            client.close()
        server.wait_for(lambda: server.running() == 0)
        with server.raw(raw_post(body)):
            server.wait_for(lambda: server.running() == 1)

    def test_further_connections_wait(self):
        server = self.start("-max-connections", "2")
        first, second = server.raw(b""), server.raw(b"")
        self.addCleanup(second.close)
        third = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.addCleanup(third.close)
        self.assertEqual(select.select([third], [], [], 0.5)[0], [])
        first.close()
        self.assertEqual(third.recv(12), b"HTTP/1.1 200")

    def test_without_keys_the_host_must_be_local(self):
        server = self.start(keys="")
        for host, status in [
            ("localhost", 200), ("LocalHost:80", 200), ("127.0.0.1:1", 200), ("[::1]:1", 200), ("", 200),
            ("example.org", 403), ("127.0.0.1.example.org", 403), ("localhost.example.org:80", 403), ("10.0.0.1", 403), ("[::2]", 403),
        ]:
            self.assertEqual(server.ask("/v1/models", Host=host)[0], status, host)

    def test_a_late_forecast_is_429(self):
        # Before the first step there is no forecast, and a request waits until the others end.
        server = self.start("-max-wait", "1ms", "-max-seqs", "32", "-max-time", "5s")
        with server.raw(raw_post(MANY)):
            server.wait_for(lambda: server.running() == 32)
            server.wait_for(lambda: server.ask("/v1/completions", FRANCE)[0] == 429)

    def test_a_deadline_keeps_the_sequences_that_have_tokens(self):
        server = self.start("-max-seqs", "1")
        status, _, body = server.ask("/v1/completions", {**LONG, "prompt": ["Count"] * 100, "max_tokens": 1000, "deadline_ms": 2000})
        self.assertEqual(status, 200, body)
        choices = json.loads(body)["choices"]
        self.assertTrue(choices[0]["text"])
        # The deadlines of the sequences are some microseconds apart, so the last one can have a token.
        self.assertEqual(len(choices), 100)
        self.assertIn(("", "deadline"), [(choice["text"], choice.get("stop_reason")) for choice in choices])

    def test_without_descriptors_a_request_is_503(self):
        server = self.start(descriptors=64)
        known = server.connect()
        self.addCleanup(known.close)
        known.request("GET", "/health")
        self.assertEqual(known.getresponse().read(), b'{"status":"ok"}\n')
        idle = []
        self.addCleanup(lambda: [connection.close() for connection in idle])
        server.wait_for(lambda: idle.append(server.raw(b"")) or "accept" in server.text())
        headers = {"Authorization": "Bearer " + KEY, "Content-Type": "application/json"}
        known.request("POST", "/v1/completions", json.dumps(FRANCE), headers)
        answer = known.getresponse()
        self.assertEqual((answer.status, answer.headers["Retry-After"]), (503, "1"), answer.read())
        answer.read()
        while idle:
            idle.pop().close()
        server.wait_for(lambda: server.complete() == PARIS)

    def test_the_time_of_a_request_is_limited(self):
        server = self.start("-max-time", "1s", "-keep-alive", "50ms", "-max-seqs", "32")
        with server.raw(raw_post(MANY)) as connection:
            server.wait_for(lambda: server.running() == 32)
            _, _, body = server.ask("/v1/completions", {**LONG, "stream": True})
            self.assertIn(b": waiting\n\n", body)
            answer = connection.recv(1000)
        self.assertTrue(answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 504 ")), answer)


class Flags(unittest.TestCase):
    def test_wrong_flags_end_the_program_before_it_listens(self):
        for flags in (
            [], ["-model", "a=/nowhere"], ["-model", str(MODEL), "-colour", "1"], ["-model", str(MODEL), "-max-results"],
            *(["-model", str(MODEL), *wrong] for wrong in (
                ["-address", "127.0.0.1"], ["-address", "127.0.0.1:70000"], ["-address", "127.0.0.1:80x"], ["-address", "1.2.3.400:0"],
                ["-max-results", "-1"], ["-max-body", "1XB"], ["-header-timeout", "soon"], ["-memory-fraction", "0.5x"], ["-api-keys", "/nowhere"],
            )),
        ):
            ended = subprocess.run([program, *flags], capture_output=True, text=True, timeout=60)
            self.assertIn(ended.returncode, (1, 2), (flags, ended.stderr))
            self.assertTrue(ended.stderr, flags)
            self.assertNotIn("listening", ended.stderr)


class Shutdown(unittest.TestCase):
    def test_a_signal_ends_the_server_after_its_requests(self):
        server = Server()
        alone = server.complete(**LONG)
        idle = server.raw(b"")
        other = Background(lambda: server.complete(**LONG))
        server.wait_for(lambda: server.in_progress() > 0 or not other.is_alive())
        self.assertEqual(server.stop(), 0)
        self.assertEqual(other.wait(), alone)
        self.assertEqual(idle.recv(1), b"")
        idle.close()

    def test_health_fails_before_the_server_accepts_no_more_connections(self):
        server = Server("-drain", "3s")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.ask("/health")[0] == 503)
        self.assertEqual(server.complete(), PARIS)
        self.assertEqual(server.process.wait(30), 0)
        server.log.close()

    def test_requests_end_with_an_error_after_the_grace(self):
        server = Server("-grace", "100ms", "-write-timeout", "5s")
        stream = Background(lambda: server.ask("/v1/completions", {**MANY, "stream": True}))
        whole = Background(lambda: server.ask("/v1/completions", MANY))
        server.wait_for(lambda: server.in_progress() == 2)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(whole.wait()[0], 503)
        events = stream.wait()[2].decode().strip().split("\n\n")
        self.assertIn("error", json.loads(events[-1].removeprefix("data: ")))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    program = sys.argv[1]
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
