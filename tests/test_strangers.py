"""A run folder from a stranger is data: reading it runs nothing, contacts nobody, opens nothing beside it."""

import errno
import inspect
import json
import shutil
from pathlib import Path

import pandas as pd
import papermill
import promises
import pytest
import strangers
import synthetic
from commands import call
from PIL import Image
from report_functions import functions_of_report
from strangers import write_stranger

from chunk_grpo import InputError
from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.reporting import figures
from chunk_grpo.reporting.figures import plot_profile
from chunk_grpo.reporting.reports import write_run_report
from chunk_grpo.runs import run_folder


@pytest.fixture
def stranger(tmp_path):
    """A run folder that asks for everything: code in the folder, an environment, an address with a secret."""
    return write_stranger(tmp_path)


def watched(run: Path, *words, **more):
    """Run the command line in the run folder with everything watched; what it did, and how it ended."""
    return strangers.watched(run.parent, *words, cwd=run, **more)


def check(run: Path, events: list) -> None:
    """Nothing of the folder was run or imported, nobody contacted, nothing beside it opened."""
    root = str(run)
    outside = str(run.parent / "outside")
    assert len([e for e in events if e[0] == "import"]) > 100, "the watch was on"
    assert not [
        e for e in events if e[0] == "run" and any(root in str(w) and "env" in str(w) for w in e[1])
    ]
    away = [e[1][0] for e in events if e[0] == "connect" and isinstance(e[1], tuple)]
    away = [host for host in away if host not in ("127.0.0.1", "::1")]
    assert not away and not [
        e for e in events if e[0] == "ask" and e[1] not in (None, "127.0.0.1", "localhost")
    ]
    opened = [e[1] for e in events if e[0] == "open"]
    assert not [file for file in opened if file.startswith(outside)]
    assert not [file for file in opened if file.startswith(root) and file.endswith(".py")]
    assert not [e for e in events if e[0] == "import" and e[1] == "evil"]
    assert not (run / "ran").exists()


