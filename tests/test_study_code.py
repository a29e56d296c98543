"""The plan of a study and the code that its arms name: what was run is what was committed, and no file forgets it."""

import json
import os
import shutil
import subprocess
from concurrent.futures import Future
from pathlib import Path

import pytest
import small_study
from commands import run

from chunk_grpo import InputError
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.studies import design, pilot, study

METHOD = """from chunk_grpo.training.method import Method

class Rank(Method):
    def advantages(self, scores, weights):
        return super().advantages(scores, weights).sign()
"""
RED = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
STUDY = """
title: a small study
question: does a rank do?
seeds: 1
reference: steps
outcome: my_red.py:red
arms: {steps: {chunks: steps}, ranks: {method: my_rank.py:Rank}}
evaluation: {eval_images: 2, eval_rewards: [my_red.py:red]}
"""


@pytest.fixture
def home(tmp_path):
    """A committed study whose arm names a method beside study.yaml, and whose evaluation names a reward there."""
    folder = small_study.write(tmp_path / "small")
    (folder / "my_rank.py").write_text(METHOD)
    (folder / "my_red.py").write_text(RED)
    (folder / "study.yaml").write_text(STUDY)
    small_study.commit(folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Somebody who stands in another folder than the study's."""
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))


class Begun:
    """Trials whose run folders are made, and which end at once unless they are only to begin."""

    concurrency_text = "at once"

    def __init__(self, most=99, ends=True):
        self.left, self.ends = most, ends

    def prepare_slots(self, out, unfinished):
        return 1

    def submit(self, trial, out, slot):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        run = study.prepare_trial(trial, out)
        if not self.ends:
            raise KeyboardInterrupt
        note = read_json(run / "run.json")
        scores = {"base": {"my_red.py:red": [0.5]}, "plain": {"my_red.py:red": [0.625]}}
        code = trial.code_hashes()
        row = read_json(run / "trial.json") | {
            "settings": note["settings"],
            "scores": scores,
            "plan": note["plan"],
        }
        row |= {name: note[name] for name in ("model_sha256", "prompts_sha256")} | (
            {"code": code} if code else {}
        )
        write_json(run / "row.json", row)
        done = Future()
        done.set_result((row, 1.0))
        return done

    def close(self):
        pass


def go(home, out, trials=99, ends=True, **marks):
    """Run a study until so many trials are made."""
    try:
        return study.run_study(home, out, log=str, pool=Begun(trials, ends), **marks)
    except KeyboardInterrupt:
        return []


def lines(out) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def git(home, *words, **more):
    who = (
        "-c",
        "user.name=a test",
        "-c",
        "user.email=test@localhost",
        "-c",
        "commit.gpgsign=false",
    )
    return subprocess.run(
        ["git", "-C", home, *who, *words], check=True, capture_output=True, **more
    )


def test_code_beside_study_yaml_is_found_from_anywhere(home):
    steps, ranks = design.expand_trials(home)
    assert (
        ranks.settings.method == f"{home / 'my_rank.py'}:Rank" and steps.settings.method == "chunk"
    )
    assert (
        ranks.evaluation["eval_rewards"]
        == [f"{home / 'my_red.py'}:red"]
        == [design.load_study(home).outcome]
    )
    assert {name.rpartition("/")[2] for name in ranks.code_hashes()} == {
        "my_rank.py:Rank",
        "my_red.py:red",
    }


@pytest.mark.parametrize(
    "file, text, words",
    [
        (
            "my_rank.py",
            "import no_such_package_at_all\n",
            ["arm ranks", "`method`", "no_such_package_at_all"],
        ),
        (
            "my_rank.py",
            METHOD + "        raise KeyError('x')\n    chunks = None\n",
            ["arm ranks", "`method`", "`chunks`"],
        ),
        ("my_red.py", "red = 3\n", ["arm steps", "`eval_rewards`", "a function or class"]),
    ],
)
def test_code_of_an_arm_is_checked_before_the_first_trial(home, tmp_path, file, text, words):
    (home / file).write_text(text)
    small_study.commit(home)
    with pytest.raises(InputError) as caught:
        go(home, tmp_path / "out")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["my_rank.py", "my_red.py"])
