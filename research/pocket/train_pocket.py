"""Train the shipped pocket weights again from scratch: autoencoder, its decoder, flow, the misled flow, CLIP.

    python research/pocket/train_pocket.py [--out pocket-rebuilt] [--work build/pocket] [--threads N] [--compile]

Hours on two cores; an interrupted training goes on from the work folder. What is trained, and the losses, are taught in
nbs/01_pocket. The package needs nothing of this at run time: the weights are shipped.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.training_utils import EMAModel
from pocket_recipe import (
    PocketFlow,
    augment_images,
    clip_loss,
    describe_files,
    encode_in_batches,
    flow_loss,
    hard_negatives,
    make_flawed_scene,
    make_spoiled_image,
    mean_category_accuracy,
    new_clip,
    new_tokenizer,
    new_vae,
    pack_flow_latents,
    sample_flow_images,
    save_flow,
    second_test_prompts,
    split_category_captions,
    split_prompts,
    vae_loss,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPModel, PreTrainedTokenizerFast

from chunk_grpo import pocket
from chunk_grpo.pocket import clip, geneval
from chunk_grpo.pocket.clip import numpy_to_vae_input, tokenize_captions
from chunk_grpo.pocket.world import (
    POCKET_CATEGORIES,
    Scene,
    matches_caption,
    parse_caption,
    render_scene,
    sample_scene,
    sample_scene_image,
)

PARTS = ("vae", "decoder", "flow", "misled", "clip")
RECIPE = {
    "vae": {
        "steps": 2500,
        "batch": 24,
        "count": 8000,
        "rate": 3e-3,
        "beta": 1e-4,
        "noise": 0.5,
        "seed": 0,
    },
    "decoder": {"steps": 2500, "batch": 24, "count": 8000, "rate": 2e-3, "noise": 0.5, "seed": 1},
    "flow": {"steps": 8000, "batch": 128, "count": 48000, "rate": 2e-3, "seed": 0},
    "misled": {"steps": 400, "batch": 128, "count": 48000, "rate": 4e-4, "seed": 0, "wrong": 0.5},
    "clip": {"steps": 5000, "batch": 64, "count": 12000, "negatives": 4, "rate": 1e-3, "seed": 0},
}
_WEIGHTS = {
    "single_object": 0.5,
    "colors": 0.75,
    "position": 1.5,
    "color_attr": 1.5,
}  # how often the flow sees each


def sample_captioned_images(
    count: int,
    seed: int = 0,
    weights: dict[str, float] | None = None,  # share of each category; None: equal shares
    free: bool = True,  # objects at any place; False: only at places of the grid
) -> tuple[list[str], np.ndarray]:  # captions; pictures (count, 64, 64, 3), uint8
    """Sample pictures with captions that may be used in training."""
    rng = np.random.default_rng([seed, 7])
    allowed = {c: split_category_captions(c)[0] for c in POCKET_CATEGORIES}
    share = np.array([(weights or {}).get(c, 1.0) for c in POCKET_CATEGORIES])
    chosen = [
        POCKET_CATEGORIES[i]
        for i in rng.choice(len(POCKET_CATEGORIES), count, p=share / share.sum())
    ]
    captions = [allowed[c][rng.integers(len(allowed[c]))] for c in chosen]
    return captions, np.stack([np.asarray(sample_scene_image(c, rng, free)) for c in captions])


@cache
def trainable_captions() -> frozenset[str]:
    """Return every caption that may be used in training."""
    return frozenset(p for c in POCKET_CATEGORIES for p in split_category_captions(c)[0])


# What the trainings share


def clipped_step(
    model: nn.Module,
    loss: torch.Tensor,  # scalar, with a graph
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,  # schedule of its learning rate
) -> None:
    """Take one step of an optimizer with the gradient's norm clipped at 1, and one of its learning-rate schedule."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def save_training_state(
    path: Path,
    step: int,  # number of finished steps
    **parts,  # objects with a state_dict, by name
) -> None:
    """Write the state of a training run atomically."""
    temporary = Path(path).with_suffix(".tmp")
    torch.save(
        {name: part.state_dict() for name, part in parts.items()} | {"step": step}, temporary
    )
    temporary.replace(path)


