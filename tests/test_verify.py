"""`chunk-grpo verify`: a run is repeated from its folder, and what was edited is named."""

import json
import shutil
from pathlib import Path

import pytest
import small_runs
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core import machine
from chunk_grpo.core.files import hash_files, read_json, write_json
from chunk_grpo.core.settings import load_settings
from chunk_grpo.runs import launch, run_folder
from chunk_grpo.runs.verify import repeat_run

FEW = {
    "iterations": 3,
    "images_per_prompt": 2,
    "prompts_per_iteration": 2,
    "steps": 5,
    "chunks": "2,2",
    "eval_count": 1,
    "eval_every": 0,
    "keep_checkpoints": 3,
    "updates_per_iteration": 2,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a finished run in it, and its own cache, so that it is this user's."""
    folder = small_runs.write(tmp_path_factory.mktemp("verify"), **FEW)
    done = call(
        "train",
        "s.yaml",
        "--out",
        "run",
        "--no-report",
        cwd=folder,
        XDG_CACHE_HOME=folder / "cache",
    )
    assert done.returncode == 0, done.stderr
    return folder


def verify(home: Path, *words, code: int = 0, run="run", cache: str = "cache", **more) -> dict:
    """The answer of `chunk-grpo verify --json`."""
    done = call("verify", run, "--json", *words, cwd=home, XDG_CACHE_HOME=home / cache, **more)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout) if code < 2 else {"said": done.stderr}


def copied(home: Path, name: str) -> Path:
    return Path(shutil.copytree(home / "run", home / name, dirs_exist_ok=False))


def test_a_finished_run_verifies_to_the_last_bit(home):
    found = verify(home, "--iterations", 3)
    assert (found["answer"], found["iterations"], found["weights"]) == ("identical", 3, 0.0)
    assert (found["changed"], found["unknown"], found["deviations"], found["differences"]) == (
        [],
        [],
        [],
        {},
    )
    assert sorted(one.name for one in home.iterdir()) == [
        "cache",
        "model",
        "prompts.txt",
        "run",
        "s.yaml",
    ]


def test_the_first_iterations_are_those_of_a_longer_run(home):
    found = verify(home, "--iterations", 1)
    assert (found["answer"], found["iterations"], found["weights"]) == ("identical", 1, None)


def test_other_threads_are_within_tolerance_and_said(home):
    run = copied(home, "threads")
    note = read_json(run / "run.json")
    write_json(run / "run.json", note | {"settings": note["settings"] | {"threads": 2}})
    shutil.rmtree(run / "checkpoints")  # the witness of the setting
    found = verify(home, "--iterations", 1, run=run)
    assert (
        found["answer"] in ("identical", "within tolerance")
        and "no checkpoints" in found["unknown"][0]
    )
    assert found["differences"] == {"threads": [1, 2]}


def spoil(run: Path, name: str) -> str:
    """Edit a file of a run; what has to be said."""
    if name == "run.json":
        note = read_json(run / name)
        write_json(run / name, note | {"settings": note["settings"] | {"learning_rate": 0.5}})
        return "run.json was changed: its setting `learning_rate` is 0.5"
    file = next(run.glob(name))
    content = file.read_bytes()
    if name == "metrics.jsonl":
        lines = [json.loads(line) for line in content.splitlines()]
        lines[1]["reward_mean"] = 9.5
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "metrics.jsonl was changed in line 2, iteration 1"
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return f"{file.relative_to(run)} was changed after it was written"


@pytest.mark.parametrize(
    "names",
    [
        ["run.json"],
        [
            "metrics.jsonl",
            "final/*.safetensors",
            "final/config.json",
            "checkpoints/000002/weights.safetensors",
        ],
    ],
    ids=["settings", "results"],
)
def test_what_was_edited_is_named(home, names):
    run = copied(home, f"edited-{len(names)}")
    wanted = [spoil(run, name) for name in names]
    found = verify(home, "--iterations", 1, run=run, code=1)
    assert found["answer"] == "differs"
    for words in wanted:
        assert any(text.startswith(words) for text in found["changed"]), found["changed"]


def test_other_prompts_are_another_run(home):
    prompts = home / "prompts.txt"
    before = prompts.read_text()
    prompts.write_text(before.replace("two cats", "two dogs"))
    found = verify(home, "--iterations", 1, code=1)
    prompts.write_text(before)
    assert found["changed"] == [
        "the files of the prompts are not those that the run was trained on"
    ]
    assert list(found["differences"]) == ["prompts_sha256"]


def test_an_edited_number_is_found_without_any_witness(home):
    run = copied(home, "alone")
    shutil.rmtree(run / "checkpoints")
    spoil(run, "metrics.jsonl")
    done = call("verify", run, "--iterations", 1, cwd=home, XDG_CACHE_HOME=home / "cache")
    assert done.returncode == 1 and "reward_mean of iteration 1: 9.5 in the run" in done.stdout
    assert "the two runs record no other difference" in done.stdout


def test_a_run_from_elsewhere_runs_no_rewards(home):
    said = verify(home, "--iterations", 1, code=2, cache="another")["said"]
    assert (
        "was not made on this machine, and verifying it would run the code tiny_rewards:red" in said
    )
    assert verify(home, "--iterations", 1, "--trust", cache="another")["answer"] == "identical"


def test_a_link_out_of_the_run_is_not_followed(home):
    run = copied(home, "linked")
    (run / "final" / "config.json").unlink()
    (run / "final" / "config.json").symlink_to(home / "prompts.txt")
    said = verify(home, "--iterations", 1, run=run, code=2)["said"]
    assert "lies outside of it" in said


def test_a_run_notes_its_packages_threads_and_sums(home):
    run = home / "run"
    note = read_json(home / "run" / "run.json")
    assert note["final_sha256"] == hash_files(run / "final")
    assert (note["threads"], note["device"]) == (1, "cpu")
    assert (run / "packages.txt").read_text().splitlines() == machine.installed_packages()


def test_changed_packages_are_noted_when_a_run_goes_on(home):
    run = copied(home, "older")
    (run / "packages.txt").write_text("torch==1.0\n")
    words = ("train", "s.yaml", "iterations=4", "--out", run, "--resume", "--no-report")
    done = call(*words, cwd=home, XDG_CACHE_HOME=home / "cache")
    assert done.returncode == 0, done.stderr
    assert [file.name for file in machine.list_package_files(run)] == [
        "packages.txt",
        "packages-2.txt",
    ]
    found = verify(home, "--iterations", 1, run=run)
    assert found["answer"] == "identical" and found["differences"]["accelerate"][0] is None


def test_a_repetition_that_fails_names_its_reason_and_no_log_that_is_gone(tmp_path, monkeypatch):
    def fails(settings, out, **words):
        run_folder.update_run_json(
            run_folder.create_run(settings, out), status="failed", error="OSError: the disk is full"
        )
        raise launch.TrainingFailed(
            f"training stopped in {out}: OSError: the disk is full; the log is {out}/train.log"
        )

    monkeypatch.setattr(launch, "train", fails)
    with pytest.raises(InputError, match="it failed: OSError: the disk is full$"):
        repeat_run(load_settings("pocket/tiny"), 1, 1, tmp_path / "run")
