"""One bad input of each kind, as a command to refuse: settings, YAML, prompts, machines, models, runs, studies, options.

Where several commands or fields take the same kind, the kinds take turns on them.
"""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import synthetic
import tiny_flux
import torch
from hypothesis import strategies as st
from safetensors.torch import save

from chunk_grpo.core.settings import Settings


@dataclass
class Case:
    """A command line and what it must end with: 2, or, where only some of the texts are wrong, 0 as well."""

    words: list
    codes: tuple = (2,)
    env: dict = field(default_factory=dict)
    # seen once a run was begun, which is taken away again and stays noted as one's own
    late: bool = False


LONG = "x" * 5000
DIGITS = "9" * 5000
TEXTS = [
    "x",
    "''",
    "' '",
    "[1",
    "{a: 1}",
    "[x, [y]]",
    "null",
    "~",
    "true",
    "0x_",
    "é",
    "\x1b[31mred",
    "a\nb",
    "'\\0'",
    "2024-01-01",
    "!!python/name:os.system",
    "*a",
    "&a [*a]",
    DIGITS,
    LONG,
    ".nan",
    "-.inf",
    "1e999",
    "-1",
]
WRONG = {  # a field of each type -> texts in YAML that it cannot be
    "iterations": ["x", "null", "true", "[1]", "1.5", "1e3", "010", "1:30", "0", DIGITS, LONG],
    "eta": ["x", "''", "{a: 1}", "'1'", ".nan", "-.inf", "1e999", "1,5", "0"],
    "noise_spread": ["1.1"],
    "ema": ["1"],
    "eval_guidance": ["-1"],
    "shared_noise": ["1", "'true'", "maybe", ""],
    "model": ["''", "null", "1.5", "[a, b]"],
    "lora_targets": ["1", "x", "null", "['']", "[a, a]", "[[a]]"],
    "reward": ["1", "[]", "{}", "{a: x}", "{1: 1}", "{[a]: 1}", "{nobody: 1}", "{a: .nan}"],
    "reward_options": ["[a]", "{a: x}"],
    "resolution": ["x", "-1", "[1, 2, 3]"],
    "dtype": ["x", "BFLOAT16", "[float32]", LONG],
}


def settings_cases(folder: Path) -> dict[str, Case]:
    """Fields with what they cannot be, in turn as a word of the command line and in a file."""
    out = {}
    plan = ["plan", "pocket/tiny", "--rate", "1"]
    found = [(name, text) for name, texts in WRONG.items() for text in texts]
    for i, (name, text) in enumerate(found):
        if i % 2:
            out[f"override {name}={text[:20]}"] = Case([*plan, f"{name}={text}"])
        else:
            file = write(folder / "settings" / f"{i}.yaml", f"like: pocket/tiny\n{name}: {text}\n")
            out[f"file {name}: {text[:20]}"] = Case(["plan", file, "--rate", "1"])
    for text in ("eta", "=3", "", "eta 3", "-eta=1", "é=1", "Eta=1", "eta.x=1", "x" * 300 + "=1"):
        out[f"override {text[:20]!r}"] = Case([*plan, "--", text])
    return out


def hash_of(text: str) -> int:
    """A number that is the same in every process."""
    return sum(text.encode())