def test_rows_of_other_code_are_not_taken_as_finished(home, tmp_path, file):
    out = tmp_path / "a/out"
    assert (
        [row["arm"] for row in go(home, out)]
        == ["steps", "ranks"]
        == [row["arm"] for row in go(home, out, 0)]
    )
    assert all(row["plan"]["commit"] and not row["plan"]["unplanned"] for row in lines(out))
    (home / file).write_text((home / file).read_text() + "# another\n")
    small_study.commit(home)
    edited = {"my_rank.py": ["ranks"], "my_red.py": ["steps", "ranks"]}[file]
    found = {
        trial.arm: design.find_finished_row(trial, out, lines(out))
        for trial in design.expand_trials(home)
    }
    assert [arm for arm, row in found.items() if row is None] == edited
    with pytest.raises(
        InputError, match="the plan of a study must stay as it was when its first trial began"
    ):
        go(home, out)
    if file == "my_rank.py":
        with pytest.raises(
            InputError, match="ranks-0 .* was begun with other code: `method`, .* has changed"
        ):
            go(home, out, unplanned=True)
    assert [
        row["code"] != {} for row in go(home, tmp_path / "b/out", finished_rows=lines(out))
    ] == [
        True,
        True,
    ]


def test_a_study_without_code_has_the_plan_that_it_had(tmp_path):
    import hashlib

    home = small_study.write(tmp_path / "plain")
    texts = [(home / name).read_bytes() for name in ("study.yaml", "base.yaml")]
    assert design.plan_record(home)["sha256"] == hashlib.sha256(b"\0".join(texts)).hexdigest()
    assert design.expand_trials(home)[0].code_hashes() == {}
    assert "code" not in go(home, tmp_path / "out")[0]


def hide(home, mark):
    (home / "study.yaml").write_text(
        (home / "study.yaml").read_text().replace("seeds: 1", "seeds: 2")
    )
    git(home, "update-index", mark, "study.yaml")


def link(home, name, place):
    place.parent.mkdir(exist_ok=True)
    (home / name).rename(place)
    (home / name).symlink_to(place)
    small_study.commit(home)


def filtered(home):
    git(home, "config", "filter.same.clean", "sed -e s/seeds.*/seeds:_1/ -e s/_/\\ /")
    (home / ".gitattributes").write_text("study.yaml filter=same\n")
    (home / "study.yaml").write_text(
        (home / "study.yaml").read_text().replace("seeds: 1", "seeds: 2")
    )
    small_study.commit(home)
    assert not git(home, "status", "--porcelain").stdout


def replaced(home):
    old = git(home, "rev-parse", "HEAD:study.yaml", text=True).stdout.strip()
    (home / "study.yaml").write_text(
        (home / "study.yaml").read_text().replace("seeds: 1", "seeds: 2")
    )
    new = git(home, "hash-object", "-w", "study.yaml", text=True).stdout.strip()
    git(home, "replace", old, new)


def edit(home, name, commit=False):
    (home / name).write_text((home / name).read_text() + "\n# another\n")
    if commit:
        small_study.commit(home)


def imported(home, place):
    (home / "my_rank.py").write_text(f"import sys\nsys.path.append({str(place)!r})\n" + METHOD)
    (home / "my_rank.py").write_text("import a_far_helper_of_ranks\n" + METHOD)
    small_study.commit(home)
    place.mkdir(exist_ok=True)
    (place / "a_far_helper_of_ranks.py").write_text("")


