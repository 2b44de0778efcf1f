"""An HTTP server with a subset of OpenAI's API, for `python -m pagedllm serve`.

It is for development and for a few clients: each connection has a thread. A parameter that it does
not know is refused and not ignored.
"""

import hmac
import http.server
import json
import select
import signal
import socket
import sys
import threading
import time
import uuid
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pagedllm

MAX_BODY_BYTES = 8 << 20
MAX_CONNECTIONS = 256
# Longest time to read the next bytes of a request, or to send the next bytes of an answer.
SOCKET_SECONDS = 60

# Parameters of OpenAI that are passed to Sampling under the same name, and their types.
NUMBERS = {
    "temperature": float, "top_p": float, "min_p": float, "top_k": int, "max_tokens": int, "min_tokens": int, "seed": int,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float,
}
# Parameters that both endpoints have. "user" and "metadata" have no effect on the answer.
COMMON = {*NUMBERS, "model", "stop", "stream", "stream_options", "n", "logit_bias", "ignore_eos", "user", "metadata"}
STATUS = {
    pagedllm.Code.INVALID_ARGUMENT: 400, pagedllm.Code.UNSUPPORTED: 400, pagedllm.Code.CAPACITY: 400,
    pagedllm.Code.OUT_OF_MEMORY: 503, pagedllm.Code.CLOSED: 503, pagedllm.Code.BUSY: 503,
}
# OpenAI has no other reasons for the requests of this server.
FINISH = {pagedllm.FinishReason.STOP: "stop", pagedllm.FinishReason.LENGTH: "length"}


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: Optional[str] = None, code: Optional[str] = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: pagedllm.Engine, model: str, address: Tuple[str, int], key: Optional[str]) -> None:
        self.engine = engine
        self.model = model
        self.key = key
        self.started = int(time.time())
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report defects. A client that has gone, or that sends too slowly, is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve(engine: pagedllm.Engine, model: str, host: str, port: int, key: Optional[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    with Server(engine, model, (host, port), key) as server:
        def stop(*_: Any) -> None:
            # shutdown() waits for serve_forever(), which runs on this thread.
            threading.Thread(target=server.shutdown).start()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {model} on http://{shown}:{server.server_port}/v1", file=sys.stderr, flush=True)
        server.serve_forever(poll_interval=0.1)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"pagedllm/{pagedllm.version()}"
    timeout = SOCKET_SECONDS
    # Answers are small; each token must leave at once.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no line for each request."""

    def do_GET(self) -> None:
        self._answer({"/health": self._health, "/metrics": self._metrics, "/v1/models": self._models}, self._no_body)

    def do_POST(self) -> None:
        self._answer({"/v1/completions": self._completions, "/v1/chat/completions": self._chat}, self._read_json)

    def _answer(self, routes: Dict[str, Any], read: Any) -> None:
        self._started = False
        try:
            body = read()
            path = self.path.partition("?")[0]
            if path not in routes:
                raise Refused(404, f"no {self.command} {path}; there are {', '.join(routes)}", code="not_found")
            if path.startswith("/v1/"):
                self._check_key()
            routes[path](body)
        except Refused as refused:
            self._send_error(refused)
        except pagedllm.Error as error:
            code = "context_length_exceeded" if error.prompt_tokens else error.code.name.lower()
            status = 429 if error.code == pagedllm.Code.CAPACITY and error.is_temporary else STATUS.get(error.code, 500)
            self._send_error(Refused(status, error.message, code=code))

    def _send_error(self, refused: Refused) -> None:
        if self._started:  # within a stream
            self._send_event(refused.body)
            self._end_chunks()
        else:
            headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
            self._send(refused.status, json.dumps(refused.body), headers=headers)

    # -- requests

    def _no_body(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True

    def _read_json(self) -> Dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        # What follows in the connection is unknown if the body is not read.
        keep, self.close_connection = self.close_connection, True
        if not (length.isascii() and length.isdigit()):
            raise Refused(411, "the request has no Content-Length; send the whole body with its length")
        if int(length) > MAX_BODY_BYTES:
            raise Refused(413, f"the body is too large ({int(length)} bytes, limit {MAX_BODY_BYTES}); send a shorter prompt")
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise ConnectionResetError("the client has closed the connection")
        self.close_connection = keep
        try:
            body = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON ({error}); send one object") from None
        if not isinstance(body, dict):
            raise Refused(400, f"the body is of type {type(body).__name__}; send one JSON object")
        return body

    def _check_key(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        if self.server.key is not None and not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):
            raise Refused(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key")

    # -- endpoints

    def _health(self, _body: None) -> None:
        error = self.server.engine.health()
        if error is not None:
            raise Refused(503, error.message)
        self._send(200, '{"status": "ok"}')

    def _metrics(self, _body: None) -> None:
        self._send(200, self.server.engine.metrics(), "application/openmetrics-text; version=1.0.0; charset=utf-8")

    def _models(self, _body: None) -> None:
        model = {"id": self.server.model, "object": "model", "created": self.server.started, "owned_by": "pagedllm"}
        self._send(200, json.dumps({"object": "list", "data": [model]}))

    def _completions(self, body: Dict[str, Any]) -> None:
        _refuse_unknown(body, COMMON | {"prompt"})
        prompt = body.get("prompt")
        ids = isinstance(prompt, list) and all(type(one) is int and 0 <= one < 1 << 32 for one in prompt)
        if not (isinstance(prompt, str) or (prompt and ids)):
            raise Refused(400, "prompt must be one text or one list of token ids", "prompt")
        self._generate(body, prompt, "text_completion", max_tokens=16)

    def _chat(self, body: Dict[str, Any]) -> None:
        _refuse_unknown(body, COMMON | {"messages", "max_completion_tokens", "response_format"})
        messages = body.get("messages")
        if not messages or not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise Refused(400, "messages must be a list of at least one object with role and content", "messages")
        prompt = self.server.engine.render_chat(messages)
        limit = _checked(body, "max_completion_tokens", int)
        self._generate(body, prompt, "chat.completion", max_tokens=limit, grammar=_grammar(body), add_special=False)

    def _generate(self, body: Dict[str, Any], prompt: Any, kind: str, *, max_tokens: Optional[int],
                  grammar: Optional[pagedllm.Grammar] = None, add_special: Optional[bool] = None) -> None:
        if _checked(body, "model", str) not in (None, self.server.model):
            message = f"the model {body['model']!r} is not served; it is {self.server.model!r}"
            raise Refused(404, message, "model", "model_not_found")
        sampling = _sampling(body, max_tokens, grammar)
        n = _checked(body, "n", int)
        if n is not None and not 1 <= n <= 128:
            raise Refused(400, f"n is out of range ({n}, limit 1 to 128)", "n")
        stream = bool(_checked(body, "stream", bool))
        usage = _checked(body, "stream_options", dict) or {}
        _refuse_unknown(usage, {"include_usage"}, "stream_options.")
        engine = self.server.engine
        with engine.create_queue(64 * (n or 1)) as queue:
            request = engine.add(prompt, sampling, queue=queue, n=n, add_special=add_special)
            head = {"id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}", "object": kind,
                    "created": int(time.time()), "model": self.server.model}
            outputs = self._outputs(queue, request, n or 1)
            if stream:
                self._stream(head, outputs, bool(usage.get("include_usage")))
            else:
                self._send(200, json.dumps(_whole(head, outputs, n or 1)))

    def _outputs(self, queue: pagedllm.Queue, request: int, unfinished: int) -> Iterator[pagedllm.Output]:
        """Return the outputs of a request. If the client has gone, end; the closed queue aborts it."""
        while unfinished:
            for output in queue.poll(0.2):
                if output.error is not None:
                    raise output.error
                unfinished -= bool(output.finish_reason)
                yield output
            if self._client_has_gone():
                self.close_connection = True
                raise ConnectionResetError("the client has closed the connection")

    def _client_has_gone(self) -> bool:
        # poll() has no limit for the number of a descriptor.
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        return bool(waiting.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    # -- answers

    def _stream(self, head: Dict[str, Any], outputs: Iterator[pagedllm.Output], with_usage: bool) -> None:
        chat = head["object"] == "chat.completion"
        if chat:
            head["object"] += ".chunk"
        self._started = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        usage, seen = _Usage(), set()
        for output in outputs:
            usage.add(output)
            if chat:
                first = {} if output.index in seen else {"role": "assistant"}
                seen.add(output.index)
                choice: Dict[str, Any] = {"delta": {**first, "content": output.text}}
            else:
                choice = {"text": output.text}
            choice.update(index=output.index, logprobs=None, finish_reason=_finish(output))
            self._send_event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})
        if with_usage:
            self._send_event({**head, "choices": [], "usage": usage.counts()})
        self._send_chunk(b"data: [DONE]\n\n")
        self._end_chunks()

    def _send_event(self, event: Dict[str, Any]) -> None:
        self._send_chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _end_chunks(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, text: str, kind: str = "application/json", headers: Optional[Dict[str, str]] = None) -> None:
        data = text.encode()
        self.send_response(status)
        fixed = {"Content-Type": kind, "Content-Length": str(len(data))}
        if self.close_connection:
            fixed["Connection"] = "close"
        for name, value in {**fixed, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class _Usage:
    """The tokens of a request: the last output of each result has its number."""

    def __init__(self) -> None:
        self.prompt = self.cached = 0
        self.generated: Dict[int, int] = {}

    def add(self, output: pagedllm.Output) -> None:
        self.prompt, self.cached = output.prompt_tokens, max(self.cached, output.cached_tokens)
        self.generated[output.index] = output.generated_tokens

    def counts(self) -> Dict[str, Any]:
        generated = sum(self.generated.values())
        return {"prompt_tokens": self.prompt, "completion_tokens": generated, "total_tokens": self.prompt + generated,
                "prompt_tokens_details": {"cached_tokens": self.cached}}


def _whole(head: Dict[str, Any], outputs: Iterator[pagedllm.Output], n: int) -> Dict[str, Any]:
    texts: List[List[str]] = [[] for _ in range(n)]
    reasons: List[Optional[str]] = [None] * n
    usage = _Usage()
    for output in outputs:
        usage.add(output)
        texts[output.index].append(output.text)
        reasons[output.index] = _finish(output)
    choices = []
    for index, parts in enumerate(texts):
        text = "".join(parts)
        content = {"message": {"role": "assistant", "content": text}} if head["object"].startswith("chat") else {"text": text}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": reasons[index]})
    return {**head, "choices": choices, "usage": usage.counts()}


def _finish(output: pagedllm.Output) -> Optional[str]:
    return FINISH.get(output.finish_reason, output.finish_reason.name.lower()) if output.finish_reason else None


# -- parameters


def _refuse_unknown(body: Dict[str, Any], known: Any, prefix: str = "") -> None:
    for name in body:
        if name not in known:
            raise Refused(400, f"the parameter {prefix}{name} is not supported; known are {', '.join(sorted(known))}", f"{prefix}{name}")


def _checked(body: Dict[str, Any], name: str, kind: type) -> Any:
    """Return a parameter, or None if it is null or missing. An integer is a number, a boolean is none."""
    value = body.get(name)
    if value is None:
        return None
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        names = {str: "a text", bool: "true or false", int: "an integer", float: "a number", dict: "an object"}
        raise Refused(400, f"{name} must be {names[kind]}, not {json.dumps(value)[:100]}", name)
    return value


def _sampling(body: Dict[str, Any], max_tokens: Optional[int], grammar: Optional[pagedllm.Grammar]) -> pagedllm.Sampling:
    given = {name: _checked(body, name, kind) for name, kind in NUMBERS.items()}
    if given["max_tokens"] is None:
        given["max_tokens"] = max_tokens
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise Refused(400, "stop must be a text or a list of texts", "stop")
    bias = _checked(body, "logit_bias", dict) or {}
    try:
        logit_bias = {int(token): float(value) for token, value in bias.items()}
    except (TypeError, ValueError):
        raise Refused(400, "logit_bias must be an object of token ids and numbers", "logit_bias") from None
    return pagedllm.Sampling(stop=stop, logit_bias=logit_bias or None, grammar=grammar,
                             ignore_eos=_checked(body, "ignore_eos", bool), **given)


def _grammar(body: Dict[str, Any]) -> Optional[pagedllm.Grammar]:
    form = _checked(body, "response_format", dict) or {"type": "text"}
    kind = form.get("type")
    if kind == "json_object":
        return pagedllm.Grammar.json_object()
    if kind == "json_schema":
        schema = (_checked(form, "json_schema", dict) or {}).get("schema")
        if not isinstance(schema, (dict, bool)):
            raise Refused(400, "json_schema.schema must be a JSON schema", "response_format")
        return pagedllm.Grammar.json_schema(schema)
    if kind != "text":
        raise Refused(400, f"response_format has the type {kind!r}; it must be text, json_object or json_schema", "response_format")
    return None
