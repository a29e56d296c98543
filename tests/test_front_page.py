"""The front page: its pictures are figures of the book, and its numbers are measured ones."""

import json
import re
import sys
from pathlib import Path

import nbformat
import torch
from PIL import Image

from chunk_grpo.method.chunks import Chunks
from chunk_grpo.rewards.rewards import load_reward

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
KEPT = ROOT / "runs/results/images/demo"
sys.path.insert(0, str(ROOT / "tools"))
import readme  # noqa: E402


def test_the_readmes_pictures_are_figures_that_the_book_keeps():
    pictures = readme.pictures()
    assert {file.name for file in pictures} == {"steps_and_chunks.png", "wrong_to_right.png"}
    assert not [file.name for file, content in pictures.items() if file.read_bytes() != content], "run `make prepare`"


def test_pictures_can_be_read_on_a_phone_and_are_sharp_on_a_wide_screen():
    "Figures are 7 inches wide, so 11 points are 8.5 px on a screen of 390 px, and no text is smaller."
    for file in readme.pictures():
        assert Image.open(file).width >= 2 * 830, "a README column is 830 px wide"
    for page in ("findings/confirmation", "12_reporting/00_figures"):
        cells = nbformat.read(ROOT / f"nbs/{page}.ipynb", as_version=4).cells
        (source,) = [cell.source for cell in cells if cell.source.startswith("# The README shows this figure")]
        assert "size=(7.0, " in source and "dpi=240" in source
        assert not [size for size in re.findall(r"(?:font.size\"?:|fontsize=) ?([\d.]+)", source) if float(size) < 11]


def test_images_that_training_mended_are_wrong_before_and_right_after():
    kept = json.loads(KEPT.with_suffix(".json").read_text())
    sheet, side = Image.open(KEPT.with_suffix(".png")), kept["side"]
    rewards = {name: load_reward(name) for name in ("pocket-clip", "pocket-geneval")}
    mended = 0
    for down, row in enumerate(kept["rows"]):
        places = [(column * side, down * side) for column in range(len(kept["iterations"]))]
        images = [sheet.crop((x, y, x + side, y + side)) for x, y in places]
        for name, reward in rewards.items():
            scores = reward(images, [row["prompt"]] * len(images))
            torch.testing.assert_close(scores, torch.tensor(row["scores"][name]), atol=2e-3, rtol=0)
        verdicts = row["scores"]["pocket-geneval"]
        mended += verdicts[0] == 0 and verdicts[-1] == 1
    assert mended == 4


def test_chunk_ratios_of_the_hero_figure_are_the_geometric_means_of_its_step_ratios():
    "To first order the mean of the distances from 1, as the page prints them."
    cells = nbformat.read(ROOT / "nbs/findings/confirmation.ipynb", as_version=4).cells
    (printed,) = [out.text for cell in cells for out in cell.get("outputs", ()) if "advantage -" in out.get("text", "")]
    steps, four = ([float(x) for x in line.split()[1:]] for line in printed.splitlines()[1:])
    parts = [steps[part] for part in Chunks.parse("2,3,4,7").slices]
    assert not [part for part, ratio in zip(parts, four, strict=True) if abs(sum(part) / len(part) - ratio) > 0.1]
    assert (sum(x < -1 for x in steps), sum(x < -1 for x in four)) == (5, 1), "as the title of the figure says"
