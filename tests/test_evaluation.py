"""An evaluation as a user has it: killed and gone on with, shared by processes, beside an older one, its intervals."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import synthetic
import torch
import typer
from commands import command, environment, server
from typer.testing import CliRunner

from chunk_grpo import InputError
from chunk_grpo.cli import main, training
from chunk_grpo.core import settings
from chunk_grpo.core.files import check_outside_runs, read_json, write_json
from chunk_grpo.core.statistics import bootstrap_category_means
from chunk_grpo.evaluation import evaluate, parts, run_images
from chunk_grpo.models import prompt_embeds, trainable
from chunk_grpo.planning.plan import describe_counts
from chunk_grpo.runs import run_folder
from chunk_grpo.training import checkpoints

SMALL = {
    "eval_images": 2,
    "eval_steps": 4,
    "hybrid_split": 2,
    "rollout_batch": 3,
    "threads": 1,
    "steps": 5,
    "chunks": "2,2",
    "eval_rewards": ["tiny_rewards:counted_red", "pocket-geneval"],
}
TOTAL = 4 * 2 * 5  # images: prompts, images of each, arms
PARTS = 5 * 3  # of three images, an arm's last one of two


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run whose weights are the base's, a little larger."""
    run = tmp_path_factory.mktemp("evaluation") / "run"
    prompts = ("a red circle", "a blue square", "two stars", "a green star and a red circle")
    (run.parent / "four.txt").write_text("\n".join(prompts))
    run_settings = settings.load_settings(
        "pocket/tiny", SMALL | {"eval_prompts": str(run.parent / "four.txt")}
    )
    write_json(
        run / "run.json",
        {"settings": run_settings.model_dump(mode="json"), "status": "finished", "processes": 1},
    )
    model = trainable.load_trainable_policy(
        "pocket",
        resolution=64,
        max_tokens=run_settings.max_tokens,
        lora_rank=run_settings.lora_rank,
        lora_targets=run_settings.lora_targets,
    )
    with torch.no_grad():
        for p in model.trained:
            p.mul_(1.02)
    trainable.save_trained_weights(model, run / "final")
    return run


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of it, and a file that counts what is scored."""
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tests = Path(__file__).parent  # for the rewards of the tests, in processes too
    monkeypatch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{tests.parent}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield shutil.copytree(finished, tmp_path / "run")
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def forks():
    """Processes that start with the imports done."""
    return server()


def evaluate_counting(run, counted):
    """What a child does."""
    os.environ["COUNTED"] = counted
    evaluate.evaluate(run, trust=True)


def kept(run):
    """The parts that a killed evaluation has left, and the files of their images."""
    parts = {}
    for folder in (run / "evaluation.begun").glob("*"):
        found = evaluate.read_parts(folder)
        parts |= {
            part: [folder / record["file"] for record in records] for part, records in found.items()
        }
    return parts


def kill_after(child, pid, run, count):
    """Kill a child with SIGKILL once so many parts are there; the images of these parts with their times."""
    end = time.monotonic() + 300
    while len(kept(run)) < count:
        assert child.is_alive() if hasattr(child, "is_alive") else child.poll() is None, (
            "it ended before it was killed"
        )
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    child.join() if hasattr(child, "join") else child.wait()
    files = [file for part in kept(run).values() for file in part]
    return {f"{file.parent.name}/{file.name}": file.stat().st_mtime_ns for file in files}


def scores(run):
    """Everything that an evaluation measured, byte for byte."""
    return (run / "evaluation/scores.jsonl").read_bytes(), read_json(
        run / "evaluation/summary.json"
    )


@pytest.mark.slow
def test_an_evaluation_killed_twice_is_that_which_ran_through(run, forks, tmp_path):
    whole = shutil.copytree(run, tmp_path / "whole")
    summary = evaluate.evaluate(whole, trust=True)
    assert len((tmp_path / "counted").read_text().splitlines()) == TOTAL
    (tmp_path / "counted").unlink()
    older = evaluate.evaluate(run, changes=["eval_images=1"], trust=True)
    (tmp_path / "counted").unlink()
    for count in (3, 8):
        child = forks.Process(target=evaluate_counting, args=(run, str(tmp_path / "counted")))
        child.start()
        times = kill_after(child, child.pid, run, count)
        assert count <= len(kept(run)) < PARTS
        assert run_folder.read_evaluation_summary(run) == older, (
            "the older one stays until the new one stands"
        )
    said = []
    assert evaluate.evaluate(run, said.append, trust=True) == summary and scores(run) == scores(
        whole
    )
    assert said[0].startswith("evaluation: resumed, ") and said[-1].startswith(
        f"evaluation: {TOTAL} of {TOTAL} images"
    )
    now = {
        f"{file.parent.name}/{file.name}": file.stat().st_mtime_ns
        for file in (run / "evaluation").rglob("*.png")
    }
    assert len(now) == TOTAL and times.items() <= now.items(), "what was kept was not drawn again"
    assert (
        TOTAL <= len((tmp_path / "counted").read_text().splitlines()) <= TOTAL + 2 * 3
    )  # a part in flight a kill
    assert sorted(file.name for file in run.glob("evaluation*")) == ["evaluation"]


@pytest.mark.slow
def test_two_processes_killed_twice_give_the_same(run, tmp_path):
    whole = shutil.copytree(run, tmp_path / "whole")
    summary = evaluate.evaluate(whole, trust=True)
    (tmp_path / "counted").unlink()
    for count in (2, 7):
        child = subprocess.Popen(
            command("evaluate", run, "--processes", "2", "--trust"),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        kill_after(child, child.pid, run, count)
        time.sleep(2)  # its children end with it
        assert len(kept(run)) < PARTS and not (run / "evaluation").exists()
    assert evaluate.evaluate(run, processes=2, trust=True) == summary and scores(run) == scores(
        whole
    )
    assert TOTAL <= len((tmp_path / "counted").read_text().splitlines()) <= TOTAL + 2 * 2 * 3


def test_the_number_of_processes_changes_no_bit(run, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)  # what a process finds where nobody chose
    by_two = shutil.copytree(run, tmp_path / "two")
    changes = ["threads=0", "eval_rewards=[pocket-clip]"]
    # a reward in a worker gets the threads that are here when it is loaded
    seen = []
    load = parts.load_scorers
    monkeypatch.setattr(
        parts, "load_scorers", lambda *of: seen.append(torch.get_num_threads()) or load(*of)
    )
    for place, processes in ((run, 1), (by_two, 2)):
        evaluate.evaluate(
            place, changes=changes, arms={"base": 0, "plain": None}, processes=processes, trust=True
        )
    assert (seen, torch.get_num_threads()) == ([1], 2) and scores(run) == scores(by_two)
    images = sorted(file.relative_to(run) for file in (run / "evaluation").rglob("*.png"))
    assert len(images) == 2 * 4 * 2
    assert [(run / image).read_bytes() for image in images] == [
        (by_two / image).read_bytes() for image in images
    ]


def test_as_trained_is_compared_with_the_base_sampled_likewise(run):
    summary = evaluate.evaluate(run, trust=True)
    assert summary["arms"] == {
        "base": 0,
        "plain": None,
        "hybrid": 2,
        "base-as-trained": 0,
        "as-trained": None,
    }
    assert summary["as_trained"] == {
        "sampler": "flow",
        "steps": 5,
        "eta": 0.7,
        "shift": 3.0,
        "resolution": 64,
    }
    row = summary["rewards"]["tiny_rewards:counted_red"]
    for arm, base in (("plain", "base"), ("hybrid", "base"), ("as-trained", "base-as-trained")):
        assert row[f"{arm}-base"]["mean"] == pytest.approx(
            row[arm]["mean"] - row[base]["mean"], abs=1e-12
        )
    assert (
        row["base"]["mean"] != row["base-as-trained"]["mean"] and "base-as-trained-base" not in row
    )
    assert set(summary["rewards"]["pocket-geneval"]["preserved"]) == {
        "plain",
        "hybrid",
        "as-trained",
    }
    settings = evaluate.evaluation_settings(run, ())
    forwards = 4 * 2 * (3 * 4 + 2 * 5)
    said = dict(describe_counts(settings))["evaluation at the end"]
    assert said.startswith(f"{TOTAL} images = 4 prompts x 2 x 5 arms, {forwards} forward passes")


def test_a_kill_between_the_two_moves_loses_nothing(run, monkeypatch):
    """The older evaluation is moved aside, the new one is not in its place yet: the same call only moves it."""
    evaluate.evaluate(run, changes=["eval_images=1"], trust=True)

    def killed(folder, place):
        place.rename(folder.with_name("older"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "replace_evaluation", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate.evaluate(run, trust=True)
    counted = os.path.getsize(os.environ["COUNTED"])
    summary = evaluate.evaluate(run, trust=True)
    assert (
        os.path.getsize(os.environ["COUNTED"]) == counted
        and run_folder.read_evaluation_summary(run) == summary
    )


def test_a_second_evaluation_is_refused_at_once_and_harms_nothing(run):
    with (
        parts.evaluation_lock(run),
        pytest.raises(InputError, match="being evaluated by another process"),
    ):
        evaluate.evaluate(run, trust=True)
    assert not os.path.exists(os.environ["COUNTED"]) and not (run / "evaluation.begun").exists()
    assert (
        evaluate.evaluate(run, trust=True)["n_prompts"] == 4
        and not (run / "evaluation.begun").exists()
    )


def test_prompts_that_the_reward_cannot_score_are_named_before_any_is_drawn(run, tmp_path):
    (tmp_path / "odd.txt").write_text("a red star\n" * 40 + "zebras fly over the moon\n")
    with pytest.raises(
        InputError,
        match="`eval_prompts` must hold prompts that the reward .* prompt 41 cannot be scored",
    ):
        evaluate.evaluate(
            run, changes=[f"eval_prompts={tmp_path / 'odd.txt'}"], processes=1, trust=True
        )
    assert not os.path.exists(os.environ["COUNTED"])


def test_a_part_that_was_cut_off_is_drawn_again(run):
    settings = evaluate.evaluation_settings(run, ())
    arms = evaluate.ode_arms(settings) | evaluate.AS_TRAINED_ARMS
    prompts = evaluate.read_prompts(settings.eval_prompts)
    folder = evaluate.unfinished_evaluation_folder(run, settings, arms, prompts)
    folder.mkdir(parents=True)
    (folder / "parts-0.jsonl").write_text('{"part": ["base", 0, 3], "records": [')
    assert evaluate.read_parts(folder) == {}
    assert evaluate.evaluate(run, trust=True)["n_prompts"] == 4


def test_another_version_of_a_reward_starts_another_evaluation(run, tmp_path):
    """Parts that two versions of a user's reward scored must not be mixed."""
    settings = evaluate.evaluation_settings(run, ())
    arms = evaluate.ode_arms(settings)

    def folder(name):
        """Return the folder of an unfinished evaluation with this reward."""
        changed = settings.model_copy(update={"reward": name, "eval_rewards": []})
        return evaluate.unfinished_evaluation_folder(run, changed, arms, ["a star"])

    file = tmp_path / "own_reward.py"
    file.write_text("def bright(images, prompts):\n    return images.mean((1, 2, 3))\n")
    first = folder(f"{file}:bright")
    assert folder(f"{file}:bright") == first
    file.write_text("def bright(images, prompts):\n    return images.amax((1, 2, 3))\n")
    assert folder(f"{file}:bright") != first
    # Without a user's code, evaluations that earlier versions began are resumed.
    identity = {
        "settings": settings.model_copy(
            update={"reward": "incompressibility", "eval_rewards": []}
        ).model_dump(mode="json", exclude={"threads"}),
        "arms": arms,
        "prompts": ["a star"],
        "weights": run_images.hash_trained_weights(run),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    assert folder("incompressibility").name == digest[:12]


@pytest.mark.slow
def test_checkpoints_of_an_unfinished_run_are_evaluated_beside_one_another(run, monkeypatch):
    """The weights of a checkpoint give the scores that they would give as final weights."""
    final = evaluate.evaluate(run, trust=True)
    run_settings = run_folder.read_run_settings(run)
    run_folder.update_run_json(run, run_id="one", status="running")
    run_info = read_json(run / "run.json")
    identity = {"run_id": "one", "settings": run_info["settings"]}
    names = ("max_tokens", "lora_rank", "lora_targets")
    options = {name: getattr(run_settings, name) for name in names}
    model = trainable.load_trainable_policy("pocket", resolution=64, **options)
    with torch.no_grad():
        for p in model.trained:
            p.mul_(1.02)
    rest = {"seconds": 1.0, "seconds_cpu": 1.0, "ema_step": 0}
    for iteration, factor in ((2, 1.0), (4, 1.1)):
        weights = {str(i): p.detach() * factor for i, p in enumerate(model.trained)}
        checkpoints.write_checkpoint(run, iteration, {"weights": weights}, rest, identity=identity)
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "evaluation")

    with pytest.raises(InputError, match="evaluate one of its checkpoints with `checkpoint`"):
        evaluate.evaluate(run, trust=True)
    with pytest.raises(InputError, match="`checkpoint` must be .*, one of 2, 4; got 3"):
        evaluate.evaluate(run, trust=True, checkpoint=3)
    assert sorted(file.name for file in run.glob("evaluation*")) == []

    first = evaluate.evaluate(run, trust=True, checkpoint=2)
    assert first == final | {"checkpoint": 2}
    words = ["evaluate", str(run), "--checkpoint", "4", "--processes", "2", "--trust"]
    answer = CliRunner().invoke(main.app, words)
    assert answer.exit_code == 0, answer.output
    second = run_folder.read_evaluation_summary(run, 4)
    name = "tiny_rewards:counted_red"
    assert second["rewards"][name]["base"] == first["rewards"][name]["base"]
    assert second["rewards"][name]["plain"] != first["rewards"][name]["plain"]
    assert run_folder.read_evaluation_summary(run, 2) == first
    assert run_folder.read_evaluation_summary(run) is None
    folders = ["evaluation-000002", "evaluation-000004"]
    assert sorted(file.name for file in run.glob("evaluation*")) == folders
    page = (run / "evaluation-000004/report.html").read_text()
    assert "The weights are those after 4 iterations." in page

    # A benchmark has a folder per checkpoint, too.
    monkeypatch.chdir(run.parent)
    Path("two.txt").write_text("a red star\na blue ring\n")
    for checkpoint in ("2", "4"):
        words = ["evaluate", str(run), "eval_rewards=[]", "--benchmark", "two.txt", "--no-report"]
        options = ["--checkpoint", checkpoint, "--rewards", "pocket-clip", "--processes", "1"]
        answer = CliRunner().invoke(main.app, [*words, *options, "--trust"])
        assert answer.exit_code == 0, answer.output
    scores_by_checkpoint = [
        read_json(run / f"benchmarks/two-{checkpoint}/summary.json")["rewards"]["pocket-clip"]
        for checkpoint in ("000002", "000004")
    ]
    assert scores_by_checkpoint[0]["base"] == scores_by_checkpoint[1]["base"]
    assert scores_by_checkpoint[0]["plain"] != scores_by_checkpoint[1]["plain"]
    with pytest.raises(InputError, match="`--out` must be outside .*evaluation-000004"):
        check_outside_runs(run / "evaluation-000004/mine", "`--out`")


