"""The installed script, where it differs from a module that Python runs: its path, its streams, its working folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call, environment, run

SCRIPT = Path(sys.executable).with_name("chunk-grpo")
TINY = [
    "pocket/tiny",
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
]
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise SystemExit(3)\n"


def shell(words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run the installed script with a shell's redirections, without this checkout's tests on the path."""
    own = environment() | {"PYTHONPATH": str(Path(__file__).parents[1]), "SCRIPT": str(SCRIPT)}
    return subprocess.run(
        f'"$SCRIPT" {words}',
        shell=True,
        cwd=cwd,
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    out = tmp_path_factory.mktemp("installed") / "run"
    run("train", *TINY, "--out", out, "--no-report")
    return out


@pytest.mark.parametrize("streams", [pytest.param(">&-", marks=pytest.mark.slow), "<&- >&- 2>&-"])
def test_training_does_not_need_anybody_to_listen(streams, tmp_path):
    assert (
        shell(f"train {' '.join(TINY)} --out run --no-report {streams}", tmp_path).returncode == 0
    )
    assert list((tmp_path / "run/final").glob("*.safetensors"))


@pytest.mark.parametrize("words", ["presets", "plan pocket/tiny --rate 1"])
def test_what_only_prints_says_that_it_cannot(words, tmp_path):
    done = shell(f"{words} >&-", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(
        "chunk-grpo: the output cannot be written"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in ("verify run --processes 2", "evaluate run --processes 2 --json")
        ),
        "watch run",
    ],
)
def test_modules_beside_a_strangers_run_are_not_executed(words, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for name in ("chunk_grpo", "jupyterlab", "torch", "diffusers"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    shell(words, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.log", ["train", *TINY, "iterations=2", "--resume", "--no-report"]),
        ("evaluation.begun", ["evaluate"]),
    ],
)
def test_nothing_is_written_where_a_link_of_a_run_leads(name, words, finished, tmp_path):
    place = shutil.copytree(finished, tmp_path / "run")
    target = tmp_path / "victim"
    if (place / name).is_dir():
        shutil.move(place / name, target)
    elif name.endswith(".log"):
        target.write_text("private\n")
        (place / name).unlink()
    else:
        target.mkdir()
    os.symlink(target, place / name)

    def content() -> dict:
        return {file: file.read_bytes() for file in [target, *target.rglob("*")] if file.is_file()}

    before = content()
    done = call(*words, *(["--out", place] if "--resume" in words else [place]), cwd=tmp_path)
    assert content() == before and done.returncode == 2, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "RUN", "a red star", "--out", "RUN/final/images"],
        ["export", "RUN", "RUN/checkpoints/model"],
        ["train", *TINY, "--out", "RUN/final/another", "--no-report"],
    ],
)
def test_nothing_is_put_among_a_runs_weights(words, finished):
    done = call(*[word.replace("RUN", str(finished)) for word in words])
    assert done.returncode == 2 and "which belongs to a run" in done.stderr
    assert (
        not (finished / "final/images").exists() and not (finished / "checkpoints/model").exists()
    )


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_the_run_ends_as_if_nothing_had_been(tmp_path):
    """torchrun starts the processes again; they go on from the newest checkpoint."""
    (tmp_path / "red.py").write_text(
        "import os, pathlib, signal\n"
        "def score(images, prompts):\n"
        "    mark = pathlib.Path('killed')\n"
        "    begun = pathlib.Path('run/checkpoints/000001').exists()\n"
        "    if begun and os.environ.get('RANK') == '1' and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return images[:, 0].mean((1, 2))\n"
    )
    words = [
        "train",
        *TINY,
        "iterations=3",
        "checkpoint_every=1",
        "reward=red.py:score",
        "--processes",
        "2",
    ]
    run(*words, "--no-report", "--out", "whole", cwd=tmp_path)
    run(*words, "--no-report", "--out", "run", "--max-restarts", "1", cwd=tmp_path)
    assert (tmp_path / "killed").exists()
    files = list((tmp_path / "whole/final").glob("*.safetensors"))
    assert files and all(
        file.read_bytes() == (tmp_path / "run/final" / file.name).read_bytes() for file in files
    )
    machines = ["--nodes", "2", "--rendezvous", "a:1", "--max-restarts", "1"]
    done = call(*words[:-1], "1", "--out", "x", *machines, cwd=tmp_path)
    assert done.returncode == 2 and "`max_restarts` must be 0" in done.stderr
