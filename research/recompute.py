"""Recompute a study's gains and contrasts with numpy and scipy alone.

This checks the package by other code: it imports nothing of the package, and has its own formulas
for gains, t intervals, paired t tests and Holm's correction. It reads the plan
runs/pocket/studies/NAME/study.yaml and the training runs runs/results/studies/NAME.jsonl.

Run `python research/recompute.py NAME` for tables of all rewards, with `--reward REWARD` for one
reward, with `--json` for one JSON object, and with `--rows FILE` for the runs of another file.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from scipy.stats import t as student_t

LEVEL = 0.95  # probability with which an interval covers the mean


@dataclass
class Plan:
    """Hold what the recomputation needs of a study's plan."""

    outcome: str | None  # reward in which the study is decided
    reference: str | None  # arm whose gain sets the scale of the smallest effect
    arms: list[str]  # names in the order of the plan
    families: dict[str, list[tuple[str, str]]]  # name of a family -> its contrasts (arm, other)
    smallest_effect: float | None  # as a share of the reference's mean gain in the outcome


# Reading and checking


def read_plan(
    path: Path,  # the study.yaml
) -> Plan:
    """Read a plan. Raise ValueError if it has no arms or names an arm that is not among them."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML.") from error
    if not isinstance(content, dict) or not isinstance(content.get("arms"), dict):
        raise ValueError(f"{path} has no arms.")
    # YAML reads a name such as 16 as a number, while rows always have text.
    arms = [str(arm) for arm in content["arms"]]
    reference = content.get("reference")
    if reference is not None:
        reference = str(reference)
        if reference not in arms:
            raise ValueError(f"The reference {reference} is not an arm of {path}.")

    families = {}
    for family, pairs in (content.get("contrasts") or {}).items():
        families[str(family)] = []
        if not isinstance(pairs, list):
            raise ValueError(f"Family {family} in {path} is not a list of contrasts.")
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"A contrast of family {family} in {path} is not a pair of arms.")
            arm, other = str(pair[0]), str(pair[1])
            for name in (arm, other):
                if name not in arms:
                    raise ValueError(f"Family {family} compares {name}, which is not an arm.")
            families[str(family)].append((arm, other))
    if not families:
        if reference is None:
            raise ValueError(f"{path} has neither contrasts nor a reference.")
        pairs = [(arm, reference) for arm in arms if arm != reference]
        families[f"against {reference}"] = pairs

    smallest_effect = content.get("smallest_effect")
    return Plan(
        outcome=content.get("outcome"),
        reference=reference,
        arms=arms,
        families=families,
        smallest_effect=None if smallest_effect is None else float(smallest_effect),
    )


def read_rows(
    path: Path,  # JSON lines, one training run per line
) -> list[dict]:
    """Read training runs. Raise ValueError if a line is no JSON object or there is no run."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"Line {number} of {path} is not valid JSON.") from error
            if not isinstance(row, dict):
                raise ValueError(f"Line {number} of {path} is not a JSON object.")
            for key in ("arm", "seed", "scores"):
                if key not in row:
                    raise ValueError(f"Line {number} of {path} has no {key}.")
            if not isinstance(row["scores"], dict):
                raise ValueError(f"Line {number} of {path} has scores that are not an object.")
            for model in ("base", "plain"):
                if not isinstance(row["scores"].get(model), dict):
                    raise ValueError(f"Line {number} of {path} has no scores of the model {model}.")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no runs.")
    return rows


def check_runs(
    rows: list[dict],  # training runs
    plan: Plan,  # plan of the study
) -> None:
    """Raise ValueError if an arm is not in the plan or an arm has a seed twice."""
    seen = set()
    for row in rows:
        arm, seed = row["arm"], row["seed"]
        if arm not in plan.arms:
            raise ValueError(f"The rows have an arm {arm}, which is not in the plan.")
        if type(seed) is not int:  # True would pass isinstance
            raise ValueError(
                f"A row of arm {arm} has the seed {seed}, which is not a whole number."
            )
        if (arm, seed) in seen:
            raise ValueError(f"Arm {arm} has seed {seed} more than once.")
        seen.add((arm, seed))


