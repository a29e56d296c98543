"""chunk-grpo speed and compiled blocks, as a user meets them. Nothing here asks how fast."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_flux
import torch
from commands import call, environment, run, server
from nbdev.test import test_nb as run_page

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.measurements import speed
from chunk_grpo.models import trainable
from chunk_grpo.planning import devices
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.training.gradient import accumulate_gradients
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update import measure_ratio_errors
from chunk_grpo.training.update_batch import build_update_batch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "research"))
import method_costs  # noqa: E402
import orders  # noqa: E402
import speed as program  # noqa: E402

FEW = ["chunks=1,2", "chunk_fraction=1", "rollout_batch=2", "update_batch=4"]
LAYERS = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "in_channels": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": True,
}
LEVELS = speed._FLUX_VAE_CONFIG | {
    "block_out_channels": (8, 8, 8, 8),
    "norm_num_groups": 4,
    "latent_channels": 4,
}
SIZE = {"resolution": 64, "max_tokens": 16}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A FLUX of two blocks."""
    return str(tiny_flux.build(tmp_path_factory.mktemp("models") / "flux"))


def test_speed_says_what_an_iteration_takes(tmp_path):
    given = [
        "--prompts",
        1,
        "--images",
        2,
        "--steps",
        4,
        "--repeats",
        1,
        "--out",
        tmp_path / "speed.json",
    ]
    said = run("speed", *FEW, *given)
    assert all(word in said for word in ("rollout", "decode", "reward", "update", "share of rate"))
    kept = json.loads((tmp_path / "speed.json").read_text())
    assert kept["images"] == 2 and kept["transitions"] == 6
    assert set(kept["phases"]) == {"rollout", "decode", "reward", "update"}
    assert {"torch", "diffusers"} <= set(kept["versions"]) and kept["machine"]["cores"]


def test_costs_are_measured_for_every_row_of_the_table(tmp_path, monkeypatch):
    published = {name for name, of in settings.METHODS.items() if not of.get("contender")}
    assert set(method_costs.compared_arms()) == published
    monkeypatch.setattr(
        method_costs, "SIZES", {"pocket": method_costs.SIZES["pocket"] | {"images_per_prompt": 2}}
    )
    monkeypatch.setattr(method_costs, "save_medium_pipeline", lambda folder: "pocket")
    monkeypatch.setattr(method_costs, "MIDDLE_SIZE", "pocket")
    method_costs.run_worker(["fast", "steps"], tmp_path / "costs.json")
    fast, steps = json.loads((tmp_path / "costs.json").read_text())["rows"]["pocket"]
    assert (fast["method"], steps["method"], steps["images"]) == ("fast", "steps", 4) and 0 < fast[
        "work"
    ]


def test_a_row_that_the_table_lacks_is_refused(tmp_path):
    words = [
        "research/method_costs.py",
        "--methods",
        "steps,fats",
        "--out",
        tmp_path / "costs.json",
    ]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "--methods must be among" in done.stderr
        and done.stderr.rstrip().endswith("got fats")
    )
    assert not (tmp_path / "costs.json").exists()


def test_the_orders_of_other_code_are_measured_in_turn():
    settings = speed.load_workload_settings(
        "pocket", ["prompts_per_iteration=1", "images_per_prompt=2", "steps=4", *FEW]
    )
    found = orders.measure(settings, 1)
    assert list(found["orders"]) == [
        "batched, as here",
        "DanceGRPO",
        "GCPO, chunks",
        "Flow-GRPO, batches of 3",
    ]
    assert all(
        set(each) == {"rollout", "update"} and min(each.values()) > 0
        for each in found["orders"].values()
    )
    assert found["gradient_error"] < 1e-5 and set(found["phases"]) == {
        "rollout",
        "decode",
        "reward",
        "update",
    }
    assert found["phases"]["update"]["reference_seconds"] > 0 and len(found["two_pass_bytes"]) == 3


