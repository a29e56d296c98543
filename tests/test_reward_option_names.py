"""Options of a reward that are called as an argument of ours: the reward's own are given to it, others are refused."""

import inspect
import os
import sys
import types

import pytest
import torch
from commands import call

from chunk_grpo import InputError, load_placed_reward
from chunk_grpo.core import settings
from chunk_grpo.measurements import profiles, speed
from chunk_grpo.reward_serving import placement
from chunk_grpo.reward_serving.hpsv3_package import load_hpsv3_package
from chunk_grpo.rewards import rewards

REWARD = """def red(images, prompts, name="", here=0.0, options=None, loader=None):
    return images[:, 0].mean((1, 2)) + float(here) + len(name)
"""
FEW = [
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_images=1",
    "steps=3",
    "chunks=steps",
    "eval_steps=2",
    "hybrid_split=1",
]


@pytest.mark.parametrize("place", ["", ", worker: true"])
@pytest.mark.parametrize(
    "option",
    [
        "here: 1",
        "name: x",
        "path: x",
        "self: 1",
        "loader: x",
        "options: {}",
        "given: 1",
        "found: 1",
    ],
)
def test_an_option_that_a_reward_does_not_have_is_one_sentence(tmp_path, option, place):
    given = f"reward_options={{pocket-clip: {{{option}{place}}}}}"
    done = call("train", "pocket/tiny", *FEW, given, "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"'{option.partition(':')[0]}'" in done.stderr and "pocket-clip" in done.stderr, (
        done.stderr
    )
    assert "unforeseen" not in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", [{}, {"worker": True}])
def test_a_reward_gets_its_own_options_whatever_they_are_called(tmp_path, monkeypatch, place):
    (tmp_path / "red_option.py").write_text(REWARD)
    reward = load_placed_reward(
        f"{tmp_path / 'red_option.py'}:red",
        **place,
        name="abc",
        here=2,
        options=1,
        loader=2,
    )
    assert reward(torch.ones(1, 3, 8, 8), ["x"]).tolist() == [6.0]
    getattr(reward, "close", lambda: None)()
    run_settings = settings.load_settings(
        "pocket/tiny", {"reward": {"name": "pocket-clip", "here": 1}}
    )
    assert run_settings.reward_options == {"pocket-clip": {"here": 1}}


@pytest.mark.parametrize("key", ["1", "true", "null", "1.5"])
def test_an_option_whose_name_is_no_text_is_refused(key):
    with pytest.raises(
        InputError, match="`reward_options` must have texts as the names of options"
    ):
        settings.load_settings("pocket/tiny", [f"reward_options={{pocket-clip: {{{key}: 2}}}}"])


def test_listed_options_of_the_hpsv3_package_are_the_parameters_of_its_loader():
    parameters = inspect.signature(load_hpsv3_package).parameters
    assert tuple(parameters) == placement.HPSV3_PACKAGE_OPTIONS


