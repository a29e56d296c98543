"""A prompt that a list names again is the same prompt: it has more images, and intervals are over different prompts."""

import json

import numpy as np
import pytest
import torch

from chunk_grpo.core import statistics
from chunk_grpo.evaluation import benchmarks, evaluate, geneval, judged

PROMPTS, COPIES = 60, 4


def records(copies: int, images: int, named: bool = True, seed: int = 0) -> list[dict]:
    """Base and trained images of 60 prompts, each listed so often and with so many images a listing."""
    draw = np.random.default_rng(seed)
    means = draw.random(PROMPTS)
    out = []
    gains = 0.1 * draw.normal(size=PROMPTS)
    for arm in ("base", "plain"):
        for copy in range(copies):
            for p in range(PROMPTS):
                for i in range(images):
                    score = means[p] + (arm == "plain") * gains[p] + 0.01 * draw.normal()
                    out.append(
                        {
                            "arm": arm,
                            "prompt_index": copy * PROMPTS + p,
                            "image_index": i,
                            "category": {},
                            "prompt": f"prompt {p}" if named else f"prompt {copy} {p}",
                            "scores": {"x": score},
                        }
                    )
    return out


@pytest.mark.parametrize("arm", ["base", "plain", "plain-base"])
def test_listing_prompts_four_times_is_like_four_images_of_each(arm):
    listed = evaluate.summarise_evaluation(records(COPIES, 1))["x"][arm]
    images = evaluate.summarise_evaluation(records(1, COPIES))["x"][arm]
    rows = evaluate.summarise_evaluation(records(COPIES, 1, named=False))["x"][arm]
    assert listed["n"] == images["n"] == PROMPTS and listed["se"] == pytest.approx(
        images["se"], rel=0.1
    )
    assert rows["n"] == PROMPTS * COPIES and rows["se"] < 0.6 * listed["se"]
    assert listed["mean"] == pytest.approx(rows["mean"])  # of all images, as before
    assert evaluate.compare_arms(records(COPIES, 1), ["base", "plain"], "x")[arm][
        "se"
    ] == pytest.approx(images["se"], rel=0.1)


def test_prompts_listed_unequally_often_have_intervals_over_prompts():
    some = [
        r for r in records(COPIES, 1) if r["prompt_index"] < PROMPTS + 30
    ]  # 30 of 60 stand twice
    found = evaluate.summarise_evaluation(some)["x"]
    assert found["base"]["n"] == PROMPTS
    assert found["base"]["mean"] == pytest.approx(
        np.mean([r["scores"]["x"] for r in some if r["arm"] == "base"])
    )
    scores = {}
    for r in some:
        if r["arm"] == "base":
            scores.setdefault(r["prompt"], []).append(r["scores"]["x"])
    draw = np.random.default_rng(1)
    rows = list(scores.values())
    means = []
    for _ in range(2000):  # the bootstrap over prompts, by hand
        chosen = [rows[i] for i in draw.integers(PROMPTS, size=PROMPTS)]
        means.append(np.concatenate(chosen).mean())
    assert found["base"]["se"] == pytest.approx(np.std(means), rel=0.1)
    assert found["base"]["lo"] < found["base"]["mean"] < found["base"]["hi"]


def test_intervals_cover_the_truth_where_prompts_are_repeated():
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        means = draw.normal(size=PROMPTS)
        rows = [means[p] + 0.1 * draw.normal(size=1 + 3 * (p % 2)) for p in range(PROMPTS)]
        found = statistics.bootstrap_category_means(rows, draws=500)
        hits += found["lo"] <= 0 <= found["hi"]
    assert 0.88 <= hits / 200 <= 0.99


