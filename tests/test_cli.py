"""The command line: exit codes, one sentence on stderr, nothing left behind; commands on a run that exists."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import typer
import yaml
from commands import call, command, environment
from safetensors.torch import save_file
from tiny_flux import build
from typer.testing import CliRunner

import chunk_grpo
from chunk_grpo import InputError
from chunk_grpo.cli import main
from chunk_grpo.core import settings
from chunk_grpo.reporting import reports


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["plan", "pocket/dmo"], ["'pocket/dmo'", "pocket/demo"]),
        (["plan", "nowhere.yaml"], ["'nowhere.yaml'", "presets"]),
        (["plan", "pocket/tiny", "learnin_rate=1"], ["`learnin_rate`", "`learning_rate`"]),
        (["plan", "pocket/tiny", "steps"], ["name=value", "'steps'"]),
        (["train", "pocket/tiny", "--seed", "1"], ["`seed`", "seed=VALUE", "--seed"]),
        (["plan", "pocket/tiny", "--learning-rate=1"], ["`learning_rate`", "learning_rate=VALUE"]),
        (["train", "--config", "my.yaml"], ["`SETTINGS`", "chunk-grpo train my.yaml", "--config"]),
        (["methods", "pocket/dmo"], ["'pocket/dmo'", "pocket/demo"]),
        (["plan", "pocket/tiny", "--processes", "3"], ["`processes`", "got 3"]),
        (["plan", "pocket/tiny", "--rate", "-1"], ["`--rate`", "-1"]),
        (["plan", "pocket/tiny", "--rate", "nan"], ["`--rate`", "nan"]),
        (["plan", "pocket/tiny", "--rate", "inf"], ["`--rate`", "inf"]),
        (["plan", "pocket/tiny", "--device", "h200", "--share", "nan"], ["`--share`", "nan"]),
        (["plan", "x" * 300], ["xxx", "File name too long"]),
        (["train", "pocket/tiny", "iterations=100000000000"], ["`iterations`", "at most 1000000"]),
        (
            ["train", "pocket/tiny", "steps=100000000000", "chunks=steps"],
            ["`steps`", "at most 10000"],
        ),
        (["train", "pocket/tiny", "--out", "x" * 300], ["xxx", "File name too long"]),
        (["train", "pocket/tiny", "--out", "run", "model=" + "x" * 300], ["xxx", "too long"]),
        (
            ["train", "pocket/tiny", "--out", "run", "prompts=" + "x" * 300],
            ["xxx", "is not a file"],
        ),
        (["profile", "pocket/tiny", "--steps", "9" * 5000], ["`--steps`"]),
        (["profile", "pocket/tiny", "--json", "x" * 300], ["File name too long"]),
        (["study", "explain", "--seeds", "9" * 5000], ["`--seeds`"]),
        (["study", "x" * 300], ["File name too long"]),
        (["report", "x" * 300], ["File name too long"]),
        (["evaluate", "x" * 300], ["File name too long"]),
        (["serve-reward", "pocket-clip", "--port", "99999"], ["port", "99999", "65535"]),
        (["serve-reward", "pocket-clip", "--host", "no such host"], ["host", "'no such host'"]),
        (
            ["serve-reward", "pocket-clip", "--host", "203.0.113.7", "--token", "HOME"],
            ["host", "203.0.113.7"],
        ),
        (["serve-reward", "pocket-clip", "--host", "0.0.0.0"], ["token"]),
        (["serve-reward", "pocket-clip", "--max-bytes", "0"], ["max_bytes", "0"]),
        (["train", "pocket/tiny", "steps=18"], ["`chunks`", "17"]),
        (["train", "pocket/tiny", "iterations=1.5"], ["`iterations`", "1.5"]),
        (
            ["train", "pocket/tiny", "reward=pocket-clp"],
            ["`reward`", "pocket-clip", "'pocket-clp'"],
        ),
        (["presets", "pocket/demmo"], ["'pocket/demmo'", "pocket/demo"]),
        (["train", "pocket/tiny", "--processes", "0"], ["`processes`", "got 0"]),
        (["train", "pocket/tiny", "--resume"], ["`--resume`", "`--out`"]),
        (["train", "pocket/tiny", "--out", "nowhere", "--resume"], ["nowhere"]),
        (["profile", "pocket/tiny", "eta=0"], ["`eta`", "above 0"]),
        (["profile"], ["settings", "`--run`"]),
        (["profile", "pocket/dmo"], ["'pocket/dmo'", "pocket/demo"]),
        (["profile", "pocket/tiny", "--steps", "10,1"], ["`--steps`", "from 2", "'10,1'"]),
        (["profile", "pocket/tiny", "--steps", "10,x"], ["`--steps`", "commas", "'10,x'"]),
        (["profile", "pocket/tiny", "--json", "."], ["`--json`", "folder"]),
        (["profile", "--run", "nowhere"], ["nowhere"]),
        (["evaluate", "nowhere"], ["nowhere"]),
        (["report", "nowhere"], ["nowhere"]),
        (["study", "explane"], ["'explane'", "explain"]),
        (["study", "explain", "--arms", "steps,stairs"], ["`arms`", "reweighted", "'stairs'"]),
        (["study", "explain", "--seeds", "0,16"], ["`seeds`", "between 0 and 15", "16"]),
        (["study", "explain", "--seeds", "x"], ["`--seeds`", "'x'"]),
        (["study", "explain", "--known", "nowhere.jsonl"], ["`--known`", "nowhere.jsonl"]),
        (["study", "explain", "--processes", "0"], ["`processes`", "got 0"]),
        (["compare", "nowhere"], ["nowhere"]),
        (["sample", "nowhere", "a star"], ["nowhere"]),
        (["sample", "nowhere"], ["neither"]),
        (["export", "nowhere", "mine"], ["nowhere"]),
        (["evaluate", "nowhere", "--benchmark", "geneval", "--json"], ["`--json`", "summary.json"]),
        (["evaluate", "nowhere", "--rewards", "clip"], ["`--rewards`", "`--benchmark`", "'clip'"]),
        (["evaluate", "nowhere", "--samples", "3"], ["`--samples`", "`--benchmark`", "got 3"]),
        (["evaluate", "nowhere", "--judge-url", "http://a"], ["`--judge-url`", "`--benchmark`"]),
        (["evaluate", "nowhere", "--out", "x"], ["`--out`", "`--images`", "'x'"]),
        (["evaluate", "--images", "a=b"], ["`--images`", "`--benchmark`"]),
        (
            ["evaluate", "run", "--images", "a=b", "--benchmark", "geneval"],
            ["`RUN`", "without `--images`", "'run'"],
        ),
        (
            ["evaluate", "--images", "a=b", "--benchmark", "geneval", "--processes", "2"],
            ["`--processes`", "without `--images`", "got 2"],
        ),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    tmp_path, monkeypatch, capfd, arguments, parts
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chunk-grpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said, error = capfd.readouterr()
    assert ended.value.code == 2 and said == ""
    assert error.startswith("chunk-grpo: ") and error.count("\n") == 1
    assert all(part in error for part in parts), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "pocket/tiny", "--out", "loop"],
        ["train", "pocket/tiny", "--out", "loop/run"],
        ["report", "loop"],
        ["train", "loop"],
        ["train", "pocket/tiny", "--out", "loop", "--resume"],
        ["train", "pocket/tiny", "--out", "run", "model=./loop"],
        ["train", "pocket/tiny", "--out", "run", "prompts=loop"],
        ["compare", "loop"],
        ["profile", "pocket/tiny", "--out", "loop/a.html"],
    ],
)
def test_a_loop_of_links_is_one_sentence(tmp_path, monkeypatch, capfd, words):
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chunk-grpo", *words])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ended:
        main.main()
    said, error = capfd.readouterr()
    assert ended.value.code == 2 and said == "" and "loop" in error and error.count("\n") == 1, (
        error
    )
    assert [one.name for one in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize(
    "command, name", [("speed", "d.json"), ("compare", "d.html"), ("tables", "d.html")]
)
def test_a_folder_is_never_replaced_by_a_file(tmp_path, monkeypatch, capfd, command, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("dear")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["chunk-grpo", command, "--out", name, *["nowhere"] * (command == "compare")]
    )
    with pytest.raises(SystemExit) as ended:
        main.main()
    error = capfd.readouterr().err
    assert (
        ended.value.code == 2
        and "`--out`" in error
        and "folder" in error
        and error.count("\n") == 1
    )
    assert (tmp_path / name / "thesis.tex").read_text() == "dear"


def test_the_command_itself_ends_with_2(tmp_path):
    words = command("train", "pocket/tiny", "steps=18")
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stderr.startswith("chunk-grpo: `chunks`")
        and done.stderr.count("\n") == 1
    )


def note(run):
    """A run.json that says little more than the settings."""
    whole = settings.load_settings("pocket/tiny").model_dump(mode="json")
    (run / "run.json").write_text(json.dumps({"settings": whole, "status": "finished"}))


def test_profile_refuses_a_run_without_weights_and_settings_beside_a_run(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    note(tmp_path / "run")
    monkeypatch.setattr(
        reports, "write_report", lambda *_, **__: pytest.fail("a report was started")
    )
    for words, part in (
        ([], "because it is not finished"),
        (["pocket/tiny"], "name=value; got 'pocket/tiny'"),
        (["eta=0"], "`eta`"),
    ):
        answer = CliRunner().invoke(main.app, ["profile", *words, "--run", str(tmp_path / "run")])
        assert isinstance(answer.exception, InputError) and part in str(answer.exception), (
            answer.exception
        )


def test_profile_hands_its_options_to_the_report(tmp_path, monkeypatch):
    (tmp_path / "run/final").mkdir(parents=True)
    save_file({"weight": torch.zeros(1)}, tmp_path / "run/final/weights.safetensors")
    note(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(
        reports, "write_report", lambda name, out, /, **values: given.append((name, out, values))
    )
    for words in (
        ["pocket/tiny"],
        [
            "seed=4",
            "--run",
            "run",
            "--prompts",
            "3",
            "--images",
            "1",
            "--steps",
            "10,50",
            "--json",
            "p.json",
            "--out",
            "p.html",
        ],
    ):
        answer = CliRunner().invoke(main.app, ["profile", *words], catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
    (name, out, plain), (_, chosen, values) = given
    assert (name, str(out), str(chosen)) == ("profile", "profile.html", "p.html")
    known = reports.report_parameters("profile")
    assert plain == {
        key: p["default"] for key, p in known.items()
    }  # without options the report's own defaults
    assert values == {
        "settings": "",
        "overrides": ["seed=4"],
        "run": "run",
        "prompts": 3,
        "images": 1,
        "step_counts": [10, 50],
        "out": "p.json",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["fly"],
        ["plan", "pocket/tiny", "--processes", "two"],
        ["plan", "--fast"],
        *(["profile", "pocket/tiny", "--prompts", text] for text in ("two", "0", "100000000000")),
        ["profile", "pocket/tiny", "--images", "0"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments):
    answer = CliRunner().invoke(main.app, arguments)
    assert answer.exit_code == 2 and "Usage" in answer.output


def test_help_names_every_command():
    answer = CliRunner().invoke(main.app, ["--help"])
    assert answer.exit_code == 0
    for name in typer.main.get_command(main.app).commands:
        line = next(line for line in answer.output.splitlines() if line.split()[:1] == [name])
        assert line.endswith(".") and not line.endswith("..."), "the summary is cut off"
        assert CliRunner().invoke(main.app, [name, "--help"]).exit_code == 0


def command_examples() -> list[list[str]]:
    """The words of every example in the help of every command."""
    lines = [
        line
        for one in typer.main.get_command(main.app).commands.values()
        for line in one.epilog.splitlines()
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("  chunk-grpo ")]


@pytest.mark.parametrize("words", command_examples(), ids=" ".join)
def test_the_examples_of_the_help_are_commands(words):
    """Each stands in the help of its own command, as it is typed, and its words are understood."""
    said = CliRunner().invoke(main.app, [words[0], "--help"]).output
    assert any(line.startswith(f"    chunk-grpo {words[0]}") for line in said.splitlines())
    one = typer.main.get_command(main.app).commands[words[0]]
    given = one.make_context(words[0], words[1:]).params
    assert any(given.values()) or len(words) == 1


def test_every_command_has_an_example():
    assert {words[0] for words in command_examples()} == set(
        typer.main.get_command(main.app).commands
    )


SHORT = ["prompts_per_iteration=1", "images_per_prompt=2", "eval_every=0", "eval_count=1"]
LESS = {  # words behind an example that make it shorter; transitions and prompts stay, as `tables` wants them
    "train pocket/tiny seed=1 --out runs/one": ["iterations=1", *SHORT],
    "train pocket/tiny seed=1 --out runs/one --resume auto": [
        "iterations=2",
        *SHORT,
        "--no-report",
    ],
    "speed --prompts 1 --images 2 --repeats 1": ["chunks=1,2", "--steps", "4"],
    "profile --run runs/one --json profile.json": ["--prompts", "1", "--images", "2"],
}
SKIPPED = {  # those that need a server, a download, a GPU's model or hours
    "train pocket/demo iterations=200 --no-report",
    "evaluate runs/one --benchmark pocket:test",
    "profile pocket/tiny --prompts 2",
    "export runs/one my-lora --layout kohya --push-to-hub me/my-lora",  # an adapter, a login
}
DAYS = {
    "without a run": ["speed", "plan", "presets", "doctor"],
    "with a run": "train plan evaluate sample export report compare tables profile".split(),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("day", DAYS)
def test_the_examples_of_the_help_run(tmp_path, day):
    """In the order of a user's day; the run is trained by the first, and the others find it."""
    names = DAYS[day]
    assert {*LESS, *SKIPPED} <= {" ".join(words) for words in command_examples()}
    (tmp_path / "FILE").write_text("a blue ring\n")
    (tmp_path / "mine.tsv").write_text("Prompt\tkind\na blue ring\tshape\n")
    examples = [
        words
        for words in command_examples()
        if words[0] in names and ("runs/one" in words) == (day == "with a run")
    ]
    assert {words[0] for words in examples} == {*names}
    for words in sorted(examples, key=lambda words: names.index(words[0])):
        line = " ".join(words)
        if line in SKIPPED:
            continue
        if words[0] == "compare":
            shutil.copytree(tmp_path / "runs/one", tmp_path / "runs/two")
        done = call(*words, *LESS.get(line, []), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    if day == "with a run":
        iterations = (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()[1:]
        assert len(iterations) == 2, "it was gone on with"
        assert (tmp_path / "stars/contact-sheet.png").is_file()
        assert (tmp_path / "my-model/README.md").is_file()


def test_the_version_is_the_packages():
    answer = CliRunner().invoke(main.app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"chunk-grpo {chunk_grpo.__version__}\n")


def test_the_shell_completes_commands_and_presets():
    for words, wanted in (
        ("chunk-grpo pres", "presets"),
        ("chunk-grpo train pocket/de", "pocket/demo"),
        ("chunk-grpo sample --reso", "--resolution"),
    ):
        given = {
            "_CHUNK_GRPO_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        answer = CliRunner().invoke(main.app, [], env=given, prog_name="chunk-grpo")
        assert wanted in answer.output.split(), (words, answer.output)


def test_what_a_script_reads_is_json():
    said = CliRunner().invoke(main.app, ["plan", "pocket/demo", "--rate", "1", "--json"]).output
    numbers = json.loads(said)["numbers"]
    run_settings = settings.load_settings("pocket/demo")
    assert numbers["iterations"] == run_settings.iterations and numbers["least_seconds"]["run"] > 0
    assert (
        list(json.loads(CliRunner().invoke(main.app, ["presets", "--json"]).output))
        == settings.list_presets()
    )
    found = json.loads(CliRunner().invoke(main.app, ["doctor", "--json"]).output)
    assert found["versions"][
        "chunk-grpo"
    ] == chunk_grpo.__version__ and "reward pocket-clip" in str(found)


def test_the_help_says_which_command_lists_the_settings():
    """What it prints is a settings file, with the meaning of every setting behind it."""
    said = " ".join(CliRunner().invoke(main.app, ["train", "--help"]).output.split())
    (line,) = re.findall(r"`chunk-grpo ([^`]+)` lists with their meaning", said)
    said = CliRunner().invoke(main.app, shlex.split(line)).output
    assert settings.load_settings(yaml.safe_load(said)) == settings.load_settings("pocket/demo")
    meanings = {text.split(":")[0]: text.split("  # ")[1] for text in said.splitlines()}
    assert meanings.keys() == settings.Settings.model_fields.keys()
    assert meanings["eval_steps"] == "ODE steps in evaluation. Unit: transitions."
    assert (
        json.loads(CliRunner().invoke(main.app, ["presets", "pocket/tiny", "--json"]).output)[
            "model"
        ]
        == "pocket"
    )


def test_every_preset_has_a_line():
    said = CliRunner().invoke(main.app, ["presets"]).output.splitlines()
    assert [line.split()[0] for line in said] == settings.list_presets()
    assert all(line.endswith(".") for line in said)


def test_nothing_is_coloured_and_no_bar_is_drawn_where_nobody_looks(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["chunk-grpo", "--version"])
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code and os.environ["TQDM_DISABLE"] == "1"
    monkeypatch.setenv("FORCE_COLOR", "1")
    for words in (["--help"], ["plan", "--help"], ["fly"]):
        assert "\x1b" not in CliRunner().invoke(main.app, words).output


def test_exit_codes_are_documented():
    said = CliRunner().invoke(main.app, ["--help"]).output
    assert all(re.search(rf"^ +{code} +\w", said, re.MULTILINE) for code in main.EXIT_CODES)
    assert set(main.EXIT_CODES) == {0, 1, 2, 75, 130, 143}


@pytest.mark.parametrize("text", ["learnin_rate=1", "reward=pocket-clp"])
def test_a_mistyped_name_is_said_without_importing_torch(tmp_path, text):
    code = (
        "import sys; from chunk_grpo import InputError; from chunk_grpo.cli import main\n"
        f"try: main.settings.load_settings('pocket/demo', ['{text}'])\n"
        "except InputError: sys.exit(3 + ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 3


@pytest.mark.parametrize(
    "preset",
    [  # in every run one of the paper's, of the pocket model's and of a machine's
        name
        if name in ("paper/chunk", "pocket/demo", "machines/8x80gb-full-flux1-dev")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in settings.list_presets()
        if not name.startswith("authors/")
    ],
)  # those of test_method_table
def test_plan_counts_every_preset(preset):
    answer = CliRunner().invoke(main.app, ["plan", preset, "--rate", "1"])
    assert answer.exit_code == 0, answer.output
    run_settings = settings.load_settings(preset)
    images = run_settings.prompts_per_iteration * run_settings.images_per_prompt
    assert (
        f"{images:,} = {run_settings.prompts_per_iteration} prompts x {run_settings.images_per_prompt} images"
        in answer.output
    )
    assert (
        f"{run_settings.iterations:,} iterations, {images * run_settings.iterations:,} images"
        in answer.output
    )
    assert "estimated, not measured" in answer.output and re.search(
        r"memory per process +\S+ [kMG]B", answer.output
    )


def test_plan_of_an_unknown_model_has_counts_only():
    answer = CliRunner().invoke(main.app, ["plan", "paper/chunk", "model=some/model"])
    assert (
        answer.exit_code == 0
        and "images per iteration" in answer.output
        and "cannot be estimated" in answer.output
    )


def test_plan_starts_nothing(tmp_path):
    done = call("plan", "pocket/tiny", cwd=tmp_path)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []


def test_doctor_finds_the_weights_intact(tmp_path):
    done = call("doctor", cwd=tmp_path, CHUNK_GRPO_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "intact" in done.stdout and str(tmp_path / "cache") in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A folder with a model in miniature, prompts and a settings file."""
    folder = tmp_path_factory.mktemp("small")
    build(folder / "model")
    (folder / "prompts.txt").write_text("a red star\na blue circle\ntwo cats\nthree dogs\n")
    (folder / "s.yaml").write_text(
        json.dumps(
            {
                "model": str(folder / "model"),
                "prompts": str(folder / "prompts.txt"),
                "eval_prompts": str(folder / "prompts.txt"),
                "resolution": 64,
                "eval_resolution": 64,
                "max_tokens": 8,
                "dtype": "float32",
                "gradient_checkpointing": False,
                "iterations": 2,
                "prompts_per_iteration": 2,
                "images_per_prompt": 4,
                "update_batch": 32,
                "threads": 1,
                "max_grad_norm": 1.0,
                "reward": "tiny_rewards:red",
                "eval_every": 1,
                "eval_steps": 4,
                "hybrid_split": 2,
            }
        )
    )
    return folder


def log(folder, *arguments):
    """What the command line says in a folder."""
    done = call(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def trained(small):
    """A run in that folder, begun with another seed."""
    said = log(small, "train", "s.yaml", "seed=3", "--no-report")
    assert (
        "run folder: runs/s-001" in said
        and re.search(r"iteration 2/2 +reward", said)
        and "report" not in said
    )
    return small / "runs/s-001"


def test_a_run_from_training_to_comparison(small, trained):
    run = trained
    assert json.loads((run / "run.json").read_text())["settings"]["seed"] == 3
    said = log(small, "evaluate", run, "--no-report")
    assert "report:" not in said and not (run / "evaluation/report.html").exists()
    assert re.search(r"tiny_rewards:red plain +-?\d\.\d{4} \(-?\d\.\d{4} to -?\d\.\d{4}\)", said)
    summary = json.loads(log(small, "evaluate", run, "--json"))
    assert summary == json.loads((run / "evaluation/summary.json").read_text())
    assert "s-001" in log(small, "compare", run)
    assert all(
        page.stat().st_size > 10_000
        for page in (run / "evaluation/report.html", small / "compare.html")
    )
    before = (run / "metrics.jsonl").read_bytes()
    assert "finished" in log(
        small, "train", "s.yaml", "seed=3", "--out", run, "--resume", "--no-report"
    )
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_is_reported_and_profiled(small, trained):
    assert "report.html" in log(small, "report", trained)
    log(small, "profile", "s.yaml", "--out", "mine.html")
    both = small / "both.html"
    words = ("--steps", "4,17", "--prompts", "3", "--json", "p.json", "--out", "both.html")
    log(small, "profile", "--run", "runs/s-001", *words)
    assert "intervals exclude 0" in both.read_text()
    measured = json.loads((small / "p.json").read_text())
    assert (
        len(measured["mean"]) == len(measured["trained_mean"]) == 17
        and measured["trajectories"] == 6
    )
    assert (
        measured["mean"] != measured["trained_mean"]
        and 0 <= measured["variance_shares"]["prompt"] < 1
    )
    assert all(
        page.stat().st_size > 10_000
        for page in (trained / "report.html", small / "mine.html", both)
    )


def test_an_interrupt_says_how_to_go_on(small, tmp_path):
    words = command(
        "train", small / "s.yaml", "iterations=500", "--processes", "1"
    )  # else it depends on the cores
    child = subprocess.Popen(
        words,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    metrics = tmp_path / "runs/s-001/metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
        assert child.poll() is None and time.monotonic() < end, "training did not get going"
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"chunk-grpo train {small / 's.yaml'} iterations=500 --out runs/s-001 --resume" in error
    assert "Traceback" not in error
    assert json.loads((tmp_path / "runs/s-001/run.json").read_text())["status"] == "interrupted"


def test_doctor_brings_no_file_too_many(tmp_path):
    """HPSv3 needs a configuration and a tokenizer of a repository that has 16 GB of weights beside them."""
    said = call(
        "doctor",
        cwd=tmp_path,
        HF_HOME=str(tmp_path / "hub"),
        CHUNK_GRPO_CACHE=str(tmp_path / "cache"),
    ).stdout
    line = next(line for line in said.splitlines() if line.startswith("reward hpsv3 "))
    assert "hf download MizzenAI/HPSv3 HPSv3.safetensors" in line and "base" in line
    base = "config.json tokenizer.json tokenizer_config.json vocab.json merges.txt"
    assert f"hf download Qwen/Qwen2-VL-7B-Instruct {base};" in line
    for name in ("clip", "pickscore", "imagereward"):
        line = next(line for line in said.splitlines() if line.startswith(f"reward {name} "))
        assert all(
            re.search(r"\.(json|txt|pt|safetensors)\b", words)
            for words in line.split("hf download ")[1:]
        )
    licences = {
        "HPDv2": "Apache-2.0",
        "PartiPrompts": "Apache-2.0",
        "DrawBench": "no licence",
        "GenEval": "MIT",
    }
    for name, licence in licences.items():
        assert any(
            line.startswith(f"prompts {name} ") and licence in line for line in said.splitlines()
        ), name
