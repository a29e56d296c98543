"""Bad inputs through the real command line: refused in one plain sentence, nothing written, nothing changed.

`CASES='loop|/proc/new' pytest -m slow tests/test_corpus.py` runs those alone whose names hold a regular expression.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import corpus
import pytest
import warm
from commands import environment, server

pytestmark = pytest.mark.timeout(1800)
FAST = 3  # of each group, in every test run


def entries(folder: str):
    """What lies in a folder, with what would change where it is touched."""
    with os.scandir(folder) as found:
        for entry in found:
            yield entry.path, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from entries(entry.path)


def snapshot(*folders: Path) -> dict[str, tuple]:
    """Every file and folder with what would change where it is touched."""
    found = [
        pair
        for folder in folders
        for pair in ((str(folder), folder.lstat()), *entries(str(folder)))
    ]
    return {
        name: (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in found
    }


def is_plain(error: str) -> str:
    """What keeps a text on stderr from being one plain sentence, or nothing."""
    if "Traceback" in error or "unforeseen" in error:
        return "an error of the program"
    if error.startswith("Usage: "):
        error = error.rstrip("\n").rpartition("\n")[2] + "\n"
        return "" if error.startswith("Error: ") else "a usage without its error"
    if not error.startswith("chunk-grpo: ") or error.count("\n") != 1:
        return "not one sentence"
    if re.search(r"[\x00-\x09\x0b-\x1f\x7f]", error):
        return "control characters"
    return "too long" if len(error) > 1500 else ""


def faults(case: corpus.Case, home: Path, work: Path) -> str:
    """What is wrong with how a command ended, or nothing."""
    before = snapshot(home, work)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("said", "error")]
        own = {
            "HOME": home,
            "TMPDIR": home,
            "XDG_CACHE_HOME": "",
            "CHUNK_GRPO_CACHE": "",
            **case.env,
        }
        try:
            code = warm.call(
                server(),
                [*map(str, case.words)],
                environment(**own),
                str(work),
                (*map(str, files),),
                120,
            )
        except subprocess.TimeoutExpired:
            return "no end"
        said, error = (file.read_text(errors="replace") for file in files)
    wrong = [f"exit code {code}"] * (code not in case.codes)
    wrong += [why for why in [is_plain(error)] if why and code] + ["something on stdout"] * bool(
        said and code
    )
    after = snapshot(home, work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed = {
        name for name in changed if "__pycache__" not in name and name != str(work / "code")
    }  # Python's own
    if case.late:  # the store keeps the prompts' states, and the run stays noted as one's own
        changed = {
            name for name in changed if not Path(name).is_relative_to(home) and name != str(work)
        }
    wrong += [f"{os.path.relpath(name, work)} was changed" for name in sorted(changed)[-1:]]
    return f"{'; '.join(wrong)}: {(error or said)[-400:]!r}" if wrong else ""


def check(kind: str, folder: Path, count: int | None) -> int:
    """Run cases of a kind; how many there were."""
    home = folder / "home"
    work = folder / "work"
    home.mkdir()
    work.mkdir()
    cases = corpus.KINDS[kind](work)
    wanted = os.environ.get("CASES", "")
    chosen = (
        corpus.sample(cases, count)
        if count
        else {k: v for k, v in cases.items() if re.search(wanted, k)}
    )
    found = {name: wrong for name, case in chosen.items() if (wrong := faults(case, home, work))}
    assert not found, f"{len(found)} of {len(chosen)}\n" + "\n".join(
        f"{k}: {v}" for k, v in found.items()
    )
    return len(chosen)


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_a_sample_of_bad_inputs_is_refused(kind, tmp_path):
    assert check(kind, tmp_path, FAST) == FAST


@pytest.mark.slow
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_every_bad_input_is_refused(kind, tmp_path):
    assert check(kind, tmp_path, None) > 10 or os.environ.get("CASES")
