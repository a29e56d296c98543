"""What the shipped pocket files were made with: prompt lists, networks, losses, pictures that have something wrong.

The lessons of nbs/01_pocket show these, research/pocket/train_pocket.py trains with them. The package reads the shipped prompts,
loads the weights with diffusers and transformers, and needs none of it.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from chunk_grpo import InputError
from chunk_grpo.pocket import IMAGE_SIZE, MAX_TOKENS, pocket_model_path
from chunk_grpo.pocket.clip import numpy_to_vae_input, tokenize_captions
from chunk_grpo.pocket.world import (
    _CELL_CENTRES,
    _GRID_RADIUS,
    CAPTION_PREFIXES,
    COUNT_WORDS,
    POCKET_CATEGORIES,
    POCKET_COLOURS,
    PROMPT_WORDS,
    RELATIONS,
    SHAPE_PLURALS,
    SHAPES,
    Scene,
    SceneObject,
    _have_clear_gaps,
    matches_caption,
    parse_caption,
    render_scene,
    sample_scene,
)

_HELDOUT_BODIES = {
    "two_object": (2, 6),
    "counting": (2, 4),
    "colors": (3, 8),
    "position": (8, 24),
    "color_attr": (8, 24),
}  # for validation, and kept back in all
_VALIDATION_PROMPTS, _TEST_PROMPTS = 8, 16  # of each category


def caption_bodies(
    category: str,
) -> list[str]:  # captions without a prefix
    """Return every caption that the grammar allows in a category, without prefixes.

    Two named objects differ in shape, and two named colours are different. Raises InputError for an unknown category.
    """
    pairs = [(a, b) for a in SHAPES for b in SHAPES if a != b]
    said = {
        "single_object": [f"a {s}" for s in SHAPES],
        "two_object": [f"a {a} and a {b}" for a, b in pairs],
        "counting": [f"{n} {p}" for n in COUNT_WORDS for p in SHAPE_PLURALS.values()],
        "colors": [f"a {c} {s}" for c in POCKET_COLOURS for s in SHAPES],
        "position": [f"a {a} {r} a {b}" for a, b in pairs for r in RELATIONS],
        "color_attr": [
            f"a {c} {a} and a {d} {b}"
            for a, b in pairs
            for c in POCKET_COLOURS
            for d in POCKET_COLOURS
            if c != d
        ],
    }
    if category not in said:
        raise InputError(
            f"`category` must be one of {', '.join(POCKET_CATEGORIES)}; got {category!r}"
        )
    return said[category]


def split_category_captions(
    category: str,
    seed: int = 0,
    # what may be trained on, validation and test prompts; in a random order
) -> tuple[list[str], list[str], list[str]]:
    """Split the captions of a category into those for training, validation and test, each in random order.

    The split is by combinations of words, so no combination appears in two lists, whatever the phrase.
    """
    rng = np.random.default_rng([seed, POCKET_CATEGORIES.index(category)])
    body = caption_bodies(category)
    chosen = set()
    if (
        category == "single_object"
    ):  # six bodies only: here the pair of phrase and shape is kept back
        rows = [
            [CAPTION_PREFIXES[i] + b for i in rng.permutation(len(CAPTION_PREFIXES))] for b in body
        ]
        held = [p for row in rows for p in row[:4]]
        rest = [p for row in rows for p in row[4:]]
    else:
        order, (few, cut) = rng.permutation(len(body)), _HELDOUT_BODIES[category]
        held = [p + body[i] for p in CAPTION_PREFIXES for i in order[:cut]]
        rest = [p + body[i] for p in CAPTION_PREFIXES for i in order[cut:]]
        chosen = {p + body[i] for p in CAPTION_PREFIXES for i in order[:few]}
    held, rest = ([x[i] for i in rng.permutation(len(x))] for x in (held, rest))
    validation = [p for p in held if p in chosen] or held[:_VALIDATION_PROMPTS]
    test = [p for p in held if p not in validation]
    return rest, validation[:_VALIDATION_PROMPTS], test[:_TEST_PROMPTS]


def split_prompts(
    train_per_category: int = 96,  # training prompts of each category, at most
    seed: int = 0,
) -> tuple[list[str], list[str], list[str]]:  # training, validation and test prompts
    """Return the training, validation and test prompts, category after category.

    The lists share no prompt and, except for single objects, no combination of words.
    """
    found = [split_category_captions(category, seed) for category in POCKET_CATEGORIES]
    train, validation, test = (
        [p for lists in found for p in lists[i][:train_per_category]] for i in range(3)
    )
    return train, validation, test


def _one_sentence_per_meaning(
    sentences: list[str],  # in the order in which they are preferred
    count: int,
) -> list[str]:
    """Take `count` sentences, choosing from the meanings in turn, so that each has about equally many."""
    waiting: dict[object, list[str]] = {}
    for sentence in sentences:
        waiting.setdefault(parse_caption(sentence), []).append(sentence)
    longest = max(map(len, waiting.values()), default=0)
    in_turn = [
        rest[turn] for turn in range(longest) for rest in waiting.values() if turn < len(rest)
    ]
    return in_turn[:count]


def second_test_prompts(
    # an even number; half of them as far from training as the category allows
    per_category: int = 32,
    seed: int = 0,
) -> list[str]:
    """Return a second list of test prompts, category after category, none of which is in another list.

    Half of a category's prompts have a combination of words that was kept back from every training. The other half has
    one that no list of prompts holds, or where training prompts use up all combinations, one that they hold in other
    phrases. Where the eight phrases are used up, two of them stand in a row.
    """
    lists = split_prompts(seed=seed)
    used = {prompt for prompts in lists for prompt in prompts}
    learned = {parse_caption(prompt) for prompt in lists[0]}
    chosen = {parse_caption(prompt) for prompt in lists[1]}
    phrases = [a + b for a in CAPTION_PREFIXES for b in CAPTION_PREFIXES if a and b and a != b]
    out = []
    for category in POCKET_CATEGORIES:
        rng = np.random.default_rng([seed, POCKET_CATEGORIES.index(category), 192])
        bodies = caption_bodies(category)
        trained_on = {
            parse_caption(caption) for caption in split_category_captions(category, seed)[0]
        }
        old = [phrase + body for body in bodies for phrase in CAPTION_PREFIXES]
        double = [phrase + body for body in bodies for phrase in phrases]
        short = [prompt for prompt in double if len(prompt.split()) <= PROMPT_WORDS]
        # Phrases that every model knows come first.
        free = [str(p) for part in (old, short) for p in rng.permutation(part) if p not in used]
        tuned = chosen if category != "single_object" else set()
        free = [prompt for prompt in free if parse_caption(prompt) not in tuned]
        kept_back = [prompt for prompt in free if parse_caption(prompt) not in trained_on]
        half = _one_sentence_per_meaning(kept_back, per_category // 2)
        rest = [prompt for prompt in free if parse_caption(prompt) in trained_on]
        unlisted = [prompt for prompt in rest if parse_caption(prompt) not in learned]
        out += half + _one_sentence_per_meaning(unlisted or rest, per_category - len(half))
    return out


def hard_negatives(
    caption: str,
) -> list[str]:
    """Return every caption that differs in one word and is false for each picture of `caption`."""

    def variety(text):
        """Return the number of different shapes and of different colours in a caption."""
        shapes, colours = zip(*parse_caption(text).objects, strict=True)
        return len(set(shapes)), len(set(colours))

    words = caption.split()
    start = max(len(prefix.split()) for prefix in CAPTION_PREFIXES if caption.startswith(prefix))
    kinds = [
        list(POCKET_COLOURS),
        list(SHAPES),
        list(SHAPE_PLURALS.values()),
        list(COUNT_WORDS),
        ["left", "right"],
        ["above", "below"],
    ]
    out = []
    for i in range(start, len(words)):
        kind = next((k for k in kinds if words[i] in k), [])
        for word in kind:
            other = " ".join([*words[:i], word, *words[i + 1 :]])
            if word != words[i] and variety(other) == variety(caption):
                out.append(other)
    return out


def mean_category_accuracy(
    verdicts: torch.Tensor | Sequence[float],  # (B,)
    prompts: Sequence[str],
    # mean of the category accuracies; accuracy of each category present
) -> tuple[float, dict[str, float]]:
    """Compute GenEval's score, in which every category has the same weight, whatever its number of prompts."""
    groups: dict[str, list[float]] = {}
    for verdict, prompt in zip(verdicts, prompts, strict=True):
        groups.setdefault(parse_caption(prompt).category, []).append(float(verdict))
    table = {c: sum(groups[c]) / len(groups[c]) for c in POCKET_CATEGORIES if c in groups}
    return sum(table.values()) / len(table), table


