"""Report notebooks as schedulers run them: by the command `papermill`, whose parameters nobody else checks."""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from commands import environment, free_port, run

from chunk_grpo import InputError
from chunk_grpo.reporting import reports
from chunk_grpo.runs import run_folder

ROOT = Path(__file__).parents[1]
PAPERMILL = Path(sys.executable).with_name("papermill")
TINY = "iterations=1 eval_every=0 eval_count=1 eval_steps=2 hybrid_split=1"
PARAMETERS = {name: reports.report_parameters(name) for name in reports.list_reports()}
WRONG = {  # values as papermill's -p hands them over
    "str": (5, True, None),
    "int": ("two", 1.5, True, None),
    "bool": ("no", "yes", 1, 0),
    "list": (3, None, {"a": 1}),
    "dict": ("CLIP=pocket-clip", 3, None),
}


def kernel_of(name: str, given: dict) -> dict:
    """What a kernel has after papermill's own cell, which stands behind the one tagged `parameters`."""
    cells = [
        cell.source
        for cell in nbformat.read(reports.find_report_notebook(name), 4).cells
        if cell.cell_type == "code"
    ]
    injected = "# Parameters\n" + "".join(f"{key} = {value!r}\n" for key, value in given.items())
    namespace = {}
    exec(cells[0] + "\n" + injected, namespace)
    return namespace | {"In": ["", cells[0], injected, cells[1]]}


@pytest.mark.parametrize("name", PARAMETERS)
def test_first_cell_of_every_report_checks_what_it_was_given(name):
    cells = [
        cell
        for cell in nbformat.read(reports.find_report_notebook(name), 4).cells
        if cell.cell_type == "code"
    ]
    first, second, *_ = ast.parse(cells[1].source).body
    assert "parameters" in cells[0].metadata.tags
    assert ast.unparse(first) == "from chunk_grpo.reporting.reports import check_report_parameters"
    assert ast.unparse(second) == f"check_report_parameters('{name}', globals())"


@pytest.mark.parametrize("name", PARAMETERS)
def test_misspelt_parameter_is_rejected_by_name(name):
    for key in PARAMETERS[name]:
        with pytest.raises(
            InputError,
            match=f"`{key}x` is not a parameter of the report {name}; did you mean `{key}`",
        ):
            reports.check_report_parameters(name, kernel_of(name, {f"{key}x": 1}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (name, key, value)
        for name, known in PARAMETERS.items()
        for key, about in known.items()
        for value in WRONG[about["type"]]
        if not (key == "step_counts" and value == 3)
    ],
)
def test_parameter_of_the_wrong_type_is_rejected_in_one_sentence(name, key, value):
    with pytest.raises(InputError) as error:
        reports.check_report_parameters(name, kernel_of(name, {key: value}))
    assert f"`{key}` of the report {name} must be" in str(error.value) and "\n" not in str(
        error.value
    )
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "given", "expected"),
    [
        ("compare", "runs", "runs/a, runs/b", ["runs/a", "runs/b"]),
        ("tables", "runs", "runs/my run", ["runs/my run"]),
        ("profile", "step_counts", "10,25", [10, 25]),
        ("profile", "step_counts", 10, [10]),
        (
            "train",
            "overrides",
            "prompts=/my files/a b.txt seed=1",
            ["prompts=/my files/a b.txt", "seed=1"],
        ),
        ("train", "overrides", "method.upper=2  seed=1 ", ["method.upper=2", "seed=1"]),
        ("train", "overrides", "", []),
        ("profile", "overrides", ["seed=1"], ["seed=1"]),
    ],
)
def test_text_for_a_list_is_split(name, key, given, expected):
    kernel = kernel_of(name, {key: given})
    reports.check_report_parameters(name, kernel)
    assert kernel[key] == expected


def test_lists_of_something_else_than_texts_are_rejected():
    for name, key, value in [
        ("compare", "runs", [1, 2]),
        ("train", "overrides", [{"seed": 1}]),
        ("tables", "names", {"CLIP": 3}),
    ]:
        with pytest.raises(InputError, match=f"`{key}` of the report {name} must hold texts"):
            reports.check_report_parameters(name, kernel_of(name, {key: value}))