def write(file: Path, content: str | bytes) -> Path:
    """A file with its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def bomb(levels: int) -> str:
    """Aliases of aliases."""
    out = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    return out + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, levels)
    )


MERGE = "steps: 17\n<<: {eta: 0.5}\n"
YAML = {
    "empty": "",
    "scalar": "3",
    "list": "- a\n- b\n",
    "two documents": "steps: 9\n---\nsteps: 17\n",
    "bomb": bomb(12),
    "twice": "steps: 17\nsteps: 17\n",
    "alias of itself": "a: &a [*a]",
    "object": "a: !!python/object/apply:os.system [ls]",
    "own tag": "a: !mine 3",
    "brackets": "[" * 3000,
    "deep": "".join(" " * i + "a:\n" for i in range(300)),
    "tab": "steps:\t17\n\teta: 1\n",
    "open": "steps: [",
    "key list": "? [a]\n: 1",
    "key number": "1: 1",
    "merge": MERGE,
    "bad directive": "%x",
    "control": "a: \x01",
    "utf-16": "steps: 17".encode("utf-16"),
    "latin": "model: café".encode("latin-1"),
    "nulls": b"\0" * 999,
    "surrogate": b"a: \xed\xa0\x80",
    "digits": "steps: " + "1" * 9999,
    "megabytes": "".join(f"a{i}: 1\n" for i in range(1_000_000)),
    "unknown": "learnin_rate: 1",
    "case": "Steps: 17",
    "like itself": "like: nothing",
    "like a path": "like: ../../etc/passwd",
    "like a mapping": "like: {a: 1}",
    "json cut": '{"steps": 17',
    "right to left": "\u202esteps: 1",
    "crlf": "steps: x\r\neta: 1\r\n",
}
STUDY = {
    "title": "a study",
    "question": "which?",
    "seeds": 1,
    "reference": "a",
    "arms": {"a": {}, "b": {"chunks": "whole"}},
    "evaluation": {},
}


def yaml_cases(folder: Path) -> dict[str, Case]:
    """Texts that are no YAML, or none of ours, as settings; some as a study, its base and a value."""
    out = {}
    for name, text in YAML.items():
        file = write(folder / "yaml" / f"{name.replace(' ', '-')}.yaml", text)
        out[f"settings {name}"] = Case(["plan", file, "--rate", "1"])
    for name in ("list", "utf-16", "twice"):
        home = write(folder / "studies" / name / "study.yaml", YAML[name]).parent
        write(home / "base.yaml", "like: pocket/tiny\n")
        out[f"study {name}"] = Case(["study", home, "--out", "new"])
    for name in ("empty", "unknown", "object"):
        home = write(folder / "bases" / name / "study.yaml", json.dumps(STUDY)).parent
        write(home / "base.yaml", YAML[name])
        out[f"base {name}"] = Case(["study", home, "--out", "new"])
    for name in ("tab", "open", "bomb"):
        out[f"value {name}"] = Case(["plan", "pocket/tiny", "--rate", "1", f"eta={YAML[name]}"])
    return out


JSON_VALUES = [None, -1, 1.5, "\x1b[0m", [[]], {"a": {"b": []}}]


def field_edits(whole: dict, name: str, fine: tuple = ()) -> dict[str, dict]:
    """The mapping with other values of a field, and without it."""
    out = {
        f"{name} is {str(x)[:12]!r}": whole | {name: x}
        for x in JSON_VALUES
        if x not in fine and x != whole[name]
    }
    return out | {f"without {name}": {k: v for k, v in whole.items() if k != name}}


def machine_cases(folder: Path) -> dict[str, Case]:
    """Machines with one thing wrong."""
    whole = {"--nodes": "2", "--processes": "1", "--rendezvous": "gpu-a:29500", "--node-rank": "0"}
    numbers = {
        "--nodes": ("", "x", "-1", "1.5"),
        "--processes": (str(10**30),),
        "--node-rank": ("2x", "-1"),
    }
    found = {
        f"{name} {value!r}": whole | {name: value}
        for name, values in numbers.items()
        for value in values
    }
    found |= {
        f"address {x!r}": whole | {"--rendezvous": x}
        for x in ("", "gpu-a", "a:65536", "a b:1", "[::1:29500", "a:٣", "http://a:1", LONG)
    }
    start = ["train", "pocket/tiny", "--out", "new"]
    return {
        f"machines: {name}": Case([*start, *(word for pair in given.items() for word in pair)])
        for name, given in found.items()
    }


def study_cases(folder: Path) -> dict[str, Case]:
    """Studies with one thing wrong, or with options that do not fit."""
    found, out = {}, {}
    found |= field_edits(STUDY, "arms")
    needed = STUDY.keys() - {"seeds", "evaluation"}
    found |= {
        f"without {name}": {k: v for k, v in STUDY.items() if k != name} for name in sorted(needed)
    }
    found |= {f"seeds {x}": STUDY | {"seeds": x} for x in (0, 1.5, "2", None, True, 10**9)}
    found |= {
        f"{name} is {value!r}": STUDY | {name: value}
        for name, value in (("title", 3), ("question", None), ("reference", "x"))
    }
    found |= {
        "unknown": STUDY | {"sides": 1},
        "arm's field": STUDY | {"arms": {"a": {"chunkz": 1}}},
        "arm's value": STUDY | {"arms": {"a": {"eta": "x"}}},
        "arm null": STUDY | {"arms": {"a": None}},
        "after": STUDY | {"after": {"b": "c"}},
        "evaluation": STUDY | {"evaluation": {"eta": "x"}},
        "splits": STUDY | {"splits": -1},
        "path": STUDY | {"arms": {"a": {}, "../b": {}}},
        "empty": STUDY | {"arms": {"a": {}, "": {}}},
        "slash": STUDY | {"arms": {"a": {}, "b/c": {}}},
        "long": STUDY | {"arms": {"a": {}, "b" * 300: {}}},
        "circle": STUDY | {"after": {"a": "b", "b": "a"}},
        "first seed": STUDY | {"first_seed": -1},
        "effect": STUDY | {"smallest_effect": -1},
    }
    (folder / "loop").symlink_to("loop")
    for i, (name, values) in enumerate(found.items()):
        home = write(folder / "study" / str(i) / "study.yaml", json.dumps(values)).parent
        write(home / "base.yaml", "like: pocket/tiny\n")
        out[f"study: {name}"] = Case(["study", home, "--out", "new"])
    home = write(folder / "study" / "whole" / "study.yaml", json.dumps(STUDY)).parent
    write(home / "base.yaml", "like: pocket/tiny\n")
    for words in (
        ["--arms", "c"],
        ["--seeds", "7"],
        ["--seeds", "0-3"],
        ["--processes", "-1"],
        ["--known", "nowhere"],
        ["--known", home],
        ["--known", write(folder / "b.jsonl", "[]\n")],
        ["--known", write(folder / "c.jsonl", '{"settings": []}\nx\n')],
        ["--out", home / "study.yaml"],
        ["--out", "/proc/new"],
        ["--out", "loop"],
        ["--out", LONG],
        ["--ray", "x y z"],
        ["--tune"],
    ):
        out[f"study {' '.join(map(str, words))[:40]}"] = Case(["study", home, *words])
    return out


PROMPTS = {
    "empty.txt": "",
    "blank.txt": "\n \n\t\n",
    "latin.txt": "caf\xe9".encode("latin-1"),
    "utf-16.txt": "a red star\n".encode("utf-16"),
    "cut.txt": b"a red star\n\xe2\x82",
    "one.txt": "a red star\n",
    "empty.jsonl": "",
    "list.jsonl": "[1]\n",
    "other.jsonl": '{"text": "a"}\n',
    "cut.jsonl": '{"prompt": "a',
    "type.jsonl": '{"prompt": 3}\n',
    "nan.jsonl": "NaN\n",
    "null within.jsonl": '{"prompt": null}\n',
    "plain.jsonl": "a red star\n",
    "blank within.jsonl": '{"prompt": " "}\n',
    "deep.jsonl": "[" * 100_000,
    "surrogate.jsonl": '{"prompt": "\\ud800"}\n{"prompt": "b"}\n{"prompt": "c"}\n',
}


def prompts_cases(folder: Path) -> dict[str, Case]:
    """Lists of prompts that are none, for training and held out; each by its file."""
    good = write(folder / "good.txt", "a red star\na blue star\ntwo cats\na dog\n")
    out = {}
    for i, (name, content) in enumerate(PROMPTS.items()):
        file = write(folder / "prompts" / name, content)
        key, other = ("prompts", "eval_prompts")[:: 1 if i % 2 or name == "one.txt" else -1]
        words = ["train", "pocket/tiny", f"{key}={file}", f"{other}={good}", "--out", "new"]
        out[f"{key} {name}"] = Case(words)
    (folder / "prompts" / "folder.txt").mkdir()
    (folder / "prompts" / "loop.txt").symlink_to("loop.txt")
    (folder / "prompts" / "gone.txt").symlink_to("nowhere.txt")
    for place in ("folder.txt", "loop.txt", "gone.txt", "nowhere.txt", "good.txt/more", LONG):
        words = ["train", "pocket/tiny", f"prompts={folder / 'prompts' / place}", "--out", "new"]
        out[f"prompts {place[:20]}"] = Case(words)
    for i, name in enumerate(("pocket:", "pocket:nothing", "pocket:../train", "/dev/null", ".")):
        words = ["train", "pocket/tiny", f"{('', 'eval_')[i % 2]}prompts={name}", "--out", "new"]
        out[f"prompts {name}"] = Case(words)
    return out


HARM = {
    "missing": None,
    "empty": b"",
    "object": b"{}",
    "list": b"[]",
    "text": b"x" * 400,
    "binary": bytes(range(256)) * 4,
    "nested": b"[" * 100_000,
    "nan": b"NaN",
    "a folder": "folder",
    "a loop": "loop",
    "nowhere": "gone",
}


def harm(file: Path, how: str) -> None:
    """Put something else in a file's place."""
    content = HARM[how]
    file.unlink()
    if content == "folder":
        file.mkdir()
    elif content in ("loop", "gone"):
        file.symlink_to(file.name if content == "loop" else "nowhere")
    elif content is not None:
        file.write_bytes(content)


