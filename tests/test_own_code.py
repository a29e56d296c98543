"""Code of one's own that settings name: found where the user stands, never because a run's folder has it."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import call, environment

from chunk_grpo import InputError
from chunk_grpo.core.imports import import_callable
from chunk_grpo.core.settings import list_code_paths, load_settings
from chunk_grpo.core.user_code import find_code
from chunk_grpo.rewards.rewards import score_images
from chunk_grpo.theory.chunks import ChunkRule, is_code_path

FEW = [
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_images=1",
    "prompts_per_iteration=1",
    "images_per_prompt=2",
    "updates_per_iteration=1",
    "eval_steps=2",
    "hybrid_split=1",
    "steps=3",
    "chunks=steps",
    "train_chunks=all",
]
RED = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"


def installed(folder: Path, *words, **more) -> subprocess.CompletedProcess:
    """The installed command, whose path has neither the tests nor the working folder."""
    script = Path(sys.executable).with_name("chunk-grpo")
    clean = {k: v for k, v in environment(**more).items() if k != "PYTHONPATH"}
    return subprocess.run(
        [script, *map(str, words)],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_installed_command_finds_ones_own_reward_in_training_and_evaluation(tmp_path):
    (tmp_path / "my_rewards.py").write_text(RED)
    (tmp_path / "few.txt").write_text("a red star\na blue ring\n")
    few = [*FEW, f"eval_prompts={tmp_path / 'few.txt'}"]
    told = installed(
        tmp_path, "train", "pocket/demo", *few, "reward=my_rewards:red", "--out", "one"
    )
    assert told.returncode == 0 and (tmp_path / "one/report.html").is_file(), told.stderr
    assert (
        "my_rewards:red"
        in json.loads((tmp_path / "one/evaluation/summary.json").read_text())["rewards"]
    )
    (tmp_path / "away").mkdir()
    told = call(
        "evaluate",
        tmp_path / "one",
        "eval_seed=1",
        "--no-report",
        cwd=tmp_path / "away",
        PYTHONPATH="",
    )
    assert told.returncode == 2 and "my_rewards" in told.stderr and "Traceback" not in told.stderr
    # A run from elsewhere: its reward is not taken from the folder in which the user stands, though Python looks there.
    note = json.loads((tmp_path / "one/run.json").read_text())
    (tmp_path / "one/run.json").write_text(json.dumps(note | {"run_id": "another"}))
    (tmp_path / "my_rewards.py").write_text("open('ran', 'w')\n" + RED)
    told = call(
        "evaluate", "one", "eval_seed=2", "--no-report", "--trust", cwd=tmp_path, PYTHONPATH=""
    )
    assert told.returncode == 2 and "my_rewards" in told.stderr and not (tmp_path / "ran").exists()


def test_what_the_user_names_is_found_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "mine_here.py").write_text(RED)
    before = list(sys.path)
    with pytest.raises(InputError, match="No module named 'mine_here'"):
        import_callable("mine_here:red", allow_working_folder=False)
    monkeypatch.setattr(
        sys, "path", ["", str(tmp_path), *before]
    )  # as `python -m` and a shell have it
    with pytest.raises(InputError, match="No module named 'mine_here'"):
        import_callable("mine_here:red", allow_working_folder=False)
    with pytest.raises(InputError, match="absolute path of the file"):
        import_callable("mine_here.py:red", allow_working_folder=False)
    sys.path[:] = before
    assert (
        import_callable("mine_here:red").__name__
        == import_callable("mine_here.py:red").__name__
        == "red"
    )
    assert (
        import_callable(f"{tmp_path}/mine_here.py:red", allow_working_folder=False).__name__
        == "red"
    )
    assert sys.path == before
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path}")
    del sys.modules["mine_here"]
    assert import_callable("mine_here:red", allow_working_folder=False).__name__ == "red"


@pytest.mark.parametrize(
    "text, words",
    [
        ("def red(images, prompts)\n    return 1\n", ["SyntaxError", "line 1"]),
        ("x = 1\n1 / 0\n", ["ZeroDivisionError", "line 2", "division by zero"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit", "line 2"]),
        ("import no_such_package_at_all\n", ["ModuleNotFoundError", "no_such_package_at_all"]),
        ("raise ValueError('one\\ntwo')\n", ["ValueError", "one"]),
        ("red = 3\n", ["function or class"]),
        ("\0", ["null bytes"]),
    ],
)
@pytest.mark.parametrize("ending", ["", ".py"])
def test_a_faulty_file_is_one_sentence_and_is_forgotten(tmp_path, monkeypatch, text, words, ending):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty_file.py").write_text(text)
    before = list(sys.path)
    sys.modules.pop("faulty_file", None)
    modules = set(sys.modules)
    with pytest.raises(InputError) as caught:
        import_callable(f"faulty_file{ending}:red", "chunks")
    said = str(caught.value)
    assert (
        said.startswith("`chunks` must be package.module:name or file.py:name") and "\n" not in said
    )
    assert all(
        word in said for word in [f"got 'faulty_file{ending}:red'"] * (text != "red = 3\n") + words
    ), said
    assert sys.path == before and (
        text == "red = 3\n"
        or not [name for name in set(sys.modules) - modules if "faulty_file" in name]
    )


@pytest.mark.parametrize(
    "path", [":f", ".x:f", "..:f", "name=x", "name", "a b:f", "math:", "math:1", "", ":"]
)
def test_what_is_no_path_is_refused_with_what_is_allowed(path):
    with pytest.raises(InputError) as caught:
        import_callable(path)
    assert (
        str(caught.value) == f"`reward` must be package.module:name or file.py:name; got {path!r}"
    )


@pytest.mark.parametrize("field", ["family", "method", "chunks", "surrogate"])
def test_code_in_a_module_whose_name_ends_in_a_digit_is_recorded(field, tmp_path, monkeypatch):
    (tmp_path / "mine2.py").write_text("def made(): ...\n")
    monkeypatch.chdir(tmp_path)
    named = load_settings("pocket/tiny").model_copy(update={field: "mine2:made"})
    assert list_code_paths(named) == ["mine2:made"]
    assert [*find_code(named)] == [f"{field}: mine2:made"]


@pytest.mark.parametrize("path", ["pkg.v2:Rank", "a b/m.py:f", "a\nb.py:f", "m\u00e9thode:Rang"])
def test_code_is_what_can_be_imported(path):
    assert is_code_path(path) and ChunkRule.parse(path, 6).kind == "code"


@pytest.mark.parametrize(
    "text", ["clip", "dppo:1e-6", "asymmetric:0.1:0.2", "tree:2@0,3", "seeds:4", "adaptive:3", ":f"]
)
def test_a_setting_with_a_colon_is_not_always_code(text):
    assert not is_code_path(text)


def test_what_no_file_has_is_refused():
    with pytest.raises(InputError, match="FileNotFoundError"):
        import_callable("nowhere.py:f")
    with pytest.raises(InputError, match="a function or class"):
        import_callable("math:pi")


def test_an_async_reward_is_refused_in_one_sentence(recwarn):
    """Beside it Python would print that nobody awaited the reward."""

    async def reward(images, prompts):
        return [0.0]

    with pytest.raises(
        InputError, match="later must return one number per image; it returned a coroutine"
    ):
        score_images("later", reward, torch.zeros(1, 3, 8, 8), ["a red star"])
    gc.collect()
    assert not [str(said.message) for said in recwarn]
