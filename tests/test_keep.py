"""Rows of studies are kept beside those of other places, tuning as well as trials."""

import importlib.util
import json
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("keep", Path(__file__).parents[1] / "tools/keep.py")
keep = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(keep)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder whose kept rows lie in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keep, "RESULTS", tmp_path / "kept")
    return tmp_path


def write(folder, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name, folder", [("one", "one"), ("one-tuning", "one-tuning/trials")])
def test_rows_of_a_study_or_its_tuning_are_kept_beside_those_from_elsewhere(place, name, folder):
    write(
        place / "runs/studies" / folder,
        {"arm": "a", "seed": 1, "x": 1},
        {"arm": "b", "seed": 1, "x": 1},
    )
    assert keep.keep_study(name) == 0
    write(
        place / "runs/studies" / folder,
        {"arm": "b", "seed": 1, "x": 2},
        {"arm": "a", "seed": 0, "x": 2},
    )
    assert keep.keep_study(name) == 0
    kept = [
        json.loads(line) for line in (place / f"kept/studies/{name}.jsonl").read_text().splitlines()
    ]
    assert [(row["seed"], row["arm"], row["x"]) for row in kept] == [
        (0, "a", 2),
        (1, "a", 1),
        (1, "b", 2),
    ]


def test_a_study_that_was_not_begun_has_no_rows_to_keep(place, capsys):
    assert (
        keep.keep_study("none") == 2
        and "a study that was begun here is needed" in capsys.readouterr().err
    )
