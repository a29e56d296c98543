"""The lines of a model card, executed as they stand: of every family they draw what `chunk-grpo sample` draws."""

import re

import numpy as np
import pytest
import tiny_families
import torch

from chunk_grpo import export_run, sample_run
from chunk_grpo.core import settings
from chunk_grpo.models import trainable
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


@pytest.fixture(
    params=[(name, way) for name in tiny_families.BUILDERS for way in WAYS], ids="-".join
)
def run(request, tmp_path, monkeypatch):
    """A finished run of a family without its training, beside the folder of its base."""
    name, way = request.param
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tiny_families.build(name, tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    changes = {
        "model": str(folder),
        "resolution": 64,
        "eval_resolution": 64,
        "max_tokens": 16,
        "dtype": "float32",
        "eval_prompts": str(tmp_path / "prompts.txt"),
        "prompts": str(tmp_path / "prompts.txt"),
        "eval_steps": 4,
        "hybrid_split": 2,
        "prompts_per_iteration": 2,
        "threads": 1,
        "reward": "incompressibility",
        "eval_rewards": [],
        "guidance": 2.5,
    }
    run_settings = settings.load_settings("pocket/tiny", changes | WAYS[way])
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


def test_the_card_of_every_family_draws_what_sample_draws(run, tmp_path):
    """Plain and hybrid, beside the exported folder and the base's, with and without guidance."""
    export_run(run, "mine")
    (code,) = re.findall(
        r"```python\n(.*?)```", (tmp_path / "mine/README.md").read_text(), re.DOTALL
    )
    names = {}
    exec(code, names)
    ours = {x["arm"]: np.asarray(x["image"]).astype(int) for x in sample_run(run, PROMPTS[:1])}
    assert (ours["plain"] != ours["base"]).any() and (ours["plain"] != ours["hybrid"]).any()
    for arm in ("plain", "hybrid"):
        apart = abs(ours[arm] - np.asarray(names[arm]).astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 1e-2, (
            arm
        )  # a level on the edge may round either way
