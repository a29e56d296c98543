"""Studies on a Ray cluster, a real one of this host: the same rows, kills of every kind, and what cannot be used."""

import os
import secrets
import signal
import tempfile
import time

import pytest
import ray
import small_study
import torch
from commands import call, run, start
from small_study import begin, rows, trainers, wait_for


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a study whose trials take seconds."""
    return small_study.write(tmp_path_factory.mktemp("study") / "small")


@pytest.fixture(scope="module")
def through(home, tmp_path_factory):
    """The study run through on this host, and where it lies."""
    out = tmp_path_factory.mktemp("through") / "small"
    run("study", home, "--out", out)
    return out


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster of one node, which is told that it has GPUs."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else they wait for all other tests
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # else it is kept in our home
    with tempfile.TemporaryDirectory(
        prefix="ray"
    ) as folder:  # pytest's own is too long for Ray's sockets
        begun = ray.init(
            address="local",
            num_cpus=2,
            num_gpus=torch.cuda.device_count() or 2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield begun.address_info["gcs_address"]
        ray.shutdown()


def until_gone(out):
    """Wait until no process works on the study."""
    end = time.time() + 60
    while trainers(out):
        assert time.time() < end, "a trial outlives the command that began it"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_change_nothing(home, through, cluster, tmp_path):
    out = tmp_path / "small"
    # once the command itself, without warning
    child = start("study", home, "--out", out, "--ray", cluster)
    lent = {}
    for arm in (
        "steps-0",
        "whole-0",
    ):  # both at once, since the cluster has room; the first may end before the second
        wait_for(out / arm / "metrics.jsonl", 1, child)
        lent |= {
            process.pid: process.environ()["CUDA_VISIBLE_DEVICES"] for process in trainers(out)
        }
    assert len(lent) == len(set(lent.values())) == 2 and not (out / "longer-0").exists()
    child.kill()
    child.wait()
    until_gone(out)
    child = begin(home, out, "--ray", cluster)  # once a trial; the others go on
    wait_for(
        out / "longer-0" / "metrics.jsonl", 5, child
    )  # whole-0, which it is a copy of, had four
    trainers(out)[0].send_signal(signal.SIGKILL)
    said, _ = child.communicate(timeout=600)
    assert child.returncode == 1 and "longer-0 failed" in said and "killed by SIGKILL" in said, said
    assert [row["arm"] for row in rows(out)] == ["steps", "whole"]
    child = begin(home, out, "--ray", cluster)  # once politely
    wait_for(out / "longer-0" / "metrics.jsonl", 6, child)
    child.terminate()
    said, _ = child.communicate(timeout=600)
    assert (
        child.returncode == 143
        and "the same command resumes the study" in said
        and not trainers(out)
    ), said
    said = run("study", home, "--ray", cluster, "--out", out)
    assert "3 of 3" in said and rows(out) == rows(through)
    assert not [
        path for path in out.iterdir() if path.name.startswith(".")
    ]  # what nodes were asked to see


def test_a_wrong_address_is_one_sentence(home, tmp_path):
    done = call("study", home, "--ray", "127.0.0.1:1", "--out", tmp_path / "small")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "`--ray`" in done.stderr and "127.0.0.1:1 does not answer" in done.stderr
    assert not (tmp_path / "small").exists()


def test_ray_is_an_extra(home, tmp_path):
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = call("study", home, "--ray", "auto", "--out", tmp_path / "small", PYTHONPATH=path)
    assert (
        done.returncode == 2
        and "pip install 'chunk-grpo[ray]'" in done.stderr
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "small").exists()