def new_tokenizer(
    kind: str,  # "clip" (begin and end marks) or "t5" (end mark)
    more_words: Sequence[
        str
    ] = (),  # additional words, numbered last so that the others keep their numbers
) -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer for the captions of the pocket world."""
    phrases = [
        *CAPTION_PREFIXES,
        *RELATIONS,
        "a and",
        *SHAPES,
        *SHAPE_PLURALS.values(),
        *POCKET_COLOURS,
        *COUNT_WORDS,
    ]
    words = sorted({w for phrase in phrases for w in phrase.split()})
    vocabulary = {
        w: i for i, w in enumerate(["<pad>", "<unk>", "<s>", "</s>", *words, *more_words])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if kind == "clip" else "$A </s>",
        special_tokens=[("<s>", 2), ("</s>", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_TOKENS,
        padding_side="right",
    )


def new_clip(
    vocabulary: int,  # number of words, including the begin and end marks
) -> CLIPModel:
    """Build the image and text towers with a common embedding space of 64 dimensions."""
    text = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=8,
    )
    return CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=64)
    )


def empty_places(
    things: Sequence[SceneObject],  # objects of a scene
) -> list[tuple[float, float]]:  # centres
    """Return the places of the grid at which an object of the same size overlaps none of the others."""
    radius = things[0].radius if things else _GRID_RADIUS
    every = product(_CELL_CENTRES, _CELL_CENTRES)
    return [
        place for place in every if _have_clear_gaps([*things, SceneObject("", "", *place, radius)])
    ]


def make_flawed_scene(
    scene: Scene,
    rng: np.random.Generator,
) -> Scene:  # its caption is false
    """Return a scene with one error: an object missing, added, of another shape or colour, or two exchanged."""
    spec = parse_caption(scene.caption)
    while True:
        new = list(scene.things)
        i = int(rng.integers(len(scene.things)))
        j = (i + 1) % len(new)
        kind = rng.choice(["drop", "add", "shape", "colour", "swap"])
        if kind == "drop":
            del new[i]
        elif kind == "add":
            extra = sample_scene(f"a {rng.choice(SHAPES)}", rng, free=True).things[0]
            twin = new[i].shape if rng.random() < 0.5 else extra.shape
            spots = empty_places(new)
            x, y = (
                spots[rng.integers(len(spots))]
                if spots and rng.random() < 0.75
                else (extra.x, extra.y)
            )
            new.append(replace(extra, x=x, y=y, radius=new[i].radius, shape=twin))
        elif kind == "shape":
            new[i] = replace(new[i], shape=str(rng.choice(SHAPES)))
        elif kind == "colour":
            new[i] = replace(new[i], colour=str(rng.choice(list(POCKET_COLOURS))))
        elif spec.relation:
            new[i], new[j] = (
                replace(new[i], x=new[j].x, y=new[j].y),
                replace(new[j], x=new[i].x, y=new[i].y),
            )
        else:
            new[i], new[j] = (
                replace(new[i], colour=new[j].colour),
                replace(new[j], colour=new[i].colour),
            )
        if not matches_caption(spec, new):
            return replace(scene, things=tuple(new))


def make_spoiled_image(
    scene: Scene,
    rng: np.random.Generator,
) -> Image.Image:  # the caption of the scene is false for it
    """Draw a picture with one object that is no shape of the world: cut, merged with another shape, or half recoloured."""
    things = list(scene.things)
    i = int(rng.integers(len(scene.things)))
    one = things[i]
    other = replace(
        one,
        shape=str(rng.choice([s for s in SHAPES if s != one.shape])),
        colour=one.colour if rng.random() < 0.6 else str(rng.choice(list(POCKET_COLOURS))),
    )
    if rng.random() < 0.4:  # two shapes almost in one place
        shift = rng.uniform(0.3, 0.9, 2) * one.radius * rng.choice([-1, 1], 2)
        return render_scene(
            replace(scene, things=(*things, replace(other, x=one.x + shift[0], y=one.y + shift[1])))
        )
    without = replace(scene, things=tuple(t for j, t in enumerate(things) if j != i))
    a = np.asarray(render_scene(scene)).copy()
    b = np.asarray(render_scene(without))
    if rng.random() < 0.5:
        b = np.asarray(render_scene(replace(without, things=(*without.things, other))))
    angle = rng.uniform(0, 2 * np.pi)
    cut = rng.uniform(-0.35, 0.35) * one.radius
    y, x = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE] + 0.5
    half = (x - one.x) * np.cos(angle) + (y - one.y) * np.sin(angle) > cut
    a[half] = b[half]
    return Image.fromarray(a)


def augment_images(
    x: torch.Tensor,  # (B, 3, 64, 64) in [-1, 1]
    generator: torch.Generator,
) -> torch.Tensor:  # the same shape
    """Apply blur, noise and a change of brightness, each with a random strength."""
    u = torch.rand(4, len(x), 1, 1, 1, generator=generator)
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    x = torch.lerp(x, blurred, 0.9 * u[0] * (u[1] < 0.5))
    return x + 0.05 * u[2] * torch.randn(x.shape, generator=generator) + 0.1 * (u[3] - 0.5)


def clip_loss(
    images: torch.Tensor,  # (2 N, D): N true pictures, then one with a flaw for each
    texts: torch.Tensor,  # (N + N M, D): N captions, then M false ones for each
    truth: torch.Tensor,  # (N, N) bool: caption n holds in true picture m
    scale: torch.Tensor,  # inverse temperature
) -> torch.Tensor:  # scalar
    """Compute CLIP's two cross-entropies with hard negatives on both sides.

    Other true pairs are left out of the denominators.
    """
    n = len(truth)
    also = truth & ~torch.eye(n, dtype=torch.bool)
    to_image = scale * texts[:n] @ images.T
    to_text = scale * images[:n] @ texts.T
    to_image = torch.cat([to_image[:, :n].masked_fill(also, -torch.inf), to_image[:, n:]], 1)
    to_text = torch.cat([to_text[:, :n].masked_fill(also.T, -torch.inf), to_text[:, n:]], 1)
    target = torch.arange(n)
    return (F.cross_entropy(to_image, target) + F.cross_entropy(to_text, target)) / 2


def new_vae() -> AutoencoderKL:
    """Build an autoencoder that compresses by a factor of 16: from 64 x 64 pixels to 8 x 4 x 4 latents."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5,
        block_out_channels=(8, 24, 48, 64, 64),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def vae_loss(
    vae: AutoencoderKL,
    x: torch.Tensor,  # pictures (B, 3, 64, 64) in [-1, 1]
    beta: float,  # weight of the KL term per latent dimension
    noise: float,  # largest standard deviation of noise on the latents, relative to theirs
    generator: torch.Generator,
) -> tuple[torch.Tensor, float]:  # the loss; the signal-to-noise ratio of the decoded picture, dB
    """Compute the L1 and squared errors of a decoded noisy code, plus the KL term."""
    code = vae.encode(x).latent_dist
    level = noise * code.mean.detach().std() * torch.rand(len(x), 1, 1, 1, generator=generator)
    z = code.sample(generator=generator)
    y = vae.decode(z + level * torch.randn(z.shape, generator=generator)).sample
    kl = 0.5 * (code.mean**2 + code.var - 1 - code.logvar).mean()
    error = F.mse_loss(y.detach().clamp(-1, 1), x).item() / 4
    return F.l1_loss(y, x) + 2 * F.mse_loss(y, x) + beta * kl, -10 * math.log10(error)


