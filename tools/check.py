"""Everything that `make test` runs, stage by stage, with the wall time of each; exit code 1 if one fails.

    python tools/check.py           what `make test` runs
    python tools/check.py package   the scorer beside the package hpsv3, `make package`
    python tools/check.py slow      what takes minutes, `make slow`

CI runs the first two.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest"]
CORES = min(os.cpu_count() or 1, 8)
SIDE_BY_SIDE = [
    "-n",
    str(CORES + 1),
    "--dist",
    "worksteal",
]  # one worker more than cores, since they wait a lot
BY_FILE = [
    "-n",
    str(CORES + 1),
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
]  # tests of a file share what it makes
FAST = {
    "ruff": [sys.executable, "-m", "ruff", "check", "."],
    "notebooks run, package and README equal them": [
        *PYTEST,
        "tests/test_notebooks.py",
        "tests/test_house.py",
        *SIDE_BY_SIDE,
        "--durations=10",
    ],
    "tests": [
        *(*PYTEST, "--ignore=tests/test_house.py", "--ignore=tests/test_notebooks.py"),
        *(*BY_FILE, "-rs", "--durations=15"),
    ],
}
SLOW = {
    "slow tests": [
        *PYTEST,
        "-m",
        "slow and not gpu and not package",
        *SIDE_BY_SIDE,
        "-rs",
        "--durations=10",
    ]
}
PACKAGE = {
    "an environment for the package hpsv3": [
        sys.executable,
        "-m",
        "chunk_grpo.cli.main",
        "reward-env",
        "hpsv3",
    ],
    "tests in it": [*PYTEST, "-m", "package", "tests/test_hpsv3_package.py"],
}


def main() -> int:
    "Run every stage, also after one has failed, and print what each took."
    results, chosen = {}, {"slow": SLOW, "package": PACKAGE}.get((sys.argv[1:] or [""])[0], FAST)
    for name, command in chosen.items():
        print(f"== {name}", flush=True)
        start = time.monotonic()
        code = subprocess.run(
            command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"} | os.environ
        ).returncode
        results[name] = ("passed" if code == 0 else "FAILED", time.monotonic() - start)
    for name, (word, seconds) in results.items():
        print(f"{word:7} {seconds:6.0f} s  {name}")
    print(f"total   {sum(seconds for _, seconds in results.values()):6.0f} s")
    return int(any(word == "FAILED" for word, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
