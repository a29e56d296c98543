"""What every command reads, writes, runs and contacts; `python tests/promises.py` keeps the table of the book."""

import http.server
import io
import json
import os
import re
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from commands import free_port
from strangers import COMMAND_LINE, watched, write_stranger

from chunk_grpo.reward_serving.placement import ENVIRONMENTS_DIR

KEPT = Path(__file__).parents[1] / "runs" / "results" / "promises.json"
TINY = (
    "like: pocket/tiny\niterations: 1\nsteps: 4\nchunks: '3'\neval_rewards: []\neval_count: 2\nhybrid_split: 2\n"
    "eval_steps: 2\nprompts: {0}\neval_prompts: {0}\n"
)
ON_A_RUN = {  # command -> its words, beside a run in the folder `run` and settings in tiny.yaml
    "plan": ["plan", "--run", "run", "--rate", "1"],
    "report": ["report", "run"],
    "watch": ["watch", "run"],
    "lab": ["lab", "run", "--", "--version"],
    "evaluate": ["evaluate", "run"],
    "compare": ["compare", "run"],
    "tables": ["tables", "run", "--prompts", "two.txt"],
    "profile": ["profile", "--run", "run", "--prompts", "1", "--images", "1"],
    "verify": ["verify", "run"],
    "sample": ["sample", "run", "a red star"],
    "export": ["export", "run", "made"],
    "train --resume": ["train", "tiny.yaml", "--out", "run", "--resume"],
}
ALONE = {
    "presets": ["presets"],
    "methods": ["methods"],
    "doctor": ["doctor"],
    "plan": ["plan", "tiny.yaml", "--rate", "1"],
    "train": ["train", "tiny.yaml", "--out", "new"],
    "speed": "speed chunks=1,2 --steps 4 --prompts 1 --images 2 --repeats 1 --out speed.json".split(),
    "serve-reward": ["serve-reward", "pocket-clip", "--port", "{port}"],
    "reward-env": ["reward-env", "hpsv3"],
    "study": ["study", "study", "--out", "rows", "--processes", "1", "--unplanned"],
}
STUDY = (
    "title: two arms\nquestion: is it fast?\nseeds: 1\nreference: steps\n"
    "arms: {steps: {chunks: steps}, whole: {chunks: whole}}\nevaluation: {eval_images: 1}\n"
)


ASKED = f"""
import os, signal, threading, time, urllib.request

def ask():  # until it answers; then the server is stopped as by its user
    while True:
        time.sleep(0.2)
        try:
            urllib.request.urlopen("http://127.0.0.1:{{port}}/health", timeout=5).read()
        except OSError:
            continue
        return os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=ask, daemon=True).start()
{COMMAND_LINE}
"""
INDEX = "127.0.0.2"  # an address of this host that nothing else here listens at


def empty_wheel(project: str, version: str) -> bytes:
    """A package that holds nothing, as pip takes it."""
    place = f"{project}-{version}.dist-info"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(
            f"{place}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{place}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{place}/RECORD", "")
    return packed.getvalue()


