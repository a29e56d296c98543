"""Code that a run names and that was edited since: nothing goes on with it, and nothing runs it unasked."""

import json
import shutil
from pathlib import Path

import pytest
from commands import call, run

from chunk_grpo import InputError, evaluate, sample_run
from chunk_grpo.core import settings
from chunk_grpo.core.files import read_json
from chunk_grpo.core.user_code import find_code, find_code_files
from chunk_grpo.evaluation import parts
from chunk_grpo.evaluation.benchmarks import run_benchmark, sample_benchmark
from chunk_grpo.reporting.samples import sample_widget
from chunk_grpo.runs import run_folder
from chunk_grpo.runs.verify import verify_run

FEW = [
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_images=1",
    "prompts_per_iteration=1",
    "steps=3",
    "images_per_prompt=2",
    "updates_per_iteration=1",
    "eval_steps=2",
    "hybrid_split=1",
    "chunks=steps",
    "train_chunks=all",
    "checkpoint_every=1",
    "threads=1",
]
METHOD = """from chunk_grpo.training.method import Method
import mine_helper

class Rank(Method):
    def advantages(self, scores, weights):
        return mine_helper.SIGN * super().advantages(scores, weights)
"""
CHUNKER = "def ones(profile):\n    return [1] * len(profile)\n"
CLIP = "import torch\n\ndef clip(ratio, advantage, clip_range):\n    return ratio * advantage\n"
RED = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
FILES = {
    "mine_method.py": METHOD,
    "mine_helper.py": "SIGN = 1\n",
    "mine_chunks.py": CHUNKER,
    "mine_clip.py": CLIP,
    "mine_reward.py": RED,
    "mine_scorer.py": RED,
}
FILE_OF = {
    "method": "mine_method.py",
    "module mine_helper": "mine_helper.py",
    "chunks": "mine_chunks.py",
    "surrogate": "mine_clip.py",
    "reward": "mine_reward.py",
    "eval_rewards": "mine_scorer.py",
}


def words(ending: str) -> list[str]:
    """Settings on the command line that name every kind of code, as files (.py) or as modules."""
    return [
        f"method=mine_method{ending}:Rank",
        f"chunks=mine_chunks{ending}:ones",
        f"surrogate=mine_clip{ending}:clip",
        f"reward=mine_reward{ending}:red",
        f"eval_rewards=[mine_scorer{ending}:red]",
    ]


def write_code(folder: Path) -> None:
    """Every file of code, as it was in the beginning."""
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)


