"""The results of studies, computed again by research/recompute.py, which uses numpy and scipy and nothing of the package."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from study_rows import row, write

from chunk_grpo.studies import analysis, design

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "research/recompute.py"


def recompute(name: str, *words: str) -> dict:
    """What the script prints about a study with --json."""
    command = [sys.executable, str(SCRIPT), name, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compare(name: str, rows: list[dict], found: dict) -> None:
    """Assert that gains, contrasts, p-values and seconds are those of the package."""
    study = design.load_study(name)
    contrasts = study.contrasts or {
        "all": [[arm, study.reference] for arm in study.arms if arm != study.reference]
    }
    for reward in analysis.common_rewards(rows):
        gains = analysis.t_intervals(analysis.gains_by_seed(rows, reward))
        for arm, line in gains.iterrows():
            other = found[reward]["gains"][arm]
            assert [other[key] for key in ("n", "mean", "lo", "hi")] == pytest.approx(
                [line.n, line["mean"], line.lo, line.hi], rel=1e-9, abs=1e-12
            )
        table = analysis.contrast_table(rows, contrasts, reward)
        assert len(table) == len(found[reward]["contrasts"])
        for (_, line), other in zip(table.iterrows(), found[reward]["contrasts"], strict=True):
            assert (line.arm, line.reference) == (other["arm"], other["other"])
            assert [other[key] for key in ("n", "mean", "lo", "hi", "p", "holm")] == pytest.approx(
                [line.n, line["mean"], line.lo, line.hi, line.p, line.holm], rel=1e-9, abs=1e-12
            )
    for arm in gains.index:
        seconds = [one["cpu_seconds"] for one in rows if one["arm"] == arm]
        assert found["cpu_seconds"][arm] == pytest.approx(sum(seconds) / len(seconds))


@pytest.mark.parametrize("name", design.list_studies())
def test_results_of_studies_are_the_same_by_other_code(name):
    rows = analysis.load_study_rows(name)
    if not rows:
        pytest.skip("no run of this study is stored yet")
    compare(name, rows, recompute(name))


def test_families_of_contrasts_are_the_same_by_other_code(tmp_path):
    effects = {arm: 0.05 + 0.01 * i for i, arm in enumerate(design.load_study("referee").arms)}
    rows = write(tmp_path, "referee", effects)
    found = recompute("referee", "--rows", str(tmp_path / "referee.jsonl"))
    compare("referee", rows, found)
    gain_of_steps = found["pocket-clip"]["gains"]["steps"]["mean"]
    assert found["smallest_effect"] == pytest.approx(0.1 * gain_of_steps)


def test_the_script_uses_nothing_of_the_package():
    imported = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"numpy", "scipy", "yaml"}


def test_wrong_rows_get_a_sentence(tmp_path):
    file = tmp_path / "rows.jsonl"
    one = row("referee", "crd", 400)
    for wrong, sentence in (
        ([one, one], "Arm crd has seed 400 more than once."),
        ([{**one, "arm": "other"}], "The rows have an arm other, which is not in the plan."),
        ([], f"{file} holds no runs."),
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in wrong))
        command = [sys.executable, str(SCRIPT), "referee", "--rows", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.strip(), done.stdout) == (2, sentence, "")
