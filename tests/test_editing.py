"""Models that edit images: the images of a list's prompts, from the file to training, evaluation, samples and exports."""

import copy
import json
import pickle

import pandas as pd
import pytest
import tiny_families
import torch
from PIL import Image
from transformers import Qwen2VLProcessor
from transformers.utils import is_torchvision_available

import chunk_grpo
from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.evaluation import benchmarks
from chunk_grpo.models import inputs, policy
from chunk_grpo.models.cost import forward_flops, known_model_configs, prompt_embeds_bytes
from chunk_grpo.models.inputs import ImagePrompt
from chunk_grpo.planning.disk import count_encoded_prompts
from chunk_grpo.reporting import figures
from chunk_grpo.runs import run_folder
from chunk_grpo.training.trainer import train_run

EDITS = [("a red star", "wide"), ("a red star", "tall"), ("two cats", "wide"), ("two cats", "wide")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A small Kontext, two images, and a list of edits, of which one is repeated; embeddings stay here."""
    folder = tmp_path_factory.mktemp("editing")
    tiny_families.build("kontext", folder / "model")
    (folder / "images").mkdir()
    for name, size, colour in (("wide", (96, 64), "crimson"), ("tall", (64, 128), "navy")):
        Image.new("RGB", size, colour).save(folder / f"images/{name}.png")
    records = [{"prompt": text, "image": f"images/{name}.png"} for text, name in EDITS]
    (folder / "edits.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(folder / "cache"))
        yield folder


def edit_settings(home, **more):
    """Settings of a short run on the list; images are evaluated at another resolution than they are trained at."""
    return settings.load_settings(
        {
            "model": str(home / "model"),
            "prompts": str(home / "edits.jsonl"),
            "eval_prompts": str(home / "edits.jsonl"),
            "resolution": 64,
            "eval_resolution": 32,
            "max_tokens": 8,
            "dtype": "float32",
            "iterations": 1,
            "images_per_prompt": 2,
            "prompts_per_iteration": 2,
            "steps": 6,
            "chunks": "2,3",
            "eval_steps": 3,
            "hybrid_split": 2,
            "threads": 1,
            "reward": "tiny_rewards:red",
            "eval_rewards": [],
            "gradient_checkpointing": False,
            **more,
        }
    )


def test_a_prompt_is_its_text_and_its_image(home):
    """It is used as a text; copies are equal; another image, or none, makes another prompt."""
    wide, tall, cats, again = inputs.read_run_prompts(edit_settings(home))
    assert [str(prompt) for prompt in (wide, tall)] == ["a red star"] * 2
    assert wide.split() == ["a", "red", "star"] and json.dumps(wide) == '"a red star"'
    assert wide != tall and wide != "a red star" and "a red star" != wide  # noqa: SIM300
    assert cats == again and len({wide, tall, cats, again}) == 3
    for other in (copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert other == wide and hash(other) == hash(wide) and other.image == wide.image
    moved = home / "images/moved.png"
    moved.write_bytes(wide.image.read_bytes())
    assert ImagePrompt("a red star", moved) == wide
    assert wide.with_text("two cats") == cats


@pytest.mark.parametrize(
    "record, fault",
    [
        ({"prompt": "a red star"}, "must name an image in line 2"),
        ("a red star", "must name an image in line 2"),
        ({"prompt": "a red star", "image": ""}, "must name an image in line 2"),
        ({"prompt": "a red star", "image": 3}, "must name an image in line 2"),
        ({"prompt": "a red star", "image": "none.png"}, "none.png is not a file"),
        ({"prompt": "a red star", "image": "images"}, "images is not a file"),
        ({"prompt": "a red star", "image": "words.png"}, "words.png is not a readable image"),
        ({"prompt": "a red star", "image": "cut.png"}, "cut.png is not a readable image"),
    ],
)
def test_an_image_that_is_missing_or_broken_is_named_before_a_weight_is_read(
    home, tmp_path, monkeypatch, record, fault
):
    first = {"prompt": "two cats", "image": str(home / "images/wide.png")}
    (tmp_path / "images").mkdir()
    (tmp_path / "words.png").write_text("no image")
    whole = (home / "images/wide.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    source = tmp_path / "list.jsonl"
    source.write_text("\n".join(map(json.dumps, [first, record])))
    monkeypatch.setattr(policy, "_load_network", lambda *_: pytest.fail("weights were read"))
    changed = edit_settings(home, prompts=str(source))
    with pytest.raises(InputError, match=fault) as error:
        inputs.check_and_hash_inputs(changed)
    assert str(error.value).startswith("prompts: ") and "line 2" in str(error.value)


def test_a_list_of_texts_is_rejected_for_a_model_that_edits(home):
    with pytest.raises(InputError, match="because FluxKontextPipeline edits images"):
        inputs.check_and_hash_inputs(edit_settings(home, eval_prompts="pocket:test"))


def test_a_model_that_does_not_edit_reads_the_text_alone(home):
    prompts = inputs.read_run_prompts(edit_settings(home, model="pocket"))
    assert prompts == [text for text, _ in EDITS]
    assert {type(prompt) for prompt in prompts} == {str}


def test_an_image_is_scaled_and_cropped_to_its_middle(tmp_path):
    """The proportions stay; a photo is turned as its camera was."""
    picture = Image.new("RGB", (90, 30), "white")
    picture.paste("black", (30, 0, 60, 30))
    picture.save(tmp_path / "three.png")
    middle = inputs.open_source_image(ImagePrompt("x", tmp_path / "three.png"), 30, 30)
    assert middle.size == (30, 30) and middle.getextrema() == ((0, 0),) * 3
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "turned.png", exif=exif)
    prompt = ImagePrompt("x", tmp_path / "turned.png")
    assert prompt.size == (30, 90)
    assert inputs.open_source_image(prompt, 30, 30).getextrema() == ((0, 0),) * 3


def test_an_image_is_encoded_once_for_each_size(home, monkeypatch):
    """Its latents follow the resolution and the content, and come from the disk the second time."""
    model = policy.load_policy(str(home / "model"), resolution=64, max_tokens=8)
    wide, tall, *_ = inputs.read_run_prompts(edit_settings(home))
    rows = model.encode([wide, tall, wide])
    latents = rows["image_latents"]
    assert latents.shape == (3, 16, 16) and torch.equal(latents[0], latents[2])
    assert (latents[0] - latents[1]).abs().max() > 0.01
    torch.testing.assert_close(rows["prompt_embeds"][0], rows["prompt_embeds"][1])
    assert model.set_resolution(32).encode([wide])["image_latents"].shape == (1, 4, 16)
    monkeypatch.setattr(type(model), "embed", lambda *_: pytest.fail("encoded again"))
    assert torch.equal(model.set_resolution(64).encode([tall])["image_latents"][0], latents[1])
    with pytest.raises(InputError, match="must each have an image"):
        inputs.open_source_image("a red star", 64, 64)


def test_latents_that_a_vae_encoded_in_tiles_are_not_those_of_the_whole_image(home):
    whole, tiled = (
        policy.load_policy(str(home / "model"), resolution=64, max_tokens=8, vae_tiling=tiling)
        for tiling in (False, True)
    )
    assert whole.key != tiled.key and whole.encoder_hash == tiled.encoder_hash


def test_guidance_reads_the_empty_prompt_with_each_image(home):
    model = policy.load_policy(str(home / "model"), resolution=64, max_tokens=8, true_cfg_scale=3.0)
    rows = model.encode(inputs.read_run_prompts(edit_settings(home))[:2])
    assert torch.equal(rows["negative_image_latents"], rows["image_latents"])
    torch.testing.assert_close(rows["negative_prompt_embeds"][0], rows["negative_prompt_embeds"][1])
    assert not torch.equal(rows["negative_prompt_embeds"], rows["prompt_embeds"])


def test_qwen_rejects_a_prompt_that_it_would_have_to_cut(home, tmp_path):
    model = tiny_families.build("qwen_edit", tmp_path / "model")
    editor = policy.load_policy(str(model), resolution=64, max_tokens=10)
    prompt = ImagePrompt("two cats left of three dogs", home / "images/wide.png")
    with pytest.raises(InputError, match="max_tokens: 10 is too few for the prompt 'two cats left"):
        editor.encode([prompt])
    rows = editor.encode([prompt.with_text("two")])
    assert rows["prompt_embeds"].shape[1] == 10 + editor.image_text_tokens


def test_a_processor_that_needs_torchvision_says_so(tmp_path, monkeypatch):
    """Qwen's processor reads videos too, with torchvision alone."""
    folder = tiny_families.build("qwen_edit", tmp_path / "model")
    inputs.check_components(folder)
    if not is_torchvision_available():
        monkeypatch.setattr(Qwen2VLProcessor, "get_attributes", tiny_families.PROCESSOR_PARTS)
        with pytest.raises(InputError, match="it needs torchvision, which is not installed"):
            inputs.check_components(folder)
    for file in (folder / "processor").glob("*"):
        file.write_text("[]")
    monkeypatch.undo()
    with pytest.raises(InputError, match="processor cannot be used"):
        inputs.check_components(folder)


@pytest.fixture(scope="module")
def run(home):
    """A run with guidance and an adapter: trained and evaluated."""
    run_settings = edit_settings(home, true_cfg_scale=3.0, lora_rank=2)
    made = run_folder.create_run(run_settings, home / "run")
    train_run(run_settings, made, log=lambda text: None)
    run_folder.update_run_json(made, status="finished")
    chunk_grpo.evaluate(made)
    return made


def test_a_run_trains_on_edits_and_is_evaluated_on_them(run):
    """The ratio is 1 before the first update; each record has its source image; a repeated edit counts once."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["ratio_floor"] == 0 and lines[1]["ratio_floor_rollout"] < 1e-4
    (first, *_) = (run / "samples/000000/manifest.jsonl").read_text().splitlines()
    with Image.open(run / "samples/000000" / json.loads(first)["source"]) as image:
        assert image.size == (32, 32)
    records = run_folder.read_evaluation_records(run)
    assert len({record["source"] for record in records}) == len(EDITS)
    assert len({record["source_sha256"] for record in records}) == 2
    for record in records:
        with Image.open(run / "evaluation" / record["source"]) as image:
            assert image.size == (32, 32)
    summary = json.loads((run / "evaluation/summary.json").read_text())
    assert summary["n_prompts"] == 3 and summary["n_listed"] == 4
    assert summary["rewards"]["tiny_rewards:red"]["plain"]["n"] == 3


def test_figures_samples_and_exports_show_the_source_image(run, home):
    figure = figures.plot_before_after(
        pd.DataFrame(run_folder.read_evaluation_records(run)),
        run / "evaluation",
        "tiny_rewards:red",
    )
    assert figure.axes[0].get_title() == "source"
    assert len(figure.axes[0].images) == 1
    prompts = inputs.read_run_prompts(edit_settings(home))[:2]
    images = chunk_grpo.sample_run(run, prompts, arms=["base"], out=home / "samples")
    assert (images[0]["image"].tobytes()) != (images[1]["image"].tobytes())
    listed = json.loads((home / "samples/samples.json").read_text())["images"]
    assert [x["source"] for x in listed] == [str(prompt.image) for prompt in prompts]
    chunk_grpo.export_run(run, home / "exported")
    with Image.open(home / "exported/source.png") as image:
        assert image.size == (32, 32)
    with pytest.raises(InputError, match="must each have an image for FluxKontextPipeline"):
        chunk_grpo.sample_run(run, ["a red star"])


def test_another_image_under_the_same_name_is_another_list(run, home):
    """The run's record tells, as it does of another text."""
    known = json.loads((run / "run.json").read_text())
    run_settings = run_folder.read_run_settings(run)
    assert inputs.find_changed_input(run_settings, known) is None
    file = home / "images/tall.png"
    content = file.read_bytes()
    Image.new("RGB", (64, 128), "green").save(file)
    assert inputs.find_changed_input(run_settings, known) == "prompts"
    file.write_bytes(content)
    assert inputs.find_changed_input(run_settings, known) is None


def test_a_plan_counts_the_longer_sequence(home):
    """A forward pass of FLUX.1-Kontext takes more than FLUX.1's, and its embeddings hold the image's latents."""
    known = known_model_configs()
    dev, kontext = (known[f"black-forest-labs/FLUX.1-{name}"] for name in ("dev", "Kontext-dev"))
    ratio = forward_flops(kontext, 512, 512) / forward_flops(dev, 512, 512)
    assert 1.6 < ratio < 1.9  # 2 x 1024 + 512 tokens to 1024 + 512, and more attention
    run_settings = settings.load_settings(
        {"resolution": 512, "max_tokens": 512, "dtype": "bfloat16"}
    )
    apart = [prompt_embeds_bytes(config, run_settings) for config in (dev, kontext)]
    assert apart[1] - apart[0] == 1024 * 64 * 2
    edit = known["Qwen/Qwen-Image-Edit"]
    rows = prompt_embeds_bytes(edit, run_settings)
    assert rows == ((512 + 18**2 + 2) * 3584 + 1024 * 64) * 2
    guided = edit_settings(home, true_cfg_scale=3.0)
    assert count_encoded_prompts(guided, kontext) == 2 * count_encoded_prompts(
        edit_settings(home), kontext
    )
    said = inputs.describe_prompts(guided.prompts, "prompts", guided.model)
    assert said.endswith(
        "1 of them repeated; each edits an image, cropped to the shape of the generated one, 4 of them not square"
    )


def test_a_benchmark_of_texts_is_refused_before_the_model_is_loaded(home, tmp_path):
    run = run_folder.create_run(edit_settings(home), tmp_path / "run")
    with pytest.raises(
        InputError, match="`benchmark` must be left out for a run whose model edits"
    ):
        benchmarks.run_benchmark(run, "pocket:test")
    assert not (run / "benchmarks").exists()
