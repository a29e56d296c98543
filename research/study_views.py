"""Computations on a study's rows for single pages of nbs/findings: falling curves, splits, and lost and gained objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from chunk_grpo import InputError
from chunk_grpo.core.settings import PRESETS_DIR
from chunk_grpo.core.statistics import claim_verdict, t_intervals
from chunk_grpo.reporting.figures import create_subplots, with_house_style
from chunk_grpo.reporting.tables import format_small_number, rows_to_html
from chunk_grpo.studies import analysis
from chunk_grpo.studies.analysis import (
    arms_with_runs,
    contrast_table,
    format_difference,
    gains_by_seed,
    paired_differences,
    pivot_by_seed,
)
from chunk_grpo.studies.design import Study, load_study

FALL_LEVELS = {
    "start": 2.0,
    "peak": 4.0,
}  # level below which a curve falls -> number of standard errors


def find_lasting_fall(
    values: np.ndarray,  # (n,), one number per iteration
    level: str = "start",  # number that the curve falls below: start or peak
    window: int = 5,  # w, number of iterations in a mean
) -> int | None:  # first iteration, from 1, from which the curve stays below the level; None: never
    """Find the iteration from which a curve has fallen (a) below its start or its peak.

    Raises InputError for another level, or if the curve is shorter than two windows.
    """
    if level not in FALL_LEVELS or len(values) < 2 * window:
        raise InputError(
            f"`level` must be {' or '.join(FALL_LEVELS)}, for a curve of at least {2 * window} iterations; got "
            f"{level!r} for {len(values)} iterations"
        )
    means = pd.Series(values).rolling(window).mean().to_numpy()
    error = np.sqrt(np.nanmean(np.diff(values) ** 2) / 2) * np.sqrt(2 / window)
    high = means[window - 1] if level == "start" else np.nanmax(means)
    above = np.flatnonzero(~(means < high - FALL_LEVELS[level] * error))
    return int(above[-1]) + 2 if above[-1] + 1 < len(values) else None


def peak_growth(
    values: np.ndarray,  # (n,), such as the norm of the gradient at each iteration
    window: int = 5,  # number of iterations in a mean
) -> float:  # nan if fewer than `window` values are finite
    """Return the largest mean over a window as a multiple of the first one."""
    means = pd.Series(values[np.isfinite(values)]).rolling(window).mean().to_numpy()[window - 1 :]
    return float(means.max() / means[0]) if len(means) else float("nan")


def split_step(
    row: Mapping,  # row of a finished run
    arm: str,  # arm of the evaluation: base, plain, hybrid, split-05 ...
) -> int:
    """Return the step at which the base takes over in an arm of the evaluation."""
    settings = {**row["settings"], **row["evaluation"]}
    named = {"base": 0, "plain": settings["eval_steps"], "hybrid": settings["hybrid_split"]}
    return named[arm] if arm in named else int(arm.removeprefix("split-"))


def gains_by_split(
    rows: Sequence[Mapping],  # rows of finished runs, all evaluated at the same splits
    reward: str,  # name of a reward that was evaluated
    arm: str,  # arm of the study
) -> pd.DataFrame:  # a row per split, with the columns of `t_intervals`
    """Compute the gain at every split, with its interval over seeds."""
    runs = [row for row in rows if row["arm"] == arm]
    arm_of_split = {split_step(runs[0], name): name for name in runs[0]["scores"]}
    gains = {}
    for split in sorted(arm_of_split):
        gains[split] = gains_by_seed(runs, reward, arm_of_split[split])[arm]
    return t_intervals(pd.DataFrame(gains))


@with_house_style
def plot_split_curves(
    rows: Sequence[Mapping],  # rows of finished runs
    rewards: Sequence[str],  # names of rewards, one panel each
) -> Figure:
    """Draw the gain over the base at every split, one line per arm, with 95% intervals."""
    figure, axes = create_subplots(len(rewards), size=(3.6 * max(2, len(rewards)), 2.9))
    shades = mpl.colormaps["viridis"](np.linspace(0.05, 0.8, len(arms_with_runs(rows))))
    for axis, reward in zip(axes[0], rewards, strict=True):
        for name, shade in zip(arms_with_runs(rows), shades, strict=True):
            gains = gains_by_split(rows, reward, name)
            axis.fill_between(gains.index, gains.lo, gains.hi, color=shade, alpha=0.15, linewidth=0)
            axis.plot(gains.index, gains["mean"], color=shade, marker="o", markersize=3, label=name)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(
            xlabel="step at which the base takes over", ylabel="gain over the base", title=reward
        )
    axes[0, 0].legend(fontsize=8)
    return figure


_SHARE_OF = {"lost": "right", "gained": "missed"}  # count -> the count by which it is divided


def changed_share(
    rows: Sequence[Mapping],  # rows of finished runs
    reward: str,  # name of a reward that judges objects
    count: str = "lost",  # lost or gained
    kind: str = "objects",  # objects or images
    arm: str = "plain",  # arm of the evaluation
) -> (
    pd.DataFrame
):  # a row per seed, a column per arm; nan if the base had none or none were counted
    """Compute the share of the base's correct objects that a run lost, or of its missed ones that it gained."""

    def share(row: Mapping) -> float:
        """Return the share of one run."""
        counts = row["preserved"].get(arm, {}).get(reward, {}).get(kind)
        if not counts or not counts[_SHARE_OF[count]]:
            return np.nan
        return counts[count] / counts[_SHARE_OF[count]]

    return pivot_by_seed(rows, share)


