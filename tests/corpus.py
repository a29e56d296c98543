"""Bad inputs by rule: settings, YAML, prompts, machines, models, runs, studies, options; each a command to refuse."""

import json
import random
import shutil
import types
import typing
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
OK_TEXTS = {int: set(), float: set(), bool: {"true"}}


def kind_of(name: str) -> type:
    """What a setting holds: int, float, bool, str, tuple or dict; `Literal` for one of several words."""
    hint = Settings.model_fields[name].annotation
    if typing.get_origin(hint) is types.UnionType:
        return float if hint == float | None else dict
    return typing.get_origin(hint) or hint


def wrong_values(name: str) -> list[str]:
    """Texts in YAML that a setting cannot be, by its type and its limits."""
    kind = kind_of(name)
    limits = {}
    for m in Settings.model_fields[name].metadata:
        limits |= {key: getattr(m, key) for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}
    if kind in (int, float):
        out = [
            "x",
            "''",
            "'1'",
            "true",
            "null",
            "[1]",
            "{a: 1}",
            ".nan",
            ".inf",
            "-.inf",
            "-" + DIGITS,
            "1,5",
            LONG,
        ]
        if Settings.model_fields[name].default is None:
            out.remove("null")
        out += ["1.5", "1e3", "1.0", "010", "1:30"] if kind is int else ["1e999", "1d3"]
        out += [DIGITS, "9" * 19] if kind is int else []
        low = limits.get("ge", limits.get("gt"))
        high = limits.get("le", limits.get("lt"))
        out += [str(low - 1)] if low is not None else []
        out += [str(high + 1 if high < 1e15 else high * 10)] if high is not None else []
        out += [str(low)] * ("gt" in limits) + [str(high)] * ("lt" in limits)
        return out
    if kind is bool:
        return ["1", "0", "'true'", "maybe", "[]", "null", "2.0", "{a: true}", ""]
    if kind is str:
        return ["", "''", "null", "true", "1.5", "[a, b]", "{a: 1}", "[[1]]"]
    if kind is tuple:
        return ["1", "x", "true", "null", "{a: 1}", "[1]", "['']", "[a, a]", "[[a]]", "[null]"]
    if kind is dict:
        out = [
            "1",
            "true",
            "null",
            "[]",
            "[a]",
            "{a: x}",
            "{a: null}",
            "{1: 1}",
            "{[a]: 1}",
            "{nobody: 1}",
            "x",
        ]
        return out + (
            ["{}", "''", "{a: 0}", "{a: -1}", "{a: .nan}", "{a: .inf}"] if name == "reward" else []
        )
    allowed = list(typing.get_args(Settings.model_fields[name].annotation))
    return [
        "x",
        "''",
        "1",
        "null",
        "true",
        "[]",
        allowed[0].upper(),
        f"{allowed[0]} ",
        f"[{allowed[0]}]",
        LONG,
    ]


def quoted(text: str) -> str:
    """A value as it would stand behind its name in a file."""
    return f'"{text}"' if text.endswith(" ") else text


