"""Runs that nobody watches: what a failed reward costs, what a scheduler is told, and what others get of a run."""

import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from accelerate.tracking import TensorBoardTracker
from commands import run
from safetensors.torch import load_file
from small_runs import metrics, trained, write
from typer.testing import CliRunner

from chunk_grpo import InputError, export_run
from chunk_grpo.cli import main
from chunk_grpo.core import files, machine, settings
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.machine import TrainingFailed
from chunk_grpo.evaluation.judge import parse_rating
from chunk_grpo.models import trainable
from chunk_grpo.pocket.clip import PocketCLIP
from chunk_grpo.reward_serving.client import (
    RewardUnavailable,
    TransientError,
    _parse_response,
    call_with_retries,
    send_request,
)
from chunk_grpo.runs import launch, run_folder
from chunk_grpo.training import credit_assignment, groups, trainer, update
from chunk_grpo.training import metrics as training_metrics

FEW = {
    "reward": "tiny_rewards:broken_while",
    "iterations": 4,
    "eval_every": 0,
    "checkpoint_every": 100,
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """The file that breaks the reward while it exists."""
    file = tmp_path / "broken"
    monkeypatch.setenv("BROKEN_WHILE", str(file))
    return file


def train_until_broken(world, run, broken, iteration, callbacks=()):
    """Train with a reward that fails after an iteration; a checkpoint of iteration 2 must be there, and no other."""

    def break_reward(line, settings):
        if line["iteration"] == iteration:
            broken.write_text("")

    with pytest.raises(TrainingFailed, match="no ink is left"):
        launch.train(world / "s.yaml", run, callbacks=[break_reward, *callbacks])
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["000002"]


@pytest.mark.parametrize(
    ("text", "error_class"), [("", TrainingFailed), ("away", RewardUnavailable)]
)
def test_a_failed_reward_costs_only_the_iteration_in_flight(tmp_path, broken, text, error_class):
    """A checkpoint is written although none was due, and the resumed run equals one that nothing stopped."""
    world = write(tmp_path, **FEW)
    whole = launch.train(world / "s.yaml", tmp_path / "whole")

    def break_after_two(line, settings):
        if line["iteration"] == 2:
            broken.write_text(text)

    with pytest.raises(error_class, match="no ink is left" if not text else "is away"):
        launch.train(world / "s.yaml", tmp_path / "run", callbacks=[break_after_two])
    folders = sorted(folder.name for folder in (tmp_path / "run/checkpoints").iterdir())
    assert folders == ["000002"]
    assert "scoring failed; the checkpoint of iteration 2 is written" in (
        (tmp_path / "run/train.log").read_text()
    )
    assert read_json(tmp_path / "run/run.json")["status"] == "failed"

    broken.unlink()
    resumed = launch.train(world / "s.yaml", tmp_path / "run", resume=True)
    assert metrics(resumed) == metrics(whole) and trained(resumed) == trained(whole)


def test_completions_that_cannot_be_scored_cost_only_the_iteration_in_flight(
    tmp_path, broken, monkeypatch
):
    """Credit per chunk scores further images after the rollout; the reward fails on those of the third iteration."""
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red", "method": "chunk-gain"})
    score_images = credit_assignment.score_images

    def score_unless_broken(**arguments):
        if broken.exists():
            raise ValueError("no ink is left")
        return score_images(**arguments)

    monkeypatch.setattr(credit_assignment, "score_images", score_unless_broken)

    train_until_broken(world, tmp_path / "run", broken, iteration=2)


def test_embeddings_that_fail_cost_only_the_iteration_in_flight(tmp_path, broken, monkeypatch):
    """Diversity embeds the images by a reward's model; it fails on those of the third iteration."""
    embed = PocketCLIP.embed

    def embed_unless_broken(scorer, images):
        if broken.exists():
            raise RuntimeError("no ink is left")
        return embed(scorer, images)

    monkeypatch.setattr(PocketCLIP, "embed", embed_unless_broken)
    world = write(tmp_path, **FEW | {"reward": "pocket-clip", "diversity": True})

    train_until_broken(world, tmp_path / "run", broken, iteration=2)


@pytest.mark.parametrize("iterations", [2, 4])  # the evaluation at the end of the run, and another
@pytest.mark.parametrize("reads_score", [False, True])
def test_a_reward_that_fails_in_an_evaluation_costs_nothing(
    tmp_path, broken, iterations, reads_score
):
    """The update before the evaluation is kept, and the resumed run repeats the evaluation.

    A callback that needs the missing score does not prevent the checkpoint.
    """
    changes = {"reward": "tiny_rewards:red", "eval_rewards": ["tiny_rewards:broken_while"]}
    world = write(tmp_path, **FEW | changes | {"eval_every": 2, "iterations": iterations})
    whole = launch.train(world / "s.yaml", tmp_path / "whole")

    def read_score(line, settings):
        if line["iteration"] == 2:
            line["eval_tiny_rewards:broken_while"]

    callbacks = [read_score] if reads_score else []
    train_until_broken(world, tmp_path / "run", broken, iteration=1, callbacks=callbacks)
    log = (tmp_path / "run/train.log").read_text()
    assert ("a callback failed too: KeyError" in log) == reads_score

    broken.unlink()
    resumed = launch.train(world / "s.yaml", tmp_path / "run", resume=True)
    assert "the evaluation after iteration 2, which did not finish, is repeated" in (
        (resumed / "train.log").read_text()
    )
    assert trained(resumed) == trained(whole) and metrics(resumed) == metrics(whole)
    # The checkpoint agrees with the log, so resuming once more changes nothing and evaluates nothing.
    last = sorted((resumed / "checkpoints").iterdir())[-1]
    assert (last / "metrics.jsonl").read_text() == (resumed / "metrics.jsonl").read_text()


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_an_evaluation_that_cannot_be_sampled_costs_nothing(tmp_path, broken, monkeypatch, ema):
    """It may need more memory than an update. The checkpoint has the trained weights, not their average."""
    changes = {"reward": "tiny_rewards:red", "eval_every": 2, "ema": ema}
    world = write(tmp_path, **FEW | changes)
    whole = launch.train(world / "s.yaml", tmp_path / "whole")
    sample_images = training_metrics.sample_images

    def sample_unless_broken(**options):
        if broken.exists():
            raise torch.OutOfMemoryError("no ink is left")
        return sample_images(**options)

    monkeypatch.setattr(training_metrics, "sample_images", sample_unless_broken)
    train_until_broken(world, tmp_path / "run", broken, iteration=1)
    log = (tmp_path / "run/train.log").read_text()
    assert "the evaluation failed; the checkpoint of iteration 2 is written" in log

    broken.unlink()
    resumed = launch.train(world / "s.yaml", tmp_path / "run", resume=True)
    assert trained(resumed) == trained(whole) and metrics(resumed) == metrics(whole)


def test_scores_that_overflow_cost_only_the_iteration_in_flight(tmp_path, monkeypatch):
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    check = trainer.check_rollout_is_finite

    def reject_third(rollout, iteration, method):
        if iteration == 2:
            raise InputError("`reward` must be finite")
        check(rollout, iteration, method)

    monkeypatch.setattr(trainer, "check_rollout_is_finite", reject_third)
    with pytest.raises(InputError, match="`reward` must be finite"):
        launch.train(world / "s.yaml", tmp_path / "run")
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["000002"]


def test_a_clock_that_is_set_back_leaves_a_readable_run(tmp_path, monkeypatch):
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    now = launch.time.time
    monkeypatch.setattr(launch.time, "time", lambda: now() - 3000 * len(calls))
    calls: list[int] = []
    run = launch.train(world / "s.yaml", tmp_path / "run", callbacks=[lambda *_: calls.append(1)])
    assert run_folder.read_run_info(run)["seconds"] >= 0


def test_a_restart_does_not_undo_the_end_of_a_run(tmp_path):
    """An alarm in `stop_on` ends the run, although the processes may be restarted once."""
    (tmp_path / "stop_at.py").write_text(
        "from chunk_grpo.training.callbacks import Callback, StopTraining\n\n\n"
        "class StopAtTwo(Callback):\n"
        "    def on_log(self, state, line):\n"
        "        if line['iteration'] == 2:\n"
        "            raise StopTraining('two are enough')\n"
    )
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    words = ["--processes", "2", "--max-restarts", "1", "--callback", "stop_at.py:StopAtTwo"]
    said = run(
        "train", world / "s.yaml", *words, "--out", "run", "--no-report", cwd=tmp_path, code=2
    )
    assert "two are enough" in said
    assert [line["iteration"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def test_a_callback_that_fails_costs_nothing(tmp_path):
    """The iteration before it is finished, so a checkpoint of it is written."""
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    whole = launch.train(world / "s.yaml", tmp_path / "whole")

    def fail(line, settings):
        if line["iteration"] == 3:
            raise OSError("no network")

    with pytest.raises(TrainingFailed, match="no network"):
        launch.train(world / "s.yaml", tmp_path / "run", callbacks=[fail])
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["000003"]
    resumed = launch.train(world / "s.yaml", tmp_path / "run", resume=True)
    assert trained(resumed) == trained(whole) and metrics(resumed) == metrics(whole)


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (groups, "sample_trajectories", ["000002"]),
        (update, "accumulate_gradients", ["000001"]),  # two updates per iteration
        (update, "step_optimizer", []),
    ],
)
def test_another_error_costs_no_finished_iteration(tmp_path, monkeypatch, module, name, expected):
    """An error before the first step leaves the weights of the last iteration, one in a step may not."""
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    whole = getattr(module, name)
    calls = []

    def fail_third(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return whole(*arguments, **options)

    monkeypatch.setattr(module, name, fail_third)
    with pytest.raises(TrainingFailed, match="out of memory"):
        launch.train(world / "s.yaml", tmp_path / "run")
    assert [folder.name for folder in (tmp_path / "run").glob("checkpoints/*")] == expected


def test_a_tracker_that_is_down_costs_only_its_curves(tmp_path, monkeypatch):
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red", "tracker": "tensorboard"})

    def fail(*arguments, **options):
        raise ConnectionError("no answer")

    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    monkeypatch.setattr(TensorBoardTracker, "finish", fail)
    run = launch.train(world / "s.yaml", tmp_path / "run")
    assert read_json(run / "run.json")["status"] == "finished"
    log = (run / "train.log").read_text()
    assert "warning: tensorboard did not take iteration 1: ConnectionError: no answer" in log
    assert "warning: tensorboard could not finish: ConnectionError: no answer" in log


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_all_processes_write_a_checkpoint_together_when_one_of_them_cannot_score(
    tmp_path, sharding
):
    """The second process raises in the second iteration; the reason and the checkpoint of the first are there."""
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:out_of_ink", "sharding": sharding})
    ink = tmp_path / "ink"
    ink.write_text("")
    words = ["train", world / "s.yaml", "--processes", 2, "--out", tmp_path / "run", "--no-report"]
    said = run(*words, code=1, INK=ink)
    assert "rank 1: ValueError: no ink is left" in said
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["000001"]


def test_a_judge_that_does_not_answer_has_an_exit_code_of_its_own(tmp_path):
    """A scheduler can tell it from wrong input; nothing is left of a run that never began."""
    options = {"base_url": "http://127.0.0.1:9/v1", "model": "judge", "retries": 0}
    words = ["reward=vlm-judge", f"reward_options={json.dumps({'vlm-judge': options})}"]
    said = run("train", "pocket/tiny", *words, "--out", tmp_path / "run", "--no-report", code=75)
    assert "gave no answer" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_another_machine_does_not_wait_for_a_run_that_is_finished(tmp_path):
    """Its first machine trains no further and meets nobody."""
    world = write(tmp_path, iterations=1, eval_every=0)
    done = launch.train(world / "s.yaml", tmp_path / "run")
    options = {"nodes": 2, "node_rank": 1, "rendezvous": "localhost:1", "resume": "auto"}
    assert launch.train(world / "s.yaml", done, **options) == done


def test_several_machines_use_all_their_gpus(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(launch, "train", lambda *words, **given: asked.update(given))
    words = ["--nodes", "2", "--node-rank", "1", "--rendezvous", "here:1", "--no-report"]
    done = CliRunner().invoke(
        main.app, ["train", "pocket/tiny", "--out", str(tmp_path / "run"), *words]
    )
    assert done.exit_code == 0, done.output
    assert (asked["processes"], asked["nodes"]) == (4, 2)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(status):
    with pytest.raises(TransientError, match=f"status {status}"):
        _parse_response("http://a", status, b"{}")


def test_a_server_that_asks_for_a_pause_gets_it(monkeypatch):
    """The header Retry-After counts up to a minute; a date in it is ignored."""
    headers = iter(["20", "500", "Fri, 1 Jan 2027 07:28:00 GMT", ""])

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self):
            header = next(headers)
            self.send_response(429 if header else 200)
            self.send_header("Retry-After", header)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words):
            """Print nothing."""

    pauses = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        answer = call_with_retries(
            lambda: send_request(url, "/health", 10.0), "the server", retries=5, pause=0.01
        )
        server.shutdown()
    assert answer == {}
    assert pauses[:2] == [20, 60] and pauses[2] < 1


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("8", 8),
        (" **7.5**\n", 7.5),
        ("**8**/10", 8),
        ("8/10", 8),
        ("<think>3 or 4</think>\n9.", 9),
        ("-1", None),
        ("11", None),
        ("8 of 10", None),
        ("7 or 8", None),
        ("", None),
    ],
)
def test_without_a_label_the_answer_is_only_a_number(text, rating):
    assert parse_rating(text, "", 0, 10) == rating