WAYS = {
    "assume-unchanged": (
        lambda home, far: hide(home, "--assume-unchanged"),
        "study.yaml was changed since its commit",
    ),
    "skip-worktree": (
        lambda home, far: hide(home, "--skip-worktree"),
        "study.yaml was changed since its commit",
    ),
    "study.yaml a link": (
        lambda home, far: link(home, "study.yaml", far / "s.yaml"),
        "study.yaml is a symbolic link",
    ),
    "base.yaml a link": (
        lambda home, far: link(home, "base.yaml", far / "b.yaml"),
        "base.yaml is a symbolic link",
    ),
    "a link inside": (
        lambda home, far: link(home, "base.yaml", home / "b.yaml"),
        "base.yaml is a symbolic link",
    ),
    "code a link": (
        lambda home, far: link(home, "my_rank.py", far / "r.py"),
        "r.py lies outside of the study's git",
    ),
    "a clean filter": (lambda home, far: filtered(home), "study.yaml was changed since its commit"),
    "a replaced object": (
        lambda home, far: replaced(home),
        "study.yaml was changed since its commit",
    ),
    "edited code": (
        lambda home, far: edit(home, "my_rank.py"),
        "my_rank.py was changed since its commit",
    ),
    "edited reward": (
        lambda home, far: edit(home, "my_red.py"),
        "my_red.py was changed since its commit",
    ),
    "code not committed": (
        lambda home, far: (
            git(home, "rm", "-q", "--cached", "my_red.py") and git(home, "commit", "-qm", "x")
        ),
        "my_red.py is not committed",
    ),
    "only staged": (
        lambda home, far: (edit(home, "study.yaml"), git(home, "add", "study.yaml")),
        "was changed since",
    ),
    "a helper elsewhere": (
        imported,
        "a_far_helper_of_ranks.py lies outside of the study's git repository",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_claims_no_plan_that_was_not_committed(home, tmp_path, monkeypatch, way):
    change, words = WAYS[way]
    assert design.plan_record(home)["commit"]
    change(home, tmp_path / "far")
    monkeypatch.syspath_prepend(str(tmp_path / "far"))
    with pytest.raises(
        InputError, match="the plan of a study must be committed before its first trial"
    ) as caught:
        go(home, tmp_path / "out")
    assert words in str(caught.value) and not (tmp_path / "out").exists()
    record = design.plan_record(home, unplanned=True)
    assert record["commit"] is None and record["unplanned"]


def test_the_environment_of_git_makes_no_plan(home, tmp_path, monkeypatch):
    """A hook, or somebody, may have set where git looks."""
    edit(home, "study.yaml")
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", home, other], check=True)
    small_study.commit(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(home))
    with pytest.raises(InputError, match="study.yaml was changed since its commit"):
        design.plan_record(home)


def test_a_shipped_study_that_was_edited_is_no_plan(tmp_path, monkeypatch):
    import hashlib
    from base64 import urlsafe_b64encode
    from importlib import metadata

    home = tmp_path / "site/studies/mine"
    home.parent.mkdir(parents=True)
    small_study.write(home)
    subprocess.run(["rm", "-rf", home / ".git"], check=True)
    monkeypatch.setattr(design, "STUDIES_FOLDER", home.parent)
    sums = {
        name: urlsafe_b64encode(hashlib.sha256((home / name).read_bytes()).digest())
        .decode()
        .rstrip("=")
        for name in ("study.yaml", "base.yaml")
    }

    class Listed:
        def __init__(self, name):
            self.name, self.hash = name, metadata.FileHash(f"sha256={sums[name]}")

        def locate(self):
            return home / self.name

    monkeypatch.setattr(design.importlib.metadata, "files", lambda name: [*map(Listed, sums)])
    assert design.plan_record(home)["commit"].startswith("chunk-grpo ")
    edit(home, "study.yaml")
    with pytest.raises(InputError, match="study.yaml was changed since it was installed"):
        design.plan_record(home)


def test_a_plan_is_kept_where_trial_json_is_deleted(home, tmp_path):
    out = tmp_path / "out"
    go(home, out, 1, ends=False, unplanned=True)  # begun, not finished
    assert (out / "steps-0/trial.json").is_file() and not (out / "steps-0/row.json").exists()
    (out / "steps-0/trial.json").unlink()
    go(home, out)
    assert [row["plan"]["unplanned"] for row in lines(out)] == [True, False]
    for trial in ("steps-0", "ranks-0"):
        (out / trial / "trial.json").unlink()
    edit(home, "my_rank.py", commit=True)
    with pytest.raises(
        InputError, match="the plan of a study must stay as it was when its first trial began"
    ):
        go(home, out)


@pytest.mark.parametrize(
    "gone",
    [
        ["peeks.json"],
        ["peeks.json", "results.jsonl"],
        ["peeks.json", "steps-0/row.json"],
        ["peeks.json", "steps-0/trial.json", "results.jsonl"],
    ],
    ids=" ".join,
)
def test_a_look_is_kept_where_files_are_deleted(home, tmp_path, gone):
    out = tmp_path / "out"
    go(home, out, arms=["steps"], peek=True)
    assert [row["plan"]["peeks"] for row in lines(out)] == [[1]]
    for name in gone:
        (out / name).unlink()
    go(home, out)
    assert [row["plan"]["peeks"] for row in lines(out)] == [[1], [1]]


def test_tuning_finds_the_code_of_arms(home, tmp_path):
    (tmp_path / "tune.txt").write_text("a star a ring a cross\n")
    tuning = f"tune: {{learning_rate: [0.001, 0.002]}}\ntune_prompts: {tmp_path / 'tune.txt'}\n"
    text = STUDY.replace("evaluation:", f"{tuning}evaluation:")
    (home / "study.yaml").write_text(text)
    made = pilot.write_tuning_study(home, tmp_path / "out/study")
    assert {trial.settings.method for trial in design.expand_trials(made)} == {
        "chunk",
        f"{home / 'my_rank.py'}:Rank",
    }


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ("tune: {learning_rate: [0.001, 0.002]}", "must share no prompt with `eval_prompts`"),
        ("tune: {learning_rate: [fast]}\ntune_prompts: tune.txt", "`tune` of study.yaml must have"),
    ],
)
def test_a_tuning_that_cannot_be_leaves_no_file(home, tmp_path, monkeypatch, tuning, words):
    """pocket:validation has one of the study's own prompts; a learning rate is no word."""
    monkeypatch.chdir(tmp_path)
    Path("tune.txt").write_text("a star a ring a cross\n")
    (home / "study.yaml").write_text(STUDY.replace("evaluation:", f"{tuning}\nevaluation:"))
    with pytest.raises(InputError, match=words):
        pilot.tune_study(home, tmp_path / "out")
    with pytest.raises(InputError, match="`processes` must be at least 1; got 0"):
        pilot.tune_study(home, tmp_path / "out", processes=0)
    assert not (tmp_path / "out").exists()


