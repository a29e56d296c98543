"""CUDA's rules about devices, kept on a machine without a GPU.

Within `pretended_cuda` every tensor lies on a device, by the memory it uses: what is made on `cuda:1` or moved there
says so and stays there, though all of it is the CPU's memory. An operation that CUDA refuses, as its tensors lie on
several devices, is refused here too, in torch's own words as near as may be. Values are those of the CPU."""

import contextlib
import threading
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
MOVES = {"to", "cuda", "cpu", "type_as"}
ANYWHERE = {
    "copy_",
    "_foreach_copy_",
    "__set__",
    "_has_compatible_shallow_copy_type",
}  # from one device to another
HOST_ONLY = {"numpy", "__array__"}
# a tensor of no dimensions on the CPU may stand beside CUDA's in arithmetic, but not in these
WITHOUT_SCALARS = {
    "cat",
    "concat",
    "stack",
    "segment_reduce",
    "index_select",
    "gather",
    "take_along_dim",
    "scatter",
    "scatter_add",
    "embedding",
    "linear",
    "matmul",
    "__matmul__",
    "mm",
    "bmm",
    "einsum",
    "index_fill",
    "scaled_dot_product_attention",
    "layer_norm",
    "group_norm",
    "conv2d",
    "conv3d",
    "repeat_interleave",
}


class Devices(threading.local):
    """The current device of a thread, which starts at 0 in every thread, as CUDA's does."""

    current = 0


class PretendedCUDA(TorchFunctionMode):
    """The mode of one thread; every thread that is to keep the rules enters one of the same `devices`."""

    def __init__(self, devices: Devices | None = None):
        super().__init__()
        self.devices = devices or Devices()

    def named(self, x) -> torch.device | None:
        """The device that a word, a number or a device of an argument names; None where it names none."""
        if isinstance(x, str) and x.split(":")[0] in ("cpu", "cuda"):
            x = torch.device(x)
        if type(x) is int:
            x = torch.device("cuda", x)
        if not isinstance(x, torch.device) or x.type not in ("cpu", "cuda"):
            return None
        if x.type == "cuda" and x.index is None:
            return torch.device("cuda", self.devices.current)
        return CPU if x.type == "cpu" else x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if name == "__get__":
            return self.attribute(func, args)
        if name in MOVES and isinstance(args[0], torch.Tensor):
            return self.move(func, name, args, kwargs)
        given = tensors_in((args, kwargs))
        refuse(name, args, kwargs, given)
        where = self.result_device(func, name, args, kwargs, given)
        if self.named(kwargs.get("device")) is not None:
            kwargs["device"] = CPU
        if isinstance(kwargs.get("generator"), torch.Generator) and where.type == "cuda":
            raise RuntimeError(
                f"Expected a 'cuda' device type for generator but found 'cpu' ({name} on {where})"
            )
        out = func(*args, **kwargs)
        if name in ("as_tensor", "asarray") and given and device_of(args[0]) != where:
            out = out.clone()
        mark(out, where, given)
        return out

    def attribute(self, func, args):
        """What a tensor says about itself; its parts lie where it lies."""
        if func == torch.Tensor.device.__get__:
            return device_of(args[0])
        if func in (torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__):
            return (device_of(args[0]).type == "cuda") == (func == torch.Tensor.is_cuda.__get__)
        out = func(*args)
        if isinstance(out, torch.Tensor):
            mark(out, device_of(args[0]), [args[0]])
        return out

    def move(self, func, name, args, kwargs):
        """A tensor on the device that is named, in other memory where that is another device."""
        tensor, target, rest = args[0], None, []
        words = [*args[1:], *[kwargs.pop(k) for k in ("device", "other") if k in kwargs]]
        for x in words:
            found = device_of(x) if isinstance(x, torch.Tensor) else self.named(x)
            target = found or target
            rest.append(x if isinstance(x, torch.Tensor) or found is None else CPU)
        if name in ("cpu", "cuda"):
            target = CPU if name == "cpu" else target or self.named("cuda")
            out = tensor.to(CPU, **{k: v for k, v in kwargs.items() if k == "memory_format"})
        else:
            out = func(tensor, *rest, **kwargs)
        target = target or device_of(tensor)
        if target != device_of(tensor) and memory(out) == memory(tensor):
            out = out.clone()
        mark(out, target, [tensor])
        return out

    def result_device(self, func, name, args, kwargs, given) -> torch.device:
        """Where what a function makes will lie."""
        target = self.named(kwargs.get("device"))
        if target is not None:
            return target
        if func is torch.tensor and not isinstance(args[0], torch.Tensor):
            return CPU
        return common_device(given)


