"""Build the book as a static site that needs no network: `make docs` writes it into _docs.

The notebooks are shown with their kept outputs; nothing is executed. What nbdev's directives hide is left out, names of
the package in prose lead to the API pages of `tools/api.py`, and `llms.txt` lists every page in one line.
"""

import argparse
import ast
import base64
import copy
import html as markup
import importlib.metadata
import io
import re
import shutil
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import api
import links
import nbformat
import numpy as np
import search
from PIL import Image
from scipy import ndimage

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "nbs"
PACKAGE = ROOT / "chunk_grpo"
WEB = ROOT / "tools/web"
STATIC_FILES = (
    "book.css",
    "book.js",
    "search.js",
    "interactive.css",
    "interactive.js",
    "chunks.svg",
)
CHAPTERS = {  # the titles that a reader sees, in the order of the house
    "theory": "The theory of the method",
    "pocket": "The pocket model",
    "core": "Files, statistics, settings",
    "models": "Models as policies",
    "rewards": "Rewards",
    "reward_serving": "Rewards in other processes",
    "planning": "Planning a run",
    "training": "Training",
    "methods": "Methods",
    "runs": "Runs and machines",
    "evaluation": "Evaluation",
    "measurements": "Measurements",
    "reporting": "Figures and reports",
    "studies": "Studies and claims",
    "cli": "The command line",
}
PICTURED = ("00_theory", "07_training", "08_methods", "findings")  # a picture in the first screen
SHORT_CODE = 12  # lines of exported code that are shown open
SMALLEST_PHOTOGRAPH = 40  # pixels of a side; smaller ones are letters and keys of a legend
HUE_ROTATION = np.array(  # of RGB by 180 degrees, as browsers do it
    [[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]]
)
FIRST_SCREEN = 1500  # characters of prose and code that leave room for a picture
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


@cache
def read(page: Path) -> nbformat.NotebookNode:
    """Read a notebook from the cache; a caller that changes it must copy it first."""
    return nbformat.read(page, as_version=4)


def chapter_folders() -> list[Path]:
    """Return the folders of the chapters, in order."""
    return sorted(path for path in BOOK.glob("[0-9][0-9]_*"))


def chapter_title(folder: Path) -> str:
    """Return a chapter's number and title as text."""
    number, name = folder.name.split("_", 1)
    return f"{int(number)}. {CHAPTERS[name]}"


def pages() -> list[Path]:
    """Return all notebooks of the site in reading order: front page, chapters, findings, glossary, reports."""
    verdict = BOOK / "findings/index.ipynb"
    rest = [path for path in sorted((BOOK / "findings").glob("*.ipynb")) if path != verdict]
    chapters = [page for folder in chapter_folders() for page in sorted(folder.glob("*.ipynb"))]
    return [
        BOOK / "index.ipynb",
        *chapters,
        verdict,
        *rest,
        BOOK / "glossary.ipynb",
        *sorted((BOOK / "reports").glob("*.ipynb")),
    ]


def title_of(page: Path) -> tuple[str, str]:
    """Return a page's heading, and its subtitle or an empty string."""
    lines = read(page).cells[0].source.strip().split("\n")
    return lines[0].removeprefix("# "), lines[-1].removeprefix("> ") if lines[-1].startswith(
        "> "
    ) else ""


def module_path(page: Path) -> Path | None:
    """Return the module that a page exports; None if it exports none."""
    text = "\n".join(cell.source for cell in read(page).cells if cell.cell_type == "code")
    found = re.search(r"^#\|\s*default_exp\s+(\S+)", text, re.MULTILINE)
    return PACKAGE / (found.group(1).replace(".", "/") + ".py") if found else None


def settings_fields() -> set[str]:
    """Return the names of settings; in prose they mean the setting and not a function of the same name."""
    fields = api.members(PACKAGE / "core/settings.py")
    return {name for names in fields.values() for name in names}


