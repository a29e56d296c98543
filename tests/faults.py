"""File operations of the command line and of what it starts, recorded, and stopped at one of them.

A process that forks from the loaded interpreter gets Python's own file functions replaced, and those of safetensors, so
that each operation under a folder is one step: open to write, write, truncate, fsync, rename, mkdir, unlink, rmdir.
Steps are counted in each process by itself. What a plan says strikes at one of them; the log keeps all of them, with
what was written. Logs of processes (*.log) are left out: they are opened to look for locks, at moments that nobody can
foretell.
"""

import builtins
import errno
import io
import os
import pickle
import re
import shutil
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import warm

NEEDS_ROOM = ("open", "write", "mkdir")
REAL = {
    name: getattr(os, name)
    for name in (
        "open",
        "fsync",
        "rename",
        "replace",
        "mkdir",
        "unlink",
        "remove",
        "rmdir",
        "truncate",
    )
}
REAL_OPEN = io.open


@dataclass
class Step:
    """A file operation."""

    role: str  # the program: main, trial, drawing
    number: int  # in its process
    op: str
    path: str  # under the folder that is watched
    to: str = ""  # of a rename
    data: bytes = b""  # of a write
    offset: int = 0  # of a write; of a truncation the size
    pid: int = 0

    @property
    def place(self) -> tuple[str, str, str]:
        """What is alike in every run, and alike for one iteration and the next."""
        name = re.sub(r"[0-9a-f]{12,}", "*", self.to or self.path)
        name = re.sub(r"/(base|plain|hybrid|base-as-trained|as-trained)\b", "/ARM", name)
        return self.role, self.op, re.sub(r"\d+", "0", name)


@dataclass
class Plan:
    """What is to happen under a folder: nothing but a log, or a strike at a step."""

    root: str
    log: str = ""  # where steps are kept
    role: str = ""
    number: int = -1
    kind: str = ""  # kill, half, ENOSPC, EIO, EINTR

    @property
    def full(self) -> str:
        """The file that says, to all processes, that the disk is full."""
        return f"{self.root}.full"


