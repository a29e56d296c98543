"""Faults of code that somebody wrote: each is one sentence that names the hook, before a run folder is made."""

import pytest
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.runs import launch
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.state import prepare_state

HEAD = """import abc
import torch
from chunk_grpo import InputError
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training.method import Method

"""
FAULTS = {  # body of a class on Method -> the hook, and words of the sentence
    "init takes more": (
        "def __init__(self, settings, rank):\n    super().__init__(settings)",
        "__init__",
        "must take (settings); it takes",
    ),
    "init raises": (
        "def __init__(self, settings):\n    raise ValueError('a\\nb')",
        "__init__",
        "ValueError: a b",
    ),
    "init without super": (
        "def __init__(self, settings):\n    self.settings = settings",
        "__init__",
        "must call super().__init__(settings)",
    ),
    "new returns another": (
        "def __new__(cls, s):\n    return 3",
        "__new__",
        "must return the method",
    ),
    "old name": (
        "trains_equal_rewards = True",
        "trains_equal_rewards",
        "new name, trains_flat_groups",
    ),
    "sampler raises": (
        "def sampler(self, iteration):\n    return 1 / 0",
        "sampler",
        "ZeroDivisionError",
    ),
    "sampler raises later": (
        "def sampler(self, iteration):\n    assert iteration < 2\n"
        "    return super().sampler(iteration)",
        "sampler",
        "AssertionError",
    ),
    "sampler returns levels": (
        "def sampler(self, iteration):\n    return self.sigmas",
        "sampler",
        "a Tensor",
    ),
    "sampler of a wrong kind": (
        "def sampler(self, iteration):\n    return Sampler(self.sigmas, 'mist')",
        "sampler",
        "'mist'",
    ),
    "sampler yields": ("def sampler(self, iteration):\n    yield 3", "sampler", "a generator"),
    "sampler waits": (
        "async def sampler(self, iteration):\n    return 3",
        "sampler",
        "asynchronous",
    ),
    "sampler is no function": ("sampler = 3", "sampler", "must be a function; it is 3"),
    "places returns a list": (
        "def trainable_steps(self, sampler):\n    return [0, 1]",
        "trainable_steps",
        "it returned a list",
    ),
    "places returns floats": (
        "def trainable_steps(self, sampler):\n    return torch.arange(3.0)",
        "trainable_steps",
        "float32 of shape",
    ),
    "places too far": (
        "def trainable_steps(self, sampler):\n    return torch.tensor([0, 99])",
        "trainable_steps",
        "[0, 99]",
    ),
    "chunks returns a list": (
        "def chunks(self, profile):\n    return [1] * len(profile)",
        "chunks",
        "a list",
    ),
    "chunks covers too few": (
        "def chunks(self, profile):\n    return Chunks((1, 1))",
        "chunks",
        "which covers 2",
    ),
    "chunks of no size": (
        "def chunks(self, profile):\n    return Chunks(())",
        "chunks",
        "one or more sizes",
    ),
    "chunks is none": ("chunks = None", "chunks", "must be a function"),
    "weights too few": (
        "def transition_weights(self, sampler):\n    return torch.ones(2)",
        "transition_weights",
        "shape (2,)",
    ),
    "weights not finite": (
        "def transition_weights(self, sampler):\n    return torch.full((len(sampler),), float('nan'))",
        "transition_weights",
        "not finite",
    ),
    "check raises": ("def check(self):\n    raise KeyError('x')", "check", "KeyError: 'x'"),
    "check returns false": ("def check(self):\n    return False", "check", "it returned False"),
    "advantages takes one": (
        "def advantages(self, scores):\n    return 3",
        "advantages",
        "must take (scores, weights)",
    ),
    "objective takes what it took before": (
        "def objective(self, statistic, advantage, group):\n    return 3",
        "objective",
        "must take (terms)",
    ),
    "transition_stats takes what it took before": (
        "def transition_stats(self, v, reference_velocities, target, x, sampler, index):\n    return 3",
        "transition_stats",
        "must take (batch)",
    ),
    "replay without anchor": (
        "def replay(self, context, image, index):\n    return 3",
        "replay",
        "must take",
    ),
    "copies is a list": ("reference_decays = ['old']", "reference_decays", "must map names"),
    "reads a text": (
        "reference_decays = {'old': lambda i: 0.5}\nreferences = ('old')",
        "references",
        "must be a tuple of names",
    ),
    "reads the unknown": ("references = ('new',)", "references", "among base"),
    "sampled by the unknown": (
        "sampling_reference = 'old'",
        "sampling_reference",
        "must be None; got",
    ),
    "required_settings no setting": (
        "required_settings = {'no_such': 1}",
        "required_settings",
        "must map names of settings",
    ),
    "statistic_size is a text": ("statistic_size = 'two'", "statistic_size", "whole number"),
    "ratio is a text": ("has_ratio = 'no'", "has_ratio", "True or False"),
}


