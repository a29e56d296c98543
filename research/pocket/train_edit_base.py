"""Train the editing base of the pocket world, and write the lists of edits.

    python research/pocket/train_edit_base.py [--out chunk_grpo/pocket/editing] [--work build/editing]
    python research/pocket/train_edit_base.py --curve [--steps 2000]
    python research/pocket/train_edit_base.py --lists

Minutes on one core; an interrupted training resumes from the work folder. The first writes a folder with the base as
diffusers saves a FluxKontextPipeline, the lists with their images, the curve of the training and a manifest. `--curve`
prints the share of right validation edits every 100 steps and writes only the work folder. `--lists` writes the lists
alone. The base's autoencoder is a link to the shipped one's, and its transformer is stored in float16.
"""

import argparse
import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxKontextPipeline
from diffusers.training_utils import EMAModel
from edit_recipe import (
    EDIT_SPLITS,
    EditFlow,
    choose_wrong_edit,
    encode_pictures,
    make_edit_lists,
    new_edit_flow,
    sample_added_place,
    sample_edited_images,
    scene_content,
    split_instructions,
)
from pocket_recipe import save_flow
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from train_bases import write_manifest
from train_pocket import (
    apply_gradient,
    build_optimizers,
    scheduled_learning_rate,
    train_resumable,
)

from chunk_grpo import pocket
from chunk_grpo.pocket.clip import tokenize_captions
from chunk_grpo.pocket.edits import (
    EDIT_KINDS,
    PocketEdit,
    PocketEditConsistency,
    apply_edit,
    build_edit_record,
    possible_edits,
    read_edit_list,
    read_edit_record,
    sample_edit_scene,
)
from chunk_grpo.pocket.world import render_scene

RECIPE = {
    "scenes": 10000,
    "steps": 2400,
    "batch": 128,
    "rate": 2e-3,
    "wrong": 0.25,
    "seed": 0,
}
SHIFT = 3.0  # of the noise levels, as for the shipped base


# The lists


def write_edit_lists(
    folder: Path,  # gets train.jsonl, validation.jsonl, test.jsonl and the folder images
) -> None:
    """Write the lists of edits, and the picture of every scene in them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, edited in make_edit_lists().items():
        lines = []
        for number, (scene, edits) in enumerate(edited):
            image = f"images/{split}-{number:02d}.png"
            render_scene(scene).save(folder / image, optimize=True)
            lines += [json.dumps(build_edit_record(scene, edit, image)) + "\n" for edit in edits]
        (folder / f"{split}.jsonl").write_text("".join(lines))


# The training


def sample_edit_pairs(
    scenes: int,  # each is edited once by every kind that is possible
    wrong: float,  # share of the edits whose instruction is another one
    seed: int,
) -> tuple[np.ndarray, np.ndarray, list[int], list[str]]:
    """Sample pictures before and after edits that may be trained on, and their instructions.

    Returns the sources (S, 64, 64, 3), the edited pictures (N, 64, 64, 3), the number of each one's source, and N
    instructions.
    """
    rng = np.random.default_rng([seed, 31])
    allowed = split_instructions()["train"]
    lists = make_edit_lists()
    held_out = {
        scene_content(scene) for split in ("validation", "test") for scene, _ in lists[split]
    }
    sources, edited, source_of, instructions = [], [], [], []
    while len(sources) < scenes:
        scene = sample_edit_scene(rng, count=1 + len(sources) % 2)
        if scene_content(scene) in held_out:
            continue
        possible = [edit for edit in possible_edits(scene) if edit in allowed]
        for kind in EDIT_KINDS:
            of_kind = [edit for edit in possible if edit.kind == kind]
            if not of_kind:
                continue
            edit = of_kind[rng.integers(len(of_kind))]
            told = choose_wrong_edit(scene, edit, allowed, rng) if rng.random() < wrong else edit
            after = apply_edit(scene, edit, sample_added_place(scene, rng))
            edited.append(np.asarray(render_scene(after)))
            source_of.append(len(sources))
            instructions.append(told.instruction)
        sources.append(np.asarray(render_scene(scene)))
    return np.stack(sources), np.stack(edited), source_of, instructions


def cache_edit_latents(
    work: Path,  # where the set is kept
    model: EditFlow,  # whose tokenizers are used
    vae: AutoencoderKL,
    scenes: int,
    wrong: float,  # share of wrong instructions
    seed: int,
) -> dict[str, torch.Tensor]:  # "source" and "latents" (N, 4, 32); "t5" and "clip" tokens
    """Return the training set, sampled and encoded once."""
    file = work / f"edits-{scenes}-{wrong}-{seed}.safetensors"
    if not file.exists():
        sources, edited, source_of, instructions = sample_edit_pairs(scenes, wrong, seed)
        data = {
            "source": encode_pictures(vae, sources)[source_of],
            "latents": encode_pictures(vae, edited),
        }
        for kind, tokenizer in model.tokenizers.items():
            data[kind] = tokenize_captions(tokenizer, instructions)
        save_file(data, file)
    return load_file(file)


def edit_flow_step(
    model: EditFlow,
    ema: EMAModel,  # averages of its weights
    optimizers: dict[str, torch.optim.Optimizer],  # from `build_optimizers`
    data: dict[str, torch.Tensor],  # from `cache_edit_latents`
    batch: int,
    rate: float,  # learning rate of this step
    seed: int,  # of this step
) -> float:  # the loss
    """Take one step on the flow-matching loss."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(data["latents"]), (batch,), generator=generator)
    u = torch.rand(batch, generator=generator)
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    target = data["latents"][pick]
    noise = torch.randn(target.shape, generator=generator)
    t = sigma[:, None, None]
    velocity = model(
        (1 - t) * target + t * noise,
        sigma,
        data["t5"][pick],
        data["clip"][pick],
        data["source"][pick],
    )
    loss = F.mse_loss(velocity, noise - target)
    return apply_gradient(loss, model=model, ema=ema, optimizers=optimizers, rate=rate)


