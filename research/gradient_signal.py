"""How many images a gradient needs: signal-to-noise ratio of the pocket model's gradient, by sampler and transitions.

    python research/gradient_signal.py [--prompts 96] [--images 12] [--out FILE.json]

Trajectories of the base model, reward pocket-clip, T 17. For each sampler, set of transitions and group of
layers, it computes the ratio for 100 images, with its standard error over 8 blocks of prompts.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from credit import gradient_gram, signal_to_noise

from chunk_grpo import pocket
from chunk_grpo.core import machine
from chunk_grpo.core.files import write_json
from chunk_grpo.models import trainable
from chunk_grpo.models.inputs import sample_prompt_indices
from chunk_grpo.models.policy import Policy, decode_latents
from chunk_grpo.rewards import rewards
from chunk_grpo.theory.objective import group_advantages
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories

SAMPLERS = {"flow": 0.7, "cps": 0.8, "dance": 0.5}
BLOCKS, STEPS = 8, 17
FIRST = {
    "first 2": 2,
    "first 5": 5,
    "first 9": 9,
    "all 16": 16,
}  # the boundaries of the chunks 2,3,4,7


def measure_sampler(
    policy: Policy,
    prompts: int,  # number of prompts
    images: int,  # number of images per prompt
    kind: str,  # kind of the sampler
    eta: float,  # strength of its noise
) -> Iterator[dict]:
    """Measure one sampler, and yield a row per layer group and set of transitions.

    The keys are sampler, eta, layers, transitions, snr_100 (signal-to-noise ratio of 100 images), se and noise.
    """
    texts = pocket.read_pocket_prompts("train")
    chosen = sample_prompt_indices(len(texts), prompts, 0, 0)
    keys = [(0, 0, p, g) for p in chosen for g in range(images)]
    row = torch.arange(len(keys)) // images
    grid = sigmas(STEPS, 3.0)
    conditioning = policy.encode([texts[p] for p in chosen])
    paths = sample_trajectories(
        policy=policy,
        conditioning=conditioning,
        prompt_index=row,
        keys=keys,
        options=RolloutOptions(Sampler(grid, kind, eta), batch_size=48),
    )
    drawn = decode_latents(policy, paths.latents[:, -1], 48)
    clip = rewards.load_reward("pocket-clip")
    asked = [texts[prompt] for _, _, prompt, _ in keys]
    score = rewards.score_images("pocket-clip", clip, drawn, asked)
    advantage = group_advantages(score.reshape(prompts, images)).flatten()
    grams = gradient_gram(ReplayContext(policy, conditioning, paths), advantage, BLOCKS)
    grams["all layers"] = sum(grams.values())
    for layers, gram in grams.items():
        for name, count in FIRST.items():
            found = signal_to_noise(
                gram, (torch.arange(STEPS - 1) < count).double(), len(keys) // BLOCKS
            )
            yield {
                "sampler": kind,
                "eta": eta,
                "layers": layers,
                "transitions": name,
                "snr_100": 100 * found["snr"],
                "se": 100 * found["se"],
                "noise": found["noise"],
            }


def main():
    """Measure all samplers, print the rows, and write them to the file given by --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--out")
    chosen = parser.parse_args()
    start = time.time()
    rows = []
    policy = trainable.load_trainable_policy(
        "pocket", resolution=pocket.IMAGE_SIZE, max_tokens=pocket.MAX_TOKENS
    )
    for kind, eta in SAMPLERS.items():
        for line in measure_sampler(policy, chosen.prompts, chosen.images, kind, eta):
            rows.append(line)
            print(
                "{sampler:6} {layers:12} {transitions:8} SNR of 100 images {snr_100:7.4f} +- {se:.4f}".format(
                    **line
                )
            )
    where = {
        "git_commit": machine.current_git_commit(),
        "machine": machine.machine_info(),
        "versions": machine.library_versions(),
    }
    sizes = {"prompts": chosen.prompts, "images": chosen.images, "seconds": time.time() - start}
    if chosen.out:
        write_json(Path(chosen.out), sizes | where | {"rows": rows})


if __name__ == "__main__":
    main()