def write(folder, body: str) -> str:
    """A file with a class on Method; what a setting calls it."""
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    (folder / "m.py").write_text(f"{HEAD}class Mine(Method):\n{lines}\n")
    return f"{folder / 'm.py'}:Mine"


def refused(tmp_path, **changes) -> str:
    """The sentence with which a training is refused that leaves nothing."""
    run_settings = settings.load_settings(
        "pocket/tiny", {"iterations": 4, "chunks": "steps", **changes}
    )
    with pytest.raises(InputError) as caught:
        launch.train(run_settings, tmp_path / "out/run")
    said = str(caught.value)
    assert "\n" not in said and not (tmp_path / "out").exists(), said
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_method_is_one_sentence_that_names_the_hook(tmp_path, fault):
    body, hook, words = FAULTS[fault]
    said = refused(tmp_path, method=write(tmp_path, body))
    assert said.startswith("`method` must") and f"`{hook}`" in said and words in said, said
    if "raises" in fault:
        assert f"line {9 + body.count(chr(10))} of " in said or "later" in fault, said


@pytest.mark.parametrize(
    "text, words",
    [
        ("Mine = 3\n", "a function or class"),
        ("def Mine(s):\n    return s\n", "must name a class on"),
        ("class Mine:\n    pass\n", "must name a class on"),
        ("raise OSError('gone')\n", "OSError"),
        ("import no_such_package_at_all\n", "no_such_package_at_all"),
        ("class Mine(:\n", "SyntaxError"),
        ("class Mine(no_such):\n    pass\n", "NameError"),
        ("other = 1\n", "a function or class"),
    ],
)
def test_a_file_without_a_method_is_one_sentence(tmp_path, text, words):
    (tmp_path / "m.py").write_text(text)
    said = refused(tmp_path, method=f"{tmp_path / 'm.py'}:Mine")
    assert said.startswith("`method` must") and words in said, said


def test_an_abstract_class_is_one_sentence(tmp_path):
    body = "class Mine(Method, abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
    (tmp_path / "m.py").write_text(HEAD + body)
    said = refused(tmp_path, method=f"{tmp_path / 'm.py'}:Mine")
    assert "`__init__` of Mine cannot make it: it is abstract and has no `f`" in said


def test_what_a_method_says_of_settings_is_left_as_it_is(tmp_path):
    said = refused(
        tmp_path,
        method=write(tmp_path, "def check(self):\n    raise InputError('`eta` must be odd')"),
    )
    assert said == "`eta` must be odd"


@pytest.mark.parametrize(
    "body, words",
    [
        ("return 3", "must return sizes of chunks; it returned a int"),
        ("pass", "it returned a NoneType"),
        ("return [1, 1]", "must return whole sizes that add up to"),
        ("return [1.0] * len(profile)", "whole sizes"),
        ("return profile", "whole sizes"),
        ("return 1 / 0", "failed in line 2 of {file}"),
        # The innermost frame of these is Python's own or torch's; a user needs the line of the chunker.
        ("import json; return json.loads('[1,')", "failed in line 2 of {file}"),
        ("return profile.reshape(3, 1000)", "failed in line 2 of {file}"),
        ("return []", "whole sizes"),
    ],
)
def test_a_fault_of_a_chunker_is_one_sentence(tmp_path, body, words):
    # A file whose name begins like that of the package is still the user's.
    file = tmp_path / "chunk_grpo_mine.py"
    file.write_text(f"def f(profile):\n    {body}\n")
    said = refused(tmp_path, chunks=f"{file}:f")
    assert said.startswith("`chunks` must") and words.format(file=file) in said, said


def test_a_fault_of_a_chunker_of_levels_is_one_sentence(tmp_path):
    (tmp_path / "c.py").write_text("def f(profile):\n    return [1, 1]\n")
    changes = {"method": "nft", "shared_noise": False, "chunks": f"{tmp_path / 'c.py'}:f"}
    said = refused(tmp_path, **changes)
    assert said.startswith("`chunks` must name a chunker that works") and "add up to" in said


@pytest.mark.parametrize("method", ["chunk", "nft"])
def test_a_chunker_that_returns_fewer_chunks_than_train_chunks_names_is_rejected(tmp_path, method):
    (tmp_path / "c.py").write_text("def f(profile):\n    return [1, len(profile) - 1]\n")
    changes = {"method": method, "shared_noise": False, "chunks": f"{tmp_path / 'c.py'}:f"}
    said = refused(tmp_path, train_chunks="3", **changes)
    assert said.startswith("`train_chunks` must") and "from 1 to 2" in said


