"""Measure how much the images of a prompt differ before and after training, for every finished trial of a study.

    python research/diversity.py NAME [--runs FOLDER]

It reads the images that the trials' evaluations stored in runs/studies/NAME and writes one line per trial to
runs/results/diversity/NAME.jsonl. Lines of other trials stay, so it can be called whenever a study pauses. A
trial takes about two seconds on one core. It prints no result, because a study may still be running.

The diversity of a prompt is the mean of 1 minus the cosine similarity over all pairs of its images, in the embedding of
the pocket CLIP. That of a trial is the mean over prompts. With two images per prompt there is one pair.

A wrong image differs from a correct one, so a model that learns to be correct loses diversity that nobody wants. A line
therefore also holds the mean over the prompts whose images are all correct, before and after training; `pocket-geneval`
decides that. These are the same prompts for both models.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from statistics import fmean

import torch
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.core.files import atomic_write, read_json, read_json_lines
from chunk_grpo.pocket.clip import PocketCLIP

RESULTS = Path(__file__).parents[1] / "runs" / "results" / "diversity"
ARMS = ("base", "plain")  # of the evaluation: before and after training


def prompt_diversity(
    embeddings: torch.Tensor,  # (B, D), unit length, images of one prompt
) -> float:  # from 0 to 2; 0: all images are the same
    """Return the mean of 1 minus the cosine similarity over all pairs of images; raise InputError if there is only one."""
    if len(embeddings) < 2:
        raise InputError("`eval_images` must be at least 2 to measure diversity; got 1")
    pairs = itertools.combinations(range(len(embeddings)), 2)
    distances = [1 - float(embeddings[i] @ embeddings[j]) for i, j in pairs]
    return sum(distances) / len(distances)


def trial_diversity(
    trial: Path,  # folder of a finished trial, with the images of its evaluation
    model: PocketCLIP,  # embeds images
) -> dict:
    """Return the mean diversity over prompts before and after training, over all prompts and over the correct ones.

    `diversity` has the means over all prompts, keyed by arm of the evaluation. `of_correct` has the number of prompts
    whose images are all correct in both arms, and the means over these prompts; they are None if there is no such prompt.
    """
    values: dict[str, dict[int, float]] = {}  # arm -> index of a prompt -> its diversity
    wrong = set()  # indices of prompts with an image that is not correct
    records = read_json_lines(trial / "evaluation" / "scores.jsonl")
    for arm in ARMS:
        images = []
        indices: dict[int, list[int]] = {}  # index of a prompt -> indices of its images
        for record in records:
            if record["arm"] == arm:
                indices.setdefault(record["prompt_index"], []).append(len(images))
                if record["scores"]["pocket-geneval"] < 1:
                    wrong.add(record["prompt_index"])
                with Image.open(trial / "evaluation" / record["file"]) as image:
                    images.append(image.convert("RGB"))
        embeddings = model.embed(images)
        values[arm] = {prompt: prompt_diversity(embeddings[own]) for prompt, own in indices.items()}
    correct = [prompt for prompt in values["base"] if prompt not in wrong]
    found = {"diversity": {}, "of_correct": {"prompts": len(correct)}}
    for arm, of_prompt in values.items():
        found["diversity"][arm] = round(fmean(of_prompt.values()), 6)
        mean = round(fmean(of_prompt[prompt] for prompt in correct), 6) if correct else None
        found["of_correct"][arm] = mean
    return found


def main() -> int:
    """Measure the trials that have no line yet; return 2 if the study has no folder of runs here."""
    parser = argparse.ArgumentParser(description="Measure the diversity of a study's images.")
    parser.add_argument("name", help="name of the study")
    parser.add_argument("--runs", type=Path, help="folder of its runs; default: runs/studies/NAME")
    arguments = parser.parse_args()
    runs = arguments.runs or Path("runs") / "studies" / arguments.name
    if not runs.is_dir():
        print(f"there is no {runs}: a study that was run here is needed", file=sys.stderr)
        return 2
    file = RESULTS / f"{arguments.name}.jsonl"
    lines = {(line["arm"], line["seed"]): line for line in read_json_lines(file)}
    torch.set_num_threads(1)
    model = PocketCLIP()
    for row_file in sorted(runs.glob("*/row.json")):
        row = read_json(row_file)
        trial = (row["arm"], row["seed"])
        # Lines that an earlier version of this file wrote have no diversity of correct images.
        if trial not in lines or "of_correct" not in lines[trial]:
            try:
                found = trial_diversity(row_file.parent, model)
            except InputError as error:
                print(f"{row_file.parent}: {error}", file=sys.stderr)
                return 2
            lines[trial] = {"arm": row["arm"], "seed": row["seed"], **found}
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary:
        temporary.write_text(
            "".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8"
        )
    print(f"{len(lines)} trials measured in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
