"""Rewards with the faults that a process of its own can have; a file says how often they strike."""

import os
import signal
import sys
import time
from pathlib import Path


def strikes(file) -> bool:
    """Whether the fault strikes: once for each line of the file, which loses one."""
    left = Path(file).read_text().splitlines()
    Path(file).write_text("\n".join(left[1:]))
    return bool(left)


def red(images):
    """How red each of some PIL images is, 0 to 1."""
    return [
        sum(image.getchannel(0).tobytes()) / (255 * image.width * image.height) for image in images
    ]


def dying(file):
    """Killed in the middle of a call, as by a system without memory."""

    def reward(images, prompts):
        if strikes(file):
            os.kill(os.getpid(), signal.SIGKILL)
        return red(images)

    return reward


def hanging(file):
    """Does not come back, and leaves a child of its own."""

    def reward(images, prompts):
        if strikes(file):
            child = os.fork()
            if child:
                Path(file).with_suffix(".pids").write_text(f"{os.getpid()} {child}")
            time.sleep(600)
        return red(images)

    return reward


def noisy():
    """Prints what looks like an answer, from Python and past it, and reads what is not its own."""

    def reward(images, prompts):
        print('{"scores": [7.0]}', flush=True)
        os.write(1, b'{"scores": []}\n')
        assert sys.stdin.read() == ""
        return red(images)

    return reward


def nan():
    return lambda images, prompts: [red(images)[0], float("nan"), *red(images)[2:]]


def short():
    return lambda images, prompts: red(images)[1:]


def raising():
    def reward(images, prompts):
        raise RuntimeError("the model is\nnot well")

    return reward


def late(file):
    """A loader that dies as long as its fault strikes."""
    if strikes(file):
        os._exit(9)
    return lambda images, prompts: red(images)