def common_rewards(
    rows: list[dict],  # training runs
) -> list[str]:
    """List the rewards that all rows have of both models, in the order of the first row."""
    rewards = []
    for reward in rows[0]["scores"]["base"]:
        complete = True
        for row in rows:
            for model in ("base", "plain"):
                if reward not in row["scores"][model]:
                    complete = False
        if complete:
            rewards.append(reward)
    return rewards


def check_scores(
    rows: list[dict],  # training runs that all have the reward
    reward: str,  # name of the reward
) -> None:
    """Raise ValueError if a score is not finite or runs differ in their number of prompts."""
    expected = None
    for row in rows:
        for model in ("base", "plain"):
            scores = row["scores"][model][reward]
            where = f"of the {model} model in {reward} (arm {row['arm']}, seed {row['seed']})"
            if not isinstance(scores, list) or not scores:
                raise ValueError(f"There are no scores {where}.")
            for score in scores:
                number = isinstance(score, (int, float)) and not isinstance(score, bool)
                if not number or not math.isfinite(score):
                    raise ValueError(f"A score {where} is {score}, not a finite number.")
            if expected is None:
                expected = len(scores)
            if len(scores) != expected:
                raise ValueError(
                    f"There are {len(scores)} scores {where}, but {expected} in the first run."
                )


def load(
    plan_path: Path,  # the study.yaml
    rows_path: Path,  # the training runs
    reward: str | None,  # the only reward to compute, None for all that all rows have
) -> tuple[Plan, list[dict], list[str]]:
    """Read and check a study, and list its rewards. Raise ValueError if it fails a check."""
    for path in (plan_path, rows_path):
        if not path.is_file():
            raise ValueError(f"There is no file {path}.")
    plan = read_plan(plan_path)
    rows = read_rows(rows_path)
    check_runs(rows, plan)
    available = common_rewards(rows)
    if not available:
        raise ValueError("There is no reward that all rows have.")
    # All are checked, even if one is asked for, because the smallest effect needs the outcome.
    for name in available:
        check_scores(rows, name)
    if reward is None:
        return plan, rows, available
    if reward not in available:
        raise ValueError(f"Not all rows have {reward}; they have {', '.join(available)}.")
    return plan, rows, [reward]


# Computing


def gains_by_seed(
    rows: list[dict],  # training runs
    arms: list[str],  # arms of the plan
    reward: str,  # name of the reward
) -> dict[str, dict[int, float]]:
    """Compute every run's gain: the mean over prompts of trained minus base, in the reward's units.

    Returns arm -> seed -> gain; an arm without runs has an empty dictionary.
    """
    gains = {arm: {} for arm in arms}
    for row in rows:
        base = np.array(row["scores"]["base"][reward], dtype=np.float64)  # (prompts,)
        plain = np.array(row["scores"]["plain"][reward], dtype=np.float64)  # (prompts,)
        gains[row["arm"]][row["seed"]] = float((plain - base).mean())
    return gains


def standard_error(
    values: np.ndarray,  # one value per seed, shape (n,) with n of at least 2
) -> float:
    """Compute the standard error of the mean, in the units of the values."""
    n = len(values)
    deviations = values - values.mean()
    variance = (deviations**2).sum() / (n - 1)
    return math.sqrt(variance / n)


def summary(
    values: np.ndarray,  # one value per seed, shape (n,)
) -> dict[str, int | float | None]:
    """Compute n, the mean, and the ends lo and hi of its t interval, in the units of the values.

    The mean is None without values, and the ends are None with fewer than two.
    """
    n = len(values)
    if n == 0:
        return {"n": 0, "mean": None, "lo": None, "hi": None}
    mean = float(values.mean())
    if n == 1:
        return {"n": 1, "mean": mean, "lo": None, "hi": None}
    # The interval leaves out the same probability on either side.
    quantile = float(student_t.ppf(0.5 + LEVEL / 2, n - 1))
    half_width = quantile * standard_error(values)
    return {"n": n, "mean": mean, "lo": mean - half_width, "hi": mean + half_width}


