"""Rewards that run elsewhere: what can go wrong between two processes, with real processes and real connections."""

import gzip
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import faulty_rewards
import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from served import serve_in_thread

from chunk_grpo import InputError
from chunk_grpo.core.settings import load_settings
from chunk_grpo.pocket import read_pocket_prompts as pocket_prompts
from chunk_grpo.reward_serving import client, placement, server
from chunk_grpo.rewards import rewards
from chunk_grpo.training.state import prepare_state

HERE = Path(__file__).resolve().parent
IMAGES = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
PROMPTS = pocket_prompts("test")[:5]
PICTURES = [Image.fromarray(x) for x in (IMAGES * 255).round().byte().permute(0, 2, 3, 1).numpy()]
RED = torch.tensor(faulty_rewards.red(PICTURES))
ONE = server.pack_request(np.zeros((1, 3, 8, 8), np.float32), ["a red star"])


def red(images, prompts):
    """Mean of the red channel."""
    return images[:, 0].mean((1, 2))


def faulty(name: str, file=None, **limits) -> placement.ChildProcessReward:
    """A child with a loader of `faulty_rewards`, as in another environment."""
    options, limits = {"file": str(file)} if file else {}, {"pause": 0.01} | limits
    loader = f"{HERE / 'faulty_rewards.py'}:{name}"
    return placement.ChildProcessReward(
        name, loader, options, python=sys.executable, **limits
    ).start()


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time."""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def fault(tmp_path):
    """Writes how often a fault strikes."""

    def write(times: int) -> Path:
        (tmp_path / "fault").write_text("x\n" * times)
        return tmp_path / "fault"

    return write


def serve(name="red", reward=red, token=None, **limits):
    """Serves a reward as long as a block lasts."""
    return serve_in_thread(
        server.create_scoring_app(name, reward, token, server.ServerLimits(**limits))
    )


def test_bit_for_bit_here_in_a_child_and_over_http():
    clip = rewards.load_reward("pocket-clip")
    expected = clip(IMAGES, PROMPTS)
    child = placement.load_placed_reward("pocket-clip", worker=True, pixels="exact")
    assert torch.equal(child(IMAGES, PROMPTS), expected)
    assert torch.equal(rewards.score_images("pocket-clip", child, IMAGES, PROMPTS), expected)
    for reward in (clip, child):  # and a child behind a server
        with serve("pocket-clip", reward) as url:
            assert torch.equal(client.load_remote_reward(url)(IMAGES, PROMPTS), expected)
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
    with pytest.raises(
        client.RewardUnavailable, match=r"after 2 tries \(the last: it was killed by SIGKILL\)"
    ):
        child(PICTURES, PROMPTS)
    assert len(file.read_text().splitlines()) == 97
    file.write_text("")
    assert torch.equal(child(PICTURES, PROMPTS), RED)  # and works again when it is back
    child.close()


def test_a_loader_that_dies_later_is_tried_again(fault):
    child = faulty("late", file := fault(0))
    os.killpg(child.child.pid, signal.SIGKILL)
    file.write_text("x\n")
    assert torch.equal(child(PICTURES, PROMPTS), RED)
    os.killpg(child.child.pid, signal.SIGKILL)
    file.write_text("x\n" * 9)
    child.worker_options = placement.WorkerOptions(retries=1, pause=0.0)
    with pytest.raises(client.RewardUnavailable, match="after 2 tries .*it exited with status 9"):
        child(PICTURES, PROMPTS)
    child.close()


def test_a_child_that_never_started_is_not_tried_again_and_its_last_words_are_quoted(
    fault, tmp_path
):
    with pytest.raises(InputError, match="late did not start: it exited with status 9$") as error:
        faulty("late", file := fault(9))
    assert not isinstance(error.value, client.RewardUnavailable)
    assert len(file.read_text().splitlines()) == 8

    # As an environment without the server's packages: the interpreter dies before the server's first line of its own.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(
        InputError, match="status 1; its last line of output: ModuleNotFoundError: No mod"
    ):
        placement.ChildProcessReward("own", "own:reward", python=bare).start()

    (tmp_path / "slow.py").write_text(
        "import time\ndef load():\n    print('3 of 9')\n    time.sleep(60)\n"
    )
    with pytest.raises(InputError, match=r"no answer within 12 s \(`start_timeout`\); .* 3 of 9$"):
        placement.ChildProcessReward("slow", f"{tmp_path}/slow.py:load", start_timeout=12.0).start()


def test_the_function_itself_is_a_reward_in_another_environment(tmp_path):
    (tmp_path / "own.py").write_text(
        "def targets(images, prompts, records, scale=1):\n"
        "    return [scale * len(record['target']) for record in records]\n"
    )
    options = {"scale": 3, "environment": str(tmp_path / "own-env")}
    (tmp_path / "own-env/bin").mkdir(parents=True)
    script = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    (tmp_path / "own-env/bin/python").write_text(script)
    (tmp_path / "own-env/bin/python").chmod(0o755)
    child = placement.load_placed_reward(f"{tmp_path}/own.py:targets", **options)
    scores = child(PICTURES[:2], PROMPTS[:2], records=[{"target": "OPEN"}, {"target": "NO"}])
    assert scores.tolist() == [12.0, 6.0]
    child.close()
    with pytest.raises(InputError, match="neither with the options .*'size': 1.* nor as a reward"):
        placement.load_placed_reward(
            f"{tmp_path}/own.py:targets", size=1, environment=options["environment"]
        )


def test_an_environment_is_made_from_a_requirements_file(tmp_path, monkeypatch):
    """With a wheel that is at hand, so that nothing is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(placement, "SERVER_PACKAGES", ())
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/ownlib-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ownlib.py", "number = 7\n")
        about = "Metadata-Version: 2.1\nName: ownlib\nVersion: 1.0\n"
        wheel.writestr("ownlib-1.0.dist-info/METADATA", about)
        kind = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("ownlib-1.0.dist-info/WHEEL", kind)
        wheel.writestr("ownlib-1.0.dist-info/RECORD", "")
    file = tmp_path / "my_reward.txt"
    file.write_text("# mine\n--no-index\n--find-links wheels\nownlib==1.0\n")
    monkeypatch.chdir(tmp_path)
    # With these variables of another project, pip would take the package for installed, or put it elsewhere.
    (tmp_path / "other/ownlib-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "other/ownlib-1.0.dist-info/METADATA").write_text(about)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "target"))
    said = []
    folder = placement.create_environment("my_reward.txt", said.append)
    assert placement.environment_python("my_reward.txt") == folder / "bin/python"
    code = "import ownlib; print(ownlib.number)"
    done = subprocess.run([folder / "bin/python", "-c", code], capture_output=True, text=True)
    assert done.stdout == "7\n" and folder.name.startswith("my_reward-")
    file.write_text("--no-index\nownlib==1.0\n")
    with pytest.raises(InputError, match="must exist; create my_reward.txt with"):
        placement.environment_python("my_reward.txt")


def test_prints_harm_nothing(capfd):
    child = faulty("noisy")
    for _ in range(2):
        assert torch.equal(child(PICTURES, PROMPTS), RED)
    child.close()
    assert capfd.readouterr().err.count('"scores"') == 4


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "nan": f"reward: nan returned nan for the prompt {PROMPTS[1]!r}",
        "short": "reward: short must return 5 numbers, one per image, but did not",
        "raising": "failed in its worker: RuntimeError: the model is not well",
    }.items(),
)
def test_wrong_scores_are_errors_at_once(name, said):
    child = faulty(name)
    first = child.child.pid
    with pytest.raises(InputError) as error:
        child(PICTURES, PROMPTS)
    assert said in str(error.value) and not isinstance(error.value, client.RewardUnavailable)
    assert child.child.pid == first and alive(first)
    child.close()


