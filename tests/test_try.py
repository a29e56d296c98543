"""`chunk-grpo try`: what it rejects, how it tunes, that it goes on where it stopped, and its two controls."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import run
from study_rows import write as write_rows

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.files import read_json_lines
from chunk_grpo.core.validation import dump_yaml, read_yaml_file
from chunk_grpo.models.inputs import check_and_hash_inputs
from chunk_grpo.pocket import PROMPT_FILES, read_pocket_prompts
from chunk_grpo.studies import analysis, design, pilot, try_method
from chunk_grpo.training.method_loading import load_method

ROOT = Path(__file__).resolve().parents[1]

# A method that works, with an option of its own.
CLIP_HIGHER = """
from dataclasses import dataclass

import torch

from chunk_grpo.training.method import Method


class ClipHigher(Method):
    "A clip range that is wider upwards."

    @dataclass
    class Options:
        upper: float = 2.0  # times `clip_range`

    def objective(self, terms):
        ratio, e = terms.statistic.exp(), self.settings.clip_range
        clipped = ratio.clamp(1 - e, 1 + self.options.upper * e)
        return torch.minimum(ratio * terms.advantage, clipped * terms.advantage)
"""
# The first control: it learns nothing, so it must not differ from the base.
RANDOM = (ROOT / "tests/methods/random_advantages.py").read_text()
# The second control: it looks at the prompts of the test, so it must be rejected.
LEAK = """
from chunk_grpo.training.method import Method


class Leak(Method):
    "It knows the prompts on which it will be tested."

    def advantages(self, scores, weights):
        self.known = open(self.settings.eval_prompts).read().splitlines()
        return super().advantages(scores, weights)
"""
# The same, with a path that its text does not hold in one piece.
HIDDEN_LEAK = f"""
from pathlib import Path

from chunk_grpo.training.method import Method


class Hidden(Method):
    "It hides the prompts that it knows."

    def advantages(self, scores, weights):
        name = "t2e9s1t"
        (Path({str(PROMPT_FILES["test192"].parent)!r}) / (name[::2] + name[5:0:-2] + ".txt")).read_text()
        return super().advantages(scores, weights)
