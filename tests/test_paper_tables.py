"The paper's tables from run folders: the functions of the report `tables`, on runs with known scores."

import nbformat
import pandas as pd
import pytest

from chunk_grpo import InputError
from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import write_json
from chunk_grpo.reporting.reports import find_report_notebook


@pytest.fixture(scope="module")
def report() -> dict:
    """What the report defines."""
    cells = {
        cell.id: cell.source for cell in nbformat.read(find_report_notebook("tables"), 4).cells
    }
    names: dict = {}
    for name in ("345ea937", "where-a-run-stands", "a-table-rebuilt"):
        exec(cells[name], names)
    return names


@pytest.fixture
def pretend(tmp_path):
    """Makes a run folder with settings and the scores of a benchmark."""

    def make(name, mean, **chosen):
        settings = setting.Settings(
            **({"reward": "hpsv3", "chunks": "2,3,4,7", "steps": 17} | chosen)
        )
        write_json(
            tmp_path / name / "run.json",
            {"settings": settings.model_dump(mode="json"), "status": "finished"},
        )
        arms = {
            arm: {"mean": x, "se": 0.1, "n": 400} for arm, x in (("base", 13.8), ("hybrid", mean))
        }
        write_json(
            tmp_path / name / "benchmarks" / "hpd-test400" / "summary.json",
            {"rewards": {"hpsv3": arms}},
        )
        return tmp_path / name

    return make


@pytest.fixture
def runs(pretend):
    """Two seeds of chunks, one of steps, one of weighted drawing with another reward, one of equal chunks."""
    return [
        pretend("a", 15.2),
        pretend("b", 15.4, seed=1),
        pretend("c", 15.0, chunks="steps"),
        pretend("d", 99.0, reward="clip", chunk_weighting="dynamics"),
        pretend("e", 15.1, chunks="equal:2"),
    ]


def test_a_run_finds_its_row_by_its_settings(report, pretend):
    assert [
        report["format_chunk_sizes"](x) for x in ((1,) * 16, (2,) * 8, (16,), (2, 3, 4, 7))
    ] == ["step", "2x8", "16", "2,3,4,7"]
    asked = {
        "chunk-ws": ({"chunks": "steps"}, "Dance-GRPO", "step"),
        "x": ({"chunks": "adaptive"}, "Chunk-GRPO", "adaptive"),
        "y": ({"chunks": "equal:2"}, "Chunk-GRPO w/o td", "2x8"),
        "nft": ({"method": "nft", "chunks": "steps"}, "nft", "step"),  # no row of the paper
    }
    for name, (chosen, method, chunks) in asked.items():
        row = report["describe_paper_row"](pretend(name, 0.0, **chosen))
        assert (row["method"], row["chunks"]) == (method, chunks)


def test_a_table_holds_the_means_of_the_runs_that_belong_there(report, runs):
    nothing = report["rebuild_table"]("table3_chunk_setting", report["collect_scores"]([]))
    assert (len(nothing), nothing.runs.sum(), len(report["missing_paper_rows"](nothing))) == (
        12,
        0,
        12,
    )
    found = report["collect_scores"](runs)
    one = (
        report["rebuild_table"]("table1_preference", found)
        .query("column == 'hpsv3'")
        .set_index("row")
    )
    assert one.loc["Chunk-GRPO", ["ours", "difference", "runs"]].tolist() == pytest.approx(
        [15.3, 15.3 - 15.236, 2]
    )
    assert one.se["Chunk-GRPO"] == pytest.approx(0.1)  # two runs that differ by 0.2
    assert one.loc[["FLUX.1-dev", "Dance-GRPO"], "ours"].tolist() == pytest.approx([13.8, 15.0])
    assert one.loc[["FLUX.1-dev", "Chunk-GRPO +ws"], "runs"].tolist() == [1, 0]
    third = report["rebuild_table"]("table3_chunk_setting", found)
    assert third[third.runs > 0].chunks.fillna("").tolist() == ["", "step", "2x8", "2,3,4,7"]
    assert report["missing_paper_rows"](third)[:2] == [
        "Dance-GRPO 25 step",
        "Chunk-GRPO w/o td 17 4x4",
    ]


def test_runs_of_one_name_in_different_folders_are_two_runs(report, pretend):
    runs = [pretend("one/seed0", 15.2), pretend("two/seed0", 15.4)]
    found = report["collect_scores"]([*runs, runs[0]])
    assert found.run.nunique() == 2
    rebuilt = report["rebuild_table"]("table1_preference", found)
    ours = rebuilt.query("column == 'hpsv3'").set_index("row").loc["Chunk-GRPO"]
    assert ours.runs == 2 and ours.ours == pytest.approx(15.3)


def test_judged_benchmarks_and_tasks_become_rows_too(report):
    judged = {
        "name": "wise",
        "overall": {"plain": {"mean": 0.7, "se": 0.01, "n": 9}},
        "arms": {
            "plain": {"categories": {"culture": {"mean": 0.8, "se": 0.02, "n": 4}}, "unparsed": 0}
        },
    }
    tasks = {
        "name": "geneval",
        "overall": {"plain": {"mean": 0.6, "se": 0.01, "n": 9}},
        "arms": {"plain": {"tasks": {"counting": {"accuracy": 0.5, "se": 0.1, "prompts": 4}}}},
    }
    rows = pd.DataFrame([row for one in (judged, tasks) for row in report["_score_rows"](one)])
    assert rows[["measure", "column", "mean", "n"]].values.tolist() == [
        ["wise", "overall", 0.7, 9],
        ["wise", "culture", 0.8, 4],
        ["geneval", "overall", 0.6, 9],
        ["geneval", "counting", 0.5, 4],
    ]


def test_images_side_by_side_are_of_the_same_prompts_and_noise(report, runs):
    show = report["side_by_side_images"]
    for run in (runs[0], runs[2]):
        listed = [{"prompt": f"prompt {i}", "file": f"{i}.png"} for i in range(6)]
        write_json(
            run / "benchmarks" / "six" / "summary.json",
            {"rewards": {}, "first": listed, "folders": {"base": "x", "hybrid": "y"}},
        )
        write_json(run / "benchmarks" / "six" / "manifest.json", {"seed": 3})
    rows, columns = show(runs, "six", prompts=2)
    assert columns == ["base", "steps", "chunk"] and show(runs, "none") == ([], [])
    assert rows[1]["files"][1] == runs[2] / "benchmarks" / "six" / "hybrid" / "3.png"
    assert [row["prompt"] for row in show(runs, "six", prompts=["prompt 5"])[0]] == ["prompt 5"]
    with pytest.raises(InputError, match="1 of 1 are not in six"):
        show(runs, "six", prompts=["prompt 9"])
    write_json(runs[2] / "benchmarks" / "six" / "manifest.json", {"seed": 4})
    with pytest.raises(
        InputError, match="runs: c drew six from other prompts or another seed than a"
    ):
        show(runs, "six")
