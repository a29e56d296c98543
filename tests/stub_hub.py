"""A hub on this machine, to which huggingface_hub uploads: it lets one token in and keeps what it gets."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_token_of_the_tests"


class Hub:
    """The repositories of the hub."""

    def __init__(self) -> None:
        self.url = ""
        self.private: dict[str, bool] = {}  # of each repository
        self.files: dict[str, dict[str, bytes]] = {}  # repository -> path -> content
        self.read_only = False  # reject every commit


class Handler(BaseHTTPRequestHandler):
    """Answers the requests that an upload makes."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Print nothing."""

    def body(self) -> bytes:
        """Read the body of the request, whole or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, value: object, status: int = 200) -> None:
        """Send JSON."""
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Say who is logged in."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        return self.answer({"name": "me", "type": "user"})

    def do_POST(self) -> None:
        """Make a repository, say how to upload files, or take a commit."""
        body = self.body()
        path = self.path.partition("?")[0].removeprefix("/api/")
        if path == "validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "repos/create":
            wanted = json.loads(body)
            repository = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            is_private = wanted.get("private") or wanted.get("visibility") == "private"
            self.hub.private.setdefault(repository, bool(is_private))
            return self.answer({"url": f"{self.hub.url}/{repository}"})
        _, owner, name, action, _ = path.split("/")
        repository = f"{owner}/{name}"
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if self.hub.read_only:
            return self.answer({"error": "You may not write here."}, 403)
        kept = self.hub.files.setdefault(repository, {})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = f"{self.hub.url}/{repository}/commit/1"
        return self.answer({"commitUrl": commit, "commitOid": "1", "hookOutput": ""})


@contextmanager
def running() -> Iterator[Hub]:
    """Yield a hub that answers until the end of the block."""
    hub = Hub()
    handler = type("Handler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
