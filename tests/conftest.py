"""What several test modules share. Tests send interrupts, which a shell ignores for what it starts behind it."""

import shutil
import signal

import pytest
from commands import run

signal.signal(signal.SIGINT, signal.default_int_handler)
LONGEST = (
    "faults",
    "evaluation",
    "strangers",
    "widgets",
    "plan",
    "cli",
    "training",
    "study",
    "installed",
    "cuda_rules",
    "processes",
    "own_code",
    "reading",
    "judge",
    "benchmark",
    "runs",
    "speed",
    "rewards_elsewhere",
    "orphans",
    "corpus",
    "methods",
    "reward_serving",
    "browser",
    "pocket",
    "recipes",
    "ddp_families",
    "baseline",
    "model_files",
    "families",
    "studies",
    "hosts",
)  # first, so that no core waits for one at the end


def pytest_collection_modifyitems(items):
    """Modules that take long come first; the rest, and the tests within a module, stay in their order."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module")
def browser():
    """Start Chromium for the tests of a module; skip them if it or playwright is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra dev)"
    )
    # A thread runs one playwright at a time, so each module closes its browser.
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with the model, prompts, and a settings file."""
    # brings torch, which the tests of pages and house need not wait for
    from small_runs import write

    return write(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def whole(world):
    """A run that nothing interrupted."""
    run("train", world / "s.yaml", "--out", world / "whole", "--no-report")
    return world / "whole"


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory):
    """A folder with the model, prompts and settings of the tiniest run."""
    import sessions
    from small_runs import write

    return write(tmp_path_factory.mktemp("tiny"), **sessions.TINY)


@pytest.fixture(scope="session")
def tiny_training(tiny_home):
    """That run, with its file operations."""
    import sessions

    return sessions.train(tiny_home)


@pytest.fixture(scope="session")
def tiny_evaluation(tiny_home, tiny_training):
    """Its evaluation, with its file operations."""
    import sessions

    return sessions.evaluate(tiny_home, tiny_training)
