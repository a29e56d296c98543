"""Adapters of every layout: training continues them, and each reader of an export computes the same velocities."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import tiny_families
import torch
from commands import run
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file, save_file
from small_runs import metrics, trained, write
from test_samples import PROMPTS, make, pixels

from chunk_grpo import InputError, export_run, load_policy, sample_run
from chunk_grpo.core.files import read_json
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models import adapters, trainable
from chunk_grpo.runs import run_folder

FAMILIES = ["dev", "sd3", "qwen", "z_image", "klein"]
SIZE = {"resolution": 64, "max_tokens": 8}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Embeddings of these models do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def velocities(policy):
    """The velocities of a policy at fixed latents."""
    rows = policy.encode(["a red star", "two cats"])
    latents = torch.stack([policy.noise(torch.Generator().manual_seed(i)) for i in range(2)])
    with torch.no_grad():
        return policy.velocity(latents, torch.tensor([0.8, 0.3]), rows)


def perturb(policy):
    """Give an adapter factors that are not zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in trainable.adapter_parameters(policy):
            p.add_(0.1 * torch.randn_like(p))
    return policy


def distance(one, other):
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model, an adapter of rank 4 and alpha 6 that training wrote, and its velocities."""
    home = tmp_path_factory.mktemp(request.param)
    model = str(tiny_families.build(request.param, home / "model"))
    policy = trainable.load_trainable_policy(model, lora_rank=4, lora_alpha=6, **SIZE)
    trainable.save_trained_weights(perturb(policy), home / "adapter")
    return model, home, velocities(policy)


@pytest.mark.parametrize("layout", ["own", *adapters.LAYOUTS])
def test_training_starts_where_an_adapter_of_any_layout_ended(family, layout, tmp_path):
    """Also with another rank and another alpha; and the base is the model with that adapter."""
    model, home, wanted = family
    source = home / "adapter"
    pipeline, network = adapters.build_meta_transformer(home / "model")
    if layout != "own":
        adapter = adapters.read_adapter(str(source), pipeline, network)
        adapters.write_adapter(adapter, tmp_path, layout)
        source = tmp_path
    started = trainable.load_trainable_policy(model, lora_rank=6, lora_alpha=3, **SIZE)
    plain = velocities(started)
    adapters.start_from_adapter(
        started, adapters.read_adapter(str(source), pipeline, started.transformer)
    )
    assert distance(velocities(started), wanted) < 1e-5 < distance(plain, wanted)
    perturb(started)
    assert distance(velocities(started), wanted) > 1e-4
    with trainable.use_base_weights(started):
        assert distance(velocities(started), wanted) < 1e-5
    assert distance(velocities(started), wanted) > 1e-4


@pytest.mark.parametrize("layout", ["diffusers", "peft"])
def test_other_readers_of_an_export_compute_the_same(family, layout, tmp_path):
    model, home, wanted = family
    pipeline, network = adapters.build_meta_transformer(home / "model")
    adapter = adapters.read_adapter(str(home / "adapter"), pipeline, network)
    adapters.write_adapter(adapter, tmp_path, layout)
    policy = load_policy(model, **SIZE)
    if layout == "peft":
        PeftModel.from_pretrained(policy.transformer, str(tmp_path))
    else:
        parts = {"text_encoder": None, "tokenizer": None, "vae": None}
        pipe = DiffusionPipeline.from_pretrained(model, transformer=policy.transformer, **parts)
        pipe.load_lora_weights(str(tmp_path))
    assert distance(velocities(policy), wanted) < 1e-5


def test_layers_of_several_ranks_have_the_scale_one_in_peft_too(family, tmp_path):
    model, home, _ = family
    pipeline, network = adapters.build_meta_transformer(home / "model")
    adapter = adapters.read_adapter(str(home / "adapter"), pipeline, network)
    name = next(iter(adapter.layers))
    a, b = adapter.layers[name]
    mixed = adapters.Adapter(adapter.layers | {name: (a[:2], b[:, :2])})
    adapters.write_adapter(mixed, tmp_path, "peft")
    started = trainable.load_trainable_policy(model, lora_rank=4, **SIZE)
    adapters.start_from_adapter(started, mixed)
    policy = load_policy(model, **SIZE)
    PeftModel.from_pretrained(policy.transformer, str(tmp_path))
    assert distance(velocities(policy), velocities(started)) < 1e-5
    # What this package writes, it reads.
    read = adapters.read_adapter(str(tmp_path), pipeline, network)
    for layer, (a, b) in mixed.layers.items():
        assert torch.allclose(read.layers[layer][1] @ read.layers[layer][0], b @ a, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 4, "alpha_pattern": {"to_q": 12}}, 3.0),
        ({"lora_alpha": 4, "alpha_pattern": {"to_k": 12}}, 1.0),
    ],
)
def test_a_layer_has_the_scale_that_peft_gives_it(changes, scale):
    layer = "transformer_blocks.0.attn.to_q"
    assert adapters._scale_of_peft_layer({"r": 4} | changes, layer, rank=4) == scale


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda"])
def test_an_adapter_that_changes_the_base_is_refused(start, tmp_path):
    config = {"r": 4, "lora_alpha": 4, "init_lora_weights": start}
    with pytest.raises(InputError, match="must be an adapter of the unchanged base.*" + start):
        adapters._check_peft_config(config, tmp_path / "adapter_model.safetensors")
    for harmless in (True, False, None, "gaussian"):
        adapters._check_peft_config(config | {"init_lora_weights": harmless}, tmp_path / "x")


@pytest.mark.parametrize("pattern", [["to_q"], {"(": 3}, {"to_q": "x"}, 5])
def test_a_pattern_that_is_none_is_one_sentence(pattern, tmp_path):
    with pytest.raises(InputError, match="must have an `alpha_pattern` of names and numbers"):
        adapters._check_peft_config({"r": 4, "alpha_pattern": pattern}, tmp_path / "x")


def kohya_reader(network, file):
    """Add up W + alpha / r B A as a reader that knows the names of modules alone: dots are underscores."""
    tensors = load_file(file)
    names = {name.replace(".", "_"): name for name, _ in network.named_modules()}
    for key in [key for key in tensors if key.endswith(".alpha")]:
        flat = key.removesuffix(".alpha")
        down, up = (tensors[f"{flat}.lora_{kind}.weight"] for kind in ("down", "up"))
        layer = network.get_submodule(names[flat.removeprefix("lora_transformer_")])
        layer.weight.data += tensors[key] / len(down) * up @ down


def test_a_reader_of_kohyas_names_computes_the_same(family, tmp_path):
    model, home, wanted = family
    pipeline, network = adapters.build_meta_transformer(home / "model")
    adapter = adapters.read_adapter(str(home / "adapter"), pipeline, network)
    adapters.write_adapter(adapter, tmp_path, "kohya")
    policy = load_policy(model, **SIZE)
    kohya_reader(policy.transformer, tmp_path / "pytorch_lora_weights.safetensors")
    assert distance(velocities(policy), wanted) < 1e-5


def test_a_run_continues_an_adapter_and_needs_its_file_no_more(tmp_path):
    """Its first evaluation is the last of the run before; resuming and evaluating read the run's own copy."""
    home = write(tmp_path, lora_rank=2, iterations=2, eval_every=1)
    words = ["train", home / "s.yaml", "--no-report"]
    run(*words, "--out", home / "one")
    more = [f"lora_start={home / 'one'}", "lora_rank=4", "iterations=2"]
    run(*words, *more, "--out", home / "two")
    ended, began = metrics(home / "one")[-1], metrics(home / "two")[0]
    name = "eval_tiny_rewards:red"
    assert began[name] == pytest.approx(ended[name], abs=1e-5)
    assert trained(home / "one") != trained(home / "two")

    shutil.move(home / "one", home / "gone")
    run("evaluate", home / "two", "--no-report")
    run("export", home / "two", home / "made")
    assert (home / "made/start_lora_weights.safetensors").is_file()
    shutil.rmtree(home / "two/start")
    said = run("evaluate", home / "two", "--no-report", code=2)
    assert "must have the folder start, which is missing" in said


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path):
    home = write(tmp_path, lora_rank=2, iterations=1, eval_every=0, kl=0.1, updates_per_iteration=1)
    words = ["train", home / "s.yaml", "--no-report"]
    run(*words, "--out", home / "one")
    more = [f"lora_start={home / 'one'}"]
    run(*words, *more, "iterations=3", "--out", home / "whole")
    run(*words, *more, "iterations=2", "--out", home / "parts")
    run(*words, *more, "iterations=3", "--out", home / "parts", "--resume")
    assert trained(home / "whole") == trained(home / "parts")
    kl = [line["kl"] for line in metrics(home / "whole")[1:]]
    assert kl[0] < 1e-9 < kl[-1]  # the reference is the start, so the KL begins at 0


