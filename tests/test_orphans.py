"""Nothing runs on that nobody asked for: children whose parent was killed, and runs under a foreign launcher."""

import subprocess
import sys
import time

import pytest
from commands import run

from chunk_grpo.core.subprocesses import process_stat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")
FAR = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); signal.pause()"
STARTS = f"""import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {FAR!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
"""
DEAF = """signal.signal(signal.SIGTERM, lambda number, frame: None)  # where the signal comes before the last line
print(child.pid, flush=True)
sum(range(10**13))  # never comes back to Python, which is where signals are looked at
"""
HASTY = """time.sleep(3)
print(child.pid, flush=True)
time.sleep(600)  # ends by the first signal
"""
TIDY = """import pathlib, signal, sys, time
def end(number, frame):
    time.sleep(2)
    pathlib.Path(sys.argv[1]).write_text("written")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(0, flush=True)
time.sleep(600)
"""
PARENT = """import os, subprocess, sys
from chunk_grpo.core.subprocesses import die_with_parent
tie = die_with_parent(os.getpid(), float(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], stdout=subprocess.PIPE, start_new_session=True,
                         preexec_fn=tie)
print(child.pid, int(child.stdout.readline()), flush=True)
sys.stdin.read()
"""


def left_behind(patience: float, *words) -> list[int]:
    "A child and what it started, whose parent was killed."
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(patience), *map(str, words)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(word) for word in parent.stdout.readline().split() if word != "0"]
    parent.kill()
    parent.communicate()
    return pids


def gone(pid: int, seconds: float = 120.0) -> bool:
    "Whether a process ends in time."
    end = time.monotonic() + seconds
    while process_stat(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return process_stat(pid) is None


@pytest.mark.parametrize("then", [DEAF, HASTY], ids=["stuck in native code", "ends at once"])
def test_a_child_ends_after_its_parent_with_what_it_started(then):
    pids = left_behind(1.0, STARTS + then)
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_a_child_that_hears_has_time_to_write(tmp_path):
    (pid,) = left_behind(100.0, TIDY, tmp_path / "file")
    assert gone(pid) and (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize("foreign", [{"WORLD_SIZE": "2", "RANK": "1"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"RANK": "1"}],
                         ids=str)
def test_a_foreign_launcher_is_said_at_once(tmp_path, monkeypatch, foreign):
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    done = run("train", "pocket/tiny", "--out", tmp_path / "run", "--no-report", code=2)
    assert all(f"{name}={value}" in done for name, value in foreign.items())
    assert "unset these variables" in done and "Traceback" not in done
    assert not (tmp_path / "run").exists()
