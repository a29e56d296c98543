"""What several test modules share. Tests send interrupts, which a shell ignores for what it starts behind it."""

import signal

import pytest
from commands import run
from small_runs import write

signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    "A folder with the model, prompts, and a settings file."
    return write(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def whole(world):
    "A run that nothing interrupted."
    run("train", world / "s.yaml", "--out", world / "whole", "--no-report")
    return world / "whole"
