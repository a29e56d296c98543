"""A run folder with invented numbers in the shape of a real one, for tests of reading and reporting. Never a result."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from chunk_grpo import InputError
from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import append_json_line, write_json
from chunk_grpo.evaluation.evaluate import summarise_evaluation
from chunk_grpo.models.inputs import fingerprint_inputs

CATEGORIES = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "green", "blue", "orange", "purple", "black")


def picture(rng: np.random.Generator, side: int) -> Image.Image:
    """A disc of some colour at some place."""
    image = Image.new("RGB", (side, side), "#f0f0ea")
    x, y = rng.integers(side // 8, side // 2, 2)
    size = side // 3
    ImageDraw.Draw(image).ellipse(
        (x, y, x + size, y + size), fill=COLOURS[rng.integers(len(COLOURS))]
    )
    return image


def line(rng: np.random.Generator, settings: setting.Settings, count: int, iteration: int) -> dict:
    """One line of metrics."""
    drawn = rng.permutation(count) < max(1, int(count * settings.chunk_fraction))
    mean = 0.5 + 0.2 * (1 - np.exp(-iteration / 15)) + 0.02 * rng.normal()
    spent = {"rollout": 2.0, "decode": 0.3, "reward": 0.2, "update": 2.4}
    out = {"iteration": iteration, "reward_mean": mean, "reward_std": 0.15, "reward_se": 0.02}
    out |= {f"reward_{name}": mean for name in setting.reward_weights(settings)}
    if settings.baseline_images:
        gained = {"mean": mean - 0.5, **dict.fromkeys(setting.reward_weights(settings), mean - 0.5)}
        out |= {f"above_base_{name}": gain for name, gain in gained.items()}
        out |= {
            "above_base_se" if name == "mean" else f"above_base_{name}_se": 0.01 for name in gained
        }
    out |= {
        "advantage_std_zero_groups": 0,
        "ratio_mean": 1.0,
        "ratio_max_dev": float(10 ** rng.normal(-2.8, 0.1)),
        "clip_fraction": np.where(drawn, rng.beta(2, 8, count), None).tolist(),
        "ratio_dev": np.where(drawn, 10 ** rng.normal(-3.3, 0.2, count), None).tolist(),
        "grad_norm": float(np.exp(rng.normal(-0.5, 0.3))),
        "lr": settings.learning_rate,
        "images": 144,
        "transitions_trained": 1152,
        "skipped_updates": 0,
        "kl": 0.0,
    }
    if iteration == 1:
        out |= {"ratio_floor": 3.1e-6, "ratio_floor_rollout": 2.2e-5}
    if iteration % settings.eval_every == 0 or iteration == settings.iterations:
        spent["evaluate"] = 5.0
        out |= held_out(settings, iteration, hybrid=True)
    return out | {"seconds": spent, "seconds_total": 5.1 * iteration}


def held_out(settings: setting.Settings, iteration: int, hybrid: bool) -> dict:
    """Held-out scores of an iteration."""
    out = {}
    for name in setting.evaluated_rewards(settings):
        for arm, gain in (("", 0.004), *([("_hybrid", 0.003)] if hybrid else [])):
            out |= {f"eval_{name}{arm}": 0.5 + gain * iteration, f"eval_{name}{arm}_se": 0.03}
    return out


def evaluation(
    rng: np.random.Generator,
    settings: setting.Settings,
    folder: Path,
    prompts: int,
    gain: float,
    arms: Sequence[str] = ("hybrid",),
    objects: bool = False,
) -> None:
    """Images, scores and summary of an evaluation; without objects, as they were written before rewards knew any."""
    records = []
    lifts = {"base": 0.0, "plain": gain, **{arm: 0.8 * gain for arm in arms}}
    for arm, lift in lifts.items():
        (folder / arm).mkdir(parents=True)
        for p in range(prompts):
            name = f"{arm}/{p:05d}.png"
            kind = CATEGORIES[p % len(CATEGORIES)]
            picture(rng, settings.eval_resolution).save(folder / name)
            scores = {
                reward: float(np.clip(0.5 + lift + 0.1 * rng.normal(), 0, 1))
                for reward in setting.evaluated_rewards(settings)
            }
            records.append(
                {
                    "arm": arm,
                    "prompt_index": p,
                    "image_index": 0,
                    "seed": settings.eval_seed,
                    "file": name,
                    "prompt": f"a {COLOURS[p % 6]} circle to the left of a {COLOURS[(p + 1) % 6]} square",
                    "scores": scores,
                    "category": {k: kind for k in scores if k == "pocket-geneval"},
                }
            )
            if objects:
                there = {k: rng.integers(0, 2, 2).tolist() for k in scores if k == "pocket-geneval"}
                records[-1]["objects"] = there
    for record in records:
        append_json_line(folder / "scores.jsonl", record)
    write_json(
        folder / "summary.json",
        {
            "n_prompts": prompts,
            "images_per_prompt": 1,
            "steps": settings.eval_steps,
            "split": settings.hybrid_split,
            "seed": settings.eval_seed,
            "resolution": settings.eval_resolution,
            "rewards": summarise_evaluation(records),
        },
    )


def inputs_of(settings: setting.Settings) -> dict[str, str]:
    """What a run would note of its model and lists, where they are here."""
    try:
        return fingerprint_inputs(settings)
    except InputError:
        return {}


def write(
    folder: Path,
    overrides=(),
    seed: int = 0,
    prompts: int = 24,
    gain: float = 0.1,
    evaluated: bool = True,
    status: str = "finished",
    upto: int | None = None,
    **drawn,
) -> Path:
    """Write a whole run folder and return it; what was drawn in the evaluation may be said."""
    whole = {"iterations": 45, "prompts_per_iteration": 12, "seed": seed, **dict(overrides)}
    settings = setting.load_settings("pocket/demo", whole)
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    sizes = settings.chunk_rule.chunks.sizes
    append_json_line(
        folder / "metrics.jsonl", {"iteration": 0, **held_out(settings, 0, hybrid=False)}
    )
    for iteration in range(1, (upto or settings.iterations) + 1):
        append_json_line(folder / "metrics.jsonl", line(rng, settings, len(sizes), iteration))
    steps = np.arange(settings.steps)
    write_json(
        folder / "profile.json",
        {
            "kind": "l1",
            "sampler": settings.sampler,
            "eta": settings.eta,
            "steps": settings.steps,
            "sigmas": np.linspace(1, 0, settings.steps + 1).tolist(),
            "mean": (0.6 * np.exp(-steps / 6) + 0.1).tolist(),
            "std": [0.04] * settings.steps,
            "chunks": ",".join(map(str, sizes)),
            "trajectories": 144,
            "latent_numel": 128,
        },
    )
    write_json(
        folder / "run.json",
        {
            "settings": settings.model_dump(mode="json"),
            "status": status,
            "error": None,
            "versions": {"python": "3.11.0", "torch": "2.13.0"},
            "git_commit": "0" * 40,
            "machine": {
                "system": "Linux x86_64",
                "processor": "an invented one",
                "cores": 2,
                "memory_gb": 8.0,
                "gpus": [],
            },
            "processes": 1,
            "model_sha256": "a" * 64,
            "prompts_sha256": "b" * 64,
            "inputs": inputs_of(settings),
            "seconds": 240.0,
            "started": 1.0,
            "finished": 241.0,
        },
    )
    if status == "finished":
        (folder / "final").mkdir()
    if evaluated:
        evaluation(rng, settings, folder / "evaluation", prompts, gain, **drawn)
    assert json.loads((folder / "run.json").read_text())["status"] == status
    return folder
