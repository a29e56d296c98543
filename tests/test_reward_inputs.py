"""Rewards that take the record of each prompt, or compare the images of a group: in training, evaluation and benchmarks."""

import json
from pathlib import Path

import pytest
import torch
from served import serve_in_thread

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.files import read_json_lines, write_json
from chunk_grpo.evaluation import benchmarks, evaluate
from chunk_grpo.reward_serving import placement, server
from chunk_grpo.rewards import rewards
from chunk_grpo.runs import launch

OWN = '''
import json
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")


class Signs:
    """Scores the length of each record's target, and how many images of the group are darker."""

    def __call__(self, images, prompts, records, groups):
        assert [record["prompt"] for record in records] == list(prompts)
        light = [float(image.mean()) if hasattr(image, "mean") else 0.0 for image in images]
        with open(CALLS, "a") as file:
            file.write(json.dumps([list(groups), [r["target"] for r in records]]) + "\\n")
        return [
            len(record["target"]) + sum(x > y for y, other in zip(light, groups) if other == group)
            for x, group, record in zip(light, groups, records)
        ]

    def check_record(self, record):
        if not record.get("target"):
            raise ValueError("its record has no target")


def plain(images, prompts):
    return [float(len(prompt)) for prompt in prompts]


def weighted(images, prompts, weight):
    return [weight] * len(images)
'''
SIGNS = [
    {"prompt": "a red star", "target": "OPEN"},
    {"prompt": "a blue ring", "target": "NO"},
    {"prompt": "two stars", "target": "EXIT 7"},
]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a reward and a list of prompts with records, in which the test stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_signs.py").write_text(OWN)
    (tmp_path / "signs.jsonl").write_text("".join(json.dumps(sign) + "\n" for sign in SIGNS))
    return tmp_path


def small(folder: Path, reward: str = "Signs", **changes) -> settings.Settings:
    """The settings of a run of one iteration with two groups of three images."""
    prompts = str(folder / "signs.jsonl")
    chosen = {
        "prompts": prompts,
        "eval_prompts": prompts,
        "reward": f"{folder}/own_signs.py:{reward}",
        "eval_rewards": [],
        "iterations": 1,
        "updates_per_iteration": 1,
        "prompts_per_iteration": 2,
        "images_per_prompt": 3,
        "rollout_batch": 2,
        "eval_every": 0,
        "eval_count": 3,
        "eval_images": 3,
        "eval_steps": 2,
        "hybrid_split": 1,
        "threads": 1,
    }
    return settings.load_settings("pocket/tiny", chosen | changes)


def train(run: Path, run_settings: settings.Settings) -> None:
    """Train in this process."""
    note = {"status": "created", "settings": run_settings.model_dump(mode="json")}
    write_json(run / "run.json", note)
    launch.launch_run(run)


def calls(folder: Path) -> list[tuple[list[int], list[str]]]:
    """Return the groups and targets of every call so far, and forget them."""
    file = folder / "calls.jsonl"
    lines = [tuple(json.loads(line)) for line in file.read_text().splitlines()]
    file.unlink()
    return lines


def assert_whole_groups(lines: list, size: int) -> None:
    """Assert that each call has all images of each of its groups, and the targets of one prompt in each."""
    assert lines
    for groups, targets in lines:
        for group in set(groups):
            of_group = [t for g, t in zip(groups, targets, strict=True) if g == group]
            assert len(of_group) == size and len(set(of_group)) == 1


def test_records_and_whole_groups_reach_a_reward_in_training_evaluation_and_benchmarks(own):
    run = own / "run"
    train(run, small(own, eval_every=1))
    assert_whole_groups(calls(own), 3)  # of training and of its evaluations
    summary = evaluate.evaluate(run, trust=True, processes=1)
    found = calls(own)
    assert_whole_groups(found, 3)
    assert {target for _, targets in found for target in targets} == {s["target"] for s in SIGNS}
    (name,) = summary["rewards"]
    # In each group one image beats two, one beats one, one beats none: 1 on average.
    expected = 1 + sum(len(sign["target"]) for sign in SIGNS) / 3
    assert summary["rewards"][name]["base"]["mean"] == pytest.approx(expected)

    # A changed record of an own list is scored again; an unchanged one is not.
    signs = str(own / "signs.jsonl")
    out = benchmarks.run_benchmark(run, signs, samples=3, processes=1, trust=True)
    assert_whole_groups(calls(own), 3)
    benchmarks.run_benchmark(run, signs, samples=3, processes=1, trust=True)
    assert not (own / "calls.jsonl").exists()
    longer = [SIGNS[0] | {"target": "OPENED"}, *SIGNS[1:]]
    (own / "signs.jsonl").write_text("".join(json.dumps(sign) + "\n" for sign in longer))
    benchmarks.run_benchmark(run, signs, samples=3, processes=1, trust=True)
    again = calls(own)
    assert {target for _, targets in again for target in targets} == {"OPENED"}
    assert_whole_groups(again, 3)
    assert len(read_json_lines(out / "scores.jsonl")) >= 27


def test_credit_for_chunks_scores_whole_groups_too(own):
    """Completions from a state that the group shares are scored as copies of one image."""
    train(own / "run", small(own, credit_of="gain", shared_noise=True))
    found = calls(own)
    assert_whole_groups(found, 3)
    assert len(found) > 3


