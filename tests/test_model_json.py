"""A model's JSON files of any content: one plain sentence before weights are read, and no run folder."""

import json
import shutil

import pytest
import tiny_families
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.models import inputs, policy
from chunk_grpo.planning.plan import describe_estimates
from chunk_grpo.runs import run_folder

QUANTIZED = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
CONTENTS = {
    "list": [],
    "text": "text",
    "number": 3,
    "null": None,
    "true": True,
    "list of lists": [["_class_name"]],
}


@pytest.fixture
def model(tmp_path):
    """The pocket model in a folder of its own, that may be harmed."""
    return shutil.copytree(inputs.fetch_model("pocket"), tmp_path / "model")


def sentence(action):
    """What an action says that must be rejected."""
    with pytest.raises(InputError) as error:
        action()
    assert "\n" not in str(error.value) and len(str(error.value)) < 500, str(error.value)
    return str(error.value)


def rejected(model, tmp_path, monkeypatch, *words, load=True, planned=True):
    """Load the model, plan with it and make a run: each says one sentence, reads no weights and leaves no folder."""
    monkeypatch.setattr(policy, "_load_network", lambda *given: pytest.fail("weights were read"))
    run_settings = settings.load_settings("pocket/tiny", {"model": str(model)})
    actions = [lambda: run_folder.create_run(run_settings, tmp_path / "run")]
    actions += [lambda: policy.load_policy(str(model), resolution=64, max_tokens=12)] * load
    actions += [lambda: describe_estimates(run_settings, 1e12)] * planned
    for action in actions:
        said = sentence(action)
        assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


FILES = [
    "model_index.json",
    "transformer/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/tokenizer.json",
]


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_file_that_holds_no_object_is_rejected(model, tmp_path, monkeypatch, name, kind):
    (model / name).write_text(json.dumps(CONTENTS[kind]))
    part = name.partition("/")[0]
    network = part in ("model_index.json", "transformer", "vae")
    tokenizer = part == "tokenizer"
    rejected(model, tmp_path, monkeypatch, part, load=not tokenizer, planned=network)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("tokenizer")])
def test_quantized_part_is_rejected(model, tmp_path, monkeypatch, name):
    file = model / name
    file.write_text(json.dumps(json.loads(file.read_text()) | QUANTIZED))
    network = name.startswith(("model_index", "transformer", "vae"))
    rejected(model, tmp_path, monkeypatch, "quantization_config", name, planned=network)


@pytest.mark.parametrize("name", tiny_families.BUILDERS)
def test_quantized_part_of_every_family_is_rejected(name, tmp_path, monkeypatch):
    folder = tiny_families.build(name, tmp_path / "model")
    for file in sorted(
        [*folder.glob("transformer/config.json"), *folder.glob("text_encoder*/config.json")]
    ):
        whole = file.read_text()
        file.write_text(json.dumps(json.loads(whole) | QUANTIZED))
        monkeypatch.setattr(
            policy, "_load_network", lambda *given: pytest.fail("weights were read")
        )
        said = sentence(lambda: policy.load_policy(str(folder), resolution=64, max_tokens=16))
        assert "quantization_config" in said and file.parent.name in said
        file.write_text(whole)


WRONG = [
    ("model_index.json", {"_class_name": []}),
    ("model_index.json", {"_class_name": 3}),
    ("model_index.json", {"_class_name": None}),
    ("model_index.json", {"_class_name": {"a": 1}}),
    ("transformer/config.json", {"axes_dims_rope": [None]}),
    ("transformer/config.json", {"axes_dims_rope": "x"}),
    ("transformer/config.json", {"in_channels": [4]}),
    ("transformer/config.json", {"num_layers": None}),
    ("vae/config.json", {"block_out_channels": "many"}),
    ("vae/config.json", {"block_out_channels": [None]}),
]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=str)
def test_values_of_a_wrong_type_are_rejected(model, tmp_path, monkeypatch, name, change):
    file = model / name
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    late = "axes_dims_rope" in change  # which a network is built with, and cannot make a step
    rejected(model, tmp_path, monkeypatch, name.partition("/")[0], load=not late)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": "x"},
        {"num_attention_heads": None},
        {"hidden_size": []},
        {"layer_norm_eps": [None]},
        {"pad_token_id": {}},
    ],
    ids=str,
)
def test_text_encoder_of_a_wrong_type_is_one_sentence(model, tmp_path, monkeypatch, change):
    """Before a run, and where a policy from Python encodes its first prompt."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    file = model / "text_encoder/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    run_settings = settings.load_settings("pocket/tiny", {"model": str(model)})
    assert "text_encoder" in sentence(lambda: run_folder.create_run(run_settings, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    loaded = policy.load_policy(str(model), resolution=64, max_tokens=12)
    assert "text encoders" in sentence(lambda: loaded.encode(["a red star"]))


def test_missing_class_name_is_said(model, tmp_path, monkeypatch):
    index = json.loads((model / "model_index.json").read_text())
    del index["_class_name"]
    (model / "model_index.json").write_text(json.dumps(index))
    rejected(model, tmp_path, monkeypatch, "_class_name")


def test_command_ends_with_code_2_and_leaves_no_folder(model, tmp_path):
    (model / "model_index.json").write_text("[]")
    for words in (
        ("train", "pocket/tiny", f"model={model}", "--out", tmp_path / "run"),
        ("plan", "pocket/tiny", f"model={model}"),
    ):
        done = call(*words)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "model_index.json must hold a JSON object" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        {"dtype": "fp16"},
        {"dtype": "fp8"},
        {"dtype": 16},
        {"dtype": None},
        {"dtype": []},
        {"weights_dtype": "float64"},
        {"weights_dtype": 3},
        {"weights_dtype": ""},
    ],
    ids=str,
)
def test_unknown_number_format_is_rejected_by_name(words):
    with pytest.raises(
        InputError, match=f"`{[*words][0]}` of load_policy must be .*float32.*bfloat16.*; got"
    ):
        policy.load_policy("pocket", resolution=64, **words)
