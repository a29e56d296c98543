"""Figures and tables of the tuning of a study: what each arm gains at every point of its grid."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chunk_grpo.reporting.figures import create_subplots, with_house_style
from chunk_grpo.studies.design import find_study_folder, read_tuned_settings

SHORT_NAMES = {"clip_range": "clip range", "updates_per_iteration": "updates per iteration"}


def tuned_points(
    studies: Sequence[str],  # names of studies; those without tuned.yaml have no rows
) -> pd.DataFrame:
    """Return a row per arm, point and seed of the tuning.

    The columns are arm, learning_rate, option (name of the arm's own option), value (of this option), seed (0, 1, ...:
    the position of the seed) and gain (in the outcome of the study, on its tuning prompts). An arm that several studies
    tuned counts once.
    """
    rows = []
    seen = set()
    for study in studies:
        for arm, result in read_tuned_settings(find_study_folder(study)).items():
            if arm in seen:
                continue
            seen.add(arm)
            (option,) = set(result["settings"]) - {"learning_rate"}
            for point in result["points"]:
                for seed, gain in enumerate(point["gains"]):
                    rows.append(
                        {
                            "arm": arm,
                            "learning_rate": point["learning_rate"],
                            "option": option,
                            "value": point[option],
                            "seed": seed,
                            "gain": gain,
                        }
                    )
    return pd.DataFrame(rows, columns=["arm", "learning_rate", "option", "value", "seed", "gain"])


def seed_deviation(
    points: pd.DataFrame,  # from `tuned_points`
) -> float:  # in units of the gain
    """Compute the standard deviation of a gain between seeds of one point, pooled over all points."""
    variances = points.groupby(["arm", "learning_rate", "value"]).gain.var()
    return float(np.sqrt(variances.mean()))


def change_per_step(
    points: pd.DataFrame,  # from `tuned_points`
    changed: str,  # learning_rate or value: what is raised to the next value of the grid
    fixed: str,  # the other one of the two, which stays
) -> pd.DataFrame:  # with the columns arm, option, fixed, start, end and change
    """Compute how the mean gain changes from each number of a grid to the next, at the same value of the other option."""
    rows = []
    means = points.groupby(["arm", "option", fixed, changed]).gain.mean()
    for (arm, option, value), grid in means.groupby(level=[0, 1, 2]):
        numbers = grid.index.get_level_values(changed)
        for i in range(len(numbers) - 1):
            rows.append(
                {
                    "arm": arm,
                    "option": option,
                    "fixed": value,
                    "start": numbers[i],
                    "end": numbers[i + 1],
                    "change": grid.iloc[i + 1] - grid.iloc[i],
                }
            )
    return pd.DataFrame(rows)


@with_house_style
def plot_grids(
    points: pd.DataFrame,  # from `tuned_points`
    columns: int = 4,  # panels per row
) -> Figure:
    """Draw a panel per arm: its gain at every point, the learning rate upwards and its own option to the right.

    All panels share the colours. The best point of an arm has a frame; a point that was not tried is white.
    """
    arms = [*dict.fromkeys(points.arm)]
    panel_rows = -(-len(arms) // columns)  # rounded up
    figure, axes = create_subplots(columns, panel_rows, size=(2.7 * columns, 2.1 * panel_rows))
    for panel in axes.flat[len(arms) :]:
        panel.set_visible(False)
    limit = points.groupby(["arm", "learning_rate", "value"]).gain.mean().max()
    for axis, arm in zip(axes.flat, arms, strict=False):
        part = points[points.arm == arm]
        grid = part.pivot_table(
            index="learning_rate", columns="value", values="gain", aggfunc="mean"
        )
        # Losses get the colour of no gain, since few points lose and none by much.
        axis.imshow(grid, origin="lower", aspect="auto", cmap="cividis", vmin=0, vmax=limit)
        best = np.unravel_index(np.nanargmax(grid), grid.shape)
        for i, j in np.argwhere(grid.notna().to_numpy()):
            gain = grid.iloc[i, j]
            axis.text(
                j,
                i,
                f"{gain:.3f}".replace("0.", ".", 1),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if gain < 0.6 * limit else "black",
                fontweight="bold" if (i, j) == best else "normal",
            )
        corner = (best[1] - 0.5, best[0] - 0.5)
        axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2.5))
        axis.set_xticks(range(grid.shape[1]), [f"{x:g}" for x in grid.columns], fontsize=7)
        axis.set_yticks(range(grid.shape[0]), [f"{x:g}" for x in grid.index], fontsize=7)
        axis.set_title(arm)
        axis.set_xlabel(SHORT_NAMES[part.option.iloc[0]])
        axis.grid(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("learning rate")
    return figure
