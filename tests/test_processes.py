"""One, two and four processes, whole weights and weights in parts: the same images, metrics and weights."""

import json
import signal
import subprocess
import sys
import time

import children
import pytest
import torch
from commands import call, command, environment, free_port, run
from small_runs import alike, metrics, trained, wait_for
from torch.distributed.elastic.rendezvous import api as rendezvous_api

from chunk_grpo.runs import launch, processes

DRAW = """
import sys, torch
from chunk_grpo.core import settings
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state
from chunk_grpo.training.groups import sample_groups
from chunk_grpo.training.rollout import initial_noise
state = load_policy_and_optimizer(prepare_state(settings.load_settings(sys.argv[1]), sys.argv[2]))
paths = sample_groups(state).context.trajectories
drawn = {"latents": paths.latents, "noise": initial_noise(state.policy, paths.keys)}
torch.save({**drawn, "keys": [tuple(key) for key in paths.keys]},
           f"{sys.argv[2]}/{state.accelerator.num_processes}.{state.accelerator.process_index}.pt")
# A process that leaves the group while another still uses it makes that one abort.
state.accelerator.wait_for_everyone()
state.accelerator.end_training()
"""


@pytest.mark.parametrize("many", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_draw_the_same_images(world, tmp_path, many):
    """One and several: bit-identical noise, images within 1e-4."""
    (tmp_path / "draw.py").write_text(DRAW)
    words = [str(world / "s.yaml"), str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(many)]
    alone = call(*words, module=str(tmp_path / "draw.py"))
    together = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "draw.py"), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    for said in (alone, together):
        assert said.returncode == 0, said.stderr[-2000:]
    one = torch.load(tmp_path / "1.0.pt")
    parts = [torch.load(tmp_path / f"{many}.{rank}.pt") for rank in range(many)]
    assert sum((part["keys"] for part in parts), []) == one["keys"]
    assert torch.equal(torch.cat([part["noise"] for part in parts]), one["noise"])
    assert (torch.cat([part["latents"] for part in parts]) - one["latents"]).abs().max() < 1e-4


def test_all_cores_count_if_the_system_has_no_cpu_affinity(tmp_path, monkeypatch):
    """As on macOS, where `os.sched_getaffinity` does not exist."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "run.json").write_text(json.dumps({"processes": 100}))
    assert processes.default_process_count(tmp_path) == 6


ENDING = """
import gc, sys
from accelerate.state import PartialState
from torch.nn.parallel import DistributedDataParallel
from chunk_grpo.core.settings import load_settings
from chunk_grpo.training.trainer import train_run

def watched(self, *given):
    print("wrapped models at the end:", sum(type(x) is DistributedDataParallel for x in gc.get_objects()))
    destroy(self, *given)

destroy, PartialState.destroy_process_group = PartialState.destroy_process_group, watched
train_run(load_settings(sys.argv[1], {"iterations": 1}), sys.argv[2], log=lambda text: None)
"""


def test_the_process_group_outlives_what_uses_it(world, tmp_path):
    """Freed by DDP's reducer, with Python's lock held, it may wait for ever for a thread of its own that wants the lock."""
    (tmp_path / "ending.py").write_text(ENDING)
    port = free_port()
    alone = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    done = call(world / "s.yaml", tmp_path, module=str(tmp_path / "ending.py"), **alone)
    assert done.returncode == 0 and "wrapped models at the end: 0\n" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    "processes, sharding",
    [
        (2, "none"),
        pytest.param(4, "none", marks=pytest.mark.slow),
        pytest.param(1, "fsdp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
    ],
)  # two machines with a part each are in test_hosts
def test_several_processes_train_the_same(world, whole, processes, sharding):
    """As one process: with whole weights in each, and with a part in each."""
    out = world / f"{processes}-{sharding}"
    alone = world / f"{processes}-{sharding}-alone"
    words = (
        "train",
        world / "s.yaml",
        "baseline_images=2",
        "--no-report",
    )  # the base draws beside it
    run(*words, f"sharding={sharding}", "--out", out, "--processes", processes)
    run(*words, "--out", alone)
    assert alike(out, alone) and trained(alone) == trained(whole)
    assert metrics(out)[-1]["above_base_mean"] != 0
    assert json.loads((out / "run.json").read_text())["processes"] == processes


@pytest.mark.slow
def test_parts_with_everything_on(world):
    """Two passes, unequal numbers of forwards, fewer held-out images than processes, KL, moving average, checkpointing."""
    words = [
        "update_batch=5",
        "kl=0.01",
        "ema=0.9",
        "eval_count=1",
        "gradient_checkpointing=true",
        "iterations=2",
    ]
    outs = [world / f"everything-{n}" for n in (1, 2)]
    for n, out in enumerate(outs, 1):
        sharding = ["sharding=fsdp"] * (n > 1)
        run(
            "train",
            world / "s.yaml",
            *words,
            *sharding,
            "--out",
            out,
            "--processes",
            n,
            "--no-report",
        )
    assert alike(outs[1], outs[0])


@pytest.mark.slow
def test_an_adapter_over_a_sharded_base_trains_the_same(world):
    """As over a whole base, also with the shards in host memory; it resumes to the bit, and its files are an adapter's."""
    words = ["train", world / "s.yaml", "lora_rank=2", "update_batch=5", "kl=0.01", "ema=0.9"]
    words += ["eval_count=1", "--no-report"]
    sharded = ["sharding=fsdp", "sharding_offload=true", "--processes", 2]
    whole, parts, resumed = (world / f"adapter-{name}" for name in ("whole", "parts", "resumed"))
    run(*words, "iterations=2", "--out", whole)
    run(*words, *sharded, "iterations=2", "--out", parts)
    assert alike(parts, whole)
    run(*words, *sharded, "iterations=1", "--out", resumed)
    run(*words, *sharded, "iterations=2", "--out", resumed, "--resume")
    assert trained(resumed) == trained(parts) and metrics(resumed)[-1] == metrics(parts)[-1]
    names = {file.name for file in (parts / "checkpoints/000002").iterdir()}
    assert names == {file.name for file in (whole / "checkpoints/000002").iterdir()}
    run("export", parts, world / "adapter-exported")
    assert (world / "adapter-exported/pytorch_lora_weights.safetensors").is_file()


