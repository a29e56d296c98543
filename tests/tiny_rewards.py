"""Rewards that tests name by their import path; the faults that a reward can have among them."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch


def red(images, prompts):
    """How red an image is."""
    return images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))


def slow_red(images, prompts):
    """The same, but it takes a moment, so that a run can be killed in the middle."""
    time.sleep(0.3)
    return red(images, prompts)


def nan(images, prompts):
    """Not a number for the last image."""
    scores = red(images, prompts)
    scores[-1] = float("nan")
    return scores


def short(images, prompts):
    """One score too few."""
    return red(images, prompts)[1:]


def nan_once(images, prompts):
    """Not a number as long as the file named in the environment is there."""
    broken = os.path.exists(os.environ["NAN_WHILE"]) and len(prompts) > 6
    return nan(images, prompts) if broken else red(images, prompts)


def constant(images, prompts):
    """The same for every image: no group has a spread."""
    return torch.ones(len(prompts))


def huge(images, prompts):
    """Numbers near the largest of float32: their sum is none."""
    return torch.tensor([3e38, -3e38] * len(prompts))[: len(prompts)]


def leaving(images, prompts):
    """Ends the program, as one that takes itself for a script."""
    sys.exit(0)


def faulty(images, prompts):
    """Red, but a file says what befalls its next calls: die, hang, nan; each line is one call."""
    file = Path(os.environ["FAULTS"])
    fault, *rest = file.read_text().splitlines() or ["none"]
    file.write_text("\n".join(rest))
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    return nan(images, prompts) if fault == "nan" else red(images, prompts)


def out_of_ink(images, prompts):
    """Red; but the second of several processes raises once it has scored its part of the base's images and an iteration."""
    if (
        os.environ.get("RANK") == "1"
        and len(prompts) > 6
        and Path(os.environ["INK"]).stat().st_size > 0
    ):
        raise ValueError("no ink is left")
    with open(os.environ["INK"], "a") as ink:
        ink.write("x" if os.environ.get("RANK") == "1" and len(prompts) > 6 else "")
    return red(images, prompts)


def counted_red(images, prompts):
    """Red; a file named in the environment gets a line an image, and it takes a moment."""
    time.sleep(0.3)
    with open(os.environ["COUNTED"], "a") as log:
        log.write("".join(f"{prompt}\n" for prompt in prompts))
    return red(images, prompts)


class red_on_its_device:
    """Red, computed on what `cuda` means where the reward is loaded and where it is asked, as many a reward is written."""

    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.tensor([1.0, -1.0, 0.0]).to(self.device)

    def __call__(self, images, prompts):
        return (images.to(self.device).mean((2, 3)) * self.weight).sum(1)


def gpu_of_thread(images, prompts):
    """The number of the GPU that this thread was told to use, where a test watches for it; else -1."""
    gpus = getattr(torch.cuda, "gpu_of_threads", {})
    return torch.full((len(prompts),), float(gpus.get(threading.get_ident(), -1)))


def broken_while(images, prompts):
    """Red; but it raises as long as the file named in the environment is there, and does not answer if the file says so."""
    broken = Path(os.environ["BROKEN_WHILE"])
    if broken.exists():
        from chunk_grpo.reward_serving.client import RewardUnavailable

        if broken.read_text() == "away":
            raise RewardUnavailable("reward: the server is away")
        raise ValueError("no ink is left")
    return red(images, prompts)
