"""GenEval's prompts, its rule, its lines and its table; scoring that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.evaluation import geneval
from chunk_grpo.evaluation.detector import DetectedObject
from chunk_grpo.evaluation.geneval import COCO_CLASSES, GENEVAL_COLOURS, GENEVAL_TAGS

SEEN = """a photo of a bench|a photo of a cow|a photo of two clocks|a photo of a pink car|a photo of four benchs
a photo of a dog right of a teddy bear|a photo of a purple wine glass and a black apple|a photo of two toothbrushs
a photo of a tv remote left of an umbrella|a photo of a computer mouse left of a bench|a photo of three sports balls
a photo of a hair drier below an elephant|a photo of a computer keyboard above a snowboard|a photo of a brown skis
a photo of an orange traffic light and a white toilet|a photo of a green cup and a red pizza|a photo of four vases
a photo of a toilet and a computer mouse|a photo of a frisbee and a vase|a photo of a yellow orange|a photo of a sink"""


def article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def drawn_prompts(seed: int) -> list[str]:
    """The prompts again, by the published procedure: the order and kind of the draws are GenEval's."""
    rng = np.random.default_rng(seed)
    out = []

    def add(tag, include, text, **more):
        out.append(
            json.dumps({"tag": tag, "include": include, **more, "prompt": f"a photo of {text}"})
        )

    def one(name, **more):
        return {"class": name, "count": 1, **more}

    for i in rng.choice(80, size=80, replace=False):
        add("single_object", [one(COCO_CLASSES[i])], article(COCO_CLASSES[i]))
    for _ in range(100):
        a, b = (COCO_CLASSES[i] for i in rng.choice(80, size=2, replace=False))
        add("two_object", [one(a), one(b)], f"{article(a)} and {article(b)}")
    for _ in range(100):
        name = COCO_CLASSES[rng.choice(80)]
        count = int(rng.integers(2, 5))
        words = (
            {2: "two", 3: "three", 4: "four"}[count]
            + f" {name}"
            + ("es" if name[-1] == "s" else "s")
        )
        add(
            "counting",
            [{"class": name, "count": count}],
            words,
            exclude=[{"class": name, "count": count + 1}],
        )
    for _ in range(100):
        name, colour = COCO_CLASSES[1 + rng.choice(79)], GENEVAL_COLOURS[rng.choice(10)]
        add("colors", [one(name, color=colour)], f"{article(colour)} {name}")
    for _ in range(100):
        a, b = (COCO_CLASSES[i] for i in rng.choice(80, size=2, replace=False))
        where = geneval.POSITIONS[rng.choice(4)]
        add("position", [one(b), one(a, position=[where, 0])], f"{article(a)} {where} {article(b)}")
    for _ in range(100):
        a, b = (COCO_CLASSES[1 + i] for i in rng.choice(79, size=2, replace=False))
        c, d = (GENEVAL_COLOURS[i] for i in rng.choice(10, size=2, replace=False))
        add(
            "color_attr",
            [one(a, color=c), one(b, color=d)],
            f"{article(c)} {a} and {article(d)} {b}",
        )
    return list(dict.fromkeys(out))


def test_shipped_prompts_are_those_of_the_published_seed():
    lines = geneval.GENEVAL_METADATA_FILE.read_text(encoding="utf-8").splitlines()
    assert lines == drawn_prompts(43) and lines != drawn_prompts(42)
    records = geneval.read_geneval_prompts()
    assert Counter(r["tag"] for r in records) == dict(
        zip(GENEVAL_TAGS, (80, 99, 80, 94, 100, 100), strict=True)
    )
    texts = {r["prompt"] for r in records}
    assert (
        not {text for line in SEEN.splitlines() for text in line.split("|")} - texts
    )  # as others published them
    assert (geneval.GENEVAL_METADATA_FILE.parent / "LICENSE").read_text().count(
        "Copyright (c) 2023 Dhruba Ghosh"
    ) == 1