def test_refusals_before_a_child_is_started():
    child = placement.ChildProcessReward("r", "no:such", python=sys.executable)
    with pytest.raises(InputError, match="one text per image; got 4 for 5 images"):
        child(PICTURES, PROMPTS[:4])
    with pytest.raises(InputError, match="floats in .0, 1.; got nan"):
        child(IMAGES * float("nan"), PROMPTS)
    with pytest.raises(InputError, match="must have the shape .B, 3, H, W."):
        child(IMAGES[:, :2], PROMPTS)
    assert child.child is None


PARENT = """
import sys
from chunk_grpo.reward_serving import placement
from PIL import Image
child = placement.ChildProcessReward("r", sys.argv[1], {"file": sys.argv[2]}, python=sys.executable).start()
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


def test_a_child_restarted_in_a_thread_outlives_the_thread(fault):
    child = faulty("dying", fault(1))
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(rewards.score_images, "dying", child, PICTURES, PROMPTS).result(60)
    assert torch.equal(scores, RED)
    pid = child.child.pid
    time.sleep(1.5)  # three times as long as the child looks at its parent
    assert torch.equal(child(PICTURES, PROMPTS), RED) and child.child.pid == pid
    child.close()


def test_an_interrupt_ends_the_child(fault):
    child = faulty("hanging", fault(1))
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        child(PICTURES, PROMPTS)
    assert child.child is None
    assert torch.equal(child(PICTURES[:2], PROMPTS[:2]), RED[:2])
    child.close()


def test_only_the_parent_may_ask_a_child():
    child = faulty("noisy")
    assert httpx.get(child.url + "/health").status_code == 401
    assert child.token not in " ".join(
        Path(f"/proc/{child.child.pid}/cmdline").read_text().split("\0")
    ) + repr(child)
    child.close()


# A client of servers with faults.


class Faults(BaseHTTPRequestHandler):
    """Answers with the first fault that is left, then correctly: the score of image i is i."""

    def do_GET(self):
        self.say(200, {"protocol": server.PROTOCOL_VERSION, "name": "r"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(self.headers.get("Authorization"))
        scores = [float(i) for i in range(len(server.unpack_request(body).prompts))]
        fault = self.server.faults.pop(0) if self.server.faults else "fine"
        if isinstance(fault, int):
            return self.say(fault, {"detail": "out of order."})
        if fault == "slow":
            time.sleep(1.0)
        if fault == "cut":
            return self.connection.close()
        if isinstance(fault, bytes) or callable(fault):
            return self.say(200, fault)
        self.say(200, {"scores": scores})

    def say(self, status, message):
        self.send_response(status)
        if callable(message):
            self.end_headers()
            try:
                for part in message():
                    self.wfile.write(part)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                self.server.left.set()
            return
        text = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Quiet(ThreadingHTTPServer):
    """A client that has gone away is no news."""

    daemon_threads = True

    def handle_error(self, *_):
        pass


@pytest.fixture
def endpoint():
    """A server with faults, and a client of it that pauses little."""
    other = Quiet(("127.0.0.1", 0), Faults)
    other.faults, other.seen, other.left = [], [], threading.Event()
    threading.Thread(target=other.serve_forever, daemon=True).start()

    def remote(faults, **changes):
        other.faults[:] = faults
        given = {"timeout": 20.0, "pause": 0.01, "retries": 2} | changes
        return client.load_remote_reward(f"http://127.0.0.1:{other.server_port}", **given)

    yield remote, other
    other.shutdown()
    other.server_close()


@pytest.mark.parametrize("faults", [[500, 503], ["cut", 502], ["slow"]], ids=str)
def test_what_passes_is_tried_again(endpoint, faults):
    remote, other = endpoint
    assert remote(faults, timeout=0.5)(IMAGES, PROMPTS).tolist() == [0, 1, 2, 3, 4]
    assert len(other.seen) == len(faults) + 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (401, "rejected the request (401): out of order."),
        (413, "rejected the request (413)"),
        (307, "rejected the request (307)"),
        (b"I am a teapot", "must answer with JSON; it answered b'I am a teapot'"),
        (b"[1]", "must answer with JSON"),
        (b"[" * 100_000, "must answer with JSON"),
        (b"{}", "must answer with 5 scores"),
        (b'{"scores": 3}', "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4]}', "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4, 5, 6]}', "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4, "x"]}', "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4, [5]]}', "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4, true]}', "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4, 1e300]}', "returned inf"),
        (b'{"scores": [1, 2, NaN, 4, 5]}', "returned nan"),
        (b'{"scores": [1, 2, 3, 4, 1' + b"0" * 400 + b"]}", "must answer with 5 scores"),
        (b'{"scores": [1, 2, 3, 4, 1' + b"0" * 5000 + b"]}", "must answer with JSON"),
    ],
    ids=range(17),
)
def test_what_would_fail_again_is_said_at_once(endpoint, fault, said):
    remote, other = endpoint
    with pytest.raises(InputError) as error:
        remote([fault])(IMAGES, PROMPTS)
    assert said in str(error.value) and not isinstance(error.value, client.RewardUnavailable)
    assert len(other.seen) == 1


def test_a_server_that_stays_away(endpoint):
    remote, other = endpoint
    with pytest.raises(
        client.RewardUnavailable,
        match=r"failed after 3 tries \(the last: status 500, out of ord",
    ):
        remote([500] * 9)(IMAGES, PROMPTS)
    assert len(other.seen) == 3
    with pytest.raises(client.RewardUnavailable, match="the last: no answer within 0.1 s"):
        remote(["slow"] * 9, timeout=0.1, retries=1)(IMAGES, PROMPTS)


def test_the_time_of_a_request_is_that_of_all_its_bytes(endpoint):
    remote, other = endpoint

    def trickle():
        for _ in range(600):
            yield b" "
            time.sleep(0.1)

    began = time.monotonic()
    with pytest.raises(client.RewardUnavailable, match="no answer within 1 s"):
        remote([trickle], timeout=1.0, retries=0)(IMAGES, PROMPTS)
    assert time.monotonic() - began < 30
    assert other.left.wait(30), "the connection is closed"


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_without_end_is_not_read_to_its_end(endpoint, packed):
    million = gzip.compress(b" " * 100_000_000, 1) if packed else b" " * 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="must answer with at most 4,000,000 bytes"):
        endpoint[0]([lambda: (million for _ in range(200))])(IMAGES, PROMPTS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_the_token_is_sent_and_nowhere_kept(endpoint, monkeypatch):
    remote, other = endpoint
    monkeypatch.setenv("A_TOKEN", "s3cret")
    reward = remote([], token_variable="A_TOKEN")
    reward(IMAGES, PROMPTS)
    assert other.seen == ["Bearer s3cret"] and "s3cret" not in repr(reward) + repr(vars(reward))
    for value, said in ((None, "not set"), ("s3cret\n", "that a header cannot carry")):
        monkeypatch.delenv("A_TOKEN", raising=False)
        if value:
            monkeypatch.setenv("A_TOKEN", value)
        with pytest.raises(
            InputError, match="must name an environment variable with the token"
        ) as error:
            reward(IMAGES, PROMPTS)
        assert said in str(error.value) and "s3cret" not in str(error.value)


def test_retries_do_not_disturb_the_numbers_of_a_run(endpoint):
    import random

    random.seed(0)
    torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    endpoint[0]([500, 500])(IMAGES, PROMPTS)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


# The real server, and what clients may do to it.


def post(url: str, body: bytes = ONE) -> httpx.Response:
    """Ask a server for scores."""
    return httpx.post(url + "/score", content=body, timeout=60)


def test_many_clients_get_the_bits_of_each_alone():
    clip = rewards.load_reward("pocket-clip")
    parts = [slice(i, i + n) for n in (1, 2, 3) for i in range(3)]
    with serve("clip", clip) as url, ThreadPoolExecutor(4) as pool:
        ask = client.load_remote_reward(url)
        found = list(pool.map(lambda p: ask(IMAGES[p], PROMPTS[p]), parts))
    for part, scores in zip(parts, found, strict=True):
        assert torch.equal(scores, clip(IMAGES[part], PROMPTS[part]))


def test_pixels_are_those_that_were_sent():
    images = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    seen = []

    def reward(given, prompts):
        seen.append(given)
        return given[:, 0].mean((1, 2))

    with serve("r", reward) as url:
        for wanted in (images, images.transpose(2, 3).contiguous().transpose(2, 3)):
            client.load_remote_reward(url)(wanted, PROMPTS[:3])
            assert torch.equal(seen[-1], wanted) and seen[-1].is_contiguous()
        client.load_remote_reward(url, pixels="bytes")(images, PROMPTS[:3])
    assert torch.equal(seen[-1], (images * 255).round() / 255)


def test_pictures_of_different_sizes_are_scored_together():
    with serve("r", lambda images, prompts: [float(image.width) for image in images]) as url:
        pictures = [Image.new("RGB", (w, 4)) for w in (3, 9, 5)]
        assert client.load_remote_reward(url)(pictures, PROMPTS[:3]).tolist() == [3, 9, 5]


def test_calls_beyond_the_limits_of_a_server_are_sent_in_parts():
    """By the number of images or by their bytes; a group stays whole, and what fits is one request."""
    seen = []

    def reward(images, prompts, groups):
        seen.append(list(groups))
        return images[:, 0].mean((1, 2))

    def counted(images, prompts):
        seen.append(len(prompts))
        return red(images, prompts) if isinstance(images, torch.Tensor) else [0.0] * len(images)

    image_bytes = IMAGES[0].numel() * 4
    for limits, sent in (
        ({"images": 5}, [5]),
        ({"images": 2}, [2, 2, 1]),
        ({"bytes": 3 * image_bytes}, [2, 2, 1]),
        ({"bytes": 6 * image_bytes}, [5]),
    ):
        seen.clear()
        with serve("r", counted, **limits) as url:
            remote = client.load_remote_reward(url)
            assert torch.equal(remote(IMAGES, PROMPTS), red(IMAGES, PROMPTS)) and seen == sent
            assert remote(PICTURES, PROMPTS).shape == (5,)
    with serve("r", reward, images=3) as url:
        remote = client.load_remote_reward(url)
        seen.clear()
        scores = remote(IMAGES, PROMPTS, groups=[0, 0, 1, 1, 1])
        assert torch.equal(scores, red(IMAGES, PROMPTS)) and seen == [[0, 0], [1, 1, 1]]
        with pytest.raises(InputError, match="images must be 1 to 3"):
            remote(IMAGES, PROMPTS, groups=[0] * 5)


def test_training_does_not_begin_with_groups_that_a_server_would_reject(tmp_path):
    """A reward that compares the images of a group needs all of them in one request."""

    def reward(images, prompts, groups):
        return images[:, 0].mean((1, 2))

    settings = load_settings("pocket/tiny", {"images_per_prompt": 6})
    for limits, problem in (
        ({"images": 5}, "`images_per_prompt` must be at most 5 with the server"),
        ({"bytes": 6 * 3 * 64 * 64 - 1}, "`images_per_prompt` must be lower with the server"),
    ):
        with serve("r", reward, **limits) as url:
            changes = {"reward": {"r": 1}, "reward_options": {"r": {"url": url, "pixels": "bytes"}}}
            with pytest.raises(InputError, match=problem):
                prepare_state(settings.model_copy(update=changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_server_says_what_it_refuses(monkeypatch):
    def reward(images, prompts):
        if "crash" in prompts:
            raise RuntimeError("no memory")
        return (
            torch.full((len(prompts),), float("nan"))
            if "nan" in prompts
            else torch.zeros(len(prompts))
        )

    monkeypatch.setenv("A_TOKEN", "right")
    monkeypatch.setenv("ANOTHER", "wrong")
    with serve("r", reward, token="right", images=5, bytes=500_000) as url:
        ask = client.load_remote_reward(url, token_variable="A_TOKEN", retries=1, pause=0.01)
        assert ask(IMAGES, PROMPTS).tolist() == [0] * 5 and ask.server_info["name"] == "r"
        with pytest.raises(
            InputError,
            match=r"rejected the request \(401\): the token is missing or wrong; `token_variable`",
        ):
            client.load_remote_reward(url, token_variable="ANOTHER")
        with pytest.raises(
            InputError,
            match=r"rejected the request \(413\): body must have at most 500000 bytes",
        ):
            ask(torch.rand(1, 3, 500, 500), ["a"])
        unaware = ask.model_copy(update={"server_info": {}})  # sends any number of images at once
        with pytest.raises(
            InputError, match=r"rejected the request \(400\): images must be 1 to 5"
        ):
            unaware(IMAGES[[0] * 6], ["a"] * 6)
        with pytest.raises(
            InputError,
            match=r"rejected the request \(422\): reward: r returned nan for the prompt 'nan'",
        ):
            ask(IMAGES[:1], ["nan"])
        with pytest.raises(
            InputError, match=r"rejected the request \(422\): RuntimeError: no memory"
        ):
            ask(IMAGES[:1], ["crash"])


def head(content: bytes, rest: bytes = b"") -> bytes:
    """A file of safetensors with this head."""
    return len(content).to_bytes(8, "little") + content + rest


WRONG = {
    "empty": b"",
    "text": b"hello, server",
    "long head": (10**9).to_bytes(8, "little") + b" " * 100,
    "no JSON": head(b"{{{{"),
    "deep": head(b"[" * 900_000),
    "huge shape": head(
        b'{"images":{"dtype":"F32","shape":[1,3,99999999,99999999],"data_offsets":[0,4]}}', b"0000"
    ),
    "cut": ONE[:-1],
    "no prompts": head(b'{"images":{"dtype":"U8","shape":[1,3,1,1],"data_offsets":[0,3]}}', b"000"),
    "half a character": server.pack_request(np.zeros((1, 3, 2, 2), np.float32), ["\ud800"]),
    "double precision": server.pack_request(np.zeros((1, 3, 2, 2)), ["a"]),
    "no pixels": server.pack_request(np.zeros((1, 3, 0, 2), np.float32), ["a"]),
    "four channels": server.pack_request([np.zeros((2, 2, 4), np.uint8)], ["a"]),
    "more prompts": server.pack_request(np.zeros((1, 3, 2, 2), np.float32), ["a", "b"]),
    "a number as images": server.pack_request(np.zeros((), np.float32), ["a"]),
    "no texts": head(b'{"prompts":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}', b"[1]"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_request_is_said_in_a_sentence(kind):
    with serve() as url:
        answer = post(url, WRONG[kind])
        assert answer.status_code == 400 and "must be" in answer.json()["detail"]
        assert post(url).json() == {"scores": [0.0], "name": "red"}  # and it goes on


def test_millions_of_empty_objects_cost_no_memory():
    """60 MB of them took 1.4 GB when bodies were JSON."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with serve() as url:
        for body in (
            b"[" + b"{}," * 20_000_000 + b"{}]",
            head(b"[" + b"{}," * 20_000_000 + b"{}]"),
        ):
            assert post(url, body).status_code == 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB, both ends


