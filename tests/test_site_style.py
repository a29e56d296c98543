"""The style sheet of the site on pieces of pages as Sphinx and its theme write them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import measure_site  # noqa: E402

pytestmark = pytest.mark.browser
# The rules of Sphinx 9 and pydata-sphinx-theme 0.20 that book.css overrides, and the theme's colours.
THEME = """
body { margin: 0; font: 16px monospace; background: var(--pst-color-background); color: var(--pst-color-text-base); }
span.pre { white-space: nowrap; }
table.indextable tr.cap { background-color: #f2f2f2; }
.bd-search .search-button__kbd-shortcut { color: var(--pst-color-border); }
html[data-theme="light"] { --pst-color-background: #fff; --pst-color-surface: #f3f4f5; --pst-color-border: #d1d5da;
  --pst-color-text-base: #222832; --pst-color-text-muted: #48566b; }
html[data-theme="dark"] { --pst-color-background: #14181e; --pst-color-surface: #29313d; --pst-color-border: #48566b;
  --pst-color-text-base: #ced6dd; --pst-color-text-muted: #9ca4af; }
"""
SIGNATURE = f"""<dl class="py function"><dt class="sig sig-object py">
<span class="sig-name descname"><span class="pre">measure</span></span><span class="sig-paren">(</span><dl>
<dd><em class="sig-param"><span class="n"><span class="pre">images</span></span><span class="p"><span class="pre">:</span></span>
<span class="n"><span class="pre">{"dict[str,tuple[Tensor,int]]|" * 4}None</span></span></em>,</dd>
<dd><em class="sig-param"><span class="n"><span class="pre">name</span></span></em>,</dd></dl>
<span class="sig-paren">)</span></dt></dl>"""
INDEX = f"""<table class="indextable genindextable"><tr>{
    "".join(
        f'<td style="width: 33%; vertical-align: top;"><ul><li><a href="#">{name}_of_a_very_long_name() '
        "(in module chunk_grpo.evaluation.benchmarks)</a></li></ul></td>"
        for name in ("first", "second", "third")
    )
}</tr></table>"""
KEYS = """<form class="bd-search"><span class="search-button__kbd-shortcut">Ctrl + K</span></form>
<table class="indextable modindextable"><tr class="cap"><td></td><td><strong>c</strong></td></tr></table>"""


@pytest.fixture
def open_page(browser):
    """Open a page with a piece of HTML, a theme and the style sheet of the site."""
    pages = []

    def opened(html, width=1280, theme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        style = THEME + (ROOT / "tools/web/book.css").read_text(encoding="utf-8")
        page.set_content(
            f'<!doctype html><html data-theme="{theme}"><style>{style}</style>'
            f'<main class="bd-article">{html}</main></html>'
        )
        return page

    yield opened
    for page in pages:
        page.close()


@pytest.mark.parametrize("html", [SIGNATURE, INDEX], ids=["signature", "index"])
def test_signatures_and_the_index_fit_a_phone(open_page, html):
    page = open_page(html, width=390)
    widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1]


def test_the_index_has_one_column_on_a_phone_and_three_on_a_wide_screen(open_page):
    rows = "[...document.querySelectorAll('td')].map((cell) => cell.getBoundingClientRect().top)"
    assert len(set(open_page(INDEX, width=390).evaluate(rows))) == 3
    assert len(set(open_page(INDEX, width=1280).evaluate(rows))) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hints_at_keys_and_letters_of_the_index_have_enough_contrast(open_page, theme):
    assert open_page(KEYS, theme=theme).evaluate(measure_site.CONTRAST) == []