def papermill(notebook: Path, folder: Path, *words, **more) -> subprocess.CompletedProcess:
    """Run a notebook by the command itself, in a folder of its own."""
    return subprocess.run(
        [PAPERMILL, notebook, "x.ipynb", *map(str, words)],
        cwd=folder,
        capture_output=True,
        env=environment(**more),
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where a wheel of the package lies, unpacked as pip does it."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in [path for path in listed.stdout.splitlines() if (ROOT / path).exists()]:
        (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / "source" / path, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
    ]
    subprocess.run([*command, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["-p", "settngs", "paper/one-h200-lora", "-p", "out", "runs/first"],
            "did you mean `settings`",
        ),
        (
            ["-p", "settings", "pocket/tiny", "-p", "out", "runs/first", "-p", "train", "no"],
            "`train` of the report train",
        ),
        (
            ["-p", "settings", "pocket/tiny", "-p", "out", "runs/first", "-p", "processes", "two"],
            "`processes` of the",
        ),
        (
            ["-p", "settings", "pocket/tiny", "-p", "out", "runs/first", "-p", "processes", "-1"],
            "`processes` must be",
        ),
        (["-p", "out", "runs/first"], "`settings` must be a preset or a settings file"),
    ],
)
def test_wrong_parameters_of_the_command_train_nothing(words, sentence, installed, tmp_path):
    done = papermill(
        installed / "chunk_grpo/reports/train.ipynb", tmp_path, *words, PYTHONPATH=installed
    )
    assert done.returncode != 0
    assert (
        done.stderr.strip().splitlines()[-1].startswith("InputError: ") and sentence in done.stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_command_trains_what_it_was_asked_for_and_evaluates(installed, tmp_path):
    prompts = tmp_path / "my prompts.txt"
    prompts.write_text("a red star\na blue ring\ntwo stars\na red square\n")
    words = [
        "-p",
        "settings",
        "pocket/tiny",
        "-p",
        "out",
        "my runs/first",
        "-p",
        "overrides",
        f"prompts={prompts} eval_prompts={prompts} {TINY}",
    ]
    done = papermill(
        installed / "chunk_grpo/reports/train.ipynb", tmp_path, *words, PYTHONPATH=installed
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "my runs/first"
    assert run_folder.read_run_settings(out).prompts == str(prompts)
    assert run_folder.read_run_info(out)["processes"] == 1
    shutil.rmtree(out / "evaluation")
    done = papermill(
        installed / "chunk_grpo/reports/evaluate.ipynb",
        tmp_path,
        "-p",
        "run",
        out,
        PYTHONPATH=installed,
    )
    assert done.returncode == 0, done.stderr
    assert run_folder.read_evaluation_summary(out)["n_prompts"] == 4


@pytest.mark.slow
def test_evaluation_notebook_does_not_run_what_a_strangers_run_asks_for(installed, tmp_path):
    (tmp_path / "red.py").write_text(
        "def score(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    )
    words = ["pocket/tiny", *TINY.split(), f"reward={tmp_path}/red.py:score", "--no-report"]
    run("train", *words, "--out", "run", cwd=tmp_path)
    note = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(note | {"run_id": "another"}))
    notebook = installed / "chunk_grpo/reports/evaluate.ipynb"
    done = papermill(notebook, tmp_path, "-p", "run", "run", PYTHONPATH=installed)
    assert done.returncode != 0 and "was not made on this machine" in done.stderr
    assert not (tmp_path / "run/evaluation").exists()
    done = papermill(
        notebook, tmp_path, "-p", "run", "run", "-p", "trust", "True", PYTHONPATH=installed
    )
    assert done.returncode == 0, done.stderr


def test_report_runs_with_this_interpreter_whatever_kernel_is_registered(tmp_path, monkeypatch):
    """A kernel named python3 of another environment comes first on Jupyter's path."""
    place = tmp_path / "jupyter/kernels/python3"
    place.mkdir(parents=True)
    spec = {
        "argv": ["/bin/false", "{connection_file}"],
        "display_name": "another",
        "language": "python",
    }
    (place / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    cells = [
        nbformat.v4.new_code_cell("x: int = 1  # anything", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("import sys\nprint(sys.executable, x)"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "small.ipynb")
    done = reports.execute_report(tmp_path / "small.ipynb", tmp_path / "done.ipynb", x=2)
    assert nbformat.read(done, 4).cells[-1].outputs[0].text == f"{sys.executable} 2\n"
    assert "JUPYTER_PATH" in os.environ


@pytest.mark.slow
def test_two_machines_execute_the_notebook_for_one_run(installed, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red star\na blue ring\ntwo stars\na red square\n")
    port = free_port()
    prompts = f"prompts={tmp_path}/prompts.txt eval_prompts={tmp_path}/prompts.txt"
    values = {
        "settings": "pocket/tiny",
        "overrides": f"{prompts} {TINY}",
        "processes": 1,
        "nodes": 2,
        "rendezvous": f"localhost:{port}",
    }
    words = [word for name, value in values.items() for word in ("-p", name, str(value))]
    notebook = installed / "chunk_grpo/reports/train.ipynb"
    folders = [tmp_path / f"machine-{rank}" for rank in (0, 1)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as machines:
        started = [
            machines.submit(
                papermill,
                notebook,
                folders[rank],
                *words,
                *("-p", "out", tmp_path / "run", "-p", "node_rank", rank),
                PYTHONPATH=installed,
            )
            for rank in (0, 1)
        ]
        done = [machine.result() for machine in started]
    assert [machine.returncode for machine in done] == [0, 0], done[0].stderr + done[1].stderr
    info = run_folder.read_run_info(tmp_path / "run")
    assert (info["nodes"], info["status"]) == (2, "finished")
    assert run_folder.read_evaluation_summary(tmp_path / "run")["n_prompts"] == 4


@pytest.mark.slow
def test_several_machines_need_the_number_of_processes(installed, tmp_path):
    words = ["-p", "settings", "pocket/tiny", "-p", "out", "run", "-p", "nodes", "2"]
    done = papermill(
        installed / "chunk_grpo/reports/train.ipynb", tmp_path, *words, PYTHONPATH=installed
    )
    assert done.returncode and "`processes` must be given with several `nodes`" in done.stderr
    assert not (tmp_path / "run").exists()