CHANGED = {  # file of a model -> changes that leave no model
    "text_encoder/config.json": [{"hidden_size": "x"}, {"hidden_size": 0}],
    "text_encoder_2/config.json": [{"num_heads": None}, {"vocab_size": 3}],
    "transformer/config.json": [{"num_layers": -1}, {"attention_head_dim": "x"}],
    "vae/config.json": [{"block_out_channels": []}, {"latent_channels": 3}],
    "tokenizer/tokenizer_config.json": [{"model_max_length": 10**30}, {"padding_side": "middle"}],
    "model_index.json": [
        {"tokenizer": None},
        {"tokenizer_2": [None, None]},
        {"text_encoder": ["os", "system"]},
        {"text_encoder_2": ["transformers", "Nothing"]},
    ],
}


def model_cases(folder: Path) -> dict[str, Case]:
    """Folders of models each with a part that is missing or damaged."""
    whole = folder / "model"
    out = {}
    good = write(folder / "good.txt", "a red star\na blue star\ntwo cats\na dog\n")
    tiny_flux.build(whole)
    words = ["train", "pocket/tiny", f"prompts={good}", f"eval_prompts={good}", "--out", "new"]
    parts = [
        "model_index.json",
        "transformer/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        *sorted(
            str(file.relative_to(whole))
            for part in ("transformer", "vae", "text_encoder", "text_encoder_2")
            for file in (whole / part).glob("*.safetensors")
        ),
    ]
    for number, part in enumerate(parts):
        half = [how for i, how in enumerate(HARM) if i % 2 != hash_of(part) % 2]
        for how in HARM if part == "model_index.json" else half[number % 2 :: 2]:
            if how == "object" and part.endswith("config.json"):
                continue  # defaults of the library; the weights tell, and those are loaded later
            other = folder / "models" / f"{part.replace('/', '-')}-{how.replace(' ', '-')}"
            shutil.copytree(whole, other, copy_function=linked)
            harm(other / part, how)
            out[f"model {part} {how}"] = Case([*words, f"model={other}"])
    for i, (key, value) in enumerate([("_class_name", x) for x in (None, [], "Nothing")]):
        other = folder / "models" / f"index-{i}"
        shutil.copytree(whole, other, copy_function=linked)
        index = json.loads((other / "model_index.json").read_text())
        (other / "model_index.json").unlink()
        write(other / "model_index.json", json.dumps(index | {key: value}))
        out[f"model class {value!r}"] = Case([*words, f"model={other}"])
    for part, changes in CHANGED.items():
        for i, change in enumerate(changes):
            other = folder / "models" / f"{part.replace('/', '-')}-{i}"
            shutil.copytree(whole, other, copy_function=linked)
            content = json.loads((other / part).read_text())
            (other / part).unlink()
            write(other / part, json.dumps(content | change))
            out[f"model {part} {change}"] = Case([*words, f"model={other}"])
    for name in ("nowhere", "a/b/c", "../..", "/dev/null", str(good), "--", "é/é", LONG):
        out[f"model {name[:20]}"] = Case([*words, f"model={name}"])
    out["model nowhere and no folder named"] = Case([*words[:-2], "model=nowhere"])
    return out


