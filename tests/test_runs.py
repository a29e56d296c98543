"""Run folders, training to its end and reports: what a lesson should not carry."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import synthetic
import torch

from chunk_grpo import InputError
from chunk_grpo.core import files, machine
from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import append_json_line
from chunk_grpo.evaluation import run_images
from chunk_grpo.planning import disk
from chunk_grpo.planning.disk import check_disk_space
from chunk_grpo.reporting import reports
from chunk_grpo.reporting.reports import compare_runs, write_run_report
from chunk_grpo.runs import launch, run_folder, verify
from chunk_grpo.training import checkpoints
from chunk_grpo.training.callbacks import Callback


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings whose model and prompts exist as far as a run folder looks at them."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red star\ntwo dogs\n")
    real = {"model_sha256": "a" * 64, "prompts_sha256": "b" * 64}
    monkeypatch.setattr(run_folder, "check_and_hash_inputs", lambda settings: real)
    monkeypatch.setattr(disk, "estimate_new_disk_bytes", lambda *_: (1, 0))
    return setting.load_settings(
        "pocket/tiny", {"prompts": str(prompts), "eval_prompts": str(prompts)}
    )


GB = 10**9
ROOM = {  # gigabytes that the run needs, the embeddings need, whether they share a disk, what is free -> what is said
    "together": (
        3,
        4,
        True,
        (6, 6),
        "`out` must lie where the run's files and the embed.* have room, about 7.00",
    ),
    "apart": (
        3,
        4,
        False,
        (6, 3),
        "`CHUNK_GRPO_CACHE` must lie where the embeddings .* have room, about 4.00",
    ),
    "enough": (3, 4, True, (8, 8), ""),
    "enough apart": (3, 4, False, (3.5, 4.5), ""),
}


@pytest.mark.parametrize("case", ROOM)
def test_the_disk_has_room_for_the_embeddings_too(settings, tmp_path, monkeypatch, case):
    run, cache, same, free, words = ROOM[case]
    monkeypatch.setattr(disk, "estimate_new_disk_bytes", lambda *_: (run * GB, cache * GB))
    other = tmp_path if same else Path("/dev")
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(other))
    rooms = {tmp_path: free[0] * GB, other: free[1] * GB}
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda place: SimpleNamespace(free=rooms[Path(place)])
    )
    if not words:
        check_disk_space(settings, tmp_path / "run")
        return
    with pytest.raises(InputError, match=words):
        check_disk_space(settings, tmp_path / "run")


def test_embeddings_that_another_run_removes_meanwhile_need_no_space(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path))
    folder = tmp_path / "embeddings" / "0123"
    folder.mkdir(parents=True)
    settings = setting.load_settings("pocket/tiny")
    _, before = disk.estimate_new_disk_bytes(settings)
    (folder / "a.safetensors").write_bytes(b"0" * 1000)
    (folder / "b.safetensors").symlink_to(tmp_path / "removed")  # listed, but no longer there
    _, after = disk.estimate_new_disk_bytes(settings)
    assert before - 1200 < after <= before - 1000


def test_a_resumed_run_needs_room_only_for_what_it_has_not_written(settings, tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints/000002").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with open(run / "checkpoints/000002/weights.safetensors", "wb") as file:
        file.truncate(4 * GB)
    monkeypatch.setattr(disk, "estimate_new_disk_bytes", lambda *_: (6 * GB, 0))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: SimpleNamespace(free=3 * GB))
    check_disk_space(settings, run)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: SimpleNamespace(free=GB))
    with pytest.raises(
        InputError, match="`out` must lie where the run's files have room, about 2.00"
    ):
        check_disk_space(settings, run)
    # What another program left in the folder of a new run is not subtracted.
    (run / "run.json").unlink()
    with pytest.raises(InputError, match="about 6.00 GB"):
        check_disk_space(settings, run)


@pytest.fixture
def trainer(monkeypatch):
    """Puts a function of the run folder in the place of the loop; it may say something."""

    def put(act):
        def train_run(settings, run, callbacks, log):
            act(run, log)
            (run / "final").mkdir(exist_ok=True)
            (run / "final" / "weights.safetensors").touch()
            state = SimpleNamespace(
                run=run,
                settings=settings,
                iteration=settings.iterations,
                accelerator=SimpleNamespace(is_main_process=True),
            )
            for callback in callbacks:
                for line in run_folder.read_metrics_lines(run):
                    callback.on_log(state, line)
                callback.on_train_end(state)

        monkeypatch.setattr(launch, "train_run", train_run)

    return put


def four_lines(run, log):
    """A run that goes well."""
    for i in range(4):
        append_json_line(run / "metrics.jsonl", {"iteration": i})


def raises(error):
    """A run that ends with an error at once."""

    def act(run, log):
        raise error

    return act


def test_a_callback_at_the_end_of_training_can_use_the_final_weights(settings, trainer, tmp_path):
    """The run is not marked as finished before its last callback has ended."""
    trainer(four_lines)
    seen = []

    class UsesWeights(Callback):
        def on_train_end(self, state):
            seen.append(run_images.hash_trained_weights(state.run))
            seen.append(run_folder.read_run_info(state.run)["status"])

    out = launch.train(settings, tmp_path / "run", callbacks=[UsesWeights()])
    assert seen == [run_images.hash_trained_weights(out), "running"]
    assert run_folder.read_run_info(out)["status"] == "finished"


def test_a_run_is_made_trained_followed_and_taken_up(settings, trainer, tmp_path):
    trainer(four_lines)
    seen = []
    out = tmp_path / "run"
    assert (
        launch.train(
            settings, out, callbacks=[lambda line, settings: seen.append(line["iteration"])]
        )
        == out
    )
    assert seen == [0, 1, 2, 3]
    note = run_folder.read_run_info(out)
    assert note["status"] == "finished" and run_folder.read_run_settings(out) == settings
    assert {
        "versions",
        "git_commit",
        "machine",
        "model_sha256",
        "prompts_sha256",
        "processes",
    } <= note.keys()
    trainer(raises(ValueError))  # would fail, but nothing is left to do
    assert launch.train(settings, out, resume=True) == out
    with pytest.raises(InputError, match="`out` must be a new folder"):
        launch.train(settings, out)


def test_numbered_folders_in_the_working_directory(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [run_folder.create_run(settings).relative_to(tmp_path) for _ in range(2)]
    assert names == [Path("runs/run-001"), Path("runs/run-002")]


CASES = ("other files", "a file", "nothing to resume", "other settings", "no space", "processes")


@pytest.mark.parametrize("case", CASES)
def test_refusals_write_nothing(settings, tmp_path, monkeypatch, case):
    out = tmp_path / "run"
    resume = False
    processes = 1
    run_settings = settings
    if case == "other files":
        out.mkdir()
        (out / "thesis.tex").write_text("dear")
    elif case == "a file":
        out.write_text("dear")
    elif case == "nothing to resume":
        resume = True
    elif case == "other settings":
        run_folder.create_run(settings, out)
        resume = True
        run_settings = settings.model_copy(update={"clip_range": 0.5})
    elif case == "no space":
        monkeypatch.setattr(disk, "estimate_new_disk_bytes", lambda *_: (10**18, 0))
    else:
        processes = 3
    words = {
        "other files": "is not empty",
        "a file": "is a file",
        "nothing to resume": "there is none",
        "other settings": "`clip_range` must stay 0.001 when the run is resumed; got 0.5",
        "no space": r"about 1000000000.00 GB; .* has \d+\.\d\d GB free",
        "processes": "divide",
    }
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=words[case]) as caught:
        run_folder.create_run(run_settings, out, resume=resume, processes=processes)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def held(folder):
    """What lies in a folder, and which folder it is."""
    return (
        folder.stat().st_ino,
        folder.stat().st_mode,
        {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()},
    )


def test_an_empty_folder_is_worked_in_and_stays(settings, trainer, tmp_path, monkeypatch):
    """Also where it is the working directory, which cannot be replaced; and when the run is refused."""
    (tmp_path / "own").mkdir(mode=0o750)
    monkeypatch.chdir(tmp_path / "own")
    before = held(tmp_path / "own")
    trainer(raises(InputError("`reward` must be finite")))
    with pytest.raises(InputError, match="must be finite"):
        launch.train(settings, ".")
    assert held(tmp_path / "own") == before
    trainer(four_lines)
    assert launch.train(settings, ".") == tmp_path / "own"
    assert (
        held(tmp_path / "own")[:2] == before[:2]
        and run_folder.read_run_info(".")["status"] == "finished"
    )


def test_a_mounted_empty_folder_is_a_run_folder(settings, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a disk can only be mounted by root")
    try:
        assert (
            run_folder.read_run_info(run_folder.create_run(settings, disk))["status"] == "created"
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_a_user_put_into_a_refused_run_stays(settings, trainer, tmp_path):
    def act(run, log):
        (run / "thesis.tex").write_text("dear")
        raise InputError("`reward` must be finite")

    trainer(act)
    with pytest.raises(InputError):
        launch.train(settings, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_of_many_starts_into_one_new_folder_one_writes(settings, tmp_path):
    """All have looked and seen nothing before the first of them makes the folder."""
    together = threading.Barrier(8)
    makes = run_folder.make_folders

    def make(out):
        together.wait(60)
        return makes(out)

    def start(_):
        try:
            return run_folder.create_run(settings, tmp_path / "run")
        except InputError as error:
            return str(error)

    run_folder.make_folders = make
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(start, range(8)))
    finally:
        run_folder.make_folders = makes
    assert found.count(tmp_path / "run") == 1
    refused = (
        "another process has just started a run",
        "holds a run, which can be resumed",
    )
    assert sum(any(part in str(words) for part in refused) for words in found) == 7


def test_a_kill_before_run_json_leaves_a_folder_to_begin_in(
    settings, trainer, tmp_path, monkeypatch
):
    class Killed(BaseException):
        """Nothing of the program goes on."""

    def stop(path, content):
        path.with_name(f".{path.name}.{2**22 + 1}.part").write_text(
            "{"
        )  # a number that no process has
        raise Killed

    trainer(four_lines)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_folder, "write_json", stop)
        launch.train(settings, tmp_path / "run")
    assert len(list((tmp_path / "run").iterdir())) == 2
    with pytest.raises(InputError, match="`out` must hold the run to resume; there is none in"):
        launch.train(settings, tmp_path / "run", resume=True)
    assert (
        run_folder.read_run_info(launch.train(settings, tmp_path / "run"))["status"] == "finished"
    )
    assert not list((tmp_path / "run").glob(".*"))


def test_warnings_of_the_log_are_shown_too(settings, trainer, tmp_path, capsys):
    def act(run, log):
        log("warning: the checkpoint is damaged")
        log("base")

    trainer(act)
    launch.train(settings, tmp_path / "run")
    assert capsys.readouterr().err == "warning: the checkpoint is damaged\n"
    assert (
        tmp_path / "run" / "train.log"
    ).read_text() == "warning: the checkpoint is damaged\nbase\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("[]", "must be a JSON object"),
        ("{}", "`settings` is missing"),
        ("\xff", "cannot be read"),
        (
            '{"settings": {}, "status": "failed", "model_sha256": "", "prompts_sha256": ""}',
            "`settings` is missing",
        ),
        (
            '{"settings": {"eta": 1}, "status": 5, "model_sha256": "", "prompts_sha256": ""}',
            "`status` must be",
        ),
        (
            '{"settings": [], "status": "failed", "model_sha256": "", "prompts_sha256": ""}',
            "`settings` must be",
        ),
    ],
)
def test_a_damaged_run_json_is_one_sentence(settings, tmp_path, text, words):
    out = run_folder.create_run(settings, tmp_path / "run")
    (out / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=re.escape(words)) as error:
        run_folder.create_run(settings, out, resume=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage, words", [("{}", "`settings`"), ("[]", "damaged"), ("", "damaged")]
)
def test_a_damaged_run_that_is_to_go_on_gets_no_log(damage, words, settings, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text(damage)
    with pytest.raises(InputError, match=words):
        run_folder.create_run(settings, out, resume=True)
    assert [path.name for path in out.iterdir()] == ["run.json"]


def test_missing_model_and_empty_prompts_are_found_before_anything_is_written(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "model").mkdir()
    for name, value, words in (
        ("prompts", "empty.txt", "holds no prompt"),
        ("model", "model", "model_index.json"),
    ):
        (tmp_path / "a.txt").write_text("a red star\ntwo dogs\n")
        values = {
            "prompts": str(tmp_path / "a.txt"),
            "eval_prompts": str(tmp_path / "a.txt"),
            name: str(tmp_path / value),
        }
        with pytest.raises(InputError, match=words):
            run_folder.create_run(setting.load_settings("pocket/tiny", values), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def fails_later(error):
    """A run that ends with an error after its first lines."""

    def act(run, log):
        four_lines(run, log)
        raise error

    return act


def test_refused_input_leaves_no_folder_and_a_crash_is_noted(settings, trainer, tmp_path):
    trainer(raises(InputError("`reward` must be finite; got nan")))
    with pytest.raises(InputError, match="^`reward` must be finite; got nan$"):
        launch.train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    trainer(fails_later(MemoryError("too large")))
    with pytest.raises(
        launch.TrainingFailed, match="MemoryError: too large; the log is .*train.log"
    ) as failed:
        launch.train(settings, tmp_path / "run")
    assert isinstance(failed.value.__cause__, MemoryError), "the original error, for a debugger"
    note = run_folder.read_run_info(tmp_path / "run")
    assert (note["status"], note["error"]) == ("failed", "MemoryError: too large")
    assert "Traceback" in (tmp_path / "run" / "train.log").read_text()
    trainer(four_lines)
    launch.train(settings, tmp_path / "run", resume=True)
    assert run_folder.read_run_info(tmp_path / "run")["status"] == "finished"


def test_a_reward_that_ends_the_program_is_a_failure(settings, trainer, tmp_path):
    trainer(raises(SystemExit(0)))
    with pytest.raises(
        launch.TrainingFailed, match=r"not finished, but sys.exit\(0\) was called, as by a reward"
    ):
        launch.train(settings, tmp_path / "run")
    assert run_folder.read_run_info(tmp_path / "run")["status"] == "failed"


def test_an_error_after_the_end_costs_nothing(settings, trainer, tmp_path, monkeypatch):
    """As when a connection cannot be closed."""
    trainer(four_lines)
    whole = launch.train_run

    def late(*given):
        whole(*given)
        raise RuntimeError("broken pipe")

    monkeypatch.setattr(launch, "train_run", late)
    run = launch.train(settings, tmp_path / "run")
    assert run_folder.read_run_info(run)["status"] == "finished"
    log = (run / "train.log").read_text()
    assert "warning: after the run was finished: RuntimeError: broken pipe" in log


def test_two_trainers_of_one_run_are_refused(settings, trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.2)
    again = []

    def act(run, log):
        assert run_folder.is_training(run)
        with pytest.raises(InputError, match="is being trained by another process") as refused:
            launch.train(settings, run, resume=True)
        again.append(refused)
        four_lines(run, log)

    trainer(act)
    out = launch.train(settings, tmp_path / "run")
    assert (
        again
        and run_folder.read_run_info(out)["status"] == "finished"
        and not run_folder.is_training(out)
    )


def test_who_goes_on_at_once_after_a_kill_waits_for_its_files(settings, trainer, tmp_path):
    """A process that was killed keeps the log's lock until its memory is given back; a second one waits for that."""
    out = run_folder.create_run(settings, tmp_path / "run")
    trainer(four_lines)
    dying = subprocess.Popen(["sleep", "1"], stdout=(log := files.lock_log(out / "train.log")))
    log.close()
    assert (
        run_folder.read_run_info(launch.train(settings, out, resume=True))["status"] == "finished"
    )
    assert dying.wait() == 0


