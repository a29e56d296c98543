"""Write down, from the history, which plan the runs of each study could have followed.

    python research/plans.py       writes runs/results/verdict/plans.json

A kept row names the commit of the code that made it. For every study and commit this looks up the plan (study.yaml and
base.yaml) at that commit, and the commit that brought the rows. A plan can be shown to be older than its runs only
where the runs' own commit already holds it, word for word.
"""

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("study.yaml", "base.yaml")


def git(*words: str) -> subprocess.CompletedProcess:
    """A git command in this repository."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)


def blob(commit: str, path: str) -> bytes | None:
    """A file at a commit; None where it is not there."""
    found = git("show", f"{commit}:{path}")
    return found.stdout if found.returncode == 0 else None


def moment(commit: str) -> str:
    """When a commit was made."""
    return (
        git("show", "-s", "--date=format:%Y-%m-%d %H:%M", "--format=%cd", commit)
        .stdout.decode()
        .strip()
    )


def keys(text: bytes) -> set[tuple]:
    """Arm, seed and commit of every row of a .jsonl file."""
    return {
        (row["arm"], row["seed"], row["git_commit"]) for row in map(json.loads, text.splitlines())
    }


def plan_entries(name: str) -> list[dict]:
    """An entry for each commit that the rows of a study name."""
    kept = f"runs/results/studies/{name}.jsonl"
    rows = keys((ROOT / kept).read_bytes())
    commits = git("log", "--reverse", "--format=%H", "--", kept).stdout.decode().split()
    held = {commit: keys(blob(commit, kept) or b"") for commit in commits}
    by_commit = defaultdict(set)
    out = []
    for row in rows:
        by_commit[row[2]].add(row)
    for named, mine in sorted(by_commit.items()):
        brought = next(commit for commit in commits if mine <= held[commit])
        before, after = (
            {file: blob(commit, f"runs/pocket/studies/{name}/{file}") for file in FILES}
            for commit in (named.removesuffix("-dirty"), brought)
        )
        states = {
            file: "absent"
            if before[file] is None
            else "the same"
            if before[file] == after[file]
            else "another"
            for file in FILES
        }
        out.append(
            {
                "study": name,
                "runs": len(mine),
                "code": named,
                "code_at": moment(named.removesuffix("-dirty")),
                "brought_by": brought,
                "brought_at": moment(brought),
                "plan_at_code": states,
                "shown": set(states.values()) == {"the same"} and not named.endswith("-dirty"),
                "plan_sha256": hashlib.sha256(
                    b"\0".join(after[file] or b"" for file in FILES)
                ).hexdigest(),
            }
        )
    return out


def main() -> int:
    """Write the file."""
    names = sorted(path.stem for path in (ROOT / "runs/results/studies").glob("*.jsonl"))
    found = [entry for name in names for entry in plan_entries(name)]
    out = ROOT / "runs/results/verdict/plans.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"plans": found}, indent=1) + "\n")
    for entry in found:
        print(
            entry["study"],
            entry["runs"],
            entry["code"][:7],
            entry["brought_by"][:7],
            entry["plan_at_code"],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
