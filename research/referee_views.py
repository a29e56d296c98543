"""Figures of the referee, the study that compares methods: gains against their cost, in one panel per world."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from chunk_grpo.core.settings import Settings, load_settings, read_settings_file
from chunk_grpo.core.statistics import t_intervals
from chunk_grpo.reporting.figures import create_subplots, with_house_style
from chunk_grpo.studies import analysis
from chunk_grpo.studies.design import find_study_folder, list_studies, load_study, read_tuned
from chunk_grpo.training.method_loading import load_method

# Study -> what its world differs in. The first one has all arms; the others have ten of them.
WORLDS = {
    "referee": "shipped base",
    "referee-wrong": "more wrong captions",
    "referee-undertrained": "undertrained base",
    "referee-proxy": "training on a proxy",
}

# The arms of each family of methods. An arrow leads from the first to the second: from steps or single levels to chunks, and
# in GRPO-Guard, whose two arms both have chunks, from credit for the image to credit for each chunk.
FAMILIES = {
    "GRPO": ("steps", "chunk"),
    "GRPO-Guard": ("guard-wide", "guard-gains"),
    "CRD": ("crd", "crd-chunk", "crd-random", "crd-long"),
    "ELBO": ("elbo", "elbo-chunk", "elbo-ratio", "elbo-random", "elbo-long"),
    "NFT": ("nft",),
}

# More published methods, which the study referee-field adds to the first world.
FIELD = "referee-field"
OTHERS = "other published methods"
_COLOURS = dict(
    zip(
        (*FAMILIES, OTHERS),
        ("#0072B2", "#117733", "#D55E00", "#882255", "#E69F00", "#7F7F7F"),
        strict=True,
    )
)
_MARKERS = {
    "steps or levels": "o",
    "chunks": "s",
    "levels at random": "x",
    "more iterations": "^",
}
_COST_LABELS = {
    "forwards": "forward passes, thousands (a trained one counts three times)",
    "seconds": "CPU seconds of a training",
}
_CHUNK_ARMS = ("chunk", "guard-wide", "guard-gains", "crd-chunk", "elbo-chunk", "elbo-ratio")


def family_of(
    arm: str,  # arm of the referee or of its field
) -> str:
    """Return the family of an arm; arms that only the field has belong to `OTHERS`."""
    for family, arms in FAMILIES.items():
        if arm in arms:
            return family
    return OTHERS


def role_of(
    arm: str,  # arm of the referee
) -> str:  # a key of `_MARKERS`
    """Return whether an arm has chunks, is a version with single steps or levels, or is one of two kinds of controls."""
    if arm.endswith("-random"):
        return "levels at random"
    if arm.endswith("-long"):
        return "more iterations"
    return "chunks" if arm in _CHUNK_ARMS else "steps or levels"


def settings_of_arm(
    study: str,  # name of a study
    arm: str,  # one of its arms
) -> Settings:
    """Return the settings with which the study trains an arm, its tuned ones included; the seed is that of base.yaml."""
    home = find_study_folder(study)
    tuned = read_tuned(home).get(arm, {}).get("settings", {})
    base = read_settings_file(home / "base.yaml")
    return load_settings(base, load_study(study).arms[arm] | tuned, home)


def forwards_per_image(
    study: str,  # name of a study
    arm: str,  # one of its arms
) -> float:
    """Return the forward passes per image when an arm is trained with its tuned settings.

    It is rollout + 3 trained + extra passes: the backward pass of a trained one costs about as much as two. Extra passes
    have no backward pass, such as those of the old and the reference model.
    """
    settings = settings_of_arm(study, arm)
    counts = load_method(settings).counts()
    images = settings.prompts_per_iteration * settings.images_per_prompt
    return (counts.rollout + 3 * counts.trained + counts.extra) / images


def total_forwards(
    study: str,  # name of a study
    arm: str,  # one of its arms
) -> float:
    """Return the thousands of forward passes of a training; a trained one counts three times."""
    settings = settings_of_arm(study, arm)
    images = settings.iterations * settings.prompts_per_iteration * settings.images_per_prompt
    return images * forwards_per_image(study, arm) / 1000


def gains_and_costs(
    study: str,  # name of a study
    reward: str = "",  # name of a reward that was evaluated; empty: the outcome of the study
) -> pd.DataFrame:
    """Compute the gain of every arm with rows, with its 95% interval over seeds, and what a training costs.

    The index is the arm. The columns are mean, lo and hi (in units of the reward), n (seeds), forwards (thousands of
    forward passes) and seconds (CPU seconds, as measured in the runs). Without rows, the table is empty.
    """
    rows = analysis.load_study_rows(study)
    columns = ["mean", "lo", "hi", "n", "forwards", "seconds"]
    if not rows:
        return pd.DataFrame(columns=columns)
    outcome = reward or load_study(study).outcome
    table = t_intervals(analysis.gains_by_seed(rows, outcome))
    measured = pd.DataFrame(rows).groupby("arm")[["images", "cpu_seconds"]].mean()
    forwards = {arm: forwards_per_image(study, arm) for arm in table.index}
    table["forwards"] = measured.images * pd.Series(forwards) / 1000
    table["seconds"] = measured.cpu_seconds
    return table[columns]


def gains_of_first_world(
    reward: str = "",  # name of a reward that was evaluated; empty: the outcome of the study
) -> pd.DataFrame:
    """Return `gains_and_costs` of the referee, with the arms that only its field has, and a column `family`.

    Arms that both studies have keep the numbers of the referee, which has more seeds.
    """
    table = gains_and_costs("referee", reward)
    field = gains_and_costs(FIELD, reward)
    field = field[~field.index.isin(table.index)]
    table = pd.concat([part for part in (table, field) if len(part)] or [table])
    return table.assign(family=[family_of(arm) for arm in table.index])


def worlds_with_rows() -> list[str]:
    """Return the studies of the referee that have rows, in the order of `WORLDS`."""
    planned = list_studies()
    return [study for study in WORLDS if study in planned and analysis.load_study_rows(study)]


def _draw_gains(
    axis: Axes,  # panel to draw in
    table: pd.DataFrame,  # from `gains_and_costs`
    cost: str,  # forwards or seconds
) -> None:
    """Draw an arm as a marker with its interval, and the arrow of each family."""
    # Markers of arms that cost the same would cover each other, so they are drawn side by side.
    spacing = 0.012 * max(np.ptp(table[cost]), 1e-9)
    offset = table.groupby(table[cost].round(1)).cumcount() * spacing
    table = table.assign(**{cost: table[cost] + offset})
    for arm, found in table.iterrows():
        colour = _COLOURS[family_of(arm)]
        axis.errorbar(
            found[cost],
            found["mean"],
            np.nan_to_num(found.hi - found["mean"]),
            fmt=_MARKERS[role_of(arm)],
            color=colour,
            markersize=6,
            linewidth=1,
        )
    for arms in FAMILIES.values():
        if len(arms) > 1 and set(arms[:2]) <= set(table.index):
            start, end = (tuple(table.loc[arm, [cost, "mean"]]) for arm in arms[:2])
            style = {"arrowstyle": "->", "color": _COLOURS[family_of(arms[0])], "lw": 1.6}
            axis.annotate("", end, start, arrowprops=style)


def _legend_handles() -> list[Line2D]:
    """Return one entry per family, with its colour, and one per role, with its marker."""
    handles = []
    for family, colour in _COLOURS.items():
        handles.append(Line2D([], [], color=colour, linewidth=4, label=family))
    for role, marker in _MARKERS.items():
        handles.append(Line2D([], [], color="black", marker=marker, linewidth=0, label=role))
    return handles


@with_house_style
def plot_gains_by_cost(
    studies: Sequence[str],  # names of studies with rows, one panel each; see `worlds_with_rows`
    cost: str = "forwards",  # forwards or seconds
    reward: str = "",  # name of a reward; empty: the outcome of each study
) -> Figure:
    """Draw every arm's gain with its 95% interval against the cost of a training, one panel per world."""
    columns = min(2, len(studies))
    panel_rows = -(-len(studies) // columns)  # rounded up
    size = (4.6 * columns + (0 if columns > 1 else 3.0), 3.4 * panel_rows + 0.8)
    figure, axes = create_subplots(columns, panel_rows, size=size)
    for panel in axes.flat[len(studies) :]:
        panel.set_visible(False)
    for axis, study in zip(axes.flat, studies, strict=False):
        _draw_gains(axis, gains_and_costs(study, reward), cost)
        axis.set_title(WORLDS[study])
        axis.set_ylabel(f"gain in {reward or load_study(study).outcome}")
        axis.set_xlabel(_COST_LABELS[cost])
    figure.legend(handles=_legend_handles(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


@with_house_style
def plot_matrix(
    reward: str = "",  # name of a reward; empty: the outcome of the referee
) -> Figure:
    """Draw the gains of all methods on the first world: sorted with their names, and against two costs.

    The two smaller panels have an arrow for each family of methods; see `FAMILIES`.
    """
    table = gains_of_first_world(reward).sort_values("mean")
    outcome = reward or load_study("referee").outcome
    figure = Figure(figsize=(10.5, 1.2 + 0.25 * len(table)), layout="constrained")
    panels = figure.subplot_mosaic(
        [["names", "forwards"], ["names", "seconds"]], width_ratios=(1.1, 1)
    )
    names = panels["names"]
    for i, (arm, found) in enumerate(table.iterrows()):
        names.errorbar(
            found["mean"],
            i,
            xerr=np.nan_to_num(found.hi - found["mean"]),
            fmt=_MARKERS[role_of(arm)],
            color=_COLOURS[found.family],
            markersize=6,
            linewidth=1,
        )
    labels = [f"{arm} ({int(n)} seeds)" for arm, n in table.n.items()]
    names.set_yticks(range(len(table)), labels, fontsize=8)
    names.set_xlabel(f"gain in {outcome}, with its 95% interval over seeds")
    for cost, label in _COST_LABELS.items():
        _draw_gains(panels[cost], table, cost)
        panels[cost].set_xlabel(label)
        panels[cost].set_ylabel("gain")
    figure.legend(handles=_legend_handles(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def cost_per_iteration(
    study: str,  # name of a study
    arm: str,  # arm with at least one row
) -> Mapping[str, float]:
    """Return what an iteration costs: images, forwards (thousands of forward passes) and seconds (CPU seconds)."""
    rows = [row for row in analysis.load_study_rows(study) if row["arm"] == arm]
    iterations = rows[0]["settings"]["iterations"]
    images = rows[0]["images"] / iterations
    return {
        "images": images,
        "forwards": images * forwards_per_image(study, arm) / 1000,
        "seconds": float(np.mean([row["cpu_seconds"] for row in rows])) / iterations,
    }


@with_house_style
def plot_rewards_by_cost(
    study: str,  # name of a study with rows
    arms: Sequence[str],  # arms to draw; those without rows are left out
    reward: str,  # a reward that the arms train on
    window: int = 3,  # number of iterations over which a point is averaged
) -> Figure:
    """Draw the mean reward on training prompts against images, forward passes and CPU seconds, one panel each.

    The first arm of each family of methods is dotted, the others are solid.
    """
    rows = analysis.load_study_rows(study)
    figure, axes = create_subplots(3, size=(10.5, 3.2), sharey=True)
    labels = ("images", "forward passes, thousands", "CPU seconds")
    for arm in arms:
        runs = [row for row in rows if row["arm"] == arm]
        if not runs:
            continue
        curves = [analysis.curve_column(row, reward) for row in runs]
        mean = pd.Series(np.mean(curves, axis=0)).rolling(window).mean().to_numpy()
        iterations = np.arange(1, len(mean) + 1)
        is_first = any(arm == arms[0] for arms in FAMILIES.values())
        style = ":" if is_first else "-"
        for axis, cost in zip(axes[0], cost_per_iteration(study, arm).values(), strict=True):
            axis.plot(iterations * cost, mean, style, color=_COLOURS[family_of(arm)], label=arm)
    for axis, label in zip(axes[0], labels, strict=True):
        axis.set_xlabel(label)
    axes[0, 0].set_ylabel(f"{reward}, mean of {window} iterations")
    axes[0, 2].legend(fontsize=8, frameon=False)
    return figure
