"""Measure how much the images of a prompt differ before and after training, for every finished trial of a study.

    python research/diversity.py NAME [--runs FOLDER]

It reads the images that the trials' evaluations stored in runs/studies/NAME and writes one line per trial to
runs/results/diversity/NAME.jsonl. Lines of other trials stay, so it can be called whenever a study pauses. A
trial takes about two seconds on one core. It prints no result, because a study may still be running.

The diversity of a prompt is the mean of 1 minus the cosine similarity over all pairs of its images, in the embedding of
the pocket CLIP. That of a trial is the mean over prompts. With two images per prompt there is one pair.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
from PIL import Image

from chunk_grpo.core.files import atomic_write, read_json, read_json_lines
from chunk_grpo.pocket.clip import PocketCLIP

RESULTS = Path(__file__).parents[1] / "runs" / "results" / "diversity"
ARMS = ("base", "plain")  # of the evaluation: before and after training


def prompt_diversity(
    embeddings: torch.Tensor,  # (B, D), unit length, images of one prompt
) -> float:  # from 0 to 2; 0: all images are the same
    """Return the mean of 1 minus the cosine similarity over all pairs of images."""
    pairs = itertools.combinations(range(len(embeddings)), 2)
    distances = [1 - float(embeddings[i] @ embeddings[j]) for i, j in pairs]
    return sum(distances) / len(distances)


def trial_diversity(
    trial: Path,  # folder of a finished trial, with the images of its evaluation
    model: PocketCLIP,  # embeds images
) -> dict[str, float]:  # keyed by arm of the evaluation
    """Return the mean diversity over prompts before and after training."""
    found = {}
    records = read_json_lines(trial / "evaluation" / "scores.jsonl")
    for arm in ARMS:
        images = []
        indices: dict[int, list[int]] = {}  # index of a prompt -> indices of its images
        for record in records:
            if record["arm"] == arm:
                indices.setdefault(record["prompt_index"], []).append(len(images))
                with Image.open(trial / "evaluation" / record["file"]) as image:
                    images.append(image.convert("RGB"))
        embeddings = model.embed(images)
        values = [prompt_diversity(embeddings[own]) for own in indices.values()]
        found[arm] = round(sum(values) / len(values), 6)
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
    lines = read_json_lines(file)
    measured = {(line["arm"], line["seed"]) for line in lines}
    torch.set_num_threads(1)
    model = PocketCLIP()
    for row_file in sorted(runs.glob("*/row.json")):
        row = read_json(row_file)
        if (row["arm"], row["seed"]) not in measured:
            diversity = trial_diversity(row_file.parent, model)
            lines.append({"arm": row["arm"], "seed": row["seed"], "diversity": diversity})
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} trials measured in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