@pytest.mark.parametrize(
    "number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_an_interrupt_is_handed_on_and_noted(settings, trainer, tmp_path, number, raised):
    def act(run, log):
        os.kill(os.getpid(), number)
        time.sleep(60)

    trainer(act)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised):
        launch.train(settings, tmp_path / "run")
    assert run_folder.read_run_info(tmp_path / "run")["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_killed_run_reads_interrupted(settings, trainer, tmp_path):
    """Nobody is left to write it down; the lock that nobody holds tells."""
    code = (
        "import os, pathlib, sys\nfrom chunk_grpo.runs import launch\n"
        "launch.train_run = lambda *_: os.kill(os.getpid(), 9)\n"
        "launch.launch_run(pathlib.Path(sys.argv[1]))\n"
    )
    out = run_folder.create_run(settings, tmp_path / "run")
    assert subprocess.run([sys.executable, "-c", code, str(out)]).returncode == -signal.SIGKILL
    assert json.loads((out / "run.json").read_text())["status"] == "running"
    assert run_folder.read_run_info(out)["status"] == "interrupted"
    trainer(four_lines)
    assert (
        run_folder.read_run_info(launch.train(settings, out, resume=True))["status"] == "finished"
    )


def test_the_caller_gets_its_threads_back(settings, trainer, tmp_path):
    before = torch.get_num_threads()
    trainer(lambda run, log: torch.set_num_threads(before + 1))
    launch.train(settings, tmp_path / "run")
    assert torch.get_num_threads() == before


def test_callbacks_of_several_processes_must_be_names(settings, tmp_path):
    with pytest.raises(InputError, match="`callbacks` must be names such as file.py:name"):
        launch.train(settings, tmp_path / "run", processes=2, callbacks=[print])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "values, words",
    [
        (
            {"setings": "pocket/tiny"},
            "`setings` is not a parameter of the report train; did you mean `settings`",
        ),
        ({"processes": "2"}, "`processes` of the report train must be a whole number; got '2'"),
        ({"overrides": "seed=1"}, "`overrides` of the report train must be a list"),
        ({"resume": 1}, "`resume` of the report train must be True or False; got 1"),
    ],
)
def test_parameters_are_checked_before_a_kernel_starts(tmp_path, values, words):
    with pytest.raises(InputError, match=re.escape(words)):
        reports.execute_report("train", tmp_path / "out.ipynb", **values)
    assert not list(tmp_path.iterdir())


