"""Views that single pages of nbs/findings have of a study: falls, splits, and what is lost and gained."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from chunk_grpo import InputError
from chunk_grpo.core.statistics import t_intervals
from chunk_grpo.reporting.figures import create_subplots, with_house_style
from chunk_grpo.studies.analysis import (
    arms_with_runs,
    format_difference,
    gains_by_seed,
    paired_differences,
    pivot_by_seed,
)

FALL_LEVELS = {"start": 2.0, "peak": 4.0}  # level that a curve falls from -> standard errors


def find_lasting_fall(
    values: np.ndarray,  # (n,) one number an iteration
    level: str = "start",  # start or peak
    window: int = 5,  # w, iterations
) -> int | None:  # the iteration, from 1, from which the curve stays below; None: never
    """When a curve falls for good (a); InputError on another level or a curve shorter than two windows."""
    if level not in FALL_LEVELS or len(values) < 2 * window:
        raise InputError(
            f"level: got {level!r} for {len(values)} iterations, allowed are {' and '.join(FALL_LEVELS)} "
            f"for a curve of at least {2 * window}."
        )
    means = pd.Series(values).rolling(window).mean().to_numpy()
    error = np.sqrt(np.nanmean(np.diff(values) ** 2) / 2) * np.sqrt(2 / window)
    high = means[window - 1] if level == "start" else np.nanmax(means)
    above = np.flatnonzero(~(means < high - FALL_LEVELS[level] * error))
    return int(above[-1]) + 2 if above[-1] + 1 < len(values) else None


def peak_growth(
    values: np.ndarray,  # (n,) such as the norm of the gradient at each iteration
    window: int = 5,  # iterations
) -> float:
    """The largest mean over a window, as a multiple of the first one."""
    means = pd.Series(values[np.isfinite(values)]).rolling(window).mean().to_numpy()[window - 1 :]
    return float(means.max() / means[0]) if len(means) else float("nan")


def split_step(
    row: Mapping,
    arm: str,  # of the evaluation: base, plain, hybrid, split-05 ...
) -> int:  # step at which the base takes over
    """The split of an arm of the evaluation."""
    s = {**row["settings"], **row["evaluation"]}
    named = {"base": 0, "plain": s["eval_steps"], "hybrid": s["hybrid_split"]}
    return named[arm] if arm in named else int(arm.removeprefix("split-"))


def gains_by_split(
    rows: Sequence[Mapping],  # all evaluated on the same splits
    reward: str,  # its name
    arm: str,  # of the study
) -> pd.DataFrame:  # a row a split, as of `t_intervals`
    """The gain at every split, with its interval over seeds."""
    mine = [row for row in rows if row["arm"] == arm]
    places = {split_step(mine[0], name): name for name in mine[0]["scores"]}
    gains = {split: gains_by_seed(mine, reward, places[split])[arm] for split in sorted(places)}
    return t_intervals(pd.DataFrame(gains))


@with_house_style
def plot_split_curves(
    rows: Sequence[Mapping],
    rewards: Sequence[str],  # names; a panel each
) -> Figure:
    """The gain over the base at every split, a line an arm, with 95% intervals."""
    figure, axes = create_subplots(len(rewards), size=(3.6 * max(2, len(rewards)), 2.9))
    shades = mpl.colormaps["viridis"](np.linspace(0.05, 0.8, len(arms_with_runs(rows))))
    for axis, reward in zip(axes[0], rewards, strict=True):
        for name, shade in zip(arms_with_runs(rows), shades, strict=True):
            found = gains_by_split(rows, reward, name)
            axis.fill_between(found.index, found.lo, found.hi, color=shade, alpha=0.15, linewidth=0)
            axis.plot(found.index, found["mean"], color=shade, marker="o", markersize=3, label=name)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(
            xlabel="step at which the base takes over", ylabel="gain over the base", title=reward
        )
    axes[0, 0].legend(fontsize=8)
    return figure


_SHARE_OF = {"lost": "right", "gained": "missed"}  # a count -> what it is a share of


def changed_share(
    rows: Sequence[Mapping],
    reward: str,  # one that knows objects
    count: str = "lost",  # lost or gained
    what: str = "objects",  # objects or images
    arm: str = "plain",  # of the evaluation
    # a row a seed, a column an arm; nan where the base had nothing of the kind or objects are not
    # known
) -> pd.DataFrame:
    """The share of the base's right ones that a run loses, or of its missed ones that it gains."""

    def of(row):
        found = row["preserved"].get(arm, {}).get(reward, {}).get(what)
        return (
            found[count] / found[_SHARE_OF[count]] if found and found[_SHARE_OF[count]] else np.nan
        )

    return pivot_by_seed(rows, of)


def preservation_table(
    rows: Sequence[Mapping],
    reward: str,  # one that knows objects
    what: str = "objects",  # objects or images
) -> list[dict]:  # column -> text, a row an arm; empty where nothing of the kind is known
    """Lost and gained shares with their intervals over seeds."""
    found = {count: t_intervals(changed_share(rows, reward, count, what)) for count in _SHARE_OF}
    return [
        {"arm": name}
        | {
            f"{what} {count}": format_difference(part.loc[name]).replace("+", "")
            for count, part in found.items()
        }
        for name in arms_with_runs(rows)
        if found["lost"].n[name]
    ]


def false_positive_note(
    found: pd.DataFrame,  # of `t_intervals` or `paired_intervals`, at 95%
) -> str:
    """A sentence: intervals, those that miss 0, those expected to by chance, those left after Holm; empty without any."""
    known = found.dropna(subset=["lo"])
    if not len(known):
        return ""
    away = int((known.lo * known.hi > 0).sum())
    sure = int((known.holm < 0.05).sum())
    return (
        f"Of {len(known)} intervals {away} miss 0; {0.05 * len(known):.2g} would by chance if no arm differed. "
        f"After Holm's correction for their number {sure} remain{'s' * (sure == 1)}."
    )


def category_table(
    rows: Sequence[Mapping],
    reward: str,  # one that knows categories
    arm: str = "plain",  # of the evaluation
    # None: change against the base; else the difference to this arm on the same seeds
    reference: str | None = None,
) -> list[dict]:  # column -> text, a row an arm; empty where the reward knows no categories
    """The change of every category with its interval over seeds."""
    if not rows or reward not in rows[0]["categories"].get("base", {}):
        return []
    out = [{"arm": name} for name in arms_with_runs(rows) if name != reference]
    for category in rows[0]["categories"]["base"][reward]:
        means = {
            name: pivot_by_seed(
                rows, lambda row, name=name, c=category: row["categories"][name][reward][c]
            )
            for name in ("base", arm)
        }
        values = means[arm] - means["base"]
        found = t_intervals(values if reference is None else paired_differences(values, reference))
        for line in out:
            line[category.replace("_", " ")] = format_difference(found.loc[line["arm"]])
    return out


def study_commands(
    name: str,  # of the study
) -> str:
    """The commands that run a study and keep its rows."""
    return f"chunk-grpo study {name}\npython tools/keep.py study {name}"