"""


@pytest.fixture
def protocol(tmp_path) -> Path:
    """A protocol whose trials take seconds: one iteration, four transitions, two prompts."""
    home = tmp_path / "protocol"
    home.mkdir()
    (tmp_path / "test-prompts.txt").write_text("\n".join(read_pocket_prompts("test")[:2]) + "\n")
    (tmp_path / "tune-prompts.txt").write_text(read_pocket_prompts("validation")[0] + "\n")
    base = settings.read_settings_file("pocket/tiny") | {
        "iterations": 1,
        "steps": 4,
        "chunks": "steps",
        "threads": 1,
        "eval_every": 0,
        "eval_count": 1,
        "eval_steps": 2,
        "hybrid_split": 2,
        "eval_prompts": str(tmp_path / "test-prompts.txt"),
    }
    study = {
        "title": "a small protocol",
        "question": "which?",
        "outcome": "pocket-clip",
        "smallest_effect": 0.1,
        "seeds": 6,
        "first_seed": 400,
        "reference": "steps",
        "arms": {
            "steps": {"chunks": "steps"},
            "whole": {"method": "whole"},
            "longer": {"method": "whole", "iterations": 2},
        },
        "evaluation": {"eval_images": 1},
        "tune": {"learning_rate": [1e-5, 2e-5, 4e-5]},
        "tune_own": {"steps": {"clip_range": [1e-4, 1e-3, 1e-2]}},
        "tune_growth": 2,
        "tune_seeds": 2,
        "tune_prompts": str(tmp_path / "tune-prompts.txt"),
    }
    (home / "base.yaml").write_text(json.dumps(base))
    (home / "study.yaml").write_text(json.dumps(study))
    return home


def write_method(folder: Path, text: str) -> str:
    """Write a method into a file; return its path."""
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


def invented_row(trial: design.Trial, gain: float) -> dict:
    """Return the row of a trial that was never run."""
    scores = {
        arm: {name: [0.4 + x, 0.6 + x] for name in ("pocket-clip", "pocket-geneval")}
        for arm, x in {"base": 0.0, "plain": gain}.items()
    }
    return {
        "study": trial.study,
        "arm": trial.arm,
        "seed": trial.seed,
        "settings": trial.settings.model_dump(mode="json"),
        "evaluation": trial.evaluation,
        "splits": trial.splits,
        "code": trial.code_hashes(),
        "git_commit": None,
        "machine": {"processor": "an invented one", "cores": 2},
        "images": 8,
        "transitions": 32,
        "cpu_seconds": 1.0,
        "chunks": "steps",
        "scores": scores,
        **check_and_hash_inputs(trial.settings),
    }


class InventedRuns:
    """What stands for `run_study`: trials that take no time, with gains of a function."""

    def __init__(self, gain: Callable[[design.Trial], float]):
        self.gain = gain
        self.begun: list[str] = []  # names of the trials that were not finished yet

    def __call__(
        self,
        source: Path,
        out: Path,
        processes: int | None = None,
        finished_rows: Sequence[Mapping] = (),
        log: Callable[[str], None] = print,
        unplanned: bool = False,
    ) -> list[dict]:
        """Return the rows of all trials, and keep them as `run_study` does."""
        rows = []
        earlier = [*finished_rows, *read_json_lines(out / "results.jsonl")]
        for trial in design.expand_trials(source):
            row = design.find_finished_row(trial, out, earlier)
            if row is None:
                self.begun.append(trial.name)
                noise = 0.004 * np.random.default_rng([trial.seed, len(trial.arm)]).normal()
                row = invented_row(trial, self.gain(trial) + noise)
            rows.append(row)
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return rows


@pytest.fixture
def invent(monkeypatch):
    """Replace trials, and the check's run of one iteration, by invented ones."""

    def replace(gain: Callable[[design.Trial], float]) -> InventedRuns:
        runs = InventedRuns(gain)
        monkeypatch.setattr(pilot, "run_study", runs)
        monkeypatch.setattr(try_method, "run_study", runs)
        monkeypatch.setattr(try_method, "_train_one_iteration", lambda settings, code: None)
        return runs

    return replace


def best_in_the_middle(trial: design.Trial) -> float:
    """Return a gain that is largest at a learning rate of 2e-5 and `upper` 8, which the grid does not hold."""
    upper = trial.settings.method_options.get("upper", 2.0)
    distance = abs(np.log2(trial.settings.learning_rate / 2e-5)) + abs(np.log2(upper / 8))
    return 0.2 - 0.03 * float(distance)


# What is rejected before anything is trained.


