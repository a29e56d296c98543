"""A run goes on meaning its own model and prompts: from another folder, and after they were changed."""

import json
import os
import shutil

import pytest
from commands import call, run

from chunk_grpo import pocket
from chunk_grpo.core import settings
from chunk_grpo.runs import run_folder

MINE = "a red star\na blue square\ntwo circles\na green star\n"
OTHER = "three stars\nfour squares\na blue circle\ntwo squares\n"
TINY = [
    "iterations=1",
    "eval_steps=1",
    "hybrid_split=1",
    "eval_images=1",
    "prompts_per_iteration=2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run that names all its inputs from the working folder."""
    home = tmp_path_factory.mktemp("home") / "A"
    home.mkdir()
    (home / "mine.txt").write_text(MINE)
    shutil.copytree(pocket.pocket_model_path(), home / "model")
    run(
        "train",
        "pocket/tiny",
        "model=model",
        "prompts=mine.txt",
        "eval_prompts=mine.txt",
        *TINY,
        "--out",
        "run",
        "--no-report",
        cwd=home,
    )
    return home


@pytest.fixture
def elsewhere(trained, tmp_path):
    """Its copy, with another folder that has another list and another model of the same names."""
    home = shutil.copytree(trained, tmp_path / "A")
    note = json.loads((home / "run" / "run.json").read_text())
    for name in ("model", "prompts", "eval_prompts"):
        note["settings"][name] = note["settings"][name].replace(str(trained), str(home))
    (home / "run" / "run.json").write_text(json.dumps(note))
    run_folder.record_own_run(home / "run")
    (tmp_path / "B").mkdir()
    (tmp_path / "B" / "mine.txt").write_text(OTHER)
    shutil.copytree(home / "model", tmp_path / "B" / "model")
    (tmp_path / "B" / "model" / "model_index.json").write_text("{}")
    return home


def sentence(done) -> str:
    """What a refused command says, which is one line."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("chunk-grpo: ")]
    return line


def test_a_run_notes_its_inputs_from_the_root(trained):
    settings = run_folder.read_run_settings(trained / "run")
    assert (settings.model, settings.prompts, settings.eval_prompts) == (
        str(trained / "model"),
        *[str(trained / "mine.txt")] * 2,
    )


def test_a_run_is_evaluated_on_its_own_prompts_from_another_folder(elsewhere):
    other = elsewhere.parent / "B"
    run("evaluate", "../A/run", cwd=other)
    records = run_folder.read_evaluation_records(elsewhere / "run")
    assert {r["prompt"] for r in records} == set(MINE.splitlines())
    run("sample", "../A/run", "a red star", "--arm", "plain", "--out", "images", cwd=other)
    run("export", "../A/run", "exported", cwd=other)
    assert (other / "exported" / "README.md").is_file()


COMMANDS = {
    "evaluate": ["evaluate", "run"],
    "sample": ["sample", "run", "a red star", "--out", "new"],
    "export": ["export", "run", "new"],
    "plan": ["plan", "--run", "run", "--rate", "1"],
    "benchmark": ["evaluate", "run", "--benchmark", "pocket:test"],
    "profile": ["profile", "--run", "run"],
    "resume": [
        "train",
        "pocket/tiny",
        "model=model",
        "prompts=mine.txt",
        "eval_prompts=mine.txt",
        *TINY,
        "--out",
        "run",
        "--resume",
    ],
}


def test_a_changed_list_of_prompts_is_rejected(elsewhere):
    (elsewhere / "mine.txt").write_text(OTHER)
    for name in ("evaluate", "plan", "profile", "resume"):
        assert "prompts` must be" in sentence(call(*COMMANDS[name], cwd=elsewhere)), name


def test_a_changed_model_is_rejected(elsewhere):
    file = elsewhere / "model" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"more": 1}))
    for name in ("sample", "export", "benchmark", "resume"):
        assert "`model` must be" in sentence(call(*COMMANDS[name], cwd=elsewhere)), name
    assert not (elsewhere / "new").exists()


def test_a_changed_model_index_is_rejected(elsewhere):
    file = elsewhere / "model" / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_diffusers_version": "0"}))
    assert "`model` must be" in sentence(call(*COMMANDS["evaluate"], cwd=elsewhere))


@pytest.mark.parametrize("gone", ["model", "mine.txt"])
def test_a_missing_input_is_said_in_a_sentence(gone, elsewhere):
    (elsewhere / gone).rename(elsewhere / "away")
    field = "model" if gone == "model" else "eval_prompts"
    assert f"chunk-grpo: {field}: " in sentence(call("evaluate", "run", cwd=elsewhere))


def test_files_that_were_only_touched_are_the_same(elsewhere):
    for file in [*(elsewhere / "model").rglob("*"), elsewhere / "mine.txt"]:
        os.utime(file, (1, 1))
    run("sample", "run", "a red star", "--arm", "plain", "--out", "new", cwd=elsewhere)


def test_an_evaluation_may_name_other_prompts(elsewhere):
    (elsewhere / "other.tsv").write_text("Prompt\tlong\na cat\tthree stars\n a dog\ttwo circles\n")
    (elsewhere / "mine.txt").unlink()
    run("evaluate", "run", "eval_prompts=other.tsv:long", cwd=elsewhere)
    records = run_folder.read_evaluation_records(elsewhere / "run")
    assert {r["prompt"] for r in records} == {"three stars", "two circles"}


def test_an_older_run_without_the_newer_notes_is_compared_too(elsewhere):
    file = elsewhere / "run" / "run.json"
    note = json.loads(file.read_text())
    del note["inputs"]
    note["settings"] |= {"model": "model", "prompts": "mine.txt", "eval_prompts": "mine.txt"}
    file.write_text(json.dumps(note))
    run_folder.record_own_run(elsewhere / "run")
    shutil.copytree(elsewhere / "model", elsewhere.parent / "B" / "model", dirs_exist_ok=True)
    assert "`eval_prompts` must be" in sentence(
        call("evaluate", "../A/run", cwd=elsewhere.parent / "B")
    )
    run("evaluate", "run", cwd=elsewhere)


def test_plan_shows_what_was_read(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,long\na,a red star\nb,two dogs\nc,two dogs\n")
    said = run(
        "plan",
        "pocket/tiny",
        "prompts=a.csv:long",
        "eval_prompts=gone.txt",
        "--rate",
        "1",
        cwd=tmp_path,
    )
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert (
        "3 prompts from a.csv:long, first 'a red star' and 'two dogs', 1 of them repeated"
        in rows["prompts"]
    )
    assert rows["eval_prompts"].endswith("gone.txt is not on this machine")


def test_rows_of_a_study_are_known_wherever_its_lists_lie(tmp_path, monkeypatch):
    from chunk_grpo.models.inputs import check_and_hash_inputs
    from chunk_grpo.studies.design import Trial, find_finished_row

    (tmp_path / "mine.txt").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run_settings = settings.load_settings(
        "pocket/tiny",
        {"prompts": "mine.txt", "eval_prompts": "mine.txt", "prompts_per_iteration": 2},
    )
    whole = run_settings.model_copy(
        update={name: str(tmp_path / "mine.txt") for name in ("prompts", "eval_prompts")}
    )
    row = {
        "settings": whole.model_dump(mode="json"),
        "evaluation": {},
        "splits": 0,
    } | check_and_hash_inputs(run_settings)
    trial = Trial("study", "arm", 0, run_settings, {}, 0)
    assert find_finished_row(trial, tmp_path, [row]) is not None
    assert find_finished_row(trial, tmp_path, [row | {"prompts_sha256": "0"}]) is None


def test_a_row_of_a_trial_that_started_from_another_adapter_is_not_taken(tmp_path):
    """The path is the same, the values are not."""

    from chunk_grpo.models import adapters, trainable
    from chunk_grpo.models.inputs import check_and_hash_inputs
    from chunk_grpo.studies.design import Trial, find_finished_row

    start = tmp_path / "start"
    changes = {"model": "pocket", "lora_rank": 2, "lora_start": str(start)}
    own = settings.load_settings("pocket/tiny", changes)

    def write_start(seed):
        policy = trainable.load_trainable_policy(
            "pocket", lora_rank=2, seed=seed, resolution=64, max_tokens=12
        )
        trainable.save_trained_weights(policy, start)
        return adapters.hash_adapter(adapters.read_start_adapter(own))

    first, second = (write_start(seed) for seed in (0, 1))
    assert first != second
    trial = Trial("s", "a", 0, own, {}, 0)
    row = {
        "settings": own.model_dump(mode="json"),
        "evaluation": {},
        "splits": 0,
        **check_and_hash_inputs(own),
    }
    assert find_finished_row(trial, tmp_path, [row | {"start_sha256": second}]) is not None
    assert find_finished_row(trial, tmp_path, [row | {"start_sha256": first}]) is None


def test_embeddings_of_another_version_of_transformers_are_not_used(monkeypatch):
    from importlib import metadata

    from chunk_grpo.models import policy, prompt_embeds

    model = policy.load_policy("pocket", resolution=64, max_tokens=12)
    before = prompt_embeds.hash_encoders(model)
    assert prompt_embeds.hash_encoders(model) == before
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    assert prompt_embeds.hash_encoders(model) != before
