"""What the paper claims, how each claim is asked of the kept rows, and the verdicts as tables and one picture.

The pages in nbs/findings, nbs/index.ipynb and tests import it; the rule is
`chunk_grpo.core.statistics.claim_verdict`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

STRUCTURE_REWARD = "pocket-geneval"  # whether an image is what its prompt asks for
VERDICTS = {
    "holds": "#009E73",
    "does not hold": "#D55E00",
    "cannot tell": "#7F7F7F",
    "open": "#B8B8B8",
}


@dataclass(frozen=True)
class CrossedMean:
    """A mean over seeds and prompts, both random, with the parts of its variance."""

    mean: float
    seeds: int
    prompts: int  # 1 where a run has one number
    of_seeds: float  # variance of what a seed adds
    of_prompts: float  # variance of what a prompt adds
    rest: float  # variance of what is left

    def error(self, seeds: int | None = None, prompts: int | None = None) -> float:
        """The standard error (a) with its own seeds and prompts, or with so many; nan with one seed."""
        s = seeds or self.seeds
        p = prompts or self.prompts
        return (
            float("nan")
            if s < 2
            else (self.of_seeds / s + self.of_prompts / p + self.rest / (s * p)) ** 0.5
        )

    @property
    def freedom(self) -> float:
        """Degrees of freedom."""
        return (min(self.seeds, self.prompts) if self.prompts > 1 else self.seeds) - 1


def crossed_mean(
    values: np.ndarray,  # (seeds, prompts) differences, or (seeds, 1)
) -> CrossedMean:
    """The mean of a table of seeds by prompts, and the parts of its variance."""
    s, p = values.shape
    mean = values.mean()
    by_seed = values.mean(1)
    by_prompt = values.mean(0)
    if s < 2 or p < 2:
        return CrossedMean(
            float(mean), s, p, float(by_seed.var(ddof=1)) if s > 1 else float("nan"), 0.0, 0.0
        )
    rest = ((values - by_seed[:, None] - by_prompt + mean) ** 2).sum() / ((s - 1) * (p - 1))
    parts = [
        max(0.0, by_seed.var(ddof=1) - rest / p),
        max(0.0, by_prompt.var(ddof=1) - rest / s),
        rest,
    ]
    return CrossedMean(float(mean), s, p, *map(float, parts))


def prompt_gains(
    rows: Sequence[Mapping],
    arm: str,
    reward: str,
    evaluated: str = "plain",  # arm of the evaluation
) -> pd.DataFrame:  # a row a seed, a column a prompt
    """What an arm gains over the base, for every seed and prompt."""
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
class Evidence:
    """What the kept runs say of one claim."""

    found: CrossedMean
    unit: str
    gain: float | None = None  # of the arm that is compared with
    first: float | None = None  # the difference of the first seed alone
    arms: tuple[str, ...] = ()
    normal: bool = False  # kept with a standard error of its own: no seeds

    @property
    def interval(self) -> dict[str, float]:  # mean, lo, hi
        """The mean with its 95% interval."""
        half = self.found.error() * (
            1.96 if self.normal else stats.t.ppf(0.975, self.found.freedom)
        )
        return {"mean": self.found.mean, "lo": self.found.mean - half, "hi": self.found.mean + half}


def contrast_arms(
    study: str | tuple[str, ...],  # one, or several whose seeds are put together
    arm: str | Sequence[str],  # its name; of several the mean
    other: str | None,  # None: the base
    reward: str = "pocket-clip",
    gain_of: str | None = None,  # arm whose gain is the measure; None: `other`
    evaluated: tuple[str, str] = ("plain", "plain"),  # arms of the evaluation
) -> Evidence | None:  # None where an arm has no run
    """The gain of one arm minus that of another on the same seeds and prompts."""
    names = (study,) if isinstance(study, str) else study
    rows = [row for name in names for row in analysis.load_study_rows(name)]
    mine = (arm,) if isinstance(arm, str) else tuple(arm)
    there = analysis.arms_with_runs(rows)
    if not mine or not {*mine, other or mine[0], gain_of or mine[0]} <= set(there):
        return None
    side = sum(prompt_gains(rows, name, reward, evaluated[0]) for name in mine) / len(mine)
    apart = (side - prompt_gains(rows, other, reward, evaluated[1]) if other else side).dropna()
    measure = gain_of or other
    gain = (
        float(prompt_gains(rows, measure, reward, evaluated[1]).mean(axis=None))
        if measure
        else None
    )
    if not len(apart):
        return None
    used = tuple(f"{name}/{a}" for name in names for a in (*mine, *([other] if other else [])))
    return Evidence(crossed_mean(apart.to_numpy()), reward, gain, float(apart.iloc[0].mean()), used)


def claim_p_value(
    away: float,  # mean from the bound on, turned so that the claimed side is positive
    error: float,
    freedom: float,
    equal: float = 0.0,  # smallest effect of an equality; 0: the claim has a side
) -> float:  # nan where one seed is too few
    """Two-sided p-value of a claim: of no effect, or for an equality of an effect as large as the smallest."""
    distances = (equal - away, equal + away) if equal else (away,)
    if not error > 0:
        return float("nan") if error != error else float(min(distances) <= 0)
    return float(min(1.0, 2 * max(stats.t.sf(d / error, freedom) for d in distances)))


def claim_power(
    smallest: float,
    error: float,
    seeds: int,  # or degrees of freedom and one
    equal: bool = False,
) -> float:  # 0 ... 1; nan with one seed
    """The chance that such runs say `holds`, asked alone, were the effect the smallest, or none for an equality."""
    if not error > 0 or seeds < 2:
        return float("nan")
    if equal:
        return max(
            0.0,
            2 * float(stats.t.cdf(smallest / error - stats.t.ppf(0.975, seeds - 1), seeds - 1)) - 1,
        )
    return pilot.paired_power(smallest / (error * seeds**0.5), seeds)


def seeds_needed(
    pilot: CrossedMean,
    smallest: float,  # effect of interest
    power: float = 0.8,
    prompts: int | None = None,  # None: the pilot's
    most: int = 2000,
) -> int | None:  # None: more than `most`
    """The fewest seeds with which such a contrast shows the effect this often."""
    enough = (
        s
        for s in range(3, most + 1)
        if claim_power(smallest, pilot.error(s, prompts), min(s, prompts or pilot.prompts)) >= power
    )
    return next(enough, None)


def peak_drop() -> Evidence | None:
    """How much further below its own peak the reward ends for the first chunk alone than for the last alone."""
    rows = analysis.load_study_rows("instability")
    drop = (
        analysis.pivot_by_seed(
            rows,
            lambda row: (
                (curve := pd.Series(curve_column(row, "pocket-clip")).rolling(5).mean()).max()
                - curve.iloc[-1]
            ),
        )
        if rows
        else {}
    )
    if not {"chunk-1", "chunk-4"} <= set(drop):
        return None
    apart = (drop["chunk-1"] - drop["chunk-4"]).dropna().to_numpy()[:, None]
    gain = float(prompt_gains(rows, "chunk-4", "pocket-clip").mean(axis=None))
    return (
        Evidence(
            crossed_mean(apart),
            "pocket-clip",
            gain,
            float(apart[0, 0]),
            ("instability/chunk-1", "instability/chunk-4"),
        )
        if len(apart)
        else None
    )


def hybrid_effect() -> Evidence | None:
    """What the longest run keeps of structure when the base takes over at 3/5; measured by what it loses without."""
    rows = analysis.load_study_rows("hybrid")
    if not any(row["arm"] == "it-36" for row in rows):
        return None
    split = f"split-{round(0.6 * (rows[0]['settings'] | rows[0]['evaluation'])['eval_steps']):02d}"
    found = contrast_arms("hybrid", "it-36", "it-36", STRUCTURE_REWARD, evaluated=(split, "plain"))
    return Evidence(
        found.found,
        found.unit,
        found.gain,
        found.first,
        (f"hybrid/it-36/{split}", "hybrid/it-36/plain"),
    )


def kept_evidence(
    file: str,  # in runs/results/benchmarks
    part: str,  # name of a list in it
    value: str,  # of its entries
    unit: str,
    **wanted,  # values that the entry must have
) -> Evidence | None:
    """A kept measurement with its standard error; None where it is not there."""
    path = PRESETS_DIR / "results" / "benchmarks" / file
    for entry in read_json(path)[part] if path.is_file() else []:
        if all(entry[name] == x for name, x in wanted.items()):
            error = entry.get(f"{value}_se", entry.get("se"))
            return Evidence(
                CrossedMean(entry[value], 2, 1, 2 * error**2, 0.0, 0.0), unit, normal=True
            )
    return None


def _read_paper_numbers() -> dict[
    str, dict[str, float]
]:  # table of version 1, or v3 -> row -> number
    """The numbers of the paper's tables that its claims rest on."""
    names = {
        "base": "FLUX.1-dev",
        "steps": "Dance-GRPO",
        "chunks": "Chunk-GRPO",
        "weighted": "Chunk-GRPO +ws",
    }

    def of(key: str, column: str, *short: str) -> dict[str, float]:
        values = {row["row"]: row[column] for row in paper_tables.paper_table_rows(key)}
        return {row: values[names[row]] for row in short}

    return {
        "Table 1": of(
            "table1_preference", "hpsv3", "base", "steps", "chunks", "weighted"
        ),  # trained on HPSv3
        "Table 2": of("table2_wise_rewritten", "overall", "chunks", "weighted"),  # trained on HPSv3
        "Table 3": {
            row["chunks"]: row["hpsv3"]
            for row in paper_tables.paper_table_rows("table3_chunk_setting")
            if row["steps"] == 17 and row["row"] == "Chunk-GRPO w/o td"
        },  # trained on HPSv3
        "Table 4": of("table4_pickscore", "hpsv3", "base", "chunks"),  # trained on PickScore
        "Table 5": of("table5_geneval", "overall", "base", "chunks", "weighted"),  # trained on CLIP
        "v3": {"adaptive": paper_tables.read_paper_tables()["distance_v3"]["rows"]["l1"][0]},
    }