def linked(source: str, target: str) -> None:
    """A second name of a file, which costs nothing."""
    Path(target).hardlink_to(source)


def synthetic_run(folder: Path) -> Path:
    """A run with small pictures and a model and prompts that exist."""
    run = synthetic.write(folder / "run", {"eval_resolution": 64}, prompts=6)
    (run / "final" / "model.safetensors").touch()
    return run


READERS = {
    "run.json": ("compare", "plan", "profile", "evaluate", "resume"),
    "metrics.jsonl": ("plan", "compare"),
    "evaluation/summary.json": ("compare",),
}
FINE = {
    ("metrics.jsonl", how)
    for how in (
        "missing",
        "empty",
        "object",
        "list",
        "null",
        "number",
        "text",
        "nested",
        "nan",
        "nowhere",
    )
}  # nothing yet, or a last line that is not finished


def command_on(name: str, run: Path) -> list:
    """A command that reads a run."""
    return {
        "plan": ["plan", "--run", run, "--rate", "1"],
        "profile": ["profile", "--run", run],
        "resume": ["train", "pocket/tiny", "--out", run, "--resume"],
    }.get(name, [name, run])


def run_cases(folder: Path) -> dict[str, Case]:
    """Run folders with a file that is missing, damaged or of the wrong form, for the commands that read it."""
    whole = synthetic_run(folder)
    out = {}
    note = json.loads((whole / "run.json").read_text())
    for name, readers in READERS.items():
        for how in HARM:
            if (name, how) in FINE or (name, how) == ("metrics.jsonl", "a folder"):
                continue
            other = folder / "runs" / f"{name.replace('/', '-')}-{how.replace(' ', '-')}"
            shutil.copytree(whole, other, copy_function=linked)
            harm(other / name, how)
            reader = readers[hash_of(how) % len(readers)]
            out[f"run {name} {how} {reader}"] = Case(command_on(reader, other))
    edits = {}
    for key, fine in (("settings", ()), ("status", ("", "x", "\x1b[0m")), ("processes", ())):
        edits |= field_edits(note, key, fine)
    for key, value in (
        ("model", 3),
        ("eta", "x"),
        ("nothing", 1),
        ("iterations", -1),
        ("reward", {}),
        ("chunks", "9"),
    ):
        edits[f"settings.{key}"] = note | {"settings": note["settings"] | {key: value}}
    for i, (name, values) in enumerate(edits.items()):
        other = folder / "edited" / str(i)
        shutil.copytree(whole, other, copy_function=linked)
        (other / "run.json").unlink()
        write(other / "run.json", json.dumps(values))
        of_a_plan = "processes" in name or "status" in name
        reader = "plan" if of_a_plan else ("compare", "evaluate", "profile")[i % 3]
        out[f"run.json {name} {reader}"] = Case(command_on(reader, other))
    lines = (whole / "metrics.jsonl").read_text()
    for i, (old, new) in enumerate(
        [
            ('"iteration": 3', '"iteration": "3"'),
            ('"iteration": 3', '"it": 3'),
            ("\n", "\nx\n"),
            ("\n", "\n[]\n"),
        ]
    ):
        other = folder / "lines" / str(i)
        shutil.copytree(whole, other, copy_function=linked)
        (other / "metrics.jsonl").unlink()
        write(other / "metrics.jsonl", lines.replace(old, new, 1))
        out[f"metrics {new!r}"] = Case(command_on("compare", other))
    return out


