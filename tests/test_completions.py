"""Completions of states are made by the rollout's own solver and noise levels, so gains are of the noise alone."""

import dataclasses

import pytest
import torch

from chunk_grpo.core.settings import load_settings
from chunk_grpo.training import credit_assignment, rollout
from chunk_grpo.training.groups import sample_groups
from chunk_grpo.training.method import completion_levels
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state

BASE = {
    "steps": 9,
    "images_per_prompt": 4,
    "shared_noise": False,
    "prompts_per_iteration": 2,
    "eval_every": 0,
    "eval_count": 1,
    "threads": 1,
    "chunk_fraction": 1,
}
ROWS = {
    "g2-strides": {},
    "self-opd": {},
    "dense": {"window": "early:1"},
    "stepwise": {"window": "early:1"},
    "chunk-gain": {"window": "early:2", "chunks": "whole"},
    "chunk": {"window": "early:1", "chunks": "steps", "completion_strides": "1,2,3"},
}


def state_of(folder, name: str, **more):
    """Return a loaded state whose method is a row of the table."""
    settings = load_settings("pocket/tiny", BASE | {"method": name} | ROWS.get(name, {}) | more)
    return load_policy_and_optimizer(prepare_state(settings, folder))


def drawn_and_completed(state, monkeypatch) -> tuple:
    """Sample groups; return them and (states, rows, levels, what the network was told, images) of each completion."""
    calls, told, complete, velocity = [], [], rollout.complete_trajectories, state.policy.velocity

    def watched(policy, conditioning, latents, options, levels):
        told.clear()
        made = complete(policy, conditioning, latents, options=options, levels=levels)
        calls.append((latents, conditioning, levels, [x[0].item() for x in told], made))
        return made

    monkeypatch.setattr(credit_assignment, "complete_trajectories", watched)
    monkeypatch.setattr(
        state.policy, "velocity", lambda x, t, rows: (told.append(t), velocity(x, t, rows))[1]
    )
    return sample_groups(state), calls


@pytest.mark.parametrize("name", ROWS)
def test_a_completion_tells_the_network_truncated_levels_where_the_rollout_does(
    name, tmp_path, monkeypatch
):
    drawn, calls = drawn_and_completed(
        state_of(tmp_path, name, truncate_timesteps=True), monkeypatch
    )
    assert calls
    for _, _, levels, told, _ in calls:
        grid = drawn.context.trajectories.sampler.sigmas[levels]
        assert told[: len(grid) - 1] == ((1000 * grid[:-1]).trunc() / 1000).tolist()
        assert told[: len(grid) - 1] != grid[:-1].tolist()


@pytest.mark.parametrize("name", ROWS)
def test_a_completion_takes_second_order_steps_where_the_solver_is_dpm2(
    name, tmp_path, monkeypatch
):
    state = state_of(tmp_path, name, solver="dpm2")
    drawn, calls = drawn_and_completed(state, monkeypatch)
    sampler, seconds = drawn.context.trajectories.sampler, 0
    assert calls
    for latents, rows, levels, _, made in calls:
        x = latents.clone()
        before = None
        grid = sampler.sigmas[levels]
        noisy = set(sampler.stochastic_steps.tolist()) if (levels.diff() == 1).all() else set()
        half = ((1 - grid.double()) / grid.double()).log()  # of the signal over the noise
        for i in range(len(grid) - 1):
            with torch.no_grad():
                v = state.policy.velocity(x, grid[i].expand(len(x)), rows)
            image = x - grid[i] * v
            step = half[i + 1] - half[i]
            x = x + (grid[i + 1] - grid[i]) * v
            follows = (
                i > 0 and not {int(levels[i]), int(levels[i]) - 1} & noisy
            )  # the rollout's step is Euler's else
            if follows and step.isfinite() and (half[i] - half[i - 1]).isfinite():
                seconds += 1
                more = (
                    (1 - grid[i + 1])
                    * (1 - torch.exp(-step))
                    * step
                    / (2 * (half[i] - half[i - 1]))
                )
                x = x + more.float() * (image - before)
            before = image
        torch.testing.assert_close(made, x, rtol=1e-4, atol=1e-4)
    assert seconds


def test_a_completion_behind_the_noise_is_the_rollouts_own_image(tmp_path, monkeypatch):
    state = state_of(
        tmp_path, "g2-strides", solver="dpm2", latents_dtype="bfloat16", truncate_timesteps=True
    )
    drawn, _ = drawn_and_completed(state, monkeypatch)
    paths = drawn.context.trajectories
    start = int(paths.sampler.stochastic_steps[-1]) + 1
    levels = torch.arange(start, len(paths.sampler) + 1)
    made = rollout.complete_trajectories(
        policy=state.policy,
        conditioning=drawn.context.image_conditioning(torch.arange(8)),
        latents=paths.latents[:, start].float(),
        options=rollout.RolloutOptions(paths.sampler, batch_size=8, storage_dtype=torch.bfloat16),
        levels=levels,
    )
    assert torch.equal(made, paths.latents[:, -1])


@pytest.mark.parametrize("name", ["self-opd", "dense", "chunk-gain"])
def test_with_hardly_any_noise_a_completion_is_the_rollouts_image(name, tmp_path, monkeypatch):
    """By Euler's steps a completion is elsewhere, and all images of a group seem to gain or to lose by it."""
    state = state_of(tmp_path, name, solver="dpm2", eta=1e-5)
    drawn, calls = drawn_and_completed(state, monkeypatch)
    final = drawn.context.trajectories.latents[:, -1]
    euler = dataclasses.replace(drawn.context.trajectories.sampler, solver="euler")
    for latents, rows, levels, _, made in calls:
        own = final[:: len(final) // len(latents)]
        other = rollout.complete_trajectories(
            policy=state.policy,
            conditioning=rows,
            latents=latents,
            options=rollout.RolloutOptions(euler, batch_size=8),
            levels=levels,
        )
        assert (made - own).abs().max() < 1e-3 < (other - own).abs().max()


def test_strides_that_visit_the_same_levels_count_once():
    """Near the end of a trajectory, strides 1, 2 and 3 all make the one step that is left."""
    changes = {"completion_strides": "1,2,3", "chunks": "steps", "train_chunks": "all"}

    def levels(window: str) -> list[list[int]]:
        settings = load_settings("pocket/demo", changes | {"window": window})
        method = load_method(settings)
        sampler = method.sampler(0)
        start = int(method.trainable_steps(sampler)[-1]) + 1
        return [found.tolist() for found in completion_levels(settings, sampler, start)]

    steps = load_settings("pocket/demo").steps
    assert levels(f"frozen:{steps - 1}") == []  # the rollout has made this step
    assert levels(f"frozen:{steps - 2}") == [[steps - 2, steps]]
    assert len(levels("frozen:2")) == 2