@pytest.mark.parametrize(
    "text, words",
    [
        ("other = 1\n", "must define exactly one subclass of .*; it defines none"),
        (CLIP_HIGHER + RANDOM, "it defines ClipHigher, RandomAdvantages"),
        ("class Mine(:\n", "has an error in line 1"),
        ("import no_such_package\nclass A: pass\n", "no_such_package"),
        (
            CLIP_HIGHER.replace("(self, terms)", "(self, statistic, advantage)"),
            "`objective` of ClipHigher must take",
        ),
        (
            RANDOM + "    tuning_grid = {'kl': [0.1]}\n",
            "`tuning_grid` of RandomAdvantages must map one setting to three values",
        ),
        (RANDOM + "    tuning_grid = {'iterations': [1, 2, 3]}\n", "must not change what the"),
        (
            RANDOM + "    tuning_grid = {'kl': [-1, 2, 3]}\n",
            "`kl=-1` is not: `kl` must be a number",
        ),
        (
            RANDOM + "    tuning_grid = {'learning_rate': [1e-4, 1e-3, 1e-2]}\n",
            "must name another setting than `learning_rate`",
        ),
        (
            RANDOM.replace("RandomAdvantages", "Größe"),
            "must have a name of ASCII letters and digits, .*; got Größe",
        ),
        (
            RANDOM.replace("def advantages", "def advantage"),
            "`advantage` of RandomAdvantages has no effect on training; did you mean advantages?",
        ),
        (
            RANDOM + "    def later(self):\n        return read_held_out_prompts(self.settings)\n",
            "uses read_held_out_prompts",
        ),
        (LEAK, "must not use held-out prompts; line 9 of mine.py uses eval_prompts"),
        (RANDOM + "    a = 'pocket:test192'\n", "names pocket:test192"),
        (RANDOM + "    a = 'test-prompts.txt'\n", "names test-prompts.txt"),
    ],
)
def test_a_file_that_is_no_method_or_knows_the_test_is_rejected(tmp_path, protocol, text, words):
    with pytest.raises(InputError, match=words) as caught:
        try_method.try_method(write_method(tmp_path, text), out=tmp_path / "out", protocol=protocol)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_the_files_of_the_recipe_do_what_it_says(tmp_path):
    """Its method and its first control load, and its second control is found to read the test prompts."""
    recipe = json.loads((ROOT / "nbs/14_cli/06_try_command.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in recipe["cells"])
    codes = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    names = [re.search(r"class (\w+)\(Method\)", code)[1] for code in codes]
    assert names == ["HalfClip", "RandomAdvantages", "Leak"]
    assert codes[1].strip() == RANDOM.strip()
    lists = try_method.held_out_lists("referee")
    base = settings.read_settings_file(design.find_study_folder("referee") / "base.yaml")
    for name, code in zip(names, codes, strict=True):
        file = tmp_path / f"{name}.py"
        file.write_text(code)
        leaks = try_method.find_leaks([file], lists)
        assert bool(leaks) == (name == "Leak")
        changes = try_method.method_changes(f"{file}:{name}")
        method = load_method(settings.load_settings(base, changes))
        if name == "RandomAdvantages":
            scores = {"pocket-clip": torch.zeros(8, 12)}
            assert method.advantages(scores, {}).shape == (8, 12)
        if name == "HalfClip":
            without = settings.load_settings(base, {"method": f"{file}:{name}"})
            with pytest.raises(
                InputError, match=r"`chunks` must be steps with \S+:HalfClip; got 2"
            ):
                load_method(without)
            values = {"statistic": torch.tensor([-1.0, 1.0]), "advantage": torch.ones(2)}
            clip_range = method.settings.clip_range
            found = method.objective(SimpleNamespace(**values))
            assert found.tolist() == pytest.approx([math.exp(-1), 1 + clip_range])


def test_a_method_that_fails_is_told_the_line_and_the_function(tmp_path, protocol):
    text = CLIP_HIGHER.replace("terms.statistic.exp()", "terms.no_such.exp()")
    with pytest.raises(InputError) as caught:
        try_method.check_method(write_method(tmp_path, text), protocol=protocol)
    said = str(caught.value)
    assert "line 17 of mine.py, in objective: AttributeError" in said and "\n" not in said


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["iterations=9"], "`iterations` must keep the value of the protocol"),
        (["eval_prompts=pocket:train"], "`eval_prompts` must keep the value of the protocol"),
        (["true_cfg_scale=3"], "`true_cfg_scale` must keep the value of the protocol"),
        (["learning_rate=1"], "`learning_rate` must be left to the tuning"),
        (["method.upper=3"], "`method.upper` must be left to the tuning"),
        (["no_such=1"], "no_such"),
        (["kl"], "NAME=VALUE"),
    ],
)
def test_settings_that_the_protocol_fixes_or_tunes_are_rejected(
    tmp_path, protocol, overrides, words
):
    mine = write_method(tmp_path, CLIP_HIGHER)
    with pytest.raises(InputError, match=words):
        try_method.check_method(mine, overrides, protocol)


