"""A frozen base in fewer bits under an adapter: what a plan says of it, what is rejected, and a run with torchao."""

import json
import os
import subprocess
import sys

import pytest
import torch
from commands import command, environment, run
from small_runs import metrics, trained, write

from chunk_grpo import InputError
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models import policy, trainable
from chunk_grpo.models.cost import known_model_configs
from chunk_grpo.planning.memory import training_memory


def weights_of(quantization):
    """The bytes that a plan counts for the weights of FLUX.1-dev under an adapter."""
    settings = load_settings("machines/80gb-lora-flux1-dev", {"quantization": quantization})
    config = known_model_configs()["black-forest-labs/FLUX.1-dev"]
    return training_memory(settings, config)["weights"]


def test_plan_counts_the_weights_that_torchao_dequantizes():
    """Autograd saves those of every layer, or with gradient checkpointing those of a block; nf4 computes them again."""
    config = known_model_configs()["black-forest-labs/FLUX.1-dev"]

    def dequantized(quantization, gradient_checkpointing):
        changes = {"quantization": quantization, "gradient_checkpointing": gradient_checkpointing}
        settings = load_settings("machines/80gb-lora-flux1-dev", changes)
        return training_memory(settings, config)["dequantized weights"] / 1e9

    assert dequantized("none", False) == dequantized("nf4", False) == 0
    assert 23 < dequantized("int8", False) == dequantized("fp8", False) < 24
    assert 0 < dequantized("int8", True) < 1


def test_a_plan_counts_the_bytes_of_each_format():
    """FLUX.1-dev has 11.9 billion weights, nearly all of them in linear layers."""
    none, int8, fp8, nf4 = (weights_of(name) for name in ("none", "int8", "fp8", "nf4"))
    assert int8 == fp8
    assert 11.8e9 < none - int8 < 11.91e9
    assert none - nf4 == pytest.approx((none - int8) * (2 - 0.5625), rel=1e-6)


@pytest.mark.slow
def test_a_plan_advises_a_quantized_base_only_under_an_adapter():
    words = ["resolution=512", "update_batch=1", "rollout_batch=2", "--device", "rtx4090"]
    said = run("plan", "machines/80gb-lora-flux1-dev", *words)
    assert "does not fit" in said and "quantization=int8" in said
    said = run("plan", "paper/one-h200-lora", "lora_rank=0", *words)
    advice = [line for line in said.splitlines() if "quantization" in line]
    assert all("lora_rank=32" in line for line in advice)


def test_what_cannot_be_quantized_is_rejected_before_weights_are_loaded(tmp_path, monkeypatch):
    said = run("train", "pocket/tiny", "quantization=int8", "--out", tmp_path / "out", code=2)
    assert "`quantization` must be none without an adapter (`lora_rank` 0); got int8" in said
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(policy.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            InputError, match="torchao: pip install 'chunk-grpo.quantized.'.; got fp8"
        ):
            policy.check_quantization("fp8", torch.device("cpu"))
        patch.setattr(policy.importlib.util, "find_spec", lambda name: name)
        policy.check_quantization("int8", torch.device("cpu"))
        with pytest.raises(InputError, match="none, int8 or fp8 without a GPU; got nf4"):
            policy.check_quantization("nf4", torch.device("cpu"))


def test_packed_weights_count_as_many_as_they_stand_for():
    """bitsandbytes packs two weights into a byte and notes the shape beside."""
    packed = torch.zeros(8, dtype=torch.uint8)
    packed.quant_state = type("State", (), {"shape": (4, 4)})
    assert (
        trainable._count_weights(packed) == 16 and trainable._count_weights(torch.zeros(3, 5)) == 15
    )


@pytest.fixture(scope="module")
def torchao(tmp_path_factory):
    """A folder with torchao, which is no requirement of the tests since every import of diffusers would load it."""
    folder = tmp_path_factory.mktemp("torchao")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, "torchao>=0.15"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"torchao cannot be installed: {done.stderr[-200:]}")
    return folder


VELOCITIES = """
import sys, torch
from chunk_grpo import load_policy
from chunk_grpo.models import trainable

out = {}
for name in ("none", "int8", "fp8"):
    policy = trainable.load_trainable_policy(
        "pocket", resolution=64, max_tokens=12, lora_rank=4, quantization=name
    )
    rows = policy.encode(["a red star", "two cats"])
    latents = torch.stack([policy.noise(torch.Generator().manual_seed(i)) for i in range(2)])
    velocity = policy.velocity(latents, torch.tensor([0.8, 0.3]), rows)
    velocity.square().mean().backward()
    gradients = sum(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.trained)
    layer = policy.transformer.transformer_blocks[0].attn.to_q.base_layer.weight
    out[name] = (velocity.detach(), gradients == len(policy.trained), type(layer).__name__)
    print("SHARE", trainable.trained_share(policy))
torch.save(out, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_a_quantized_base(torchao, tmp_path):
    """Velocities near the base's, gradients for the whole adapter, and a run that resumes to the bit and exports."""
    path = os.pathsep.join([str(torchao), environment()["PYTHONPATH"]])

    def call(*words):
        done = subprocess.run(
            words, env=environment(PYTHONPATH=path), capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    said = call(sys.executable, "-c", VELOCITIES, str(tmp_path / "v.pt"))
    shares = {line.split()[1] for line in said.splitlines() if line.startswith("SHARE")}
    found = torch.load(tmp_path / "v.pt")
    reference = found["none"][0]
    for name, limit, kind in (("int8", 0.02, "Int8Tensor"), ("fp8", 0.08, "Float8Tensor")):
        velocity, all_gradients, layer = found[name]
        error = (velocity - reference).abs().max() / reference.abs().max()
        assert 1e-5 < error < limit and all_gradients and layer == kind, (name, error, layer)
    assert len(shares) == 1

    (tmp_path / "home").mkdir()
    home = write(tmp_path / "home", lora_rank=2)
    words = ["train", home / "s.yaml", "quantization=int8", "eval_every=0", "--no-report"]
    call(*command(*words, "iterations=3", "--out", home / "whole"))
    call(*command(*words, "iterations=2", "--out", home / "parts"))
    call(*command(*words, "iterations=3", "--out", home / "parts", "--resume"))
    assert trained(home / "whole") == trained(home / "parts")
    lines = metrics(home / "whole")
    floors = [line["ratio_floor"] for line in lines if line.get("ratio_floor") is not None]
    assert floors and max(floors) < 1e-3
    call(*command("evaluate", home / "whole", "--no-report"))
    call(*command("export", home / "whole", home / "made"))
    assert (home / "made/pytorch_lora_weights.safetensors").is_file()
    assert json.loads((home / "whole/run.json").read_text())["settings"]["quantization"] == "int8"
