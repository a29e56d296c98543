"""The pretended CUDA keeps CUDA's rules: each planted fault is refused, and what is right is not."""

import threading

import pytest
import torch
from pretended_device import PretendedCUDA, pretended_cuda


@pytest.fixture
def cuda():
    """A machine with two GPUs, the first of them current."""
    with pretended_cuda() as mode:
        yield mode


def pair():
    """Four numbers on the CPU and on a GPU."""
    return torch.arange(4.0), torch.arange(4.0, device="cuda:0")


FAULTS = {
    "operands": lambda here, there: here + there,
    "operands in place": lambda here, there: there.add_(here),
    "two GPUs": lambda here, there: there * there.to("cuda:1"),
    "a number of the GPU with tensors of the CPU": lambda here, there: here + there.sum(),
    "cat": lambda here, there: torch.cat([here, there]),
    "stack of numbers": lambda here, there: torch.stack([here.sum(), there.sum()]),
    "where": lambda here, there: torch.where(there > 1, here, there),
    "equal": lambda here, there: torch.equal(here, there),
    "matrix product": lambda here, there: here @ there,
    "segment_reduce": lambda here, there: torch.segment_reduce(
        there, "mean", lengths=torch.tensor([3, 1])
    ),
    "foreach": lambda here, there: torch._foreach_add_([there], [here]),
    "a CPU tensor by a GPU's index": lambda here, there: here[there.long()],
    "a CPU tensor by a GPU's mask": lambda here, there: here[there > 1],
    "values of another device": lambda here, there: there.__setitem__(
        torch.tensor([0, 1]), here[:2]
    ),
    "numpy": lambda here, there: there.numpy(),
    "generator": lambda here, there: torch.randn(
        2, device="cuda", generator=torch.Generator().manual_seed(0)
    ),
    "generator in place": lambda here, there: there.normal_(
        generator=torch.Generator().manual_seed(0)
    ),
    "a layer elsewhere": lambda here, there: torch.nn.Linear(4, 2)(there),
    "out": lambda here, there: torch.add(there, 1, out=here),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(cuda, fault):
    with pytest.raises((RuntimeError, TypeError), match="device"):
        FAULTS[fault](*pair())


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_on_one_device_is_not(cuda, fault):
    """What is refused is the mixing, nothing else: on the CPU all of it goes through."""
    if fault not in ("two GPUs", "generator"):
        FAULTS[fault](torch.arange(4.0), torch.arange(4.0))


def test_right_code_goes_through(cuda):
    """Numbers of the CPU beside a GPU's tensors, indices of the CPU, copies, views, moves."""
    here, there = pair()
    assert (there * torch.tensor(2.0)).device == torch.device("cuda:0")
    assert there[torch.tensor([1, 2])].is_cuda and not there[1:].cpu().is_cuda
    there[:2] = here[2:]
    there.copy_(here)
    assert there.tolist() == [0, 1, 2, 3] and there.sum().item() == 6
    assert (
        here.to(there).device == there.device
        and there.to("cpu", torch.float64).device.type == "cpu"
    )
    assert (
        there.view(2, 2).T.is_cuda
        and torch.zeros_like(there).is_cuda
        and there.new_tensor([1.0]).is_cuda
    )
    assert torch.tensor([there[0], there[1]]).device.type == "cpu", "numbers are read one by one"
    assert torch.as_tensor(here, device="cuda").is_cuda and not here.is_cuda
    assert torch.randn(2, generator=torch.Generator()).to("cuda").is_cuda


def test_memory_is_where_it_was_made(cuda):
    """A move copies; views, in-place operations and parameters' data share the memory of what they are made of."""
    here, there = pair()
    there += 1
    assert here.tolist() == [0, 1, 2, 3]
    here.to("cuda").add_(1)
    assert here.tolist() == [0, 1, 2, 3]
    layer = torch.nn.Linear(4, 4).to("cuda:1")
    assert {p.device for p in layer.parameters()} == {torch.device("cuda:1")}
    layer.weight.data, other = torch.ones(4, 4), layer.weight.data
    assert (layer.weight.device.type, other.device.type) == ("cpu", "cuda")


def test_a_step_of_training(cuda):
    """Gradients, moments and what is computed again in a backward lie where the weights lie."""
    layer = torch.nn.Linear(4, 4).to("cuda")
    x = torch.ones(2, 4, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).square().mean().backward()
    assert layer.weight.grad.is_cuda
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].is_cuda and not torch.equal(
        before, layer.weight
    )

    def forgetful(x):
        return layer(x * torch.ones(4) if again.pop() else x)

    again = [True, False]  # only what is computed again is wrong
    loss = torch.utils.checkpoint.checkpoint(forgetful, x, use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match="same device"):
        loss.backward()


def test_every_thread_has_a_current_device():
    """The main thread's is set, another begins at 0: what says `cuda` there lies on another GPU."""
    found = []
    with pretended_cuda(current=1) as mode:
        assert (
            torch.zeros(1, device="cuda").device == torch.device("cuda:1")
            and torch.cuda.current_device() == 1
        )

        def other():
            with PretendedCUDA(mode.devices):
                found.append(torch.zeros(1, device="cuda").device)
                torch.cuda.set_device(1)
                found.append(torch.zeros(1, device="cuda").device)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert not torch.cuda.is_available()


def test_generators_and_devices_that_fit(cuda):
    """Half the rules refuse: the CPU's generators draw on the CPU."""
    assert torch.randn(2, generator=torch.Generator().manual_seed(1)).device.type == "cpu"
    assert torch.zeros(2, device="cuda").normal_().is_cuda
