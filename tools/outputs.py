"""Keep the outputs of every page of the book: run the pages whose code changed after their outputs were made.

    python tools/outputs.py [--all] [PAGE ...]      run what is stale (or all, or these pages) and keep text and figures
    python tools/outputs.py --check                 write nothing; name the stale pages and exit with 1 if there are any

A page's metadata hold `outputs_of`, the hash of the code that its outputs came from, without comments and docstrings.
If a page reads stored results (files under runs/results), they also hold `outputs_read`, the hash of each file.
A page is stale if any of these hashes changed.
Cells marked `#| hide`, `#| eval: false`, `#| notest`, `#| slow` or `#| gpu` keep none.
Warnings and widgets are not kept.
"""

import ast
import base64
import hashlib
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
# bytes of a page with its outputs; a figure at twice the resolution takes 2.3 times the bytes
LIMIT = 500_000
KEPT = ("text/plain", "text/html", "text/markdown", "image/png", "image/svg+xml")
# names in a page that may print docstrings, comments or source code: then these decide its outputs too
PRINTS_DOCS = r"\bhelp\(|__doc__|getsource|getdoc|describe_parameters"
SKIPPED = {"eval: false", "notest", "slow", "gpu"}


def book() -> list[Path]:
    """Return the pages whose outputs are stored: all except the reports, which papermill runs."""
    pages = [
        *(ROOT / "nbs").glob("[0-9]*/*.ipynb"),
        *(ROOT / "nbs/findings").glob("*.ipynb"),
        ROOT / "nbs/index.ipynb",
        ROOT / "nbs/glossary.ipynb",
    ]
    return sorted(pages)


def directives(cell: NotebookNode) -> set[str]:
    """Return the directives of a cell, the words after `#|`."""
    return set(re.findall(r"^#\|\s*(.+?)\s*$", cell.source, flags=re.MULTILINE))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove the docstrings of a module's functions and classes, in place, and return the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return tree


def code_text(
    source: str,  # of one cell
    prints_docs: bool,  # the page prints docstrings or source code
) -> str:
    """Return what of a cell decides its output: the directives and the code without comments and docstrings.

    The text is the whole cell if the page prints docstrings or source code, or if the cell is not plain Python.
    """
    if prints_docs:
        return source
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a line that only a notebook understands, such as a magic
        return source
    directive_lines = re.findall(r"^#\|.*$", source, flags=re.MULTILINE)
    return "\n".join([*directive_lines, ast.dump(_without_docstrings(tree))])


def code_hash(notebook: NotebookNode) -> str:
    """Return the hash of what decides the outputs of a page's code cells, in order."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    prints_docs = any(re.search(PRINTS_DOCS, source) for source in sources)
    code = "\0".join(code_text(source, prints_docs) for source in sources)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def file_hash(path: str) -> str | None:
    """Return the hash of a file, named relative to the root; None if it does not exist."""
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None


def stale_because(page: Path) -> str:
    """Say what changed since a page's outputs were made: its code, or results that it reads; empty if nothing did."""
    notebook = nbformat.read(page, as_version=4)
    if notebook.metadata.get("outputs_of") != code_hash(notebook):
        return "its code"
    read = notebook.metadata.get("outputs_read", {})
    return ", ".join(path for path, kept in read.items() if file_hash(path) != kept)


def small_png(encoded: str) -> str:
    """Reduce a base64 PNG to at most 256 colours, which takes a third of the bytes."""
    picture = Image.open(io.BytesIO(base64.b64decode(encoded)))
    file = io.BytesIO()
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    few = white.convert("RGB").getcolors(20_000)  # a drawing; None for photographs
    white.convert("RGB").quantize(128 if few else 256).save(file, "PNG", optimize=True)
    return min(encoded, base64.b64encode(file.getvalue()).decode(), key=len)


