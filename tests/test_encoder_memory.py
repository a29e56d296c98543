"""The text encoders of a large model and its transformer need not fit into a GPU together."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from chunk_grpo.models import prompt_embeds

GB = 10**9


class RecordedModule(nn.Module):
    """A network that writes down where it is moved; the GPU of these tests exists only in `moves`."""

    def __init__(self, name, moves):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.name, self.moves = name, moves

    def to(self, device):
        self.moves.append(f"{self.name} to {device}")
        return self


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 10 GB of free memory, of which torch has reserved 1 GB; `free` may be changed."""
    memory = SimpleNamespace(free=9 * GB, reserved=4 * GB, allocated=3 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory.free, 32 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: memory.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: memory.allocated)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return memory


def make_policy(monkeypatch, encoder_bytes, wrapped=False, error=None):
    """Return a policy on the GPU and the list of its networks' moves; its text encoder has a size of its own choice."""
    moves = []
    encoder = RecordedModule("encoder", moves)
    monkeypatch.setattr(
        type(encoder.weight), "nbytes", property(lambda self: encoder_bytes), raising=False
    )

    class Pipeline:
        components = {"text_encoder": encoder, "tokenizer": object(), "transformer": None}

        def to(self, device):
            encoder.to(device)
            return self

    def embed(pipe, prompts):
        if error:
            raise error
        return {"prompt_embeds": torch.zeros(len(prompts), 1)}

    monkeypatch.setattr(prompt_embeds, "_load_encoders", lambda policy: Pipeline())
    transformer = RecordedModule("transformer", moves)
    policy = SimpleNamespace(
        folder="model",
        device="cuda:0",
        transformer=transformer,
        module=nn.Sequential(transformer) if wrapped else transformer,
        vae=None,
        embed=embed,
    )
    return policy, moves


def encode(policy, prompts=("a red star",)):
    with prompt_embeds.lazy_prompt_encoder(policy) as encoder:
        return encoder(list(prompts)), encoder(list(prompts))


AWAY = ["transformer to cpu", "encoder to cuda:0", "transformer to cuda:0"]


@pytest.mark.parametrize(("gigabytes", "moves"), [(3.9, ["encoder to cuda:0"]), (4.1, AWAY)])
def test_the_transformer_waits_on_the_host_only_if_the_encoders_do_not_fit(
    gpu, monkeypatch, capsys, gigabytes, moves
):
    """10 GB are free, and activations take 6."""
    policy, seen = make_policy(monkeypatch, gigabytes * GB)
    encode(policy)
    assert seen == moves
    assert ("waits in host memory" in capsys.readouterr().out) == (moves == AWAY)


def test_a_transformer_that_ddp_wraps_stays(gpu, monkeypatch):
    """A move would cut the hooks by which the processes average their gradients."""
    policy, seen = make_policy(monkeypatch, 20 * GB, wrapped=True)
    encode(policy)
    assert seen == ["encoder to cuda:0"]


def test_a_sharded_transformer_stays(gpu, monkeypatch):
    policy, seen = make_policy(monkeypatch, 20 * GB)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy.transformer.weight = nn.Parameter(distribute_tensor(torch.zeros(8), mesh))
        encode(policy)
    finally:
        dist.destroy_process_group()
    assert seen == ["encoder to cuda:0"]


def test_the_transformer_returns_after_an_error(gpu, monkeypatch):
    policy, seen = make_policy(monkeypatch, 20 * GB, error=torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        encode(policy)
    assert seen == AWAY


def test_on_a_cpu_nothing_is_moved(gpu, monkeypatch):
    policy, seen = make_policy(monkeypatch, 20 * GB)
    policy.device = "cpu"
    encode(policy)
    assert seen == ["encoder to cpu"]
