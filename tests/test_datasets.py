"""Prompts from Python, and the tables of Hugging Face's datasets: files of pyarrow, and folders of the datasets library."""

import json
import sys

import pytest
from commands import call

import chunk_grpo
from chunk_grpo import InputError
from chunk_grpo.models import inputs

ROWS = [
    {"prompt": "a red star", "caption": "a star", "negative_prompt": "blurry"},
    {"prompt": "two cats", "caption": "cats", "negative_prompt": None},
]


class Column(list):
    """A dataset of the datasets library as far as it is used: rows that are mappings."""


def test_prompts_from_python_are_a_list_that_a_run_reads(tmp_path):
    """Texts, mappings and the rows of a dataset; a second call with the same prompts is fine."""
    texts = chunk_grpo.write_prompts(("a cat" for _ in range(2)), tmp_path / "texts.jsonl")
    assert inputs.read_prompts(texts) == ["a cat", "a cat"]
    rows = chunk_grpo.write_prompts(Column(ROWS), tmp_path / "rows.jsonl")
    assert inputs.read_prompts(rows) == ["a red star", "two cats"]
    assert inputs.read_negative_prompts(rows) == {"a red star": "blurry"}
    assert [record for _, _, record in inputs.read_prompt_records(rows)] == ROWS
    assert chunk_grpo.write_prompts(ROWS, rows) == rows
    settings = chunk_grpo.load_settings("pocket/tiny", {"prompts": texts})
    assert settings.prompts == str(tmp_path / "texts.jsonl")


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([{"prompt": "a cat", "image": b"png"}], "entry 1 has a bytes as image"),
        ([{"prompt": "a cat", "score": float("nan")}], "entry 1 has a float as score"),
        (["a cat", {"caption": "x"}], "entry 2: a column Prompt or Prompts is needed"),
        ([{"prompt": "a cat", "seed": 3}], "entry 1 sets seed to '3'"),
        ([" "], "entry 1 has 0"),
        ([], "at least one prompt"),
    ],
)
def test_prompts_that_a_run_could_not_read_are_not_written(prompts, words, tmp_path):
    with pytest.raises(InputError, match=words):
        chunk_grpo.write_prompts(prompts, tmp_path / "a.jsonl")
    assert not list(tmp_path.iterdir())


def test_other_prompts_are_never_overwritten(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a dog"}\n')
    with pytest.raises(InputError, match="holds others"):
        chunk_grpo.write_prompts(["a cat"], tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="must end in .jsonl"):
        chunk_grpo.write_prompts(["a cat"], tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "saved"])
def test_without_the_libraries_the_install_is_said(name, tmp_path, monkeypatch):
    """One sentence of the setting, before a folder is made."""
    for module in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    if name == "saved":
        (tmp_path / name).mkdir()
        (tmp_path / name / "dataset_info.json").write_text("{}")
    else:
        (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"^prompts: .*: pip install 'chunk-grpo\[datasets\]'\)"):
        inputs.read_prompts(str(tmp_path / name))


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_tables_of_pyarrow_are_read_without_their_images(kind, tmp_path):
    """Parquet, and Arrow as the datasets library streams it or as a file; another column by its name."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [row | {"image": {"bytes": b"png", "path": "x"}, "tags": ["a"]} for row in ROWS]
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        source = tmp_path / "a.parquet"
        parquet.write_table(table, source)
    else:
        source = tmp_path / "a.arrow"
        new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with new(str(source), table.schema) as writer:
            writer.write_table(table)
    records = [record for _, _, record in inputs.read_prompt_records(str(source))]
    assert records == [row | {"tags": ["a"]} for row in ROWS]
    assert inputs.read_prompts(f"{source}:caption") == ["a star", "cats"]
    assert inputs.read_negative_prompts(str(source)) == {"a red star": "blurry"}
    with pytest.raises(
        InputError, match="a column text is needed, but there is none among prompt,"
    ):
        inputs.read_prompts(f"{source}:text")
    source.write_bytes(source.read_bytes()[:50])
    with pytest.raises(InputError, match="prompts: .* cannot be read"):
        inputs.read_prompts(str(source))


def test_a_saved_dataset_is_read_and_trained_on(tmp_path):
    """Its rows in the order in which it was saved, one split of several, and a run on it."""
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in ROWS] * 2)
    dataset.select([3, 0]).save_to_disk(tmp_path / "saved")
    assert inputs.read_prompts(str(tmp_path / "saved")) == ["two cats", "a red star"]
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "splits")
    assert len(inputs.read_prompts(str(tmp_path / "splits/train"))) == 4
    with pytest.raises(InputError, match="several splits; allowed are .*splits/train"):
        inputs.read_prompts(str(tmp_path / "splits"))
    written = chunk_grpo.write_prompts(dataset, tmp_path / "written.jsonl")
    assert inputs.read_prompts(written) == ["a red star", "two cats"] * 2
    words = ["prompts=splits/train", "iterations=1", "prompts_per_iteration=2", "--no-report"]
    done = call("train", "pocket/tiny", *words, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    note = json.loads((tmp_path / "run/run.json").read_text())
    assert note["settings"]["prompts"] == str(tmp_path / "splits/train")
