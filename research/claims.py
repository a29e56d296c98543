"""The paper's claims, how each one is measured on the stored rows, and the verdicts as tables and a figure.

The pages in nbs/findings, nbs/index.ipynb and tests import it; the rule is
`chunk_grpo.core.statistics.claim_verdict`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from statsmodels.stats.multitest import multipletests

from chunk_grpo.core.files import read_json
from chunk_grpo.core.settings import PRESETS_DIR
from chunk_grpo.core.statistics import claim_verdict
from chunk_grpo.evaluation import paper_tables
from chunk_grpo.reporting.figures import create_subplots, with_house_style
from chunk_grpo.reporting.tables import format_interval, format_number
from chunk_grpo.studies import analysis, pilot
from chunk_grpo.studies.analysis import curve_column

STRUCTURE_REWARD = "pocket-geneval"  # the exact checker: 1 if an image shows what its prompt says
VERDICTS = {
    "holds": "#009E73",
    "does not hold": "#D55E00",
    "inconclusive": "#7F7F7F",
    "not tested": "#B8B8B8",
}


@dataclass(frozen=True)
class CrossedMean:
    """A mean over seeds and prompts, both treated as random, with its variance components."""

    mean: float
    seeds: int  # number of seeds
    prompts: int  # number of prompts; 1 if a run has only one number
    seed_variance: float  # variance of the seeds' effects
    prompt_variance: float  # variance of the prompts' effects
    residual_variance: float

    def standard_error(self, seeds: int | None = None, prompts: int | None = None) -> float:
        """Return the standard error (a) of the mean for these numbers of seeds and prompts.

        By default these are the numbers in the data. Returns nan for one seed.
        """
        seeds = seeds or self.seeds
        prompts = prompts or self.prompts
        if seeds < 2:
            return float("nan")
        return (
            self.seed_variance / seeds
            + self.prompt_variance / prompts
            + self.residual_variance / (seeds * prompts)
        ) ** 0.5

    @property
    def degrees_of_freedom(self) -> int:
        """Return the degrees of freedom of the t quantile: the number of seeds or of prompts, whichever is smaller, minus 1."""
        units = min(self.seeds, self.prompts) if self.prompts > 1 else self.seeds
        return units - 1


def crossed_mean(
    values: np.ndarray,  # (seeds, prompts) differences, or (seeds, 1)
) -> CrossedMean:
    """Estimate the mean and the variance components of a table of seeds by prompts."""
    seeds, prompts = values.shape
    mean = values.mean()
    by_seed = values.mean(1)
    by_prompt = values.mean(0)
    if seeds < 2 or prompts < 2:
        seed_variance = float(by_seed.var(ddof=1)) if seeds > 1 else float("nan")
        return CrossedMean(
            mean=float(mean),
            seeds=seeds,
            prompts=prompts,
            seed_variance=seed_variance,
            prompt_variance=0.0,
            residual_variance=0.0,
        )
    residuals = values - by_seed[:, None] - by_prompt + mean
    residual_variance = (residuals**2).sum() / ((seeds - 1) * (prompts - 1))
    # An estimate below zero counts as zero, which can only widen the interval.
    return CrossedMean(
        mean=float(mean),
        seeds=seeds,
        prompts=prompts,
        seed_variance=float(max(0.0, by_seed.var(ddof=1) - residual_variance / prompts)),
        prompt_variance=float(max(0.0, by_prompt.var(ddof=1) - residual_variance / seeds)),
        residual_variance=float(residual_variance),
    )


def prompt_gains(
    rows: Sequence[Mapping],  # rows of finished runs
    arm: str,  # arm of the study
    reward: str,  # name of a reward that was evaluated
    evaluated: str = "plain",  # arm of the evaluation
) -> pd.DataFrame:  # a row per study and seed, a column per prompt
    """Compute the gain of every run of an arm on every prompt: the trained model's score minus the base's."""
    return pd.DataFrame.from_dict(
        {
            (row["study"], row["seed"]): np.subtract(
                row["scores"][evaluated][reward], row["scores"]["base"][reward]
            )
            for row in rows
            if row["arm"] == arm
        },
        orient="index",
    )


@dataclass(frozen=True)
class Measurement:
    """The number that decides a claim, measured on stored runs."""

    estimate: CrossedMean
    unit: str  # unit of the estimate, such as the name of a reward
    gain: float | None = None  # mean gain that scales the smallest effect of interest
    first: float | None = None  # the difference of the first seed alone
    arms: tuple[str, ...] = ()  # compared arms, each STUDY/ARM
    is_normal: bool = False  # stored with its own standard error, so it has no seeds

    @property
    def interval(self) -> dict[str, float]:  # keyed by mean, lo and hi
        """Return the mean with its 95% interval."""
        if self.is_normal:
            quantile = 1.96
        else:
            quantile = stats.t.ppf(0.975, self.estimate.degrees_of_freedom)
        mean = self.estimate.mean
        half = self.estimate.standard_error() * quantile
        return {"mean": mean, "lo": mean - half, "hi": mean + half}


def contrast_arms(
    study: str | tuple[str, ...],  # one study, or several whose seeds are combined
    arm: str | Sequence[str],  # an arm, or several whose gains are averaged
    other: str | None,  # arm that is subtracted; None: the base
    reward: str = "pocket-clip",
    gain_of: str | None = None,  # arm whose gain scales the smallest effect; None: `other`
    evaluated: tuple[str, str] = ("plain", "plain"),  # arms of the evaluation, of `arm` and `other`
) -> Measurement | None:  # None if an arm has no run
    """Compute the gain of one arm minus that of another on the same seeds and prompts."""
    studies = (study,) if isinstance(study, str) else study
    rows = [row for name in studies for row in analysis.load_study_rows(name)]
    arms = (arm,) if isinstance(arm, str) else tuple(arm)
    available = analysis.arms_with_runs(rows)
    if not arms or not {*arms, other or arms[0], gain_of or arms[0]} <= set(available):
        return None
    gains = sum(prompt_gains(rows, name, reward, evaluated[0]) for name in arms) / len(arms)
    differences = gains
    if other:
        differences = gains - prompt_gains(rows, other, reward, evaluated[1])
    differences = differences.dropna()
    scale_arm = gain_of or other
    gain = None
    if scale_arm:
        gain = float(prompt_gains(rows, scale_arm, reward, evaluated[1]).mean(axis=None))
    if not len(differences):
        return None
    compared = (*arms, other) if other else arms
    return Measurement(
        estimate=crossed_mean(differences.to_numpy()),
        unit=reward,
        gain=gain,
        first=float(differences.iloc[0].mean()),
        arms=tuple(f"{study_name}/{name}" for study_name in studies for name in compared),
    )


def claim_p_value(
    distance: float,  # mean minus the bound, with the sign that makes the claimed side positive
    error: float,  # standard error of the mean
    degrees_of_freedom: float,  # infinite: normal
    equality_margin: float = 0.0,  # smallest effect, if the claim is an equality; 0: it is not
) -> float:  # nan if one seed is too few
    """Compute the two-sided p-value of a claim.

    The null hypothesis is no effect, or for an equality an effect as large as the smallest one of interest.
    """
    distances = (distance,)
    if equality_margin:
        distances = (equality_margin - distance, equality_margin + distance)
    if error != error:
        return float("nan")
    if not error > 0:
        return float(min(distances) <= 0)
    tails = [stats.t.sf(d / error, degrees_of_freedom) for d in distances]
    return float(min(1.0, 2 * max(tails)))


def claim_power(
    smallest: float,  # smallest effect of interest
    error: float,  # standard error of the mean
    seeds: int,  # number of seeds, or degrees of freedom plus 1
    is_equality: bool = False,
) -> float:  # 0 to 1; nan with one seed
    """Compute the probability that such runs give the verdict "holds", without a correction for other claims.

    The true effect is assumed to be the smallest one of interest, or zero for an equality.
    """
    if not error > 0 or seeds < 2:
        return float("nan")
    if is_equality:
        quantile = stats.t.ppf(0.975, seeds - 1)
        inside = float(stats.t.cdf(smallest / error - quantile, seeds - 1))
        return max(0.0, 2 * inside - 1)
    return pilot.paired_power(smallest / (error * seeds**0.5), seeds)


def required_seeds(
    pilot: CrossedMean,  # an earlier estimate of the same contrast
    smallest: float,  # smallest effect of interest
    power: float = 0.8,  # wanted probability of detecting the effect
    prompts: int | None = None,  # number of prompts; None: as in the pilot
    limit: int = 2000,  # largest number of seeds that is tried
) -> int | None:  # None: more than `limit`
    """Return the smallest number of seeds with which such a contrast has the wanted power."""
    units = prompts or pilot.prompts
    for seeds in range(3, limit + 1):
        error = pilot.standard_error(seeds, prompts)
        # With one number per run there is no variation over prompts, so only the seeds count.
        if claim_power(smallest, error, min(seeds, units) if units > 1 else seeds) >= power:
            return seeds
    return None


def peak_drop() -> Measurement | None:  # None if an arm has no run
    """Measure the drop of the reward below its peak: that of the first chunk alone minus that of the last alone."""
    rows = analysis.load_study_rows("instability")

    def drop(row: Mapping) -> float:
        """Return the highest mean of five iterations minus the last one."""
        curve = pd.Series(curve_column(row, "pocket-clip")).rolling(5).mean()
        return curve.max() - curve.iloc[-1]

    drops = analysis.pivot_by_seed(rows, drop) if rows else {}
    if not {"chunk-1", "chunk-4"} <= set(drops):
        return None
    differences = (drops["chunk-1"] - drops["chunk-4"]).dropna().to_numpy()[:, None]
    if not len(differences):
        return None
    return Measurement(
        estimate=crossed_mean(differences),
        unit="pocket-clip",
        gain=float(prompt_gains(rows, "chunk-4", "pocket-clip").mean(axis=None)),
        first=float(differences[0, 0]),
        arms=("instability/chunk-1", "instability/chunk-4"),
    )


def hybrid_effect() -> Measurement | None:  # None if there is no run
    """Measure what hybrid inference, with the base from 3/5 of the steps on, adds to the longest run's structural score."""
    rows = analysis.load_study_rows("hybrid")
    if not any(row["arm"] == "it-36" for row in rows):
        return None
    split = f"split-{round(0.6 * (rows[0]['settings'] | rows[0]['evaluation'])['eval_steps']):02d}"
    measured = contrast_arms(
        "hybrid", "it-36", "it-36", STRUCTURE_REWARD, evaluated=(split, "plain")
    )
    return replace(measured, arms=(f"hybrid/it-36/{split}", "hybrid/it-36/plain"))