def test_no_pages_about_the_server():
    with serve() as url:
        assert [
            httpx.get(url + path).status_code for path in ("/docs", "/redoc", "/openapi.json")
        ] == [404] * 3


def connect(url: str) -> socket.socket:
    """A bare connection."""
    line = socket.create_connection((httpx.URL(url).host, httpx.URL(url).port))
    line.settimeout(60)
    return line


def test_a_body_that_trickles_in_gives_its_place_back():
    with serve(waiting=0, body_seconds=1.0) as url:
        slow = connect(url)
        slow.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nx")
        assert post(url).status_code in (200, 503)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        slow.close()
        assert post(url).status_code == 200


def test_a_length_that_is_not_said_or_too_large_is_refused_before_the_body(capfd):
    with serve(bytes=1000) as url:
        for line, status in (
            (b"Content-Length: 99999999999999999999", b"400 413"),
            (b"Content-Length: 1001", b"413"),
            (b"Transfer-Encoding: chunked", b"411"),
        ):
            slow = connect(url)
            slow.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n\r\n")
            assert slow.recv(1000).split()[1] in status.split()
            slow.close()


def test_a_client_that_leaves_makes_no_noise_and_gives_its_place_back(capfd):
    with serve(waiting=0) as url:
        slow = connect(url)
        slow.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nx")
        slow.close()
        end = time.monotonic() + 30
        while post(url).status_code != 200:
            assert time.monotonic() < end
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_queue_is_tried_again_later(monkeypatch):
    """The server asks for a pause, which this test does not keep."""
    monkeypatch.setattr(client, "read_retry_after", lambda headers: 0)
    begun = threading.Event()
    free = threading.Event()

    def reward(images, prompts):
        begun.set()
        free.wait(60)
        return torch.zeros(len(prompts))

    with serve("r", reward, waiting=1) as url, ThreadPoolExecutor(4) as pool:
        ask = client.load_remote_reward(url, retries=0)
        first = [pool.submit(ask, IMAGES[:1], PROMPTS[:1])]
        assert begun.wait(
            60
        )  # it is being scored, so the next one waits; sent together, one might be refused
        first.append(pool.submit(ask, IMAGES[:1], PROMPTS[:1]))
        end = time.monotonic() + 60
        while client.load_remote_reward(url).server_info["waiting"] < 1 and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(
            client.RewardUnavailable, match="status 503, 2 requests are already waiting"
        ):
            ask(IMAGES[:1], PROMPTS[:1])
        assert post(url).headers["Retry-After"] == "30"
        patient = pool.submit(
            client.load_remote_reward(url, retries=8, pause=0.05), IMAGES[:1], PROMPTS[:1]
        )
        free.set()
        assert [f.result(60).tolist() for f in (*first, patient)] == [[0.0]] * 3


