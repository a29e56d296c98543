"""Every notebook of the book runs, each in a process of its own as in a reader's kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "nbs").glob("[0-9]*/*.ipynb")) + [ROOT / "nbs/index.ipynb"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_notebook_runs(page):
    command = [Path(sys.executable).with_name("nbdev-test"), page, "--n-workers", "1"]
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{page.name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
