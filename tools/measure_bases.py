"""Measure what every reward sees on images of every base of the pocket world, as a rollout draws them.

    python tools/measure_bases.py [--images 12] [--out runs/results/benchmarks/pocket_worlds.json]

For each base and each list of held-out prompts: the mean and the spread of each reward over images, its mean standard
deviation within a prompt's group, the share of groups whose scores are all equal, which teach nothing, and the
correlation of each reward with the exact verdict over all images. About three minutes on one core.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from chunk_grpo import pocket
from chunk_grpo.core import machine
from chunk_grpo.core.files import write_json
from chunk_grpo.method.sampler import Sampler
from chunk_grpo.method.schedule import sigmas
from chunk_grpo.models import trainable
from chunk_grpo.rewards import rewards
from chunk_grpo.training.rollout import sample_images

OUT = Path(__file__).parents[1] / "runs" / "results" / "benchmarks" / "pocket_worlds.json"
REWARDS = ("pocket-clip", "pocket-partial", "pocket-geneval", "pocket-low", "pocket-low-pixels")
VERDICT = "pocket-geneval"
LISTS = ("test", "test192")
SEED = 77


def group_statistics(
    scores: np.ndarray,  # (P, G) of one reward
    verdict: np.ndarray,  # (P, G) of the exact checker
) -> dict[str, float]:
    """Return mean, standard error over prompts, spreads, share of flat groups and correlation with the verdict."""
    of_prompts = scores.mean(1)
    related = np.corrcoef(scores.ravel(), verdict.ravel())[0, 1] if scores.std() and verdict.std() else float("nan")
    return {
        "mean": float(scores.mean()),
        "standard_error": float(of_prompts.std(ddof=1) / len(of_prompts) ** 0.5),
        "deviation": float(scores.std(ddof=1)),
        "deviation_in_group": float(scores.std(1, ddof=1).mean()),
        "flat_groups": float((np.ptp(scores, axis=1) == 0).mean()),
        "correlation_with_verdict": float(related),
    }


def measure_base(
    model: str,  # as in the setting of that name
    images: int,  # per prompt
) -> list[dict]:  # a row a list and a reward
    """Draw images of the base as a rollout of the training does, and score them."""
    policy = trainable.load_trainable_policy(model, resolution=64, max_tokens=12, frozen=True)
    scorers = {name: rewards.load_reward(name) for name in REWARDS}
    sampler = Sampler(sigmas(17, 3.0), "flow", 0.7)
    rows = []
    for split in LISTS:
        prompts = pocket.read_pocket_prompts(split)
        places = [(p, i) for p in range(len(prompts)) for i in range(images)]
        drawn = sample_images(policy, prompts, places, SEED, batch=48, sampler=sampler)
        texts = [prompts[p] for p, _ in places]
        scores = {}
        for name, score in scorers.items():
            found = rewards.score_images(name, score, drawn, texts)
            scores[name] = found.double().reshape(len(prompts), images).numpy()
        for name, found in scores.items():
            one = {"base": model, "prompts": split, "reward": name, "number_of_prompts": len(prompts), "images": images}
            rows.append(one | {k: round(x, 4) for k, x in group_statistics(found, scores[VERDICT]).items()})
        print(model, split, {row["reward"]: row["mean"] for row in rows[-len(REWARDS) :]}, flush=True)
    return rows


def main() -> None:
    """Measure all bases."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--images", type=int, default=12, help="images per prompt")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for model in pocket.POCKET_MODELS for row in measure_base(model, asked.images)]
    about = {"sampler": "flow, eta 0.7, 17 transitions", "seed": SEED, "versions": machine.library_versions()}
    write_json(asked.out, about | {"rows": rows})


if __name__ == "__main__":
    main()
