"""Keep what texts and figures cite of finished runs: python tools/keep.py NAME RUN [RUN ...]

Copies the small files of each run (settings, commit, machine, metrics, profile, table of the evaluation; no weights, no
images) to runs/results/NAME/RUN. Each copy can be read as a run folder: chunk-grpo compare runs/results/NAME/*.
"""

import shutil
import sys
from pathlib import Path

FILES = ("run.json", "metrics.jsonl", "profile.json", "evaluation/summary.json")


def main() -> int:
    "Copy the files; 2 where a run lacks one."
    name, *runs = sys.argv[1:]
    for run in map(Path, runs):
        missing = [file for file in FILES if not (run / file).is_file()]
        if missing:
            print(f"{run} has no {', '.join(missing)}: a finished and evaluated run is needed", file=sys.stderr)
            return 2
    for run in map(Path, runs):
        kept = Path(__file__).parents[1] / "runs" / "results" / name / run.name
        for file in FILES:
            (kept / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / file, kept / file)
        print(f"kept {kept.relative_to(Path.cwd()) if kept.is_relative_to(Path.cwd()) else kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