def measure_edits(
    model: EditFlow,
    vae: AutoencoderKL,
    split: str,  # one of EDIT_SPLITS
    images: int,  # per edit
    steps: int = 20,
    eta: float = 0.0,  # 0: the ODE
    seed: int = 0,
) -> dict[str, float]:
    """Return the share of right edits on a list, of all and of each kind, and the share of unchanged pixels."""
    records = read_edit_list(split)
    instructions = [record["prompt"] for record in records]
    pictures = np.stack(
        [np.asarray(render_scene(read_edit_record(record)[0])) for record in records]
    )
    check = PocketEdit()
    right, consistent = [], []
    for number in range(images):
        edited = sample_edited_images(
            model,
            vae,
            pictures,
            instructions,
            steps=steps,
            eta=eta,
            seed=seed + 1000 * number,
        )
        right.append(check(edited, instructions, records))
        consistent.append(PocketEditConsistency()(edited, instructions, records))
    of_edits = torch.stack(right).mean(0)
    kinds = [check.category(text) for text in instructions]
    shares = {kind: of_edits[[k == kind for k in kinds]].mean().item() for kind in EDIT_KINDS}
    numbers = {
        "edit": of_edits.mean().item(),
        "edit_se": of_edits.std().item() / len(of_edits) ** 0.5,
        **shares,
        "best_of_images": torch.stack(right).amax(0).mean().item(),
        "consistency": torch.stack(consistent).mean().item(),
    }
    return {name: round(x, 4) for name, x in numbers.items()}


