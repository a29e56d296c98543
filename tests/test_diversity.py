"""The diversity of a study's images, measured by research/diversity.py."""

import json
import subprocess
import sys
from pathlib import Path

import diversity
import pytest
import torch
from PIL import Image

from chunk_grpo.pocket.clip import PocketCLIP
from chunk_grpo.pocket.world import Scene, SceneObject, render_scene

ROOT = Path(__file__).resolve().parents[1]


def test_pairs_of_equal_and_of_perpendicular_embeddings():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert diversity.prompt_diversity(torch.stack([one, one])) == 0
    assert diversity.prompt_diversity(torch.stack([one, other])) == 1
    assert diversity.prompt_diversity(torch.stack([one, one, other])) == pytest.approx(2 / 3)
    assert diversity.prompt_diversity(torch.stack([one, -one])) == 2


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
            lines.append({"arm": arm, "prompt_index": n // 2, "file": name})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "evaluation" / "scores.jsonl").write_text(text)
    (folder / "row.json").write_text(json.dumps({"arm": "crd", "seed": 0}))
    return folder


def test_a_trial_that_lost_its_diversity(trial):
    found = diversity.trial_diversity(trial, PocketCLIP())
    assert found["base"] > 0.1 and found["plain"] == pytest.approx(0, abs=1e-5)


def test_lines_of_trials_are_kept_and_added(trial, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diversity, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["diversity.py", "mine", "--runs", str(trial.parent)])
    file = tmp_path / "results" / "mine.jsonl"
    file.parent.mkdir()
    file.write_text('{"arm": "crd", "seed": 7, "diversity": {"base": 0.5, "plain": 0.4}}\n')
    assert diversity.main() == 0 and "2 trials measured" in capsys.readouterr().out
    assert diversity.main() == 0 and "2 trials measured" in capsys.readouterr().out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines] == [("crd", 7), ("crd", 0)]


def test_a_study_without_runs_gets_a_sentence(tmp_path):
    command = [sys.executable, str(ROOT / "research/diversity.py"), "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no runs/studies/nothing" in done.stderr