def test_a_rubric_is_kept_and_must_stay_the_same(tmp_path):
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Rate {prompt}. Score: N")
    options = {"base_url": "http://127.0.0.1:9/v1", "model": "judge", "rubric": str(rubric)}
    changes = {"reward": "vlm-judge", "reward_options": {"vlm-judge": options | {"ask": False}}}
    chosen = settings.load_settings("pocket/tiny", changes)
    made = run_folder.create_run(chosen, tmp_path / "run")
    assert (made / "code/rubric.txt").read_bytes() == rubric.read_bytes()
    run_folder.create_run(chosen, made, resume=True)
    rubric.write_text("Rate {prompt} kindly. Score: N")
    with pytest.raises(InputError, match=r"`reward_options` .*rubric.txt has changed since"):
        run_folder.create_run(chosen, made, resume=True)


def test_an_own_run_with_a_rubric_from_an_earlier_version_is_still_ones_own(tmp_path):
    """Earlier versions recorded no rubrics, so their absence is no change."""
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Rate {prompt}. Score: N")
    options = {"base_url": "http://127.0.0.1:9/v1", "model": "judge", "rubric": str(rubric)}
    changes = {"reward": "vlm-judge", "reward_options": {"vlm-judge": options | {"ask": False}}}
    made = run_folder.create_run(settings.load_settings("pocket/tiny", changes), tmp_path / "run")
    run_info = read_json(made / "run.json")
    del run_info["code"]
    write_json(made / "run.json", run_info)
    run_folder.record_own_run(made)
    assert run_folder.is_own_run(made)


