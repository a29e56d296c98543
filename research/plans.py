"""Find out from the git history which plan the runs of each study can have followed.

    python research/plans.py       writes runs/results/verdict/plans.json

A stored row names the commit of the code that made it. For every study and commit, this program looks up the plan
(study.yaml and base.yaml) at that commit, and the commit that added the rows. A plan is provably older than its runs
only if the commit of the runs already contains it byte for byte.
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
    """Run git in this repository with the given words, such as `show HEAD`; its output is bytes, and it may fail."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)


def blob(commit: str, path: str) -> bytes | None:
    """Return the content of a file at a commit; None if there is no such file."""
    done = git("show", f"{commit}:{path}")
    return done.stdout if done.returncode == 0 else None


def commit_time(commit: str) -> str:
    """Return the time of a commit, such as 2026-01-31 12:00."""
    return (
        git("show", "-s", "--date=format:%Y-%m-%d %H:%M", "--format=%cd", commit)
        .stdout.decode()
        .strip()
    )


def row_keys(text: bytes) -> set[tuple]:
    """Return the set of (arm, seed, commit) of the rows in the content of a .jsonl file."""
    return {
        (row["arm"], row["seed"], row["git_commit"]) for row in map(json.loads, text.splitlines())
    }


def plan_entries(name: str) -> list[dict]:
    """Return an entry for each commit that the rows of a study name, which says whether it contains the study's plan.

    `code` is that commit, `brought_by` the commit that added the rows, `plan_at_code` compares the plan's files at the two,
    and `shown` is True if they are the same and the code had no uncommitted changes.
    """
    file = f"runs/results/studies/{name}.jsonl"
    rows = row_keys((ROOT / file).read_bytes())
    commits = git("log", "--reverse", "--format=%H", "--", file).stdout.decode().split()
    rows_at = {commit: row_keys(blob(commit, file) or b"") for commit in commits}
    by_commit = defaultdict(set)
    entries = []
    for row in rows:
        by_commit[row[2]].add(row)
    for named, named_rows in sorted(by_commit.items()):
        added = next(commit for commit in commits if named_rows <= rows_at[commit])
        before, after = (
            {file: blob(commit, f"runs/pocket/studies/{name}/{file}") for file in FILES}
            for commit in (named.removesuffix("-dirty"), added)
        )
        states = {
            file: "absent"
            if before[file] is None
            else "the same"
            if before[file] == after[file]
            else "another"
            for file in FILES
        }
        entries.append(
            {
                "study": name,
                "runs": len(named_rows),
                "code": named,
                "code_at": commit_time(named.removesuffix("-dirty")),
                "brought_by": added,
                "brought_at": commit_time(added),
                "plan_at_code": states,
                "shown": set(states.values()) == {"the same"} and not named.endswith("-dirty"),
                "plan_sha256": hashlib.sha256(
                    b"\0".join(after[file] or b"" for file in FILES)
                ).hexdigest(),
            }
        )
    return entries


def main() -> int:
    """Write plans.json for all studies with stored rows, and print its entries."""
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
