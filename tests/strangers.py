"""A run folder from a stranger that asks for everything, and commands that are watched while they read it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import synthetic
from commands import environment
from PIL import Image

from chunk_grpo.core.files import read_json, write_json

WATCH = """import os, subprocess, sys

def watch(event, words):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        given = words[1] if isinstance(words[1], (list, tuple)) else [words[1]]
        say("run", [os.fsdecode(word) for word in (words[0], *given)])
    elif event == "socket.connect":
        say("connect", words[1])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        say("ask", words[0])
    elif event == "open" and isinstance(words[0], (str, bytes)):
        say("open", os.path.realpath(os.fsdecode(words[0])))
    elif event == "import":
        say("import", words[0])

def say(*line):
    os.write(log, (repr(line) + "\\n").encode())

log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(watch)

start = subprocess.Popen.__init__

def start_watched(self, *words, env=None, **options):
    # A command that starts a program without PYTHONPATH must not hide what the program does.
    if env is not None and "PYTHONPATH" not in env:
        env = {**env, "PYTHONPATH": os.path.dirname(__file__)}
    start(self, *words, env=env, **options)

subprocess.Popen.__init__ = start_watched
"""
EVIL = """import pathlib
pathlib.Path(__file__).with_name("ran").touch()
def f(images, prompts):
    return [0.0] * len(prompts)
"""
COMMAND_LINE = (
    "import sys; from chunk_grpo.cli.main import main; sys.argv[0] = 'chunk-grpo'; main()"
)


def write_stranger(folder: Path) -> Path:
    """Code in the run's folder, an environment, an address with a secret, and files beside it; the run."""
    run = synthetic.write(folder / "run")
    note = read_json(run / "run.json")
    options = {
        "evil:f": {"environment": str(run / "env")},
        "pocket-clip": {
            "url": "http://203.0.113.7:9",
            "token_variable": "A_SECRET",
            "retries": 0,
            "timeout": 1,
        },
    }
    note["settings"] |= {
        "reward": {"pocket-clip": 1.0, "evil:f": 1.0},
        "eval_rewards": [],
        "reward_options": options,
        "model": str(folder / "outside"),
        "prompts": str(folder / "outside" / "secret.txt"),
        "eval_prompts": str(folder / "outside" / "secret.txt"),
    }
    write_json(run / "run.json", note)
    (run / "env" / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (run / "env" / "bin" / name).write_text(f"#!/bin/sh\ntouch {run}/ran\n")
        (run / "env" / "bin" / name).chmod(0o755)
    for name in (
        "evil",
        "pandas",
        "ipykernel_launcher",
        "papermill",
        "matplotlib",
        "sitecustomize",
        "chunk_grpo",
    ):
        (run / f"{name}.py").write_text(EVIL)
    (run / "final").mkdir(exist_ok=True)
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text("a secret")
    (folder / "outside" / "model_index.json").write_text("{}")
    Image.new("RGB", (8, 8), "red").save(folder / "outside" / "secret.png")
    return run


def watched(folder: Path, *words, cwd: Path, program: str = COMMAND_LINE, **more):
    """Run the command line with everything watched, its log in the folder; how it ended, and what it did."""
    watch = folder / "watch"
    watch.mkdir(exist_ok=True)
    (watch / "sitecustomize.py").write_text(WATCH)
    log = watch / "log"
    log.write_text("")
    path = os.pathsep.join(map(str, (watch, Path(__file__).parents[1], Path(__file__).parent)))
    own = {"A_SECRET": "s3cret", "WATCH_LOG": log, "CHUNK_GRPO_CACHE": folder / "cache", **more}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        env=environment(**own) | {"PYTHONPATH": path},
        text=True,
        timeout=600,
    )
    return done, [ast.literal_eval(line) for line in log.read_text().splitlines()]