def test_the_card_of_a_run_that_started_from_an_adapter_draws_what_sample_draws(
    tmp_path, monkeypatch
):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = make(tmp_path / "first", lora_rank=4, lora_alpha=8)
    second = make(tmp_path / "second", lora_rank=6, lora_start=str(first))
    monkeypatch.chdir(tmp_path)
    export_run(second, "mine")
    (code,) = re.findall(
        r"```python\n(.*?)```", (tmp_path / "mine/README.md").read_text(), re.DOTALL
    )
    names = {}
    exec(code, names)
    ours = {x["arm"]: pixels(x["image"]) for x in sample_run(second, [PROMPTS[0]])}
    assert (ours["plain"] != ours["hybrid"]).any() and (ours["base"] != ours["hybrid"]).any()
    for arm in ("plain", "hybrid"):
        apart = abs(ours[arm].astype(int) - pixels(names[arm]).astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 1e-3, arm


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny FLUX with an adapter of rank 2 in diffusers' layout."""
    home = write(tmp_path_factory.mktemp("wrong"), lora_rank=2)
    policy = trainable.load_trainable_policy(str(home / "model"), lora_rank=2, **SIZE)
    trainable.save_trained_weights(perturb(policy), home / "adapter")
    return home


def wrong_files(home, folder):
    """Files that are no adapter that can be continued: name -> changes of settings, part of the sentence."""
    tensors = load_file(home / "adapter/pytorch_lora_weights.safetensors")
    first = next(name for name in tensors if "lora_A" in name)
    layer = first.removesuffix(".lora_A.weight")
    other = {name: x for name, x in tensors.items() if name != first}
    bad = {
        "half": (other, {}, "two matrices of the same rank"),
        "dora": (tensors | {f"{layer}.lora_magnitude_vector": torch.ones(3)}, {}, "DoRA"),
        "text": (
            tensors | {"text_encoder.layers.0.q_proj.lora_A.weight": torch.ones(2, 4)},
            {},
            "of the transformer alone",
        ),
        "infinite": (tensors | {first: tensors[first] * torch.inf}, {}, "must be finite"),
        "shape": (
            tensors | {first: torch.cat([tensors[first]] * 2, 1)},
            {},
            "must be an adapter of this model",
        ),
        "rank": (tensors, {"lora_rank": 1}, "`lora_rank` must be at least 2"),
        "targets": (tensors, {"lora_targets": ["to_q"]}, "`lora_targets` must name all layers"),
        "peft": (
            {f"base_model.model.{name.partition('.')[2]}": x for name, x in tensors.items()},
            {},
            "adapter_config.json",
        ),
        "flat": ({"lora_transformer_none.lora_up.weight": torch.ones(2, 2)}, {}, "linear layers"),
    }
    for name, (content, changes, words) in bad.items():
        save_file(
            {key: x.contiguous() for key, x in content.items()}, folder / f"{name}.safetensors"
        )
        yield folder / f"{name}.safetensors", changes, words
    (folder / "cut.safetensors").write_bytes(b"cut")
    yield folder / "cut.safetensors", {}, "must be an undamaged file"
    (folder / "pickle.bin").write_bytes(b"")
    yield folder / "pickle.bin", {}, "must be a .safetensors file"
    (folder / "empty").mkdir()
    yield folder / "empty", {}, "has none"
    yield home / "adapter", {"lora_rank": 0}, "must be empty without an adapter"


def test_what_cannot_be_continued_is_rejected_before_a_folder_is_made(whole, tmp_path):
    for source, changes, words in wrong_files(whole, tmp_path):
        given = [f"lora_start={source}", *(f"{k}={json.dumps(v)}" for k, v in changes.items())]
        said = run("train", whole / "s.yaml", *given, "--out", tmp_path / "out", code=2)
        assert words in said and len(said.strip().splitlines()) == 1, (source, said)
        assert not (tmp_path / "out").exists()


def make_pipe(path):
    """Make a pipe whose other end is open, so that a reader that opens it fails instead of waiting."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


@pytest.mark.parametrize("in_folder", [True, False])
def test_adapter_that_is_a_pipe_is_rejected_in_one_sentence(tmp_path, in_folder):
    pipe = tmp_path / "adapter_model.safetensors"
    writer = make_pipe(pipe)
    with pytest.raises(
        InputError, match="`lora_start` must name regular files; got .*, which is a"
    ):
        adapters.fetch_adapter_file(str(tmp_path if in_folder else pipe))
    os.close(writer)


def test_final_weights_that_are_a_pipe_are_rejected_in_one_sentence(tmp_path):
    writer = make_pipe(tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(InputError, match="`run` must name regular files; got .*, which is a pipe"):
        trainable.read_saved_weights(tmp_path)
    os.close(writer)


def test_peft_finds_the_files_of_its_layout_under_its_own_names(tmp_path):
    adapter = adapters.Adapter({"layer": (torch.ones(2, 3), torch.ones(4, 2))})
    with pytest.raises(InputError, match="`file_name` must be empty or adapter_model.safetensors"):
        adapters.write_adapter(adapter, tmp_path, "peft", adapters.START_FILE)
    assert not list(tmp_path.iterdir())
    adapters.write_adapter(adapter, tmp_path, "peft")
    files = sorted(file.name for file in tmp_path.iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(files)
    with pytest.raises(InputError, match="`layout` must be one of .*; got 'onnx'"):
        adapters.write_adapter(adapter, tmp_path, "onnx")


def test_written_adapters_have_the_permissions_of_their_folder(tmp_path):
    tmp_path.chmod(0o755)
    layers = {"transformer_blocks.0.attn.to_q": (torch.ones(2, 4), torch.ones(4, 2))}
    for layout in adapters.LAYOUTS:
        adapters.write_adapter(adapters.Adapter(layers), tmp_path, layout)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("targets", [["to_q"], ["to_q", "to_k", "to_v"]])
def test_saved_weights_of_other_layers_are_rejected(tmp_path, targets):
    """Whether the policy has too few layers or too many."""
    policies = [load_policy("pocket", resolution=64, max_tokens=12) for _ in "12"]
    trainable.make_trainable(policies[0], lora_rank=2, lora_targets=("to_q", "to_k"))
    trainable.save_trained_weights(policies[0], tmp_path)
    trainable.load_trained_weights(policies[0], tmp_path)
    trainable.make_trainable(policies[1], lora_rank=2, lora_targets=tuple(targets))
    with pytest.raises(InputError, match="are those of another model"):
        trainable.load_trained_weights(policies[1], tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_named(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        InputError, match="'some/adapter:x.safetensors' cannot be reached .no network"
    ):
        adapters.fetch_adapter_file("some/adapter:x.safetensors")


def test_an_adapter_whose_scale_differs_by_layer_is_read_with_each(whole, tmp_path):
    """kohya's alphas are per layer; a network with them is read as one with the scale in B."""
    pipeline, network = adapters.build_meta_transformer(whole / "model")
    adapter = adapters.read_adapter(str(whole / "adapter"), pipeline, network)
    adapters.write_adapter(adapter, tmp_path, "kohya")
    file = tmp_path / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    alphas = sorted(key for key in tensors if key.endswith(".alpha"))
    tensors |= {key: torch.tensor(float(i + 1)) for i, key in enumerate(alphas)}
    save_file(tensors, file)
    again = adapters.read_adapter(str(file), pipeline, network)
    for i, key in enumerate(alphas):
        (name,) = [
            name
            for name in adapter.layers
            if f"lora_transformer_{name.replace('.', '_')}.alpha" == key
        ]
        expected = adapter.layers[name][1] * (i + 1) / len(adapter.layers[name][0])
        np.testing.assert_allclose(again.layers[name][1], expected, rtol=1e-6)

    save_file(tensors | {alphas[0]: torch.ones(2)}, file)
    with pytest.raises(InputError, match=r"one number per alpha; .* has 2"):
        adapters.read_adapter(str(file), pipeline, network)


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_an_adapter_with_damaged_metadata_is_rejected_in_one_sentence(whole, tmp_path, text):
    pipeline, network = adapters.build_meta_transformer(whole / "model")
    adapter = adapters.read_adapter(str(whole / "adapter"), pipeline, network)
    adapters.write_adapter(adapter, tmp_path, "diffusers")
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(load_file(file), file, metadata={"lora_adapter_metadata": text})
    with pytest.raises(InputError, match="lora_adapter_metadata that is an object in JSON"):
        adapters.read_adapter(str(file), pipeline, network)


def test_an_export_names_its_layout_and_rejects_others(whole, tmp_path, monkeypatch):
    made = make(tmp_path, lora_rank=2)
    for layout, words in {"peft": "PeftModel.from_pretrained", "kohya": "ComfyUI"}.items():
        run("export", made, tmp_path / layout, "--layout", layout)
        assert words in (tmp_path / layout / "README.md").read_text()
    config = read_json(tmp_path / "peft/adapter_config.json")
    assert config["r"] == config["lora_alpha"] == 2
    said = run("export", made, tmp_path / "no", "--layout", "onnx", code=2)
    assert "must be one of diffusers, peft, kohya; got 'onnx'" in said
    assert not (tmp_path / "no").exists()


def test_run_that_was_resumed_and_not_finished_is_no_start(tmp_path):
    """Its final weights are those of its former end."""
    (tmp_path / "final").mkdir()
    layers = {"transformer_blocks.0.attn.to_q": (torch.ones(2, 4), torch.ones(4, 2))}
    adapters.write_adapter(adapters.Adapter(layers), tmp_path / "final")
    run_info = tmp_path / "run.json"
    run_info.write_text(json.dumps({"status": "finished"}))
    assert adapters.fetch_adapter_file(str(tmp_path)).parent == tmp_path / "final"
    (tmp_path / "checkpoints/000003").mkdir(parents=True)
    run_info.write_text(json.dumps({"status": "running", "final_iteration": 2}))
    with pytest.raises(InputError, match="was resumed and is not finished"):
        adapters.fetch_adapter_file(str(tmp_path))


@pytest.mark.parametrize("name", ["qwen", "z_image"])
def test_a_layout_that_comfyui_does_not_read_is_refused(name, tmp_path):
    changes = {
        "model": str(tiny_families.build(name, tmp_path / name)),
        "lora_rank": 2,
        "resolution": 32,
    }
    changes |= {"eval_resolution": 32, "max_tokens": 16, "guidance": 0.0, "true_cfg_scale": 1.0}
    made = run_folder.create_run(load_settings("pocket/tiny", changes), tmp_path / "run")
    policy = trainable.load_trainable_policy(
        changes["model"], lora_rank=2, resolution=32, max_tokens=16
    )
    trainable.save_trained_weights(policy, made / "final")
    run_folder.update_run_json(made, status="finished")
    with pytest.raises(InputError, match="`layout` must be diffusers or peft for a .*Pipeline"):
        export_run(made, tmp_path / "out", layout="kohya")
    assert not (tmp_path / "out").exists()
