"""Learning-rate schedules: diffusers' rates, the rate that each iteration is trained with, and what a resume keeps."""

import json
import math

import pytest
import small_runs
import tiny_families
import torch

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.settings import check_resume, load_settings
from chunk_grpo.runs import verify
from chunk_grpo.training import resuming, trainer
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state
from chunk_grpo.training.update import scheduled_learning_rate

FEW = {
    "steps": 3,
    "chunks": "1,1",
    "images_per_prompt": 2,
    "prompts_per_iteration": 1,
    "iterations": 4,
    "eval_count": 1,
    "eval_every": 0,
    "max_tokens": 12,
    "lora_rank": 2,
    "reward": "incompressibility",
}
FALLING = {"lr_scheduler": "cosine", "lr_warmup_iterations": 2}


def rates(**changes) -> list[float]:
    settings = load_settings({}, {"learning_rate": 1.0, "iterations": 10, **changes})
    return [scheduled_learning_rate(settings, i) for i in range(settings.iterations)]


@pytest.fixture(scope="module", params=["sd3", "klein"])
def home(request, tmp_path_factory):
    """A folder with a settings file of a family."""
    before = torch.get_num_threads()
    folder = small_runs.write(tmp_path_factory.mktemp(request.param), **FEW)
    values = json.loads((folder / "s.yaml").read_text())
    values["model"] = str(tiny_families.build(request.param, folder / "family"))
    (folder / "s.yaml").write_text(json.dumps(values))
    yield folder
    torch.set_num_threads(before)


def fresh(home, run, **changes):
    """The state of a run before its first iteration."""
    run.mkdir(exist_ok=True)
    settings = load_settings(home / "s.yaml", changes)
    return load_policy_and_optimizer(prepare_state(settings, run))


def test_without_a_schedule_each_iteration_has_the_setting_to_the_last_bit():
    settings = load_settings({}, {"learning_rate": 0.1 + 0.2})
    assert {scheduled_learning_rate(settings, i) for i in range(150)} == {0.1 + 0.2}


def test_rates_are_those_of_the_named_schedule():
    assert rates(lr_scheduler="linear") == pytest.approx([1 - i / 10 for i in range(10)])
    cosine = [(1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)]
    assert rates(lr_scheduler="cosine") == pytest.approx(cosine)
    half = [(1 + math.cos(math.pi * i / 5)) / 2 for i in range(5)]
    assert rates(lr_scheduler="cosine_with_restarts:2") == pytest.approx(half * 2)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "cosine_with_restarts:2"])
def test_no_iteration_of_a_warm_up_or_at_the_end_has_the_rate_0(name):
    found = rates(lr_scheduler=name, lr_warmup_iterations=3)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert min(found) > 0 and max(found) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scheduler": "cosin"}, "`lr_scheduler` must be constant, linear, cosine"),
        ({"lr_scheduler": "cosine_with_restarts:1"}, "CYCLES with a number from 2"),
        ({"lr_scheduler": "linear", "lr_warmup_iterations": 150}, "be below 150, .*; got 150"),
        ({"lr_scheduler": "linear", "lr_iterations": 149}, "at least `iterations` .150."),
        ({"lr_iterations": 200}, "`lr_iterations` must be 0 if `lr_scheduler` is constant"),
        ({"lr_scheduler": "cosine_with_restarts:151"}, "at most as many cycles"),
    ],
)
def test_schedule_that_cannot_be_is_rejected(changes, words):
    with pytest.raises(InputError, match=words):
        load_settings({}, changes)


def test_a_run_is_made_longer_only_if_the_past_rates_stay_the_same():
    longer = {"iterations": 200}
    with pytest.raises(InputError, match="`iterations` must stay 150 when the run is resumed"):
        check_resume(
            load_settings({}, {"lr_scheduler": "linear"}),
            load_settings({}, {"lr_scheduler": "linear"} | longer),
        )
    planned = {"lr_scheduler": "linear", "lr_iterations": 300}
    check_resume(load_settings({}, planned), load_settings({}, planned | longer))
    warm = {"lr_warmup_iterations": 5}
    check_resume(load_settings({}, warm), load_settings({}, warm | longer))


def test_written_out_settings_of_runs_before_schedules_keep_their_meaning():
    """Nobody chose `surrogate` for a method that has no use for it: the run's defaults were written out."""
    values = load_settings({}, {"updates_per_iteration": 1}).model_dump(mode="json")
    values |= {"surrogate": "hinge:0.1"}
    for name in ("lr_scheduler", "lr_warmup_iterations", "lr_iterations"):
        del values[name]
    assert load_settings(values).surrogate == "hinge:0.1"


def test_optimizer_and_metrics_have_the_rate_and_a_resumed_run_equals_an_uninterrupted_one(
    home, tmp_path
):
    whole = fresh(home, tmp_path / "whole", **FALLING)
    found = [trainer.train_iteration(whole)["lr"] for _ in range(4)]
    assert found == [scheduled_learning_rate(whole.settings, i) for i in range(4)]
    assert len(set(found)) == 4

    cut = fresh(home, tmp_path / "cut", **FALLING)
    for _ in range(2):
        trainer.train_iteration(cut)
    (tmp_path / "cut" / "metrics.jsonl").write_text("")
    resuming.save_checkpoint(cut)
    resumed = fresh(home, tmp_path / "cut", **FALLING)
    resuming.resume(resumed)
    assert [trainer.train_iteration(resumed)["lr"] for _ in range(2)] == found[2:]
    pairs = zip(whole.policy.trained, resumed.policy.trained, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

    # The schedule is no ornament: with a constant rate the weights are others.
    constant = fresh(home, tmp_path / "constant")
    for _ in range(4):
        trainer.train_iteration(constant)
    pairs = zip(whole.policy.trained, constant.policy.trained, strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_repeating_the_first_iterations_of_a_run_repeats_their_rates(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        verify.launch, "train", lambda settings, *rest, **how: seen.append(settings)
    )
    settings = load_settings("pocket/tiny", {**FALLING, "iterations": 8})
    verify.repeat_run(settings, 2, 1, tmp_path)
    assert seen[0].iterations == 2
    assert [scheduled_learning_rate(seen[0], i) for i in range(2)] == [
        scheduled_learning_rate(settings, i) for i in range(2)
    ]


def test_every_schedule_that_may_be_named_is_one_of_diffusers():
    from diffusers.optimization import SchedulerType

    for name in ("constant", "linear", "cosine", "cosine_with_restarts:3"):
        kind, _ = settings.parse_lr_scheduler(load_settings({}, {"lr_scheduler": name}))
        assert kind in {member.value for member in SchedulerType}