def train_edit_base(
    work: Path,  # training set, state and snapshots; training resumes from there
    scenes: int,
    steps: int,
    batch: int,
    rate: float,  # the highest
    wrong: float,  # share of wrong instructions
    seed: int,
    snapshot_steps: int = 100,  # between two snapshots, each of which is judged
    log: Callable[[str], None] = print,
) -> tuple[EditFlow, AutoencoderKL, list[dict]]:  # with averaged weights; a row per snapshot
    """Train the base from the shipped one, and judge each snapshot on the validation list."""
    work.mkdir(parents=True, exist_ok=True)
    model, vae = new_edit_flow(seed)
    data = cache_edit_latents(work, model=model, vae=vae, scenes=scenes, wrong=wrong, seed=seed)
    ema = EMAModel(model.parameters(), decay=0.998, use_ema_warmup=True, power=0.8)
    optimizers = build_optimizers(model, rate)
    rows_file = work / "curve.json"
    rows = json.loads(rows_file.read_text()) if rows_file.exists() else []

    def judge(done):
        """Measure the averaged weights on the validation list after `done` steps, and record the result."""
        averaged = copy.deepcopy(model)
        ema.copy_to(averaged.parameters())
        numbers = measure_edits(averaged.eval(), vae, "validation", images=4)
        rows[:] = [row for row in rows if row["steps"] < done]
        row = {"steps": done, "right": numbers["edit"], **{k: numbers[k] for k in EDIT_KINDS}}
        rows.append(row)
        rows_file.write_text(json.dumps(rows))
        log(str(row))

    train_resumable(
        "edits",
        steps=steps,
        path=work / "edits-state.pt",
        parts={"model": model, "ema": ema} | optimizers,
        checkpoint_steps=snapshot_steps,
        log=log,
        take_step=lambda step: edit_flow_step(
            model,
            ema=ema,
            optimizers=optimizers,
            data=data,
            batch=batch,
            rate=scheduled_learning_rate(step, steps, rate),
            seed=seed * 10_000_019 + step,
        ),
        snapshot=judge,
    )
    ema.copy_to(model.parameters())
    return model.eval(), vae, rows


# The folder that the package ships


def save_edit_base(
    model: EditFlow,
    vae: AutoencoderKL,
    folder: Path,  # written anew
    shipped: Path,  # the folder of the shipped base
) -> None:
    """Write the base as a FluxKontextPipeline whose autoencoder is a link to the shipped one."""
    shutil.rmtree(folder, ignore_errors=True)
    save_flow(model, vae, folder, FluxKontextPipeline, SHIFT)
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    halved = {name: x.astype(np.float16) for name, x in load_arrays(weights).items()}
    save_arrays(halved, weights, metadata={"format": "pt"})
    shutil.rmtree(folder / "vae")
    (folder / "vae").symlink_to(os.path.relpath(shipped / "vae", folder))


def load_edit_base(
    folder: Path,  # of `save_edit_base`
) -> tuple[EditFlow, AutoencoderKL]:
    """Return the parts of a saved base as an `EditFlow` and its autoencoder."""
    pipeline = FluxKontextPipeline.from_pretrained(folder)
    model = EditFlow()
    model.transformer = pipeline.transformer
    model.clip = pipeline.text_encoder
    model.t5 = pipeline.text_encoder_2
    return model.eval(), pipeline.vae


def files_of_edit_base(
    out: Path,  # with the base, the lists and their images
) -> list[Path]:
    """List the files that the manifest of the editing base describes."""
    files = [out / f"{split}.jsonl" for split in EDIT_SPLITS] + [out / "curve.json"]
    return files + [file for part in ("base", "images") for file in (out / part).rglob("*")]


def main() -> None:
    """Train the editing base."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--out", type=Path, default=pocket.POCKET_DIR / "editing", help="folder that is written"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/editing"), help="folder of states, to resume from"
    )
    parser.add_argument("--steps", type=int, default=RECIPE["steps"], help="steps of training")
    parser.add_argument("--rate", type=float, default=RECIPE["rate"], help="learning rate")
    parser.add_argument("--images", type=int, default=8, help="images per test edit in measuring")
    parser.add_argument("--curve", action="store_true", help="train and print the curve alone")
    parser.add_argument("--lists", action="store_true", help="write the lists alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.lists:
        write_edit_lists(chosen.out)
        return
    recipe = RECIPE | {"steps": chosen.steps, "rate": chosen.rate}
    start = time.time()
    model, vae, rows = train_edit_base(chosen.work, **recipe)
    print(f"{recipe['steps']} steps in {time.time() - start:.0f} s")
    if chosen.curve:
        return
    write_edit_lists(chosen.out)
    save_edit_base(model, vae, chosen.out / "base", Path(pocket.pocket_model_path()))
    curve = {"edits": "validation", "images": 4, "rows": rows}
    (chosen.out / "curve.json").write_text(json.dumps(curve) + "\n")
    # It is measured as it is read back from its folder.
    saved = load_edit_base(chosen.out / "base")
    manifest = write_manifest(
        chosen.out,
        files=files_of_edit_base(chosen.out),
        recipe=recipe,
        measured=measure_edits(*saved, "test", images=chosen.images),
    )
    print(manifest["quality"])


if __name__ == "__main__":
    main()
