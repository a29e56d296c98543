"""The package hpsv3 1.0.0, in the environment that `chunk-grpo reward-env hpsv3` makes, against the thin scorer."""

import json
from pathlib import Path

import pytest
import released
import torch
import yaml

from chunk_grpo import InputError
from chunk_grpo.reward_serving import placement
from chunk_grpo.rewards import hpsv3, rewards

pytestmark = pytest.mark.package


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The package and the thin scorer on one tiny checkpoint in the released layout."""
    place = placement.locate_environment("hpsv3")
    if not (place / "ready.json").is_file():
        pytest.fail("the environment hpsv3 has not been made: chunk-grpo reward-env hpsv3")
    folder = tmp_path_factory.mktemp("hpsv3")
    weights = released.hpsv3(folder / "weights", base_weights=True)
    (own,) = place.glob("lib/python*/site-packages/hpsv3/config/HPSv3_7B.yaml")
    chosen = {
        "model_name_or_path": str(weights / "base"),
        "output_dir": str(folder / "out"),
        "report_to": "none",
        "deepspeed": None,
        "bf16": False,
        "torch_dtype": "float32",
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(yaml.safe_load(own.read_text()) | chosen))
    files = {"checkpoint": str(weights / "HPSv3.safetensors"), "config": str(folder / "tiny.yaml")}
    package = placement.load_placed_reward("hpsv3", backend="package", device="cpu", **files)
    yield (
        package,
        rewards.load_reward(
            "hpsv3", weights=str(weights), base=str(weights / "base"), device="cpu"
        ),
    )
    package.close()


@pytest.fixture(scope="module")
def asked():
    """Twenty pictures of odd sizes and aspect ratios, and their prompts."""
    prompts = [released.PROMPTS[i % len(released.PROMPTS)] for i in range(len(released.SIZES))]
    return [released.picture(i, *size) for i, size in enumerate(released.SIZES)], prompts


@pytest.fixture(scope="module")
def theirs(both, asked):
    """The package's scores."""
    return both[0](*asked)


def test_package_and_thin_scorer_agree(both, asked, theirs):
    package, thin = both
    versions = package.server_info["versions"]
    assert versions["hpsv3"] == "1.0.0" and versions["transformers"] == "4.45.2"
    assert len(theirs) == 20 and theirs.std() > 0.1
    torch.testing.assert_close(thin(*asked), theirs, rtol=0, atol=2e-5)


def test_positions_by_rows_and_columns_would_not_agree(both, asked, theirs):
    """M-RoPE positions, which a newer transformers computes by itself, are not those that HPSv3 was trained with."""
    thin = both[1]
    images, prompts = (part[:3] for part in asked)
    inputs = hpsv3.build_hpsv3_inputs(thin.tokenizer, images, prompts, thin.device, thin.dtype)
    kinds = (inputs["input_ids"] == thin.model.config.image_token_id).int()
    places, _ = thin.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=kinds,
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    with torch.inference_mode():
        placed = thin.predict_rewards(inputs | {"position_ids": places})[:, 0]
    assert (placed - theirs[:3]).abs().min() > 1e-3


def test_the_package_refuses_its_own_marks(both, asked):
    with pytest.raises(InputError, match="which HPSv3 reserves for its own markers"):
        both[0](asked[0][:1], ["a <|Reward|>"])


def test_the_golden_set_is_what_the_package_says(theirs):
    """The stored scores, against which every test run compares the thin scorer."""
    kept = json.loads((Path(__file__).parent / "golden" / "hpsv3_official.json").read_text())[
        "rows"
    ]
    torch.testing.assert_close(theirs, torch.tensor([row["mu"] for row in kept]), rtol=0, atol=2e-5)
