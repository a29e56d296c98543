"""Writes hpsv21_official.json: the package hpsv2 1.2.0 on the checkpoint of tests/released.py.

Needs the unpacked wheel of hpsv2 and torchvision. Only its model and its transform are imported, since its command line
wants more:

    python tests/golden/hpsv21_official.py FOLDER_OF_THE_WHEEL
"""

import importlib
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
from transformers import CLIPTokenizer

# torchvision's wheel wants two operators that a build of torch without CUDA may lack
library = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import torchvision  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import released  # noqa: E402

SIZES = [*released.SIZES[:8], (224, 224), (640, 480)]

if __name__ == "__main__":
    package = types.ModuleType("hps")
    package.__path__ = [f"{sys.argv[1]}/hpsv2/src/open_clip"]
    sys.modules["hps"] = package
    CLIP = importlib.import_module("hps.model").CLIP
    image_transform = importlib.import_module("hps.transform").image_transform

    with tempfile.TemporaryDirectory() as home:
        folder = released.hpsv21(Path(home) / "hps")
        state = torch.load(folder / "HPS_v2.1_compressed.pt", weights_only=True)["state_dict"]
        words = CLIPTokenizer.from_pretrained(folder)
        vision = dict(layers=2, width=48, head_width=12, patch_size=32, image_size=224, mlp_ratio=2)
        text = dict(context_length=77, vocab_size=len(words), width=32, heads=4, layers=2)
        # The package has no option for the text tower's ratio of 2, so its layers are built with another default.
        module = importlib.import_module("hps.transformer")
        module.Transformer.__init__.__defaults__ = tuple(
            2.0 if value == 4.0 else value for value in module.Transformer.__init__.__defaults__
        )
        model = CLIP(24, vision, text).eval()
        model.load_state_dict(state)
        transform = image_transform(224, is_train=False, resize_longest_max=True)
        rows = []
        for seed, size in enumerate(SIZES):
            prompt = released.PROMPTS[seed % len(released.PROMPTS)]
            image = transform(released.picture(seed, *size))[None]
            ids = words(prompt, truncation=True, max_length=77).input_ids
            ids = torch.tensor([ids + [0] * (77 - len(ids))])  # open_clip pads with zeros
            with torch.inference_mode():
                pair = model.encode_image(image, True), model.encode_text(ids, True)
                score = (pair[0] @ pair[1].T).item()
            rows.append({"seed": seed, "size": size, "prompt": prompt, "score": score})
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    kept = {"package": "hpsv2 1.2.0", "versions": versions, "rows": rows}
    (HERE / "hpsv21_official.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept, indent=1))