@pytest.mark.parametrize("place", ["worker", "url"])
def test_a_reward_in_another_process_gets_the_same(own, place):
    here = placement.load_placed_reward("own_signs.py:Signs")
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    of_image = [SIGNS[i] for i in (0, 0, 0, 1, 1, 2)]
    texts = [sign["prompt"] for sign in of_image]
    given = {"records": of_image, "groups": [4, 4, 4, 7, 7, 9]}
    expected = rewards.score_images("own_signs.py:Signs", here, images, texts, batch=3, **given)

    def compare(there):
        assert rewards.extra_inputs(there) == ("records", "groups")
        scores = rewards.score_images("own_signs.py:Signs", there, images, texts, batch=3, **given)
        assert torch.equal(scores, expected)
        rewards.check_prompts({"own": there}, texts, records=of_image)
        with pytest.raises(
            InputError, match="prompt 2 cannot be scored: .*its record has no target"
        ):
            rewards.check_prompts({"own": there}, ["a", "b"], records=[SIGNS[0], {"prompt": "b"}])

    if place == "worker":
        there = placement.load_placed_reward("own_signs.py:Signs", worker=True)
        compare(there)
        there.close()
    else:
        with serve_in_thread(server.create_scoring_app("own_signs.py:Signs", here)) as url:
            compare(placement.load_placed_reward("own_signs.py:Signs", url=url))


def test_the_two_copies_of_the_rule_agree():
    """The server's file imports nothing of the package, so it has its own copy."""
    cases = [
        lambda images, prompts: 0,
        lambda images, prompts, records: 0,
        lambda images, prompts, *, groups=None: 0,
        lambda images, prompts, **options: 0,
        lambda images, prompts, groups, /: 0,
        max,
    ]
    assert list(rewards.EXTRA_INPUTS) == list(server.EXTRA_INPUTS)
    for case in cases:
        assert rewards.extra_inputs(case) == server.extra_inputs(case)


def test_a_wrong_signature_or_a_missing_record_is_one_sentence_before_training(own):
    with pytest.raises(InputError, match="cannot be called with images, prompts and .*'weight'"):
        placement.load_placed_reward("own_signs.py:weighted")
    with pytest.raises(InputError, match="'weight'"):
        placement.load_placed_reward("own_signs.py:weighted", worker=True)
    (own / "signs.jsonl").write_text(json.dumps(SIGNS[0]) + '\n{"prompt": "a ring"}\n')
    with pytest.raises(
        InputError, match="`prompts` must hold .*prompt 2 cannot be scored: .*no target"
    ):
        train(own / "run", small(own))
    assert not (own / "run/metrics.jsonl").exists()


def test_changed_records_are_changed_prompts_when_a_run_is_resumed(own):
    from chunk_grpo.models.inputs import (
        check_and_hash_inputs,
        find_changed_input,
        fingerprint_inputs,
    )

    run_settings = small(own, reward="plain")
    known = check_and_hash_inputs(run_settings) | {"inputs": fingerprint_inputs(run_settings)}
    assert find_changed_input(run_settings, known) is None
    other = [sign | {"target": "X"} for sign in SIGNS]
    (own / "signs.jsonl").write_text("".join(json.dumps(sign) + "\n" for sign in other))
    assert find_changed_input(run_settings, known) == "prompts"
    changed = check_and_hash_inputs(run_settings)
    assert [name for name in known if name != "inputs" and known[name] != changed[name]] == [
        "records_sha256"
    ]
    assert "records_sha256" not in check_and_hash_inputs(settings.load_settings("pocket/tiny"))


def test_fields_that_are_added_to_a_list_are_noticed(own):
    from chunk_grpo.models.inputs import find_changed_input, fingerprint_inputs

    prompts = [sign["prompt"] for sign in SIGNS]
    (own / "plain.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    lists = {"prompts": str(own / "plain.jsonl"), "eval_prompts": str(own / "plain.jsonl")}
    run_settings = settings.load_settings("pocket/tiny", lists)
    known = {"inputs": fingerprint_inputs(run_settings)}
    assert find_changed_input(run_settings, known) is None
    (own / "plain.jsonl").write_text("".join(json.dumps(sign) + "\n" for sign in SIGNS))
    assert find_changed_input(run_settings, known) == "prompts"
    older = {name: value for name, value in known["inputs"].items() if "records" not in name}
    assert find_changed_input(run_settings, {"inputs": older}) is None


def test_a_run_is_not_resumed_with_fields_that_were_added_to_its_list(own):
    from chunk_grpo.runs import run_folder

    prompts = [sign["prompt"] for sign in SIGNS]
    (own / "plain.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    lists = {"prompts": str(own / "plain.jsonl"), "eval_prompts": str(own / "plain.jsonl")}
    run_settings = settings.load_settings("pocket/tiny", lists)
    run_folder.create_run(run_settings, own / "run")
    run_folder.create_run(run_settings, own / "run", resume=True)
    (own / "plain.jsonl").write_text("".join(json.dumps(sign) + "\n" for sign in SIGNS))
    with pytest.raises(InputError, match="`prompts` must be the same when a run is resumed"):
        run_folder.create_run(run_settings, own / "run", resume=True)