def test_own_prompts_are_checked_line_by_line(tmp_path):
    good = json.dumps(geneval.read_geneval_prompts()[0])
    (tmp_path / "own.jsonl").write_text(f"{good}\n{{\n")
    with pytest.raises(InputError, match="own.jsonl cannot be read .line 2 is not JSON"):
        geneval.read_geneval_prompts(tmp_path / "own.jsonl")
    (tmp_path / "own.jsonl").write_text(f"{good}\n")
    assert (
        geneval.read_geneval_prompts(tmp_path / "own.jsonl") == geneval.read_geneval_prompts()[:1]
    )
    with pytest.raises(InputError, match="none.jsonl is not a file"):
        geneval.read_geneval_prompts(tmp_path / "none.jsonl")


def thing(name, x, y, score=0.95, size=20):
    return DetectedObject(
        COCO_CLASSES.index(name), float(np.float32(score)), (x, y, x + size, y + size)
    )


def scene(record, spoil=False):
    """Objects that show a prompt, and their colours; or all but one of them."""
    found, paint = [], {}
    for clause in record["include"]:
        x = 40.0 * len(found)
        where = clause.get("position", [None])[0]
        x, y = {
            "left of": (-40.0, 0.0),
            "right of": (40.0, 0.0),
            "above": (0.0, -40.0),
            "below": (0.0, 40.0),
        }.get(where, (x, 0.0))
        for _ in range(clause["count"]):
            found.append(thing(clause["class"], x, y))
            paint[found[-1].box] = clause.get("color", "red")
            x += 40 if where is None else 0
    return (found[1:] if spoil else found), paint


def painted(paint):
    """A judge of colours that knows them."""
    return lambda mine, name: [paint[one.box] for one in mine]


@pytest.mark.parametrize("tag", GENEVAL_TAGS)
def test_every_prompt_can_be_met_and_missed(tag):
    for record in (r for r in geneval.read_geneval_prompts() if r["tag"] == tag):
        for spoil in (False, True):
            found, paint = scene(record, spoil)
            answer = geneval.geneval_verdict(
                geneval.select_objects(found, tag), record, painted(paint)
            )
            assert answer[0] is not spoil and bool(answer[1]) is spoil, (record, answer)


@pytest.mark.parametrize("tag,edge", [("single_object", 0.3), ("position", 0.3), ("counting", 0.9)])
def test_a_score_must_be_above_the_threshold(tag, edge):
    above = float(np.nextafter(np.float32(edge), np.float32(1)))
    assert geneval.select_objects([thing("dog", 0, 0, edge)], tag) == {}
    assert list(geneval.select_objects([thing("dog", 0, 0, above)], tag)) == ["dog"]


def test_no_more_than_sixteen_objects_are_counted():
    record = {
        "tag": "counting",
        "prompt": "",
        "include": [{"class": "dog", "count": 16}],
        "exclude": [{"class": "dog", "count": 17}],
    }
    crowd = [thing("dog", 30 * i, 0) for i in range(40)]
    assert geneval.geneval_verdict(geneval.select_objects(crowd, "counting"), record, None) == (
        True,
        "",
    )
    record["exclude"][0]["count"] = 16
    assert geneval.geneval_verdict(geneval.select_objects(crowd, "counting"), record, None) == (
        False,
        "expected dog<16, found 16",
    )


def see(image):
    """A detector that reads what was drawn: (class, place) in the first pixels."""
    rows = np.asarray(image)[0]
    return [
        thing(COCO_CLASSES[r], float(g), float(b))
        for r, g, b in rows.tolist()
        if (r, g, b) != (255, 255, 255)
    ]


def see_slowly(image):
    time.sleep(0.1)
    return see(image)


def colours(image, objects, name):
    """The colour of the drawn object is its row's number."""
    return [GENEVAL_COLOURS[int(one.box[1]) % 10] for one in objects]


