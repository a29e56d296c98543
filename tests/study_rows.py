"""Invented rows of the real studies in the shape of kept ones, for tests of what reads them. Never a result."""

import json
from pathlib import Path

import numpy as np

from chunk_grpo.core import settings
from chunk_grpo.studies import analysis, design

CATEGORIES = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def row(name: str, arm: str, seed: int, effect: float = 0.1, prompts: int = 24) -> dict:
    """A finished run of a study; its gain on every reward is `effect` plus what the seed and the run add."""
    asked = analysis.describe_study(name)
    run_settings = settings.load_settings(
        settings.read_settings_file(design.find_study_folder(name) / "base.yaml"),
        {**asked["arms"][arm], "seed": seed},
    )
    shared = 0.02 * np.random.default_rng(seed).normal()
    rng = np.random.default_rng([seed, *f"{name}{arm}".encode()])
    gain = effect + shared + 0.005 * rng.normal()
    steps = run_settings.eval_steps
    splits = range(asked["splits"], steps, asked["splits"]) if asked["splits"] else ()
    places = {"base": 0, **{f"split-{split:02d}": split for split in splits}, "plain": steps}
    base = np.random.default_rng(3).uniform(0.3, 0.7, prompts)
    scores = {
        place: {
            reward: (base + gain * at / steps + (at > 0) * rng.normal(0, 0.02, prompts)).tolist()
            for reward in run_settings.eval_rewards
        }
        for place, at in places.items()
    }
    trained = (
        [run_settings.reward] if isinstance(run_settings.reward, str) else list(run_settings.reward)
    )
    n = run_settings.iterations
    curve = {
        reward: (0.5 + gain * np.arange(n) / n + rng.normal(0, 0.02, n)).tolist()
        for reward in trained
    }
    curve |= {
        "iteration": list(range(1, n + 1)),
        "grad_norm": rng.uniform(0.5, 1, n).tolist(),
        "ratio_dev": rng.uniform(1e-5, 2e-5, n).tolist(),
        "clip_fraction": rng.uniform(0, 0.3, n).tolist(),
    }
    means = {category: 0.8 - 0.1 * i for i, category in enumerate(CATEGORIES)}
    counts = {
        "right": 100,
        "lost": int(rng.binomial(100, 0.1)),
        "missed": 80,
        "gained": int(rng.binomial(80, 0.3)),
    }
    share = 2 if run_settings.chunks == "whole" else 1
    return {
        "study": name,
        "arm": arm,
        "seed": seed,
        "settings": run_settings.model_dump(mode="json"),
        "evaluation": asked["evaluation"],
        "chunks": "2,3,4,7" if run_settings.chunks == "profile" else run_settings.chunks,
        "splits": asked["splits"],
        "git_commit": "0" * 40,
        "versions": {"torch": "2.13.0"},
        "machine": {
            "system": "Linux",
            "processor": "an invented one",
            "cores": 2,
            "memory_gb": 8.0,
            "gpus": [],
        },
        "images": 96 * n,
        "transitions": 768 * n * share,
        "seconds": 5.0 * n,
        "cpu_seconds": 4.0 * n,
        "curve": curve,
        "held_out_curve": {
            "iteration": [0, n],
            **{reward: [0.5, 0.5 + gain] for reward in run_settings.eval_rewards},
        },
        "scores": scores,
        "categories": {
            "base": {"pocket-geneval": means},
            "plain": {"pocket-geneval": {c: m + gain for c, m in means.items()}},
        },
        "preserved": {"plain": {"pocket-geneval": {"objects": counts, "images": counts}}},
    }


def write(
    folder: Path,
    name: str,
    effects: dict[str, float] | None = None,
    seeds: int | None = None,
    only: tuple[str, ...] | None = None,
) -> list[dict]:
    """Write the rows of a study and return them: `only` these arms, the first `seeds`, arms with their `effects`."""
    asked = analysis.describe_study(name)
    rows = [
        row(name, arm, seed, (effects or {}).get(arm, 0.1))
        for arm in only or asked["arms"]
        for seed in asked["seeds_of_arm"][arm][:seeds]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return rows