def settings_cases(folder: Path) -> dict[str, Case]:
    """Every field with everything that it cannot be, as a word of the command line and in a file."""
    out = {}
    plan = ["plan", "pocket/tiny", "--rate", "1"]
    fine = {"weighting_uniform": {"0"}, "reward_options": set()}
    for name in Settings.model_fields:
        for i, text in enumerate(wrong_values(name)):
            if text in fine.get(name, ()) or (
                kind_of(name) is typing.Literal and text.endswith(" ")
            ):
                continue  # YAML takes the space away
            if i % 3 == hash_of(name) % 3:
                out[f"override {name}={text[:20]}"] = Case([*plan, f"{name}={text}"])
            if i % 5 == hash_of(name) % 5:
                file = folder / "settings" / f"{name}-{i}.yaml"
                write(file, f"like: pocket/tiny\n{name}: {quoted(text)}\n")
                out[f"file {name}: {text[:20]}"] = Case(["plan", file, "--rate", "1"])
    for text in (
        "eta",
        "=3",
        " =3",
        "eta 3",
        "=",
        "",
        "eta:3",
        "é=1",
        "-eta=1",
        "x" * 300 + "=1",
        "Eta=1",
        "eta.x=1",
    ):
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
    "blank": "  \n\n",
    "comment": "# nothing\n",
    "scalar": "3",
    "text": "settings",
    "list": "- a\n- b\n",
    "null": "null",
    "document end": "---\n...\n",
    "two documents": "steps: 9\n---\nsteps: 17\n",
    "bomb": bomb(12),
    "twice": "steps: 17\nsteps: 17\n",
    "twice within": "reward: {a: 1, a: 2}\n",
    "alias": "steps: &a 17\neta: *a\n",
    "alias of itself": "a: &a [*a]",
    "unknown alias": "steps: *a",
    "object": "a: !!python/object/apply:os.system [ls]",
    "name": "a: !!python/name:os.system",
    "binary tag": "a: !!binary aGk=",
    "own tag": "a: !mine 3",
    "float tag": "eta: !!float 1",
    "set": "!!set {a, b}",
    "omap": "!!omap [a: 1]",
    "brackets": "[" * 3000,
    "braces": "{a: " * 3000,
    "deep": "".join(" " * i + "a:\n" for i in range(300)),
    "tab": "steps:\t17\n\teta: 1\n",
    "open": "steps: [",
    "open text": "model: 'a",
    "key list": "? [a]\n: 1",
    "key mapping": "? {a: b}\n: 1",
    "key null": "~: 1",
    "key number": "1: 1",
    "key float": ".nan: 1",
    "key true": "true: 1",
    "key empty": "'': 1",
    "merge": MERGE,
    "directive": "%YAML 9.9\n---\nsteps: 9",
    "bad directive": "%x",
    "control": "a: \x01",
    "bell": "a\x07: 1",
    "utf-16": "steps: 17".encode("utf-16"),
    "utf-32": "steps: 17".encode("utf-32"),
    "latin": "model: café".encode("latin-1"),
    "binary": bytes(range(256)),
    "nulls": b"\0" * 999,
    "half utf": b"a: \xc3",
    "surrogate": b"a: \xed\xa0\x80",
    "digits": "steps: " + "1" * 9999,
    "hexadecimal": "steps: 0x_",
    "octal": "steps: 0o9",
    "old octal": "steps: 011",
    "megabytes": "".join(f"a{i}: 1\n" for i in range(1_000_000)),
    "long name": "x" * 10**7 + ": 1",
    "sexagesimal": "steps: 1:90",
    "date": "steps: 2024-02-30",
    "unknown": "learnin_rate: 1",
    "case": "Steps: 17",
    "like itself": "like: nothing",
    "like a list": "like: [pocket/tiny]",
    "like null": "like:\n",
    "like number": "like: 1",
    "like a path": "like: ../../etc/passwd",
    "like a mapping": "like: {a: 1}",
    "json cut": '{"steps": 17',
    "lone": "- ",
    "anchor": "&a",
    "percent": "steps: %a",
    "at": "steps: @a",
    "backtick": "steps: `a`",
    "long key": "x" * 3000 + ": 1",
    "long line": "model: [" + "x, " * 20000,
    "many": "".join(f"a{i}: 1\n" for i in range(3000)),
    "escape": '"\\xZZ": 1',
    "emoji": "😀: 1",
    "right to left": "\u202esteps: 1",
    "crlf": "steps: x\r\neta: 1\r\n",
    "nel": "steps: 1\x85eta: 2",
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
    """Texts that are no YAML, or none of ours: as settings, and as one of study, base of a study and value."""
    out = {}
    for name, text in YAML.items():
        file = write(folder / "yaml" / f"{name.replace(' ', '-')}.yaml", text)
        out[f"settings {name}"] = Case(["plan", file, "--rate", "1"])
        where = ("study", "base", "value")[hash_of(name) % 3]
        if where == "study":
            home = write(folder / "studies" / f"s-{file.stem}" / "study.yaml", text).parent
            write(home / "base.yaml", "like: pocket/tiny\n")
            out[f"study {name}"] = Case(["study", home, "--out", "new"])
        elif where == "base":
            whole = write(
                folder / "studies" / f"b-{file.stem}" / "study.yaml", json.dumps(STUDY)
            ).parent
            write(whole / "base.yaml", text)
            out[f"base {name}"] = Case(["study", whole, "--out", "new"])
        elif isinstance(text, str):
            out[f"value {name}"] = Case(
                ["plan", "pocket/tiny", "--rate", "1", f"eta={text[:20_000]}"]
            )
    return out


