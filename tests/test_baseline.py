"""What the base draws beside a training: how far the reward is above it, and that nothing else changes by looking."""

import json

import pytest
import synthetic
from commands import run
from small_runs import metrics, trained

from chunk_grpo.reporting.reports import write_run_report
from chunk_grpo.training.metrics import tracker_values

SHORT = ["iterations=2", "eval_every=0", "--no-report"]


def above(line):
    """What a line of the metrics says about the base."""
    return {name: value for name, value in line.items() if name.startswith("above_base")}


def seconds(folder):
    """The phases that the metrics of a run name."""
    return {
        name
        for line in map(json.loads, open(folder / "metrics.jsonl"))
        for name in line.get("seconds", {})
    }


def test_it_only_looks(world, whole):
    """Trained weights and all other metrics are bit for bit those of the run that does not look, which draws nothing."""
    out = world / "looking"
    run("train", world / "s.yaml", "baseline_images=4", "--out", out, "--no-report")
    assert trained(out) == trained(whole)
    lines = metrics(out)
    assert [{k: v for k, v in line.items() if k not in above(line)} for line in lines] == metrics(
        whole
    )
    assert (
        not any(map(above, metrics(whole)))
        and "baseline" not in seconds(whole)
        and "baseline" in seconds(out)
    )
    names = [
        "above_base_mean",
        "above_base_se",
        "above_base_tiny_rewards:red",
        "above_base_tiny_rewards:red_se",
    ]
    assert not above(lines[0]) and all(list(above(line)) == names for line in lines[1:])
    assert set(above(lines[1]).values()) == {0.0}, "the same weights and the same noise"
    assert all(line["above_base_se"] > 0 for line in lines[2:]) and lines[-1]["above_base_mean"] > 0
    assert {"train/above_base_mean", "train/above_base_tiny_rewards:red"} <= tracker_values(
        lines[2]
    ).keys()


def test_an_adapter_is_off_for_the_base(world):
    """From one image a prompt, with a moving average and KL: next to nothing before the first update, then something."""
    out = world / "looking-lora"
    words = ["baseline_images=1", "lora_rank=4", "kl=0.01", "ema=0.5", "shared_noise=false"]
    run("train", world / "s.yaml", *words, *SHORT, "--out", out)
    _, first, second = metrics(out)
    assert (
        abs(first["above_base_mean"]) < 1e-5 and abs(second["above_base_mean"]) > 1e-5
    )  # batches of another size


def test_it_goes_on_after_an_interruption(world):
    """Stopped and resumed: the same numbers to the last bit."""
    outs = [world / "looking-through", world / "looking-resumed"]
    run("train", world / "s.yaml", "baseline_images=2", *SHORT, "--out", outs[0])
    run("train", world / "s.yaml", "baseline_images=2", *SHORT, "iterations=1", "--out", outs[1])
    run("train", world / "s.yaml", "baseline_images=2", *SHORT, "--out", outs[1], "--resume")
    assert metrics(outs[0])[-1] == metrics(outs[1])[-1] and trained(outs[0]) == trained(outs[1])
    assert above(metrics(outs[0])[-1])["above_base_mean"] != 0


def test_more_than_a_group_is_refused(world, tmp_path):
    said = run("train", world / "s.yaml", "baseline_images=5", "--out", tmp_path / "run", code=2)
    assert "`baseline_images` must be at most `images_per_prompt` (4)" in said and "got 5" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("images", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_report_shows_it_where_it_is(tmp_path, images):
    """The figure above the base with what it says of the last iterations; nothing of it in other runs."""
    out = synthetic.write(
        tmp_path / "run", {"iterations": 12, "baseline_images": images}, prompts=6
    )
    page = write_run_report(out).read_text()
    said = [
        words in page for words in ("on the same prompts, from the same noise", "2 by 2; the bands")
    ]
    assert said == [images > 0] * 2