def test_a_request_whose_client_has_given_up_is_not_scored():
    """It would be asked again, so the queue of a slow reward would grow without end."""
    begun = threading.Event()
    free = threading.Event()
    scored: list[int] = []

    def reward(images, prompts):
        scored.append(len(prompts))
        begun.set()
        free.wait(60)
        return torch.zeros(len(prompts))

    with serve("r", reward) as url, ThreadPoolExecutor(4) as pool:
        first = pool.submit(post, url)
        assert begun.wait(60)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/score", content=ONE, timeout=0.5)
        time.sleep(0.5)  # until the server notices
        free.set()
        assert first.result(60).status_code == 200
        assert post(url).status_code == 200
    assert len(scored) == 2


def test_another_reward_at_the_same_address_is_noticed():
    with serve("red", lambda images, prompts: torch.zeros(len(prompts))) as url:
        ask = client.load_remote_reward(url)
        assert ask(IMAGES, PROMPTS).tolist() == [0.0] * len(PROMPTS)
        ask.server_info["name"] = "blue"  # what the server served when the run began
        with pytest.raises(InputError, match="`url` must serve 'blue'; .* now serves 'red'"):
            ask(IMAGES, PROMPTS)


def test_a_worker_is_not_started_again_with_other_code(tmp_path, monkeypatch):
    """Its file was edited for the next run, and then the worker was killed."""
    text = "def mine(images, prompts):\n    return [{}] * len(prompts)\n"
    (tmp_path / "mine.py").write_text(text.format(1.0))
    monkeypatch.chdir(tmp_path)
    child = placement.load_placed_reward(f"{tmp_path}/mine.py:mine", worker=True)
    assert child(PICTURES, PROMPTS).tolist() == [1.0] * len(PROMPTS)
    (tmp_path / "mine.py").write_text(text.format(2.0))
    assert child(PICTURES, PROMPTS).tolist() == [1.0] * len(PROMPTS)
    os.kill(child.child.pid, 9)
    with pytest.raises(InputError, match="`reward` must keep its code"):
        child(PICTURES, PROMPTS)
    child.close()


def test_background_keeps_order_and_says_what_went_wrong():
    thread = ThreadPoolExecutor(1)
    order = []

    def reward(images, prompts):
        order.append(len(prompts))
        time.sleep(0.05)
        return images[:, 0].mean((1, 2))

    futures = [
        thread.submit(rewards.score_images, "r", reward, IMAGES[:n], PROMPTS[:n]) for n in (5, 1, 3)
    ]
    wrong = thread.submit(rewards.score_images, "r", lambda i, p: [1.0], IMAGES, PROMPTS)
    assert [f.result(20).shape[0] for f in futures] == [5, 1, 3] == order
    with pytest.raises(InputError, match="returned scores of shape"):
        wrong.result(20)
    thread.shutdown()
