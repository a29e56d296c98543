"""Commands of README, CONTRIBUTING and the book's prose are understood, and README's Python prints what it says."""

import re
import shlex
from pathlib import Path

import nbformat
import pytest
import typer.main
from commands import call_python
from typer.testing import CliRunner

from chunk_grpo.cli import main
from chunk_grpo.core import settings
from chunk_grpo.studies import design

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
    done = call_python("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(blocks) == 2 and printed in done.stdout.splitlines()
    assert len((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()) > 3