def mark(folder: Path, name: str) -> None:
    """Make a file leave a mark where it is run."""
    text = (folder / name).read_text()
    (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')\n{text}")


@pytest.fixture(scope="module", params=[".py", ""], ids=["file", "module"])
def stopped(request, tmp_path_factory):
    """A folder with code and a run that names it, and the words that train the run."""
    folder = tmp_path_factory.mktemp("stopped")
    write_code(folder)
    more = [*FEW, *words(request.param)]
    run("train", "pocket/tiny", *more, "--out", "run", "--no-report", cwd=folder)
    return folder, more


def test_a_run_keeps_copies_of_its_code(stopped):
    folder, _ = stopped
    noted = read_json(folder / "run/run.json")["code"]
    assert {Path(one["file"]).name for one in noted.values()} == set(FILES)
    for one in noted.values():
        assert (folder / "run" / one["copy"]).read_bytes() == Path(one["file"]).read_bytes()


def test_a_run_is_not_resumed_with_edited_code(stopped):
    """Every second kind of code where files are named, and the others where modules are."""
    folder, more = stopped
    by_file = "reward=mine_reward.py:red" in more
    words = [*more, "iterations=2", "--out", "run", "--resume", "--no-report"]
    for what in list(FILE_OF)[by_file::2]:
        mark(folder, FILE_OF[what])
        before = (folder / "run/run.json").read_bytes()
        done = call("train", "pocket/tiny", *words, cwd=folder)
        write_code(folder)  # as it was
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        setting = "method" if what.startswith("module") else what
        assert f"`{setting}` must be the same code when a run is resumed" in done.stderr, what
        assert f"{FILE_OF[what]} has changed since the run began" in done.stderr
        assert "run/code" in done.stderr and not (folder / "ran").exists()
        assert (folder / "run/run.json").read_bytes() == before


def test_a_run_is_resumed_with_the_code_that_it_began_with(stopped):
    folder, more = stopped
    run(
        "train",
        "pocket/tiny",
        *more,
        "iterations=2",
        "--out",
        "run",
        "--resume",
        "--no-report",
        cwd=folder,
    )


def test_code_of_a_package_counts_with_what_lies_around_it_and_what_it_imports(
    tmp_path, monkeypatch
):
    inside = tmp_path / "lab_q" / "deep"
    inside.mkdir(parents=True)
    (tmp_path / "lab_q/__init__.py").write_text("raise RuntimeError('imported')\n")
    (inside / "__init__.py").write_text("")
    (inside / "rank.py").write_text(
        "from . import scale\nfrom ..base import f\nimport json, torch, chunk_grpo\n"
    )
    (inside / "scale.py").write_text("import lab_r\n")
    (tmp_path / "lab_q/base.py").write_text("f = 1\n")
    (tmp_path / "lab_r.py").write_text("import lab_q.deep.scale\n")  # a circle
    monkeypatch.chdir(tmp_path)
    found = find_code_files("lab_q.deep.rank:f")
    assert {name: file.name for name, file in found.items()} == {
        "lab_q": "__init__.py",
        "lab_q.deep": "__init__.py",
        "lab_q.deep.rank:f": "rank.py",
        "lab_q.deep.scale": "scale.py",
        "lab_q.base": "base.py",
        "lab_r": "lab_r.py",
    }
    assert "lab_q.deep.no_such:f" not in find_code_files("lab_q.deep.no_such:f")
    assert [*find_code_files("torch.nn:Module")] == [
        "torch",
        "torch.nn:Module",
    ]  # what is installed is not followed
    assert (
        find_code_files("no_such_module:f")
        == find_code_files("no_such.py:f")
        == find_code_files("math:floor")
        == {}
    )
    assert find_code_files("chunk_grpo.theory.chunk_search:paper_rule_chunks") == {}


def test_a_run_without_user_code_notes_none(tmp_path):
    assert find_code(settings.load_settings("pocket/tiny", {"method": "nft"})) == {}
    made = run_folder.create_run(settings.load_settings("pocket/tiny"), tmp_path / "run")
    assert "code" not in read_json(made / "run.json")


def test_a_process_that_starts_again_refuses_code_that_was_edited_meanwhile(tmp_path, monkeypatch):
    from chunk_grpo.runs import launch

    monkeypatch.chdir(tmp_path)
    write_code(tmp_path)
    run_settings = settings.load_settings("pocket/tiny", [*FEW, "method=mine_method.py:Rank"])
    made = run_folder.create_run(run_settings, tmp_path / "run")
    mark(tmp_path, "mine_method.py")
    with pytest.raises(InputError, match="`method` must be the same code"):
        launch.launch_run(made)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two trained runs that name code, by file and by module, and the code."""
    folder = tmp_path_factory.mktemp("own")
    write_code(folder)
    (folder / "few.txt").write_text("a red star\na blue ring\n")
    few = [*FEW, f"eval_prompts={folder / 'few.txt'}"]
    for out, reward in (("by-file", "mine_reward.py:red"), ("by-module", "mine_reward:red")):
        run(
            "train",
            "pocket/tiny",
            *few,
            f"reward={reward}",
            "--out",
            out,
            "--no-report",
            cwd=folder,
        )
    return folder


@pytest.mark.parametrize("name", ["by-file", "by-module"])
def test_a_copy_of_ones_own_run_beside_other_code_runs_none_of_it(trained, tmp_path, name):
    shutil.copytree(trained / name, tmp_path / "run")
    shutil.copy(trained / "mine_reward.py", tmp_path)
    mark(tmp_path, "mine_reward.py")
    done = call("evaluate", "run", "--no-report", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert (
        "`reward` of run names code that differs from what the run was trained with" in done.stderr
    )
    assert (
        "mine_reward.py" in done.stderr
        and "--trust" in done.stderr
        and not (tmp_path / "ran").exists()
    )


def test_ones_own_run_is_evaluated_beside_its_code_and_after_a_look_beside_edited_code(
    trained, tmp_path
):
    for name in ("by-file", "by-module"):
        run("evaluate", name, "eval_images=2", "--no-report", cwd=trained)
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    mark(copy, "mine_reward.py")
    run("evaluate", "by-module", "eval_seed=3", "eval_images=2", "--no-report", "--trust", cwd=copy)
    assert (copy / "ran").exists()


FUNCTIONS = {
    "evaluate": lambda run, **how: evaluate(run, **how),
    "sample_run": lambda run, **how: sample_run(
        run, ["a red star"], ["as-trained", "base-as-trained"], **how
    ),
    "sample_widget": lambda run, **how: sample_widget(run, "a red star", **how),
    "verify_run": lambda run, **how: verify_run(run, **how),
    "run_benchmark": lambda run, **how: run_benchmark(run, "pocket:test", **how),
    "sample_benchmark": lambda run, **how: sample_benchmark(run, ["pocket:test"], run / "b", **how),
    "sample_process_parts": lambda run, **how: parts.sample_process_parts(
        run, run_folder.read_run_settings(run), {"base": 0, "plain": None}, run / "begun", **how
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_imports_nothing_that_a_foreign_run_names(trained, tmp_path, monkeypatch, name):
    shutil.copytree(trained / "by-file", tmp_path / "run")
    for file in ("mine_method.py", "mine_helper.py", "mine_reward.py"):
        shutil.copy(trained / file, tmp_path)
        mark(tmp_path, file)
    note = read_json(tmp_path / "run/run.json")
    note["settings"] |= {
        "method": f"{tmp_path}/mine_method.py:Rank",
        "reward": f"{tmp_path}/mine_reward.py:red",
    }
    (tmp_path / "run/run.json").write_text(json.dumps(note | {"run_id": "a stranger's"}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match="was not made on this machine, and .* the code .*trust=True"
    ):
        FUNCTIONS[name](Path("run"))
    assert not (tmp_path / "ran").exists()


def test_a_function_runs_what_a_foreign_run_names_when_it_is_trusted(
    trained, tmp_path, monkeypatch
):
    shutil.copytree(trained / "by-file", tmp_path / "run")
    for file in ("mine_method.py", "mine_helper.py", "mine_reward.py"):
        shutil.copy(trained / file, tmp_path)
    mark(tmp_path, "mine_method.py")
    note = read_json(tmp_path / "run/run.json")
    note["settings"] |= {"method": f"{tmp_path}/mine_method.py:Rank", "reward": "pocket-clip"}
    (tmp_path / "run/run.json").write_text(json.dumps(note | {"run_id": "a stranger's"}))
    monkeypatch.chdir(tmp_path)
    assert len(sample_run("run", ["a red star"], ["as-trained"], trust=True)) == 1
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["mine_method.py:Rank", "mine_method:Rank"])
def test_a_trusted_foreign_run_takes_no_method_from_the_working_folder(trained, tmp_path, name):
    shutil.copytree(trained / "by-file", tmp_path / "run")
    for file in ("mine_method.py", "mine_helper.py"):
        shutil.copy(trained / file, tmp_path)
    mark(tmp_path, "mine_method.py")
    note = read_json(tmp_path / "run/run.json")
    note["settings"] |= {"method": name, "reward": "pocket-clip"}
    (tmp_path / "run/run.json").write_text(json.dumps(note | {"run_id": "a stranger's"}))
    done = call(
        "sample",
        "run",
        "a red star",
        "--arm",
        "as-trained,base-as-trained",
        "--trust",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "ran").exists()


def test_own_run_is_sampled_where_the_code_of_its_reward_cannot_be_found(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "far_reward.py").write_text(
        "def score(images, prompts):\n    return [0.5] * len(prompts)\n"
    )
    run = tmp_path / "run"
    words = [
        "train",
        "pocket/tiny",
        "reward=far_reward:score",
        "eval_rewards=[]",
        "iterations=1",
        "eval_every=0",
    ]
    done = call(*words, "--out", run, "--no-report", cwd=tmp_path / "code")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    run_folder.check_trust(run, action="sampling from", loads_rewards=False)
    with pytest.raises(
        InputError, match="can no longer be found; run the command in the folder that has the code"
    ):
        run_folder.check_trust(run)


def test_an_older_run_that_did_not_record_code_is_read_and_resumed_with_a_warning(
    tmp_path, monkeypatch
):
    """Older versions recorded no code of a module whose name ends in a digit; what they recorded is still compared."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_code(tmp_path)
    shutil.copy("mine_method.py", "mine_method2.py")
    changes = {"method": "mine_method2:Rank", "reward": "mine_reward:red", "eval_rewards": []}
    run_settings = settings.load_settings("pocket/tiny", changes)
    old = run_folder.create_run(run_settings, tmp_path / "run")
    code = read_json(old / "run.json")["code"]
    kept = {key: entry for key, entry in code.items() if entry["setting"] == "reward"}
    assert kept and len(kept) < len(code)
    run_folder.update_run_json(old, code=kept)
    (tmp_path / "cache" / "own-runs.txt").unlink()
    run_folder.record_own_run(old)  # the hashes of an older version leave this code out, too
    with pytest.warns(UserWarning, match="did not record the code that `method` names"):
        run_folder.check_trust(old)
    with pytest.warns(UserWarning, match="did not record the code that `method` names"):
        assert run_folder.create_run(run_settings, old, resume=True) == old
    mark(tmp_path, "mine_reward.py")
    with pytest.raises(InputError, match="`reward` of .* has changed since the run began"):
        run_folder.check_trust(old)
    with pytest.raises(InputError, match="`reward` must be the same code when a run is resumed"):
        run_folder.create_run(run_settings, old, resume=True)
    assert not (tmp_path / "ran").exists()
