"""Replayed transitions and chunk samples made of given tensors, for tests of a method's hooks."""

from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training.replay import ChunkTerms, TransitionBatch


def batch_of(
    velocity: Tensor,  # (m, S, C)
    latents: Tensor,  # (m, S, C)
    target: Tensor,  # (m, ...)
    sampler: Sampler | SimpleNamespace,
    step: Tensor,  # (m,) long
    references: Mapping[str, Tensor] | None = None,
) -> TransitionBatch:
    """Return one transition of each of m images, which are one group."""
    image = torch.arange(len(latents))
    return TransitionBatch(
        latents=latents,
        target=target,
        velocity=velocity,
        reference_velocities=references or {},
        sampler=sampler,
        step_index=step,
        image_index=image,
        member=image,
    )


def batch_at_levels(
    velocity: Tensor,  # (m, S, C)
    latents: Tensor,  # (m, S, C)
    target: Tensor,  # (m, S, C)
    levels: Tensor,  # (m,), noise level of each latent
    references: Mapping[str, Tensor] | None = None,
) -> TransitionBatch:
    """Return noised images, one at each of m levels."""
    return batch_of(
        velocity,
        latents,
        target,
        sampler=SimpleNamespace(sigmas=levels),
        step=torch.arange(len(levels)),
        references=references,
    )


def terms_of(
    statistic: Tensor,  # (N, ...)
    advantage: Tensor,  # (N,)
    group: Tensor | None = None,  # (N,) long; None: all are one group
    member: Tensor | None = None,  # (N,) long; None: in their order
) -> ChunkTerms:
    """Return the terms of N chunk samples."""
    count = len(advantage)
    return ChunkTerms(
        statistic=statistic,
        advantage=advantage,
        group=torch.zeros(count, dtype=torch.long) if group is None else group,
        member=torch.arange(count) if member is None else member,
    )
