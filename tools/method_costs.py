"""Seconds an image of every row of the table of methods, where calls cost most and where arithmetic does.

    python tools/method_costs.py --out runs/results/benchmarks/method_costs.json [--methods steps,fast] [--rounds 2]

Every row trains two iterations on the pocket model and on a FLUX of middle size with random weights, one row after the
other, round after round, in one process of one thread; the second iteration counts. The orders of DanceGRPO, GCPO and
Flow-GRPO follow on both sizes, with the same grid and images. Takes half an hour, and a machine that does nothing
else; what is measured is written after each row. nbs/findings/methods.ipynb shows what it found.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import orders
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from speed import FEW, MIDDLE, say

from chunk_grpo.core import machine
from chunk_grpo.core.files import write_json
from chunk_grpo.core.settings import PRESETS_DIR, load_settings, read_settings_file
from chunk_grpo.measurements.speed import load_workload_settings
from chunk_grpo.pocket import pocket_model_path
from chunk_grpo.runs import launch, run_folder

LOOKS = PRESETS_DIR / "pocket" / "looks"
SHORT = {"iterations": 2, "eval_steps": 1, "hybrid_split": 0, "eval_count": 1, "checkpoint_every": 2, "threads": 1,
         "reward": {"pocket-clip": 1}, "eval_rewards": ["pocket-clip", "pocket-partial"]}
SIZES = {"pocket": {"prompts_per_iteration": 2, "images_per_prompt": 12, "rollout_batch": 24, "update_batch": 96},
         "a FLUX of middle size": {"prompts_per_iteration": 1, "images_per_prompt": 4, "resolution": 128,
                                   "eval_resolution": 128, "max_tokens": 64, "rollout_batch": 8, "update_batch": 8}}
ASIDE = ("decode", "reward", "evaluate")  # the same for every row that draws as many images


def looked_at() -> dict[str, dict]:
    "The arms of the looks at the table, each with what it changes."
    found = {}
    for folder in ("methods", "more-methods", "self-opd"):
        found |= read_settings_file(LOOKS / folder / "study.yaml")["arms"]
    return found


def save_middle(folder: Path) -> str:
    "A pipeline's folder: pocket's encoders and tokenizers, a FLUX of middle size and a small VAE with random weights."
    torch.manual_seed(0)
    encoders = FluxPipeline.from_pretrained(pocket_model_path())
    config = MIDDLE | {"joint_attention_dim": encoders.text_encoder_2.config.d_model,
                       "pooled_projection_dim": encoders.text_encoder.config.hidden_size}
    parts = {"transformer": FluxTransformer2DModel(**config), "vae": AutoencoderKL(**FEW)}
    FluxPipeline(**(encoders.components | parts)).save_pretrained(folder)
    return str(folder)


def train_row(base: dict, changes: dict) -> dict:
    "Images and seconds an image of the second iteration: of drawing and training, of decoding, of scoring."
    with tempfile.TemporaryDirectory() as tmp:
        s = load_settings(base, changes)
        line = run_folder.read_metrics(launch.train(s, Path(tmp) / "run", processes=1)).iloc[-1]
    phases = {name.removeprefix("seconds_"): float(x) for name, x in line.items()
              if name.startswith("seconds_") and "total" not in name and x == x}
    images = int(line["images"])
    work = sum(seconds for name, seconds in phases.items() if name not in ASIDE)
    return {"images": images, "work": work / images, **{name: phases.get(name, 0.0) / images for name in ASIDE[:2]}}


def measure_orders(base: dict, middle: bool, repeats: int) -> dict[str, float]:
    "Seconds an image of the four orders of one iteration on this grid."
    few = [f"{name}={base[name]}" for name in ("prompts_per_iteration", "images_per_prompt", "resolution", "max_tokens",
                                               "rollout_batch", "update_batch")]
    s = load_workload_settings("flux-size" if middle else "pocket", [*few, "dtype=float32", "shared_noise=false"])
    found = orders.measure(s, repeats, say, configs=(MIDDLE, FEW) if middle else ())
    return {name: sum(each.values()) / found["images"] for name, each in found["orders"].items()}


def main():
    "Measure what was asked for and write it."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="", help="these rows alone, such as steps,fast")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    arms = looked_at()
    if unknown := set(filter(None, a.methods.split(","))) - set(arms):
        print(f"--methods must be of {', '.join(arms)}; got {', '.join(sorted(unknown))}", file=sys.stderr)
        sys.exit(2)
    arms = {name: arms[name] for name in a.methods.split(",")} if a.methods else arms
    torch.set_num_threads(1)
    result = {"rounds": a.rounds, "threads": 1, "machine": machine.machine_info(),
              "versions": machine.library_versions(), "git_commit": machine.current_git_commit(),
              "sizes": SIZES, "rows": {size: {} for size in SIZES}, "orders": {}}
    with tempfile.TemporaryDirectory() as tmp:
        plain = read_settings_file(LOOKS / "methods" / "base.yaml")
        bases = {size: plain | SHORT | changes for size, changes in SIZES.items()}
        bases["a FLUX of middle size"]["model"] = save_middle(Path(tmp) / "middle")
        for n in range(a.rounds):
            for size, base in bases.items():
                for name, changes in arms.items():
                    found = train_row(base, changes)
                    result["rows"][size].setdefault(name, []).append(found)
                    write_json(Path(a.out), result)
                    say(f"round {n + 1}, {size}, {name}: {found['work']:.3g} s an image")
        for size, base in bases.items():
            result["orders"][size] = measure_orders(base, size != "pocket", 1 + a.rounds)
            write_json(Path(a.out), result)
    say(f"numbers: {a.out}")


if __name__ == "__main__":
    main()
