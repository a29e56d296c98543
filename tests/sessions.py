"""Commands on a tiny run that nothing disturbed, with their file operations: what tests disturb, and go on with."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import children
import faults
import small_study
import warm
from commands import environment, server
from small_runs import metrics, trained

TINY = {
    "resolution": 32,
    "eval_resolution": 32,
    "steps": 5,
    "chunks": "2,2",
    "iterations": 2,
    "images_per_prompt": 2,
    "prompts_per_iteration": 2,
    "eval_steps": 2,
    "hybrid_split": 1,
    "eval_every": 0,
    "eval_count": 2,
    "keep_checkpoints": 1,
    "eval_rewards": ["tiny_rewards:red"],
}


def begin(words, root: Path, plan: faults.Plan, files):
    """The command line in a process of the server, which has a plan."""
    own = environment(CHUNK_GRPO_CACHE=root / "cache", HOME=root.parent)
    child = server().Process(
        target=faults.program, args=([*map(str, words)], own, str(root.parent), files, plan)
    )
    warm.start_process(child)
    return child


def call(words, root: Path, **plan) -> subprocess.CompletedProcess:
    """Run the command line to its end with a plan."""
    with tempfile.TemporaryDirectory() as folder:
        files = tuple(str(Path(folder) / name) for name in ("said", "error"))
        child = begin(words, root, faults.Plan(str(root), **plan), files)
        child.join(600)
        if child.exitcode is None:
            children.kill(children.descendants(child.pid))
            child.kill()
            raise AssertionError(f"no end: {words}")
        said, error = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(words, child.exitcode, said, error)


class Session:
    """A command, from a folder before it to the same folder after it, which nothing disturbed."""

    def __init__(self, home: Path, name: str, words, before: Path | None, fields, again=()):
        self.home, self.name, self.words, self.before, self.again = home, name, words, before, again
        self.fields, self.whole, self.log = fields, home / name / "root", home / f"{name}.steps"
        (home / name).mkdir()
        self.fresh(self.whole)
        done = call(self.spoken(self.whole), self.whole, log=str(self.log))
        assert done.returncode == 0, done.stderr + done.stdout
        self.steps = faults.read_steps(self.log)

    def fresh(self, root: Path) -> None:
        """The folder before the command."""
        shutil.copytree(self.before, root) if self.before else root.mkdir()

    def spoken(self, root: Path, *more) -> list[str]:
        """The words of the command for a folder."""
        return [*(str(word).replace("ROOT", str(root)) for word in self.words), *more]

    def places(self) -> list[faults.Step]:
        """The first step of each place, and the last one of those that change run.json or the metrics."""
        first, last = {}, {}
        for step in self.steps:
            first.setdefault(step.place, step)
            last[step.place] = step
        again = [
            step
            for step in last.values()
            if step not in first.values()
            and step.op in ("write", "rename")
            and re.fullmatch(r"run/\.?(run\.json|metrics\.jsonl).*", step.to or step.path)
        ]
        return [*first.values(), *again]

    def result(self, root: Path) -> dict:
        """What must be the same, whatever happened."""
        return self.fields(root)


def pictures(folder: Path) -> dict[str, bytes]:
    """All pictures under a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.png"))
    }


def of_training(root: Path) -> dict:
    """Metrics, weights and pictures of the run, its status, and what lies there that should not."""
    run = root / "run"
    there = sorted(
        str(file.relative_to(run)) for file in run.rglob("*") if file.suffix not in (".log", ".png")
    )
    return {
        "metrics": metrics(run),
        "weights": trained(run),
        "pictures": pictures(run),
        "files": there,
        "status": json.loads((run / "run.json").read_text())["status"],
    }


def of_evaluation(root: Path) -> dict:
    """Scores, summary and pictures, and what lies there; an embedding in its middle is removed an hour later."""
    folder = root / "run" / "evaluation"
    named = [str(file.relative_to(root)) for file in root.rglob("*") if file.suffix != ".png"]
    there = sorted(
        name for name in named if not (name.startswith("cache/") and name.endswith(".part"))
    )
    return {
        "summary": json.loads((folder / "summary.json").read_text()),
        "pictures": pictures(folder),
        "files": there,
        "scores": (folder / "scores.jsonl").read_text(),
    }


def of_report(root: Path) -> dict:
    """The page; ids of its cells aside."""
    page = (root / "run" / "report.html").read_text()
    return {
        "page": re.sub(r'id="[^"]*"', "", page).replace(str(root), ""),
        "files": sorted(str(file.relative_to(root)) for file in root.rglob("*")),
    }


def of_study(root: Path) -> dict:
    """The rows."""
    return {"rows": small_study.rows(root / "study")}


def train(home: Path) -> Session:
    """A run that nothing disturbed, with its steps."""
    words = ["train", home / "s.yaml", "--out", "ROOT/run", "--no-report"]
    return Session(home, "training", words, None, of_training, ("--resume",))


def evaluate(home: Path, training: Session) -> Session:
    """Its evaluation."""
    return Session(home, "evaluation", ["evaluate", "ROOT/run"], training.whole, of_evaluation)


def report(home: Path, training: Session) -> Session:
    """Its report."""
    return Session(home, "report", ["report", "ROOT/run"], training.whole, of_report)


def study(home: Path) -> Session:
    """A study of two arms, of which one goes on from the other."""
    place = home / "study-home"
    place.mkdir()
    about = {
        "title": "a study",
        "question": "which?",
        "seeds": 1,
        "reference": "one",
        "after": {"two": "one"},
        "arms": {"one": {"iterations": 1}, "two": {"iterations": 2}},
        "evaluation": {"eval_images": 1},
    }
    (place / "study.yaml").write_text(json.dumps(about))
    shutil.copy(home / "s.yaml", place / "base.yaml")
    words = ["study", place, "--out", "ROOT/study", "--processes", "1", "--unplanned"]
    return Session(home, "study", words, None, of_study)


def go_on(session: Session, root: Path) -> list[str]:
    """The same command again, and what is wrong with its end."""
    again = session.spoken(root, *session.again)
    if (
        session.again and not (root / "run" / "run.json").is_file()
    ):  # nothing was begun: said so, and begun there
        done = call(again, root)
        if done.returncode != 2 or "there is none" not in done.stderr:
            return [f"going on without a run ended with {done.returncode}: {done.stderr[-200:]}"]
        again = session.spoken(root)
    done = call(again, root)
    if done.returncode:
        return [f"going on ended with {done.returncode}: {done.stderr[-400:]!r}"]
    mine = session.result(root)
    theirs = session.result(session.whole)
    return [
        f"other {name}: {difference(mine[name], theirs[name])}"
        for name in theirs
        if mine[name] != theirs[name]
    ]


def difference(mine, theirs) -> str:
    """Where two results differ, in a few words."""
    if isinstance(theirs, list) and all(isinstance(x, str) for x in theirs):
        return f"more {sorted(set(mine) - set(theirs))}, fewer {sorted(set(theirs) - set(mine))}"
    if isinstance(theirs, dict):
        return str(
            [key for key in theirs.keys() | mine.keys() if mine.get(key) != theirs.get(key)][:5]
        )
    return f"{str(mine)[:200]} for {str(theirs)[:200]}"
