"A tiny Mask2Former in the names and layout of mmdet, with seeded weights: what a published checkpoint looks like."

import re
from pathlib import Path

import numpy as np
import torch

WIDTH = 8
DEPTHS = (2, 1, 1, 1)
HEADS = (1, 2, 2, 2)
WINDOW = 3
# LAYERS: of the pixel decoder, of the decoder
SIZE = 32
QUERIES = 6
LAYERS = (2, 3)
CLASSES = 80
NUM_HEADS = 4


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as mmdet 3.x has them; checked against mmdet 3.3.0."""
    out: dict[str, tuple[int, ...]] = {}

    def linear(name, rows, columns, bias=True):
        out[f"{name}.weight"] = (rows, columns)
        if bias:
            out[f"{name}.bias"] = (rows,)

    def norm(name, width):
        out[f"{name}.weight"] = out[f"{name}.bias"] = (width,)

    def conv(name, rows, columns, kernel, bias=True):
        out[f"{name}.weight"] = (rows, columns, kernel, kernel)
        if bias:
            out[f"{name}.bias"] = (rows,)

    conv("backbone.patch_embed.projection", WIDTH, 3, 4)
    norm("backbone.patch_embed.norm", WIDTH)
    for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True)):
        width = WIDTH * 2**i
        for j in range(depth):
            block = f"backbone.stages.{i}.blocks.{j}"
            norm(f"{block}.norm1", width)
            out[f"{block}.attn.w_msa.relative_position_bias_table"] = ((2 * WINDOW - 1) ** 2, heads)
            out[f"{block}.attn.w_msa.relative_position_index"] = (WINDOW**2, WINDOW**2)
            linear(f"{block}.attn.w_msa.qkv", 3 * width, width)
            linear(f"{block}.attn.w_msa.proj", width, width)
            norm(f"{block}.norm2", width)
            linear(f"{block}.ffn.layers.0.0", 4 * width, width)
            linear(f"{block}.ffn.layers.1", width, 4 * width)
        if i < 3:
            norm(f"backbone.stages.{i}.downsample.norm", 4 * width)
            linear(f"backbone.stages.{i}.downsample.reduction", 2 * width, 4 * width, bias=False)
        norm(f"backbone.norm{i}", width)
    head = "panoptic_head"
    for i in range(3):
        conv(f"{head}.pixel_decoder.input_convs.{i}.conv", SIZE, WIDTH * 2 ** (3 - i), 1)
        norm(f"{head}.pixel_decoder.input_convs.{i}.gn", SIZE)
    for i in range(LAYERS[0]):
        layer = f"{head}.pixel_decoder.encoder.layers.{i}"
        linear(f"{layer}.self_attn.sampling_offsets", NUM_HEADS * 3 * 4 * 2, SIZE)
        linear(f"{layer}.self_attn.attention_weights", NUM_HEADS * 3 * 4, SIZE)
        linear(f"{layer}.self_attn.value_proj", SIZE, SIZE)
        linear(f"{layer}.self_attn.output_proj", SIZE, SIZE)
        linear(f"{layer}.ffn.layers.0.0", 2 * SIZE, SIZE)
        linear(f"{layer}.ffn.layers.1", SIZE, 2 * SIZE)
        for n in range(2):
            norm(f"{layer}.norms.{n}", SIZE)
    out[f"{head}.pixel_decoder.level_encoding.weight"] = (3, SIZE)
    conv(f"{head}.pixel_decoder.lateral_convs.0.conv", SIZE, WIDTH, 1, bias=False)
    norm(f"{head}.pixel_decoder.lateral_convs.0.gn", SIZE)
    conv(f"{head}.pixel_decoder.output_convs.0.conv", SIZE, SIZE, 3, bias=False)
    norm(f"{head}.pixel_decoder.output_convs.0.gn", SIZE)
    conv(f"{head}.pixel_decoder.mask_feature", SIZE, SIZE, 1)
    for i in range(LAYERS[1]):
        layer = f"{head}.transformer_decoder.layers.{i}"
        for kind in ("self_attn", "cross_attn"):
            out[f"{layer}.{kind}.attn.in_proj_weight"] = (3 * SIZE, SIZE)
            out[f"{layer}.{kind}.attn.in_proj_bias"] = (3 * SIZE,)
            linear(f"{layer}.{kind}.attn.out_proj", SIZE, SIZE)
        linear(f"{layer}.ffn.layers.0.0", 3 * SIZE, SIZE)
        linear(f"{layer}.ffn.layers.1", SIZE, 3 * SIZE)
        for n in range(3):
            norm(f"{layer}.norms.{n}", SIZE)
    norm(f"{head}.transformer_decoder.post_norm", SIZE)
    out |= {
        f"{head}.query_embed.weight": (QUERIES, SIZE),
        f"{head}.query_feat.weight": (QUERIES, SIZE),
        f"{head}.level_embed.weight": (3, SIZE),
    }
    linear(f"{head}.cls_embed", CLASSES + 1, SIZE)
    for n in (0, 2, 4):
        linear(f"{head}.mask_embed.{n}", SIZE, SIZE)
    return out


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded weights, large enough that every one of them shows in the logits."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in sorted(shapes().items()):
        values = rng.standard_normal(shape)
        if name.endswith("relative_position_index"):
            place = np.stack(
                np.meshgrid(np.arange(WINDOW), np.arange(WINDOW), indexing="ij"), -1
            ).reshape(-1, 2)
            ahead = place[:, None] - place + WINDOW - 1
            out[name] = torch.from_numpy(ahead[..., 0] * (2 * WINDOW - 1) + ahead[..., 1])
            continue
        if len(shape) == 1:
            values = 1 + 0.3 * values if name.endswith(".weight") else 0.3 * values
        elif re.search(r"embed\.weight|encoding|query_feat|bias_table", name) and "cls" not in name:
            pass
        else:
            values = values / np.prod(shape[1:]) ** 0.5
        out[name] = torch.from_numpy(values.astype(np.float32))
    for kind in (
        "weight",
        "bias",
    ):  # logits of masks near 1, so that 1e-5 is a tolerance for them too
        out[f"panoptic_head.mask_embed.4.{kind}"] *= 0.1
    return out


def older(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under the names of mmdet 2.x."""
    out = {}
    for name, value in state.items():
        if "transformer_decoder.layers" in name:
            name = name.replace(".cross_attn.", ".attentions.0.").replace(
                ".self_attn.", ".attentions.1."
            )
            name = name.replace(".ffn.", ".ffns.0.")
        elif "pixel_decoder.encoder.layers" in name:
            name = name.replace(".self_attn.", ".attentions.0.").replace(".ffn.", ".ffns.0.")
        out[name] = value
    return out


