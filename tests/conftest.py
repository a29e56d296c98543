"""What several test modules share. Tests send interrupts, which a shell ignores for what it starts behind it."""

import json
import signal

import pytest
from commands import run
from small_runs import SMALL
from tiny_flux import build

signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    "A folder with the model, prompts, and a settings file."
    folder = tmp_path_factory.mktemp("world")
    build(folder / "model")
    (folder / "prompts.txt").write_text("a red star\na blue circle\ntwo cats\nthree dogs\na green square\nthe photo\n")
    names = {"model": str(folder / "model"), "prompts": str(folder / "prompts.txt")}
    (folder / "s.yaml").write_text(json.dumps(SMALL | names | {"eval_prompts": names["prompts"]}))
    return folder


@pytest.fixture(scope="session")
def whole(world):
    "A run that nothing interrupted."
    run("train", world / "s.yaml", "--out", world / "whole", "--no-report")
    return world / "whole"
