"""What `from chunk_grpo import ...` offers: the right objects, for people and type checkers, without a heavy import."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import chunk_grpo
from chunk_grpo.cli.main import app

ROOT = Path(__file__).parents[1]
STUB = ast.parse((ROOT / "chunk_grpo/__init__.pyi").read_text())
OFFERED = [
    (node.module, alias)
    for node in STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
]
MODULE_OF = {alias.name: module for module, alias in OFFERED}


@pytest.fixture(scope="module")
def package_files():
    """The data files that a wheel of the package holds, as setup.py names them."""
    program = (
        "import os, setuptools, distutils.core\n"
        "command = distutils.core.run_setup('setup.py', stop_after='init').get_command_obj('build_py')\n"
        "command.ensure_finalized()\n"
        "print(*[os.path.join(source, name) for _, source, _, names in command.data_files for name in names])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def loaded(program: str, *modules: str) -> set[str]:
    """Which of these modules a program of its own has imported in the end."""
    ending = (
        f"\nimport sys; print('loaded', *[name for name in {modules!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program + ending], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_names_are_those_of_all():
    assert sorted(chunk_grpo.__all__) == sorted(["InputError", *MODULE_OF])
    assert {*chunk_grpo.__all__, "__version__"} <= set(dir(chunk_grpo))
    namespace = {}
    exec("from chunk_grpo import *", namespace)
    assert set(chunk_grpo.__all__) <= set(namespace)


@pytest.mark.parametrize("name", MODULE_OF)
def test_a_name_is_the_object_of_its_module(name):
    module = f"chunk_grpo.{MODULE_OF[name]}"
    found = getattr(chunk_grpo, name)
    assert found is getattr(import_module(module), name)
    assert getattr(found, "__module__", module) == module, (
        "the chapter that it comes from, not one that imports it"
    )


def test_no_name_hides_a_chapter():
    chapters = {folder.name for folder in (ROOT / "chunk_grpo").iterdir() if folder.is_dir()}
    assert not chapters & set(chunk_grpo.__all__)


def test_an_unknown_name_is_said_with_the_package():
    with pytest.raises(AttributeError, match="No chunk_grpo attribute chunk_ration"):
        chunk_grpo.chunk_ration  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'chunk_ration' from 'chunk_grpo'"):
        from chunk_grpo import chunk_ration  # noqa: F401


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("torch", "pydantic", "numpy", "pandas", "yaml", "chunk_grpo.core")
    assert loaded("import chunk_grpo", *heavy) == set()
    assert loaded("from chunk_grpo import Settings", *heavy) == {
        "pydantic",
        "yaml",
        "chunk_grpo.core",
    }


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nsys.argv = ['chunk-grpo', '--help']\nfrom chunk_grpo.cli import main\n"
        "try: main.main()\nexcept SystemExit: pass"
    )
    assert (
        loaded(program, "torch", "numpy", "pandas", "scipy", "diffusers", "matplotlib", "nbformat")
        == set()
    )


def test_type_checkers_see_every_name():
    """A stub offers a name only when it is imported under its own name once more."""
    assert [alias.asname for _, alias in OFFERED] == [alias.name for _, alias in OFFERED]


def test_the_package_says_that_it_is_typed(package_files):
    assert {"chunk_grpo/py.typed", "chunk_grpo/__init__.pyi"} <= set(package_files)
    for name in ("train.ipynb", "report.css"):
        assert f"chunk_grpo/reports/{name}" in package_files, "the listing is the wheel's"


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words", re.findall(r"^chunk-grpo (?:train|plan) ((?:paper|machines)/[^#\n]*)", README, re.M)
)
def test_the_readmes_commands_for_gpus_fit_their_devices(words):
    device = [] if "--device" in words else ["--device", "h100"]
    answer = CliRunner().invoke(app, ["plan", *words.split(), *device])
    assert answer.exit_code == 0, answer.output
    assert re.search(r"^on \d+ x h\d+ +fits, ", answer.output, re.M), answer.output


def test_the_readme_has_such_commands():
    assert "chunk-grpo train paper/" in README and "chunk-grpo plan paper/" in README


@pytest.mark.parametrize(
    "name", ["train", "evaluate", "load_settings", "load_policy", "sample_images"]
)
def test_help_explains_the_parameters(name):
    """The comments beside parameters are part of the docstring, each under its own name."""
    function = getattr(chunk_grpo, name)
    text = inspect.getdoc(function)
    described = re.findall(
        r"^    (\w+): \S", text.partition("Args:")[2].partition("Returns:")[0], re.M
    )
    parameters = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]
    assert set(described) <= set(parameters) and len(described) >= 0.8 * len(parameters)


def test_parameters_are_described_however_the_signature_is_laid_out(tmp_path):
    (tmp_path / "laid_out.py").write_text(
        "from chunk_grpo.arguments import check_arguments, describe_parameters\n\n"
        "@check_arguments(\n    a=int,\n)\n"
        "def several(\n    a: int,  # the first\n    # the second,\n    # in two lines\n    b: str = 'x#y',\n"
        '    c: int = 0,\n) -> int:  # their sum\n    """Add."""\n    return a\n\n'
        '@check_arguments()\ndef single(a: int) -> int:  # a: the only one\n    """Return it."""\n    return a\n\n'
        '@check_arguments()\ndef bare(a):\n    """Do nothing."""\n'
    )
    program = (
        "from laid_out import *; print(several.__doc__, single.__doc__, bare.__doc__, sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    several, single, bare = done.stdout.split("|")
    expected = "Args:\n    a: the first\n    b: the second, in two lines\n\nReturns:\n    their sum"
    assert expected in several and "c:" not in several
    assert "Args:\n    a: the only one" in single and "Returns" not in single
    assert bare.strip() == "Do nothing."