JSON_VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\x1b[0m",
    [],
    {},
    [[]],
    {"a": {"b": []}},
    ["a", 1],
    {"1": None},
]


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
    found = {
        f"{name} {value!r}": whole | {name: value}
        for name in ("--nodes", "--processes", "--node-rank")
        for value in ("", "x", "-1", "1.5", str(10**30), "2x")
        if (name, value) != ("--nodes", "1")
    }
    found |= {
        f"address {x!r}": whole | {"--rendezvous": x}
        for x in (
            "",
            "gpu-a",
            ":1",
            "a:0",
            "a:65536",
            "a:-1",
            "a b:1",
            "a:1:2:3",
            "[::1:29500",
            "a:٣",
            "http://a:1",
            "a:1\n",
            LONG,
        )
    }
    start = ["train", "pocket/tiny", "--out", "new"]
    return {
        f"machines: {name}": Case([*start, *(word for pair in given.items() for word in pair)])
        for name, given in found.items()
    }


def study_cases(folder: Path) -> dict[str, Case]:
    """Studies with one thing wrong, or with options that do not fit."""
    found, out = {}, {}
    fine = {
        "title": ("x", "\x1b[0m"),
        "question": ("x", "\x1b[0m"),
        "evaluation": ({},),
        "seeds": (),
    }
    for name in STUDY:
        if name != "seeds":
            found |= field_edits(STUDY, name, fine.get(name, ()))
    found |= {f"seeds {x}": STUDY | {"seeds": x} for x in (0, -1, 1.5, "2", None, True, 10**9, [1])}
    found |= {
        "unknown": STUDY | {"sides": 1},
        "arm's field": STUDY | {"arms": {"a": {"chunkz": 1}}},
        "arm's value": STUDY | {"arms": {"a": {"eta": "x"}}},
        "no arm": STUDY | {"arms": {}},
        "arm null": STUDY | {"arms": {"a": None}},
        "after": STUDY | {"after": {"b": "c"}},
        "evaluation": STUDY | {"evaluation": {"eta": "x"}},
        "splits": STUDY | {"splits": -1},
        "path": STUDY | {"arms": {"a": {}, "../b": {}}},
        "empty": STUDY | {"arms": {"a": {}, "": {}}},
        "slash": STUDY | {"arms": {"a": {}, "b/c": {}}},
        "long": STUDY | {"arms": {"a": {}, "b" * 300: {}}},
        "after itself": STUDY | {"after": {"a": "a"}},
        "circle": STUDY | {"after": {"a": "b", "b": "a"}},
        "first seed": STUDY | {"first_seed": -1},
        "effect": STUDY | {"smallest_effect": -1},
    }
    found.pop("without evaluation")
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
        ["--seeds", "-1"],
        ["--seeds", "a"],
        ["--seeds", "0-3"],
        ["--processes", "-1"],
        ["--processes", "x"],
        ["--known", "nowhere"],
        ["--known", home],
        ["--known", write(folder / "a.jsonl", '{"a": 1}\n')],
        ["--known", write(folder / "b.jsonl", "[]\n")],
        ["--known", write(folder / "c.jsonl", '{"settings": []}\nx\n')],
        ["--out", home / "study.yaml"],
        ["--out", "/dev/null"],
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
    "binary.txt": bytes(range(256)),
    "utf-16.txt": "a red star\n".encode("utf-16"),
    "cut.txt": b"a red star\n\xe2\x82",
    "one.txt": "a red star\n",
    "empty.jsonl": "",
    "list.jsonl": "[1]\n",
    "number.jsonl": "3\n",
    "null.jsonl": "null\n",
    "text.jsonl": '"a"\n',
    "other.jsonl": '{"text": "a"}\n',
    "cut.jsonl": '{"prompt": "a',
    "type.jsonl": '{"prompt": 3}\n',
    "nan.jsonl": "NaN\n",
    "list within.jsonl": '{"prompt": ["a"]}\n',
    "null within.jsonl": '{"prompt": null}\n',
    "plain.jsonl": "a red star\n",
    "blank within.jsonl": '{"prompt": " "}\n',
    "deep.jsonl": "[" * 100_000,
    "binary.jsonl": bytes(range(256)),
    "latin.jsonl": '{"prompt": "caf\xe9"}'.encode("latin-1"),
    "digits.jsonl": '{"prompt": %s}' % ("1" * 5000),
    "surrogate.jsonl": '{"prompt": "\\ud800"}\n{"prompt": "b"}\n{"prompt": "c"}\n',
    "nulls.txt": "a\0b\nc\nd\ne\n",
    "escape.txt": "\x1b[31ma\n\x1b[31mb\nc\nd\n",
    "one object.jsonl": json.dumps([{"prompt": "a"}] * 5),
}


