"""Wrong calls of every function of the front door end in InputError with one sentence, before anything is done."""

import inspect
import pickle
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

import chunk_grpo
from chunk_grpo import InputError

NAN = float("nan")
INF = float("inf")
TEXTS = (None, 5, 1.5, b"text", [], {}, object(), "")
COUNTS = (None, "2", 1.0, True, NAN, [1], -1)
NUMBERS = (None, "0.5", True, NAN, INF, [0.5], torch.zeros(2))
FLAGS = (None, "no", 0, 1, [])
PATHS = (None, 5, b"run", [], {}, object(), "")
LISTS_OF_TEXTS = (None, "a ring", 5, [1], ["a", None], {"a", "b"}, b"a", [["a"]])
CALLS = (5, "print", [], object())
TENSORS = (None, 5, "x", [1.0, 2.0], np.ones(3))
CHANGES = (None, "seed=1", 5, [1], [None], object(), {1: 2})

levels = torch.linspace(1, 0, 5)
ones = torch.ones(2, 4)
chunks = chunk_grpo.Chunks((2, 2))


class Nobody:
    """No policy."""


def write_nothing(line, settings=None):
    raise AssertionError("it began")


RUN = "/no/such/run"
GOOD = {  # arguments that are right by themselves
    "Chunks": {"sizes": (2, 2)},
    "Chunks.parse": {"text": "2,2"},
    "Chunks.steps": {"transitions": 4},
    "Chunks.whole": {"transitions": 4},
    "Chunks.equal": {"transitions": 4, "size": 2},
    "Sampler": {"sigmas": levels},
    "sigmas": {"steps": 4},
    "relative_distance": {"latents": torch.rand(2, 5, 3)},
    "chunks_from_profile": {"profile": torch.rand(4) + 1},
    "chunk_probabilities": {"distance": ones, "chunks": chunks},
    "chunk_ratio": {"new_logp": ones, "old_logp": ones, "chunks": chunks},
    "clipped_objective": {"ratio": ones, "advantage": torch.ones(2), "clip_range": 0.1},
    "group_advantages": {"rewards": ones},
    "Settings": {},
    "load_settings": {"source": "pocket/tiny"},
    "load_policy": {"model": "pocket", "resolution": 64},
    "write_prompts": {"prompts": ["a ring"], "path": "/proc/no/prompts.jsonl"},
    "load_placed_reward": {"name": "pocket-clip"},
    "sample_images": {
        "policy": Nobody(),
        "prompts": ["a ring"],
        "image_indices": [(0, 0)],
        "seed": 0,
    },
    "train": {"settings": "pocket/tiny", "out": "/proc/no/run"},
    "evaluate": {"run": RUN},
    "read_metrics": {"run": RUN},
    "compare_runs": {"runs": [RUN]},
    "write_run_report": {"run": RUN},
    "sample_run": {"run": RUN, "prompts": ["a ring"]},
    "sample_widget": {"run": RUN},
    "export_run": {"run": RUN, "folder": "/proc/no/folder"},
}
WRONG = {
    "Chunks": {
        "sizes": (None, 4, "22", "2,2", [], [0], [-1], [1.0], [True], ["2"], [NAN], [[2]], {2, 1})
    },
    "Chunks.parse": {"text": (None, 5, 2.2, b"2", ["2"], "", "a", "0,2", "2;2", "-1")},
    "Chunks.steps": {"transitions": (*COUNTS, 0)},
    "Chunks.whole": {"transitions": (*COUNTS, 0)},
    "Chunks.equal": {"transitions": (*COUNTS, 0), "size": (*COUNTS, 0, 3)},
    "Sampler": {
        "sigmas": (
            *TENSORS,
            torch.tensor([1.0, NAN, 0.0]),
            torch.full((3,), NAN),
            torch.tensor([1.0]),
            ones,
            torch.tensor([0.0, 1.0]),
            torch.tensor([2, 1, 0]),
            torch.tensor([INF, 1.0, 0.0]),
            torch.tensor([2.0, 1.0, 0.0]),
            torch.tensor([1.0, 0.0, -1.0]),
        ),
        "kind": (None, 5, "flows", "", ["flow"], b"flow"),
        "eta": (
            None,
            "0.5",
            NAN,
            INF,
            -1,
            -0.1,
            [0.1],
            [NAN] * 4,
            ["a"] * 4,
            {},
            torch.ones(2),
            torch.ones(4),
        ),
        "solver": (None, 5, "heun", "", "dpm2"),
    },
    "sigmas": {
        "steps": (*COUNTS, 0),
        "shift": (None, "3", NAN, INF, 0, -1.0, [3.0]),
        "dtype": (None, "float32", float, 32),
    },
    "relative_distance": {
        "latents": (*TENSORS, torch.ones(2), torch.zeros(1, 3, 2), torch.full((1, 3, 2), NAN)),
        "kind": (None, 1, "l3", "", ["l1"]),
    },
    "chunks_from_profile": {
        "profile": (None, "123", 5, [], [0.0], [-1.0], [NAN], [INF], ["a"], {}, torch.ones(2, 2)),
        "chunk_count": ("2", 1.0, True, NAN, [1], -1, 0),
    },
    "chunk_probabilities": {
        "distance": (*TENSORS, torch.ones(4), torch.ones(2, 3), -ones, ones * NAN),
        "chunks": (None, 5, "2,2", (2, 2), [2, 2], Nobody()),
    },
    "chunk_ratio": {
        "new_logp": (*TENSORS, torch.ones(2), torch.ones(2, 3)),
        "old_logp": (*TENSORS, torch.ones(2), torch.ones(2, 3)),
        "chunks": (None, 5, "2,2", (2, 2), [2, 2], chunk_grpo.Chunks((1, 1))),
    },
    "clipped_objective": {
        "ratio": (*TENSORS, torch.ones(2)),
        "advantage": (*TENSORS, ones, torch.ones(3)),
        "clip_range": (*NUMBERS, -0.1, 0.0),
    },
    "group_advantages": {
        "rewards": (*TENSORS, torch.ones(2), torch.ones(2, 1), ones * NAN),
        "clamp": (*NUMBERS, -1.0, 0.0),
    },
    "Settings": {
        "steps": COUNTS,
        "learning_rate": (None, "a", NAN, True, [1]),
        "sampler": (5, "flows"),
        "no_setting": (1,),
    },
    "load_settings": {
        "source": (
            None,
            5,
            1.5,
            [],
            ["pocket/tiny"],
            b"pocket/tiny",
            "",
            "no/preset",
            object(),
            {1: 2},
            {"stepz": 1},
            ("pocket/tiny",),
        ),
        "overrides": (*CHANGES, ["seed"], ["seed=x"], {"seed": "x"}, {"sed": 1}),
    },
    "load_policy": {
        "model": (*TEXTS, "no-model-of-this-name"),
        "resolution": (*COUNTS, 0, 63, (64,), (64, 0), (64, 63), (64, 64.0), (64, 64, 64)),
        "dtype": (None, 32, "fp16", "half", "", torch.float32, ["float32"]),
        "weights_dtype": (32, "fp16", "", []),
        "max_tokens": (*COUNTS, 0, 100_000),
        "guidance": (*NUMBERS, -1.0),
        "true_cfg_scale": (*NUMBERS, 0.5),
        "device": (None, 0, "gpu", "", "cuda:x", "meta0", []),
        "keep_on_cpu": FLAGS,
        "vae_tiling": FLAGS,
    },
    "write_prompts": {
        "prompts": (
            None,
            5,
            "a ring",
            b"a ring",
            [],
            [5],
            [None],
            [""],
            {"prompt": "a"},
            [{"a": 1}],
        ),
        "path": (*TEXTS, "prompts.txt"),
    },
    "load_placed_reward": {
        "name": (*TEXTS, "no-reward", "module:"),
        "allow_working_folder": FLAGS,
        "url": (5, [], True, "nowhere"),
        "environment": (5, [], True, "none-such"),
        "worker": (5, "yes", []),
        "option": (1,),
    },
    "sample_images": {
        "policy": (None, 5, "pocket", Nobody()),
        "prompts": (*LISTS_OF_TEXTS, {0: 1}, {"a": "b"}),
        "image_indices": (
            None,
            5,
            "00",
            [],
            [0],
            [(0,)],
            [(0, 0, 0)],
            [(0, -1)],
            [(1, 0)],
            [("a", "b")],
            [(0.0, 0.0)],
        ),
        "seed": COUNTS,
        "steps": (*COUNTS, 0),
        "split": ("2", 1.0, True, NAN, [1], -1, 51),
        "batch": (*COUNTS, 0),
        "sampler": (5, "flow", Nobody()),
        "storage_dtype": (None, "float32", 32),
    },
    "train": {
        "settings": (None, 5, [], ["pocket/tiny"], b"x", object(), "", "no/preset", {"stepz": 1}),
        "out": (5, b"run", [], {}, object(), ""),
        "resume": FLAGS,
        "processes": (*COUNTS, 0),
        "nodes": (*COUNTS, 0),
        "node_rank": COUNTS,
        "rendezvous": (None, 5, []),
        "max_restarts": COUNTS,
        "callbacks": (None, 5, "print", [5], ["print"], print, {}),
        "on_created": CALLS,
    },
    "evaluate": {
        "run": (*PATHS, RUN),
        "say": CALLS + (None,),
        "changes": CHANGES,
        "arms": (5, "base", ["base"], [], {"base": "0"}, {"base": 0.5}, {1: 0}),
        "processes": COUNTS,
        "checkpoint": (0, -1, 0.5, "2", True, [2], NAN),
    },
    "read_metrics": {"run": PATHS},
    "compare_runs": {"runs": (None, 5, "runs/one", b"x", [], [5], [None], [""], {}, [RUN])},
    "write_run_report": {
        "run": (*PATHS, RUN),
        "name": (None, 5, [], "trian", ""),
        "checkpoint": (0, "2", True),
    },
    "sample_run": {
        "run": (*PATHS, RUN),
        "prompts": (*LISTS_OF_TEXTS, [], [""]),
        "arms": LISTS_OF_TEXTS,
        "seeds": (None, 5, "01", ["0"], [0.5], [-1], [True], [NAN]),
        "out": (5, b"x", [], object(), ""),
        "changes": CHANGES,
        "say": CALLS + (None,),
    },
    "sample_widget": {
        "run": (*PATHS, RUN),
        "prompt": (None, 5, [], ["a"]),
        "arms": LISTS_OF_TEXTS,
        "changes": CHANGES,
    },
    "export_run": {"run": (*PATHS, RUN), "folder": PATHS, "trust": FLAGS},
}
CASES = [
    (name, key, value)
    for name, known in WRONG.items()
    for key, values in known.items()
    for value in values
]


