"""The second list of test prompts, the other bases and the tastes of the pocket world."""

import re
from collections import Counter

import pytest
from pocket_recipe import new_tokenizer, second_test_prompts, split_category_captions

from chunk_grpo import InputError, pocket
from chunk_grpo.models.inputs import read_prompts, unknown_words
from chunk_grpo.pocket.world import CAPTION_PREFIXES, POCKET_CATEGORIES, parse_caption

SECOND = pocket.read_pocket_prompts("test192")


def plain(prompt):
    "A prompt without capitals, punctuation, articles and the spaces between words."
    return "".join(word for word in re.findall("[a-z0-9]+", prompt.casefold()) if word not in ("a", "an", "the"))


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
        first = Counter(next((x for x in CAPTION_PREFIXES if x and p.startswith(x)), "") for p in prompts)
        assert len(first) >= 6 and max(first.values()) <= 11, (name, first)
    assert len({parse_caption(p) for p in SECOND}) >= 120


def test_every_model_reads_every_word_of_the_second_test_list():
    assert unknown_words(pocket.pocket_model_path(), SECOND) == []
    read = new_tokenizer("clip")(SECOND)["input_ids"]
    assert max(map(len, read)) <= pocket.MAX_TOKENS


def test_caption_with_two_phrases_means_what_it_means_with_one():
    for phrase in CAPTION_PREFIXES:
        assert parse_caption(f"a sketch of {phrase}two rings") == parse_caption("two rings")


@pytest.mark.parametrize(
    "caption",
    ["a photo of a print of a star and a ring", "a sketch of a photo of a print of a star", "a photo of a photo of",
     "of a star", "a photo ofa star", "a photo of  a star"],
)
def test_caption_with_too_many_words_or_phrases_is_rejected(caption):
    with pytest.raises(InputError, match="`caption` must") as error:
        parse_caption(caption)
    assert repr(caption) in str(error.value) and "\n" not in str(error.value)