def paired_p(
    differences: np.ndarray,  # arm minus other, one per common seed, shape (n,)
) -> float | None:
    """Compute the two-sided p of the paired t test, None with fewer than two seeds."""
    n = len(differences)
    if n < 2:
        return None
    mean = float(differences.mean())
    error = standard_error(differences)
    if error == 0:
        # t is 0 / 0 if all differences are 0: such arms behave the same, which is no evidence
        # of a difference. If all are the same other number, t is infinite.
        return 1.0 if mean == 0 else 0.0
    return float(2 * student_t.sf(abs(mean / error), n - 1))


def holm(
    p_values: list[float | None],  # one p per contrast of a family, None if there is no test
) -> list[float | None]:
    """Adjust a family's p values by Holm's step-down method, and keep their order.

    A contrast without a p was not tested yet: it gets no adjusted p, but counts in the size of the
    family, since it was planned.
    """
    tested = [index for index, p in enumerate(p_values) if p is not None]
    tested.sort(key=lambda index: p_values[index])
    adjusted = [None] * len(p_values)
    largest = 0.0  # an adjusted p is never below that of a smaller p
    for rank, index in enumerate(tested):
        remaining = len(p_values) - rank
        largest = max(largest, min(1.0, remaining * p_values[index]))
        adjusted[index] = largest
    return adjusted


def contrast_rows(
    gains: dict[str, dict[int, float]],  # arm -> seed -> gain
    families: dict[str, list[tuple[str, str]]],  # family -> its contrasts (arm, other)
) -> list[dict]:
    """Compute every contrast, arm minus other over common seeds, in the units of the gains.

    A contrast with fewer than two common seeds has neither an interval nor p, but Holm's
    correction of its family counts it.
    """
    results = []
    for family, pairs in families.items():
        family_results = []
        for arm, other in pairs:
            seeds = sorted(set(gains[arm]) & set(gains[other]))
            differences = np.array([gains[arm][seed] - gains[other][seed] for seed in seeds])
            result = {"family": family, "arm": arm, "other": other}
            result.update(summary(differences))
            result["p"] = paired_p(differences)
            family_results.append(result)
        adjusted = holm([result["p"] for result in family_results])
        for result, p in zip(family_results, adjusted, strict=True):
            result["holm"] = p
        results.extend(family_results)
    return results


def reward_results(
    rows: list[dict],  # training runs that all have the reward
    plan: Plan,  # plan of the study
    reward: str,  # name of the reward
) -> dict:
    """Compute the gains of all arms and all contrasts in a reward, in the reward's units."""
    gains = gains_by_seed(rows, plan.arms, reward)
    arm_gains = {}
    for arm in plan.arms:
        arm_gains[arm] = summary(np.array(list(gains[arm].values())))
    return {"gains": arm_gains, "contrasts": contrast_rows(gains, plan.families)}


def smallest_effect(
    rows: list[dict],  # training runs
    plan: Plan,  # plan of the study
) -> float | None:
    """Compute the smallest effect of interest in the outcome's units, None if it is not defined.

    The plan gives it as a share of the reference's mean gain. It is not defined if the plan
    gives no share, not all rows have the outcome, or the reference has no runs.
    """
    if plan.smallest_effect is None or plan.outcome not in common_rewards(rows):
        return None
    if plan.reference is None:
        return None
    gains = list(gains_by_seed(rows, plan.arms, plan.outcome)[plan.reference].values())
    if not gains:
        return None
    return plan.smallest_effect * float(np.mean(gains))


def mean_cpu_seconds(
    rows: list[dict],  # training runs
    arms: list[str],  # arms of the plan
) -> dict[str, float | None]:
    """Compute the mean CPU time of a run of each arm, in seconds; None if a run lacks it.

    A mean of only some runs of an arm could mislead, so such an arm has none.
    """
    means = {}
    for arm in arms:
        times = [row.get("cpu_seconds") for row in rows if row["arm"] == arm]
        if not times or None in times:
            means[arm] = None
        else:
            means[arm] = float(np.mean(times))
    return means


