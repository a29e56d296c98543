"""Run the checks of a make target, stage by stage, with the wall time of each; exit with 1 if one fails.

    python tools/check.py           `make test`
    python tools/check.py quick     `make quick`: what a contributor runs while editing
    python tools/check.py package   `make package`: the scorer of HPSv3 beside the package hpsv3
    python tools/check.py slow      `make slow`: tests that take minutes

CI runs `make test` and `make package`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest"]
CORES = min(os.cpu_count() or 1, 8)
# One worker more than cores, since tests wait a lot. BY_FILE: the tests of a file share what it makes.
SIDE_BY_SIDE = f"-n {CORES + 1} --dist worksteal".split()
BY_FILE = f"-n {CORES + 1} --dist loadfile --no-loadscope-reorder".split()
RUFF = {
    "ruff check": [sys.executable, "-m", "ruff", "check", "."],
    "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "--quiet", "."],
}
FAST = RUFF | {
    "notebooks run, package and README equal them": [
        *PYTEST,
        "tests/test_notebooks.py",
        "tests/test_house.py",
        *SIDE_BY_SIDE,
        "--durations=10",
    ],
    "tests": [
        *PYTEST,
        "--ignore=tests/test_house.py",
        "--ignore=tests/test_notebooks.py",
        *BY_FILE,
        "-rs",
        "--durations=15",
    ],
}
THEORY = "chunkers golden_methods objective_properties sharing theory_properties timesteps".split()
QUICK = RUFF | {
    "pages of the theory": [*PYTEST, "tests/test_notebooks.py", "-k", "00_theory", *SIDE_BY_SIDE],
    "tests of the theory and of settings": [
        *PYTEST,
        *(f"tests/test_{name}.py" for name in [*THEORY, "settings"]),
        *SIDE_BY_SIDE,
    ],
}
SLOW_MARK = "slow and not gpu and not package"
SLOW = {"slow tests": [*PYTEST, "-m", SLOW_MARK, *SIDE_BY_SIDE, "-rs", "--durations=10"]}
MAKE_ENVIRONMENT = "-m chunk_grpo.cli.main reward-env hpsv3".split()
PACKAGE = {
    "an environment for the package hpsv3": [sys.executable, *MAKE_ENVIRONMENT],
    "tests in it": [*PYTEST, "-m", "package", "tests/test_hpsv3_package.py"],
}


def main() -> int:
    """Run every stage, even after one has failed, and print the time of each."""
    results = {}
    target = sys.argv[1] if len(sys.argv) > 1 else "test"
    chosen = {"test": FAST, "quick": QUICK, "slow": SLOW, "package": PACKAGE}[target]
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
