"""What a client may do to a reward server, and a server to its client: too large, too slow, not what it says."""

import base64
import gzip
import io
import json
import resource
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi")

import httpx

from chunk_grpo import InputError
from chunk_grpo.reward_serving import client, protocol, server

PROMPT = "a red star"


def red(images, prompts):
    "Mean of the red channel."
    return images[:, 0].mean((1, 2))


@pytest.fixture
def serve():
    "Serves `red` with limits, as long as a block lasts."
    def serving(**limits):
        return server.serve_in_thread(server.create_scoring_app("red", red, limits=server.ServerLimits(**limits)))

    return serving


def png(width: int, height: int) -> str:
    "A black PNG in base64."
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def ask(url: str, **changes) -> httpx.Response:
    "Ask a server for the score of a small image, or of something else."
    message = {"id": "1", "form": "tensor", "images": [png(8, 8)], "prompts": [PROMPT]} | changes
    return httpx.post(url + "/score", content=json.dumps(message).encode(), timeout=60)


def connect(url: str) -> socket.socket:
    "A bare connection."
    host, port = url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)))
    line.settimeout(60)
    return line


def test_large_pictures_in_small_files_are_refused_before_they_are_unpacked(serve, monkeypatch):
    monkeypatch.setattr(Image.Image, "convert", lambda *words: pytest.fail("a picture was unpacked"))
    large = png(8192, 8192)
    assert len(large) < 400_000
    with serve() as url:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answers = [ask(url, images=[large] * 3, prompts=[PROMPT] * 3, form=form) for form in ("tensor", "pil")]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB
    for answer in answers:
        assert answer.status_code == 400
        said = "images: 201,326,592 pixels came in all, allowed are 67,108,864 in a request."
        assert answer.json()["detail"] == said


def npy_head(shape: str, kind: str = "<f4") -> str:
    "The head of a file of NumPy that says a shape, and nothing behind it."
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    return base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00" + head.ljust(117).encode() + b"\n").decode()


def damaged(width: int, height: int) -> str:
    "A PNG whose head is right and whose pixels are missing."
    return base64.b64encode(base64.b64decode(png(width, height))[:45]).decode()


