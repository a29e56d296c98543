"""`lora_targets` names linear layers: they are shown, and other names are rejected before weights are read."""

import json
import re

import pytest
import tiny_families
import torch
from commands import run

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.models import inputs, policy, trainable
from chunk_grpo.runs import run_folder

NAMES = list(tiny_families.BUILDERS)
SIDE, TOKENS = 64, 16


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    """A family's name and its folder."""
    name = request.param
    return name, tiny_families.build(name, tmp_path_factory.mktemp(name) / "model")


def linear_layers(net):
    """Names of the linear layers."""
    return [name for name, layer in net.named_modules() if isinstance(layer, torch.nn.Linear)]


def adapted(folder, *targets):
    """The names of the layers that get an adapter."""
    model = trainable.load_trainable_policy(
        str(folder), resolution=SIDE, max_tokens=TOKENS, lora_rank=2, lora_targets=targets
    )
    found = [name for name, _ in model.transformer.named_modules() if name.endswith(".lora_A")]
    assert model.trained and all(p.requires_grad for p in model.trained)
    return {name.removesuffix(".lora_A") for name in found}, model


def expected(folder, *targets):
    """By hand: linear layers of these names, or inside a module of one."""
    family = inputs.import_family(inputs.check_pipeline_folder(folder))
    net = policy.load_policy(str(folder), resolution=SIDE, max_tokens=TOKENS).transformer
    assert family
    return {name for name in linear_layers(net) for t in targets if f".{t}." in f".{name}."}


USUAL = [
    ("to_q", "to_k", "to_v", "to_out"),
    ("to_out",),
    ("to_out.0",),
    ("to_q",),
    ("attn",),
    ("attention",),
    ("proj",),
    ("proj_out",),
    ("ff",),
    ("feed_forward",),
    ("net",),
    ("linear",),
    ("linear_in", "to_q"),
]


@pytest.mark.parametrize("targets", USUAL, ids="-".join)
def test_targets_are_the_linear_layers_of_a_name_or_inside_it(family, targets):
    """On every family; a name that no linear layer has is rejected, alone or beside others."""
    wanted = expected(family[1], *targets)
    each = [expected(family[1], target) for target in targets]
    if all(each):
        found, _ = adapted(family[1], *targets)
        assert found == wanted
        return
    with pytest.raises(InputError, match="lora_targets: no linear layer is named") as error:
        adapted(family[1], *targets)
    assert "\n" not in str(error.value)


def test_to_out_of_klein_trains(tmp_path):
    """What users of peft write; its attention's `to_out` is a list of layers, and that of single blocks a layer."""
    folder = tiny_families.build("klein", tmp_path / "model")
    found, model = adapted(folder, "to_q", "to_k", "to_v", "to_out")
    assert (
        "transformer_blocks.0.attn.to_out.0" in found
        and "single_transformer_blocks.0.attn.to_out" in found
    )
    x = torch.stack([model.noise(torch.Generator().manual_seed(0))])
    rows = {"prompt_embeds": torch.randn(1, TOKENS, 96)}
    model.velocity(x, torch.tensor([0.5]), rows).square().mean().backward()
    assert all(p.grad is not None for p in model.trained)


def test_convolution_of_sd3_keeps_no_adapter(tmp_path):
    """`proj` is a convolution of the embedding too."""
    found, _ = adapted(tiny_families.build("sd3", tmp_path / "model"), "proj")
    assert found and "pos_embed.proj" not in found


def test_a_full_name_is_that_layer_alone(family):
    """Also where another layer's name ends with it."""
    net = policy.load_policy(str(family[1]), resolution=SIDE, max_tokens=TOKENS).transformer
    for name in linear_layers(net)[:3]:
        found, _ = adapted(family[1], name)
        assert found == {name}


BAD = [
    "no_such",
    "to_qq",
    "norm_q",
    "pos_embed.nothing",
    "transformer.to_q",
    ".*",
    "all-linear",
    "to_q.lora_A",
    " to_q",
    "dropout",
    "to_out.1",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_name_without_linear_layer_is_rejected_before_weights(family, bad, tmp_path, monkeypatch):
    """Alone or beside others, in training and before the run's folder is made."""
    monkeypatch.setattr(policy, "_load_network", lambda *given: pytest.fail("weights were read"))
    for targets in ((bad,), ("to_q", bad)):
        with pytest.raises(
            InputError, match=f"lora_targets: no linear layer is named {re.escape(repr(bad))}"
        ):
            adapted(family[1], *targets)
        changes = {
            "model": str(family[1]),
            "resolution": SIDE,
            "eval_resolution": SIDE,
            "max_tokens": TOKENS,
            "lora_rank": 2,
            "lora_targets": targets,
        }
        with pytest.raises(InputError, match="lora_targets: no linear layer"):
            run_folder.create_run(settings.load_settings("pocket/tiny", changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_layers_whose_results_nothing_reads_cannot_be_all_that_is_trained(tmp_path):
    folder = tiny_families.build("qwen", tmp_path / "model")
    with pytest.raises(InputError, match="lora_targets: .*which is not used"):
        adapted(folder, "transformer_blocks.1.txt_mlp")


def test_plan_and_the_start_of_training_show_the_adapted_layers(tmp_path):
    """As patterns with the number of layers each."""
    words = ["lora_rank=2", "lora_targets=[to_q, to_out]"]
    said = run("plan", "pocket/tiny", *words)
    net = policy.load_policy("pocket", resolution=SIDE, max_tokens=12).transformer
    wanted = [name for name in linear_layers(net) if name.endswith((".to_q", ".to_out.0"))]
    shown = re.findall(
        r"([\w.*]+) \((\d+)\)", " ".join(said[said.index("adapted layers") :].split())
    )
    counts = {pattern: int(count) for pattern, count in shown}
    by_hand = {}
    for name in wanted:
        pattern = re.sub(r"^(\w+)\.\d+\.", r"\1.*.", name)
        by_hand[pattern] = by_hand.get(pattern, 0) + 1
    assert by_hand.items() <= counts.items()
    out = tmp_path / "run"
    said = run("train", "pocket/tiny", "iterations=1", *words, "--out", out, "--no-report")
    for pattern, count in by_hand.items():
        assert (
            f"{pattern} ({count})" in said
            and f"{pattern} ({count})" in (out / "train.log").read_text()
        )
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