def test_training_prompts_among_those_of_the_test_are_rejected(tmp_path, protocol):
    with open(tmp_path / "test-prompts.txt", "a") as file:
        file.write(read_pocket_prompts("train")[0] + "\n")
    with pytest.raises(InputError, match="must not be training prompts; 1 are"):
        try_method.check_method(write_method(tmp_path, CLIP_HIGHER), (), protocol)


def test_a_method_passes_the_check_in_a_real_iteration(tmp_path, protocol):
    checked = try_method.check_method(write_method(tmp_path, CLIP_HIGHER), (), protocol)
    assert checked.name == "ClipHigher" and checked.grid == {"method.upper": [1.0, 2.0, 4.0]}


def test_a_folder_in_place_of_the_file_is_one_sentence(tmp_path):
    (tmp_path / "mine.py").mkdir()
    with pytest.raises(InputError, match="mine.py"):
        try_method.find_method(f"{tmp_path / 'mine.py'}")


def test_a_hidden_leak_is_caught_when_it_opens_the_list(tmp_path, protocol):
    mine = write_method(tmp_path, HIDDEN_LEAK)
    lists = try_method.held_out_lists(protocol)
    assert not try_method.find_leaks(try_method.find_method_files(mine), lists)
    with pytest.raises(InputError, match="line 1[0-9] of mine.py opens test192.txt"):
        try_method.check_method(mine, (), protocol)


def test_a_hook_that_fails_while_training_is_one_sentence(tmp_path, protocol):
    text = RANDOM.replace("torch.randn(shape, generator=self.generator())", "torch.ones(3)")
    with pytest.raises(InputError, match="`advantages` of .* must return finite") as caught:
        try_method.check_method(write_method(tmp_path, text), (), protocol)
    assert "\n" not in str(caught.value)


def test_a_method_whose_second_update_is_not_finite_is_rejected(tmp_path, protocol):
    """The ratio is 1 in the first update only."""
    text = CLIP_HIGHER.replace(
        "        return torch.minimum(",
        "        clipped = clipped * torch.where(ratio == 1, 1.0, math.nan)\n        return torch.minimum(",
    ).replace("import torch\n", "import math\n\nimport torch\n", 1)
    with pytest.raises(InputError, match="must leave a finite gradient in every update"):
        try_method.check_method(
            write_method(tmp_path, text), ("updates_per_iteration=2",), protocol
        )


def test_a_protocol_that_tunes_nothing_is_rejected_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match="must be a study that tunes its arms"):
        try_method.check_method(write_method(tmp_path, CLIP_HIGHER), (), "explain")


def test_the_command_exits_with_2_and_one_sentence(tmp_path):
    mine = write_method(tmp_path, LEAK)
    said = run("try", mine, "--out", tmp_path / "out", code=2, cwd=tmp_path)
    assert "line 9 of mine.py uses eval_prompts" in said.splitlines()[-1]
    assert not (tmp_path / "out").exists()


# How it tunes and tests.


def test_tuning_grows_as_in_the_protocol_and_the_test_uses_its_choice(tmp_path, protocol, invent):
    runs = invent(best_in_the_middle)
    out = tmp_path / "out"
    try_method.try_method(write_method(tmp_path, CLIP_HIGHER), out=out, protocol=protocol)
    tuned = read_yaml_file(out / "plan/tuned.yaml")
    assert list(tuned) == ["ClipHigher", "steps"]
    assert tuned["ClipHigher"]["settings"] == {"learning_rate": 2e-5, "method.upper": 8.0}
    # Nine points; 4 is the largest, so 8 follows; 8 is the largest, so 16 follows, and 8 stays.
    assert len(tuned["ClipHigher"]["points"]) == 11 and not tuned["ClipHigher"]["edge"]

    rows = read_json_lines(out / "trials/results.jsonl")
    assert {row["seed"] for row in rows} == {*range(400, 406)}
    tuning_rows = read_json_lines(out / "tuning/trials/results.jsonl")
    assert {row["seed"] for row in tuning_rows} == {1000, 1001}
    # The base's chunks are those of the preset steps; a method of a file keeps them in tuning too.
    assert {row["settings"]["chunks"] for row in [*rows, *tuning_rows]} == {"steps"}
    mine = [row["settings"] for row in rows if row["arm"] == "ClipHigher"]
    assert {row["method_options"]["upper"] for row in mine} == {8.0}
    assert {row["eval_prompts"] for row in mine} == {str(tmp_path / "test-prompts.txt")}
    assert len([name for name in runs.begun if re.fullmatch(r"ClipHigher-4\d\d", name)]) == 6