def name_table(modules: Iterable[Path]) -> dict[str, list[str]]:
    """Return for every way to write a public name in prose the full names that it can mean."""
    table = {}
    ours = settings_fields()
    for path in modules:
        module = api.module_of(path)
        names = list(api.entries(path))
        names += [
            f"{owner}.{member}" for owner, found in api.members(path).items() for member in found
        ]
        for name in names:
            full = f"{module}.{name}"
            written = {
                name,
                f"{module.split('.')[-1]}.{name}",
                full,
                full.removeprefix("chunk_grpo."),
            }
            if "." not in name and (name in ours or name.islower() and "_" not in name):
                written.discard(
                    name
                )  # `train` or `chunks` alone is as often a command or a setting
            for text in written:
                table.setdefault(text, []).append(full)
    return table


def linked_names(text: str, table: dict[str, list[str]], module: str) -> str:
    """Turn backticked names of the package into links, except in code blocks, links and headings."""

    def link(match: re.Match) -> str:
        name = re.sub(r"\(\)$", "", match.group(1))
        meant = table.get(name, [])
        meant = [full for full in meant if full == f"{module}.{name}"] or meant
        return f"{{py:obj}}`{match.group(1)} <{meant[0]}>`" if len(meant) == 1 else match.group(0)

    blocks = re.split(
        r"(^```.*?^```[ \t]*$|^#+ .*$|\[[^\]]*\]\([^)]*\)|\$\$.*?\$\$)",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return "".join(
        block if i % 2 else re.sub(r"(?<![`\w}])`([\w.]+(?:\(\))?)`(?!`)", link, block)
        for i, block in enumerate(blocks)
    )


def relinked(text: str, here: Path, sources: dict[Path, str]) -> str:
    """Change links to files into links to pages of the site; a link to a file that is not on the site becomes its text."""

    def link(match: re.Match) -> str:
        words, target, rest = match.groups()
        file = (here.parent / target).resolve()
        if file.suffix in (".png", ".svg"):
            return match.group(0)
        if file not in sources:
            return words
        back = "../" * (len(Path(sources[here]).parts) - 1)
        return f"[{words}]({back}{sources[file]}{rest})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*|)\)", link, text)


TESTS = re.compile(r"(test_\w+|expect_fail)$")


def folded(source: str, outputs: list[nbformat.NotebookNode]) -> str:
    """Return the label of a folded cell for its imports, tests or figure code; empty for a cell that stays open."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # magics
        return ""

    def tests(node: ast.stmt) -> bool:
        calls = (
            node.items[0].context_expr
            if isinstance(node, ast.With)
            else getattr(node, "value", None)
        )
        name = ast.unparse(calls.func) if isinstance(calls, ast.Call) else ""
        return (
            isinstance(node, ast.Assert)
            or bool(TESTS.match(name))
            and not isinstance(node, ast.Assign)
        )

    if all(isinstance(node, ast.Import | ast.ImportFrom) for node in body):
        return "Imports"
    if not outputs and any(map(tests, body)):
        checks = [node for node in body if tests(node) or isinstance(node, ast.For | ast.With)]
        if len(checks) * 2 >= len(body):
            return "Tests"
    pictures = any("image/png" in out.get("data", {}) for out in outputs)
    return "Code of the figure" if pictures and len(source.splitlines()) > 3 else ""


def folded_words(
    source: str,
    outputs: list[nbformat.NotebookNode],
    directives: set[str],
) -> str:
    """Return the words on the line that opens a folded cell; empty for a cell that is open.

    What the package holds is folded unless it is short: pages show how it is used. A page decides otherwise by
    `#| fold` or `#| open` at the top of a cell.
    """
    if "open" in directives:
        return ""
    if "fold" in directives:
        return "Code"
    words = folded(source, outputs)
    if words or "export" not in directives or len(source.splitlines()) <= SHORT_CODE:
        return words
    names = re.findall(
        r"^(?:async )?(?:def|class) (\w+)|^([A-Z_]+)(?:: .*)? = ", source, re.MULTILINE
    )
    public = [name[0] or name[1] for name in names if not (name[0] or name[1]).startswith("_")]
    made = ", ".join(public or [name[0] or name[1] for name in names])
    return f"Code of the package: {made}" if made else "Code of the package"


def shown(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return a code cell as the site shows it: nbdev's directives applied and removed, Markdown output as Markdown."""
    directives = set(re.findall(r"^#\|\s*(\w+(?:: *\w+)?)", cell.source, flags=re.MULTILINE))
    source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE).strip()
    if "hide" in directives or not source:
        return []
    texts = [
        out["data"].pop("text/markdown")
        for out in cell.outputs
        if "text/markdown" in out.get("data", {})
    ]
    outputs = [
        out
        for out in cell.outputs
        if out.output_type == "stream" or set(out.get("data", {})) - {"text/plain"} or not texts
    ]
    new = nbformat.v4.new_code_cell(source, outputs=outputs)
    new.metadata.tags = [name for name in ("export", "lead") if name in directives]
    if "echo: false" in directives:
        new.metadata.tags.append("remove-input")
    elif words := folded_words(source, outputs, directives):
        new.metadata.tags.append("hide-input")
        new.metadata["mystnb"] = {"code_prompt_show": words, "code_prompt_hide": words}
    code = [] if "echo: false" in directives and not outputs else [new]
    return code + [nbformat.v4.new_markdown_cell(text) for text in texts]


