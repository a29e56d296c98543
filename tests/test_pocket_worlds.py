"""The second list of test prompts, the other bases and the tastes of the pocket world."""

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import call
from pocket_recipe import new_tokenizer, second_test_prompts, split_category_captions

from chunk_grpo import InputError, pocket
from chunk_grpo.core.files import read_json
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models.inputs import (
    fetch_model,
    find_unknown_words,
    make_inputs_absolute,
    read_prompts,
)
from chunk_grpo.models.policy import load_policy
from chunk_grpo.pocket.geneval import PocketGenEval
from chunk_grpo.pocket.taste import PocketLow, PocketLowPixels
from chunk_grpo.pocket.world import (
    CAPTION_PREFIXES,
    POCKET_CATEGORIES,
    POCKET_COLOURS,
    Scene,
    SceneObject,
    parse_caption,
    render_scene,
)

SECOND = pocket.read_pocket_prompts("test192")


def plain(prompt):
    """A prompt without capitals, punctuation, articles and the spaces between words."""
    return "".join(
        word
        for word in re.findall("[a-z0-9]+", prompt.casefold())
        if word not in ("a", "an", "the")
    )


def category(prompt):
    return parse_caption(prompt).category


# The second list of test prompts


def test_second_test_list_is_what_its_function_makes_and_has_a_name_in_settings():
    assert SECOND == second_test_prompts() == read_prompts("pocket:test192")
    assert second_test_prompts(seed=1) != SECOND
    with pytest.raises(InputError, match="pocket:test192"):
        read_prompts("pocket:test193")


@pytest.mark.parametrize("split", pocket.PROMPT_SPLITS)
def test_second_test_list_shares_no_prompt_with_another_list_even_spelled_otherwise(split):
    other = {plain(prompt) for prompt in pocket.read_pocket_prompts(split)}
    assert not other & {plain(prompt) for prompt in SECOND}
    assert plain(f" An {SECOND[0][2:].upper()}.") == plain(SECOND[0])  # the comparison would see it


def test_second_test_list_has_no_prompt_twice_even_spelled_otherwise():
    assert len({plain(prompt) for prompt in SECOND}) == len(SECOND) == 192


def test_second_test_list_shares_no_combination_with_the_prompts_that_settings_are_chosen_on():
    chosen = {parse_caption(prompt) for prompt in pocket.read_pocket_prompts("validation")}
    assert not [p for p in SECOND if parse_caption(p) in chosen and category(p) != "single_object"]


def test_second_test_list_is_balanced_over_categories_combinations_and_phrases():
    assert Counter(map(category, SECOND)) == dict.fromkeys(POCKET_CATEGORIES, 32)
    for name in POCKET_CATEGORIES:
        prompts = [p for p in SECOND if category(p) == name]
        trained = {parse_caption(p) for p in split_category_captions(name)[0]}
        kept_back = Counter(parse_caption(p) for p in prompts if parse_caption(p) not in trained)
        seen = Counter(parse_caption(p) for p in prompts if parse_caption(p) in trained)
        assert kept_back.total() == (0 if name == "single_object" else 16)
        # Every combination about as often as another; of two kept-back objects every sentence that was left is taken.
        if name != "two_object" and kept_back:
            assert max(kept_back.values()) - min(kept_back.values()) <= 1, (name, kept_back)
        assert max(seen.values(), default=0) - min(seen.values(), default=0) <= 1, (name, seen)
        # No phrase stands before more than a third of a category's prompts.
        first = Counter(
            next((x for x in CAPTION_PREFIXES if x and p.startswith(x)), "") for p in prompts
        )
        assert len(first) >= 6 and max(first.values()) <= 11, (name, first)
    assert len({parse_caption(p) for p in SECOND}) >= 120


def test_every_model_reads_every_word_of_the_second_test_list():
    assert find_unknown_words(pocket.pocket_model_path(), SECOND) == []
    read = new_tokenizer("clip")(SECOND)["input_ids"]
    assert max(map(len, read)) <= pocket.MAX_TOKENS


def test_caption_with_two_phrases_means_what_it_means_with_one():
    for phrase in CAPTION_PREFIXES:
        assert parse_caption(f"a sketch of {phrase}two rings") == parse_caption("two rings")


@pytest.mark.parametrize(
    "caption",
    [
        "a photo of a print of a star and a ring",
        "a sketch of a photo of a print of a star",
        "a photo of a photo of",
        "of a star",
        "a photo ofa star",
        "a photo of  a star",
    ],
)
def test_caption_with_too_many_words_or_phrases_is_rejected(caption):
    with pytest.raises(InputError, match="`caption` must") as error:
        parse_caption(caption)
    assert repr(caption) in str(error.value) and "\n" not in str(error.value)


# The other bases

BASES = [name for name in pocket.POCKET_MODELS if name not in ("pocket", "pocket/editing")]


def test_files_of_the_other_bases_are_as_shipped_and_small():
    folder = pocket.POCKET_DIR / "bases"
    files = read_json(folder / "manifest.json")["sha256"]
    assert pocket.verify_pocket_files(folder) == len(files)
    there = {
        f.relative_to(folder).as_posix()
        for f in folder.rglob("*")
        if f.is_file() and f.parent.name != "vae"
    }
    assert there == {*files, "manifest.json", "curve.json"}
    assert sum((folder / name).stat().st_size for name in files) < 5e6


