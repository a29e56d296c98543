"""Write README.md from nbs/index.ipynb: markdown, code as fenced blocks, and the text, tables and errors kept below it.

A code cell with `#| hide` is left out; one with `#| echo: false` shows its output only. Images stay files: markdown
links them by their path in the repository. The README's pictures are figures that pages of the book keep: a code cell
that begins with `# The README shows this figure: images/NAME.png` gives that file. `python tools/readme.py --check`
writes nothing and exits with 1 when README.md or one of its pictures differs.
"""

import base64
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by `make prepare` from nbs/index.ipynb: edit the notebook. -->"


def relinked(text: str) -> str:
    """Convert the links of the front page to those of the README, which lies one level above the notebook."""
    beside = r"\]\((?!https?:|#|/|\.\./)([^)#]+\.(?:ipynb|png|svg)(?:#[^)]*)?)\)"
    return re.sub(beside, r"](nbs/\1)", text).replace("](../", "](")


def output_text(output: nbformat.NotebookNode) -> str:
    """Return a stored output as Markdown; empty for kinds that a README cannot show."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return relinked(data["text/markdown"].strip())
    text = output.get("text") or data.get("text/plain", "")
    return "```\n" + text.strip("\n") + "\n```" if text else ""


def cell_text(cell: nbformat.NotebookNode) -> list[str]:
    """Return the Markdown blocks of a cell."""
    if cell.cell_type != "code":
        return [relinked(cell.source)]
    directives = set(re.findall(r"^#\|\s*(.+?)\s*$", cell.source, flags=re.MULTILINE))
    if "hide" in directives:
        return []
    source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE).strip()
    code = [] if "echo: false" in directives or not source else [f"```python\n{source}\n```"]
    return code + [text for text in map(output_text, cell.outputs) if text]


def readme(path: Path = ROOT / "nbs/index.ipynb") -> str:
    """Return the text of README.md."""
    notebook = nbformat.read(path, as_version=4)
    blocks = [block.strip() for cell in notebook.cells for block in cell_text(cell)]
    return "\n\n".join([NOTE, *(block for block in blocks if block)]) + "\n"


def pictures() -> dict[Path, bytes]:  # by file
    """Collect the figures of the book that the README shows."""
    found = {}
    for page in sorted((ROOT / "nbs").glob("*/*.ipynb")):
        for cell in nbformat.read(page, as_version=4).cells:
            named = re.match(r"# The README shows this figure: (images/\w+\.png)\n", cell.source)
            if cell.cell_type == "code" and named:
                figures = [
                    out.data["image/png"]
                    for out in cell.outputs
                    if "image/png" in out.get("data", {})
                ]
                if len(figures) != 1:
                    raise SystemExit(
                        f"{page.name} must keep one figure for {named[1]}; got {len(figures)}"
                    )
                found[ROOT / "nbs" / named[1]] = base64.b64decode(figures[0])
    return found


def main() -> int:
    """Write README.md and its pictures, or compare them with the files."""
    files = {ROOT / "README.md": readme().encode(), **pictures()}
    if "--check" in sys.argv[1:]:
        return int(
            any(
                not file.is_file() or file.read_bytes() != content
                for file, content in files.items()
            )
        )
    for file, content in files.items():
        file.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