def test_a_second_call_runs_nothing_again_and_keeps_to_its_options(tmp_path, protocol, invent):
    runs = invent(best_in_the_middle)
    mine = write_method(tmp_path, CLIP_HIGHER)
    out = tmp_path / "out"
    page = try_method.try_method(mine, out=out, protocol=protocol)
    first = page.read_text()
    begun = len(runs.begun)
    # An interruption while testing, of which some rows are left.
    lines = (out / "trials/results.jsonl").read_text().splitlines(keepends=True)
    (out / "trials/results.jsonl").write_text("".join(lines[:5]))
    assert try_method.try_method(mine, out=out, protocol=protocol).read_text() == first
    assert len(runs.begun) == begun + len(lines) - 5

    with pytest.raises(InputError, match="begun with another `settings`"):
        try_method.try_method(mine, ["kl=0.01"], out=out, protocol=protocol)
    with pytest.raises(InputError, match="begun with another `quick`"):
        try_method.try_method(mine, out=out, protocol=protocol, quick=True)
    write_method(tmp_path, CLIP_HIGHER + "\n# changed\n")
    with pytest.raises(InputError, match="begun with another `file`"):
        try_method.try_method(mine, out=out, protocol=protocol)
    with pytest.raises(InputError, match="must be a new folder"):
        try_method.try_method(mine, out=tmp_path, protocol=protocol)


@pytest.mark.slow
def test_a_try_beside_another_does_not_train_the_reference_again(tmp_path, protocol, invent):
    runs = invent(best_in_the_middle)
    mine = write_method(tmp_path, CLIP_HIGHER)
    try_method.try_method(mine, out=tmp_path / "tries/one", protocol=protocol)
    assert any(name.startswith("steps") for name in runs.begun)
    runs.begun.clear()
    write_method(tmp_path, CLIP_HIGHER + "\n# another version\n")
    try_method.try_method(mine, out=tmp_path / "tries/two", protocol=protocol)
    assert runs.begun and not any(name.startswith("steps") for name in runs.begun)


def test_points_at_which_training_fails_are_not_chosen_and_are_named(tmp_path, protocol, invent):
    """A learning rate at which the method diverges loses, and the rest is tuned and tested."""
    runs = invent(best_in_the_middle)

    def fail_at_the_largest(source, out, *arguments, **options):
        rows = runs(source, out, *arguments, **options)
        failed = {
            trial.name: InputError("`learning_rate` must be lower")
            for trial in design.expand_trials(source)
            if trial.arm.startswith("ClipHigher@") and trial.settings.learning_rate == 4e-5
        }
        if failed:
            left = [row for row in rows if f"{row['arm']}-{row['seed']}" not in failed]
            text = "".join(json.dumps(row) + "\n" for row in left)
            (out / "results.jsonl").write_text(text)
            error = InputError("trials failed")
            error.failed_trials = failed
            raise error
        return rows

    pilot.run_study = fail_at_the_largest  # `invent` restores it
    out = tmp_path / "out"
    page = try_method.try_method(write_method(tmp_path, CLIP_HIGHER), out=out, protocol=protocol)
    best = read_yaml_file(out / "plan/tuned.yaml")["ClipHigher"]
    assert best["settings"]["learning_rate"] == 2e-5 and best["failed_points"]
    assert {point["learning_rate"] for point in best["failed_points"]} == {4e-5}
    assert "learning_rate=4e-05" in page.read_text().partition("Training failed at these")[2]