@contextmanager
def package_index():
    """An index with an empty package for each line of hpsv3's list, at INDEX; its address."""
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ENVIRONMENTS_DIR / "hpsv3.txt").read_text(), re.M)
    )
    pins = {re.sub(r"[-_.]+", "_", name).lower(): version for name, version in pins.items()}

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.strip("/").split("/")[-1]
            project = (
                name.split("-")[0].replace("-", "_")
                if name.endswith(".whl")
                else name.replace("-", "_")
            )
            file = f"{project}-{pins[project]}-py3-none-any.whl"
            page = f'<html><body><a href="/files/{file}">{file}</a></body></html>'.encode()
            body = empty_wheel(project, pins[project]) if name.endswith(".whl") else page
            self.send_response(200)
            self.send_header(
                "Content-Type", "application/zip" if name.endswith(".whl") else "text/html"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer((INDEX, 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{INDEX}:{server.server_port}/simple/"
        server.shutdown()


SYSTEM = ("uname", "fc-list", "node", "lsb_release", "rustc")  # what libraries ask the machine
LIBRARIES = re.compile(
    r"home/(\.cache|\.config|\.local/share)/(matplotlib|fontconfig|jupyter)"
    r"|home/\.(ipython|jupyter|rustup)"
)


def stamps(folder: Path) -> dict[str, tuple]:
    """Every file below a folder, with what changes where it is written."""
    found = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return {
        str(file.relative_to(folder)): (file.lstat().st_ino, file.lstat().st_mtime_ns)
        for file in found
    }


def shortened(name: str) -> str:
    """A file's name for the table: folders of images and weights stand for what is in them."""
    parts = name.split("/")
    if parts[0] == "cache":
        return "the cache"
    if parts[:4] == ["home", ".cache", "chunk-grpo", "envs"]:
        return "/".join(parts[:4]) + "/"
    kept = parts if parts[0] == "home" else parts[:2] if parts[0] in ("run", "new") else parts[:1]
    return re.sub(r"\d{3,}", "N", "/".join(kept)) + ("/" if len(parts) > len(kept) else "")


def program(words: list) -> str:
    """A started program by its name, with the module where it is Python's."""
    said = [str(word) for word in words]
    module = said[said.index("-m") + 1] if "-m" in said[:4] else ""
    return " ".join(
        filter(
            None, [re.sub(r"[\d.]+$", "", Path(said[1] if len(said) > 1 else said[0]).name), module]
        )
    )


def promise(folder: Path, whose: str, command: str, words: list) -> dict:
    """A row: how the command ended, and what it read of the run, wrote, ran and contacted."""
    work = folder
    before = stamps(folder)
    port = free_port()
    places = {
        "HOME": folder / "home",
        "TMPDIR": folder / "temporary",
        "PIP_CONFIG_FILE": os.devnull,
    }
    started = ASKED.replace("{port}", str(port)) if "{port}" in words else COMMAND_LINE
    words = [word.replace("{port}", str(port)) for word in words]
    with package_index() as index:
        places |= {"PIP_INDEX_URL": index, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        done, events = watched(folder, *words, cwd=work, program=started, **places)
    after = stamps(folder)
    here = f"{work.resolve()}/"
    opened = {
        e[1].removeprefix(here) for e in events if e[0] == "open" and e[1].startswith(f"{here}run/")
    }
    wrote = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    wrote = {
        shortened(name)
        for name in wrote
        if not name.startswith(("watch/", "temporary/")) and not LIBRARIES.match(name)
    }
    hosts = {
        str(e[1])
        for e in events
        if e[0] == "ask" and e[1] not in (None, "127.0.0.1", "localhost", "")
    }
    hosts |= {e[1][0] for e in events if e[0] == "connect" and isinstance(e[1], tuple)} - {
        "127.0.0.1",
        "::1",
    }
    hosts = {"the index of pip" if host == INDEX else host for host in hosts}
    left = [name for name in after if name.startswith("temporary/") and name not in before]
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode  # as a shell says it
    return {
        "command": command,
        "run": whose,
        "exit": code,
        "reads": sorted({shortened(name) for name in opened if name in before} - wrote),
        "writes": sorted(wrote),
        "runs": sorted({program(e[1]) for e in events if e[0] == "run"} - {*SYSTEM}),
        "contacts": sorted(hosts),
        "left in the temporary folder": len(left),
    }


WHOSE = {"none": ALONE, "one's own": ON_A_RUN, "a stranger's": ON_A_RUN}
TOGETHER = [  # whose run, and the commands that share a folder
    *(("none", (command,)) for command in ALONE),
    ("one's own", tuple(ON_A_RUN)),  # each needs what those before it left
    *(("a stranger's", (command,)) for command in ON_A_RUN),
]


def promises(whose: str, commands: Iterable[str]) -> list[dict]:
    """The rows of commands in turn in one folder: without a run, on one's own run, or on a stranger's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for place in ("temporary", "cache", "home"):
            (folder / place).mkdir()
        (folder / "two.txt").write_text("a red star\na blue ring\n")
        (folder / "tiny.yaml").write_text(TINY.format(folder / "two.txt"))
        if whose == "none":
            (folder / "study").mkdir()
            (folder / "study" / "study.yaml").write_text(STUDY)
            (folder / "study" / "base.yaml").write_text(TINY.format(folder / "two.txt"))
        elif whose == "one's own":
            words = "train", "tiny.yaml", "--out", "run", "--no-report"
            done, _ = watched(folder, *words, cwd=folder, HOME=folder / "home")
            assert done.returncode == 0, done.stderr
        else:
            write_stranger(folder)
        rows = [promise(folder, whose, name, WHOSE[whose][name]) for name in commands]
        assert not (folder / "run" / "ran").exists(), "code of the stranger's folder was run"
        return rows


if __name__ == "__main__":
    made = [row for whose, commands in TOGETHER for row in promises(whose, commands)]
    KEPT.write_text(json.dumps(made, indent=1) + "\n")
    print(*made, sep="\n")
    sys.exit(0)
