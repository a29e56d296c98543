"""The four published scorers on tiny checkpoints in the released layout: parity, agreement of forms, faults."""

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import released
import torch
from PIL import Image
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from chunk_grpo import InputError
from chunk_grpo.rewards import hpsv3, image_reward, rewards, scorers
from chunk_grpo.rewards import images as image_ops

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("clip", "pickscore", "imagereward", "hpsv3")
SPEC = importlib.util.spec_from_file_location("golden_scorers", GOLDEN / "scorers.py")
golden = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(golden)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """The options of `rewards.load_reward` by name, for checkpoints on disk."""
    return golden.stored(tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def loaded(options):
    """The scorers by name."""
    return {name: rewards.load_reward(name, **options[name]) for name in NAMES}


def official(name: str) -> tuple[dict, list[Image.Image], list[str]]:
    """A golden set of an official package, its pictures and prompts."""
    kept = json.loads((GOLDEN / f"{name}_official.json").read_text())
    images = [released.picture(row["seed"], *row["size"]) for row in kept["rows"]]
    return kept, images, [row["prompt"] for row in kept["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_that_were_kept(name, loaded):
    kept = torch.tensor(json.loads((GOLDEN / "scorers.json").read_text())[name])
    scores = loaded[name](*golden.asked())
    assert scores.dtype == torch.float32 and scores.device.type == "cpu" and kept.std() > 0.05
    torch.testing.assert_close(scores, kept, rtol=1e-4, atol=1e-4)


def test_imagereward_is_the_official_one(loaded):
    kept, images, prompts = official("imagereward")
    theirs = torch.tensor([row["score"] for row in kept["rows"]])
    torch.testing.assert_close(loaded["imagereward"](images, prompts), theirs, rtol=1e-4, atol=1e-4)


def test_hpsv3_is_the_official_one(loaded):
    kept, images, prompts = official("hpsv3")
    theirs = torch.tensor([[row["mu"], row["log_sigma"]] for row in kept["rows"]])
    torch.testing.assert_close(
        loaded["hpsv3"].score_distribution(images, prompts), theirs, rtol=0, atol=2e-5
    )
    batch = torch.tensor(kept["first_four_as_a_batch"])
    torch.testing.assert_close(batch, theirs[:4, 0], rtol=0, atol=2e-5)


def test_hpsv21_is_the_official_one(tmp_path):
    """Pictures of all shapes: the package fits the whole picture into the square and resizes floats."""
    kept, images, prompts = official("hpsv21")
    folder = str(released.hpsv21(tmp_path / "hps"))
    scorer = rewards.load_reward("hpsv21", weights=folder, processor=folder, device="cpu")
    theirs = torch.tensor([row["score"] for row in kept["rows"]])
    assert theirs.std() > 0.05
    torch.testing.assert_close(scorer(images, prompts), theirs, rtol=0, atol=2e-5)


def test_aesthetic_score_is_its_published_formula(options, tmp_path):
    """Five linear layers without anything between them, on the embedding of length 1."""
    folder = options["clip"]["weights"]
    sizes = {0: (24, 20), 2: (20, 12), 4: (12, 8), 6: (8, 6), 7: (6, 1)}
    shapes = {}
    for number, (into, out) in sizes.items():
        shapes |= released.layer(f"layers.{number}", into, out)
    head = released.fill(shapes, 3)
    torch.save(head, tmp_path / "aesthetic-model.pth")
    scorer = rewards.load_reward(
        "aesthetic", weights=str(tmp_path), clip=str(folder), device="cpu", batch_size=2
    )
    images, prompts = golden.asked()
    pixels = np.stack(CLIPImageProcessorPil.from_pretrained(folder)(images)["pixel_values"])
    with torch.inference_mode():
        model = CLIPModel.from_pretrained(folder).eval()
        x = model.get_image_features(pixel_values=torch.as_tensor(pixels)).pooler_output
        x = x / x.norm(dim=-1, keepdim=True)
        for number in sizes:
            x = x @ head[f"layers.{number}.weight"].T + head[f"layers.{number}.bias"]
    torch.testing.assert_close(scorer(images, prompts), x[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ("clip", "pickscore"))
def test_clips_are_what_transformers_computes(name, loaded, options):
    folder = options[name]["weights"]
    model = CLIPModel.from_pretrained(folder).eval()
    words = CLIPTokenizer.from_pretrained(folder)
    images = [
        released.picture(i, *size)
        for i, size in enumerate(((224, 224), (300, 200), (97, 80), (640, 480)))
    ]
    prompts = [*released.PROMPTS[2:5], "very " * 90 + "tall trees"]
    pixels = torch.as_tensor(
        np.stack(CLIPImageProcessorPil.from_pretrained(folder)(images)["pixel_values"])
    )
    text = words(prompts, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.inference_mode():
        logits = model(pixel_values=pixels, **text).logits_per_image.diagonal()
    scale = 1 if name == "pickscore" else 100
    torch.testing.assert_close(scale * loaded[name](images, prompts), logits, rtol=1e-5, atol=1e-4)
    assert text["input_ids"].shape[1] == 77  # the long prompt was cut


@pytest.mark.parametrize("name", NAMES)
def test_batches_forms_and_order_do_not_matter(name, loaded):
    reward, (images, prompts) = loaded[name], golden.asked()
    images, prompts = images[:4], prompts[:4]
    scores = reward(images, prompts)
    single = torch.cat([reward([i], [p]) for i, p in zip(images, prompts, strict=True)])
    torch.testing.assert_close(single, scores, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        reward(images[::-1], prompts[::-1]).flip(0), scores, rtol=1e-5, atol=1e-4
    )
    same = [released.picture(i, 120, 90) for i in range(3)]
    whole = torch.from_numpy(np.stack([np.asarray(image) for image in same])).permute(0, 3, 1, 2)
    from_pil = reward(same, prompts[:3])
    assert torch.equal(reward(whole, prompts[:3]), from_pil)
    assert torch.equal(reward(whole.float() / 255, prompts[:3]), from_pil)
    assert torch.equal(
        reward(whole.double() / 255 + 1e-4, prompts[:3]), from_pil
    )  # less than half a grey level
    assert (reward(same, prompts[1:4]) - from_pil).abs().min() > 1e-4  # the prompt matters
    assert reward([], []).shape == (0,)


def fitted(height: int, width: int) -> tuple[int, int]:
    """The size that HPSv3 resizes a picture to."""
    return hpsv3.smart_resize(height, width, 28, hpsv3.TARGET_PIXELS, hpsv3.TARGET_PIXELS)


# of the formula in float64, on tensors
RESIZED = "beb164ec73dbfa6c1eb3a2f2016c681fd84f9ba703f86b1024703031273e9bf0"


def test_a_resize_is_that_of_pillows_formula_whatever_pillow_is_installed():
    """All pictures in three sizes: every grey level, as arithmetic without Pillow had them, rows first."""
    found = hashlib.sha256()
    for i, (width, height) in enumerate(released.SIZES):
        for size in ((224, 224), fitted(height, width), (17, 400)):
            x = image_ops.images_to_tensor([released.picture(i, width, height)])
            found.update(
                (255 * image_ops.resize_like_pillow(x, size)).round().byte().numpy().tobytes()
            )
    assert found.hexdigest() == RESIZED


def test_what_a_float_resize_would_cost(loaded):
    """The score moves by far more than the bound of the parity when the picture is not rounded as Pillow rounds it."""
    reward = loaded["imagereward"]
    image = released.picture(5, 640, 480)
    x = image_ops.images_to_tensor([image])
    raw = torch.nn.functional.interpolate(x, (224, 298), mode="bicubic", antialias=True).clamp(0, 1)
    exact = image_ops.resize_like_pillow(x, (224, 298))
    pair = [image_ops.normalize_images(v[..., 37:261]) for v in (exact, raw)]
    with torch.inference_mode():
        seen = [reward.vision(pixel_values=v).last_hidden_state for v in pair]
    difference = (seen[0] - seen[1]).abs().max() / seen[0].abs().max()
    assert (
        torch.equal(pair[0], image_ops.transform_images([image], reward.transform))
        and difference > 1e-4
    )


def test_rows_and_columns_as_positions_change_hpsv3(loaded):
    reward, (images, prompts) = loaded["hpsv3"], golden.asked()
    inputs = hpsv3.build_hpsv3_inputs(
        reward.tokenizer, images[:3], prompts[:3], reward.device, reward.dtype
    )
    kinds = (inputs["input_ids"] == reward.model.config.image_token_id).int()
    grid, _ = reward.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=kinds,
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    with torch.inference_mode():
        counted = reward.predict_rewards(inputs)
        placed = reward.predict_rewards(inputs | {"position_ids": grid})
    assert (counted - placed)[:, 0].abs().min() > 1e-3


def test_special_tokens_in_a_prompt_are_refused(loaded):
    for token in ("<|Reward|>", "<|image_pad|>", "<|im_end|>", "<|vision_start|>"):
        with pytest.raises(InputError, match="special token"):
            loaded["hpsv3"](golden.asked()[0][:1], [f"a {token} fox"])


class Code:
    """Runs when it is unpickled without care."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_code_in_a_pt_file_is_refused_and_not_run(tmp_path, monkeypatch):
    folder = released.imagereward(tmp_path / "weights")
    torch.save({"mlp.layers.0.weight": Code()}, folder / "ImageReward.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="contains code"):
        image_reward.load_imagereward(str(folder), device="cpu")
    assert not (tmp_path / "harm").exists()


def test_weights_may_lie_where_nothing_can_be_written(tmp_path):
    folder = released.imagereward(tmp_path / "weights")
    before = sorted(folder.iterdir())
    folder.chmod(0o555)
    image_reward.load_imagereward(str(folder), device="cpu")
    folder.chmod(0o755)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    "name, file",
    [
        ("clip", "model.safetensors"),
        ("clip", "preprocessor_config.json"),
        ("pickscore", "config.json"),
        ("imagereward", "med_config.json"),
        ("imagereward", "ImageReward.pt"),
        ("hpsv3", "HPSv3.safetensors"),
        ("hpsv3", "base/config.json"),
        ("hpsv3", "base/tokenizer_config.json"),
    ],
)
def test_a_missing_file_is_named(name, file, options, tmp_path):
    shutil.copytree(options[name]["weights"], tmp_path / "copy")
    (tmp_path / "copy" / file).unlink()
    changed = options[name] | {"weights": str(tmp_path / "copy")}
    changed |= {"base": str(tmp_path / "copy/base")} if name == "hpsv3" else {}
    with pytest.raises(InputError, match=Path(file).name):
        rewards.load_reward(name, **changed)


@pytest.mark.parametrize("name", NAMES)
def test_without_weights_the_sentence_says_what_is_needed(name, monkeypatch, tmp_path):
    monkeypatch.setattr(scorers, "hf_hub_download", offline)
    with pytest.raises(InputError, match="must be a folder or a hub id such as .*are you offline"):
        rewards.load_reward(name, device="cpu")
    with pytest.raises(
        InputError, match="unexpected keyword argument 'wieghts'.*allowed are weights"
    ):
        rewards.load_reward(name, wieghts=str(tmp_path))


def test_a_file_that_is_on_the_machine_is_found_behind_a_broken_proxy(monkeypatch, tmp_path):
    def answer_403(repository, file, revision=None, local_files_only=False):
        if not local_files_only:
            raise OSError("403 Forbidden")
        return str(tmp_path / file)

    monkeypatch.setattr(scorers, "hf_hub_download", answer_403)
    found = scorers.fetch_hub_file("weights", "some/clip", "config.json", "openai/clip")
    assert found == tmp_path / "config.json"


def offline(*words, **options):
    """The hub without a network."""
    raise OSError("no network")


def test_a_clip_that_lacks_weights_is_refused(options, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(options["clip"]["weights"], tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    tensors = load_file(file)
    del tensors["visual_projection.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 of them .visual_projection.weight"):
        rewards.load_reward("clip", weights=str(tmp_path / "copy"), device="cpu")


def test_fitted_sizes_are_the_model_s_own():
    for width, height in ((w, h) for w in range(20, 2100, 97) for h in range(20, 2100, 131)):
        if max(width, height) <= 200 * min(width, height):
            h, w = fitted(height, width)
            assert h % 28 == w % 28 == 0 < min(h, w)
            long = max(h, w)
            short = min(h, w)
            assert (
                0.5
                < h * w / hpsv3.TARGET_PIXELS
                < 1 + (long + short + 28) * 28 / hpsv3.TARGET_PIXELS
            )


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_scores_are_those_of_the_cpu(name, loaded, options):
    images, prompts = golden.asked()
    other = rewards.load_reward(name, **options[name] | {"device": "cuda", "dtype": "float32"})
    torch.testing.assert_close(
        other(images, prompts), loaded[name](images, prompts), rtol=1e-3, atol=1e-3
    )
    for i, size in enumerate(released.SIZES):
        x = image_ops.images_to_tensor([released.picture(i, *size)])
        ours, theirs = (
            image_ops.resize_like_pillow(y, (224, 224)).cpu() * 255 for y in (x.cuda(), x)
        )
        assert torch.equal(
            ours.round(), theirs.round()
        )  # a GPU divides by 255 as it multiplies, one bit off


def test_bfloat16_keeps_the_head_exact(options, loaded):
    images, prompts = golden.asked()
    half = hpsv3.load_hpsv3(**options["hpsv3"] | {"dtype": "bfloat16"})
    assert half.head[0].weight.dtype == torch.float32
    assert (
        0
        < (half(images[:2], prompts[:2]) - loaded["hpsv3"](images[:2], prompts[:2])).abs().max()
        < 0.1
    )


def test_imagereward_takes_the_pictures_width_from_the_vision_half(options, loaded, tmp_path):
    """The public med_config.json says 768 where the vision transformer is 1024 wide; the official code does not read it."""
    folder = shutil.copytree(options["imagereward"]["weights"], tmp_path / "imagereward")
    med = json.loads((folder / "med_config.json").read_text())
    (folder / "med_config.json").write_text(
        json.dumps(med | {"encoder_width": med["encoder_width"] * 3 // 4})
    )
    images, prompts = golden.asked()
    other = rewards.load_reward("imagereward", **options["imagereward"] | {"weights": str(folder)})
    assert torch.equal(other(images, prompts), loaded["imagereward"](images, prompts))


def test_a_scorer_loads_onto_the_gpu_of_its_process(monkeypatch):
    """`cuda` without a number is the first GPU to safetensors: every rank's weights would go there."""
    answers = {"is_available": lambda: True, "device_count": lambda: 8, "current_device": lambda: 5}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    opened = []

    class Opened:
        def __init__(self, file, kind, device):
            opened.append(device)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def keys(self):
            return []

    monkeypatch.setattr(hpsv3, "safe_open", Opened)
    for device in ("auto", "cuda", "cuda:5"):
        where, kind = scorers.resolve_device(device, "auto", 8, large=True)
        hpsv3.read_hpsv3_weights(Path("HPSv3.safetensors"), where, kind)
    assert opened == ["cuda:5"] * 3