def load_training_state(
    path: Path,
    **parts,  # as given to `save_training_state`
) -> int:  # 0 if there is no state yet
    """Load the state of a training run into its parts, and return the number of finished steps."""
    if not Path(path).exists():
        return 0
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["step"]


def train_resumable(
    name: str,  # beginning of the log lines
    steps: int,  # total number of steps
    path: Path,  # file of the state
    parts: dict,  # objects with a state_dict, by name, as in `save_training_state`
    checkpoint_steps: int,  # number of steps between two saved states
    log: Callable[[str], None],
    take_step: Callable[
        [int], float
    ],  # takes the step with this number, from 0, and returns its loss
    # called with the number of finished steps before a state is saved
    snapshot: Callable[[int], object] = lambda done: None,
) -> None:
    """Take the remaining steps and save the state at intervals; a call with the same path resumes."""
    start = time.time()
    total = 0.0
    for step in range(load_training_state(path, **parts), steps):
        total += take_step(step)
        if (step + 1) % 100 == 0:
            log(f"{name} {step + 1}/{steps} loss {total / 100:.4f} {time.time() - start:.0f} s")
            total = 0.0
        if (step + 1) % checkpoint_steps == 0 or step + 1 == steps:
            snapshot(step + 1)
            save_training_state(path, step + 1, **parts)


# The autoencoder


