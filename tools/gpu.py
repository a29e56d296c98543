"""Run the checks of a GPU that have no result yet: `make gpu`, or one of the ten: `make gpu CHECK=3`.

    python tools/gpu.py [CHECK ...] [--out runs/results/gpu] [--seconds 540] [--small]

Needs a GPU, but no network and no released weights: models have published sizes and random weights. Each check has a
process of its own and less than four minutes, writes one JSON file and prints one line; a check that fails leaves its
reason and does not stop the next. Without numbers those run that have a result neither in `--out` nor in
runs/results/gpu: those that were never begun first, then those that did not end. `--seconds` is the time for all checks:
the last one is ended with it, and keeps its finished parts. `--small` runs the same code with tiny sizes on whatever is
there, a CPU too, and into a folder that `--out` names; no page counts such files. nbs/findings/speed.ipynb says how to
read them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpu_results
from gpu_results import CHECKS

ROOT = Path(__file__).resolve().parents[1]
CHECK_SECONDS = 235  # after which a check is ended
START_SECONDS = 5  # that its process takes beside that, about
SHORTEST_SECONDS = 60  # a check is not begun with less time than this
# Those with the most to tell in the least time come first.
ORDER = (1, 2, 3, 9, 7, 6, 8, 5, 10, 4)


def log(text: str) -> None:
    """Print a line and flush the output."""
    print(text, flush=True)


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError:
        return None
    return (done.stdout.strip().splitlines() or [None])[0]


def describe_environment() -> dict:
    """Return the device, its driver and the versions of packages, on which a result depends."""
    import torch

    from chunk_grpo.core import machine

    out = {
        "device": "CPU",
        "driver": None,
        "cuda": torch.version.cuda,
        "memory_gb": None,
        "capability": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        out |= {
            "device": torch.cuda.get_device_name(0),
            "driver": driver_version(),
            "memory_gb": properties.total_memory / 1e9,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return out | {
        "machine": machine.machine_info(),
        "versions": machine.library_versions(),
        "git_commit": machine.current_git_commit(),
    }


def run_check(number: int, small: bool, out: Path) -> dict:
    """Run a check in this process, and return the content of its file."""
    import gpu_checks

    check = gpu_checks.ALL[number]
    question = (check.__doc__ or "").strip().splitlines()[0]
    about = {"check": number, "name": CHECKS[number], "question": question, "small": small}
    about |= describe_environment()
    with tempfile.TemporaryDirectory(prefix="chunk-grpo-gpu-") as folder:
        parts = check(small, Path(folder))
        file = gpu_results.check_file(number, out)
        return gpu_results.measure_parts(parts, file, about, gpu_checks.allocated_peak)


def checks_to_run(out: Path) -> list[int]:
    """Return the numbers of the checks without a result, in the order in which they are run."""
    folders = (out, gpu_results.RESULTS)
    left = [n for n in ORDER if not any(gpu_results.has_result(n, folder) for folder in folders)]

    def was_begun(number: int) -> bool:
        """Return True if a check left a file, which has no result."""
        return any(gpu_results.check_file(number, folder).is_file() for folder in folders)

    return sorted(left, key=was_begun)


def run_in_time(
    number: int,
    small: bool,
    out: Path,
    limit: float = CHECK_SECONDS,  # seconds after which the check is ended
) -> dict:
    """Run a check in a separate process with a time limit, and return what it measured.

    An earlier result in its file stays if the check does not finish.
    """
    from chunk_grpo.core.files import read_json, write_json
    from chunk_grpo.core.machine import make_parent_death_hook, terminate_process_group

    file = gpu_results.check_file(number, out)
    partial = gpu_results.partial_file(file)
    partial.unlink(missing_ok=True)
    start = time.monotonic()
    before = read_json(file) if file.is_file() else None
    words = [
        sys.executable,
        __file__,
        str(number),
        "--out",
        str(out),
        "--inside",
        *(["--small"] if small else []),
    ]
    child = subprocess.Popen(
        words,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        # If this process is killed, the check must not go on using the GPU.
        preexec_fn=make_parent_death_hook(os.getpid()),
    )
    ending = ""
    try:
        code = child.wait(limit)
        ending = f"its process ended with status {code}" if code else ""
    except subprocess.TimeoutExpired:
        ending = f"it was ended after {limit:.0f} s"
    finally:
        terminate_process_group(child)
        # check 5 keeps checkpoints there
        shutil.rmtree(f"/dev/shm/chunk-grpo-{child.pid}", ignore_errors=True)
    measured_file = partial if partial.is_file() else file
    result = read_json(measured_file) if measured_file.is_file() else None
    if result is None or result == before:  # it ended before its first part
        result = {
            "check": number,
            "name": CHECKS[number],
            "small": small,
            "device": "unknown",
            "parts": {},
        }
        result |= {"verdict": "unfinished", "reason": ending, "peak_gb": None}
    elif ending:
        result |= {"verdict": "unfinished", "reason": f"{ending}, {result['reason']}".rstrip(", ")}
    result["seconds"] = round(time.monotonic() - start, 1)
    out.mkdir(parents=True, exist_ok=True)
    keeps_earlier_result = gpu_results.is_finished(before) and not gpu_results.is_finished(result)
    write_json(partial if keeps_earlier_result else file, result)
    return result


def main() -> int:
    """Run the requested checks; return 1 if one failed or did not finish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checks", nargs="*", type=int, choices=[[], *CHECKS], metavar="CHECK", help="1 to 10"
    )
    parser.add_argument("--out", type=Path, help="folder of the results; runs/results/gpu")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time for all checks together"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, on whatever is there; needs --out"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        import gpu_checks

        gpu_checks.train_in_process(given.train)
        return 0
    if given.small and given.out is None:
        parser.error(
            "--small needs --out, since results of tiny sizes do not belong beside the others"
        )
    out = (given.out or gpu_results.RESULTS).absolute()
    if given.inside:
        run_check(given.checks[0], given.small, out)
        return 0
    import torch

    if not given.small and not torch.cuda.is_available():
        log("make gpu: torch sees no CUDA device on this machine, so nothing was measured")
        return 1
    chosen = given.checks or (list(CHECKS) if given.small else checks_to_run(out))
    if not chosen:
        log("every check has a result; CHECK=3 runs one of them again")
    start = time.monotonic()
    verdicts = []
    for position, number in enumerate(chosen):
        left = given.seconds - (time.monotonic() - start) - START_SECONDS
        if left < SHORTEST_SECONDS:
            log(
                f"no time is left for checks {', '.join(map(str, chosen[position:]))}; `make gpu` runs them next"
            )
            verdicts.append("unfinished")
            break
        result = run_in_time(number, given.small, out, min(left, CHECK_SECONDS))
        verdicts.append(result["verdict"])
        log(gpu_results.describe_check(result))
        if out == gpu_results.RESULTS.absolute():
            gpu_results.write_shares()  # it combines the results of all checks
    log(gpu_results.gpu_sentence(gpu_results.read_results(out)) + ".")
    return int(any(verdict != "passed" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