def make_odd_places(folder: Path) -> None:
    """A link in a circle, an empty folder, a file, and a folder with somebody's work."""
    (folder / "loop").symlink_to("loop")
    (folder / "hollow").mkdir()
    write(folder / "file", "dear")
    write(folder / "kept" / "thesis.tex", "dear")


def place_cases(folder: Path) -> dict[str, Case]:
    """Places that are no run, or where nothing can be written; commands that take one take turns on them."""
    make_odd_places(folder)
    run = synthetic_run(folder)
    nowhere = ["nowhere", "file", "hollow", "loop", "file/more", "/dev/null", "/proc", LONG, "a\nb"]
    nowhere += ["\x1b[31m", "~", "*"]
    readers = ["report", "compare", "evaluate", "plan", "profile", "resume", "tables"]
    out = {}
    for i, place in enumerate([*nowhere, "hollow", "nowhere"]):
        reader = readers[i % len(readers)]
        out[f"{reader} {place[:20]!r}"] = Case(command_on(reader, place))
    taken = ["file", "loop", "kept", "/dev/full", "/proc/new", LONG, "file/more", "loop/more"]
    for place in taken:
        out[f"train --out {place[:20]}"] = Case(["train", "pocket/tiny", "--out", place])
    written = [
        (["compare", run, "--out"], "html"),
        (["tables", "--out"], "html"),
        (["speed", "--out"], "json"),
        (["profile", "pocket/tiny", "--out"], "html"),
        (["profile", "pocket/tiny", "--json"], "json"),
    ]
    places = ["hollow", "/proc/new/a.KIND", LONG, "file/a.KIND", "loop/a.KIND", "loop.KIND/"]
    for i, place in enumerate(places):
        for words, kind in (written[i % 5], written[(i + 2) % 5]):
            if (words[-1], place) != ("--json", "loop.KIND/"):
                name = place.replace("KIND", kind)
                out[f"{words[0]} {words[-1]} {name[:20]}"] = Case([*words, name])
    return out


