"""What the lessons of the chapter pocket leave out: the shipped files, an offline call in a fresh process, seeds."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pocket_recipe import hard_negatives, split_prompts

from chunk_grpo import InputError, pocket
from chunk_grpo.pocket import clip, geneval
from chunk_grpo.pocket.world import (
    POCKET_CATEGORIES,
    parse_caption,
    render_scene,
    sample_scene,
    sample_scene_image,
)
from chunk_grpo.rewards import rewards

POCKET_REWARDS = [
    "pocket-clip",
    "pocket-geneval",
    "pocket-partial",
    "pocket-warm",
    "pocket-low",
    "pocket-low-pixels",
]
OFFLINE = """
import socket

def refuse(*args, **kwargs):
    raise OSError("no network in this test")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import sys
import torch
from diffusers import FluxPipeline

torch.set_num_threads(1)
pipeline = FluxPipeline.from_pretrained(sys.argv[1])
assert not any(name.startswith("chunk_grpo") for name in sys.modules)
images = pipeline(
    ["a red circle", "a blue star"], height=64, width=64, max_sequence_length=int(sys.argv[2]), num_inference_steps=20,
    generator=torch.Generator().manual_seed(0),
).images
for image in images:
    low, high = zip(*image.getextrema())
    assert image.size == (64, 64) and max(high) - min(low) > 80, image.getextrema()  # not one flat grey
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scenes():
    """Three hundred fresh scenes of both prompt lists, their pictures and prompts."""
    rng = np.random.default_rng(2026)
    prompts = [
        str(p)
        for p in rng.choice(
            pocket.read_pocket_prompts("train") + pocket.read_pocket_prompts("test"), 300
        )
    ]
    drawn = [sample_scene(p, rng) for p in prompts]
    return rng, prompts, [render_scene(s) for s in drawn]


@pytest.mark.parametrize(
    "caption",
    ["a red star and a blue star", "a red star and a red star"]
    + [f"a star {relation} a star" for relation in ("left of", "right of", "above", "below")],
)
def test_two_objects_of_one_shape_may_stand_in_either_order(caption):
    rng = np.random.default_rng(5)
    images = [sample_scene_image(caption, rng) for _ in range(8)]
    for check in (geneval.PocketGenEval(), geneval.PocketPartial()):
        assert check(images, [caption] * 8).tolist() == [1.0] * 8


def test_a_relation_of_two_objects_of_one_shape_can_be_wrong():
    rng = np.random.default_rng(5)
    images = [sample_scene_image("a star above a star", rng) for _ in range(8)]
    scores = geneval.PocketGenEval()(images, ["a star left of a star"] * 8)
    assert scores.mean() < 1


def test_diffusers_alone_draws_an_image_without_network():
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, pocket.pocket_model_path(), str(pocket.MAX_TOKENS)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_shipped_file_is_as_measured_and_small():
    manifest = pocket.read_pocket_manifest()
    assert pocket.verify_pocket_files() == len(manifest["sha256"])
    on_disk = {
        f.relative_to(pocket.POCKET_DIR).as_posix()
        for part in ("base", "clip", "prompts")
        for f in (pocket.POCKET_DIR / part).rglob("*")
        if f.is_file()
    }
    assert on_disk == set(manifest["sha256"])
    assert (
        sum((pocket.POCKET_DIR / name).stat().st_size for name in on_disk)
        == manifest["bytes"]
        < 20e6
    )


def test_no_shipped_file_names_the_machine_it_was_made_on():
    for name in pocket.read_pocket_manifest()["sha256"]:
        if name.endswith(".json"):
            content = json.loads((pocket.POCKET_DIR / name).read_text())
            assert "_name_or_path" not in content or not content["_name_or_path"].startswith("/"), (
                name
            )


