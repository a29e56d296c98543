"""Thousands of iterations: memory, open files, threads and the time of an iteration stay what they were."""

import json
import os
import statistics
import subprocess
import time

import psutil
import pytest
import small_runs
from commands import command, environment

ITERATIONS = int(os.environ.get("LONG_RUN_ITERATIONS", "2000"))
REWARD = os.environ.get(
    "LONG_RUN_REWARD", "tiny_rewards:red"
)  # such as one that leaks, to see this test fail
TINIEST = {
    "iterations": ITERATIONS,
    "reward": REWARD,
    "steps": 2,
    "chunks": "steps",
    "chunk_fraction": 1.0,
    "images_per_prompt": 2,
    "prompts_per_iteration": 1,
    "updates_per_iteration": 1,
    "resolution": 32,
    "eval_resolution": 32,
    "eval_every": 0,
    "eval_count": 1,
    "eval_steps": 1,
    "hybrid_split": 0,
    "checkpoint_every": max(1, ITERATIONS // 20),
    "keep_checkpoints": 1,
}


def watch(child, metrics) -> list[dict]:
    """Looks at the command's process, which trains, until it ends: iteration, memory in MB, open files, threads."""
    looks = []
    trainer = psutil.Process(child.pid)
    while child.poll() is None:
        time.sleep(0.1)
        try:
            look = {
                "memory": trainer.memory_info().rss / 1e6,
                "files": trainer.num_fds(),
                "threads": trainer.num_threads(),
            }
            looks.append({"iteration": metrics.read_bytes().count(b"\n") - 1} | look)
        except (psutil.Error, FileNotFoundError):  # not begun, or just ended
            continue
    return looks


def medians(rows: list[dict], name: str) -> tuple[float, float]:
    """The median of a number over the third and over the last tenth of the iterations."""

    def tenth(number: int) -> float:
        low = ITERATIONS * number // 10
        high = ITERATIONS * (number + 1) // 10
        return statistics.median(row[name] for row in rows if low < row["iteration"] < high)

    return tenth(2), tenth(9)


@pytest.mark.slow
def test_a_long_run_stays_flat(tmp_path):
    small_runs.write(tmp_path, **TINIEST)
    out = tmp_path / "run"
    child = subprocess.Popen(
        command("train", tmp_path / "s.yaml", "--out", out, "--no-report"),
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    looks = watch(child, out / "metrics.jsonl")
    assert child.returncode == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == ITERATIONS + 1
    spent = [
        line["seconds_cpu_total"] for line in lines[1:]
    ]  # of the processor: a busy machine does not count
    rows = [
        {"iteration": i, "seconds": b - a}
        for i, (a, b) in enumerate(zip(spent, spent[1:], strict=False), 2)
    ]
    found = {name: medians(looks, name) for name in ("memory", "files", "threads")} | {
        "time": medians(rows, "seconds")
    }
    print({name: [round(x, 4) for x in pair] for name, pair in found.items()})
    early, late = found["memory"]
    assert late - early < 16 + 0.004 * ITERATIONS, (
        f"memory grew from {early:.0f} to {late:.0f} MB"
    )  # lines are kept
    for name in ("files", "threads"):
        assert found[name][1] <= found[name][0] + 2, found
    assert found["time"][1] < 1.5 * found["time"][0], found
