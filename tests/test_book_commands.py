"""Commands of README, CONTRIBUTING and the book's prose are understood, and those of README do what it says."""

import json
import re
import shlex
import shutil
from pathlib import Path

import nbformat
import pytest
import small_study
import typer.main
import yaml
from commands import call_python, run
from typer.testing import CliRunner

from chunk_grpo.cli import main
from chunk_grpo.core import settings
from chunk_grpo.studies import design

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO = "\n".join(
    cell.source for cell in nbformat.read(ROOT / "nbs/findings/demo.ipynb", as_version=4).cells
)


def prose() -> list[str]:
    """What is written for people: README, CONTRIBUTING, and the book's cells of markdown."""
    pages = [
        page
        for page in sorted((ROOT / "nbs").rglob("*.ipynb"))
        if ".ipynb_checkpoints" not in page.parts
    ]
    cells = [
        cell.source
        for page in pages
        for cell in nbformat.read(page, as_version=4).cells
        if cell.cell_type == "markdown"
    ]
    return [README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), *cells]


def commands_in(text: str) -> list[str]:
    """The commands of a text, in a line of their own or between backticks; what stands behind a pipe is left out."""
    lines = re.findall(
        r"^ *(?:\.venv/bin/)?(chunk-grpo [^\n|]+)", text.replace("\\\n", " "), re.MULTILINE
    )
    inline = re.findall(r"(?<!`)`(?:\.venv/bin/)?(chunk-grpo [^`|]+)`(?!`)", text)
    return [" ".join(words.split()) for words in [*lines, *inline]]


COMMANDS = sorted({words for text in prose() for words in commands_in(text)})


def test_commands_are_found_in_lines_and_between_backticks():
    text = "`chunk-grpo plan\npocket/demo` and\n\n    chunk-grpo doctor | head -1\nchunk-grpo train a \\\n  b=1 # why\n"
    assert commands_in(text) == [
        "chunk-grpo doctor",
        "chunk-grpo train a b=1 # why",
        "chunk-grpo plan pocket/demo",
    ]
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_book_is_understood(line):
    """Its options exist, its preset and study too, and its settings go together. A name alone only mentions a command."""
    name, *words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(main.app)
    if name.startswith("-"):
        assert name in CliRunner().invoke(main.app, ["--help"]).output
        return
    command = group.commands[name]
    given = command.make_context(name, words).params if words and "..." not in words else {}
    source = str(given.get("source") or "")
    if source.startswith(("authors/", "pocket/", "paper/", "machines/")):
        changes = [
            word for word in given.get("overrides") or [] if ":" not in word
        ]  # rewards of a reader's own module
        assert settings.load_settings(source, changes)
    if (
        name == "study" and given and not given["name"].isupper() and given["name"] != "groups"
    ):  # that of own_study
        assert given["name"] in design.list_studies()


