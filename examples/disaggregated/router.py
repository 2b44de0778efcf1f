"""The router: the prompt of a request goes to a prefill engine, and the request to a decode engine,
which reads the blocks of the prompt as the prefill engine computes them.

POST /v1/completions  as an instance
GET /instances        the instances, with the numbers of their requests and failures
"""

import concurrent.futures
import http.client
import json
import threading
import time

import web

# Time for which an engine that has failed gets no requests, and limits of calls, in seconds.
PAUSE, SCORE_TIMEOUT, TIMEOUT = 5, 10, 600
# Errors of the connection to a process that has ended or hangs.
LOST = (OSError, http.client.HTTPException)
# The parameters of vLLM's proxies for a prefill engine.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
           "remote_host": None, "remote_port": None}


class Instance:
    def __init__(self, name, url, pid):
        self.name, self.role, self.url, self.pid = name, name.partition("-")[0], url, pid
        self.load = self.failures = self.served = 0
        self.paused_until = 0.0


class Router:
    def __init__(self, instances, prefill_wait_ms=5000):
        self.instances = instances
        self.prefill_wait_ms = prefill_wait_ms
        self.prefill_from = 0.0  # time before which the decode engines compute the prompts
        self.lock = threading.Lock()
        self.pool = concurrent.futures.ThreadPoolExecutor(64)

    def completions(self, body, send):
        """Run a request. The lines of an answer that is a stream are sent, and the result is None."""
        if body.get("kv_transfer_params"):
            raise web.Refused(400, "the router sets kv_transfer_params; leave it out")
        scored = self.scored("decode", body)
        # What an engine has cached, the store has, too.
        is_new = scored and all(score["cached"] < score["blocks"] for _, score in scored)
        if is_new and time.monotonic() >= self.prefill_from:
            body = {**body, "kv_transfer_params": self.start_prefill(body)}
        call = (lambda one: self.stream(one, body, send)) if body.get("stream") else lambda one: self.post(one, body)
        answer = self.call_best(scored, call)
        if answer is None:
            raise web.Refused(503, "no decode engine answers; start the example again")
        return answer or None

    def start_prefill(self, body):
        """Start to compute a prompt on a prefill engine. Return kv_transfer_params for the decode
        engine: None if no prefill engine answers, so that it computes the prompt itself."""
        scored = self.scored("prefill", body)
        if not scored:
            self.prefill_from = time.monotonic() + PAUSE
            return None
        # The first block may have to wait for the prompts of other requests.
        wait_ms = self.prefill_wait_ms + int(2000 * min(self.cost(one)[1] for one in scored))
        threading.Thread(target=self.prefill, args=(body, scored), daemon=True).start()
        return {**PREFILL, "do_remote_decode": False, "do_remote_prefill": True, "wait_ms": wait_ms}

    def prefill(self, body, scored):
        request = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL}
        try:
            answer = self.call_best(scored, lambda one: self.post(one, request))
        except web.Refused:  # the decode engine refuses it, too
            return
        if not answer or not answer["kv_transfer_params"]:  # the prefill engines or the store have failed
            self.prefill_from = time.monotonic() + PAUSE

    def scored(self, role, body):
        """Return the instances of the role that answer, each with its score of the prompt."""
        mine = [one for one in self.instances if one.role == role]
        ready = [one for one in mine if one.paused_until <= time.monotonic()] or mine
        question = {name: body[name] for name in ("prompt", "max_tokens") if name in body}
        scores = self.pool.map(lambda one: self.post(one, question, "/score", SCORE_TIMEOUT), ready)
        return [(one, score) for one, score in zip(ready, scores) if score]

    def call_best(self, scored, call):
        """Return the result of the call for the best instance that does not fail, or None."""
        result = None
        while scored and result is None:
            with self.lock:
                best = min(scored, key=self.cost)
                scored.remove(best)
                best[0].load += 1
            try:
                result = call(best[0])
            finally:
                with self.lock:
                    best[0].load -= 1
                    best[0].served += result is not None
        return result

    @staticmethod
    def cost(item):
        """The predicted time to the first token, without the blocks that are cached, for each request
        that this router has sent there. Without measured times: the overlap, then the load."""
        instance, score = item
        return not score["admits"], score["seconds"] * (1 + instance.load), -score["cached"], instance.load

    def post(self, instance, body, path="/v1/completions", timeout=TIMEOUT):
        """Return the answer of an instance, or None if it has failed."""
        def call():
            with web.post(instance.url + path, body, timeout) as answer:
                return json.load(answer)
        return self.attempt(instance, call)

    def stream(self, instance, body, send):
        """Send the lines of a stream. Return None if the instance has failed before the first one."""
        answer = self.attempt(instance, lambda: web.post(f"{instance.url}/v1/completions", body, TIMEOUT))
        if answer is None:
            return None
        with answer:
            line, is_started = self.attempt(instance, answer.readline), False
            while line:
                send(line)
                if line.startswith(b"data: [DONE]"):
                    send(b"\n")
                    return {}
                line, is_started = self.attempt(instance, answer.readline), True
        if line is not None:  # the connection was closed without an error
            self.pause(instance)
        if not is_started:
            return None
        raise web.Refused(503, f"the engine {instance.name} has ended within the answer; send the request again")

    def attempt(self, instance, call):
        """Return the result of a call, None if the instance has failed. Errors of requests are raised."""
        try:
            return call()
        except web.Refused as refused:
            if refused.status < 500:
                raise
        except (*LOST, ValueError):  # also an answer that was cut off
            pass
        self.pause(instance)
        return None

    def pause(self, instance):
        with self.lock:
            instance.failures += 1
            instance.paused_until = time.monotonic() + PAUSE


class Handler(web.Handler):
    @property
    def routes(self):
        return {"POST /v1/completions": lambda body: self.router.completions(body, self.pass_line),
                "GET /instances": lambda _: {"instances": [vars(one) for one in self.router.instances], "store": self.store}}

    def pass_line(self, line):
        if not self.is_streaming:
            self.start_events()
        self.wfile.write(line)
