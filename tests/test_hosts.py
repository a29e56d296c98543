"""Several processes and several machines: what they train together, and how they end when one of them does."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from commands import call, command, environment, run
from small_runs import metrics, wait_for, write

from chunk_grpo import InputError
from chunk_grpo.cli import main
from chunk_grpo.core import settings
from chunk_grpo.runs import hosts, launch, run_folder, runs

EXAMPLES = Path(__file__).parents[1] / "runs" / "hosts"
SLOW = "reward=tiny_rewards:slow_red"  # time to be killed in


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "A folder with the model, prompts, a settings file, and the file of two machines, which are both this one."
    return write(tmp_path_factory.mktemp("world"), iterations=3)


@pytest.fixture(scope="module")
def whole(world):
    "A run of one process that nothing interrupted."
    run("train", world / "s.yaml", "--out", world / "whole", "--no-report")
    return metrics(world / "whole")


def same(mine, theirs):
    "The same metrics to 1e-4."
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name] == pytest.approx(value, abs=1e-4, rel=1e-4), name


def family(*children):
    "Processes that were started and all that they started."
    return [p for c in children for p in (psutil.Process(c.pid), *psutil.Process(c.pid).children(recursive=True))]


def kill(processes, rank):
    "SIGKILL for the trainer with this rank."
    (trainer,) = [
        p for p in processes if "chunk_grpo.training.trainer" in p.cmdline() and p.environ().get("RANK") == str(rank)
    ]
    trainer.send_signal(signal.SIGKILL)


def gone(processes):
    "Whether none of them is left."
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.fixture
def hosts_file(tmp_path):
    "The file that names two machines."
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    (tmp_path / "hosts.yaml").write_text(
        f"nodes: 2\nprocesses: 1\nrendezvous: localhost:{port}\nenvironment: {{GLOO_SOCKET_IFNAME: lo}}\n")
    return tmp_path / "hosts.yaml"


@pytest.fixture
def two(world, hosts_file):
    "Starts the same command on two machines."
    children = []

    def begin(*words, **more):
        line = command("train", world / "s.yaml", *words, "--no-report", "--hosts", hosts_file)
        for number in (1, 0):  # whichever comes first waits
            children.append(subprocess.Popen(line, env=environment(GROUP_RANK=number, **more), text=True,
                                             stderr=subprocess.PIPE, stdout=subprocess.PIPE))
        return children[::-1]
    yield begin
    for child in children:
        child.kill()


def test_two_machines_train_as_one_does(world, whole, hosts_file):
    "One process on each, with half of the weights: the metrics of one process, one report of them, and logs of each."
    out = world / "machines"
    words = ("train", world / "s.yaml", "sharding=fsdp", "--out", out, "--no-report", "--hosts", hosts_file)
    with ThreadPoolExecutor(2) as pool:
        second, first = pool.map(lambda number: call(*words, GROUP_RANK=number), (1, 0))
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert "iteration 3/3" in first.stdout and "machine 1 of 2, beside machine 0" in second.stdout
    same(metrics(out), whole)
    note = json.loads((out / "run.json").read_text())
    assert (note["status"], note["nodes"], note["processes"]) == ("finished", 2, 2)
    assert (out / "train.log").stat().st_size and (out / "train-1.log").stat().st_size
    assert len(list((out / "checkpoints" / "000003").glob("*.safetensors"))) == 2


@pytest.mark.slow
def test_a_rank_that_raises_ends_both_machines(world, two, tmp_path):
    "The exception is named on both, not the connection that the other loses by it; nobody is left on either."
    out, ink = world / "apart", tmp_path / "ink"
    ink.write_text("")
    first, second = two("--out", out, "reward=tiny_rewards:out_of_ink", INK=ink)
    wait_for(out, 0, first)
    everybody = family(first, second)
    errors = [child.communicate(timeout=200)[1] for child in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1) and gone(everybody)
    why = "rank 1: ValueError: no ink is left"
    there = f"machine 1 ({socket.gethostname()}, train-1.log): {why}"
    assert f"training stopped in {out}: {there}; the log is {out / 'train.log'}" in errors[0]
    assert f"training stopped in {out}: {why}; the log is {out / 'train-1.log'}" in errors[1]
    note = json.loads((out / "run.json").read_text())
    assert (note["status"], note["error"]) == ("failed", there) and len(metrics(out)) == 2


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    "Two machines, each a call in a thread, with a few lines of Python as their trainers; both end at once."
    (tmp_path / "prompts.txt").write_text("a red star\ntwo dogs\n")
    monkeypatch.setattr(run_folder, "content_hashes", lambda s: {"model_sha256": "a" * 64, "prompts_sha256": "b" * 64})
    monkeypatch.setattr(run_folder, "estimate_disk_bytes", lambda s: 1)
    prompts = str(tmp_path / "prompts.txt")
    s = settings.load_settings("pocket/tiny", {"prompts": prompts, "eval_prompts": prompts})
    both = [hosts.Hosts(nodes=2, processes=1, rendezvous="here:1", node=node) for node in (0, 1)]

    def train(node):
        with pytest.raises((InputError, launch.TrainingFailed, KeyboardInterrupt)) as caught:
            runs.train(s, tmp_path / "run", hosts=both[node])
        ended[node] = caught.value

    def begin(*codes):
        head = "import os, signal, sys, time\n"
        words = lambda run, processes, program, h: [sys.executable, "-c", head + codes[h.node], str(run)]  # noqa: E731
        monkeypatch.setattr(launch, "training_command", words)
        beside = threading.Thread(target=train, args=(0,))
        beside.start()
        train(1)  # here, since signals come to the main thread
        beside.join(60)
        return ended[0], ended[1]
    ended = {}
    return begin


def test_an_interrupt_on_one_machine_ends_both(stand_in, tmp_path):
    "Ctrl-C where machine 1 is."
    zero, one = stand_in("time.sleep(600)", "time.sleep(1); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)")
    assert isinstance(one, KeyboardInterrupt) and isinstance(zero, launch.TrainingFailed)
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    assert note["status"] == "interrupted" and "train-1.log): it was interrupted" in note["error"]
    assert not run_folder.is_training(tmp_path / "run")


def test_input_that_is_refused_by_all_leaves_no_folder(stand_in, tmp_path):
    "The sentence is said on each machine, the folder is taken back when both have ended."
    code = "time.sleep(6 + {0}); print('`reward` must be finite; got nan', file=sys.stderr); sys.exit(2)"
    zero, one = stand_in(code.format(0), code.format(3))
    assert str(zero) == str(one) == "`reward` must be finite; got nan" and isinstance(one, InputError)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "more", "words"), [
    ("nodes: 2\nprocesses: 1\nrendezvous: here\nnode: 0\n", [], "`rendezvous` must be HOST:PORT"),
    ("nodes: 2\nprocesses: 1\nrendezvous: here:99999\nnode: 0\n", [], "`rendezvous` must be HOST:PORT"),
    (f"nodes: 2\nprocesses: 1\nrendezvous: here:{'9' * 5000}\nnode: 0\n", [], "`rendezvous` must be HOST:PORT"),
    ("nodes: 2\nprocesses: 1\nrendezvous: no such host:1\nnode: 0\n", [], "`rendezvous` must be HOST:PORT"),
    ("nodes: 100000000000\nprocesses: 1\nrendezvous: here:1\nnode: 0\n", [], "`nodes` must be a whole number"),
    ("nodes: 2\nprocesses: 3\nrendezvous: here:1\nnode: 0\n", [], "`prompts_per_iteration` (4); got 6"),
    ("nodes: 2\nprocesses: 1\nrendezvous: here:1\nnode: 0\n", ["--processes", 2], "`processes` must be left out"),
    ("nodes: $NODES_OF_NOBODY\n", [], "NODES_OF_NOBODY"),
    ("names: [nobody, no-one]\nprocesses: 1\nrendezvous: here:1\n", [], "`names` must hold this machine once"),
])
def test_wrong_hosts_are_one_sentence(world, tmp_path, monkeypatch, capfd, text, more, words):
    (tmp_path / "hosts.yaml").write_text(text)
    line = ["train", world / "s.yaml", "--out", tmp_path / "run", "--hosts", tmp_path / "hosts.yaml", *more]
    monkeypatch.setattr(sys, "argv", ["chunk-grpo", *map(str, line)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    error = capfd.readouterr().err
    assert ended.value.code == 2 and words in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


JOB = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "8", "FIRST": "gpu-a"}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load(file):
    found = hosts.load_hosts(file, JOB, "gpu-b")
    assert (found.nodes, found.node, found.processes, hosts.rendezvous_address(found)) == (2, 1, 8, ("gpu-a", 29500))
    settings.check_processes(settings.load_settings("paper/chunk"), found.world_size)
    assert f"hosts/{file.stem}" not in settings.list_presets()


def test_the_sbatch_script_is_one_srun_of_the_command(tmp_path):
    "A stand-in for srun shows what SLURM would start on each machine."
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$FIRST" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    script = EXAMPLES / "slurm.sbatch"
    done = subprocess.run(["bash", script, "paper/chunk", "--out", "/shared/run", "--resume"], check=True, text=True,
                          env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, stdout=subprocess.PIPE)
    first, *words = done.stdout.split()
    assert first == socket.gethostname() and words[1:] == [
        "chunk-grpo", "train", "paper/chunk", "--out", "/shared/run", "--resume", "--hosts", "slurm.yaml"]
    assert sum(line.strip() != "" and not line.startswith("#") for line in script.read_text().splitlines()) == 1