NUMBERS = ["x", "", "nan", "inf", "-1", "1.5", "0x10", "1e3", DIGITS, "-" + DIGITS, "١", "1 2"]
OPTIONS = {  # command -> option -> texts that it does not take
    "plan pocket/tiny": {
        "--processes": [*NUMBERS, "0", "3"],
        "--rate": ["nan", "-1", "1e999"],
        "--device": ["x", "\x1b"],
        "--share": ["0.5"],
        "--run": ["nowhere"],
    },
    "plan pocket/tiny --device h200": {"--share": ["0", "1.1", "nan"], "--rate": ["1"]},
    "train pocket/tiny": {
        "--processes": [*NUMBERS, "3", "4"],
        "--nodes": ["0", "2"],
        "--max-restarts": ["-1"],
    },
    "profile pocket/tiny": {
        "--prompts": [*NUMBERS, "10001"],
        "--images": [*NUMBERS, "0"],
        "--steps": ["1", "10,x", "10001", ",", "10;20", "٣"],
    },
    "speed": {
        "--prompts": [*NUMBERS],
        "--images": [*NUMBERS, "1"],
        "--steps": [*NUMBERS, "2"],
        "--resolution": [*NUMBERS, "17"],
        "--model": ["nowhere", ""],
        "--out": ["a.txt", ".", "nowhere/a.json"],
    },
    "tables": {"--arm": ["x"], "--steps": [*NUMBERS, "1"], "--name": ["x", "=a"]},
    "evaluate --images a=hollow": {"--benchmark": ["nowhere", "file"], "--samples": ["10001"]},
    "evaluate --benchmark geneval": {"--images": ["x", "a=", "=hollow", "a=nowhere"]},
    "evaluate --benchmark geneval --images a=hollow": {"--detector": ["nowhere", "hollow"]},
    "evaluate nowhere": {"--processes": [*NUMBERS, "1001"]},
    "serve-reward pocket-clip": {
        "--port": [*NUMBERS, "65536"],
        "--host": ["", "no such host"],
        "--token": ["NOT_SET_HERE", "a b"],
        "--max-images": ["0"],
        "--batch-wait-ms": ["nan"],
    },
    "study explain": {"--processes": [*NUMBERS, "10001"], "--seeds": ["x", "16"]},
}
PLAIN = [
    "fly",
    "evaluate",
    "serve-reward",
    "plan --fast",
    "train pocket/tiny --resume",
    "serve-reward nowhere:f",
    "serve-reward os:nothing",
    "report nowhere more",
    "compare run nowhere",
    "plan pocket/tiny more",
    "evaluate run eta=1",
    "evaluate --images a=hollow",
    "--out",
]


def option_cases(folder: Path) -> dict[str, Case]:
    """Every option with values that it does not take."""
    make_odd_places(folder)
    synthetic_run(folder)
    out = {}
    for command, options in OPTIONS.items():
        for option, texts in options.items():
            number = NUMBERS[hash_of(option) % 3 :: 3][hash_of(command) % 4]
            all_numbers = len(texts) >= len(NUMBERS)  # of these one
            chosen = [
                text for text in texts if text == number or not (all_numbers and text in NUMBERS)
            ]
            out |= {
                f"{command} {option} {text[:20]!r}": Case([*command.split(), option, text])
                for text in chosen
            }
    out |= {f"plain {words}": Case(words.split()) for words in PLAIN}
    for value in ("x", "-1", "nan", "10 GB"):
        words = ["train", "pocket/tiny", "--out", "new"]
        out[f"CHUNK_GRPO_CACHE_GB={value!r}"] = Case(words, env={"CHUNK_GRPO_CACHE_GB": value})
    for value in ("/dev/null", "/proc/new", "loop", "x" * 300):
        out[f"CHUNK_GRPO_CACHE={value[:20]}"] = Case(
            ["train", "pocket/tiny", "--out", "new"], env={"CHUNK_GRPO_CACHE": value}
        )
    return out


