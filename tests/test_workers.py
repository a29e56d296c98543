"""Rewards that run elsewhere: what can go wrong between two processes, with real processes and real connections."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import faulty_rewards
import pytest
import torch
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.pocket import read_pocket_prompts as pocket_prompts
from chunk_grpo.reward_serving import client as remote_client
from chunk_grpo.reward_serving import protocol, worker
from chunk_grpo.rewards import async_scoring, rewards

HERE = Path(__file__).resolve().parent
IMAGES = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
PROMPTS = pocket_prompts("test")[:5]
PICTURES = [Image.fromarray(x) for x in protocol.quantize_to_uint8(IMAGES).permute(0, 2, 3, 1).numpy()]
RED = torch.tensor(faulty_rewards.red(PICTURES))


def faulty(name: str, file=None, **limits) -> worker.RewardWorker:
    "A worker with a loader of `faulty_rewards`, as in another environment: light, since it brings no torch."
    options, limits = {"file": str(file)} if file else None, {"pause": 0.01} | limits
    return worker.load_reward_in_worker(
        f"{HERE / 'faulty_rewards.py'}:{name}", options, python=sys.executable, **limits
    )


def alive(pid: int) -> bool:
    "Whether a process is there and no zombie."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    "Whether a process ends in time."
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def fault(tmp_path):
    "Writes how often a fault strikes."
    def write(times: int) -> Path:
        (tmp_path / "fault").write_text("x\n" * times)
        return tmp_path / "fault"
    return write


@pytest.fixture
def serve():
    "Serves a reward as long as a block lasts."
    pytest.importorskip("fastapi")
    from chunk_grpo.reward_serving import server
    return lambda *words, **options: server.serve_in_thread(server.create_scoring_app(*words, **options))


def server_limits(**given):
    "The limits of a server."
    from chunk_grpo.reward_serving import server
    return server.ServerLimits(**given)


def test_bit_for_bit_here_in_a_worker_and_over_http(serve):
    clip = rewards.load_reward("pocket-clip")
    expected = clip(IMAGES, PROMPTS)
    child = worker.load_reward_in_worker("pocket-clip")
    assert torch.equal(child(IMAGES, PROMPTS), expected)
    assert torch.equal(rewards.score_images("pocket-clip", child, IMAGES, PROMPTS), expected)
    with serve("pocket-clip", clip) as url:
        assert torch.equal(remote_client.load_remote_reward(url)(IMAGES, PROMPTS), expected)
    with serve("pocket-clip", child) as url:  # a worker behind a server
        assert torch.equal(remote_client.load_remote_reward(url)(IMAGES, PROMPTS), expected)
    child.close()


def test_a_child_killed_in_flight_is_started_again(fault):
    child = faulty("dying", fault(2))
    first = child.child.pid
    assert torch.equal(child(PICTURES, PROMPTS), RED)
    assert child.child.pid != first and gone(first)
    child.close()
    assert child.child is None


def test_a_child_that_hangs_is_ended_with_what_it_started(fault):
    child = faulty("hanging", file := fault(1), timeout=3.0)
    began = time.monotonic()
    assert torch.equal(child(PICTURES, PROMPTS), RED)
    assert time.monotonic() - began > 3.0
    assert all(gone(int(pid)) for pid in file.with_suffix(".pids").read_text().split())
    child.close()


def test_a_reward_that_stays_away(fault):
    child = faulty("dying", file := fault(99), retries=1)
    with pytest.raises(protocol.RewardUnavailable, match=r"after 2 tries \(the last: it was killed by SIGKILL\)"):
        child(PICTURES, PROMPTS)
    assert len(file.read_text().splitlines()) == 97
    file.write_text("")
    assert torch.equal(child(PICTURES, PROMPTS), RED)  # and works again when it is back
    child.close()


def test_a_loader_that_dies_is_tried_again(fault):
    child = faulty("late", fault(1))
    assert torch.equal(child(PICTURES, PROMPTS), RED)
    child.close()
    with pytest.raises(protocol.RewardUnavailable, match="after 1 tries .*it exited with status 9"):
        faulty("late", fault(9), retries=0)


def test_pauses_double_and_end_at_a_minute(monkeypatch):
    slept = []
    monkeypatch.setattr(worker.time, "sleep", slept.append)
    child = worker.RewardWorker("r", [], {}, retries=9)
    def ask():
        raise worker.WorkerDied("no")
    with pytest.raises(protocol.RewardUnavailable):
        worker.call_with_retries(child, ask)
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_prints_harm_nothing(capfd):
    child = faulty("noisy")
    for _ in range(2):
        assert torch.equal(child(PICTURES, PROMPTS), RED)
    child.close()
    assert capfd.readouterr().err.count('"scores"') == 4


@pytest.mark.parametrize(("name", "said"), {
    "nan": f"faulty_rewards.py:nan returned nan for the prompt {PROMPTS[1]!r}",
    "short": "failed in its worker: ValueError: the reward must return 5 numbers, one an image; it did not",
    "raising": "failed in its worker: RuntimeError: the model is not well",
}.items())
def test_wrong_scores_are_errors_at_once(name, said):
    child = faulty(name)
    with pytest.raises(InputError) as error:
        child(PICTURES, PROMPTS)
    assert said in str(error.value) and not isinstance(error.value, protocol.RewardUnavailable)
    assert child.number == 1 and child.child.poll() is None  # it was not started again, and lives
    child.close()


WRONG = {
    "protocol": "speaks protocol 2; allowed is 1",
    "number": "answered request '0' instead of '1'",
    "ids": "left out 5 of 5 images and scored 5 that nobody sent",
    "twice": "gave two scores for one image",
    "missing": "left out 1 of 5 images and scored 0 that nobody sent",
    "more": "left out 0 of 5 images and scored 1 that nobody sent",
    "infinite": "returned inf for the prompt",
    "word": "must answer with pairs of image id and score",
    "none": "must answer with pairs of image id and score",
    "list": "must answer with one line of JSON",
    "garbage": "must answer with one line of JSON; it said b'I am a teapot",
    "two": "must answer with one line of JSON",
}


def other(kind: str) -> worker.RewardWorker:
    "A worker whose program answers wrongly."
    return worker.RewardWorker(
        "r", [sys.executable, HERE / "faulty_rewards.py", kind], worker.child_env(True), pause=0.01
    )


@pytest.mark.parametrize("kind", ["number", "ids", "garbage"])
def test_wrong_answers_are_said(kind):
    child = other(kind)
    with pytest.raises(InputError) as error:
        child(PICTURES, PROMPTS)
    assert WRONG[kind] in str(error.value)
    assert (child.child is None) == (kind != "ids")  # after an answer to nobody knows what the child is ended
    child.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_every_wrong_answer_is_said(kind):
    child = other(kind)
    with pytest.raises(InputError) as error:
        child(PICTURES, PROMPTS)
    assert WRONG[kind] in str(error.value)
    child.close()


def test_order_is_restored_by_ids():
    child = other("order")
    assert child(PICTURES, PROMPTS).tolist() == [0, 1, 2, 3, 4]
    child.close()


def test_refusals_before_a_child_is_started():
    child = worker.RewardWorker("r", ["/no/such/program"], {})
    with pytest.raises(InputError, match="5 images came with 4 prompts"):
        child(PICTURES, PROMPTS[:4])
    with pytest.raises(InputError, match="not finite"):
        child(IMAGES * float("nan"), PROMPTS)
    with pytest.raises(InputError, match="allowed is float"):
        child(IMAGES.byte(), PROMPTS)


PARENT = """
import sys
from chunk_grpo.reward_serving import worker
from PIL import Image
child = worker.load_reward_in_worker(sys.argv[1], {"file": sys.argv[2]}, python=sys.executable)
print(child.child.pid, flush=True)
child([Image.new("RGB", (2, 2))], ["a"])
"""


def test_a_child_does_not_outlive_its_parent(fault):
    file = fault(1)
    command = [sys.executable, "-c", PARENT, f"{HERE / 'faulty_rewards.py'}:hanging", file]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
    pid = int(parent.stdout.readline())
    pids = file.with_suffix(".pids")
    while not pids.is_file() or len(pids.read_text().split()) < 2:  # it hangs in the call now
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid) and all(gone(int(p)) for p in pids.read_text().split())


def test_a_worker_restarted_in_a_thread_outlives_the_thread(fault):
    child = faulty("dying", fault(1))
    with ThreadPoolExecutor(1) as thread:
        scores = async_scoring.submit_scoring(thread, "dying", child, PICTURES, PROMPTS).result(60)
    assert torch.equal(scores, RED)
    pid = child.child.pid
    time.sleep(1.5)  # twice as long as the child looks at its parent
    assert torch.equal(child(PICTURES, PROMPTS), RED) and child.child.pid == pid
    child.close()


def test_an_interrupt_leaves_no_half_read_answer(fault):
    child = faulty("hanging", fault(1))
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        child(PICTURES, PROMPTS)
    assert torch.equal(child(PICTURES[:2], PROMPTS[:2]), RED[:2])
    child.close()


# Over HTTP: a server that has the faults, and then the real one.


class Faults(BaseHTTPRequestHandler):
    "Answers with the first fault that is left, then correctly: the score of image i is i."

    def do_GET(self):
        self.say(200, {"protocol": 1, "name": "r"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(self.headers.get("Authorization"))
        number, pairs = body["id"], [[f"{body['id']}:{i}", float(i)] for i in range(len(body["images"]))]
        fault = self.server.faults.pop(0) if self.server.faults else "fine"
        if isinstance(fault, int):
            return self.say(fault, {"detail": "out of order."})
        if fault == "slow":
            time.sleep(1.0)
        if fault == "cut":
            return self.connection.close()
        answers = {"reversed": pairs[::-1], "missing": pairs[1:], "twice": pairs[:-1] + pairs[:1]}
        answer = {"id": "other" if fault == "number" else number, "scores": answers.get(fault, pairs)}
        self.say(200, "I am a teapot" if fault == "garbage" else answer)

    def say(self, status, message):
        text = (message if message == "I am a teapot" else json.dumps(message)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Quiet(ThreadingHTTPServer):
    "A client that has gone away is no news."

    def handle_error(self, *_):
        pass


@pytest.fixture
def endpoint():
    "A server with faults, and a client of it that pauses little."
    server = Quiet(("127.0.0.1", 0), Faults)
    server.faults, server.seen = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def client(faults, **changes):
        server.faults[:] = faults
        given = {"timeout": 20.0, "pause": 0.01, "retries": 2} | changes
        return remote_client.load_remote_reward(f"http://127.0.0.1:{server.server_port}", **given)

    yield client, server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("faults", [[500, 503], ["cut", 502], ["slow"], ["reversed"]], ids=str)
def test_what_passes_is_tried_again(endpoint, faults):
    client, server = endpoint
    assert client(faults, timeout=0.5)(IMAGES, PROMPTS).tolist() == [0, 1, 2, 3, 4]
    assert len(server.seen) == len([f for f in faults if f != "reversed"]) + 1


@pytest.mark.parametrize(("fault", "said"), {
    401: "refused (401): out of order.", 413: "refused (413)", 307: "refused (307)",
    "number": "answered request 'other' instead of", "missing": "left out 1 of 5 images",
    "twice": "two scores for one image", "garbage": "must answer with JSON; it said b'I am a teapot'",
}.items())
def test_what_would_fail_again_is_said_at_once(endpoint, fault, said):
    client, server = endpoint
    with pytest.raises(InputError) as error:
        client([fault])(IMAGES, PROMPTS)
    assert said in str(error.value) and not isinstance(error.value, protocol.RewardUnavailable)
    assert len(server.seen) == 1


def test_a_server_that_stays_away(endpoint):
    client, server = endpoint
    with pytest.raises(
        protocol.RewardUnavailable, match=r"stayed away after 3 tries \(the last: status 500, out of order"
    ):
        client([500] * 9)(IMAGES, PROMPTS)
    assert len(server.seen) == 3
    with pytest.raises(protocol.RewardUnavailable, match="the last: no answer within 0.1 s"):
        client(["slow"] * 9, timeout=0.1, retries=1)(IMAGES, PROMPTS)


def test_the_token_is_sent_and_nowhere_kept(endpoint, monkeypatch):
    client, server = endpoint
    monkeypatch.setenv("A_TOKEN", "s3cret")
    reward = client([], token_variable="A_TOKEN")
    reward(IMAGES, PROMPTS)
    assert server.seen == ["Bearer s3cret"] and "s3cret" not in repr(reward) + repr(vars(reward))
    monkeypatch.delenv("A_TOKEN")
    with pytest.raises(InputError, match="the environment variable A_TOKEN must hold the token"):
        reward(IMAGES, PROMPTS)


def test_retries_do_not_disturb_the_numbers_of_a_run(endpoint):
    import random

    client, _ = endpoint
    random.seed(0)
    torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    client([500, 500])(IMAGES, PROMPTS)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_clients_that_share_a_batch_get_their_own_scores(serve):
    sizes = []
    def reward(images, prompts):
        sizes.append(len(prompts))
        return images[:, 0].mean((1, 2))
    parts = [slice(0, 2), slice(2, 5)]
    with serve("red", reward, batch_wait_ms=300) as url, ThreadPoolExecutor(2) as pool:
        ask = remote_client.load_remote_reward(url)
        together = list(pool.map(lambda p: ask(IMAGES[p], PROMPTS[p]), parts))
    assert sizes == [5]
    assert torch.equal(torch.cat(together), IMAGES[:, 0].mean((1, 2)))
    clip = rewards.load_reward("pocket-clip")
    with serve("clip", clip, batch_wait_ms=300) as url, ThreadPoolExecutor(2) as pool:
        ask = remote_client.load_remote_reward(url)
        joined = list(pool.map(lambda p: ask(IMAGES[p], PROMPTS[p]), parts))
    for part, found in zip(parts, joined, strict=True):
        assert (found - clip(IMAGES[part], PROMPTS[part])).abs().max() < 1e-6


def test_many_clients_without_joining_get_the_bits_of_each_alone(serve):
    clip = rewards.load_reward("pocket-clip")
    parts = [slice(i, i + n) for n in (1, 2, 3) for i in range(3)]
    with serve("clip", clip) as url, ThreadPoolExecutor(4) as pool:
        ask = remote_client.load_remote_reward(url)
        found = list(pool.map(lambda p: ask(IMAGES[p], PROMPTS[p]), parts))
    for part, scores in zip(parts, found, strict=True):
        assert torch.equal(scores, clip(IMAGES[part], PROMPTS[part]))


def test_the_server_says_what_it_refuses(serve, monkeypatch):
    def reward(images, prompts):
        if "crash" in prompts:
            raise RuntimeError("no memory")
        return torch.full((len(prompts),), float("nan")) if "nan" in prompts else torch.zeros(len(prompts))
    monkeypatch.setenv("A_TOKEN", "right")
    monkeypatch.setenv("ANOTHER", "wrong")
    with serve("r", reward, token="right", limits=server_limits(images=5, bytes=500_000)) as url:
        ask = remote_client.load_remote_reward(url, token_variable="A_TOKEN", retries=1, pause=0.01)
        assert ask(IMAGES, PROMPTS).tolist() == [0] * 5
        with pytest.raises(InputError, match=r"refused \(401\): token: it is missing or wrong"):
            remote_client.load_remote_reward(url, token_variable="ANOTHER")
        with pytest.raises(InputError, match=r"refused \(413\): body: it is larger than 500000 bytes"):
            ask(torch.rand(1, 3, 500, 500), ["a"])
        with pytest.raises(InputError, match=r"refused \(413\): images: 6 came; allowed are 5"):
            ask(IMAGES[[0] * 6], ["a"] * 6)
        with pytest.raises(InputError, match=r"refused \(422\): reward: r returned nan for the prompt 'nan'"):
            ask(IMAGES[:1], ["nan"])
        with pytest.raises(protocol.RewardUnavailable, match="status 500, server: r failed .RuntimeError: no memory"):
            ask(IMAGES[:1], ["crash"])
        assert (
            ask.about["name"] == "r"
            and remote_client.load_remote_reward(url, token_variable="A_TOKEN").about["queue"] == 0
        )


def test_a_full_queue_is_tried_again_later(serve):
    begun, free = threading.Event(), threading.Event()
    def reward(images, prompts):
        begun.set()
        free.wait(60)
        return torch.zeros(len(prompts))
    with serve("r", reward, limits=server_limits(waiting=1)) as url, ThreadPoolExecutor(4) as pool:
        ask = remote_client.load_remote_reward(url, retries=0)
        first = [pool.submit(ask, IMAGES[:1], PROMPTS[:1])]
        assert begun.wait(60)  # it is being scored, so the next one waits; sent together, one might be refused
        first.append(pool.submit(ask, IMAGES[:1], PROMPTS[:1]))
        end = time.monotonic() + 60
        while remote_client.load_remote_reward(url).about["queue"] < 1 and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(protocol.RewardUnavailable, match="status 503, server: 1 requests wait already"):
            ask(IMAGES[:1], PROMPTS[:1])
        patient = pool.submit(remote_client.load_remote_reward(url, retries=8, pause=0.05), IMAGES[:1], PROMPTS[:1])
        free.set()
        assert [f.result(60).tolist() for f in (*first, patient)] == [[0.0]] * 3


def test_background_keeps_order_and_says_what_went_wrong():
    thread = ThreadPoolExecutor(1)
    order = []
    def reward(images, prompts):
        order.append(len(prompts))
        time.sleep(0.05)
        return images[:, 0].mean((1, 2))
    futures = [async_scoring.submit_scoring(thread, "r", reward, IMAGES[:n], PROMPTS[:n]) for n in (5, 1, 3)]
    wrong = async_scoring.submit_scoring(thread, "r", lambda i, p: [1.0], IMAGES, PROMPTS)
    assert [f.result(20).shape[0] for f in futures] == [5, 1, 3] == order
    with pytest.raises(InputError, match="returned scores of shape"):
        wrong.result(20)
    thread.shutdown()
    with pytest.raises(RuntimeError):
        async_scoring.submit_scoring(thread, "r", reward, IMAGES, PROMPTS)