def test_prompts_of_different_categories_stay_apart_and_lists_without_repeats_keep_their_numbers():
    plain = records(1, 2)
    alone = evaluate.summarise_evaluation(plain)["x"]["base"]
    values = np.array(
        [
            [r["scores"]["x"] for r in plain if r["arm"] == "base" and r["prompt_index"] == p]
            for p in range(PROMPTS)
        ]
    )
    assert alone == statistics.bootstrap_category_means(values)
    sorted_in = [dict(r, category={"x": "ab"[r["prompt_index"] >= PROMPTS]}) for r in records(2, 1)]
    assert evaluate.summarise_evaluation(sorted_in)["x"]["base"]["n"] == 2 * PROMPTS


def test_lost_and_gained_images_are_clustered_by_prompt():
    def shares(named):
        rows = [
            dict(r, scores={"x": float(r["scores"]["x"] > 0.5)}) for r in records(COPIES, 1, named)
        ]
        return evaluate.preservation_rates(rows, "plain", "x")["images"]["lost"]

    listed = shares(True)
    rows = shares(False)
    assert (
        listed["count"] == rows["count"] and listed["n"] < rows["n"] and listed["se"] > rows["se"]
    )


def test_genevals_table_counts_a_prompt_once():
    shipped = geneval.read_geneval_prompts()[::10]
    draw = np.random.default_rng(0)

    def lines(copies):
        return [
            {
                "tag": r["tag"],
                "prompt": r["prompt"],
                "metadata": json.dumps(r | {"copy": c}),
                "scorer": "dice",
                "correct": bool(len(r["prompt"]) % 2) if draw.random() < 0.9 else False,
            }
            for c in range(copies)
            for r in shipped
        ]

    assert geneval.summarise_geneval(lines(4))["prompts"] == len(shipped)
    four, one = (geneval.summarise_geneval(lines(copies))["overall"]["se"] for copies in (4, 1))
    assert four > 0.6 * one


def test_a_summary_says_how_often_prompts_are_listed():
    assert evaluate.count_prompts(["a", "b", "a"]) == {"n_prompts": 2, "n_listed": 3}
    assert evaluate.count_prompts(["a", "b"]) == {"n_prompts": 2}


def test_scores_of_geneval_from_a_list_with_repeats_are_paired_by_prompt(tmp_path, monkeypatch):
    """As flow_grpo ships GenEval: every line four times."""
    shipped = geneval.read_geneval_prompts()[::40]
    file = tmp_path / "metadata.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in shipped * 4))
    task = benchmarks.load_benchmark_task("geneval", file, 1)
    draw = np.random.default_rng(0)
    chance = {r["prompt"]: draw.random() for r in shipped}

    def scored(images, out, *_, **__):
        return [
            {"correct": bool(draw.random() < chance[record["prompt"]] ** 4)} for _, record in images
        ], {}

    monkeypatch.setattr(geneval, "evaluate_geneval", scored)
    arms = {"base": tmp_path, "plain": tmp_path}
    inputs = benchmarks.ScoringInputs(tools={"detector": ""}, log=print)
    found = task.score(arms, tmp_path, inputs)
    assert found["overall"]["base"]["n"] == found["overall"]["plain-base"]["n"] == len(shipped)


def test_categories_of_questions_are_clustered_by_prompt():
    questions = (judged._Proposition(1, "is it red?", (), "attribute"),)
    items = [
        judged.JudgedPrompt(f"{i}", f"prompt {i % 5}", propositions=questions) for i in range(20)
    ]
    rows = [
        {
            "prompt_index": i,
            "prompt": items[i].prompt,
            "answered": [i % 2],
            "objects": {"dpg": [i % 2]},
        }
        for i in range(20)
    ]
    assert judged._category_shares(items, rows)["attribute"]["answered"]["n"] == 5


def test_the_standard_error_of_an_iteration_counts_a_prompt_once():
    values = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once = statistics.mean_se(values)
    assert statistics.mean_se(values, range(60)) == once
    assert statistics.mean_se(values.repeat(4), [*range(60)] * 4) == pytest.approx(once)
    assert statistics.mean_se(values.repeat(4))[1] < 0.6 * once[1]