KEPT = json.loads(promises.KEPT.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # those on one's own run are a dozen commands, one after another
@pytest.mark.parametrize(
    "whose, commands",
    promises.TOGETHER,
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_table_of_the_book_is_what_commands_do(whose, commands):
    kept = [row for row in KEPT if row["run"] == whose and row["command"] in commands]
    assert promises.promises(whose, commands) == kept
    assert [row["command"] for row in kept] == [*commands]


def test_the_table_has_every_command_and_a_strangers_run_is_not_obeyed_in_it():
    for whose in ("one's own", "a stranger's"):
        assert [row["command"] for row in KEPT if row["run"] == whose] == [*promises.ON_A_RUN]
    for row in [row for row in KEPT if row["run"] == "a stranger's"]:
        assert not row["contacts"] and not row["left in the temporary folder"]
        assert all(
            words.split()[0] in ("python", "git") and "evil" not in words for words in row["runs"]
        )
        assert row["exit"] == 0 or not row["writes"], "what is refused writes nothing"


def test_a_report_runs_nothing_of_a_run(stranger):
    done, events = watched(stranger, "report", ".")
    assert done.returncode == 0, done.stderr
    check(stranger, events)
    assert not [
        e for e in events if e[0] == "import" and e[1].startswith("diffusers.pipelines.")
    ], "it takes seconds"
    assert "a mean over 128 latent dimensions" in (stranger / "report.html").read_text()


def test_commands_that_would_obey_a_run_ask_first(stranger):
    """One process, the commands in turn: each refuses in one sentence, and none runs, asks or connects."""
    hub = shutil.copytree(stranger, stranger.parent / "hub")
    note = read_json(hub / "run.json")
    note["settings"] |= {
        "model": "evil/model",
        "reward": "pocket-clip",
        "reward_options": {},
        "eval_prompts": "pocket:test",
        "prompts": "pocket:train",
    }
    write_json(hub / "run.json", note)
    commands = [
        ["evaluate", "."],
        ["plan", "--run", "."],
        ["evaluate", hub],
        ["verify", hub],
        ["sample", hub, "a red star"],
        ["export", hub, "made"],
        ["profile", "--run", hub],
    ]
    program = (
        "import json, os, sys; from chunk_grpo.cli.main import main\n"
        "for words in json.loads(os.environ['COMMANDS']):\n"
        "    sys.argv = ['chunk-grpo', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(words[0], end.code, flush=True)\n"
    )
    given = json.dumps([[str(word) for word in words] for words in commands])
    done, events = watched(stranger, program=program, COMMANDS=given)
    assert done.stdout.split() == [word for words in commands for word in (words[0], "2")]
    said = [line for line in done.stderr.splitlines() if line.startswith("chunk-grpo: ")]
    assert len(said) == len(commands) and "Traceback" not in done.stderr, done.stderr
    rewards, model, *of_the_hub = said
    assert "the code evil:f" in rewards and "203.0.113.7" in rewards and "--trust" in rewards
    assert "was not made on this machine, and its model" in model
    assert all("the model evil/model of the hub" in s and "--trust" in s for s in of_the_hub)
    assert "s3cret" not in done.stderr and not (stranger / "made").exists()
    check(stranger, events)
    assert not (hub / "ran").exists()


@pytest.mark.parametrize("far", ["../../outside/secret.png", "absolute", "link"])
def test_images_beside_the_run_are_not_shown(stranger, far):
    secret = stranger.parent / "outside" / "secret.png"
    lines = [
        json.loads(line)
        for line in (stranger / "evaluation" / "scores.jsonl").read_text().splitlines()
    ]
    if far == "link":
        (stranger / "evaluation" / lines[0]["file"]).unlink()
        (stranger / "evaluation" / lines[0]["file"]).symlink_to(secret)
    else:
        lines[0]["file"] = str(secret) if far == "absolute" else far
        (stranger / "evaluation" / "scores.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    scores = pd.DataFrame(run_folder.read_evaluation_records(stranger))
    with pytest.raises(InputError, match="the run must hold its own files"):
        figures.plot_before_after(scores, stranger / "evaluation", "pocket-clip")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run.json", run_folder.read_run_info),
        ("train.log", run_folder.read_run_info),
        ("metrics.jsonl", run_folder.read_metrics),
        ("profile.json", run_folder.read_run_profile),
        ("evaluation", run_folder.read_evaluation_summary),
        ("evaluation", run_folder.read_evaluation_records),
        ("evaluation/summary.json", run_folder.read_evaluation_summary),
        ("evaluation/scores.jsonl", run_folder.read_evaluation_records),
    ],
)
def test_links_out_of_a_run_are_refused(stranger, name, read):
    (stranger / "train.log").touch()
    run_folder.update_run_json(stranger, status="running")
    shutil.move(stranger / name, stranger.parent / "moved")
    (stranger / name).symlink_to(stranger.parent / "moved")
    with pytest.raises(InputError, match="the run must hold its own files"):
        read(stranger)


def test_a_run_of_this_machine_is_known_until_its_rewards_are_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = run_folder.create_run(setting.load_settings("pocket/tiny"), tmp_path / "run")
    shutil.copytree(run, tmp_path / "copy")
    known = tmp_path / "cache" / "own-runs.txt"
    known.write_bytes(b"\xff\xfe a bad line\n" + known.read_bytes())
    assert run_folder.is_own_run(run) and run_folder.is_own_run(tmp_path / "copy")
    changed = read_json(run / "run.json")["settings"] | {
        "reward_options": {"pocket-clip": {"url": "x"}}
    }
    run_folder.update_run_json(run, settings=changed)
    assert not run_folder.is_own_run(run)
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "another"))
    assert not run_folder.is_own_run(tmp_path / "copy")


def test_asking_whether_a_run_is_own_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    write_json(run / "run.json", {"run_id": "a", "settings": {"reward": "pocket-clip"}})
    parameters = inspect.signature(run_folder.is_own_run).parameters
    assert list(parameters) == ["run"]  # no option can make the question record the run
    assert not run_folder.is_own_run(run)
    assert not (tmp_path / "cache").exists()
    run_folder.record_own_run(run)
    run_folder.record_own_run(run)
    assert run_folder.is_own_run(run)
    lines = (tmp_path / "cache" / "own-runs.txt").read_text().splitlines()
    assert len(lines) == len(set(lines))


