"""Studies as processes: kills of every kind, failures, continuing from rows that were kept."""

import json
import shutil
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import claims
import psutil
import pytest
import small_study
import study_rows
import yaml
from commands import call, run, start
from small_study import STUDY, begin, rows, trainers, wait_for

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.files import write_json
from chunk_grpo.core.machine import TrainingFailed
from chunk_grpo.reporting.reports import write_report
from chunk_grpo.reward_serving.client import RewardUnavailable
from chunk_grpo.studies import design, pilot, study


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a study whose trials take seconds."""
    return small_study.write(tmp_path_factory.mktemp("study") / "small")


@pytest.fixture(scope="module")
def through(home, tmp_path_factory):
    """The study run through, and where it lies."""
    out = tmp_path_factory.mktemp("through") / "small"
    said = run("study", home, "--processes", "2", "--out", out)
    gains, _, table = said.partition("finished: 3 trials")
    assert (
        "0 of 3 trials are finished" in said
        and gains.count("pocket-clip") == 3
        and f"{out}/results.jsonl" in said
    )
    assert "pocket-clip: minus " in table and f"report: {out}/report.html" in table
    assert "The plan was committed before the first trial." in (out / "report.html").read_text()
    return out


def kill_study(home, out, *words):
    """Kill a study without warning within its first trial; nothing of it goes on."""
    child = start("study", home, "--out", out, "--processes", "1", *words)
    wait_for(out / "steps-0" / "metrics.jsonl", 2, child)
    trials = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    assert trials and not psutil.wait_procs(trials, timeout=30)[1], (
        "a trial outlives the study that began it"
    )


def test_a_killed_study_goes_on(home, through, tmp_path):
    """One trial of it, to the row that the study has which nothing interrupted."""
    kill_study(home, tmp_path / "small", "--arms", "steps")
    run("study", home, "--arms", "steps", "--out", tmp_path / "small")
    assert rows(tmp_path / "small") == rows(through)[:1]


@pytest.mark.slow
def test_three_kills_change_nothing(home, through, tmp_path):
    out = tmp_path / "small"
    kill_study(home, out)  # once the study itself
    child = begin(
        home, out, "--processes", "1"
    )  # once a trial; the others go on, and the study says which one failed
    wait_for(out / "whole-0" / "metrics.jsonl", 2, child)
    trainers(out)[0].send_signal(signal.SIGKILL)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 1 and "whole-0 failed" in said and "killed by SIGKILL" in said
    child = begin(home, out, "--processes", "1")  # once politely
    wait_for(out / "longer-0" / "metrics.jsonl", 5, child)
    child.terminate()
    said, _ = child.communicate(timeout=60)
    assert (
        child.returncode == 143
        and "the same command resumes the study" in said
        and not trainers(out)
    )
    assert len(rows(out)) < 3
    run("study", home, "--processes", "1", "--out", out)
    assert rows(out) == rows(through)


def test_a_finished_study_is_not_run_again(home, through):
    before = (through / "results.jsonl").read_bytes()
    said = run("study", home, "--out", through)
    assert (
        "3 of 3 trials are finished, 0 are left" in said
        and (through / "results.jsonl").read_bytes() == before
    )


@pytest.mark.slow
def test_rows_from_elsewhere_are_taken(home, through, tmp_path):
    out = tmp_path / "small"
    said = run("study", home, "--out", out, "--known", through / "results.jsonl")
    assert "3 of 3 trials are finished" in said and rows(out) == rows(through)
    assert not [path for path in out.iterdir() if path.is_dir()]
    lines = (through / "results.jsonl").read_text().splitlines()
    changed = json.loads(lines[0])
    changed["settings"]["learning_rate"] *= 2
    assert design.find_finished_row(design.expand_trials(home)[0], out, [changed]) is None


@pytest.mark.slow
def test_rows_count_as_finished_although_their_folders_were_deleted(home, through, tmp_path):
    out = tmp_path / "small"
    out.mkdir()
    shutil.copy(through / "results.jsonl", out)
    said = run("study", home, "--out", out)
    assert "3 of 3 trials are finished, 0 are left" in said and rows(out) == rows(through)


def test_rows_of_other_held_out_prompts_are_not_taken(home, through, tmp_path):
    trial = design.expand_trials(home)[0]
    row = json.loads((through / "results.jsonl").read_text().splitlines()[0])
    assert design.find_finished_row(trial, tmp_path, [row])
    assert design.find_finished_row(trial, tmp_path, [row | {"eval_sha256": "0" * 64}]) is None
    del row["eval_sha256"]  # a row of an earlier version
    assert design.find_finished_row(trial, tmp_path, [row])


def report_of(folder, found, plan):
    """Write the report of invented rows of the referee that all began under a plan, and return its text."""
    lines = [json.dumps(row | {"plan": plan}) for row in found]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    home = str(design.find_study_folder("referee"))
    page = write_report("study", folder / "report.html", home=home, folder=str(folder))
    return page.read_text()


@pytest.mark.slow
def test_a_report_compares_the_planned_pairs_and_calls_unplanned_trials_exploratory(tmp_path):
    found = study_rows.write(tmp_path, "referee", seeds=3, only=("steps", "crd", "crd-chunk"))
    plan = design.plan_record(design.find_study_folder("referee"), unplanned=True)
    plan |= {"commit": "0" * 40, "peeks": [9]}
    committed = "The plan was committed before the first trial."
    for changes, words in (
        ({"unplanned": True}, "the results are exploratory"),
        ({"unplanned": False}, committed),
        ({"unplanned": False, "sha256": "0" * 64}, "No run began under the plan as it is now"),
    ):
        text = report_of(tmp_path, found, plan | changes)
        assert "crd-chunk minus crd" in text and "chunks choose the levels" in text
        assert "crd minus steps" not in text  # no planned pair
        assert text.count("p (Holm)") == 1  # that of the planned pairs
        assert words in text
        assert (committed in text) == (words == committed)


@pytest.mark.slow
def test_a_report_before_the_last_trial_shows_no_outcome_unless_somebody_looked(tmp_path):
    found = study_rows.write(tmp_path, "referee", seeds=3, only=("steps", "crd", "crd-chunk"))
    plan = design.plan_record(design.find_study_folder("referee"), unplanned=True)
    text = report_of(tmp_path, found, plan)
    assert "No outcome is shown before the last trial" in text
    assert "p (Holm)" not in text and "gains +" not in text
    assert "Still missing: " in text


def test_a_new_study_keeps_the_settings_of_its_base_file(tmp_path):
    base = tmp_path / "my.yaml"
    base.write_text("like: pocket/demo\nstatistic: guard\n")
    folder = design.write_new_study(tmp_path / "2024", ["chunk", "steps"], base)
    trials = {trial.arm: trial.settings for trial in design.expand_trials(folder)}
    assert trials["chunk"].statistic == trials["steps"].statistic == "guard"
    assert design.load_study(folder).title == "2024"


def test_two_files_of_one_name_are_refused_by_a_new_study(tmp_path):
    code = "from chunk_grpo.training.method import Method\n\n\nclass {}(Method):\n    pass\n"
    for name, class_name in (("one", "First"), ("two", "Second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank.py").write_text(code.format(class_name))
    arms = [f"{tmp_path}/one/rank.py:First", f"{tmp_path}/two/rank.py:Second"]
    with pytest.raises(InputError, match="files with different names"):
        design.write_new_study(tmp_path / "new", arms, "pocket/tiny")
    assert not (tmp_path / "new").exists()


def test_tuned_settings_of_an_arm_that_the_study_does_not_have_are_refused(home, tmp_path):
    folder = tmp_path / "renamed"
    shutil.copytree(home, folder)
    (folder / "tuned.yaml").write_text("stairs: {settings: {learning_rate: 0.5}}\n")
    with pytest.raises(InputError, match="must name arms of the study.*got stairs"):
        design.expand_trials(folder)


@pytest.mark.parametrize(
    "words, part",
    [
        (["explain", "--base", "pocket/tiny"], "`--base` must go with `--new`"),
        (["n", "--new", "--arms", "a,b", "--seeds", "0"], "`--new` must be given without --seeds"),
        (["n", "--new"], "`--arms` must name at least two methods; got none"),
        (["explain", "--arms", "steps", "--seeds", "999"], "`seeds` must"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, words, part):
    done = call("study", *words, cwd=tmp_path)
    assert done.returncode == 2 and part in done.stderr and not [*tmp_path.iterdir()]


def test_tuned_values_may_be_lists():
    points = [{"chunks": [1, 2], "gain": 0.1, "gains": [0.1, 0.12]}]
    points.append({"chunks": [3], "gain": 0.2, "gains": [0.2, 0.21]})
    best = {"points": points, "settings": {"chunks": [3]}, "gain": 0.2, "edge": ["chunks"]}
    assert pilot.next_points(None, {"a": best}) == {}
    table = pilot.tuning_difference_sd({"a": best, "b": best}, "a")
    assert list(table.index) == ["b"] and table.sd["b"] == 0
    assert pilot.paired_power(float("inf"), 8) == 1


def test_whole_numbers_of_one_grid_match_fractions_of_another():
    def tuned(values):
        points = [{"kl": x, "gain": 0.1 + x, "gains": [0.1 + x, 0.12 + x]} for x in values]
        return {"points": points, "settings": {"kl": values[0]}, "gain": 0.1, "edge": []}

    table = pilot.tuning_difference_sd({"a": tuned([1, 2]), "b": tuned([1.0, 2.0])}, "a")
    assert table.seeds["b"] == 3  # two points of two seeds have two degrees of freedom


def test_arms_share_prompts_and_noise(through):
    first, second, longer = rows(through)
    assert first["scores"]["base"] == second["scores"]["base"]
    assert first["curve"]["pocket-clip"][0] == second["curve"]["pocket-clip"][0]
    assert longer["curve"]["pocket-clip"][:3] == second["curve"]["pocket-clip"]
    assert longer["images"] > second["images"] and second["transitions"] > 0


def test_only_one_call_works_on_a_study(home, through):
    with study.study_lock(through):
        done = call("study", home, "--out", through)
    assert done.returncode == 2 and "is being run by another process" in done.stderr


@pytest.mark.parametrize(
    "old, new, parts",
    [
        (
            "reference: steps",
            "reference: stairs",
            ["`reference`", "steps, whole, longer", "'stairs'"],
        ),
        ("chunks: whole}", "chunks: hole}", ["arm whole", "`chunks`", "hole"]),
        ("question:", "questions:", ["`questions`", "`question`"]),
    ],
)
def test_bad_studies_are_one_sentence(home, tmp_path, old, new, parts):
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "base.yaml").write_text((home / "base.yaml").read_text())
    assert old in STUDY
    (folder / "study.yaml").write_text(STUDY.replace(old, new))
    done = call("study", folder, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("name", design.list_studies())
def test_shipped_studies_are_sound(name):
    given = design.load_study(name)
    assert given.seeds >= (5 if name in ("explain", "chunk-setting") else 3)
    assert len(design.expand_trials(name)) == sum(len(given.seeds_of(arm)) for arm in given.arms)
    rows = [{"arm": trial.arm, "seed": trial.seed} for trial in design.expand_trials(name)]
    assert given.is_complete(rows) and not given.is_complete(rows[:-1])


class Instant:
    """Trials that end at once, each with a gain that nobody should see too early."""

    concurrency_text = "at once"

    def __init__(self, most=99):
        self.left = most

    def prepare_slots(self, out, unfinished):
        return 1

    def submit(self, trial, out, slot):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        asked = {
            "study": trial.study,
            "arm": trial.arm,
            "seed": trial.seed,
            "evaluation": trial.evaluation,
            "splits": trial.splits,
            "plan": trial.plan,
        }
        (out / trial.name).mkdir(exist_ok=True)
        write_json(out / trial.name / "trial.json", asked)
        scores = {"base": {"pocket-clip": [0.5]}, "plain": {"pocket-clip": [0.625]}}
        write_json(
            out / trial.name / "row.json",
            asked
            | {"settings": trial.settings.model_dump(mode="json"), "scores": scores}
            | design.hash_inputs(trial.settings),
        )
        done = Future()
        done.set_result((json.loads((out / trial.name / "row.json").read_text()), 1.0))
        return done

    def close(self):
        pass


def study_until(home, out, trials, **marks):
    """What a study says that is stopped after so many trials."""
    said = []
    try:
        study.run_study(home, out, log=said.append, pool=Instant(trials), **marks)
    except KeyboardInterrupt:
        pass
    return "\n".join(said)


def plans(out):
    return [json.loads(line)["plan"] for line in (out / "results.jsonl").read_text().splitlines()]


def test_rows_of_trials_that_the_plan_no_longer_has_are_set_aside_and_found_again(home, tmp_path):
    out = tmp_path / "out"
    study_until(home, out, 99, unplanned=True)

    def trials(name):
        """Return the arm and seed of each row of a file, sorted."""
        rows = map(json.loads, (out / name).read_text().splitlines())
        return sorted((row["arm"], row["seed"]) for row in rows)

    before = trials("results.jsonl")
    for folder in out.glob("*-*/"):
        shutil.rmtree(folder)

    changed = shutil.copytree(home, tmp_path / "changed")
    text = (changed / "study.yaml").read_text()
    content = yaml.safe_load(text)
    first, *others = content["arms"]
    content["arms"] = {first: content["arms"][first]} | {
        f"new-{x}": content["arms"][x] | {"eta": 0.31} for x in others
    }
    content["reference"] = first
    content["after"] = {}
    (changed / "study.yaml").write_text(yaml.safe_dump(content))
    said = study_until(changed, out, 0, unplanned=True)
    old = trials("results.old.jsonl")
    assert sorted([*old, *trials("results.jsonl")]) == before and len(old) == 2
    assert f"{len(old)} rows belong to no trial of the plan" in said

    # With the former plan no trial runs again.
    said = study_until(home, out, 0, unplanned=True)
    assert trials("results.jsonl") == before and "0 are left" in said


def test_a_pool_that_cannot_run_leaves_the_rows_as_they_were(home, tmp_path):
    class Closed(Instant):
        def prepare_slots(self, out, unfinished):
            raise InputError("no room")

    out = tmp_path / "out"
    study_until(home, out, 2, unplanned=True)
    before = (out / "results.jsonl").read_bytes()
    for folder in out.glob("*-*/"):
        shutil.rmtree(folder)
    with pytest.raises(InputError, match="no room"):
        study.run_study(home, out, log=str, pool=Closed(), unplanned=True, arms=["steps"])
    assert (out / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([RewardUnavailable("away")], RewardUnavailable),
        ([InputError("wrong"), InputError("wrong too")], InputError),
        ([InputError("wrong"), TrainingFailed("broken")], TrainingFailed),
    ],
)
def test_failed_trials_keep_the_kind_of_their_error(home, tmp_path, errors, raised):
    """A script tells a server that is away, which passes, from wrong input and from a failure."""
    begun = []

    class Failing(Instant):
        def submit(self, trial, out, slot):
            begun.append(trial.name)
            done = Future()
            done.set_exception(errors[min(len(begun), len(errors)) - 1])
            return done

    with pytest.raises(Exception, match="trials failed, the first is") as error:
        study.run_study(home, tmp_path / "out", log=str, pool=Failing(), unplanned=True)
    assert type(error.value) is raised
    total = sum(trial.after is None for trial in design.expand_trials(home))
    assert len(begun) == (1 if raised is RewardUnavailable else total)


def test_the_study_in_the_current_folder_has_its_name(home, monkeypatch):
    monkeypatch.chdir(home)
    assert {trial.study for trial in design.expand_trials(".")} == {home.name}


def test_a_plan_that_is_not_committed_starts_no_trial(home, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("study.yaml", "base.yaml"):
        (folder / name).write_text((home / name).read_text())
    done = call("study", folder, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "lies in no git repository" in done.stderr and "--unplanned" in done.stderr
    small_study.commit(folder)
    assert design.plan_record(folder)["commit"] and not design.plan_record(folder)["unplanned"]
    (folder / "study.yaml").write_text(
        (folder / "study.yaml").read_text().replace("seeds: 1", "seeds: 2")
    )
    with pytest.raises(InputError, match="was changed since its commit"):
        study.run_study(folder, tmp_path / "out", pool=Instant())
    (folder / "tuned.yaml").write_text("steps: {settings: {learning_rate: 0.5}}")
    with pytest.raises(InputError, match="is not committed"):
        study.run_study(folder, tmp_path / "out", pool=Instant())
    study_until(folder, tmp_path / "out", 2, unplanned=True)
    small_study.commit(folder)
    study_until(
        folder, tmp_path / "out", 99
    )  # committed since: what was begun before keeps its mark
    assert [plan["unplanned"] for plan in plans(tmp_path / "out")] == [True] * 2 + [False] * 4


def test_a_plan_that_was_edited_after_its_first_trial_is_refused(tmp_path):
    home = small_study.write(tmp_path / "small")
    out = tmp_path / "out"
    study_until(home, out, 1)
    first = plans(out)[0]
    assert first == design.plan_record(home)
    (home / "study.yaml").write_text(
        (home / "study.yaml").read_text().replace("seeds: 1", "seeds: 2")
    )
    small_study.commit(home)
    with pytest.raises(
        InputError, match="must stay as it was when its first trial began; steps-0 began with"
    ):
        study.run_study(home, out, pool=Instant())
    study_until(home, out, 99, unplanned=True)
    assert [plan["unplanned"] for plan in plans(out)] == [False] + [True] * 5


def test_nothing_of_an_outcome_is_said_before_the_last_trial_unless_somebody_peeks(tmp_path):
    home = small_study.write(tmp_path / "small")
    # rows beside a study are taken
    out = tmp_path / "a/out"
    looked = tmp_path / "b/looked"
    assert "pocket-clip" not in study_until(home, out, 2) and "0.1" not in study_until(home, out, 0)
    assert study_until(home, out, 99).count("pocket-clip +0.125") == 3  # the plan is through
    assert all(plan["peeks"] == [] and not plan["unplanned"] for plan in plans(out))
    assert "pocket-clip" not in study_until(home, looked, 2)
    said = []
    study.run_study(home, looked, arms=["steps"], log=said.append, peek=True)
    assert (
        any("pocket-clip +0.125" in line for line in said)
        and [plan["peeks"] for plan in plans(looked)] == [[2]] * 2
    )
    study_until(home, looked, 99)
    assert [plan["peeks"] for plan in plans(looked)] == [[2]] * 3  # for ever


def test_the_verdict_shows_the_marks_of_plans(monkeypatch):
    rows = {"planned": [], "looked at": [2], "unplanned": []}
    for word, peeks in rows.items():
        plan = {"sha256": "0", "commit": "0", "unplanned": word == "unplanned", "peeks": peeks}
        monkeypatch.setattr(
            claims.analysis, "load_study_rows", lambda name, plan=plan: [{"plan": plan}]
        )
        assert claims.plan_status(["explain"]) == word


def test_the_iterations_of_the_run_that_a_trial_goes_on_from_are_not_its_own(tmp_path):
    first, second = (
        design.Trial(
            "s", arm, 0, settings.load_settings("pocket/tiny", {"iterations": n}), {}, 0, after
        )
        for arm, n, after in (("a", 2, None), ("b", 6, "a"))
    )
    progress = SimpleNamespace(
        plan=[first, second], out=tmp_path, unfinished=lambda: [first, second]
    )
    assert study._Progress.iterations_left(progress) == {"a-0": 2, "b-0": 4}
    (tmp_path / "b-0").mkdir()
    (tmp_path / "b-0/metrics.jsonl").write_text(
        "".join(f'{{"iteration": {i}}}\n' for i in range(4))
    )
    assert study._Progress.iterations_left(progress) == {"a-0": 2, "b-0": 3}


def test_of_two_values_each_is_an_edge():
    study = design.Study(
        title="t",
        question="q",
        reference="a",
        arms={"a": {}},
        tune={"learning_rate": [1e-3, 2e-3], "eta": [0.7]},
    )
    assert pilot.settings_at_edge(study, {"learning_rate": 1e-3, "eta": 0.7}) == ["learning_rate"]
    assert pilot.settings_at_edge(study, {"learning_rate": 2e-3, "eta": 0.7}) == ["learning_rate"]
    edges = [row["at the edge"] for row in pilot.tuning_table("chunk-setting")]
    assert len(edges) == 8 and all(
        "learning_rate" in edge and "clip_range" in edge for edge in edges
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ("evaluation: {learning_rate: 1}", "`learning_rate` cannot be changed in an evaluation"),
        (
            "evaluation: {eval_rewards: [pocket-clip]}\noutcome: hpsv3",
            "`outcome` must be a reward that is evaluated",
        ),
        (
            "after: {chunks: steps}",
            "arm chunks of the study mine cannot continue steps: `chunks` must stay",
        ),
    ],
)
def test_a_study_that_cannot_end_is_refused_before_it_begins(tmp_path, change, words):
    home = tmp_path / "mine"
    home.mkdir()
    (home / "base.yaml").write_text(settings.dump_settings(settings.load_settings("pocket/tiny")))
    (home / "study.yaml").write_text(
        f"title: t\nquestion: q\nreference: steps\narms: {{steps: {{chunks: steps}}, chunks: {{}}}}\n{change}\n"
    )
    with pytest.raises(InputError, match=words):
        study.run_study(home, tmp_path / "out", unplanned=True)
    assert not (tmp_path / "out").exists()


def test_what_a_kill_left_of_a_copy_is_no_trial(home, tmp_path):
    """A kill while an arm's run is copied leaves a hidden folder whose files may be cut."""
    left = tmp_path / "small" / ".longer-0.1.part"
    left.mkdir(parents=True)
    (left / "trial.json").write_text('{"stu')
    assert "finished: 1 trials" in run(
        "study", home, "--out", left.parent, "--arms", "steps", "--seeds", "0"
    )


