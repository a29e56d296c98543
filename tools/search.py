"""Write what the site's search reads: the text of every section of the built pages, and the table of synonyms.

`make docs` calls this after Sphinx. The browser does the rest (`tools/web/search.js`), without a server or a network.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

SYNONYMS = Path(__file__).with_name("web") / "synonyms.json"
VOID = {"img", "br", "hr", "input", "meta", "link", "col", "wbr", "source"}
BLOCKS = {"p", "li", "td", "th", "tr", "div", "pre", "dt", "dd", "blockquote", "summary", "table"}
SKIPPED_TAGS = {"script", "style", "svg", "nav", "button"}
SKIPPED_CLASSES = {"headerlink", "toctree-wrapper", "admonition-title", "prev-next-footer"}
NOT_SEARCHED = {"genindex.html", "py-modindex.html", "search.html"}
SIGNS = {  # formulas in an excerpt are read as text
    "varepsilon": "ε",
    "epsilon": "ε",
    "sigma": "σ",
    "eta": "η",
    "theta": "θ",
    "beta": "β",
    "alpha": "α",
    "gamma": "γ",
    "lambda": "λ",
    "mu": "μ",
    "pi": "π",
    "tau": "τ",
    "Delta": "Δ",
    "ratio": "r",
    "cdot": "·",
    "times": "×",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "approx": "≈",
    "dots": "…",
    "sqrt": "√",
    "sum": "Σ",
}


@dataclass
class Section:
    """A heading or an API entry, and the text below it."""

    page: str
    anchor: str
    name: str = ""  # the heading, or the name of the API entry
    kind: str = "page"  # or "api"
    text: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def formula_text(tex: str) -> str:
    """Turn a short TeX formula into text, and a long one into an ellipsis."""
    tex = re.sub(r"^\\[(\[]|\\[)\]]$", "", tex.strip())
    tex = re.sub(r"\\([A-Za-z]+)", lambda found: SIGNS.get(found.group(1), ""), tex)
    tex = " ".join(re.sub(r"[\\{}]", "", tex).split())
    return tex if len(tex) <= 24 else "…"


class Reader(HTMLParser):
    """Cut the article of a page into sections."""

    def __init__(self, page: str, html: str):
        super().__init__()
        self.page = page
        self.sections: list[Section] = []
        self.open: list[tuple[str, str]] = []  # tag, and what closes with it
        self.stack: list[Section] = []
        self.inside = self.skipping = self.in_code = self.in_formula = 0
        self.in_heading: Section | None = None
        self.formula = ""
        article = html[max(html.find("<article"), 0) :]
        self.feed(article[: article.rfind("</article>")])

    def start(self, name: str, anchor: str, kind: str) -> None:
        """Open a section below the current one."""
        section = Section(page=self.page, anchor=anchor, name=name, kind=kind)
        self.sections.append(section)
        self.stack.append(section)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        classes = set((given.get("class") or "").split())
        if tag in VOID:
            return
        closes = ""
        if tag == "article" and "bd-article" in classes:
            closes = "inside"
            self.inside += 1
        elif tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES:
            closes = "skipping"
            self.skipping += 1
        elif self.inside and "math" in classes and tag in ("span", "div"):
            closes = "in_formula"
            self.in_formula += 1
            self.formula = ""
        elif self.inside and tag == "div" and classes & {"cell_input", "cell_output"}:
            closes = "in_code" if "text_html" not in classes else ""
            self.in_code += bool(closes)
        elif self.inside and tag == "section":
            closes = "section"
            self.start("", given.get("id") or "", "page")
        elif self.inside and tag == "dl" and "py" in classes:
            closes = "entry"
        elif self.inside and tag == "dt" and "sig-object" in classes and given.get("id"):
            if self.stack and self.open and self.open[-1][1] == "entry":
                self.open[-1] = ("dl", "section")
            self.start(given["id"].removeprefix("chunk_grpo."), given["id"], "api")
        elif re.fullmatch("h[1-6]", tag) and self.stack:
            closes = "in_heading"
            self.in_heading = self.stack[-1]
        self.open.append((tag, closes))

    def handle_endtag(self, tag):
        if tag in VOID or all(tag != name for name, _ in self.open):
            return
        name = ""
        while name != tag:  # an element that was never closed ends with the one around it
            name, closes = self.open.pop()
            if closes == "section":
                self.stack.pop()
            elif closes == "in_heading":
                self.in_heading = None
            elif closes == "in_formula":
                self.in_formula -= 1
                self.add(formula_text(self.formula))
            elif closes in ("inside", "skipping", "in_code"):
                setattr(self, closes, getattr(self, closes) - 1)
        if tag in BLOCKS:
            self.add("\n")

    def handle_data(self, data):
        if not self.inside or self.skipping:
            return
        if self.in_formula:
            self.formula += data
        else:
            self.add(data.replace("\n", " "))

    def add(self, text: str) -> None:
        """Add a text to the current section."""
        if not self.stack or self.skipping:
            return
        if self.in_heading is not None:
            self.in_heading.name += text
        elif self.in_code:
            self.stack[-1].code.append(text)
        else:
            self.stack[-1].text.append(text)


def prose(parts: Iterable[str]) -> str:
    """Join the texts of a section: one space between words, a middle dot between blocks."""
    lines = [" ".join(line.split()) for line in "".join(parts).split("\n")]
    joined = ""
    for line in lines:
        if not line:
            continue
        joined += (" " if joined.endswith((".", ":", "?", "!")) or not joined else " · ") + line
    return joined.strip()


def words_of(parts: Iterable[str]) -> str:
    """List the different names in a piece of code, in order."""
    return " ".join(dict.fromkeys(re.findall(r"[^\W\d]\w{2,}", "".join(parts))))


def sections_of(page: str, html: str) -> list[dict[str, str]]:
    """List the sections of a page in order as the browser reads them; the first carries the page's title."""
    found = []
    for section in Reader(page, html).sections:
        text = prose(section.text)
        code = words_of(section.code)
        if section.name.strip() or text or code:
            found.append(
                {
                    "page": section.page,
                    "anchor": section.anchor,
                    "name": " ".join(section.name.split()),
                    "kind": section.kind,
                    "text": text,
                    "code": code,
                }
            )
    return found


def searched_pages(folder: Path) -> list[Path]:
    """List the pages of a built site that a search may find."""
    pages = [path for path in folder.rglob("*.html") if "_static" not in path.parts]
    return sorted(page for page in pages if str(page.relative_to(folder)) not in NOT_SEARCHED)


def write(folder: Path) -> Path:
    """Write `_static/search_data.js` of a built site."""
    sections = []
    for path in searched_pages(folder):
        name = str(path.relative_to(folder))
        sections += sections_of(name, path.read_text(encoding="utf-8"))
    data = {
        "synonyms": json.loads(SYNONYMS.read_text(encoding="utf-8")),
        "sections": sections,
    }
    target = folder / "_static/search_data.js"
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    target.write_text(f"window.BOOK_SEARCH_DATA = {text};\n", encoding="utf-8")
    return target