def test_rows_are_found_by_the_content_of_the_code_and_not_by_its_folder(home, tmp_path):
    """A copy of the study elsewhere runs nothing again; another content does."""
    rows = go(home, tmp_path / "out", unplanned=True)
    copy = shutil.copytree(home, tmp_path / "elsewhere")
    assert go(copy, tmp_path / "apart/out", trials=0, finished_rows=rows, unplanned=True) == [
        row | {"study": "elsewhere"} for row in rows
    ]
    (copy / "my_rank.py").write_text(METHOD + "\n# another\n")
    assert not go(copy, tmp_path / "again/out", trials=0, finished_rows=rows, unplanned=True)


@pytest.mark.slow
def test_a_study_with_code_of_its_own_runs_to_its_rows(home, tmp_path):
    rows = study.run_study(home, tmp_path / "out", 1, log=str)
    assert [sorted(name.partition(": ")[0] for name in row["code"]) for row in rows] == [
        ["eval_rewards"],
        ["eval_rewards", "method"],
    ]
    assert (
        os.listdir(tmp_path / "out/ranks-0/code") == ["my_rank.py"]
        and Path("my_rank.py").exists() is False
    )


def test_a_new_study_is_written_with_the_code_of_its_arms(tmp_path):
    """The command writes both files and copies the code; what cannot be a study leaves nothing."""
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.training.method import Method\n\n\nclass Rank(Method):\n    pass\n"
    )
    words = ["study", "ranks", "--new", "--arms", "steps,mine.py:Rank", "--base", "pocket/tiny"]
    said = run(*words, cwd=tmp_path)
    assert "ranks/study.yaml" in said
    made = design.load_study(tmp_path / "ranks")
    assert made.arms == {"steps": {"method": "steps"}, "Rank": {"method": "mine.py:Rank"}}
    assert made.reference == "steps" and made.tune_prompts == "pocket:validation"
    (tmp_path / "mine.py").unlink()
    methods = {
        trial.settings.method for trial in design.expand_trials(tmp_path / "ranks", seeds=[0])
    }
    assert methods == {"chunk", f"{tmp_path / 'ranks/mine.py'}:Rank"}
    wrong = {
        "ranks": "must be a new folder",
        "one": "must name at least two methods",
        "twice": "must name different methods; got steps twice",
        "none": "chunkk",
    }
    arms = {"ranks": "steps,chunk", "one": "steps", "twice": "steps,steps", "none": "steps,chunkk"}
    for name, sentence in wrong.items():
        said = run("study", name, "--new", "--arms", arms[name], cwd=tmp_path, code=2)
        assert sentence in said
        assert name == "ranks" or not (tmp_path / name).exists()
