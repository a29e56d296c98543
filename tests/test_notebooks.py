"""Every notebook of the book runs, in reading order; report notebooks are run through papermill by their own tests."""

import signal
import tomllib
from pathlib import Path

import pytest
from nbdev.test import test_nb as run_nb  # under another name, or pytest takes it for a test

ROOT = Path(__file__).resolve().parents[1]
FLAGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]["tst_flags"].split()
PAGES = sorted((ROOT / "nbs").glob("*.ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_notebook_runs(page, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        passed, _ = run_nb(page, skip_flags=FLAGS, basepath=ROOT)
    finally:
        signal.signal(signal.SIGINT, on_interrupt)  # nbdev installs a handler that ends the process
    assert passed, f"{page.name} failed; its traceback stands above"
