"""Measure what every reward sees on images of every base of the pocket world that draws captions, as a rollout draws them.

    python research/pocket/measure_bases.py [--images 12] [--out runs/results/benchmarks/pocket_worlds.json]

For each base and each list of held-out prompts: the mean and the spread of each reward over images, its mean standard
deviation within a prompt's group, the share of groups whose scores are all equal, which teach nothing, and the
correlation of each reward with the exact verdict over all images. About three minutes on one core; lists that the file
holds already, of the same weights and as many images, are not measured again.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from chunk_grpo import pocket
from chunk_grpo.core import machine
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.models import trainable
from chunk_grpo.models.inputs import MODEL_FOLDERS, fetch_model, hash_model_files
from chunk_grpo.rewards import rewards
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.training.rollout import sample_images

OUT = Path(__file__).parents[2] / "runs" / "results" / "benchmarks" / "pocket_worlds.json"
REWARDS = ("pocket-clip", "pocket-partial", "pocket-geneval", "pocket-low", "pocket-low-pixels")
VERDICT = "pocket-geneval"
LISTS = ("test", "test192")
BASES = [model for model in pocket.POCKET_MODELS if model != "pocket/editing"]  # those that draw
SEED = 77


def group_statistics(
    scores: np.ndarray,  # scores of one reward, (P, G)
    verdict: np.ndarray,  # verdicts of the exact checker, (P, G)
) -> dict[str, float]:
    """Return statistics of a reward's scores, keyed by name.

    They are the mean, its standard error over prompts, standard deviations, the share of groups with equal rewards, and
    the correlation with the verdict.
    """
    of_prompts = scores.mean(1)
    related = (
        np.corrcoef(scores.ravel(), verdict.ravel())[0, 1]
        if scores.std() and verdict.std()
        else float("nan")
    )
    return {
        "mean": float(scores.mean()),
        "standard_error": float(of_prompts.std(ddof=1) / len(of_prompts) ** 0.5),
        "deviation": float(scores.std(ddof=1)),
        "deviation_in_group": float(scores.std(1, ddof=1).mean()),
        "flat_groups": float((np.ptp(scores, axis=1) == 0).mean()),
        "correlation_with_verdict": float(related),
    }


def measure_base(
    model: str,  # a value of the setting `model`
    split: str,  # name of a prompt list
    images: int,  # number of images per prompt
) -> list[dict]:  # a row per reward
    """Sample images of the base as in a training rollout, and score them with each reward."""
    policy = trainable.load_trainable_policy(
        model, resolution=64, max_tokens=12, sampling_only=True
    )
    scorers = {name: rewards.load_reward(name) for name in REWARDS}
    sampler = Sampler(sigmas(17, 3.0), "flow", 0.7)
    prompts = pocket.read_pocket_prompts(split)
    places = [(p, i) for p in range(len(prompts)) for i in range(images)]
    drawn = sample_images(policy, prompts, places, SEED, batch=48, sampler=sampler)
    texts = [prompts[p] for p, _ in places]
    scores = {}
    for name, score in scorers.items():
        found = rewards.score_images(name, score, drawn, texts)
        scores[name] = found.double().reshape(len(prompts), images).numpy()
    about = {"base": model, "prompts": split, "number_of_prompts": len(prompts), "images": images}
    rows = []
    for name, found in scores.items():
        numbers = group_statistics(found, scores[VERDICT])
        rows.append({**about, "reward": name, **{key: round(x, 4) for key, x in numbers.items()}})
    return rows


def main() -> None:
    """Measure all bases."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--images", type=int, default=12, help="images per prompt")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = {
        "sampler": "flow, eta 0.7, 17 transitions",
        "seed": SEED,
        "weights": {model: hash_model_files(fetch_model(model), MODEL_FOLDERS) for model in BASES},
        "versions": machine.library_versions(),
    }
    kept = read_json(asked.out) if asked.out.is_file() else {}
    rows = [
        row
        for row in kept.get("rows", [])
        if row["images"] == asked.images
        and kept["weights"].get(row["base"]) == about["weights"][row["base"]]
    ]
    for model in BASES:
        for split in LISTS:
            if not any((row["base"], row["prompts"]) == (model, split) for row in rows):
                rows += measure_base(model, split, asked.images)
                write_json(asked.out, about | {"rows": rows})
                print(
                    model,
                    split,
                    {row["reward"]: row["mean"] for row in rows[-len(REWARDS) :]},
                    flush=True,
                )


if __name__ == "__main__":
    main()
