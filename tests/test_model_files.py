"""What is fetched of a repository, what a decode holds at once, and which layers an adapter stands beside."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import tiny_families
import tiny_flux
import torch
from commands import call
from huggingface_hub.utils import filter_repo_objects

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.models import inputs, policy, trainable
from chunk_grpo.models.activations import (
    _GpuNumberFormats,
    _largest_block_bytes,
    activation_bytes,
    fit_update_batch,
)
from chunk_grpo.models.cost import build_meta_policy, find_model_config, read_model_config
from chunk_grpo.models.policy import decode_latents, padded_batch_size
from chunk_grpo.runs import run_folder
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state

SD35 = """LICENSE.md model_index.json sd3.5_large.safetensors scheduler/scheduler_config.json mmdit.png
text_encoder/config.json text_encoder/model.safetensors text_encoder/model.fp16.safetensors
text_encoder_3/config.json text_encoder_3/model-00001-of-00002.safetensors
text_encoder_3/model-00002-of-00002.safetensors
text_encoder_3/model.safetensors.index.json
text_encoder_3/model.fp16-00001-of-00002.safetensors
text_encoder_3/model.fp16-00002-of-00002.safetensors text_encoder_3/model.safetensors.index.fp16.json
text_encoders/clip_g.safetensors text_encoders/t5xxl_fp16.safetensors text_encoders/t5xxl_fp8_e4m3fn.safetensors
tokenizer/merges.txt tokenizer/vocab.json tokenizer_3/spiece.model tokenizer_3/tokenizer.json
transformer/config.json transformer/diffusion_pytorch_model-00001-of-00002.safetensors
transformer/diffusion_pytorch_model.safetensors.index.json vae/diffusion_pytorch_model.safetensors vae/config.json"""


def test_the_same_weights_are_fetched_once(monkeypatch, tmp_path):
    """Of a repository like SD3.5's neither half precision nor what other programs read, and all that a pipeline loads."""
    asked = {}

    def fetch(model, revision, allow_patterns, ignore_patterns):
        asked["files"] = {
            *filter_repo_objects(
                SD35.split(), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        }
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    inputs.fetch_model("some/model")
    left = {*SD35.split()} - asked["files"]
    assert not [file for file in asked["files"] if "fp16" in file or "text_encoders/" in file]
    assert all(
        "fp16" in file or file.startswith("text_encoders/") or "/" not in file for file in left
    ), left
    assert "model_index.json" in asked["files"] and "tokenizer_3/spiece.model" in asked["files"]


@pytest.mark.parametrize("name", ["transformer/diffusion_pytorch_model.safetensors", "vae/x.json"])
def test_model_with_a_pipe_is_rejected_in_one_sentence(name, tmp_path):
    folder = shutil.copytree(inputs.fetch_model("pocket"), tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    writer = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)  # so that no reader waits
    with pytest.raises(
        InputError, match="`model` must name regular files; got .*, which is a pipe"
    ):
        inputs.check_pipeline_folder(folder)
    if name.endswith(".safetensors"):
        with pytest.raises(InputError, match="`model` must name regular files"):
            inputs.read_tensor_shapes(folder, "transformer")
    os.close(writer)


@pytest.mark.parametrize(
    "changes", [{"guidance": 2.5}, {"eval_guidance": 4.0}, {"guidance": 0.0, "eval_guidance": 1.0}]
)
def test_guidance_scale_is_rejected_for_a_model_that_ignores_it(changes):
    tiny = settings.load_settings("pocket/tiny", changes)
    with pytest.raises(InputError, match="guidance` must be 0 or 3.5 .* takes no guidance scale"):
        inputs.check_and_hash_inputs(tiny)


@pytest.mark.parametrize("name", ["dev", "sd3", "qwen", "z_image", "klein"])
def test_only_a_family_that_uses_the_guidance_scale_allows_it(name, tmp_path):
    folder = tiny_families.build(name, tmp_path / name)
    family = inputs.import_family(inputs.check_pipeline_folder(folder))
    config = inputs.read_model_json(folder, "transformer/config.json")
    given = settings.load_settings("pocket/tiny", {"guidance": 2.5})
    if name == "dev":
        inputs.check_embedded_guidance(given, family, config)
    else:
        with pytest.raises(InputError, match="`guidance` must be 0 or 3.5"):
            inputs.check_embedded_guidance(given, family, config)
    inputs.check_embedded_guidance(settings.load_settings("pocket/tiny"), family, config)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"lora_alpha": 4}, "`lora_alpha` must be 0 without an adapter"),
        ({"sharding_group": 2}, "`sharding_group` must be 0 if `sharding` is none; got 2"),
    ],
)
def test_training_option_without_effect_is_rejected(option, words):
    with pytest.raises(InputError, match=words):
        trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12, **option)


