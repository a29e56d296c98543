"""A study whose trials take seconds: written, begun as a process of its own, and looked at while it goes on."""

import json
import subprocess
import time

import psutil
from commands import command, environment

from chunk_grpo.core import settings

STUDY = """
title: a small study
question: does it survive?
seeds: 1
reference: steps
arms: {steps: {chunks: steps}, whole: {chunks: whole}, longer: {chunks: whole, iterations: 8}}
after: {longer: whole}
evaluation: {eval_images: 2}
"""


def write(folder):
    """The study's folder."""
    folder.mkdir()
    (folder / "prompts.txt").write_text("a red circle\na blue square\ntwo stars\n")
    base = settings.read_settings_file("pocket/tiny") | {
        "steps": 6,
        "chunks": "steps",
        "threads": 1,
        "checkpoint_every": 1,
        "eval_every": 0,
        "eval_count": 1,
        "eval_steps": 2,
        "hybrid_split": 2,
        "eval_prompts": str(folder / "prompts.txt"),
    }
    (folder / "base.yaml").write_text(json.dumps(base))
    (folder / "study.yaml").write_text(STUDY)
    commit(folder)
    return folder


def commit(folder):
    """The folder's files in version control, as a plan must be."""
    who = (
        "-c",
        "user.name=a test",
        "-c",
        "user.email=test@localhost",
        "-c",
        "commit.gpgsign=false",
    )
    for words in (
        ("init", "-q"),
        ("add", "--all"),
        (*who, "commit", "-q", "--allow-empty", "-m", "a plan"),
    ):
        subprocess.run(["git", "-C", folder, *words], check=True)


def rows(out):
    """The rows of a study without what the clock and the version control say."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "cpu_seconds", "git_commit")}
        for row in lines
    ]


def begin(home, out, *words):
    """The command as a process of its own."""
    words = command("study", home, "--out", out, *words)
    return subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(path, lines, child):
    """Until a file has so many lines."""
    end = time.time() + 300
    while not path.is_file() or len(path.read_text().splitlines()) < lines:
        assert child.poll() is None, f"{path} never came"
        assert time.time() < end, f"{path} never came"
        time.sleep(0.05)


def trainers(out):
    """Processes that work on a trial of the study: programs, or forks of those that serve calls."""
    found = {
        p.pid: p
        for p in psutil.process_iter(["cmdline"])
        if "chunk_grpo.studies.study" in (p.info["cmdline"] or [])
        and str(out) in p.info["cmdline"][-1]
    }
    return [p for p in found.values() if "--serve" not in p.info["cmdline"] or p.ppid() in found]