def test_every_report_has_one_parameters_cell_and_no_output():
    assert reports.list_reports() == [
        "benchmark",
        "compare",
        "evaluate",
        "profile",
        "study",
        "tables",
        "train",
    ]
    for name in reports.list_reports():
        cells = nbformat.read(reports.find_report_notebook(name), 4).cells
        assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1
        assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_the_report_of_a_failed_run_shows_what_is_there(tmp_path, monkeypatch):
    run = synthetic.write(tmp_path / "run", evaluated=False, status="failed", upto=3)
    run_folder.update_run_json(run, error="ValueError: <b>lost</b>")
    log = run / "metrics.jsonl"
    log.write_text(
        log.read_text().replace('"advantage_std_zero_groups": 0', '"advantage_std_zero_groups": 12')
    )
    monkeypatch.chdir(tmp_path)
    page = write_run_report("run").read_text()
    assert (
        "This run is not finished but failed, after iteration 3 of 45. ValueError: &lt;b&gt;lost&lt;/b&gt;"
        in page
    )
    assert "The run has not been evaluated." in page and page.count("<img") >= 5
    assert "flat_groups" in page and "all images of each prompt had the same reward" in page
    assert sorted(p.name for p in run.iterdir() if p.name.startswith("report")) == [
        "report.html",
        "report.ipynb",
    ]


