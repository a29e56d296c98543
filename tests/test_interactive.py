"""The interactive parts of pages in a real browser without a network, by mouse and by keyboard."""

import json
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "tools/web"
pytestmark = pytest.mark.browser
PAGES = {
    "clip": "00_theory/03_objective",
    "chunks": "00_theory/05_dynamics",
    "particles": "00_theory/01_sampler",
    "seeds": "findings/confirmation",
    "methods": "08_methods/00_table",
}


def stored_html(kind: str) -> str:
    """Return the HTML that the page's cell displayed, as the book stores it."""
    notebook = nbformat.read(ROOT / f"nbs/{PAGES[kind]}.ipynb", as_version=4)
    texts = [
        output["data"]["text/html"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if f'data-kind="{kind}"' in output.get("data", {}).get("text/html", "")
    ]
    assert len(texts) == 1, f"{PAGES[kind]}: run `make prepare`"
    return texts[0]


def stored_data(kind: str) -> dict:
    """Return the numbers that the page gives to the script."""
    return json.loads(re.search(r"<script[^>]*>(.*)</script>", stored_html(kind), re.DOTALL)[1])


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a small page around one interactive; nothing may fail, and only its own files may be asked for."""
    wrong = []
    contexts = []

    def opened(kind, width=1000, scripts=True, theme="light"):
        files = f'<link rel="stylesheet" href="{(WEB / "book.css").as_uri()}">'
        files += f'<link rel="stylesheet" href="{(WEB / "interactive.css").as_uri()}">'
        files += f'<script defer src="{(WEB / "interactive.js").as_uri()}"></script>'
        file = tmp_path / f"{kind}.html"
        file.write_text(
            f'<!doctype html><html data-theme="{theme}"><meta charset="utf-8">{files}'
            f'<main class="bd-article"><div class="output text_html">{stored_html(kind)}</div></main></html>',
            encoding="utf-8",
        )
        context = browser.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=scripts, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("requestfailed", lambda request: wrong.append(f"failed {request.url}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith("file:") or wrong.append(f"asked for {request.url}")
            ),
        )
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(file.as_uri())
        if scripts:
            page.wait_for_selector(".interactive[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def values(page, within: str) -> list[float]:
    """Return the numbers shown in an element, in full precision."""
    return page.eval_on_selector_all(
        f".interactive {within} data", "found => found.map(node => Number(node.dataset.value))"
    )


def same(numbers, tolerance=1e-12):
    """Compare with numbers that differ by rounding only."""
    return pytest.approx(numbers, rel=1e-9, abs=tolerance)


@pytest.mark.parametrize("kind", PAGES)
def test_without_javascript_a_sentence_remains(open_page, kind):
    page = open_page(kind, scripts=False)
    words = page.inner_text(".interactive")
    assert words.startswith("With JavaScript") and "{" not in words


@pytest.mark.parametrize("kind", PAGES)
def test_every_control_has_a_label_and_shows_its_focus(open_page, kind):
    page = open_page(kind)
    controls = page.locator(".interactive :is(input, select, button)")
    assert controls.count()
    for i in range(controls.count()):
        name = controls.nth(i).evaluate(
            "node => node.ariaLabel || (node.labels && node.labels[0] || node).textContent.trim()"
        )
        assert name
    page.keyboard.press("Tab")
    focused = page.evaluate(
        "[document.activeElement.closest('.interactive') !== null,"
        " getComputedStyle(document.activeElement).outlineStyle]"
    )
    assert focused == [True, "solid"]
    assert page.locator(".interactive [aria-live=polite]").count()


@pytest.mark.parametrize("kind", PAGES)
def test_an_interactive_fits_a_phone(open_page, kind):
    page = open_page(kind, width=390)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    parts = page.eval_on_selector_all(
        ".interactive :is(input, select, button, svg, .answer)",
        "found => found.map(node => node.getBoundingClientRect().right)",
    )
    assert parts and max(parts) <= 390


# Step against chunk


def test_the_clip_range_changes_what_the_package_computes(open_page):
    data = stored_data("clip")
    page = open_page("clip")
    page.click(".interactive summary")
    slider = page.locator(".interactive input[type=range]")
    for position, expected in data["reference"].items():
        slider.fill(position)
        steps, chunks = expected["steps"], expected["chunks"]
        clipped_steps, clipped_chunks, _, _, step_objective, chunk_objective = values(
            page, ".answer"
        )
        assert [clipped_steps, clipped_chunks] == [steps["clipped"][0], chunks["clipped"][0]]
        assert step_objective == same(steps["objective"], 1e-18)
        assert chunk_objective == same(chunks["objective"], 1e-18)
        numbers = values(page, "table")
        assert numbers[2::4] == same(steps["gradient"])
        assert numbers[3::4] == same(chunks["gradient"])


def test_the_clip_range_moves_by_keyboard_and_by_mouse(open_page):
    data = stored_data("clip")
    page = open_page("clip")
    slider = page.locator(".interactive input[type=range]")
    slider.focus()
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") == "1e−5"
    narrow = values(page, ".answer")
    assert narrow[0] == data["reference"]["0"]["steps"]["clipped"][0]
    page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "1.5e−5"
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    assert slider.input_value() == str(len(data["clip_ranges"]) - 1)
    wide = values(page, ".answer")
    assert wide[0] < narrow[0] and wide[2] < narrow[2]
    assert page.locator(".interactive circle.hollow").count() == wide[0]


def test_another_image_of_the_group_is_shown(open_page):
    data = stored_data("clip")
    page = open_page("clip")
    group = values(page, ".answer")[2:]
    page.locator(".interactive select").focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text(".interactive .answer").startswith("Image 2:")
    shown = values(page, ".answer")
    expected = data["reference"][str(data["start"])]
    assert shown[:2] == [expected["steps"]["clipped"][1], expected["chunks"]["clipped"][1]]
    assert shown[2:] == group


# Chunk cutter


def test_boundaries_give_the_weights_that_the_package_computes(open_page):
    data = stored_data("chunks")
    page = open_page("chunks")
    profile = page.locator(".interactive select").nth(0)
    slider = page.locator(".interactive input[type=range]")
    boxes = page.locator(".interactive input[type=checkbox]")
    for expected in data["reference"]:
        profile.select_option(str(expected["profile"]))
        ends = [sum(expected["sizes"][:j]) for j in range(1, len(expected["sizes"]))]
        for i in range(boxes.count()):
            boxes.nth(i).set_checked(i + 1 in ends)
        assert page.inner_text(".interactive code") == "chunks=" + ",".join(
            map(str, expected["sizes"])
        )
        for position, shares in enumerate(expected["clipped"]):
            slider.fill(str(position))
            numbers = values(page, "table")
            assert numbers[0::3] == same(expected["weights"])
            assert numbers[2::3] == same(shares)
            all_steps = [
                weight
                for weight, size in zip(numbers[1::3], expected["sizes"], strict=True)
                for _ in range(size)
            ]
            assert all_steps == same(expected["step_weights"])


def test_a_boundary_is_set_by_keyboard_and_removed_by_mouse(open_page):
    page = open_page("chunks")
    setting = page.locator(".interactive code")
    assert setting.inner_text() == "chunks=2,3,4,7"
    page.locator(".interactive input[type=checkbox]").nth(0).focus()
    page.keyboard.press("Space")
    assert setting.inner_text() == "chunks=1,1,3,4,7"
    assert page.locator(".interactive select").nth(1).input_value() == "own"
    box = page.locator(".interactive svg").bounding_box()
    left = 34  # where the plot begins, px
    page.mouse.click(box["x"] + left + (box["width"] - left) * 9 / 16 + 3, box["y"] + 60)
    assert setting.inner_text() == "chunks=1,1,3,11"
    page.locator(".interactive select").nth(1).select_option(label="steps")
    assert setting.inner_text() == "chunks=" + ",".join(["1"] * 16)


def test_the_rule_follows_the_profile(open_page):
    data = stored_data("chunks")
    page = open_page("chunks")
    profile, preset = (page.locator(".interactive select").nth(i) for i in (0, 1))
    preset.select_option("1")
    for number, sizes in enumerate(data["presets"][1]["sizes"]):
        profile.select_option(str(number))
        assert page.inner_text(".interactive code") == "chunks=" + ",".join(map(str, sizes))


# Particles under the ODE and the SDE


def test_particles_move_as_the_package_samples(open_page):
    data = stored_data("particles")
    page = open_page("particles")
    eta, step = (page.locator(".interactive input[type=range]").nth(i) for i in (0, 1))

    for expected in data["reference"]:
        eta.fill(str(expected["eta"]))
        step.fill(str(expected["step"]))
        ode_spread, spread, exact, ode_length, length, moved = values(page, ".answer")
        assert [spread, length] == same([expected["spread"], expected["length"]])
        if data["etas"][expected["eta"]] == 0:
            assert [ode_spread, ode_length, moved] == [spread, length, 0]
        else:
            assert moved > 0 and length > ode_length
        side = page.locator(".interactive svg").bounding_box()["width"]
        dots = page.locator(".interactive svg circle.step")
        assert dots.count() == 2 * len(data["start"])
        unit = min((side - 8) / 2, 276) / 6.8
        middle = (side - 8) * 3 / 4 + 8
        last = dots.last
        drawn = [(float(last.get_attribute("cx")) - middle) / unit]
        assert drawn == pytest.approx(expected["last"][:1], abs=1e-6)
        if (
            data["etas"][expected["eta"]] <= 0.7
        ):  # above, one Euler-Maruyama step from pure noise is too large
            assert spread == pytest.approx(exact, rel=0.12)


def test_particles_run_by_keyboard_and_the_slider_stops_them(open_page):
    data = stored_data("particles")
    page = open_page("particles")
    step = page.locator(".interactive input[type=range]").nth(1)
    page.get_by_role("button", name="Play").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.interactive input')[1].value > 2")
    assert page.get_by_role("button", name="Stop").count() == 1
    step.focus()
    page.keyboard.press("Home")
    assert step.input_value() == "0" and page.get_by_role("button", name="Play").count() == 1
    page.wait_for_timeout(300)
    assert step.input_value() == "0"
    box = step.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    assert step.input_value() == str(len(data["levels"]) - 1)
    assert step.get_attribute("aria-valuetext") == "32 of 32, t = 0.00"


# Seed roulette


def test_a_draw_shows_the_gains_of_the_drawn_seeds_and_then_the_interval(open_page):
    data = stored_data("seeds")
    page = open_page("seeds")
    reveal = page.get_by_role("button", name="Show the interval")
    assert reveal.is_disabled()
    page.get_by_role("button", name="Draw one seed").focus()
    page.keyboard.press("Enter")
    rows = page.locator(".interactive tbody tr")
    gains = {}
    for i, arm in enumerate(data["arms"]):
        seed, gain = (
            rows.nth(i)
            .locator("data")
            .evaluate_all("found => found.map(node => Number(node.dataset.value))")[:2]
        )
        gains[arm] = gain
        assert gain == same(data["gains"][arm][data["seeds"].index(seed)])
    assert f"{max(gains, key=gains.get)} gains most" in page.inner_text(".interactive .answer")
    reveal.click()
    for i, arm in enumerate(data["arms"]):
        if arm == data["reference"]:
            continue
        shown = (
            rows.nth(i)
            .locator("data")
            .evaluate_all("found => found.map(node => Number(node.dataset.value))")
        )
        assert shown[3:] == same(data["intervals"][arm])


def test_a_hundred_draws_are_counted(open_page):
    data = stored_data("seeds")
    page = open_page("seeds")
    page.get_by_role("button", name="Draw 100 times").click()
    said = page.inner_text(".interactive .answer")
    first_places = [int(count) for count in re.findall(r"(\d+) times", said)]
    assert len(first_places) == len(data["arms"]) and sum(first_places) == 100


# Method explorer


def test_the_explorer_shows_where_two_methods_differ(open_page):
    data = stored_data("methods")
    page = open_page("methods")
    first, second = (page.locator(".interactive select").nth(i) for i in (2, 3))
    for expected in data["reference"]:
        first.select_option(expected["pair"][0])
        second.select_option(expected["pair"][1])
        rows = page.eval_on_selector_all(
            ".interactive tbody tr",
            "found => found.map(row => [...row.cells].map(cell => cell.textContent))",
        )
        shown = {axis: choices for axis, *choices in rows if "per image" not in axis}
        assert shown == expected["differs"]


def test_the_explorer_filters_by_word_and_by_axis(open_page):
    data = stored_data("methods")
    page = open_page("methods")
    found = page.locator(".interactive .found li")
    assert found.count() == len(data["methods"])
    axis, choice = data["axes"][0], data["methods"][0][data["axes"][0]]
    page.locator(".interactive select").nth(0).select_option(axis)
    page.locator(".interactive select").nth(1).select_option(choice)
    fitting = [method["name"] for method in data["methods"] if method[axis] == choice]
    assert found.locator("button").all_inner_texts() == fitting
    assert 0 < len(fitting) < len(data["methods"])
    page.locator(".interactive select").nth(0).select_option("")
    page.locator(".interactive input[type=search]").focus()
    page.keyboard.type("no method says this")
    assert found.count() == 0
    assert page.locator(".interactive .answer").nth(0).inner_text().startswith("0 of ")
    page.locator(".interactive input[type=search]").fill("")
    found.locator("button").nth(5).focus()
    page.keyboard.press("Enter")
    assert page.locator(".interactive select").nth(3).input_value() == data["methods"][5]["name"]
