"""The same iteration in this package's order and in the orders of other code, with equal gradients.

DanceGRPO samples image by image and trains transition by transition. GCPO's code also samples image by image, and trains
chunk by chunk. Flow-GRPO samples and trains three at a time. Each order must give the gradient of ours.
`research/speed.py` and `research/method_costs.py` measure the orders; nbs/findings/speed.ipynb shows the results.
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
def sample_one_by_one(b: Workload) -> Trajectories:
    """Sample the trajectories of a rollout image by image."""
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
    """List the transitions that an update trains, one list per chunk.

    Each is a tuple of the image's index, the transition's index and its weight in the objective.
    """
    chosen = b.sample_chunks(paths)
    steps = range(b.chunks.transitions)
    transitions = []
    for image, row in enumerate(chosen.tolist()):
        for chunk in row:
            in_chunk = steps[b.chunks.slices[chunk]]
            weight = 1 / len(in_chunk) / chosen.numel()
            transitions.append([(image, i, weight) for i in in_chunk])
    return transitions


def accumulate_batched(
    b: Workload, paths: Trajectories, batches: Sequence[Sequence[tuple[int, int, float]]]
) -> None:
    """Accumulate the on-policy gradient of minus (13), with one forward and backward pass per batch of transitions."""
    b.policy.transformer.zero_grad()
    for batch in batches:
        image, i, weight = map(torch.tensor, zip(*batch, strict=True))
        rows = {k: v[paths.prompt_index[image]] for k, v in b.conditioning.items()}
        current, following = (
            paths.latents[image, j].float().to(b.policy.device) for j in (i, i + 1)
        )
        velocity = b.policy.velocity(
            current, compute_network_sigma(b.policy, b.sampler.sigmas[i]), rows
        )
        log_prob = b.sampler.log_prob(following, *b.sampler.mean_std(velocity, current, i))
        # On-policy, the ratio is 1 and has the gradient of the new log-probability.
        ratio = (log_prob - log_prob.detach()).exp()
        (-(weight * b.advantage[image]).to(b.policy.device) * ratio).sum().backward()


def gradient_difference(b: Workload, ours: Tensor) -> float:
    """Return the relative difference of the accumulated gradient from `ours`.

    Raises RuntimeError if it exceeds `GRADIENT_TOLERANCE`.
    """
    error = ((ours - b.gradient()).norm() / ours.norm()).item()
    if not error <= GRADIENT_TOLERANCE[b.settings.dtype]:
        raise RuntimeError(
            f"the gradients of two orders must agree; their relative difference is {error:.1e}"
        )
    return error


def measure(settings: Settings, repeats: int = 3, log=lambda text: None, configs=()) -> dict:
    """Measure an iteration in our order and in those of three papers, and the memory of an update in two passes.

    Returns the result of `measure_iteration` with the keys orders, gradient_error and two_pass_bytes added. Raises
    RuntimeError if the gradients of two orders differ.
    """
    errors = []
    workloads = []

    def measure_other_orders(b: Workload, paths: Trajectories, timed) -> None:
        """Time the other orders on the same workload."""

        def order(name, call):
            """Time a call, and compare its gradient if it is an update."""
            timed(name, call)
            if name.endswith("update"):
                errors.append(gradient_difference(b, ours))

        workloads[:] = [b]
        ours = b.gradient()
        chunks = list_transitions(b, paths)
        transitions = [transition for chunk in chunks for transition in chunk]
        threes = [transitions[n : n + 3] for n in range(0, len(transitions), 3)]
        few = replace(
            b, settings=b.settings.model_copy(update={"rollout_batch": 3, "shared_noise": False})
        )
        with torch.compiler.set_stance("force_eager"):
            order("reference rollout", lambda: sample_one_by_one(b))
            order(
                "reference update",
                lambda: accumulate_batched(b, paths, [[one] for one in transitions]),
            )
            # GCPO samples like the reference.
            order("GCPO update", lambda: accumulate_batched(b, paths, chunks))
            order("Flow-GRPO rollout", few.rollout)
            order("Flow-GRPO update", lambda: accumulate_batched(b, paths, threes))

    found = speed.measure_iteration(settings, repeats, log, measure_other_orders, configs)
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
    return found | {
        "gradient_error": max(errors),
        "two_pass_bytes": measure_two_passes(workloads[0]),
    }


def measure_two_passes(b: Workload) -> dict[str, int | None]:
    """Return the peak memory in bytes of three updates of two images, keyed by a description.

    They use chunks of one transition, and the longest chunk in two passes and in one pass.

    A value is None if the update runs out of memory.
    """
    paths = b.rollout()
    longest = max(b.chunks.sizes)
    context = ReplayContext(b.policy, b.conditioning, paths)
    method = Method(b.settings)

    def peak(
        chosen: Tensor,  # numbers of the trained chunks, (B, k)
        chunks: Chunks,
        limit: int,  # number of transitions in one forward pass
    ) -> int | None:
        """Return the peak memory of an update, in bytes; None if it runs out of memory."""
        work = build_update_batch(torch.arange(min(2, len(b.keys))), chosen, chunks, limit)
        old = paths.log_probs[work.image_index, work.step_index].to(b.policy.device)
        for p in b.policy.trained:  # gradients are allocated before, so no measurement counts them
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
