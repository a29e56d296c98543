"""Every row of the verdict, recomputed from kept files by other code: numpy and scipy, no function of the package."""

import json
import math
import subprocess
from collections import defaultdict
from pathlib import Path

import claims
import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "runs/results"
STEPS = 15.080 - 13.804  # what steps gain in the paper's Table 1


def kept(name):
    return [
        json.loads(line) for line in (RESULTS / f"studies/{name}.jsonl").read_text().splitlines()
    ]


def gains(name, arm, reward="pocket-clip", place="plain", minus="base"):
    """A row a seed, a column a prompt."""
    rows = sorted((row for row in kept(name) if row["arm"] == arm), key=lambda row: row["seed"])
    return np.array(
        [
            np.array(row["scores"][place][reward]) - np.array(row["scores"][minus][reward])
            for row in rows
        ]
    )


def of_table(d):
    """Mean, error and degrees of freedom of seeds by prompts, each part of the variance at least 0."""
    s, p = d.shape
    if p == 1:
        return d.mean(), d.std(ddof=1) / s**0.5, s - 1
    left = d - d.mean(1, keepdims=True) - d.mean(0, keepdims=True) + d.mean()
    rest = np.square(left).sum() / ((s - 1) * (p - 1))
    seeds = np.var(d.mean(1), ddof=1) - rest / p
    prompts = np.var(d.mean(0), ddof=1) - rest / s
    return (
        d.mean(),
        math.sqrt(max(seeds, 0) / s + max(prompts, 0) / p + rest / (s * p)),
        min(s, p) - 1,
    )


def entry(file, part, value, error, **wanted):
    """A kept number with its error, as a normal one."""
    found = next(
        e
        for e in json.loads((RESULTS / f"benchmarks/{file}").read_text())[part]
        if all(e[name] == x for name, x in wanted.items())
    )
    return found[value], found[error], math.inf


def falls(arm):
    """How far a curve, as means of five, ends below its highest point."""
    out = []
    for row in sorted(
        (row for row in kept("instability") if row["arm"] == arm), key=lambda row: row["seed"]
    ):
        means = np.convolve(row["curve"]["pocket-clip"], np.ones(5) / 5, "valid")
        out.append([means.max() - means[-1]])
    return np.array(out)