def drawn_folder(folder):
    """Two images for each of twelve prompts, the first right."""
    for p, i in enumerate(range(0, 553, 50)):
        record = geneval.read_geneval_prompts()[i]
        found, paint = scene(record)
        for n in range(2):
            image = Image.new("RGB", (32, 8), (255, 255, 255))
            for k, one in enumerate(found[n:]):
                x = one.box[0] + 100
                y = one.box[1] // 10 * 10 + 100 + GENEVAL_COLOURS.index(paint[one.box])
                image.putpixel((k, 0), (one.label, int(x), int(y)))
            geneval.write_geneval_image(folder, p, n, record, image)
    return listed(folder)


def listed(folder):
    """Images in the layout, with what was asked for."""
    return [
        (file, json.loads((file.parents[1] / "metadata.jsonl").read_text()))
        for file in sorted(folder.glob("*/samples/*.png"))
    ]


def summary_script(path):
    """What GenEval's own summary reads: the columns tag, correct and metadata, and nothing else."""
    table = pd.read_json(path, orient="records", lines=True)
    tasks = table.groupby("tag", sort=False)["correct"].mean()
    return {
        "images": len(table),
        "prompts": table["metadata"].nunique(),
        "correct_images": table["correct"].mean(),
        "correct_prompts": table.groupby("metadata")["correct"].any().mean(),
        "tasks": tasks.to_dict(),
        "overall": np.mean(list(tasks)),
    }


def test_lines_are_read_by_a_script_like_geneval_s(tmp_path):
    images = drawn_folder(tmp_path / "images")
    lines = geneval.score_geneval_images(images, tmp_path / "results.jsonl", see, colours, "drawn")
    theirs = summary_script(tmp_path / "results.jsonl")
    ours = geneval.summarise_geneval(lines)
    assert theirs["images"] == ours["images"] == 24 and theirs["prompts"] == ours["prompts"] == 12
    assert (
        theirs["tasks"]
        == {tag: task["accuracy"] for tag, task in ours["tasks"].items()}
        == dict.fromkeys(GENEVAL_TAGS, 0.5)
    )
    assert theirs["overall"] == ours["overall"]["accuracy"]
    assert (theirs["correct_images"], theirs["correct_prompts"]) == (
        ours["correct_images"],
        ours["correct_prompts"],
    )
    for line in lines:
        assert isinstance(line["correct"], bool) and bool(line["reason"]) is not line["correct"]
        for boxes in json.loads(line["details"]).values():
            assert all(len(box) == 5 and box[4] > 0.3 for box in boxes)


