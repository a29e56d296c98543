"""The public code's order, one image and one transition at a time, against ours: equal gradients, and the speed ratio.

    python nbs/benchmarks/reference_order.py [--prompts 2] [--images 12] [--repeats 3] [--out FILE.json]

Both orders do the work of one on-policy update of the pocket model (T 17, chunks 2,3,4,7, half of them drawn) in one
process, in turn, so that a machine whose speed drifts slows both. Times are medians over the repeats.
"""

import argparse
import json
import platform
import time
from functools import partial

import numpy as np
import torch

from chunk_grpo import pocket, weights
from chunk_grpo.chunks import Chunks
from chunk_grpo.rollout import rollout
from chunk_grpo.sampler import log_prob, transition
from chunk_grpo.schedule import sigmas
from chunk_grpo.update import Replay, accumulate, choose_chunks, lay_out

CLIP = 1e-3


def timed(function):
    "What the function returns, and its seconds."
    start = time.perf_counter()
    out = function()
    return out, time.perf_counter() - start


def reference_update(what, chosen, chunks, advantage):
    "Image by image, chunk by chunk, transition by transition: one forward each, one backward a chunk."
    paths, grid = what.trajectories, what.sigmas
    for image in range(len(chosen)):
        rows = {k: v[paths.row[image] : paths.row[image] + 1] for k, v in what.conditioning.items()}
        for chunk in chosen[image].tolist():
            differences = []
            for i in range(chunks.transitions)[chunks.slices[chunk]]:
                now, then = paths.latents[image : image + 1, i], paths.latents[image : image + 1, i + 1]
                mean, std = transition(what.policy.velocity(now, grid[i : i + 1], rows), now, grid, i)
                differences.append(log_prob(then, mean, std)[0] - paths.logp[image, i])
            ratio = torch.stack(differences).mean().exp()
            clipped = torch.minimum(ratio * advantage[image], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[image])
            (-clipped / chosen.numel()).backward()


def gradient(policy, function):
    "The gradient that the function leaves in the weights, and its seconds."
    policy.transformer.zero_grad()
    _, seconds = timed(function)
    return torch.cat([p.grad.flatten() for p in policy.trained]), seconds


def main():
    "Measure, compare, print, and write what was asked for."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 2), ("images", 12), ("repeats", 3), ("batch", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    a = parser.parse_args()
    policy = weights.load("pocket", resolution=pocket.SIZE, max_tokens=pocket.MAX_TOKENS)
    conditioning = policy.encode(pocket.prompts("train")[: a.prompts])
    keys = [(0, 0, p, g) for p in range(a.prompts) for g in range(a.images)]
    row, grid, chunks = torch.arange(len(keys)) // a.images, sigmas(17, 3.0), Chunks.parse("2,3,4,7")
    advantage = torch.randn(len(keys), generator=torch.Generator().manual_seed(0))
    times = {"rollout": [], "update": [], "both": []}
    for _ in range(a.repeats):
        paths, ours = timed(lambda: rollout(policy, conditioning, row, keys, grid, batch=a.batch))
        _, theirs = timed(lambda: rollout(policy, conditioning, row, keys, grid, batch=1))
        what = Replay(policy, conditioning, paths, grid)
        chosen = choose_chunks(paths.latents, keys, chunks, 0.5)
        work = lay_out(torch.arange(len(keys)), chosen, chunks, 2 * a.batch)
        grad, our_update = gradient(policy, partial(accumulate, what, work, advantage, CLIP))
        reference, their_update = gradient(policy, partial(reference_update, what, chosen, chunks, advantage))
        error = ((grad - reference).norm() / reference.norm()).item()
        assert error < 1e-5, f"the gradients differ by {error:.1e}, relative"
        for name, pair in (("rollout", (ours, theirs)), ("update", (our_update, their_update))):
            times[name].append(pair)
        times["both"].append((ours + our_update, theirs + their_update))
    result = {name: [float(np.median(column)) for column in zip(*pairs, strict=True)] for name, pairs in times.items()}
    print(f"{len(keys)} images, {len(work.segment)} transitions trained, {torch.get_num_threads()} threads")
    print(f"gradients differ by {error:.1e}, relative")
    for name, (ours, theirs) in result.items():
        print(f"{name:8s} ours {ours:6.2f} s   reference order {theirs:6.2f} s   ratio {theirs / ours:.1f}")
    if a.out:
        about = {"images": len(keys), "transitions": len(work.segment), "threads": torch.get_num_threads()}
        about |= {"gradient_error": error, "torch": torch.__version__, "machine": platform.machine()}
        with open(a.out, "w") as handle:
            json.dump(about | {"seconds": result}, handle, indent=1)


if __name__ == "__main__":
    main()