def recompute(
    rows: list[dict],  # training runs that passed the checks
    plan: Plan,  # plan of the study
    rewards: list[str],  # rewards that all rows have
) -> dict:
    """Compute the results: per reward gains and contrasts, CPU seconds, the smallest effect."""
    results = {}
    for reward in rewards:
        results[reward] = reward_results(rows, plan, reward)
    results["cpu_seconds"] = mean_cpu_seconds(rows, plan.arms)
    results["smallest_effect"] = smallest_effect(rows, plan)
    return results


# Printing


def number_text(
    value: float | None,  # a gain, a difference or an end of an interval
    sign: bool = False,  # write a plus before a number that is not negative
) -> str:
    """Write a number with five decimals, or a dash if there is none."""
    if value is None:
        return "-"
    return f"{value:+.5f}" if sign else f"{value:.5f}"


def p_text(
    p: float | None,  # a probability
) -> str:
    """Write a p with four decimals, or a dash if there is none."""
    if p is None:
        return "-"
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def table(
    header: list[str],  # titles of the columns
    lines: list[list[str]],  # cells of each line, as many as titles
    text_columns: int,  # number of columns at the left that are aligned left, unlike numbers
) -> str:
    """Write a table with columns of fixed width."""
    widths = []
    for column in range(len(header)):
        widths.append(max(len(line[column]) for line in [header, *lines]))
    texts = []
    for line in [header, *lines]:
        cells = []
        for column, cell in enumerate(line):
            width = widths[column]
            cells.append(cell.ljust(width) if column < text_columns else cell.rjust(width))
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def report(
    results: dict,  # what recompute returns
    rewards: list[str],  # rewards to print
    plan: Plan,  # plan of the study
) -> str:
    """Write tables of gains and contrasts for every reward, in the rewards' units."""
    parts = []
    for reward in rewards:
        gain_lines = []
        for arm, gain in results[reward]["gains"].items():
            numbers = [number_text(gain[key]) for key in ("mean", "lo", "hi")]
            cpu_seconds = results["cpu_seconds"][arm]
            cpu_text = "-" if cpu_seconds is None else f"{cpu_seconds:.1f}"
            gain_lines.append([arm, str(gain["n"]), *numbers, cpu_text])
        gain_header = ["arm", "seeds", "gain", "lo", "hi", "CPU s"]

        contrast_lines = []
        for contrast in results[reward]["contrasts"]:
            names = [contrast["family"], f"{contrast['arm']} - {contrast['other']}"]
            numbers = [number_text(contrast[key], sign=True) for key in ("mean", "lo", "hi")]
            p_values = [p_text(contrast["p"]), p_text(contrast["holm"])]
            contrast_lines.append([*names, str(contrast["n"]), *numbers, *p_values])
        contrast_header = ["family", "contrast", "seeds", "difference", "lo", "hi", "p", "Holm"]

        parts.append(f"{reward}{' (outcome)' if reward == plan.outcome else ''}")
        parts.append(table(gain_header, gain_lines, text_columns=1))
        parts.append(table(contrast_header, contrast_lines, text_columns=2))
    effect = results["smallest_effect"]
    if effect is not None:
        share = f"{plan.smallest_effect:g} of the gain of {plan.reference}"
        parts.append(f"Smallest effect of interest in {plan.outcome}: {effect:.5f} ({share}).")
    return "\n\n".join(parts)


def main() -> int:
    """Print the results of a study; return 2 if it fails a check, else 0."""
    parser = argparse.ArgumentParser(description="Recompute a study's gains and contrasts.")
    parser.add_argument("name", help="name of the study")
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=root, help="root of the repository")
    parser.add_argument("--rows", type=Path, help="file of training runs instead of the study's")
    parser.add_argument("--reward", help="the only reward to compute")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not tables")
    arguments = parser.parse_args()

    plan_path = arguments.root / "runs/pocket/studies" / arguments.name / "study.yaml"
    rows_path = arguments.rows
    if rows_path is None:
        rows_path = arguments.root / "runs/results/studies" / f"{arguments.name}.jsonl"
    try:
        plan, rows, rewards = load(plan_path, rows_path, arguments.reward)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results = recompute(rows, plan, rewards)
    if arguments.json:
        print(json.dumps(results, allow_nan=False))
    else:
        print(report(results, rewards, plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
