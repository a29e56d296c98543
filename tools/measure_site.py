"""Open the pages of a built site in Chromium and print what a reader cannot see, read or reach.

    python tools/measure_site.py _docs                        all pages at 390, 1280 and 1920 px
    python tools/measure_site.py _docs --width 1280 --list    one width, and the pages behind each number
    python tools/measure_site.py _docs 00_theory findings     the pages whose names begin so

At each width it counts equations, tables and code that are cut or scroll, and, in the chapters of the method and its
results, the pages without a picture and those whose first picture lies below the first screen. At 1280 px it also counts
text with too little contrast in both themes, and what the keyboard reaches.
"""

import argparse
import shutil
import sys
from collections import Counter
from pathlib import Path

WIDTHS = (390, 1280, 1920)
HEIGHT = 900  # of a screen, px
WIDTH_OF_THEMES = 1280  # where contrast and keyboard are looked at
PICTURED = ("00_theory/", "07_training/", "08_methods/", "findings/")

FITS = r"""
() => {
  const article = document.querySelector(".bd-article");
  if (!article) return {};
  const seen = (node) => node.checkVisibility({visibilityProperty: true}) && node.getBoundingClientRect().width > 1;
  const scrolls = (box) => ["auto", "scroll"].includes(getComputedStyle(box).overflowX) && box.scrollWidth > box.clientWidth + 1;
  /** How the right end of a part is seen: "seen", "scrolls" or "cut". */
  const reach = (part) => {
    const right = part.getBoundingClientRect().right;
    for (let box = part; box && box !== article.parentElement; box = box.parentElement) {
      if (scrolls(box)) return "scrolls";
      if (getComputedStyle(box).overflowX !== "visible" && right > box.getBoundingClientRect().right + 2) return "cut";
    }
    return right > document.documentElement.clientWidth + 1 ? "cut" : "seen";
  };
  const count = (nodes) => {
    const found = {seen: 0, scrolls: 0, cut: 0};
    for (const node of nodes) found[reach(node)] += 1;
    return found;
  };
  const all = (selector) => [...article.querySelectorAll(selector)].filter(seen);
  const pictures = all("img, .interactive, .cell_output svg").filter((node) => !node.closest("a.headerlink, mjx-container"));
  const first = pictures.length ? pictures[0].getBoundingClientRect() : null;
  return {
    equations: count(all("mjx-container[display=true] mjx-math")),
    tables: count(all("table")),
    stacked: all("table.stacked").length,
    code: count(all("pre")),
    pictures: pictures.length,
    first: first && (first.top + window.scrollY + Math.min(first.height, 150)) / window.innerHeight,
    wide: document.documentElement.scrollWidth - window.innerWidth,
    screens: document.documentElement.scrollHeight / window.innerHeight,
  };
}
"""

CONTRAST = r"""
() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = (top, below) => top.slice(0, 3).map((part, i) => part * top[3] + below[i] * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let box = node; box; box = box.parentElement) {
      const colour = parse(getComputedStyle(box).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const pale = new Map(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
    if (!text || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (node.closest("script, style, noscript, mjx-assistive-mml, :disabled, .visually-hidden, #pst-skip-link")) continue;
    const style = getComputedStyle(node), ground = behind(node);
    const ink = light(over(parse(node.closest("svg") ? style.fill : style.color), ground)), paper = light(ground);
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5) - 0.005) {
      const key = `${ratio.toFixed(2)} ${node.tagName.toLowerCase()}.${node.className.baseVal ?? node.className} in ` +
        `${node.parentElement.tagName.toLowerCase()}.${node.parentElement.className}`;
      pale.set(key, pale.get(key) || text.slice(0, 40));
    }
  }
  return [...pale];
}
"""

KEYBOARD = r"""
() => {
  const article = document.querySelector(".bd-article") || document.body;
  const stops = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")].filter((node) =>
    node.tabIndex >= 0 && !node.disabled && node.type !== "hidden" && node.checkVisibility({visibilityProperty: true}) &&
    !node.closest("[inert]"));
  const named = (node) => (node.ariaLabel || node.getAttribute("aria-labelledby") || node.title || node.placeholder ||
    (node.labels && [...node.labels].map((label) => label.textContent).join("")) || node.textContent ||
    [...node.querySelectorAll("img, svg")].map((picture) => picture.alt || picture.ariaLabel || "").join("")).trim();
  const isBefore = (node) => node.compareDocumentPosition(article) & Node.DOCUMENT_POSITION_FOLLOWING && !node.contains(article);
  const boxes = [...article.querySelectorAll("*")].filter((box) =>
    ["auto", "scroll"].includes(getComputedStyle(box).overflowX) && box.scrollWidth > box.clientWidth + 1 && box.clientWidth > 1);
  return {
    before: stops.filter(isBefore).length,
    nameless: stops.filter((node) => !named(node)).map((node) => node.outerHTML.slice(0, 80)),
    unreachable: boxes.filter((box) =>
      box.tabIndex < 0 && !box.querySelector("a[href], button, input, select, summary, [tabindex='0']")).length,
  };
}
"""


