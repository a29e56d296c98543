"""Real training of a FLUX in miniature: what a kill, several processes and faults do to a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from commands import command, environment, run, start
from safetensors.torch import load_file, save_file
from small_runs import metrics, trained, wait_for

ROOT = Path(__file__).parents[1]


def test_killed_and_resumed_is_bit_identical(world, whole):
    """kill -9 in iteration 3 of 6, then --resume: the same metrics and weights, to the last bit."""
    out = world / "killed"
    slow = "reward=tiny_rewards:slow_red"
    child = start("train", world / "s.yaml", slow, "--out", out, "--no-report")
    wait_for(out, 2, child)
    time.sleep(0.2)  # into iteration 3
    family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    for process in family:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family[1:], timeout=10)
    child.wait()
    assert len(metrics(out)) < 7 and not (out / "final").exists()
    run("train", world / "s.yaml", slow, "--out", out, "--resume", "--no-report")
    renamed = json.loads(json.dumps(metrics(out)).replace("slow_red", "red"))
    assert renamed == metrics(whole)
    assert trained(out) == trained(whole)
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


def test_learns(whole):
    """The reward on held-out prompts rises over the base; the ratio before the first update is exactly 1."""
    lines = metrics(whole)
    assert lines[-1]["eval_tiny_rewards:red"] > lines[0]["eval_tiny_rewards:red"]
    assert lines[1]["ratio_floor"] == 0.0 and 0 <= lines[1]["ratio_floor_rollout"] < 1e-4
    assert [line["iteration"] for line in lines] == list(range(7))


def test_adaptive_chunks_go_on_after_an_interruption(world):
    """Chunks of each image's own, fading weights, weighted steps: stopped and resumed, bit for bit the same."""
    outs = [world / "adaptive-through", world / "adaptive-resumed"]
    words = [
        "chunks=adaptive:1",
        "steps=10",
        "eval_every=0",
        "chunk_weighting=profile",
        "weighting_anneal=2",
        "step_weights=noise",
        "--no-report",
    ]
    run("train", world / "s.yaml", *words, "iterations=2", "--out", outs[0])
    run("train", world / "s.yaml", *words, "iterations=1", "--out", outs[1])
    run("train", world / "s.yaml", *words, "iterations=2", "--out", outs[1], "--resume")
    assert metrics(outs[0])[-1] == metrics(outs[1])[-1] and trained(outs[0]) == trained(outs[1])


def test_lora_run_loads_into_diffusers(world):
    """A LoRA run with KL, moving average and the dynamics' weights ends in a folder that diffusers loads."""
    from diffusers import FluxPipeline

    out = world / "lora"
    changes = [
        "lora_rank=4",
        "kl=0.01",
        "ema=0.5",
        "chunk_weighting=dynamics",
        "chunks=profile",
        "iterations=2",
    ]
    run("train", world / "s.yaml", *changes, "--out", out, "--no-report")
    pipe = FluxPipeline.from_pretrained(world / "model")
    before = {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(out / "final")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    after = pipe.transformer.state_dict()
    assert any(not torch.equal(before[k], after[k]) for k in before)
    sizes = [int(x) for x in json.loads((out / "profile.json").read_text())["chunks"].split(",")]
    assert sum(sizes) == 16 and len(metrics(out)[-1]["ratio_dev"]) == len(sizes)


@pytest.fixture(scope="session")
def eight_bits(tmp_path_factory):
    """Where bitsandbytes lies, for this test alone: peft would import it into everything that runs beside it."""
    there = tmp_path_factory.mktemp("bitsandbytes")
    words = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        there,
        "-c",
        ROOT / "constraints.txt",
    ]
    subprocess.run([sys.executable, *words, "bitsandbytes"], check=True, timeout=300)
    return there


