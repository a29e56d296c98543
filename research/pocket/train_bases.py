"""Train the other bases of the pocket world: one with three quarters of its captions wrong, and an undertrained one.

    python research/pocket/train_bases.py [--out chunk_grpo/pocket/bases] [--work build/bases] [--images 8]

About five minutes on one free core; an interrupted training resumes from the work folder. Each base is a folder as
diffusers saves a pipeline. Its autoencoder is a link to the shipped one's, so bases differ in what they draw and not in
how it is decoded. The transformer is kept in float16. What they score is on the page nbs/01_pocket/05_bases.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from pocket_recipe import describe_files, load_flow
from safetensors.numpy import load_file, save_file
from train_pocket import measure_quality, train_flow

from chunk_grpo import pocket

RECIPE = {
    # From the shipped base, of whose captions half were wrong.
    "three-quarters-wrong": {
        "steps": 600,
        "batch": 128,
        "rate": 4e-4,
        "seed": 0,
        "wrong": 0.75,
        "schedule": 600,
    },
    # The shipped recipe of the flow, stopped after the first 600 of its 8,000 steps.
    "undertrained": {"steps": 600, "batch": 128, "rate": 2e-3, "seed": 0, "schedule": 8000},
}
PARTS = (  # file of a base, the name of its part in a `PocketFlow`, and the type its numbers are kept in
    ("transformer/diffusion_pytorch_model.safetensors", "transformer.", np.float16),
    ("text_encoder/model.safetensors", "clip.", np.float32),
    ("text_encoder_2/model.safetensors", "t5.", np.float32),
)


def train_base(
    name: str,  # a key of RECIPE
    work: Path,  # training set, states and snapshots
    recipe: dict,  # settings of its training
    log: Callable[[str], None] = print,
) -> Path:  # the snapshot with the weights averaged over steps
    """Train a base, unless the work folder already contains its weights."""
    snapshot = Path(work) / f"{name}-{recipe['steps']:06d}.safetensors"
    if not snapshot.exists():
        start, vae = load_flow()
        start = start if "wrong" in recipe else None
        train_flow(work, vae, **{"snapshot_steps": 100} | recipe, start=start, name=name, log=log)
    return snapshot


def save_base(
    snapshot: Path,  # weights of a `PocketFlow`
    folder: Path,  # replaced if it exists
    shipped: Path,  # folder of the shipped base, which has the same network
) -> None:
    """Write a base in the format of diffusers, with a link to the autoencoder of the shipped base."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns("vae", "*.safetensors"))
    weights = load_file(snapshot)
    for file, prefix, kind in PARTS:
        named = {
            name.removeprefix(prefix): x.astype(kind)
            for name, x in weights.items()
            if name.startswith(prefix)
        }
        wanted = load_file(shipped / file)
        if {name: x.shape for name, x in named.items()} != {
            name: x.shape for name, x in wanted.items()
        }:
            raise ValueError(f"{snapshot} holds other tensors than {shipped / file}")
        save_file(named, folder / file, metadata={"format": "pt"})
    (folder / "vae").symlink_to(os.path.relpath(shipped / "vae", folder))


def write_manifest(
    out: Path,  # folder that holds the files
    files: Iterable[Path],  # files to hash; those of linked autoencoders are left out
    recipe: dict,  # settings of the training, or those of each base by name
    measured: dict,  # scores of the base, or those of each base by name
) -> dict:
    """Write manifest.json: how the bases were trained, their scores, and the hash of each file."""
    files = sorted(file for file in files if file.is_file() and "vae" not in file.parts)
    content = {
        "training": recipe,
        "quality": measured,
        **describe_files(files, out),
    }
    (out / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def build_bases(
    out: Path,  # receives one folder per base and manifest.json
    work: Path,  # training set, states and snapshots, from which training resumes
    recipe: dict | None = None,  # settings of the trainings
    images: int = 8,  # number of images per test prompt for measuring; 0: measure nothing
    log: Callable[[str], None] = print,
) -> dict:  # the manifest
    """Train, write and measure every base; each is loaded from its folder before it is measured."""
    recipe = recipe or RECIPE
    work = Path(work)
    work.mkdir(parents=True, exist_ok=True)
    measured = {}
    for name, settings in recipe.items():
        snapshot = train_base(name, work, settings, log)
        save_base(snapshot, Path(out) / name, Path(pocket.pocket_model_path()))
        if images:
            measured[name] = measure_quality(*load_flow(Path(out) / name), images)
    files = [file for name in recipe for file in (Path(out) / name).rglob("*")]
    return write_manifest(Path(out), files=files, recipe=recipe, measured=measured)


def main() -> None:
    """Train the bases other than the shipped one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--out", type=Path, default=pocket.POCKET_DIR / "bases", help="folder that is written"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/bases"), help="folder of states, to resume from"
    )
    parser.add_argument("--images", type=int, default=8, help="images per test prompt in measuring")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    manifest = build_bases(chosen.out, chosen.work, images=chosen.images)
    print(f"{chosen.out}: {len(manifest['training'])} bases, {manifest['bytes'] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