KILLED = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
import test_geneval
from chunk_grpo.evaluation.geneval import score_geneval_images
images = test_geneval.listed(Path(sys.argv[1]))
score_geneval_images(images, sys.argv[2], test_geneval.see_slowly, test_geneval.colours, "drawn")
"""


def test_a_killed_scoring_goes_on_to_the_same_file(tmp_path):
    images = drawn_folder(tmp_path / "images")
    geneval.score_geneval_images(images, tmp_path / "whole.jsonl", see, colours, "drawn")
    killed = tmp_path / "killed.jsonl"
    here = Path(__file__).resolve().parent
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "images", killed, here, here.parent]
    )
    deadline = time.monotonic() + 240
    while not (killed.is_file() and killed.read_bytes().count(b"\n") >= 3):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = killed.read_bytes().count(b"\n")
    assert 3 <= before < 24
    with open(killed, "ab") as handle:
        handle.write(b'{"filename": "cut o')  # as if the kill had come while a line was written
    looked = []
    geneval.score_geneval_images(
        images, killed, lambda image: looked.append(1) or see(image), colours, "drawn"
    )
    assert killed.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(looked) == 24 - before
    assert geneval.score_geneval_images(
        images, killed, None, None, "drawn"
    ) == geneval.score_geneval_images(
        images, tmp_path / "whole.jsonl", None, None, "drawn"
    )  # nothing is left to do
    with pytest.raises(InputError, match="scorer 'drawn', not 'official: x'"):
        geneval.score_geneval_images(images, killed, see, colours, "official: x")


def test_more_images_of_a_prompt_can_be_added(tmp_path):
    folder = tmp_path / "images"
    geneval.score_geneval_images(
        drawn_folder(folder), tmp_path / "results.jsonl", see, colours, "drawn"
    )
    geneval.write_geneval_image(
        folder,
        5,
        2,
        geneval.read_geneval_prompts()[250],
        Image.new("RGB", (32, 8), (255, 255, 255)),
    )
    lines = geneval.score_geneval_images(
        listed(folder), tmp_path / "results.jsonl", see, colours, "drawn"
    )
    assert len(lines) == 25 and lines[12]["filename"].endswith("00005/samples/00002.png")
    assert (
        geneval.summarise_geneval(lines)["images"]
        == summary_script(tmp_path / "results.jsonl")["images"]
        == 25
    )


def test_bootstrap_covers_the_truth():
    rng = np.random.default_rng(0)
    hit = 0
    for _ in range(60):
        chances = rng.beta(1, 1, 60)  # true accuracy one half
        lines = [
            {"tag": "colors", "metadata": str(p), "correct": bool(rng.random() < c), "scorer": ""}
            for p, c in enumerate(chances)
            for _ in range(4)
        ]
        task = geneval.summarise_geneval(lines, draws=400)["tasks"]["colors"]
        hit += task["lo"] <= 0.5 <= task["hi"]
    assert hit >= 50  # of 60 intervals of 95 %; fewer than 50 has a chance of 2e-4


def test_verdicts_belong_to_images_however_their_folder_is_named(tmp_path, monkeypatch):
    """Relative, absolute, and moved together with the verdicts; also verdicts of earlier versions, with typed paths."""
    folder = tmp_path / "run"
    drawn_folder(folder / "images")
    lines = geneval.score_geneval_images(
        listed(folder / "images"), folder / "results.jsonl", see, colours, "drawn"
    )
    assert lines[0]["filename"] == "images/00000/samples/00000.png"
    monkeypatch.chdir(tmp_path)

    def score(images, results_file):
        """Score again, with a detector that fails if it is called."""
        return geneval.score_geneval_images(images, results_file, None, None, "drawn")

    assert score(listed(Path("run/images")), "run/results.jsonl") == lines
    for typed in (Path("run/images"), folder / "images"):
        old = [
            line | {"filename": str(file)}
            for line, (file, _) in zip(lines, listed(typed), strict=True)
        ]
        (folder / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
        assert score(listed(folder / "images"), folder / "old.jsonl") == old
    folder.rename(tmp_path / "moved")
    assert score(listed(Path("moved/images")), tmp_path / "moved/results.jsonl") == lines
    with pytest.raises(InputError, match="a verdict on .*, which is not among the images"):
        score(listed(Path("moved/images"))[1:], tmp_path / "moved/results.jsonl")


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"include": ["bench"]}, "`include` must be a list of objects"),
        ({"exclude": None}, "`exclude` must be a list of objects"),
        ({"exclude": {"class": "bench"}}, "`exclude` must be a list of objects"),
        ({"exclude": [3]}, "`exclude` must be a list of objects"),
        ({"position": None}, "`position` must be a position and the number of an earlier object"),
        ({"position": ["left of"]}, "`position` must be a position"),
        ({"position": "left of"}, "`position` must be a position"),
        ({"position": [["left of"], 0]}, "`position` must be a position"),
        (
            {"include": [{"class": "cow", "count": 1, "position": ["left of", -1]}]},
            "`position` must be a position and the number of an earlier object",
        ),
        (
            {"exclude": [{"class": "cow", "count": 2, "color": "red"}]},
            "`exclude` must be a list of objects with only class and count",
        ),
        ({"class": ["bench"]}, "`class` must be one of the 80 classes"),
    ],
)
def test_malformed_metadata_is_one_sentence(tmp_path, change, expected):
    clauses = [{"class": "bench", "count": 1}, {"class": "cow", "count": 1}]
    record = {"tag": "position", "prompt": "a cow left of a bench", "include": clauses}
    if change.keys() <= {"include", "exclude"}:
        record |= change
    else:
        clauses[1] |= change
    (tmp_path / "one.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(InputError, match=expected):
        geneval.read_geneval_prompts(tmp_path / "one.jsonl")
