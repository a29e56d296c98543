"""The tensors that an iteration computes up to its first update, and how much they differ: findings/bit-identity."""

import torch
from torch import Tensor

from chunk_grpo.theory.dynamics import relative_distance
from chunk_grpo.training.gradient import accumulate_gradients
from chunk_grpo.training.groups import sample_groups
from chunk_grpo.training.state import TrainingState
from chunk_grpo.training.update import build_update_batches, step_optimizer


def iteration_tensors(
    state: TrainingState,  # with policy and optimizer; the first update changes its weights
) -> dict[str, Tensor]:
    """Run an iteration up to and including its first update, and return the tensors of its stages.

    The keys are initial noise, latents, log-probabilities, advantages, gradient and weights.
    """
    rollout = sample_groups(state)
    context, advantage = rollout.context, rollout.advantage
    state.profile = relative_distance(context.trajectories.latents.float()).double().mean(0)
    (work, *_), _ = build_update_batches(state, rollout)
    state.optimizer.zero_grad()
    accumulate_gradients(context, work, advantage, state.method)
    trained, paths = state.policy.trained, context.trajectories
    gradient = torch.cat([p.grad.flatten() for p in trained]).clone()
    step_optimizer(state)
    weights = torch.cat([p.detach().flatten() for p in trained])
    return {
        "initial noise": paths.latents[:, 0].clone(),
        "latents": paths.latents[:, -1],
        "log-probabilities": paths.log_probs,
        "advantages": advantage,
        "gradient": gradient,
        "weights": weights,
    }


def relative_difference(
    a: Tensor,
    b: Tensor,  # same shape as `a`
) -> float:  # 0 if all bits are equal
    """Return the largest difference of two tensors, relative to the largest number in the first one."""
    if torch.equal(a, b):
        return 0.0
    return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()


def describe_difference(
    difference: float,  # from `relative_difference`
) -> str:
    """Describe a relative difference: "the same bits", or its size relative to the largest number."""
    if difference == 0:
        return "the same bits"
    return f"a difference of at most {difference:.0e} of the largest number"
