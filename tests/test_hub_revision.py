"""A run of a model on the hub keeps the commit with which it began, whatever the owner pushes afterwards."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from chunk_grpo import InputError
from chunk_grpo.core.files import write_json
from chunk_grpo.core.settings import load_settings, method_label
from chunk_grpo.evaluation import parts
from chunk_grpo.models import inputs
from chunk_grpo.models.cost import find_model_config
from chunk_grpo.reporting.model_card import card_data, is_hub_id, model_card
from chunk_grpo.reporting.reports import group_runs
from chunk_grpo.rewards import scorers
from chunk_grpo.runs import run_folder
from chunk_grpo.studies import study
from chunk_grpo.studies.design import Trial, comparable_settings
from chunk_grpo.training.state import prepare_state

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A cache of the hub that holds the first commit of someone/small; its folder is returned."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub/models--someone--small"
    push(folder, FIRST, "first.txt")
    return folder


def push(folder: Path, commit: str, file: str) -> None:
    """Add a commit to the cached repository, as the branch main; it differs from others by a file of the VAE's folder."""
    snapshot = shutil.copytree(inputs.fetch_model("pocket"), folder / "snapshots" / commit)
    (snapshot / "vae" / file).write_text("new")
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_text(commit)


def forget_commit(run: Path, model: str) -> None:
    """Make a run one of an older version, which recorded no commit."""
    content = {k: v for k, v in run_folder.read_run_info(run).items() if k != "requested_model"}
    write_json(run / "run.json", content | {"settings": content["settings"] | {"model": model}})


def test_a_run_is_resumed_with_the_commit_with_which_it_began(repository, tmp_path):
    settings = load_settings("pocket/tiny", {"model": "someone/small"})
    run = run_folder.create_run(settings, tmp_path / "run")
    assert run_folder.read_run_settings(run).model == f"someone/small@{FIRST}"

    push(repository, SECOND, "second.txt")
    run_folder.create_run(settings, run, resume=True)
    recorded = run_folder.read_run_settings(run)
    assert recorded.model == f"someone/small@{FIRST}"
    run_folder.create_run(recorded, run, resume=True)
    run_folder.check_run_inputs(run, recorded)
    assert inputs.fetch_model(recorded.model).name == FIRST

    new = run_folder.create_run(settings, tmp_path / "new")
    assert run_folder.read_run_settings(new).model == f"someone/small@{SECOND}"
    other = load_settings(settings, {"model": f"someone/small@{SECOND}"})
    with pytest.raises(InputError, match=f"`model` must stay .*{FIRST}"):
        run_folder.create_run(other, run, resume=True)


def test_a_run_of_a_branch_is_resumed_with_the_settings_that_started_it(repository, tmp_path):
    settings = load_settings("pocket/tiny", {"model": "someone/small@main"})
    run = run_folder.create_run(settings, tmp_path / "run")
    push(repository, SECOND, "second.txt")
    run_folder.create_run(settings, run, resume=True)
    assert run_folder.read_run_settings(run).model == f"someone/small@{FIRST}"
    other = load_settings(settings, {"model": "someone/small@v2"})
    with pytest.raises(InputError, match=f"`model` must stay .*{FIRST}"):
        run_folder.create_run(other, run, resume=True)


def test_all_trials_of_a_study_have_one_commit(repository, tmp_path):
    """A push between two trials changes nothing, neither in this call nor in a later one."""
    settings = load_settings("pocket/tiny", {"model": "someone/small"})
    trials = [
        Trial("study", arm, 0, settings, evaluation={}, splits=0) for arm in ("steps", "chunk")
    ]
    pinned = study._pin_models(trials, tmp_path)
    assert {trial.settings.model for trial in pinned} == {f"someone/small@{FIRST}"}
    run_folder.create_run(pinned[0].settings, tmp_path / trials[0].name)
    push(repository, SECOND, "second.txt")
    later = study._pin_models(trials, tmp_path)
    assert {trial.settings.model for trial in later} == {f"someone/small@{FIRST}"}
    run_folder.create_run(later[0].settings, tmp_path / trials[0].name, resume=True)
    # The rows of a study remember the commit, too, if the folders were deleted.
    row = {"settings": pinned[0].settings.model_dump(mode="json")}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/results.jsonl").write_text(json.dumps(row) + "\n")
    again = study._pin_models(trials, tmp_path / "rows")
    assert {trial.settings.model for trial in again} == {f"someone/small@{FIRST}"}


def test_a_trial_that_an_older_version_began_goes_on(repository, tmp_path):
    settings = load_settings("pocket/tiny", {"model": "someone/small"})
    trial = Trial("study", "steps", 0, settings, evaluation={}, splits=0)
    run = run_folder.create_run(settings, tmp_path / trial.name)
    forget_commit(run, "someone/small")
    (pinned,) = study._pin_models([trial], tmp_path)
    run_folder.create_run(pinned.settings, run, resume=True)
    assert run_folder.read_run_settings(run).model == "someone/small"


