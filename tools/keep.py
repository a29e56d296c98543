"""Keep what texts and figures cite of finished runs and studies.

    python tools/keep.py NAME RUN [RUN ...]     each run's settings, commit, machine, metrics, profile and table of the
                                                evaluation, no weights, no images, in runs/results/NAME/RUN
    python tools/keep.py study NAME [...]       the rows of runs/studies/NAME in runs/results/studies/NAME.jsonl, beside
                                                rows of other arms and seeds that were kept before

A kept run can be read as a run folder: chunk-grpo compare runs/results/NAME/*. Kept rows let a study go on elsewhere:
chunk-grpo study NAME --known runs/results/studies/NAME.jsonl.
"""

import json
import shutil
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "runs" / "results"
FILES = ("run.json", "metrics.jsonl", "profile.json", "evaluation/summary.json")


def keep_study(name: str) -> int:
    "Merge a study's rows into those kept; 2 where it has none."
    new, old = Path("runs") / "studies" / name / "results.jsonl", RESULTS / "studies" / f"{name}.jsonl"
    if not new.is_file():
        print(f"there is no {new}: a study that was begun here is needed", file=sys.stderr)
        return 2
    lines = [line for file in (old, new) if file.is_file() for line in file.read_text().splitlines()]
    rows = {(row["seed"], row["arm"]): row for row in map(json.loads, lines)}  # the newer one stands
    arms = list(dict.fromkeys(arm for _, arm in rows))
    order = sorted(rows, key=lambda place: (place[0], arms.index(place[1])))
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text("".join(json.dumps(rows[place], allow_nan=False) + "\n" for place in order))
    print(f"kept {len(rows)} rows in {old}")
    return 0


def main() -> int:
    "Copy the files; 2 where a run lacks one."
    name, *runs = sys.argv[1:]
    if name == "study":
        return max(keep_study(run) for run in runs)
    for run in map(Path, runs):
        missing = [file for file in FILES if not (run / file).is_file()]
        if missing:
            print(f"{run} has no {', '.join(missing)}: a finished and evaluated run is needed", file=sys.stderr)
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