AXES = {  # setting -> texts that say no choice on its axis
    "window": ["x", "all:3", "frozen:", "frozen:99", "random:1.5", "progressive:4", "frozen:4:2"],
    "merge": ["x", "entropy:", "entropy:0", "entropy:nan", "rest:2", "rest:0.5:2", LONG],
    "completion_strides": ["2", "1,1", "1,0", "1,x", "1;2", "1,99999"],
    "solver": ["x", "EULER", "[dpm2]"],
    "surrogate": ["x", "clip:1", "asymmetric:1", "dppo:0", "hinge:x", "nowhere.py:f", "os:nothing"],
    "step_weights": ["x", "1,2", "0,16", "16,", "\u0661\u0666", DIGITS],
    "sharing": ["x", "seeds", "seeds:5", "tree:2@", "tree:2@0,0", "tree:2@99,0", "tree:2@0,1,2"],
    "method": ["x", "a b", ":M", "nowhere.py:M", "os:getcwd", "chunk_grpo.theory.chunks:Chunks"],
    "chunks": ["0,16", "-1,17", "equal:5", "adaptive:0", "whole:2", "steps,1", "profile:3", LONG],
    "train_chunks": ["0", "5", "1,1", "1;2", "1.5"],
}
PAIRS = [  # choices that do not go together
    "sharing=seeds:2 shared_noise=true",
    "credit_of=depth",
    "credit_of=depth sharing=group shared_noise=false",
    "credit_of=gain chunks=profile",
    "completion_steps=2",
    "lora_alpha=4",
    "lora_targets=[to_q]",
    "anchor_share=0.5",
    "diversity=true reward=incompressibility eval_rewards=[]",
    "noise_spread=0.3 shared_noise=false",
    "method=neighbor noise_spread=0",
    "method=tmpo chunks=steps",
    "method=neighbor updates_per_iteration=3",
    "profile_every=2",
    "merge=window window=frozen:4 chunks=profile",
    "merge=entropy:2 window=frozen:4",
    "completion_strides=1,3",
    "completion_strides=1,2 window=frozen:1 credit_of=gain chunks=steps",
    "merge=entropy:2",
    "solver=dpm2 window=frozen:15 chunks=steps",
    "merge=rest:0.5 window=frozen:2 sharing=tree:2@0,1 shared_noise=false",
    "merge=window window=frozen:4 chunk_weighting=profile chunks=whole",
    "anchor_every=2",
    "drop_flat_groups=true kl=0.1",
    "sampler=cps statistic=guard",
    "sampler=cps eta=1.6",
    "train_chunks=1 chunks=adaptive:2",
    "weighting_uniform=0.5",
    "sharding=fsdp lora_rank=4 quantization=int8",
    "sharding=fsdp sharding_offload=true",
    "sharding_group=2",
    "sharding=fsdp optimizer=adamw-8bit",
    "steps=9",
    "window=frozen:4",
    "window=frozen:4 chunks=2,3",
    "step_weights=2,3 chunks=whole",
    "method=branch images_per_prompt=8",
    "method=tree images_per_prompt=9 steps=3",
    "method=tempflow-seeds images_per_prompt=6",
    "method=mix steps=4",
    "method=fast window=early:99",
    "method=nft shared_noise=true",
    "method=online-dpo shared_noise=true",
    "hybrid_split=6",
    "eval_steps=2 hybrid_split=3",
    "updates_per_iteration=3",
]


def method_cases(folder: Path) -> dict[str, Case]:
    """Every axis of the methods with what is no choice there, and choices that do not go together."""
    plan = ["plan", "pocket/tiny", "--rate", "1"]
    more = {"sharing": ["shared_noise=false"]}
    out = {
        f"axis {name}={text[:20]!r}": Case(
            [*plan, *more.get(name, []), f"{name}={json.dumps(text)}"]
        )
        for name, texts in AXES.items()
        for text in texts
    }
    return out | {f"pair {words}": Case([*plan, *words.split()]) for words in PAIRS}


CODE = {  # what a user's file says -> how
    "does not parse": "def f(:\n",
    "divides": "1/0\n",
    "exits": "import sys\nsys.exit(3)\n",
    "has no f": "g = 1\n",
    "is a number": "f = 3\n",
    "imports nothing": "import nothing_of_the_kind\n",
    "is empty": "",
    "has nulls": "a = '\0'\n",
    "raises what has lines": "raise ValueError('a\\nb\\x1b[31m')\n",
    "recurs": "def g(): g()\ng()\n",
}
GIVES = "def f(images, prompts): return "
REWARDS = {
    "takes nothing": "def f():\n    return []\n",
    "is a class that cannot be called": "class f:\n    pass\n",
    "gives nothing": GIVES + "None",
    "gives too few": GIVES + "[0.0]",
    "gives text": GIVES + "['a'] * len(prompts)",
    "gives no number": GIVES + "[float('nan')] * len(prompts)",
    "gives two each": GIVES + "[[1.0, 2.0]] * len(prompts)",
    "generates": "def f(images, prompts):\n    yield 1.0\n",
    "needs an option": "def f(images, prompts, level):\n    return [level]\n",
}


def code_cases(folder: Path) -> dict[str, Case]:
    """Files of a user that cannot be imported, name nothing, or whose functions take or give something else."""
    train = ["train", "pocket/tiny", "--out", "new", "iterations=1", "steps=4", "chunks=3"]
    out = {}
    for i, (what, content) in enumerate({**CODE, **REWARDS}.items()):
        file = write(folder / "code" / f"mine{i}.py", content)
        field = "reward" if what in REWARDS else ("method", "chunks", "surrogate", "reward")[i % 4]
        words = [*train, f"{field}={file}:f"] + ["eval_rewards=[]"] * (field == "reward")
        out[f"{field} that {what}"] = Case(words, late=field == "reward")
    return out