def measure(
    folder: Path,  # folder of the built site
    widths: tuple[int, ...] = WIDTHS,
    beginnings: tuple[
        str, ...
    ] = (),  # measure pages whose names begin with one of these; empty: all
) -> dict[int, dict[str, dict]]:
    """Measure each page at each width, and return the results, keyed by width and page name."""
    from playwright.sync_api import sync_playwright

    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    names = [
        name for name in names if not name.startswith("_") and name.startswith(beginnings or "")
    ]
    found = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        for width in widths:
            found[width] = {}
            for theme in ("light", "dark") if width == WIDTH_OF_THEMES else ("light",):
                context = browser.new_context(
                    viewport={"width": width, "height": HEIGHT},
                    color_scheme=theme,
                    offline=True,
                )
                page = context.new_page()
                page.set_default_timeout(120_000)
                for name in names:
                    page.goto((folder.resolve() / name).as_uri())
                    page.wait_for_function("document.documentElement.dataset.fitted")
                    page.wait_for_function(
                        "!document.querySelector('.interactive[data-kind]:not([data-ready])')"
                    )
                    answer = found[width].setdefault(name, {})
                    if theme == "light":
                        answer.update(page.evaluate(FITS))
                    if width == WIDTH_OF_THEMES:
                        answer[f"contrast, {theme}"] = page.evaluate(CONTRAST)
                        answer["keyboard"] = page.evaluate(KEYBOARD)
                context.close()
        browser.close()
    return found


def summary(found: dict[str, dict]) -> list[tuple[str, str, list[str]]]:
    """Return rows for one width: what is counted, how often it occurs, and the pages where it occurs."""
    with_article = {name: page for name, page in found.items() if "code" in page}
    lines = []
    for part in ("equations", "tables", "code"):
        total = Counter()
        for page in with_article.values():
            total.update(page[part])
        number = sum(total.values())
        share = f" ({total['scrolls'] / number:.0%})" if number else ""
        words = f"{number}: {total['cut']} cut, {total['scrolls']} scroll{share}"
        bad = [n for n, page in with_article.items() if page[part]["cut"] or page[part]["scrolls"]]
        lines.append((part, words, bad))
    stacked = {name: page["stacked"] for name, page in with_article.items() if page["stacked"]}
    lines.append(
        ("tables stacked", f"{sum(stacked.values())} on {len(stacked)} pages", list(stacked))
    )
    wide = [name for name, page in with_article.items() if page["wide"] > 0]
    lines.append(("pages wider than the screen", str(len(wide)), wide))
    lengths = sorted(page["screens"] for page in with_article.values())
    lines.append(
        ("screens, median and most", f"{lengths[len(lengths) // 2]:.1f}, {lengths[-1]:.1f}", [])
    )
    chapters = {name: page for name, page in with_article.items() if name.startswith(PICTURED)}
    chapters = {
        n: page
        for n, page in chapters.items()
        if n in {"findings/index.html"} or not n.endswith("/index.html")
    }
    bare = [name for name, page in chapters.items() if not page["pictures"]]
    late = [
        f"{name} {page['first']:.1f}" for name, page in chapters.items() if (page["first"] or 0) > 1
    ]
    of = f"of {len(chapters)} in the pictured chapters"
    lines.append(("pages without a picture", f"{len(bare)} {of}", bare))
    lines.append(("first picture below the first screen", f"{len(late)} {of}", late))
    for theme in ("light", "dark"):
        pale = {
            n: page[f"contrast, {theme}"]
            for n, page in found.items()
            if page.get(f"contrast, {theme}")
        }
        kinds = Counter(kind for texts in pale.values() for kind, _ in texts)
        if any(f"contrast, {theme}" in page for page in found.values()):
            lines.append(
                (
                    f"pages with pale text, {theme}",
                    str(len(pale)),
                    [f"{k} ({n} pages)" for k, n in kinds.most_common(12)],
                )
            )
    keys = {name: page["keyboard"] for name, page in found.items() if "keyboard" in page}
    if keys:
        before = sorted(page["before"] for page in keys.values())
        nameless = Counter(text for page in keys.values() for text in page["nameless"])
        closed = [name for name, page in keys.items() if page["unreachable"]]
        lines += [
            (
                "stops of the Tab key before the text, median and most",
                f"{before[len(before) // 2]}, {before[-1]}",
                [],
            ),
            (
                "stops without a name",
                f"{sum(nameless.values())}",
                [f"{t} ({n})" for t, n in nameless.most_common(6)],
            ),
            (
                "boxes that scroll and take no focus",
                str(sum(page["unreachable"] for page in keys.values())),
                closed,
            ),
        ]
    return lines


def main() -> int:
    """Measure, and print the numbers width by width; the exit status is 1 if something is cut or has no picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the built site, such as _docs")
    parser.add_argument("pages", nargs="*", help="how the names of the pages begin; all without")
    parser.add_argument("--width", type=int, action="append", help="px; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the pages behind each number")
    given = parser.parse_args()
    found = measure(given.folder, tuple(given.width or WIDTHS), tuple(given.pages))
    bad = False
    for width, pages in found.items():
        print(f"{width} px, {len(pages)} pages")
        for what, words, behind in summary(pages):
            print(f"  {what}: {words}")
            if given.list:
                print(*(f"    {name}" for name in behind), sep="\n")
            bad = bad or (" cut" in words and " 0 cut" not in words)
            bad = bad or (what == "pages without a picture" and bool(behind))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