def pixels(height: int = 96, width: int = 64, seed: int = 1) -> torch.Tensor:
    """A prepared image, (1, 3, H, W)."""
    noise = np.random.default_rng(seed).standard_normal((1, 3, height, width))
    return torch.from_numpy(noise.astype(np.float32))


def save(folder: Path, state: dict[str, torch.Tensor], name: str = "detector.pth") -> Path:
    """A checkpoint file as mmdet publishes them."""
    path = Path(folder) / name
    torch.save({"state_dict": state, "meta": {"CLASSES": ("person",), "epoch": 50}}, path)
    return path


def drawn(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as of a network that saw ten soft discs: classes (10, 81) and masks (10, 24, 16)."""
    rng = np.random.default_rng(seed)
    classes = rng.normal(0, 1, (10, CLASSES + 1))
    classes[np.arange(10), rng.integers(0, CLASSES + 1, 10)] += rng.uniform(2, 8, 10)
    y, x = np.mgrid[:24, :16]
    centres = rng.uniform((2, 2), (22, 14), (10, 2))
    radii = rng.uniform(1, 6, 10)
    far = np.hypot(y - centres[:, :1, None], x - centres[:, 1:, None])
    masks = rng.uniform(0.3, 3, (10, 1, 1)) * (radii[:, None, None] - far)
    return torch.from_numpy(classes.astype(np.float32)), torch.from_numpy(masks.astype(np.float32))


GIVEN = {
    "padded_size": (96, 64),
    "resized_size": (90, 60),
    "image_size": (45, 30),
}  # heights, widths of the golden objects
SIZES = (
    ((60, 90), (80, 120)),
    ((37, 50), (23, 31)),
    ((37, 50), (61, 45)),
    ((128, 128), (64, 64)),
    ((16, 21), (1, 1)),
)


def noise(height: int, width: int) -> np.ndarray:
    """Pixels, (H, W, 3), uint8."""
    return np.random.default_rng(height * 1000 + width).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
