"""Forward passes in float16: closer ratios than in bfloat16, a scaled loss, skipped steps, and sentences about overflow."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_families
import torch
from commands import environment, run
from diffusers.training_utils import EMAModel
from small_runs import metrics, trained

from chunk_grpo import InputError
from chunk_grpo.core.files import read_json
from chunk_grpo.core.settings import Settings, load_settings
from chunk_grpo.models import policy, prompt_embeds, trainable
from chunk_grpo.models.cost import find_model_config
from chunk_grpo.planning.devices import find_device, iteration_seconds
from chunk_grpo.planning.memory import training_memory
from chunk_grpo.theory.chunks import chunks_from_setting
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training import trainer
from chunk_grpo.training.callbacks import Alarms
from chunk_grpo.training.chunk_sampling import sample_chunks
from chunk_grpo.training.gradient import (
    accumulate_gradients,
    compute_transition_stats,
    max_ratio_error,
)
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update import step_optimizer
from chunk_grpo.training.update_batch import build_update_batch

PROMPTS = ["a red star", "two cats left of three dogs"]
ARGUMENTS = {"resolution": 64, "max_tokens": 16, "guidance": 2.5}
SCALE = 2.0**16


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Embeddings of these models do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["dev", "qwen"])
def folder(request, tmp_path_factory):
    """A model's folder."""
    return str(tiny_families.build(request.param, tmp_path_factory.mktemp("model") / "model"))


def sampled(model):
    """The trajectories of both prompts by a model, and all their transitions as an update."""
    paths = sample_trajectories(
        policy=model,
        conditioning=model.encode(PROMPTS),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        keys=[(0, 0, p, g) for p in range(2) for g in range(2)],
        options=RolloutOptions(Sampler(policy.sigmas(6, 3.0))),
    )
    chunks = chunks_from_setting("2,3", 5)
    chosen = sample_chunks(paths, chunks, 1.0)
    return paths, build_update_batch(torch.arange(4), chosen, chunks, limit=20)


def test_ratios_are_closer_to_one_than_in_bfloat16(folder):
    """A replay in a number format differs less from the exact one in float16 than in bfloat16, and not by nothing."""
    exact = policy.load_policy(folder, **ARGUMENTS)
    paths, batch = sampled(exact)
    errors = {}
    for dtype in ("float32", "float16", "bfloat16"):
        model = policy.load_policy(folder, **ARGUMENTS, dtype=dtype, weights_dtype="float32")
        context = ReplayContext(model, model.encode(PROMPTS), paths)
        new = compute_transition_stats(context, batch, Method(Settings()))[0]
        old = paths.log_probs[batch.image_index, batch.step_index]
        errors[dtype] = max_ratio_error(new, old, batch)
    assert 0 <= errors["float32"] < errors["float16"] < errors["bfloat16"] / 2


def test_the_scaled_gradient_is_near_that_of_float32(folder):
    """The gradient of an update in float16, unscaled, points where float32's points; it is in float32."""
    gradients = {}
    for dtype, scale in (("float32", 1.0), ("float16", SCALE)):
        model = trainable.load_trainable_policy(folder, **ARGUMENTS, dtype=dtype, lora_rank=4)
        with torch.no_grad():  # an adapter begins at 0, which leaves half of its gradient 0
            for i, p in enumerate(model.trained):
                p.copy_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        paths, batch = sampled(model)
        context = ReplayContext(model, model.encode(PROMPTS), paths)
        accumulate_gradients(
            context,
            batch,
            torch.tensor([1.0, -1.0, 0.5, -0.5]),
            Method(Settings(clip_range=1.0)),
            backward=lambda loss, scale=scale: (scale * loss).backward(),
        )
        assert {p.grad.dtype for p in model.trained} == {torch.float32}
        gradients[dtype] = torch.cat([p.grad.flatten() / scale for p in model.trained])
    cosine = torch.cosine_similarity(gradients["float16"], gradients["float32"], dim=0)
    assert cosine > 0.99 and gradients["float32"].norm() > 0


