"""The book's table of what commands read, write, run and contact is what they do."""

import json

import promises
import pytest

ROWS = json.loads(promises.KEPT.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some fifteen commands, one after another
@pytest.mark.parametrize("whose", promises.WHOSE)
def test_the_table_of_the_book_is_what_commands_do(whose):
    assert promises.promises(whose) == [row for row in ROWS if row["run"] == whose]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["run"] == "a stranger's"], ids=lambda row: row["command"]
)
def test_a_strangers_run_is_read_and_not_obeyed(row):
    """Of the kept table, which the test above makes again."""
    assert not row["contacts"] and not row["left in the temporary folder"]
    assert all(
        words.split()[0] in ("python", "git") and "evil" not in words for words in row["runs"]
    )
    assert row["exit"] == 0 or not row["writes"], "what is refused writes nothing"


def test_every_command_that_takes_a_run_has_its_rows():
    for whose in ("one's own", "a stranger's"):
        assert [row["command"] for row in ROWS if row["run"] == whose] == [*promises.ON_A_RUN]