@pytest.mark.parametrize("rank", [0, 4])
def test_largest_block_is_counted_if_the_last_one_has_frozen_layers(rank, tmp_path, monkeypatch):
    """A block in the middle trains all its layers, so freezing layers of the last one does not lower the peak."""
    config = read_model_config(tiny_families.build("qwen", tmp_path / "qwen"))
    sizes = json.loads(config.transformer) | {"num_layers": 4}
    config = replace(config, transformer=json.dumps(sizes))
    family = inputs.import_family("QwenImagePipeline")

    def count():
        empty = build_meta_policy(config, 64, 12, rank=rank)
        return _largest_block_bytes(config, empty, _GpuNumberFormats(torch.float32), rows=2)

    counted = count()
    monkeypatch.setattr(family, "layers_without_gradient", ())
    assert counted == count()


SHARES = {
    "black-forest-labs/FLUX.1-dev": 0.7,
    "black-forest-labs/FLUX.2-klein-4B": 0.9,
    "Qwen/Qwen-Image": 0.6,
    "stabilityai/stable-diffusion-3.5-medium": 0.6,
    "Tongyi-MAI/Z-Image-Turbo": 0.95,
}


def widest(model, images):
    """The most numbers that any layer of the decoder makes of so many images."""
    most, hooks = [], []
    for part in model.vae.modules():
        hooks.append(
            part.register_forward_hook(
                lambda _, given, out: most.append(
                    max(x.numel() for x in (*given, out) if isinstance(x, torch.Tensor))
                )
            )
        )
    noise = torch.stack([model.noise(torch.Generator().manual_seed(i)) for i in range(images)])
    decode_latents(model, noise, batch=images)
    for hook in hooks:
        hook.remove()
    return max(most)


@pytest.mark.parametrize("name", tiny_families.BUILDERS)
def test_no_layer_of_a_decode_is_larger_than_counted(name, tmp_path):
    """The rule is no less than what a decode makes, and at most twice as much."""
    model = policy.load_policy(
        str(tiny_families.build(name, tmp_path / "model")), resolution=64, max_tokens=16
    )
    counted = policy._largest_vae_activation(model.vae.config, 64)
    assert widest(model, 1) <= counted <= 2 * widest(model, 1)


def test_a_decode_is_split_below_32_bits(tmp_path, monkeypatch):
    """Twelve images of 1024 pixels go in two parts for FLUX.1-dev's autoencoder; the images are those of one decode."""
    dev = build_meta_policy(find_model_config("black-forest-labs/FLUX.1-dev"), 1024, 16)
    assert dev.decode_limit == 7 and dev.set_resolution(512).decode_limit == 31
    model = policy.load_policy("pocket", resolution=64, max_tokens=12)
    noise = torch.stack([model.noise(torch.Generator().manual_seed(i)) for i in range(5)])
    whole = decode_latents(model, noise)
    sizes = []
    decode = type(model).decode
    monkeypatch.setattr(
        type(model), "decode", lambda self, x: sizes.append(len(x)) or decode(self, x)
    )
    monkeypatch.setattr(type(model), "decode_limit", 2)
    torch.testing.assert_close(decode_latents(model, noise), whole, rtol=0, atol=1e-5)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("name", tiny_families.BUILDERS)
def test_an_adapter_stands_beside_every_attention_and_feed_forward_layer(name, tmp_path):
    """All linear layers within blocks but those that only modulate; and what nothing reads has none that is trained."""
    folder = str(tiny_families.build(name, tmp_path / "model"))
    model = trainable.load_trainable_policy(folder, resolution=64, max_tokens=16, lora_rank=2)
    adapted = {
        part.split(".lora_A")[0]
        for part, _ in model.transformer.named_modules()
        if part.endswith(".lora_A")
    }
    left = [
        part.removesuffix(".base_layer")
        for part, layer in model.transformer.named_modules()
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in part
    ]
    left = [part for part in left if part not in adapted and "." in part]
    outside = (
        "norm",
        "mod",
        "ada",
        "embed",
        "final_layer",
    )  # what modulates, and what is outside of blocks
    assert adapted and not [
        part for part in left if not any(word in part.lower() for word in outside)
    ]
    assert 0.1 < trainable.trained_share(model) < 1


