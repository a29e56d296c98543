"""What a run writes can be read again: numbers that are not finite, and what a method measures by itself."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run

from chunk_grpo import InputError, evaluate, train
from chunk_grpo.core import files
from chunk_grpo.core.settings import load_settings
from chunk_grpo.reporting import figures, reports
from chunk_grpo.runs import run_folder
from chunk_grpo.training.metrics import collect_metrics

TINY = {"iterations": 2, "eval_every": 0, "eval_count": 1, "eval_steps": 2, "hybrid_split": 1}


def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path):
    nested = {
        "a": math.nan,
        "b": [1.0, math.inf, {"c": -math.inf}],
        "d": (math.nan, 2),
        "e": "NaN",
        "f": True,
    }
    files.append_json_line(tmp_path / "lines.jsonl", nested)
    files.write_json(tmp_path / "one.json", nested)
    expected = {"a": None, "b": [1.0, None, {"c": None}], "d": [None, 2], "e": "NaN", "f": True}
    assert files.read_json_lines(tmp_path / "lines.jsonl") == [expected]
    assert files.read_json(tmp_path / "one.json") == expected


def test_metrics_of_an_older_version_with_nan_are_read_as_null(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "ratio_dev": [NaN, 0.5], "kl": Infinity}\n'
    )
    (line,) = files.read_json_lines(tmp_path / "metrics.jsonl", files.MetricsLine)
    assert line == {"iteration": 1, "ratio_dev": [None, 0.5], "kl": None}


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """A run in which the second of its iterations updates nothing, since a ratio is infinite; others are right."""
    folder = tmp_path_factory.mktemp("skipped")
    (folder / "ends.py").write_text(
        "import torch\n"
        "from chunk_grpo.training.method import Method\n"
        "class Ends(Method):\n"
        "    calls = 0\n"
        "    def metrics(self, items, chunk, count):\n"
        "        found = super().metrics(items, chunk, count)\n"
        "        bad = float('nan')\n"
        "        return found | {'ratio_dev': [bad] * count, 'clip_fraction': [bad] * count, 'own': [bad, 1.0],\n"
        "                        'deep': {'part': float('inf')}}\n"
    )
    values = TINY | {"method": f"{folder}/ends.py:Ends", "checkpoint_every": 1}
    return train(load_settings("pocket/tiny", values), folder / "run")


@pytest.mark.slow
def test_run_with_numbers_that_are_not_finite_is_read_by_everything(skipped):
    lines = run_folder.read_metrics_lines(skipped)
    assert lines[-1]["own"] == [None, 1.0] and set(lines[-1]["ratio_dev"]) == {None}
    assert len(run_folder.read_metrics(skipped)) == len(lines)
    assert "forward" in run("plan", "--run", skipped)
    assert figures.watch_run(skipped, lambda line, settings: None, 0.05) == "finished"
    evaluate(skipped)
    assert reports.write_run_report(skipped).is_file()


def test_run_with_numbers_that_are_not_finite_is_resumed(skipped):
    settings = run_folder.read_run_settings(skipped)
    longer = load_settings(settings, {"iterations": 3})
    assert train(longer, skipped, resume=True) == skipped
    log = (skipped / "train.log").read_text()
    assert "damaged" not in log and len(run_folder.read_metrics_lines(skipped)) == 4


def test_learning_rate_that_breaks_everything_leaves_a_readable_run(tmp_path):
    try:
        train(load_settings("pocket/tiny", TINY | {"learning_rate": 1e20}), tmp_path / "run")
    except (InputError, RuntimeError) as error:
        assert "\n" not in str(error)
    assert run_folder.read_metrics_lines(tmp_path / "run")
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


OWN = """from chunk_grpo.training.method import Method
class Own(Method):
    def metrics(self, items, chunk, count):
        return super().metrics(items, chunk, count) | {%s}
