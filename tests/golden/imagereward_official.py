"""Scores of the package image-reward 1.5 on the tiny checkpoint of tests/released.py: imagereward_official.json.

Needs an environment of its own: transformers==4.45.2, timm==0.6.13, fairscale==0.4.13, torchvision and pillow<13, and
the package's folder, unpacked. Only its scoring code is imported: its start imports `clip` and a trainer as well. The
vision tower is made as small as the checkpoint; nothing else is changed.
Run with `python tests/golden/imagereward_official.py PACKAGE_FOLDER`.
"""

import importlib
import importlib.metadata
import json
import sys
import tempfile
import types
from pathlib import Path

import torch

# torchvision's wheel wants two operators that a build of torch without CUDA may lack
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import released  # noqa: E402

for name in (
    "ImageReward",
    "ImageReward.models",
    "ImageReward.models.BLIP",
):  # packages without their start
    package = types.ModuleType(name)
    package.__path__ = [str(Path(sys.argv[1]).joinpath(*name.split(".")))]
    sys.modules[name] = package
blip = importlib.import_module("ImageReward.models.BLIP.blip")
pretrain = importlib.import_module("ImageReward.models.BLIP.blip_pretrain")
official = importlib.import_module("ImageReward.ImageReward")
VisionTransformer = importlib.import_module("ImageReward.models.BLIP.vit").VisionTransformer

with tempfile.TemporaryDirectory() as home:
    folder = released.imagereward(Path(home) / "weights")
    med = json.loads((folder / "med_config.json").read_text())
    wide = med["encoder_width"]
    small = VisionTransformer(
        img_size=224, patch_size=16, embed_dim=wide, depth=2, num_heads=wide // 64
    )
    pretrain.create_vit = lambda *_: (small, wide)
    loaded = blip.BertTokenizer.from_pretrained
    blip.BertTokenizer.from_pretrained = lambda *_: loaded(str(folder))
    head = official.MLP
    official.MLP = lambda size: head(med["hidden_size"])
    model = official.ImageReward(med_config=str(folder / "med_config.json"), device="cpu")
    report = model.load_state_dict(
        torch.load(folder / "ImageReward.pt", map_location="cpu"), strict=False
    )
    assert not report.missing_keys, report.missing_keys
    model.eval()
    rows = []
    with torch.no_grad():
        for i, size in enumerate(released.SIZES):
            prompt = released.PROMPTS[i % len(released.PROMPTS)]
            rows.append(
                {
                    "seed": i,
                    "size": size,
                    "prompt": prompt,
                    "score": model.score(prompt, released.picture(i, *size)),
                }
            )

libraries = ("torch", "transformers", "timm", "torchvision", "pillow")
versions = {name: importlib.metadata.version(name) for name in libraries}
out = {
    "package": "image-reward 1.5",
    "versions": versions,
    "unexpected": report.unexpected_keys,
    "rows": rows,
}
(HERE / "imagereward_official.json").write_text(json.dumps(out, indent=1) + "\n")
print(json.dumps(out, indent=1))
