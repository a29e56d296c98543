"""Studies as processes: kills of every kind, failures, continuing from rows that were kept."""

import json
import signal

import psutil
import pytest
import small_study
from commands import call, run, start
from small_study import STUDY, begin, rows, trainers, wait_for

from chunk_grpo.studies import design, scheduler


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "The folder of a study whose trials take seconds."
    return small_study.write(tmp_path_factory.mktemp("study") / "small")


@pytest.fixture(scope="module")
def through(home, tmp_path_factory):
    "The study run through, and where it lies."
    out = tmp_path_factory.mktemp("through") / "small"
    said = run("study", home, "--processes", "2", "--out", out)
    assert "0 of 3 trials are finished" in said and said.count("pocket-clip") == 3 and f"{out}/results.jsonl" in said
    return out


def kill_study(home, out, *words):
    "Kill a study without warning within its first trial; nothing of it goes on."
    child = start("study", home, "--out", out, "--processes", "1", *words)
    wait_for(out / "steps-0" / "metrics.jsonl", 2, child)
    trials = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    assert trials and not psutil.wait_procs(trials, timeout=30)[1], "a trial outlives the study that began it"


def test_a_killed_study_goes_on(home, through, tmp_path):
    "One trial of it, to the row that the study has which nothing interrupted."
    kill_study(home, tmp_path / "small", "--arms", "steps")
    run("study", home, "--arms", "steps", "--out", tmp_path / "small")
    assert rows(tmp_path / "small") == rows(through)[:1]


@pytest.mark.slow
def test_three_kills_change_nothing(home, through, tmp_path):
    out = tmp_path / "small"
    kill_study(home, out)  # once the study itself
    child = begin(home, out, "--processes", "1")  # once a trial; the others go on, and the study says which one failed
    wait_for(out / "whole-0" / "metrics.jsonl", 2, child)
    trainers(out)[0].send_signal(signal.SIGKILL)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 1 and "whole-0 failed" in said and "killed by SIGKILL" in said
    child = begin(home, out, "--processes", "1")  # once politely
    wait_for(out / "longer-0" / "metrics.jsonl", 5, child)
    child.terminate()
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 143 and "the same command goes on" in said and not trainers(out)
    assert len(rows(out)) < 3
    run("study", home, "--processes", "1", "--out", out)
    assert rows(out) == rows(through)


def test_a_finished_study_is_not_run_again(home, through):
    before = (through / "results.jsonl").read_bytes()
    said = run("study", home, "--out", through)
    assert "3 of 3 trials are finished, 0 are left" in said and (through / "results.jsonl").read_bytes() == before


def test_rows_from_elsewhere_are_taken(home, through, tmp_path):
    out = tmp_path / "small"
    said = run("study", home, "--out", out, "--known", through / "results.jsonl")
    assert "3 of 3 trials are finished" in said and rows(out) == rows(through)
    assert not [path for path in out.iterdir() if path.is_dir()]
    lines = (through / "results.jsonl").read_text().splitlines()
    changed = json.loads(lines[0])
    changed["settings"]["learning_rate"] *= 2
    assert design.find_finished_row(design.expand_trials(home)[0], out, [changed]) is None


def test_arms_share_prompts_and_noise(through):
    first, second, longer = rows(through)
    assert first["scores"]["base"] == second["scores"]["base"]
    assert first["curve"]["pocket-clip"][0] == second["curve"]["pocket-clip"][0]
    assert longer["curve"]["pocket-clip"][:3] == second["curve"]["pocket-clip"]
    assert longer["images"] > second["images"] and second["transitions"] > 0


def test_only_one_call_works_on_a_study(home, through):
    with scheduler.study_lock(through):
        done = call("study", home, "--out", through)
    assert done.returncode == 2 and "is being run by another process" in done.stderr


@pytest.mark.parametrize("old, new, parts", [
    ("seeds: 1", "seeds: 0", ["`seeds`", "at least 1", "got 0"]),
    ("reference: steps", "reference: stairs", ["`reference`", "steps, whole, longer", "'stairs'"]),
    ("{longer: whole}", "{longer: hole}", ["`after`", "'hole'"]),
    ("chunks: whole}", "chunks: hole}", ["arm whole", "`chunks`", "hole"]),
    ("eval_images: 2", "eval_images: 0", ["`eval_images`", "at least 1"]),
    ("question:", "questions:", ["`questions`", "`question`"]),
])
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
    assert len(design.expand_trials(name)) == given.seeds * len(given.arms)
