"""Paths that a command cannot use: folders that a run replaces, pipes, and a list of one prompt."""

import os
import shutil
import signal

import pytest
from commands import call, run

from chunk_grpo import InputError
from chunk_grpo.cli.evaluation import print_means
from chunk_grpo.core import files, imports, validation
from chunk_grpo.evaluation import judge
from chunk_grpo.reward_serving import placement, server

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
        files.hash_file,
        validation.read_yaml_file,
    ):
        with pytest.raises(InputError, match="regular file"):
            read(tmp_path / "pipe")
    with pytest.raises(InputError, match="can be written to"):
        files.lock_log(tmp_path / "pipe")


@pytest.fixture
def no_wait():
    """End a test that waits for the writer of a pipe."""

    def fail(number, frame):
        raise TimeoutError("a pipe was opened")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("field", ["method", "reward", "family", "chunks", "surrogate"])
def test_pipe_instead_of_a_code_file_is_rejected_before_it_is_opened(field, tmp_path, no_wait):
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(InputError, match=rf"`{field}`: .*pipe\.py must be a regular file"):
        imports.import_callable(f"{tmp_path}/pipe.py:Rank", field)


def test_pipe_as_method_reward_or_family_ends_a_command_with_one_sentence(tmp_path, no_wait):
    os.mkfifo(tmp_path / "pipe.py")
    for field in ("method", "reward", "family"):
        done = call(
            *["train", *TINY, f"{field}={tmp_path}/pipe.py:Rank"],
            *["--no-report", "--out", tmp_path / "run"],
        )
        assert done.returncode == 2 and f"`{field}`: " in done.stderr
        assert "must be a regular file" in done.stderr and not (tmp_path / "run").exists()


def test_pipes_in_the_options_of_rewards_are_rejected_before_they_are_opened(tmp_path, no_wait):
    for name in ("list.txt", "rubric.txt", "code.py"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=r"`environment`: .*list\.txt must be a regular file"):
        placement.locate_environment(str(tmp_path / "list.txt"))
    with pytest.raises(InputError, match=r"`rubric`: .*rubric\.txt must be a regular file"):
        judge._read_question(str(tmp_path / "rubric.txt"))
    with pytest.raises(ValueError, match=r"code\.py must be a regular file"):
        server.import_loader(f"{tmp_path}/code.py:red")


def test_means_of_one_prompt_are_printed_without_interval(capsys):
    row = {"mean": 0.5, "se": None, "lo": None, "hi": None, "n": 1}
    known = {"mean": 0.5, "se": 0.1, "lo": 0.4, "hi": 0.6, "n": 2}
    print_means(
        {"n_prompts": 1, "images_per_prompt": 1, "rewards": {"red": {"base": row, "plain": known}}}
    )
    said = capsys.readouterr().out
    assert "0.5000 (one prompt gives no interval)" in said and "0.5000 (0.4000 to 0.6000)" in said
