"""Images that are not square: settings, plan, training, resuming, evaluation, samples and model cards."""

import json
import math

import pytest
import tiny_families
from commands import run
from PIL import Image
from small_runs import metrics, trained, write

from chunk_grpo import InputError
from chunk_grpo.core.settings import (
    Settings,
    dump_settings,
    format_resolution,
    image_size,
    load_settings,
)
from chunk_grpo.models import activations
from chunk_grpo.models.cost import find_model_config, forward_flops, latent_numel
from chunk_grpo.models.families import FluxPolicy
from chunk_grpo.planning.devices import rate_share
from chunk_grpo.planning.disk import run_disk_bytes
from chunk_grpo.planning.memory import training_memory
from chunk_grpo.planning.plan import describe_estimates
from chunk_grpo.reporting.model_card import pipeline_options

WIDE, TALL = [32, 64], [64, 32]
SIZES = {"resolution": WIDE, "eval_resolution": TALL}
WORDS = [f"{name}={json.dumps(value)}" for name, value in SIZES.items()]


def test_a_size_is_one_number_or_height_and_width(tmp_path):
    """Equal sides are one number; a written file gives the same settings."""
    settings = load_settings("pocket/tiny", ["resolution=[512, 768]", "eval_resolution=[96, 96]"])
    assert settings.resolution == (512, 768) and settings.eval_resolution == 96
    (tmp_path / "s.yaml").write_text(dump_settings(settings))
    assert load_settings(tmp_path / "s.yaml") == settings
    assert load_settings(json.loads(settings.model_dump_json())) == settings
    assert image_size(720) == (720, 720) and format_resolution(720) == "720 px"
    assert format_resolution([512, 768]) == "512 x 768 px (height x width)"


@pytest.mark.parametrize(
    "value", [100, [512, 700], [512], [512, 512, 512], "512", [512.0, 512], True, 8, [16, 16_400]]
)
def test_a_size_that_cannot_be_is_rejected_in_one_sentence(value):
    with pytest.raises(
        InputError, match=r"`eval_resolution` must be the side length of a square or"
    ):
        Settings(eval_resolution=value)


@pytest.mark.parametrize(
    "model",
    [
        "black-forest-labs/FLUX.1-dev",
        pytest.param("stabilityai/stable-diffusion-3.5-medium", marks=pytest.mark.slow),
    ],
)
def test_plan_counts_the_pixels_of_both_sides(model):
    """Twice as wide is twice the tokens, and wide costs what tall costs."""
    config = find_model_config(model)
    square, wide, tall = 512, (512, 1024), (1024, 512)
    assert latent_numel(config, wide) == 2 * latent_numel(config, square)
    # Squares of 720 and 736 pixels have 2,025 and 2,116 tokens, the others 2,048.
    flops = {size: forward_flops(config, size, 512) for size in (720, wide, tall, 736)}
    assert flops[720] < flops[wide] == flops[tall] < flops[736]
    memory = [
        training_memory(Settings(model=model, resolution=size, lora_rank=8), config)
        for size in (square, wide, tall)
    ]
    assert memory[1] == memory[2]
    assert memory[1]["trajectories"] == 2 * memory[0]["trajectories"]
    assert memory[1]["activations"] > memory[0]["activations"]
    decoding = [
        activations._decode_bytes(config, size, "bfloat16", False, 1) for size in (wide, tall)
    ]
    assert decoding[0] == decoding[1]
    disk = [
        run_disk_bytes(Settings(model=model, resolution=s, eval_resolution=s), config)
        for s in (wide, tall, square)
    ]
    assert disk[0] == disk[1] and disk[0]["images"] == 2 * disk[2]["images"]
    lines = dict(describe_estimates(Settings(model=model, resolution=wide), 1e12))
    assert "512 x 1024 px (height x width)" in lines["one forward pass"]


def test_a_measured_share_is_that_of_the_square_with_as_many_pixels():
    config = find_model_config("black-forest-labs/FLUX.1-dev")
    shares = [
        rate_share("h200", "bfloat16", size, config) for size in (720, (480, 1080), (512, 2048))
    ]
    assert shares[0] == shares[1] and shares[2] == rate_share("h200", "bfloat16", 1024, config)
    assert shares[0] != shares[2] and math.prod(image_size((480, 1080))) == 720**2


@pytest.mark.parametrize(
    "name",
    [
        "dev",
        pytest.param("sd3", marks=pytest.mark.slow),
        pytest.param("qwen", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_drawn_resumed_evaluated_and_sampled_in_its_sizes(name, tmp_path):
    """Two families of positions, one that crops them; a killed run ends as one that was not."""
    folder = write(tmp_path, model=str(tiny_families.build(name, tmp_path / name)), **SIZES)
    few = ["prompts_per_iteration=2", "images_per_prompt=2", "eval_every=1", "eval_count=2"]
    few = ["train", folder / "s.yaml", *few, "steps=5", "chunks=2,2", "--no-report"]
    run(*few, "iterations=2", "--out", folder / "whole")
    run(*few, "iterations=1", "--out", folder / "parts")
    run(*few, "iterations=2", "--out", folder / "parts", "--resume")
    assert trained(folder / "whole") == trained(folder / "parts")
    assert metrics(folder / "whole")[-1] == metrics(folder / "parts")[-1]
    assert metrics(folder / "whole")[1]["ratio_floor"] < 1e-5

    run("evaluate", folder / "whole", "eval_prompts=" + str(folder / "prompts.txt"))
    summary = json.loads((folder / "whole" / "evaluation" / "summary.json").read_text())
    assert summary["resolution"] == TALL and summary["as_trained"]["resolution"] == WIDE
    run("sample", folder / "whole", "two cats", "--resolution", "32,96", "--out", folder / "drawn")
    drawn = [file for file in (folder / "drawn").glob("0*.png")]
    assert drawn and {Image.open(file).size for file in drawn} == {(96, 32)}
    run("export", folder / "whole", folder / "out")
    card = (folder / "out" / "README.md").read_text()
    assert "height=64, width=32" in card


@pytest.mark.slow
def test_the_pocket_model_trains_on_wide_images(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red star\ntwo stars\n")
    words = ["iterations=2", "prompts_per_iteration=2", "images_per_prompt=2", "threads=1", *WORDS]
    words += [f"eval_prompts={tmp_path / 'prompts.txt'}", "eval_count=2"]
    run("train", "pocket/tiny", *words, "--out", tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert all(math.isfinite(line["reward"]) for line in lines if "reward" in line)
    summary = json.loads((tmp_path / "run" / "evaluation" / "summary.json").read_text())
    assert summary["resolution"] == TALL
    evaluation = tmp_path / "run" / "evaluation"
    sizes = {False: set(), True: set()}
    for file in evaluation.rglob("*.png"):
        sizes["as-trained" in file.parent.name].add(Image.open(file).size)
    assert sizes == {False: {(32, 64)}, True: {(64, 32)}}


def test_a_pipeline_is_told_height_and_width():
    """The pipeline that a card describes draws images of the evaluation's size."""
    options = pipeline_options(Settings(eval_resolution=(512, 768)), FluxPolicy)
    assert (options["height"], options["width"]) == (512, 768)
