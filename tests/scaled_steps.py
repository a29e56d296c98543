"""A program for two processes: optimizer steps on a scaled loss; in the second, one process has an infinite gradient.

Only the last row of the weight overflows, so with shards the other process holds none of what is infinite.
"""

import json
import sys
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from chunk_grpo.models.trainable import full_tensor
from chunk_grpo.training.update import step_optimizer

SCALE = 2.0**10


def wrapped(way: str, accelerator: Accelerator) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    """A linear layer whose gradients the processes share, whole in each or in shards, and its weights."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    if way == "whole":
        return accelerator.prepare(net), list(net.parameters())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    formats = MixedPrecisionPolicy(
        param_dtype=torch.float16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    fully_shard(net, mesh=mesh, mp_policy=formats)
    return net, list(net.parameters())


def steps(way: str, accelerator: Accelerator) -> list[dict]:
    """What three steps did in this process: whether the norm was finite, the scale, and the sum of the weights."""
    net, weights = wrapped(way, accelerator)
    state = SimpleNamespace(
        settings=SimpleNamespace(max_grad_norm=1.0),
        policy=SimpleNamespace(trained=weights),
        optimizer=torch.optim.AdamW(weights, lr=0.1),
        scaler=torch.amp.GradScaler("cpu", init_scale=SCALE),
        ema=None,
    )
    done = []
    for step in range(3):
        state.optimizer.zero_grad()
        is_infinite = step == 1 and accelerator.process_index == 1
        factor = torch.ones(4)
        factor[-1] = 1e30 if is_infinite else 1.0
        with torch.autocast("cpu", torch.float16):
            loss = (net(torch.ones(2, 4)).float() * factor).mean()
        state.scaler.scale(loss).backward()
        norm = step_optimizer(state)
        total = sum(full_tensor(p.detach()).double().sum().item() for p in weights)
        is_finite = bool(torch.isfinite(torch.tensor(norm)))
        done.append({"finite": is_finite, "scale": state.scaler.get_scale(), "weights": total})
    return done


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    from accelerate.utils import gather_object

    said = {way: gather_object([steps(way, accelerator)]) for way in sys.argv[1:]}
    if accelerator.is_main_process:
        print("SAID " + json.dumps(said))