def function(name: str):
    """A function of the front door, or a class method."""
    found = chunk_grpo
    for part in name.split("."):
        found = getattr(found, part)
    return found


def refusal(called, *args, **kwargs) -> str:
    """The sentence of a call that must be refused."""
    with pytest.raises(InputError) as error:
        called(*args, **kwargs)
    assert str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_every_function_has_its_wrong_calls():
    callables = {name for name in chunk_grpo.__all__ if callable(getattr(chunk_grpo, name))} - {
        "InputError"
    }
    assert callables <= {name.partition(".")[0] for name in WRONG} and WRONG.keys() == GOOD.keys()


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{name}-{key}-{i}" for i, (name, key, _) in enumerate(CASES)]
)
def test_wrong_argument_is_rejected_in_one_sentence(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, key, value = CASES[number]
    refusal(function(name), **GOOD[name] | {key: value})
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.parametrize("name", GOOD)
def test_missing_or_unknown_argument_is_rejected(name):
    called = function(name)
    good = GOOD[name]
    if name == "Settings":
        return
    if name != "load_settings":
        assert f"{name} takes" in refusal(called)
    if name in ("load_policy", "load_placed_reward"):  # they hand further arguments on
        return
    assert "`no_such`" in refusal(called, **good, no_such=1)
    first = next(iter(good))
    near = f"{first}x"
    assert f"did you mean `{first}`" in refusal(
        called, **{near if k == first else k: v for k, v in good.items()}
    )
    refusal(called, *range(20))


def test_argument_value_and_allowed_values_are_named():
    assert refusal(chunk_grpo.train, "pocket/tiny", processes=2, max_restarts=-1) == (
        "`max_restarts` of train must be a whole number from 0; got -1"
    )
    assert refusal(chunk_grpo.train, "pocket/tiny", processes=1.0) == (
        "`processes` of train must be a whole number from 1; got 1.0"
    )
    assert refusal(chunk_grpo.load_policy, "pocket", resolution=64, dtype="fp16") == (
        "`dtype` of load_policy must be one of float32, bfloat16, float16; got 'fp16'"
    )
    assert "`overrides` of load_settings must be a mapping or a list of texts" in refusal(
        chunk_grpo.load_settings, "pocket/tiny", "seed=1"
    )
    assert "a Tensor; got [1.0]" in refusal(chunk_grpo.group_advantages, [1.0])


@pytest.mark.parametrize("prompts", LISTS_OF_TEXTS)
def test_policy_encodes_no_letters_for_prompts(prompts, pocket):
    assert "`prompts` of encode_prompts" in refusal(pocket.encode, prompts)


@pytest.fixture(scope="module")
def pocket():
    """The pocket model."""
    return chunk_grpo.load_policy("pocket", resolution=64, max_tokens=12)


def test_settings_may_be_named_where_a_run_is_trained(tmp_path):
    tiny = {"iterations": 1, "eval_every": 0, "eval_count": 1, "eval_steps": 2, "hybrid_split": 1}
    settings = chunk_grpo.load_settings("pocket/tiny", tiny)
    assert chunk_grpo.train(settings.model_dump(mode="json"), tmp_path / "run") == tmp_path / "run"


@pytest.mark.parametrize("name", GOOD)
def test_help_and_signature_stay_readable(name):
    called = function(name)
    text = str(inspect.signature(called))
    assert (
        name == "Settings" or "Annotated" not in text and "args" not in text.replace("kwargs", "")
    )
    assert called.__doc__ and inspect.getdoc(called)
    if not isinstance(called, type):
        assert typing.get_type_hints(inspect.unwrap(called)) or name.startswith("Chunks.")


def test_functions_can_still_be_handed_to_other_processes():
    for name in [name for name in GOOD if "." not in name]:
        assert pickle.loads(pickle.dumps(function(name))) is function(name)


def test_right_calls_are_let_through():
    assert chunk_grpo.sigmas(4).shape == (5,) and chunk_grpo.Chunks([1, 2]).sizes == (1, 2)
    assert len(chunk_grpo.Sampler(levels, "flow", [0.5, 0.5, 0.5, 0])) == 4
    assert chunk_grpo.chunks_from_profile([1.0, 2.0, 3.0], 2).transitions == 3
    assert chunk_grpo.chunk_ratio(ones, old_logp=ones, chunks=chunks).shape == (2, 2)
    assert chunk_grpo.group_advantages(ones, clamp=5).shape == (2, 4)
    assert chunk_grpo.load_settings(Path("pocket/tiny")) if Path("pocket/tiny").exists() else True
    assert chunk_grpo.load_settings("pocket/tiny", ("seed=3",)).seed == 3
