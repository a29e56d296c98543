"""Convert the detector of GenEval from mmdet's checkpoint to a transformers folder.

    python tools/convert_detector.py mask2former.pth detector

mmdet published the weights twice: for its versions 2.x (`..._lsj_8x2_50e_coco_20220504_001756-743b7d99.pth`) and,
renamed, for 3.x (`..._8xb2-lsj-50e_coco_20220504_001756-c9d0c4f2.pth`). The end of a name is the start of the file's
sha256. 3.x renamed attention and feed-forward layers: 2.x numbers attentions in the order in which they run.

Names are the smaller half: a weight of the right shape in the wrong order loads silently and detects nothing.
Three layouts differ.

1. Patch merging. Four neighbouring patches become one, their channels side by side. mmdet unfolds them, so a channel
   has number 4 c + 2 row + column; transformers lays whole patches one after the other, C (2 column + row) + c.
2. Queries, keys and values lie in one matrix in mmdet and in three in transformers, except in the decoder's
   cross-attention, which is torch's own `MultiheadAttention` on both sides.
3. The mask's three linear layers have the ReLUs between them in mmdet, at 0, 2 and 4.

All sizes are read from the weights. The decoder's heads leave no trace in the shapes: they are taken to be as many as
the pixel decoder's, as in the published configuration (8 and 8).
"""

import argparse
import hashlib
import pickle
import re
import sys
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

from chunk_grpo import InputError
from chunk_grpo.core.files import atomic_write, check_writable, write_json

OFFICIAL_CHECKPOINTS = {
    "743b7d99": "mmdet 2.x",
    "c9d0c4f2": "mmdet 3.x",
}  # start of the sha256: where from
MMDET_2_TO_3 = (  # names of mmdet 2.x -> 3.x
    (r"(pixel_decoder\.encoder\.layers\.\d+)\.attentions\.0\.", r"\1.self_attn."),
    (r"(transformer_decoder\.layers\.\d+)\.attentions\.0\.", r"\1.cross_attn."),
    (r"(transformer_decoder\.layers\.\d+)\.attentions\.1\.", r"\1.self_attn."),
    (r"(coder\.(?:encoder\.)?layers\.\d+)\.ffns\.0\.", r"\1.ffn."),
)


def to_mmdet_3_name(
    name: str,  # name of a weight in mmdet 2.x or 3.x
) -> str:
    """Convert the name of a weight to that of mmdet 3.x."""
    for old, new in MMDET_2_TO_3:
        name = re.sub(old, new, name)
    return name


ENCODER, BLOCK = "model.pixel_level_module.encoder", r"backbone\.stages\.(\d+)\.blocks\.(\d+)"

TO_BLOCK = rf"{ENCODER}.swin.encoder.layers.\1.blocks.\2"

BACKBONE_NAMES = (  # names of mmdet 3.x -> of transformers, without what `convert_weight` treats first
    (
        r"backbone\.patch_embed\.projection",
        f"{ENCODER}.swin.embeddings.patch_embeddings.projection",
    ),
    (r"backbone\.patch_embed\.norm", f"{ENCODER}.swin.embeddings.norm"),
    (rf"{BLOCK}\.norm1", rf"{TO_BLOCK}.layernorm_before"),
    (rf"{BLOCK}\.norm2", rf"{TO_BLOCK}.layernorm_after"),
    (rf"{BLOCK}\.attn\.w_msa\.proj", rf"{TO_BLOCK}.attention.o_proj"),
    (
        rf"{BLOCK}\.attn\.w_msa\.(relative_position_bias)_table",
        rf"{TO_BLOCK}.attention.\3.\3_table",
    ),
    (rf"{BLOCK}\.ffn\.layers\.0\.0", rf"{TO_BLOCK}.mlp.fc1"),
    (rf"{BLOCK}\.ffn\.layers\.1", rf"{TO_BLOCK}.mlp.fc2"),
)


def translate_name(
    names: tuple[tuple[str, str], ...],  # pairs of a pattern of the old name and the new name
    name: str,  # name of a weight
) -> str | None:
    """Return the new name of a weight; None if no pattern matches its beginning."""
    for old, new in names:
        if re.match(rf"{old}(?=$|\.|_)", name):
            return re.sub("^" + old, new, name)
    return None


PIXEL, PIXEL_HEAD = "model.pixel_level_module.decoder", r"panoptic_head\.pixel_decoder"

PIXEL_LAYER = rf"{PIXEL_HEAD}\.encoder\.layers\.(\d+)"
TO_PIXEL_LAYER = rf"{PIXEL}.encoder.layers.\1"

