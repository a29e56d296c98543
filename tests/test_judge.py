"""A judge that fails or talks nonsense, runs that are killed: the table is the same, or a sentence says why not."""

import json
import signal
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest
from commands import environment
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from stub_judge import NAME, number, serve, three_scores, yes_or_no

from chunk_grpo import InputError
from chunk_grpo.core.files import read_json_lines
from chunk_grpo.evaluation import judged
from chunk_grpo.evaluation.judge import Judge, _image_url, parse_rating, parse_scale_scores

ARMS = {"base": 10, "plain": 11}  # grey of the images
QUICK = dict(max_concurrency=6, timeout=20.0, retries=8, pause=0.01)


def pictures(folder, names):
    """One grey image for each name, for both arms."""
    for arm, grey in ARMS.items():
        (folder / arm).mkdir(parents=True)
        Image.new("L", (2, 2), grey).save(folder / arm / "first.png")
        content = (folder / arm / "first.png").read_bytes()
        for name in names:
            (folder / arm / f"{name}.png").write_bytes(content)
    return {arm: folder / arm for arm in ARMS}


@pytest.fixture
def small(tmp_path):
    """A DPG-Bench of 12 prompts with 3 questions, and its images: 72 requests for two arms."""
    rows = [
        (
            f"item{n}",
            f"thing {n}",
            p,
            {1: "0", 2: "1", 3: "2"}[p],
            f"{kind} - x (y)",
            f"thing {n}, part {p}?",
        )
        for n in range(12)
        for p, kind in ((1, "entity"), (2, "attribute"), (3, "relation"))
    ]
    pd.DataFrame(rows, columns=judged.DPG_COLUMNS).to_csv(tmp_path / "dpg_bench.csv", index=False)
    return tmp_path / "dpg_bench.csv", pictures(
        tmp_path / "images", [f"item{n}" for n in range(12)]
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout of WISE with 1,000 invented things, and images of both arms."""
    home = tmp_path_factory.mktemp("wise")
    (home / "WISE_legacy/data").mkdir(parents=True)
    for part, low, high in zip(
        judged.WISE_FILE_STEMS, (1, 401, 701), (400, 700, 1000), strict=True
    ):
        rows = [
            {
                "prompt_id": n,
                "Prompt": f"thing {n}",
                "Explanation": "as it is",
                "Subcategory": "things",
            }
            for n in range(low, high + 1)
        ]
        (home / f"WISE_legacy/data/{part}_rewrite.json").write_text(json.dumps(rows))
    return home, pictures(home / "images", range(1, 1001))


def known_wiscore(n: int, grey: int) -> float:
    """What `three_scores` is worth."""
    return (0.7 * ((n + grey) % 3) + 0.2 * (n % 2) + 0.1 * (n // 7 % 3)) / 2


def test_faults_on_the_way_do_not_change_the_table(small, tmp_path):
    kinds = [
        "500",
        "503",
        "429",
        "html",
        "cut",
        "other",
        "list",
        "drop",
        "sleep",
        "mumble",
        "empty",
    ]

    def fault(name, before):  # each question meets another fault first, every third one two of them
        n = number(name) * 3 + int(name.split("part ")[1][0]) + int(name.split()[0])
        return kinds[(n + before) % len(kinds)] if before < 1 + (n % 3 == 0) else None

    with serve(yes_or_no) as stub:
        clean = judged.evaluate_dpg(
            *small, Judge(stub.url, "asked-for", **QUICK), tmp_path / "clean"
        )
        straight = [name for name in stub.order]
    with serve(yes_or_no, fault) as stub:
        judge = Judge(stub.url, "asked-for", **QUICK | {"timeout": 1.0})
        rough = judged.evaluate_dpg(*small, judge, tmp_path / "rough")
        assert set(stub.done) == set(kinds)
        assert stub.order[-72:] != straight
        assert stub.bodies[0]["model"] == "asked-for" and stub.bodies[0]["temperature"] == 0
    assert (
        rough == clean
        and clean["judge"]["judges"] == {NAME: 72}
        and clean["judge"]["unparsed"] == 0
    )
    assert (tmp_path / "rough/summary.json").read_bytes() == (
        tmp_path / "clean/summary.json"
    ).read_bytes()
    assert (tmp_path / "rough/scores.jsonl").read_bytes() == (
        tmp_path / "clean/scores.jsonl"
    ).read_bytes()
    kept = read_json_lines(tmp_path / "rough/answers.jsonl")
    unread = [record for record in kept if record["parsed"] is None]
    assert len(kept) == 72 + len(unread) and {r["text"] for r in unread} == {"Hard to say.", ""}

    expected = []  # what the answers are worth, by hand
    for n in range(12):
        yes = [yes_or_no(f"thing {n}, part {p}?", 10) == "yes" for p in (1, 2, 3)]
        expected.append((yes[0] + (yes[0] and yes[1]) + all(yes)) / 3)
    assert clean["overall"]["base"]["mean"] == pytest.approx(sum(expected) / 12)


SCRIPT = """
import sys
from pathlib import Path
from chunk_grpo.evaluation import judged
from chunk_grpo.evaluation.judge import Judge
source, images, out, url, pause = sys.argv[1:]
arms = {arm: Path(images) / arm for arm in ("base", "plain")}
evaluate = judged.evaluate_dpg if source.endswith(".csv") else judged.evaluate_wise
evaluate(Path(source), arms, Judge(url, "asked-for", max_concurrency=6, pause=float(pause)), Path(out))
"""


def start(source, images, out, url, pause=1.0) -> subprocess.Popen:
    """A benchmark in a process of its own."""
    words = [sys.executable, "-c", SCRIPT, source, images["base"].parent, out, url, pause]
    return subprocess.Popen(
        [str(w) for w in words], env=environment(), stderr=subprocess.PIPE, text=True
    )


def kill_at(count, file, process):
    """SIGKILL where the file has so many lines."""
    for _ in range(6000):
        if file.is_file() and file.read_bytes().count(b"\n") >= count:
            process.kill()
            assert process.wait() == -signal.SIGKILL and not file.with_name("summary.json").exists()
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    raise AssertionError(f"{file} did not reach {count} lines")


def same(one, other):
    """The tables of two folders are the same, to the byte."""
    return all(
        (one / name).read_bytes() == (other / name).read_bytes()
        for name in ("scores.jsonl", "summary.json")
    )


def test_a_killed_run_goes_on_to_the_same_table(small, tmp_path):
    file = tmp_path / "killed/answers.jsonl"
    gate = threading.Event()

    def fault(
        name, before
    ):  # a third thing is mumbled about at first; after 30 requests the judge falls silent
        if sum(stub.came.values()) > 30:
            gate.wait(120)
        return "mumble" if number(name) == 3 and not before else None

    with serve(yes_or_no, fault) as stub:
        kill_at(25, file, start(*small, tmp_path / "killed", stub.url))
        gate.set()
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(
            b"".join(lines[:24]) + lines[24][:60]
        )  # as if killed in the middle of a line
        judge = Judge(stub.url, "asked-for", **QUICK)
        judged.evaluate_dpg(*small, judge, tmp_path / "killed")
        twice = (
            judge.max_concurrency + len(lines) - 24
        )  # what was under way when it was killed, and the lines cut off
        assert sum(stub.came.values()) <= 72 + 6 + twice
    with serve(yes_or_no) as stub:
        judged.evaluate_dpg(*small, Judge(stub.url, "asked-for", **QUICK), tmp_path / "whole")
    assert same(tmp_path / "killed", tmp_path / "whole")
    read = [record["id"] for record in read_json_lines(file) if record["parsed"] is not None]
    assert len(read) == len(set(read)) == 72


@pytest.mark.slow
def test_wise_killed_twice_goes_on_to_the_same_table(checkout, tmp_path):
    home, images = checkout
    file = tmp_path / "killed/answers.jsonl"
    with serve(three_scores) as stub:
        for count in (300, 900):
            kill_at(count, file, start(home, images, tmp_path / "killed", stub.url))
        judge = Judge(stub.url, "asked-for", max_concurrency=6)
        again = judged.evaluate_wise(home, images, judge, tmp_path / "killed")
        assert (
            sum(stub.came.values()) <= 2000 + 2 * judge.max_concurrency
        )  # only what was under way is asked twice
    with serve(three_scores) as stub:
        whole = judged.evaluate_wise(
            home, images, Judge(stub.url, "asked-for", max_concurrency=6), tmp_path / "whole"
        )
        assert sum(stub.came.values()) == 2000
    assert again == whole and same(tmp_path / "killed", tmp_path / "whole")
    ids = [record["id"] for record in read_json_lines(file)]
    assert len(ids) == len(set(ids)) == 2000

    for arm, grey in ARMS.items():
        scores = [known_wiscore(n, grey) for n in range(1, 1001)]
        assert whole["overall"][arm]["mean"] == pytest.approx(sum(scores) / 1000)
        assert whole["arms"][arm]["categories"]["time"]["mean"] == pytest.approx(
            sum(scores[400:567]) / 167
        )
    difference = whole["overall"]["plain-base"]
    assert difference["n"] == 1000 and difference["lo"] < difference["mean"] < difference["hi"]
    assert list(whole["judge"]["judges"]) == [NAME]
    assert (
        sum(part["n"] for arm in whole["arms"].values() for part in arm["categories"].values())
        == 2000
    )
    assert whole["label"].startswith(
        f"not comparable with the paper: the judge is {NAME} instead of gpt-4o-2024-05-13"
    )


def test_answers_to_another_rubric_are_never_mixed_in(checkout, tmp_path):
    home, images = checkout
    one = {"base": images["base"]}
    (tmp_path / "own.txt").write_text("Prompt: {prompt}. Score it.")
    with serve(three_scores) as stub:
        judge = Judge(stub.url, "asked-for", max_concurrency=6)
        found = judged.evaluate_wise(home, one, judge, tmp_path / "out")
        with pytest.raises(InputError, match="belongs to another text; use a new folder"):
            judged.evaluate_wise(home, one, judge, tmp_path / "out", rubric=tmp_path / "own.txt")
        assert (
            sum(stub.came.values()) == 1000
            and json.loads((tmp_path / "out/summary.json").read_text()) == found
        )


@pytest.mark.slow
def test_an_interrupt_ends_a_run_that_waits_for_its_judge(small, tmp_path):
    with serve(yes_or_no, lambda name, before: "500" if number(name) > 5 else None) as stub:
        process = start(*small, tmp_path / "out", stub.url, pause=60.0)
        while stub.done["500"] < 6:  # all six pause then, for a minute
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(timeout=50) != 0 and time.monotonic() - began < 30
        assert "KeyboardInterrupt" in process.stderr.read()
    assert len(read_json_lines(tmp_path / "out/answers.jsonl")) == 18


def test_nonsense_is_counted_and_said(small, tmp_path):
    with serve(lambda text, grey: "The image is a poem.") as stub:
        judge = Judge(stub.url, "asked-for", **QUICK)
        found = judged.evaluate_dpg(*small, judge, tmp_path / "out")
        assert set(stub.came.values()) == {3} and sum(stub.came.values()) == 3 * 72
        assert judged.evaluate_dpg(*small, judge, tmp_path / "out") == found
        assert sum(stub.came.values()) == 3 * 72
    assert (
        found["judge"]["unparsed"] == found["judge"]["questions"] == 72
        and found["judge"]["refused"] == 0
    )
    assert found["overall"] == {"base": None, "plain": None, "plain-base": None}
    assert found["arms"]["base"]["between"] == [0.0, 1.0]
    assert [arm["unparsed"] for arm in found["arms"].values()] == [12, 12]
    assert len(read_json_lines(tmp_path / "out/answers.jsonl")) == 3 * 72


def test_some_nonsense_leaves_the_rest_in_pairs(small, tmp_path):
    def fault(name, before):
        if name == "11 " + judged.DPG_QUESTION.format(question="thing 4, part 2?"):
            return "mumble"
        return "filter" if number(name) == 5 and name.startswith("10") else None

    with serve(yes_or_no, fault) as stub:
        found = judged.evaluate_dpg(*small, Judge(stub.url, "asked-for", **QUICK), tmp_path / "out")
        assert stub.done == {
            "mumble": 3,
            "filter": 3,
        }  # a refusal of each of three questions, asked once
    assert found["judge"]["unparsed"] == 4 and found["judge"]["refused"] == 3
    assert {arm: part["unparsed"] for arm, part in found["arms"].items()} == {"base": 1, "plain": 1}
    assert {name: part["n"] for name, part in found["overall"].items()} == {
        "base": 11,
        "plain": 11,
        "plain-base": 10,
    }
    assert found["preserved"]["plain"]["objects"]["lost"]["n"] <= 10


def test_a_key_is_needed_used_and_never_written(small, tmp_path, monkeypatch):
    with serve(yes_or_no, key="sk-right-4711") as stub:
        judge = Judge(
            stub.url,
            "asked-for",
            **QUICK | {"key_variable": "JUDGE_KEY_OF_THE_TESTS", "max_concurrency": 1},
        )
        monkeypatch.delenv("JUDGE_KEY_OF_THE_TESTS", raising=False)
        with pytest.raises(
            InputError, match="environment variable JUDGE_KEY_OF_THE_TESTS is not set"
        ):
            judged.evaluate_dpg(*small, judge, tmp_path / "out")
        assert not stub.came and not (tmp_path / "out").exists()

        monkeypatch.setenv("JUDGE_KEY_OF_THE_TESTS", "sk-wrong-4712")
        with pytest.raises(
            InputError, match="rejects the request .status 401: .*Incorrect API key"
        ) as stopped:
            judged.evaluate_dpg(*small, judge, tmp_path / "out")
        assert (
            stub.came == {"401": 1}
            and "4712" not in str(stopped.value)
            and "[the key]" in str(stopped.value)
        )

        monkeypatch.setenv("JUDGE_KEY_OF_THE_TESTS", "sk-right-4711")
        assert judged.evaluate_dpg(*small, judge, tmp_path / "out")["judge"]["unparsed"] == 0
        written = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
        assert len(written) > 1000 and b"4711" not in written and b"4712" not in written


@pytest.mark.parametrize(
    "fault, words",
    [
        ("503", "gave no answer about .* in 3 requests; the last failed with status 503"),
        ("unknown", "rejects the request .status 404: .*the model does not exist"),
    ],
)
def test_a_judge_that_goes_away_stops_the_run_and_what_it_said_is_kept(
    small, tmp_path, fault, words
):
    away = {"now": True}
    with serve(
        yes_or_no, lambda name, before: fault if away["now"] and number(name) > 5 else None
    ) as stub:
        judge = Judge(stub.url, "asked-for", **QUICK | {"retries": 2})
        with pytest.raises(InputError, match=words):
            judged.evaluate_dpg(*small, judge, tmp_path / "out")
        kept = len(read_json_lines(tmp_path / "out/answers.jsonl"))
        assert kept == 18 and not (tmp_path / "out/summary.json").exists()
        assert stub.done[fault] <= judge.max_concurrency * 3
        away["now"], asked = False, sum(stub.came.values())
        found = judged.evaluate_dpg(*small, judge, tmp_path / "out")
        assert sum(stub.came.values()) - asked == 72 - kept
    with serve(yes_or_no) as stub:
        assert (
            judged.evaluate_dpg(*small, Judge(stub.url, "asked-for", **QUICK), tmp_path / "clean")
            == found
        )


def test_nobody_there(small, tmp_path):
    with pytest.raises(
        InputError, match="gave no answer about .* in 2 requests; the last failed with ConnectError"
    ):
        judged.evaluate_dpg(
            *small, Judge("http://127.0.0.1:9/v1", "m", retries=1, pause=0.01), tmp_path / "out"
        )


def test_another_image_or_judge_is_another_question(small, tmp_path):
    file, images = small
    with serve(yes_or_no) as stub:
        judge = Judge(stub.url, "asked-for", **QUICK)
        judged.evaluate_dpg(file, {"base": images["base"]}, judge, tmp_path / "out")
        with pytest.raises(InputError, match="belongs to another model or options"):
            judged.evaluate_dpg(
                file, {"base": images["base"]}, Judge(stub.url, "better", **QUICK), tmp_path / "out"
            )
        Image.new("L", (2, 2), 99).save(images["base"] / "item3.png")
        with pytest.raises(InputError, match="about base/item3/. that belongs to another image"):
            judged.evaluate_dpg(file, {"base": images["base"]}, judge, tmp_path / "out")
        (images["base"] / "item3.png").unlink()
        with pytest.raises(InputError, match="lacks 1 of 12 images, first item3.png"):
            judged.evaluate_dpg(file, {"base": images["base"]}, judge, tmp_path / "out")
        assert sum(stub.came.values()) == 36


@given(
    st.tuples(*[st.integers(0, 2)] * 3),
    st.permutations(list(judged.WISCORE_SCALES)),
    st.sampled_from([": ", " = ", ":** ", '": ']),
    st.sampled_from(["\n", ", ", ";\n- ", " | "]),
)
def test_scores_are_read_in_any_order_and_dress(numbers, order, colon, between):
    scores = dict(zip(judged.WISCORE_SCALES, numbers, strict=True))
    text = between.join(f"{name.capitalize()}{colon}{scores[name]}" for name in order)
    assert parse_scale_scores(text, judged.WISCORE_SCALES, 2) == scores
    text += between + f"Realism{colon}{(scores['realism'] + 1) % 3}"
    assert parse_scale_scores(text, judged.WISCORE_SCALES, 2) is None


@given(st.text(alphabet='consitery: 0123/.*\n"aemlhRAC-', max_size=80))
def test_whatever_a_judge_says_is_scores_or_nothing(text):
    found = parse_scale_scores(text, judged.WISCORE_SCALES, 2)
    assert (
        found is None
        or set(found) == set(judged.WISCORE_SCALES)
        and set(found.values()) <= {0, 1, 2}
    )


@pytest.mark.parametrize(
    "text, rating",
    [
        ("Score (0-10): 7", 7),
        ("**Score** (0 – 10) = 7.5", 7.5),
        ("Score [0 to 10]: 7/10", 7),
        ("Score 0-10: 7", 7),
        ("Score: 10", 10),
        ("Score: 7.", 7),
        ("Score: 6-7", None),
        ("Score: 6 - 7.", None),
        ("Score: 6 to 7 points", None),
        ("Score: 8 - 3 people, as the prompt says", 8),
        ("Score: 7 – 2 hands are wrong", 7),
        ("Score (10-100): 70", None),
        ("Score (0-100): 70", None),
        ("Score (1-5): 4", None),
    ],
)
def test_the_scale_before_a_rating_is_not_the_rating(text, rating):
    assert parse_rating(text, "Score", 0, 10) == rating


def test_a_changed_image_is_sent_as_it_is_now(tmp_path):
    file = tmp_path / "image.bmp"
    urls = []
    for size in (2, 3):
        Image.new("RGB", (size, size)).save(file)
        urls.append(_image_url(file))
    assert urls[0] != urls[1] and _image_url(file) == urls[1]
