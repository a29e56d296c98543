"""`make gpu` at tiny sizes on whatever is here: every part of each of the ten checks gives numbers or a reason."""

import functools
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import gpu
import gpu_bundle
import gpu_checks
import gpu_models
import gpu_results
import pytest
import torch
from gpu_results import Measured

from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.models.cost import find_model_config
from chunk_grpo.planning.devices import rate_share

ROOT = Path(__file__).resolve().parents[1]
WITH_PROCESSES = (
    5,
    8,
    10,
)  # they train in processes of their own, which take seconds each to start
NUMBERS = [
    pytest.param(n, marks=pytest.mark.slow) if n in WITH_PROCESSES else n
    for n in gpu_results.CHECKS
]

INVENTED = {"small": False, "device": "an invented one", "versions": {"torch": "0"}}


@pytest.fixture(scope="module")
def small_check(tmp_path_factory):
    """Runs a check at tiny sizes, once for all tests; its result and the folder with its file."""

    @functools.cache
    def run_once(number):
        out = tmp_path_factory.mktemp(f"check-{number}")
        return gpu.run_check(number, small=True, out=out), out

    return run_once


@pytest.mark.parametrize("number", NUMBERS)
def test_every_part_of_a_check_gives_numbers(number, small_check):
    result, out = small_check(number)
    assert result["verdict"] == "passed", result["reason"]
    assert json.loads(gpu_results.check_file(number, out).read_text()) == json.loads(
        json.dumps(result)
    )
    for part in result["parts"].values():
        assert gpu_results.describe_numbers(part)
    assert {
        "device",
        "driver",
        "versions",
        "git_commit",
        "seconds",
        "peak_gb",
        "question",
    } <= result.keys()
    assert gpu_results.describe_check(result).startswith(f"check {number}, ")


def test_ratio_error_stands_beside_the_clip_range(small_check):
    parts = small_check(2)[0]["parts"]
    for dtype in ("bfloat16", "float32"):
        assert parts[dtype]["clip range"] == 5e-5
        assert (
            parts[dtype]["replay in batches of 2"].keys()
            == parts[dtype]["replay in batches of 4"].keys()
        )
    assert 0 <= parts["float32"]["replay in batches of 2"]["chunks, largest"] < 5e-5


def test_an_iteration_is_that_of_the_trainer(small_check):
    parts = small_check(3)[0]["parts"]
    assert {"rollout", "reward", "update"} <= parts["iteration"]["seconds"].keys()
    assert parts["iteration"]["images"] == 4 and parts["iteration"]["grad_norm"] > 0
    assert parts["evaluation"]["images"] == 12


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (lambda found: found["native"].neg_(), "cosine -1"),
        (lambda found: found["native"].fill_(float("nan")), "not finite"),
    ],
)
def test_a_wrong_backward_fails_the_first_check(wrong, problem, tmp_path, monkeypatch):
    found, gradients = {}, gpu_checks.gradients

    def broken(policy):
        kernel = "native" if "native" not in found else "math"
        found[kernel] = gradients(policy)
        if kernel == "native":
            wrong(found)
        return found[kernel]

    monkeypatch.setattr(gpu_checks, "gradients", broken)
    measured = gpu_checks.check_update(True, tmp_path)["one double and one single block"]()
    assert problem in measured.problem


def test_a_part_that_fails_leaves_its_reason_and_does_not_stop_the_next(tmp_path):
    def full():
        raise MemoryError("1 PB were asked for\nand more")

    parts = {
        "numbers": lambda: Measured({"images": 12, "peak": {"gb": 1.25}}),
        "out of memory": full,
        "wrong": lambda: Measured({"cosine": 0.5}, "the cosine is .5"),
    }
    about = {"check": 4, "name": "one-h200-lora"} | INVENTED
    left = gpu_results.measure_parts(parts, gpu_results.check_file(4, tmp_path), about)
    assert left["verdict"] == "failed"
    assert left["reason"] == "out of memory: MemoryError: 1 PB were asked for (and 1 more)"
    assert left["parts"]["wrong"]["cosine"] == 0.5
    assert gpu_results.describe_numbers({"peak": {"gb": 1.25}, "n": 2}) == "peak gb 1.25, n 2"
    assert gpu_results.has_result(4, tmp_path) and not gpu_results.has_result(3, tmp_path)
    found = gpu_results.read_results(tmp_path)
    assert "failed: 4 (one-h200-lora)" in gpu_results.gpu_sentence(found)
    assert len(gpu_results.result_rows(found)) == 9 + 3


def test_a_check_that_was_killed_is_unfinished_and_runs_again(tmp_path):
    def killed():
        raise KeyboardInterrupt

    parts = {"first": lambda: Measured({"n": 1}), "second": killed}
    about = {"check": 1, "name": "update"} | INVENTED
    with pytest.raises(KeyboardInterrupt):
        gpu_results.measure_parts(parts, gpu_results.check_file(1, tmp_path), about)
    left = gpu_results.read_results(tmp_path)[1]
    assert (left["verdict"], left["reason"]) == ("unfinished", "ended before second")
    assert left["parts"]["first"]["n"] == 1
    assert not gpu_results.has_result(1, tmp_path)
    assert gpu_results.gpu_sentence({1: left}).startswith("None of the 10 checks")


def test_a_repeated_check_that_was_killed_keeps_its_earlier_result(tmp_path):
    def killed():
        raise KeyboardInterrupt

    about = {"check": 1, "name": "update"} | INVENTED
    file = gpu_results.check_file(1, tmp_path)
    gpu_results.measure_parts({"first": lambda: Measured({"n": 1})}, file, about)
    with pytest.raises(KeyboardInterrupt):
        gpu_results.measure_parts(
            {"first": lambda: Measured({"n": 2}), "second": killed}, file, about
        )
    assert gpu_results.read_results(tmp_path)[1]["parts"]["first"]["n"] == 1
    assert read_json(gpu_results.partial_file(file))["parts"]["first"]["n"] == 2
    gpu_results.measure_parts({"first": lambda: Measured({"n": 3})}, file, about)
    assert gpu_results.read_results(tmp_path)[1]["parts"]["first"]["n"] == 3
    assert not gpu_results.partial_file(file).exists()