def test_changed_file_of_another_base_is_found(tmp_path):
    copy = Path(shutil.copytree(pocket.POCKET_DIR / "bases", tmp_path / "bases"))
    (copy / "undertrained/model_index.json").write_text("{}")
    with pytest.raises(InputError, match="undertrained/model_index.json"):
        pocket.verify_pocket_files(copy)


@pytest.mark.parametrize("name", BASES)
def test_another_base_draws_with_weights_of_its_own_and_the_shipped_autoencoder(name):
    torch.set_num_threads(1)
    shipped, other = (load_policy(x, resolution=64, max_tokens=12) for x in ("pocket", name))
    noise = torch.randn(
        2, *shipped.noise(torch.Generator()).shape, generator=torch.Generator().manual_seed(0)
    )
    levels = torch.full((2,), 0.9)
    first, second = (
        policy.velocity(noise, levels, policy.encode(["a star", "two rings"]))
        for policy in (shipped, other)
    )
    assert second.isfinite().all() and not torch.allclose(first, second, atol=1e-2)
    torch.testing.assert_close(shipped.decode(noise), other.decode(noise), rtol=0, atol=0)


@pytest.mark.parametrize("name", BASES)
def test_diffusers_alone_loads_another_base_in_float32(name):
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(pocket.pocket_model_path(name))
    kinds = {
        p.dtype
        for part in (pipeline.transformer, pipeline.text_encoder, pipeline.vae)
        for p in part.parameters()
    }
    assert kinds == {torch.float32}


@pytest.mark.parametrize("name", ["pocket/untrained", "pocket/", "pocket/Undertrained"])
def test_unknown_base_is_rejected_by_name_without_network(name, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked")
    )
    with pytest.raises(InputError) as error:
        fetch_model(name)
    assert repr(name) in str(error.value) and all(base in str(error.value) for base in BASES)


def test_unknown_base_ends_training_in_one_sentence(tmp_path):
    done = call("train", "pocket/tiny", "model=pocket/untrained", "--out", tmp_path / "run")
    assert (
        done.returncode == 2
        and "pocket/undertrained" in done.stderr
        and not (tmp_path / "run").exists()
    )


def test_base_is_the_shipped_one_where_a_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "pocket/undertrained").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = make_inputs_absolute(load_settings("pocket/tiny", {"model": "pocket/undertrained"}))
    assert settings.model == "pocket/undertrained"
    assert fetch_model(settings.model) == pocket.POCKET_DIR / "bases/undertrained"


# A taste and its proxy


def picture(*things):
    return render_scene(Scene("", things))


def mirrored(image):
    return np.asarray(image)[:, ::-1]


@pytest.mark.parametrize("y, expected", [(16, 0.25), (32, 0.5), (48, 0.75)])
@pytest.mark.parametrize("shape", ["circle", "square", "triangle", "star", "cross", "ring"])
def test_taste_is_the_height_of_an_object_whatever_its_shape_colour_and_column(shape, y, expected):
    images = [
        picture(SceneObject(shape, colour, x, y, 13)) for colour in POCKET_COLOURS for x in (16, 48)
    ]
    scores = PocketLow()(images, [""] * len(images))
    assert (scores - expected).abs().max() <= 0.5 / 64


def test_taste_is_the_mean_over_well_formed_objects_and_zero_without_any():
    low = SceneObject("circle", "red", 48, 48, 12)
    high = SceneObject("square", "blue", 16, 16, 12)
    giant = SceneObject("circle", "red", 32, 32, 28)
    scores = PocketLow()([picture(low, high), picture(low), picture(), picture(giant)], [""] * 4)
    torch.testing.assert_close(scores, torch.tensor([0.5, 0.75, 0.0, 0.0]), rtol=0, atol=0.01)


@pytest.mark.parametrize("reward", [PocketLow(), PocketLowPixels()])
def test_taste_and_proxy_do_not_depend_on_prompt_mirror_or_company(reward):
    image = picture(
        SceneObject("star", "green", 16, 48, 12), SceneObject("ring", "blue", 48, 16, 12)
    )
    both = torch.from_numpy(np.stack([np.asarray(image), mirrored(image)])).permute(0, 3, 1, 2)
    alone = reward(both[:1], ["a star"])
    scores = reward(both, ["two rings", "no sentence of the world"])
    assert scores[0] == alone[0] and abs(scores[1] - alone[0]) <= 0.5 / 64
    assert reward([], []).shape == (0,) and scores.dtype == torch.float32


def test_proxy_is_raised_by_a_strip_of_colour_that_taste_and_checker_reject():
    star = SceneObject("star", "red", 16, 16, 12)
    strip = np.asarray(picture(star)).copy()
    strip[58:] = POCKET_COLOURS["blue"]
    images = torch.from_numpy(np.stack([np.asarray(picture(star)), strip])).permute(0, 3, 1, 2)
    prompts = ["a star"] * 2
    proxy, taste, right = (
        reward(images, prompts) for reward in (PocketLowPixels(), PocketLow(), PocketGenEval())
    )
    assert proxy[1] > proxy[0] + 0.3 and taste[0] == taste[1] and right.tolist() == [1, 0]


@pytest.mark.parametrize("reward", [PocketLow(), PocketLowPixels()])
def test_taste_and_proxy_reject_another_number_of_prompts_than_images(reward):
    with pytest.raises(InputError, match="got 1 for 2 images"):
        reward(torch.zeros(2, 3, 64, 64), ["a star"])


def test_taste_and_proxy_have_names_in_settings():
    names = ("pocket-low", "pocket-low-pixels")
    assert (
        load_settings("pocket/tiny", {"reward": names[1], "eval_rewards": names}).eval_rewards
        == names
    )
