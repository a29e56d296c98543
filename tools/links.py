"""Check a folder of HTML: every link and picture inside it leads somewhere, and no page asks another host for a part.

`python tools/links.py _docs` prints what is broken, then the links to other sites, which it does not follow.
"""

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PARTS = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}


class Page(HTMLParser):
    """Parse the link targets and the links of an HTML page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # address, and whether it is a part of the page
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src", "data") and value:
                self.links.append((value, (tag, name) in PARTS))


@dataclass
class Found:
    """The result of a check of links."""

    broken: list[str] = field(default_factory=list)  # one sentence per broken link
    outside: set[str] = field(default_factory=set)  # linked addresses on other sites
    checked: int = 0  # number of links within the site


def check(folder: Path) -> Found:
    """Check the links of every page in a folder."""
    files = [
        path for path in folder.rglob("*.html") if "_static" not in path.parts
    ]  # there lie the theme's templates
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in files}
    found = Found()
    for path, page in pages.items():
        for address, part in page.links:
            where = path.relative_to(folder.resolve())
            parts = urlsplit(address)
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                found.outside.add(address)
                if part:
                    found.broken.append(f"{where}: asks another host for {address}")
                continue
            found.checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.broken.append(f"{where}: no file for {address}")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                found.broken.append(f"{where}: no place for {address}")
    return found


def main() -> int:
    """Check a built site and print the broken links."""
    found = check(Path(sys.argv[1]))
    print(
        "\n".join(
            [
                *found.broken,
                f"{found.checked} links inside, {len(found.broken)} broken; to other sites:",
                *sorted(found.outside),
            ]
        )
    )
    return int(bool(found.broken))


if __name__ == "__main__":
    sys.exit(main())