PIXEL_DECODER_NAMES = (
    (rf"{PIXEL_HEAD}\.input_convs\.(\d)\.conv", rf"{PIXEL}.input_projections.\1.0"),
    (rf"{PIXEL_HEAD}\.input_convs\.(\d)\.gn", rf"{PIXEL}.input_projections.\1.1"),
    (rf"{PIXEL_HEAD}\.lateral_convs\.0\.conv", f"{PIXEL}.adapter_1.0"),
    (rf"{PIXEL_HEAD}\.lateral_convs\.0\.gn", f"{PIXEL}.adapter_1.1"),
    (rf"{PIXEL_HEAD}\.output_convs\.0\.conv", f"{PIXEL}.layer_1.0"),
    (rf"{PIXEL_HEAD}\.output_convs\.0\.gn", f"{PIXEL}.layer_1.1"),
    (rf"{PIXEL_HEAD}\.level_encoding\.weight", f"{PIXEL}.level_embed"),
    (rf"{PIXEL_HEAD}\.mask_feature", f"{PIXEL}.mask_projection"),
    (rf"{PIXEL_LAYER}\.self_attn", rf"{TO_PIXEL_LAYER}.self_attn"),
    (rf"{PIXEL_LAYER}\.norms\.0", rf"{TO_PIXEL_LAYER}.self_attn_layer_norm"),
    (rf"{PIXEL_LAYER}\.norms\.1", rf"{TO_PIXEL_LAYER}.final_layer_norm"),
    (rf"{PIXEL_LAYER}\.ffn\.layers\.0\.0", rf"{TO_PIXEL_LAYER}.fc1"),
    (rf"{PIXEL_LAYER}\.ffn\.layers\.1", rf"{TO_PIXEL_LAYER}.fc2"),
)

DECODER, HEAD = "model.transformer_module", r"panoptic_head"

LAYER = rf"{HEAD}\.transformer_decoder\.layers\.(\d+)"
TO_LAYER = rf"{DECODER}.decoder.layers.\1"

DECODER_NAMES = (
    (rf"{HEAD}\.query_embed", f"{DECODER}.queries_embedder"),
    (rf"{HEAD}\.query_feat", f"{DECODER}.queries_features"),
    (rf"{HEAD}\.level_embed", f"{DECODER}.level_embed"),
    (rf"{LAYER}\.cross_attn\.attn", rf"{TO_LAYER}.cross_attn"),
    (rf"{LAYER}\.self_attn\.attn", rf"{TO_LAYER}.self_attn"),
    (rf"{LAYER}\.norms\.0", rf"{TO_LAYER}.cross_attn_layer_norm"),
    (rf"{LAYER}\.norms\.1", rf"{TO_LAYER}.self_attn_layer_norm"),
    (rf"{LAYER}\.norms\.2", rf"{TO_LAYER}.final_layer_norm"),
    (rf"{LAYER}\.ffn\.layers\.0\.0", rf"{TO_LAYER}.fc1"),
    (rf"{LAYER}\.ffn\.layers\.1", rf"{TO_LAYER}.fc2"),
    (rf"{HEAD}\.transformer_decoder\.post_norm", f"{DECODER}.decoder.layernorm"),
    (rf"{HEAD}\.cls_embed", "class_predictor"),
)

MMDET_TO_TRANSFORMERS = BACKBONE_NAMES + PIXEL_DECODER_NAMES + DECODER_NAMES

UNUSED_KEYS = (
    f"{ENCODER}.swin.layernorm.weight",
    f"{ENCODER}.swin.layernorm.bias",
    "criterion.empty_weight",
)


def reorder_patch_channels(
    x: Tensor,  # (..., 4 C) or (4 C,), in the order of mmdet
) -> Tensor:  # the same shape
    """Reorder the channels of four merged patches from the order of mmdet to that of transformers."""
    return x.reshape(*x.shape[:-1], -1, 4)[..., [0, 2, 1, 3]].transpose(-1, -2).reshape(x.shape)


