"""A stop before file operations of a tiny run, its evaluation, its report and a tiny study, and random kills.

What is promised stands in PROMISES; what came of it is written as a table, fault x place, beside the runs of the test.
A place is an operation of a program on a file: what is alike in every iteration is struck in the first, and where
run.json or the metrics change in the last too. A study is struck where a run and its evaluation have no place.

Every kind of operation on every file is struck, but for a fixed sample of those whose stop leaves what another stop
leaves too: see STRIDES.

Each case is the whole command as a process of its own, struck at the place, and the same command again as another. Both
are forks of a process with all imports done (`warm`): imports were most of what a case took.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import children
import faults
import pytest
import sessions
from sessions import Session, begin, call, go_on

pytestmark = pytest.mark.timeout(1800)
PROMISES = {
    "kill": "the same command goes on, to the same bits",
    "half": "a write ends in its middle: the same command goes on, to the same bits",
    "ENOSPC": "full from here on: one sentence, exit code 1 or 2, nothing half-written; then as after a kill",
    "EIO": "one sentence, exit code 1 or 2, nothing half-written; then as after a kill",
    "EINTR": "as EIO",
}
# (fault, operation) -> one in so many is struck, always with the first and the last
STRIDES = {
    # A kill before fsync leaves the files that a kill before the next operation leaves.
    ("kill", "fsync"): 4,
    # It leaves an empty file, and "half" of the same write leaves a part of it.
    ("kill", "write"): 3,
    # The disk stays full, so the operations after it fail too.
    ("ENOSPC", "write"): 2,
    ("ENOSPC", "mkdir"): 2,
}
PARTS = 4  # tests among which the cases of a session are divided, so that all workers are busy


@pytest.fixture(scope="module")
def report(tiny_home, tiny_training):
    return sessions.report(tiny_home, tiny_training)


@pytest.fixture(scope="module")
def study(tiny_home):
    return sessions.study(tiny_home)


def leftovers(root: Path) -> list[str]:
    """What was begun and not finished: temporary names of this program; what it could not remove is not that."""
    return [
        str(file.relative_to(root))
        for file in root.rglob(".*")
        if re.search(r"(?<!\.old)\.\d+\.part$", file.name)
    ]


def strike(session: Session, step: faults.Step, kind: str, folder: Path) -> str:
    """Let a fault strike, go on, and say what is wrong, or nothing."""
    root = folder / "root"
    session.fresh(root)
    plan = {"role": step.role, "number": step.number, "kind": kind}
    done = call(session.spoken(root), root, **plan)
    Path(f"{root}.full").unlink(missing_ok=True)
    wrong = []
    killed = kind in ("kill", "half")
    if killed and done.returncode != -9:
        return f"it was not killed but ended with {done.returncode}: {done.stderr[-200:]}"
    if not killed and done.returncode == 0:
        same = session.result(root) == session.result(session.whole)
        return "" if same else "it ended well, with other results"
    if not killed:
        wrong += [f"exit code {done.returncode}"] * (done.returncode not in (1, 2))
        wrong += [f"no sentence: {done.stderr[-300:]!r}"] * (
            not done.stderr.strip() or "Traceback" in done.stderr
        )
        wrong += [f"left behind: {leftovers(root)}"] * bool(
            leftovers(root / "run") if (root / "run").exists() else []
        )
    return "; ".join([*wrong, *go_on(session, root)])


def cases(session: Session, kinds=tuple(PROMISES)) -> list[tuple[faults.Step, str]]:
    """Every place with a kill, every write with an end in its middle and a full disk, others with errors in turn."""
    out = []
    for i, step in enumerate(session.places()):
        fit = {
            "kill": True,
            "half": step.op == "write" and len(step.data) > 1,
            "EIO": i % 6 == 0,
            "EINTR": i % 15 == 1,
            "ENOSPC": step.op in ("write", "mkdir"),
        }
        out += [(step, kind) for kind in kinds if fit[kind]]
    return out


def sample(found: list[tuple[faults.Step, str]]) -> list[tuple[faults.Step, str]]:
    """Every case, but of the kinds in STRIDES one in so many, with the first and the last of the kind."""
    halves = {id(step) for step, kind in found if kind == "half"}
    groups = {}
    for step, kind in found:
        name = (kind, step.op)
        if name != ("kill", "write") or id(step) in halves:
            groups.setdefault(name, []).append(step)
    left_out = {
        (id(step), kind)
        for (kind, op), group in groups.items()
        for place, step in enumerate(group[:-1])
        if place % STRIDES.get((kind, op), 1)
    }
    return [(step, kind) for step, kind in found if (id(step), kind) not in left_out]


def check(session: Session, chosen, folder: Path, part: int = 0) -> None:
    """Let all of them strike, two at once; the table, and what is wrong."""

    def one(case):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            return strike(session, *case, Path(place))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, chosen))
    rows = [
        f"| {kind} | {' '.join(step.place)} | {wrong or 'kept'} |"
        for (step, kind), wrong in zip(chosen, found, strict=True)
    ]
    promises = "".join(f"- {kind}: {words}\n" for kind, words in PROMISES.items())
    table = (
        "\n".join([promises, "| fault | before the step | promise |", "| --- | --- | --- |", *rows])
        + "\n"
    )
    (session.home / f"{session.name}-faults-{part}.md").write_text(table)
    wrong = [row for row, words in zip(rows, found, strict=True) if words]
    assert not wrong, f"{len(wrong)} of {len(chosen)}\n" + "\n".join(wrong)


def test_steps_are_seen(tiny_training):
    """The log knows what a run writes: without it no fault could strike."""
    ops = {step.op for step in tiny_training.steps}
    assert ops >= {"open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"}
    assert {step.role for step in tiny_training.steps} == {"main"} and len(
        tiny_training.places()
    ) > 40
    named = {step.to or step.path for step in tiny_training.steps}
    assert {"run/run.json", "run/metrics.jsonl", "run/checkpoints/000002", "run/final"} <= named


def unsynced(steps: list[faults.Step]):
    """Yield each step with what is not on the disk before it: files by their content, and names in their folders."""
    contents, names = set(), set()
    for step in steps:
        yield step, contents, names
        if step.op == "write":
            contents.add(step.path)
        elif step.op == "fsync":
            contents.discard(step.path)
            names = {name for name in names if Path(name).parent != Path(step.path)}
        elif step.op in ("rename", "mkdir") or step.data == b"new":
            names.add(step.to or step.path)


def test_a_file_is_synced_before_its_rename_and_its_folder_after_it(tiny_training):
    """What a power cut leaves of a run is whole, and all of a finished run is left."""
    steps = [step for step in tiny_training.steps if not step.path.startswith("cache")]
    early = [
        f"{lost} before the rename to {step.to}"
        for step, contents, names in unsynced(steps)
        for lost in contents | names - {step.path}
        if step.op == "rename" and Path(lost).is_relative_to(step.path)
    ]
    assert not early
    *_, (_, contents, names) = unsynced([*steps, steps[-1]])
    left = {name for name in contents | names if (tiny_training.whole / name).exists()}
    assert not {name for name in left if not name.endswith(".log")}


@pytest.mark.slow
def test_images_are_synced_before_they_count_as_drawn(tiny_evaluation):
    early = [
        contents | names
        for step, contents, names in unsynced(tiny_evaluation.steps)
        if step.op == "write" and "/parts-" in step.path
    ]
    assert early and not [name for lost in early for name in lost if name.endswith(".png")]


def test_a_few_faults_of_a_run(tiny_training, tmp_path):
    found = cases(tiny_training)
    chosen = [
        next(
            (step, kind)
            for step, kind in found
            if kind == wanted and part in (step.to or step.path)
        )
        for wanted, part in (("half", "metrics.jsonl"), ("ENOSPC", "weights"))
    ]
    renamed = [
        next(step for step in tiny_training.steps if step.op == "rename" and step.to == name)
        for name in ("run/checkpoints/000002", "run/run.json")
    ]  # before the latter there is a folder and no run
    check(tiny_training, [*chosen, *((step, "kill") for step in renamed)], tmp_path)


def test_the_sample_has_every_operation_on_every_file(tiny_training):
    """A place that no kill strikes has its file struck at another operation, and each end of a kind is kept."""
    every = cases(tiny_training)
    chosen = sample(every)
    assert chosen[0] == every[0] and len(every) / 2 < len(chosen) < len(every)
    assert {(kind, step.op) for step, kind in chosen} == {(kind, step.op) for step, kind in every}
    killed = [{step.place for step, kind in some if kind == "kill"} for some in (chosen, every)]
    assert {op for _, op, _ in killed[1] - killed[0]} == {"fsync", "write"}
    struck = {step.place for step, _ in chosen}
    assert {op for _, op, _ in killed[1] - struck} == {"fsync"}
    for name in STRIDES:
        ends = [
            [step.place for step, kind in some if (kind, step.op) == name]
            for some in (every, chosen)
        ]
        assert (ends[0][0], ends[0][-1]) == (ends[1][0], ends[1][-1]), name


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_place_of_a_run(tiny_training, tmp_path, part):
    check(tiny_training, sample(cases(tiny_training))[part::PARTS], tmp_path, part)


@pytest.mark.slow
def test_every_place_of_an_evaluation(tiny_evaluation, tmp_path):
    found = cases(tiny_evaluation, ("kill", "half", "ENOSPC", "EIO"))
    check(tiny_evaluation, sample(found), tmp_path)


@pytest.mark.slow
def test_every_place_of_a_report(report, tmp_path):
    check(report, sample(cases(report, ("kill", "half", "ENOSPC", "EIO"))), tmp_path)


def in_turn(found: list[tuple[faults.Step, str]]) -> list[tuple[faults.Step, str]]:
    """Of a place that the trials of both arms have, that of the one arm, of the next such place that of the other."""
    groups = {}
    for step, kind in found:
        role, op, name = step.place
        alike = re.sub(r"^study/(one|two)-0\b", "study/ARM-0", name)
        groups.setdefault((kind, role, op, alike), []).append((step, kind))
    pairs = 0
    out = []
    for group in groups.values():
        out.append(group[pairs % len(group)])
        pairs += len(group) > 1
    return out


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_place_of_a_study(study, tmp_path, part):
    """Those that a run and its evaluation do not have, and those before a trial has its run.json.

    Where the trials of both arms have a place, one of the two is struck, the arms in turn.
    """

    def own(step):
        name = step.to or step.path
        made = step.role == "main" and re.match(r"study/[^/.]+/\.?run\.json", name)
        return made or re.search(r"^study/[^/]*$|row\.json|trial\.json", name)

    found = [(step, kind) for step, kind in cases(study, ("kill", "EIO")) if own(step)]
    last = {step.place[1:] + (kind,): (step, kind) for step, kind in found}
    chosen = sample(in_turn(list(last.values())))
    assert {step.path.split("/")[1] for step, _ in chosen} >= {"one-0", "two-0", "lock"}
    check(study, chosen[part::PARTS], tmp_path, part)


def kill_after(delay: float, words, root: Path, files) -> bool:
    """Begin a command and kill it with all that it started; False where it had come to its end before."""
    child = begin(words, root, faults.Plan(str(root)), files)
    child.join(delay)
    if child.exitcode is not None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGSTOP)  # so that it starts nothing more
    left = children.descendants(child.pid)
    child.kill()
    children.kill(left)
    child.join()
    assert children.gone(left, 60)
    return True


def kill_a_run(
    session: Session, longest: float, number: int, folder: Path
) -> tuple[int, list[str]]:
    """One of these runs: how often it was killed, and what is wrong."""
    draw = random.Random(number)
    root = folder / str(number) / "root"
    root.parent.mkdir()
    session.fresh(root)
    kills = 0
    files = (str(root.parent / "said"), str(root.parent / "error"))
    for _ in range(5):
        again = session.again if (root / "run" / "run.json").is_file() else ()
        if not kill_after(
            draw.uniform(0, 0.8 * longest), session.spoken(root, *again), root, files
        ):
            break
        kills += 1
    return kills, [f"run {number} after {kills} kills: {words}" for words in go_on(session, root)]


@pytest.mark.slow
def test_a_hundred_random_kills(tiny_training, tmp_path):
    """Runs killed at a random moment, gone on with, killed again, five times each, and then let go to their end."""

    def seconds(name: str) -> float:
        start = time.monotonic()
        root = tmp_path / name
        tiny_training.fresh(root)
        assert call(tiny_training.spoken(root), root).returncode == 0
        return time.monotonic() - start

    kills, wrong = 0, []
    with ThreadPoolExecutor(2) as pool:
        longest = max(
            pool.map(seconds, ("one", "other"))
        )  # two at once, as the runs that are killed
        for first in itertools.count(0, 4):
            four = range(first, first + 4)
            for more, found in pool.map(
                lambda number: kill_a_run(tiny_training, longest, number, tmp_path), four
            ):
                kills, wrong = kills + more, wrong + found
            if kills >= 100:
                break
    assert not wrong