FINAL = {
    "half": 0.5,
    "a byte less": -1,
    "empty": 0,
    "garbage": b"\x00" * 4096,
    "text": b"weights",
    "a link in a circle": "loop",
    "a link to nowhere": "nowhere",
    "a folder": "folder",
}


def final_cases(folder: Path) -> dict[str, Case]:
    """Trained weights that are damaged, with and without their note, for every command that loads them."""
    whole = synthetic_run(folder)
    out = {}
    (whole / "final" / "model.safetensors").unlink()
    weights = write(whole / "final" / "transformer.safetensors", save({"a": torch.ones(64, 64)}))
    note = json.loads((whole / "run.json").read_text())
    commands = ("evaluate", "sample", "export")
    more = {"sample": ["a red star", "--out", "drawn"], "export": ["made"]}
    for i, (how, content) in enumerate([*FINAL.items(), *FINAL.items()]):
        noted = i < len(FINAL)
        run = folder / "finals" / f"{how.replace(' ', '-')}-{noted}"
        shutil.copytree(whole, run, copy_function=linked)
        (run / "final" / weights.name).unlink()
        harm_weights(run / "final" / weights.name, weights.read_bytes(), content)
        (run / "run.json").unlink()
        own = {"final_sha256": {weights.name: "0" * 64}} if noted else {}
        write(run / "run.json", json.dumps(note | {"status": "finished"} | own))
        name = commands[i % 3]
        what = f"final {how}, {'noted' if noted else 'not noted'}"
        out[f"{what}, {name}"] = Case([name, run, *more.get(name, [])])
    return out


def harm_weights(file: Path, whole: bytes, how) -> None:
    """Put damaged weights in a file's place."""
    if how == "folder":
        file.mkdir()
    elif isinstance(how, str):
        file.symlink_to(file.name if how == "loop" else how)
    else:
        file.write_bytes(
            how
            if isinstance(how, bytes)
            else whole[: int(len(whole) * how)]
            if how >= 0
            else whole[:how]
        )


WORDS = st.sampled_from([*Settings.model_fields, "steps", "like", "nothing", ""])
VALUES = st.one_of(
    st.sampled_from(TEXTS),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=12),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
        max_leaves=6,
    ).map(json.dumps),
)
OVERRIDES = (
    st.tuples(WORDS, VALUES)
    .map(lambda pair: f"{pair[0]}={pair[1]}")
    .filter(lambda text: "\0" not in text)
)
FILES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode(errors="surrogatepass")),
    st.dictionaries(WORDS, VALUES, max_size=3).map(
        lambda x: "\n".join(f"{k}: {v}" for k, v in x.items()).encode(errors="surrogatepass")
    ),
)


def drawn(strategy, count: int) -> list:
    """Examples of a strategy, the same at every call."""
    from hypothesis import HealthCheck, Phase, given, settings

    found = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(value):
        found.append(value)

    draw()
    return found


def drawn_cases(folder: Path, count: int = 15) -> dict[str, Case]:
    """Words and files that hypothesis makes: those that are right by chance are planned."""
    out = {
        f"drawn {i} {text[:30]!r}": Case(["plan", "pocket/tiny", "--rate", "1", "--", text], (0, 2))
        for i, text in enumerate(drawn(OVERRIDES.filter(encodable), count))
    }
    for i, content in enumerate(drawn(FILES, count)):
        file = write(folder / "drawn" / f"{i}.yaml", content)
        out[f"drawn file {i}"] = Case(["plan", file, "--rate", "1"], (0, 2))
    return out


def encodable(text: str) -> bool:
    """Whether a text can be a word of a command line."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


KINDS = {
    "settings": settings_cases,
    "yaml": yaml_cases,
    "machines": machine_cases,
    "studies": study_cases,
    "prompts": prompts_cases,
    "models": model_cases,
    "runs": run_cases,
    "places": place_cases,
    "options": option_cases,
    "drawn": drawn_cases,
    "methods": method_cases,
    "code": code_cases,
    "finals": final_cases,
}


def sample(cases: dict[str, Case], count: int) -> dict[str, Case]:
    """A few of them, the same every time."""
    names = random.Random(0).sample(sorted(cases), min(count, len(cases)))
    return {name: cases[name] for name in names}
