"""Every list of prompts is read by one reader: whole prompts, or an error that names the line."""

import json

import pytest
from commands import call, run

from chunk_grpo import InputError
from chunk_grpo.evaluation import geneval
from chunk_grpo.models import inputs

LISTS = {  # name of the file, what it holds, the prompts
    "tab.tsv": (
        'Prompt\tCategory\n"G I G G L E" painted\tText\nthe letter "\tText\na cat\tAnimals\n',
        ['"G I G G L E" painted', 'the letter "', "a cat"],
    ),
    "lone.tsv": ('Prompt\tNote\n"a cat\tx\na dog\ty\n', ['"a cat', "a dog"]),
    "all-quoted.tsv": ('"Prompt"\t"Note"\n"a ""red"" cat"\t"x"\n', ['a "red" cat']),
    "from-pandas.tsv": ('prompt\tnote\n"""hello"" world"\tx\n', ['"hello" world']),
    "quoted.csv": (
        'prompt\n"a red star, with a blue moon"\n\n"two\nlines"\n',
        ["a red star, with a blue moon", "two\nlines"],
    ),
    "capitals.csv": ("PROMPT,id\na cat,1\n", ["a cat"]),
    "bom.csv": ("\ufeffprompt,id\r\na cat,1\r\n", ["a cat"]),
    "lines.ndjson": ('{"Prompt": "a cat"}\n\n{"Prompt": "a dog"}\n', ["a cat", "a dog"]),
    "lines.txt": ('\ufeff{"prompt": "a cat"}\n{"prompt": "a dog"}\n\n', ["a cat", "a dog"]),
    "list.txt": ('["a cat",\n "a dog"]\n', ["a cat", "a dog"]),
    "texts.jsonl": ('"a cat"\n"a dog"\n', ["a cat", "a dog"]),
    "list.yaml": ("- a cat\n- prompt: a dog\n", ["a cat", "a dog"]),
    "list.yml": ('- "300"\n- a cat\n', ["300", "a cat"]),
    "capitals.json": ('[{"Prompts": "a cat"}, "a dog", "a dog"]', ["a cat", "a dog", "a dog"]),
    "again.csv": ("prompt\na cat\na cat\n", ["a cat", "a cat"]),
    "mac.txt": ("a cat\ra dog\r", ["a cat", "a dog"]),
    "separator.txt": ("a cat\u2028and a dog\n", ["a cat\u2028and a dog"]),
    "long.yaml": (
        "".join(f"- a cat with number {i}, {'very ' * 20}red\n" for i in range(1_600)),
        None,
    ),
    "long.csv": (f"prompt,page\na cat,{'x' * 200_000}\n", ["a cat"]),
    "brackets.txt": (
        '[sketch] a cat\n{a dog}\n"a fox"\n',
        ["[sketch] a cat", "{a dog}", '"a fox"'],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_every_form_of_list_gives_whole_prompts(name, tmp_path):
    text, prompts = LISTS[name]
    (tmp_path / name).write_bytes(text.encode())
    found = inputs.read_prompts(str(tmp_path / name))
    assert len(found) == 1_600 if prompts is None else found == prompts


WRONG = {  # name of the file, what it holds, what the sentence says
    "comma.csv": (
        "prompt\na cat\na red star, with a blue moon\n",
        "line 3 has 2 fields and the header has 1",
    ),
    "quote.csv": ('prompt,id\n"G I G G L E" painted,1\n', "line 2 is not a row of a table"),
    "open.csv": ('prompt\na cat\n"a dog\na fox\n', "line 3 is not a row of a table"),
    "short.csv": ("prompt,id\na cat\n", "line 2 has 1 fields and the header has 2"),
    "break.tsv": ("prompt\tid\na cat\nsits\t1\n", "line 2 has 1 fields"),
    "two.csv": ("prompt,Prompts\na cat,b\n", "more than one, prompt, Prompts"),
    "twice.csv": ("prompt,prompt\na cat,b\n", "'prompt' twice"),
    "other.csv": ("caption,id\na cat,1\n", "none among caption, id; choose one with FILE:COLUMN"),
    "blank.csv": ("prompt,id\na cat,1\n ,2\n", "has an empty prompt in line 3"),
    "broken.ndjson": ('{"prompt": "a cat"}\n{"prompt": \n', "line 2 is not JSON"),
    "broken.txt": ('{"prompt": "a cat"}\na dog\n', "line 2 is not JSON"),
    "number.json": ('["a cat", 3]', "entry 2 must be a text; it is 3"),
    "number.yaml": ("- a cat\n- 300\n", "entry 2 must be a text; it is 300"),
    "mapping.yaml": ("prompts:\n- a cat\n", "it must hold a list; it holds a dict"),
    "colon.yaml": ("- a cat\n- a dog: it runs\n", "entry 2: a column Prompt or Prompts"),
    "table.txt": ("Prompt\tCategory\na cat\tAnimals\n", "line 1 is the header of a table"),
    "column.txt": ("prompt\na cat\n", "line 1 is the header of a table"),
    "rows.txt": ("a cat\tAnimals\na dog\tAnimals\n", "every line has a tab"),
    "dashes.txt": ("- a cat\n- a dog\n", "as in a YAML list"),
    "latin.txt": ("a cat\ncaf\xe9\n".encode("latin-1"), "line 2 is not UTF-8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_list_that_is_no_list_is_rejected_with_its_line(name, tmp_path):
    content, words = WRONG[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as raised:
        inputs.read_prompts(str(tmp_path / name), "eval_prompts")
    assert (
        words in str(raised.value)
        and str(raised.value).startswith("eval_prompts: ")
        and name in str(raised.value)
    )


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.tsv", "Prompt\tlong\nx\ta cat, at night\n"),
        ("a.csv", 'Prompt,long\nx,"a cat, at night"\n'),
        ("a.jsonl", '{"prompt": "x", "long": "a cat, at night"}\n'),
        ("a.yaml", "- {prompt: x, long: 'a cat, at night'}\n"),
    ],
)
def test_a_column_is_chosen_behind_a_colon(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert inputs.read_prompts(f"{tmp_path / name}:LONG") == ["a cat, at night"]
    with pytest.raises(
        InputError, match="a column wide is needed, but there is none among [Pp]rompt, long"
    ):
        inputs.read_prompts(f"{tmp_path / name}:wide")
    (tmp_path / "a.txt").write_text("a cat\n")
    with pytest.raises(InputError, match="line 1 must be a record with a column long"):
        inputs.read_prompts(f"{tmp_path / 'a.txt'}:long")
    (tmp_path / "b:c.txt").write_text("a dog\n")
    assert inputs.read_prompts(str(tmp_path / "b:c.txt")) == ["a dog"]


def test_geneval_metadata_is_read_as_other_lists_are(tmp_path):
    record = dict(geneval.read_geneval_prompts()[0], prompt="a photo of a\u2028bench")
    line = json.dumps(record, ensure_ascii=False)
    (tmp_path / "own.jsonl").write_bytes(f"\ufeff{line}\r\n{line}\n\n".encode())
    assert geneval.read_geneval_prompts(tmp_path / "own.jsonl") == [record, record]


@pytest.mark.parametrize(
    "field, value",
    [
        ("negative", "blurry"),
        ("negative_prompt_2", "blurry"),
        ("width", 1024),
        ("height", 512),
        ("seed", 0),
        ("guidance", 3.5),
        ("guidance_scale", 1.0),
        ("cfg", 7),
        ("steps", 20),
        ("num_inference_steps", 20),
        ("numInferenceSteps", 20),
        ("aspect_ratio", "16:9"),
        ("sampler", "Euler"),
    ],
)
def test_a_record_that_asks_for_more_than_a_prompt_is_rejected(field, value, tmp_path):
    lists = {
        "a.jsonl": json.dumps({"prompt": "a cat"})
        + "\n"
        + json.dumps({"prompt": "a dog", field: value}),
        "a.json": json.dumps([{"prompt": "a cat"}, {"prompt": "a dog", field: value}]),
        "a.yaml": json.dumps([{"prompt": "a cat"}, {"prompt": "a dog", field: value}]),
        "a.csv": f"prompt,{field}\na cat,\na dog,{value}\n",
        "a.tsv": f"prompt\t{field}\na cat\t\na dog\t{value}\n",
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError) as raised:
            inputs.read_prompts(str(tmp_path / name))
        assert f"sets {field} to" in str(raised.value) and any(
            f"{x} of" in str(raised.value) for x in ("line 2", "line 3", "entry 2")
        )
        assert inputs.read_prompts(f"{tmp_path / name}:prompt") == [
            "a cat",
            "a dog",
        ]  # nothing else is read, as asked
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a cat", field: None}))
    assert inputs.read_prompts(str(tmp_path / "a.jsonl")) == ["a cat"]


def test_training_on_records_of_another_size_is_rejected_before_a_folder_is_made(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a red star", "width": 1024}\n' * 40)
    done = call("train", "pocket/tiny", "prompts=mine.jsonl", "--out", "run", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = done.stderr.splitlines()
    assert "mine.jsonl sets width to '1024', but a run samples all prompts" in line


def test_doctor_shows_what_is_read_of_a_list(tmp_path):
    (tmp_path / "a.tsv").write_text('Prompt\tlong\nx\t"red" stars\ny\ttwo dogs\nz\ttwo dogs\n')
    said = run("doctor", "a.tsv:long", "prompts=pocket:test", cwd=tmp_path)
    first, second = said.splitlines()
    assert (
        "3 prompts from a.tsv:long, first '\"red\" stars' and 'two dogs', 1 of them repeated"
        in first
    )
    assert "96 prompts from pocket:test, first " in second and "none repeated" in second


def test_records_of_compared_images_give_each_prompt_once_and_in_order(tmp_path):
    texts = ["a star", "a ring", "a star", "a cross", "a ring"]
    pairs = [
        {"prompt": text, "image_path": ["1.jpg", "2.jpg"], "human_preference": [1, 0]}
        for text in texts
    ]
    (tmp_path / "train.json").write_text(json.dumps(pairs))
    assert inputs.read_prompts(str(tmp_path / "train.json")) == ["a star", "a ring", "a cross"]
    (tmp_path / "other.json").write_text(json.dumps([{"prompt": text} for text in texts]))
    assert inputs.read_prompts(str(tmp_path / "other.json")) == texts


def test_missing_list_of_a_preset_leads_to_the_command_that_brings_it(tmp_path):
    done = call("train", "paper/chunk", "device=cpu", "--out", tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert (
        "is not a file" in done.stderr
        and "hf download ymhao/HPDv2 train.json test.json" in done.stderr
    )
    assert "hf download ymhao/HPDv2 train.json test.json" in call("doctor").stdout


@pytest.mark.parametrize(
    "name, words",
    [
        ("partiprompts.tsv", "curl -LO https://raw.githubusercontent.com/google-research/parti"),
        ("DrawBench.csv", "curl -Lo drawbench.csv"),
        (
            "mine.txt",
            "`chunk-grpo doctor` shows the commands that download HPDv2, PartiPrompts, DrawBench",
        ),
    ],
)
def test_missing_list_is_followed_by_where_it_can_be_had(name, words):
    with pytest.raises(InputError) as error:
        inputs.read_prompts(name)
    assert words in str(error.value)