class Watch:
    """Counts steps, keeps them and strikes."""

    def __init__(self, plan: Plan):
        self.plan, self.pid, self.count, self.within = plan, 0, 0, False
        # Of the command; its trials are forked from it or from a child of it.
        self.main_pid = os.getpid()

    def relative(self, path, dir_fd=None) -> str:
        """A path under the folder, a dot for the folder itself, or nothing."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.fspath(path)
        path = path.decode() if isinstance(path, bytes) else path
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
        path = os.path.normpath(os.path.join(base, path))
        if path == self.plan.root:
            return "."
        inside = path.startswith(self.plan.root + os.sep) and not path.endswith(".log")
        return path[len(self.plan.root) + 1 :] if inside else ""

    def step(
        self, op: str, path: str, to: str = "", data: bytes = b"", offset: int = 0, half=None
    ) -> None:
        """Strike, or keep the step."""
        if not path:
            return
        if self.pid != os.getpid():
            self.pid, self.count = os.getpid(), 0
        role, number = Path(sys.argv[0]).stem, self.count
        self.count += 1
        plan = self.plan
        if (plan.role, plan.number) == (role, number):
            self.strike(role, half)
        elif plan.kind == "ENOSPC" and op in NEEDS_ROOM and os.path.exists(plan.full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if plan.log:
            line = pickle.dumps(Step(role, number, op, path, to, data, offset, self.pid))
            file = REAL["open"](plan.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, struct.pack("<Q", len(line)) + line)
            os.close(file)

    def strike(self, role: str, half) -> None:
        """End as the plan says."""
        if self.plan.kind == "half" and half:
            half()
        if self.plan.kind in ("kill", "half"):
            if role != "main":
                os.kill(self.main_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.plan.kind == "ENOSPC":
            os.close(REAL["open"](self.plan.full, os.O_WRONLY | os.O_CREAT))
            if half:
                half()
        number = getattr(errno, self.plan.kind)
        raise OSError(number, os.strerror(number))


class Raw(io.FileIO):
    """A file whose writes are steps."""

    def __init__(self, watch: Watch, path, mode: str):
        self.watch, self.place = watch, watch.relative(path)
        made = not os.path.lexists(path)
        watch.step(
            "open", self.place, to="", data=b"new" if made else b"cut" if "w" in mode else b""
        )
        super().__init__(path, mode)

    def write(self, data):
        data = bytes(data)
        at = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
        self.watch.step(
            "write",
            self.place,
            data=data,
            offset=at,
            half=lambda: super(Raw, self).write(data[: len(data) // 2]),
        )
        return super().write(data)

    def truncate(self, size=None):
        self.watch.step("truncate", self.place, offset=self.tell() if size is None else size)
        return super().truncate(size)


def install(plan: Plan) -> None:
    """Replace the file functions of this process."""
    watch = Watch(plan)

    def opened(
        file,
        mode="r",
        buffering=-1,
        encoding=None,
        errors=None,
        newline=None,
        closefd=True,
        opener=None,
    ):
        if (
            isinstance(file, int)
            or opener
            or not set("wax+") & set(mode)
            or not watch.relative(file)
        ):
            return REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Raw(watch, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return (
            buffer
            if "b" in mode
            else io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)
        )

    def os_open(path, flags, mode=0o777, *, dir_fd=None):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            made = not os.path.lexists(path)
            watch.step("open", watch.relative(path, dir_fd), data=b"new" if made else b"")
        return REAL["open"](path, flags, mode, dir_fd=dir_fd)

    def fsync(file):
        watch.step("fsync", watch.relative(file if isinstance(file, int) else file.fileno()))
        REAL["fsync"](file)

    def moved(name):
        def move(source, target, *, src_dir_fd=None, dst_dir_fd=None):
            watch.step(
                "rename", watch.relative(source, src_dir_fd), to=watch.relative(target, dst_dir_fd)
            )
            REAL[name](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        return move

    def mkdir(path, mode=0o777, *, dir_fd=None):
        if not os.path.lexists(path) and os.path.isdir(
            os.path.dirname(os.path.abspath(os.fspath(path)))
        ):
            watch.step("mkdir", watch.relative(path, dir_fd))
        REAL["mkdir"](path, mode, dir_fd=dir_fd)

    def gone(name):
        def remove(path, *, dir_fd=None):
            if dir_fd is not None or os.path.lexists(path):
                watch.step("rmdir" if name == "rmdir" else "unlink", watch.relative(path, dir_fd))
            REAL[name](path, dir_fd=dir_fd)

        return remove

    builtins.open = io.open = opened
    os.open, os.fsync, os.mkdir = os_open, fsync, mkdir
    os.rename, os.replace = moved("rename"), moved("replace")
    os.unlink, os.remove, os.rmdir = gone("unlink"), gone("remove"), gone("rmdir")
    shutil._USE_CP_SENDFILE = False  # copies by reading and writing
    watch_safetensors()
    leave_out()


def watch_safetensors() -> None:
    """Tensors are written by Python's functions, with the errors that they give."""
    import safetensors
    import safetensors.torch

    def serialize_file(tensors, filename, metadata=None):
        try:
            with open(filename, "wb") as file:
                file.write(safetensors.serialize(tensors, metadata))
        except OSError as error:
            raise safetensors.SafetensorError(
                f"Error while serializing: I/O error: {error.strerror}"
            ) from None

    safetensors.torch.serialize_file = serialize_file


def leave_out() -> None:
    """What takes long and writes nothing.

    A report's kernel, as if the notebook had been executed, version control, a look at every installed package, and
    the trial forward of the model's configuration: nearly half of what a tiny run takes.
    """
    import papermill

    from chunk_grpo.core import machine
    from chunk_grpo.models import cost
    from chunk_grpo.runs import run_folder

    machine.installed_packages = lambda: ["torch==0", "numpy==0"]
    cost.check_forward = lambda model, settings: None

    run_folder.current_git_commit = lambda: None
    papermill.execute_notebook = lambda source, out, **rest: shutil.copyfile(source, out)


def program(
    words: list[str], environment: dict[str, str], folder: str, files: tuple[str, str], plan: Plan
) -> None:
    """What a process of the server does: the command line with a plan, its output in two files."""
    for number, name in enumerate(files, 1):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    import subprocess

    subprocess.Popen = warm.Popen
    install(plan)
    os._exit(warm.become(warm.MAIN, words, environment, safe=True))


def read_steps(log: Path) -> list[Step]:
    """The steps that a log keeps, of all processes, in their order."""
    out = []
    content = Path(log).read_bytes()
    at = 0
    while at < len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        out.append(pickle.loads(content[at + 8 : at + 8 + size]))
        at += 8 + size
    return out
