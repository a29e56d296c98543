"""The lines of a model card, executed as they stand: of every family they draw what `chunk-grpo sample` draws."""

import json
import re

import numpy as np
import pytest
import tiny_families
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

from chunk_grpo import export_run, sample_run
from chunk_grpo.core import settings
from chunk_grpo.models import inputs, trainable
from chunk_grpo.runs import run_folder

PROMPTS = ["a red star", 'two cats left of three "dogs" \\ the green square']
WAYS = {
    "lora": {"lora_rank": 4, "true_cfg_scale": 3.0},
    "full": {"lora_rank": 0, "true_cfg_scale": 1.0},
    # an evaluation of another size and guidance than training, away from a negative prompt
    "own": {
        "lora_rank": 4,
        "eval_resolution": [32, 64],
        "eval_guidance": 4.0,
        "eval_true_cfg_scale": 3.0,
        "negative_prompt": "two blue cats",
    },
}


NAMES = [*tiny_families.BUILDERS, *tiny_families.EDITING_BUILDERS]


@pytest.fixture(params=[(name, way) for name in NAMES for way in WAYS], ids="-".join)
def run(request, tmp_path, monkeypatch):
    """A finished run of a family without its training, beside the folder of its base."""
    name, way = request.param
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tiny_families.build(name, tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    records = []
    for i, text in enumerate(PROMPTS):
        Image.effect_mandelbrot((64, 48), (-2, -1, 1, 1), 20 + 9 * i).save(tmp_path / f"{i}.png")
        records.append(json.dumps({"prompt": text, "image": f"{i}.png"}))
    prompts.write_text("\n".join(records))
    changes = {
        "model": str(folder),
        "resolution": 64,
        "eval_resolution": 64,
        "max_tokens": 16,
        "dtype": "float32",
        "eval_prompts": str(prompts),
        "prompts": str(prompts),
        "eval_steps": 4,
        "hybrid_split": 2,
        "prompts_per_iteration": 2,
        "threads": 1,
        "reward": "incompressibility",
        "eval_rewards": [],
        "guidance": 2.5,
    }
    changes |= WAYS[way]
    config = json.loads((folder / "transformer/config.json").read_text())
    family = inputs.import_family(inputs.check_pipeline_folder(folder))
    if not family.embeds_guidance(config):
        changes |= {name: 0.0 for name in ("guidance", "eval_guidance") if name in changes}
    run_settings = settings.load_settings("pocket/tiny", changes)
    made = run_folder.create_run(run_settings, tmp_path / "run")
    words = ("resolution", "max_tokens", "guidance", "true_cfg_scale", "lora_rank")
    model = trainable.load_trainable_policy(
        run_settings.model, **{name: getattr(run_settings, name) for name in words}
    )
    with torch.no_grad():
        for i, p in enumerate(model.trained):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    trainable.save_trained_weights(model, made / "final")
    run_folder.update_run_json(made, status="finished")
    return made


def test_the_card_of_every_family_draws_what_sample_draws(run, tmp_path, monkeypatch):
    """Plain and hybrid, beside the exported folder and the base's, with and without guidance."""
    run_settings = run_folder.read_run_settings(run)
    height, width = settings.image_size(run_settings.eval_resolution)
    # Qwen-Image-Edit's pipeline gives the source image a megapixel, and the card says so.
    monkeypatch.setattr(
        pipeline_qwenimage_edit, "calculate_dimensions", lambda *_: (width, height, None)
    )
    export_run(run, "mine")
    prompts = inputs.read_run_prompts(run_settings, "eval_prompts")
    (code,) = re.findall(
        r"```python\n(.*?)```", (tmp_path / "mine/README.md").read_text(), re.DOTALL
    )
    names = {}
    exec(code, names)
    ours = {x["arm"]: np.asarray(x["image"]).astype(int) for x in sample_run(run, prompts[:1])}
    assert (ours["plain"] != ours["base"]).any() and (ours["plain"] != ours["hybrid"]).any()
    for arm in ("plain", "hybrid"):
        apart = abs(ours[arm] - np.asarray(names[arm]).astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 1e-2, (
            arm
        )  # a level on the edge may round either way