def test_a_report_warns_of_settings_of_another_version(tmp_path, monkeypatch):
    run = synthetic.write(tmp_path / "run")
    note = run_folder.read_run_info(run)
    run_folder.update_run_json(
        run, versions={"chunk_grpo": "9.0"}, settings=note["settings"] | {"from_the_future": 1}
    )
    monkeypatch.setattr(reports, "write_report", lambda *_, **__: run / "report.html")
    with pytest.warns(
        UserWarning,
        match="ignores settings that it does not know, in the run .* 9.0: from_the_future",
    ):
        write_run_report(run)


def newer(folder):
    """A run whose evaluation has other arms than usual, and objects."""
    run = synthetic.write(folder, arms=("split-05", "split-10"), objects=True)
    arms = {"base": 0, "split-05": 5, "split-10": 10, "plain": None}
    summary = run_folder.read_evaluation_summary(run) | {"arms": arms}
    (run / "evaluation" / "summary.json").write_text(json.dumps(summary))
    return run


@pytest.mark.slow
def test_reports_read_older_and_newer_summaries(tmp_path):
    old = synthetic.write(tmp_path / "old")
    summary = run_folder.read_evaluation_summary(old)
    for row in summary["rewards"].values():
        assert row.pop("preserved") is None
    (old / "evaluation" / "summary.json").write_text(json.dumps(summary))
    page = write_run_report(old, "evaluate").read_text()
    assert (
        "Hybrid inference, in which the base takes over at step 12" in page
        and "saw preserved" not in page
    )
    assert write_run_report(newer(tmp_path / "new")).is_file()