@pytest.mark.parametrize(
    "changes", [["chunks=1,3"], ["chunks=2,2", "chunk_fraction=0.5"], ["chunks=steps"]]
)
def test_every_order_leaves_the_same_gradient(changes):
    """In as many forwards as its batches: DanceGRPO's one a transition, GCPO's one a chunk, Flow-GRPO's one for three."""
    given = [
        "prompts_per_iteration=1",
        "images_per_prompt=4",
        "steps=5",
        "rollout_batch=4",
        *changes,
    ]
    b = speed.prepare_workload(speed.load_workload_settings("pocket", given))
    paths = b.rollout()
    calls = []
    trained = b.update(paths)
    forward = b.policy.transformer.forward
    b.policy.transformer.forward = lambda *args, **more: calls.append(1) or forward(*args, **more)
    chunks = orders.list_transitions(b, paths)
    each = [transition for chunk in chunks for transition in chunk]
    ours = b.gradient()
    threes = [each[n : n + 3] for n in range(0, len(each), 3)]
    assert len(each) == trained and ours.norm() > 0
    for batches in (chunks, threes, [[one] for one in each]):
        calls.clear()
        orders.accumulate_batched(b, paths, batches)
        assert len(calls) == len(batches) and orders.gradient_difference(b, ours) < 1e-5
    orders.accumulate_batched(b, paths, chunks[1:])  # a chunk is left out
    with pytest.raises(RuntimeError, match="the gradients of two orders must agree"):
        orders.gradient_difference(b, ours)


def test_a_wrong_model_is_one_sentence():
    done = call("speed", "--model", "poket")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "`--model` must be pocket, flux-size, a settings file or a preset" in done.stderr


def test_sharded_weights_are_not_measured_as_if_they_were_whole():
    with pytest.raises(
        InputError, match="`sharding` must be none in a speed measurement.*; got fsdp"
    ):
        speed.load_workload_settings("machines/8x80gb-full-flux1-dev", {"chunks": "4,4,4,4"})


@pytest.mark.parametrize(
    "change, sentence", [("chunks=profile", "`chunks` must be sizes"), ("steps=9", "`chunks`")]
)
def test_settings_that_cannot_be_measured(change, sentence):
    with pytest.raises(InputError, match=sentence):
        speed.load_workload_settings("pocket", [change])


@pytest.mark.parametrize(
    "changes", [[], ["lora_rank=0", "dtype=float32"], ["gradient_checkpointing=true"]]
)
def test_flux_size_goes_the_same_way(changes):
    small = ["resolution=64", "max_tokens=8", "steps=4", "images_per_prompt=2"]
    settings = speed.load_workload_settings("flux-size", [*small, *FEW, *changes])
    result = orders.measure(settings, 1, configs=(LAYERS, LEVELS))
    assert (
        "reward" not in result["phases"]
        and result["gradient_error"] <= orders.GRADIENT_TOLERANCE[settings.dtype]
    )
    assert (
        result["transitions"] == 6
        and result["phases"]["update"]["flop"] > 6 * result["flop"]["forward"]
    )
    assert bool(result["recomputed_flop"]) == settings.gradient_checkpointing
    assert ("computes" in "\n".join(speed.speed_lines(result))) == settings.gradient_checkpointing
    assert (result["trained"] == result["parameters"]) == (settings.lora_rank == 0)


def test_two_passes_take_the_memory_of_one_transition():
    settings = speed.load_workload_settings(
        "pocket", ["prompts_per_iteration=1", "images_per_prompt=2"]
    )
    one, two, whole = orders.measure_two_passes(speed.prepare_workload(settings)).values()
    assert abs(two / one - 1) < 0.1 and whole > 4 * one


