"""Training whose rewards run in another process: the same run, and what their faults do to it."""

import json

import psutil
import pytest
from served import serve_in_thread
from tiny_flux import build

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.files import write_json
from chunk_grpo.reward_serving import server
from chunk_grpo.rewards import rewards
from chunk_grpo.runs import launch

POCKET = {
    "model": "pocket",
    "prompts": "pocket:train",
    "eval_prompts": "pocket:test",
    "resolution": 64,
    "eval_resolution": 64,
    "max_tokens": 12,
    "dtype": "float32",
    "steps": 5,
    "chunks": "2,2",
    "iterations": 2,
    "prompts_per_iteration": 2,
    "images_per_prompt": 4,
    "rollout_batch": 4,
    "update_batch": 32,
    "eval_steps": 3,
    "eval_images": 1,
    "eval_count": 6,
    "eval_every": 1,
    "hybrid_split": 1,
    "lora_rank": 2,
    "learning_rate": 1e-3,
    "clip_range": 1e-3,
    "checkpoint_every": 1,
    "threads": 1,
    "reward": {"pocket-clip": 1.0, "pocket-geneval": 2.0},
}
TINY = {
    "resolution": 64,
    "eval_resolution": 64,
    "max_tokens": 8,
    "dtype": "float32",
    "steps": 6,
    "chunks": "2,3",
    "iterations": 3,
    "images_per_prompt": 4,
    "prompts_per_iteration": 2,
    "rollout_batch": 4,
    "update_batch": 32,
    "learning_rate": 1e-3,
    "clip_range": 1e-2,
    "eval_steps": 3,
    "eval_images": 1,
    "eval_count": 2,
    "hybrid_split": 0,
    "eval_every": 0,
    "checkpoint_every": 1,
    "threads": 1,
}


@pytest.fixture(autouse=True)
def no_child_left():
    """A run ends the workers of its rewards, however it ends."""
    yield
    there = psutil.Process().children(recursive=True)
    assert not [child for child in there if "reward_serving/server.py" in " ".join(child.cmdline())]


def train(folder, chosen: dict) -> None:
    """Train in this process what a run folder asks for, or go on with it."""
    if not folder.exists():
        run_settings = settings.Settings(**chosen)
        write_json(
            folder / "run.json",
            {"status": "created", "settings": run_settings.model_dump(mode="json")},
        )
    launch.launch_run(folder)


def metrics(folder) -> list[dict]:
    """The metrics without what the clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def weights(folder) -> dict[str, bytes]:
    """The trained weights, byte for byte."""
    return {f.name: f.read_bytes() for f in sorted((folder / "final").glob("*.safetensors"))}


def test_a_worker_and_a_server_train_the_same_run(tmp_path):
    """Two rewards here, and one in a worker and one over HTTP: metrics and weights are equal to the last bit."""
    near = tmp_path / "near"
    far = tmp_path / "far"
    train(near, POCKET)
    with serve_in_thread(
        server.create_scoring_app("pocket-geneval", rewards.load_reward("pocket-geneval"))
    ) as url:
        options = {"pocket-clip": {"worker": True}, "pocket-geneval": {"url": url}}
        train(far, POCKET | {"reward_options": options})
    assert (
        len(metrics(near)) == 3
        and {"eval_pocket-clip", "eval_pocket-geneval"} <= metrics(near)[-1].keys()
    )
    assert metrics(far) == metrics(near)
    assert weights(far) == weights(near) != {}


@pytest.mark.slow
def test_a_reward_that_dies_hangs_and_fails(tmp_path, monkeypatch):
    """Once dead or hanging: training goes on. Not a number, or gone for good: one sentence, and the run is resumed."""
    build(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red star\na blue circle\ntwo cats\n")
    prompts = str(tmp_path / "prompts.txt")
    here = tmp_path / "here"
    there = tmp_path / "there"
    faults = tmp_path / "faults"
    chosen = TINY | {"model": str(tmp_path / "model"), "prompts": prompts, "eval_prompts": prompts}
    train(here, chosen | {"reward": "tiny_rewards:red"})

    monkeypatch.setenv("FAULTS", str(faults))
    options = {"worker": True, "timeout": 5, "retries": 1, "pause": 0.01}
    chosen |= {"reward": "tiny_rewards:faulty", "reward_options": {"tiny_rewards:faulty": options}}
    faults.write_text(
        "none\ndie\nnone\nhang\nnan"
    )  # the base, the first iteration and its repetition, the second
    with pytest.raises(InputError, match="tiny_rewards:faulty returned nan for the prompt"):
        train(there, chosen)
    assert [line["iteration"] for line in metrics(there)] == [0, 1]

    faults.write_text("die\ndie")
    with pytest.raises(
        InputError,
        match="the worker of tiny_rewards:faulty failed after 2 tries.*resume a run",
    ):
        train(there, chosen)
    assert [line["iteration"] for line in metrics(there)] == [0, 1]

    train(there, chosen)
    renamed = json.loads(
        json.dumps(metrics(there)).replace("tiny_rewards:faulty", "tiny_rewards:red")
    )
    assert renamed == metrics(here)
    assert weights(there) == weights(here) != {}
