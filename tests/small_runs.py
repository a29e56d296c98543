"""Small real runs: their settings, and what is compared between two of them."""

import json
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from tiny_flux import build

SMALL = {
    "resolution": 64,
    "eval_resolution": 64,
    "max_tokens": 8,
    "dtype": "float32",
    "iterations": 6,
    "learning_rate": 1e-3,
    "images_per_prompt": 4,
    "prompts_per_iteration": 4,
    "rollout_batch": 8,
    "update_batch": 32,
    "gradient_checkpointing": False,
    "clip_range": 1e-2,
    "max_grad_norm": 1.0,
    "eval_steps": 4,
    "hybrid_split": 2,
    "eval_every": 3,
    "checkpoint_every": 1,
    "threads": 1,
    "reward": "tiny_rewards:red",
}


def write(folder, **more):
    """Put a model, prompts and a settings file into the folder; the same folder."""
    build(folder / "model")
    (folder / "prompts.txt").write_text(
        "a red star\na blue circle\ntwo cats\nthree dogs\na green square\nthe photo\n"
    )
    names = {"model": str(folder / "model"), "prompts": str(folder / "prompts.txt")}
    (folder / "s.yaml").write_text(
        json.dumps(SMALL | names | {"eval_prompts": names["prompts"]} | more)
    )
    return folder


def metrics(folder):
    """The metrics without what the clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def trained(folder):
    """The trained weights, byte for byte."""
    return {f.name: f.read_bytes() for f in sorted((folder / "final").glob("*.safetensors"))}


def wait_for(folder, iteration, child):
    """Wait until the metrics of an iteration are there."""
    log = folder / "metrics.jsonl"
    for _ in range(12_000):  # ten minutes: two machines on a busy one are slow to meet
        if log.exists() and any(
            f'"iteration": {iteration},' in line for line in log.read_text().splitlines()
        ):
            return
        assert child.poll() is None, "training ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError(f"iteration {iteration} did not come")


def alike(one, other):
    """Whether two runs have the same metrics to 1e-4, nearly the same weights, and the same pictures to a level of grey."""
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            same = value if value is None else pytest.approx(value, abs=1e-4, rel=1e-4)
            assert mine[name] == same, name
    a, b = (load_file(next((f / "final").glob("*.safetensors"))) for f in (one, other))
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max().item() for k in a) < 1e-3
    drawn = sorted(file.relative_to(other) for file in (other / "samples").rglob("*.png"))
    assert drawn == sorted(file.relative_to(one) for file in (one / "samples").rglob("*.png"))
    for name in drawn:
        mine, theirs = (
            np.asarray(Image.open(folder / name)).astype(int) for folder in (one, other)
        )
        assert abs(mine - theirs).max() <= 1, name
    return True
