"""Write README.md from nbs/index.ipynb: markdown, code as fenced blocks, and the text, tables and errors kept below it.

A code cell with `#| hide` is left out; one with `#| echo: false` shows its output only. Images stay files: markdown
links them by their path in the repository. `python tools/readme.py --check` writes nothing and exits with 1 when
README.md differs.
"""

import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by `make prepare` from nbs/index.ipynb: edit the notebook. -->"


def relinked(text: str) -> str:
    "Markdown of the index with the README's links: the book lies beside the index and one level below the README."
    beside = r"\]\((?!https?:|#|/|\.\./)([^)]+\.(?:ipynb|png|svg))\)"
    return re.sub(beside, r"](nbs/\1)", text).replace("](../", "](")


def output_text(output: nbformat.NotebookNode) -> str:
    "One kept output as markdown; nothing for kinds that a README cannot hold."
    data = output.get("data", {})
    if "text/markdown" in data:
        return relinked(data["text/markdown"].strip())
    text = output.get("text") or data.get("text/plain", "")
    return "```\n" + text.strip("\n") + "\n```" if text else ""


def cell_text(cell: nbformat.NotebookNode) -> list[str]:
    "The blocks of markdown that a cell gives."
    if cell.cell_type != "code":
        return [relinked(cell.source)]
    directives = set(re.findall(r"^#\|\s*(.+?)\s*$", cell.source, flags=re.MULTILINE))
    if "hide" in directives:
        return []
    source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE).strip()
    code = [] if "echo: false" in directives or not source else [f"```python\n{source}\n```"]
    return code + [text for text in map(output_text, cell.outputs) if text]


def readme(path: Path = ROOT / "nbs/index.ipynb") -> str:
    "The text of README.md."
    notebook = nbformat.read(path, as_version=4)
    blocks = [block.strip() for cell in notebook.cells for block in cell_text(cell)]
    return "\n\n".join([NOTE, *(block for block in blocks if block)]) + "\n"


def main() -> int:
    "Write README.md, or compare it."
    file, text = ROOT / "README.md", readme()
    if "--check" in sys.argv[1:]:
        return int(file.read_text(encoding="utf-8") != text)
    file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
