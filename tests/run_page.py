"""Runs one page in a process of its own, forked from a server that has imported what most pages import."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import warm

PRELOADED = [
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.models.transformers.transformer_flux",
    "peft",
    "accelerate",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "pandas",
    "scipy.stats",
    "matplotlib.pyplot",
    "pydantic",
    "nbdev.test",
]


class Forked(warm.Forked):
    anew = ("chunk_grpo",)  # of which a page may have replaced parts


class Popen(warm.Popen):
    """Trainings that a page starts are forks of its process, as long as this has no thread but that of its shell."""

    forked = Forked

    def __new__(cls, args, *given, **more):
        threads = os.listdir("/proc/self/task") if sys.platform == "linux" else []
        return (
            super().__new__(cls, args, *given, **more)
            if 1 <= len(threads) <= 2
            else object.__new__(cls)
        )


def run_page(
    page: Path,
    log: Path,  # gets all that the page prints
    folder: str,  # for its temporary files
) -> None:
    """Run a page as nbdev-test does; the process ends with 1 where it failed."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    subprocess.Popen = Popen
    from nbdev.test import test_nb  # not as a module's name, or pytest takes it for a test

    passed, _ = test_nb(page, skip_flags=("notest", "slow", "gpu"), basepath=page.parents[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if passed else 1)
