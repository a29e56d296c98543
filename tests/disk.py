"""What a disk may hold after the power went, by the file operations that came before.

The model is that of ALICE (Pillai et al., OSDI 2014) and of the tests of SQLite: a program may count on nothing but
fsync. A file has its content in memory and what of it is on the disk; `fsync` of the file brings the one to the other.
A folder has its names in memory and on the disk; `fsync` of the folder does the same with them. Neither does it for the
other: a file whose content was synced can be lost with its name, and a name can be there before its content. A rename
is atomic, and names change in the order of the operations. In between disks differ; of each point there are:

- `synced`: nothing is there but what was synced, names and contents alike;
- `names`: all names came through (ext4's and XFS' journals), contents that were not synced are empty or as they were;
- `contents`: all contents came through, names that were not synced did not;
- `half`: all names, and of contents that were not synced the first half of what is new;
- `zeros`: all names and sizes, with zeros in what was not synced, as after delayed allocation.
"""

import hashlib
import shutil
from pathlib import Path

from faults import Step

KINDS = ("synced", "names", "contents", "half", "zeros")


class Node:
    """A file, or a folder: what memory and the disk know of it."""

    def __init__(self, folder: bool):
        self.folder = folder
        self.now, self.kept = ({}, {}) if folder else (b"", b"")


class Disk:
    """A folder whose operations are done again."""

    def __init__(self):
        self.root = Node(True)

    def find(self, path: str) -> Node:
        """What lies at a path, as memory knows it."""
        node = self.root
        for name in path.split("/") if path not in ("", ".") else ():
            node = node.now[name]
        return node

    def parent(self, path: str) -> tuple[Node, str]:
        """The folder that a path's last name is in, and that name."""
        folder, _, name = path.rpartition("/")
        return self.find(folder), name

    def do(self, step: Step) -> None:
        """One operation."""
        folder, name = self.parent(step.path)
        if step.op == "open" and (
            step.path in ("", ".") or name in folder.now and folder.now[name].folder
        ):
            return  # a file without a name in that folder: it is gone with its process
        if step.op in ("open", "mkdir") and name not in folder.now:
            folder.now[name] = Node(step.op == "mkdir")
        elif step.op == "open" and step.data == b"cut":
            folder.now[name].now = b""
        elif step.op == "write":
            file = folder.now[name]
            file.now = (
                file.now[: step.offset].ljust(step.offset, b"\0")
                + step.data
                + file.now[step.offset + len(step.data) :]
            )
        elif step.op == "truncate":
            folder.now[name].now = folder.now[name].now[: step.offset].ljust(step.offset, b"\0")
        elif step.op == "fsync":
            node = self.find(step.path)
            node.kept = dict(node.now) if node.folder else node.now
        elif step.op == "rename":
            there, new = self.parent(step.to)
            there.now[new] = folder.now.pop(name)
        elif step.op in ("unlink", "rmdir"):
            folder.now.pop(name)

    def state(self, kind: str) -> dict[str, bytes | None]:
        """The files, and as None the folders, that are there after the power went."""
        out = {}

        def walk(node: Node, path: str) -> None:
            names = node.kept if kind in ("synced", "contents") else node.now
            for name, child in names.items():
                if child.folder:
                    out[path + name] = None
                    walk(child, f"{path}{name}/")
                else:
                    out[path + name] = content(child, kind)

        walk(self.root, "")
        return out


def content(file: Node, kind: str) -> bytes:
    """What is left of a file."""
    new = len(file.now) - len(file.kept) if file.now.startswith(file.kept) else 0
    if kind == "contents" or file.now == file.kept:
        return file.now
    if kind == "half":
        return file.now[: len(file.now) - new + new // 2] if new else file.now[: len(file.now) // 2]
    if kind == "zeros":
        return file.kept + b"\0" * new if new else b"\0" * len(file.now)
    return file.kept


def every_state(steps: list[Step], disk: Disk):
    """The states before and after each fsync and rename and at the end, each with its name."""
    for i, step in enumerate([*steps, None]):
        last = steps[i - 1] if i else None
        if (
            step is None
            or step.op in ("fsync", "rename")
            or (last and last.op in ("fsync", "rename"))
        ):
            for kind in KINDS:
                yield (
                    f"{kind} at step {i}, {step.op + ' ' + (step.to or step.path) if step else 'the end'}",
                    disk.state(kind),
                )
        if step:
            disk.do(step)


def states(steps: list[Step], disk: Disk | None = None) -> list[tuple[str, dict]]:
    """Every state that differs from the others, by its name."""
    seen = set()
    out = []
    for name, state in every_state(steps, disk or Disk()):
        key = hashlib.sha256(repr(sorted(state.items())).encode()).digest()
        if key not in seen:
            seen.add(key)
            out.append((name, state))
    return out


def put(state: dict[str, bytes | None], root: Path) -> None:
    """Write a state into a folder."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in state.items():
        if content is None:
            (root / name).mkdir(parents=True, exist_ok=True)
    for name, content in state.items():
        if content is not None:
            (root / name).write_bytes(content)