def test_training_stands_whatever_becomes_of_its_evaluation(tmp_path, capsys):
    run = synthetic.write(tmp_path / "run", evaluated=False)  # its weights are missing
    with pytest.raises(typer.Exit) as ended:
        training._finish_training(run, report=True)
    said = capsys.readouterr()
    assert ended.value.exit_code == 2 and "finished: 240 s of training" in said.out
    assert (
        "holds no trained weights" in said.err
        and f"continue with: chunk-grpo evaluate {run}" in said.err
    )
    assert run_folder.read_run_info(run)["status"] == "finished"


def test_an_interrupt_of_an_evaluation_says_how_to_go_on(run, monkeypatch, capsys):
    from chunk_grpo.cli import evaluation as commands_

    def interrupted(*words, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate", interrupted)
    with pytest.raises(typer.Exit) as ended:
        commands_.evaluate_with_progress(run, ["eval_images=4"])
    assert ended.value.exit_code == 130
    assert f"continue with: chunk-grpo evaluate {run} eval_images=4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_refuses_says_why(run):
    with pytest.raises(InputError, match="evaluation: a sampling process failed: .*nowhere"):
        evaluate.evaluate(run, changes={"eval_rewards": ["nowhere:red"]}, processes=2, trust=True)
    assert not (run / "evaluation").exists()


def test_intervals_over_categories_and_images_hold_the_truth():
    """200 simulated evaluations of six unequal categories: the interval holds the truth of the mean of their means."""
    rates = np.array([0.95, 0.8, 0.6, 0.7, 0.25, 0.3])
    sizes = [4, 4, 8, 8, 16, 40]
    kind = np.repeat(np.arange(6), sizes)
    random = np.random.default_rng(3)
    held = []
    for _ in range(200):
        chance = random.beta(3 * rates[kind], 3 * (1 - rates[kind]))
        found = bootstrap_category_means(
            random.random((len(kind), 4)) < chance[:, None], kind, draws=500
        )
        held.append(found["lo"] <= rates.mean() <= found["hi"])
    assert 0.90 <= np.mean(held) <= 0.99


def test_the_text_encoders_are_loaded_once_for_all_parts(run, monkeypatch, tmp_path):
    """Five arms of three parts each; training had encoded none of the prompts."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    loads = []
    load_encoders = prompt_embeds._load_encoders
    monkeypatch.setattr(
        prompt_embeds, "_load_encoders", lambda policy: loads.append(1) or load_encoders(policy)
    )
    evaluate.evaluate(run, processes=1, trust=True)
    assert len(loads) == 1
