"""`truncate_timesteps`: the network is told whole timesteps in rollout and update, and exact ones in the ODE."""

from dataclasses import replace

import pytest
import torch

from chunk_grpo.core import settings
from chunk_grpo.training.groups import measure_profile, sample_groups
from chunk_grpo.training.rollout import initial_noise, sample_ode
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state
from chunk_grpo.training.update import update_policy

FEW = {
    "iterations": 1,
    "prompts_per_iteration": 1,
    "images_per_prompt": 2,
    "steps": 5,
    "chunks": "2,2",
    "threads": 1,
    "eval_count": 1,
    "eval_rewards": [],
    "reward": "tiny_rewards:red",
    "kl": 0.1,
    "updates_per_iteration": 1,
}


def told(state, monkeypatch) -> dict[str, list[float]]:
    """What the network is told in each phase, in thousandths."""
    found, predict = {}, state.policy.predict

    def watched(latents, sigma, rows):
        found.setdefault(phase, []).extend((1000 * sigma.double()).tolist())
        return predict(latents, sigma, rows)

    monkeypatch.setattr(state.policy, "predict", watched)
    phase = "rollout"
    rollout = sample_groups(state)
    measure_profile(state, rollout.context.trajectories)
    phase = "update"
    update_policy(state, replace(rollout, advantage=torch.tensor([1.0, -1.0])))
    phase = "ode"
    sample_ode(
        state.policy,
        state.policy.encode(["a red star"]),
        initial_noise(state.policy, [(0, 0, 0, 0)]),
        state.policy.sigmas(7),
    )
    return found


@pytest.mark.parametrize("truncated", [False, True])
def test_whole_timesteps_are_told_where_they_are_asked_for(truncated, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run_settings = settings.load_settings("pocket/tiny", FEW | {"truncate_timesteps": truncated})
    state = load_policy_and_optimizer(prepare_state(run_settings, tmp_path))
    found = told(state, monkeypatch)
    grid = [1000 * x for x in state.method.sigmas.double().tolist()]
    assert any(abs(x - round(x)) > 0.01 for x in found["ode"]), (
        "the evaluation's levels are the model's own"
    )
    for phase in ("rollout", "update"):
        if truncated:
            assert {round(x, 2) for x in found[phase]} <= {float(int(x + 1e-4)) for x in grid}
        else:
            assert {round(x, 2) for x in found[phase]} <= {round(x, 2) for x in grid}
            assert any(abs(x - round(x)) > 0.01 for x in found[phase])


def test_it_is_off_unless_it_is_asked_for():
    assert settings.Settings().truncate_timesteps is False
    for name, like in (("code-chunk", "chunk"), ("code-dance", "dance")):
        code, text = (settings.load_settings(f"paper/{preset}") for preset in (name, like))
        assert settings.diff_settings(text, code) == {"truncate_timesteps": (False, True)}
    rows = [settings.load_settings(f"paper/{name}") for name in ("table5-chunk-ws", "code-clip")]
    changed = settings.diff_settings(*rows)
    assert set(changed) == {"truncate_timesteps", "reward_options"}