@pytest.mark.slow
def test_the_report_of_an_evaluation_reads_a_newer_summary(tmp_path):
    new = newer(tmp_path / "new")
    file = new / "evaluation" / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": 77}))
    page = write_run_report(new, "evaluate").read_text()
    assert "Euler steps of the ODE, seed 77." in page, (
        "the evaluation's seed, and not that of the run's settings"
    )
    assert page.count("saw preserved</h3>") == 1 and page.count("<td>objects</td>") == 3
    assert (
        "There was no arm hybrid." not in page
        and "the base takes over: split-05 5, split-10 10." in page
    )
    rewards = run_folder.read_evaluation_summary(new)["rewards"]
    assert len(compare_runs([synthetic.write(tmp_path / "old"), new])) == 2 * len(rewards)


def test_comparing_needs_evaluated_runs_and_groups_by_seed(tmp_path):
    a = synthetic.write(tmp_path / "a")
    b = synthetic.write(tmp_path / "b", seed=1, gain=0.05)
    steps = synthetic.write(tmp_path / "c", {"chunks": "steps"})
    table = compare_runs([a, b, steps])
    assert table[table.reward == "pocket-clip"].group.tolist() == ["chunk", "chunk", "steps"]
    assert (
        (table.transitions == 45 * 1152).all()
        and (table.lo < table.delta).all()
        and (table.delta < table.hi).all()
    )
    with pytest.raises(InputError, match="must be evaluated"):
        compare_runs([a, synthetic.write(tmp_path / "d", evaluated=False)])


