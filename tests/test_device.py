"""Where a policy is trained: a large model never ends up on the CPU without anybody having asked for it."""

import warnings
from unittest import mock

import pytest
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core.machine import choose_device
from chunk_grpo.core.settings import load_settings
from chunk_grpo.planning.processes import choose_image_device, choose_training_device
from chunk_grpo.runs.run_folder import create_run

LARGE = [
    "black-forest-labs/FLUX.1-dev",
    "stabilityai/stable-diffusion-3.5-medium",
    "Qwen/Qwen-Image",
]


@pytest.fixture
def no_gpu():
    with mock.patch("torch.cuda.is_available", lambda: False):
        yield


@pytest.mark.parametrize("model", LARGE)
def test_large_model_is_not_trained_on_the_cpu_unless_asked(no_gpu, model, tmp_path):
    settings = load_settings({"model": model, "reward": "incompressibility"})
    with pytest.raises(
        InputError, match="^`device` must be cpu to train a large .* billion .*got auto"
    ):
        create_run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_command_refuses_a_gpu_preset_on_the_cpu_before_it_looks_for_weights(no_gpu, tmp_path):
    done = call("train", "machines/80gb-lora-flux1-dev", "--out", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 2 and "`device` must be cpu" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_large_model_is_trained_on_the_cpu_if_asked(no_gpu):
    assert choose_training_device(load_settings({"model": LARGE[0], "device": "cpu"})) == "cpu"


def test_small_model_is_trained_on_the_cpu_without_asking(no_gpu):
    assert choose_training_device(load_settings("pocket/tiny")) == "cpu"


def test_gpu_that_is_asked_for_and_missing_is_an_error(no_gpu, tmp_path):
    with pytest.raises(
        InputError, match="^`device` must be auto or cpu if torch sees no GPU .*got cuda"
    ):
        create_run(load_settings("pocket/tiny", {"device": "cuda"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gpu_is_used_unless_the_cpu_is_asked_for():
    with mock.patch("torch.cuda.is_available", lambda: True):
        assert [choose_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
        assert choose_training_device(load_settings({"model": LARGE[0]})) == "cuda"


def test_unknown_device_is_rejected_by_name():
    with pytest.raises(InputError, match="`device` must be .*auto.*cpu.*cuda"):
        load_settings("pocket/tiny", {"device": "gpu"})


def test_images_of_a_large_model_on_the_cpu_come_with_a_warning(no_gpu):
    with pytest.warns(UserWarning, match="sampled on the CPU.*11.9 billion"):
        assert choose_image_device(load_settings({"model": LARGE[0]})) == "cpu"
    with warnings.catch_warnings(action="error"):
        assert choose_image_device(load_settings({"model": LARGE[0], "device": "cpu"})) == "cpu"
        assert choose_image_device(load_settings("pocket/tiny")) == "cpu"