def test_checks_that_were_never_begun_come_first(tmp_path, monkeypatch):
    """A result in either folder counts, and a check that did not end does not block the others."""
    stored = tmp_path / "stored"
    monkeypatch.setattr(gpu_results, "RESULTS", stored)
    parts = {"first": lambda: Measured({"n": 1})}
    for number, folder in ((1, stored), (2, tmp_path / "new")):
        about = {"check": number, "name": gpu_results.CHECKS[number]} | INVENTED
        gpu_results.measure_parts(parts, gpu_results.check_file(number, folder), about)
    begun = {"check": 3, "name": gpu_results.CHECKS[3], "verdict": "unfinished"} | INVENTED
    write_json(gpu_results.check_file(3, stored), begun)
    assert gpu.checks_to_run(tmp_path / "new") == [9, 7, 6, 8, 5, 10, 4, 3]


def test_small_results_do_not_count(small_check):
    _, out = small_check(9)
    assert gpu_results.read_results(out) == {}
    assert gpu_results.collect_shares(out) == []


@pytest.mark.parametrize(
    "rises, problem",
    [
        ({"float32": 0.1, "bfloat16": 0.08}, ""),
        ({"float32": 0.1, "bfloat16": 0.04}, "rises by +0.040 in bfloat16"),
        ({"float32": 0.1, "bfloat16": float("-inf")}, "in bfloat16"),
        ({"float32": -0.1, "bfloat16": 0.04}, "does not rise in float32"),
    ],
)
def test_learning_in_bfloat16_is_judged_by_that_in_float32(rises, problem):
    said = gpu_checks.judge_learning(rises)
    assert (problem in said) if problem else said == ""
    assert gpu_checks.reward_rise([0.0] * 10 + [0.5] * 40 + [1.0] * 10) == 1.0


def test_a_measured_share_is_what_plan_uses():
    kept = gpu_results.read_shares()
    assert kept == gpu_results.collect_shares()
    network = find_model_config("black-forest-labs/FLUX.1-dev")
    assert {row["device"] for row in kept} >= {"h200"}
    for row in kept:
        share = rate_share(row["device"], row["dtype"], row["resolution"], network, row["phase"])
        assert share.value == row["share"] and row["device"] in share.source


def test_models_have_the_published_sizes():
    """4.76e9 weights in T5-XXL's encoder, 7.75e9 in HPSv3 less its head and `lm_head`, 0.99e9 in PickScore."""
    meta = torch.device("meta")
    t5 = gpu_models.t5_encoder(False, meta, torch.bfloat16)
    qwen = gpu_models.hpsv3_scorer(False, meta, torch.bfloat16, 1).model
    clip = gpu_models.RandomPickScore(False, meta, torch.bfloat16).model
    counts = [sum(p.numel() for p in net.parameters()) for net in (t5, qwen, clip)]
    assert counts == [pytest.approx(size, rel=0.01) for size in (4.76e9, 7.75e9, 0.986e9)]


def tool(*words, **environment):
    """tools/gpu.py as a command."""
    return subprocess.run(
        [sys.executable, ROOT / "tools/gpu.py", *map(str, words)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=os.environ | environment,
    )


def test_without_a_gpu_nothing_is_measured_and_nothing_written(tmp_path):
    done = tool("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "no CUDA device" in done.stdout and not list(tmp_path.iterdir())
    done = tool("3", "--small")
    assert done.returncode == 2 and "--small needs --out" in done.stderr


@pytest.mark.slow
def test_a_check_has_a_process_of_its_own_and_a_line(tmp_path):
    done = tool(9, "--small", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "check 9, scorers-decoding: passed in " in done.stdout
    none = tool(9, "--small", "--out", tmp_path, "--seconds", 1)
    assert none.returncode == 1 and "no time is left for checks 9" in none.stdout


def test_a_host_without_the_packages_that_the_bundle_leaves_out_can_run_the_checks():
    code = """
        import importlib.machinery, sys
        sys.path.insert(0, "tools")
        import gpu_bundle

        class Without(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                package = name.split(".")[0].replace("_", "-")
                return None if package in gpu_bundle.NOT_NEEDED else super().find_spec(name, path, target)

        sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
        import gpu_checks, chunk_grpo.cli.main
        from chunk_grpo import load_settings, train
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    packages = gpu_bundle.needed_packages(
        {gpu_bundle.normal_name(name) for name in gpu_bundle.ON_HOST}
    )
    names = {package.split("==")[0] for package in packages}
    assert {"diffusers", "peft", "lazy-loader", "pydantic", "typer"} <= names
    assert not names & {"torch", "transformers", "jupyterlab"}


def test_the_bundle_keeps_one_cuda_of_bitsandbytes(tmp_path):
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("bitsandbytes/__init__.py", "a = 1")
        for kind in ("cpu", "cuda126", "cuda130", "rocm70"):
            archive.writestr(f"bitsandbytes/libbitsandbytes_{kind}.so", kind)
    gpu_bundle.keep_one_cuda(wheel, "130")
    with zipfile.ZipFile(wheel) as archive:
        kept = {name.rpartition("_")[2] for name in archive.namelist() if name.endswith(".so")}
    assert kept == {"cpu.so", "cuda130.so"} and gpu_bundle.imported_module(wheel) == "bitsandbytes"