def test_the_python_of_the_readme_prints_what_stands_below_it(tmp_path):
    """In the order of the page, in one process; the last block trains."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (printed,) = re.findall(r"```\n(\(4, 4\)[^\n]+)\n```", README)
    done = call_python("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(blocks) == 2 and printed in done.stdout.splitlines()
    assert len((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()) > 3


SMALL = [
    "iterations=1",
    "prompts_per_iteration=2",
    "images_per_prompt=2",
    "eval_prompts=few.txt",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
    "threads=1",
    "steps=5",
    "chunks=2,2",
    "train_chunks=all",
]
ON_RUNS = {  # commands of README and of the page on the demo, in the order of a day -> words that make them shorter
    "train pocket/demo seed=0": [*SMALL, "--no-report"],
    "train pocket/demo seed=1": SMALL,
    "evaluate runs/seed-0": ["eval_images=2"],
    "evaluate runs/one": [],
    "sample": [],
    "compare": [],
}
ALONE = {
    "plan": [],
    "profile": ["--steps", "5,10", "--prompts", "1", "--images", "1"],
    "speed": ["chunks=1,2", "--prompts", "1", "--images", "2", "--steps", "4", "--repeats", "1"],
    "methods": [],
    "presets": [],
    "doctor": [],
}
# small in test_gpu_host, test_study and test_try
ELSEWHERE = ("train paper/eight-gpu-full", "study explain", "try my_method.py")
LINES = [line.removeprefix("chunk-grpo ") for line in commands_in(f"{README}\n{DEMO}")]


def line_of(start: str) -> str:
    """The one command that begins so."""
    (line,) = [line for line in LINES if line.startswith(start)]
    return line


def test_every_command_of_the_readme_has_a_test():
    assert not [line for line in LINES if not line.startswith((*ON_RUNS, *ALONE, *ELSEWHERE))]


@pytest.mark.slow
@pytest.mark.parametrize("start", ALONE)
def test_a_command_of_the_readme_runs(tmp_path, start):
    run(*shlex.split(line_of(start), comments=True), *ALONE[start], cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_on_runs_run(tmp_path):
    """As they stand there, in one folder, and those that its comments name on what they left."""
    (tmp_path / "few.txt").write_text("a red star\na blue ring\n")
    for start, less in ON_RUNS.items():
        if start == "compare":
            shutil.copytree(tmp_path / "runs/one", tmp_path / "runs/two")
        run(*shlex.split(line_of(start), comments=True), *less, cwd=tmp_path)
    for line in (
        "report runs/one",
        "tables runs/one",
        "export runs/one mine",
        "watch runs/one",
        "verify runs/one",
    ):
        run(*line.split(), cwd=tmp_path)
    made = "runs/one/report.html runs/seed-0/evaluation/report.html compare.html tables.html mine/README.md".split()
    assert all((tmp_path / name).stat().st_size > 1000 for name in made)
    assert len(list(tmp_path.glob("samples/*/contact-sheet.png"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_on_a_study_of_your_own(tmp_path):
    """`--tune` judges by prompts of the study's choice, and the study takes what each arm did best with."""
    home = small_study.write(tmp_path / "groups")
    (tmp_path / "one.txt").write_text("an image of a square\n")  # not among those for training
    plan = {
        "title": "t",
        "question": "q",
        "outcome": "pocket-clip",
        "seeds": 1,
        "reference": "steps",
        "arms": {"steps": {"chunks": "steps"}, "whole": {"chunks": "whole"}},
        "tune_seeds": 1,
        "tune": {"learning_rate": [1e-5, 1e-4]},
        "tune_prompts": "one.txt",
    }
    (home / "study.yaml").write_text(json.dumps(plan))
    page = nbformat.read(ROOT / "nbs/14_cli/15_own_study.ipynb", as_version=4)
    lines = [
        line
        for cell in page.cells
        if cell.cell_type == "markdown"
        for line in commands_in(cell.source)
    ]
    new, *lines = lines  # the first writes a plan of the same name, so it runs elsewhere
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(
        "from chunk_grpo.training.method import Method\n\n\nclass Rank(Method):\n    pass\n"
    )
    run(*shlex.split(new)[1:], cwd=elsewhere)
    written = yaml.safe_load((elsewhere / "groups/study.yaml").read_text())
    assert {"steps", "chunk"} < set(written["arms"]) and len(written["arms"]) == 3
    for line in lines:
        small_study.commit(home)  # the plan, and what was tuned
        run(*shlex.split(line)[1:], cwd=tmp_path)
    tried = tmp_path / "runs/studies/groups-tuning/trials"
    runs = tmp_path / "runs/studies/groups"
    judged = [
        json.loads(file.read_text())["n_prompts"]
        for file in tried.glob("*/evaluation/summary.json")
    ]
    assert ("--tune" in lines[0], len(lines), judged) == (True, 2, [1] * 4)
    best = design.read_tuned_settings(home)
    rows = [json.loads(line) for line in (runs / "results.jsonl").read_text().splitlines()]
    assert {row["arm"]: row["settings"]["learning_rate"] for row in rows} == {
        arm: best[arm]["settings"]["learning_rate"] for arm in plan["arms"]
    }