def test_raw_scores_of_several_rewards_are_added_with_a_warning(tmp_path):
    changes = {"method": "flow", "reward": {"pocket-clip": 1.0, "pocket-partial": 0.3}}
    chosen = settings.load_settings("pocket/tiny", changes)
    assert chosen.credit == "batch"
    with pytest.warns(UserWarning, match="adds the raw scores of pocket-clip and pocket-partial"):
        run_folder.create_run(chosen, tmp_path / "run")


def test_the_settings_of_a_run_start_another_run(tmp_path):
    made = run_folder.create_run(settings.load_settings("pocket/tiny"), tmp_path / "run")
    again = settings.load_settings(made / "run.json", {"seed": 7})
    expected = run_folder.read_run_settings(made).model_copy(update={"seed": 7})
    assert again == expected


def test_a_card_names_the_repository_and_the_base_but_no_server(tmp_path):
    """It is what a stranger reads on the hub: the code loads from there, and internal addresses stay inside."""
    options = {"base_url": "http://judge.internal:8000/v1", "model": "j", "key_variable": "OUR_KEY"}
    folder = tmp_path / "tuned"
    changes = {
        "lora_rank": 4,
        "threads": 1,
        "reward": "vlm-judge",
        "reward_options": {"vlm-judge": options | {"ask": False}},
    }
    chosen = settings.load_settings("pocket/tiny", changes)
    made = run_folder.create_run(chosen, tmp_path / "run")
    policy = trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12, lora_rank=4)
    trainable.save_trained_weights(policy, made / "final")
    run_folder.update_run_json(made, status="finished")
    card = (export_run(made, folder, repo_id="me/my-lora") / "README.md").read_text()
    assert "load_lora_weights('me/my-lora'" in card and "judge" in card
    assert "internal" not in card and "OUR_KEY" not in card

    with pytest.raises(InputError, match="`repo_id` must be a repository of the hub"):
        export_run(made, tmp_path / "other", repo_id="my-lora")
    with pytest.raises(InputError, match="`base_model` must be left out"):
        export_run(made, tmp_path / "other", base_model="a/b")
    with pytest.raises(InputError, match="`base_model` must be a repository of the hub"):
        export_run(made, tmp_path / "other", base_model="../b")


