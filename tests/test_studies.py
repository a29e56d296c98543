"""Reading studies: rows, statistics and claims on invented rows; every page of nbs/findings with rows and without."""

import json
import os
from pathlib import Path

import claims
import pytest
import study_views
from commands import server
from nbdev.test import test_nb as run_page
from scipy import stats
from study_rows import row, write

from chunk_grpo import InputError
from chunk_grpo.studies import analysis, design
from chunk_grpo.studies.study import run_study

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page for page in (ROOT / "nbs/findings").glob("*.ipynb") if page.stem != "speed"
)  # test_speed has it
NAMES = design.list_studies()
REWARD = "pocket-clip"  # what decides in the studies of the shipped base


def work(folder: str, log: str) -> None:
    """What a process does: every page, one after the other; its exit code is 1 where one fails."""
    with open(log, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ["MPLBACKEND"] = "agg"
    if folder:
        analysis.STUDY_ROWS_FOLDER = Path(folder)
    failed = [page.stem for page in PAGES if not run_page(page)[0]]
    print("failed:", failed, flush=True)
    os._exit(int(bool(failed)))


def run_pages(folder: str | Path, tmp_path: Path) -> None:
    'Every page of nbs/findings, in a process of its own, reading rows from `folder`; "": the kept ones.'
    child = server().Process(target=work, args=(str(folder), str(tmp_path / "log")))
    child.start()
    child.join()
    assert child.exitcode == 0, (tmp_path / "log").read_text(errors="replace")[-8000:]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder that is read in place of the kept rows."""
    monkeypatch.setattr(analysis, "STUDY_ROWS_FOLDER", tmp_path)
    return tmp_path


def test_every_study_has_a_page():
    beside = {
        "instability": "single-chunk",
        "clip-width": "explain",
        "referee-field": "referee",
        "referee-credit": "referee",
        "referee-wrong": "referee",
        "referee-undertrained": "referee",
        "referee-proxy": "referee",
    }  # on the page of the study that left it open
    assert {beside.get(name, name) for name in NAMES} < {page.stem for page in PAGES}
    assert all(
        f'"{name}"'
        in (ROOT / f"nbs/findings/{beside.get(name, name)}.ipynb").read_text().replace("\\", "")
        for name in NAMES
    )


@pytest.mark.slow
def test_pages_run_without_rows(tmp_path):
    run_pages(tmp_path / "none", tmp_path)


@pytest.mark.slow
def test_pages_run_with_rows(tmp_path):
    for name in NAMES:
        write(tmp_path, name)
    run_pages(tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["reference with one seed", "others", "two arms with one seed"])
def test_pages_run_with_a_part_of_the_rows(tmp_path, which):
    for name in NAMES:
        asked = analysis.describe_study(name)
        others = [arm for arm in asked["arms"] if arm != asked["reference"]]
        only = {
            "others": others[:2],
            "two arms with one seed": [asked["reference"], others[0]],
        }.get(which)
        write(
            tmp_path,
            name,
            seeds=None if which == "others" else 1,
            only=tuple(only or [asked["reference"]]),
        )
    run_pages(tmp_path, tmp_path)


@pytest.mark.slow
def test_pages_run_with_what_is_kept(tmp_path):
    run_pages("", tmp_path)


@pytest.mark.slow
def test_a_trial_of_the_referee_is_the_same_from_nothing(tmp_path):
    """Its stored row is repeated; on another processor rounding may change the scores a little."""
    (stored,) = [
        one
        for one in analysis.load_study_rows("referee")
        if (one["arm"], one["seed"]) == ("steps", 400)
    ]
    (again,) = run_study(
        "referee", tmp_path / "referee", processes=1, arms=["steps"], seeds=[400], unplanned=True
    )
    for name in ("settings", "evaluation", "images", "transitions", "chunks", "model_sha256"):
        assert again[name] == stored[name], name
    for arm in ("base", "plain"):
        assert again["scores"][arm].keys() == stored["scores"][arm].keys()
    same_processor = again["machine"]["processor"] == stored["machine"]["processor"]
    difference = analysis.gains_by_seed([again], REWARD) - analysis.gains_by_seed([stored], REWARD)
    assert abs(difference.to_numpy()).max() <= (1e-3 if same_processor else 0.03)


def test_what_is_kept_answers_every_claim():
    """A study is whole, or planned and not begun; only its claims are open."""
    said = {
        name: analysis.missing_runs_note(
            analysis.load_study_rows(name), analysis.describe_study(name)
        )
        for name in NAMES
    }
    planned = {
        name
        for name, words in said.items()
        if words.startswith("No run of this study is stored yet")
    }
    assert all(
        words.startswith("Every arm has its") for name, words in said.items() if name not in planned
    )
    lines = claims.claim_rows(asked := claims.all_claims())
    assert all(
        (line["verdict"] == "not tested") == bool(set(claim.studies) & planned)
        for claim, line in zip(asked, lines, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_kept_rows_are_of_the_study(name):
    asked = analysis.describe_study(name)
    rows = analysis.load_study_rows(name)
    for one in rows:
        assert one["arm"] in asked["arms"] and one["study"] == name
        assert one["settings"].items() >= {"seed": one["seed"]}.items()
        assert {"base", "plain"} <= one["scores"].keys()
        lengths = {len(scores) for arm in one["scores"].values() for scores in arm.values()}
        assert len(lengths) == 1 and lengths.pop() > 1
        assert len(one["curve"]["iteration"]) == one["settings"]["iterations"]
    analysis.differing_settings(
        rows
    )  # InputError where the runs of an arm differ in more than the seed


def test_rows_come_in_the_order_of_the_description(kept):
    rows = write(kept, "explain", seeds=2)
    file = kept / "explain.jsonl"
    file.write_text("".join(sorted(file.read_text().splitlines(keepends=True), reverse=True)))
    assert analysis.load_study_rows("explain") == rows
    file.write_text(file.read_text() + json.dumps(rows[0]) + "\n")
    with pytest.raises(InputError, match="the arm steps with seed 0 more than once"):
        analysis.load_study_rows("explain")


def test_paired_is_a_t_test_on_the_same_seeds():
    rows = [
        row("explain", arm, seed, effect)
        for arm, effect in (("steps", 0.1), ("chunks", 0.13))
        for seed in range(5)
    ]
    values = analysis.gains_by_seed(rows, REWARD)
    found = analysis.paired_intervals(rows, REWARD, "steps").loc["chunks"]
    expected = stats.ttest_rel(values["chunks"], values["steps"])
    low, high = expected.confidence_interval()
    assert (found.lo, found.hi, found.p) == pytest.approx((low, high, expected.pvalue))
    assert found.lo < 0.03 < found.hi
    assert analysis.paired_intervals(rows[:-1], REWARD, "steps").n["chunks"] == 4
    with pytest.raises(
        InputError, match="`reference` must be an arm with runs, steps, chunks; got 'reweighted'"
    ):
        analysis.paired_intervals(rows, REWARD, "reweighted")
    with pytest.raises(InputError, match="`reward` must be one with which .*; got 'hpsv3'"):
        analysis.gains_by_seed(rows, "hpsv3")


@pytest.mark.slow
def test_a_claim_follows_its_rows(kept):
    """The same claim holds, does not hold, and cannot be told, as the invented effect says."""

    def verdict():
        return next(
            line
            for line in claims.claim_rows(claims.all_claims())
            if line["claim"] == "Chunks beat steps"
        )

    assert verdict()["verdict"] == "not tested"
    said = {}
    for effect in (0.14, 0.11, 0.06):
        write(kept, "confirmation", {"2-3-4-7": effect}, only=("steps", "2-3-4-7"))
        said[effect] = verdict()["verdict"]
    assert (
        said[0.14] == "holds"
        and said[0.06] == "does not hold"
        and said[0.11] in ("holds", "inconclusive")
    )
    write(kept, "confirmation", seeds=1, only=("steps", "2-3-4-7"))
    assert verdict()["verdict"] == "inconclusive" and "1 seed" in verdict()["measured"]


@pytest.mark.slow
def test_claims_of_every_study_are_measured_where_rows_are_whole(kept):
    for name in NAMES:
        write(kept, name)
    lines = claims.claim_rows(claims.all_claims())
    assert not [line["claim"] for line in lines if line["verdict"] == "not tested"]
    text = claims.claims_markdown(lines, "nbs/findings/")
    assert text.count("\n") == len(lines) + 1 and "](nbs/findings/chunk-setting.ipynb) |" in text


def test_hybrid_and_transfer_are_on_rewards_that_were_not_trained_on(kept):
    assert claims.STRUCTURE_REWARD not in analysis.training_rewards(write(kept, "hybrid")[0])
    write(kept, "rewards")
    units = [claim.measure().unit for claim in claims.reward_claims()]
    assert units == [claims.STRUCTURE_REWARD, claims.STRUCTURE_REWARD, "pocket-clip"]
    assert (
        claims.hybrid_effect().interval["hi"] < 0
    )  # an invented gain grows with the trained steps, so a split costs


def test_pages_of_claims_exist():
    pages = {ROOT / f"nbs/findings/{claim.page}.ipynb" for claim in claims.all_claims()}
    assert not [page for page in pages if not page.is_file()]


def test_runs_of_an_arm_differ_in_the_seed_alone():
    rows = [row("explain", "steps", 0), row("explain", "steps", 1)]
    assert analysis.differing_settings(rows) == [{"arm": "steps"}]
    rows[1]["settings"]["eta"] = 0.3
    with pytest.raises(InputError, match="the runs of the arm steps differ in eta"):
        analysis.differing_settings(rows)


def test_changes_by_category_are_of_the_same_seeds():
    rows = [row("chunk-setting", arm, seed) for arm in ("steps", "2-3-4-7") for seed in range(3)]
    for one in rows:
        means = one["categories"]["base"]["pocket-geneval"]
        more = 0.14 if one["arm"] == "2-3-4-7" else 0.10
        one["categories"]["plain"] = {
            "pocket-geneval": {name: mean + more for name, mean in means.items()}
        }
    assert (
        study_views.category_table(rows, "pocket-geneval")[0]["counting"]
        == "+0.100 (+0.100 to +0.100)"
    )
    against = study_views.category_table(rows, "pocket-geneval", reference="steps")
    assert [line["arm"] for line in against] == ["2-3-4-7"] and against[0][
        "colors"
    ] == "+0.040 (+0.040 to +0.040)"
    assert study_views.category_table(rows, "pocket-clip") == []


def test_shares_of_what_was_preserved_need_something_to_preserve():
    one = row("weighting", "uniform", 0)
    entry = one["preserved"]["plain"]["pocket-geneval"]["objects"]
    assert (
        study_views.changed_share([one], "pocket-geneval").loc[0, "uniform"]
        == entry["lost"] / entry["right"]
    )
    assert study_views.changed_share([one], "pocket-clip").isna().all(axis=None)
    entry["right"] = entry["lost"] = 0
    assert study_views.changed_share([one], "pocket-geneval").isna().all(axis=None)


def test_a_kept_row_has_what_an_invented_one_has():
    invented = row("explain", "steps", 0)
    for name in NAMES:
        for one in analysis.load_study_rows(name):
            assert one.keys() >= invented.keys()
            assert one["curve"].keys() >= {"iteration", "grad_norm", "ratio_dev", "clip_fraction"}
            assert set(analysis.training_rewards(one)) <= one["curve"].keys()
            assert study_views.split_step(one, "plain") > 0
