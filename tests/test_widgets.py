"""The widgets without a browser, the chunk editor in JupyterLab as a reader drives it, and `chunk-grpo lab`."""

import ast
import contextlib
import html
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from commands import call, free_port
from hypothesis import given
from hypothesis import strategies as st

from chunk_grpo import InputError, pocket
from chunk_grpo.core import settings
from chunk_grpo.measurements import profiles
from chunk_grpo.models import trainable
from chunk_grpo.reporting import figures, widgets
from chunk_grpo.runs import run_folder
from chunk_grpo.theory import chunks

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
MEASURED = {
    "kind": "l1",
    "mean": (0.5 * np.exp(-np.arange(17) / 6) + 0.1).tolist(),
    "std": [0.03] * 17,
}  # invented
PROFILE = torch.tensor(MEASURED["mean"][:16], dtype=torch.float64)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(
    lambda sizes: chunks.Chunks(tuple(sizes))
)


def parts(editor):
    """Field, words beside it, sliders, and the HTML below."""
    row, _, handles, below = editor.children
    return *row.children, [handle.children[1] for handle in handles.children], below


@given(SIZES.filter(lambda cut: len(cut) > 1), st.data())
def test_a_pushed_boundary_leaves_no_chunk_empty(cut, data):
    index = data.draw(st.integers(0, len(cut) - 2))
    to = data.draw(st.integers(index + 1, cut.transitions - len(cut) + 1 + index))
    moved = widgets.move_boundary(cut, index, to)  # InputError where a chunk were empty
    before, after = ([part.start for part in one.slices[1:]] for one in (cut, moved))
    assert len(moved) == len(cut) and moved.transitions == cut.transitions and after[index] == to
    away = [a != b for a, b in zip(before, after, strict=True)]
    assert not any(away[:index]) or not any(away[index + 1 :])  # only on the side that it moved to


@pytest.mark.parametrize(
    "text", ["2,3,4", "", "2,,3", "0,16", "4;12", "equal:5", "-1,17", "2,3,4,7,1", "stepz"]
)
def test_words_are_those_of_the_settings(text):
    editor = widgets.chunk_editor(MEASURED)
    field, words, *_ = parts(editor)
    with pytest.raises(InputError) as error:
        chunks.chunks_from_setting(text, 16)
    field.value = text
    assert html.escape(str(error.value)) in words.value and "chunks" in words.value


@pytest.mark.parametrize(
    ("text", "sizes"),
    [(" 2, 3,4 ,7", "2,3,4,7"), ("whole", "16"), ("equal:8", "8,8"), ("steps", ",".join("1" * 16))],
)
def test_line_gives_these_chunks(text, sizes):
    editor = widgets.chunk_editor(MEASURED, text)
    line = re.search(r"<code[^>]*>(.*?)</code>", parts(editor)[3].value)[1]
    run_settings = settings.load_settings("paper/chunk", yaml.safe_load(line))
    assert str(run_settings.chunk_rule.chunks) == str(editor.value) == sizes


def test_weights_of_a_cut():
    cut = chunks.Chunks.parse("2,3,4,7")
    rows = widgets.chunk_weight_rows(cut, PROFILE)
    each, drawn = ([float(row[name]) for row in rows] for name in list(rows[0])[2:4])
    assert each == pytest.approx([16 / (4 * size) for size in cut.sizes], abs=6e-4)
    means = [float(PROFILE[part].mean()) for part in cut.slices]
    assert drawn == pytest.approx([mean / sum(means) for mean in means], abs=6e-4)


def test_editor_keeps_the_last_valid_chunks():
    editor = widgets.chunk_editor(MEASURED)
    field, words, _, below = parts(editor)
    page = editor.page()
    seen = []
    editor.observe(lambda change: seen.append(str(change.new)), "value")
    field.value = "2,3,4"
    assert (
        "must add up to the 16 transitions that are trained; got 2,3,4, which adds up to 9"
        in words.value
    )
    assert (
        str(editor.value) == "2,3,4,7"
        and editor.page() == page
        and "chunks: 2,3,4,7<" in below.value
    )
    field.value = "<b>"
    assert "<b>" not in words.value
    field.value = "4,4,4,4"
    assert (
        "chunks" not in words.value
        and seen == ["4,4,4,4"]
        and "chunks: 4,4,4,4<" in editor.page() != page
    )


def test_editor_moves_boundaries():
    editor = widgets.chunk_editor(MEASURED)
    field, words, knobs, _ = parts(editor)
    field.value = "2,3"
    knobs[1].value = 12  # moved although the text is not valid: the last valid chunks move
    assert (field.value, str(editor.value), [knob.value for knob in knobs]) == (
        "2,10,1,3",
        "2,10,1,3",
        [2, 12, 13],
    )
    assert "chunks" not in words.value
    knobs[2].value = 3
    assert field.value == "1,1,1,13"
    field.value = "steps"
    assert parts(editor)[2] == []
    field.value = "8,8"
    assert [(knob.min, knob.value, knob.max) for knob in parts(editor)[2]] == [(1, 8, 15)]