def test_a_worker_prints_the_warnings_that_its_error_stream_would_hide(
    settings, trainer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    trainer(lambda run, log: log("warning: the checkpoint is damaged"))
    launch.train(settings, tmp_path / "run")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("warning: the checkpoint is damaged\n", "")


def test_the_seconds_of_interrupted_sessions_count_too(settings, trainer, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(launch.time, "time", lambda: clock.now)

    def session(error):
        def act(run, log):
            clock.now += 100
            if error:
                raise error

        return act

    out = tmp_path / "run"
    for error, seconds in ((KeyboardInterrupt(), 100.0), (ValueError(), 200.0), (None, 300.0)):
        trainer(session(error))
        with contextlib.suppress(KeyboardInterrupt, machine.TrainingFailed):
            launch.train(settings, out, resume="auto")
        assert run_folder.read_run_info(out)["seconds"] == seconds


def test_restarts_of_one_process_are_refused(settings, tmp_path):
    with pytest.raises(InputError, match="`max_restarts` must be 0 with one process, .*; got 2"):
        launch.train(settings, tmp_path / "run", max_restarts=2)
    assert not (tmp_path / "run").exists()


def test_more_processes_than_gpus_are_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="`processes` must be at most 2, .*; got 3"):
        launch.train(settings, tmp_path / "run", processes=3)
    assert not (tmp_path / "run").exists()
    # On the CPU, GPUs do not matter: the error is that of the callbacks, which are checked later.
    on_cpu = settings.model_copy(update={"device": "cpu"})
    with pytest.raises(InputError, match="`callbacks` must be names"):
        launch.train(on_cpu, tmp_path / "run", processes=3, callbacks=[print])


def test_the_status_of_a_run_that_only_others_may_write_can_be_read(
    settings, tmp_path, monkeypatch
):
    out = run_folder.create_run(settings, tmp_path / "run")

    def open_for_reading(file, mode="r", **options):
        if set(mode) & set("wa+"):
            raise PermissionError(13, "Permission denied", str(file))
        return open(file, mode, **options)

    monkeypatch.setattr(run_folder, "open", open_for_reading, raising=False)
    assert not run_folder.is_training(out)
    with files.lock_log(out / "train.log"):
        assert run_folder.is_training(out)


def test_two_processes_that_ask_at_once_do_not_take_each_other_for_training(settings, tmp_path):
    out = run_folder.create_run(settings, tmp_path / "run")
    run_folder.update_run_json(out, status="running")
    with open(out / "train.log", "rb") as other:
        assert files.try_lock(other, shared=True)  # as another reader does while it asks
        assert run_folder.read_run_info(out)["status"] == "interrupted"


def test_an_older_run_with_a_setting_without_effect_can_be_resumed(tmp_path):
    """Training and its checkpoint, as a version wrote them that did not reject `profile_every`."""
    lists = {"prompts": "pocket:train", "eval_prompts": "pocket:test"}
    small = {"steps": 5, "images_per_prompt": 2, "prompts_per_iteration": 1, "eval_every": 0}
    few = {"chunks": "adaptive:2", "iterations": 1, "eval_images": 1, **small, **lists}
    settings = setting.load_settings("pocket/tiny", few)
    out = launch.train(settings, tmp_path / "run")
    old = run_folder.read_run_info(out)["settings"] | {"profile_every": 5}
    run_folder.update_run_json(out, settings=old)
    (folder,) = (out / "checkpoints").glob("[0-9]*")
    manifest = checkpoints.read_manifest(folder) | {"settings": old}
    manifest["sha256"] = checkpoints._hash_manifest(manifest)
    files.write_json(folder / "manifest.json", manifest)
    launch.train(settings.model_copy(update={"iterations": 2}), out, resume=True)
    assert [line["iteration"] for line in run_folder.read_metrics_lines(out)] == [0, 1, 2]
    assert run_folder.read_run_info(out)["settings"]["profile_every"] == 0


def test_another_number_of_processes_is_warned_of(settings, tmp_path):
    settings = settings.model_copy(update={"prompts_per_iteration": 2})
    out = run_folder.create_run(settings, tmp_path / "run", processes=2)
    with warnings.catch_warnings(action="error"):
        run_folder.create_run(settings, out, resume=True)  # nothing was trained with 2
        run_folder.create_run(settings, out, resume=True, processes=2)
        (out / "checkpoints").mkdir()
        run_folder.create_run(settings, out, resume=True, processes=2)
    with pytest.warns(
        UserWarning, match="with 2 processes and resumes with 1, .* differ by rounding"
    ):
        run_folder.create_run(settings, out, resume=True)


def test_settings_of_memory_may_change_on_resume_with_a_warning(tmp_path):
    """What a run that ran out of memory needs; the metrics stay the same up to rounding."""
    few = {"steps": 5, "chunks": "2,2", "images_per_prompt": 4, "prompts_per_iteration": 1}
    few |= {"iterations": 2, "eval_every": 0, "eval_images": 1, "dtype": "float32"}
    settings = setting.load_settings("pocket/tiny", few)
    whole = launch.train(settings, tmp_path / "whole")
    out = launch.train(settings.model_copy(update={"iterations": 1}), tmp_path / "run")
    smaller = settings.model_copy(
        update={"update_batch": 2, "rollout_batch": 3, "gradient_checkpointing": True}
    )
    with pytest.warns(UserWarning, match="`update_batch` .* and resumes with 2, .* by rounding"):
        launch.train(smaller, out, resume=True)
    assert run_folder.read_run_info(out)["settings"]["update_batch"] == 2
    changes, unchecked = verify.find_changes(out, run_folder.read_run_info(out))
    assert not changes and any("`update_batch` was" in text for text in unchecked)
    found, expected = run_folder.read_metrics_lines(out), run_folder.read_metrics_lines(whole)
    assert [line["iteration"] for line in found] == [line["iteration"] for line in expected]
    for name in ("reward_mean", "grad_norm"):
        assert found[-1][name] == pytest.approx(expected[-1][name], rel=1e-3)
