"""The ten checks of `make gpu`: each a question about a GPU at the size of a released model, answered in four minutes.

Every check is a function of `small` (tiny sizes, on whatever is there) and an empty folder; it returns its parts by
name, each a call that measures something and says what is wrong with it. nbs/findings/speed.ipynb explains the answers.
"""

import contextlib
import functools
import gc
import hashlib
import importlib.util
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import gpu_models
import torch
from gpu_models import DEVICE
from gpu_results import Measured
from safetensors.torch import load_file
from torch import Tensor

from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.machine import (
    disable_tf32,
    make_parent_death_hook,
    terminate_process_group,
)
from chunk_grpo.core.settings import Settings
from chunk_grpo.measurements import speed
from chunk_grpo.models import trainable
from chunk_grpo.models.activations import (
    LiveBytesMode,
    activation_bytes,
    decode_batch_size,
    decode_bytes_on_gpu,
    fit_update_batch,
)
from chunk_grpo.models.cost import forward_flops, model_sizes
from chunk_grpo.models.policy import ModelConfig, Policy, decode_latents
from chunk_grpo.planning.counts import forward_backward_cost
from chunk_grpo.planning.devices import find_device, recognise_gpu
from chunk_grpo.planning.memory import peak_memory
from chunk_grpo.runs import run_folder
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.training import metrics, trainer
from chunk_grpo.training.chunk_sampling import sample_chunks
from chunk_grpo.training.gradient import chunk_means, compute_transition_stats
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.state import TrainingState
from chunk_grpo.training.update_batch import build_update_batch

ROOT = Path(__file__).resolve().parents[1]
Parts = dict[str, Callable[[], Measured]]
CLIP_RANGE = 5e-5  # the paper's

SMALL = {  # what makes a preset tiny
    "resolution": 64,
    "eval_resolution": 64,
    "max_tokens": 16,
    "dtype": "float32",
    "latents_dtype": "float32",
    "lora_rank": 2,
    "steps": 5,
    "chunks": "2,2",
    "images_per_prompt": 4,
    "rollout_batch": 4,
    "update_batch": 2,
}
ONE_ITERATION = {  # of a preset: one prompt, so that an iteration takes a minute; memory does not depend on it
    "prompts": "pocket:train",
    "eval_prompts": "pocket:test",
    "prompts_per_iteration": 1,
    "iterations": 2,
    "eval_every": 0,
    "eval_steps": 2,
    "hybrid_split": 1,
    "eval_count": 12,
}


# ------------------------------------------------------------------------------------------------- time, memory, device


class Peak:
    """The largest memory, in bytes, that this process has used on the device in any measurement."""

    bytes = 0


def allocated_peak() -> int | None:
    """Return the largest memory that the process has used on the device so far; None without a GPU."""
    if DEVICE.type != "cuda":
        return None
    Peak.bytes = max(Peak.bytes, torch.cuda.max_memory_allocated(DEVICE))
    return Peak.bytes


def measure_peak(call: Callable) -> tuple[object, int]:
    """Call a function, and return its result and the peak of the bytes that it allocated."""
    if DEVICE.type == "cuda":
        allocated_peak()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        out = call()
        torch.cuda.synchronize(DEVICE)
        return out, torch.cuda.max_memory_allocated(DEVICE) - before
    with torch.compiler.set_stance("force_eager"), LiveBytesMode() as live:
        out = call()
    return out, live.peak


def allocated_gigabytes() -> float | None:
    """Return the device memory that this process holds, in GB; None without a GPU."""
    return torch.cuda.memory_allocated(DEVICE) / 1e9 if DEVICE.type == "cuda" else None


def free_memory() -> None:
    """Free the memory that earlier parts have left allocated."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def limit_memory(
    gigabytes: float,
) -> float | None:  # memory of the device under this limit, in GB; None without a GPU
    """Limit the device memory of this process to that of a smaller card."""
    if DEVICE.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), DEVICE)
    return min(gigabytes, total / 1e9)


def median_seconds(call: Callable, repeats: int = 3) -> float:
    """Return the median seconds of a call, after a first call that does not count."""
    call()
    return statistics.median(speed.time_call(call, DEVICE)[1] for _ in range(repeats))


def reached_share(flops: float, seconds: float, dtype: str) -> tuple[str | None, float | None]:
    """Return the device's name in `plan`, and the share of its rated speed that these operations reached."""
    name = recognise_gpu(torch.cuda.get_device_name()) if DEVICE.type == "cuda" else None
    if name is None:
        return None, None
    return name, flops / seconds / (getattr(find_device(name), dtype) * 1e12)


def share_entry(model: str, settings: Settings, phase: str, flops: float, seconds: float) -> dict:
    """Return the entry of `shares.json` for a measurement; empty if `plan` does not know the device."""
    name, share = reached_share(flops, seconds, settings.dtype)
    if name is None:
        return {}
    row = {
        "device": name,
        "model": model,
        "dtype": settings.dtype,
        "phase": phase,
        "resolution": settings.resolution,
    }
    return {"share": row | {"share": share}}


def flux_settings(small: bool, **changes) -> Settings:
    """Return the settings of a LoRA run of FLUX.1-dev's size at 720 px."""
    size = (
        {name: SMALL[name] for name in ("resolution", "max_tokens", "dtype", "lora_rank")}
        if small
        else {}
    )
    return speed.load_workload_settings("flux-size", size | changes)