def expected():
    """Number of a row -> (mean, error, freedom), direction, bound, smallest effect."""
    truth, structure, mean = "ground_truth.json", "pocket-geneval", {}
    apart = {
        name: {arm: gains(name, arm) for arm in {row["arm"] for row in kept(name)}}
        for name in ("chunk-setting", "confirmation", "explain")
    }
    first, fresh, free = apart["chunk-setting"], apart["confirmation"], apart["explain"]
    mean = {name: {arm: d.mean() for arm, d in found.items()} for name, found in apart.items()}
    equal = np.mean([15.115, 15.078, 15.173]) - 15.080
    steps = mean["confirmation"]["steps"]

    def tenth(arm):
        return 0.1 * mean["explain"][arm]

    both = np.concatenate([first["16-half"] - first["steps"], fresh["16-half"] - fresh["steps"]])
    of_both = 0.1 * np.concatenate([first["steps"], fresh["steps"]]).mean()
    hacked = gains("hybrid", "it-36", structure)
    rows = [
        (
            entry(
                truth, "states", "mean_by_share", "mean_by_share_se", sampler="flow", parts="all"
            ),
            "above",
            0.37,
            0.037,
        ),
        (
            entry(
                truth,
                "gradients",
                "images_of_steps",
                "images_of_steps_se",
                sampler="flow",
                transitions=16,
                estimator="2,3,4,7",
            ),
            "below",
            1.0,
            0.1,
        ),
        (
            entry(
                "profile_shares.json", "rows", "prompt_only", "se", sampler="flow", distance="l1"
            ),
            "equal",
            0.0,
            0.05,
        ),
        (of_table(fresh["2-3-4-7"] - fresh["steps"]), "above", 0.0, steps * 0.156 / STEPS),
        (
            of_table((first["2x8"] + first["4x4"] + first["8x2"]) / 3 - first["steps"]),
            "above",
            0.0,
            mean["chunk-setting"]["steps"] * equal / STEPS,
        ),
        (
            of_table(fresh["2-3-4-7"] - fresh["4x4"]),
            "above",
            0.0,
            steps * (15.236 - 15.173) / STEPS,
        ),
        (
            of_table(fresh["16-half"] - fresh["2-3-4-7"]),
            "below",
            0.0,
            steps * (15.236 - 15.142) / STEPS,
        ),
        (
            of_table(first["adaptive"] - first["steps"]),
            "above",
            0.0,
            mean["chunk-setting"]["steps"] * 0.156 / STEPS,
        ),
        (of_table(both), "equal", 0.0, of_both),
        (of_table(free["reweighted-free"] - free["steps-free"]), "above", 0.0, tenth("steps-free")),
        (of_table(free["chunks"] - free["reweighted"]), "above", 0.0, tenth("reweighted")),
        (of_table(free["4x4"] - free["steps"]), "above", 0.0, tenth("steps")),
        (of_table(free["4x4-free"] - free["steps-free"]), "equal", 0.0, tenth("steps-free")),
        (of_table(free["4x4-once"] - free["steps-once"]), "equal", 0.0, tenth("steps-once")),
        (of_table(free["reweighted-free"] - free["chunks"]), "above", 0.0, tenth("chunks")),
        None,  # planned, not run
        (
            of_table(gains("weighting", "dynamics") - gains("weighting", "uniform")),
            "above",
            0.0,
            steps * 0.137 / STEPS,
        ),
        (
            of_table(
                gains("weighting", "dynamics", structure) - gains("weighting", "uniform", structure)
            ),
            "below",
            0.0,
            0.02,
        ),
        (
            of_table(gains("single-chunk", "chunk-1") - gains("single-chunk", "chunk-4")),
            "above",
            0.0,
            0.1 * gains("single-chunk", "chunk-4").mean(),
        ),
        (
            of_table(falls("chunk-1") - falls("chunk-4")),
            "above",
            0.0,
            0.1 * gains("instability", "chunk-4").mean(),
        ),
        (
            of_table(gains("hybrid", "it-36", structure, "split-12", "plain")),
            "above",
            0.0,
            0.1 * abs(hacked.mean()),
        ),
        (of_table(gains("rewards", "clip", structure)), "above", 0.0, 0.03),
        (
            of_table(gains("rewards", "partial")),
            "above",
            0.0,
            gains("rewards", "clip").mean() * (14.810 - 13.804) / (15.236 - 13.804),
        ),
    ]
    return dict(enumerate(rows))


def p_of(found, direction, bound, smallest):
    """Two-sided p-value: of no effect on the claimed side, or of an effect as large as the smallest."""
    (mean, error, freedom), sign = found, -1 if direction == "below" else 1
    upper = (
        (lambda x: stats.norm.sf(x / error))
        if freedom == math.inf
        else (lambda x: stats.t.sf(x / error, freedom))
    )
    away = sign * (mean - bound)
    return min(
        1,
        2
        * (
            max(upper(smallest - away), upper(smallest + away))
            if direction == "equal"
            else upper(away)
        ),
    )


def test_every_row_by_other_code():
    ours = claims.claim_rows(claims.all_claims())
    theirs = expected()
    assert len(ours) == len(theirs)
    known = {i: p_of(*row) for i, row in theirs.items() if row is not None}
    running, holm = 0.0, {}
    for rank, i in enumerate(sorted(known, key=known.get)):
        running = max(running, min(1.0, known[i] * (len(known) - rank)))
        holm[i] = running
    for i, line in enumerate(ours):
        if theirs[i] is None:
            assert line["verdict"] == "not tested" and line["interval"] is None
            continue
        (mean, error, freedom), direction, bound, smallest = theirs[i]
        half = error * (1.96 if freedom == math.inf else stats.t.ppf(0.975, freedom))
        found = line["interval"]
        assert (found["mean"], found["lo"], found["hi"]) == pytest.approx(
            (mean, mean - half, mean + half), abs=1e-9
        ), i
        assert line["smallest"] == pytest.approx(smallest, rel=1e-6), line["claim"]
        assert line["p"] == pytest.approx(holm[i], abs=1e-9), line["claim"]
        lo, hi = sorted(
            (-1 if direction == "below" else 1) * (mean + side * half - bound) for side in (-1, 1)
        )
        if direction == "equal":
            word = (
                "does not hold"
                if lo > smallest or hi < -smallest
                else "holds"
                if -smallest < lo and hi < smallest and holm[i] < 0.05
                else "inconclusive"
            )
        else:
            word = (
                "does not hold"
                if hi < smallest
                else "holds"
                if lo > 0 and holm[i] < 0.05
                else "inconclusive"
            )
        assert line["verdict"] == word, line["claim"]


