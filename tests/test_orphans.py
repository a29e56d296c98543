"""Nothing runs on that nobody asked for: children whose parent was killed, and runs under a foreign launcher."""

import subprocess
import sys
import tempfile
from pathlib import Path

import children
import psutil
import pytest
from commands import command, environment, run
from small_runs import wait_for, write

from chunk_grpo.core.files import temporary_folder

DEAF = """import signal, sys
[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]
print(flush=True)
sum(range(10**13))  # never comes back to Python, which is where signals are looked at
"""
PARENT = """import os, subprocess, sys
from chunk_grpo.core.machine import make_parent_death_hook
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True,
                         preexec_fn=make_parent_death_hook(os.getpid()))
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")
def test_a_child_that_hears_nothing_ends_with_its_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, DEAF], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert children.gone([child])


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")
def test_the_processes_of_a_run_end_with_the_command(tmp_path):
    """kill -9 of the command that started two of them: a crash that nobody can write down."""
    write(tmp_path, reward="tiny_rewards:slow_red")
    out = tmp_path / "run"
    child = subprocess.Popen(
        command("train", tmp_path / "s.yaml", "--out", out, "--processes", 2, "--no-report"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(out, 1, child)
    workers = children.descendants(child.pid)
    assert len(workers) >= 2
    child.kill()
    child.wait()
    assert children.gone(workers)


HOLDER = """import sys
from chunk_grpo.core.files import temporary_folder
with temporary_folder("report") as folder:
    (folder / "half.ipynb").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_in_the_temporary_folder_is_removed_by_the_next(
    tmp_path, monkeypatch
):
    """And what a living one has there is left alone, as is what anything else put there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "chunk-grpo-other-1").mkdir()
    (tmp_path / "chunk-grpo-report-of-mine.html").touch()
    killed, living = (
        subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(TMPDIR=tmp_path),
        )
        for _ in range(2)
    )
    left, used = (Path(child.stdout.readline().strip()) for child in (killed, living))
    killed.kill()
    killed.wait()
    assert left.is_dir()
    with temporary_folder("report", patience=0) as own:
        assert own.is_dir() and not left.exists() and (used / "half.ipynb").read_text() == "half"
    living.communicate()
    assert living.returncode == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "chunk-grpo-other-1",
        "chunk-grpo-report-of-mine.html",
    }


@pytest.mark.parametrize(
    "foreign",
    [{"WORLD_SIZE": "2", "RANK": "1"}, {"OMPI_COMM_WORLD_SIZE": "4"}],
    ids=str,
)
def test_a_foreign_launcher_is_said_at_once(tmp_path, monkeypatch, foreign):
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    done = run("train", "pocket/tiny", "--out", tmp_path / "run", "--no-report", code=2)
    assert all(f"{name}={value}" in done for name, value in foreign.items())
    assert "unset these variables" in done and "Traceback" not in done
    assert not (tmp_path / "run").exists()