WRONG = {
    "half a character": ({"prompts": ["\ud800"]}, "half of a character"),
    "half in the id": ({"id": "\ud800"}, "half of a character"),
    "many floats": ({"form": "floats", "images": [npy_head("(3, 99999, 99999)")]}, "99999 x 99999 pixels"),
    "missing floats": ({"form": "floats", "images": [npy_head("(3, 8000, 8000)")]}, "does not hold them"),
    "too many floats": ({"form": "floats", "images": [npy_head("(3, 8192, 8192)")] * 2, "prompts": [PROMPT] * 2},
                        "134,217,728 pixels came in all"),
    "negative": ({"form": "floats", "images": [npy_head("(3, -1, 5)")]}, "no file of NumPy"),
    "beyond numbers": ({"form": "floats", "images": [npy_head(f"(3, {'9' * 60}, 5)")]}, "no file of NumPy"),
    "nested head": ({"form": "floats", "images": [npy_head("(" * 60)]}, "no file of NumPy"),
    "objects": ({"form": "floats", "images": [npy_head("(3, 1, 1)", "|O")]}, "no file of NumPy"),
    "wide": ({"images": [png(9000, 1)]}, "9000 x 1 pixels"),
    "cut": ({"images": [damaged(8, 8)]}, "damaged PNG"),
    "short": ({"images": ["AAAA"]}, "no PNG"),
    "no base64": ({"images": ["\u00e9"]}, "no base64"),
    "two sizes": ({"images": [png(8, 8), png(8, 9)], "prompts": [PROMPT] * 2}, "of one size"),
    "long prompt": ({"prompts": ["a" * 20_001]}, "too long"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_request_is_said_in_a_sentence(serve, kind):
    changes, said = WRONG[kind]
    with serve() as url:
        answer = ask(url, **changes)
        assert 400 <= answer.status_code < 500, answer.text
        assert said in answer.json()["detail"]
        assert ask(url).json() == {"id": "1", "scores": [["1:0", 0.0]]}  # and it goes on


@pytest.mark.parametrize("body", [b"[" * 300_000, b'{"a":' * 300_000, b"\xff\xfe\x00", b"1" * 10_000, b""], ids=len)
def test_what_is_no_json_is_said_in_a_sentence(serve, body):
    with serve() as url:
        answer = httpx.post(url + "/score", content=body, timeout=60)
    assert answer.status_code == 400 and "detail" in answer.json()


def test_no_pages_about_the_server(serve):
    with serve() as url:
        assert [httpx.get(url + path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3


def test_a_body_that_trickles_in_gives_its_place_back(serve):
    with serve(waiting=0, body_seconds=1.0, head_seconds=1.0) as url:
        slow = connect(url)
        slow.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        began, answer = time.monotonic(), b""
        assert ask(url).status_code in (200, 503)
        while b"\r\n\r\n" not in answer and time.monotonic() - began < 60:
            slow.sendall(b"x")
            time.sleep(0.1)
            slow.setblocking(False)
            try:
                answer += slow.recv(1000)
            except BlockingIOError:
                pass
            slow.setblocking(True)
        assert answer.startswith(b"HTTP/1.1 408")
        assert ask(url).status_code == 200
        slow.settimeout(60)
        while slow.recv(1000):  # and the connection ends
            pass
        slow.close()


def test_a_head_that_trickles_in_is_given_up(serve):
    with serve(head_seconds=0.5) as url:
        slow = connect(url)
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert slow.recv(100_000).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /health HT")  # a second one, on the same connection
        slow.settimeout(60)
        rest = b""
        while part := slow.recv(100_000):
            rest += part
        assert b"HTTP/1.1" not in rest
        slow.close()


def test_places_are_given_back_whatever_becomes_of_a_request(serve):
    with serve(waiting=0, pixels=64, images=1) as url:
        for _ in range(6):
            assert ask(url, images=[png(9, 9)]).status_code == 400
            assert ask(url, images=["AAAA"]).status_code == 400
            assert ask(url).status_code == 200


def test_pixels_in_a_tensor_and_floats_are_those_that_were_sent(serve):
    images = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    rounded = protocol.quantize_to_uint8(images).float() / 255
    seen = []

    def reward(given, prompts):
        seen.append(given)
        return given[:, 0].mean((1, 2))

    with server.serve_in_thread(server.create_scoring_app("r", reward)) as url:
        for wanted in (images, rounded, images.transpose(2, 3).contiguous().transpose(2, 3)):
            client.load_remote_reward(url)(wanted, [PROMPT] * 3)
            assert torch.equal(seen[-1], wanted) and seen[-1].is_contiguous()


class Stranger(BaseHTTPRequestHandler):
    "Answers with what the test has left for it: bytes, or a function that writes."

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.body = json.loads(self.rfile.read(length))
        self.send_response(200)
        kind, answer = self.server.kind, self.server.answer
        if kind:
            self.send_header("Content-Encoding", kind)
        self.end_headers()
        try:
            for part in answer(self.server.body["id"]):
                self.wfile.write(part)
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.server.left.set()

    def log_message(self, *_):
        pass


@pytest.fixture
def stranger():
    "A server that answers as it likes, and a client of it."
    other = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    other.daemon_threads, other.left = True, threading.Event()
    threading.Thread(target=other.serve_forever, daemon=True).start()

    def score(answer, kind="", timeout=30.0):
        other.answer, other.kind = answer, kind
        remote = client.RemoteReward(f"http://127.0.0.1:{other.server_port}", timeout=timeout, retries=0, pause=0.0)
        return remote(torch.rand(1, 3, 8, 8), [PROMPT])

    yield score, other
    other.shutdown()
    other.server_close()


def test_the_time_of_a_request_is_that_of_all_its_bytes(stranger):
    score, other = stranger

    def trickle(number):
        for _ in range(600):
            yield b" "
            time.sleep(0.1)

    began = time.monotonic()
    with pytest.raises(protocol.RewardUnavailable, match="no answer within 1 s"):
        score(trickle, timeout=1.0)
    assert time.monotonic() - began < 30
    assert other.left.wait(30), "the connection is closed"


@pytest.mark.parametrize("kind", ["", "gzip"])
def test_an_answer_without_end_is_not_read_to_its_end(stranger, kind):
    score, _ = stranger
    million = gzip.compress(b" " * 100_000_000, 1) if kind else b" " * 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="answered with more than 4,000,000 bytes|must answer with JSON"):
        score(lambda number: (million for _ in range(200)), kind)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize(("answer", "said"), [
    ('[1]', "must answer with JSON"),
    ("[" * 100_000, "must answer with JSON"),
    ('{"id": "%s"}', "must answer with pairs"),
    ('{"id": "%s", "scores": 3}', "must answer with pairs"),
    ('{"id": "%s", "scores": [[["x"], 1]]}', "must answer with pairs"),
    ('{"id": "%s", "scores": [["%s:0", [1]]]}', "must answer with pairs"),
    ('{"id": "%s", "scores": [["%s:0", 1, 2]]}', "must answer with pairs"),
    ('{"id": "%s", "scores": [["%s:0", 1e300]]}', "returned inf"),
    ('{"id": "%s", "scores": [["%s:0", NaN]]}', "returned nan"),
    ('{"id": "%s", "scores": [["%s:0", 1' + "0" * 400 + "]]}", "must answer with pairs"),
    ('{"id": "%s", "scores": [["%s:0", 1' + "0" * 5000 + "]]}", "must answer with JSON"),
    ('{"id": ["%s"], "scores": []}', "answered request"),
], ids=range(12))
def test_an_answer_that_is_none_is_said_in_a_sentence(stranger, answer, said):
    score, _ = stranger
    with pytest.raises(InputError, match=said):
        score(lambda number: [answer.replace("%s", number).encode()])


def test_a_token_that_no_header_can_hold_is_not_shown(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "s3cret\n")
    with pytest.raises(InputError, match="without spaces or line ends") as error:
        client.load_remote_reward("http://127.0.0.1:9", token_variable="A_TOKEN", retries=0)
    assert "s3cret" not in str(error.value)
