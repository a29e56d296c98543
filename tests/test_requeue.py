"""A job that a scheduler ends with SIGTERM and puts back into its queue, and callbacks in several processes."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from commands import command, environment, run
from small_runs import metrics, trained, wait_for, write

from chunk_grpo import InputError, train
from chunk_grpo.core import machine
from chunk_grpo.training.callbacks import Callback, load_callback

WORDS = ["reward=tiny_rewards:slow_red", "checkpoint_every=100", "eval_every=0", "iterations=4"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return write(tmp_path_factory.mktemp("requeue"))


@pytest.fixture(scope="module")
def whole(home):
    """The run that nothing interrupts."""
    run("train", home / "s.yaml", *WORDS, "--out", home / "whole", "--no-report")
    return home / "whole"


def checkpoints(out):
    return sorted(int(folder.name) for folder in (out / "checkpoints").glob("[0-9]*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--processes", "2"],
        ["sharding=fsdp", "--processes", "2"],
        ["sharding=fsdp", "lora_rank=2", "--processes", "2"],
    ],
    ids=["one", "two", "sharded", "adapter"],
)
def test_sigterm_keeps_the_last_iteration_and_the_same_command_resumes(home, whole, more, request):
    """No checkpoint is due in the run, so what is resumed is what SIGTERM left."""
    out = home / request.node.callspec.id
    words = ["train", home / "s.yaml", *WORDS, *more, "--out", out, "--no-report"]
    words += ["--resume", "auto"]
    child = subprocess.Popen(
        command(*words), env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    wait_for(out, 2, child)
    time.sleep(0.2)  # into iteration 3
    child.send_signal(signal.SIGTERM)
    error = child.communicate(timeout=60)[1].decode()
    assert child.returncode == 143, error
    assert "--resume auto" in error
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    (kept,) = checkpoints(out)
    assert kept in (2, 3) and kept == metrics(out)[-1]["iteration"]
    run(*words)
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert [line["iteration"] for line in metrics(out)] == list(range(5))
    if not more:  # sums of several processes differ by rounding
        assert metrics(out) == metrics(whole) and trained(out) == trained(whole)


def test_a_switch_of_weights_is_not_cut_in_two(monkeypatch):
    """SIGTERM that arrives while the base's weights are put in place is raised when they are back."""
    import torch

    from chunk_grpo.models import trainable

    weights, base = [torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.zeros(2)]

    class Policy:
        lora, base_params, start_params = False, base, None

        class transformer:
            @staticmethod
            def parameters():
                yield weights[0]
                os.kill(os.getpid(), signal.SIGTERM)
                yield weights[1]

    with pytest.raises(machine.Terminated), machine.raise_on_sigterm():
        with trainable.use_base_weights(Policy()):
            pytest.fail("the signal came before")
    assert all(bool((one == 1).all()) for one in weights)
    assert all(bool((one == 0).all()) for one in base)


def test_resume_takes_auto_alone_and_needs_a_folder(home):
    settings = str(home / "s.yaml")
    said = run("train", settings, "--resume", "auto", code=2)
    assert "`--resume` needs the run folder in `--out`" in said
    said = run("train", settings, "--out", home / "none", "--resume=maybe", code=2)
    assert "`--resume` takes no value or auto; got 'maybe'" in said
    said = run("train", settings, "--out", home / "none", "--resume", "eta=0.5", code=2)
    assert "there is none" in said and not (home / "none").exists()
    with pytest.raises(InputError, match="`out` must name the run to start or to resume"):
        train(settings, resume="auto")
    with pytest.raises(InputError, match="`resume` of train must be .*auto.*got 'always'"):
        train(settings, home / "none", resume="always")


MINE = """
from pathlib import Path
from chunk_grpo.training.callbacks import Callback

def note(line, settings):
    with open("noted.txt", "a") as file:
        file.write(f"{line['iteration']}\\n")

class Ranks(Callback):
    def on_train_end(self, state):
        (Path(state.run).parent / f"rank-{state.accelerator.process_index}").touch()

class Other:
    pass

class Needs(Callback):
    def __init__(self, number):
        pass
"""


@pytest.mark.slow
def test_named_callbacks_reach_every_process(home, tmp_path):
    """A class is made in each process, a function is called in the first alone."""
    (tmp_path / "mine.py").write_text(MINE.replace("noted.txt", str(tmp_path / "noted.txt")))
    names = [f"{tmp_path / 'mine.py'}:{name}" for name in ("note", "Ranks")]
    words = ["iterations=1", "eval_every=0", "--processes", "2", "--no-report"]
    words += [word for name in names for word in ("--callback", name)]
    run("train", home / "s.yaml", *words, "--out", tmp_path / "out")
    assert (tmp_path / "noted.txt").read_text().split() == ["0", "1"]
    assert {file.name for file in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}


def test_wrong_names_of_callbacks_are_rejected_before_a_folder_is_made(home, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    wrong = {
        "Other": "another class",
        "Needs": "made without arguments",
        "gone": "function or class",
    }
    for name, words in wrong.items():
        path = f"{tmp_path / 'mine.py'}:{name}"
        with pytest.raises(InputError, match=re.escape(words)):
            train(home / "s.yaml", tmp_path / "out", callbacks=[path])
        said = run("train", home / "s.yaml", "--out", tmp_path / "out", "--callback", path, code=2)
        assert "`callbacks`" in said and words in said
    assert not (tmp_path / "out").exists()
    assert isinstance(load_callback(f"{tmp_path / 'mine.py'}:Ranks"), Callback)