def test_editor_refuses_what_it_cannot_begin_with():
    with pytest.raises(InputError, match="must add up to the 17"):
        widgets.chunk_editor(MEASURED, transitions=17)
    with pytest.raises(InputError, match="profile"):
        widgets.chunk_editor({**MEASURED, "mean": [0.0] * 17})


@pytest.fixture(scope="module")
def invented():
    """Frames of colours in the shape of real ones: 3 prompts, 4 transitions, 8 pixels a side."""
    images = np.random.default_rng(0).integers(0, 255, (2, 2, 3, 5, 8, 8, 3), dtype=np.uint8)
    return profiles.TrajectoryFrames(
        ("a star", "<two> rings", "a cross"), (1.0, 0.9, 0.75, 0.5, 0.0), images
    )


def test_scrubber_shows_base_beside_trained(invented):
    scrub = widgets.trajectory_scrubber(invented)
    prompt, row, words, images = scrub.children
    place, slider = row.children
    prompt.value, slider.value = 1, 3
    assert place.value == 3 and place.description == "transitions done"
    assert scrub.value == (1, 3) and "= 0.500, after 3 of 4 transitions" in words.value
    rows = [
        (view, [invented.images[0, v, 1, 3], invented.images[1, v, 1, 3]])
        for v, view in enumerate(widgets.TRAJECTORY_VIEWS)
    ]
    assert images.value == widgets.gallery_html(rows, ("base", "trained"), 192)


def test_both_leave_a_page_without_a_kernel(invented):
    editor = widgets.chunk_editor(MEASURED)
    scrub = widgets.trajectory_scrubber(invented)
    for widget, pictures in ((editor, 1), (scrub, 2 * 4 * 5)):
        page = widget._repr_mimebundle_()["text/html"]
        alts = re.findall(r'<img src="data:image/png;base64,[^"]+" alt="([^"]+)"', page)
        assert len(alts) == pictures and "<script" not in page and "<two>" not in page


def test_frames_of_weights_that_were_not_trained_are_the_base():
    policy = trainable.load_trainable_policy(
        "pocket", resolution=pocket.IMAGE_SIZE, max_tokens=pocket.MAX_TOKENS
    )
    made = profiles.render_frames(policy, ["a star"], steps=3, sampler="ode", side=32)
    assert made.images.shape == (2, 2, 1, 4, 32, 32, 3) and len(made.sigmas) == 4
    assert (made.images[0] == made.images[1]).all()


def test_frames_that_are_not_square_keep_their_proportions():
    policy = trainable.load_trainable_policy(
        "pocket", resolution=(32, 64), max_tokens=pocket.MAX_TOKENS
    )
    made = profiles.render_frames(policy, ["a star"], steps=2, sampler="ode", side=32)
    assert made.images.shape[-3:] == (16, 32, 3)


@pytest.mark.parametrize(("height", "width", "crisp"), [(40, 20, True), (20, 40, False)])
def test_only_images_narrower_than_on_the_page_are_enlarged_without_smoothing(height, width, crisp):
    image = np.zeros((height, width, 3), np.uint8)
    page = widgets.gallery_html([("a", [image])], ["base"], 30)
    assert ("pixelated" in page) == crisp


