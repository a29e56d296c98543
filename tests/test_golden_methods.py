"""Losses and gradients that authors' own code gave on small tensors, computed outside: ours are the same numbers.

golden_methods.json names repository, commit, file and how each number was made. The tensors are waves: no data is kept.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transitions import batch_at_levels, batch_of, terms_of

from chunk_grpo.core.settings import load_settings
from chunk_grpo.theory.credit import credit_advantages, relative_nearest_distances
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.theory.sharing import Sharing, edge_advantages, label_shared_states
from chunk_grpo.training.method import Method
from chunk_grpo.training.method_loading import load_method

GOLDEN = json.loads((Path(__file__).parent / "golden_methods.json").read_text())
SHAPE = (4, 2, 3)
LEVELS = torch.tensor([0.9, 0.6, 0.3, 0.1])
ADVANTAGE = torch.tensor([1.5, -2.0, 0.3, -0.7])
GROUP = torch.arange(4)


def wave(k: int) -> torch.Tensor:
    """A tensor that anybody can make again."""
    return torch.sin(1.7 * torch.arange(24, dtype=torch.float64) + k).reshape(SHAPE).float()


def objective_of(
    method: Method,
    statistic: torch.Tensor,
    group: torch.Tensor = GROUP,
    advantage: torch.Tensor = ADVANTAGE,
) -> torch.Tensor:
    """Return the objective of four chunk samples, one of each image."""
    return method.objective(terms_of(statistic, advantage, group))


def method_of(name: str, **more):
    settings = {"method": name, "steps": 9, "shared_noise": False, **more}
    return load_method(load_settings("pocket/tiny", settings))


def compare(name: str, loss: torch.Tensor, at: torch.Tensor) -> None:
    """To the rounding of float32."""
    expected = torch.tensor(GOLDEN[name]["gradient"]).reshape(SHAPE)
    assert loss.item() == pytest.approx(GOLDEN[name]["loss"], rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, at)[0], expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("name", ["nft-1.0", "nft-0.1"])
def test_diffusion_nft(name):
    method = method_of("nft")
    t = LEVELS.reshape(-1, 1, 1)
    method.beta = GOLDEN[name]["beta"]
    clean = wave(0)
    noise = wave(1)
    v = wave(2).requires_grad_()
    references = {"old": wave(2) + 0.1 * wave(3)}
    losses = method.level_stats(
        batch_at_levels(
            v, (1 - t) * clean + t * noise, noise - clean, levels=LEVELS, references=references
        )
    )
    compare(name, -objective_of(method, method.statistic(losses, losses)).mean(), v)


def test_advantage_weighted_matching():
    method = method_of("awm", clip_range=GOLDEN["awm"]["clip_range"])
    t = LEVELS.reshape(-1, 1, 1)
    clean = wave(0)
    noise = wave(1)
    v = wave(2).requires_grad_()
    references = {"ema": wave(2) + 0.1 * wave(3)}
    batch = batch_at_levels(
        v, (1 - t) * clean + t * noise, noise - clean, levels=LEVELS, references=references
    )
    new = method.level_stats(batch)
    old = method.level_stats(replace(batch, velocity=wave(2) + 0.05 * wave(4)))
    compare("awm", -objective_of(method, method.statistic(new, old)).mean(), v)


def test_centred_reward_distillation():
    method = method_of("crd")
    t = LEVELS.reshape(-1, 1, 1)
    clean = wave(0)
    noise = wave(1)
    v = wave(2).requires_grad_()
    references = {"old": wave(2) + 0.1 * wave(3)}
    losses = method.level_stats(
        batch_at_levels(
            v, (1 - t) * clean + t * noise, noise - clean, levels=LEVELS, references=references
        )
    )
    one_group = torch.zeros(4, dtype=torch.long)
    worth = objective_of(method, method.statistic(losses, losses), one_group)
    compare("crd", -worth.mean(), v)


@pytest.mark.parametrize("surrogate", ["epg", "pepg", "par", "grpo"])
def test_elbo(surrogate):
    more = {"clip_range": 1e-3} if surrogate == "grpo" else {}
    method = method_of(f"elbo-{'clip' if surrogate == 'grpo' else surrogate}", **more)
    t = LEVELS.reshape(-1, 1, 1)
    clean = wave(0)
    noise = wave(1)
    v = wave(2).requires_grad_()
    batch = batch_at_levels(v, (1 - t) * clean + t * noise, noise - clean, levels=LEVELS)
    new = method.level_stats(batch)
    old = method.level_stats(replace(batch, velocity=wave(2) + 0.05 * wave(4)))
    moved = method.statistic(new, old)
    held = {"epg": ADVANTAGE, "pepg": ADVANTAGE - moved}.get(
        surrogate, torch.zeros(4)
    ) * moved.exp()
    further = (
        held.detach() * old[0].detach()
    ).mean()  # theirs multiply the new bound itself, not what it moved by
    compare(f"elbo-{surrogate}", -objective_of(method, moved).mean() - further, v)


def test_direct_group_preference():
    """One image is clipped, three are not."""
    method = method_of("dgpo", clip_range=GOLDEN["dgpo"]["clip_range"])
    t = LEVELS.reshape(-1, 1, 1)
    assert method.beta == GOLDEN["dgpo"]["beta"]
    clean = wave(0)
    noise = wave(1)
    v = wave(4).requires_grad_()
    references = {"base": wave(4) + 0.1 * wave(3)}
    batch = batch_at_levels(
        v, (1 - t) * clean + t * noise, noise - clean, levels=LEVELS, references=references
    )
    new = method.level_stats(batch)
    old = method.level_stats(replace(batch, velocity=wave(4) + 0.05 * wave(6)))
    one_group = torch.zeros(4, dtype=torch.long)
    worth = objective_of(method, method.statistic(new, old), one_group)
    compare("dgpo", -worth.mean(), v)


@pytest.mark.parametrize("name", ["guard", "dppo"])
def test_repaired_ratios(name):
    more = (
        {"clip_range": GOLDEN["guard"]["clip_ratio"]}
        if name == "guard"
        else {"surrogate": f"dppo:{GOLDEN['dppo']['kl_mask_threshold']}"}
    )
    method = method_of(name, **more)
    sampler = Sampler(sigmas(9, 3.0), "flow", 0.7)
    index = torch.full((4,), 4)
    mean, std = sampler.mean_std(wave(1), wave(0), index)
    then = mean + std * wave(5)
    size = torch.tensor([1.0, 2.0, 3.0, 0.5]).reshape(-1, 1, 1)
    moved = (mean + 0.1 * wave(6) * size).requires_grad_()
    a, b, _ = sampler.coefficients(
        4
    )  # transition statistics asks for velocities, the numbers are by the mean
    new, old = (
        method.transition_stats(
            batch_of(
                velocity=(x - a * wave(0)) / b,
                latents=wave(0),
                target=then,
                sampler=sampler,
                step=index,
            )
        )
        for x in (moved, mean)
    )
    worth = objective_of(method, method.statistic(new, old))
    length = (
        (sampler.sigmas[4] - sampler.sigmas[5]).item() if name == "guard" else 1.0
    )  # what guard divides by
    compare(name, -worth.mean() / length, moved)


def test_gardo_s_advantages_by_distance():
    scores = wave(1).flatten()[:8].reshape(2, 4)
    features = wave(0).reshape(2, 4, 3)
    advantage = credit_advantages({"r": scores}, {"r": 1.0}, "none")
    ours = torch.where(advantage > 0, advantage * relative_nearest_distances(features), advantage)
    expected = torch.tensor(GOLDEN["gardo"]["advantages"]).reshape(2, 4)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(ours, advantage, rtol=0.1)


def test_self_opd():
    """Four branches of one state, of which three lose to the ODE: weights within the authors' clip, which is not ours."""
    golden = GOLDEN["self-opd"]
    method = method_of("self-opd", images_per_prompt=4)
    mean = wave(2)[:1].requires_grad_()
    std = golden["std_dev"] * golden["dt"] ** 0.5
    sampler = SimpleNamespace(mean_std=lambda v, x, step: (v, torch.full((4, 1, 1), std)))
    next_states = wave(5).expand(4, 4, -1, -1)  # each row with those of all branches
    batch = batch_of(
        velocity=mean.expand(4, -1, -1),
        latents=wave(0),
        target=next_states,
        sampler=sampler,
        step=torch.full((4,), 3),
    )
    new = method.transition_stats(batch)
    gains = torch.tensor([golden["rewards"]]) - golden["ode_reward"]
    credit = credit_advantages({"r": gains}, {"r": 1.0}, "scale")[0]
    one_group = torch.zeros(4, dtype=torch.long)
    worth = objective_of(method, method.statistic(new, new), one_group, advantage=credit)
    assert -worth.mean().item() == pytest.approx(golden["loss"], rel=1e-5)
    (gradient,) = torch.autograd.grad(-worth.mean(), mean)
    torch.testing.assert_close(
        gradient.flatten(), torch.tensor(golden["gradient"]), rtol=1e-4, atol=1e-6
    )


def test_tree_grpo_carries_advantages_up():
    """A mean over children, as its code has it; its deviation divides by the number of leaves, ours by one less."""
    states = label_shared_states(Sharing.parse("tree:2@0,1,2").noise_owners(8, 3), torch.arange(3))
    ours = edge_advantages(wave(1).flatten()[None, :8], states, "leaves")[0]
    for depth, row in enumerate(GOLDEN["tree"]["edges"]):
        theirs = torch.tensor(row).repeat_interleave(8 // len(row)) * (7 / 8) ** 0.5
        torch.testing.assert_close(ours[:, depth], theirs, rtol=1e-4, atol=1e-6)