def state_of(weight, gradient, scaler=None):
    """What `step_optimizer` reads, with a gradient in place."""
    weight.grad = gradient.clone()
    return SimpleNamespace(
        settings=SimpleNamespace(max_grad_norm=1.0),
        policy=SimpleNamespace(trained=[weight]),
        optimizer=torch.optim.AdamW([weight], lr=0.1),
        scaler=scaler,
        ema=EMAModel([weight], decay=0.5),
    )


def test_a_scaled_step_is_the_step_without_scale():
    """Gradients are unscaled before their norm is measured and clipped."""
    start, gradient = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([3.0, 0.5, -4.0])
    plain = torch.nn.Parameter(start.clone())
    norm = step_optimizer(state_of(plain, gradient))
    scaled = torch.nn.Parameter(start.clone())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # which makes the tensor of the scale
    state = state_of(scaled, SCALE * gradient, scaler)
    assert step_optimizer(state) == norm
    assert state.ema.optimization_step == 1
    assert torch.equal(scaled, plain) and not torch.equal(scaled, start)
    assert torch.equal(scaled.grad, plain.grad)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (SCALE, 1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_with_an_infinite_gradient_is_skipped_and_halves_the_scale(bad):
    start = torch.tensor([1.0, -2.0])
    weight = torch.nn.Parameter(start.clone())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    state = state_of(weight, torch.tensor([1.0, bad]), scaler)
    norm = step_optimizer(state)
    assert not torch.isfinite(torch.tensor(norm))
    assert torch.equal(weight, start) and scaler.get_scale() == SCALE / 2
    assert not state.optimizer.state and state.ema.optimization_step == 0


def test_all_processes_skip_a_step_together(tmp_path):
    """Two processes with whole weights, and with shards: an infinite loss in one of them skips the step in both."""
    ways = ["whole", "shards"]
    program = Path(__file__).with_name("scaled_steps.py")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *words, str(program), *ways],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("SAID "))
    for way, (one, other) in json.loads(said[5:]).items():
        assert one == other, way
        assert [step["finite"] for step in one] == [True, False, True], way
        assert [step["scale"] for step in one] == [2.0**10, 2.0**9, 2.0**9], way
        weights = [step["weights"] for step in one]
        assert weights[0] == weights[1] != weights[2], way


def test_a_run_learns_and_resumes_to_the_bit(world):
    """A run in float16 raises its reward; one that was resumed has its metrics, weights and loss scale."""
    words = ["dtype=float16", "--no-report"]
    outs = [world / "float16", world / "float16-resumed"]
    run("train", world / "s.yaml", *words, "--out", outs[0])
    run("train", world / "s.yaml", *words, "iterations=3", "--out", outs[1])
    run("train", world / "s.yaml", *words, "iterations=6", "--out", outs[1], "--resume")
    assert metrics(outs[0]) == metrics(outs[1]) and trained(outs[0]) == trained(outs[1])
    first, *lines = metrics(outs[0])
    assert lines[-1]["eval_tiny_rewards:red"] > first["eval_tiny_rewards:red"]
    assert lines[0]["ratio_floor"] == 0
    skipped = sum(line["skipped_updates"] for line in lines)
    assert lines[-1]["loss_scale"] == SCALE / 2**skipped and skipped < 3
    kept = [read_json(out / "checkpoints" / "000006" / "state.json") for out in outs]
    updates = 6 * load_settings(str(world / "s.yaml")).updates_per_iteration
    for state in kept:
        assert state["loss_scale"] == lines[-1]["loss_scale"]
        assert 0 < state["loss_scale_updates"] <= updates
    assert kept[0]["loss_scale_updates"] == kept[1]["loss_scale_updates"]


def test_skipped_updates_are_counted_and_a_run_without_any_other_is_ended(
    world, tmp_path, monkeypatch
):
    """At a scale that no gradient stands, each update is skipped; the sentence names bfloat16."""
    huge = functools.partial(torch.amp.GradScaler, init_scale=2.0**100)
    monkeypatch.setattr(torch.amp, "GradScaler", huge)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    settings = load_settings(
        str(world / "s.yaml"), {"dtype": "float16", "iterations": 2, "eval_every": 0}
    )
    with pytest.raises(InputError, match=r"in the last 2 iterations, .*set `dtype` to bfloat16"):
        trainer.train_run(settings, tmp_path, log=lambda text: None)
    count = settings.updates_per_iteration
    lines = metrics(tmp_path)[1:]
    assert [line["skipped_updates"] for line in lines] == [count, count]
    assert [line["loss_scale"] for line in lines] == [2.0 ** (100 - count * i) for i in (1, 2)]


