"""Places and files that a command cannot use: folders that a run makes anew, pipes, and a list of one prompt."""

import os
import shutil

import pytest
from commands import call, run

from chunk_grpo import InputError
from chunk_grpo.cli.evaluation import print_means
from chunk_grpo.core import files, validation

TINY = [
    "pocket/tiny",
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    out = tmp_path_factory.mktemp("places") / "run"
    run("train", *TINY, "--out", out, "--no-report")
    return out


@pytest.mark.parametrize(
    "words",
    [
        ["export", "RUN", "RUN/evaluation/mine"],
        ["export", "RUN", "RUN/samples/mine"],
        ["sample", "RUN", "a red star", "--out", "RUN/samples/mine"],
        ["train", *TINY, "--no-report", "--out", "RUN/evaluation/another"],
        ["profile", "pocket/tiny", "--json", "RUN/evaluation/profile.json"],
    ],
)
def test_nothing_is_put_where_the_next_evaluation_deletes_it(words, finished):
    before = sorted(finished.rglob("*"))
    done = call(*[word.replace("RUN", str(finished)) for word in words])
    assert done.returncode == 2 and "which its run may replace" in done.stderr
    assert sorted(finished.rglob("*")) == before


def test_watching_a_run_whose_metrics_are_a_pipe_ends_at_once(finished, tmp_path):
    place = shutil.copytree(finished, tmp_path / "run")
    (place / "metrics.jsonl").unlink()
    os.mkfifo(place / "metrics.jsonl")
    done = call("watch", place)
    assert done.returncode == 2 and "must be a regular file" in done.stderr


def test_readers_refuse_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (
        files.read_json,
        files.read_json_lines,
        files.sha256_of,
        validation.read_yaml_file,
    ):
        with pytest.raises(InputError, match="regular file"):
            read(tmp_path / "pipe")
    with pytest.raises(InputError, match="can be written to"):
        files.lock_log(tmp_path / "pipe")


def test_means_of_one_prompt_are_printed_without_interval(capsys):
    row = {"mean": 0.5, "se": None, "lo": None, "hi": None, "n": 1}
    known = {"mean": 0.5, "se": 0.1, "lo": 0.4, "hi": 0.6, "n": 2}
    print_means(
        {"n_prompts": 1, "images_per_prompt": 1, "rewards": {"red": {"base": row, "plain": known}}}
    )
    said = capsys.readouterr().out
    assert "0.5000 (one prompt gives no interval)" in said and "0.5000 (0.4000 to 0.6000)" in said
