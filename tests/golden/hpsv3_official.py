"""Scores of the package hpsv3 1.0.0 on the tiny checkpoint of tests/released.py: hpsv3_official.json, float32 on a CPU.

Needs an environment of its own: hpsv3==1.0.0, transformers==4.45.2, trl==0.11.4, peft==0.13.2, accelerate==1.0.1,
datasets==3.0.1, tensorboard, matplotlib, torchvision and pillow<13. The package is called as
it is, with its own settings but for the model's folder, float32 and no DeepSpeed.
Run with `python tests/golden/hpsv3_official.py`.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import torch
import yaml

# torchvision's wheel wants two operators that a build of torch without CUDA may lack
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import hpsv3.inference as official  # noqa: E402
import released  # noqa: E402

with tempfile.TemporaryDirectory() as home:
    folder = released.hpsv3(Path(home) / "weights", base_weights=True)
    settings = yaml.safe_load((Path(official.__file__).parent / "config/HPSv3_7B.yaml").read_text())
    settings |= {
        "model_name_or_path": str(folder / "base"),
        "torch_dtype": "float32",
        "bf16": False,
        "output_dir": f"{home}/out",
        "deepspeed": None,
        "report_to": "none",
    }
    (Path(home) / "tiny.yaml").write_text(yaml.safe_dump(settings))
    model = official.HPSv3RewardInferencer(
        config_path=f"{home}/tiny.yaml",
        checkpoint_path=str(folder / "HPSv3.safetensors"),
        device="cpu",
    )
    rows = []
    with torch.no_grad():
        for i, size in enumerate(released.SIZES):
            prompt = released.PROMPTS[i % len(released.PROMPTS)]
            scores = model.reward(image_paths=[released.picture(i, *size)], prompts=[prompt])
            rows.append(
                {
                    "seed": i,
                    "size": size,
                    "prompt": prompt,
                    "mu": scores[0, 0].item(),
                    "log_sigma": scores[0, 1].item(),
                }
            )
        batch = model.reward(
            image_paths=[released.picture(i, *size) for i, size in enumerate(released.SIZES[:4])],
            prompts=list(released.PROMPTS[:4]),
        )[:, 0].tolist()

versions = {
    name: importlib.metadata.version(name)
    for name in ("torch", "transformers", "torchvision", "pillow")
}
out = {"package": "hpsv3 1.0.0", "versions": versions, "rows": rows, "first_four_as_a_batch": batch}
(HERE / "hpsv3_official.json").write_text(json.dumps(out, indent=1) + "\n")
print(json.dumps(out, indent=1))
