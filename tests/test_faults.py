"""A stop before every file operation of a tiny run, its evaluation, its report and a tiny study, and random kills.

What is promised stands in PROMISES; what came of it is written as a table, fault x place, beside the runs of the test.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faults
import pytest
import small_study
from commands import environment, server
from small_runs import metrics, trained, write

from chunk_grpo.core.subprocesses import descendants, kill_processes, process_stat

pytestmark = pytest.mark.timeout(1800)
TINY = {"resolution": 32, "eval_resolution": 32, "steps": 5, "chunks": "2,2", "iterations": 2, "images_per_prompt": 2,
        "prompts_per_iteration": 2, "eval_steps": 2, "hybrid_split": 1, "eval_every": 0, "eval_count": 2,
        "keep_checkpoints": 1, "eval_rewards": ["tiny_rewards:red"]}
PROMISES = {
    "kill": "the same command goes on, to the same bits",
    "half": "a write ends in its middle: the same command goes on, to the same bits",
    "ENOSPC": "full from here on: one sentence, exit code 1 or 2, nothing half-written; then as after a kill",
    "EIO": "one sentence, exit code 1 or 2, nothing half-written; then as after a kill",
    "EINTR": "as EIO"}


def begin(words, root: Path, plan: faults.Plan, files):
    "The command line in a process of the server, which has a plan."
    own = environment(CHUNK_GRPO_CACHE=root / "cache", HOME=root.parent)
    child = server().Process(target=faults.program, args=([*map(str, words)], own, str(root.parent), files, plan))
    child.start()
    return child


def call(words, root: Path, **plan) -> subprocess.CompletedProcess:
    "Run the command line to its end with a plan."
    with tempfile.TemporaryDirectory() as folder:
        files = tuple(str(Path(folder) / name) for name in ("said", "error"))
        child = begin(words, root, faults.Plan(str(root), **plan), files)
        child.join(600)
        if child.exitcode is None:
            kill_processes(descendants(child.pid))
            child.kill()
            raise AssertionError(f"no end: {words}")
        said, error = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(words, child.exitcode, said, error)


class Session:
    "A command, from a folder before it to the same folder after it, which nothing disturbed."

    def __init__(self, home: Path, name: str, words, before: Path | None, fields, again=()):
        self.home, self.name, self.words, self.before, self.again = home, name, words, before, again
        self.fields, self.whole, self.log = fields, home / name / "root", home / f"{name}.steps"
        (home / name).mkdir()
        self.fresh(self.whole)
        done = call(self.spoken(self.whole), self.whole, log=str(self.log))
        assert done.returncode == 0, done.stderr + done.stdout
        self.steps = faults.read_steps(self.log)

    def fresh(self, root: Path) -> None:
        "The folder before the command."
        shutil.copytree(self.before, root) if self.before else root.mkdir()

    def spoken(self, root: Path, *more) -> list[str]:
        "The words of the command for a folder."
        return [*(str(word).replace("ROOT", str(root)) for word in self.words), *more]

    def places(self) -> list[faults.Step]:
        "The first step of each place, and the last one of those that change run.json or the metrics."
        first, last = {}, {}
        for step in self.steps:
            first.setdefault(step.place, step)
            last[step.place] = step
        again = [step for step in last.values() if step not in first.values() and step.op in ("write", "rename")
                 and re.fullmatch(r"run/\.?(run\.json|metrics\.jsonl).*", step.to or step.path)]
        return [*first.values(), *again]

    def result(self, root: Path) -> dict:
        "What must be the same, whatever happened."
        return self.fields(root)


def pictures(folder: Path) -> dict[str, bytes]:
    "All pictures under a folder."
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.png"))}


def of_training(root: Path) -> dict:
    "Metrics, weights and pictures of the run, its status, and what lies there that should not."
    run = root / "run"
    there = sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.suffix not in (".log", ".png"))
    return {"metrics": metrics(run), "weights": trained(run), "pictures": pictures(run), "files": there,
            "status": json.loads((run / "run.json").read_text())["status"]}


def of_evaluation(root: Path) -> dict:
    "Scores, summary and pictures, and what lies there; an embedding in its middle is removed an hour later."
    folder = root / "run" / "evaluation"
    named = [str(file.relative_to(root)) for file in root.rglob("*") if file.suffix != ".png"]
    there = sorted(name for name in named if not (name.startswith("cache/") and name.endswith(".part")))
    return {"summary": json.loads((folder / "summary.json").read_text()), "pictures": pictures(folder), "files": there,
            "scores": (folder / "scores.jsonl").read_text()}


def of_report(root: Path) -> dict:
    "The page; ids of its cells aside."
    page = (root / "run" / "report.html").read_text()
    return {"page": re.sub(r'id="[^"]*"', "", page).replace(str(root), ""), "files": sorted(
        str(file.relative_to(root)) for file in root.rglob("*"))}


def of_study(root: Path) -> dict:
    "The rows."
    return {"rows": small_study.rows(root / "study")}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A folder with the model, prompts and settings."
    return write(tmp_path_factory.mktemp("faults"), **TINY)


def training_session(home: Path) -> Session:
    "A run that nothing disturbed, with its steps."
    words = ["train", home / "s.yaml", "--out", "ROOT/run", "--no-report"]
    return Session(home, "training", words, None, of_training, ("--resume",))


def evaluation_session(home: Path, training: Session) -> Session:
    "Its evaluation."
    return Session(home, "evaluation", ["evaluate", "ROOT/run"], training.whole, of_evaluation)


@pytest.fixture(scope="module")
def training(home):
    return training_session(home)


@pytest.fixture(scope="module")
def evaluation(home, training):
    return evaluation_session(home, training)


@pytest.fixture(scope="module")
def report(home, training):
    "Its report."
    return Session(home, "report", ["report", "ROOT/run"], training.whole, of_report)


@pytest.fixture(scope="module")
def study(home):
    "A study of two arms, of which one goes on from the other."
    place = home / "study-home"
    place.mkdir()
    about = {"title": "a study", "question": "which?", "seeds": 1, "reference": "one", "after": {"two": "one"},
             "arms": {"one": {"iterations": 1}, "two": {"iterations": 2}}, "evaluation": {"eval_images": 1}}
    (place / "study.yaml").write_text(json.dumps(about))
    shutil.copy(home / "s.yaml", place / "base.yaml")
    words = ["study", place, "--out", "ROOT/study", "--processes", "1"]
    return Session(home, "study", words, None, of_study)


def leftovers(root: Path) -> list[str]:
    "What was begun and not finished: temporary names of this program; what it could not remove is not that."
    return [str(file.relative_to(root)) for file in root.rglob(".*") if re.search(r"(?<!\.old)\.\d+\.part$", file.name)]


def strike(session: Session, step: faults.Step, kind: str, folder: Path) -> str:
    "Let a fault strike, go on, and say what is wrong, or nothing."
    root = folder / "root"
    session.fresh(root)
    plan = {"role": step.role, "number": step.number, "kind": kind}
    done = call(session.spoken(root), root, **plan)
    Path(f"{root}.full").unlink(missing_ok=True)
    wrong, killed = [], kind in ("kill", "half")
    if killed and done.returncode != -9:
        return f"it was not killed but ended with {done.returncode}: {done.stderr[-200:]}"
    if not killed and done.returncode == 0:
        same = session.result(root) == session.result(session.whole)
        return "" if same else "it ended well, with other results"
    if not killed:
        wrong += [f"exit code {done.returncode}"] * (done.returncode not in (1, 2))
        wrong += [f"no sentence: {done.stderr[-300:]!r}"] * (not done.stderr.strip() or "Traceback" in done.stderr)
        wrong += [f"left behind: {leftovers(root)}"] * bool(leftovers(root / "run") if (root / "run").exists() else [])
    return "; ".join([*wrong, *go_on(session, root)])


def go_on(session: Session, root: Path) -> list[str]:
    "The same command again, and what is wrong with its end."
    run = root / "run"
    again = session.spoken(root, *session.again)
    if session.again and not (run / "run.json").is_file():  # nothing was begun: said so, and begun anew
        done = call(again, root)
        if done.returncode != 2 or "there is none" not in done.stderr:
            return [f"going on without a run ended with {done.returncode}: {done.stderr[-200:]}"]
        shutil.rmtree(run, ignore_errors=True)
        again = session.spoken(root)
    done = call(again, root)
    if done.returncode:
        return [f"going on ended with {done.returncode}: {done.stderr[-400:]!r}"]
    mine, theirs = session.result(root), session.result(session.whole)
    return [f"other {name}: {difference(mine[name], theirs[name])}" for name in theirs if mine[name] != theirs[name]]


def difference(mine, theirs) -> str:
    "Where two results differ, in a few words."
    if isinstance(theirs, list) and all(isinstance(x, str) for x in theirs):
        return f"more {sorted(set(mine) - set(theirs))}, fewer {sorted(set(theirs) - set(mine))}"
    if isinstance(theirs, dict):
        return str([key for key in theirs.keys() | mine.keys() if mine.get(key) != theirs.get(key)][:5])
    return f"{str(mine)[:200]} for {str(theirs)[:200]}"


def cases(session: Session, kinds=tuple(PROMISES)) -> list[tuple[faults.Step, str]]:
    "Every place with a kill, every write with an end in its middle and a full disk, others with errors in turn."
    out = []
    for i, step in enumerate(session.places()):
        fit = {"kill": True, "half": step.op == "write" and len(step.data) > 1, "EIO": i % 6 == 0, "EINTR": i % 15 == 1,
               "ENOSPC": step.op in ("write", "mkdir")}
        out += [(step, kind) for kind in kinds if fit[kind]]
    return out


def check(session: Session, chosen, folder: Path) -> None:
    "Let all of them strike, two at once; the table, and what is wrong."
    def one(case):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            return strike(session, *case, Path(place))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, chosen))
    rows = [f"| {kind} | {' '.join(step.place)} | {wrong or 'kept'} |" for (step, kind), wrong in zip(
        chosen, found, strict=True)]
    promises = "".join(f"- {kind}: {words}\n" for kind, words in PROMISES.items())
    table = "\n".join([promises, "| fault | before the step | promise |", "| --- | --- | --- |", *rows]) + "\n"
    (session.home / f"{session.name}-faults.md").write_text(table)
    wrong = [row for row, words in zip(rows, found, strict=True) if words]
    assert not wrong, f"{len(wrong)} of {len(chosen)}\n" + "\n".join(wrong)


def test_steps_are_seen(training):
    "The log knows what a run writes: without it no fault could strike."
    ops = {step.op for step in training.steps}
    assert ops >= {"open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"}
    assert {step.role for step in training.steps} == {"main", "trainer"} and len(training.places()) > 40
    named = {step.to or step.path for step in training.steps}
    assert {"run/run.json", "run/metrics.jsonl", "run/checkpoints/000002", "run/final"} <= named


def test_a_few_faults_of_a_run(training, tmp_path):
    found = cases(training)
    chosen = [next((step, kind) for step, kind in found if kind == wanted and step.role == "trainer" and part in
                   (step.to or step.path)) for wanted, part in (("half", "metrics.jsonl"), ("ENOSPC", "weights"))]
    renamed = [step for step in training.steps if step.op == "rename" and step.to == "run/checkpoints/000002"]
    check(training, [*chosen, (renamed[0], "kill")], tmp_path)


@pytest.mark.slow
def test_every_place_of_a_run(training, tmp_path):
    check(training, cases(training), tmp_path)


@pytest.mark.slow
def test_every_place_of_an_evaluation(evaluation, tmp_path):
    check(evaluation, cases(evaluation, ("kill", "half", "ENOSPC", "EIO")), tmp_path)


@pytest.mark.slow
def test_every_place_of_a_report(report, tmp_path):
    check(report, cases(report, ("kill", "half", "ENOSPC", "EIO")), tmp_path)


@pytest.mark.slow
def test_every_place_of_a_study(study, tmp_path):
    "Those that a run and its evaluation do not have."
    def own(step):
        return re.search(r"^study/[^/]*$|row\.json|trial\.json", step.to or step.path)

    found = [(step, kind) for step, kind in cases(study, ("kill", "EIO")) if own(step)]
    chosen = {step.place[1:] + (kind,): (step, kind) for step, kind in found}
    check(study, list(chosen.values()), tmp_path)


def kill_after(delay: float, words, root: Path, files) -> bool:
    "Begin a command and kill it with all that it started; False where it had come to its end before."
    child = begin(words, root, faults.Plan(str(root)), files)
    child.join(delay)
    if child.exitcode is not None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGSTOP)  # so that it starts nothing more
    left = descendants(child.pid)
    child.kill()
    kill_processes(left)
    child.join()
    end = time.monotonic() + 60
    while any(map(process_stat, left)) and time.monotonic() < end:
        time.sleep(0.01)
    return True


@pytest.mark.slow
def test_a_hundred_random_kills(training, tmp_path):
    "Runs killed at a random moment, gone on with, killed again, five times each, and then let go to their end."
    draw, files = random.Random(0), (str(tmp_path / "said"), str(tmp_path / "error"))
    start, root = time.monotonic(), tmp_path / "root"
    training.fresh(root)
    assert call(training.spoken(root), root).returncode == 0
    longest, wrong, kills = time.monotonic() - start, [], 0
    while kills < 100:
        shutil.rmtree(root)
        training.fresh(root)
        for _ in range(5):
            begun = (root / "run" / "run.json").is_file()
            if not begun:
                shutil.rmtree(root / "run", ignore_errors=True)
            words = training.spoken(root, *training.again * begun)
            if not kill_after(draw.uniform(0, 0.8 * longest), words, root, files):
                break
            kills += 1
        wrong += [f"after {kills} kills: {words}" for words in go_on(training, root)]
    assert not wrong
