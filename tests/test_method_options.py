"""A method's own options, from the command line to the run folder, and the weight of its KL term."""

import json
from dataclasses import dataclass

import pytest
import torch
from commands import run

from chunk_grpo import InputError
from chunk_grpo.core.settings import dump_settings, load_settings
from chunk_grpo.studies.design import load_study
from chunk_grpo.training.method import Method
from chunk_grpo.training.method_loading import load_method

CODE = '''
from dataclasses import dataclass

import torch

from chunk_grpo.training.method import Method


class ClipHigher(Method):
    """Clip-higher, with a KL term for negative advantages only."""

    @dataclass
    class Options:
        upper: float = 2.0  # times `clip_range`
        seen: tuple[int, ...] = ()

        def __post_init__(self):
            if self.upper <= 0:
                raise ValueError(f"upper must be above 0; got {self.upper}")

    def objective(self, terms):
        ratio, e = terms.statistic.exp(), self.settings.clip_range
        clipped = ratio.clamp(1 - e, 1 + self.options.upper * e)
        return torch.minimum(ratio * terms.advantage, clipped * terms.advantage)

    def kl_weight(self, advantage):
        return (advantage < 0).float()


class Demanding(Method):
    @dataclass
    class Options:
        width: int


class Listed(Method):
    Options = {"width": 3}
'''
TINY = [
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
    "threads=1",
]


@pytest.fixture
def code(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'mine.py'}:ClipHigher"


def options(code, **given):
    """Return the options that a method is made with, given as `method.NAME`."""
    changes = {f"method.{name}": value for name, value in given.items()}
    return load_method(load_settings("pocket/tiny", {"method": code, **changes})).options


def test_an_option_reaches_the_method_and_the_run_folder(code, tmp_path):
    out = tmp_path / "run"
    words = ["pocket/tiny", f"method={code}", "kl=0.1", *TINY]
    run("train", *words, "method.upper=3", "--out", out, "--no-report")
    note = json.loads((out / "run.json").read_text())
    assert note["settings"]["method_options"] == {"upper": 3}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["kl"] >= 0
    said = run("train", *words, "method.upper=4", "--out", out, "--resume", code=2)
    assert "`method_options` must stay" in said


def test_options_have_the_types_and_defaults_of_the_class(code):
    assert options(code).upper == 2.0
    assert options(code, upper=3).upper == 3.0
    assert options(code, seen=[1, 2]).seen == (1, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"uper": 2}, "`method.uper` is not an option of .*did you mean `method.upper`"),
        ({"zzz": 2}, "`method.zzz` is not an option of .*it has upper, seen"),
        ({"upper": "wide"}, "`method.upper` must be a valid number; got the text 'wide'"),
        ({"upper": True}, "`method.upper` must be a valid number; got true"),
        ({"upper": None}, "`method.upper` must be a valid number; got"),
        ({"seen": ["a"]}, "`method.seen` must be a valid integer"),
        ({"upper": -1}, "`method_options` must suit .*upper must be above 0; got -1"),
    ],
)
def test_wrong_options_are_rejected_in_one_sentence(code, given, words):
    with pytest.raises(InputError, match=words):
        options(code, **given)


def test_a_wrong_option_on_the_command_line_leaves_no_folder(code, tmp_path):
    words = ["train", "pocket/tiny", f"method={code}", "method.upper=wide"]
    said = run(*words, "--out", tmp_path / "out", code=2)
    assert "`method.upper` must be a valid number" in said and not (tmp_path / "out").exists()


def test_what_has_no_options_says_so(code):
    for method in ("chunk", "steps", "nft"):
        with pytest.raises(InputError, match="`method_options` must be empty with .*method.upper"):
            load_method(load_settings("pocket/tiny", {"method": method, "method.upper": 2}))
    file = code.partition(":")[0]
    with pytest.raises(InputError, match="`method.width` is missing"):
        options(f"{file}:Demanding")
    with pytest.raises(InputError, match="`Options` is a dataclass"):
        options(f"{file}:Listed", width=3)


