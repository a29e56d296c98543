"""The power goes at any step of a tiny run: what the disk may hold goes on to the same bits, or is refused in words.

What a disk may hold stands in the module disk: nothing but what was synced is sure.
"""

import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import disk
import pytest
from sessions import Session, call, difference

pytestmark = pytest.mark.timeout(1800)
SAMPLE = 4


def outcome(session: Session, state: dict, root: Path) -> str:
    """What is wrong with how a state goes on, or nothing; a refusal in words is no wrong."""
    disk.put(state, root)
    begun = (root / "run" / "run.json").is_file()
    again = session.again if begun else ()
    done = call(session.spoken(root, *again), root)
    if (
        done.returncode == 2
        and done.stderr.startswith("chunk-grpo: ")
        and done.stderr.count("\n") == 1
    ):
        return "" if begun else f"a new run is refused: {done.stderr}"
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr[-300:]!r}"
    mine = session.result(root)
    theirs = session.result(session.whole)
    return "; ".join(
        f"other {name}: {difference(mine[name], theirs[name])}"
        for name in theirs
        if name != "files" and mine[name] != theirs[name]
    )


def check(session: Session, chosen: list, folder: Path) -> None:
    """Go on from every state, two at once."""

    def one(named):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            return outcome(session, named[1], Path(place) / "root")

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, chosen))
    wrong = [f"{name}: {words}" for (name, _), words in zip(chosen, found, strict=True) if words]
    assert not wrong, f"{len(wrong)} of {len(chosen)}\n" + "\n".join(wrong)


def late(states: list) -> list:
    """States with a checkpoint, a run that says that it is finished, or its weights."""
    return [
        one
        for one in states
        if any(name in one[1] for name in ("run/checkpoints/000001", "run/final"))
    ]


@pytest.mark.slow
def test_the_disk_keeps_what_was_synced(tiny_training):
    """The model itself: names need their folder's fsync, contents their own, and the last state is what is there."""
    whole = disk.Disk()
    for step in tiny_training.steps:
        whole.do(step)
    there = {
        str(file.relative_to(tiny_training.whole)): file.read_bytes()
        for file in tiny_training.whole.rglob("*")
        if file.is_file() and file.suffix != ".log"
    }
    found = {name: content for name, content in whole.state("names").items() if content is not None}
    assert found.keys() == there.keys()
    assert {
        name: content for name, content in whole.state("contents").items() if content is not None
    }.items() <= there.items()
    simple = disk.Disk()
    for op, path, more in (
        ("mkdir", "a", {}),
        ("open", "a/b", {"data": b"new"}),
        ("write", "a/b", {"data": b"1234"}),
    ):
        simple.do(disk.Step("", 0, op, path, **more))
    assert [simple.state(kind) for kind in disk.KINDS] == [
        {},
        {"a": None, "a/b": b""},
        {},
        {"a": None, "a/b": b"12"},
        {"a": None, "a/b": b"\0" * 4},
    ]


@pytest.mark.slow
def test_a_finished_run_is_on_the_disk(tiny_training):
    """At its end nothing of a run is left that a loss of power could take; its cache is none of it."""
    there = {
        f"run/{file.relative_to(tiny_training.whole / 'run')}": file.read_bytes()
        for file in (tiny_training.whole / "run").rglob("*")
        if file.is_file() and file.suffix != ".log"
    }
    whole = disk.Disk()
    for step in tiny_training.steps:
        whole.do(step)
    kept = {
        name: content
        for name, content in whole.state("synced").items()
        if content is not None and name.startswith("run/")
    }
    assert kept == there


@pytest.mark.slow
def test_power_lost_at_a_few_steps(tiny_training, tmp_path):
    check(
        tiny_training,
        random.Random(1).sample(late(disk.states(tiny_training.steps)), SAMPLE),
        tmp_path,
    )


@pytest.mark.slow
def test_power_lost_at_every_sync_and_rename(tiny_training, tmp_path):
    found = disk.states(tiny_training.steps)
    assert len(found) > 100
    check(tiny_training, [*found[::4], *late(found)[::3]][:70], tmp_path)


def finished_run(session: Session) -> disk.Disk:
    """A disk that holds what was there before a session, all of it for good."""
    root = disk.Disk()
    before = {
        str(file.relative_to(session.before)): file for file in sorted(session.before.rglob("*"))
    }
    for name, file in before.items():
        root.do(disk.Step("", 0, "mkdir" if file.is_dir() else "open", name, data=b"new"))
        if file.is_file():
            node = root.find(name)
            node.now = node.kept = file.read_bytes()
    for name in ["", *(name for name, file in before.items() if file.is_dir())]:
        node = root.find(name)
        node.kept = dict(node.now)
    return root


def counted_pictures(state: dict) -> dict[str, bytes | None]:
    """The pictures that finished lines of a state count as drawn, by arm and name; None where one is gone."""
    out = {}
    for name in [name for name in state if "/parts-" in name]:
        for line in state[name].rpartition(b"\n")[0].split(b"\n") if b"\n" in state[name] else []:
            files = [record["file"] for record in json.loads(line)["records"]]
            out |= {file: state.get(f"{name.rpartition('/')[0]}/{file}") for file in files}
    return out


def test_what_counts_as_drawn_is_on_the_disk(tiny_evaluation):
    """In every state, not only in those that are gone on with below."""
    theirs = tiny_evaluation.result(tiny_evaluation.whole)["pictures"]
    found = [
        (name, counted_pictures(state))
        for name, state in disk.every_state(tiny_evaluation.steps, finished_run(tiny_evaluation))
    ]
    wrong = [
        f"{name}: {file}"
        for name, files in found
        for file, content in files.items()
        if content != theirs[file]
    ]
    assert not wrong, "\n".join(wrong)
    assert max(len(files) for _, files in found) == len(theirs)


@pytest.mark.slow
def test_power_lost_in_an_evaluation(tiny_evaluation, tmp_path):
    found = disk.states(tiny_evaluation.steps, finished_run(tiny_evaluation))
    check(tiny_evaluation, found[:: max(1, len(found) // 30)], tmp_path)