@pytest.mark.slow
def test_two_groups_of_two_processes_train_the_same(world):
    """Each group has a whole copy of the weights, half of it in each process; its checkpoints resume to the bit."""
    words = ["train", world / "s.yaml", "eval_every=0", "--no-report"]
    groups = ["sharding=fsdp", "sharding_group=2", "--processes", 4]
    whole, parts, resumed = (world / f"groups-{name}" for name in ("whole", "parts", "resumed"))
    run(*words, "iterations=2", "--out", whole)
    run(*words, *groups, "iterations=2", "--out", parts)
    assert alike(parts, whole)
    run(*words, *groups, "iterations=1", "--out", resumed)
    run(*words, *groups, "iterations=2", "--out", resumed, "--resume")
    assert trained(resumed) == trained(parts) and metrics(resumed)[-1] == metrics(parts)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("sharding, before, after", [("none", 2, 4), ("fsdp", 2, 1)])
def test_a_rank_dies_and_another_number_goes_on(world, whole, sharding, before, after):
    """kill -9 of one rank in iteration 3 of 6: the run ends and says why, and others go on to the same images."""
    out = world / f"died-{sharding}-{before}-{after}"
    slow = "reward=tiny_rewards:slow_red"
    words = ["train", world / "s.yaml", slow, f"sharding={sharding}", "--out", out, "--no-report"]
    child = subprocess.Popen(
        command(*words, "--processes", before),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    wait_for(out, 2, child)
    time.sleep(0.2)  # into iteration 3
    family = children.descendants(child.pid)
    dead = before - 1
    (rank,) = [
        p
        for p in family
        if "chunk_grpo.runs.launch" in p.cmdline() and p.environ().get("RANK") == str(dead)
    ]
    rank.send_signal(signal.SIGKILL)
    said = child.communicate(timeout=120)[1].decode()
    why = f"rank {dead} was killed by SIGKILL"
    assert child.returncode == 1 and f"training stopped in {out}: {why}; the log is" in said
    note = json.loads((out / "run.json").read_text())
    assert (note["status"], note["error"], note["processes"]) == ("failed", why, before)
    assert children.gone(family), "a process is left"
    run(*words, "--processes", after, "--resume")
    for file in (out / "metrics.jsonl", out / "run.json"):
        file.write_text(file.read_text().replace("slow_red", "red"))
    assert alike(out, whole)


@pytest.mark.slow
def test_adaptive_chunks_train_the_same_on_two_processes(world):
    """Every image has chunks of its own, and processes different numbers of them: still the mean over all of them."""
    outs = [world / f"adaptive-{n}" for n in (1, 2)]
    for n, out in enumerate(outs, 1):
        words = [
            "chunks=adaptive:1",
            "steps=10",
            "iterations=2",
            "eval_every=0",
            "--processes",
            n,
            "--no-report",
        ]
        run("train", world / "s.yaml", "--out", out, *words)
    one, two = map(metrics, outs)
    assert one[1]["transitions_trained"] not in (0, 16 * 9) and one[1]["ratio_floor"] == 0
    for mine, theirs in zip(two, one, strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, abs=1e-4, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes minutes, more on a busy machine
def test_compiled_parts_train_the_same(world):
    """Blocks that are compiled and then shared out between two processes.

    Compiling takes nearly all of the time, once for each size of a batch: here two images without gradients, and eight
    transitions with them.
    """
    words = ["iterations=2", "prompts_per_iteration=2", "images_per_prompt=2", "rollout_batch=2"]
    words += ["steps=5", "chunks=2,2", "chunk_fraction=1", "update_batch=8"]
    words += ["eval_every=0", "eval_count=4", "--no-report"]
    outs = [world / "plain", world / "compiled-parts"]
    run("train", world / "s.yaml", *words, "--out", outs[0])
    done = subprocess.run(
        command(
            "train",
            world / "s.yaml",
            *words,
            "sharding=fsdp",
            "compile=true",
            "--out",
            outs[1],
            "--processes",
            2,
        ),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert alike(outs[1], outs[0])


@pytest.mark.slow
def test_a_finished_run_goes_on_with_two_processes(tmp_path):
    """As the page about a GPU host says: more iterations, another number of processes, and what is there stays."""
    words = ["train", "pocket/tiny", "--out", tmp_path / "run", "--no-report"]
    out = tmp_path / "run"
    run(*words, "iterations=3")
    before = metrics(out)
    said = run(*words, "iterations=4", "--resume", "--processes", 2)
    assert "iteration 4/4" in said and "iteration 3/4" not in said
    assert metrics(out)[:4] == before and len(metrics(out)) == 5
    assert json.loads((out / "run.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_processes_meet_without_a_port_that_others_may_take(world, tmp_path, monkeypatch):
    """The launcher listens before it names its port: a port that was free a moment ago may be another program's."""

    def another_programs_port():
        raise AssertionError("a port is named on which nobody listens yet")

    monkeypatch.setattr(rendezvous_api, "get_free_port", another_programs_port)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    folder = launch.train(world / "s.yaml", tmp_path / "run", processes=2)
    assert (folder / "final").is_dir()
