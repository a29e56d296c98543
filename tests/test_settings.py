"""Settings: what is refused, with which sentence, and what the shipped files say."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as example
from hypothesis import strategies as st

from chunk_grpo import InputError
from chunk_grpo.core import settings, validation
from chunk_grpo.evaluation import paper_tables
from chunk_grpo.studies.design import load_study

ROOT = Path(__file__).resolve().parents[1]
FIELDS = settings.Settings.model_fields


def refused(values: dict, overrides=()) -> str:
    """The sentence for wrong settings."""
    with pytest.raises(InputError) as caught:
        settings.load_settings(values, overrides)
    text = str(caught.value)
    assert "\n" not in text and not text.endswith(".")
    return text


@pytest.mark.parametrize(
    "values, parts",
    [
        ({"learnin_rate": 1e-3}, ["`learnin_rate`", "did you mean `learning_rate`"]),
        ({"lr": 1e-3}, ["`lr`", "not a setting"]),
        ({"k" * 10**7: 1}, ["`kkk", "...` is not a setting"]),
        ({1: 2}, ["name of a setting", "got 1"]),
        ({"iterations": "12"}, ["`iterations`", "whole number", "'12'"]),
        ({"iterations": True}, ["`iterations`", "whole number", "true"]),
        ({"iterations": 12.0}, ["`iterations`", "whole number", "12.0"]),
        ({"iterations": 0}, ["`iterations`", "at least 1", "got 0"]),
        ({"learning_rate": "0.1"}, ["`learning_rate`", "number", "'0.1'"]),
        ({"learning_rate": True}, ["`learning_rate`", "number", "true"]),
        ({"learning_rate": float("nan")}, ["`learning_rate`", "number", "NaN"]),
        ({"learning_rate": float("inf")}, ["`learning_rate`", "number", "Infinity"]),
        ({"learning_rate": "1e999"}, ["`learning_rate`", "number"]),
        (
            {"iterations": 100_000_000_000},
            ["`iterations` must be", "at most 1000000; got 100000000000"],
        ),
        (
            {"steps": 100_000_000_000, "chunks": "steps"},
            ["`steps` must be", "at most 10000; got 100000000000"],
        ),
        (
            {"prompts_per_iteration": 10**400},
            ["`prompts_per_iteration` must be", "at most 1000000", "401 digits"],
        ),
        ({"eval_steps": 10**9, "hybrid_split": 1}, ["`eval_steps` must be", "at most 10000;"]),
        ({"seed": 2**63}, ["`seed` must be", "at most 9223372036854775807"]),
        ({"reward": {"hpsv3": float("nan")}}, ["`reward`", "mapping"]),
        ({"chunk_fraction": 1.5}, ["`chunk_fraction`", "above 0", "at most 1", "1.5"]),
        ({"chunk_fraction": 0}, ["`chunk_fraction`", "above 0", "got 0"]),
        ({"shared_noise": "yes"}, ["`shared_noise`", "true or false", "'yes'"]),
        ({"shared_noise": 1}, ["`shared_noise`", "true or false", "got 1"]),
        ({"sampler": "ode"}, ["`sampler`", "flow, dance, cps", "'ode'", "density"]),
        ({"sampler": "euler"}, ["`sampler`", "flow, dance, cps", "'euler'"]),
        ({"dtype": "fp16"}, ["`dtype`", "float32, bfloat16, float16", "'fp16'"]),
        ({"prompts": None}, ["`prompts`", "text", "nothing"]),
        ({"model": ""}, ["`model`", "text"]),
        ({"chunks": "2,3,4"}, ["`chunks`", "16"]),
        ({"chunks": "2,3,four,7"}, ["`chunks`", "four"]),
        ({"chunks": "equal:5"}, ["`chunks`", "divide the 16", "got 5"]),
        ({"chunks": [2, 3, 4, 8]}, ["`chunks`", "2,3,4,8"]),
        ({"chunks": 2.5}, ["`chunks`", "text", "2.5"]),
        ({"steps": 18}, ["`chunks`", "17"]),
        ({"chunks": "adaptive:0"}, ["`chunks`", "adaptive:SIZE", "'adaptive:0'"]),
        ({"chunks": "adaptive:17"}, ["`chunks`", "17", "16"]),
        ({"chunks": "adaptive", "train_chunks": "1"}, ["`train_chunks`", "all", "'1'"]),
        ({"train_chunks": "5"}, ["`train_chunks`", "from 1 to 4", "'5'"]),
        ({"train_chunks": "1,1"}, ["`train_chunks`", "different", "'1,1'"]),
        ({"weighting_uniform": 0.5}, ["`weighting_uniform`", "0", "`chunk_weighting`", "0.5"]),
        (
            {"chunk_weighting": "dynamics", "weighting_uniform": 1.5},
            ["`weighting_uniform`", "at most 1", "1.5"],
        ),
        (
            {"chunk_weighting": "dynamics", "weighting_temperature": 0},
            ["`weighting_temperature`", "above 0"],
        ),
        ({"step_weights": "loud"}, ["`step_weights`", "noise", "'loud'"]),
        ({"step_weights": "2,3,4"}, ["`step_weights`", "16", "9"]),
        ({"images_per_prompt": 1}, ["`images_per_prompt`", "at least 2"]),
        (
            {"images_per_prompt": 11},
            ["`images_per_prompt`", "multiple", "`updates_per_iteration`", "11"],
        ),
        ({"baseline_images": 13}, ["`baseline_images`", "`images_per_prompt`", "12", "got 13"]),
        ({"baseline_images": -1}, ["`baseline_images`", "at least 0", "-1"]),
        ({"baseline_images": 1.5}, ["`baseline_images`", "whole number", "1.5"]),
        ({"hybrid_split": 51}, ["`hybrid_split`", "`eval_steps`", "50", "51"]),
        ({"sampler": "cps", "eta": 1.2}, ["`eta`", "at most 1", "1.2"]),
        ({"resolution": 100}, ["`resolution`", "multiple of 16", "100"]),
        ({"reward": {"hpsv3": -1.0}}, ["`reward`", "above 0", "'hpsv3'", "-1"]),
        ({"reward": {"hpsv3": "much"}}, ["`reward`", "mapping"]),
        ({"reward": {}}, ["`reward`", "at least one"]),
        ({"reward": 3}, ["`reward`", "got 3"]),
        (
            {"reward": "pocket-clp"},
            ["`reward`", "package.module:function", "'pocket-clp', did you mean pocket-clip?"],
        ),
        ({"reward": {"hpsv3": 1, "zzz": 1}}, ["`reward`", "pocket-clip, ", "'zzz'"]),
        ({"eval_rewards": ["hpsv4"]}, ["`eval_rewards`", "'hpsv4', did you mean hpsv3?"]),
        (
            {"reward": "mine", "reward_options": {"mine": {"worker": True}}},
            ["`reward`", "`url`", "'mine'"],
        ),
        ({"eval_rewards": "hpsv3"}, ["`eval_rewards`", "list", "'hpsv3'"]),
        ({"eval_rewards": ["a", "a"]}, ["`eval_rewards`", "once", '["a", "a"]']),
        ({"lora_targets": ["to_q", 3]}, ["`lora_targets`", "list"]),
        ({"ema": 1.0}, ["`ema`", "below 1", "1"]),
        ({"shift": 1e12}, ["`shift`", "above 0 and at most 100", "1000000000000"]),
        ({"lr": 1e-5}, ["`lr` is not a setting", "did you mean `learning_rate`"]),
        ({"clip_range": 1e300}, ["`clip_range`", "at most 1e+30", "1e+300"]),
        ({"advantage_clamp": 1e39}, ["`advantage_clamp`", "at most 1e+30"]),
        (
            {"sharding": "fsdp", "optimizer": "adamw-8bit"},
            ["`optimizer`", "be adamw if `sharding` is fsdp and all weights are trained"],
        ),
        (
            {"sharding": "fsdp", "lora_rank": 4, "quantization": "int8"},
            ["`quantization`", "be none if `sharding` is fsdp", "got int8"],
        ),
        ({"sharding": "fsdp", "sharding_offload": True}, ["`sharding_offload`", "an adapter"]),
        ({"lora_rank": 4, "sharding_offload": True}, ["`sharding_offload`", "`sharding` is fsdp"]),
        ({"sharding_group": 2}, ["`sharding_group`", "`sharding` is fsdp (here none)", "got 2"]),
        ({"sharding": "fsdp", "sharding_group": 1}, ["`sharding_group`", "above 1", "got 1"]),
    ],
)
def test_one_sentence_names_field_and_value(values, parts):
    sentence = refused(values)
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    "overrides, parts",
    [
        (["eta"], ["name=value", "'eta'"]),
        (["=3"], ["name=value"]),
        (["eta=[1"], ["`eta`", "YAML"]),
        (["iterations="], ["`iterations`", "nothing"]),
        (["iterations=010"], ["`iterations`", "whole number", "'010'"]),  # 8 in YAML 1.1
        (["iterations=1:30"], ["`iterations`", "whole number", "'1:30'"]),  # 90 in YAML 1.1
        ({"iterations": "3"}, ["`iterations`", "'3'"]),
    ],
)
def test_overrides_are_checked(overrides, parts):
    sentence = refused({}, overrides)
    assert all(part in sentence for part in parts), sentence


def test_a_server_and_modules_may_have_rewards_of_any_name():
    given = {
        "reward": "mine",
        "reward_options": {"mine": {"url": "http://host:8000"}},
        "eval_rewards": ["a.b:c"],
    }
    assert settings.load_settings(given).eval_rewards == ("a.b:c",)


def test_a_preset_without_a_class_needs_load_settings():
    for name, preset in settings.METHODS.items():
        if name == "chunk" or "class" in preset:
            continue
        with pytest.raises(InputError, match="`method` must be chunk in `Settings`; load_settings"):
            settings.Settings(method=name)
    loaded = settings.load_settings({"method": "dance"})
    assert loaded.method == "chunk" and loaded.sampler == "dance"
    assert settings.load_settings(loaded.model_dump(mode="json")) == loaded


def test_repeating_the_method_of_a_file_keeps_the_settings_of_the_file(tmp_path):
    """Its preset fills only what the file leaves out; another method replaces the preset's settings."""
    file = tmp_path / "mine.yaml"
    file.write_text("like: pocket/tiny\nmethod: mix\nwindow: progressive:4:10\n")
    own = settings.load_settings(file)
    assert own.window == "progressive:4:10" and own.credit == "sum"
    for overrides in (["method=mix"], {"method": "mix"}):
        assert settings.load_settings(file, overrides) == own
    assert settings.load_settings(file, ["method=mix", "window=random:4"]).window == "random:4"
    assert settings.load_settings(file, ["method=mix-random"]).window == "random:4"