def prompts_cases(folder: Path) -> dict[str, Case]:
    """Lists of prompts that are none, for training and held out; each by its file."""
    good = write(folder / "good.txt", "a red star\na blue star\ntwo cats\na dog\n")
    out = {}
    for name, content in PROMPTS.items():
        file = write(folder / "prompts" / name, content)
        for key, other in (("prompts", "eval_prompts"), ("eval_prompts", "prompts")):
            if name not in ("one.txt", "nulls.txt", "escape.txt") or (
                key == "prompts" and name == "one.txt"
            ):
                words = ["train", "pocket/tiny", f"{key}={file}", f"{other}={good}", "--out", "new"]
                out[f"{key} {name}"] = Case(words)
    (folder / "prompts" / "folder.txt").mkdir()
    (folder / "prompts" / "loop.txt").symlink_to("loop.txt")
    (folder / "prompts" / "gone.txt").symlink_to("nowhere.txt")
    for place in ("folder.txt", "loop.txt", "gone.txt", "nowhere.txt", "good.txt/more", LONG):
        words = ["train", "pocket/tiny", f"prompts={folder / 'prompts' / place}", "--out", "new"]
        out[f"prompts {place[:20]}"] = Case(words)
    for name in (
        "pocket:",
        "pocket:nothing",
        "pocket:../train",
        "pocket:train/",
        "/dev/null",
        "/proc/self/mem",
        ".",
    ):
        out[f"prompts {name}"] = Case(["train", "pocket/tiny", f"prompts={name}", "--out", "new"])
        out[f"eval_prompts {name}"] = Case(
            ["train", "pocket/tiny", f"eval_prompts={name}", "--out", "new"]
        )
    return out