def preservation_table(
    rows: Sequence[Mapping],  # rows of finished runs
    reward: str,  # name of a reward that judges objects
    kind: str = "objects",  # objects or images
) -> list[dict]:  # one per arm: texts, keyed by column; empty if nothing was counted
    """Build a table of the lost and gained shares with their intervals over seeds."""
    shares = {count: t_intervals(changed_share(rows, reward, count, kind)) for count in _SHARE_OF}
    table = []
    for name in arms_with_runs(rows):
        if not shares["lost"].n[name]:
            continue
        line = {"arm": name}
        for count, intervals in shares.items():
            line[f"{kind} {count}"] = format_difference(intervals.loc[name]).replace("+", "")
        table.append(line)
    return table


def false_positive_note(
    intervals: pd.DataFrame,  # 95% intervals, from `t_intervals` or `paired_intervals`
) -> str:  # empty without intervals
    """Return a sentence that compares the number of intervals that exclude 0 with the number expected by chance."""
    finite = intervals.dropna(subset=["lo"])
    if not len(finite):
        return ""
    excluding = int((finite.lo * finite.hi > 0).sum())
    significant = int((finite.holm < 0.05).sum())
    verb = "remains" if significant == 1 else "remain"
    return (
        f"Of {len(finite)} intervals, {excluding} exclude 0; if no arm differed, {0.05 * len(finite):.2g} would by "
        f"chance. After Holm's correction for their number, {significant} {verb}."
    )


def category_table(
    rows: Sequence[Mapping],  # rows of finished runs
    reward: str,  # name of a reward with categories
    arm: str = "plain",  # arm of the evaluation
    # arm of the study whose change is subtracted, seed by seed; None: show the change itself
    reference: str | None = None,
) -> list[dict]:  # one per arm: texts, keyed by column; empty if the reward has no categories
    """Build a table of the change from the base in every category, with its interval over seeds."""
    if not rows or reward not in rows[0]["categories"].get("base", {}):
        return []
    table = [{"arm": name} for name in arms_with_runs(rows) if name != reference]
    for category in rows[0]["categories"]["base"][reward]:
        means = {
            name: pivot_by_seed(
                rows, lambda row, name=name, c=category: row["categories"][name][reward][c]
            )
            for name in ("base", arm)
        }
        values = means[arm] - means["base"]
        if reference is not None:
            values = paired_differences(values, reference)
        intervals = t_intervals(values)
        for line in table:
            line[category.replace("_", " ")] = format_difference(intervals.loc[line["arm"]])
    return table


def are_stored_rows(
    name: str,  # name of a study
) -> bool:
    """Return True if the pages read the rows that this repository stores, and these are all runs of the study.

    Only then can the sentences of a page be checked against the rows: tests also run the pages with invented rows.
    """
    is_stored = Path(analysis.STUDY_ROWS_FOLDER) == PRESETS_DIR / "results" / "studies"
    return is_stored and load_study(name).is_complete(analysis.load_study_rows(name))


def smallest_effect(
    rows: Sequence[Mapping],  # rows of finished runs
    study: Study,
) -> float | None:  # in units of the outcome; None: the reference has no runs
    """Compute a study's smallest effect of interest, a share of what its reference gained in the outcome."""
    if study.reference not in arms_with_runs(rows):
        return None
    return study.smallest_effect * gains_by_seed(rows, study.outcome)[study.reference].mean()


def differences_table(
    rows: Sequence[Mapping],  # rows of finished runs
    contrasts: Mapping[str, Sequence[Sequence[str]]],  # family -> pairs of arms: first minus second
    reward: str,  # name of a reward that was evaluated
    families: Sequence[str] = (),  # families to show; empty: all
    # smallest effect of interest, in units of the reward; None: the table has no verdicts
    smallest: float | None = None,
) -> str:  # HTML
    """Return a table of the differences of pairs of arms, with Holm's correction within each family.

    Pairs without runs are left out of the table, but Holm's correction counts all pairs of their family. A verdict is that
    on the claim that the first arm of a pair gains more, see `claim_verdict`.
    """
    found = contrast_table(rows, contrasts, reward).dropna(subset=["mean"])
    lines = []
    for _, row in found.iterrows():
        if families and row.family not in families:
            continue
        line = {
            "family": row.family,
            "pair": f"{row.arm} minus {row.reference}",
            "seeds": int(row.n),
            "difference": format_difference(row),
            "p (Holm)": format_small_number(row.holm),
        }
        if smallest is not None:
            line["first gains more"] = claim_verdict(row, "above", smallest, row.holm)
        lines.append(line)
    return rows_to_html(lines, ("seeds",))


def study_commands(
    name: str,  # name of the study
) -> str:
    """Return the commands that run a study and store its rows."""
    return f"chunk-grpo study {name}\npython tools/keep.py study {name}"
