"""What is printed is for whoever looks: nobody there, a full disk or a narrow encoding ends no training."""

import contextlib
import errno
import io
import os
import signal
import sys

import pytest

from chunk_grpo import InputError
from chunk_grpo.cli import console, main, reports
from chunk_grpo.core import settings
from chunk_grpo.core.machine import Terminated
from chunk_grpo.runs import launch, run_folder


@pytest.fixture
def nobody(monkeypatch):
    """Standard output is a pipe whose reader has gone, in an encoding of few signs."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(
            sys, "stdout", io.TextIOWrapper(pipe, encoding="ascii", write_through=True)
        )
        yield
        monkeypatch.undo()


def start(monkeypatch, *words) -> int:
    """The exit code of the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["chunk-grpo", *map(str, words)])
    try:
        main.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_training_goes_on_when_nobody_reads(monkeypatch, tmp_path, nobody):
    """Every iteration is printed, in signs that the stream lacks, and the run gets to its end."""
    done = []

    def train(settings, out, *rest, **how):
        for i in range(5):
            print(f"iteration {i}: 1 \u00b1 0.5 \u2192 2", flush=True)
            done.append(i)
        return out

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(run_folder, "read_run_info", lambda run: {"seconds": 1.0})
    assert start(monkeypatch, "train", "pocket/tiny", "--out", tmp_path / "run", "--no-report") == 0
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full"
)
def test_a_full_disk_behind_the_output_ends_nothing(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with contextlib.redirect_stdout(console.rewrap_stream(sys.stdout)):
            print("one", flush=True)
            print("two", flush=True)
        monkeypatch.undo()
        with pytest.raises(OSError) as error:
            print("three", file=full, flush=True)
        assert main.describe_error(error.value) == (
            1,
            "the output cannot be written (No space left on device)",
        )
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), full.fileno()
        )  # it is closed with what is left in it


def test_a_command_that_only_prints_ends_by_the_signal(monkeypatch, tmp_path):
    """Within `plan` the signal is that of other programs, and this program's own again after it."""
    before = signal.getsignal(signal.SIGPIPE)
    seen = []

    def load(*_):
        seen.append(signal.getsignal(signal.SIGPIPE))
        raise ZeroDivisionError

    monkeypatch.setattr(settings, "load_settings", load)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert start(monkeypatch, "plan", "pocket/tiny") == 1
    assert seen == [signal.SIG_DFL] and signal.getsignal(signal.SIGPIPE) == before


def test_a_line_that_cannot_be_printed_ends_no_training(tmp_path, nobody):
    """A script that calls `train` has no command line that looks after its output."""
    launch.print_progress(
        {"iteration": 1, "reward_mean": 0.5, "reward_se": 0.1},
        settings.load_settings("pocket/tiny"),
    )


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Terminated(143), 143)])
def test_ctrl_c_and_sigterm_say_how_to_go_on(monkeypatch, tmp_path, capfd, error, code):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()

    def train(*_, **__):
        raise error

    monkeypatch.setattr(launch, "train", train)
    assert start(monkeypatch, "train", "pocket/tiny", "--out", tmp_path / "run") == code
    said = capfd.readouterr().err.strip()
    assert (
        said
        == f"interrupted; continue with: chunk-grpo train pocket/tiny --out {tmp_path / 'run'} --resume"
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("`eta` must be above 0"), 2, "`eta` must be above 0"),
        (OSError(errno.ELOOP, "Too many links", "a/b"), 2, "the path a/b cannot be used"),
        (KeyError("et\na"), 1, "an unforeseen KeyError: 'et\\na'; the traceback is in "),
        (
            RuntimeError("two\nlines"),
            1,
            "an unforeseen RuntimeError: two lines; the traceback is in ",
        ),
    ],
)
def test_every_error_is_one_sentence(monkeypatch, tmp_path, capfd, error, code, words):
    """Of an unforeseen one the traceback is in the file that the sentence names."""

    def load(*_):
        raise error

    monkeypatch.setattr(settings, "load_settings", load)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert start(monkeypatch, "profile", "pocket/tiny") == code and reports.settings is settings
    said = capfd.readouterr().err
    assert said.startswith(f"chunk-grpo: {words}") and said.count("\n") == 1
    logs = list(tmp_path.iterdir())
    assert len(logs) == (code == 1) and all(
        str(file) in said and "in load\n" in file.read_text() for file in logs
    )