HARM = {
    "missing": None,
    "empty": b"",
    "object": b"{}",
    "list": b"[]",
    "null": b"null",
    "number": b"3",
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
    "text_encoder/config.json": [
        {"hidden_size": 3},
        {"hidden_size": "x"},
        {"hidden_act": "x"},
        {"hidden_size": 0},
        {"intermediate_size": 0},
        {"eos_token_id": "x"},
        {"vocab_size": -1},
    ],
    "text_encoder_2/config.json": [
        {"num_layers": "x"},
        {"d_model": 0},
        {"d_kv": -4},
        {"num_heads": None},
        {"d_ff": []},
        {"dense_act_fn": "x"},
        {"feed_forward_proj": 3},
        {"vocab_size": 3},
    ],
    "transformer/config.json": [
        {"num_layers": -1},
        {"num_attention_heads": -1},
        {"joint_attention_dim": 0},
        {"attention_head_dim": "x"},
        {"in_channels": 0},
        {"pooled_projection_dim": None},
    ],
    "vae/config.json": [
        {"act_fn": "x"},
        {"block_out_channels": []},
        {"down_block_types": ["x"]},
        {"in_channels": 0},
        {"latent_channels": 3},
        {"latent_channels": -1},
        {"scaling_factor": "x"},
        {"shift_factor": []},
        {"norm_num_groups": 0},
        {"layers_per_block": "x"},
    ],
    "tokenizer/tokenizer_config.json": [
        {"model_max_length": "x"},
        {"model_max_length": 0},
        {"model_max_length": -1},
        {"model_max_length": 10**30},
        {"pad_token": None},
        {"padding_side": "middle"},
    ],
    "model_index.json": [
        {"tokenizer": None},
        {"tokenizer": "x"},
        {"tokenizer_2": [None, None]},
        {"text_encoder": ["os"]},
        {"text_encoder": ["os", "system"]},
        {"tokenizer": ["os", "system"]},
        {"scheduler": None},
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
    for part in parts:
        for i, how in enumerate(HARM):
            if i % 2 == hash_of(part) % 2 and part != "model_index.json":
                continue
            if how == "object" and part.endswith("config.json"):
                continue  # defaults of the library; the weights tell, and those are loaded later
            other = folder / "models" / f"{part.replace('/', '-')}-{how.replace(' ', '-')}"
            shutil.copytree(whole, other, copy_function=linked)
            harm(other / part, how)
            out[f"model {part} {how}"] = Case([*words, f"model={other}"])
    for i, (key, value) in enumerate(
        [("_class_name", x) for x in (None, 3, "", "Nothing", [], {}, "FluxPipelin")]
    ):
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
    for name in (
        "nowhere",
        "a/b/c",
        "../..",
        "/dev/null",
        str(good),
        "--",
        "a b",
        "é/é",
        LONG,
        "./nowhere",
        ".",
    ):
        out[f"model {name[:20]}"] = Case([*words, f"model={name}"])
        out[f"model {name[:20]} and no folder named"] = Case([*words[:-2], f"model={name}"])
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
            out |= {
                f"run {name} {how} {reader}": Case(command_on(reader, other)) for reader in readers
            }
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
        readers = (
            ("plan",)
            if "processes" in name or "status" in name
            else ("compare", "evaluate", "profile")
        )
        out |= {f"run.json {name} {reader}": Case(command_on(reader, other)) for reader in readers}
    lines = (whole / "metrics.jsonl").read_text()
    for i, (old, new) in enumerate(
        [
            ('"iteration": 3', '"iteration": "3"'),
            ('"iteration": 3', '"iteration": -3'),
            ('"iteration": 3', '"it": 3'),
            ("\n", "\n\n"),
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
    """Places that are no run, or where nothing can be written, for every command that takes one."""
    make_odd_places(folder)
    out = {}
    run = synthetic_run(folder)
    nowhere = [
        "nowhere",
        "file",
        "hollow",
        "loop",
        "file/more",
        "/dev/null",
        "/proc",
        LONG,
        "",
        "a\nb",
        "\x1b[31m",
        "~",
        "*",
    ]
    for name in ("report", "compare", "evaluate", "plan", "profile", "resume", "tables"):
        out |= {
            f"{name} {place[:20]!r}": Case(command_on(name, place))
            for place in nowhere
            if (name, place) not in (("plan", ""), ("profile", ""))
        }
    taken = [
        "file",
        "loop",
        "kept",
        "/dev/null",
        "/dev/full",
        "/proc/new",
        "/sys/new",
        LONG,
        "file/more",
        "loop/more",
    ]
    out |= {
        f"train --out {place[:20]}": Case(["train", "pocket/tiny", "--out", place])
        for place in taken
    }
    for command, words, kind in (
        ("compare", [run], "html"),
        ("tables", [], "html"),
        ("speed", [], "json"),
        ("profile", ["pocket/tiny"], "html"),
    ):
        for place in (
            "hollow",
            "/proc/new/a." + kind,
            LONG,
            "file/a." + kind,
            "loop/a." + kind,
            f"loop.{kind}/",
        ):
            out[f"{command} --out {place[:20]}"] = Case([command, *words, "--out", place])
    for place in ("hollow", "file/a.json", "/proc/new/a.json", LONG, "loop/a.json"):
        out[f"profile --json {place[:20]}"] = Case(["profile", "pocket/tiny", "--json", place])
    return out


NUMBERS = ["x", "", "nan", "inf", "-1", "1.5", "0x10", "1e3", DIGITS, "-" + DIGITS, "١", "1 2"]
OPTIONS = {  # command -> option -> texts that it does not take
    "plan pocket/tiny": {
        "--processes": [*NUMBERS, "0", "3"],
        "--rate": ["x", "nan", "inf", "-1", "-inf", "1e999", ""],
        "--device": ["x", "H200x", " ", LONG, "\x1b"],
        "--share": ["0.5", "x"],
        "--run": ["nowhere"],
    },
    "plan pocket/tiny --device h200": {
        "--share": ["0", "-1", "1.1", "nan", "inf", "x"],
        "--rate": ["1"],
    },
    "train pocket/tiny": {
        "--processes": [*NUMBERS, "0", "3", "4"],
        "--nodes": ["0", "2", "x"],
        "--max-restarts": ["-1", "x"],
    },
    "profile pocket/tiny": {
        "--prompts": [*NUMBERS, "0", "10001"],
        "--images": [*NUMBERS, "0", "10001"],
        "--steps": ["1", "x", "10,x", "10001", ",", "1.5", "-3", DIGITS, "10;20", "٣"],
    },
    "speed": {
        "--prompts": [*NUMBERS, "0"],
        "--images": [*NUMBERS, "0", "1"],
        "--steps": [*NUMBERS, "0", "2"],
        "--resolution": [*NUMBERS, "8", "17"],
        "--repeats": [*NUMBERS, "0"],
        "--model": ["nowhere", LONG, ""],
        "--out": ["a.txt", ".", "nowhere/a.json", "a"],
    },
    "tables": {
        "--arm": ["x", "base", "Hybrid"],
        "--steps": [*NUMBERS, "0", "1"],
        "--name": ["x", "=", "a=", "=a"],
        "--prompts": [],
    },
    "evaluate --images a=hollow": {
        "--benchmark": ["nowhere", LONG, ".", "file"],
        "--samples": [*NUMBERS, "10001"],
    },
    "evaluate --benchmark geneval": {"--images": ["x", "a=", "=hollow", "a=nowhere", "a=file"]},
    "evaluate --benchmark geneval --images a=hollow": {"--detector": ["nowhere", "hollow", "file"]},
    "evaluate nowhere": {"--processes": [*NUMBERS, "1001"]},
    "serve-reward pocket-clip": {
        "--port": [*NUMBERS, "65536"],
        "--host": ["", "no such host", "256.1.1.1", "\n"],
        "--token": ["NOT_SET_HERE", "a b"],
        "--max-images": [*NUMBERS, "0"],
        "--max-pixels": [*NUMBERS, "0"],
        "--batch-wait-ms": ["nan", "inf", "-1", "x"],
    },
    "study explain": {
        "--processes": [*NUMBERS, "0", "10001"],
        "--seeds": ["x", "16", "-1", "1.5", DIGITS],
    },
}
PLAIN = [
    "fly",
    "plan",
    "profile",
    "evaluate",
    "compare",
    "report",
    "study",
    "reward-env",
    "serve-reward",
    "plan --fast",
    "train --resume",
    "train pocket/tiny --resume",
    "reward-env nowhere",
    "serve-reward nowhere",
    "serve-reward nowhere:f",
    "serve-reward os:nothing",
    "serve-reward a.b.c:d",
    "report nowhere more",
    "compare run nowhere",
    "plan pocket/tiny more",
    "evaluate run eta=1",
    "evaluate run more",
    "doctor more",
    "evaluate --images a=hollow",
    "--out",
    "--versio",
]


def option_cases(folder: Path) -> dict[str, Case]:
    """Every option with values that it does not take."""
    make_odd_places(folder)
    synthetic_run(folder)
    out = {}
    for command, options in OPTIONS.items():
        for option, texts in options.items():
            chosen = [
                text
                for i, text in enumerate(texts)
                if text not in NUMBERS or i % 3 == hash_of(option) % 3
            ]
            out |= {
                f"{command} {option} {text[:20]!r}": Case([*command.split(), option, text])
                for text in chosen
            }
    out |= {f"plain {words}": Case(words.split()) for words in PLAIN}
    for value in ("x", "-1", "nan", "inf", "", " ", "1e999", "10 GB", "١"):
        words = ["train", "pocket/tiny", "--out", "new"]
        out[f"CHUNK_GRPO_CACHE_GB={value!r}"] = Case(words, env={"CHUNK_GRPO_CACHE_GB": value})
    out.pop("CHUNK_GRPO_CACHE_GB=''")  # as if it were not set
    for value in ("/dev/null", "/proc/new", "file", "loop", "x" * 300, "file/more"):
        out[f"CHUNK_GRPO_CACHE={value[:20]}"] = Case(
            ["train", "pocket/tiny", "--out", "new"], env={"CHUNK_GRPO_CACHE": value}
        )
    return out


AXES = {  # setting -> texts that say no choice on its axis
    "window": [
        "x",
        "all:3",
        "frozen",
        "frozen:",
        "frozen:0",
        "frozen:99",
        "frozen:x",
        "random:-1",
        "random:1.5",
        "early:",
        "progressive:4",
        "progressive:4:0",
        "progressive:0:25",
        "progressive:4:x",
        "exponential:4",
        "FROZEN:4",
        "exponential:4:-1",
        "frozen:4:2",
        "frozen :4",
        "random:\u0664",
        LONG,
        f"frozen:{DIGITS}",
    ],
    "merge": [
        "x",
        "window",
        "entropy",
        "entropy:",
        "entropy:0",
        "entropy:-1",
        "entropy:x",
        "entropy:nan",
        LONG,
        "rest",
        "rest:",
        "rest:0",
        "rest:1",
        "rest:2",
        "rest:-0.5",
        "rest:x",
        "rest:nan",
        "rest:.",
        "rest:0.5:2",
    ],
    "completion_strides": [
        "2",
        "1,1",
        "1,2",
        "2,1",
        "1,0",
        "1,-2",
        "1,x",
        "",
        "1;2",
        "1,2.5",
        "1,99999",
        LONG,
    ],
    "solver": ["x", "heun", "dpm2", "EULER", "dpm", "", "2", "null", "[dpm2]", LONG],
    "surrogate": [
        "x",
        "clip:1",
        "asymmetric",
        "asymmetric:1",
        "asymmetric:0:0",
        "asymmetric:x:1",
        "asymmetric:nan:1",
        "dppo",
        "dppo:0",
        "dppo:-1",
        "dppo:nan",
        "dppo:inf",
        "hinge",
        "hinge:x",
        "hinge:-1",
        "epg:1",
        "CLIP",
        "nowhere.py:f",
        "f.py:",
        ":f",
        "os:nothing",
        LONG,
    ],
    "step_weights": [
        "x",
        "two",
        "1,2",
        "0,16",
        "noise,1",
        "interval:2",
        "-1",
        "16,",
        "\u0661\u0666",
        LONG,
        DIGITS,
    ],
    "sharing": [
        "x",
        "seeds",
        "seeds:0",
        "seeds:5",
        "seeds:x",
        "seeds:-1",
        "tree",
        "tree:2",
        "tree:2@",
        "tree:1@0",
        "tree:2@0,0",
        "tree:2@3,1",
        "tree:2@99,0",
        "tree:2@-1,0",
        "tree:3@0",
        "tree:2@0,1,2",
        "group:2",
        "own:1",
        "tree:2@0;1",
        f"seeds:{DIGITS}",
        LONG,
    ],
    "method": [
        "x",
        "Steps",
        "steps ",
        "grpo",
        ":M",
        "a b",
        "..:M",
        "nowhere.py:M",
        "m.py:",
        "os:nothing",
        "os:getcwd",
        "json:loads",
        "chunk_grpo.method.chunks:Chunks",
        "chunk_grpo:nothing",
        LONG,
    ],
    "chunks": [
        "0,16",
        "16,0",
        "-1,17",
        "equal",
        "equal:0",
        "equal:5",
        "equal:x",
        "adaptive:0",
        "adaptive:99",
        "whole:2",
        "steps,1",
        "profile:3",
        "nowhere.py:f",
        "os:nothing",
        "\u0661\u0666",
        LONG,
    ],
    "train_chunks": ["0", "5", "1,1", "2,1,9", "x", "-1", "1;2", "1,,2", "1.5", "\u0661", LONG],
}
PAIRS = [  # choices that do not go together
    "sharing=group shared_noise=true",
    "sharing=seeds:2 shared_noise=true",
    "credit_of=depth",
    "credit_of=leaves",
    "credit_of=depth sharing=group shared_noise=false",
    "credit_of=gain chunks=profile",
    "credit_of=gain chunks=adaptive:2",
    "credit_of=all-gains chunks=profile",
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
    "merge=rest:0.5",
    "merge=rest:0.5 window=frozen:4 chunks=profile",
    "solver=dpm2 window=frozen:15 chunks=steps",
    "merge=rest:0.5 window=frozen:2 sharing=tree:2@0,1 shared_noise=false",
    "merge=window window=frozen:4 chunk_weighting=profile chunks=whole",
    "anchor_every=2",
    "drop_flat_groups=true kl=0.1",
    "merge=window window=frozen:2 sharing=tree:2@0,1 shared_noise=false",
    "sampler=cps statistic=guard",
    "sampler=cps statistic=centred",
    "sampler=cps eta=1.6",
    "train_chunks=1 chunks=adaptive:2",
    "weighting_uniform=0.5",
    "weighting_anneal=3",
    "weighting_temperature=2",
    "sharding=fsdp lora_rank=4 quantization=int8",
    "sharding=fsdp sharding_offload=true",
    "sharding_group=2",
    "sharding=fsdp optimizer=adamw-8bit",
    "steps=9",
    "steps=18",
    "window=frozen:4",
    "window=frozen:4 chunks=2,3",
    "step_weights=2,3 chunks=whole",
    "images_per_prompt=1",
    "method=branch images_per_prompt=8",
    "method=tree images_per_prompt=9 steps=3",
    "method=tempflow-seeds images_per_prompt=6",
    "method=tempflow shared_noise=true",
    "method=mix steps=4",
    "method=fast window=early:99",
    "method=nft shared_noise=true",
    "method=awm shared_noise=true",
    "method=dgpo shared_noise=true",
    "method=crd shared_noise=true",
    "method=best-of-n shared_noise=true",
    "method=online-dpo shared_noise=true",
    "method=elbo-par shared_noise=true",
    "method=v-grpo shared_noise=true",
    "hybrid_split=6",
    "eval_steps=2 hybrid_split=3",
    "updates_per_iteration=3",
    "ema=1",
    "baseline_images=-1",
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
    "takes one": "def f(images):\n    return [1.0]\n",
    "is a class that cannot be called": "class f:\n    pass\n",
    "gives nothing": GIVES + "None",
    "gives too few": GIVES + "[0.0]",
    "gives text": GIVES + "['a'] * len(prompts)",
    "gives no number": GIVES + "[float('nan')] * len(prompts)",
    "gives no end": GIVES + "[float('inf')] * len(prompts)",
    "gives what is imaginary": GIVES + "[1j] * len(prompts)",
    "gives two each": GIVES + "[[1.0, 2.0]] * len(prompts)",
    "gives a mapping": GIVES + "{'a': 1}",
    "gives bytes": GIVES + "b'ab'",
    "generates": "def f(images, prompts):\n    yield 1.0\n",
    "needs an option": "def f(images, prompts, level):\n    return [level]\n",
}


def code_cases(folder: Path) -> dict[str, Case]:
    """Files of a user that cannot be imported, name nothing, or whose functions take or give something else."""
    train = ["train", "pocket/tiny", "--out", "new", "iterations=1", "steps=4", "chunks=3"]
    out = {}
    for i, (what, content) in enumerate({**CODE, **REWARDS}.items()):
        file = write(folder / "code" / f"mine{i}.py", content)
        if what in CODE:
            out |= {
                f"{field} that {what}": Case([*train, f"{field}={file}:f"])
                for field in ("method", "chunks", "surrogate")
            }
        out[f"reward that {what}"] = Case(
            [*train, f"reward={file}:f", "eval_rewards=[]"], late=True
        )
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
    commands = {"evaluate": ["evaluate"], "sample": ["sample"], "export": ["export"]}
    for noted in (True, False):
        for how, content in FINAL.items():
            run = folder / "finals" / f"{how.replace(' ', '-')}-{noted}"
            shutil.copytree(whole, run, copy_function=linked)
            (run / "final" / weights.name).unlink()
            harm_weights(run / "final" / weights.name, weights.read_bytes(), content)
            (run / "run.json").unlink()
            own = {"final_sha256": {weights.name: "0" * 64}} if noted else {}
            write(run / "run.json", json.dumps(note | {"status": "finished"} | own))
            more = {"sample": ["a red star", "--out", "drawn"], "export": ["made"]}
            what = f"final {how}, {'noted' if noted else 'not noted'}"
            out |= {
                f"{what}, {name}": Case([*words, run, *more.get(name, [])])
                for name, words in commands.items()
            }
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


def drawn_cases(folder: Path, count: int = 60) -> dict[str, Case]:
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
