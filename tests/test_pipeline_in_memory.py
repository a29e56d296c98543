"""`load_policy` of a pipeline that is in memory: the policy of its folder, without reading it again."""

import shutil

import diffusers
import pytest
import tiny_families
import torch

from chunk_grpo import InputError, load_policy
from chunk_grpo.models import trainable

SIDE, TOKENS = 64, 16
PROMPTS = ["a red star", "two cats left of three dogs"]
TEXT_FAMILIES = list(tiny_families.BUILDERS)


@pytest.fixture(scope="module", params=TEXT_FAMILIES)
def folder(request, tmp_path_factory):
    """A tiny pipeline of each family that draws from text."""
    return tiny_families.build(request.param, tmp_path_factory.mktemp(request.param) / "model")


def load(source, **options):
    """Load a policy at the size of the tests."""
    return load_policy(source, resolution=SIDE, max_tokens=TOKENS, **options)


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["plain", "guided"])
def test_the_policy_is_that_of_the_folder(folder, scale, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    from_memory = load(pipe, true_cfg_scale=scale)
    assert from_memory.transformer is pipe.transformer
    rows = from_memory.encode(PROMPTS)
    assert not (
        tmp_path / "cache"
    ).exists()  # nothing is stored of encoders whose files are not known

    from_folder = load(str(folder), true_cfg_scale=scale)
    expected = from_folder.encode(PROMPTS)
    assert rows.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(rows[name], value), name
    assert torch.equal(from_memory.sigmas(5), from_folder.sigmas(5))

    latents = torch.stack([from_folder.noise(torch.Generator().manual_seed(i)) for i in (0, 1)])
    sigma = torch.tensor([0.9, 0.4])
    with torch.no_grad():
        velocity = from_memory.velocity(latents, sigma, rows)
        assert torch.equal(velocity, from_folder.velocity(latents, sigma, expected))
        assert torch.equal(from_memory.decode(latents), from_folder.decode(latents))


def test_training_changes_the_pipeline(folder):
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    policy = load(pipe)
    trained = trainable.make_trainable(policy, lora_rank=2)
    rows = policy.encode(PROMPTS)
    latents = torch.stack([policy.noise(torch.Generator().manual_seed(i)) for i in (0, 1)])
    before = policy.velocity(latents, torch.tensor([0.9, 0.4]), rows)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    before.square().mean().backward()
    optimizer.step()
    after = policy.velocity(latents, torch.tensor([0.9, 0.4]), rows)
    assert not torch.equal(before, after)
    assert any("lora" in name for name, _ in pipe.transformer.named_parameters())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "bfloat16"}, "`dtype` must be that of the pipeline's transformer, float32"),
        (
            {"weights_dtype": "bfloat16"},
            "`weights_dtype` must be that of the pipeline's transformer, float32",
        ),
        ({"quantization": "int8"}, "`quantization` must be none for a pipeline in memory"),
    ],
)
def test_what_would_change_the_pipeline_s_weights_is_rejected(folder, options, sentence):
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    with pytest.raises(InputError, match=sentence):
        load(pipe, **options)


def test_a_pipeline_without_a_family_is_rejected(folder):
    class Other(diffusers.DiffusionPipeline):
        """A pipeline that no family is for."""

    with pytest.raises(InputError, match="`model` must be a FluxPipeline, .*; got a Other"):
        load(Other())


def test_a_distilled_pipeline_without_its_folder_rejects_guidance(tmp_path):
    tiny_families.klein(tmp_path / "model", distilled=True)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(InputError, match="true_cfg_scale: got 3, but the model is distilled"):
        load(pipe, true_cfg_scale=3.0)
    assert load(pipe).true_cfg_scale == 1