def all_finite(tensors) -> bool:
    """Return True if all numbers of some tensors are finite."""
    return all(bool(x.isfinite().all()) for x in tensors)


# -------------------------------------------------------------------------------------------------------- 1: an update


def example_inputs(policy: Policy, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return latents, noise levels and conditioning with this number of rows."""
    noise = [policy.noise(torch.Generator().manual_seed(i)) for i in range(count)]
    rows = policy.encode([f"a prompt with {'more ' * i}words" for i in range(count)])
    return torch.stack(noise).to(policy.device), torch.linspace(0.9, 0.3, count), rows


def backward_of(policy: Policy, inputs: tuple) -> None:
    """Leave the gradients of a forward pass and its backward in the trained weights.

    Gradients that are there are set to zero and stay, so that a second call measures activations alone, as `plan` does.
    """
    for parameter in policy.trained:
        if parameter.grad is not None:
            parameter.grad.zero_()
    latents, sigma, rows = inputs
    velocity = policy.velocity(latents, sigma, rows)
    direction = torch.randn(velocity.shape, generator=torch.Generator().manual_seed(1)).to(velocity)
    (velocity * direction).mean().backward()


def gradients(policy: Policy) -> Tensor:
    """Return all gradients as one vector; weights without a gradient count as zeros."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.trained]
    return torch.cat([part.flatten().float() for part in parts])


def check_update(small: bool, folder: Path) -> Parts:
    """Check that attention's backward is right in bfloat16, and that an update of 12 billion parameters runs."""

    def blocks() -> Measured:
        config = gpu_models.model_config("flux", small, num_layers=1, num_single_layers=1)
        settings = flux_settings(small, lora_rank=0, dtype="bfloat16", gradient_checkpointing=False)
        policy = gpu_models.trainable_policy(config, settings, folder / "blocks")
        inputs = example_inputs(policy, 2)
        found = {}
        kernels = {}
        for kernel in ("native", "_native_math"):
            trainable.set_attention_backend(policy, kernel)
            backward_of(policy, inputs)
            found[kernel] = gradients(policy)
            kernels[kernel] = attention_kernels(policy)
        cosine = torch.cosine_similarity(
            found["native"].double(), found["_native_math"].double(), dim=0
        ).item()
        finite = all_finite(found.values())
        problem = ""
        if not finite:
            problem = "gradients are not finite"
        elif cosine < 0.999:
            problem = (
                f"gradients of native and math attention have cosine {cosine:.5f}, allowed is .999"
            )
        return Measured(
            {"cosine of gradients": cosine, "finite": finite, "kernels": kernels}, problem
        )

    @functools.cache
    def whole_model() -> tuple[Policy, ModelConfig]:
        free_memory()
        config = gpu_models.model_config("flux", small)
        return gpu_models.trainable_policy(config, flux_settings(small), folder / "whole"), config

    def rows(count: int, checkpointing: bool) -> Measured:
        policy, config = whole_model()
        settings = flux_settings(small, update_batch=count, gradient_checkpointing=checkpointing)
        planned = activation_bytes(config, settings)
        if not fits_beside_weights(planned):
            return Measured(
                {
                    "planned_gb": planned / 1e9,
                    "not tried": "by the plan it does not fit on this device",
                }
            )
        net = policy.transformer
        (
            net.enable_gradient_checkpointing
            if checkpointing
            else net.disable_gradient_checkpointing
        )()
        inputs = example_inputs(policy, count)
        backward_of(policy, inputs)  # gradients are there from now on
        _, peak = measure_peak(lambda: backward_of(policy, inputs))
        seconds = median_seconds(lambda: backward_of(policy, inputs), 1)
        forward = forward_flops(config, settings.resolution, settings.max_tokens)
        flops = count * forward * forward_backward_cost(settings)
        numbers = {
            "rows": count,
            "finite": all_finite([gradients(policy)]),
            "seconds": seconds,
            "peak_gb": peak / 1e9,
            "planned_gb": planned / 1e9,
        }
        if count == 4:
            numbers |= share_entry(gpu_models.PUBLISHED["flux"], settings, "update", flops, seconds)
        problem = "" if numbers["finite"] else "gradients are not finite"
        if not problem and not small and peak > 1.1 * planned:
            problem = f"the update took {peak / 1e9:.1f} GB, planned were {planned / 1e9:.1f}"
        return Measured(numbers, problem)

    parts: Parts = {"one double and one single block": blocks}
    for checkpointing in (True, False):
        for count in (1, 2, 4):
            name = f"{count} rows, {'with' if checkpointing else 'without'} checkpointing"
            parts[name] = functools.partial(rows, count, checkpointing)
    return parts


def fits_beside_weights(wanted: int) -> bool:
    """Return True if this number of bytes fits in the free memory of the device; always True without a GPU."""
    if DEVICE.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(DEVICE)
    return wanted < 0.95 * (
        free + torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE)
    )