def test_runs_of_others_who_share_the_cache_are_not_own(tmp_path, monkeypatch):
    """Neither a line that another user may have written counts, nor is one's own run recorded where others write."""
    cache, state = tmp_path / "cache", tmp_path / "state"
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(cache))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    theirs = run_folder.create_run(setting.load_settings("pocket/tiny"), tmp_path / "theirs")
    assert run_folder.is_own_run(theirs)
    (cache / "own-runs.txt").chmod(0o666)
    assert not run_folder.is_own_run(theirs)
    (cache / "own-runs.txt").unlink()
    cache.chmod(0o777)
    own = run_folder.create_run(setting.load_settings("pocket/tiny"), tmp_path / "own")
    assert run_folder.is_own_run(own) and not run_folder.is_own_run(theirs)
    assert not (cache / "own-runs.txt").exists()
    assert (state / "chunk_grpo").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "another"))
    assert run_folder.is_own_run(own)
    monkeypatch.setattr(run_folder.os, "getuid", lambda: 12345)  # the other user asks
    assert not run_folder.is_own_run(own)


def test_a_run_that_cannot_be_recorded_is_created_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "cache" / "own-runs.txt").mkdir(parents=True)  # cannot be opened, even by root
    run = run_folder.create_run(setting.load_settings("pocket/tiny"), tmp_path / "run")
    assert run_folder.is_own_run(run)
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with pytest.warns(UserWarning, match="could not be recorded as your own.* need --trust"):
        run = run_folder.create_run(setting.load_settings("pocket/tiny"), tmp_path / "second")
    assert run_folder.read_run_info(run)["status"] == "created"
    assert not run_folder.is_own_run(run)


SCRIPT = "<script>alert(1)</script>"


