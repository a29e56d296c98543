"""The same iteration in the orders of other code, beside ours: image by image, transition by transition, in batches.

DanceGRPO draws image by image and trains transition by transition; GCPO's code draws so and trains chunk by chunk;
Flow-GRPO draws and trains three at a time. Each must leave the gradient that ours leaves. `research/speed.py` and
`research/method_costs.py` measure them; nbs/findings/speed.ipynb shows what they found.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from chunk_grpo.core.settings import Settings
from chunk_grpo.measurements import speed
from chunk_grpo.measurements.speed import Workload
from chunk_grpo.models.policy import compute_network_sigma
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.training.gradient import accumulate_gradients
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, Trajectories, initial_noise, sample_sde
from chunk_grpo.training.update_batch import build_update_batch

GRADIENT_TOLERANCE = {
    "float32": 1e-5,
    "float16": 0.02,
    "bfloat16": 0.1,
}  # largest relative difference from our gradient
ORDERS = {
    "batched, as here": ("rollout", "update"),
    "DanceGRPO": ("reference rollout", "reference update"),
    "GCPO, chunks": ("reference rollout", "GCPO update"),
    "Flow-GRPO, batches of 3": ("Flow-GRPO rollout", "Flow-GRPO update"),
}


@torch.no_grad()
def draw_one_by_one(b: Workload) -> Trajectories:
    """The trajectories of a rollout, image by image."""
    start = initial_noise(b.policy, b.keys, b.settings.shared_noise).to(b.policy.device)
    parts = []
    for i in range(len(b.keys)):
        rows = {k: v[b.prompt_index[i : i + 1]] for k, v in b.conditioning.items()}
        one = slice(i, i + 1)
        parts.append(
            sample_sde(
                policy=b.policy,
                prompt_embeds=rows,
                latents=start[one],
                keys=b.keys[one],
                options=RolloutOptions(b.sampler),
            )
        )
    latents, logp = (torch.cat(x) for x in zip(*parts, strict=True))
    return Trajectories(latents, logp, b.prompt_index, b.keys, b.sampler)


def list_transitions(b: Workload, paths: Trajectories) -> list[list[tuple[int, int, float]]]:
    """The transitions that an update trains, a list a chunk: image, transition, weight in the objective."""
    chosen = b.sample_chunks(paths)
    every = range(b.chunks.transitions)
    inside = [
        (image, every[b.chunks.slices[chunk]])
        for image, row in enumerate(chosen.tolist())
        for chunk in row
    ]
    return [[(image, i, 1 / len(part) / chosen.numel()) for i in part] for image, part in inside]


def accumulate_batched(
    b: Workload, paths: Trajectories, batches: Sequence[Sequence[tuple[int, int, float]]]
) -> None:
    """Leave the gradient of minus (13) in the weights, on-policy, with one forward and backward a batch of transitions."""
    b.policy.transformer.zero_grad()
    for batch in batches:
        image, i, weight = map(torch.tensor, zip(*batch, strict=True))
        rows = {k: v[paths.prompt_index[image]] for k, v in b.conditioning.items()}
        now, then = (paths.latents[image, j].float().to(b.policy.device) for j in (i, i + 1))
        velocity = b.policy.velocity(
            now, compute_network_sigma(b.policy, b.sampler.sigmas[i]), rows
        )
        logp = b.sampler.log_prob(then, *b.sampler.mean_std(velocity, now, i))
        ratio = (
            logp - logp.detach()
        ).exp()  # on-policy: 1, with the gradient of the new log-probability
        (-(weight * b.advantage[image]).to(b.policy.device) * ratio).sum().backward()


def gradient_difference(b: Workload, ours: Tensor) -> float:
    """How far the gradient in the weights is from ours, relative; RuntimeError where that is too far."""
    error = ((ours - b.gradient()).norm() / ours.norm()).item()
    if not error <= GRADIENT_TOLERANCE[b.settings.dtype]:
        raise RuntimeError(f"the gradients of two orders differ by {error:.1e}, relative")
    return error


def measure(settings: Settings, repeats: int = 3, say=lambda text: None, configs=()) -> dict:
    """`measure_iteration` with the other orders in turn, and with the memory of the two passes."""
    errors, spent, kept = [], {}, []

    def beside(b: Workload, paths: Trajectories, timed) -> None:
        def order(name, call):
            timed(name, call)
            if name.endswith("update"):
                errors.append(gradient_difference(b, ours))

        kept[:] = [b]
        ours = b.gradient()
        chunks = list_transitions(b, paths)
        each = [transition for chunk in chunks for transition in chunk]
        threes = [each[n : n + 3] for n in range(0, len(each), 3)]
        few = replace(
            b, settings=b.settings.model_copy(update={"rollout_batch": 3, "shared_noise": False})
        )
        with torch.compiler.set_stance("force_eager"):
            order("reference rollout", lambda: draw_one_by_one(b))
            order("reference update", lambda: accumulate_batched(b, paths, [[one] for one in each]))
            order(
                "GCPO update", lambda: accumulate_batched(b, paths, chunks)
            )  # drawn as the reference
            order("Flow-GRPO rollout", few.rollout)
            order("Flow-GRPO update", lambda: accumulate_batched(b, paths, threes))

    found = speed.measure_iteration(settings, repeats, say, beside, configs)
    spent = {name: phase["seconds"] for name, phase in found["phases"].items()}
    found["phases"] = {
        name: phase | {"reference_seconds": spent.get(f"reference {name}")}
        for name, phase in found["phases"].items()
        if not name.startswith(("reference", "GCPO", "Flow"))
    }
    found["orders"] = {
        order: {"rollout": spent[rollout], "update": spent[update]}
        for order, (rollout, update) in ORDERS.items()
    }
    return found | {"gradient_error": max(errors), "two_pass_bytes": measure_two_passes(kept[0])}


def measure_two_passes(b: Workload) -> dict[str, int | None]:
    """Bytes at most of an update of two images, in chunks of one and of the longest; None where it does not fit."""
    paths = b.rollout()
    longest = max(b.chunks.sizes)
    context = ReplayContext(b.policy, b.conditioning, paths)
    method = Method(b.settings)

    def peak(
        chosen: Tensor, chunks: Chunks, limit: int
    ) -> int | None:  # (B, k), and transitions in one forward
        work = build_update_batch(torch.arange(min(2, len(b.keys))), chosen, chunks, limit)
        old = paths.log_probs[work.image, work.step].to(b.policy.device)
        for p in b.policy.trained:  # gradients are there before, and the same in all ways
            p.grad = torch.zeros_like(p)
        try:
            return speed._measure_peak_bytes(
                lambda: accumulate_gradients(context, work, b.advantage, method, (old,)),
                b.policy.device,
            )
        except torch.OutOfMemoryError:
            return None

    last = torch.full((len(b.keys), 1), b.chunks.sizes.index(longest))
    first = torch.arange(longest).expand(len(b.keys), -1)
    with speed.eager_execution(b.policy) if b.policy.device.type == "cpu" else torch.enable_grad():
        return {
            "chunk of 1": peak(first, Chunks.steps(b.settings.transitions), 1),
            f"chunk of {longest}, two passes": peak(last, b.chunks, 1),
            f"chunk of {longest}, one pass": peak(last, b.chunks, longest),
        }