def test_does_not_hold_excludes_what_the_paper_reports():
    for line in claims.claim_rows(claims.all_claims()):
        if line["verdict"] == "does not hold":
            sign = -1 if line["direction"] == "below" else 1
            assert (
                max(sign * (line["interval"][end] - line["bound"]) for end in ("lo", "hi"))
                < line["smallest"]
            )


def test_the_history_says_the_same_of_plans(tmp_path):
    """The kept table of plans is what the history gives, where it is here."""
    entries = json.loads((RESULTS / "verdict/plans.json").read_text())["plans"]
    kept_rows = {
        (name.stem, row["git_commit"])
        for name in (RESULTS / "studies").glob("*.jsonl")
        for row in kept(name.stem)
        if "plan" not in row
    }
    assert kept_rows == {(one["study"], one["code"]) for one in entries}
    for one in entries:
        known = subprocess.run(
            ["git", "-C", ROOT, "cat-file", "-e", one["brought_by"]],
            capture_output=True,
            check=False,
        )
        if known.returncode:
            pytest.skip("the history is not here")
        for file, state in one["plan_at_code"].items():
            path = f"runs/pocket/studies/{one['study']}/{file}"
            then, later = (
                subprocess.run(
                    ["git", "-C", ROOT, "show", f"{commit}:{path}"],
                    capture_output=True,
                    check=False,
                )
                for commit in (one["code"], one["brought_by"])
            )
            assert state == (
                "absent"
                if then.returncode
                else "the same"
                if then.stdout == later.stdout
                else "another"
            )
    assert {one["study"] for one in entries if one["shown"]} == {"instability", "samplers"}


def plan_files(name: str) -> list[Path]:
    """The files of a study's plan, relative to the repository; tuned.yaml is one of them if the study was tuned."""
    (home,) = (ROOT / "runs/pocket").glob(f"*/{name}")
    names = ("study.yaml", "base.yaml", "tuned.yaml")
    return [(home / file).relative_to(ROOT) for file in names if (home / file).is_file()]


def test_rows_follow_a_plan_that_was_committed_before_them():
    """A row that names its plan was run by code that contains it, and nobody touched the plan after it."""

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, check=False)

    # A study may take over rows of another one, which keep the plan by which they ran.
    studies_of_run = defaultdict(set)
    rows = []
    for file in (RESULTS / "studies").glob("*.jsonl"):
        if file.stem.endswith("-tuning"):  # this compares no arms
            continue
        for row in kept(file.stem):
            run = row["seed"], json.dumps(row["scores"])
            studies_of_run[run].add(file.stem)
            if "plan" in row:
                rows.append((run, row["plan"], row["git_commit"]))
    plans = {
        (frozenset(studies_of_run[run]), plan["commit"], plan["unplanned"], code)
        for run, plan, code in rows
    }
    assert {name for names, *_ in plans for name in names} >= {"methods", "more-methods"}
    assert {frozenset({"referee-field"}), frozenset({"referee", "referee-field"})} <= {
        names for names, *_ in plans
    }
    for names, planned_at, unplanned, code in plans:
        assert planned_at and not unplanned and not code.endswith("-dirty"), names
        if git("cat-file", "-e", planned_at).returncode:
            pytest.skip("the history is not here")
        assert git("merge-base", "--is-ancestor", planned_at, code).returncode == 0, names
        unchanged = [
            name
            for name in names
            if all(
                git("show", f"{planned_at}:{file}").stdout == (ROOT / file).read_bytes()
                for file in plan_files(name)
            )
        ]
        assert unchanged, names


@pytest.mark.parametrize(
    "effect, word", [(0.02, "holds"), (0.0, "does not hold"), (0.006, "inconclusive")]
)
def test_a_verdict_follows_its_interval(effect, word):
    assert (
        claims.claim_verdict({"lo": effect - 0.006, "hi": effect + 0.006}, "above", 0.007) == word
    )
    assert (
        claims.claim_verdict({"lo": -effect - 0.006, "hi": -effect + 0.006}, "below", 0.007) == word
    )
    assert claims.claim_verdict({"lo": 0.014, "hi": 0.026}, "above", 0.007, 0.2) == "inconclusive"
