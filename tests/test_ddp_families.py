"""Every family trains on two processes: no weight is waited for whose gradient never comes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_families
from commands import environment
from ddp_families import WAYS

PROGRAM = Path(__file__).with_name("ddp_families.py")


def said_by_two(names, folder):
    """What two processes say of families."""
    folders = {name: str(tiny_families.build(name, folder / name)) for name in names}
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROGRAM),
        json.dumps(folders),
    ]
    done = subprocess.run(
        [sys.executable, *words],
        env=environment(CHUNK_GRPO_CACHE=folder / "cache"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("SAID "))[5:]
    )


@pytest.mark.slow
def test_qwen_image_trains_on_two_processes(tmp_path):
    """Its last block computes what nothing reads."""
    assert said_by_two(["qwen"], tmp_path) == {f"qwen {way}": "trains" for way in WAYS}


@pytest.mark.slow
def test_every_family_trains_on_two_processes(tmp_path):
    said = said_by_two(tiny_families.BUILDERS, tmp_path)
    assert said == {f"{name} {way}": "trains" for name in tiny_families.BUILDERS for way in WAYS}