def test_an_arm_whose_points_all_fail_ends_the_tuning(tmp_path, protocol, invent):
    runs = invent(best_in_the_middle)

    def fail(source, out, *arguments, **options):
        runs(source, out, *arguments, **options)
        error = InputError("trials failed")
        error.failed_trials = {
            trial.name: InputError("no")
            for trial in design.expand_trials(source)
            if trial.arm.startswith("ClipHigher@")
        }
        raise error

    pilot.run_study = fail
    with pytest.raises(InputError, match="trials failed"):
        try_method.try_method(
            write_method(tmp_path, CLIP_HIGHER), out=tmp_path / "out", protocol=protocol
        )


def test_quick_is_small_and_says_that_it_decides_nothing(tmp_path, protocol, invent):
    runs = invent(best_in_the_middle)
    out = tmp_path / "out"
    mine = write_method(tmp_path, CLIP_HIGHER)
    page = try_method.try_method(mine, out=out, protocol=protocol, quick=True)
    # Nine points of each arm with one seed, and no further points; then four seeds of each arm.
    assert len(runs.begun) == 2 * 9 + 2 * 4
    assert "too few for a conclusion" in try_method.summarise_try(out)[0]
    assert "too few for a conclusion" in page.read_text()


def test_kept_arms_of_the_same_budget_are_on_the_page_without_a_run(
    tmp_path, protocol, invent, monkeypatch
):
    runs = invent(best_in_the_middle)
    best = {"settings": {"learning_rate": 2e-5}, "gain": 0.1, "edge": [], "points": []}
    tuned = {arm: best for arm in ("steps", "whole", "longer")}
    (protocol / "tuned.yaml").write_text(dump_yaml(tuned))
    kept = [invented_row(one, 0.1 + 0.001 * one.seed) for one in design.expand_trials(protocol)]
    monkeypatch.setattr(try_method, "load_complete_rows", lambda source: kept)
    page = try_method.try_method(
        write_method(tmp_path, CLIP_HIGHER), out=tmp_path / "out", protocol=protocol
    )
    assert {name.partition("@")[0].partition("-")[0] for name in runs.begun} == {"ClipHigher"}
    text = page.read_text()
    assert "ClipHigher minus whole" in text and "rows differ: longer." in text


def test_rows_of_other_settings_do_not_count_as_kept(tmp_path, protocol, invent, monkeypatch):
    runs = invent(best_in_the_middle)
    kept = [invented_row(one, 0.1) for one in design.expand_trials(protocol)]
    for row in kept:
        row["settings"]["eta"] = 0.3
    monkeypatch.setattr(try_method, "load_complete_rows", lambda source: kept)
    page = try_method.try_method(
        write_method(tmp_path, CLIP_HIGHER), out=tmp_path / "out", protocol=protocol
    )
    assert "minus whole" not in page.read_text()
    assert any(name.startswith("steps-") for name in runs.begun)


def test_an_unfinished_study_shows_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "STUDY_ROWS_FOLDER", tmp_path)
    study = design.load_study("referee")
    planned = [{"arm": arm, "seed": seed} for arm in study.arms for seed in study.seeds_of(arm)]
    file = tmp_path / "referee.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in planned[:-1]))
    assert try_method.load_complete_rows("referee") == []
    file.write_text("".join(json.dumps(row) + "\n" for row in planned))
    assert len(try_method.load_complete_rows("referee")) == len(planned)
    assert try_method.load_complete_rows(design.find_study_folder("referee")) != []


# What it says.


def summary(tmp_path, protocol, invent, text: str, gain: Callable) -> str:
    """Return the summary of a try whose trials are invented."""
    invent(gain)
    out = tmp_path / "out"
    try_method.try_method(write_method(tmp_path, text), out=out, protocol=protocol)
    return "\n".join(try_method.summarise_try(out))


