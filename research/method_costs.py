"""Seconds per image of each row of the table of methods, on a model with much overhead and on one with much arithmetic.

    python research/method_costs.py --out runs/results/benchmarks/method_costs.json [--methods steps,fast] [--workers 5]

Every row trains two iterations on the pocket model and on a medium-sized FLUX with random weights, on a CPU with one
thread; the second iteration counts. The rows are divided among workers, each pinned to its own core. Each worker
measures `steps` first and last at each size, which shows how much cores and times differ. One more worker measures the
orders of DanceGRPO, GCPO and Flow-GRPO. The machine must do nothing else: with 5 workers on 16 cores, or 2 on 2, it
takes a quarter of an hour. Results are written as they are measured, and shown on nbs/findings/methods.ipynb.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orders
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from speed import FEW, MIDDLE, log

from chunk_grpo.core import machine
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.settings import PRESETS_DIR, load_settings, read_settings_file
from chunk_grpo.measurements.speed import load_workload_settings
from chunk_grpo.pocket import pocket_model_path
from chunk_grpo.runs import launch, run_folder

LOOKS = PRESETS_DIR / "pocket" / "looks"
SHORT = {
    "iterations": 2,
    "eval_steps": 1,
    "hybrid_split": 0,
    "eval_count": 1,
    "checkpoint_every": 2,
    "threads": 1,
    "reward": {"pocket-clip": 1},
    "eval_rewards": ["pocket-clip", "pocket-partial"],
}
MIDDLE_SIZE = "a FLUX of middle size"
SIZES = {
    "pocket": {
        "prompts_per_iteration": 2,
        "images_per_prompt": 12,
        "rollout_batch": 24,
        "update_batch": 96,
    },
    MIDDLE_SIZE: {
        "prompts_per_iteration": 1,
        "images_per_prompt": 4,
        "resolution": 128,
        "eval_resolution": 128,
        "max_tokens": 32,
        "rollout_batch": 8,
        "update_batch": 8,
    },
}
FEWER = {"tempflow-seeds": {"sharing": "seeds:2"}}  # for groups of four images


def compared_arms() -> dict[str, dict]:
    """Return the changed settings of each arm of the preliminary comparisons, keyed by arm."""
    arms = {}
    for folder in ("methods", "more-methods", "self-opd"):
        arms |= read_settings_file(LOOKS / folder / "study.yaml")["arms"]
    return arms


def save_medium_pipeline(folder: Path) -> str:
    """Save a pipeline with a medium-sized FLUX, and return its folder.

    It has the pocket model's encoders and tokenizers; the transformer and a small VAE have random weights.
    """
    torch.manual_seed(0)
    encoders = FluxPipeline.from_pretrained(pocket_model_path())
    config = MIDDLE | {
        "joint_attention_dim": encoders.text_encoder_2.config.d_model,
        "pooled_projection_dim": encoders.text_encoder.config.hidden_size,
    }
    parts = {"transformer": FluxTransformer2DModel(**config), "vae": AutoencoderKL(**FEW)}
    FluxPipeline(**(encoders.components | parts)).save_pretrained(folder)
    return str(folder)


def train_row(base: dict, changes: dict) -> dict:
    """Train two iterations, and return the second one's number of images and its seconds per image in three phases.

    The keys are images, work (sampling, completions and training), decode and reward.
    """
    with tempfile.TemporaryDirectory() as tmp:
        settings = load_settings(base, changes)
        line = run_folder.read_metrics(launch.train(settings, Path(tmp) / "run", processes=1)).iloc[
            -1
        ]
    images = int(line["images"])
    names = ("rollout", "completions", "update", "decode", "reward")
    spent = {name: float(line.get(f"seconds_{name}", 0.0)) / images for name in names}
    work = spent["rollout"] + spent["completions"] + spent["update"]
    return {"images": images, "work": work, "decode": spent["decode"], "reward": spent["reward"]}


def measure_orders(base: dict, middle: bool, repeats: int) -> dict[str, float]:
    """Measure four orders of sampling and training, and return the seconds per image of each, keyed by order.

    `middle` chooses the medium-sized FLUX instead of the pocket model.
    """
    changes = [
        f"{name}={base[name]}"
        for name in (
            "prompts_per_iteration",
            "images_per_prompt",
            "resolution",
            "max_tokens",
            "rollout_batch",
            "update_batch",
        )
    ]
    settings = load_workload_settings(
        "flux-size" if middle else "pocket", [*changes, "dtype=float32", "shared_noise=false"]
    )
    found = orders.measure(settings, repeats, log, configs=(MIDDLE, FEW) if middle else ())
    return {name: sum(each.values()) / found["images"] for name, each in found["orders"].items()}


def run_worker(names: list[str], out: Path) -> None:
    """Measure the named arms at both sizes or, without names, the orders, and write the results to the file `out`.

    Runs in a process that is pinned to one core.
    """
    arms = compared_arms()
    found = {"rows": {size: [] for size in SIZES}, "orders": {}}
    with tempfile.TemporaryDirectory() as tmp:
        plain = read_settings_file(LOOKS / "methods" / "base.yaml")
        bases = {size: plain | SHORT | changes for size, changes in SIZES.items()}
        bases[MIDDLE_SIZE]["model"] = save_medium_pipeline(Path(tmp) / "middle")
        for size, base in bases.items():
            for name in names:
                fewer = FEWER.get(name, {}) if base["images_per_prompt"] == 4 else {}
                cost = train_row(base, arms[name] | fewer)
                found["rows"][size].append({"method": name, **cost})
                write_json(out, found)
                log(f"{size}, {name}: {cost['work']:.3g} s per image")
            if not names:
                found["orders"][size] = measure_orders(base, size == MIDDLE_SIZE, 3)
                write_json(out, found)


def main():
    """Start the workers, and write their results while they run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="", help="only these rows, such as steps,fast")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of processes, each pinned to its own core"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.inside is not None:
        torch.set_num_threads(1)
        run_worker([*filter(None, a.inside.split(","))], a.out)
        return
    arms = compared_arms()
    asked = [*filter(None, a.methods.split(","))]
    if unknown := set(asked) - set(arms):
        print(
            f"--methods must be among {', '.join(arms)}; got {', '.join(sorted(unknown))}",
            file=sys.stderr,
        )
        sys.exit(2)
    rest = [name for name in asked or arms if name != "steps"]
    shares = [["steps", *rest[n :: a.workers], "steps"] for n in range(a.workers)] + [[]]
    about = {
        "threads": 1,
        "machine": machine.machine_info(),
        "sizes": SIZES,
        "versions": machine.library_versions(),
        "git_commit": machine.current_git_commit(),
    }
    if not hasattr(os, "sched_setaffinity"):
        print("costs are measured on Linux, which can bind a process to a core", file=sys.stderr)
        sys.exit(2)
    cores = sorted(os.sched_getaffinity(0))
    running = {}
    codes = []
    with tempfile.TemporaryDirectory() as tmp:
        parts = [Path(tmp) / f"{n}.json" for n in range(len(shares))]
        waiting = list(zip(shares, parts, strict=True))
        while waiting or running:
            for core in [core for core, child in running.items() if child.poll() is not None]:
                codes.append(running.pop(core).returncode)
            free_cores = [core for core in reversed(cores) if core not in running]
            for core in free_cores[: len(waiting)]:
                names, part = waiting.pop(0)
                command = [
                    sys.executable,
                    __file__,
                    "--inside",
                    ",".join(names),
                    "--out",
                    str(part),
                ]
                running[core] = subprocess.Popen(
                    command,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                    preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),
                )
            found = [read_json(part) for part in parts if part.is_file()]
            write_json(
                a.out,
                about
                | {
                    "whole": not (waiting or running or any(codes)),
                    "workers": [each["rows"] for each in found if not each["orders"]],
                    "orders": next((each["orders"] for each in found if each["orders"]), {}),
                },
            )
            time.sleep(1)
    log(f"numbers: {a.out}")
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
