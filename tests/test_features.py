"""The table of features is true: settings, commands and tests exist, no test is skipped, families are in the tests."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

import chunk_grpo
from chunk_grpo.cli.main import app
from chunk_grpo.core.settings import Settings

TESTS = Path(__file__).parent
GROUPS = yaml.safe_load((TESTS / "features.yaml").read_text(encoding="utf-8"))
ROWS = {row["feature"]: row for rows in GROUPS.values() for row in rows}
COMMANDS = typer.main.get_command(app).commands
ALL_TEXT = r"|(?<!EDITING_)BUILDERS"
WORDS = {  # family -> what the code of a test on it holds: a builder of its networks, or all builders
    "flux": r"'dev'|'schnell'|pocket|tiny_flux|small_runs|FluxPolicy" + ALL_TEXT,
    "sd3": r"'sd3'" + ALL_TEXT,
    "qwen": r"'qwen'" + ALL_TEXT,
    "z-image": r"'z_image'" + ALL_TEXT,
    "klein": r"'klein'" + ALL_TEXT,
    "kontext": r"'kontext'|EDITING_BUILDERS",
    "qwen-edit": r"'qwen_edit'|EDITING_BUILDERS",
}
SKIPS = r"\b(skipif|xfail|importorskip|pytest\.skip|mark\.skip)\b"


@functools.cache
def definitions(file: Path) -> dict[str, ast.stmt]:
    """Return the statement that defines or imports each name of a module."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            targets = [x for target in node.targets for x in ast.walk(target)]
            found |= {x.id: node for x in targets if isinstance(x, ast.Name)}
    return found


def reachable_source(test: str) -> str:  # file::function
    """Return the code of a test with the fixtures, helpers and constants that it names, without comments."""
    file, name = test.split("::")
    known = definitions(TESTS / "conftest.py") | definitions(TESTS / f"{file}.py")
    waiting = [name]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in known and name not in found:
            found[name] = ast.unparse(known[name])
            parts = list(ast.walk(known[name]))
            waiting += [part.id for part in parts if isinstance(part, ast.Name)]
            waiting += [part.arg for part in parts if isinstance(part, ast.arg)]  # fixtures
    return "\n".join(found.values())


@pytest.mark.parametrize("feature", ROWS)
def test_settings_and_commands_of_a_row_exist(feature):
    row = ROWS[feature]
    assert row.get("settings") or row.get("commands"), "how to use it"
    assert set(row.get("settings", ())) <= Settings.model_fields.keys()
    for command in row.get("commands", ()):
        program, *words = shlex.split(command)
        if program != "chunk-grpo":
            assert hasattr(chunk_grpo, program.removeprefix("chunk_grpo."))
            continue
        options = {option for x in COMMANDS[words[0]].params for option in x.opts}
        assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("feature", ROWS)
def test_tests_of_a_row_exist_run_and_have_its_families(feature):
    assert ROWS[feature]["tests"]
    for test, families in ROWS[feature]["tests"].items():
        source = reachable_source(test)
        assert re.search(rf"^def {test.split('::')[1]}\(", source, re.MULTILINE), test
        assert not re.search(SKIPS, source), f"{test} may be skipped"
        missing = [family for family in families if not re.search(WORDS[family], source)]
        assert not missing, f"{test} does not use {missing}"


@pytest.mark.parametrize("feature", [name for name, row in ROWS.items() if row.get("training")])
def test_training_is_tested_on_two_families_or_the_row_says_why_not(feature):
    row = ROWS[feature]
    families = {family for of_test in row["tests"].values() for family in of_test}
    assert bool(row.get("reason")) == (len(families) < 2)


def test_rows_have_no_other_fields_and_none_has_run_on_a_gpu():
    """A check of `make gpu` writes its result here; a row that names one needs that file."""
    allowed = {"feature", "settings", "commands", "training", "reason", "tests", "gpu"}
    for row in ROWS.values():
        assert row.keys() <= allowed and {"feature", "tests", "gpu"} <= row.keys()
        if row["gpu"] != "no":
            assert (TESTS.parent / "runs/results/gpu" / row["gpu"]).is_file()