def convert_weight(
    name: str,  # name in mmdet 3.x
    value: Tensor,
) -> dict[str, Tensor]:
    """Convert one weight, and return the resulting weights, keyed by the names of transformers; empty if it is unknown."""
    if found := re.fullmatch(rf"{BLOCK}\.attn\.w_msa\.qkv\.(weight|bias)", name):
        start = found.expand(TO_BLOCK) + ".attention"
        return {
            f"{start}.{k}_proj.{found[3]}": part.clone()
            for k, part in zip("qkv", value.chunk(3), strict=True)
        }
    if found := re.fullmatch(rf"{LAYER}\.self_attn\.attn\.in_proj_(weight|bias)", name):
        start = f"{DECODER}.decoder.layers.{found[1]}.self_attn"
        return {
            f"{start}.{k}_proj.{found[2]}": part.clone()
            for k, part in zip("qkv", value.chunk(3), strict=True)
        }
    if found := re.fullmatch(
        r"backbone\.stages\.(\d+)\.downsample\.((norm|reduction)\.(weight|bias))", name
    ):
        return {
            f"{ENCODER}.swin.encoder.layers.{found[1]}.downsample.{found[2]}": reorder_patch_channels(
                value
            )
        }
    if found := re.fullmatch(r"backbone\.norm(\d)\.(weight|bias)", name):
        return {f"{ENCODER}.hidden_states_norms.stage{int(found[1]) + 1}.{found[2]}": value}
    if found := re.fullmatch(rf"{HEAD}\.mask_embed\.([024])\.(weight|bias)", name):
        return {
            f"{DECODER}.decoder.mask_predictor.mask_embedder.{int(found[1]) // 2}.0.{found[2]}": value
        }
    new = translate_name(MMDET_TO_TRANSFORMERS, name)
    return {new: value} if new else {}


def weight_shape(
    weights: dict[str, Tensor],  # keyed by the names of mmdet 3.x
    name: str,
) -> tuple[int, ...]:
    """Return the shape of a weight; raise InputError if there is no weight of this name."""
    if name not in weights:
        raise InputError(
            f"source: the checkpoint has no weight {name!r}; a Mask2Former with a Swin backbone from "
            f"mmdet is needed."
        )
    return tuple(weights[name].shape)


def layer_count(
    weights: dict[str, Tensor],
    pattern: str,  # regular expression of a name, whose first group is the number of the layer
) -> int:
    """Return the number of layers in the names of the weights."""
    return 1 + max((int(m[1]) for name in weights if (m := re.match(pattern, name))), default=-1)


def infer_swin_config(
    weights: dict[str, Tensor],  # keyed by the names of mmdet 3.x
) -> dict:  # keyword arguments of transformers' SwinConfig
    """Infer the sizes of the backbone from the shapes of the weights."""
    bias_table = "backbone.stages.{}.blocks.0.attn.w_msa.relative_position_bias_table"
    stages = range(layer_count(weights, r"backbone\.stages\.(\d+)\."))
    patches = weight_shape(weights, "backbone.patch_embed.projection.weight")
    return {
        "model_type": "swin",
        "embed_dim": patches[0],
        "patch_size": patches[-1],
        "drop_path_rate": 0.0,
        "depths": [
            layer_count(weights, rf"backbone\.stages\.{i}\.blocks\.(\d+)\.") for i in stages
        ],
        "num_heads": [weight_shape(weights, bias_table.format(i))[1] for i in stages],
        "window_size": (isqrt(weight_shape(weights, bias_table.format(0))[0]) + 1) // 2,
        "out_features": [f"stage{i + 1}" for i in stages],
    }


def infer_config(
    weights: dict[str, Tensor],  # keyed by the names of mmdet 3.x
) -> Mask2FormerConfig:
    """Infer the network's configuration from its weights; raise InputError if they belong to another network."""
    pixel, decoder = "panoptic_head.pixel_decoder", "panoptic_head.transformer_decoder.layers"
    backbone = infer_swin_config(weights)
    layer = f"{pixel}.encoder.layers.0"
    masks, features = weight_shape(weights, f"{pixel}.mask_feature.weight")[:2]
    queries, hidden = weight_shape(weights, "panoptic_head.query_feat.weight")
    return Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=features,
        mask_feature_size=masks,
        hidden_dim=hidden,
        num_queries=queries,
        num_attention_heads=weight_shape(weights, f"{layer}.self_attn.sampling_offsets.weight")[0]
        // (3 * 4 * 2),
        encoder_layers=layer_count(weights, rf"{re.escape(pixel)}\.encoder\.layers\.(\d+)\."),
        encoder_feedforward_dim=weight_shape(weights, f"{layer}.ffn.layers.0.0.weight")[0],
        decoder_layers=layer_count(weights, rf"{re.escape(decoder)}\.(\d+)\.")
        + 1,  # the queries count as the first
        dim_feedforward=weight_shape(weights, f"{decoder}.0.ffn.layers.0.0.weight")[0],
        num_labels=weight_shape(weights, "panoptic_head.cls_embed.weight")[0] - 1,
    )


