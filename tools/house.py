"""Draw the house as nbs/images/house.svg: the chapters, what each is built on, and what flows through an iteration.

The arrows are the imports of the package itself, less those that follow from others.
`python tools/house.py --check` writes nothing and exits with 1 when the picture is not that of the code.
"""

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "nbs/images/house.svg"
CHAPTERS = {  # name: what it holds, column (of 12, its left edge), floor from below, colour
    "theory": ("schedule, sampler, chunks, objective", 1, 0, "#cfe3f5"),
    "pocket": ("a world of shapes, its small FLUX", 7, 0, "#e4e4e4"),
    "core": ("files, statistics, settings", 0, 1, "#f5e6b8"),
    "models": ("a pipeline as a policy, five families", 4, 1, "#d5ead0"),
    "rewards": ("images and prompts to scores", 8, 1, "#f6d3c6"),
    "reward_serving": ("rewards in other processes", 8, 2, "#eeeeee"),
    "planning": ("memory and time before a start", 2, 2, "#eeeeee"),
    "training": ("rollout, update, checkpoints", 6, 3, "#dcd3ee"),
    "methods": ("the table, decoupled methods", 7, 5, "#dcd3ee"),
    "runs": ("a run folder, its processes", 2, 3, "#eeeeee"),
    "evaluation": ("held-out prompts, GenEval, WISE, DPG", 8, 4, "#eeeeee"),
    "measurements": ("profiles, noise, bias, speed", 4, 4, "#eeeeee"),
    "reporting": ("figures, tables, reports, widgets", 0, 4, "#f3d9e6"),
    "studies": ("arms, seeds, claims, verdicts", 2, 5, "#eeeeee"),
    "cli": ("chunk-grpo", 7, 6, "#eeeeee"),
}
FLOW = [
    ("settings", "core"),
    ("prompts", "models"),
    ("trajectories", "training"),
    ("rewards", "rewards"),
    ("advantages", "theory"),
    ("chunks", "theory"),
    ("gradient", "training"),
    ("weights", "models"),
    ("report", "reporting"),
]
COLUMN, WIDTH, HEIGHT, FLOOR, TOP = 79, 288, 48, 92, 116  # pixels


def imported_chapters(file: Path) -> set[str]:
    """Return the chapters that a module of the package imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (
            node.level == 2 or (node.module or "").startswith("chunk_grpo")
        ):
            parts = (node.module or "").removeprefix("chunk_grpo").strip(".").split(".")
            found |= {parts[0]} if parts[0] else {alias.name for alias in node.names}
    return found & set(CHAPTERS)


def built_on() -> dict[str, list[str]]:
    """Return for each chapter the chapters that it imports, without those that follow from another import."""
    direct = {}
    earlier = set()
    for name in CHAPTERS:
        files = (ROOT / "chunk_grpo" / name).glob("*.py")
        direct[name] = earlier.intersection(*[set().union(*map(imported_chapters, files))])
        earlier = earlier | {name}

    def reach(name: str) -> set[str]:
        return direct[name].union(*(reach(other) for other in direct[name]))

    return {
        name: sorted(x for x in own if not any(x in reach(y) for y in own - {x}))
        for name, own in direct.items()
    }


def box(x: float, y: float, width: float, height: float, colour: str, lines: list[str]) -> str:
    """Draw a box with one or two lines of text, the first one bold."""
    kinds = ["flow"] if len(lines) == 1 else ["name", "what"]
    middle = [y + height / 2 + 5] if len(lines) == 1 else [y + 20, y + 38]
    text = "".join(
        f'<text x="{x + width / 2:g}" y="{at:g}" class="{kind}">{escape(line)}</text>'
        for line, at, kind in zip(lines, middle, kinds, strict=False)
    )
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{colour}"/>{text}'


def place(name: str) -> tuple[float, float]:
    """Return the upper left corner of a chapter's box."""
    _, column, floor, _ = CHAPTERS[name]
    return 12 + column * COLUMN, TOP + (6 - floor) * FLOOR


def arrow(upper: str, lower: str) -> str:
    """Draw an arrow from the lower edge of one box to the upper edge of another."""
    (x0, y0), (x1, y1) = place(upper), place(lower)
    shift = max(-0.35, min(0.35, (x1 - x0) / WIDTH / 3)) * WIDTH
    return (
        f'<path d="M{x0 + WIDTH / 2 + shift:g} {y0 + HEIGHT:g} L{x1 + WIDTH / 2 - shift:g} {y1 - 3:g}" '
        'class="arrow" marker-end="url(#tip)"/>'
    )


STYLE = """text{font-family:sans-serif;text-anchor:middle;fill:#222}
.name{font-size:15px;font-weight:600} .what{font-size:13px} .flow{font-size:13.5px}
.note{font-size:13px;text-anchor:start;fill:#555} rect{stroke:#777;stroke-width:1}
.arrow{stroke:#777;stroke-width:1.4;fill:none}"""
TIP = """<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#777"/></marker></defs>"""


def note(y: float, text: str) -> str:
    """Draw a line of small text at the left edge."""
    return f'<text x="12" y="{y:g}" class="note">{escape(text)}</text>'


def picture() -> str:
    """Return the whole picture as SVG."""
    width = 12 * COLUMN + 24
    height = TOP + 6 * FLOOR + HEIGHT + 12
    step = 12 * COLUMN / len(FLOW)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        "<title>The house: fourteen chapters, and what flows through an iteration</title>",
        f"<style>{STYLE}</style>",
        TIP,
        f'<rect width="{width}" height="{height}" fill="#ffffff" style="stroke:none"/>',
        note(20, "What flows through an iteration, in the colour of the chapter that makes it:"),
    ]
    for i, (word, chapter) in enumerate(FLOW):
        parts.append(box(12 + i * step, 32, step - 14, 34, CHAPTERS[chapter][3], [word]))
        if i:
            parts.append(
                f'<path d="M{12 + i * step - 14:g} 49 h11" class="arrow" marker-end="url(#tip)"/>'
            )
    parts.append(note(TOP - 12, "The chapters. An arrow leads to what a chapter is built on:"))
    parts += [arrow(name, other) for name, others in built_on().items() for other in others]
    for number, (name, (what, _, _, colour)) in enumerate(CHAPTERS.items()):
        parts.append(box(*place(name), WIDTH, HEIGHT, colour, [f"{number:02d} {name}", what]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Write the picture, or compare it with the file."""
    if "--check" in sys.argv[1:]:
        return int(not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != picture())
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