@pytest.mark.parametrize("option", ["weights", "base", "batch_size", "bathc"])
def test_option_that_the_hpsv3_package_does_not_have_is_rejected_before_a_child_starts(option):
    sentence = f"`backend: package` must be among checkpoint, config, device, .*; got '{option}'$"
    with pytest.raises(InputError, match=sentence):
        load_placed_reward("hpsv3", backend="package", **{option: 1})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "bfloat16", "device": "cpu"}, "`dtype` must be auto or float32 on a CPU"),
        ({"batch": 0}, "`batch` must be a whole number of at least 1; got 0"),
        ({"batch": True}, "`batch` must be a whole number of at least 1; got True"),
    ],
)
def test_option_without_effect_in_the_hpsv3_package_is_rejected(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_hpsv3_package(**options)


def test_bfloat16_is_rejected_if_the_configuration_of_the_package_loads_float32(monkeypatch):
    scorer = types.SimpleNamespace(model=torch.nn.Linear(2, 2), device="cuda:0")
    package = types.ModuleType("hpsv3")
    package.HPSv3RewardInferencer = lambda **options: scorer
    monkeypatch.setitem(sys.modules, "hpsv3", package)
    with pytest.raises(ValueError, match="`config` loads no bfloat16 weights; got 'bfloat16'"):
        load_hpsv3_package(dtype="bfloat16", device="cuda:0")
    assert load_hpsv3_package(dtype="float32", device="cuda:0").batch == 8
    scorer.model.bfloat16()
    assert load_hpsv3_package(dtype="bfloat16", device="cuda:0").device == "cuda:0"


@pytest.mark.parametrize("backend", ["plain", "package"])
def test_backend_of_a_reward_behind_a_server_is_rejected(backend):
    with pytest.raises(InputError, match="`backend` must be left out|one place where hpsv3 runs"):
        load_placed_reward("hpsv3", backend=backend, url="http://127.0.0.1:9")


def test_environment_of_a_reward_that_cannot_run_in_it_is_rejected(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    for name in ("pickscore", "hpsv3", "no-such-reward"):
        with pytest.raises(InputError, match=f"`environment` must be left out for {name}; only"):
            load_placed_reward(name, environment=str(tmp_path))


def test_unknown_extra_input_of_a_reward_is_rejected():
    class Reward:
        extra_inputs = ("record",)

        def __call__(self, images, prompts, record=None):
            return [0.0] * len(prompts)

    with pytest.raises(InputError, match="takes the unknown input 'record'; allowed are records"):
        rewards.score_images("own", Reward(), torch.zeros(1, 3, 4, 4), ["x"])


def test_speed_measures_every_reward_of_the_settings():
    changes = ["steps=3", "chunks=steps", "prompts_per_iteration=1", "images_per_prompt=2"]
    both = "reward={compressibility: 1, incompressibility: 2}"
    workload = speed.prepare_workload(speed.load_workload_settings("pocket", [*changes, both]))
    assert list(workload.scorers) == ["compressibility", "incompressibility"]
    called = []
    for name in workload.scorers:
        workload.scorers[name] = lambda images, prompts, name=name: called.append(name) or [0, 0]
    workload.score(torch.zeros(2, 3, 8, 8))
    assert called == ["compressibility", "incompressibility"]


@pytest.mark.parametrize("changes", [["reward=hpsv3"], {"reward": "hpsv3"}])
def test_reward_of_a_model_with_random_weights_is_rejected(changes):
    with pytest.raises(InputError, match="`reward` must be left out for flux-size"):
        speed.load_workload_settings("flux-size", changes)


def test_sizes_that_are_not_one_per_prompt_are_rejected():
    with pytest.raises(InputError, match="`sizes` must be one per prompt; got 1 for 2 prompts"):
        profiles.measure_distances(None, ["a", "b"], [0, 1], 1, 0, None, sizes=[64])


TIMED = """def timed(images, prompts, timeout=1.0):
    return [timeout] * len(prompts)
"""


def environment_of_this_python(folder):
    """Make a folder that looks like an environment and starts this interpreter."""
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("place", ["worker", "environment"])
def test_an_option_of_both_the_reward_and_its_child_process_is_rejected(tmp_path, place):
    (tmp_path / "timed.py").write_text(TIMED)
    (tmp_path / "own").mkdir()
    places = {"worker": True, "environment": environment_of_this_python(tmp_path / "own")}
    name = f"{tmp_path / 'timed.py'}:timed"
    with pytest.raises(InputError, match="`timeout` must be left out for .* in a child process"):
        load_placed_reward(name, timeout=20.0, **{place: places[place]})
    reward = load_placed_reward(name, retries=0, **{place: places[place]})
    assert reward(torch.ones(1, 3, 8, 8), ["x"]).tolist() == [1.0]
    reward.close()


def test_an_option_of_both_a_shipped_reward_and_its_child_process_is_rejected():
    options = {"base_url": "http://127.0.0.1:9", "model": "m", "ask": False}
    with pytest.raises(InputError, match="`retries` must be left out for vlm-judge in a child"):
        load_placed_reward("vlm-judge", worker=True, retries=1, **options)


@pytest.mark.parametrize(("name", "pixels"), [("hpsv21", "exact"), ("pickscore", "bytes")])
def test_a_shipped_reward_gets_bytes_only_if_it_rounds_images_itself(name, pixels, monkeypatch):
    monkeypatch.setattr(placement.ChildProcessReward, "start", lambda server: server)
    assert load_placed_reward(name, worker=True).worker_options.pixels == pixels
    asked = {}
    monkeypatch.setattr(
        placement.client, "load_remote_reward", lambda url, **more: asked.update(more)
    )
    load_placed_reward(name, url="http://127.0.0.1:9")
    assert asked.get("pixels", "exact") == pixels


@pytest.mark.parametrize("place", ["url", "environment"])
def test_an_empty_place_is_rejected(place):
    with pytest.raises(InputError, match=f"`{place}` of .* must be a text that is not empty"):
        load_placed_reward("pocket-clip", **{place: ""})


@pytest.mark.parametrize("place", ["worker", "environment"])
def test_a_child_process_loads_no_code_of_the_working_folder_unless_that_is_allowed(
    tmp_path, monkeypatch, place
):
    (tmp_path / "red_here.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    places = {"worker": True, "environment": environment_of_this_python(tmp_path)}
    options = {place: places[place]}
    names = ["red_here.py:red"] if place == "environment" else ["red_here.py:red", "red_here:red"]
    for name in names:
        with pytest.raises(
            InputError, match="`reward` must be package.module:name or file.py:name"
        ):
            load_placed_reward(name, False, **options)
        load_placed_reward(name, True, **options).close()
    load_placed_reward(f"{tmp_path / 'red_here.py'}:red", False, **options).close()


def test_a_run_names_no_environment_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "red_here.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    environment = environment_of_this_python(tmp_path)
    name = f"{tmp_path / 'red_here.py'}:red"
    relative = f".{os.sep}{os.path.relpath(environment)}"
    with pytest.raises(InputError, match="`environment` must be a name, or the absolute path"):
        load_placed_reward(name, False, environment=relative)
    load_placed_reward(name, True, environment=relative).close()
    load_placed_reward(name, False, environment=environment).close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip": {"weigths": "/w"}}, "weigths"),
        ({"clip": {"url": "http://a:1", "token": "x"}}, "did you mean `token_variable`?"),
        ({"clip": {"worker": True, "start_timeout": -1}}, "`start_timeout` must"),
        ({"hpsv3": {"backend": "package", "weights": "/w"}}, "'weights'"),
    ],
)
def test_plan_finds_wrong_options_before_a_host_does(options, sentence):
    (name,) = options
    done = call("plan", "pocket/tiny", f"reward={name}", f"reward_options={options}")
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    right = {"clip": {"url": "http://a:1", "token_variable": "T"}, "hpsv3": {"worker": True}}
    placement.check_reward_options(name, right[name])
