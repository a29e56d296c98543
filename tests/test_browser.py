"""Reports in a real browser without a network."""

import pytest
import synthetic

from chunk_grpo.reporting.reports import write_run_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(browser):
    """A browser page that cannot reach the network, with lists of what it asked for and complained about."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_offline(True)
    opened = context.new_page()
    opened.asked, opened.failed, opened.said = [], [], []
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.on("requestfailed", lambda request: opened.failed.append(request.url))
    opened.on("console", lambda message: opened.said.append(message.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    yield opened
    context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of an invented run."""
    return write_run_report(synthetic.write(tmp_path_factory.mktemp("report") / "run"))


def test_report_opens_offline_with_all_figures(page, report):
    page.goto(report.as_uri())
    pictures = page.eval_on_selector_all(
        "img", "found => found.map(i => [i.naturalWidth, i.alt.length, i.width])"
    )
    assert len(pictures) >= 8
    assert all(
        natural > 0 and words > 20 and 0 < shown <= natural for natural, words, shown in pictures
    )
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.failed == [] and page.said == []


def test_report_is_a_page_for_people(page, report):
    page.goto(report.as_uri())
    headings = page.eval_on_selector_all("h2", "found => found.map(h => h.textContent.trim())")
    assert headings == [
        "During training",
        "Before and after",
        "Scores on held-out prompts",
        "The reward during training",
        "Clip fraction and ratio, chunk by chunk",
        "Norm of the gradient",
        "Alarms",
        "How far the base's latents move",
        "Time by phase",
        "Settings",
        "Where it ran",
    ]
    assert "45 iterations" in page.inner_text("p.lead >> nth=0")
    assert page.query_selector("script, iframe, link[href^=http], div.input, pre") is None
    page.click("summary")
    assert page.inner_text("details").count("our choice") > 3
    width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1]


def test_report_fits_a_narrow_screen(page, report):
    """Figures keep a size at which their words can be read, and scroll within the page."""
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(report.as_uri())
    width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    shown = page.eval_on_selector_all(
        "img", "found => found.map(i => [i.width, i.parentElement.clientWidth])"
    )
    page.set_viewport_size({"width": 1200, "height": 900})
    assert width[0] <= width[1] and all(box <= 390 and 600 <= picture for picture, box in shown)
