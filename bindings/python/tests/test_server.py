"""`python -m pagedllm serve`: answers, streams, errors, clients that vanish."""

import concurrent.futures
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from support import EXPECTED, LAST_RESORT, LONG_CASE, MODEL, MODULE

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
KEY = "a secret key"


class Served(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.NamedTemporaryFile("w", suffix=".key") as key:
            key.write(f"{KEY}\n")
            key.flush()
            command = [sys.executable, "-m", "pagedllm", "serve", str(MODEL), "--port", "0", "--api-key-file", key.name,
                       "-o", "kv_bytes=8388608"]
            cls.server = subprocess.Popen(command, cwd=MODULE, stderr=subprocess.PIPE, text=True)
            line = cls.server.stderr.readline()
        cls.port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)[1])

    @classmethod
    def tearDownClass(cls):
        cls.server.send_signal(signal.SIGTERM)
        errors = cls.server.communicate(timeout=60)[1]
        assert (cls.server.returncode, errors) == (0, ""), (cls.server.returncode, errors)

    def connect(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LAST_RESORT)
        self.addCleanup(connection.close)
        return connection

    def send(self, method, path, body=None, key=KEY, connection=None):
        connection = connection or self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Authorization": f"Bearer {key}"})
        return connection.getresponse()

    def ask(self, path, body):
        answer = self.send("POST", path, body)
        text = answer.read()
        self.assertEqual(answer.status, 200, text)
        return json.loads(text)

    def events(self, path, body):
        answer = self.send("POST", path, {**body, "stream": True})
        self.assertEqual(answer.getheader("Content-Type"), "text/event-stream")
        *events, done = re.findall(r"data: (.*)\n\n", answer.read().decode())
        self.assertEqual(done, "[DONE]")
        return [json.loads(event) for event in events]

    def assertRefused(self, status, message, path, body, **how):
        answer = self.send("POST", path, body, **how)
        error = json.loads(answer.read())["error"]
        self.assertEqual(answer.status, status, error)
        self.assertIn(message, error["message"])
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        return error

    def metric(self, name):
        return float(re.search(rf"^{name}(?:{{.*?}})? (\S+)$", self.send("GET", "/metrics").read().decode(), re.M)[1])

    def assertIdle(self):
        end = time.monotonic() + LAST_RESORT
        while self.metric("pagedllm_num_requests_running") + self.metric("pagedllm_num_requests_waiting"):
            self.assertLess(time.monotonic(), end, "requests are left")
            time.sleep(0.05)

    def test_a_chat_has_the_answer_and_the_usage(self):
        answer = self.ask(CHAT, {"messages": QUESTION, "temperature": 0, "model": str(MODEL), "user": "someone"})
        self.assertEqual(answer["object"], "chat.completion")
        choice = answer["choices"][0]
        self.assertEqual(choice["message"], {"role": "assistant", "content": "The capital of France is Paris."})
        self.assertEqual(choice["finish_reason"], "stop")
        usage = answer["usage"]
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        self.assertGreater(usage["prompt_tokens"], 5)

    def test_a_stream_has_the_same_text_and_ends_with_the_usage(self):
        body = {"messages": QUESTION, "temperature": 0, "stream_options": {"include_usage": True}}
        *chunks, last = self.events(CHAT, body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        self.assertEqual("".join(delta["content"] for delta in deltas), "The capital of France is Paris.")
        self.assertEqual([delta.get("role") for delta in deltas], ["assistant"] + [None] * (len(deltas) - 1))
        self.assertEqual([chunk["choices"][0]["finish_reason"] for chunk in chunks], [None] * (len(chunks) - 1) + ["stop"])
        self.assertEqual({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"})
        self.assertEqual((last["choices"], last["usage"]["completion_tokens"]), ([], len(chunks)))

    def test_completions_take_texts_and_token_ids(self):
        case = EXPECTED[0]
        by_text = self.ask("/v1/completions", {"prompt": case["prompt"], "max_tokens": 5, "temperature": 0, "seed": 1})
        self.assertEqual(by_text["object"], "text_completion")
        self.assertEqual(by_text["choices"][0]["finish_reason"], "length")
        self.assertEqual(by_text["usage"]["completion_tokens"], 5)
        streamed = self.events("/v1/completions", {"prompt": case["prompt"], "max_tokens": 5, "temperature": 0})
        self.assertEqual("".join(one["choices"][0]["text"] for one in streamed), by_text["choices"][0]["text"])
        self.assertTrue(self.ask("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5})["choices"])

    def test_n_results_have_their_indices(self):
        body = {"prompt": "Once", "n": 3, "max_tokens": 6, "temperature": 2, "seed": 3, "ignore_eos": True}
        whole = self.ask("/v1/completions", body)
        self.assertEqual([choice["index"] for choice in whole["choices"]], [0, 1, 2])
        self.assertEqual(whole["usage"]["completion_tokens"], 18)
        texts = ["", "", ""]
        for event in self.events("/v1/completions", body):
            choice = event["choices"][0]
            texts[choice["index"]] += choice["text"]
        self.assertEqual(texts, [choice["text"] for choice in whole["choices"]])

    def test_a_schema_is_obeyed(self):
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        answer = self.ask(CHAT, {"messages": QUESTION, "response_format": form, "max_completion_tokens": 100, "seed": 1})
        self.assertIn(json.loads(answer["choices"][0]["message"]["content"]), ({"a": True}, {"a": False}))

    def test_a_stop_text_ends_the_answer(self):
        answer = self.ask(CHAT, {"messages": QUESTION, "temperature": 0, "stop": " is"})
        self.assertEqual(answer["choices"][0]["message"]["content"], "The capital of France")

    def test_the_model_is_listed_and_the_engine_is_healthy(self):
        models = json.loads(self.send("GET", "/v1/models").read())
        self.assertEqual([model["id"] for model in models["data"]], [str(MODEL)])
        self.assertEqual(self.send("GET", "/health", key="").status, 200)

    def test_a_connection_serves_many_requests(self):
        connection = self.connect()
        for _ in range(3):
            answer = self.send("POST", CHAT, {"messages": QUESTION, "temperature": 0}, connection=connection)
            self.assertIn("Paris", answer.read().decode())

    def test_wrong_requests_are_refused_with_the_object_of_openai(self):
        refused = self.assertRefused
        refused(400, "the body is no JSON", CHAT, b"{")
        refused(400, "the body is no JSON", CHAT, b'{"messages": "\xff"}')
        refused(400, "the body is no JSON", CHAT, b"[" * 200_000)
        refused(400, "of type list", CHAT, [])
        refused(400, "messages must be a list", CHAT, {})
        refused(400, "messages must be a list", CHAT, {"messages": ["Hello"]})
        refused(400, "prompt must be", "/v1/completions", {"prompt": [1, -1]})
        refused(400, "prompt must be", "/v1/completions", {"prompt": [True]})
        refused(400, "temperature must be a number", CHAT, {"messages": QUESTION, "temperature": "hot"})
        refused(400, "max_tokens must be an integer", CHAT, {"messages": QUESTION, "max_tokens": True})
        refused(400, "max_tokens", CHAT, {"messages": QUESTION, "max_tokens": -1})
        refused(400, "n is out of range", CHAT, {"messages": QUESTION, "n": 10**9})
        refused(400, "stop must be", CHAT, {"messages": QUESTION, "stop": [1]})
        refused(400, "logit_bias must be", CHAT, {"messages": QUESTION, "logit_bias": {"x": 1}})
        refused(400, "response_format has the type 'xml'", CHAT, {"messages": QUESTION, "response_format": {"type": "xml"}})
        self.assertEqual(refused(400, "tools is not supported", CHAT, {"messages": QUESTION, "tools": []})["param"], "tools")
        self.assertEqual(refused(404, "is not served", CHAT, {"messages": QUESTION, "model": "other"})["code"], "model_not_found")
        too_long = refused(400, "max_model_len", "/v1/completions", {"prompt": [5] * 5000})
        self.assertEqual(too_long["code"], "context_length_exceeded")
        refused(400, "KV blocks and the pool has", "/v1/completions", {"prompt": "a", "n": 64, "max_tokens": 1000})
        refused(404, "no POST /v1/nothing", "/v1/nothing", {})
        self.assertEqual(refused(401, "API key", CHAT, {"messages": QUESTION}, key="another")["code"], "invalid_api_key")

    def test_a_large_body_is_refused_before_it_is_read(self):
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 104857600\r\n\r\n{")
            answer = client.makefile("rb").read().decode()
        self.assertIn("413", answer.splitlines()[0])
        self.assertIn("(104857600 bytes, limit 8388608)", answer)

    def test_garbage_does_not_end_the_server(self):
        for garbage in (os.urandom(4096), b"\r\n" * 100, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
                client.makefile("rb").read()
        self.test_a_connection_serves_many_requests()

    def test_a_client_that_vanishes_aborts_its_request(self):
        for stream in (True, False):
            connection = self.connect()
            connection.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": stream}), {"Authorization": f"Bearer {KEY}"})
            if stream:
                connection.getresponse().read(100)
            connection.close()
        self.assertIdle()

    def test_parallel_streams_have_the_texts_of_single_ones(self):
        body = {"prompt": LONG_CASE["prompt"], "max_tokens": 20, "temperature": 0}
        alone = self.ask("/v1/completions", body)["choices"][0]["text"]

        def read(_):
            return "".join(event["choices"][0]["text"] for event in self.events("/v1/completions", body))

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            self.assertEqual(set(pool.map(read, range(64))), {alone})
        self.assertIdle()


if __name__ == "__main__":
    unittest.main()