def kept_output(output: NotebookNode) -> NotebookNode | None:
    """Return an output in the form in which it is stored; None if it is not stored."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    if output.output_type == "error":
        return output
    if any("widget" in kind for kind in output.data):
        output.data.pop("text/plain", None)
    output.data = NotebookNode({kind: value for kind, value in output.data.items() if kind in KEPT})
    if "image/png" in output.data:
        output.data.pop("text/plain", None)
        output.data["image/png"] = small_png(output.data["image/png"])
    if not output.data:
        return None
    size = {
        key: value
        for key, value in output.metadata.get("image/png", {}).items()
        if key in ("width", "height", "alt")
    }
    output.metadata = NotebookNode(
        {"image/png": size} if size and "image/png" in output.data else {}
    )
    return output


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Merge neighbouring outputs of the same stream."""
    found: list[NotebookNode] = []
    for output in outputs:
        if found and output.output_type == "stream" == found[-1].output_type:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


# Runs before a page's first cell; the cell after its last one prints what it found.
WATCH = f"""
get_ipython().run_line_magic("matplotlib", "inline")
get_ipython().run_line_magic("config", "InlineBackend.figure_formats = ['retina']")  # twice the pixels, the same width
def watch(files):
    import os, sys
    def opened(event, args):
        path = os.path.realpath(os.fsdecode(args[0])) if event == "open" and isinstance(args[0], (str, bytes)) else ""
        if path.startswith({str(ROOT / "runs/results")!r} + os.sep):
            files.add(os.path.relpath(path, {str(ROOT)!r}))
    sys.addaudithook(opened)
watched_files = set()
watch(watched_files)
del watch
"""


def renew(page: Path) -> None:
    """Run a page in its own kernel, and store the outputs of its cells."""
    notebook = nbformat.read(page, as_version=4)
    run = nbformat.v4.new_notebook()
    cells = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and not SKIPPED & directives(cell)
    ]
    sources = [WATCH, *(cell.source for cell in cells), 'print("\\n".join(sorted(watched_files)))']
    run.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    resources = {"metadata": {"path": str(page.parent)}}
    quiet = ["--log-level=40"]
    NotebookClient(
        run, timeout=900, kernel_name="python3", resources=resources, extra_arguments=quiet
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    for cell, done in zip(cells, run.cells[1:-1], strict=True):
        if "hide" not in directives(cell):
            cell.outputs = joined(
                [output for output in map(kept_output, done.outputs) if output is not None]
            )
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    notebook.metadata["outputs_of"] = code_hash(notebook)
    read = "".join(output.text for output in run.cells[-1].outputs).split()
    notebook.metadata.pop("outputs_read", None)
    if read:
        notebook.metadata["outputs_read"] = {path: file_hash(path) for path in read}
    text = nbformat.writes(notebook)
    if len(text.encode()) > LIMIT:
        raise SystemExit(
            f"{page.relative_to(ROOT)} has {len(text.encode()):,} bytes with its outputs; "
            f"allowed are {LIMIT:,}: smaller figures or fewer of them are needed"
        )
    nbformat.write(notebook, page)
    print(f"kept the outputs of {page.relative_to(ROOT)}", flush=True)


def main() -> int:
    """Renew the outputs of pages, or check that they are current."""
    words = sys.argv[1:]
    unknown = [
        word for word in words if word.startswith("-") and word not in ("--all", "--check", "--one")
    ]
    if unknown:
        print(f"allowed are PAGE ..., --all and --check; got {unknown[0]}", file=sys.stderr)
        return 2
    named = [Path(word).resolve() for word in words if not word.startswith("-")]
    if len(named) == 1 and "--one" in words:
        renew(named[0])
        return 0
    pages = named or [page for page in book() if "--all" in words or stale_because(page)]
    if "--check" in words:
        for page in pages:
            print(
                f"{page.relative_to(ROOT)}: {stale_because(page) or 'nothing'} changed after its outputs were made"
            )
        return int(bool(pages))
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    command = [sys.executable, __file__, "--one"]
    with ThreadPoolExecutor(
        os.cpu_count()
    ) as pool:  # a process a page: each has a kernel of its own to wait for
        codes = list(
            pool.map(
                lambda page: subprocess.run([*command, page], env=environment).returncode, pages
            )
        )
    failed = [str(page.relative_to(ROOT)) for page, code in zip(pages, codes, strict=True) if code]
    if failed:
        print(f"no outputs were made of {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