def test_files_and_overrides_merge_and_another_method_drops_them(code, tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(f"like: pocket/tiny\nmethod: {code}\nmethod.upper: 5\nmethod.seen: [1]\n")
    settings = load_settings(file, ["method.upper=6"])
    assert settings.method_options == {"upper": 6, "seen": [1]}
    assert load_settings(settings, {"method.seen": [2]}).method_options == {"upper": 6, "seen": [2]}
    assert load_settings(settings, {"method_options": {"upper": 7}}).method_options == {"upper": 7}
    assert load_settings(settings, {"method": "steps"}).method_options == {}
    assert load_settings(file, {"method": "steps"}).method_options == {}
    (tmp_path / "dumped.yaml").write_text(dump_settings(settings))
    assert load_settings(tmp_path / "dumped.yaml") == settings


def test_an_arm_of_a_study_and_a_grid_may_name_an_option(code, tmp_path):
    (tmp_path / "base.yaml").write_text("like: pocket/tiny\n")
    (tmp_path / "study.yaml").write_text(
        "title: Widths\nquestion: Which?\nreference: two\nfirst_seed: 5000\nseeds: 2\n"
        f"arms:\n  two: {{method: {code}}}\n  three: {{method: {code}, method.upper: 3}}\n"
        "tune: {method.upper: [1.0, 2.0, 3.0]}\n"
    )
    study = load_study(tmp_path)
    assert study.grid_of("two") == {"method.upper": [1.0, 2.0, 3.0]}
    base = load_settings(tmp_path / "base.yaml")
    assert load_settings(base, study.arms["three"], tmp_path).method_options == {"upper": 3}


def kl_gradient(weight):
    """Return the KL part of an update's gradient, with this `kl_weight`: the update with `kl` less that without."""
    from test_hooks import moved_gradient, trainable

    class Weighted(Method):
        def kl_weight(self, advantage):
            return weight(advantage)

    policy = trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)
    gradients = []
    for kl in (0.0, 0.5):
        changes = {"kl": kl, "shared_noise": False, "steps": 7, "chunks": "2,4"}
        torch.manual_seed(0)
        gradients.append(
            moved_gradient(policy, Weighted(load_settings("pocket/tiny", changes))).double()
        )
    return gradients[1] - gradients[0]


def test_the_kl_of_each_chunk_sample_has_its_weight():
    """Weights of positive and of negative advantages add up to the whole KL, and each of them leaves part of it out."""
    whole = kl_gradient(lambda advantage: None)
    ones = kl_gradient(torch.ones_like)
    negative = kl_gradient(lambda advantage: (advantage < 0).float())
    others = kl_gradient(lambda advantage: (advantage >= 0).float())
    assert torch.equal(whole, ones)
    assert torch.allclose(negative + others, whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))
    for part in (negative, others):
        assert 0.05 < part.norm() / whole.norm() < 0.98


def test_a_malformed_kl_weight_is_named():
    with pytest.raises(InputError, match="`kl_weight` of chunk must return finite .*\\(N,\\)"):
        kl_gradient(lambda advantage: torch.ones(3))


def test_options_survive_the_dataclass_decorator_on_the_method(code):
    """A method that is a dataclass field by field elsewhere may name its options by any dataclass."""

    @dataclass
    class Width:
        width: int = 3

    class Wide(Method):
        Options = Width

    assert Wide(load_settings("pocket/tiny", {"method.width": 4})).options == Width(4)


def test_a_plan_counts_one_forward_pass_for_a_reference_that_method_and_kl_share():
    """dgpo reads the base anyway, so its KL term adds none; chunk's adds one for each trained transition."""
    for method, more in (("dgpo", 0), ("chunk", 1)):
        with_kl, without = (
            load_method(
                load_settings(
                    "pocket/demo",
                    {"method": method, "kl": kl, "anchor": "velocity"}
                    if kl
                    else {"method": method},
                )
            ).counts()
            for kl in (0.1, 0)
        )
        assert with_kl.extra - without.extra == pytest.approx(more * with_kl.trained), method