@pytest.mark.slow
def test_texts_of_a_run_are_texts_in_its_report(tmp_path):
    """Names of rewards and categories, prompts and words of the profile: neither markup nor formulas."""
    run = synthetic.write(tmp_path / "%s {x}")
    for file in (
        run / "run.json",
        run / "metrics.jsonl",
        run / "evaluation" / "summary.json",
        run / "evaluation" / "scores.jsonl",
    ):
        text = (
            file.read_text()
            .replace("single_object", SCRIPT)
            .replace("pocket-geneval", f"m:{SCRIPT}")
        )
        file.write_text(text)
    lines = [
        json.loads(line) for line in (run / "evaluation" / "scores.jsonl").read_text().splitlines()
    ]
    for line in lines:
        line["prompt"] = r"$\frac$ and $x_1$ " + SCRIPT
    (run / "evaluation" / "scores.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    words = {"kind": f"$\\frac$ {SCRIPT}", "sampler": SCRIPT}
    write_json(run / "profile.json", read_json(run / "profile.json") | words)
    for name in ("train", "evaluate"):
        page = write_run_report(run, name).read_text()
        assert "<script" not in page
        assert "&lt;script&gt;" in page


def test_dollars_in_a_text_make_no_formula():
    from matplotlib.text import Text

    for words in (r"$\frac$", "$x_1$", r"a \$5 and $6$"):
        value = {"mean": 0.1, "lo": 0.0, "hi": 0.2}
        made = [
            figures.plot_image_grid([[Image.new("RGB", (8, 8))]], [words], [words], [[words]]),
            figures.plot_categories({"base": {words: 0.1}, "plain": {words: 0.2}}, words),
            figures.plot_deltas({words: {"plain-base": value, f"{words}-base": value}}),
            plot_profile({"mean": [0.5, 0.2], "std": [0.1, 0.1], "kind": words}),
        ]
        for figure in made:
            figure.canvas.draw()
            found = [text for text in figure.findobj(Text) if words in text.get_text()]
            assert found and not any(text.get_parse_math() for text in found)


def test_a_logarithmic_axis_keeps_its_formulas():
    metrics = pd.DataFrame({"iteration": [1, 2, 3], "grad_norm": [1e-5, 1e-3, 1.0]})
    figure = functions_of_report("train").plot_gradient_norm(metrics)
    figure.canvas.draw()
    assert all(label.get_parse_math() for label in figure.axes[0].get_yticklabels())


def test_a_full_disk_leaves_the_report_that_was_there(tmp_path, monkeypatch):
    run = synthetic.write(tmp_path / "run")
    (run / "report.ipynb").write_text("the old one")

    def full(source, out, **rest):
        Path(out).write_text("")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(papermill, "execute_notebook", full)
    with pytest.raises(InputError, match="no disk space"):
        write_run_report(run)
    assert (run / "report.ipynb").read_text() == "the old one"
    assert not [file for file in run.iterdir() if file.name.startswith(".")]


ESCAPE = "\x1b]0;owned\x07\x9b2J"  # sets a terminal's title, and clears its screen


def test_the_words_of_a_run_do_not_drive_the_terminal(tmp_path):
    """Names of rewards as a stranger may write them; every command prints through the same stream."""
    run = synthetic.write(tmp_path / "run")
    summary = read_json(run / "evaluation/summary.json")
    summary["rewards"][ESCAPE] = summary["rewards"]["pocket-clip"]
    write_json(run / "evaluation/summary.json", summary)
    done = call("compare", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "owned" in done.stdout and not set("\x1b\x07\x9b") & set(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "odd",
    [
        {"reward_mean": None, "clip_fraction": [1e308]},
        {"reward_mean": 1e308, "seconds_total": 1e308},
        {"eval_x": "text"},
        {"eval_x": 10**400},
        {"iteration": 0},
    ],
    ids=lambda odd: str(odd)[:30],
)
def test_watch_shows_odd_metrics_or_refuses_them(tmp_path, odd):
    run = synthetic.write(tmp_path / "run", evaluated=False)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    (run / "metrics.jsonl").write_text(json.dumps(line | odd) + "\n")
    done = call("watch", run)
    if done.returncode:
        assert (
            done.returncode == 2
            and "metrics.jsonl is damaged" in done.stderr
            and done.stderr.count("\n") == 1
        )
    else:
        assert (
            done.stdout.startswith("iteration ")
            and "the run is finished" in done.stdout
            and not done.stderr
        )
    assert all(len(line) < 300 for line in (done.stdout + done.stderr).splitlines())


def test_a_run_of_another_version_is_read_and_what_only_that_knew_is_named(tmp_path):
    run = synthetic.write(tmp_path / "theirs")
    note = read_json(run / "run.json")
    note["settings"] |= {"temperature_of_rain": 3}
    note["versions"] |= {"chunk_grpo": "9.9"}
    write_json(run / "run.json", note)
    for words in (["compare"], ["plan", "--rate", "1", "--run"]):
        done = call(*words, run, cwd=tmp_path)
        said = {  # without the end of a kernel, cut short
            line for line in done.stderr.splitlines() if not line.startswith("[IPKernelApp]")
        }
        assert done.returncode == 0 and len(said) == 1, done.stderr
        known = ("temperature_of_rain", "theirs", "made by chunk_grpo 9.9")
        assert all(part in done.stderr for part in known)
    done = call("verify", run)
    assert done.returncode == 2 and "theirs, made by chunk_grpo 9.9" in done.stderr, done.stderr
    note["settings"]["clip_range"] = "wide"
    write_json(run / "run.json", note)
    done = call("compare", run, cwd=tmp_path)
    assert done.returncode == 2 and "theirs, made by chunk_grpo 9.9" in done.stderr
    assert "`clip_range`" in done.stderr


def test_a_setting_without_effect_of_an_older_run_is_read_as_its_default_with_a_warning(tmp_path):
    run = synthetic.write(tmp_path / "old")
    note = read_json(run / "run.json")
    adaptive = {"chunks": "adaptive:4", "train_chunks": "all"}
    note["settings"] |= {**adaptive, "profile_every": 5, "anchor_every": 3}
    write_json(run / "run.json", note)
    with pytest.raises(InputError, match="`anchor_every` must be 0"):
        setting.load_settings(note["settings"])
    with pytest.warns(
        UserWarning, match="old, made by .*anchor_every 3 as 0, profile_every 5 as 0"
    ):
        settings = run_folder.read_run_settings(run)
    assert (settings.chunks, settings.profile_every, settings.anchor_every) == ("adaptive:4", 0, 0)
    done = call("compare", run, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("profile_every 5 as 0") == 1, done.stderr