def test_prompt_lists_are_disjoint_and_balanced():
    lists = tuple(map(pocket.read_pocket_prompts, pocket.PROMPT_SPLITS))
    assert lists == split_prompts()
    assert len({p for prompts in lists for p in prompts}) == sum(map(len, lists))
    for prompts, count in zip(lists[1:], (8, 16), strict=True):
        assert [
            sum(parse_caption(p).category == c for p in prompts) for c in POCKET_CATEGORIES
        ] == [count] * 6
    said = [
        {parse_caption(p) for p in prompts if parse_caption(p).category != "single_object"}
        for prompts in lists
    ]
    assert not said[0] & said[1] and not said[0] & said[2] and not said[1] & said[2]
    with pytest.raises(InputError, match="train, validation, test or test192"):
        pocket.read_pocket_prompts("heldout")


def test_checker_on_fresh_scenes(scenes):
    rng, prompts, images = scenes
    check = geneval.PocketGenEval()
    assert check(images, prompts).mean() >= 0.98
    assert check(images, list(rng.permutation(prompts))).mean() < 0.10
    assert check(images, [str(rng.choice(hard_negatives(p))) for p in prompts]).mean() < 0.01


def test_what_passes_shows_every_object(scenes):
    rng, prompts, images = scenes
    check = geneval.PocketGenEval()
    for asked, low, high in ((prompts, 0.99, 1), (list(rng.permutation(prompts)), 0.1, 0.5)):
        verdicts = check(images, asked)
        objects = check.objects(images, asked)
        assert [len(row) for row in objects] == [len(parse_caption(p).objects) for p in asked]
        assert all(all(row) for row, passed in zip(objects, verdicts, strict=True) if passed)
        assert low <= np.mean(sum(objects, [])) <= high


@pytest.mark.parametrize(
    "caption", ["a red star", "two stars", "a star and a ring", "a ring above a star"]
)
def test_checker_refuses_what_is_not_quite_it(caption):
    rng = np.random.default_rng(1)
    scene = sample_scene(caption, rng)
    check = geneval.PocketGenEval()
    array = np.asarray(render_scene(scene)).copy()
    assert check([render_scene(scene)], [caption]) == 1
    array[2:8, 2:8] = (40, 165, 60)  # one more patch of colour
    assert check(torch.from_numpy(array).permute(2, 0, 1)[None], [caption]) == 0
    grey = np.full_like(array, 225)
    assert check(torch.from_numpy(grey).permute(2, 0, 1)[None], [caption]) == 0


def test_clip_ranks_true_over_one_word_changed():
    rng = np.random.default_rng(7)
    prompts = pocket.read_pocket_prompts("test") * 3
    images = [render_scene(sample_scene(p, rng)) for p in prompts]
    reward = clip.PocketCLIP()
    false = [str(rng.choice(hard_negatives(p))) for p in prompts]
    assert (reward(images, prompts) > reward(images, false)).float().mean() >= 0.95


def test_rewards_take_every_kind_of_image_and_go_by_name(scenes):
    _, prompts, images = scenes
    bytes_ = torch.stack(
        [torch.from_numpy(np.asarray(i).copy()).permute(2, 0, 1) for i in images[:20]]
    )
    for name in POCKET_REWARDS:
        reward = rewards.load_reward(name)
        scores = [reward(kind, prompts[:20]) for kind in (images[:20], bytes_, bytes_ / 255)]
        for score in scores:
            assert score.shape == (20,) and score.dtype == torch.float32
            torch.testing.assert_close(score, scores[0], atol=1e-5, rtol=0)


def test_manifest_states_the_quality_of_the_base():
    quality = pocket.read_pocket_manifest()["quality"]
    for sampler in ("ode", "sde"):
        assert 0.4 < quality[sampler]["geneval"] < 0.65  # room for reinforcement learning
        assert (
            quality[sampler]["clip_auc_in_prompt"] > 0.7
        )  # the reward orders the model's own images


@pytest.mark.parametrize("name", POCKET_REWARDS)
def test_rewards_of_the_world_refuse_options(name):
    with pytest.raises(InputError, match="size"):
        rewards.load_reward(name, size="large")