def stored_measurement(
    file: str,  # in runs/results/benchmarks
    part: str,  # name of a list in the file
    value: str,  # name of the number in the list's entries
    unit: str,  # unit of the number
    **wanted,  # names and values that identify the entry
) -> Measurement | None:  # None if there is no such file or entry
    """Read a number and its standard error from a file of results."""
    path = PRESETS_DIR / "results" / "benchmarks" / file
    for entry in read_json(path)[part] if path.is_file() else []:
        if all(entry[name] == x for name, x in wanted.items()):
            error = entry.get(f"{value}_se", entry.get("se"))
            # Two seeds with this variance give the stored standard error.
            estimate = CrossedMean(entry[value], 2, 1, 2 * error**2, 0.0, 0.0)
            return Measurement(estimate, unit, is_normal=True)
    return None


def _read_paper_numbers() -> dict[
    str, dict[str, float]
]:  # table of version 1, or v3 -> row -> number
    """Read from the paper's tables the numbers on which its claims are based, such as ["Table 1"]["steps"]."""
    names = {
        "base": "FLUX.1-dev",
        "steps": "Dance-GRPO",
        "chunks": "Chunk-GRPO",
        "weighted": "Chunk-GRPO +ws",
    }

    def column_values(key: str, column: str, *short: str) -> dict[str, float]:
        """Return a column of a table, keyed by the short names of these rows."""
        values = {row["row"]: row[column] for row in paper_tables.paper_table_rows(key)}
        return {row: values[names[row]] for row in short}

    return {
        "Table 1": column_values(
            "table1_preference", "hpsv3", "base", "steps", "chunks", "weighted"
        ),  # trained on HPSv3
        "Table 2": column_values(
            "table2_wise_rewritten", "overall", "chunks", "weighted"
        ),  # trained on HPSv3
        "Table 3": {
            row["chunks"]: row["hpsv3"]
            for row in paper_tables.paper_table_rows("table3_chunk_setting")
            if row["steps"] == 17 and row["row"] == "Chunk-GRPO w/o td"
        },  # trained on HPSv3
        "Table 4": column_values(
            "table4_pickscore", "hpsv3", "base", "chunks"
        ),  # trained on PickScore
        "Table 5": column_values(
            "table5_geneval", "overall", "base", "chunks", "weighted"
        ),  # trained on CLIP
        "v3": {"adaptive": paper_tables.read_paper_tables()["distance_v3"]["rows"]["l1"][0]},
    }


