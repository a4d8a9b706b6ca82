"""A server in OpenAI's form on a local port, with faults on demand, for tests of judges, teachers and agents.

    with LLMServer(lambda body: "hello") as server: ...  # every question is answered alike
    with LLMServer(answer, script=[Fault(429, {"Retry-After": "0"}), "first", Fault(hang=True)]) as s: ...

`answer(body)` is called for what the script does not cover; it may return a text, a message (dict), a whole
response (dict with "choices"), or a Fault. Runs in threads of the test's process.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROMPT_TOKENS, COMPLETION_TOKENS = 100, 10  # of every good answer


@dataclass
class Fault:
    """One answer that is none. The first of reset, hang, drip decides; else it is a plain HTTP answer."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"out of order"
    delay_s: float = 0.0  # before the answer
    reset: bool = False  # the connection is cut without an answer
    hang: bool = False  # no byte until the server closes
    drip: bool = False  # a body that comes byte by byte and never ends


def say(content, **message) -> dict:
    """A whole response that says `content`."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    choice["message"] |= message
    tokens = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": tokens}


def call(name: str, arguments: str, id: str = "call_x") -> dict:
    """One entry of a message's tool_calls; arguments are the text as a server sends it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class LLMServer:
    """url        base url, for Endpoint
    bodies     every question's JSON, in order of arrival
    headers    its headers
    in_flight  most questions that were open at once
    models     what /models names
    """

    def __init__(self, answer=lambda body: "ok", *, script=(), models=("m",)):
        self.answer, self.script, self.models = answer, list(script), models
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.in_flight = self._open = 0
        self.closing = threading.Event()
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                outer._connections.append(self.connection)

            def do_GET(self):
                outer._send(self, 200, {}, json.dumps({"data": [{"id": id} for id in outer.models]}).encode())

            def do_POST(self):
                outer._post(self)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self._connections:  # kept open, they would answer on
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _post(self, handler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self._open += 1
            self.in_flight = max(self.in_flight, self._open)
            given = self.script.pop(0) if self.script else None
        try:
            if handler.path != "/v1/chat/completions":
                given = Fault(404, body=b"no such path")
            given = self.answer(body) if given is None else given
        finally:
            with self._lock:
                self._open -= 1  # before the answer leaves: its reader may ask again at once
        try:
            self._answer(handler, given)
        except OSError:
            handler.close_connection = True  # the client has gone

    def _answer(self, handler, given) -> None:
        if not isinstance(given, Fault):
            message = {"content": given} if isinstance(given, str) else given
            whole = message if "choices" in message else say(**message)
            return self._send(handler, 200, {}, json.dumps(whole).encode())
        time.sleep(given.delay_s)
        if given.reset:
            linger = struct.pack("ii", 1, 0)  # so that closing sends a reset
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.connection.close()
        elif given.hang:
            self.closing.wait(60)
        elif given.drip:
            self._head(handler, 200, {"Content-Length": "1000000"})
            while not self.closing.wait(0.02):
                handler.wfile.write(b" ")
        else:
            return self._send(handler, given.status, given.headers, given.body)
        handler.close_connection = True

    def _send(self, handler, status: int, headers: dict, body: bytes) -> None:
        self._head(
            handler, status, {"Content-Type": "application/json", **headers, "Content-Length": len(body)}
        )
        handler.wfile.write(body)

    def _head(self, handler, status: int, headers: dict) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, str(value))
        handler.end_headers()
