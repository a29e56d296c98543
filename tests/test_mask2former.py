"""The converted detector against mmdet itself: logits, objects and resized pixels in `golden_mmdet.json`.

The golden numbers were computed by mmdet 3.3.0 with mmcv 2.1.0 and OpenCV 5.0.0, in an environment of their own,
from the seeded weights of `tiny_mmdet.py`, which mmdet loaded with `strict=True`: so names and shapes are mmdet's as
well. mmcv's compiled operations were absent; its own torch version of deformable attention ran in their place. The
names of mmdet 2.x are from its source; no 2.x was run.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import tiny_mmdet as tiny
import torch
from commands import call

from chunk_grpo import InputError
from chunk_grpo.evaluation import detector

GOLDEN = json.loads((Path(__file__).parent / "golden_mmdet.json").read_text())
TOOL = Path(__file__).resolve().parents[1] / "tools/convert_detector.py"
spec = importlib.util.spec_from_file_location("convert_detector", TOOL)
convert = importlib.util.module_from_spec(spec)
spec.loader.exec_module(convert)


@pytest.fixture(scope="module")
def state():
    return tiny.weights()


def logits(model):
    with torch.no_grad():
        out = model(pixel_values=tiny.pixels())
    return out.class_queries_logits[0], out.masks_queries_logits[0].flatten(1)[:, ::5]


def distance(model) -> float:
    """The largest difference of the logits to mmdet's."""
    classes, masks = logits(model)
    return max(
        (classes - torch.tensor(GOLDEN["classes"])).abs().max().item(),
        (masks - torch.tensor(GOLDEN["masks"])).abs().max().item(),
    )


@pytest.mark.parametrize("layout", ["mmdet 2.x", "mmdet 3.x"])
def test_converted_logits_are_mmdets(tmp_path, state, layout):
    given = tiny.older(state) if layout == "mmdet 2.x" else state
    note = convert.convert_mmdet_checkpoint(tiny.save(tmp_path, given), tmp_path / "detector")
    assert note["layout"] == layout and note["official"] is False
    model, label = detector.load_detector(tmp_path / "detector")
    assert distance(model) < 1e-5
    assert label == f"not official: detector.pth, sha256 {note['sha256'][:16]}"


def swapped_merging(state):
    return {
        k: v.reshape(*v.shape[:-1], -1, 4)[..., [0, 2, 1, 3]].reshape(v.shape)
        if "downsample" in k
        else v
        for k, v in state.items()
    }


def swapped_rows(word):
    """Queries, keys and values in another order."""
    return lambda state: {
        k: torch.cat([v.chunk(3)[i] for i in (1, 0, 2)]) if word in k else v
        for k, v in state.items()
    }


def swapped_names(one, other):
    return lambda state: {
        k.replace(one, "@").replace(other, one).replace("@", other): v for k, v in state.items()
    }


@pytest.mark.parametrize(
    "spoil",
    [
        swapped_merging,
        swapped_rows("w_msa.qkv.weight"),
        swapped_rows("self_attn.attn.in_proj_weight"),
        swapped_rows("cross_attn.attn.in_proj_weight"),
        swapped_names(".cross_attn.attn.", ".self_attn.attn."),
        swapped_names("decoder.layers.1.norms.0", "decoder.layers.1.norms.1"),
        swapped_names("query_embed", "query_feat"),
        swapped_names("level_embed", "pixel_decoder.level_encoding"),
        swapped_names("mask_embed.0", "mask_embed.2"),
    ],
    ids=["merging", "qkv", "self", "cross", "attentions", "norms", "queries", "levels", "mask"],
)
def test_golden_logits_would_show_a_wrong_layout(state, spoil):
    assert distance(convert.build_mask2former(spoil(state))) > 1e-3


