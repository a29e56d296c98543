"""What an iteration computes up to its first update, and how far two iterations are apart: findings/bit-identity."""

import torch
from torch import Tensor

from chunk_grpo.theory.dynamics import relative_distance
from chunk_grpo.training.gradient import accumulate_gradients
from chunk_grpo.training.groups import sample_groups
from chunk_grpo.training.state import TrainingState
from chunk_grpo.training.update import build_update_batches, step_optimizer


def iteration_tensors(
    state: TrainingState,  # with policy and optimizer; its weights take a step
) -> dict[str, Tensor]:
    """What an iteration computes up to its first update."""
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
    b: Tensor,  # of the same shape
) -> float:  # 0 where all bits are the same
    """Largest difference of two tensors, as a part of the largest number."""
    if torch.equal(a, b):
        return 0.0
    return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()


def difference_words(difference: float) -> str:
    """A difference in words."""
    return (
        "the same bits" if difference == 0 else f"apart by at most {difference:.0e} of the largest"
    )