def test_8_bits_need_their_package(world, tmp_path):
    """One sentence that says how to get it, and no run folder."""
    said = run("train", world / "s.yaml", "optimizer=adamw-8bit", "--out", tmp_path / "run", code=2)
    assert (
        "optimizer: adamw-8bit needs the package bitsandbytes: pip install 'chunk-grpo[8bit]'"
        in said
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_every_way_to_save_memory_at_once(world, eight_bits):
    """Trajectories in bfloat16 on the host, tiles, moments of 8 bits, forwards by memory: it goes on bit for bit."""
    words = [
        "latents_dtype=bfloat16",
        "latents_on=host",
        "vae_tiling=true",
        "update_memory=0.002",
        "eval_every=0",
        "gradient_checkpointing=true",
        "optimizer=adamw-8bit",
        "drop_flat_groups=true",
        "--no-report",
    ]
    outs = [world / "saving", world / "saving-resumed"]
    path = f"{eight_bits}{os.pathsep}{Path(__file__).parent}"
    run("train", world / "s.yaml", *words, "iterations=2", "--out", outs[0], PYTHONPATH=path)
    run("train", world / "s.yaml", *words, "iterations=1", "--out", outs[1], PYTHONPATH=path)
    run(
        "train",
        world / "s.yaml",
        *words,
        "iterations=2",
        "--out",
        outs[1],
        "--resume",
        PYTHONPATH=path,
    )
    assert metrics(outs[0])[-1] == metrics(outs[1])[-1] and trained(outs[0]) == trained(outs[1])
    lines = metrics(outs[0])
    assert (
        lines[1]["ratio_floor"] == 0
        and lines[2]["ratio_max_dev"] > 0
        and lines[1]["skipped_updates"] == 0
    )


@pytest.mark.parametrize(
    ("reward", "words"), [("nan", "returned nan for"), ("short", "one score per image")]
)
def test_reward_that_fails(world, tmp_path, reward, words):
    """A reward that returns NaN or the wrong count ends the run with a sentence and exit code 2."""
    said = run(
        "train",
        world / "s.yaml",
        f"reward=tiny_rewards:{reward}",
        "--out",
        tmp_path / "run",
        code=2,
    )
    assert words in said and "Traceback" not in said
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(
    "changes, code, words",
    [
        (["kl=1e30"], 2, "no update was applied in the last 3 iterations"),
        (["learning_rate=1e5"], 2, "finite"),
        (
            ["reward=tiny_rewards:huge"],
            2,
            "`reward` must return scores with a finite mean and standard deviation",
        ),
        (["reward=tiny_rewards:leaving"], 1, "sys.exit(0) was called"),
    ],
)
def test_what_trains_nothing_does_not_end_well(world, tmp_path, changes, code, words):
    """One sentence, another exit code than 0, and no trained weights."""
    said = run(
        "train",
        world / "s.yaml",
        *changes,
        "eval_every=0",
        "--out",
        tmp_path / "run",
        "--no-report",
        code=code,
    )
    assert (
        words in said
        and "Traceback" not in said
        and "finished" not in said.replace("not finished", "")
    )
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_a_model_of_nan_draws_no_black_pictures(world, tmp_path, part):
    """Weights that are no numbers are refused before the run has a line, and nothing is left of it."""
    shutil.copytree(world / "model", tmp_path / "model")
    file = next((tmp_path / "model" / part).glob("*.safetensors"))
    save_file({k: v * float("nan") for k, v in load_file(file).items()}, file, {"format": "pt"})
    said = run(
        "train", world / "s.yaml", f"model={tmp_path / 'model'}", "--out", tmp_path / "run", code=2
    )
    assert "images that are not finite" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_flipped_bit_costs_one_iteration(world, whole, tmp_path):
    """The real command: the newest checkpoint and the metrics are damaged, the user reads so, and the run ends the same."""
    out = tmp_path / "run"
    run("train", world / "s.yaml", "--out", out, "--no-report", "iterations=3")
    file = out / "checkpoints" / "000003" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (out / "evaluation").mkdir()
    said = run("train", world / "s.yaml", "--out", out, "--no-report", "--resume")
    assert (
        "000003 is damaged (weights.safetensors is not what was written); the run resumes from 000002"
        in said
    )
    assert metrics(out)[4:] == metrics(whole)[4:] and trained(out) == trained(whole)
    assert not (out / "evaluation").exists(), "it was of other weights"


def test_reward_that_recovers_loses_one_iteration(world, whole, tmp_path):
    """A reward fails in iteration 1; when it works again the run goes on and ends as if nothing had been."""
    flag = tmp_path / "flag"
    flag.touch()
    words = [
        "train",
        world / "s.yaml",
        "reward=tiny_rewards:nan_once",
        "iterations=2",
        "--no-report",
        "--out",
        tmp_path / "run",
    ]
    assert "returned nan" in run(*words, code=2, NAN_WHILE=flag)
    flag.unlink()
    run(*words, "--resume", NAN_WHILE=flag)
    renamed = json.loads(json.dumps(metrics(tmp_path / "run")).replace("nan_once", "red"))
    assert len(renamed) == 3 and renamed[:2] == metrics(whole)[:2]


def test_no_spread_is_counted_and_trains_nothing(world, tmp_path):
    """A reward that is the same for all images: every group is counted, no weight moves."""
    changes = ["reward=tiny_rewards:constant", "iterations=1", "weight_decay=0", "eval_every=0"]
    run("train", world / "s.yaml", *changes, "--out", tmp_path / "run", "--no-report")
    line = metrics(tmp_path / "run")[1]
    assert line["advantage_std_zero_groups"] == 4 and line["grad_norm"] == 0
    base = load_file(next((world / "model" / "transformer").glob("*.safetensors")))
    file = next((tmp_path / "run" / "final").glob("*.safetensors"))
    after = load_file(file)
    assert (
        file.stat().st_mode & 0o777 == (tmp_path / "run" / "run.json").stat().st_mode & 0o777
    )  # others may read it
    assert all(torch.equal(base[k], after[k]) for k in base)


def test_an_alarm_in_stop_on_ends_the_run_in_words_and_it_can_go_on(world, tmp_path):
    """Exit code 2 and the status failed, with the alarm's sentence; the run goes on from its checkpoint."""
    out = tmp_path / "run"
    more = ["reward=tiny_rewards:constant", "eval_every=0", "checkpoint_every=6", "--no-report"]
    words = ["train", world / "s.yaml", *more, "iterations=4", "--out", out]
    said = run(*words, "stop_on=[grid, flat_groups]", code=2)
    sentence = "`stop_on` names flat_groups, and after iteration 3 in 3 iterations in a row, all images of each prompt had"
    assert (
        "warning: iteration 3, alarm flat_groups: in 3 iterations in a row, all images" in said
        and sentence in said
    )
    note = json.loads((out / "run.json").read_text())
    assert note["status"] == "failed" and sentence in note["error"] and not (out / "final").exists()
    assert [folder.name for folder in (out / "checkpoints").iterdir()] == ["000003"] and len(
        metrics(out)
    ) == 4
    assert "alarm" not in run(*words, "--resume"), "what is said once is not said again"
    assert (
        json.loads((out / "run.json").read_text())["status"] == "finished"
        and len(metrics(out)) == 5
    )


def test_an_alarm_that_stop_on_does_not_name_is_a_warning(world, tmp_path):
    words = [
        "reward=tiny_rewards:constant",
        "eval_every=0",
        "iterations=3",
        "stop_on=[gradient_norm]",
        "--no-report",
    ]
    said = run("train", world / "s.yaml", *words, "--out", tmp_path / "run")
    assert said.count("warning: ") == 1 and "alarm flat_groups" in said and "finished" in said
    line = metrics(tmp_path / "run")[1]
    assert (
        0 < line["image_saturation"] < 1
        and line["image_high_frequency"] > 0
        and line["image_grid"] > 0
    )


def test_an_alarm_that_there_is_not_is_refused(world, tmp_path):
    said = run("train", world / "s.yaml", "stop_on=[girds]", "--out", tmp_path / "run", code=2)
    assert "`stop_on` must be a list of alarms among clip_fraction, " in said and "girds" in said
    assert not (tmp_path / "run").exists()


def test_damaged_weights(world, tmp_path):
    """A model cut short is refused before anything is written."""
    shutil.copytree(world / "model", tmp_path / "model")
    file = next((tmp_path / "model" / "transformer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:500])
    said = run(
        "train", world / "s.yaml", f"model={tmp_path / 'model'}", "--out", tmp_path / "run", code=2
    )
    assert "is damaged" in said and not (tmp_path / "run").exists()


def test_other_settings_and_other_runs(world, whole):
    """Resuming with other settings, and training into another run's folder, are refused in words."""
    before = (whole / "run.json").read_bytes()
    said = run("train", world / "s.yaml", "learning_rate=2e-3", "--out", whole, "--resume", code=2)
    assert "learning_rate" in said and "Traceback" not in said
    assert "holds a run" in run("train", world / "s.yaml", "--out", whole, code=2)
    assert (whole / "run.json").read_bytes() == before


def test_the_miniature_is_the_pipeline(world):
    """Embedded guidance and dynamic shift: our ODE is the pipeline's own call, from the same seed."""
    from diffusers import FluxPipeline

    from chunk_grpo.models import policy
    from chunk_grpo.theory.schedule import sigmas
    from chunk_grpo.training.rollout import sample_ode

    model = policy.load_policy(str(world / "model"), resolution=64, max_tokens=8, guidance=2.5)
    noise = model.noise(torch.Generator().manual_seed(3))[None]
    ours = model.decode(
        sample_ode(
            model, model.encode(["a red star"]), noise, sigmas(6, policy.native_shift(model))
        )
    )
    pipe = FluxPipeline.from_pretrained(world / "model")
    size = {"height": 64, "width": 64, "max_sequence_length": 8, "guidance_scale": 2.5}
    generator = torch.Generator().manual_seed(3)
    theirs = pipe(
        "a red star", num_inference_steps=6, output_type="pt", generator=generator, **size
    ).images
    assert (ours - theirs).abs().max() < 1e-5


def test_tensorboard_gets_the_metrics(world, tmp_path):
    """The tracker's files hold the reward of every iteration, a curve a chunk, and the images, by names in groups."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    run(
        "train",
        world / "s.yaml",
        "tracker=tensorboard",
        "iterations=2",
        "--out",
        out,
        "--no-report",
    )
    (events,) = (out / "chunk_grpo").glob("events*")
    found = EventAccumulator(str(events))
    found.Reload()
    assert [event.step for event in found.Scalars("train/reward_mean")] == [1, 2]
    assert found.Scalars("train/reward_mean")[1].value == pytest.approx(
        metrics(out)[2]["reward_mean"], rel=1e-5
    )
    names = found.Tags()["scalars"]
    assert {name.partition("/")[0] for name in names} == {"train", "eval", "chunks", "seconds"}
    drawn = {
        k
        for line in metrics(out)[1:]
        for k, x in enumerate(line["clip_fraction"], 1)
        if x is not None
    }
    assert {name for name in names if "clip_fraction" in name} == {
        f"chunks/clip_fraction_{k}" for k in drawn
    }
    kept = sorted(int(folder.name) for folder in (out / "samples").iterdir())
    assert [event.step for event in found.Images("eval/images")] == kept
    assert "a package that is installed (pip install wandb)" in run(
        "train", world / "s.yaml", "tracker=wandb", "--out", tmp_path / "two", code=2
    )


def test_every_tracker_of_accelerate_can_be_named():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from chunk_grpo.core.settings import TRACKERS
    from chunk_grpo.training.metrics import IMAGE_TRACKERS

    assert set(TRACKERS) == {str(name) for name in LOGGER_TYPE_TO_CLASS}
    takes_images = {
        name for name, tracker in LOGGER_TYPE_TO_CLASS.items() if hasattr(tracker, "log_images")
    }
    assert set(IMAGE_TRACKERS) <= {str(name) for name in takes_images}


@pytest.mark.slow
def test_a_tracker_that_takes_no_images_gets_the_numbers(world, tmp_path):
    """trackio stands for those without images; a stand-in for its package notes what accelerate hands it."""
    package = tmp_path / "trackio"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class Config:\n"
        "    def update(self, *values, **more): pass\n"
        "config = Config()\n"
        "class Run:\n"
        "    def __init__(self, **options): pass\n"
        "    def log(self, values, **more): print('LOGGED', sorted(values)[:1], more)\n"
        "    def finish(self): print('FINISHED')\n"
        "def init(**options): print('BEGUN', options); return Run(**options)\n"
    )
    (tmp_path / "trackio-1.0.dist-info").mkdir()
    (tmp_path / "trackio-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: trackio\nVersion: 1.0\n"
    )
    words = ["train", world / "s.yaml", "tracker=trackio", "iterations=1", "--no-report"]
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = subprocess.run(
        command(*words, "--out", tmp_path / "run"),
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + (tmp_path / "run/train.log").read_text()
    assert "trackio receives numbers only; images are in" in said and "FINISHED" in said
    begun = r"BEGUN \{'project': 'chunk_grpo', 'name': 'run-[0-9a-f]{8}', 'resume': 'allow'\}"
    assert re.search(begun, said)
    assert said.count("LOGGED") == 2


def test_full_disk(world, tmp_path):
    """A disk too small for the run is said before it starts, and nothing is written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        said = run("train", world / "s.yaml", "--out", disk / "run", code=2)
        assert "GB free" in said and list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