def convert_state_dict(
    weights: dict[str, Tensor],  # keyed by the names of mmdet 3.x
    own: dict[str, Tensor],  # state dict of the network, with the names and shapes that it needs
) -> dict[str, Tensor]:  # keyed by the names of transformers
    """Convert all weights; raise InputError for the first one that is unknown, missing or has another shape."""
    new, unknown, misfits = {}, [], []
    for name, value in weights.items():
        found = convert_weight(name, value)
        misfits += [
            f"{name} {tuple(value.shape)}"
            for to, part in found.items()
            if to in own and own[to].shape != part.shape
        ]
        if not found or not found.keys() <= own.keys():
            unknown.append(name)
        new |= found
    missing = [name for name in own if name not in new and name not in UNUSED_KEYS]
    for what, names in {
        "unknown": unknown,
        "missing": missing,
        "of another shape": misfits,
    }.items():
        if names:
            raise InputError(
                f"source: {len(names)} weights are {what}, first {', '.join(names[:3])}; a Mask2Former "
                f"with a Swin backbone from mmdet 2.x or 3.x is needed."
            )
    return new


def check_position_index(
    model: Mask2FormerForUniversalSegmentation,
    index: dict[str, Tensor],  # relative position indices, keyed by the names of mmdet 3.x
) -> None:
    """Raise InputError if the checkpoint numbers relative positions in another order than the network."""
    layers = model.model.pixel_level_module.encoder.swin.encoder.layers
    for name, value in index.items():
        stage, block = (int(x) for x in re.match(BLOCK, name).groups())
        bias = layers[stage].blocks[block].attention.relative_position_bias
        if not torch.equal(value.flatten(), bias.relative_position_index.flatten()):
            raise InputError(
                f"source: {name} counts relative positions in another order than Swin does."
            )


def build_mask2former(
    weights: dict[str, Tensor],  # keyed by the names of mmdet 2.x or 3.x
) -> Mask2FormerForUniversalSegmentation:
    """Build the network with these weights; raise InputError if they do not fit."""
    weights = {to_mmdet_3_name(name): value for name, value in weights.items()}
    model = Mask2FormerForUniversalSegmentation(infer_config(weights)).eval()
    index = {
        name: weights.pop(name)
        for name in list(weights)
        if name.endswith(".relative_position_index")
    }
    new = convert_state_dict(weights, model.state_dict())
    check_position_index(model, index)
    model.load_state_dict(new, strict=False)
    return model.requires_grad_(False)


def read_mmdet_checkpoint(
    source: Path,  # mmdet checkpoint, .pth
) -> dict[str, Tensor]:  # keyed by the names of mmdet
    """Read the weights of a checkpoint; raise InputError if it contains anything but tensors."""
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(
            f"source: {source} cannot be read as weights alone ({str(error).splitlines()[0]}); a "
            f"checkpoint of plain tensors is needed."
        ) from None
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not weights or not all(isinstance(x, Tensor) for x in weights.values()):
        raise InputError(
            f"source: {source} holds no table of weights; a checkpoint that mmdet published is needed."
        )
    return weights


def convert_mmdet_checkpoint(
    source: str | Path,  # mmdet checkpoint, .pth
    out: str | Path,  # folder to create
) -> dict:  # keyed by source, sha256, official and layout
    """Convert a checkpoint of mmdet to a transformers folder; raise InputError if it does not fit."""
    source, out = Path(source), Path(out)
    if not source.is_file():
        raise InputError(
            f"source: {source} is no file; the checkpoint that mmdet published is needed."
        )
    if out.exists():
        raise InputError(f"out: {out} exists already; a new folder is needed.")
    check_writable(out)
    with open(source, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    weights = read_mmdet_checkpoint(source)
    layout = "mmdet 2.x" if any(".attentions." in name for name in weights) else "mmdet 3.x"
    note = {
        "source": source.name,
        "sha256": digest,
        "official": digest[:8] in OFFICIAL_CHECKPOINTS,
        "layout": layout,
    }
    model = build_mask2former(weights)
    with atomic_write(out) as folder:
        model.save_pretrained(folder)
        write_json(folder / "source.json", note)
    return note


def main(arguments: list[str] | None = None) -> int:  # exit status
    """Convert a checkpoint; return 2 and print one sentence if it does not fit."""
    parser = argparse.ArgumentParser(prog="convert_detector", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="mmdet's Mask2Former checkpoint, a .pth file")
    parser.add_argument("out", type=Path, help="the folder to make")
    chosen = parser.parse_args(arguments)
    try:
        note = convert_mmdet_checkpoint(chosen.source, chosen.out)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"detector: {chosen.out}, {'official' if note['official'] else 'not official'}, sha256 {note['sha256']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
