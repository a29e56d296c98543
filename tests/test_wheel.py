"""The wheel: what it carries, and its commands in an environment that has the other packages but not this checkout."""

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from chunk_grpo.core import settings
from chunk_grpo.pocket import POCKET_MODELS

ROOT = Path(__file__).resolve().parents[1]
TRACKED = ["git", "ls-files", "-co", "--exclude-standard"]
PACKAGES = Path(pytest.__file__).resolve().parents[1]  # what this environment has installed
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
BUILD_EDITABLE = """
import sys
from setuptools import build_meta
build_meta.build_editable(sys.argv[1], {"editable_mode": "compat"})
"""


def checkout_files() -> list[str]:
    """List the files of this checkout that git does not ignore."""
    listed = subprocess.run(TRACKED, cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).exists()]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files that a wheel is built from, so that a build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("wheel") / "source"
    for path in checkout_files():
        if path.startswith(("chunk_grpo", "runs", "nbs/reports")) or "/" not in path:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    """The wheel, built with this environment's setuptools."""
    out = source.with_name("wheels")
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run([*PIP, *map(str, words)], check=True)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """The folder `bin` of an environment with the wheel, which finds all other packages in this environment.

    This environment's packages are added after pip has run, so pip cannot change them.
    """
    home = wheel.parents[1] / "environment"
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin/python"
    words = ["--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([*PIP, *map(str, words)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Unlike PYTHONPATH, a line of a .pth file does not run the .pth files in the folder that it
    # names, so the editable install of this checkout stays unseen.
    (site / "others.pth").write_text(f"{PACKAGES}\n")
    return home / "bin"


def run_installed(
    folder: Path,  # the working folder
    *words,  # a program and its arguments
) -> str:
    """Run a program as a stranger does, without variables that lead to this checkout, and return what it prints."""
    own = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own["HOME"] = str(folder)
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=own, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_carries_presets_reports_and_weights(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"chunk_grpo/presets/{name}.yaml" for name in settings.list_presets()}
    expected |= {f"chunk_grpo/reports/{path.name}" for path in ROOT.glob("nbs/reports/*.ipynb")}
    expected |= {"chunk_grpo/presets/results/gpu/shares.json"}  # what `plan` reads
    expected |= {"chunk_grpo/presets/published_tables.yaml", "chunk_grpo/presets/methods.yaml"}
    home = "chunk_grpo/presets/pocket/studies"
    studies = {path.parent.name for path in (ROOT / "runs/pocket/studies").glob("*/study.yaml")}
    assert studies
    expected |= {f"{home}/{name}/{file}.yaml" for name in studies for file in ("base", "study")}
    expected |= {
        path
        for path in checkout_files()
        if path.startswith("chunk_grpo/") and not (ROOT / path).is_symlink()
    }
    shipped = {f"chunk_grpo/pocket/{folder}/vae" for folder in POCKET_MODELS.values()}
    expected |= {f"{folder}/config.json" for folder in shipped}
    expected |= {f"{folder}/diffusion_pytorch_model.safetensors" for folder in shipped}
    assert not expected - names
    assert any(name.endswith(".safetensors") for name in names)


def test_installed_wheel_finds_its_presets_and_weights(installed, tmp_path):
    code = (
        "import json, chunk_grpo, chunk_grpo.pocket as pocket; from chunk_grpo.core import settings;"
        "pocket.verify_pocket_files();"
        "pocket.verify_pocket_files(pocket.POCKET_DIR / 'bases');"
        "print(json.dumps([chunk_grpo.__file__, settings.list_presets(), settings.load_settings('pocket/demo').model]))"
    )
    file, presets, model = json.loads(run_installed(tmp_path, installed / "python", "-c", code))
    assert Path(file).is_relative_to(installed.parent)
    assert presets == settings.list_presets() and model == "pocket"


def test_installed_command_helps_plans_and_names_its_notebooks(installed, tmp_path):
    program = installed / "chunk-grpo"
    assert "train" in run_installed(tmp_path, program, "--help")
    reports = Path(run_installed(tmp_path, program, "reports", "--path").strip())
    assert reports.is_relative_to(installed.parent) and (reports / "train.ipynb").is_file()
    plan = json.loads(
        run_installed(tmp_path, program, "plan", "pocket/tiny", "--rate", "1", "--json")
    )
    assert plan["numbers"]["iterations"] == settings.load_settings("pocket/tiny").iterations


def test_editable_install_is_a_path_that_editors_follow(source, tmp_path):
    """pyright and VS Code follow a path in a .pth file, and no code in one."""
    command = [sys.executable, "-c", BUILD_EDITABLE, tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(file)
    (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
    assert archive.read(path).decode().split() == [str(source)]
    for name in ("Makefile", "CONTRIBUTING.md"):
        assert "--config-settings editable_mode=compat" in (ROOT / name).read_text()
