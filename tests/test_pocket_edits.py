"""Edits of the pocket world: the checker on pictures of known truth, the lists, the base, and a short run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import call
from diffusers import FluxKontextPipeline, FluxPipeline
from edit_recipe import encode_pictures, make_edit_lists, new_edit_flow, split_instructions
from PIL import Image
from pocket_recipe import (
    describe_files,
    encode_in_batches,
    load_flow,
    save_flow,
    unpack_flow_latents,
)

import chunk_grpo
from chunk_grpo import InputError, pocket
from chunk_grpo.core.files import read_json
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models.inputs import (
    ImagePrompt,
    find_editing_pipeline,
    find_unknown_words,
    read_model_prompts,
    read_prompts,
)
from chunk_grpo.models.policy import load_policy
from chunk_grpo.pocket import POCKET_DIR, edits
from chunk_grpo.pocket.world import Scene, SceneObject, render_scene
from chunk_grpo.rewards.rewards import load_reward, score_images
from chunk_grpo.runs import run_folder
from chunk_grpo.training.trainer import train_run

SPLITS = ("train", "validation", "test")
LISTS = {split: edits.read_edit_list(split) for split in SPLITS}
CHECK = edits.PocketEdit()
STAR = SceneObject("star", "red", 16.0, 16.0, 13.0)
RING = SceneObject("ring", "blue", 48.0, 48.0, 13.0)
SCENE = Scene("", (STAR, RING))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def verdict(instruction, *things, scene=SCENE):
    """What the checker says of a picture of some objects."""
    edit = edits.parse_instruction(instruction)
    record = edits.build_edit_record(scene, edit, "")
    return CHECK([render_scene(Scene("", things))], [instruction], [record]).item()


# The checker


@pytest.mark.parametrize("kind", edits.EDIT_KINDS)
def test_the_picture_of_an_edit_is_right_and_that_of_another_is_wrong(kind):
    rng = np.random.default_rng(5)
    for scene in [edits.sample_edit_scene(rng, count) for count in (1, 2) * 6]:
        possible = edits.possible_edits(scene)
        pictures = [render_scene(edits.apply_edit(scene, edit)) for edit in possible]
        for edit in [edit for edit in possible if edit.kind == kind][:6]:
            count = len(possible)
            records = [edits.build_edit_record(scene, edit, "")] * count
            verdicts = CHECK(pictures, [edit.instruction] * count, records)
            assert verdicts.tolist() == [float(other == edit) for other in possible]


@pytest.mark.parametrize("kind", edits.EDIT_KINDS)
def test_an_unchanged_image_is_wrong_though_it_is_fully_consistent(kind):
    records = [record for record in LISTS["test"] if record["prompt"].startswith(kind)]
    sources = [render_scene(edits.read_edit_record(record)[0]) for record in records]
    prompts = [record["prompt"] for record in records]
    assert CHECK(sources, prompts, records).max() == 0
    assert edits.PocketEditConsistency()(sources, prompts, records).min() == 1


def test_an_added_object_may_be_in_every_free_cell_and_nowhere_else():
    cross = SceneObject("cross", "green", 48.0, 16.0, 13.0)
    alone = Scene("", (STAR,))
    cells = edits.free_cells(alone)
    assert cells == [(16.0, 48.0), (48.0, 16.0), (48.0, 48.0)]
    for x, y in cells:
        assert verdict("add a green cross", STAR, replace(cross, x=x, y=y), scene=alone) == 1
    for wrong in [(replace(cross, x=16.0),), (STAR, cross, replace(cross, x=16.0, y=48.0))]:
        assert verdict("add a green cross", *wrong, scene=alone) == 0


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"x": 50.0}, 1),
        ({"x": 55.0}, 0),
        ({"radius": 12.0}, 1),
        ({"radius": 8.0}, 0),
        ({"colour": "purple"}, 0),
        ({"shape": "circle"}, 0),
    ],
)
def test_another_object_may_change_a_little_and_not_more(change, expected):
    assert verdict("remove the red star", replace(RING, **change)) == expected


def test_pictures_that_passed_through_the_autoencoder_are_judged_as_before():
    _, vae = load_flow()
    records = LISTS["validation"]
    parsed = [edits.read_edit_record(record) for record in records]
    after = np.stack([np.asarray(render_scene(edits.apply_edit(*pair))) for pair in parsed])
    with torch.no_grad():
        latents = unpack_flow_latents(encode_pictures(vae, after))
        decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    images = decoded.clamp(-1, 1) / 2 + 0.5
    prompts = [record["prompt"] for record in records]
    assert CHECK(images, prompts, records).mean() > 0.95
    assert edits.PocketEditConsistency()(images, prompts, records).min() > 0.9


def test_rewards_take_images_of_any_form_and_need_records():
    record = LISTS["test"][0]
    image = render_scene(edits.apply_edit(*edits.read_edit_record(record)))
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
    for name in ("pocket-edit", "pocket-edit-consistency"):
        reward = load_reward(name)
        for images in ([image], tensor, tensor.float() / 255):
            scores = score_images(name, reward, images, [record["prompt"]], records=[record])
            assert scores.tolist() == [1.0]
        with pytest.raises(InputError, match="must describe the scene of its image"):
            score_images(name, reward, [image], [record["prompt"]])
        assert reward([], [], []).shape == (0,)


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"prompt": "a red star"}, "must be an edit of the pocket world"),
        ({"prompt": "recolour the red star red"}, "must be an edit of the pocket world"),
        ({"prompt": "remove the green star"}, "there is no green star"),
        ({"prompt": "move the red star up"}, "no free cell"),
        ({"prompt": "add a blue ring"}, "there is a blue ring already"),
        ({"prompt": "add a green star"}, "there are 2 objects already"),
        ({"objects": [{"shape": "star"}]}, "must describe the scene of its image"),
        ({"objects": None}, "must describe the scene of its image"),
        ({"background": 300}, "must describe the scene of its image"),
    ],
)
def test_a_record_that_cannot_be_judged_is_rejected_in_one_sentence(change, fault):
    record = edits.build_edit_record(SCENE, edits.parse_instruction("remove the red star"), "")
    CHECK.check_record(record)
    with pytest.raises(InputError, match=fault) as error:
        CHECK.check_record(record | change)
    assert "\n" not in str(error.value)


# The lists


def test_lists_and_images_are_what_their_function_makes():
    for split, edited in make_edit_lists().items():
        made = []
        for number, (scene, of_scene) in enumerate(edited):
            image = f"images/{split}-{number:02d}.png"
            made += [edits.build_edit_record(scene, edit, image) for edit in of_scene]
            with Image.open(POCKET_DIR / "editing" / image) as shown:
                assert np.array_equal(np.asarray(shown), np.asarray(render_scene(scene)))
        assert LISTS[split] == made
        kinds = [CHECK.category(record["prompt"]) for record in made]
        assert kinds == ["recolour", "move", "add", "recolour", "move", "remove"] * (
            len(edited) // 2
        )


def test_no_instruction_scene_or_image_is_in_two_lists():
    allowed = split_instructions()
    for split in SPLITS:
        others = [other for other in SPLITS if other != split]
        prompts = {record["prompt"] for record in LISTS[split]}
        scenes = {frozenset(edits.read_edit_record(record)[0].things) for record in LISTS[split]}
        images = {prompt.image_sha256 for prompt in shipped_prompts(split)}
        assert prompts <= {edit.instruction for edit in allowed[split]}
        for other in others:
            assert not allowed[split] & allowed[other]
            assert not prompts & {record["prompt"] for record in LISTS[other]}
            assert not scenes & {
                frozenset(edits.read_edit_record(record)[0].things) for record in LISTS[other]
            }
            assert not images & {prompt.image_sha256 for prompt in shipped_prompts(other)}


def shipped_prompts(split):
    """The prompts of a list as a run reads them, each with its image."""
    return read_model_prompts(f"pocket:edit-{split}", "prompts", "pocket/editing")


def test_a_run_reads_the_lists_by_name_each_prompt_with_its_image():
    assert find_editing_pipeline("pocket/editing") == "FluxKontextPipeline"
    assert find_editing_pipeline("pocket") == ""
    for split in SPLITS:
        prompts = shipped_prompts(split)
        assert {type(prompt) for prompt in prompts} == {ImagePrompt}
        assert list(map(str, prompts)) == read_prompts(f"pocket:edit-{split}")
        assert {prompt.size for prompt in prompts} == {(64, 64)}


@pytest.mark.parametrize(
    "words, named",
    [
        (["prompts=pocket:edit-dev"], "pocket:edit-validation"),
        (["eval_prompts=pocket:test"], "because FluxKontextPipeline edits images"),
        (["model=pocket/edit"], "pocket/editing"),
        (["reward=pocket-edits"], "pocket-edit"),
        (["model=pocket", "prompts=pocket:train"], "must be an edit of the pocket world"),
    ],
)
def test_an_unknown_name_or_a_list_without_scenes_ends_training_in_one_sentence(
    tmp_path, words, named
):
    done = call("train", "pocket/edit", *words, "--out", tmp_path / "run")
    assert done.returncode == 2 and named in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_list_is_rejected_by_name():
    with pytest.raises(InputError, match="train, validation or test; got 'dev'"):
        edits.read_edit_list("dev")


# The base


def test_files_of_the_editing_base_are_as_shipped_and_small():
    folder = POCKET_DIR / "editing"
    files = read_json(folder / "manifest.json")["sha256"]
    assert pocket.verify_pocket_files(folder) == len(files)
    on_disk = {
        f.relative_to(folder).as_posix()
        for f in folder.rglob("*")
        if f.is_file() and f.parent.name != "vae"
    }
    assert on_disk == {*files, "manifest.json"}
    assert sum((folder / name).stat().st_size for name in files) < 3e6


def test_the_base_knows_every_word_and_shares_the_shipped_autoencoder():
    path = pocket.pocket_model_path("pocket/editing")
    prompts = [record["prompt"] for split in SPLITS for record in LISTS[split]]
    assert find_unknown_words(path, prompts) == []
    shipped, editing = (
        load_policy(name, resolution=64, max_tokens=12) for name in ("pocket", "pocket/editing")
    )
    latents = torch.randn(
        2, *shipped.noise(torch.Generator()).shape, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(shipped.decode(latents), editing.decode(latents), rtol=0, atol=0)


def test_the_base_follows_about_half_of_the_instructions():
    quality = read_json(POCKET_DIR / "editing/manifest.json")["quality"]
    assert 0.3 < quality["edit"] < 0.6 and quality["best_of_images"] > 0.8


# A run


def test_a_short_run_trains_and_is_evaluated_by_both_rewards_and_every_kind(tmp_path):
    changes = {
        "iterations": 2,
        "prompts_per_iteration": 2,
        "images_per_prompt": 4,
        "eval_every": 2,
        "eval_count": 4,
        "eval_images": 1,
        "eval_steps": 4,
        "hybrid_split": 2,
        "eval_prompts": "pocket:edit-validation",
        "threads": 1,
    }
    settings = load_settings("pocket/edit", changes)
    run = run_folder.create_run(settings, tmp_path / "run")
    train_run(settings, run, log=lambda text: None)
    run_folder.update_run_json(run, status="finished")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert "eval_pocket-edit-consistency" in lines[-1]

    chunk_grpo.evaluate(run)
    summary = json.loads((run / "evaluation/summary.json").read_text())
    assert summary["n_prompts"] == len(LISTS["validation"])
    for name in ("pocket-edit", "pocket-edit-consistency"):
        assert set(summary["rewards"][name]["categories"]["base"]) == set(edits.EDIT_KINDS)


# What both recipes save


def test_pictures_are_encoded_in_batches_without_a_change():
    _, vae = load_flow()
    pictures = np.stack([np.asarray(render_scene(SCENE))] * 3)
    latents = encode_in_batches(vae, pictures, batch=2)
    packed = encode_pictures(vae, pictures)
    assert latents.shape == (3, 8, 4, 4) and not latents.requires_grad
    shifted = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert torch.allclose(unpack_flow_latents(packed), shifted, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "pipeline_class"), [(load_flow, FluxPipeline), (new_edit_flow, FluxKontextPipeline)]
)
def test_both_bases_are_saved_by_one_function(tmp_path, make, pipeline_class):
    model, vae = make()
    save_flow(model, vae, tmp_path, pipeline_class)
    saved = pipeline_class.from_pretrained(tmp_path)
    assert type(saved) is pipeline_class and saved.scheduler.config.shift == 3.0
    for part, loaded in (
        (model.transformer, saved.transformer),
        (model.clip, saved.text_encoder),
        (model.t5, saved.text_encoder_2),
    ):
        expected = part.state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())


@pytest.mark.parametrize("part", ["bases", "editing"])
def test_shipped_manifests_describe_their_files(part):
    folder = POCKET_DIR / part
    manifest = read_json(folder / "manifest.json")
    described = describe_files([folder / name for name in manifest["sha256"]], folder)
    assert described == {key: manifest[key] for key in ("bytes", "sha256")}
