"""Several machines, which are both this one: what they train together, and how they end when one of them does."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import children
import psutil
import pytest
from commands import command, environment, free_port, run
from small_runs import metrics, wait_for, write

from chunk_grpo.cli import main

EXAMPLES = Path(__file__).parents[1] / "runs" / "hosts"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the model, prompts and a settings file."""
    return write(tmp_path_factory.mktemp("world"), iterations=3)


@pytest.fixture(scope="module")
def whole(world):
    """A run of one process that nothing interrupted."""
    run("train", world / "s.yaml", "--out", world / "whole", "--no-report")
    return metrics(world / "whole")


def same(mine, theirs):
    """The same metrics to 1e-4."""
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name] == pytest.approx(value, abs=1e-4, rel=1e-4), name


@pytest.fixture
def two(world):
    """Starts the same command on two machines."""
    started = []
    port = free_port()

    def begin(*words, **more):
        line = command(
            "train",
            world / "s.yaml",
            *words,
            "--no-report",
            "--nodes",
            2,
            "--rendezvous",
            f"localhost:{port}",
        )
        for number in (1, 0):  # whichever comes first waits
            own = environment(SLURM_NODEID=number, GLOO_SOCKET_IFNAME="lo", **more)
            started.append(
                subprocess.Popen(
                    line, env=own, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
        return started[::-1]

    yield begin
    for child in started:
        child.kill()


def family(*started):
    """Processes that were started and all that they started."""
    return [
        p
        for child in started
        for p in (psutil.Process(child.pid), *children.descendants(child.pid))
    ]


@pytest.mark.slow
def test_two_machines_train_as_one_does(world, whole, two):
    """One process on each, with half of the weights: the metrics of one process, and one report of them."""
    out = world / "machines"
    first, second = two("sharding=fsdp", "--out", out)
    said = [child.communicate(timeout=250) for child in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert "iteration 3/3" in said[0][0] and "finished" not in said[1][0]
    same(metrics(out), whole)
    note = json.loads((out / "run.json").read_text())
    assert (note["status"], note["nodes"], note["processes"]) == ("finished", 2, 2)
    assert len(list((out / "checkpoints" / "000003").glob("*.safetensors"))) == 2


@pytest.mark.slow
def test_a_rank_that_raises_ends_both_machines(world, two, tmp_path):
    """The machine where it happened has the exception in one sentence; nobody is left on either."""
    out = world / "apart"
    ink = tmp_path / "ink"
    ink.write_text("")
    first, second = two("--out", out, "reward=tiny_rewards:out_of_ink", INK=ink)
    wait_for(out, 0, first)
    everybody = family(first, second)
    errors = [child.communicate(timeout=200)[1] for child in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1) and children.gone(everybody)
    why = f"training stopped in {out}: rank 1: ValueError: no ink is left; the log is {out / 'train-1.log'}"
    assert why in errors[1]
    # The first machine was told why, before the second ended.
    assert f"training stopped in {out}: rank 1: ValueError: no ink is left" in errors[0]
    assert errors[0].count("\n") == 1
    assert (
        json.loads((out / "run.json").read_text())["status"] == "failed" and len(metrics(out)) == 2
    )
    assert "Traceback" in (out / "train-1.log").read_text()


@pytest.mark.slow
def test_an_interrupt_on_one_machine_ends_both(world, two):
    out = world / "stopped"
    first, second = two("--out", out, "reward=tiny_rewards:slow_red")
    wait_for(out, 1, first)
    everybody = family(first, second)
    second.send_signal(signal.SIGINT)
    said = [child.communicate(timeout=200)[1] for child in (first, second)]
    assert (first.returncode, second.returncode) == (1, 130), said
    assert "continue with: chunk-grpo train" in said[1] and children.gone(everybody)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nodes", "2", "--rendezvous", "here"], "`rendezvous` must be HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "here:99999"], "`rendezvous` must be HOST:PORT"),
        (["--nodes", "2", "--rendezvous", f"here:{'9' * 5000}"], "`rendezvous` must be HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "no such host:1"], "`rendezvous` must be HOST:PORT"),
        (["--nodes", "2"], "`rendezvous` must be HOST:PORT"),
        (
            ["--nodes", "100000000000", "--rendezvous", "here:1"],
            "`prompts_per_iteration` (4); got 100000000000",
        ),
        (
            ["--nodes", "2", "--processes", "3", "--rendezvous", "here:1"],
            "`prompts_per_iteration` (4); got 6",
        ),
        (
            ["--nodes", "2", "--node-rank", "2", "--rendezvous", "here:1"],
            "`node_rank` must be a whole number from 0 to 1",
        ),
        (
            ["--nodes", "2", "--node-rank", "-1", "--rendezvous", "here:1"],
            "`node_rank` of train must be a whole number",
        ),
    ],
)
def test_machines_that_cannot_meet_are_one_sentence(
    world, tmp_path, monkeypatch, capfd, words, part
):
    line = ["train", world / "s.yaml", "--out", tmp_path / "run", *words]
    monkeypatch.setattr(sys, "argv", ["chunk-grpo", *map(str, line)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    error = capfd.readouterr().err
    assert ended.value.code == 2 and part in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def run_sbatch_script(folder, exit_code, **more):
    """Run the script with stand-ins that record their words; return its exit code and the words."""
    words = folder / "words.txt"
    for name, code in {"srun": exit_code, "scontrol": 0, "chunk-grpo": 0}.items():
        (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {words}\nexit {code}\n')
        (folder / name).chmod(0o755)
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_JOB_ID": "17",
    }
    script = EXAMPLES / "slurm.sbatch"
    done = subprocess.run(
        ["bash", script, "paper/chunk", "--out", "/shared/run", "--resume", "auto"],
        check=False,
        env=os.environ | job | more,
    )
    return done.returncode, words.read_text().splitlines()


def test_the_sbatch_script_is_one_srun_of_the_command(tmp_path):
    """A stand-in for srun shows what SLURM would start on each machine."""
    code, words = run_sbatch_script(tmp_path, exit_code=0)
    expected = (
        "srun --kill-on-bad-exit=0 --wait=540 chunk-grpo train paper/chunk --out /shared/run --resume auto --no-report --nodes 2 "
        f"--processes 8 --rendezvous {socket.gethostname()}:29500"
    )
    evaluation = ["chunk-grpo evaluate /shared/run", "chunk-grpo report /shared/run"]
    assert (code, words) == (0, [expected, *evaluation])


@pytest.mark.parametrize("exit_code", [1, 2, 75, 143])
def test_the_sbatch_script_requeues_runs_that_can_go_on(tmp_path, exit_code):
    """After SIGTERM, and if a reward did not answer; not after wrong input or a crash."""
    code, words = run_sbatch_script(tmp_path, exit_code)
    assert code == exit_code
    assert words[1:] == (["scontrol requeue 17"] if exit_code in (75, 143) else [])


def test_the_sbatch_script_does_not_requeue_forever(tmp_path):
    """A cause that does not pass, such as a wrong address, must not hold the GPUs again and again."""
    _, words = run_sbatch_script(tmp_path, 75, SLURM_RESTART_COUNT="10")
    assert len(words) == 1
