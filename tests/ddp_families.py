"""A program for each of several processes: two updates of every family, all weights and an adapter on every layer."""

import json
import sys
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from chunk_grpo.core.settings import Settings
from chunk_grpo.models import policy, trainable
from chunk_grpo.theory.chunks import chunks_from_setting
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training.chunk_sampling import sample_chunks
from chunk_grpo.training.gradient import accumulate_gradients
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update import average_adapter_gradients, check_weights_have_gradients
from chunk_grpo.training.update_batch import build_update_batch

SIDE, TOKENS = 64, 16
WAYS = ("full", "lora", "sharded lora")
PROMPTS = ["a red star", "two cats left of three dogs, a photo of the green square"]


def prepare(model, accelerator, sharded):
    """Wrap the policy, and build the work of one update, with one prompt per process."""
    if not sharded:
        model.module = accelerator.prepare(model.transformer)
    rank = accelerator.process_index
    grid = policy.sigmas(4, 3.0)
    keys = [(0, 0, rank, g) for g in range(2)]
    rows = model.encode(PROMPTS[rank : rank + 1])
    paths = sample_trajectories(
        policy=model,
        conditioning=rows,
        prompt_index=torch.zeros(2, dtype=torch.long),
        keys=keys,
        options=RolloutOptions(Sampler(grid)),
    )
    chunks = chunks_from_setting("1,2", 3)
    work = build_update_batch(torch.arange(2), sample_chunks(paths, chunks, 1.0), chunks, limit=3)
    return ReplayContext(model, rows, paths), work


def updates(model, accelerator, sharded):
    """Return the latents, and the gradients of two updates on the same weights, whose last pass exchanges them."""
    context, work = prepare(model, accelerator, sharded)

    def sync(last):
        return torch.enable_grad() if last or sharded else accelerator.no_sync(model.module)

    found = []
    for _ in range(2):
        model.transformer.zero_grad()
        accumulate_gradients(
            context,
            work,
            torch.tensor([1.0, -1.0]),
            Method(Settings(clip_range=1.0)),
            backward=accelerator.backward,
            sync=sync,
        )
        check_weights_have_gradients(model, accelerator.num_processes)
        if sharded:
            average_adapter_gradients(SimpleNamespace(policy=model, accelerator=accelerator))
        found.append(torch.cat([p.grad.flatten() for p in model.trained]))
    return context.trajectories.latents, found


def base_in_shards(model, processes):
    """Return True if this process holds its share of the base, to a row per weight, and the whole adapter."""
    base = [p for name, p in model.transformer.named_parameters() if ".lora_" not in name]
    held = sum(p.to_local().numel() for p in base)
    rows = sum(p[0].numel() for p in base)
    whole = not any(isinstance(p, DTensor) for p in model.trained)
    return whole and held <= sum(p.numel() for p in base) / processes + rows


def main(folders):
    """Print for every family and way whether the processes have the same gradient in two updates."""
    accelerator = Accelerator(cpu=True)
    said = {}
    for name, folder in folders.items():
        whole = None  # the latents and the gradient over a whole base
        for way in WAYS:
            sharded = way == "sharded lora"
            words = {"resolution": SIDE, "max_tokens": TOKENS}
            if way != "full":
                net = policy.load_policy(folder, **words).transformer
                every = tuple(
                    name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)
                )
                words |= {"lora_rank": 2, "lora_targets": every}
            if sharded:
                words |= {"sharding": "fsdp", "sharding_offload": True}
            try:
                model = trainable.load_trainable_policy(folder, **words)
                # A run evaluates its base before the first update.
                with trainable.use_base_weights(model):
                    pass
                latents, (one, two) = updates(model, accelerator, sharded)
                every = accelerator.gather(one[None])
                same = torch.equal(every[0], every[1]) and torch.allclose(one, two, atol=1e-6)
                said[f"{name} {way}"] = (
                    "trains" if same and one.abs().max() > 0 else "gradients differ"
                )
                if sharded:
                    assert base_in_shards(model, accelerator.num_processes), "not in shards"
                    assert torch.allclose(latents, whole[0], atol=1e-5), "other images"
                    apart = (one - whole[1]).norm() / whole[1].norm()
                    assert apart < 1e-4, f"another gradient, by {apart}"
                whole = latents, one
            except Exception as error:  # the test shows all of them together
                said[f"{name} {way}"] = str(error).strip().splitlines()[0]
    if accelerator.is_main_process:
        print("SAID " + json.dumps(said))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
