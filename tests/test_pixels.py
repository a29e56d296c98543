"""Pixels that are no image: pocket's rewards, the size rewards and the reward server reject them in one sentence."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.pocket.clip import PocketCLIP
from chunk_grpo.pocket.geneval import images_to_numpy
from chunk_grpo.reward_serving import server
from chunk_grpo.rewards import rewards

NAMES = [
    "pocket-clip",
    "pocket-geneval",
    "pocket-low",
    "pocket-low-pixels",
    "incompressibility",
    "compressibility",
]


def image(value=None, place=(0, 1, 2, 3)):
    """Two grey images, one number of which is another."""
    x = torch.full((2, 3, 64, 64), 0.5)
    if value is not None:
        x[place] = value
    return x


WRONG = {
    "nan": image(float("nan")),
    "inf": image(float("inf")),
    "-inf": image(float("-inf"), (1, 2, 63, 63)),
    "too large": image(1.5),
    "negative": image(-0.5),
    "of bytes as floats": image() * 255,
    "of a VAE": image() * 2 - 1.5,
    "half nan": image(float("nan")).half(),
    "bfloat16 inf": image(float("inf")).bfloat16(),
    "whole numbers": torch.zeros(2, 3, 64, 64, dtype=torch.int64),
    "truth": torch.zeros(2, 3, 64, 64).bool(),
    "channels last": torch.zeros(2, 64, 64, 3),
    "one image": torch.zeros(3, 64, 64),
    "four channels": torch.zeros(2, 4, 64, 64),
    "no pixels": torch.zeros(2, 3, 0, 64),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_tensor_that_is_no_image_is_rejected(name, kind):
    reward = rewards.load_reward(name)
    given = WRONG[kind]
    prompts = ["a photo of a red star"] * len(given)
    with pytest.raises(InputError, match="images") as error:
        reward(given, prompts)
    assert "\n" not in str(error.value) and re.search("allowed|must", str(error.value))


@pytest.mark.parametrize("name", NAMES)
def test_images_of_every_allowed_kind_score_the_same(name):
    """Floats, the rounding of a resize beyond the ends, bytes and pictures."""
    reward = rewards.load_reward(name)
    prompts = ["a photo of a red star"] * 2
    ends = torch.zeros(2, 3, 64, 64)
    ends[:, 0] = 1.0
    over = ends * 1.01 - 0.005
    whole = (ends * 255).byte()
    pictures = [Image.fromarray(x) for x in whole.permute(0, 2, 3, 1).numpy()]
    expected = reward(ends, prompts)
    for other in (over, whole, pictures):
        torch.testing.assert_close(reward(other, prompts), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["nan", "inf", "-inf", "too large", "negative", "of bytes as floats", "of a VAE"]
)
def test_reward_server_rejects_pixels_outside_of_an_image(kind):
    with pytest.raises(ValueError, match="images must be finite numbers from 0 to 1") as error:
        server.unpack_request(server.pack_request(WRONG[kind].numpy(), ["a", "b"]))
    assert "\n" not in str(error.value)
    good = server.unpack_request(server.pack_request(image().numpy(), ["a", "b"])).images
    assert np.array_equal(good, image().numpy())


def test_a_users_reward_cannot_change_what_later_rewards_get():
    pictures = [Image.new("RGB", (16, 16), "red") for _ in range(2)]
    records = [{"prompt": "a", "tags": ["x"]}] * 2
    seen = []

    def careless(images, prompts, records):
        for image, record in zip(images, records, strict=True):
            image.thumbnail((4, 4))
            seen.append(list(record["tags"]))
            record["tags"].append("y")
        return [0.0] * len(prompts)

    rewards.score_images("mine:careless", careless, pictures, ["a", "a"], records=records)
    assert [image.size for image in pictures] == [(16, 16)] * 2
    assert records[0]["tags"] == ["x"] and seen == [["x"], ["x"]]


def test_what_is_no_picture_is_rejected():
    for given in (["text"], [np.zeros((64, 64, 3))], [None], "text", [[1, 2]]):
        with pytest.raises(InputError, match="images"):
            images_to_numpy(given)
    with pytest.raises(InputError, match="sizes"):
        images_to_numpy([Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8))])
    with pytest.raises(InputError, match="images"):
        PocketCLIP().embed(image(float("nan")))
