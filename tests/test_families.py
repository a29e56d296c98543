"""Every family is its pipeline: the same embeddings, noise, velocity, images; and it trains, is saved and switched."""

import json
import shutil
from types import SimpleNamespace

import pytest
import tiny_families
import torch
from commands import run
from diffusers import AutoencoderDC, DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.core.settings import Settings
from chunk_grpo.models import policy, trainable
from chunk_grpo.models.families import latents_to_tokens
from chunk_grpo.models.inputs import ImagePrompt, check_components, open_source_image
from chunk_grpo.theory.chunks import chunks_from_setting
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training.chunk_sampling import sample_chunks
from chunk_grpo.training.gradient import (
    accumulate_gradients,
    compute_transition_stats,
    max_ratio_error,
)
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_ode, sample_trajectories
from chunk_grpo.training.update_batch import build_update_batch

NAMES = [*tiny_families.BUILDERS, *tiny_families.EDITING_BUILDERS]
PROMPTS = [
    "a red star",
    "two cats left of three dogs, a photo of the green square",
]  # of different lengths
STEPS, TOKENS, SIDE = 5, 16, 64
EDITS = ["a red star", "two cats left of three dogs"]  # shorter: Qwen-Image-Edit cuts none
SOURCES = []  # files of the images that are edited, made by `sources`
OFF = {
    "dev": {"guidance_scale": 2.5},
    "sd3": {"guidance_scale": 1.0},
    "z_image": {"guidance_scale": 0.0},
    "klein": {"guidance_scale": 1.0},
    "kontext": {"guidance_scale": 2.5},
}  # what a pipeline is told to take one forward
ON = {
    "dev": {"guidance_scale": 2.5, "true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
    "schnell": {"true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
    "sd3": {"guidance_scale": 3.0},
    "qwen": {"true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
    "z_image": {"guidance_scale": 2.0},
    "klein": {"guidance_scale": 3.0},
    "kontext": {"guidance_scale": 2.5, "true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
    "qwen_edit": {"true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
}  # and what it is told for a guidance of 3


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    """A family's name and its folder."""
    name = request.param
    return name, tiny_families.build(name, tmp_path_factory.mktemp(name) / "model")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Embeddings of these models do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def sources(tmp_path_factory):
    """The images that are edited, one for each prompt; Qwen's pipeline gives them the size of the others."""
    folder = tmp_path_factory.mktemp("sources")
    for i in range(len(PROMPTS)):
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{i}.png")
        SOURCES.append(folder / f"{i}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline_qwenimage_edit,
            "calculate_dimensions",
            lambda _, ratio: (int(SIDE * max(ratio, 1)), int(SIDE / min(ratio, 1)), None),
        )
        yield
    SOURCES.clear()


def prompts_of(model, texts=()):
    """Prompts for a family: texts, or texts each with its image."""
    if not model.edits_images:
        return list(texts or PROMPTS)
    return [ImagePrompt(text, file) for text, file in zip(texts or EDITS, SOURCES, strict=True)]


def load(folder, **more):
    """A frozen policy."""
    return policy.load_policy(str(folder), resolution=SIDE, max_tokens=TOKENS, guidance=2.5, **more)


def generators():
    """A generator for each prompt."""
    return [torch.Generator().manual_seed(i) for i in range(len(PROMPTS))]


def tokens(latents):
    """A pipeline's latents as ours."""
    return latents_to_tokens(latents) if latents.ndim == 4 else latents


class Watched:
    """A pipeline's own call: what its transformer was given, each step's latents and velocity, and the images."""

    def __init__(self, folder, height=SIDE, width=SIDE, **given):
        pipe = DiffusionPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        self.calls, self.latents, self.velocity = [], [], []
        pipe.transformer.register_forward_pre_hook(
            lambda _, a, k: self.calls.append((a, k)), with_kwargs=True
        )
        step = pipe.scheduler.step

        def watch(out, t, sample, **more):
            self.velocity.append(tokens(out))
            self.latents.append(tokens(sample))
            after = step(out, t, sample, **more)
            self.last = tokens(after[0])
            return after

        pipe.scheduler.step = watch
        if "Kontext" in type(pipe).__name__:
            given |= {"max_area": height * width, "_auto_resize": False}
        if "Kontext" in type(pipe).__name__ or "Edit" in type(pipe).__name__:
            edited = [ImagePrompt(text, file) for text, file in zip(EDITS, SOURCES, strict=True)]
            given |= {"image": [open_source_image(prompt, width, height) for prompt in edited]}
        prompts = EDITS if "image" in given else PROMPTS
        self.images = pipe(
            prompt=list(prompts),
            height=height,
            width=width,
            num_inference_steps=STEPS,
            generator=generators(),
            max_sequence_length=TOKENS,
            output_type="pt",
            **given,
        ).images
        self.sigmas = pipe.scheduler.sigmas

    def texts(self):
        """The text of every sample in the first forward, without padding, and all other conditioning."""
        args, given = self.calls[0]
        if len(args) == 3:  # Z-Image
            return list(args[2]), None
        mask = given.get("encoder_hidden_states_mask")
        states = given["encoder_hidden_states"]
        out = (
            list(states)
            if mask is None
            else [s[m.bool()] for s, m in zip(states, mask, strict=True)]
        )
        return out, given.get("pooled_projections")


@pytest.fixture(scope="module", params=[1.0, 3.0], ids=["plain", "guided"])
def pair(request, family):
    """A policy and its pipeline's own call, with and without classifier-free guidance."""
    name, folder = family
    told = OFF.get(name, {}) if request.param == 1 else ON[name]
    return load(folder, true_cfg_scale=request.param), Watched(folder, **told)


def test_encode_gives_the_pipelines_embeddings(family):
    """Row by row, masked where it is padded; all rows have one shape, whoever is encoded with them."""
    name, folder = family
    model = load(folder)
    theirs = Watched(folder, **OFF.get(name, {}))
    rows = model.encode(prompts_of(model))
    assert all(len(v) == len(PROMPTS) for v in rows.values())
    states, pooled = theirs.texts()
    mask = rows.get("prompt_embeds_mask")
    for i, state in enumerate(states):
        mine = rows["prompt_embeds"][i] if mask is None else rows["prompt_embeds"][i][mask[i]]
        torch.testing.assert_close(mine, state, rtol=0, atol=1e-5)
    assert (pooled is None) == ("pooled_prompt_embeds" not in rows)
    if pooled is not None:
        torch.testing.assert_close(rows["pooled_prompt_embeds"], pooled, rtol=0, atol=1e-5)
    if mask is not None:
        assert mask[0].sum() < mask[1].sum()
    alone = model.encode(prompts_of(model, [PROMPTS[0], "two dogs"]))
    assert {k: v.shape for k, v in alone.items()} == {k: v.shape for k, v in rows.items()}


def test_stable_diffusion_without_t5_encodes_with_its_other_encoders(tmp_path):
    """diffusers writes null for an encoder that was left out, and takes zeros for its states."""
    folder = tiny_families.build("sd3", tmp_path / "sd3")
    whole = load(folder).encode(PROMPTS)
    index = json.loads((folder / "model_index.json").read_text())
    for component in ("text_encoder_3", "tokenizer_3"):
        index[component] = [None, None]
        shutil.rmtree(folder / component)
    (folder / "model_index.json").write_text(json.dumps(index))
    check_components(folder)
    rows = load(folder).encode(PROMPTS)
    torch.testing.assert_close(rows["pooled_prompt_embeds"], whole["pooled_prompt_embeds"])
    assert rows["prompt_embeds"].shape == whole["prompt_embeds"].shape
    assert not rows["prompt_embeds"][:, -TOKENS:].any()


def test_noise_is_the_pipelines(pair):
    """The same generators, the same first latents, to the last bit."""
    model, theirs = pair
    assert torch.equal(torch.stack([model.noise(g) for g in generators()]), theirs.latents[0])


def test_velocity_is_what_the_pipeline_gives_its_scheduler(pair):
    """At every step of its own call, guided or not."""
    model, theirs = pair
    rows = model.encode(prompts_of(model))
    assert len(theirs.velocity) == STEPS
    for x, v, sigma in zip(theirs.latents, theirs.velocity, theirs.sigmas[:-1], strict=True):
        mine = model.velocity(x, sigma.expand(len(x)), rows)
        assert mine.dtype == torch.float32 and v.std() > 0.05
        torch.testing.assert_close(mine, v, rtol=1e-5, atol=1e-5)


def test_sampling_is_the_pipelines_call(pair):
    """Our noise levels, our Euler steps and our decoding: its latents and its images."""
    model, theirs = pair
    grid = model.sigmas(STEPS)
    torch.testing.assert_close(grid, theirs.sigmas, rtol=0, atol=1e-6)
    noise = torch.stack([model.noise(g) for g in generators()])
    ours = sample_ode(model, model.encode(prompts_of(model)), noise, grid)
    torch.testing.assert_close(ours, theirs.last, rtol=0, atol=1e-5)
    assert theirs.images.std() > 0.01
    torch.testing.assert_close(model.decode(ours), theirs.images, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(64, 128), (128, 64)], ids=["wide", "tall"])
def test_images_that_are_not_square_are_the_pipelines(family, height, width):
    """Noise, positions, noise levels and decoding of another height than width."""
    name, folder = family
    theirs = Watched(folder, height, width, **ON[name])
    model = load(folder, true_cfg_scale=3.0).set_resolution((height, width))
    noise = torch.stack([model.noise(g) for g in generators()])
    assert torch.equal(noise, theirs.latents[0])
    grid = model.sigmas(STEPS)
    torch.testing.assert_close(grid, theirs.sigmas, rtol=0, atol=1e-6)
    ours = sample_ode(model, model.encode(prompts_of(model)), noise, grid)
    torch.testing.assert_close(ours, theirs.last, rtol=0, atol=1e-5)
    images = model.decode(ours)
    assert images.shape[2:] == (height, width)
    torch.testing.assert_close(images, theirs.images, rtol=0, atol=1e-5)


def test_negative_prompts_are_the_pipelines(family):
    """Each prompt is led away from its own negative prompt, or from the run's."""
    name, folder = family
    negatives = ["a blue cat", "two dogs left of a red square"]
    if name == "klein":  # its pipeline takes them as embeddings alone
        pipe = DiffusionPipeline.from_pretrained(folder)
        embeds = pipe.encode_prompt(negatives, max_sequence_length=TOKENS)[0]
        given = ON[name] | {"negative_prompt_embeds": embeds}
    else:
        given = ON[name] | {"negative_prompt": list(negatives)}
    theirs = Watched(folder, **given)
    model = load(folder, true_cfg_scale=3.0)
    prompts = prompts_of(model)
    noise = torch.stack([model.noise(g) for g in generators()])
    sigma = theirs.sigmas[0].expand(2)
    without = model.velocity(noise, sigma, model.encode(prompts))
    model.negative_prompt = negatives[1]
    model.negative_prompts = {prompts[0]: negatives[0]}
    rows = model.encode(prompts)
    velocity = model.velocity(noise, sigma, rows)
    torch.testing.assert_close(velocity, theirs.velocity[0], rtol=1e-5, atol=1e-5)
    assert (velocity - without).abs().max() > 1e-3
    ours = sample_ode(model, rows, noise, model.sigmas(STEPS))
    torch.testing.assert_close(ours, theirs.last, rtol=0, atol=1e-5)
    assert not any(
        row.startswith("negative") for row in model.set_guidance(2.5, 1.0).encode(prompts)
    )


def test_a_sample_alone_is_the_sample_in_a_batch(pair):
    """Whatever the lengths of the other prompts, and each at its own noise level."""
    model, theirs = pair
    x = theirs.latents[0]
    sigma = torch.tensor([0.9, 0.3])
    rows = model.encode(prompts_of(model))
    both = model.velocity(x, sigma, rows)
    for i in range(len(PROMPTS)):
        part = slice(i, i + 1)
        alone = model.velocity(x[part], sigma[part], {k: v[part] for k, v in rows.items()})
        torch.testing.assert_close(alone, both[part], rtol=0, atol=1e-5)
    torch.testing.assert_close(model.decode(x)[1:], model.decode(x[1:]), rtol=0, atol=1e-5)
    swapped = {k: v.flip(0) for k, v in rows.items()}
    assert (model.velocity(x, sigma, swapped) - both).abs().max() > 1e-3, (
        "the prompt does not matter"
    )


def drawn(model):
    """Trajectories of both prompts, and all their transitions as the work of an update."""
    keys = [(0, 0, p, g) for p in range(2) for g in range(2)]
    grid = policy.sigmas(6, 3.0)
    row = torch.tensor([0, 0, 1, 1])
    rows = model.encode(prompts_of(model))
    paths = sample_trajectories(
        policy=model,
        conditioning=rows,
        prompt_index=row,
        keys=keys,
        options=RolloutOptions(Sampler(grid)),
    )
    chunks = chunks_from_setting("2,3", 5)
    work = build_update_batch(torch.arange(4), sample_chunks(paths, chunks, 1.0), chunks, limit=20)
    return ReplayContext(model, rows, paths), work


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["plain", "guided"])
def test_ratio_is_one_before_the_first_update(family, scale):
    """The log-probabilities of the rollout, one step in a batch, are those of the replay, all in another batch."""
    what, work = drawn(load(family[1], true_cfg_scale=scale))
    old = what.trajectories.log_probs[work.image_index, work.step_index]
    assert (
        max_ratio_error(compute_transition_stats(what, work, Method(Settings()))[0], old, work)
        < 1e-5
    )
    assert old.std() > 0


@pytest.mark.parametrize(("rank", "scale"), [(0, 1.0), (4, 3.0)], ids=["full", "lora-guided"])
def test_an_update_is_learned_saved_loaded_and_switched_off(family, rank, scale, tmp_path):
    """One step raises the objective; the saved weights are the trained ones, here and in diffusers; the base is there."""
    _, folder = family
    base = load(folder, true_cfg_scale=scale)
    words = {
        "resolution": SIDE,
        "max_tokens": TOKENS,
        "guidance": 2.5,
        "true_cfg_scale": scale,
        "lora_rank": rank,
    }
    trained = [trainable.load_trainable_policy(str(folder), **words) for _ in range(2)]
    model, again = trained
    what, work = drawn(model)
    x = what.trajectories.latents[[0, 2], 0]
    sigma = torch.tensor([0.9, 0.3])
    before = base.velocity(x, sigma, what.conditioning).detach()
    torch.testing.assert_close(
        model.velocity(x, sigma, what.conditioning), before, rtol=0, atol=1e-6
    )

    method = Method(Settings(clip_range=10.0))
    old = compute_transition_stats(what, work, method)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    optimizer = torch.optim.AdamW(
        model.trained, lr=1e-2 if rank else 1e-3
    )  # an adapter starts at nothing
    first = accumulate_gradients(what, work, advantage, method, old)
    optimizer.step()
    optimizer.zero_grad()
    second = accumulate_gradients(what, work, advantage, method, old)
    assert abs(first.objective) < 1e-6 and second.objective > 1e-4

    after = model.velocity(x, sigma, what.conditioning).detach()
    assert (after - before).abs().max() > 1e-4
    with torch.no_grad(), trainable.use_base_weights(model):
        torch.testing.assert_close(
            model.velocity(x, sigma, what.conditioning), before, rtol=0, atol=1e-6
        )
    assert torch.equal(model.velocity(x, sigma, what.conditioning).detach(), after)

    trainable.save_trained_weights(model, tmp_path / "final")
    trainable.load_trained_weights(again, tmp_path / "final")
    assert torch.equal(again.velocity(x, sigma, what.conditioning).detach(), after)
    if rank:
        pipe = DiffusionPipeline.from_pretrained(folder)
        pipe.load_lora_weights(str(tmp_path / "final"))
        base.module = pipe.transformer
    else:
        base.module = type(base.transformer).from_pretrained(tmp_path / "final")
    torch.testing.assert_close(base.velocity(x, sigma, what.conditioning), after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_float16(family, stored):
    """A forward in float16, of weights stored either way, is nearer to the one in float32 than bfloat16's limit."""
    given = {"true_cfg_scale": 3.0}
    model = load(family[1], **given)
    half = load(family[1], **given, dtype="float16", weights_dtype=stored)
    x = torch.stack([model.noise(g) for g in generators()])
    sigma = torch.tensor([0.875, 0.25])
    # the same embeddings for both
    rows = half.encode(prompts_of(half))
    exact_rows = {k: v.float() if v.is_floating_point() else v for k, v in rows.items()}
    with torch.no_grad():
        v = model.velocity(x, sigma, exact_rows)
        low = half.velocity(x, sigma, rows)
        assert half.decode(x).dtype == low.dtype == torch.float32
    assert 0 < (low - v).norm() < 0.03 * v.norm()
    assert rows["prompt_embeds"].dtype == torch.float16 and half.vae.dtype == torch.bfloat16
    assert not half.saturated


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_bfloat16(family, stored):
    """A forward in bfloat16, of weights stored either way, is near the one in float32."""
    given = {"true_cfg_scale": 3.0}
    model = load(family[1], **given)
    half = load(family[1], **given, dtype="bfloat16", weights_dtype=stored)
    # which bfloat16 has too
    rows = model.encode(prompts_of(model))
    sigma = torch.tensor([0.875, 0.25])
    x = torch.stack([model.noise(g) for g in generators()])
    with torch.no_grad():
        v = model.velocity(x, sigma, rows)
        low = half.velocity(x, sigma, rows)
        assert half.decode(x).dtype == low.dtype == torch.float32
    assert 0 < (low - v).norm() < 0.15 * v.norm()
    assert half.encode(prompts_of(half))["prompt_embeds"].dtype == torch.bfloat16


def test_gradient_checkpointing_changes_nothing(family):
    """The same gradient."""
    grads = []
    for checkpointing in (False, True):
        model = trainable.load_trainable_policy(
            str(family[1]), resolution=SIDE, max_tokens=TOKENS, gradient_checkpointing=checkpointing
        )
        x = torch.stack([model.noise(g) for g in generators()])
        model.velocity(
            x, torch.tensor([0.9, 0.3]), model.encode(prompts_of(model))
        ).square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.trained if p.grad is not None]))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_said(family):
    """A resolution that cannot be packed, and more tokens than the pipeline allows."""
    _, folder = family
    model = load(folder)
    with pytest.raises(InputError, match="resolution: 72 is not allowed"):
        model.set_resolution(
            72
        ) if model.patch * model.vae_scale_factor == 16 else model.set_resolution(72 + 1)
    assert model.resolution == SIDE
    with pytest.raises(InputError, match="max_tokens: 5000 is too many"):
        policy.load_policy(str(folder), resolution=SIDE, max_tokens=5000)


def test_a_distilled_klein_is_not_guided(tmp_path):
    tiny_families.klein(tmp_path / "klein", distilled=True)
    assert load(tmp_path / "klein").true_cfg_scale == 1
    with pytest.raises(InputError, match="true_cfg_scale: got 3, but the model is distilled"):
        load(tmp_path / "klein", true_cfg_scale=3.0)


def shift(network, offset=8):
    """Put every tensor of a network where a file may have it: so many bytes after a multiple of 64."""
    for tensor in (*network.parameters(), *network.buffers()):
        size = tensor.element_size()
        room = torch.empty(tensor.numel() + 64 // size, dtype=tensor.dtype)
        tensor.data = room[offset // size :][: tensor.numel()].view_as(tensor).copy_(tensor)
        assert tensor.data_ptr() % 64 == offset


def test_weights_are_aligned_wherever_the_file_has_them(family, monkeypatch):
    """Some CPUs sum differently where weights do not begin on a multiple of 64 bytes.

    All networks of a policy do, also after training's weights were loaded, so that the base and weights that were not
    trained are one function to the bit."""
    _, folder = family
    import_class, loaded = policy.import_class, []

    class Shifted:
        """A class of diffusers whose files have weights 8 bytes off."""

        def __init__(self, name):
            self.kind = import_class(name)

        def __getattr__(self, name):
            return getattr(self.kind, name)

        def from_pretrained(self, *given, **more):
            loaded.append(self.kind.from_pretrained(*given, **more))
            shift(loaded[-1])
            return loaded[-1]

    monkeypatch.setattr(policy, "import_class", Shifted)
    model = trainable.load_trainable_policy(
        str(folder), resolution=SIDE, max_tokens=TOKENS, guidance=2.5
    )
    assert loaded == [model.transformer, model.vae]
    for network in (model.transformer, model.vae):
        assert not [name for name, p in network.named_parameters() if p.data_ptr() % 64]
        assert not [name for name, p in network.named_buffers() if p.data_ptr() % 64]
    assert not [p for p in model.base_params if p.data_ptr() % 64]

    rows = model.encode(prompts_of(model))
    sigma = torch.tensor([0.9, 0.3])
    x = torch.stack([model.noise(g) for g in generators()])
    with torch.no_grad():
        untrained = model.velocity(x, sigma, rows)
        with trainable.use_base_weights(model):
            assert torch.equal(model.velocity(x, sigma, rows), untrained)
            assert not [p for p in model.transformer.parameters() if p.data_ptr() % 64]
        assert torch.equal(load(folder).velocity(x, sigma, rows), untrained)


def test_a_run_from_the_command_line(tmp_path):
    """SD3 with guidance and LoRA: trained, evaluated, and its weights load into diffusers."""
    folder = tiny_families.build("sd3", tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red star\na blue circle\ntwo cats\n")
    words = {
        "model": str(folder),
        "prompts": str(tmp_path / "prompts.txt"),
        "true_cfg_scale": 3.0,
        "lora_rank": 2,
    }
    words |= {
        "eval_prompts": words["prompts"],
        "resolution": 64,
        "eval_resolution": 64,
        "max_tokens": 8,
        "dtype": "float32",
        "iterations": 1,
        "images_per_prompt": 2,
        "prompts_per_iteration": 2,
        "steps": 6,
        "chunks": "2,3",
        "eval_steps": 3,
        "hybrid_split": 2,
        "threads": 1,
        "reward": "tiny_rewards:red",
    }
    (tmp_path / "s.yaml").write_text(json.dumps(words))
    assert "memory per process" in run("plan", tmp_path / "s.yaml")
    run("train", tmp_path / "s.yaml", "--out", tmp_path / "run", "--no-report")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[1]["ratio_floor"] == 0 and lines[1]["ratio_floor_rollout"] < 1e-4
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.load_lora_weights(str(tmp_path / "run" / "final"))


def test_a_vae_with_another_configuration_has_a_scale_and_a_limit():
    """Sana's, whose configuration names its channels in another way, and one that names none."""
    vae = AutoencoderDC(
        encoder_block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        latent_channels=4,
        attention_head_dim=8,
    )
    model = policy.Policy.__new__(policy.Policy)
    model.vae, model.resolution = vae, 1024
    assert model.vae_scale_factor == 4
    largest = []
    for layer in vae.decoder.modules():
        layer.register_forward_hook(lambda layer, given, out: largest.append(out.numel()))
    with torch.no_grad():
        assert vae.decode(torch.zeros(1, 4, 16, 16)).sample.shape[-1] == 64
    assert max(largest) <= policy._largest_vae_activation(vae.config, 64) <= 4 * max(largest)
    assert model.decode_limit == (2**31 - 1) // policy._largest_vae_activation(vae.config, 1024)
    assert policy._largest_vae_activation(SimpleNamespace(), 64) == 1024 * 64 * 64