def test_a_checkpoint_is_exported_with_all_digits_of_its_weights(tmp_path):
    """Weights that are all trained are kept in float32, whatever the forward passes compute in."""
    world = write(
        tmp_path, **FEW | {"reward": "tiny_rewards:red", "dtype": "bfloat16", "checkpoint_every": 1}
    )
    made = launch.train(world / "s.yaml", tmp_path / "run")
    last = export_run(made, tmp_path / "last")
    checkpoint = export_run(made, tmp_path / "checkpoint", checkpoint=4)
    (file,) = (last / "transformer").glob("*.safetensors")
    expected = load_file(file)
    found = load_file(checkpoint / "transformer" / file.name)
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float32 and torch.equal(found[name], tensor), name


def test_a_card_of_a_local_base_can_name_its_repository(tmp_path):
    world = write(tmp_path, lora_rank=4)
    chosen = settings.load_settings(world / "s.yaml")
    made = run_folder.create_run(chosen, tmp_path / "run")
    policy = trainable.load_trainable_policy(
        chosen.model, resolution=64, max_tokens=chosen.max_tokens, lora_rank=4
    )
    trainable.save_trained_weights(policy, made / "final")
    run_folder.update_run_json(made, status="finished")
    exported = export_run(made, tmp_path / "mine", base_model="me/fine-tuned")
    card = (exported / "README.md").read_text()
    assert "base_model: me/fine-tuned" in card and "base = 'me/fine-tuned'" in card