def _fit_vae(
    vae: AutoencoderKL,  # trained in place
    data: torch.Tensor,  # pictures (N, 3, 64, 64), uint8
    steps: int,
    batch: int,
    rate: float,  # highest learning rate
    beta: float,  # weight of the KL term per latent dimension
    noise: float,  # largest standard deviation of noise on the latents, relative to theirs
    seed: int,
    log: Callable[[str], None],
) -> None:
    """Train an autoencoder on pictures, in place."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.05
    )
    rng = torch.Generator().manual_seed(seed)
    start = time.time()
    for step in range(steps):
        x = data[torch.randint(len(data), (batch,), generator=rng)].float() / 127.5 - 1
        loss, psnr = vae_loss(vae, x, beta=beta, noise=noise, generator=rng)
        clipped_step(vae, loss, optimizer, schedule)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            log(
                f"vae {step + 1}/{steps} loss {loss.item():.4f} psnr {psnr:.1f} dB {time.time() - start:.0f} s"
            )


def _sample_vae_training_set(
    count: int,  # N, number of pictures
    seed: int,  # seed of the training run
) -> torch.Tensor:  # (N, 3, 64, 64), uint8
    """Sample the pictures on which the autoencoder is trained."""
    pictures = sample_captioned_images(count, seed + 1, free=False)[1]
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def train_vae(
    work: Path,  # receives vae.safetensors
    steps: int = 2500,
    batch: int = 24,
    count: int = 8000,  # number of training pictures
    rate: float = 3e-3,
    beta: float = 1e-4,  # weight of the KL term per latent dimension
    noise: float = 0.5,  # largest standard deviation of noise on the latents, relative to theirs
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> AutoencoderKL:
    """Train the autoencoder, or load it if its file exists."""
    torch.manual_seed(seed)
    vae = new_vae()
    path = Path(work) / "vae.safetensors"
    if path.exists():
        vae.load_state_dict(load_file(path))
        return vae.eval()
    vae.to(memory_format=torch.channels_last)
    data = _sample_vae_training_set(count, seed)
    _fit_vae(
        vae,
        data,
        steps=steps,
        batch=batch,
        rate=rate,
        beta=beta,
        noise=noise,
        seed=seed,
        log=log,
    )
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, path)
    return vae.eval()


def refine_decoder(
    work: Path,  # receives decoder.safetensors
    vae: AutoencoderKL,  # its decoder is trained in place
    steps: int = 2500,
    batch: int = 24,
    count: int = 8000,  # number of training pictures
    rate: float = 2e-3,
    noise: float = 0.5,  # largest standard deviation of noise on the latents, relative to theirs
    seed: int = 1,
    log: Callable[[str], None] = print,
) -> AutoencoderKL:
    """Continue to train the decoder with a frozen encoder, or load the result if its file exists."""
    path = Path(work) / "decoder.safetensors"
    if path.exists():
        vae.decoder.load_state_dict(load_file(path))
        return vae
    vae.to(memory_format=torch.channels_last).encoder.requires_grad_(False)
    data = _sample_vae_training_set(count, seed)
    # The encoder stays, so the KL term has no weight.
    _fit_vae(
        vae,
        data,
        steps=steps,
        batch=batch,
        rate=rate,
        beta=0.0,
        noise=noise,
        seed=seed,
        log=log,
    )
    save_file({k: v.contiguous() for k, v in vae.decoder.state_dict().items()}, path)
    return vae.requires_grad_(True).eval()


# The flow


@torch.no_grad()
def cache_training_latents(
    work: Path,  # holds the encoded set, latents.safetensors
    vae: AutoencoderKL,  # its shift and scaling factor are set here
    count: int,  # number of pictures
    seed: int = 0,
) -> dict[str, torch.Tensor]:  # "latents" (N, 4, 32); "t5" and "clip" tokens (N, MAX_TOKENS)
    """Sample and encode the training set, or load it if its file exists."""
    file = Path(work) / "latents.safetensors"
    if not file.exists():
        captions, pictures = sample_captioned_images(count, seed + 2, _WEIGHTS, free=False)
        code = encode_in_batches(vae, pictures)
        shift = code.mean()
        factor = 1 / code.std()
        data = {
            "latents": pack_flow_latents((code - shift) * factor),
            "scale": torch.stack([shift, factor]),
        }
        save_file(
            data
            | {kind: tokenize_captions(new_tokenizer(kind), captions) for kind in ("t5", "clip")},
            file,
        )
    data = load_file(file)
    shift, factor = data["scale"].tolist()
    vae.register_to_config(shift_factor=shift, scaling_factor=factor)
    return data


def mislead_captions(
    captions: list[str],
    share: float,  # share of the captions that become wrong
    seed: int = 0,
) -> list[str]:  # in the same order
    """Change one word in a share of the captions so that they become wrong.

    The wrong captions are never held-out ones.
    """
    rng = np.random.default_rng([seed, 17])
    out = []
    for caption in captions:
        wrong = [text for text in hard_negatives(caption) if text in trainable_captions()]
        out.append(str(rng.choice(wrong)) if wrong and rng.random() < share else caption)
    return out


def mislead_tokens(
    data: dict[str, torch.Tensor],  # from `cache_training_latents`
    share: float,  # share of the captions that become wrong
    seed: int = 0,
) -> dict[str, torch.Tensor]:  # the same latents with tokens of other captions
    """Return the training set with a share of wrong captions."""
    captions = new_tokenizer("t5").batch_decode(data["t5"], skip_special_tokens=True)
    wrong = mislead_captions(captions, share, seed)
    return data | {kind: tokenize_captions(new_tokenizer(kind), wrong) for kind in ("t5", "clip")}


def scheduled_learning_rate(
    step: int,
    steps: int,
    peak: float,
    warm: int = 200,  # number of steps of the linear rise
    fall: float = 0.75,  # share of the steps, at the end, over which the rate falls to a twentieth
) -> float:
    """Return the learning rate of a step: a linear rise, a constant part and a fall."""
    left = (steps - step) / max(1, fall * steps)
    return peak * min(1.0, (step + 1) / warm) * (0.05 + 0.95 * min(1.0, left))


def build_optimizers(
    model: nn.Module,
    rate: float,
) -> dict[str, torch.optim.Optimizer]:  # "muon" and "adamw"; every parameter is in one of them
    """Build Muon for the matrices inside blocks and AdamW for all other parameters."""

    def inside(name, p):
        """Return True if a parameter is a matrix inside a block."""
        return (
            p.ndim == 2 and any(word in name for word in ("block", "layers")) and "bias" not in name
        )

    named = list(model.named_parameters())
    return {
        "muon": torch.optim.Muon(
            [p for n, p in named if inside(n, p)],
            lr=rate,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
        ),
        "adamw": torch.optim.AdamW(
            [p for n, p in named if not inside(n, p)],
            lr=rate,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=True,
        ),
    }


def apply_gradient(
    loss: torch.Tensor,  # (), with its graph
    model: nn.Module,
    ema: EMAModel,  # moving average of its weights
    optimizers: dict[str, torch.optim.Optimizer],  # from `build_optimizers`
    rate: float,  # learning rate of this step
) -> float:  # the loss
    """Take one step of every optimizer and of the averages, with the gradient's norm clipped at 1."""
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    ema.step(model.parameters())
    return loss.item()


