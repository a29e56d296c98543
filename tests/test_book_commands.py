"""Commands and snippets of README, CONTRIBUTING and the book's prose: each is understood, and those of README run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import small_study
import typer.main
from commands import call, environment, run
from typer.testing import CliRunner

from chunk_grpo.cli import main
from chunk_grpo.core import settings
from chunk_grpo.studies import design

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ["iterations=1", "prompts_per_iteration=2", "images_per_prompt=2", "eval_prompts=few.txt", "eval_every=0",
         "eval_count=1", "eval_steps=2", "hybrid_split=1", "threads=1"]


def prose() -> list[str]:
    "What is written for people: README, CONTRIBUTING, and the book's cells of markdown."
    pages = [page for page in sorted((ROOT / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in page.parts]
    cells = [cell.source for page in pages for cell in nbformat.read(page, as_version=4).cells
             if cell.cell_type == "markdown"]
    return [README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), *cells]


def commands_in(text: str) -> list[str]:
    "The commands of a text, in a line of their own or between backticks; what stands behind a pipe is left out."
    lines = re.findall(r"^ *(?:\.venv/bin/)?(chunk-grpo [^\n|]+)", text.replace("\\\n", " "), re.MULTILINE)
    inline = re.findall(r"(?<!`)`(?:\.venv/bin/)?(chunk-grpo [^`|]+)`(?!`)", text)
    return [" ".join(words.split()) for words in [*lines, *inline]]


COMMANDS = sorted({words for text in prose() for words in commands_in(text)})


def test_commands_are_found_in_lines_and_between_backticks():
    text = "`chunk-grpo plan\npocket/demo` and\n\n    chunk-grpo doctor | head -1\nchunk-grpo train a \\\n  b=1 # why\n"
    assert commands_in(text) == ["chunk-grpo doctor", "chunk-grpo train a b=1 # why", "chunk-grpo plan pocket/demo"]
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_book_is_understood(line):
    "Its options exist, its preset and study too, and its settings go together. A name alone only mentions a command."
    name, *words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(main.app)
    if name.startswith("-"):
        assert name in CliRunner().invoke(main.app, ["--help"]).output
        return
    command = group.commands[name]
    given = command.make_context(name, words).params if words and "..." not in words else {}
    source = str(given.get("source") or "")
    if source.startswith(("pocket/", "paper/", "machines/")):
        changes = [word for word in given.get("overrides") or [] if ":" not in word]  # rewards of a reader's own module
        assert settings.load_settings(source, changes)
    if name == "study" and given and not given["name"].isupper() and given["name"] != "groups":  # that of own_study
        assert given["name"] in design.list_studies()


def test_the_python_of_the_readme_prints_what_stands_below_it(tmp_path):
    "In the order of the page, in one process; the last block trains."
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (printed,) = re.findall(r"```\n(\(4, 4\)[^\n]+)\n```", README)
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(blocks) == 2 and printed in done.stdout.splitlines()
    assert len((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()) > 3


README_DAY = ["plan paper/one-h200-lora", "train pocket/demo seed=0", "train pocket/demo seed=1",
              "evaluate runs/seed-0", "evaluate runs/one", "sample", "compare", "profile", "speed", "presets", "doctor"]
LESS = {"train": SMALL, "profile": ["--prompts", "1", "--images", "1"],
        "speed": ["--prompts", "1", "--images", "2", "--steps", "4", "--repeats", "1"]}
ELSEWHERE = {"train paper/chunk", "study explain"}  # eight GPUs, and days; small in test_gpu_host and test_study


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_run(tmp_path):
    "As they stand there, with fewer images where that is all that makes them long."
    (tmp_path / "few.txt").write_text("a red star\na blue ring\n")
    lines = [line.removeprefix("chunk-grpo ") for line in commands_in(README)]
    left = [line for line in lines if not line.startswith((*README_DAY, *ELSEWHERE))]
    assert not left, f"commands of README that no test runs: {left}"
    for start in README_DAY:
        (line,) = [line for line in lines if line.startswith(start)]
        words = shlex.split(line, comments=True)
        if words[0] == "compare":
            shutil.copytree(tmp_path / "runs/one", tmp_path / "runs/two")
        done = call(*words, *LESS.get(words[0], []), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert (tmp_path / "runs/one/report.html").is_file() and list(tmp_path.glob("samples/*/contact-sheet.png"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_on_a_study_of_your_own(tmp_path):
    "`--tune` writes what each arm does best with, and the study takes it from there."
    home = small_study.write(tmp_path / "groups")
    plan = {"title": "t", "question": "q", "outcome": "pocket-clip", "seeds": 1, "reference": "steps",
            "arms": {"steps": {"chunks": "steps"}, "whole": {"chunks": "whole"}}, "tune_seeds": 1,
            "tune": {"learning_rate": [1e-5, 1e-4]}}
    (home / "study.yaml").write_text(json.dumps(plan))
    page = nbformat.read(ROOT / "nbs/13_cli/06_own_study.ipynb", as_version=4)
    lines = [line for cell in page.cells if cell.cell_type == "markdown" for line in commands_in(cell.source)]
    tune, study = [shlex.split(line)[1:] for line in lines]
    run(*tune, cwd=tmp_path)
    best = design.read_tuned_settings(home)
    assert {name: list(found) for name, found in best.items()} == dict.fromkeys(plan["arms"], ["learning_rate"])
    run(*study, cwd=tmp_path)
    rows = map(json.loads, (tmp_path / "runs/studies/groups/results.jsonl").read_text().splitlines())
    assert {row["arm"]: row["settings"]["learning_rate"] for row in rows} == {
        arm: found["learning_rate"] for arm, found in best.items()}