def test_random_advantages_are_not_different_from_the_base(tmp_path, protocol, invent):
    def gain(trial: design.Trial) -> float:
        return 0.0 if trial.arm.startswith("Random") else 0.1

    said = summary(tmp_path, protocol, invent, RANDOM, gain)
    assert "not different from the base" in said and "behind steps" in said
    page = (tmp_path / "out/page.md").read_text()
    assert "It is no sandbox" in page and "has rank 2 of the 2 arms" in page
    assert re.search(r"not different from the base.*; power at the smallest effect", said)
    assert not re.search(r"behind steps.*power", said)  # what is decided needs no power
    assert "smallest effect of interest is 10% of the gain of steps" in said


def test_a_better_method_is_ahead_and_has_the_first_rank(tmp_path, protocol, invent):
    def gain(trial: design.Trial) -> float:
        return 0.15 if trial.arm.startswith("ClipHigher") else 0.1

    said = summary(tmp_path, protocol, invent, CLIP_HIGHER, gain)
    assert "ClipHigher has rank 1 of the 2 arms" in said
    assert "ahead of the base" in said and "ahead of steps" in said


def test_words_of_a_comparison_follow_interval_and_smallest_effect():
    def words(lo: float, hi: float, holm: float = 0.01, n: int = 8, smallest: float = 0.02) -> str:
        row = {"reference": "steps", "lo": lo, "hi": hi, "holm": holm, "n": n}
        return try_method.describe_comparison(row, smallest)

    assert words(0.01, 0.05) == "ahead of steps"
    assert words(0.001, 0.01) == "ahead of steps, by less than the smallest effect of interest"
    assert words(-0.05, -0.01) == "behind steps"
    assert words(-0.01, 0.01, 0.9).endswith("an effect of interest is excluded")
    assert words(-0.01, 0.05, 0.2).endswith("an effect of interest is not excluded")
    assert words(0.01, 0.05, 0.2).startswith("not different from steps")  # after correction
    assert words(0.01, 0.05, n=1) == "one seed decides nothing about steps"
    assert words(-0.01, 0.05, 0.2, smallest=0.0) == "not different from steps"


def test_a_table_survives_bars_and_line_breaks():
    table = try_method.markdown_table([{"a|b": "one|two", "c": "three\nfour"}])
    assert table.splitlines() == ["| a\\|b | c |", "|---|---|", "| one\\|two | three four |"]


def test_the_comparison_reads_rows_as_studies_keep_them(tmp_path):
    rows = write_rows(
        tmp_path, "referee", {"steps": 0.1, "crd": 0.15}, seeds=3, only=("steps", "crd")
    )
    study = design.load_study("referee").model_copy(
        update={"contrasts": {"against steps": [["crd", "steps"]]}}
    )
    table = try_method.comparison_table(rows, study, "crd")
    assert list(table.reference) == ["the base", "steps"] and (table.n == 3).all()
    without = study.model_copy(update={"smallest_effect": 0.0})
    assert try_method.comparison_table(rows, without, "crd").power.isna().all()
    assert [line["arm"] for line in try_method.rank_table(rows, "pocket-clip")] == [
        "crd",
        "steps",
        "the base",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("text", [CLIP_HIGHER, RANDOM])
def test_the_command_tries_a_method_and_goes_on(tmp_path, protocol, text):
    mine = write_method(tmp_path, text)
    words = ["try", mine, "--quick", "--protocol", protocol, "--out", tmp_path / "out"]
    said = run(*words, "--processes", 2, cwd=tmp_path)
    assert "has rank" in said and "too few for a conclusion" in said
    page = (tmp_path / "out/page.md").read_text()
    assert "minus steps" in page and (tmp_path / "out/report.html").stat().st_size > 10_000
    again = run(*words, cwd=tmp_path)
    assert re.search(r"\b0 are left", again)
