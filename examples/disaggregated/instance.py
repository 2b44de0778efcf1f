"""One engine behind HTTP.

POST /v1/completions  as OpenAI's, for one prompt, with kv_transfer_params of vLLM
POST /score           {"prompt": ...}: what the router needs to select an engine
GET /stats            counters of the engine
"""

import argparse
import json
import pathlib
import socket
import sys
import threading
import time
import uuid

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python"))
import web  # noqa: E402
from pagedllm import Code, Engine, Error, KvEventKind, KvStore, Sampling  # noqa: E402

BLOCK_SIZE = 16
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "max_tokens")
KNOWN = {*SAMPLING, "prompt", "model", "stream", "return_token_ids", "kv_transfer_params"}


def count_in_directory(directory, keys):
    """Return how many of the keys the store in the directory has."""
    return sum((pathlib.Path(directory) / key[0] / key).exists() for key in keys)


def count_in_server(path, keys):
    """Return how many of the keys the Valkey server with this Unix socket has."""
    words = [b"EXISTS", *(f"pagedllm:kv:{key}".encode() for key in keys)]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        connection.connect(path)
        connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        reply = connection.makefile("rb").readline()
    if not reply.startswith(b":"):
        raise OSError(f"the server has answered {reply!r}")
    return int(reply[1:])


STORES = {"files": (KvStore.files, count_in_directory), "valkey": (KvStore.valkey, count_in_server)}


class Instance:
    def __init__(self, given):
        kind, _, place = given.store.partition(":")
        open_store, count = STORES[kind]
        library = given.connectors and f"{given.connectors}/libpagedllm_{kind}.so"
        self.name, self.store_seconds = given.name, given.store_timeout_ms / 1000
        self.count_stored = lambda keys: count(place, keys)
        self.cached = set()  # names of the blocks in the prefix cache
        self.reading = threading.Lock()
        with open_store(place, library=library) as store:
            self.engine = Engine(given.model, threads=given.threads, block_size=BLOCK_SIZE, kv_events_capacity=16384,
                                 kv_store=store, kv_store_timeout_ms=given.store_timeout_ms)

    def tokens(self, body):
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return self.engine.tokenize(prompt, add_special=True)
        if isinstance(prompt, list) and prompt and all(type(one) is int and one >= 0 for one in prompt):
            return prompt
        raise web.Refused(400, "prompt must be one text or one list of token ids")

    def keys(self, tokens):
        """Return the names that the full blocks of a prompt have in events and in the store."""
        return [block.hex() for block in self.engine.hash_prompt(tokens)]

    def score(self, body):
        """Return how many blocks of the prompt are cached here, and the time to its first token."""
        tokens = self.tokens(body)
        admission = self.engine.predict_admission(tokens, Sampling(max_tokens=body.get("max_tokens")))
        keys, cached = self.keys(tokens)[:(len(tokens) - 1) // BLOCK_SIZE], 0
        with self.reading:
            for event in self.engine.poll_kv_events():
                if event.kind == KvEventKind.CLEARED:
                    self.cached.clear()
                else:
                    (self.cached.add if event.kind == KvEventKind.STORED else self.cached.discard)(event.hash.hex())
            while cached < len(keys) and keys[cached] in self.cached:
                cached += 1
        # The prediction assumes that nothing is cached.
        total = admission.waiting_tokens + len(tokens)
        seconds = (admission.first_token_seconds or 0.0) * (total - cached * BLOCK_SIZE) / total
        return {"blocks": len(keys), "cached": cached, "seconds": seconds, "admits": admission.admits}

    def complete(self, body):
        """Add a request and return its outputs, each with what it adds to the answer."""
        unknown = sorted(body.keys() - KNOWN)
        if unknown:
            raise web.Refused(400, f"{unknown[0]} is not supported; known are {', '.join(sorted(KNOWN))}")
        transfer = body.get("kv_transfer_params") or {}
        is_prefill = bool(transfer.get("do_remote_decode"))
        if is_prefill and transfer.get("do_remote_prefill"):
            raise web.Refused(400, "do_remote_decode and do_remote_prefill are both true; set one of them")
        tokens = self.tokens(body)
        sampling = {"max_tokens": 16, **{name: body[name] for name in SAMPLING if name in body}}
        if is_prefill:
            sampling["max_tokens"] = 1
        wait_ms = transfer.get("wait_ms", 0) if transfer.get("do_remote_prefill") else 0
        stream = self.engine.stream(tokens, Sampling(**sampling), kv_store_wait_ms=wait_ms)
        return self.outputs(tokens, stream, is_prefill)

    def outputs(self, tokens, stream, is_prefill):
        cached = 0
        for output in stream:
            cached, added = max(cached, output.cached_tokens), {}
            if output.finish_reason:
                usage = {"prompt_tokens": len(tokens), "completion_tokens": output.generated_tokens,
                         "total_tokens": len(tokens) + output.generated_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
                added = {"usage": usage, "kv_transfer_params": self.transfer(tokens) if is_prefill else None}
            yield output, added

    def transfer(self, tokens):
        """Wait for the full blocks in the store. Return kv_transfer_params of the decode engine, or
        None if the store does not get them."""
        keys, end = self.keys(tokens), time.monotonic() + self.store_seconds
        try:
            while keys and self.count_stored(keys) < len(keys):
                if time.monotonic() > end:
                    return None
                time.sleep(0.002)
        except OSError:
            return None
        # The decode engine finds the blocks by the hashes of the prompt, so it needs no block ids.
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.name,
                "remote_block_ids": None, "remote_host": None, "remote_port": None}


class Handler(web.Handler):
    @property
    def routes(self):
        calls = {"POST /v1/completions": self.completions, "POST /score": self.instance.score,
                 "GET /stats": lambda _: self.instance.engine.stats()._asdict()}
        return {route: self.with_errors(call) for route, call in calls.items()}

    def with_errors(self, call):
        def answer(body):
            try:
                return call(body)
            except Error as error:
                is_of_client = error.code in (Code.INVALID_ARGUMENT, Code.UNSUPPORTED)
                raise web.Refused(400 if is_of_client else 503, error.message) from None
            except TypeError as error:
                raise web.Refused(400, f"a parameter has a wrong type: {error}") from None
        return answer

    def completions(self, body):
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
                "model": body.get("model", self.instance.name)}

        def part(text, tokens, output, added):
            ids = {"token_ids": tokens} if body.get("return_token_ids") else {}
            reason = output.finish_reason.name.lower() if output.finish_reason else None
            return {**head, "choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None, **ids}], **added}

        text, tokens = "", []
        for output, added in self.instance.complete(body):
            if body.get("stream"):
                if not self.is_streaming:
                    self.start_events()
                self.send_event(json.dumps(part(output.text, output.tokens, output, added)))
            text, tokens = text + output.text, tokens + output.tokens
        if not self.is_streaming:
            return part(text, tokens, output, added)
        self.send_event("[DONE]")


def main():
    parser = argparse.ArgumentParser()
    for name in ("name", "model", "store"):
        parser.add_argument(name)
    parser.add_argument("--connectors")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--store-timeout-ms", type=int)
    given = parser.parse_args()
    try:
        Handler.instance = Instance(given)
    except Error as error:
        sys.exit(f"{given.name}: {error.message}")
    server = web.Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()  # ends when the process that started this one ends
    Handler.instance.engine.close()


if __name__ == "__main__":
    main()
