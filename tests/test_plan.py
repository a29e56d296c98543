"""What a plan counts, and what a model costs."""

import pytest

from chunk_grpo import InputError, cost, plan, settings


@pytest.mark.parametrize("chunks, expected", [
    ("2,3,4,7", (5, 8.0, 11)), ("steps", (8, 8.0, 8)), ("whole", (16, 16.0, 16)), ("equal:4", (8, 8.0, 8)),
    ("profile", (1, 8.0, 16))])
def test_transitions_of_an_image(chunks, expected):
    assert plan.transitions_per_image(settings.load({"chunks": chunks})) == expected


def test_counts_name_everything_once():
    names = [name for name, _ in plan.counts(settings.Settings(), 8)]
    assert len(set(names)) == len(names)
    text = dict(plan.counts(settings.Settings(), 8))
    assert text["images a process"].startswith("24,")
    with pytest.raises(InputError, match="number of processes"):
        plan.counts(settings.Settings(), 5)


def test_a_broken_model_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="config.json"):
        cost.geometry(str(tmp_path))
    for part in ("transformer", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
    with pytest.raises(InputError, match="config.json"):
        cost.geometry(str(tmp_path))