def test_every_exit_code_is_explained():
    assert main.EXIT_CODES[RewardUnavailable.exit_code].startswith("a reward does not answer")
    assert InputError.exit_code in main.EXIT_CODES


@pytest.mark.parametrize("has_successor", [False, True])
def test_a_kill_between_two_renames_loses_no_folder(tmp_path, has_successor):
    """The folder that was moved away gets its name back, unless the new one has taken the name."""
    old = tmp_path / ".final.old.999999999.part"  # no process has this number
    old.mkdir()
    (old / "weights").write_text("old")
    if has_successor:
        (tmp_path / "final").mkdir()
        (tmp_path / "final/weights").write_text("new")
    files.remove_abandoned_files(tmp_path)
    assert (tmp_path / "final/weights").read_text() == ("new" if has_successor else "old")
    assert [entry.name for entry in tmp_path.iterdir()] == ["final"]


def test_sigterm_in_an_evaluation_ends_it_at_once_and_costs_nothing(tmp_path, monkeypatch):
    """A scheduler ends the job while held-out images are sampled or scored; the update before them is kept."""
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red", "eval_every": 2})
    whole = launch.train(world / "s.yaml", tmp_path / "whole")
    sample_images = training_metrics.sample_images
    calls: list[str] = []

    def end_job(**options):
        images = sample_images(**options)
        calls.append("sampled")
        if len(calls) == 2:  # the first evaluation is that of the base
            os.kill(os.getpid(), signal.SIGTERM)
            calls.append("went on")
        return images

    monkeypatch.setattr(training_metrics, "sample_images", end_job)
    with pytest.raises(machine.Terminated):
        launch.train(world / "s.yaml", tmp_path / "run")
    assert calls == ["sampled", "sampled"]
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["000002"]
    assert "the evaluation after iteration 2 was interrupted" in (
        (tmp_path / "run/train.log").read_text()
    )

    monkeypatch.undo()
    resumed = launch.train(world / "s.yaml", tmp_path / "run", resume=True)
    assert trained(resumed) == trained(whole) and metrics(resumed) == metrics(whole)