def test_a_chunker_may_be_in_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my code"
    folder.mkdir()
    (folder / "cut.py").write_text("def cut(profile):\n    return [len(profile)]\n")
    path = f"{folder / 'cut.py'}:cut"
    assert settings.load_settings({"chunks": path}).chunks == path
    assert settings.load_settings({"chunks": "2, 3, 4, 7"}).chunks == "2,3,4,7"


def test_train_chunks_may_name_any_chunk_that_a_chunker_can_return():
    for numbers in ("5,6", "16"):
        loaded = settings.load_settings({"chunks": "mine:cut", "train_chunks": numbers})
        assert loaded.train_chunk_numbers == tuple(int(n) - 1 for n in numbers.split(","))
    assert "`train_chunks`" in refused({"chunks": "mine:cut", "train_chunks": "18"})


def test_exponents_are_numbers_in_every_way_they_are_written():
    for text in ("1e-3", "1E-3", "1.e-3", "1.0e-3", "0.001", "10e-4", "+1e-3"):
        assert (
            settings.load_settings(
                validation.parse_yaml(f"learning_rate: {text}", "it")
            ).learning_rate
            == 1e-3
        )
        assert settings.load_settings({}, [f"learning_rate={text}"]).learning_rate == 1e-3
    assert settings.load_settings({}, ["reward={hpsv3: 1e-1}"]).reward == {"hpsv3": 0.1}
    assert validation.parse_yaml("[1, 12e, e5, 0x1e3, 1.5e3]", "it") == [
        1,
        "12e",
        "e5",
        0x1E3,
        1500.0,
    ]


