"""An evaluation follows the noise levels of the pipeline's own call, whatever the scheduler's options are."""

import json
import shutil

import pytest
import tiny_families
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.models import inputs, policy
from chunk_grpo.models.families import latents_to_tokens
from chunk_grpo.runs import run_folder
from chunk_grpo.training.rollout import sample_ode

NAMES = list(tiny_families.BUILDERS)
PROMPT, STEPS, TOKENS, SIDE = "a red star", 4, 16, 64
ONE_FORWARD = {
    "dev": {"guidance_scale": 2.5},
    "sd3": {"guidance_scale": 1.0},
    "z_image": {"guidance_scale": 0.0},
    "klein": {"guidance_scale": 1.0},
}

SUPPORTED = {
    "static": {"use_dynamic_shifting": False, "shift": 2.0, "shift_terminal": None},
    "no-shift": {"use_dynamic_shifting": False, "shift": 1.0, "shift_terminal": None},
    "dynamic": {"use_dynamic_shifting": True, "shift_terminal": None},
    "linear": {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    "linear-static": {"use_dynamic_shifting": False, "time_shift_type": "linear", "shift": 3.0},
    "ends-of-the-shift": {"use_dynamic_shifting": True, "base_shift": 0.2, "max_shift": 2.0},
    "ends-of-the-tokens": {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 4,
        "max_image_seq_len": 32,
    },
    "terminal": {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": 0.1},
    "terminal-dynamic": {"use_dynamic_shifting": True, "shift_terminal": 0.1},
    "karras": {"use_karras_sigmas": True},
    "karras-between": {"use_karras_sigmas": True, "sigma_min": 0.05, "sigma_max": 0.9},
    "exponential": {"use_exponential_sigmas": True},
    "beta": {"use_beta_sigmas": True},
    "terminal-karras": {"use_karras_sigmas": True, "shift_terminal": 0.05},
    "flow-sigmas": {"use_flow_sigmas": True, "use_dynamic_shifting": False, "shift": 3.0},
    "flow-sigmas-dynamic": {"use_flow_sigmas": True, "use_dynamic_shifting": True},
    "no-terminal": {"shift_terminal": None},
}

REJECTED = {
    "invert_sigmas": {"invert_sigmas": True},
    "stochastic_sampling": {"stochastic_sampling": True},
    "num_train_timesteps": {"num_train_timesteps": 500},
    "num_train_timesteps-text": {"num_train_timesteps": "1000"},
    "time_shift_type": {"time_shift_type": "quadratic"},
    "use_karras_sigmas": {"use_karras_sigmas": True, "use_exponential_sigmas": True},
    "use_karras_sigmas-text": {"use_karras_sigmas": "false"},
    "use_beta_sigmas-number": {"use_beta_sigmas": 1},
    "use_karras_sigmas-null": {"use_karras_sigmas": None},
    "shift": {"shift": 0, "use_dynamic_shifting": False},
    "shift-negative": {"shift": -3.0, "use_dynamic_shifting": False},
    "shift-text": {"shift": "three"},
    "shift-list": {"shift": [3.0]},
    "shift-null": {"shift": None, "use_dynamic_shifting": False},
    "shift-nan": {"shift": float("nan")},
    "shift_terminal": {"shift_terminal": 1.0},
    "shift_terminal-text": {"shift_terminal": "0.02"},
    "base_shift": {"use_dynamic_shifting": True, "base_shift": None},
    "base_shift-linear": {
        "use_dynamic_shifting": True,
        "time_shift_type": "linear",
        "base_shift": -1.0,
    },
    "max_shift": {"use_dynamic_shifting": True, "max_shift": 1e6},
    "base_image_seq_len": {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 4096,
        "max_image_seq_len": 4096,
    },
    "max_image_seq_len": {"use_dynamic_shifting": True, "max_image_seq_len": "many"},
}

CLASSES = (
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "EulerDiscreteScheduler",
    "NoSuchScheduler",
    3,
    "",
)


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    """A family's name, its folder, and its pipeline."""
    folder = tiny_families.build(request.param, tmp_path_factory.mktemp(request.param) / "model")
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return request.param, folder, pipe


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Embeddings of these models do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def config(family):
    """The scheduler's configuration, which is put back afterwards."""
    file = family[1] / "scheduler" / "scheduler_config.json"
    whole = file.read_text()
    yield lambda change: file.write_text(json.dumps(json.loads(whole) | change))
    file.write_text(whole)


@pytest.mark.parametrize("option", SUPPORTED)
def test_levels_and_latents_are_those_of_the_pipelines_call(family, config, option):
    """The scheduler is read from the same folder; from the same noise the same latents come out."""
    name, folder, pipe = family
    config(SUPPORTED[option])
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    theirs = pipe(
        prompt=PROMPT,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        max_sequence_length=TOKENS,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **ONE_FORWARD.get(name, {}),
    ).images
    model = policy.load_policy(str(folder), resolution=SIDE, max_tokens=TOKENS, guidance=2.5)
    levels = model.sigmas(STEPS)
    torch.testing.assert_close(levels, pipe.scheduler.sigmas, rtol=0, atol=2e-6)
    noise = model.noise(torch.Generator().manual_seed(0))[None]
    ours = sample_ode(model, model.encode([PROMPT]), noise, levels)
    if (
        name == "klein"
    ):  # whose call undoes the VAE's batch norm and the patches before it returns latents
        norm = model.vae.bn
        ours = (
            ours * (norm.running_var + model.vae.config.batch_norm_eps).sqrt() + norm.running_mean
        )
        theirs = torch.nn.functional.pixel_unshuffle(theirs, 2)
    theirs = latents_to_tokens(theirs) if theirs.ndim == 4 else theirs
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)


def rejected(folder, tmp_path, monkeypatch, *words):
    """The sentence that loading and making a run give, before any weight is loaded; no folder is left."""
    monkeypatch.setattr(policy, "_load_network", lambda *given: pytest.fail("weights were read"))
    changes = {
        "model": str(folder),
        "resolution": SIDE,
        "eval_resolution": SIDE,
        "max_tokens": TOKENS,
    }
    for attempt in (
        lambda: policy.load_policy(str(folder), resolution=SIDE, max_tokens=TOKENS),
        lambda: run_folder.create_run(
            settings.load_settings("pocket/tiny", changes), tmp_path / "run"
        ),
    ):
        with pytest.raises(InputError) as error:
            attempt()
        said = str(error.value)
        assert "\n" not in said and len(said) < 400 and all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", REJECTED)
def test_unsupported_scheduler_option_is_rejected_before_weights(
    family, config, tmp_path, monkeypatch, option
):
    config(REJECTED[option])
    rejected(family[1], tmp_path, monkeypatch, option.partition("-")[0], "scheduler_config.json")


@pytest.mark.parametrize("name", CLASSES)
def test_other_scheduler_class_is_rejected_before_weights(family, tmp_path, monkeypatch, name):
    """Named by the index, by the scheduler's own file, or by both."""
    index = json.loads((family[1] / "model_index.json").read_text())
    own = json.loads((family[1] / "scheduler/scheduler_config.json").read_text())
    for places in (("index",), ("own",), ("index", "own")):
        folder = shutil.copytree(family[1], tmp_path / "-".join(places))
        if "index" in places:
            (folder / "model_index.json").write_text(
                json.dumps(index | {"scheduler": ["diffusers", name]})
            )
        if "own" in places:
            (folder / "scheduler/scheduler_config.json").write_text(
                json.dumps(own | {"_class_name": name})
            )
        rejected(folder, tmp_path, monkeypatch, "scheduler")


def test_one_step_that_a_schedule_cannot_take_is_rejected_before_a_run(tmp_path):
    """A terminal level needs two steps: with one, diffusers divides by zero."""
    folder = tiny_families.build("qwen", tmp_path / "model")
    changes = {
        "model": str(folder),
        "resolution": SIDE,
        "eval_resolution": SIDE,
        "max_tokens": TOKENS,
    }
    changes |= {"eval_steps": 1, "hybrid_split": 0, "prompts": "pocket:train"}
    with pytest.raises(InputError, match="shift_terminal"):
        run_folder.create_run(settings.load_settings("pocket/tiny", changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    model = policy.load_policy(str(folder), resolution=SIDE, max_tokens=TOKENS)
    with pytest.raises(InputError, match="1 step"):
        model.sigmas(1)


def test_every_family_s_own_scheduler_is_accepted(family):
    inputs.check_scheduler(family[1])