def test_objects_are_mmdets():
    classes, masks = tiny.drawn()
    found = detector._post_process(classes, masks, **tiny.GIVEN, min_score=0.01)
    assert len(found) == len(GOLDEN["objects"]) > 10
    for ours, theirs in zip(found, GOLDEN["objects"], strict=True):
        assert ours.label == theirs["label"] and list(ours.box) == theirs["box"]
        assert ours.score == pytest.approx(theirs["score"], abs=1e-6)
        assert ours.mask.shape == tiny.GIVEN["image_size"] and ours.mask.sum() == theirs["pixels"]
    few = detector._post_process(classes, masks, **tiny.GIVEN, min_score=0.3)
    assert few == [one for one in found if one.score > 0.3] != found


@pytest.mark.parametrize("old,new", tiny.SIZES)
def test_resized_pixels_are_opencvs(old, new):
    ours = detector._resize_like_opencv(tiny.noise(*old), new[1], new[0])
    key = "{}x{} {}x{}".format(*old, *new)
    assert hashlib.sha256(ours.tobytes()).hexdigest() == GOLDEN["resized"][key]


def test_wrong_files_are_told(tmp_path, state):
    def refused(content, name):
        torch.save(content, tmp_path / name)
        return convert.convert_mmdet_checkpoint(tmp_path / name, tmp_path / "out")

    with pytest.raises(
        InputError, match="2 weights are unknown, first backbone.norm8.weight, backbone.norm8.bias;"
    ):
        refused(
            state | {"backbone.norm8.weight": torch.ones(2), "backbone.norm8.bias": torch.ones(2)},
            "a.pth",
        )
    lost = "panoptic_head.transformer_decoder.layers.1.self_attn.attn.out_proj.bias"
    with pytest.raises(
        InputError, match="1 weights are missing, first model.transformer_module.decoder.layers.1"
    ):
        refused({k: v for k, v in state.items() if k != lost}, "b.pth")
    with pytest.raises(
        InputError, match="1 weights are of another shape, first panoptic_head.query_embed.weight"
    ):
        refused(state | {"panoptic_head.query_embed.weight": torch.ones(3, 3)}, "c.pth")
    with pytest.raises(InputError, match="has no weight 'backbone.patch_embed.projection.weight'"):
        refused({"layer1.weight": torch.ones(2)}, "d.pth")
    with pytest.raises(InputError, match="holds no table of weights"):
        refused([1, 2], "e.pth")
    (tmp_path / "f.pth").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(InputError, match="f.pth cannot be read as weights alone"):
        convert.convert_mmdet_checkpoint(tmp_path / "f.pth", tmp_path / "out")
    with pytest.raises(InputError, match="cannot be read as weights alone"):
        refused({"hook": print}, "g.pth")
    index = "backbone.stages.0.blocks.0.attn.w_msa.relative_position_index"
    with pytest.raises(InputError, match="counts relative positions in another order"):
        refused(state | {index: state[index].flip(0)}, "h.pth")
    assert not (tmp_path / "out").exists(), "a failed conversion leaves nothing"


def test_a_detector_of_other_classes_is_refused(tmp_path, state):
    other = {k: v[:21] if "cls_embed" in k else v for k, v in state.items()}
    convert.convert_mmdet_checkpoint(tiny.save(tmp_path, other), tmp_path / "detector")
    with pytest.raises(
        InputError, match="^`detector` must detect the 80 classes of COCO; .* detects 20"
    ):
        detector.load_detector(tmp_path / "detector")


def test_the_tool_as_a_user_starts_it(tmp_path, state):
    source = tiny.save(tmp_path, state)

    def start(*words):
        done = call(*words, module=str(TOOL))
        return done.returncode, done.stdout + done.stderr

    code, said = start(source, tmp_path / "detector")
    assert code == 0 and f"detector: {tmp_path / 'detector'}, not official" in said
    assert {p.name for p in (tmp_path / "detector").iterdir()} == {
        "config.json",
        "model.safetensors",
        "source.json",
    }
    for words, why in (
        ((source, tmp_path / "detector"), "exists already"),
        ((tmp_path / "no.pth", "new"), "is no file"),
        ((source, source / "new"), "can be written to"),
    ):
        code, said = start(*words)
        assert code == 2 and why in said and "Traceback" not in said