def test_files_are_read_or_refused_in_words(tmp_path):
    file = tmp_path / "mine.yaml"
    for text, part in (
        ("steps: 9\nsteps: 17\n", "again in line 2"),
        ("steps: [", "YAML"),
        ("- a\n- b\n", "name: value"),
        ("", "name: value"),
        ("steps: 9\n  shift: 2\n", "YAML"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=part):
            settings.load_settings(file)
    file.write_bytes(b"\xff\xfe\x00steps")
    with pytest.raises(InputError, match="readable"):
        settings.load_settings(file)
    with pytest.raises(InputError, match="did you mean pocket/demo"):
        settings.load_settings("pocket/dem")
    with pytest.raises(InputError, match="neither"):
        settings.load_settings(tmp_path)
    file.write_text("steps: 9\nchunks: equal:2\n")
    assert settings.load_settings(str(file), {"steps": 5}).steps == 5


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
ODD = {
    "aliases": (BOMB, "line 2 has an alias"),
    "alias of itself": ("&a [*a]", "an alias"),
    "object": ("a: !!python/object:os.system {}", "line 1 has a tag"),
    "binary": ("a: !!binary aGk=", "a tag"),
    "int": ("a: !!int x", "a tag"),
    "set": ("!!set {a, b}", "a tag"),
    "brackets": ("[" * 500, "20 levels"),
    "braces": ("{a: " * 300, "20 levels"),
    "lines": ("".join(" " * i + "a:\n" for i in range(40)), "20 levels"),
    "digits": ("a: " + "1" * 10_000, "it has an error"),
    "hexadecimal": ("a: 0x_", "it has an error"),
    "many keys": ("".join(f"key{i}: 1\n" for i in range(800_000)), "at most 200000 characters"),
    "long key": (f"{'k' * 10**7}: 1", "at most 200000 characters"),
    "key": ("? [a]\n: 1", "it has an error in line 1"),
    "control": ("a: \x01", "it has an error"),
}


@pytest.mark.parametrize("text", ["010", "-010", "0o10", "0b11", "1:30", "1:30.5", "08"])
def test_numbers_that_mean_something_else_in_old_yaml_are_refused(text):
    for field in ("iterations", "eta"):
        with pytest.raises(
            InputError, match=f"`{field}` must be a .*number .*; got the text '{text}'"
        ):
            settings.load_settings({}, [f"{field}={text}"])


@pytest.mark.parametrize("case", ODD)
def test_yaml_that_is_no_settings_is_one_sentence_everywhere(tmp_path, case):
    """In a settings file, in study.yaml and in an override; the file is named."""
    text, part = ODD[case]
    (tmp_path / "base.yaml").write_text("steps: 9\n")
    readers = {
        tmp_path / "mine.yaml": settings.load_settings,
        tmp_path / "study.yaml": lambda file: load_study(file.parent),
    }
    for file, read in readers.items():
        file.write_text(text)
        with pytest.raises(InputError, match=part) as error:
            read(file)
        assert (
            str(file) in str(error.value)
            and "\n" not in str(error.value)
            and len(str(error.value)) < 300
        )
    with pytest.raises(InputError, match="the value of `model` must (be|have)") as error:
        settings.load_settings({}, [f"model={text}"])
    assert part.partition(" in line")[0] in str(error.value)


def test_a_date_is_text_and_shared_lists_are_written_out(tmp_path):
    assert settings.load_settings({}, ["model=2024-01-01"]).model == "2024-01-01"
    with pytest.raises(InputError, match="`2024-01-01` is not a setting"):
        settings.load_settings(validation.parse_yaml("2024-01-01: 1", "it"))
    shared = ["to_q"]
    written = validation.dump_yaml({"a": shared, "b": shared})
    assert validation.parse_yaml(written, "it") == {"a": ["to_q"], "b": ["to_q"]}


@pytest.mark.parametrize(
    "text",
    ["1e5", "1E5", "-2e-3", "1.e3", ".5e3", "010", "1:30", "12", "0x1F", "yes", "null", "-", ""],
)
def test_a_text_that_looks_like_a_number_stays_a_text(text):
    content = {"model": text, text: [text, 1e-5, 100000]}
    written = validation.dump_yaml(content)
    assert validation.parse_yaml(written, "it") == content
    assert yaml.safe_load(written) == content


def test_settings_are_frozen_and_come_back_from_yaml_and_json():
    run_settings = settings.load_settings("pocket/demo", ["seed=3", "reward={pocket-clip: 2}"])
    with pytest.raises(ValueError, match="frozen"):
        run_settings.seed = 4
    assert (
        settings.load_settings(yaml.safe_load(settings.dump_settings(run_settings))) == run_settings
    )
    assert (
        settings.load_settings(json.loads(json.dumps(run_settings.model_dump(mode="json"))))
        == run_settings
    )
    assert [row["name"] for row in settings.settings_table(run_settings)] == list(FIELDS)


@example(deadline=None)
@given(
    st.builds(
        dict,
        learning_rate=st.floats(1e-9, 1),
        eta=st.floats(0.01, 1),
        seed=st.integers(0, 2**40),
        prompts=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
    )
)
def test_every_value_survives_a_round_trip(values):
    run_settings = settings.load_settings(values)
    assert (
        settings.load_settings(yaml.safe_load(settings.dump_settings(run_settings))) == run_settings
    )


def test_every_field_has_unit_source_and_meaning():
    for name, field in FIELDS.items():
        assert set(field.json_schema_extra) - {"takes"} == {"unit", "source"}, name
        assert field.json_schema_extra["source"], name
        assert field.description and validation.describe_field(settings.Settings, name), name


def test_resume_refuses_another_run():
    old = settings.Settings()
    settings.check_resume(
        old, settings.load_settings({"iterations": 151, "eval_every": 1, "checkpoint_every": 3})
    )
    for changed, part in (
        ({"iterations": 149}, "raised"),
        ({"learning_rate": 2e-5}, "`learning_rate`"),
        ({"iterations": 149, "eta": 0.3}, "`eta`"),
        ({"threads": 1}, "`threads`"),
    ):
        with pytest.raises(InputError, match=part):
            settings.check_resume(old, settings.load_settings(changed))
    smaller = settings.load_settings({"update_batch": 1})
    settings.check_resume(old, smaller)
    with pytest.raises(
        InputError, match="`update_batch`"
    ):  # as for an arm of a study that continues another
        settings.check_resume(old, smaller, rounding=False)


def test_processes_share_the_prompts():
    for processes in (1, 2, 16):
        settings.check_process_count(settings.Settings(), processes)
    for processes in (0, -1, 3, 32):
        with pytest.raises(InputError, match="divide `prompts_per_iteration`"):
            settings.check_process_count(settings.Settings(), processes)
    groups = settings.load_settings({"sharding": "fsdp", "sharding_group": 4})
    settings.check_process_count(groups, 8)
    with pytest.raises(InputError, match=r"`sharding_group` must .* processes \(2\); got 4"):
        settings.check_process_count(groups, 2)


PAPER = {
    "learning_rate": 1e-5,
    "weight_decay": 1e-4,
    "max_grad_norm": 0.01,
    "clip_range": 5e-5,
    "advantage_clamp": 5.0,
    "resolution": 720,
    "steps": 17,
    "eta": 0.7,
    "shift": 3.0,
    "chunk_fraction": 0.5,
    "iterations": 150,
    "prompts_per_iteration": 2 * 8,
    "images_per_prompt": 12,
    "updates_per_iteration": 2,
    "chunks": "2,3,4,7",
    "kl": 0.0,
    "ema": 0.0,
    "guidance": 3.5,
    "shared_noise": True,
    "eval_resolution": 1024,
    "eval_steps": 50,
    "hybrid_split": 30,
    "model": "black-forest-labs/FLUX.1-dev",
    "reward": "hpsv3",
    "lora_rank": 0,
}


def test_defaults_are_the_papers():
    assert {name: getattr(settings.Settings(), name) for name in PAPER} == PAPER


@pytest.mark.parametrize(
    "name, differs",
    [("chunk", {}), ("chunk-ws", {"chunk_weighting": "dynamics"}), ("dance", {"chunks": "steps"})],
)
def test_paper_files_write_the_papers_values_out(name, differs):
    written = settings.read_settings_file(f"paper/{name}")
    assert not set(PAPER) - set(written)
    run_settings = settings.load_settings(written)
    assert {
        n: b for n, (_, b) in settings.diff_settings(settings.Settings(), run_settings).items()
    } == differs


REWARDS = {"Table 1": "hpsv3", "Table 3": "hpsv3", "Table 4": "pickscore", "Table 5": "clip"}


def test_every_row_of_the_papers_tables_has_its_file():
    """Of Tables 1, 3, 4 and 5, but for methods of others: one file each, and no other setting changed than the row says."""
    found = {}
    for name in settings.list_presets():
        if name.startswith("paper/table"):
            run_settings = settings.load_settings(name)
            table = f"Table {name[len('paper/table')]}"
            sizes = run_settings.chunk_rule.chunks.sizes
            cut = (
                "step"
                if set(sizes) == {1}
                else str(sizes[0])
                if len(sizes) == 1
                else (
                    f"{sizes[0]}x{len(sizes)}"
                    if len(set(sizes)) == 1
                    else ",".join(map(str, sizes))
                )
            )
            method = "Dance-GRPO" if cut == "step" else "Chunk-GRPO"
            row = method + " +ws" * (run_settings.chunk_weighting == "dynamics")
            if table == "Table 3":
                row += "" if cut == "step" else " w/ td" if cut == "2,3,4,7" else " w/o td"
                row = (row, run_settings.steps, cut)
            found.setdefault(table, []).append(row)
            assert set(settings.diff_settings(settings.Settings(), run_settings)) <= {
                "chunks",
                "chunk_weighting",
                "reward",
                "steps",
            }
            assert run_settings.reward == REWARDS[table]
    for key, table in paper_tables.PAPER_TABLES.items():
        if table in REWARDS:
            rows = paper_tables.paper_table_rows(key)
            rows = [r for r in rows if "(v3)" not in r["row"] and r["row"] != "FLUX.1-dev"]
            wanted = [
                (r["row"], r["steps"], r["chunks"]) if table == "Table 3" else r["row"]
                for r in rows
            ]
            assert sorted(found[table]) == sorted(wanted)


def test_pocket_files_differ_only_where_they_say():
    demo = settings.load_settings("pocket/demo")
    steps = settings.load_settings("pocket/steps")
    weighted = settings.load_settings("pocket/chunk-ws")
    assert settings.diff_settings(demo, steps) == {
        "chunks": ("2,3,4,3", "steps"),
        "train_chunks": ("1,2,3", "1,2,3,4,5,6,7,8,9"),
    }
    assert settings.diff_settings(demo, weighted) == {"chunk_weighting": ("uniform", "dynamics")}
    defaults = settings.Settings()
    for name in ("demo", "tiny"):
        same = [
            n
            for n, v in settings.load_settings(f"pocket/{name}").model_dump().items()
            if n in settings.read_settings_file(f"pocket/{name}") and v == getattr(defaults, n)
        ]
        assert not same, f"pocket/{name} writes defaults out: {same}"


def test_all_presets_load():
    names = settings.list_presets()
    expected = {
        "pocket/demo",
        "pocket/tiny",
        "pocket/steps",
        "pocket/chunk-ws",
        "paper/chunk",
        "paper/chunk-ws",
    }
    assert expected | {"paper/dance"} <= set(names)
    for name in names:
        assert settings.load_settings(name) == settings.load_settings(
            ROOT / "runs" / f"{name}.yaml"
        )


def test_the_settings_of_a_run_keep_their_emoji(tmp_path):
    """JSON writes them as two escapes, which YAML would read as two halves."""
    written = settings.load_settings("pocket/tiny", {"prompts": "a \U0001f600.txt"})
    content = {"settings": written.model_dump(mode="json")}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert settings.load_settings(tmp_path / "run.json").prompts == "a \U0001f600.txt"


@pytest.mark.parametrize("options", [None, {}])
def test_empty_options_of_a_reward_count_as_none(options):
    written = {"name": "clip", "dtype": "bfloat16"}
    read = settings.load_settings({"reward": written, "reward_options": {"clip": options}})
    assert read.reward_options == {"clip": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    "name", [name for name, row in settings.METHODS.items() if "class" not in row]
)
def test_the_label_of_a_method_that_combines_settings_is_its_name(name):
    values = {"steps": 17} if name in ("reweighted", "tree-chunk") else {}
    assert (
        settings.method_label(settings.load_settings("pocket/tiny", values | {"method": name}))
        == name
    )


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({}, "chunk"),
        ({"chunks": "steps"}, "steps"),
        ({"chunk_weighting": "dynamics"}, "chunk+ws"),
        ({"method": "guard", "eta": 0.5}, "guard"),
        ({"method": "steps", "surrogate": "dppo:1e-5"}, "steps, surrogate dppo:1e-5"),
        (
            {"method": "steps", "surrogate": "dppo:1e-5", "step_weights": "flash"},
            "steps, surrogate dppo:1e-5, step_weights flash",
        ),
        ({"method": "nft"}, "nft"),
    ],
)
def test_a_run_with_another_loss_is_not_labelled_as_the_paper_s_method(values, label):
    assert settings.method_label(settings.load_settings("pocket/tiny", values)) == label