def memory(tensor: torch.Tensor) -> int:
    """The number of the memory that a tensor and its views use."""
    return tensor.untyped_storage()._cdata


def real_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies in truth."""
    with torch._C.DisableTorchFunction():
        return tensor.device


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies: where it was said to, else where it does (on the CPU, or nowhere: `meta`)."""
    return getattr(tensor.untyped_storage(), "pretended_device", real_device(tensor))


def mark(made, device: torch.device, given: list[torch.Tensor]) -> None:
    """Put what was made on a device, but for views of what was given."""
    old = {memory(tensor) for tensor in given}
    for tensor in tensors_in(made):
        if memory(tensor) not in old and real_device(tensor) == CPU:  # `meta` stays what it is
            tensor.untyped_storage().pretended_device = device


def tensors_in(x) -> list[torch.Tensor]:
    """All tensors that stand in an argument or a result."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)]


def common_device(given: list[torch.Tensor]) -> torch.device:
    """Where an operation computes: the device of the first tensor that is no number of the CPU."""
    places = [
        device_of(tensor) for tensor in given if tensor.dim() or device_of(tensor).type == "cuda"
    ]
    return places[0] if places else device_of(given[0]) if given else CPU


def refuse(name: str, args, kwargs, given: list[torch.Tensor]) -> None:
    """RuntimeError or TypeError for what CUDA would not do."""
    if name in HOST_ONLY and device_of(args[0]).type == "cuda":
        raise TypeError(
            f"can't convert {device_of(args[0])} device type tensor to numpy. Use Tensor.cpu() first."
        )
    if name in ("__getitem__", "__setitem__", "index_put_"):
        return refuse_index(*args[:3])
    if name in ANYWHERE:
        return None
    place = common_device(given)
    for tensor in given:
        number = tensor.dim() == 0 and device_of(tensor) == CPU and name not in WITHOUT_SCALARS
        if device_of(tensor) != place and not number:
            found = ", ".join(sorted({str(device_of(one)) for one in given}))
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices: "
                f"{found} (in {name})"
            )


def refuse_index(tensor: torch.Tensor, index, value=None) -> None:
    """RuntimeError where a tensor is indexed by one of another device than the CPU's and its own, or given such values."""
    place = device_of(tensor)
    found = tensors_in(index)
    for one in found:
        if device_of(one) not in (CPU, place):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({place})"
            )
    if found and isinstance(value, torch.Tensor) and value.dim() and device_of(value) != place:
        raise RuntimeError(
            f"Expected all tensors to be on the same device: the values are on {device_of(value)}, the "
            f"indexed tensor is on {place}"
        )


@contextlib.contextmanager
def pretended_cuda(
    current: int = 0,  # the GPU that this thread uses where nothing else is said, as a rank's
    count: int = 2,  # GPUs
    free: int = 80 * 10**9,  # bytes of free memory on each
):  # -> the mode; a thread of its own enters `PretendedCUDA(mode.devices)`
    """A machine with GPUs whose memory is the CPU's; every device is kept apart as CUDA would."""
    devices = Devices()
    autocast = torch.autocast
    checkpoint = torch.utils.checkpoint.checkpoint
    devices.current = current

    def again(
        function, *args, **more
    ):  # what a backward computes again leaves the mode, and comes back to it here
        def under_rules(*given, **named):
            with PretendedCUDA(devices):
                return function(*given, **named)

        return checkpoint(under_rules, *args, **more)

    def set_device(x):
        devices.current = x if isinstance(x, int) else torch.device(x).index

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: devices.current,
        "set_device": set_device,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (free, 80 * 10**9),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.utils.checkpoint, "checkpoint", again))
        on_cpu = mock.patch.object(
            torch, "autocast", lambda kind, *rest, **more: autocast("cpu", *rest, **more)
        )
        stack.enter_context(on_cpu)
        yield stack.enter_context(PretendedCUDA(devices))
