"""Options of a reward that are called as an argument of ours: the reward's own are given to it, others are refused."""

import pytest
import torch
from commands import call

from chunk_grpo import InputError, load_placed_reward
from chunk_grpo.core import settings

REWARD = """def red(images, prompts, name="", here=0.0, options=None, loader=None):
    return images[:, 0].mean((1, 2)) + float(here) + len(name)
"""
FEW = [
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_images=1",
    "steps=3",
    "chunks=steps",
    "eval_steps=2",
    "hybrid_split=1",
]


@pytest.mark.parametrize("place", ["", ", worker: true"])
@pytest.mark.parametrize(
    "option",
    [
        "here: 1",
        "name: x",
        "path: x",
        "self: 1",
        "loader: x",
        "options: {}",
        "given: 1",
        "found: 1",
    ],
)
def test_an_option_that_a_reward_does_not_have_is_one_sentence(tmp_path, option, place):
    given = f"reward_options={{pocket-clip: {{{option}{place}}}}}"
    done = call("train", "pocket/tiny", *FEW, given, "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"'{option.partition(':')[0]}'" in done.stderr and "pocket-clip" in done.stderr, (
        done.stderr
    )
    assert "unforeseen" not in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", [{}, {"worker": True}])
def test_a_reward_gets_its_own_options_whatever_they_are_called(tmp_path, monkeypatch, place):
    (tmp_path / "red_option.py").write_text(REWARD)
    reward = load_placed_reward(
        f"{tmp_path / 'red_option.py'}:red", **place, name="abc", here=2, options=1, loader=2
    )
    assert reward(torch.ones(1, 3, 8, 8), ["x"]).tolist() == [6.0]
    getattr(reward, "close", lambda: None)()
    run_settings = settings.load_settings(
        "pocket/tiny", {"reward": {"name": "pocket-clip", "here": 1}}
    )
    assert run_settings.reward_options == {"pocket-clip": {"here": 1}}


@pytest.mark.parametrize("key", ["1", "true", "null", "1.5"])
def test_an_option_whose_name_is_no_text_is_refused(key):
    with pytest.raises(
        InputError, match="`reward_options` must have texts as the names of options"
    ):
        settings.load_settings("pocket/tiny", [f"reward_options={{pocket-clip: {{{key}: 2}}}}"])
