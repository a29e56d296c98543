"""What `tools/measure_site.py` counts on two small pages."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import measure_site  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"
    ),
]
HEAD = """<!doctype html><html data-fitted="true"><meta charset="utf-8"><title>page</title>
<style>body { margin: 0; background: #fff; color: #000 } pre, .box { overflow-x: auto; margin: 0 }
.clip { overflow: hidden; width: 200px } .pale { color: #aaa }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } }</style>
<a href="#text">Skip</a><a href="#text"></a>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Write a page where much is wrong, and one where nothing is."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    folder = tmp_path_factory.mktemp("site")
    (folder / "00_theory").mkdir()
    wide = "x" * 2000
    (folder / "00_theory/bad.html").write_text(
        f"""{HEAD}<main class="bd-article" id="text"><pre>{wide}</pre><pre>short</pre>
        <div class="clip"><table style="width: 400px"><tr><td>cut</td></tr></table></div>
        <p class="pale">pale words</p></main></html>""",
        encoding="utf-8",
    )
    (folder / "00_theory/late.html").write_text(
        f"""{HEAD}<main class="bd-article" id="text"><div style="height: 2000px"></div>
        <img alt="a" width="100" height="100" src="data:image/gif;base64,R0lGODlhAQABAAAAACw="></main></html>""",
        encoding="utf-8",
    )
    (folder / "good.html").write_text(
        f"""{HEAD}<main class="bd-article" id="text"><p>words</p></main></html>""", encoding="utf-8"
    )
    return folder


def test_what_is_cut_late_pale_or_out_of_reach_is_counted(site):
    found = measure_site.measure(site, (1280,))[1280]
    numbers = {what: (words, behind) for what, words, behind in measure_site.summary(found)}
    assert numbers["code"] == ("2: 0 cut, 1 scroll (50%)", ["00_theory/bad.html"])
    assert numbers["tables"][0] == "1: 1 cut, 0 scroll (0%)"
    assert numbers["pages without a picture"][1] == ["00_theory/bad.html"]
    (late,) = numbers["first picture below the first screen"][1]
    assert late.startswith("00_theory/late.html 2.")
    assert numbers["pages with pale text, light"][0] == "1"
    assert numbers["stops without a name"][0] == "3"
    assert numbers["boxes that scroll and take no focus"] == ("1", ["00_theory/bad.html"])


def test_pages_are_chosen_by_how_their_names_begin(site):
    assert list(measure_site.measure(site, (390,), ("good",))[390]) == ["good.html"]
