"""The recipes of CONTRIBUTING.md run as they stand there."""

import re
from pathlib import Path

import pytest
from commands import call_python, run

from chunk_grpo.runs.run_folder import read_evaluation_records

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^##)", TEXT, flags=re.MULTILINE | re.DOTALL))


def code_of(recipe: str) -> str:
    """The block of Python of a recipe."""
    (code,) = re.findall(r"```python\n(.*?)```", RECIPES[recipe], flags=re.DOTALL)
    return code


FEW = [
    "iterations=1",
    "steps=3",
    "chunks=steps",
    "train_chunks=all",
    "eval_images=1",
    "eval_steps=2",
    "hybrid_split=1",
]
FILES = {
    "Add a method": "my_method.py",
    "Give a method options": "my_clip_higher.py",
    "Change an axis": "my_credit.py",
    "Add a chunker": "my_chunks.py",
    "Change the clip": "my_clip.py",
}


def test_there_are_seven():
    assert list(RECIPES) == ["Add a reward", "Add a family", *FILES]


def test_a_new_family_runs(tmp_path):
    done = call_python(code_of("Add a family"), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", FILES)
def test_a_file_beside_the_package_is_trained_with(recipe, tmp_path):
    """Found in the working directory; the run names it from the root, so that it is found again from anywhere."""
    code = code_of(recipe)
    (tmp_path / FILES[recipe]).write_text(code)
    (words,) = re.findall(r"^ +chunk-grpo (train .+)$", RECIPES[recipe], flags=re.MULTILINE)
    few = ["iterations=1", "eval_every=0", "eval_count=1", "eval_steps=2", "hybrid_split=1"]
    run(*words.split(), *few, "--out", tmp_path / "run", "--no-report", cwd=tmp_path)
    assert str(tmp_path / FILES[recipe]) in (tmp_path / "run/run.json").read_text()


def test_a_new_reward_is_trained_on_with_prompts_of_ones_own(tmp_path):
    (tmp_path / "my_rewards.py").write_text(code_of("Add a reward"))
    (tmp_path / "my_prompts.txt").write_text("a red star\na blue ring\n")
    (words,) = re.findall(r"^ +chunk-grpo (train .+)$", RECIPES["Add a reward"], flags=re.MULTILINE)
    run(*words.split(), *FEW, "--out", tmp_path / "run", "--no-report", cwd=tmp_path)
    assert "redness" in (tmp_path / "run/run.json").read_text()
    run("evaluate", tmp_path / "run", "--trust", "--no-report", cwd=tmp_path)
    asked = {line["prompt"] for line in read_evaluation_records(tmp_path / "run")}
    assert asked == {"a red star", "a blue ring"}


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_page_to_open_is_found_from_the_index_in_one_step(recipe):
    page = re.search(r"[Tt]he page \[\w+\]\((nbs/[^)]+)\)", RECIPES[recipe]).group(1)
    assert f"]({page.removeprefix('nbs/')})" in "".join(
        (ROOT / "nbs/index.ipynb").read_text(encoding="utf-8")
    )