class PocketFlow(nn.Module):
    """A velocity network and text encoders that are trained together."""

    def __init__(self):
        """Build the tokenizers, the velocity network and the text encoders with random weights."""
        super().__init__()
        self.tokenizers = {"clip": new_tokenizer("clip"), "t5": new_tokenizer("t5")}
        words = len(self.tokenizers["t5"])
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=32,
            num_layers=1,
            num_single_layers=3,
            attention_head_dim=32,
            num_attention_heads=3,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        self.t5 = T5EncoderModel(
            T5Config(
                vocab_size=words,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=1,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=0,
                eos_token_id=3,
                decoder_start_token_id=0,
                feed_forward_proj="gated-gelu",
            )
        )
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=words,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                num_attention_heads=4,
                max_position_embeddings=MAX_TOKENS,
                pad_token_id=0,
                bos_token_id=2,
                eos_token_id=3,
                projection_dim=64,
            )
        )
        self.register_buffer(
            "ids", FluxPipeline._prepare_latent_image_ids(1, 2, 2, "cpu", torch.float32), False
        )

    def forward(
        self,
        x: torch.Tensor,  # latents, (B, 4, 32)
        sigma: torch.Tensor,  # noise levels, (B,)
        t5_tokens: torch.Tensor,  # (B, MAX_TOKENS)
        clip_tokens: torch.Tensor,  # (B, MAX_TOKENS)
    ) -> torch.Tensor:  # velocity, (B, 4, 32)
        """Return the velocity at a noise level, given the prompt's tokens."""
        return self.transformer(
            hidden_states=x,
            timestep=sigma,
            encoder_hidden_states=self.t5(t5_tokens).last_hidden_state,
            pooled_projections=self.clip(clip_tokens).pooler_output,
            img_ids=self.ids,
            txt_ids=self.ids.new_zeros(t5_tokens.shape[1], 3),
            return_dict=False,
        )[0]