def attention_kernels(policy: Policy, rows: int = 2) -> list[str]:
    """Return the names of the attention kernels that torch chooses in a forward and backward pass."""
    inputs = example_inputs(policy, rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        backward_of(policy, inputs)
    names = {event.key for event in profiler.key_averages() if "_scaled_dot_product_" in event.key}
    return sorted(name.removeprefix("aten::_scaled_dot_product_") for name in names)


# -------------------------------------------------------------------------------------- 2: the ratio before any update


def check_ratio_error(small: bool, folder: Path) -> Parts:
    """Check how far ratios are from 1 before any update, if rollout and replay use different batch sizes."""
    images = 4 if small else 12
    batches = (2, 4) if small else (4, 8)

    def ratios(dtype: str, transitions: int, compiled: bool) -> Measured:
        free_memory()
        # Compiled blocks are replayed with autograd's graph, which for eight rows needs checkpointing to fit.
        settings = flux_settings(
            small, dtype=dtype, gradient_checkpointing=compiled, rollout_batch=images
        )
        config = gpu_models.model_config("flux", small)
        policy = gpu_models.trainable_policy(config, settings, folder / dtype)
        if compiled:
            trainable.compile_blocks(policy)
        levels = sigmas(settings.steps, settings.shift)[
            : transitions + 2
        ]  # the steps of a whole trajectory
        sampler = Sampler(levels, settings.sampler, settings.eta)
        keys = [(settings.seed, 0, 0, g) for g in range(images)]
        conditioning = policy.encode(["a prompt"])
        row = torch.zeros(images, dtype=torch.long)
        paths = sample_trajectories(
            policy=policy,
            conditioning=conditioning,
            prompt_index=row,
            keys=keys,
            options=RolloutOptions(sampler, batch_size=images, shared_noise=settings.shared_noise),
        )
        method = Method(settings)
        context = ReplayContext(policy, conditioning, paths)
        chunks = setting.load_settings(
            settings, {"steps": transitions + 1, "chunks": "whole"}
        ).chunk_rule.chunks
        chosen = sample_chunks(paths, chunks, 1.0)
        numbers = {
            "dtype": dtype,
            "compiled": compiled,
            "transitions": transitions,
            "rollout_batch": images,
        }
        largest = 0.0
        for batch in batches:
            work = build_update_batch(torch.arange(images), chosen, chunks, batch)
            again = compute_transition_stats(context, work, method)[0]
            old = paths.log_probs[work.image_index, work.step_index].to(again.device)
            of_steps = ((again - old).exp() - 1).abs()
            of_chunks = (
                chunk_means(again - old, work.chunk_sample_ids.to(again.device)).exp() - 1
            ).abs()
            numbers[f"replay in batches of {batch}"] = {
                "steps, median": of_steps.median().item(),
                "steps, 90%": of_steps.quantile(0.9).item(),
                "steps, largest": of_steps.max().item(),
                "chunks, largest": of_chunks.max().item(),
                "beyond the clip range": (of_steps > CLIP_RANGE).float().mean().item(),
            }
            largest = max(largest, of_chunks.max().item())
        problem = ""
        if not math.isfinite(largest):
            problem = "ratios are not finite"
        elif dtype == "float32" and largest > CLIP_RANGE:
            problem = f"in float32 a chunk's ratio is off by {largest:.1e}, beyond the clip range {CLIP_RANGE:g}"
        return Measured(numbers | {"clip range": CLIP_RANGE}, problem)

    parts = {
        "bfloat16": functools.partial(ratios, "bfloat16", 4, False),
        "float32": functools.partial(ratios, "float32", 1, False),  # a forward is ten times as long
    }
    if not small:  # a compilation takes minutes on a CPU; `speed` tests it
        parts["bfloat16, compiled"] = functools.partial(ratios, "bfloat16", 4, True)
    return parts


# ------------------------------------------------------------------------------- 3, 4, 7: whole iterations of presets


@contextlib.contextmanager
def counted_rows(policy: Policy) -> Iterator[Counter]:
    """Count the rows of forward passes within this context, by phase: rollout, then update."""
    counter = Counter()
    phase = ["rollout"]
    velocity = policy.velocity

    def counted(latents, *more):
        counter[phase[0]] += len(latents)
        return velocity(latents, *more)

    def update(*given):
        phase[0] = "update"
        return trainer_update(*given)

    trainer_update = trainer.update_policy
    with (
        mock.patch.object(policy, "velocity", counted),
        mock.patch.object(trainer, "update_policy", update),
    ):
        yield counter


def measure_whole_iteration(
    state: TrainingState,
    config: ModelConfig,
    model: str,  # its hub id
) -> dict:
    """Train one iteration with the trainer's own code, and return seconds, memory and shares of the rated speed."""
    settings = state.settings
    with counted_rows(state.policy) as rows:
        line, peak = measure_peak(lambda: trainer.train_iteration(state))
    backward = line["transitions_trained"] * (forward_backward_cost(settings) - 1)
    forward = forward_flops(config, settings.resolution, settings.max_tokens)
    forward *= 1 + (settings.true_cfg_scale > 1)
    work = {"rollout": rows["rollout"] * forward, "update": (rows["update"] + backward) * forward}
    seconds = {name: round(spent, 3) for name, spent in line["seconds"].items()}
    shares = {
        name: reached_share(flops, seconds[name], settings.dtype)[1] for name, flops in work.items()
    }
    out = {
        "images": line["images"],
        "transitions": line["transitions_trained"],
        "seconds": seconds,
        "share of the rated speed": shares,
        "reward_mean": line["reward_mean"],
        "grad_norm": line["grad_norm"],
        "ratio_floor": line.get("ratio_floor"),
        "ratio_floor_rollout": line.get("ratio_floor_rollout"),
        "above_weights_gb": peak / 1e9,
    }
    if settings.compile:
        return out  # `plan` uses shares of runs that are not compiled
    return out | share_entry(model, settings, "update", work["update"], seconds["update"])


def preset_parts(
    preset: str,
    model: str,  # a key of PUBLISHED
    small: bool,
    folder: Path,
    gigabytes: float | None,  # of the card that the preset is for; None: all of this device's
    make_scorer: Callable,  # (small) -> a scorer of the reward's size
    **changes,  # of settings
) -> Parts:
    """Return the parts that load a preset with random weights, train one iteration, evaluate and free the memory."""
    config = gpu_models.model_config(model, small)

    def settings() -> Settings:
        tiny = {name: value for name, value in SMALL.items() if name != "dtype"} if small else {}
        more = {"dtype": "float32"} if small else {}
        out = setting.load_settings(preset, ONE_ITERATION | tiny | more | changes)
        return fit_update_batch(config, out)

    @functools.cache
    def state() -> TrainingState:
        if gigabytes:
            limit_memory(gigabytes)
        scorer = make_scorer(small)
        return gpu_models.prepare_training(config, settings(), folder, scorer)

    def planned() -> tuple[int, dict[str, int]]:
        return peak_memory(settings(), config)

    def load() -> Measured:
        held = torch.cuda.memory_allocated() if state() and DEVICE.type == "cuda" else None
        names = (
            "weights",
            "autoencoder",
            "rewards",
            "gradients",
            "moments",
            "base weights kept aside",
        )
        wanted = sum(planned()[1].get(name, 0) for name in names)
        return Measured(
            {
                "preset": preset,
                "limit_gb": gigabytes,
                "parameters": sum(p.numel() for p in state().policy.transformer.parameters()),
                "weights_gb": None if held is None else held / 1e9,
                "planned_gb_with_moments": wanted / 1e9,
                "planned_peak_gb": planned()[0] / 1e9,
            }
        )

    def iteration() -> Measured:
        numbers = measure_whole_iteration(state(), config, gpu_models.PUBLISHED[model])
        numbers["planned activations_gb"] = planned()[1]["activations"] / 1e9
        numbers["planned decoding_gb"] = planned()[1]["decoding"] / 1e9
        finite = math.isfinite(numbers["grad_norm"]) and math.isfinite(numbers["reward_mean"])
        return Measured(numbers, "" if finite else "the gradient or the reward is not finite")

    def release() -> Measured:
        before = allocated_gigabytes()
        state.cache_clear()
        torch.compiler.reset()  # compiled blocks refer to their model
        free_memory()
        return Measured({"held_gb": before, "left_gb": allocated_gigabytes()})

    def evaluation() -> Measured:
        line, peak = measure_peak(lambda: metrics.evaluate_held_out(state()))
        images = state().settings.eval_count * state().settings.eval_images
        found = {k: v for k, v in line.items() if not k.endswith("_se")}
        return Measured(
            {
                "images": images,
                "pixels": state().settings.eval_resolution,
                "above_weights_gb": peak / 1e9,
            }
            | found
        )

    return {"load": load, "iteration": iteration, "evaluation": evaluation, "release": release}


def hpsv3_on_device(small: bool):
    """Make a scorer of HPSv3's size on the device."""
    return gpu_models.hpsv3_scorer(
        small, DEVICE, torch.float32 if small else torch.bfloat16, 2 if small else 8
    )


def pickscore_on_device(small: bool):
    """Make a scorer of PickScore's size on the device."""
    return gpu_models.RandomPickScore(small, DEVICE, torch.float32 if small else torch.bfloat16)


def check_80gb_iteration(small: bool, folder: Path) -> Parts:
    """Check that the preset for one 80 GB card trains within 80 GB, with text encoder before and scorer during the iteration."""

    def encode() -> Measured:
        limit_memory(80)
        count, length = (2, 16) if small else (16, 512)
        dtype = torch.float32 if small else torch.bfloat16
        encoder = gpu_models.t5_encoder(small, DEVICE, dtype)
        ids = torch.randint(encoder.config.vocab_size, (count, length), device=DEVICE)
        with torch.no_grad():
            (out, seconds), peak = measure_peak(
                lambda: speed.time_call(lambda: encoder(ids).last_hidden_state, DEVICE)
            )
        finite = all_finite([out])
        weights = sum(p.nbytes for p in encoder.parameters())
        numbers = {
            "prompts": count,
            "seconds": seconds,
            "weights_gb": weights / 1e9,
            "peak_gb": peak / 1e9,
        }
        encoder.to_empty(device="meta")  # frees the device's memory
        del out
        free_memory()
        left = torch.cuda.memory_allocated() / 1e9 if DEVICE.type == "cuda" else None
        problem = "" if finite else "T5-XXL's states are not finite"
        if left is not None and left > 0.1:
            problem = f"{left:.1f} GB of the text encoder were not freed"
        return Measured(numbers | {"left_gb": left}, problem)

    preset = "machines/80gb-lora-flux1-dev"
    return {"T5-XXL": encode} | preset_parts(preset, "flux", small, folder, 80, hpsv3_on_device)


def check_one_h200(small: bool, folder: Path) -> Parts:
    """Check that paper/one-h200-lora runs as shipped, and measure what compiling its blocks costs and gains."""
    preset = "paper/one-h200-lora"
    config = gpu_models.model_config("flux", small)
    changes = {"compile": False} if small else {}  # a compilation takes minutes on a CPU

    def enough() -> Measured:
        settings = setting.load_settings(preset)
        planned = peak_memory(settings, gpu_models.model_config("flux", False))[0]
        total = (
            torch.cuda.get_device_properties(DEVICE).total_memory
            if DEVICE.type == "cuda"
            else 141e9
        )
        if planned > total:
            raise RuntimeError(
                f"the preset is planned at {planned / 1e9:.0f} GB, this device has {total / 1e9:.0f}"
            )
        return Measured({"planned_gb": planned / 1e9, "device_gb": total / 1e9})

    def compiled_blocks() -> Measured:
        size = {
            name: SMALL[name] for name in ("resolution", "max_tokens", "lora_rank", "update_batch")
        }
        size["dtype"] = "float32"
        settings = setting.load_settings(preset, ONE_ITERATION | (size if small else {}) | changes)
        policy = gpu_models.trainable_policy(config, settings, folder / "compiled")
        few = example_inputs(policy, settings.update_batch)
        many = example_inputs(policy, 2 if small else 12)
        counters = torch._dynamo.utils.counters
        counters.clear()

        @torch.no_grad()
        def forward():
            return policy.velocity(*many)

        def update():
            backward_of(policy, few)

        first = {
            "forward": speed.time_call(forward, DEVICE)[1],
            "update": speed.time_call(update, DEVICE)[1],
        }
        after = {"forward": median_seconds(forward), "update": median_seconds(update)}
        with speed.eager_execution(policy):
            eager = {"forward": median_seconds(forward, 1), "update": median_seconds(update, 1)}
        numbers = {
            "compile seconds": {name: first[name] - after[name] for name in first},
            "compiled graphs": counters["stats"]["unique_graphs"],
            "seconds": after,
            "seconds without compile": eager,
            "gain": {name: eager[name] / after[name] for name in after},
        }
        return Measured(numbers)

    def count_graphs() -> Measured:
        counters = torch._dynamo.utils.counters
        before = counters["stats"]["unique_graphs"]
        numbers = parts["iteration"]().numbers
        return Measured(numbers | {"compiled graphs": counters["stats"]["unique_graphs"] - before})

    parts = preset_parts(preset, "flux", small, folder, None, hpsv3_on_device, **changes)
    # The first iteration compiles; the second shows what an iteration takes then. The comparison has a model of its own.
    return {
        "does it fit": enough,
        "load": parts["load"],
        "first iteration": count_graphs,
        "second iteration": count_graphs,
        "release": parts["release"],
        "compiled blocks": compiled_blocks,
    }


def check_24gb_presets(small: bool, folder: Path) -> Parts:
    """Check that the two presets for 24 GB train an iteration within 24 GB, with guidance and tiled decoding."""
    parts: Parts = {}
    kinds = {"sd3": "machines/24gb-lora-sd35-medium", "klein": "machines/24gb-lora-flux2-klein"}
    for model, preset in kinds.items():
        of_preset = preset_parts(preset, model, small, folder / model, 24, pickscore_on_device)
        parts |= {f"{model}, {name}": part for name, part in of_preset.items()}
    return parts


# ------------------------------------------------------------------------------------------------------------- 5: FSDP


SHARDED = {
    "prompts": "pocket:train",
    "eval_prompts": "pocket:test",
    "max_tokens": 12,
    "prompts_per_iteration": 1,
    "images_per_prompt": 4,
    "steps": 5,
    "chunks": "2,2",
    "sharding": "fsdp",
    "reward": "incompressibility",
    "eval_every": 0,
    "eval_steps": 2,
    "hybrid_split": 1,
    "eval_count": 1,
    "rollout_batch": 4,
    "update_batch": 2,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "clip_range": 1e-3,
}
# of a weight on the disk: two checkpoints for a moment, trained weights twice
TRAINING_BYTES = 3 * 4 * 2 + 4 * 2


def train_in_process(words: list[str]) -> None:
    """Train a random model to the end of its run; `train_alone` calls this in a separate process."""
    given = read_json(Path(words[0]))
    out = Path(words[1])
    out.mkdir(exist_ok=True)
    config = ModelConfig(**given["config"])
    settings = setting.load_settings(given["settings"])
    scorer = speed.rewards.load_reward("incompressibility")
    with contextlib.ExitStack() as stack:
        for patched in gpu_models.replaced_loaders(config, settings, out.parent / "model", scorer):
            stack.enter_context(patched)
        if given["whole run"]:
            trainer.train_run(settings, out)
            numbers = {}
        else:
            state = gpu_models.prepare_training(config, settings, out, scorer)
            numbers = measure_whole_iteration(state, config, "a part of FLUX.1-dev")
            numbers.pop("share", None)  # of another model
    write_json(out / "numbers.json", numbers | {"peak_bytes": allocated_peak()})


def train_alone(out: Path, config: ModelConfig, settings: dict, whole_run: bool) -> dict:
    """Train in a separate process, and return its numbers; raise RuntimeError with its last line if it fails."""
    file = out.with_suffix(".json")
    write_json(file, {"config": vars(config), "settings": settings, "whole run": whole_run})
    words = [sys.executable, str(ROOT / "tools/gpu.py"), "--train", str(file), str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return read_json(out / "numbers.json")


def part_of_flux(divisor: int, small: bool) -> ModelConfig:
    """Return the configuration of FLUX.1-dev with only a part of its blocks."""
    blocks = {} if small else {"num_layers": 19 // divisor, "num_single_layers": 38 // divisor}
    return gpu_models.model_config("flux", small, **blocks)


def roomiest_folder(folder: Path) -> Path:
    """Return the folder with the most free space: the given one, or one in the memory of the host."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > shutil.disk_usage(folder).free:
        return memory / f"chunk-grpo-{os.getpid()}"
    return folder


def check_fsdp(small: bool, folder: Path) -> Parts:
    """Check training all weights of a part of FLUX.1-dev with FSDP2: planned memory, checkpoint and resume."""
    side = 64 if small else 512
    base = SHARDED | {
        "resolution": side,
        "eval_resolution": side,
        "dtype": "float32" if small else "bfloat16",
    }
    device_bytes = (
        1e12 if DEVICE.type == "cpu" else torch.cuda.get_device_properties(DEVICE).total_memory
    )
    large = roomiest_folder(folder)

    def largest_that_fits() -> ModelConfig:
        for divisor in range(3, 20):
            config = part_of_flux(divisor, small)
            planned, _ = peak_memory(setting.load_settings(base), config)
            if planned < 0.85 * device_bytes:
                return config
        raise RuntimeError(
            f"the device's {device_bytes / 1e9:.0f} GB hold no part of FLUX.1-dev with all its weights"
        )

    def one_iteration() -> Measured:
        config = largest_that_fits()
        planned, _ = peak_memory(setting.load_settings(base), config)
        numbers = train_alone(folder / "iteration", config, base | {"iterations": 2}, False)
        peak = numbers.pop("peak_bytes")
        numbers |= {
            "parameters": model_sizes(config)["transformer"],
            "peak_gb": None if peak is None else peak / 1e9,
            "planned_gb": planned / 1e9,
        }
        problem = ""
        if peak is not None and peak > 1.1 * planned:
            problem = f"it took {peak / 1e9:.1f} GB, planned were {planned / 1e9:.1f}"
        return Measured(numbers, problem)

    def resumed() -> Measured:
        config = gpu_models.model_config(
            "flux", small, **({} if small else {"num_layers": 1, "num_single_layers": 2})
        )
        count = model_sizes(config)["transformer"]
        large.mkdir(parents=True, exist_ok=True)
        try:
            if shutil.disk_usage(large).free < count * TRAINING_BYTES:
                raise RuntimeError(
                    f"{large} has too little room for checkpoints of {count:,} weights"
                )
            start = time.monotonic()
            train_alone(large / "parts", config, base | {"iterations": 1}, True)
            files = [
                file for file in (large / "parts" / "checkpoints").rglob("*") if file.is_file()
            ]
            held = sum(file.stat().st_size for file in files)
            train_alone(large / "parts", config, base | {"iterations": 2}, True)
            shutil.rmtree(large / "parts" / "checkpoints")
            train_alone(large / "whole", config, base | {"iterations": 2}, True)
            equal = compare_runs(large / "whole", large / "parts")
        finally:
            if large != folder:
                shutil.rmtree(large, ignore_errors=True)
        numbers = {
            "parameters": count,
            "checkpoint_gb": held / 1e9,
            "seconds": time.monotonic() - start,
        } | equal
        problem = (
            ""
            if equal["weights equal"]
            else "the resumed run has other weights than the uninterrupted one"
        )
        return Measured(numbers, problem)

    return {"one iteration": one_iteration, "checkpoint and resume": resumed}


# -------------------------------------------------------------------------------------------------- 6: masked attention


def check_masked_attention(small: bool, folder: Path) -> Parts:
    """Check which attention kernel runs if prompts have masks, and measure a forward and backward pass of one row."""

    def row_of(model: str) -> Measured:
        free_memory()
        config = gpu_models.model_config(model, small)
        size = (
            {name: SMALL[name] for name in ("resolution", "max_tokens", "dtype", "lora_rank")}
            if small
            else {}
        )
        settings = setting.load_settings(
            {"lora_rank": 32, "gradient_checkpointing": True, "update_batch": 1, "max_tokens": 512}
            | size
        )
        policy = gpu_models.trainable_policy(config, settings, folder / model)
        inputs = example_inputs(policy, 1)
        backward_of(policy, inputs)
        _, peak = measure_peak(lambda: backward_of(policy, inputs))
        seconds = median_seconds(lambda: backward_of(policy, inputs), 1)
        planned = activation_bytes(config, settings)
        finite = all_finite([gradients(policy)])
        numbers = {
            "model": gpu_models.PUBLISHED[model],
            "parameters": sum(p.numel() for p in policy.transformer.parameters()),
            "finite": finite,
            "seconds": seconds,
            "peak_gb": peak / 1e9,
            "planned_gb": planned / 1e9,
            "kernels, one row": attention_kernels(policy, 1),
            "kernels, two rows of other lengths": attention_kernels(policy, 2),
        }
        backward_of(policy, example_inputs(policy, 2))
        masked = all_finite([gradients(policy)])
        problem = "" if finite and masked else "gradients are not finite"
        if not problem and not small and peak > 1.1 * planned:
            problem = f"a row took {peak / 1e9:.1f} GB, planned were {planned / 1e9:.1f}"
        return Measured(numbers | {"finite with masks": masked}, problem)

    return {"Z-Image": lambda: row_of("z_image"), "Qwen-Image": lambda: row_of("qwen")}


# -------------------------------------------------------------------------------------- 8, 10: runs by the command line


def run_command(words: list, log: Path) -> None:
    """Run a command to its end; raise RuntimeError with its last line if it fails."""
    command = [sys.executable, "-m", "chunk_grpo.cli.main", *map(str, words)]
    with open(log, "ab") as out:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            # A check that is ended must not leave its training on the GPU.
            preexec_fn=make_parent_death_hook(os.getpid()),
        )
    try:
        code = child.wait()
    finally:
        terminate_process_group(child)
    if code:
        raise RuntimeError(
            (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
        )


def compare_runs(one: Path, other: Path) -> dict:
    """Compare metrics, pictures and weights of two runs, and return what is equal and how far the weights differ."""

    def lines(folder: Path) -> list[dict]:
        kept = run_folder.read_metrics_lines(folder)
        return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in kept]

    def weights(folder: Path) -> dict[str, Tensor]:
        files = sorted((folder / "final").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def pictures(folder: Path) -> dict[str, str]:
        files = sorted((folder / "samples").rglob("*.png"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    first = weights(one)
    second = weights(other)
    apart = max((first[name].float() - second[name].float()).abs().max().item() for name in first)
    return {
        "metrics equal": lines(one) == lines(other),
        "pictures equal": pictures(one) == pictures(other),
        "weights equal": apart == 0,
        "largest difference of a weight": apart,
    }


def check_adamw_8bit(small: bool, folder: Path) -> Parts:
    """Check that three steps with 8-bit moments, saved and resumed, are bit-identical to an uninterrupted run."""

    def optimizer() -> str:
        if importlib.util.find_spec("bitsandbytes") and DEVICE.type == "cuda":
            return "adamw-8bit"
        if small:
            return "adamw"  # the same code, without the package
        raise RuntimeError("bitsandbytes is not installed")

    def trained(name: str, iterations: int, *more: str) -> Path:
        words = [
            "train",
            "pocket/tiny",
            f"optimizer={optimizer()}",
            "eval_every=0",
            f"iterations={iterations}",
        ]
        run_command([*words, "--out", folder / name, "--no-report", *more], folder / f"{name}.log")
        return folder / name

    def resumed() -> Measured:
        whole = trained("whole", 3)
        trained("parts", 2)
        parts = trained("parts", 3, "--resume")
        equal = compare_runs(whole, parts)
        problem = (
            ""
            if equal["weights equal"]
            else "the resumed run has other weights than the uninterrupted one"
        )
        return Measured({"optimizer": optimizer(), "steps": 3} | equal, problem)

    return {"checkpoint and resume": resumed}


def reward_rise(rewards: list[float]) -> float:
    """Return the mean reward of the last sixth of the iterations minus that of the first sixth."""
    count = max(1, len(rewards) // 6)
    return statistics.mean(rewards[-count:]) - statistics.mean(rewards[:count])


def judge_learning(rises: dict[str, float]) -> str:
    """Describe the problem if bfloat16 rises by less than half as much as float32; empty if there is none."""
    if rises["float32"] <= 0:
        return f"the reward does not rise in float32 either ({rises['float32']:+.3f})"
    if rises["bfloat16"] < rises["float32"] / 2:
        return f"the reward rises by {rises['bfloat16']:+.3f} in bfloat16, by {rises['float32']:+.3f} in float32"
    return ""


def check_bfloat16_learns(small: bool, folder: Path) -> Parts:
    """Check that sixty LoRA iterations of the pocket model raise the reward in bfloat16 as they do in float32."""
    rises: dict[str, float] = {}

    def trained(dtype: str) -> Measured:
        changes = (
            ["iterations=2", "prompts_per_iteration=2", "images_per_prompt=4"] if small else []
        )
        words = [
            "train",
            "pocket/demo",
            f"dtype={dtype}",
            "eval_every=0",
            "eval_count=4",
            "checkpoint_every=60",
        ]
        run_command(
            [*words, *changes, "--processes", 1, "--out", folder / dtype, "--no-report"],
            folder / f"{dtype}.log",
        )
        lines = run_folder.read_metrics_lines(folder / dtype)[1:]
        rises[dtype] = reward_rise([line["reward_mean"] for line in lines])
        floors = {
            name: lines[0][name]
            for name in ("ratio_floor", "ratio_floor_rollout")
            if name in lines[0]
        }
        return Measured(
            {
                "iterations": len(lines),
                "first reward": lines[0]["reward_mean"],
                "last reward": lines[-1]["reward_mean"],
                "rise": rises[dtype],
                "seconds": sum(sum(line["seconds"].values()) for line in lines),
                "skipped updates": sum(line["skipped_updates"] for line in lines),
            }
            | floors
        )

    def compared() -> Measured:
        numbers = {f"rise in {dtype}": rise for dtype, rise in rises.items()}
        if len(rises) < 2:
            return Measured(numbers, "one of the two runs did not end")
        return Measured(numbers, "" if small else judge_learning(rises))

    return {
        "float32": lambda: trained("float32"),
        "bfloat16": lambda: trained("bfloat16"),
        "compared": compared,
    }


# -------------------------------------------------------------------------------------------- 9: scorers and decoding


def check_scorers_decoding(small: bool, folder: Path) -> Parts:
    """Check that float32 scores on the GPU equal those of the CPU, and that decoding takes the planned memory."""

    def run_tests() -> Measured:
        report = folder / "tests.xml"
        files = ["tests/test_gpu.py", "tests/test_scorers.py"]
        chosen = [files[0], "-k", "cpu and resized"] if small else [*files, "-m", "gpu"]
        words = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True
        )
        if not report.is_file():
            raise RuntimeError((done.stdout + done.stderr).strip().splitlines()[-1])
        names = {"passed": [], "failed": [], "skipped": []}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "passed"
            if kinds & {"failure", "error"}:
                outcome = "failed"
            elif "skipped" in kinds:
                outcome = "skipped"
            names[outcome].append(f"{case.get('classname')}::{case.get('name')}")
        numbers = {outcome: len(cases) for outcome, cases in names.items()} | {
            "failed tests": names["failed"]
        }
        problem = (
            f"{len(names['failed'])} tests failed, first {names['failed'][0]}"
            if names["failed"]
            else ""
        )
        if not names["passed"]:
            problem = problem or "no test ran"
        return Measured(numbers, problem)

    def patch_embedding() -> Measured:
        """Compare ImageReward's one convolution in float32 with the CPU's, as torch would do it and as scorers do."""
        width, side = (16, 32) if small else (1024, 224)
        layer = torch.nn.Conv2d(3, width, 16, 16).requires_grad_(False)
        pictures = torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(0))
        expected = layer(pictures)
        layer, pictures = layer.to(DEVICE), pictures.to(DEVICE)
        disable_tf32()  # as every scorer does when it is loaded
        ours = torch.backends.cudnn.allow_tf32
        errors = {}
        for name, allowed in (("as the package sets it", ours), ("with TF32", True)):
            torch.backends.cudnn.allow_tf32 = allowed
            errors[name] = (
                (layer(pictures).cpu() - expected).abs().max() / expected.abs().max()
            ).item()
        torch.backends.cudnn.allow_tf32 = ours
        problem = (
            ""
            if errors["as the package sets it"] < 1e-5
            else "float32 convolutions are not float32"
        )
        return Measured({"largest relative error": errors, "TF32 in convolutions": ours}, problem)

    config = gpu_models.model_config("flux", small)
    large, many = (128, 3) if small else (1024, 12)

    @functools.cache
    def policy() -> Policy:
        settings = flux_settings(small, resolution=large)
        one_block = gpu_models.model_config(
            "flux", small, num_layers=1, num_single_layers=1
        )  # only its VAE is needed
        return gpu_models.random_policy(one_block, settings, folder / "decoding")

    def decode(count: int) -> Measured:
        latents = torch.stack(
            [policy().noise(torch.Generator().manual_seed(i)) for i in range(count)]
        ).to(DEVICE)

        def call() -> Tensor:
            return decode_latents(policy(), latents, count)

        at_once = decode_batch_size(config, large, count)
        dtype = flux_settings(small).dtype
        planned = decode_bytes_on_gpu(config, large, dtype, False, at_once)
        call()
        images, peak = measure_peak(call)
        alone = torch.cat([decode_latents(policy(), row[None], 1) for row in latents[:2]])
        numbers = {
            "pixels": large,
            "images": count,
            "at once": at_once,
            "seconds": median_seconds(call, 1),
            "peak_gb": peak / 1e9,
            "planned_gb": planned / 1e9,
            "difference from one by one": (images[:2] - alone).abs().max().item(),
        }
        problem = ""
        if DEVICE.type == "cuda" and peak > max(1.1 * planned, planned + 0.5e9):
            problem = f"decoding took {peak / 1e9:.2f} GB, planned were {planned / 1e9:.2f}"
        return Measured(numbers, problem)

    return {
        "tests of scorers": run_tests,
        "a float32 convolution": patch_embedding,
        "decode one": lambda: decode(1),
        f"decode {many}": lambda: decode(many),
    }


ALL = {
    1: check_update,
    2: check_ratio_error,
    3: check_80gb_iteration,
    4: check_one_h200,
    5: check_fsdp,
    6: check_masked_attention,
    7: check_24gb_presets,
    8: check_adamw_8bit,
    9: check_scorers_decoding,
    10: check_bfloat16_learns,
}
