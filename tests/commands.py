"""The command line as a user starts it: a process of its own, one thread, rewards of the tests importable, no hub."""

import functools
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import warm


def environment(**more) -> dict[str, str]:
    """The environment of a child."""
    tests = Path(__file__).parent
    path = os.pathsep.join(
        map(str, (tests.parent, tests))
    )  # this checkout's package, whatever is installed
    keep = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | keep | {k: str(v) for k, v in more.items()}


def command(*words) -> list[str]:
    """The installed chunk-grpo with some words behind it."""
    return [str(Path(sys.executable).with_name("chunk-grpo")), *map(str, words)]


@functools.cache
def server():
    """The context whose processes begin with the imports done."""
    return warm.server(environment())


def start(*words, **more) -> warm.Started:
    """Start the command line in a process that begins with the imports done, for tests that kill it; it says nothing."""
    files = (os.devnull, os.devnull)
    return warm.Started(server(), [*map(str, words)], environment(**more), os.getcwd(), files)


def call(
    *words, cwd=None, module: str = "chunk_grpo.cli.main", **more
) -> subprocess.CompletedProcess:
    """Run the command line, or another module or file, to its end, in a process that begins with the imports done."""
    words = [*map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("said", "error")]
        code = warm.call(
            server(),
            words,
            environment(**more),
            str(cwd or os.getcwd()),
            tuple(map(str, files)),
            timeout=300,
            module=module,
        )
        said, error = (file.read_text() for file in files)
    return subprocess.CompletedProcess(words, code, said, error)


def call_python(code: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a text of Python in a folder, in a process that begins with the imports done."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        return call(cwd=folder, module=file.name)


def run(*words, code: int = 0, **more) -> str:
    """Run the command line to its end, which must have this exit code; what it said."""
    done = call(*words, **more)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def free_port() -> int:
    """Find a port on which nobody listens, below those that a system hands out to whoever asks for any port.

    So no other test is given it before its user listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as attempt:
            try:
                attempt.bind(("", port))
            except OSError:
                continue
        return port