def test_torch_may_not_choose_cudnns_attention(tiny):
    """Its backward is wrong on Hopper, and torch prefers it there."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    trainable.load_trainable_policy(tiny, **SIZE)
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_a_machine_without_a_compiler_is_told(tiny, monkeypatch):
    monkeypatch.setattr(trainable.shutil, "which", lambda name: None)
    with pytest.raises(
        InputError, match="`compile` must be false on a machine without a C\\+\\+ compiler"
    ):
        trainable.load_trainable_policy(tiny, **SIZE, compile=True)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_numbers(tiny):
    """Velocity, base, gradient and floor, through an adapter that is switched, in batches of several sizes."""
    pair = [
        trainable.load_trainable_policy(tiny, **SIZE, lora_rank=4, compile=on)
        for on in (False, True)
    ]
    for policy in pair:
        torch.manual_seed(0)
        for p in policy.trained:
            p.data += 0.1 * torch.randn_like(p)
    x = torch.randn(5, pair[0].tokens, 16)
    sigma = torch.linspace(0.9, 0.2, 5)
    rows = {
        k: v[torch.tensor([0, 0, 0, 1, 1])]
        for k, v in pair[0].encode(["a red star", "two cats"]).items()
    }
    found = []
    for policy in pair:  # with graph, as all forwards that an update compares
        moved = policy.velocity(x, sigma, rows).detach()
        with trainable.use_base_weights(policy):
            base = policy.velocity(x, sigma, rows).detach()
        found.append((moved, base, policy.velocity(x, sigma, rows).detach()))
    assert (found[0][0] - found[0][1]).abs().max() > 1e-3
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=1e-5)
    assert torch.equal(found[1][0], found[1][2])

    keys = [(0, 0, 0, g) for g in range(4)]
    row = torch.zeros(4, dtype=torch.long)
    grid = sigmas(6, 3.0)
    chunks = "2,3"
    given = pair[0].encode(["a red star"])
    paths = sample_trajectories(
        policy=pair[0],
        conditioning=given,
        prompt_index=row,
        keys=keys,
        options=RolloutOptions(Sampler(grid), batch_size=4),
    )
    chosen = torch.tensor([[0], [1], [1], [1]])
    method = Method(settings.Settings(clip_range=1e-3))
    work = build_update_batch(torch.arange(4), chosen, Chunks.parse(chunks), limit=6)
    assert [len(part) for part in work.batches] == [5, 6]  # both are filled up to six
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert measure_ratio_errors(ReplayContext(pair[1], given, paths), work, method)[0] == 0.0
    gradients = []
    advantage = torch.tensor([1.0, -0.5, 0.7, -1.2])
    for policy in pair:
        accumulate_gradients(ReplayContext(policy, given, paths), work, advantage, method)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trained]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    )  # nothing was compiled again


@pytest.mark.slow
def test_a_compiled_run_trains(tmp_path):
    given = [
        "compile=true",
        "gradient_checkpointing=true",
        "lora_rank=4",
        "iterations=1",
        "images_per_prompt=2",
        "steps=5",  # fewer sizes of batches to compile
        "chunks=2,2",
    ]
    run("train", "pocket/tiny", *given, "--out", tmp_path / "run", "--no-report")
    (line,) = [
        json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[1:]
    ]
    assert line["ratio_floor"] == 0.0 and line["grad_norm"] > 0


def work(results: str, log: str) -> None:
    """What a process does: the page, with what is kept of measurements in a folder."""

    class Kept(type(settings.PRESETS_DIR)):
        def __truediv__(self, name):
            return Path(results) if name == "results" else shipped / name

    shipped = settings.PRESETS_DIR
    settings.PRESETS_DIR = Kept(shipped)
    os.environ["MPLBACKEND"] = "agg"
    with open(log, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os._exit(0 if run_page(ROOT / "nbs/findings/speed.ipynb")[0] else 1)


def page_runs(results: Path, log: Path):
    """The page of benchmarks, on what lies in a folder."""
    child = server().Process(target=work, args=(str(results), str(log)))
    child.start()
    child.join()
    assert child.exitcode == 0, log.read_text(errors="replace")[-6000:]


@pytest.mark.slow
def test_the_page_runs_on_what_is_kept(tmp_path):
    page_runs(ROOT / "runs/results", tmp_path / "log")


@pytest.mark.parametrize("model", ["pocket", "flux-size"])
def test_every_point_of_the_growth_can_be_measured(model):
    """Of the program, which the slow test below runs at the first two points of each axis."""
    for what, values in program.growth_points(model):
        sizes = [value for value, _ in values]
        assert len(values) >= 3 and sizes == sorted(sizes), what
        for _, changes in values:
            speed.load_workload_settings(model, changes)


SMALL_PROGRAM = f"""
import sys