def test_runs_of_one_model_are_one_group_whatever_their_commits_are():
    commits = ("someone/small", f"someone/small@{FIRST}", f"someone/small@{SECOND}")
    runs = [load_settings("pocket/tiny", {"model": model}) for model in commits]
    assert {group for group, _, _ in group_runs(runs)} == {method_label(runs[0])}


def test_a_pull_request_of_a_known_model_is_not_known():
    flux = "black-forest-labs/FLUX.1-dev"
    assert run_folder.is_known_model(flux) and run_folder.is_known_model(f"{flux}@{FIRST}")
    assert not run_folder.is_known_model(f"{flux}@refs/pr/5")
    assert not run_folder.is_known_model(f"{flux}@main")


def test_an_older_run_without_a_commit_is_still_resumed(repository, tmp_path):
    settings = load_settings("pocket/tiny", {"model": "someone/small"})
    run = run_folder.create_run(settings, tmp_path / "run")
    forget_commit(run, "someone/small")
    run_folder.create_run(settings, run, resume=True)
    assert run_folder.read_run_settings(run).model == "someone/small"
    push(repository, SECOND, "second.txt")
    with pytest.raises(InputError, match="`model` must be the same"):
        run_folder.create_run(settings, run, resume=True)


def test_a_branch_becomes_its_commit_and_an_unknown_revision_is_named(repository, tmp_path):
    assert inputs.pin_revision("someone/small@main") == f"someone/small@{FIRST}"
    with pytest.raises(InputError, match="model: 'someone/small@v2' is neither a folder nor"):
        inputs.fetch_model("someone/small@v2")
    with pytest.raises(InputError, match="model: 'someone/small@' is neither a folder nor"):
        inputs.fetch_model("someone/small@")
    folder = tmp_path / "mine/small@2"
    folder.mkdir(parents=True)
    assert inputs.split_revision(str(folder)) == (str(folder), "")
    assert inputs.pin_revision(str(folder)) == str(folder)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_card_loads_the_commit_that_was_trained(repository, tmp_path, rank):
    settings = load_settings("pocket/tiny", {"model": "someone/small", "lora_rank": rank})
    run = run_folder.create_run(settings, tmp_path / "run")
    settings = run_folder.read_run_settings(run)
    assert is_hub_id(settings.model)
    assert card_data(settings).base_model == "someone/small"
    card = model_card(run, settings, run / "final", name="mine")
    assert "https://huggingface.co/someone/small)" in card
    assert f"Base model: someone/small at revision {FIRST}." in card
    assert "base = 'someone/small'" in card
    loads = [line for line in card.splitlines() if "from_pretrained(base" in line]
    assert len(loads) == 1 and f"revision='{FIRST}')" in loads[0]


def test_a_revision_changes_neither_the_sizes_nor_the_rows_of_a_study():
    flux = "black-forest-labs/FLUX.1-dev"
    assert find_model_config(f"{flux}@{FIRST}") == find_model_config(flux)
    rows = [comparable_settings({"model": model}) for model in (flux, f"{flux}@{FIRST}")]
    assert rows[0] == rows[1]


REWARD = """
from chunk_grpo.rewards.scorers import fetch_hub_file


class Constant:
    def __init__(self, weights="people/scores"):
        self.score = float(fetch_hub_file("weights", weights, "score.txt", weights).read_text())

    def __call__(self, images, prompts):
        return [self.score] * len(images)
"""


def test_a_run_keeps_the_commits_of_its_rewards(tmp_path, monkeypatch):
    """When it is resumed or evaluated after a push, the scores are still those of the same weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(scorers, "_hub_commits", {})
    folder = tmp_path / "hub/models--people--scores"

    def push_score(commit, score):
        """Add a commit with a score to the cached repository, as the branch main."""
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "score.txt").write_text(score)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs/main").write_text(commit)

    def load_score(run):
        """Return the score of a run's reward."""
        state = prepare_state(run_folder.read_run_settings(run), run)
        return state.rewards[name](range(1), ["a star"])[0]

    push_score(FIRST, "1")
    (tmp_path / "constant.py").write_text(REWARD)
    name = f"{tmp_path / 'constant.py'}:Constant"
    values = {"reward": name, "eval_rewards": [], "device": "cpu"}
    run = run_folder.create_run(load_settings("pocket/tiny", values), tmp_path / "run")
    assert load_score(run) == 1
    assert run_folder.read_run_info(run)["reward_commits"] == {"people/scores": FIRST}

    push_score(SECOND, "2")
    assert load_score(run) == 1
    evaluated = parts.load_scorers(run_folder.read_run_settings(run), run)
    assert evaluated[name](range(1), ["a star"]) == [1.0]

    new = run_folder.create_run(load_settings("pocket/tiny", values), tmp_path / "new")
    assert load_score(new) == 2, "a run in the same process leaves no commits to the next"
    assert load_score(run) == 1
    values["reward_options"] = {name: {"weights": f"people/scores@{FIRST}"}}
    chosen = run_folder.create_run(load_settings("pocket/tiny", values), tmp_path / "chosen")
    assert load_score(chosen) == 1