def plain_words(text: str) -> str:
    """Return the last paragraph of a Markdown cell as plain text, for the alternative text of the figure below it."""
    parts = [
        part
        for part in re.split(r"\n\s*\n", text)
        if not re.match(r"\s*(#|\||\$\$|```|[-*] |\d+\. |>|\()", part)
    ]
    last = " ".join(parts[-1].split()) if parts else ""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|\{py:obj\}`([^ `]*)[^`]*`", r"\1\2", last)
    return re.sub(r"[`*]|\$", "", words)


def is_drawing(png: bytes) -> bool:
    """Return whether a picture is a drawing on white, which the dark theme may turn into light on dark.

    Most of a drawing is white. One with large areas of colour has few colours, as pages keep drawings, and little of the
    light grey that images of the pocket world have.
    """
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = picture.getcolors(256)  # as many as pages keep
    if colours is None or len(colours) < 8:
        return False
    pixels = picture.width * picture.height
    white = sum(count for count, colour in colours if min(colour) > 245)
    grey = sum(
        count
        for count, colour in colours
        if 200 < min(colour) <= 240 and max(colour) - min(colour) < 12
    )
    if white > 0.8 * pixels:
        return True
    return len(colours) <= 128 and white > 0.5 * pixels and grey < 0.15 * pixels


def photograph_mask(
    pixels: np.ndarray,  # (height, width, 3) of a picture
) -> np.ndarray:  # (height, width) bool
    """Return which pixels of a figure belong to photographs: large boxes that are filled with other colours than white."""
    labels, _ = ndimage.label(pixels.min(axis=2) < 246)
    mask = np.zeros(labels.shape, dtype=bool)
    for number, box in enumerate(ndimage.find_objects(labels), 1):
        sides = [part.stop - part.start for part in box]
        if min(sides) >= SMALLEST_PHOTOGRAPH and (labels[box] == number).mean() >= 0.95:
            mask[box] = True
    return mask


def for_dark_theme(png: bytes) -> bytes | None:
    """Return a figure whose photographs stay as they are and whose ground, text and lines turn into light on dark.

    Return None for a picture that is one photograph, and for masks, which have few colours.
    """
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    pixels = np.asarray(picture).astype(float)
    mask = photograph_mask(pixels)
    white = (pixels.min(axis=2) > 245).mean()
    if mask.mean() > 0.9 or white < 0.05 or len(picture.getcolors(2**24)) < 8:
        return None
    # The same as the style sheet's invert(0.93) hue-rotate(180deg) for drawings.
    turned = (237.15 - 0.86 * pixels) @ HUE_ROTATION.T
    pixels = np.where(mask[:, :, None], pixels, turned).round().clip(0, 255)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()


def with_lead(cells: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Show the first figure again below the page's first paragraph if it lies below the first screen.

    A cell with the directive `#| lead` has the figure that is shown instead of the first. Cells come back as they were
    if a page has no figure, or has it early, or if its first text has a picture.
    """
    if any("![" in cell.source for cell in cells[:2] if cell.cell_type == "markdown"):
        return cells
    figures = []  # the characters before each figure, whether its cell has the directive, and its HTML
    before = 0
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown" or not {"hide-input", "remove-input"} & set(tags):
            before += len(cell.source)
        for out in cell.get("outputs", []):
            html = out.get("data", {}).get("text/html", "")
            if html.startswith('<img class="figure'):
                figures.append((before, "lead" in tags, html))
    if not figures or figures[0][0] <= FIRST_SCREEN:
        return cells
    html = next((html for _, is_lead, html in figures if is_lead), figures[0][2])
    place = re.search(r' id="([^"]+)"', html)
    caption = f'<p class="caption">From <a href="#{place[1]}">below on this page</a>.</p>'
    figure = nbformat.v4.new_code_cell(
        "# The figure again",  # not shown; myst-nb leaves out cells without a source
        outputs=[
            nbformat.v4.new_output(
                "display_data", {"text/html": html.replace(place[0], "") + caption}
            )
        ],
    )
    figure.metadata.tags = ["remove-input"]
    first, _, rest = cells[1].source.strip().partition("\n\n")
    texts = [nbformat.v4.new_markdown_cell(text) for text in (first, rest.strip()) if text]
    return [cells[0], texts[0], figure, *texts[1:], *cells[2:]]


def cell_targets(cells: list[nbformat.NotebookNode], stem: str) -> dict[str, str]:
    """Give each heading before an export cell a target, and say which name is made below which."""
    heading, targets = None, {}
    for cell in cells:
        if cell.cell_type == "markdown" and re.search(r"^#{2,4} ", cell.source, re.MULTILINE):
            heading = cell
        elif (
            cell.cell_type == "code"
            and "export" in cell.metadata.get("tags", [])
            and heading is not None
        ):
            label = f"made-{stem}-{cells.index(heading)}"
            if not heading.source.startswith("(made-") and f"\n({label})=" not in heading.source:
                at = [m.start() for m in re.finditer(r"^#{2,4} ", heading.source, re.MULTILINE)][-1]
                heading.source = heading.source[:at] + f"({label})=\n" + heading.source[at:]
            for name in re.findall(
                r"^(?:async )?(?:def|class) (\w+)|^(\w+)(?:: .*)? = ", cell.source, re.MULTILINE
            ):
                targets.setdefault(name[0] or name[1], label)
    return targets


def tree(entries: Iterable[str], caption: str = "", hidden: bool = True) -> str:
    """Format a toctree directive."""
    head = [":hidden:"] * hidden + ([f":caption: {caption}"] if caption else [])
    return "\n".join(["```{toctree}", *head, "", *entries, "```"])


def front_lines() -> dict[str, str]:
    """Return the description of each chapter in the front page's table, keyed by chapter."""
    text = "\n".join(cell.source for cell in read(BOOK / "index.ipynb").cells)
    return dict(re.findall(r"^\| \[\d\d (\w+)\]\([^)]*\) \| (.*) \|$", text, re.MULTILINE))


class Site:
    """The sources of the site and the way to write each page; `only` restricts it to some pages."""

    def __init__(self, folder: Path, only: Iterable[str] | None = None):
        chosen = None if only is None else {"index", *only}
        self.folder, self.written = folder, set()
        self.pages = [
            p
            for p in pages()
            if chosen is None or str(p.relative_to(BOOK).with_suffix("")) in chosen
        ]
        self.sources = {page: str(page.relative_to(BOOK)) for page in self.pages}
        self.sources |= {ROOT / old: new for old, new in ROOT_PAGES.items()}
        self.modules = {page: path for page in self.pages if (path := module_path(page))}
        self.names = name_table(self.modules.values())
        self.chapters = [
            f for f in chapter_folders() if any(page.parent == f for page in self.pages)
        ]
        self.with_api = [f for f in self.chapters if any(page.parent == f for page in self.modules)]

    def write(self, name: str, text: str) -> None:
        """Write one source file; leave it if its content is unchanged, so that Sphinx does not read it again."""
        file = self.folder / name
        self.written.add(file)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def markdown(self, text: str, page: Path) -> str:
        """Return a Markdown text of a page with links that work on the site."""
        module = api.module_of(self.modules[page]) if page in self.modules else ""
        return linked_names(relinked(text, page, self.sources), self.names, module)

    def notebook(self, page: Path, *after: str) -> dict[str, str]:
        """Write one notebook, followed by further Markdown, and return the link targets of its names."""
        notebook = copy.deepcopy(read(page))
        cells = []
        for cell in notebook.cells:
            cells += [cell] if cell.cell_type == "markdown" else shown(cell)
        for cell in cells:
            if cell.cell_type == "markdown":
                cell.source = self.markdown(cell.source, page)
        stem = str(page.relative_to(BOOK).with_suffix("")).replace("/", "-").replace("_", "-")
        self.figures(cells, page, stem)
        if page.parent.name in PICTURED:
            cells = with_lead(cells)
        targets = cell_targets(cells, stem)
        cells += [nbformat.v4.new_markdown_cell(text) for text in after]
        notebook.cells, notebook.metadata = (
            cells,
            {
                "kernelspec": notebook.metadata.get(
                    "kernelspec",
                    {"name": "python3", "display_name": "python3", "language": "python"},
                ),
                "language_info": {"name": "python"},
            },
        )
        self.write(self.sources[page], nbformat.writes(notebook))
        return targets

    def figures(self, cells: list[nbformat.NotebookNode], page: Path, stem: str) -> None:
        """Write the pictures of the outputs to files, shown at their width and with an alternative text."""
        back = "../" * (len(Path(self.sources[page]).parts) - 1)
        said = ""
        number = 0
        for cell in cells:
            if cell.cell_type == "markdown":
                said = plain_words(cell.source) or said
                continue
            for i, out in enumerate(cell.outputs):
                if "image/png" not in out.get("data", {}):
                    continue
                number += 1
                file = self.folder / f"_static/figures/{stem}-{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data := base64.b64decode(out.data["image/png"]))
                about = out.metadata.get("image/png", {})
                below = "".join(
                    after.get("data", {}).get("text/html", "")
                    for after in cell.outputs[i + 1 : i + 2]
                )
                caption = markup.unescape(
                    "".join(re.findall(r'<p class="caption">(.*?)</p>', below, re.DOTALL))
                )
                words = markup.escape(about.get("alt") or caption or said or title_of(page)[0])
                width = about.get("width") or int.from_bytes(data[16:20], "big")
                kinds = ["figure"]
                turned = None
                if is_drawing(data):
                    kinds.append("drawing")
                elif turned := for_dark_theme(data):
                    kinds.append("only-light")
                rest = f'width="{width}" alt="{words}"'
                html = (
                    f'<img class="{" ".join(kinds)}" src="{back}_static/figures/{file.name}" {rest} '
                    f'id="figure-{stem}-{number}">'
                )
                if turned:
                    dark = file.with_name(f"{file.stem}-dark.png")
                    dark.write_bytes(turned)
                    html += f'<img class="figure only-dark" src="{back}_static/figures/{dark.name}" {rest}>'
                cell.outputs[i] = nbformat.v4.new_output("display_data", {"text/html": html})

    def chapter(self, folder: Path) -> None:
        """Write a chapter's pages, its start page and its API page."""
        inside = [page for page in self.pages if page.parent == folder]
        title = chapter_title(folder)
        name = folder.name.split("_", 1)[1]
        modules = []
        for page in inside:
            module = self.modules.get(page)
            names = list(api.entries(module)) if module else []
            full = ", ".join(f"{{py:obj}}`{n} <{api.module_of(module)}.{n}>`" for n in names)
            targets = self.notebook(page, *([f"**In the API:** {full}."] if names else []))
            if names:
                parts = dict.fromkeys(targets[n] for n in names if n in targets)
                links = ", ".join(f"[{i}](#{target})" for i, target in enumerate(parts, 1))
                made = f"Made on the page [{title_of(page)[0]}](../{self.sources[page]})"
                modules.append((module, made + (f", parts {links}." if links else ".")))
        if modules:
            self.write(f"api/{name}.md", api.chapter_page(title, modules))
        lines = [
            f"- [{t}]({page.name}): {s[:1].lower() + s[1:] if s[1:2].islower() else s}"
            for page in inside
            for t, s in [title_of(page)]
        ]
        said = relinked(front_lines().get(name, ""), BOOK / "index.ipynb", self.sources)
        said = re.sub(r"\]\((?!http)", "](../", said)
        ref = [f"Signatures of all its functions: [API](../api/{name}.md)."] if modules else []
        toc = tree([page.stem for page in inside])
        self.write(
            f"{folder.name}/index.md",
            "\n\n".join(
                [f"# {title}", said[:1].upper() + said[1:] + ".", "\n".join(lines), *ref, toc]
            )
            + "\n",
        )

    def front_door(self) -> str:
        """Return the names that `chunk_grpo` exports as a list of links."""
        stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
        return "\n".join(
            f"- {{py:obj}}`{alias.name} <chunk_grpo.{node.module}.{alias.name}>`"
            for node in stub.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        )

    def build_sources(self) -> None:
        """Write all sources that Sphinx reads."""
        for folder in self.chapters:
            self.chapter(folder)
        findings = [page for page in self.pages if page.parent.name == "findings"]
        reports = [page for page in self.pages if page.parent.name == "reports"]
        for page in findings + reports:
            self.notebook(
                page, *([tree([p.stem for p in findings[1:]])] if page.stem == "index" else [])
            )
        tops = [tree([f"{folder.name}/index" for folder in self.chapters], "The book")]
        if findings:
            tops.append(tree([f"findings/{findings[0].stem}"], "What came out"))
        if reports:
            words = (
                "Notebooks that `chunk-grpo report`, `compare`, `tables`, `profile` and `evaluate` fill in with\n"
                "a run's numbers. They are shown as they are before, with code and no output."
            )
            lines = [f"- [{title_of(page)[0]}]({page.name})" for page in reports]
            self.write(
                "reports/index.md",
                "\n\n".join(
                    [
                        "# Report notebooks",
                        words,
                        "\n".join(lines),
                        tree([page.stem for page in reports]),
                    ]
                )
                + "\n",
            )
        listed = [f"- [{chapter_title(f)}]({f.name.split('_', 1)[1]}.md)" for f in self.with_api]
        self.write(
            "api/index.md",
            "\n\n".join(
                [
                    "# API",
                    "Every public name with its signature, what each parameter is, and the page where it is made.",
                    "\n".join(listed),
                    "## From the front door",
                    "`from chunk_grpo import ...` gives:",
                    self.front_door(),
                    tree([f.name.split("_", 1)[1] for f in self.with_api]),
                ]
            )
            + "\n",
        )
        glossary = [page for page in self.pages if page.stem == "glossary"]
        for page in glossary:
            self.notebook(page)
        more = [
            *[page.stem for page in glossary],
            *["reports/index"] * bool(reports),
            *(name.removesuffix(".md") for name in ROOT_PAGES.values()),
        ]
        tops.append(tree(["api/index", *more], "Reference"))
        for old, new in ROOT_PAGES.items():
            self.write(new, self.markdown((ROOT / old).read_text(encoding="utf-8"), ROOT / old))
        self.notebook(BOOK / "index.ipynb", *tops)
        self.write("conf.py", (WEB / "conf.py").read_text(encoding="utf-8"))
        for name in STATIC_FILES:
            self.write(f"_static/{name}", (WEB / name).read_text(encoding="utf-8"))
        for name in ("layout.html", "search.html"):
            text = (WEB / "templates" / name).read_text(encoding="utf-8")
            self.write(f"_templates/{name}", text)
        for old in {*self.folder.rglob("*.ipynb"), *self.folder.rglob("*.md")} - self.written:
            old.unlink()
        shutil.copytree(BOOK / "images", self.folder / "images", dirs_exist_ok=True)
        copy_mathjax(self.folder / "_static/mathjax")


def copy_mathjax(folder: Path) -> None:
    """Copy MathJax and its fonts from its package to the site's own files."""
    wanted = (
        r"mathjax/static/mathjax/(?:es5/)?(LICENSE|tex-chtml-full\.js|output/chtml/fonts/.*\.woff)"
    )
    for file in importlib.metadata.files("django-static-mathjax"):
        inside = re.fullmatch(wanted, str(file))
        if inside:
            target = folder / inside.group(1)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)


def first_sentence(page: Path) -> str:
    """Return the first sentence of a page after its heading, without Markdown."""
    cells = read(page).cells
    text = title_of(page)[1] or next((c.source for c in cells[1:] if c.cell_type == "markdown"), "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=[.?!]) ", text)[0]


def page_text(page: Path) -> str:
    """Return a page as plain Markdown: prose, code and printed text, without pictures."""
    parts = []
    for cell in read(page).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        for part in shown(copy.deepcopy(cell)):
            if part.cell_type == "markdown":
                parts.append(part.source)
                continue
            if "remove-input" not in part.metadata.tags:
                parts.append(f"```python\n{part.source}\n```")
            texts = [
                out.get("text") or out.get("data", {}).get("text/plain", "")
                for out in part.outputs
                if "image/png" not in out.get("data", {})
            ]
            parts += [f"```\n{text.strip()}\n```" for text in texts if text.strip()]
    return "\n\n".join(parts) + "\n"


def write_llms(site: Site, out: Path) -> None:
    """Write `llms.txt`, with one line per page, and `llms-full.txt`, with the pages themselves."""
    cells = read(BOOK / "index.ipynb").cells
    about = re.sub(
        r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(cells[1].source.split("\n\n")[0].split())
    )
    lines = ["# Chunk-GRPO", f"> {title_of(BOOK / 'index.ipynb')[1]}", about]
    groups = [(chapter_title(f), [p for p in site.pages if p.parent == f]) for f in site.chapters]
    groups += [
        (name, [p for p in site.pages if p.parent.name == folder])
        for name, folder in (("Findings", "findings"), ("Report notebooks", "reports"))
    ]
    for name, inside in groups:
        if inside:
            lines += [
                f"## {name}",
                "\n".join(
                    f"- [{title_of(p)[0]}]({Path(site.sources[p]).with_suffix('.html')}): {first_sentence(p)}"
                    for p in inside
                ),
            ]
    for page in (page for page in site.pages if page.stem == "glossary"):
        lines += ["## Glossary", f"- [Glossary](glossary.html): {first_sentence(page)}"]
    names = [f.name.split("_", 1)[1] for f in site.with_api]
    lines += [
        "## API",
        "\n".join(
            f"- [{CHAPTERS[name]}](api/{name}.html): signatures, parameters" for name in names
        ),
    ]
    (out / "llms.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    (out / "llms-full.txt").write_text(
        "\n\n".join(page_text(page) for page in site.pages), encoding="utf-8"
    )


def build(out: Path, work: Path, only: Iterable[str] | None = None, jobs: int = 2) -> int:
    """Write the sources, build the pages with Sphinx (warnings are errors), and add llms.txt."""
    from sphinx.cmd.build import main as sphinx_build

    site = Site(work / "source", only)
    site.build_sources()
    made = (
        work / "html"
    )  # myst-nb keeps its own files beside the pages, so these are made in the work folder
    kept = {made / path.relative_to(site.folder).with_suffix(".html") for path in site.written}
    for old in set(made.glob("*/*.html")) - kept:
        old.unlink()
    code = sphinx_build(
        [
            "-q",
            "-b",
            "html",
            "-W",
            "--keep-going",
            "-j",
            str(jobs),
            "-d",
            str(work / "doctrees"),
            str(site.folder),
            str(made),
        ]
    )
    if code == 0:
        write_llms(site, made)
        search.write(made)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out, ignore=shutil.ignore_patterns("searchindex.js"))
        found = links.check(out)
        print("\n".join(found.broken), file=sys.stderr)
        code = int(bool(found.broken))
    return code


def main() -> int:
    """Build all pages, or those named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "_docs")
    parser.add_argument("--work", type=Path, default=ROOT / "_proc")
    parser.add_argument("pages", nargs="*", help="such as 00_theory/02_chunks; all without")
    given = parser.parse_args()
    return build(given.out, given.work, given.pages or None)


if __name__ == "__main__":
    sys.exit(main())