"""


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("'iteration': 7", "`iteration`"),
        ("'reward_mean': 9.0", "`reward_mean`"),
        ("'reward_own': 9.0", "`reward_own`"),
        ("'eval_own': 9.0", "`eval_own`"),
        ("'image_own': 9.0", "`image_own`"),
        ("'above_base_own': 9.0", "`above_base_own`"),
        ("'seconds': {}", "`seconds`"),
        ("'seconds_total': 1.0", "`seconds_total`"),
        ("'grad_norm': 1.0", "`grad_norm`"),
        ("'kl': 1.0", "`kl`"),
        ("'lr': 1.0", "`lr`"),
        ("'skipped_updates': 0", "`skipped_updates`"),
        ("'clip_fraction': 'none'", "`clip_fraction`"),
        ("'ratio_dev': 0.5", "`ratio_dev`"),
        ("3: 1.0", "3"),
        ("'own': items['loss'] if 'loss' in items else chunk", "`own`"),
        ("'own': {1, 2}", "`own`"),
        ("'own': object()", "`own`"),
    ],
)
def test_metrics_of_a_method_that_cannot_be_kept_are_rejected_by_name(entry, words, tmp_path):
    (tmp_path / "own.py").write_text(OWN % entry)
    settings = load_settings("pocket/tiny", TINY | {"method": f"{tmp_path}/own.py:Own"})
    with pytest.raises(InputError) as error:
        train(settings, tmp_path / "run")
    assert (
        "`metrics` of " in str(error.value)
        and words in str(error.value)
        and "\n" not in str(error.value)
    )


def test_metrics_of_a_method_must_be_a_mapping(tmp_path):
    (tmp_path / "own.py").write_text(
        "from chunk_grpo.training.method import Method\n"
        "class Own(Method):\n    def metrics(self, items, chunk, count):\n"
        "        return [1.0]\n"
    )
    with pytest.raises(InputError, match="`metrics` of .* must be a mapping"):
        train(
            load_settings("pocket/tiny", TINY | {"method": f"{tmp_path}/own.py:Own"}),
            tmp_path / "run",
        )


def test_metrics_of_a_method_may_be_numbers_lists_and_mappings(tmp_path):
    (tmp_path / "own.py").write_text(
        OWN % "'a': 1, 'b': 2.5, 'c': [1.0, None], 'd': {'e': 1.0}, 'f': None, "
        "'g': items['ratio'].mean()"
    )
    out = train(
        load_settings("pocket/tiny", TINY | {"iterations": 1, "method": f"{tmp_path}/own.py:Own"}),
        tmp_path / "run",
    )
    line = run_folder.read_metrics_lines(out)[-1]
    assert [line[name] for name in "abcdf"] == [1, 2.5, [1.0, None], {"e": 1.0}, None]
    assert line["g"] == pytest.approx(float(torch.tensor(line["ratio_mean"])))
    assert Path(out / "final").is_dir()


class TwoProcesses:
    """Gather as if another process had the same values, with ratio errors twice as large."""

    device = torch.device("cpu")
    pad_across_processes = staticmethod(lambda x, pad_index: x)

    def gather(self, x):
        is_errors = x.dtype == torch.float64 and x.shape == (1, 2)
        return torch.cat([x, x * torch.tensor([2.0, 0.5]).double() if is_errors else x])


@pytest.mark.parametrize("first", [torch.bool, torch.float32, torch.bfloat16, torch.int64])
def test_chunk_numbers_and_ratio_errors_are_those_of_all_processes(first):
    """Whatever the type of a method's first measurement, and whichever process has the largest error."""
    seen = {}

    class Measuring:
        def metrics(self, measurements, chunk_number, chunk_count):
            seen.update(values=measurements, chunk=chunk_number)
            return {}

        def chunks(self, profile):
            return [1] * 5000

        def trainable_steps(self, sampler):
            return torch.arange(2)

        def sampler(self, iteration):
            return None

    class State(SimpleNamespace):
        def iteration_prompt_indices(self, iteration):
            return [0, 1]

    run_settings = load_settings("pocket/tiny", {"images_per_prompt": 2, "shared_noise": False})
    state = State(
        settings=run_settings,
        method=Measuring(),
        accelerator=TwoProcesses(),
        profile=torch.ones(2),
        iteration=1,
        prompts=["a", "b"],
        scaler=None,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
    )
    measured = {
        "first": torch.tensor([1, 0]).to(first),
        "count": torch.tensor([1001, 3]),  # a bfloat16 would round it
        "ratio": torch.tensor([0.1, 1.5]),
        "flag": torch.tensor([True, False]),
    }
    update = SimpleNamespace(
        norms=[1.0],
        stats=[SimpleNamespace(chunk_metrics=measured, kl=0.0)],
        batches=[
            SimpleNamespace(chunk_number=torch.tensor([3, 4099]), chunk_sample_ids=torch.arange(2))
        ],
        ratio_errors=[0.25, 0.5],
    )
    rollout = SimpleNamespace(
        scores={"red": torch.tensor([0.0, 1.0])},
        combined_scores=torch.tensor([0.0, 1.0]),
        advantage=torch.tensor([-1.0, 1.0]),
        image_statistics=torch.zeros(2, 3),
    )
    line = collect_metrics(state, rollout, update)
    assert (line["ratio_floor"], line["ratio_floor_rollout"]) == (0.5, 0.5)
    assert seen["chunk"].tolist() == [3, 4099] * 2
    for name, values in seen["values"].items():
        expected = measured[name].repeat(2)
        assert values.dtype == expected.dtype and torch.equal(values, expected)
