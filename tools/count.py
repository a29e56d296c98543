"""Count the house: lines, modules, public names, cells, outputs, arrows.

    python tools/count.py [ROOT] [--json]

Lines are those of the exported modules, and of the stub beside the package's front door. A public name is a function or
class at the top of a module without a leading underscore; it is used elsewhere when another module of the package holds
it as a word. A demonstration cell is a code cell that is neither exported, nor marked to be skipped or hidden, nor made
of imports alone.
"""

import ast
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import nbformat

UNSEEN = {"hide", "default_exp", "eval", "notest", "slow", "gpu"}


def modules(root: Path) -> dict[str, Path]:
    """Return the package's modules, keyed by dotted name, without nbdev's index and empty files."""
    files = [
        f
        for f in sorted((root / "chunk_grpo").rglob("*.py"))
        if f.name != "_modidx.py" and f.read_text().strip()
    ]
    return {
        ".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f
        for f in files
    }


def public_names(file: Path) -> list[str]:
    """Return the public functions and classes of a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def imported(name: str, file: Path, known: set[str]) -> set[str]:
    """Return the modules of the package that a module imports, at its top or inside functions."""
    found = set()
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return (found & known) - {name, "chunk_grpo"}


def reachable(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return every module that a module imports directly or indirectly."""
    seen = set()
    todo = list(arrows[start])
    while todo:
        if (one := todo.pop()) not in seen:
            seen.add(one)
            todo += arrows[one]
    return seen


def count_package(root: Path) -> dict:
    """Count the lines, modules, names and imports of the package."""
    files = modules(root)
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    names = {name: public_names(file) for name, file in files.items()}
    arrows = {name: imported(name, file, set(files)) for name, file in files.items()}
    words = {name: set(re.findall(r"[A-Za-z_]\w*", text)) for name, text in texts.items()}
    alone = [
        x
        for name, found in names.items()
        for x in found
        if not any(x in words[o] for o in files if o != name)
    ]
    places = {
        f"chunk_grpo.{page.parent.name[3:]}.{page.stem[3:]}": (page.parent.name, page.name)
        for page in (root / "nbs").glob("[0-9]*/*.ipynb")
    }
    upward = [
        (a, b) for a in places for b in arrows.get(a, ()) if b in places and places[b] > places[a]
    ]
    chapters = defaultdict(lambda: [0, 0, 0])
    for name, text in texts.items():
        row = chapters[name.split(".")[1] if "." in name else "front door"]
        row[:] = [
            a + b for a, b in zip(row, (len(text.splitlines()), 1, len(names[name])), strict=True)
        ]
    stub = (root / "chunk_grpo/__init__.pyi").read_text(encoding="utf-8").splitlines()
    return {
        "lines": len(stub) + sum(len(text.splitlines()) for text in texts.values()),
        "modules": len(files),
        "public names": sum(map(len, names.values())),
        "public names used in their own module only": len(alone),
        "imports that lead upwards": len(upward),
        "modules in circles": sum(name in reachable(name, arrows) for name in arrows),
        "chapters (lines, modules, public names)": dict(chapters),
    }


def count_book(root: Path) -> dict:
    """Count the pages and cells of the book, and their kinds of output."""
    exports, demonstrations, shown, with_figure = [], 0, 0, 0
    pages = sorted((root / "nbs").glob("[0-9]*/*.ipynb"))
    for page in pages:
        cells = [
            cell for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "code"
        ]
        kinds = {
            kind for cell in cells for output in cell.outputs for kind in output.get("data", {})
        }
        with_figure += bool(kinds & {"image/png", "image/svg+xml"})
        for cell in cells:
            marks = set(re.findall(r"^#\|\s*(\w+)", cell.source, re.MULTILINE))
            body = [
                line
                for line in cell.source.split("\n")
                if line.strip() and not line.startswith("#|")
            ]
            if "export" in marks:
                exports.append(len(body))
            elif not marks & UNSEEN and not all(
                re.match(r"(from|import)\s|[\s)]", line) for line in body
            ):
                demonstrations += 1
                shown += bool(cell.outputs)
    return {
        "pages": len(pages),
        "pages with a figure": with_figure,
        "export cells": len(exports),
        "lines of an export cell, median": statistics.median(exports),
        "lines of an export cell, most": max(exports),
        "demonstration cells": demonstrations,
        "of these with an output": f"{shown / demonstrations:.1%}",
    }


def main() -> int:
    """Print the numbers."""
    given = [x for x in sys.argv[1:] if x != "--json"]
    root = Path(given[0]) if given else Path(__file__).resolve().parents[1]
    found = count_package(root) | count_book(root)
    for part in ("tests", "tools", "research"):
        found[f"lines of {part}"] = sum(
            len(f.read_text().splitlines()) for f in (root / part).rglob("*.py")
        )
    if "--json" in sys.argv:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{value:>8}  {name}" if not isinstance(value, dict) else name)
        for chapter, row in sorted(value.items()) if isinstance(value, dict) else ():
            print(f"  {chapter:16} {row[0]:6} {row[1]:4} {row[2]:5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
