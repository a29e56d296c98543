"""Rows of the table are what their sources say, and settings that leave nothing to train are rejected at once."""

import pytest
import torch
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core.settings import METHODS, load_settings
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.theory.windows import Window
from chunk_grpo.training import trainer
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state

SMALL = {
    "steps": 7,
    "images_per_prompt": 4,
    "shared_noise": False,
    "iterations": 2,
    "eval_every": 0,
    "eval_count": 1,
    "threads": 1,
    "prompts_per_iteration": 2,
}


def method_of(name: str, **more):
    return load_method(load_settings("pocket/tiny", SMALL | {"method": name} | more))


@pytest.mark.parametrize("steps", [4, 5, 8, 16, 17, 25])
@pytest.mark.parametrize("width", [1, 2])
def test_an_early_window_reaches_the_last_transition_of_the_first_half(steps, width):
    window = Window("early", width)
    half = steps // 2
    firsts = {window.transition_indices(steps - 1, i)[0] for i in range(300)}
    assert firsts == set(range(max(half - width, 0) + 1))
    assert max(firsts) + width == max(half, width)


def test_mix_flash_frozen_takes_the_papers_eight_forward_passes():
    method = method_of("mix-flash-frozen", steps=25)
    assert len(method.sampler(0)) == 8 and method.settings.merge == "rest:0.2"
    assert method.sampler(0).second_order_weights.any()
    assert len(method_of("mix-flash-frozen", steps=17).sampler(0)) == 6


def test_crd_compares_with_one_copy_and_draws_with_another():
    method = method_of("crd")
    old, sampling = method.reference_decays["old"], method.reference_decays["sampling"]
    assert method.sampling_reference == "sampling" and method.references == ("old",)
    assert [round(old(i), 3) for i in (0, 1, 100, 1000)] == [0.25, 0.255, 0.75, 0.999]
    assert [round(sampling(i), 4) for i in (0, 75, 76, 1000)] == [0, 0, 0.0075, 0.999]


def test_a_merge_from_sigma_one_on_has_the_noise_of_the_whole_grid():
    """With sigma_1 of the merged grid the noise would shrink by the merge itself."""
    whole = sigmas(17, 3.0)
    merged = method_of(
        "e-grpo", steps=17, shift=3.0, merge="entropy:20", window="frozen:1"
    ).sampler(0)
    length = 17 - len(merged) + 1
    assert length > 1 and merged.sigmas[0] == 1
    std = merged.coefficients(0)[2]
    expected = 0.7 * (1 / (1 - whole[1])) ** 0.5 * (1 - whole[length]) ** 0.5
    torch.testing.assert_close(std, expected)
    assert Sampler(merged.sigmas, "flow", merged.eta).coefficients(0)[2] < std


@pytest.mark.parametrize("name", ["fast", "cps"])
def test_fast_and_cps_are_flow_grpo_but_for_window_and_noise(name):
    settings = dict(METHODS["flow"]["settings"])
    assert settings.items() <= METHODS[name]["settings"].items() or name == "fast"
    run_settings, flow = method_of(name).settings, method_of("flow").settings
    changed = {key for key, value in run_settings if getattr(flow, key) != value}
    assert changed == {"fast": {"window"}, "cps": {"sampler"}}[name]


ONE_IMAGE = ["crd", "dgpo", "online-dpo", "tmpo", "neighbor", "self-opd"]


@pytest.mark.parametrize("name", ONE_IMAGE)
def test_comparing_one_image_of_a_group_is_rejected(name):
    with pytest.raises(InputError, match="`updates_per_iteration` must"):
        method_of(name, updates_per_iteration=4, shared_noise=name == "neighbor")


def test_seed_groups_of_one_image_are_rejected_by_plan_and_before_a_folder_is_made(tmp_path):
    for words in (["plan", "pocket/tiny"], ["train", "pocket/tiny", "--out", tmp_path / "run"]):
        done = call(*words, "method=tempflow-seeds", "images_per_prompt=4", cwd=tmp_path)
        assert done.returncode == 2 and "`sharing` must leave" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("weights", ["noise", "flash"])
@pytest.mark.parametrize("name", ["neighbor", "elbo-clip"])
def test_weights_by_noise_are_rejected_where_there_is_none(name, weights):
    with pytest.raises(InputError, match="`step_weights` must"):
        method_of(name, step_weights=weights, shared_noise=name == "neighbor")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"updates_per_iteration": 4},
        {"images_per_prompt": 2, "updates_per_iteration": 1},
        {"drop_flat_groups": True},
        {"update_batch": 1, "rollout_batch": 1, "prompts_per_iteration": 1, "iterations": 1},
        {"chunk_fraction": 0.01},
    ],
    ids=str,
)
def test_a_row_trains_with_equal_rewards_and_corner_settings_or_is_rejected_when_read(
    name, more, tmp_path
):
    (tmp_path / "equal.py").write_text(
        "def same(images, prompts):\n    return [0.5] * len(images)\n"
    )
    shape = {"steps": 17}
    if "tree" in name or name == "branch":
        shape["images_per_prompt"] = METHODS[name]["settings"]["images_per_prompt"]
    if name == "tempflow-seeds":
        shape["sharing"] = "seeds:2"
    values = SMALL | {"shared_noise": name == "neighbor", "method": name} | more | shape
    for reward in (f"{tmp_path / 'equal.py'}:same", "pocket-clip"):
        try:
            settings = load_settings(
                "pocket/tiny", values | {"reward": reward, "eval_rewards": ("pocket-clip",)}
            )
            load_method(settings)
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            return
        state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
        for _ in range(settings.iterations):
            line = trainer.train_iteration(state)
            assert line["skipped_updates"] == 0 and line["grad_norm"] < float("inf")
        assert reward != "pocket-clip" or line["grad_norm"] > 0


def test_online_dpo_goes_on_where_all_groups_have_equal_rewards(tmp_path):
    (tmp_path / "equal.py").write_text(
        "def same(images, prompts):\n    return [0.5] * len(images)\n"
    )
    settings = load_settings(
        "pocket/tiny", SMALL | {"method": "online-dpo", "reward": f"{tmp_path / 'equal.py'}:same"}
    )
    state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
    line = trainer.train_iteration(state)
    assert line["grad_norm"] == 0 and line["skipped_updates"] == 0