def test_a_table_of_tuned_settings_has_a_column_for_the_settings_of_every_arm():
    """Arms tune different settings: the referee's `steps` a clip range, its `crd` a number of updates."""
    table = pilot.tuning_table("referee")
    assert [line["arm"] for line in table] == list(design.load_study("referee").arms)
    assert len({tuple(line) for line in table}) == 1
    lines = {line["arm"]: line for line in table}
    assert lines["steps"]["clip_range"] and not lines["steps"]["updates_per_iteration"]
    assert lines["crd"]["updates_per_iteration"] and not lines["crd"]["clip_range"]


BASE_STUDY = """
title: a small study
question: are the images of the base the same in all trials?
seeds: 1
reference: steps
arms: {steps: {chunks: steps}, crd: {method: crd, learning_rate: 1.0e-3}, cps: {method: cps}}
evaluation: {eval_images: 2}
"""


@pytest.mark.slow
def test_images_of_the_base_are_sampled_once(home, tmp_path):
    """Trials that copy them have the rows and images that each has alone, and a change to the base is seen."""
    folder = tmp_path / "plan"
    shutil.copytree(home, folder)
    (folder / "study.yaml").write_text(BASE_STUDY)
    small_study.commit(folder)
    together = tmp_path / "together" / "small"
    run("study", folder, "--out", together, "--processes", "1")
    base = together / "steps-0" / "evaluation" / "base"
    for arm in ("crd", "cps"):
        alone = tmp_path / arm / "small"
        run("study", folder, "--out", alone, "--processes", "1", "--arms", arm)
        assert rows(alone) == [row for row in rows(together) if row["arm"] == arm]
        for file in sorted(base.iterdir()):
            own = alone / f"{arm}-0" / "evaluation" / "base" / file.name
            assert own.read_bytes() == file.read_bytes()
            copied = together / f"{arm}-0" / "evaluation" / "base" / file.name
            assert copied.read_bytes() == file.read_bytes()

    # A marked image shows that they are copied.
    marked = tmp_path / "marked" / "small"
    run("study", folder, "--out", marked, "--processes", "1", "--arms", "steps")
    name = "evaluation/base/00000.png"
    (marked / "steps-0" / name).write_bytes(b"marked")
    run("study", folder, "--out", marked, "--processes", "1", "--arms", "steps,cps")
    assert (marked / "cps-0" / name).read_bytes() == b"marked"

    trial = together / "cps-0"
    evaluated = settings.load_settings(
        json.loads((trial / "run.json").read_text())["settings"], {"eval_images": 2}
    )
    identity = study.base_identity(trial, evaluated, {})
    assert study.find_run_with_same_base(trial, identity) == together / "crd-0"
    for changed in ({"shift": 2.0}, {"eval_images": 3}, {"eval_seed": 8}, {"threads": 2}):
        other = study.base_identity(trial, settings.load_settings(evaluated, changed), {})
        assert study.find_run_with_same_base(trial, other) is None
    assert study.find_run_with_same_base(trial, identity | {"code": {"my.py": "0"}}) is None
