"""What a GPU may do otherwise than a CPU, on the last of the devices: scorers, pictures, attention (check 9).

Without a GPU the same tests run on the CPU, so that they are known to run; `pytest -m gpu` asks the device.
"""

import threading

import numpy as np
import pytest
import released
import tiny_families
import torch
from PIL import Image
from test_scorers import NAMES, golden, loaded, options  # noqa: F401  fixtures

from chunk_grpo import InputError
from chunk_grpo.models import trainable
from chunk_grpo.rewards import images as image_ops
from chunk_grpo.rewards import rewards

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH = 2


def last(kind: str) -> str:
    """The last device of a kind, with its number where it has one."""
    return kind if kind == "cpu" else f"cuda:{torch.cuda.device_count() - 1}"


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_scorer_scores_on_a_device_with_a_number_and_from_a_thread(name, kind, loaded, options):  # noqa: F811
    images, prompts = golden.asked()
    there = rewards.load_reward(name, **options[name] | {"device": last(kind), "dtype": "float32"})
    assert there.device == torch.device(last(kind))
    found = []
    thread = threading.Thread(target=lambda: found.append(there(images, prompts)))
    thread.start()
    thread.join()
    assert found and found[0].device.type == "cpu"
    torch.testing.assert_close(found[0], loaded[name](images, prompts), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", PLACES)
def test_pictures_are_resized_to_pillows_last_grey_level(kind):
    for i, size in enumerate(released.SIZES):
        picture = released.picture(i, *size)
        x = image_ops.resize_like_pillow(
            image_ops.images_to_tensor([picture]).to(last(kind)), (224, 224)
        )
        ours = (x[0] * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        rows = picture.resize(
            (224, picture.height), Image.Resampling.BICUBIC
        )  # first, as Pillow may do it last
        assert np.array_equal(
            ours, np.asarray(rows.resize((224, 224), Image.Resampling.BICUBIC))
        ), size


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("family", tiny_families.BUILDERS)
def test_every_kernel_of_attention_gives_a_familys_velocity(family, kind, tmp_path, monkeypatch):
    """With prompts of two lengths, so with masks where a family passes them; or one sentence says why it cannot be."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    folder = str(tiny_families.build(family, tmp_path / "model"))
    found = {}
    names = [x.value for x in trainable.AttentionBackendName if not x.value.endswith("_hub")]
    for name in names:  # those of the hub would be downloaded
        given = {"resolution": 64, "max_tokens": 16, "device": last(kind), "attention": name}
        try:
            policy = trainable.load_trainable_policy(folder, lora_rank=2, **given)
        except InputError as error:
            assert "`attention` must be " in str(error)
            continue
        rows = policy.encode(["a red star", "two cats left of a green square"])
        noise = torch.stack(
            [policy.noise(torch.Generator().manual_seed(i)) for i in range(BATCH)]
        ).to(policy.device)
        velocity = policy.velocity(noise, torch.tensor([0.9, 0.3]), rows)
        velocity.sum().backward()
        found[name] = velocity.detach().cpu()
    assert "native" in found and (
        "_native_math" in found or family == "sd3"
    )  # whose layers ask torch directly
    assert "_native_flash" not in found or family not in ("qwen", "z_image")  # it takes no mask
    for name, velocity in found.items():
        torch.testing.assert_close(
            velocity, found["native"], rtol=1e-3, atol=1e-3, msg=f"{family}, {name}"
        )