PAPER_NUMBERS = _read_paper_numbers()


@dataclass(frozen=True)
class Size:
    """The smallest effect of interest: a share of a gain, or a number."""

    share: float = 0.1  # of a gain; a tenth where the paper gives no size
    steps_of: str = ""  # study whose `steps` gained it; empty: the arm that is compared with
    number: float | None = None  # in the unit of the reward, in place of a share
    paper: str = ""  # the paper's number and its place; empty: it gives none

    def of(self, found: Evidence) -> float:
        """In the unit of what was measured."""
        if self.number is not None:
            return self.number
        steps = contrast_arms(self.steps_of, "steps", None) if self.steps_of else None
        return self.share * abs(steps.found.mean if steps else found.gain)


def paper_size(
    table: str,  # of `PAPER_NUMBERS`
    row: str,
    against: float,  # the number it is compared with
    steps_of: str,  # study whose `steps` measure the size here
) -> Size:
    """A difference of the paper's in HPSv3 as a share of the gain of steps."""
    first = PAPER_NUMBERS["Table 1"]
    apart = PAPER_NUMBERS[table][row] - against
    share = apart / (first["steps"] - first["base"])
    words = f"{apart:+.3f} HPSv3, {100 * share:+.0f}% of the gain of steps ({table})".replace(
        "-", "\u2212"
    )
    return Size(abs(share), steps_of, paper=words)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper or about it, and how it is asked here."""

    words: str
    page: str  # where it is looked at, in findings/
    direction: str  # above, below or equal
    measure: Callable[[], Evidence | None]
    size: Size = Size()
    bound: float = 0.0  # what the number is compared with
    studies: tuple[str, ...] = ()  # whose rows decide
    since: str = ""  # what changed after data were seen


def _theory_claims() -> list[Claim]:
    """Claims on gradients and dynamics."""
    truth = partial(kept_evidence, "ground_truth.json")
    return [
        Claim(
            "In more than 37% of the steps the state is worth something else than the final reward says",
            "ground-truth",
            "above",
            partial(truth, "states", "mean_by_share", "of the states", sampler="flow", parts="all"),
            Size(number=0.037, paper="37% and 44%, by a trained judge (v3)"),
            0.37,
            since="bound",
        ),
        Claim(
            "The weights of [2,3,4,7], in chunks or on steps, need fewer images for as true a gradient",
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
                kept_evidence,
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
    """Chunks against steps, and chunks against chunks."""
    t1, t3, v3 = (PAPER_NUMBERS[name] for name in ("Table 1", "Table 3", "v3"))
    equal = [t3[name] for name in ("2x8", "4x4", "8x2")]
    fresh = ("confirmation",)
    first = ("chunk-setting",)
    asked = partial(contrast_arms, "confirmation")
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
            partial(asked, "2-3-4-7", "steps"),
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
            partial(asked, "2-3-4-7", "4x4"),
            paper_size("Table 1", "chunks", max(equal), "confirmation"),
            studies=fresh,
            since="rival, fresh seeds",
        ),
        Claim(
            "One chunk of the whole trajectory, with half the images and half the optimizer steps, falls behind "
            "[2,3,4,7]",
            "confirmation",
            "below",
            partial(asked, "16-half", "2-3-4-7"),
            paper_size("Table 3", "16", t1["chunks"], "confirmation"),
            studies=fresh,
            since="fresh seeds, words",
        ),
        Claim(
            "Adaptive chunks beat steps",
            "chunk-setting",
            "above",
            partial(contrast_arms, "chunk-setting", "adaptive", "steps"),
            paper_size("v3", "adaptive", t1["steps"], "chunk-setting"),
            studies=first,
            since="rival",
        ),
        Claim(
            "One chunk of the whole trajectory does as well as steps that have twice its images",
            "confirmation",
            "equal",
            partial(contrast_arms, ("chunk-setting", "confirmation"), "16-half", "steps"),
            studies=("chunk-setting", "confirmation"),
            since="new",
        ),
    ]


def _explanation_claims() -> list[Claim]:
    """What of the difference between chunks and steps remains where weights and clipping are alike."""
    asked = [
        (
            "Without clipping, steps with the chunks' weights beat steps",
            "above",
            "reweighted-free",
            "steps-free",
            "rival",
        ),
        (
            "Under a tight clip range chunks beat steps of the same weights",
            "above",
            "chunks",
            "reweighted",
            "controls",
        ),
        ("Under a tight clip range equal chunks beat steps", "above", "4x4", "steps", "arm"),
        ("Without clipping equal chunks equal steps", "equal", "4x4-free", "steps-free", "arm"),
        (
            "With one update an iteration equal chunks equal steps",
            "equal",
            "4x4-once",
            "steps-once",
            "arm",
        ),
        (
            "Steps with the chunks' weights and no clipping beat chunks under a tight clip range",
            "above",
            "reweighted-free",
            "chunks",
            "new",
        ),
    ]
    return [
        Claim(
            words,
            "explain",
            direction,
            partial(contrast_arms, "explain", arm, other),
            studies=("explain",),
            since=since,
        )
        for words, direction, arm, other, since in asked
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
    """Which chunks are drawn."""
    t1 = PAPER_NUMBERS["Table 1"]
    t5 = PAPER_NUMBERS["Table 5"]
    weighted = partial(contrast_arms, "weighting")
    lost = t5["weighted"] - t5["chunks"]
    return [
        Claim(
            "Weighted drawing raises the reward further",
            "weighting",
            "above",
            partial(weighted, "dynamics", "uniform"),
            paper_size("Table 1", "weighted", t1["chunks"], "confirmation"),
            studies=("weighting",),
        ),
        Claim(
            "Weighted drawing costs structure",
            "weighting",
            "below",
            partial(weighted, "dynamics", "uniform", STRUCTURE_REWARD),
            Size(number=abs(lost), paper=f"{lost:+.3f} GenEval (Table 5)".replace("-", "\u2212")),
            studies=("weighting",),
        ),
        Claim(
            "The chunk nearest to the noise teaches more than the one nearest to the image",
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
            since="fresh seeds, words",
        ),
    ]


def reward_claims() -> list[Claim]:
    """Hybrid inference, and what training on one reward does to another."""
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
            "Training on GenEval's graded form raises the CLIP reward, as PickScore raised HPSv3",
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
    """All claims, in the order of the paper."""
    return [
        *_theory_claims(),
        *_chunk_claims(),
        *_explanation_claims(),
        *_sampling_claims(),
        *reward_claims(),
    ]


def otherwise(
    claim: Claim,
    half: float,  # half of the interval
    smallest: float,
) -> str:
    """The means that would give each verdict, with this interval and before the correction."""
    at = partial(format_number, signed=not claim.bound)
    sign = -1 if claim.direction == "below" else 1
    if half != half:
        return ""
    if claim.direction == "equal":
        room = smallest - half
        inside = (
            f"holds within \u00b1{format_number(room)}"
            if room > 0
            else "holds for none: too few seeds"
        )
        return f"{inside}; does not hold beyond \u00b1{format_number(smallest + half)}"
    first = claim.bound + sign * half
    last = claim.bound + sign * (smallest - half)
    beyond = ("from {} up", "below {}") if sign > 0 else ("from {} down", "above {}")
    holds = max(first, last) if sign > 0 else min(first, last)
    return f"holds {beyond[0].format(at(holds))}; does not hold {beyond[1].format(at(last))}"


def plan_of(
    studies: Sequence[str],
) -> str:  # planned, unplanned, looked at, or not shown; empty where no study decides
    """Whether the plan of the deciding rows can be shown to be older than they are."""
    kept = read_json(PRESETS_DIR / "results" / "verdict" / "plans.json")["plans"]
    words = []
    for study in studies:
        for row in analysis.load_study_rows(study):
            plan = row.get("plan")
            if plan is None:
                known = [
                    one["shown"]
                    for one in kept
                    if one["study"] == study and one["code"] == row["git_commit"]
                ]
                words.append("planned" if known == [True] else "not shown")
            else:
                words.append(
                    "unplanned"
                    if plan["unplanned"]
                    else "looked at"
                    if plan["peeks"]
                    else "planned"
                )
    order = ("not shown", "unplanned", "looked at", "planned")
    return next((word for word in order if word in words), "")


def claim_rows(
    asked: Sequence[Claim],
    # claims that are corrected together with these; None: these
    family: Sequence[Claim] | None = None,
    # claim, verdict, measured, smallest, p, power, otherwise, paper, plan, since, one run, page;
    # numbers
) -> list[dict]:
    """A row a claim."""
    family = list(family or asked)
    every = {
        claim.words: claim.measure() for claim in [*family, *(c for c in asked if c not in family)]
    }
    sizes, raw = {}, {}
    for claim in family:
        if (found := every[claim.words]) is not None:
            sign = -1 if claim.direction == "below" else 1
            smallest = claim.size.of(found)
            freedom = np.inf if found.normal else found.found.freedom
            sizes[claim.words] = smallest
            raw[claim.words] = claim_p_value(
                sign * (found.found.mean - claim.bound),
                found.found.error(),
                freedom,
                smallest if claim.direction == "equal" else 0.0,
            )
    known = [words for words, p in raw.items() if p == p]
    holm = (
        dict(
            zip(
                known, multipletests([raw[words] for words in known], method="holm")[1], strict=True
            )
        )
        if known
        else {}
    )
    return [
        _claim_row(claim, every[claim.words], sizes.get(claim.words), holm.get(claim.words))
        for claim in asked
    ]


def _claim_row(
    claim: Claim,
    found: Evidence | None,
    smallest: float | None,  # effect of interest
    p: float | None,  # after Holm's correction
) -> dict:  # as of `claim_rows`
    """The row of one claim."""
    row = {
        "claim": claim.words,
        "verdict": "open",
        "measured": "not measured yet",
        "smallest": smallest,
        "p": p,
        "power": float("nan"),
        "otherwise": "",
        "the paper": claim.size.paper or "gives no size",
        "plan": plan_of(claim.studies),
        "since": claim.since,
        "one run": "",
        "page": claim.page,
        "interval": None,
        "bound": claim.bound,
        "direction": claim.direction,
    }
    if found is None:
        return row
    interval, count = found.interval, found.found.seeds
    moved = {name: x - claim.bound for name, x in interval.items()}
    half = moved["hi"] - moved["mean"]
    error = found.found.error()
    of = "" if found.normal else f", {count} seed{'s' * (count != 1)}"
    known = {name: None if x != x else x for name, x in interval.items()}
    return row | {
        "verdict": claim_verdict(moved, claim.direction, smallest, 1.0 if p is None else p),
        "measured": f"{format_interval(known, signed=not claim.bound)} {found.unit}{of}",
        "power": claim_power(
            smallest,
            error,
            10**6 if found.normal else found.found.freedom + 1,
            claim.direction == "equal",
        ),
        "otherwise": otherwise(claim, half, smallest),
        "interval": interval,
        "one run": "" if found.first is None else format_number(found.first, signed=True),
    }


@with_house_style
def plot_verdicts(
    rows: Sequence[Mapping],  # of `claim_rows`
) -> Figure:
    """A forest of all claims, coloured by verdict; small enough for a telephone."""
    figure, axes = create_subplots(size=(5.0, 0.9 + 0.46 * len(rows)))
    axis, low, high, edge = axes[0, 0], -6.0, 10.0, 17.0  # from `high` on stand the numbers
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
    page: str,  # of nbs/findings, such as explain
) -> list[dict]:  # column -> text
    """The answers of one page, corrected for all claims of the book."""

    def text(row):
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
        text(row) for row in claim_rows([c for c in all_claims() if c.page == page], all_claims())
    ]


def claims_markdown(
    rows: Sequence[Mapping],  # of `claim_rows`
    root: str = "",  # the way from the reader's page to nbs/findings/
) -> str:
    """The verdicts as markdown, the answer first."""
    lines = [
        f"| {i} | **{row['verdict']}** | "
        f"[{row['claim'].replace('[', '').replace(']', '')}]({root}{row['page']}.ipynb) | "
        f"{row['measured']} |"
        for i, row in enumerate(rows, 1)
    ]
    return "\n".join(["| | verdict | claim | measured on pocket |", "|---|---|---|---|", *lines])


def rows_markdown(
    rows: Sequence[Mapping],  # a mapping a row: column -> text
) -> str:
    """Rows as a markdown table, whose cells wrap on a narrow screen."""
    names = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(str(text) for text in row.values())} |" for row in rows]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *lines])
