"""What a command does on a full disk, after Ctrl-C, and with numbers that are none."""

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chunk_grpo import InputError, sample_run
from chunk_grpo.cli import console, main, reports
from chunk_grpo.pocket import edits
from chunk_grpo.studies.agreement import read_published_tables
from chunk_grpo.theory.dynamics import sample_without_replacement, tempered_probabilities


def test_an_unforeseen_error_is_one_sentence_even_without_a_temporary_folder(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    code, sentence = main.describe_error(ZeroDivisionError("by zero"))
    assert code == 1
    assert sentence == (
        "an unforeseen ZeroDivisionError: by zero; the traceback could not be written (No space left on device)"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_named_with_the_file(number):
    code, sentence = main.describe_error(OSError(number, "no room", "/runs/one/metrics.jsonl"))
    verb = "read or written" if number == errno.EIO else "written"
    assert (code, sentence) == (1, f"the file /runs/one/metrics.jsonl cannot be {verb} (no room)")


def test_json_that_cannot_be_written_is_an_error_and_progress_is_not(monkeypatch):
    with open("/dev/full", "w") as full:
        stream = console.rewrap_stream(full)
        monkeypatch.setattr("sys.stdout", stream)
        print("progress", flush=True)
        with pytest.raises(OSError, match="No space left"):
            console.print_json({"a": 1})
        stream.buffer.raw.drops_errors = True  # what is left in the buffer


def test_json_that_nobody_reads_any_more_is_no_error(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        stream = console.rewrap_stream(pipe)
        monkeypatch.setattr("sys.stdout", stream)
        console.print_json({"a": 1})


def test_ctrl_c_leaves_jupyterlab_the_time_to_end(monkeypatch, tmp_path):
    waits = []

    class Server:
        def __init__(self, command):
            pass

        def wait(self):
            waits.append(1)
            if len(waits) < 3:  # Ctrl-C, and once more
                raise KeyboardInterrupt
            return 5

    monkeypatch.setattr(reports.subprocess, "Popen", Server)
    monkeypatch.setattr(
        "chunk_grpo.reporting.widgets.write_lab_notebook", lambda run, folder: "x.ipynb"
    )
    monkeypatch.setattr("chunk_grpo.reporting.widgets.lab_command", lambda file, options: [])
    answer = CliRunner().invoke(main.app, ["lab", str(tmp_path)])
    assert answer.exit_code == 5 and len(waits) == 3


SCORES = "`scores` must be a mapping of at least two methods to finite numbers; got"
TABLE = {"id": "one", "paper": "p", "scores": {"flow": 1.0, "mix": 2.0}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"scores": {"flow": 1.0, "mix": float("nan")}}], SCORES),
        ([{"scores": {"flow": 1.0, "mix": float("inf")}}], SCORES),
        ([{"scores": {"flow": True, "mix": 2.0}}], SCORES),
        ([{"scores": {"flow": "3", "mix": 2.0}}], SCORES),
        ([{}, {}], "`id` must be unique among the tables; got one twice"),
    ],
)
def test_a_published_table_has_finite_numbers_and_a_name_of_its_own(tmp_path, changes, words):
    file = tmp_path / "tables.json"
    file.write_text(json.dumps({"tables": [TABLE | change for change in changes]}))
    with pytest.raises(InputError, match=words):
        read_published_tables(file)


def test_whole_numbers_and_copied_methods_are_read(tmp_path):
    file = tmp_path / "tables.json"
    table = TABLE | {"scores": {"flow": 1, "mix": 2}, "copied": ["mix"]}
    file.write_text(json.dumps({"tables": [table]}))
    (read,) = read_published_tables(file)
    assert read.scores == {"flow": 1.0, "mix": 2.0} and read.copied == ("mix",)


def test_a_list_of_wrong_numbers_is_told_what_each_must_be():
    with pytest.raises(
        InputError,
        match=r"`seeds` of .* must be a list in which each entry is a whole number from 0; got \[-1\]",
    ):
        sample_run(Path("nowhere"), ["a star"], seeds=[-1])


@pytest.mark.parametrize("temperature", [1.0, 0.05, 0.01, 1e-4])
def test_a_low_temperature_keeps_every_chunk_possible(temperature):
    weights = torch.tensor([[0.02, 0.03, 0.06, 0.89], [0.0, 0.3, 0.3, 0.4]])
    tempered = tempered_probabilities(weights, temperature=temperature)
    assert ((tempered > 0) == (weights > 0)).all() and torch.allclose(
        tempered.sum(1), torch.ones(2)
    )
    uniforms = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    chosen = sample_without_replacement(tempered, 2, uniforms)
    assert 0 not in chosen[1]  # the chunk of weight 0
    if temperature < 1:
        assert chosen[0, 1] == 3


def test_an_infinite_background_is_bad_input():
    record = {"prompt": "make the star red", "objects": [], "background": float("inf")}
    with pytest.raises(InputError):
        edits.read_edit_record(record)
