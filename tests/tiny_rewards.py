"""Rewards that tests name by their import path; the faults that a reward can have among them."""

import os
import time

import torch


def red(images, prompts):
    "How red an image is."
    return images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))


def slow_red(images, prompts):
    "The same, but it takes a moment, so that a run can be killed in the middle."
    time.sleep(0.3)
    return red(images, prompts)


def nan(images, prompts):
    "Not a number for the last image."
    scores = red(images, prompts)
    scores[-1] = float("nan")
    return scores


def short(images, prompts):
    "One score too few."
    return red(images, prompts)[1:]


def nan_once(images, prompts):
    "Not a number as long as the file named in the environment is there."
    broken = os.path.exists(os.environ["NAN_WHILE"]) and len(prompts) > 6
    return nan(images, prompts) if broken else red(images, prompts)


def constant(images, prompts):
    "The same for every image: no group has a spread."
    return torch.ones(len(prompts))
