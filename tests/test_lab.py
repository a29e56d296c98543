"""chunk-grpo lab: a run's widgets in a notebook of its reader's own, opened by one command."""

import ast
import shutil
import subprocess
import sys

import nbformat
import pytest
from commands import call

from chunk_grpo import InputError
from chunk_grpo.reporting import figures, lab
from chunk_grpo.runs import run_folder


def test_every_cell_runs_on_a_trained_run(whole, tmp_path, monkeypatch):
    "As a reader runs them: the curve, the chunk editor, trajectories, a prompt."
    file = lab.write_lab_notebook(whole, tmp_path)
    seen = []
    monkeypatch.setattr(figures, "display", lambda *given, **more: seen.append(given))
    names, values = {}, []
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "code":
            *lines, last = ast.parse(cell.source).body
            exec(compile(ast.Module(lines, []), "cell", "exec"), names)
            kind = "eval" if isinstance(last, ast.Expr) else "exec"
            code = ast.Expression(last.value) if kind == "eval" else ast.Module([last], [])
            values.append(eval(compile(code, "cell", kind), names))
    curve, editor, trajectories, drawn = values[1:]
    assert curve == "finished" and seen
    assert str(editor.value) == run_folder.read_run_profile(whole)["chunks"]
    assert trajectories.value[0] == 0 and trajectories.page().count("<img") > 8
    assert [image["arm"] for image in drawn.value] == ["base", "plain", "hybrid"]
    assert names["run"] == whole.resolve()


def test_the_run_s_folder_stays_as_it_is(whole, tmp_path):
    before = sorted(whole.rglob("*"))
    with pytest.raises(InputError, match="`--folder` must lie outside the run's folder"):
        lab.write_lab_notebook(whole, whole / "samples")
    lab.write_lab_notebook(whole, tmp_path)
    assert sorted(whole.rglob("*")) == before


def test_the_command_says_where_the_notebook_is_and_hands_options_on(whole, tmp_path):
    "JupyterLab itself answers --version, and ends."
    done = call("lab", whole, "--", "--version", cwd=tmp_path)
    version = subprocess.run([sys.executable, "-m", "jupyterlab", "--version"], capture_output=True, text=True).stdout
    assert done.returncode == 0 and done.stdout.splitlines() == ["notebook: whole.ipynb", version.strip()]
    assert (tmp_path / "whole.ipynb").is_file()


def test_what_cannot_be_opened_is_said(tmp_path):
    done = call("lab", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and "nowhere" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium on this machine (apt-get install chromium)")
def test_it_opens_in_a_browser(whole, tmp_path):
    "The notebook stands there, not the launcher; with its cells run, every field has a name, also what a slider sets."
    from test_widgets import CHROMIUM, start_lab

    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    file = lab.write_lab_notebook(whole, tmp_path)
    with start_lab(tmp_path, lambda options: lab.lab_command(file, options)) as address:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page, expect = browser.new_page(viewport={"width": 1400, "height": 1100}), playwright.expect
            expect.set_options(timeout=60_000)
            page.goto(address, timeout=120_000)
            expect(page.get_by_role("heading", name="whole")).to_be_visible(timeout=120_000)
            expect(page.get_by_text("| Idle")).to_be_visible(timeout=120_000)
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
            expect(page.get_by_role("button", name="draw")).to_be_visible(timeout=180_000)
            fields = {"textbox": ["chunks", "prompt"], "spinbutton": ["transitions done", "seed"],
                      "combobox": ["prompt"]}
            for role, name in [(role, name) for role, names in fields.items() for name in names]:
                expect(page.get_by_role(role, name=name, exact=True)).to_be_visible()
            page.get_by_role("spinbutton", name="transitions done").fill("0")
            page.keyboard.press("Enter")
            expect(page.get_by_text("noise level σ = 1.000")).to_be_visible()
            page.screenshot(path=tmp_path / "lab.png")
            browser.close()