def test_processes_that_are_started_again_do_not_train_on_an_edited_list(tmp_path):
    """The list is edited after the run began, and a process is restarted, or begins late on another machine."""
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red star\na blue star\n")
    run_settings = settings.load_settings(
        world / "s.yaml", {"prompts": str(prompts), "prompts_per_iteration": 1}
    )
    run = run_folder.create_run(run_settings, tmp_path / "run")
    prompts.write_text("a red star\na purple elephant\n")
    with pytest.raises(InputError, match="`prompts` must stay as it was when the run began"):
        launch.launch_run(run)


def test_a_command_that_loses_the_race_for_a_run_changes_nothing(tmp_path, monkeypatch):
    """Another command trains the run that this one has just created."""
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.2)
    world = write(tmp_path, **FEW | {"reward": "tiny_rewards:red"})
    run = run_folder.create_run(settings.load_settings(world / "s.yaml"), tmp_path / "run")
    run_folder.update_run_json(run, status="running")
    with files.lock_log(run / "train.log"):
        with pytest.raises(InputError, match="is being trained by another process"):
            launch.launch_run(run, roll_back_if_rejected=True)
        assert read_json(run / "run.json")["status"] == "running"


def test_a_run_goes_on_with_a_reward_server_at_another_address(tmp_path):
    """The server's job got another port, and more retries are wanted; its other options must stay."""
    old = {"r": {"url": "http://a:1", "retries": 1, "pixels": "exact"}}
    moved = {"r": {"url": "http://b:2", "timeout": 5.0, "pixels": "exact"}}
    assert settings.without_addresses(old) == settings.without_addresses(moved)
    assert settings.replace_addresses(old, moved) == moved
    world = write(tmp_path, reward="tiny_rewards:red")
    plain = settings.load_settings(world / "s.yaml")
    begun = plain.model_copy(update={"reward_options": old})
    settings.check_resume(begun, plain.model_copy(update={"reward_options": moved}))
    for other in ({"r": {"url": "http://b:2"}}, {"r": {"pixels": "exact"}}, {}):
        with pytest.raises(InputError, match="`reward_options` must stay"):
            settings.check_resume(begun, plain.model_copy(update={"reward_options": other}))
