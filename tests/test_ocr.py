"""The reward `ocr`: without its environment one sentence; with it, words are read with RapidOCR's own models."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.reward_serving import placement, server
from chunk_grpo.reward_serving.ocr import OCRReward
from chunk_grpo.rewards import rewards


def sign(text: str) -> Image.Image:
    """A word in black on white."""
    image = Image.new("RGB", (320, 160), "white")
    ImageDraw.Draw(image).text((40, 50), text, fill="black", font=ImageFont.load_default(48))
    return image


def test_without_its_environment_the_command_that_makes_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InputError, match="create ocr with `chunk-grpo reward-env ocr`"):
        placement.load_placed_reward("ocr")
    with pytest.raises(InputError, match="`worker` must be left out for ocr"):
        placement.load_placed_reward("ocr", worker=True)
    assert settings.load_settings("pocket/tiny", {"reward": "ocr"}).reward == "ocr"


class Shouted(OCRReward):
    """Reads OPEN in every image."""

    def __init__(self):
        super().__init__(lambda image: "OPEN", lambda a, b: max(len(a), len(b)))


def test_the_sampled_prompt_quotes_the_text_whatever_column_holds_it():
    """In a table the column may be `Prompt`, or another than `prompt`, which the image does not show."""
    prompt = 'a sign that says "OPEN"'
    reward = Shouted()
    records = (
        {"Prompt": prompt},
        {"prompt": 'a "cat"', "long": prompt},
        {"prompt": "a cat"},
        {"prompt": prompt, "target": None},  # a column that other rows fill
        {"prompt": prompt, "target": ""},
    )
    for record in records:
        for check in (rewards._find_rejected_prompt, server.find_rejected_prompt):
            assert check(reward, [prompt], [record]) is None
        assert reward([sign("OPEN")], [prompt], [record]) == [1.0]
    for check in (rewards._find_rejected_prompt, server.find_rejected_prompt):
        index, reason = check(reward, [prompt, "a cat"], [{"Prompt": prompt}, {"prompt": prompt}])
        assert index == 1 and "must have a field `target`" in reason


@pytest.mark.skipif(
    not (placement.locate_environment("ocr") / "ready.json").is_file(),
    reason="the environment ocr has not been made: chunk-grpo reward-env ocr",
)
def test_drawn_words_are_read_in_the_environment():
    reward = placement.load_placed_reward("ocr")
    words = ["OPEN", "EXIT 7", "OPEN"]
    records = [{"prompt": "p", "target": target} for target in ("open", "Exit 7", "BAKERY")]
    pictures = [sign(word) for word in words]
    tensor = torch.from_numpy(np.stack([np.asarray(x) for x in pictures])).permute(0, 3, 1, 2) / 255
    try:
        rewards.check_prompts({"ocr": reward}, ["p"] * 3, records=records)
        with pytest.raises(
            InputError, match="prompt 1 cannot be scored: .*must have a field `target`"
        ):
            rewards.check_prompts({"ocr": reward}, ["a cat"])
        for images in (pictures, tensor):
            scores = rewards.score_images("ocr", reward, images, ["p"] * 3, records=records)
            assert scores[:2].tolist() == [1.0, 1.0] and scores[2] < 0.5
    finally:
        reward.close()


def test_the_list_names_exact_versions_of_all_that_the_server_needs():
    lines, rest = placement._read_requirements("ocr", placement.ENVIRONMENTS_DIR)
    assert not rest and all("==" in line for line in lines)
    names = {line.partition("==")[0].lower() for line in lines}
    assert {*placement.SERVER_PACKAGES, "rapidocr", "onnxruntime", "rapidfuzz"} <= names
    assert "torch" not in names, json.dumps(sorted(names))
