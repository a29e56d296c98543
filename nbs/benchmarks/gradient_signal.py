"""How many images a gradient needs: signal-to-noise ratio of the pocket model's gradient, by sampler and transitions.

    python nbs/benchmarks/gradient_signal.py [--prompts 96] [--images 12] [--out FILE.json]

Trajectories of the base model, reward pocket-clip, T 17. For every sampler, set of transitions and group of layers: the
ratio for 100 images, with its standard error over 8 blocks of prompts.
"""

import argparse
import time
from pathlib import Path

import torch

from chunk_grpo import folder, pocket, rewards, weights
from chunk_grpo.checkpoint import write_json
from chunk_grpo.inputs import draw_prompts
from chunk_grpo.objective import group_advantages
from chunk_grpo.rollout import decode, rollout
from chunk_grpo.schedule import sigmas
from chunk_grpo.snr import gradient_gram, signal_to_noise
from chunk_grpo.update import Replay

SAMPLERS = {"flow": 0.7, "cps": 0.8, "dance": 0.5}
BLOCKS, STEPS = 8, 17
FIRST = {"first 2": 2, "first 5": 5, "first 9": 9, "all 16": 16}  # the boundaries of the chunks 2,3,4,7


def table(policy, prompts, images, kind, eta):
    "Rows of one sampler."
    texts = pocket.prompts("train")
    chosen = draw_prompts(len(texts), prompts, 0, 0)
    keys = [(0, 0, p, g) for p in chosen for g in range(images)]
    row, grid = torch.arange(len(keys)) // images, sigmas(STEPS, 3.0)
    conditioning = policy.encode([texts[p] for p in chosen])
    paths = rollout(policy, conditioning, row, keys, grid, kind, eta, 48)
    drawn = decode(policy, paths.latents[:, -1], 48)
    score = rewards.score("pocket-clip", rewards.load("pocket-clip"), drawn, [texts[key[2]] for key in keys])
    advantage = group_advantages(score.reshape(prompts, images)).flatten()
    grams = gradient_gram(Replay(policy, conditioning, paths, grid, kind, eta), advantage, BLOCKS)
    grams["all layers"] = sum(grams.values())
    for layers, gram in grams.items():
        for name, count in FIRST.items():
            found = signal_to_noise(gram, (torch.arange(STEPS - 1) < count).double(), len(keys) // BLOCKS)
            yield {"sampler": kind, "eta": eta, "layers": layers, "transitions": name, "snr_100": 100 * found["snr"],
                   "se": 100 * found["se"], "noise": found["noise"]}


def main():
    "Measure, print, and write where --out says."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--out")
    chosen, start, rows = parser.parse_args(), time.time(), []
    policy = weights.load("pocket", resolution=pocket.SIZE, max_tokens=pocket.MAX_TOKENS)
    for kind, eta in SAMPLERS.items():
        for line in table(policy, chosen.prompts, chosen.images, kind, eta):
            rows.append(line)
            print("{sampler:6} {layers:12} {transitions:8} SNR of 100 images {snr_100:7.4f} +- {se:.4f}".format(**line))
    where = {"git_commit": folder.commit(), "machine": folder.machine(), "versions": folder.versions()}
    sizes = {"prompts": chosen.prompts, "images": chosen.images, "seconds": time.time() - start}
    if chosen.out:
        write_json(Path(chosen.out), sizes | where | {"rows": rows})


if __name__ == "__main__":
    main()