@pytest.mark.parametrize(("name", "least"), SHARES.items())
def test_how_much_of_a_published_model_an_adapter_reaches(name, least):
    """All but the modulations; klein's single blocks, most of it, among them."""
    model = build_meta_policy(find_model_config(name), 64, 16)
    with torch.device("meta"):
        trainable.make_trainable(model, 4)
    assert least < trainable.trained_share(model) < 1


def test_a_run_says_what_share_it_trains(tmp_path):
    """In the log and in run.json; an adapter on the attention alone is a smaller share than on all."""
    from commands import run

    shares = {}
    for name, words in (("all", []), ("attention", ["lora_targets=[to_q, to_k, to_v]"])):
        out = tmp_path / name
        said = run(
            "train",
            "pocket/tiny",
            "lora_rank=2",
            "iterations=1",
            *words,
            "--out",
            out,
            "--no-report",
        )
        shares[name] = json.loads((out / "run.json").read_text())["trained_share"]
        assert f"on {shares[name]:.1%} of the model" in said + (out / "train.log").read_text()
    assert 0 < shares["attention"] < shares["all"] < 1


def test_a_compiler_is_looked_for_before_weights(monkeypatch):
    """On a GPU torch.compile needs one of C; nothing is loaded without."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(
        trainable, "load_policy", lambda *given, **more: pytest.fail("weights were read")
    )
    for device, word in (("cuda", "C compiler"), ("cpu", r"C\+\+ compiler")):
        with pytest.raises(
            InputError, match=f"`compile` must be false on a machine without a {word}"
        ):
            trainable.load_trainable_policy("pocket", resolution=64, compile=True, device=device)


MISSING = {
    "scheduler": "scheduler/scheduler_config.json",
    "tokenizer": "no vocabulary under tokenizer/",
    "tokenizer_2/tokenizer.json": "no vocabulary under tokenizer_2/",
    "text_encoder": "text_encoder/config.json",
    "text_encoder_2/model.safetensors": "no weights (*.safetensors) under text_encoder_2/",
    "vae/config.json": "vae/config.json",
    "transformer/config.json": "transformer/config.json",
}


@pytest.fixture
def pocket_copy(tmp_path):
    """The pocket model in a folder of its own, that may be harmed."""
    return shutil.copytree(inputs.fetch_model("pocket"), tmp_path / "model")


@pytest.mark.parametrize("name", MISSING)
def test_a_model_that_lacks_a_part_makes_no_run(pocket_copy, tmp_path, name):
    """The part is named, and no folder is there."""
    gone = pocket_copy / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(InputError, match=r"model: ") as error:
        run_folder.create_run(
            settings.load_settings("pocket/tiny", {"model": str(pocket_copy)}), tmp_path / "run"
        )
    assert MISSING[name] in str(error.value) and not (tmp_path / "run").exists()


TOKENIZERS = {
    "empty": "",
    "cut": None,
    "a list": "[]",
    "an object": "{}",
    "no model": '{"version": "1.0", "model": {}}',
    "bytes": "\\0\\1\\2",
    "deep": "[" * 10_000,
}


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2"])
@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_damaged_tokenizer_makes_no_run(pocket_copy, tmp_path, part, damage):
    """It would fail in training, at the first prompt."""
    file = pocket_copy / part / "tokenizer.json"
    file.write_text(file.read_text()[:1000] if TOKENIZERS[damage] is None else TOKENIZERS[damage])
    with pytest.raises(InputError, match=f"model: .*{part}") as error:
        run_folder.create_run(
            settings.load_settings("pocket/tiny", {"model": str(pocket_copy)}), tmp_path / "run"
        )
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_encoder_makes_no_run(pocket_copy, tmp_path):
    """Its tokens are numbers that the encoder has no row for."""
    file = pocket_copy / "tokenizer/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {
        word: n + 1000 * (n > 3) for word, n in content["model"]["vocab"].items()
    }
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="the text encoder has, which knows 40"):
        run_folder.create_run(
            settings.load_settings("pocket/tiny", {"model": str(pocket_copy)}), tmp_path / "run"
        )


def test_a_text_encoder_of_another_network_leaves_no_run(tmp_path, monkeypatch):
    """It is loaded where the prompts are encoded, before anything is written."""
    folder = tiny_families.build("sd3", tmp_path / "model")
    (folder / "text_encoder_2/config.json").write_text("{}")
    (tmp_path / "few.txt").write_text("a red star\ntwo cats\n")
    done = call(
        "train",
        "pocket/tiny",
        f"model={folder}",
        f"prompts={tmp_path / 'few.txt'}",
        f"eval_prompts={tmp_path / 'few.txt'}",
        "max_tokens=8",
        "dtype=float32",
        "reward=incompressibility",
        "eval_rewards=[]",
        "--out",
        tmp_path / "run",
        CHUNK_GRPO_CACHE=tmp_path / "cache",
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists(), done.stderr
    assert "`model` must have text encoders whose config.json fits their weights" in done.stderr


@pytest.mark.parametrize("name", tiny_families.BUILDERS)
def test_every_part_of_every_family_can_be_used(name, tmp_path):
    inputs.check_components(tiny_families.build(name, tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["model_index.json", "transformer/config.json", "scheduler/scheduler_config.json"]
)
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_damaged_file_of_a_model_is_one_sentence(pocket_copy, name, text):
    (pocket_copy / name).write_text(text)
    with pytest.raises(InputError) as error:
        inputs.check_pipeline_folder(pocket_copy)
    assert name in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"num_single_layers": 0},
        {"num_layers": 9},
        {"in_channels": 4},
        {"num_layers": -1},
        {"num_layers": "two"},
        {"num_attention_heads": 0},
    ],
)
def test_a_configuration_of_another_network_is_refused(pocket_copy, monkeypatch, change):
    """Before weights are read: fewer layers would be trained, further ones would be random."""
    file = pocket_copy / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    monkeypatch.setattr(policy, "_load_network", lambda *given: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="model: .*transformer") as error:
        policy.load_policy(str(pocket_copy), resolution=64)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", tiny_families.BUILDERS)
def test_what_diffusers_saved_belongs_together(name, tmp_path):
    """Of every family."""
    folder = tiny_families.build(name, tmp_path / "model")
    family = inputs.import_family(inputs.check_pipeline_folder(folder))
    inputs.check_network_weights(
        folder, "transformer", inputs.import_class(family.network_classes[0])
    )


def test_a_folder_with_the_embedded_model_s_name_is_measured_itself(tmp_path, monkeypatch):
    """`./pocket` of a user's own: an update takes as many rows as fit of this model, not of the one that is shipped."""
    own = tiny_flux.build(tmp_path / "pocket")
    monkeypatch.chdir(tmp_path)
    given = {
        "model": "./pocket",
        "resolution": 64,
        "eval_resolution": 64,
        "max_tokens": 8,
        "update_memory": 0.01,
    }
    run_settings = settings.load_settings("pocket/tiny", given)
    (tmp_path / "run").mkdir()
    state = load_policy_and_optimizer(prepare_state(run_settings, tmp_path / "run"))
    pair = read_model_config(own), find_model_config("pocket")
    fits, shipped = (fit_update_batch(one, run_settings).update_batch for one in pair)
    assert state.transitions_per_forward == fits != shipped


