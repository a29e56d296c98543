"""Keep what texts and figures cite of finished runs and studies.

    python tools/keep.py NAME RUN [RUN ...]     each run's settings, commit, machine, metrics, profile and table of the
                                                evaluation, no weights, no images, in runs/results/NAME/RUN
    python tools/keep.py study NAME [...]       the rows of runs/studies/NAME in runs/results/studies/NAME.jsonl, beside
                                                rows of other arms and seeds that were kept before; NAME-tuning is
                                                what `chunk-grpo study NAME --tune` tried
    python tools/keep.py images NAME RUN        the images that a run kept while it trained, one row per image and one
                                                column per iteration, in runs/results/images/NAME.png, and their scores
                                                in NAME.json

A kept run can be read as a run folder: chunk-grpo compare runs/results/NAME/*. Kept rows let a study go on elsewhere:
chunk-grpo study NAME --known runs/results/studies/NAME.jsonl.
"""

import json
import shutil
import sys
from pathlib import Path

from PIL import Image

RESULTS = Path(__file__).parents[1] / "runs" / "results"
FILES = ("run.json", "metrics.jsonl", "profile.json", "evaluation/summary.json")


def keep_study(name: str) -> int:
    """Merge the rows of a study into the stored ones; return 2 if it has none."""
    folder = Path("runs") / "studies" / name
    old = RESULTS / "studies" / f"{name}.jsonl"
    new = (folder / "trials" if (folder / "trials").is_dir() else folder) / "results.jsonl"
    if not new.is_file():
        print(f"there is no {new}: a study that was begun here is needed", file=sys.stderr)
        return 2
    lines = [
        line for file in (old, new) if file.is_file() for line in file.read_text().splitlines()
    ]
    rows = {
        (row["seed"], row["arm"]): row for row in map(json.loads, lines)
    }  # the newer one stands
    arms = list(dict.fromkeys(arm for _, arm in rows))
    order = sorted(rows, key=lambda place: (place[0], arms.index(place[1])))
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text("".join(json.dumps(rows[place], allow_nan=False) + "\n" for place in order))
    print(f"kept {len(rows)} rows in {old}")
    return 0


def keep_images(name: str, run: Path) -> int:
    """Copy the images that a run saved during training, and their scores; return 2 if it saved none."""
    from chunk_grpo.core.settings import image_size, reward_weights
    from chunk_grpo.rewards.rewards import load_reward
    from chunk_grpo.runs.run_folder import read_run_info, read_run_settings

    folders = sorted(run.glob("samples/[0-9]*"))
    if not folders:
        print(
            f"{run} has no samples: a run that was evaluated while it trained is needed",
            file=sys.stderr,
        )
        return 2
    lines = [json.loads(line) for line in (folders[0] / "manifest.jsonl").read_text().splitlines()]
    tiles = [
        [Image.open(folder / line["file"]).convert("RGB") for folder in folders] for line in lines
    ]
    settings = read_run_settings(run)
    rewards = {reward: load_reward(reward) for reward in reward_weights(settings)}
    rows = []
    for line, images in zip(lines, tiles, strict=True):
        prompts = [line["prompt"]] * len(images)
        scores = {
            name: [round(x, 4) for x in reward(images, prompts).tolist()]
            for name, reward in rewards.items()
        }
        rows.append(
            {"prompt": line["prompt"], "image_index": line["image_index"], "scores": scores}
        )

    height, width = image_size(settings.eval_resolution)
    sheet = Image.new("RGB", (width * len(folders), height * len(lines)))
    for down, images in enumerate(tiles):
        for across, image in enumerate(images):
            sheet.paste(image, (width * across, height * down))
    info = read_run_info(run)
    about = {
        "run": settings.model_dump(mode="json", exclude_defaults=True),
        "git_commit": info["git_commit"],
        "processes": info["processes"],
        "processor": info["machine"]["processor"],
        "side": height if height == width else [height, width],
        "iterations": [int(folder.name) for folder in folders],
        "rows": rows,
    }
    home = RESULTS / "images"
    home.mkdir(parents=True, exist_ok=True)
    sheet.save(home / f"{name}.png", optimize=True)
    (home / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"kept {len(lines)} images of {len(folders)} iterations in {home / name}.png")
    return 0


def main() -> int:
    """Copy the files; return 2 if a run lacks one."""
    name, *runs = sys.argv[1:]
    if name == "images":
        return keep_images(runs[0], Path(runs[1]))
    if name == "study":
        return max(keep_study(run) for run in runs)
    for run in map(Path, runs):
        missing = [file for file in FILES if not (run / file).is_file()]
        if missing:
            print(
                f"{run} has no {', '.join(missing)}: a finished and evaluated run is needed",
                file=sys.stderr,
            )
            return 2
    for run in map(Path, runs):
        kept = RESULTS / name / run.name
        for file in FILES:
            (kept / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / file, kept / file)
        print(f"kept {kept.relative_to(Path.cwd()) if kept.is_relative_to(Path.cwd()) else kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