@contextlib.contextmanager
def start_lab(folder: Path, command):
    """JupyterLab with settings of its own, by a command that takes options; the address without a path."""
    port = free_port()
    own = {
        name: str(folder / name.lower())
        for name in (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_RUNTIME_DIR",
            "IPYTHONDIR",
            "JUPYTER_DATA_DIR",
            "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
        )
    }
    words = command(
        [
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={port}",
            "--IdentityProvider.token=",
            "--LabApp.news_url=None",
        ]
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(folder / "lab.log", "w") as log:
        server = subprocess.Popen(
            words, env=os.environ | own | {"PYTHONPATH": path}, stdout=log, stderr=log
        )
        try:
            for _ in range(600):
                with socket.socket() as knock:
                    if server.poll() is not None or knock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            assert server.poll() is None, (folder / "lab.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on a notebook of one cell; the address of the notebook."""
    code = (
        "import numpy as np\nfrom chunk_grpo.reporting import widgets\n"
        f"widgets.chunk_editor({MEASURED!r})"
    )
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(metadata=kernel, cells=[nbformat.v4.new_code_cell(code)])
    (tmp_path / "books").mkdir()
    nbformat.write(book, tmp_path / "books" / "editor.ipynb")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={tmp_path / 'books'}"]
    with start_lab(tmp_path, lambda options: [*command, *options]) as address:
        yield f"{address}/lab/tree/editor.ipynb?reset"


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"
)
def test_chunk_editor_in_jupyterlab(lab):
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra dev)"
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1100})
        expect = playwright.expect
        expect.set_options(timeout=60_000)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(lab, timeout=120_000)
        expect(page.get_by_text("| Idle")).to_be_visible(
            timeout=120_000
        )  # before that Lab asks for a kernel
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        output = page.locator(".jp-OutputArea-output:has(.widget-text)")
        field = output.locator("input[type=text]")
        line = output.locator("code")
        expect(line).to_have_text("chunks: 2,3,4,7", timeout=120_000)

        def type_in(text):
            field.fill("")
            field.press_sequentially(text)

        type_in("2,3,4")
        sentence = "`chunks` must add up to the 16 transitions that are trained; got 2,3,4, which adds up to 9"
        expect(output).to_contain_text(sentence)
        expect(line).to_have_text("chunks: 2,3,4,7")
        type_in("4,4,4,4")
        expect(line).to_have_text("chunks: 4,4,4,4")
        expect(output).not_to_contain_text("must add up")
        output.locator(".noUi-handle").nth(1).focus()
        page.keyboard.press("ArrowRight")
        expect(field).to_have_value("4,5,3,4")
        expect(line).to_have_text("chunks: 4,5,3,4")
        shown = output.locator("img").evaluate(
            "i => [i.naturalWidth, i.alt, i.getBoundingClientRect().right]"
        )
        assert shown[0] > 0 and shown[1].endswith("4,5,3,4") and shown[2] < 1400
        assert not [
            url
            for url in asked
            if not url.startswith((lab.split("/lab/")[0], "data:", "blob:", "ws:"))
        ]
        browser.close()


def test_every_cell_runs_on_a_trained_run(whole, tmp_path, monkeypatch):
    """As a reader runs them: the curve, the chunk editor, trajectories, a prompt."""
    file = widgets.write_lab_notebook(whole, tmp_path)
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
        widgets.write_lab_notebook(whole, whole / "samples")
    widgets.write_lab_notebook(whole, tmp_path)
    assert sorted(whole.rglob("*")) == before


def test_the_command_says_where_the_notebook_is_and_hands_options_on(whole, tmp_path):
    """JupyterLab itself answers --version, and ends."""
    done = call("lab", whole, "--", "--version", cwd=tmp_path)
    version = subprocess.run(
        [sys.executable, "-m", "jupyterlab", "--version"], capture_output=True, text=True
    ).stdout
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "notebook: whole.ipynb",
        version.strip(),
    ]
    assert (tmp_path / "whole.ipynb").is_file()


def test_lab_without_jupyterlab_names_the_extra_and_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(widgets.importlib.util, "find_spec", lambda name: None)
    sentence = r"^`chunk-grpo lab` needs JupyterLab: pip install 'chunk-grpo\[lab\]', or open .*one\.ipynb "
    with pytest.raises(InputError, match=sentence):
        widgets.lab_command(tmp_path / "one.ipynb")


def test_nothing_beside_a_run_is_executed(whole, tmp_path):
    """A file named as JupyterLab in the folder where the command is given."""
    (tmp_path / "jupyterlab.py").write_text("print('executed')")
    done = call("lab", whole, "--", "--version", cwd=tmp_path)
    assert done.returncode == 0 and "executed" not in done.stdout, done.stdout


def test_what_cannot_be_opened_is_said(tmp_path):
    done = call("lab", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and "nowhere" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"
)
def test_it_opens_in_a_browser(whole, tmp_path):
    """The notebook stands there, not the launcher; with its cells run, every field has a name, also what a slider sets."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra dev)"
    )
    file = widgets.write_lab_notebook(whole, tmp_path)
    with start_lab(tmp_path, lambda options: widgets.lab_command(file, options)) as address:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 1100})
            expect = playwright.expect
            expect.set_options(timeout=60_000)
            page.goto(address, timeout=120_000)
            expect(page.get_by_role("heading", name="whole")).to_be_visible(timeout=120_000)
            expect(page.get_by_text("| Idle")).to_be_visible(timeout=120_000)
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
            expect(page.get_by_role("button", name="draw")).to_be_visible(timeout=180_000)
            fields = {
                "textbox": ["chunks", "prompt"],
                "spinbutton": ["transitions done", "seed"],
                "combobox": ["prompt"],
            }
            for role, name in [(role, name) for role, names in fields.items() for name in names]:
                expect(page.get_by_role(role, name=name, exact=True)).to_be_visible()
            page.get_by_role("spinbutton", name="transitions done").fill("0")
            page.keyboard.press("Enter")
            expect(page.get_by_text("noise level σ = 1.000")).to_be_visible()
            page.screenshot(path=tmp_path / "lab.png")
            browser.close()