def test_a_download_that_was_cut_off_is_rejected_by_the_missing_shard(tmp_path):
    folder = tiny_families.build("klein", tmp_path / "model")
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    first, second = (weights.with_stem(f"{weights.stem}-0000{i}-of-00002") for i in (1, 2))
    names = list(inputs.read_tensor_shapes(folder, "transformer"))
    index = {"weight_map": {name: first.name for name in names} | {names[0]: second.name}}
    weights.rename(first)
    (folder / f"transformer/{weights.name}.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=f"has 1 of the 2 shards .*; {second.name} is missing"):
        inputs.check_pipeline_folder(folder)
    for wrong in (None, [], {names[0]: 3}):
        (folder / f"transformer/{weights.name}.index.json").write_text(
            json.dumps({"weight_map": wrong})
        )
        with pytest.raises(InputError, match="must have a mapping of tensors to files"):
            inputs.check_pipeline_folder(folder)


@pytest.mark.parametrize("memory", [1.0, 3.0, 7.0, 20.0, 40.0])
def test_a_compiled_batch_stays_within_its_memory(memory):
    """Compiled blocks get batches of a few sizes, so a batch of 17 takes as much as one of 24."""
    changes = {"update_memory": memory, "compile": True}
    run_settings = settings.load_settings("machines/24gb-lora-flux1-dev", changes)
    config = find_model_config(run_settings.model)
    fitted = fit_update_batch(config, run_settings)
    assert padded_batch_size(fitted.update_batch) == fitted.update_batch
    if fitted.update_batch > 1:
        assert activation_bytes(config, fitted) <= memory * 1e9
    larger = activation_bytes(config, run_settings, fitted.update_batch + 1)
    assert larger > memory * 1e9
