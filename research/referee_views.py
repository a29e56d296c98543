"""Figures of the referee, the study that compares methods: gains against their cost, in one panel per world."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from chunk_grpo import InputError
from chunk_grpo.core.files import read_json_lines
from chunk_grpo.core.settings import PRESETS_DIR, Settings, load_settings, read_settings_file
from chunk_grpo.core.statistics import t_intervals
from chunk_grpo.reporting.figures import create_subplots, with_house_style
from chunk_grpo.studies import analysis
from chunk_grpo.studies.design import (
    find_study_folder,
    list_studies,
    load_study,
    read_tuned_settings,
)
from chunk_grpo.theory.chunks import parse_chunk_numbers
from chunk_grpo.theory.dynamics import count_trained_chunks
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
_KIND_COLOURS = {True: "#0072B2", False: "#D55E00"}  # coupled, decoupled
_COST_LABELS = {
    "forwards": "forward passes, thousands (a trained one counts three times)",
    "seconds": "CPU seconds of a training run",
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
    tuned = read_tuned_settings(home).get(arm, {}).get("settings", {})
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
    """Return the thousands of forward passes of a training run; a trained one counts three times."""
    settings = settings_of_arm(study, arm)
    images = settings.iterations * settings.prompts_per_iteration * settings.images_per_prompt
    return images * forwards_per_image(study, arm) / 1000


def share_of_levels(
    study: str,  # name of a study
    arm: str,  # one of its arms
) -> np.ndarray:  # (T,), from 0 to 1, from the noisiest level to the least noisy one
    """Compute the share of images that train each noise level in an iteration.

    A coupled method trains transitions; a transition counts for the level at its start. Raises InputError if the arm
    samples its chunks by weights, has chunks of its own for each image, or trains a window that moves: then the share
    depends on the images or on the iteration.
    """
    settings = settings_of_arm(study, arm)
    if (
        settings.chunk_weighting != "uniform"
        or settings.chunk_rule.kind != "fixed"
        or settings.window != "all"
    ):
        raise InputError(f"`arm` must train the same share of each level always; got {arm!r}")
    method = load_method(settings)
    sampler = method.sampler(0)
    trainable_steps = method.trainable_steps(sampler)
    flat_profile = torch.ones(len(trainable_steps))
    # In a decoupled method, chunks may select levels that are not themselves the chunks of the loss.
    cut = method.chunks if method.has_log_prob else method.selection_chunks
    chunks = cut(flat_profile)
    allowed = parse_chunk_numbers(settings.train_chunks, len(chunks))
    share = count_trained_chunks(len(allowed), settings.chunk_fraction) / len(allowed)
    shares = np.zeros(len(sampler))
    for number in allowed:
        shares[trainable_steps[chunks.slices[number]].numpy()] = share
    return shares


def is_coupled(
    study: str,  # name of a study
    arm: str,  # one of its arms
) -> bool:
    """Return whether an arm takes ratios of the densities of sampled transitions; a decoupled arm trains on final images."""
    return load_method(settings_of_arm(study, arm)).has_log_prob


def gains_by_kind() -> pd.DataFrame:
    """Compute the mean gain of the referee's coupled arms and of its decoupled ones, one row per seed that all arms have.

    The columns are coupled and decoupled. Controls, with random levels or more iterations, are left out.
    """
    study = load_study("referee")
    by_seed = analysis.gains_by_seed(analysis.load_study_rows("referee"), study.outcome).dropna()
    arms = [arm for arm in study.arms if role_of(arm) in ("steps or levels", "chunks")]
    kinds = {arm: is_coupled("referee", arm) for arm in arms}
    return pd.DataFrame(
        {
            "coupled": by_seed[[arm for arm in arms if kinds[arm]]].mean(axis=1),
            "decoupled": by_seed[[arm for arm in arms if not kinds[arm]]].mean(axis=1),
        }
    )


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


def complete_worlds() -> list[str]:
    """Return the studies of the referee whose planned trials all have rows, in the order of `WORLDS`.

    The plans forbid looking at an outcome before that, so pages leave out the others.
    """
    available = list_studies()
    return [
        study
        for study in WORLDS
        if study in available and load_study(study).is_complete(analysis.load_study_rows(study))
    ]


# Methods with chunks that may be ahead of the published ones, and the published methods that every world has.
CANDIDATES = ("crd-chunk", "elbo-chunk", "guard-gains")
PUBLISHED = ("crd", "elbo", "chunk", "steps")


def compare_candidates(
    studies: Sequence[str],  # complete worlds, see `complete_worlds`
) -> pd.DataFrame:
    """Compare each candidate with each published method in every world, on the same seeds.

    The columns are arm, reference, study, n, mean, lo and hi (in units of the study's outcome), planned (whether the pair is
    one of the plan's), forwards and seconds (the cost of a training of the arm, as a multiple of that of the reference).
    """
    pairs = [(arm, reference) for arm in CANDIDATES for reference in PUBLISHED]
    tables = []
    for study in studies:
        plan = load_study(study)
        planned = {tuple(pair) for family in plan.contrasts.values() for pair in family}
        rows = analysis.load_study_rows(study)
        costs = gains_and_costs(study)
        table = analysis.contrast_table(rows, {"": pairs}, plan.outcome)
        table["study"] = study
        table["planned"] = [pair in planned for pair in pairs]
        for cost in ("forwards", "seconds"):
            table[cost] = [costs[cost][arm] / costs[cost][other] for arm, other in pairs]
        tables.append(table)
    columns = ["arm", "reference", "study", "n", "mean", "lo", "hi", "planned"]
    together = pd.concat(tables, ignore_index=True)[[*columns, "forwards", "seconds"]]
    # All worlds of a pair below each other.
    order = {pair: i for i, pair in enumerate(pairs)}
    keys = [order[pair] for pair in zip(together.arm, together.reference, strict=True)]
    return together.iloc[np.argsort(keys, kind="stable")].reset_index(drop=True)


def candidate_rows(
    studies: Sequence[str],  # complete worlds
) -> list[dict[str, str]]:
    """Return the table of `compare_candidates` as texts, one row per pair and world."""
    return [
        {
            "pair": f"{found.arm} minus {found.reference}",
            "world": WORLDS[found.study],
            "seeds": str(int(found.n)),
            "difference": analysis.format_difference(found._asdict()),
            "planned": "yes" if found.planned else "no",
            "forward passes": f"{found.forwards:.2f} times",
            "CPU time": f"{found.seconds:.2f} times",
        }
        for found in compare_candidates(studies).itertuples()
    ]


@with_house_style
def plot_pairs_by_world(
    studies: Sequence[str],  # complete worlds
    pairs: Sequence[Sequence[str]],  # arms: first minus second
) -> Figure:
    """Draw the differences of pairs of arms in several worlds, in units of the outcome, with 95% intervals over seeds."""
    figure = Figure(figsize=(8.4, 1.4 + 0.42 * len(pairs)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="#7F7F7F", linewidth=0.8)
    colours = ("#0072B2", "#D55E00", "#117733", "#882255")
    for number, study in enumerate(studies):
        plan = load_study(study)
        rows = analysis.load_study_rows(study)
        table = analysis.contrast_table(rows, {"": pairs}, plan.outcome)
        offset = 0.5 * (number - (len(studies) - 1) / 2) / max(len(studies), 2)
        axis.errorbar(
            table["mean"],
            np.arange(len(pairs)) + offset,
            xerr=table.hi - table["mean"],
            fmt="o",
            color=colours[number],
            markersize=5,
            linewidth=1,
            label=WORLDS[study],
        )
    axis.set_yticks(range(len(pairs)), [f"{one} minus {other}" for one, other in pairs])
    axis.invert_yaxis()
    axis.set_xlabel("difference in the gain")
    axis.legend(frameon=False, fontsize=8)
    return figure


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


def _legend_handles(
    arms: Sequence[str],  # arms in the figure
) -> list[Line2D]:
    """Return one entry per family of the arms, with its colour, and one per role, with its marker."""
    families = {family_of(arm) for arm in arms}
    handles = []
    for family, colour in _COLOURS.items():
        if family in families:
            handles.append(Line2D([], [], color=colour, linewidth=4, label=family))
    for role, marker in _MARKERS.items():
        handles.append(Line2D([], [], color="black", marker=marker, linewidth=0, label=role))
    return handles


@with_house_style
def plot_gains_by_cost(
    studies: Sequence[str],  # names of studies with rows, one panel each; see `complete_worlds`
    cost: str = "forwards",  # forwards or seconds
    reward: str = "",  # name of a reward; empty: the outcome of each study
) -> Figure:
    """Draw every arm's gain with its 95% interval against the cost of a training run, one panel per world."""
    columns = min(2, len(studies))
    panel_rows = -(-len(studies) // columns)  # rounded up
    size = (4.6 * columns + (0 if columns > 1 else 3.0), 3.4 * panel_rows + 0.8)
    figure, axes = create_subplots(columns, panel_rows, size=size)
    for panel in axes.flat[len(studies) :]:
        panel.set_visible(False)
    drawn = []
    for axis, study in zip(axes.flat, studies, strict=False):
        table = gains_and_costs(study, reward)
        drawn += [*table.index]
        _draw_gains(axis, table, cost)
        axis.set_title(WORLDS[study])
        axis.set_ylabel(f"gain in {reward or load_study(study).outcome}")
        axis.set_xlabel(_COST_LABELS[cost])
    figure.legend(handles=_legend_handles(drawn), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _draw_names(
    axis: Axes,  # panel to draw in
    table: pd.DataFrame,  # from `gains_of_first_world`, in the order in which rows are drawn upwards
    labels: Sequence[str],  # one per row of the table
    colours: Sequence[str],  # one per row of the table
) -> None:
    """Draw the gain of every arm with its interval, one below the other."""
    for i, (arm, found) in enumerate(table.iterrows()):
        axis.errorbar(
            found["mean"],
            i,
            xerr=np.nan_to_num(found.hi - found["mean"]),
            fmt=_MARKERS[role_of(arm)],
            color=colours[i],
            markersize=6,
            linewidth=1,
        )
    axis.set_yticks(range(len(table)), labels)


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
    labels = [f"{arm} ({int(n)} seeds)" for arm, n in table.n.items()]
    _draw_names(panels["names"], table, labels, [_COLOURS[family] for family in table.family])
    panels["names"].tick_params(axis="y", labelsize=8)
    panels["names"].set_xlabel(f"gain in {outcome}, with its 95% interval over seeds")
    for cost, label in _COST_LABELS.items():
        _draw_gains(panels[cost], table, cost)
        panels[cost].set_xlabel(label)
        panels[cost].set_ylabel("gain")
    figure.legend(
        handles=_legend_handles(table.index), loc="outside lower center", ncols=5, fontsize=8
    )
    return figure


@with_house_style
def plot_summary(
    size: tuple[float, float] = (7.0, 4.7),  # width and height, inches
) -> Figure:
    """Draw the gains of all methods for the README: sorted with their names, and against forward passes.

    The text is large enough for a phone. Colours are families and markers are roles, as in `plot_matrix`.
    """
    table = gains_of_first_world().sort_values("mean")
    with mpl.rc_context({"font.size": 11, "axes.titlesize": 11.5, "axes.titleweight": "bold"}):
        figure = Figure(figsize=size, layout="constrained")
        names, costs = figure.subplots(1, 2)
        colours = [_COLOURS[family] for family in table.family]
        _draw_names(names, table, list(table.index), colours)
        names.set(title="Gain", xlabel=load_study("referee").outcome)
        _draw_gains(costs, table, "forwards")
        costs.set(title="Gain by cost", xlabel="1,000 forward passes")
        roles = ("steps or levels", "chunks", "levels at random", "more iterations")
        handles = [
            Line2D([], [], color="black", marker=_MARKERS[role], linewidth=0, label=role)
            for role in roles
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


@with_house_style
def plot_kinds(
    reward: str = "",  # name of a reward; empty: the outcome of the referee
) -> Figure:
    """Draw the gains of all methods on the first world, coupled ones above decoupled ones, each sorted, with 95% intervals."""
    table = gains_of_first_world(reward)
    studies = {
        arm: "referee" if arm in load_study("referee").arms else FIELD for arm in table.index
    }
    table["coupled"] = [is_coupled(study, arm) for arm, study in studies.items()]
    table = table.sort_values(["coupled", "mean"])
    figure = Figure(figsize=(8.4, 1.2 + 0.25 * len(table)), layout="constrained")
    axis = figure.subplots()
    _draw_names(axis, table, table.index, [_KIND_COLOURS[kind] for kind in table.coupled])
    for coupled, label in ((True, "coupled"), (False, "decoupled")):
        colour = _KIND_COLOURS[coupled]
        axis.plot([], [], color=colour, linewidth=4, label=label)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(f"gain in {reward or load_study('referee').outcome}")
    axis.legend(frameon=False, loc="lower right")
    return figure


@with_house_style
def plot_tuned_kinds() -> Figure:
    """Draw the gain of each arm's best point in the referee's tuning, coupled arms above decoupled ones, each sorted.

    A dot is one of the two seeds of the tuning, a bar their mean, on validation prompts.
    """
    tuned = read_tuned_settings(find_study_folder("referee"))
    best = {
        arm: next(point for point in found["points"] if point["gain"] == found["gain"])["gains"]
        for arm, found in tuned.items()
    }
    kinds = {arm: is_coupled("referee", arm) for arm in best}
    arms = sorted(best, key=lambda arm: (kinds[arm], np.mean(best[arm])))
    figure = Figure(figsize=(8.4, 1.2 + 0.25 * len(arms)), layout="constrained")
    axis = figure.subplots()
    for i, arm in enumerate(arms):
        colour = _KIND_COLOURS[kinds[arm]]
        axis.plot(best[arm], [i] * len(best[arm]), "o", color=colour, markersize=4, alpha=0.6)
        axis.plot([np.mean(best[arm])] * 2, [i - 0.3, i + 0.3], color=colour, linewidth=3)
    for coupled, label in ((True, "coupled"), (False, "decoupled")):
        axis.plot([], [], color=_KIND_COLOURS[coupled], linewidth=4, label=label)
    axis.set_yticks(range(len(arms)), arms, fontsize=8)
    axis.set_xlabel(f"gain in {load_study('referee').outcome} on validation prompts")
    axis.legend(frameon=False, loc="lower right")
    return figure


def read_diversity(
    study: str,  # name of a study
) -> pd.DataFrame:
    """Read how much the images of a prompt differ, before and after training, one row per trial.

    The columns are arm, seed, base and trained (mean over all prompts), and correct_prompts, correct_base and
    correct_trained (mean over the prompts whose images are all correct before and after training). The table is empty if
    `research/diversity.py` has not measured the study.
    """
    lines = read_json_lines(PRESETS_DIR / "results" / "diversity" / f"{study}.jsonl")
    columns = ["arm", "seed", "base", "trained"]
    columns += ["correct_prompts", "correct_base", "correct_trained"]
    values = [
        (
            line["arm"],
            line["seed"],
            line["diversity"]["base"],
            line["diversity"]["plain"],
            line["of_correct"]["prompts"],
            line["of_correct"]["base"],
            line["of_correct"]["plain"],
        )
        for line in lines
    ]
    return pd.DataFrame(values, columns=columns)


def _label_beside(
    axis: Axes,  # panel whose points are drawn already
    x: pd.Series,  # keyed by label
    y: pd.Series,  # keyed by label
) -> None:
    """Write the label of each point to the right of all points, in the order of y, with a thin line to the point."""
    low, high = axis.get_ylim()
    labels = y.sort_values().index
    heights = np.linspace(low, high, len(labels) + 4)[2:-2]
    right = x.max() + 0.08 * np.ptp(x)
    for label, height in zip(labels, heights, strict=True):
        line = {"arrowstyle": "-", "color": "#999999", "lw": 0.5, "shrinkB": 3}
        axis.annotate(
            label,
            (x[label], y[label]),
            (right, height),
            fontsize=7,
            va="center",
            arrowprops=line,
        )
    axis.set_xlim(right=right + 0.35 * np.ptp(x))


@with_house_style
def plot_diversity(
    study: str,  # name of a study with rows and diversities
    references: Mapping[
        str, Sequence[float]
    ],  # label of a horizontal line -> its height in both panels
) -> Figure:
    """Draw diversity after training against gain, for all prompts and for those that stay correct; a marker per arm."""
    gains = gains_and_costs(study)
    found = read_diversity(study).groupby("arm").mean(numeric_only=True)
    panels = {"trained": "all prompts", "correct_trained": "prompts that stay correct"}
    figure, axes = create_subplots(2, size=(9.5, 3.8))
    for number, (column, title) in enumerate(panels.items()):
        axis = axes[0, number]
        arms = gains.index.intersection(found.index)
        for arm in arms:
            place = (gains["mean"][arm], found[column][arm])
            axis.plot(*place, _MARKERS[role_of(arm)], color=_COLOURS[family_of(arm)], markersize=6)
        for style, (label, heights) in zip(("--", ":"), references.items(), strict=False):
            axis.axhline(heights[number], color="#555555", lw=1, ls=style, label=label)
        _label_beside(axis, gains["mean"][arms], found[column][arms])
        axis.set_title(title)
        axis.set_xlabel(f"gain in {load_study(study).outcome}")
        axis.set_ylabel("diversity after training")
    axes[0, 0].legend(frameon=False, fontsize=8, loc="center left")
    return figure


@with_house_style
def plot_trained_levels(
    study: str,  # name of a study
    arms: Sequence[str],  # its arms, from top to bottom
) -> Figure:
    """Draw which noise levels each arm trains and, if the study has rows, the gain of each arm beside them.

    The darker a cell, the larger the share of images that train the level in an iteration. The interval of a gain is the
    95% interval over seeds. Raises InputError as `share_of_levels` does.
    """
    shares = np.stack([share_of_levels(study, arm) for arm in arms])
    figure = Figure(figsize=(9.5, 1.3 + 0.3 * len(arms)), layout="constrained")
    table = gains_and_costs(study)
    panels = 2 if len(table) else 1
    axes = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=(1.5, 1)[:panels])
    levels = axes[0, 0]
    image = levels.pcolormesh(
        shares, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=1.5
    )
    figure.colorbar(image, ax=levels, location="left", label="share of images", shrink=0.9)
    sigmas = load_method(settings_of_arm(study, arms[0])).sigmas
    shown = range(0, shares.shape[1], 4)
    levels.set_xticks([i + 0.5 for i in shown], [f"{i}\nσ = {float(sigmas[i]):.2f}" for i in shown])
    levels.set_xlabel("noise level")
    levels.set_yticks([i + 0.5 for i in range(len(arms))], arms)
    levels.invert_yaxis()
    if not len(table):
        return figure
    gains = axes[0, 1]
    for i, arm in enumerate(arms):
        if arm in table.index:
            found = table.loc[arm]
            gains.errorbar(
                found["mean"],
                i + 0.5,
                xerr=np.nan_to_num(found.hi - found["mean"]),
                fmt=_MARKERS[role_of(arm)],
                color=_COLOURS[family_of(arm)],
                linewidth=1,
            )
    gains.set_xlabel(f"gain in {load_study(study).outcome}")
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
