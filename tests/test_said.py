"""What is printed can be used as it stands: commands are quoted, foreign files are named, prompts are legible."""

import json
import shlex
import warnings

import pytest
import yaml
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.cli import publishing
from chunk_grpo.core import settings
from chunk_grpo.reporting import figures

FOREIGN = {
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "bf16",
        "num_processes": 8,
        "debug": False,
    },
    "DeepSpeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0},
    "diffusers": {"_class_name": "FluxPipeline", "_diffusers_version": "0.35.0"},
    "transformers": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8},
    "trl": {"model_name_or_path": "some/model", "learning_rate": 1e-5, "num_generations": 8},
    "peft": {"peft_type": "LORA", "r": 8},
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("form", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_configuration_of_another_program_is_named(tmp_path, kind, form):
    file = tmp_path / "config.yaml"
    file.write_text(form(FOREIGN[kind]))
    with pytest.raises(InputError) as error:
        settings.load_settings(str(file))
    said = str(error.value)
    assert (
        "\n" not in said
        and "configuration of" in said
        and kind in said
        and "did you mean" not in said
    )


def test_every_preset_is_no_configuration_of_another_program():
    for name in settings.list_presets():
        settings.load_settings(name)


def test_upload_command_is_quoted(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "my model; rm -rf $HOME"
    monkeypatch.setattr(
        "chunk_grpo.reporting.export.export_run", lambda run, folder, **options: folder
    )
    monkeypatch.setattr(publishing, "check_trust", lambda *given, **more: None)
    publishing.export(tmp_path, folder)
    line = capsys.readouterr().out.splitlines()[1]
    command = shlex.split(line.partition("licence: ")[2])
    assert command == ["hf", "upload", f"NAME/{folder.name}", str(folder)]


@pytest.mark.parametrize("prompt", ["红色的星星", "赤い星", "빨간 별", "a 星 of 🌟", "نجمة"])
def test_no_prompt_becomes_boxes(prompt):
    """A font that has the letters, or their numbers; never a box for a letter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of each letter without a shape
        image = Image.new("RGB", (8, 8))
        figures.figure_to_png(figures.plot_image_grid([[image]], [prompt], ["plain"]))
    text, fonts = figures.choose_fonts(prompt)
    usual = figures.choose_fonts("a red star")
    assert usual[0] == "a red star"
    assert text == prompt or all(f"\\u{{{ord(x):x}}}" in text or x in text for x in prompt)
    assert fonts


def test_doctor_says_why_torch_sees_no_gpu(monkeypatch):
    """Torch's CUDA, the driver, and each GPU's free memory and capability."""
    from types import SimpleNamespace

    from chunk_grpo.cli.machine import _describe_gpus

    def machine(cuda, count):
        about = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
        device = SimpleNamespace(
            device_count=lambda: count,
            get_device_properties=lambda i: about,
            mem_get_info=lambda i: (70 * 2**30, 80 * 2**30),
        )
        return SimpleNamespace(version=SimpleNamespace(cuda=cuda), cuda=device)

    rows = dict(_describe_gpus(machine("13.0", 1)))
    assert rows["torch's CUDA"] == "13.0"
    assert rows["cuda:0"] == "NVIDIA H100, 80 GiB, 70.0 GiB free, capability 9.0"
    assert "for CPUs" in dict(_describe_gpus(machine(None, 0)))["torch's CUDA"]
    assert "no CUDA" in dict(_describe_gpus(machine(None, 0)))["GPUs"]
    assert "driver" in dict(_describe_gpus(machine("13.0", 0)))["GPUs"]