def test_a_falling_loss_scale_does_not_end_a_run_but_one_below_1_does():
    """Three iterations without an update end other runs; here each of them makes the next more likely to be applied."""
    settings = load_settings("pocket/tiny", {"dtype": "float16", "iterations": 10})
    state = SimpleNamespace(settings=settings, iteration=0)
    watch = Alarms(lambda text: None)
    watch.on_log(state, {"iteration": 0})
    line = {"skipped_updates": settings.updates_per_iteration}
    for iteration, scale in enumerate([8.0, 4.0, 2.0, 1.0], 1):
        watch.on_log(state, line | {"iteration": iteration, "loss_scale": scale})
    with pytest.raises(InputError, match=r"in the last 5 iterations, .*set `dtype` to bfloat16"):
        watch.on_log(state, line | {"iteration": 5, "loss_scale": 0.5})


def test_prompts_and_images_do_not_pass_through_float16(folder):
    """Text encoders and VAE compute in bfloat16; what the transformer gets is in float16."""
    model = policy.load_policy(folder, **ARGUMENTS, dtype="float16")
    low = policy.load_policy(folder, **ARGUMENTS, dtype="bfloat16")
    assert (model.transformer.dtype, model.vae.dtype) == (torch.float16, torch.bfloat16)
    assert model.key == low.key
    rows, others = model.encode(PROMPTS), low.encode(PROMPTS)
    assert rows["prompt_embeds"].dtype == torch.float16
    for name, values in rows.items():
        torch.testing.assert_close(values.float(), others[name].float(), rtol=0, atol=1e-6)


def test_a_prompt_beyond_the_range_of_float16_is_rejected():
    rows = {"prompt_embeds": torch.tensor([[7e4, 1.0]], dtype=torch.bfloat16)}
    with pytest.raises(InputError, match=r"`dtype` must be bfloat16 or float32 .*`prompt_embeds`"):
        prompt_embeds._convert_to_float16(rows)


class Block(torch.nn.Module):
    def forward(self, x):
        return x, (10 * x).clip(-65504, 65504)


class Network(torch.nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])


def test_activations_at_the_largest_number_are_noticed_although_diffusers_clips_them():
    net = Network()
    saturated = policy.watch_saturation(net, torch.device("cpu"))
    net.blocks[1](torch.full((2,), 6000.0, dtype=torch.float16))
    net.blocks[1](torch.full((2,), 7e4))  # in float32 there is room
    assert not saturated
    net.blocks[1](torch.full((2,), 7000.0, dtype=torch.float16))
    assert saturated


def test_overflow_is_said_once_as_a_warning_or_ends_the_run(folder, capsys):
    """Clipped activations are a warning; images that are not finite are an error that names float16."""
    model = policy.load_policy(folder, **ARGUMENTS, dtype="float16")
    noise = torch.stack([model.noise(torch.Generator().manual_seed(0))])
    policy.decode_latents(model, noise)
    assert capsys.readouterr().out == ""
    model.saturated.fill_(True)
    policy.decode_latents(model, noise)
    policy.decode_latents(model, noise)
    assert capsys.readouterr().out.count("warning: activations of the transformer reach 65504") == 1
    with pytest.raises(InputError, match=r"not finite; .* activations exceed 65504, .* float16"):
        policy.decode_latents(model, noise * float("nan"))


def test_a_plan_counts_float16_as_bfloat16():
    """Both have two bytes and the same rate; FLUX clips its text in float16, which keeps more for the backward pass."""
    config = find_model_config("black-forest-labs/FLUX.1-dev")
    low, half = (
        load_settings("paper/chunk", {"dtype": dtype}) for dtype in ("bfloat16", "float16")
    )
    device = find_device("h200")
    memory, other = (training_memory(settings, config) for settings in (half, low))
    assert memory.pop("activations") >= other.pop("activations") > 0
    assert memory == other
    assert iteration_seconds(half, config, device) == iteration_seconds(low, config, device)