@pytest.fixture(scope="module")
def trainer():
    """research/pocket/train_pocket.py, which made the shipped weights."""
    file = Path(__file__).resolve().parents[1] / "research/pocket/train_pocket.py"
    spec = importlib.util.spec_from_file_location("train_pocket", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(pocket.POCKET_DIR / "base" / "vae")


def test_the_whole_training_in_miniature_writes_what_is_shipped(trainer, tmp_path):
    from diffusers import FluxPipeline

    tiny = {name: {"steps": 3, "batch": 4, "count": 8} for name in trainer.PARTS}
    tiny["misled"] = tiny["flow"] | {"wrong": 0.5}
    made = trainer.build_pocket(
        tmp_path / "out", tmp_path / "work", tiny, images=0, log=lambda line: None
    )
    assert pocket.verify_pocket_files(tmp_path / "out") == len(made["sha256"])
    assert set(made["sha256"]) == set(pocket.read_pocket_manifest()["sha256"])
    pipeline = FluxPipeline.from_pretrained(tmp_path / "out" / "base")
    pipeline.set_progress_bar_config(disable=True)
    kwargs = {
        "height": 64,
        "width": 64,
        "max_sequence_length": pocket.MAX_TOKENS,
        "num_inference_steps": 2,
    }
    assert pipeline("a star", **kwargs).images[0].size == (64, 64)
    again = trainer.build_pocket(
        tmp_path / "again", tmp_path / "work", tiny, images=0, log=lambda line: None
    )
    assert again["sha256"] == made["sha256"]  # read back from the work folder


@pytest.mark.slow
@pytest.mark.parametrize("part", ["flow", "clip"])
def test_an_interrupted_training_ends_where_a_straight_one_ends(
    trainer, vae, part, tmp_path, monkeypatch
):
    settings = {
        "vae": vae,
        "steps": 6,
        "batch": 8,
        "count": 24,
        {"flow": "snapshot_steps", "clip": "checkpoint_steps"}[part]: 3,
        "log": lambda line: None,
    }
    train = getattr(trainer, f"train_{part}")
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    straight = train(tmp_path / "one", **settings)
    name = {"flow": "flow_loss", "clip": "clip_batch_loss"}[part]
    calls = iter(range(4))
    real = getattr(trainer, name)
    with monkeypatch.context() as patched:
        patched.setattr(
            trainer, name, lambda *args, **kwargs: (next(calls), real(*args, **kwargs))[1]
        )
        with pytest.raises(StopIteration):
            train(tmp_path / "two", **settings)
    resumed = train(tmp_path / "two", **settings)
    for a, b in zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_captions_that_mislead_are_one_word_off_and_never_held_out(trainer):
    captions = trainer.sample_captioned_images(300, 2, free=False)[0]
    wrong = trainer.mislead_captions(captions, 0.5)
    changed = [(a.split(), b.split()) for a, b in zip(captions, wrong, strict=True) if a != b]
    assert 0.4 < len(changed) / len(captions) < 0.6
    assert all(sum(x != y for x, y in zip(a, b, strict=True)) == 1 for a, b in changed)
    held = {
        spec
        for spec in map(parse_caption, pocket.read_pocket_prompts("test"))
        if spec.category != "single_object"
    }
    assert not held & set(map(parse_caption, wrong)) and not set(wrong) & set(
        pocket.read_pocket_prompts("test")
    )
    assert trainer.mislead_captions(captions, 0.0) == captions


def test_the_manifests_numbers_are_measured_as_they_say(trainer):
    score = torch.tensor([[3.0, 2, 1], [1, 1, 0]])
    right = torch.tensor([[1.0, 0, 1], [1, 0, 1]])
    assert trainer.within_group_auc(score, right) == (1 + 0 + 0.5 + 0) / 4
    held = pocket.read_pocket_prompts("test")
    draws = (torch.rand(len(held), 8, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    mean, error, table = trainer.mean_accuracy_with_error(draws, held)
    assert abs(mean - 0.3) < 4 * error and len(table) == 6
    assert error == pytest.approx((0.3 * 0.7 / draws.numel()) ** 0.5, rel=0.2)
