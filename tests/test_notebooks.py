"""Every page of the book runs, each in a process of its own as in a reader's kernel."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest
from run_page import PRELOADED, run_page

ROOT = Path(__file__).resolve().parents[1]
LONGEST = (
    "02_ray_cluster",
    "14_own_study",
    "11_gpu_host",
    "01_study",
    "04_trainable",
    "05_plan",
    "09_activations",
    "04_flow",
    "02_placement",
    "06_tuning",
    "01_launch",
)  # begun first
PAGES = sorted(
    [*(ROOT / "nbs").glob("[0-9]*/*.ipynb"), ROOT / "nbs/index.ipynb", ROOT / "nbs/glossary.ipynb"],
    key=lambda page: (page.stem not in LONGEST, str(page)),
)
PATIENCE = 500  # seconds of a page


@pytest.fixture(scope="module")
def processes():
    """Processes that start with the book's libraries imported, which takes seconds, and nothing run."""
    os.environ |= {"MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_page_runs(page, processes, tmp_path):
    log = tmp_path / "log"
    with tempfile.TemporaryDirectory(
        prefix="page-", ignore_cleanup_errors=True
    ) as folder:  # a socket's path is short
        child = processes.Process(target=run_page, args=(page, log, folder))
        child.start()
        child.join(PATIENCE)
        if child.is_alive():
            child.kill()
            child.join()
    assert child.exitcode == 0, (
        f"{page.name} failed ({child.exitcode}):\n{log.read_text(errors='replace')[-4000:]}"
    )
