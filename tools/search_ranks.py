"""Ask the search of a built site what newcomers ask, and print the rank of the first page that answers.

`python tools/search_ranks.py _docs` asks the phrases of tests/questions.json, in a browser and without a network;
`python tools/search_ranks.py _docs "own reward" LoRA` shows the first pages for phrases of your own.
"""

import json
import shutil
import sys
from pathlib import Path

QUESTIONS = Path(__file__).resolve().parents[1] / "tests/questions.json"
FIRST = 3  # a page that answers is expected among so many
RANKED = """
(questions) => questions.map((question) => {
  const found = BOOK_SEARCH.rank(question);
  return {
    pages: found.pages.map((hit) => hit.section.page),
    headings: found.pages.map((hit) => hit.section.name),
    excerpts: found.pages.slice(0, 10).map((hit) =>
      BOOK_SEARCH.excerpt(hit.section.text, found.terms).map((part) => part[0]).join("")),
    api: found.api.map((section) => section.name),
  };
})
"""


def rank_of_answer(
    pages: list[str],  # pages in the order of the search
    answers: list[str],  # pages that answer the question
) -> int | None:
    """Return the rank, from 1, of the first page that answers; None if no page does."""
    return next((rank for rank, page in enumerate(pages, 1) if page in answers), None)


def ask(
    page,  # browser page that shows the site's search
    questions: list[str],
) -> list[dict]:
    """Search for each question, and return its pages, headings, excerpts and API names, best first."""
    page.wait_for_function("window.BOOK_SEARCH !== undefined")
    return page.evaluate(RANKED, questions)


def ask_site(folder: Path, questions: list[str]) -> list[dict]:
    """Open the search of a built site in Chromium from its files, and search for the questions."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        page = browser.new_page()
        page.goto((folder.resolve() / "search.html").as_uri())
        found = ask(page, questions)
        browser.close()
    return found


def main() -> int:
    """Print the ranks; return 1 if a question of the list has no answer among the first pages."""
    folder, *phrases = sys.argv[1:]
    expected = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    questions = phrases or list(expected)
    late = 0
    for question, found in zip(questions, ask_site(Path(folder), questions), strict=True):
        first = [f"{p} ({h})" for p, h in zip(found["pages"], found["headings"], strict=True)]
        if phrases:
            print(question, *first[:5], sep="\n  ")
            continue
        rank = rank_of_answer(found["pages"], expected[question])
        late += rank is None or rank > FIRST
        print(f"{rank or '-':>3}  {question:<36} {first[0] if first else 'nothing found'}")
    if not phrases:
        print(f"{len(questions) - late} of {len(questions)} answered by one of the first {FIRST}")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