def test_train_chunks_may_name_a_chunk_that_only_some_profiles_have(tmp_path):
    """The number of chunks may depend on the profile, which is measured after the method is loaded."""
    body = "ends = [i for i in range(1, len(profile)) if profile[i - 1] > 1.2 * profile[i]]"
    sizes = "return [b - a for a, b in zip([0, *ends], [*ends, len(profile)])]"
    (tmp_path / "c.py").write_text(f"def f(profile):\n    {body}\n    {sizes}\n")
    changes = {"chunks": f"{tmp_path / 'c.py'}:f", "train_chunks": "2"}
    loaded = load_method(settings.load_settings("pocket/tiny", changes))
    assert loaded.settings.train_chunk_numbers == (1,)


@pytest.mark.parametrize(
    "head, body, words",
    [
        (
            "ratio, advantage",
            "return ratio",
            "must take (ratio, advantage, clip_range); it takes (ratio, advantage)",
        ),
        ("r, a, c", "return 3", "it returned a int"),
        ("r, a, c", "return (r * a).mean()", "float32 of shape ()"),
        ("r, a, c", "return r[:, None] * a", "of shape (3, 3)"),
        ("r, a, c", "return r.x", "failed in line 2"),
        ("r, a, c", "return r > 1", "bool of shape (3,)"),
    ],
)
def test_a_fault_of_a_surrogate_is_one_sentence(tmp_path, head, body, words):
    (tmp_path / "c.py").write_text(f"def f({head}):\n    {body}\n")
    said = refused(tmp_path, surrogate=f"{tmp_path / 'c.py'}:f")
    assert said.startswith("`surrogate` must") and words in said, said


def test_the_plan_of_a_method_that_cannot_count_is_one_sentence(tmp_path):
    name = write(tmp_path, "def counts(self):\n    return 1 / 0")
    done = call("plan", "pocket/tiny", f"method={name}")
    assert (
        done.returncode == 2
        and "`counts` of Mine failed in line" in done.stderr
        and done.stderr.count("\n") == 1
    )


COUNTING = """
calls = []
class Mine(Method):
    def trainable_steps(self, sampler):
        calls.append("trainable_steps")
        return super().trainable_steps(sampler)
    def transition_weights(self, sampler):
        calls.append("transition_weights")
        return super().transition_weights(sampler)
"""


@pytest.mark.parametrize("window, count", [("frozen:4", 1), ("progressive:4:2", 4)])
def test_hooks_are_checked_once_per_window_rather_than_once_per_iteration(tmp_path, window, count):
    (tmp_path / "m.py").write_text(HEAD + COUNTING)
    changes = {"steps": 8, "chunks": "steps", "window": window, "iterations": 500}
    method = load_method(
        settings.load_settings("pocket/tiny", {"method": f"{tmp_path / 'm.py'}:Mine", **changes})
    )
    calls = type(method).trainable_steps.__globals__["calls"]
    # `load_method` itself checks each window, and then `check` does.
    assert calls.count("transition_weights") == 2 * count
    assert calls.count("trainable_steps") < 10 * count


def test_a_window_that_comes_late_is_checked(tmp_path):
    body = "def trainable_steps(self, sampler):\n    out = super().trainable_steps(sampler)\n"
    body += "    return out if out[0] < 3 else out.float()"
    changes = {"steps": 8, "window": "progressive:4:2", "iterations": 500}
    said = refused(tmp_path, method=write(tmp_path, body), **changes)
    assert "`trainable_steps` of Mine must return numbers of transitions" in said


def test_methods_of_the_table_are_made_as_before():
    for name in ("chunk", "steps", "neighbor"):
        assert load_method(settings.load_settings("pocket/tiny", {"method": name})).settings.steps


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("base", {}, "must have names other than base"),
        ("a/b", {}, "without dots and slashes; got 'a/b'"),
        ("a.b", {}, "without dots and slashes; got 'a.b'"),
        ("reference", {"kl": 0.1, "anchor_every": 2}, "`anchor_every` must be 0 with"),
    ],
)
def test_names_of_reference_weights_that_mean_others_are_refused(tmp_path, name, changes, words):
    body = f"reference_decays = {{{name!r}: lambda iteration: 0.5}}"
    changes = {"method": write(tmp_path, body), "chunks": "steps", **changes}
    with pytest.raises(InputError, match=words):
        prepare_state(settings.load_settings("pocket/tiny", changes), tmp_path)