import torch

sys.path.insert(0, {str(ROOT / "research")!r})
import speed as program

program.MIDDLE |= {LAYERS!r}
program.FEW |= {LEVELS!r}
for words in (program.AT_256, program.AT_256_IN_GROUPS):
    words[words.index("resolution=256")] = "resolution=64"
program.RANKS |= {{
    "prompts_per_iteration": 2,
    "images_per_prompt": 2,
    "steps": 5,
    "chunks": "2,2",
    "train_chunks": "all",
    "chunk_fraction": 1.0,
}}
points = program.growth_points
program.growth_points = lambda model: [(what, values[:2]) for what, values in points(model)]
compile_module = torch.nn.Module.compile
torch.nn.Module.compile = lambda module, **given: compile_module(module, backend="eager", **given)
program.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_program_measures_and_the_page_shows_it(tmp_path):
    """Every part of it, each with smaller models, fewer images and two points of each axis.

    Blocks are captured as for the compiler and run without it; two tests above compile.
    """
    (tmp_path / "benchmarks").mkdir()
    out = tmp_path / "benchmarks/speed.json"
    few = ["prompts_per_iteration=1", "images_per_prompt=4", "rollout_batch=4"]
    few += ["steps=5", "chunks=2,2"]
    words = [sys.executable, "-c", SMALL_PROGRAM, "--repeats", "1", "--out", out, *few]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = json.loads(out.read_text())
    names = ["profile", "iteration", "orders", "growth", "ranks", "levers"]
    assert {*names, "levers of a middle size"} <= set(kept)
    assert all(len(entries) == 2 for entries in kept["growth"].values())
    assert [row["processes"] for row in kept["ranks"]] == [1, 2, 1]
    for name in ("levers", "levers of a middle size"):
        assert all(r["expected"] and r["before"] > 0 and r["after"] > 0 for r in kept[name])
        compiled = [row["note"] for row in kept[name] if "compiled blocks" in row["change"]]
        assert len(compiled) == 2 and not any(
            note.startswith("compile: true; 0 ") for note in compiled
        )
    shutil.copytree(ROOT / "runs/results/gpu", tmp_path / "gpu")  # the page reads its shares too
    page_runs(tmp_path, tmp_path / "log")


@pytest.mark.parametrize(
    "model, changes, sentence",
    [
        ("pocket", ["method=nft"], "`method` must be chunk in a speed measurement; got nft"),
        ("pocket", ["chunk_weighting=profile"], "`chunk_weighting` must be uniform or dynamics"),
        ("flux-size", ["true_cfg_scale=3"], "`true_cfg_scale` must be 1 with flux-size"),
    ],
)
def test_what_is_not_measured_is_refused(model, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        speed.load_workload_settings(model, changes)


def test_the_settings_of_a_run_reach_the_measurement(monkeypatch):
    changes = [
        "prompts_per_iteration=1",
        "images_per_prompt=2",
        "rollout_batch=2",
        "steps=5",
        "chunks=1,1,2",
        "chunk_fraction=0.5",
        "train_chunks=1,2",
        "chunk_weighting=dynamics",
        "noise_spread=0.5",
        "latents_dtype=bfloat16",
    ]
    workload = speed.prepare_workload(speed.load_workload_settings("pocket", changes))
    paths = workload.rollout()
    assert paths.latents.dtype == torch.bfloat16
    assert not torch.equal(paths.latents[0, 0], paths.latents[1, 0])  # of the same prompt
    assert {number for (number,) in workload.sample_chunks(paths).tolist()} <= {0, 1}
    assert workload.update(paths) == 2

    size = ["resolution=64", "max_tokens=8", "vae_tiling=true", "lora_rank=4"]
    policy = speed.load_workload_policy(
        speed.load_workload_settings("flux-size", size), LAYERS, LEVELS
    )
    assert policy.vae.use_tiling and policy.vae.use_slicing
    # A measurement on the CPU compares with the CPU's rate, even if there is a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.measure_matmul_rate("float32", 0.01, "cpu") > 0
