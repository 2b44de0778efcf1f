"""What the servers of this example share: JSON over HTTP, and errors in the form of OpenAI."""

import http.server
import json
import sys
import urllib.error
import urllib.request


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": None}}


class Handler(http.server.BaseHTTPRequestHandler):
    """Subclasses have `routes`, such as "GET /stats". The functions take the body and return an object,
    or None if they have sent a stream."""
    disable_nagle_algorithm = True  # each token must leave at once

    def log_message(self, format, *arguments):
        """Write no line for each request."""

    def answer(self):
        self.is_streaming = False
        try:
            route = self.routes.get(f"{self.command} {self.path}")
            if route is None:
                raise Refused(404, f"no {self.command} {self.path}; there are {', '.join(self.routes)}")
            answer = route(self.read_json() if self.command == "POST" else {})
            if answer is not None:
                self.send_json(200, answer)
        except Refused as refused:
            if self.is_streaming:
                self.send_event(json.dumps(refused.body))
            else:
                self.send_json(refused.status, refused.body)

    do_GET = do_POST = answer

    def read_json(self):
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except ValueError as error:
            raise Refused(400, f"the body is no JSON ({error}); send one object") from None
        if not isinstance(body, dict):
            raise Refused(400, f"the body is of type {type(body).__name__}; send one JSON object")
        return body

    def send_json(self, status, answer):
        self.start(status, "application/json")
        self.wfile.write(json.dumps(answer).encode())

    def start_events(self):
        self.is_streaming = True
        self.start(200, "text/event-stream")

    def send_event(self, text):
        self.wfile.write(f"data: {text}\n\n".encode())

    def start(self, status, kind):
        """Begin an answer, which ends with the connection."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Report defects, but no client that has disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def post(url, body, timeout):
    """Send a request and return the response, which can be a stream."""
    try:
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, json.load(error)["error"]["message"]) from None
