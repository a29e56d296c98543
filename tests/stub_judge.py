"""A judge on this machine that speaks the OpenAI protocol, knows its answers, and fails as it is told to."""

import base64
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image

NAME = "judge-of-the-tests-2026"  # what the server calls itself, whatever it was asked for


class Stub:
    """What the judge was asked, and what it does."""

    def __init__(
        self,
        answer: Callable[[str, int], str],
        fault: Callable[[str, int], str | None],
        key: str | None,
    ):
        self.answer = answer  # (text, grey of the image) -> words
        # (text with grey, how often it came before) -> a name of `FAULTS`, or None
        self.fault = fault
        self.key = key  # the only one that is let in; None: all are
        self.slow = 0.0  # seconds before each answer
        self.came = Counter()  # requests by text with grey
        self.done = Counter()  # faults by name
        self.order = []  # texts in the order of their answers
        self.bodies = []  # of the first ten requests
        self.lock = threading.Lock()
        self.url = ""


def reply(words: str | None) -> bytes:
    """A body of the protocol."""
    message = {"role": "assistant", "content": words}
    return json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "model": NAME,
            "usage": {"total_tokens": 9},
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
    ).encode()


FAULTS = {  # name -> status, headers, body
    "500": (500, {}, b"the server fell over"),
    "503": (503, {}, b"{}"),
    "429": (429, {"Retry-After": "0"}, b'{"error": {"message": "slow down"}}'),
    "html": (200, {}, b"<html>a proxy's page</html>"),
    "cut": (200, {}, reply("Score: 1")[:40]),
    "other": (200, {}, b'{"choices": []}'),
    "list": (200, {}, b"[1, 2]"),
    "mumble": (200, {}, reply("Hard to say.")),
    "empty": (200, {}, reply(None)),
    "filter": (400, {}, b'{"error": {"code": "content_filter", "message": "not this image"}}'),
    "unknown": (404, {}, b'{"error": {"message": "the model does not exist"}}'),
}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        stub: Stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
            said = f'{{"error": {{"message": "Incorrect API key provided: {self.headers.get("Authorization")}"}}}}'
            stub.came["401"] += 1
            return self.send(401, {}, said.encode())
        image, text = body["messages"][0]["content"]
        head, data = image["image_url"]["url"].split(",")
        assert self.path == "/v1/chat/completions" and head == "data:image/png;base64"
        grey = Image.open(io.BytesIO(base64.b64decode(data))).convert("L").getpixel((0, 0))
        name = f"{grey} {text['text']}"
        with stub.lock:
            before = stub.came[name]
            stub.came[name] += 1
            stub.bodies += [body] if len(stub.bodies) < 10 else []
        time.sleep(stub.slow)
        fault = stub.fault(name, before)
        if fault:
            stub.done[fault] += 1
        if fault == "sleep":
            time.sleep(2.0)
        if fault == "drop":
            return self.connection.close()
        with stub.lock:
            stub.order.append(name)
        self.send(*FAULTS.get(fault, (200, {}, reply(stub.answer(text["text"], grey)))))

    def send(self, status: int, headers: dict, body: bytes):
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": len(body),
            **headers,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


class Server(ThreadingHTTPServer):
    """Says nothing of clients that went away: that is what is tested."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serve(answer, fault=lambda name, before: None, key=None) -> Iterator[Stub]:
    """The judge, for as long as the block runs."""
    server = Server(("127.0.0.1", 0), Handler)
    server.stub = Stub(answer, fault, key)
    server.stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.stub
    server.shutdown()
    server.server_close()


def number(text: str) -> int:
    """The number of the thing that a prompt of the tests asks for."""
    return int(re.search(r"thing (\d+)", text)[1])


def three_scores(text: str, grey: int) -> str:
    """WISE: scores by the prompt's number and the image's grey."""
    n = number(text)
    return f"Consistency: {(n + grey) % 3}\nRealism: {n % 2}\nAesthetics: {n // 7 % 3}"


def yes_or_no(text: str, grey: int) -> str:
    """DPG: an answer by the prompt's number, the question's and the image's grey."""
    return (
        "yes" if (number(text) * 7 + int(re.search(r"part (\d)", text)[1]) * 3 + grey) % 4 else "no"
    )