def pack_flow_latents(
    z: torch.Tensor,  # (B, C, H, W)
) -> torch.Tensor:  # (B, H/2 * W/2, 4 C)
    """Pack patches of 2 x 2 latents into tokens, in FLUX's order."""
    b, c, h, w = z.shape
    return (
        z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)
    )


def unpack_flow_latents(
    x: torch.Tensor,  # (B, 4, 32)
) -> torch.Tensor:  # (B, 8, 4, 4)
    """Unpack tokens into latents; the inverse of `pack_flow_latents`."""
    return x.view(len(x), 2, 2, 8, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(len(x), 8, 4, 4)


@torch.no_grad()
def encode_in_batches(
    vae: AutoencoderKL,
    pictures: np.ndarray,  # (N, 64, 64, 3), uint8
    batch: int = 250,  # pictures encoded at once
) -> torch.Tensor:  # (N, 8, 4, 4)
    """Return the mean latents of pictures, neither shifted nor scaled."""
    latents = []
    for start in range(0, len(pictures), batch):
        x = numpy_to_vae_input(pictures[start : start + batch])
        latents.append(vae.encode(x).latent_dist.mean)
    return torch.cat(latents)


def flow_loss(
    model: nn.Module,
    x0: torch.Tensor,  # data latents, (B, 4, 32)
    t5_tokens: torch.Tensor,
    clip_tokens: torch.Tensor,
    generator: torch.Generator,
    shift: float = 3.0,
) -> torch.Tensor:  # scalar
    """Compute the flow-matching loss, equations (1) and (2)."""
    u = torch.rand(len(x0), generator=generator)
    sigma = shift * u / (1 + (shift - 1) * u)
    x1 = torch.randn(x0.shape, generator=generator)
    t = sigma[:, None, None]
    v = model((1 - t) * x0 + t * x1, sigma, t5_tokens, clip_tokens)
    return F.mse_loss(v, x1 - x0)


@torch.no_grad()
def sample_flow_images(
    model: PocketFlow,
    vae: AutoencoderKL,
    captions: list[str],
    steps: int = 20,
    eta: float = 0.0,  # 0: Euler on the ODE; above: the flow SDE, last step without noise
    shift: float = 3.0,
    seed: int = 0,
) -> torch.Tensor:  # images (B, 3, 64, 64) in [0, 1]
    """Sample an image for each caption, equations (3) and (7)."""
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenize_captions(model.tokenizers[kind], captions) for kind in ("t5", "clip")]
    sigmas = [shift * u / (1 + (shift - 1) * u) for u in torch.linspace(1, 0, steps + 1).tolist()]
    x = torch.randn(len(captions), 4, 32, generator=generator)
    for i, (now, after) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        v = model(x, torch.full((len(x),), now), *ids)
        d = after - now
        s = eta * math.sqrt(now / (1 - (now if now < 1 else sigmas[1])))
        x = x + (v + s**2 / (2 * now) * (x + (1 - now) * v)) * d
        if eta and i + 1 < steps:
            x = x + s * math.sqrt(-d) * torch.randn(x.shape, generator=generator)
    z = unpack_flow_latents(x) / vae.config.scaling_factor + vae.config.shift_factor
    return torch.cat([vae.decode(part).sample for part in z.split(48)]).clamp(-1, 1) / 2 + 0.5