def flow_step(
    model: PocketFlow,
    ema: EMAModel,  # moving average of its weights
    optimizers: dict[str, torch.optim.Optimizer],  # from `build_optimizers`
    data: dict[str, torch.Tensor],  # from `cache_training_latents`
    batch: int,
    rate: float,  # learning rate of this step
    seed: int,  # seed of this step
) -> float:  # the loss
    """Take one step on the flow-matching loss."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(data["latents"]), (batch,), generator=generator)
    loss = flow_loss(model, *(data[k][pick] for k in ("latents", "t5", "clip")), generator)
    return apply_gradient(loss, model=model, ema=ema, optimizers=optimizers, rate=rate)


def train_flow(
    work: Path,  # data, state and snapshots <name>-<step>.safetensors (weights averaged over steps)
    vae: AutoencoderKL,
    steps: int = 16000,
    batch: int = 64,
    count: int = 48000,  # number of training pictures
    rate: float = 1.5e-3,
    snapshot_steps: int = 500,  # steps between snapshots
    compiled: bool = False,  # compile the velocity network
    seed: int = 0,
    wrong: float = 0.0,  # share of the captions with one word wrong
    start: PocketFlow | None = None,  # initial weights; None: random ones
    name: str = "flow",  # name of the state and snapshot files
    # length of the learning-rate schedule, if training stops before its end
    schedule: int | None = None,
    log: Callable[[str], None] = print,
) -> PocketFlow:  # with averaged weights
    """Train the flow; a call with the same folder resumes where the last one stopped."""
    work = Path(work)
    data = cache_training_latents(work, vae, count, seed)
    torch.manual_seed(seed)
    model = PocketFlow()
    if start is not None:
        model.load_state_dict(start.state_dict())
    if compiled:
        model.transformer.compile()
    ema = EMAModel(model.parameters(), decay=0.998, use_ema_warmup=True, power=0.8)
    data, optimizers = (
        mislead_tokens(data, wrong, seed) if wrong else data,
        build_optimizers(model, rate),
    )

    def keep(done):
        """Save the averaged weights after `done` steps."""
        averages = zip(model.named_parameters(), ema.shadow_params, strict=True)
        save_file(
            {of: p.clone() for (of, _), p in averages}, work / f"{name}-{done:06d}.safetensors"
        )

    train_resumable(
        name,
        steps=steps,
        path=work / f"{name}-state.pt",
        parts={"model": model, "ema": ema} | optimizers,
        checkpoint_steps=snapshot_steps,
        log=log,
        take_step=lambda step: flow_step(
            model,
            ema=ema,
            optimizers=optimizers,
            data=data,
            batch=batch,
            rate=scheduled_learning_rate(step, schedule or steps, rate),
            seed=seed * 10_000_019 + step,
        ),
        snapshot=keep,
    )
    ema.copy_to(model.parameters())
    return model.eval()


# The reward


@torch.no_grad()
def vae_roundtrip(
    array: np.ndarray,  # (N, 64, 64, 3), uint8
    vae: AutoencoderKL,
    noise: float,  # largest standard deviation of noise added to latents of standard deviation 1
    seed: int = 0,
) -> np.ndarray:  # the same shape
    """Encode pictures, add a little noise to their latents and decode them, so that they look like generated ones."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for start in range(0, len(array), 100):
        z = vae.encode(numpy_to_vae_input(array[start : start + 100])).latent_dist.mean
        level = noise * torch.rand(len(z), 1, 1, 1, generator=generator) / vae.config.scaling_factor
        y = vae.decode(z + level * torch.randn(z.shape, generator=generator)).sample
        out.append(
            ((y.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        )
    return np.concatenate(out)


def sample_clip_training_set(
    count: int,
    seed: int,
    # scenes; true pictures; pictures with a flaw, (N, 64, 64, 3) uint8
) -> tuple[list[Scene], np.ndarray, np.ndarray]:
    """Sample scenes with trainable captions, their true pictures, and pictures with a flaw."""
    rng = np.random.default_rng([seed, 11])
    allowed = [split_category_captions(c)[0] for c in POCKET_CATEGORIES]
    all_scenes, good, bad = [], [], []
    for n, i in enumerate(rng.integers(len(POCKET_CATEGORIES), size=count)):
        scene = sample_scene(allowed[i][rng.integers(len(allowed[i]))], rng, free=n >= 0.75 * count)
        all_scenes.append(scene)
        good.append(np.asarray(render_scene(scene)))
        flawed = rng.random() < 0.7
        wrong = (
            render_scene(make_flawed_scene(scene, rng))
            if flawed
            else make_spoiled_image(scene, rng)
        )
        bad.append(np.asarray(wrong))
    return all_scenes, np.stack(good), np.stack(bad)


def clip_batch_loss(
    model: CLIPModel,
    words: PreTrainedTokenizerFast,
    scenes: Sequence[Scene],  # N
    images: np.ndarray,  # their pictures, then those with a flaw, (2 N, 64, 64, 3), uint8
    negatives: int,  # number of false captions per scene
    rng: np.random.Generator,
    generator: torch.Generator,
) -> torch.Tensor:  # scalar
    """Compute the CLIP loss of a batch of scenes."""
    lists = [
        [text for text in hard_negatives(s.caption) if text in trainable_captions()] for s in scenes
    ]
    false = [str(text) for texts in lists for text in rng.choice(texts, negatives)]
    specs = [parse_caption(s.caption) for s in scenes]
    truth = torch.tensor([[matches_caption(spec, s.things) for s in scenes] for spec in specs])
    x = augment_images(numpy_to_vae_input(images), generator)
    texts = clip.embed_text(model, tokenize_captions(words, [s.caption for s in scenes] + false))
    return clip_loss(
        clip.embed_image(model, x), texts, truth, model.logit_scale.exp().clamp(max=50)
    )


def clip_step_loss(
    model: CLIPModel,
    words: PreTrainedTokenizerFast,
    data: tuple[list[Scene], np.ndarray, np.ndarray],  # scenes; true pictures; pictures with a flaw
    batch: int,  # number of scenes
    negatives: int,  # number of false captions per scene
    seed: tuple[int, int],  # seed of the training run, and number of the step
) -> torch.Tensor:  # scalar
    """Compute the CLIP loss of one training step, on a batch that the seed selects."""
    rng = np.random.default_rng([seed[0], 13, seed[1]])
    generator = torch.Generator().manual_seed(seed[0] * 10_000_019 + seed[1])
    drawn, good, bad = data
    pick = rng.choice(len(drawn), batch, replace=False)
    images = np.concatenate([good[pick], bad[pick]])
    return clip_batch_loss(
        model,
        words,
        scenes=[drawn[i] for i in pick],
        images=images,
        negatives=negatives,
        rng=rng,
        generator=generator,
    )


def train_clip(
    work: Path,  # holds the state, clip-state.pt
    vae: AutoencoderKL,
    steps: int = 5000,
    batch: int = 64,  # number of scenes
    count: int = 12000,  # number of scenes, each with a true picture and one with a flaw
    negatives: int = 4,  # number of false captions per scene
    rate: float = 1e-3,
    checkpoint_steps: int = 500,  # steps between states
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> CLIPModel:
    """Train the CLIP; a call with the same folder resumes where the last one stopped."""
    torch.manual_seed(seed)
    words = new_tokenizer("clip")
    model = new_clip(len(words))
    data = sample_clip_training_set(count, seed)
    for i, array in enumerate(data[1:]):  # half of the pictures as a flow model would give them
        array[: count // 2] = vae_roundtrip(array[: count // 2], vae, 0.4, seed + i)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def take_step(step):
        """Take one training step, and return its loss."""
        loss = clip_step_loss(
            model, words, data=data, batch=batch, negatives=negatives, seed=(seed, step)
        )
        clipped_step(model, loss, optimizer, schedule)
        return loss.item()

    train_resumable(
        "clip",
        steps=steps,
        path=Path(work) / "clip-state.pt",
        parts=parts,
        checkpoint_steps=checkpoint_steps,
        log=log,
        take_step=take_step,
    )
    return model.eval()


# What the results score


def within_group_auc(
    score: torch.Tensor,  # (P, G)
    right: torch.Tensor,  # (P, G), 0 or 1
) -> float:
    """Compute the area under the ROC curve of scores against verdicts within groups; ties count half."""
    higher = (score[:, :, None] > score[:, None]).double() + 0.5 * (
        score[:, :, None] == score[:, None]
    )
    pair = (right[:, :, None] > right[:, None]).double()
    return float((higher * pair).sum() / pair.sum().clamp(min=1))


def judge_prompt_images(
    model: PocketFlow,
    vae: AutoencoderKL,
    prompts: list[str],
    images_per_prompt: int,
    steps: int,
    eta: float,
    reward: clip.PocketCLIP,
    seed: int,
    # verdicts, 0 or 1, and cosines, (P, G) each; share of malformed objects
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Sample images for every prompt, and score them with the exact checker and with the reward."""
    check = geneval.PocketGenEval()
    verdicts = []
    scores = []
    things = []
    for i in range(images_per_prompt):
        images = torch.cat(
            [
                sample_flow_images(model, vae, part, steps=steps, eta=eta, seed=seed + 1000 * i + j)
                for j, part in enumerate(prompts[k : k + 48] for k in range(0, len(prompts), 48))
            ]
        )
        verdicts.append(check(images, prompts))
        scores.append(reward(images, prompts))
        things += [
            thing
            for found in geneval.detect_shapes(geneval.images_to_numpy(images))
            for thing in found
        ]
    return (
        torch.stack(verdicts, 1),
        torch.stack(scores, 1),
        things.count(None) / max(1, len(things)),
    )


def mean_accuracy_with_error(
    right: torch.Tensor,  # verdicts, (P, G)
    prompts: list[str],  # (P,)
    # mean over categories, its standard error, accuracy of each category
) -> tuple[float, float, dict[str, float]]:
    """Compute GenEval's score for several images per prompt, with its standard error over prompts."""
    mean, table = mean_category_accuracy(right.mean(1), prompts)
    categories = [parse_caption(p).category for p in prompts]
    groups = [right.mean(1)[[k == c for k in categories]] for c in table]
    return mean, math.sqrt(sum(g.var().item() / len(g) for g in groups)) / len(groups), table


def measure_quality(
    model: PocketFlow,
    vae: AutoencoderKL,
    images_per_prompt: int = 8,
    steps: int = 20,
    eta: float = 0.0,
    stride: int = 1,  # use every stride-th test prompt
    reward: clip.PocketCLIP | None = None,  # None: the shipped one
    seed: int = 0,
) -> dict[str, float]:
    """Measure the checker's verdicts on the test prompts, and how well the reward ranks the same images."""
    prompts = pocket.read_pocket_prompts("test")[::stride]
    reward = reward or clip.PocketCLIP()
    right, score, malformed = judge_prompt_images(
        model,
        vae,
        prompts=prompts,
        images_per_prompt=images_per_prompt,
        steps=steps,
        eta=eta,
        reward=reward,
        seed=seed,
    )
    mean, error, table = mean_accuracy_with_error(right, prompts)
    best, _ = mean_category_accuracy(right.amax(1), prompts)
    return {
        "geneval": round(mean, 4),
        "geneval_se": round(error, 4),
        **{f"geneval_{c}": round(v, 4) for c, v in table.items()},
        "geneval_best_of_images": round(best, 4),
        "malformed": round(malformed, 4),
        "clip": round(score.mean().item(), 4),
        "clip_auc_in_prompt": round(within_group_auc(score, right), 4),
        "images": right.numel(),
        "prompts": len(prompts),
        "steps": steps,
        "eta": eta,
        "seed": seed,
    }


def measure_reward_reliability(
    reward: clip.PocketCLIP,
    scenes: int = 8,  # number of scenes per test prompt
    seed: int = 7,
) -> dict[str, float]:  # shares of the scenes
    """Measure how often reward and checker are right on pictures whose correctness is known."""
    rng = np.random.default_rng(seed)
    check = geneval.PocketGenEval()
    prompts = pocket.read_pocket_prompts("test") * scenes
    drawn = [sample_scene(p, rng) for p in prompts]
    true = [render_scene(s) for s in drawn]
    score = reward(true, prompts)
    false = reward(true, [str(rng.choice(hard_negatives(p))) for p in prompts])
    wrong = reward([render_scene(make_flawed_scene(s, rng)) for s in drawn], prompts)
    return {
        "clip_true_over_false_caption": round((score > false).double().mean().item(), 4),
        "clip_true_over_flawed_picture": round((score > wrong).double().mean().item(), 4),
        "geneval_true_scenes": round(check(true, prompts).double().mean().item(), 4),
        "geneval_other_prompt": round(
            check(true, list(rng.permutation(prompts))).double().mean().item(), 4
        ),
        "scenes": len(prompts),
    }


# The folder that the package ships


def _write_pocket_manifest(
    folder: Path,
    training: dict,  # settings, seeds and seconds of each part, by name
    measured: dict,  # name of a sampler -> result of `measure_quality`
) -> dict:
    """Write manifest.json with training, versions, quality, and the hash of every shipped file."""
    folder = Path(folder)
    files = sorted(
        f for part in ("base", "clip", "prompts") for f in (folder / part).rglob("*") if f.is_file()
    )
    names = ("torch", "diffusers", "transformers", "tokenizers", "numpy", "pillow", "scipy")
    content = {
        "training": training,
        "quality": measured,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        **describe_files(files, folder),
    }
    (folder / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def train_pocket_parts(
    work: Path,  # states and training sets, from which training resumes
    recipe: dict,  # settings of each part's training
    compiled: bool,  # compile the velocity network while it is trained
    log: Callable[[str], None],
) -> tuple[dict, dict[str, float]]:  # the trained parts and the seconds of each, by name
    """Train the autoencoder, its decoder again, the flow, the flow on wrong captions, and the CLIP."""
    made, seconds = {}, {}
    for name, train in zip(
        PARTS, (train_vae, refine_decoder, train_flow, train_flow, train_clip), strict=True
    ):
        start = time.time()
        before = () if name == "vae" else (made["vae"],)
        options = {"compiled": compiled} if train is train_flow else {}
        options |= {"start": made["flow"], "name": name} if name == "misled" else {}
        made[name] = train(work, *before, **recipe[name], **options, log=log)
        seconds[name] = time.time() - start
    return made, seconds


def build_pocket(
    out: Path,  # base, clip, prompts and manifest.json are written here
    work: Path,  # states and training sets, from which training resumes
    recipe: dict | None = None,  # settings of each part's training; None: the shipped recipe
    images: int = 8,  # number of images per test prompt for the quality measurement
    compiled: bool = False,  # compile the velocity network while it is trained
    log: Callable[[str], None] = print,
) -> dict:  # the manifest
    """Train all parts, and write the files that ship with the package."""
    recipe, out, work = recipe or RECIPE, Path(out), Path(work)
    work.mkdir(parents=True, exist_ok=True)
    (out / "prompts").mkdir(parents=True, exist_ok=True)
    for name, captions in zip(
        pocket.PROMPT_FILES, (*split_prompts(), second_test_prompts()), strict=True
    ):
        (out / "prompts" / f"{name}.txt").write_text("\n".join(captions) + "\n")
    made, seconds = train_pocket_parts(work, recipe, compiled, log)
    save_flow(made["misled"], made["vae"], out / "base")
    made["clip"].save_pretrained(out / "clip")
    new_tokenizer("clip").save_pretrained(out / "clip")
    reward = clip.PocketCLIP(out / "clip")
    measured = {}
    if images:
        measured = {
            name: measure_quality(
                made[part],
                made["vae"],
                images_per_prompt=images,
                steps=steps,
                eta=eta,
                reward=reward,
            )
            for name, part, steps, eta in (
                ("ode", "misled", 20, 0.0),
                ("sde", "misled", 17, 0.7),
                ("exact_captions_ode", "flow", 20, 0.0),
            )
        }
        measured["rewards"] = measure_reward_reliability(reward)
    return _write_pocket_manifest(
        out, {k: recipe[k] | {"seconds": round(s, 1)} for k, s in seconds.items()}, measured
    )


def main(
    arguments: list[str] | None = None,  # of the command line
) -> None:
    """Train the pocket models from scratch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("pocket-rebuilt"), help="folder that is written"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/pocket"), help="folder of states, to go on from"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of torch; 0: its own choice"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the velocity network; needs a C++ compiler"
    )
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    start = time.time()
    manifest = build_pocket(chosen.out, chosen.work, compiled=chosen.compile)
    score = manifest["quality"]["ode"]
    print(
        f"{chosen.out}: {manifest['bytes'] / 1e6:.1f} MB, {score['geneval']:.1%} of test images right "
        f"(standard error {score['geneval_se']:.1%}), in {(time.time() - start) / 60:.0f} minutes"
    )


if __name__ == "__main__":
    main()