PAPER_NUMBERS = _read_paper_numbers()


@dataclass(frozen=True)
class Size:
    """The smallest effect of interest: a share of a gain, or a number."""

    share: float = 0.1  # share of a gain; a tenth if the paper gives no size
    steps_of: str = ""  # study whose arm `steps` has that gain; empty: `gain` of the measurement
    number: float | None = None  # size in the unit of the reward; None: use the share
    paper: str = ""  # the paper's number and the table; empty: the paper gives none

    def in_units(self, measured: Measurement) -> float:
        """Return the size in the unit of a measurement."""
        if self.number is not None:
            return self.number
        steps = contrast_arms(self.steps_of, "steps", None) if self.steps_of else None
        return self.share * abs(steps.estimate.mean if steps else measured.gain)


def paper_size(
    table: str,  # a key of `PAPER_NUMBERS`
    row: str,  # row of the table
    against: float,  # number that is subtracted from that of the row
    steps_of: str,  # study whose arm `steps` scales the size here
) -> Size:
    """Express the HPSv3 of a row of the paper minus another number as a share of what steps gained in the paper."""
    first = PAPER_NUMBERS["Table 1"]
    difference = PAPER_NUMBERS[table][row] - against
    share = difference / (first["steps"] - first["base"])
    text = f"{difference:+.3f} HPSv3, {100 * share:+.0f}% of the gain of steps ({table})".replace(
        "-", "\u2212"
    )
    return Size(abs(share), steps_of, paper=text)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper or about it, and how it is tested here."""

    text: str  # the claim in one sentence
    page: str  # page in findings/ that tests it
    direction: str  # above, below or equal
    measure: Callable[[], Measurement | None]  # returns None if runs are missing
    size: Size = Size()  # smallest effect of interest
    bound: float = 0.0  # number that the measurement is compared with
    studies: tuple[str, ...] = ()  # studies whose rows decide
    since: str = ""  # what was changed after data had been seen


def _theory_claims() -> list[Claim]:
    """Return the claims about gradients and dynamics."""
    truth = partial(stored_measurement, "ground_truth.json")
    return [
        Claim(
            "In more than 37% of the steps, the state's value contradicts the final reward",
            "ground-truth",
            "above",
            partial(truth, "states", "mean_by_share", "of the states", sampler="flow", parts="all"),
            Size(number=0.037, paper="37% and 44%, by a trained judge (v3)"),
            0.37,
            since="bound",
        ),
        Claim(
            "With the weights of [2,3,4,7], an equally accurate gradient takes fewer images",
            "ground-truth",
            "below",
            partial(
                truth,
                "gradients",
                "images_of_steps",
                "of steps' images",
                sampler="flow",
                transitions=16,
                estimator="2,3,4,7",
            ),
            Size(number=0.1),
            1.0,
        ),
        Claim(
            "The dynamics do not depend on the prompt: less than 5% of a profile's variation",
            "../11_measurements/00_profiles",
            "equal",
            partial(
                stored_measurement,
                "profile_shares.json",
                "rows",
                "prompt_only",
                "of the variation",
                sampler="flow",
                distance="l1",
            ),
            Size(number=0.05),
        ),
    ]


def _chunk_claims() -> list[Claim]:
    """Return the claims that compare chunks with steps, and chunk settings with one another."""
    t1, t3, v3 = (PAPER_NUMBERS[name] for name in ("Table 1", "Table 3", "v3"))
    equal = [t3[name] for name in ("2x8", "4x4", "8x2")]
    fresh = ("confirmation",)
    first = ("chunk-setting",)
    confirmed = partial(contrast_arms, "confirmation")
    mean = Size(
        steps_of="chunk-setting",
        paper=f"{sum(equal) / 3 - t1['steps']:+.3f} HPSv3, mean of three (Table 3)",
        share=(sum(equal) / 3 - t1["steps"]) / (t1["steps"] - t1["base"]),
    )
    return [
        Claim(
            "Chunks beat steps",
            "confirmation",
            "above",
            partial(confirmed, "2-3-4-7", "steps"),
            paper_size("Table 1", "chunks", t1["steps"], "confirmation"),
            studies=fresh,
            since="fresh seeds",
        ),
        Claim(
            "Equal chunks beat steps",
            "chunk-setting",
            "above",
            partial(contrast_arms, "chunk-setting", ("2x8", "4x4", "8x2"), "steps"),
            mean,
            studies=first,
        ),
        Claim(
            "[2,3,4,7] beats the best equal chunks",
            "confirmation",
            "above",
            partial(confirmed, "2-3-4-7", "4x4"),
            paper_size("Table 1", "chunks", max(equal), "confirmation"),
            studies=fresh,
            since="compared arm, fresh seeds",
        ),
        Claim(
            "One chunk of the whole trajectory, with half the images and half the optimizer steps, falls behind "
            "[2,3,4,7]",
            "confirmation",
            "below",
            partial(confirmed, "16-half", "2-3-4-7"),
            paper_size("Table 3", "16", t1["chunks"], "confirmation"),
            studies=fresh,
            since="fresh seeds, wording",
        ),
        Claim(
            "Adaptive chunks beat steps",
            "chunk-setting",
            "above",
            partial(contrast_arms, "chunk-setting", "adaptive", "steps"),
            paper_size("v3", "adaptive", t1["steps"], "chunk-setting"),
            studies=first,
            since="compared arm",
        ),
        Claim(
            "One chunk of the whole trajectory gains as much as steps with twice its images",
            "confirmation",
            "equal",
            partial(contrast_arms, ("chunk-setting", "confirmation"), "16-half", "steps"),
            studies=("chunk-setting", "confirmation"),
            since="new",
        ),
    ]


def _explanation_claims() -> list[Claim]:
    """Return the claims that compare chunks and steps with equal weights or equal clipping."""
    contrasts = [
        (
            "Without clipping, steps with the chunks' weights beat steps",
            "above",
            "reweighted-free",
            "steps-free",
            "compared arm",
        ),
        (
            "With a tight clip range, chunks beat steps with the same weights",
            "above",
            "chunks",
            "reweighted",
            "controls",
        ),
        ("With a tight clip range, equal chunks beat steps", "above", "4x4", "steps", "arm"),
        (
            "Without clipping, equal chunks gain as much as steps",
            "equal",
            "4x4-free",
            "steps-free",
            "arm",
        ),
        (
            "With one update per iteration, equal chunks gain as much as steps",
            "equal",
            "4x4-once",
            "steps-once",
            "arm",
        ),
        (
            "Steps with the chunks' weights and no clipping beat chunks with a tight clip range",
            "above",
            "reweighted-free",
            "chunks",
            "new",
        ),
    ]
    return [
        Claim(
            text,
            "explain",
            direction,
            partial(contrast_arms, "explain", arm, other),
            studies=("explain",),
            since=since,
        )
        for text, direction, arm, other, since in contrasts
    ] + [
        Claim(
            "With a clip range wide enough for both, chunks beat steps",
            "explain",
            "above",
            partial(contrast_arms, "clip-width", "2-3-4-7", "steps"),
            paper_size("Table 1", "chunks", PAPER_NUMBERS["Table 1"]["steps"], "confirmation"),
            studies=("clip-width",),
            since="new",
        )
    ]


def _sampling_claims() -> list[Claim]:
    """Return the claims about the chunks that are sampled for training."""
    t1 = PAPER_NUMBERS["Table 1"]
    t5 = PAPER_NUMBERS["Table 5"]
    weighted = partial(contrast_arms, "weighting")
    lost = t5["weighted"] - t5["chunks"]
    return [
        Claim(
            "Weighted sampling of chunks raises the reward further",
            "weighting",
            "above",
            partial(weighted, "dynamics", "uniform"),
            paper_size("Table 1", "weighted", t1["chunks"], "confirmation"),
            studies=("weighting",),
        ),
        Claim(
            "Weighted sampling of chunks lowers GenEval",
            "weighting",
            "below",
            partial(weighted, "dynamics", "uniform", STRUCTURE_REWARD),
            Size(number=abs(lost), paper=f"{lost:+.3f} GenEval (Table 5)".replace("-", "\u2212")),
            studies=("weighting",),
        ),
        Claim(
            "The chunk nearest to the noise gains more than the one nearest to the image",
            "single-chunk",
            "above",
            partial(contrast_arms, "single-chunk", "chunk-1", "chunk-4"),
            Size(paper="Figure 6, no number"),
            studies=("single-chunk",),
        ),
        Claim(
            "Trained alone, the chunk nearest to the noise ends further below its peak than the one nearest to the "
            "image",
            "single-chunk",
            "above",
            peak_drop,
            Size(paper="unstable after 60 steps (Figure 6)"),
            studies=("instability",),
            since="fresh seeds, wording",
        ),
    ]


def reward_claims() -> list[Claim]:
    """Return the claims about hybrid inference, and about the effect of training on one reward on another."""
    t1, t4, t5 = (PAPER_NUMBERS[name] for name in ("Table 1", "Table 4", "Table 5"))
    geneval = t5["chunks"] - t5["base"]
    other = t4["chunks"] - t4["base"]
    share = other / (t1["chunks"] - t1["base"])
    return [
        Claim(
            "Hybrid inference protects structure against reward hacking",
            "hybrid",
            "above",
            hybrid_effect,
            studies=("hybrid",),
        ),
        Claim(
            "Training on the CLIP reward raises GenEval",
            "rewards",
            "above",
            partial(contrast_arms, "rewards", "clip", None, STRUCTURE_REWARD),
            Size(number=geneval, paper=f"{geneval:+.3f} GenEval (Table 5)"),
            studies=("rewards",),
            since="arms",
        ),
        Claim(
            "Training on graded GenEval raises the CLIP reward, as PickScore raised HPSv3",
            "rewards",
            "above",
            partial(contrast_arms, "rewards", "partial", None, gain_of="clip"),
            Size(
                share, paper=f"{other:+.3f} HPSv3, {100 * share:.0f}% of training on it (Table 4)"
            ),
            studies=("rewards",),
            since="arms",
        ),
    ]


def all_claims() -> list[Claim]:
    """Return all claims, in the order of the paper."""
    return [
        *_theory_claims(),
        *_chunk_claims(),
        *_explanation_claims(),
        *_sampling_claims(),
        *reward_claims(),
    ]


def describe_alternatives(
    claim: Claim,
    half_width: float,  # half the width of the interval
    smallest: float,  # smallest effect of interest
) -> str:
    """Describe for which means the claim would hold or not hold with an interval of this width, without Holm's correction.

    An example is "holds from +0.020 up; does not hold below +0.010"; the text is empty if the width is nan.
    """
    number = partial(format_number, signed=not claim.bound)
    sign = -1 if claim.direction == "below" else 1
    if half_width != half_width:
        return ""
    if claim.direction == "equal":
        room = smallest - half_width
        holds = "holds for no mean: too few seeds"
        if room > 0:
            holds = f"holds within \u00b1{format_number(room)}"
        return f"{holds}; does not hold beyond \u00b1{format_number(smallest + half_width)}"
    excludes_zero = claim.bound + sign * half_width
    reaches_smallest = claim.bound + sign * (smallest - half_width)
    if sign > 0:
        holds = f"from {number(max(excludes_zero, reaches_smallest))} up"
        fails = f"below {number(reaches_smallest)}"
    else:
        holds = f"from {number(min(excludes_zero, reaches_smallest))} down"
        fails = f"above {number(reaches_smallest)}"
    return f"holds {holds}; does not hold {fails}"


def plan_status(
    studies: Sequence[str],  # studies whose rows decide a claim
) -> str:  # planned, looked at, unplanned or not shown; empty without studies
    """Return whether the plan of the deciding rows is provably older than the rows ("planned"), or the weakest status."""
    stored_plans = read_json(PRESETS_DIR / "results" / "verdict" / "plans.json")["plans"]
    found = set()
    for study in studies:
        for row in analysis.load_study_rows(study):
            plan = row.get("plan")
            if plan is None:
                shown = [
                    entry["shown"]
                    for entry in stored_plans
                    if entry["study"] == study and entry["code"] == row["git_commit"]
                ]
                found.add("planned" if shown == [True] else "not shown")
            elif plan["unplanned"]:
                found.add("unplanned")
            elif plan["peeks"]:
                found.add("looked at")
            else:
                found.add("planned")
    for status in ("not shown", "unplanned", "looked at", "planned"):
        if status in found:
            return status
    return ""


def claim_rows(
    claims: Sequence[Claim],  # claims that get a row
    family: Sequence[Claim] | None = None,  # claims that Holm's correction counts; None: `claims`
) -> list[dict]:
    """Return a row per claim with its measurement and its verdict.

    The keys are claim, verdict, measured, smallest, p, power, otherwise, the paper, plan, since, one run, page,
    interval, bound and direction. A claim outside of the family has no smallest effect and no p-value. Claims without runs
    do not count in Holm's correction.
    """
    family = list(family or claims)
    others = [claim for claim in claims if claim not in family]
    measurements = {claim.text: claim.measure() for claim in [*family, *others]}
    sizes = {}
    p_values = {}
    for claim in family:
        measured = measurements[claim.text]
        if measured is None:
            continue
        sign = -1 if claim.direction == "below" else 1
        smallest = claim.size.in_units(measured)
        estimate = measured.estimate
        sizes[claim.text] = smallest
        p_values[claim.text] = claim_p_value(
            distance=sign * (estimate.mean - claim.bound),
            error=estimate.standard_error(),
            degrees_of_freedom=np.inf if measured.is_normal else estimate.degrees_of_freedom,
            equality_margin=smallest if claim.direction == "equal" else 0.0,
        )
    tested = {text: p for text, p in p_values.items() if p == p}  # without nan
    corrected = {}
    if tested:
        holm = multipletests(list(tested.values()), method="holm")[1]
        corrected = dict(zip(tested, holm, strict=True))
    return [
        _claim_row(
            claim=claim,
            measured=measurements[claim.text],
            smallest=sizes.get(claim.text),
            p=corrected.get(claim.text),
        )
        for claim in claims
    ]


def _claim_row(
    claim: Claim,
    measured: Measurement | None,
    smallest: float | None,  # smallest effect of interest
    p: float | None,  # after Holm's correction
) -> dict:
    """Return the row of one claim, see `claim_rows`."""
    row = {
        "claim": claim.text,
        "verdict": "not tested",
        "measured": "not measured yet",
        "smallest": smallest,
        "p": p,
        "power": float("nan"),
        "otherwise": "",
        "the paper": claim.size.paper or "gives no size",
        "plan": plan_status(claim.studies),
        "since": claim.since,
        "one run": "",
        "page": claim.page,
        "interval": None,
        "bound": claim.bound,
        "direction": claim.direction,
    }
    if measured is None:
        return row
    interval = measured.interval
    estimate = measured.estimate
    distances = {name: x - claim.bound for name, x in interval.items()}
    half_width = distances["hi"] - distances["mean"]
    seeds = ""
    if not measured.is_normal:
        seeds = f", {estimate.seeds} seed{'s' if estimate.seeds != 1 else ''}"
    without_nan = {name: None if x != x else x for name, x in interval.items()}
    formatted = format_interval(without_nan, signed=not claim.bound)
    return row | {
        "verdict": claim_verdict(distances, claim.direction, smallest, 1.0 if p is None else p),
        "measured": f"{formatted} {measured.unit}{seeds}",
        "power": claim_power(
            smallest=smallest,
            error=estimate.standard_error(),
            seeds=10**6 if measured.is_normal else estimate.degrees_of_freedom + 1,
            is_equality=claim.direction == "equal",
        ),
        "otherwise": describe_alternatives(claim, half_width, smallest),
        "interval": interval,
        "one run": "" if measured.first is None else format_number(measured.first, signed=True),
    }


@with_house_style
def plot_verdicts(
    rows: Sequence[Mapping],  # rows of claims, from `claim_rows`
) -> Figure:
    """Draw a forest plot of all claims, coloured by verdict, in a size for narrow screens."""
    figure, axes = create_subplots(size=(5.0, 0.9 + 0.46 * len(rows)))
    axis, low, high, edge = axes[0, 0], -6.0, 10.0, 17.0  # the numbers are right of `high`
    axis.axvspan(-1, 1, color="#f2f2f2", zorder=0)
    for at in (0, 1):
        axis.axvline(at, color="black", linewidth=0.8, linestyle="-" if at == 0 else ":")
    for number, row in enumerate(rows, 1):
        y, shade = -number, VERDICTS[row["verdict"]]
        words = f"{number}  {row['claim']}"
        axis.text(
            low,
            y + 0.36,
            words if len(words) < 92 else f"{words[:89]}...",
            fontsize=6.8,
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        axis.text(
            edge,
            y,
            row["measured"].split(" pocket")[0].split(" of ")[0],
            fontsize=6.8,
            va="center",
            ha="right",
        )
        if row["interval"] is None:
            continue
        sign = (-1 if row["direction"] == "below" else 1) / row["smallest"]
        mean, lo, hi = (
            (row["interval"][name] - row["bound"]) * sign for name in ("mean", "lo", "hi")
        )
        lo, hi = min(lo, hi), max(lo, hi)
        axis.plot(
            [max(lo, low), min(hi, high)], [y, y], color=shade, linewidth=2.4, solid_capstyle="butt"
        )
        axis.plot(
            min(max(mean, low), high),
            y,
            "s" if row["direction"] == "equal" else "o",
            color=shade,
            markersize=5,
        )
        for end, beyond, mark in ((low, lo < low, "<"), (high, hi > high, ">")):
            if beyond:
                axis.plot(end, y, mark, color=shade, markersize=6, clip_on=False)
    for word in [word for word in VERDICTS if any(row["verdict"] == word for row in rows)]:
        axis.plot([], [], "o-", color=VERDICTS[word], label=word)
    axis.legend(
        ncol=4,
        fontsize=7,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        columnspacing=1,
        handlelength=1.2,
    )
    axis.set(
        xlim=(low, edge),
        ylim=(-len(rows) - 0.6, -0.3),
        yticks=[],
        xticks=[-5, -1, 0, 1, 5],
        xlabel="effect in units of the smallest effect of interest",
    )
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    return figure


def answer_table(
    page: str,  # name of a page in nbs/findings, such as explain
) -> list[dict]:  # one per claim: texts, keyed by column
    """Return the verdicts on the claims of one page, with Holm's correction for all claims of the book."""

    def format_row(row: Mapping) -> dict[str, str]:
        """Format the row of a claim as texts, keyed by column."""
        p = row["p"]
        smallest = "" if row["smallest"] is None else format_number(row["smallest"])
        return {
            "claim": row["claim"],
            "verdict": row["verdict"],
            "measured": row["measured"],
            "smallest effect": smallest,
            "p (Holm)": "" if p is None or p != p else "<0.001" if p < 0.001 else f"{p:.3f}",
            "power": "" if row["power"] != row["power"] else f"{row['power']:.2f}",
            "otherwise": row["otherwise"],
            "the paper": row["the paper"],
            "plan": row["plan"],
        }

    return [
        format_row(row)
        for row in claim_rows([c for c in all_claims() if c.page == page], all_claims())
    ]


def claims_markdown(
    rows: Sequence[Mapping],  # rows of claims, from `claim_rows`
    root: str = "",  # path from the page that shows the table to nbs/findings/
) -> str:
    """Format the verdicts as a Markdown table with the verdict in the first column."""
    lines = [
        f"| {i} | **{row['verdict']}** | "
        f"[{row['claim'].replace('[', '').replace(']', '')}]({root}{row['page']}.ipynb) | "
        f"{row['measured']} |"
        for i, row in enumerate(rows, 1)
    ]
    return "\n".join(["| | verdict | claim | measured on pocket |", "|---|---|---|---|", *lines])


def rows_markdown(
    rows: Sequence[Mapping],  # texts, keyed by column; all rows have the same columns
) -> str:
    """Format rows as a Markdown table, whose cells wrap on a narrow screen."""
    names = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(str(text) for text in row.values())} |" for row in rows]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *lines])