def save_flow(
    model: PocketFlow,
    vae: AutoencoderKL,
    folder: Path,  # written as `save_pretrained` writes it
    pipeline_class: type[DiffusionPipeline] = FluxPipeline,  # or FluxKontextPipeline
    shift: float = 3.0,  # of the noise levels
) -> None:
    """Save a velocity network, its text encoders and an autoencoder as a pipeline of diffusers."""
    pipeline_class(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False),
        vae=vae.to(memory_format=torch.contiguous_format),
        transformer=model.transformer,
        text_encoder=model.clip,
        tokenizer=model.tokenizers["clip"],
        text_encoder_2=model.t5,
        tokenizer_2=model.tokenizers["t5"],
    ).save_pretrained(folder, safe_serialization=True)


def describe_files(
    files: Iterable[Path],
    folder: Path,  # that contains them
) -> dict:  # "bytes" of all files; "sha256" of each by its path relative to the folder
    """Return the size and the hashes of files, as a manifest records them."""
    files = list(files)
    hashes = {}
    for file in files:
        hashes[file.relative_to(folder).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"bytes": sum(file.stat().st_size for file in files), "sha256": hashes}


def load_flow(
    folder: Path | None = None,  # folder of a saved pipeline; None: the shipped one
) -> tuple[PocketFlow, AutoencoderKL]:
    """Load the parts of a saved pipeline as a `PocketFlow` and its autoencoder."""
    pipeline = FluxPipeline.from_pretrained(folder or pocket_model_path())
    model = PocketFlow()
    model.transformer, model.clip, model.t5 = (
        pipeline.transformer,
        pipeline.text_encoder,
        pipeline.text_encoder_2,
    )
    return model.eval(), pipeline.vae
