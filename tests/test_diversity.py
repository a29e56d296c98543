"""The diversity of a study's images, measured by research/diversity.py."""

import json
import subprocess
import sys
from pathlib import Path

import diversity
import pytest
import torch
from PIL import Image

from chunk_grpo import InputError
from chunk_grpo.pocket.clip import PocketCLIP
from chunk_grpo.pocket.world import Scene, SceneObject, render_scene

ROOT = Path(__file__).resolve().parents[1]


def test_pairs_of_equal_and_of_perpendicular_embeddings():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert diversity.prompt_diversity(torch.stack([one, one])) == 0
    assert diversity.prompt_diversity(torch.stack([one, other])) == 1
    assert diversity.prompt_diversity(torch.stack([one, one, other])) == pytest.approx(2 / 3)
    assert diversity.prompt_diversity(torch.stack([one, -one])) == 2
    with pytest.raises(InputError, match="at least 2"):
        diversity.prompt_diversity(one[None])


@pytest.fixture
def trial(tmp_path):
    """A trial whose base drew two different images of each prompt, and whose trained model drew the same one twice."""
    folder = tmp_path / "runs" / "crd-0"
    red = render_scene(Scene("", (SceneObject("star", "red", 16, 16, 12),)))
    blue = render_scene(Scene("", (SceneObject("ring", "blue", 48, 48, 12),)))
    lines = []
    for arm, images in (("base", (red, blue)), ("plain", (red, red))):
        (folder / "evaluation" / arm).mkdir(parents=True)
        for n in range(4):
            name = f"{arm}/{n:05d}.png"
            picture = images[n % 2]
            if not isinstance(picture, Image.Image):
                picture = Image.fromarray(picture)
            picture.save(folder / "evaluation" / name)
            # The second prompt has a wrong image before training.
            is_correct = arm == "plain" or n < 3
            scores = {"pocket-geneval": float(is_correct)}
            lines.append({"arm": arm, "prompt_index": n // 2, "file": name, "scores": scores})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "evaluation" / "scores.jsonl").write_text(text)
    (folder / "row.json").write_text(json.dumps({"arm": "crd", "seed": 0}))
    return folder


def test_a_trial_that_lost_its_diversity(trial):
    found = diversity.trial_diversity(trial, PocketCLIP())
    for means in (found["diversity"], found["of_correct"]):
        assert means["base"] > 0.1 and means["plain"] == pytest.approx(0, abs=1e-5)
    assert found["of_correct"]["prompts"] == 1


def test_a_trial_without_a_prompt_that_stays_correct(trial):
    file = trial / "evaluation" / "scores.jsonl"
    file.write_text(file.read_text().replace("1.0", "0.0"))
    found = diversity.trial_diversity(trial, PocketCLIP())
    assert found["of_correct"] == {"prompts": 0, "base": None, "plain": None}


def test_lines_of_trials_are_kept_and_added(trial, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diversity, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["diversity.py", "mine", "--runs", str(trial.parent)])
    file = tmp_path / "results" / "mine.jsonl"
    file.parent.mkdir()
    line = {
        "arm": "crd",
        "seed": 7,
        "diversity": {"base": 0.5, "plain": 0.4},
        "of_correct": {"prompts": 0, "base": None, "plain": None},
    }
    old_line = {"arm": "crd", "seed": 8, "diversity": {"base": 0.5, "plain": 0.4}}
    file.write_text(json.dumps(line) + "\n" + json.dumps(old_line) + "\n")
    assert diversity.main() == 0 and "3 trials measured" in capsys.readouterr().out
    assert diversity.main() == 0 and "3 trials measured" in capsys.readouterr().out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # A line of an earlier version stays if its run is not here, and is replaced if it is.
    assert [(line["arm"], line["seed"]) for line in lines] == [("crd", 7), ("crd", 8), ("crd", 0)]
    assert lines[:2] == [line, old_line] and lines[2]["of_correct"]["prompts"] == 1
    del lines[2]["of_correct"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diversity.main() == 0
    assert json.loads(file.read_text().splitlines()[2])["of_correct"]["prompts"] == 1


def test_a_study_without_runs_gets_a_sentence(tmp_path):
    command = [sys.executable, str(ROOT / "research/diversity.py"), "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no runs/studies/nothing" in done.stderr
