"""Methods that sample by the ODE: what their runs record, and what reports, cards and widgets say about them."""

import json
import re

import pytest
import torch
from commands import run as command

from chunk_grpo import InputError, evaluate, train
from chunk_grpo.core.settings import load_settings
from chunk_grpo.reporting import model_card, widgets
from chunk_grpo.reporting.reports import write_run_report
from chunk_grpo.reporting.tables import describe_as_trained_sampling
from chunk_grpo.runs import run_folder
from chunk_grpo.training.method_loading import load_method

CHANGES = {
    "method": "crd-chunk",
    "steps": 6,
    "chunks": "2,4",
    "train_chunks": "2",
    "iterations": 1,
    "prompts_per_iteration": 2,
    "eval_count": 2,
    "threads": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of CRD on chunks, evaluated with all arms."""
    settings = load_settings("pocket/tiny", CHANGES)
    run = train(settings, tmp_path_factory.mktemp("ode") / "run")
    evaluate(run)
    return run


def test_a_run_records_that_it_sampled_by_the_ode(run):
    profile = run_folder.read_run_profile(run)
    assert (profile["sampler"], profile["eta"], profile["chunks"]) == ("ode", 0.0, "1,1,1,1,1,1")


def test_an_evaluation_says_how_as_trained_images_were_sampled(run):
    summary = run_folder.read_evaluation_summary(run)
    assert summary["as_trained"]["sampler"] == "ode"
    assert "by the ODE (6 steps, shift" in describe_as_trained_sampling(summary)


def test_the_words_for_the_sde_name_its_noise():
    sampling = {"sampler": "flow", "steps": 13, "eta": 1.0, "shift": 3.0, "resolution": 64}
    text = describe_as_trained_sampling({"as_trained": sampling})
    assert "by the SDE (flow, 13 steps, η 1, shift 3, 64 px)" in text
    text = describe_as_trained_sampling({"as_trained": sampling | {"sampler": "ode", "eta": 0.0}})
    assert "by the ODE (13 steps, shift 3, 64 px)" in text and "η" not in text


@pytest.mark.slow
def test_its_report_counts_noise_levels_and_names_no_sde(run):
    text = write_run_report(run).read_text()
    assert "at 6 noise levels: " in text
    assert "noise of the SDE" not in text and "the last transition is not trained" not in text
    assert "under the base and the ODE: mean" in text


def test_its_notebook_edits_the_chunks_of_all_levels(run, tmp_path):
    file = widgets.write_lab_notebook(run, tmp_path)
    cells = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"]]
    (code,) = [cell for cell in cells if "chunk_editor(" in cell]
    names = {"run": run, "run_folder": run_folder, "widgets": widgets}
    exec(code, names)


@pytest.mark.slow
def test_its_profile_covers_the_levels_of_its_chunks(run, tmp_path):
    words = ["profile", "pocket/tiny", *(f"{name}={value}" for name, value in CHANGES.items())]
    few = [
        "--prompts",
        "1",
        "--images",
        "2",
        "--out",
        tmp_path / "p.html",
        "--json",
        tmp_path / "p.json",
    ]
    command(*words, *few)
    assert json.loads((tmp_path / "p.json").read_text())["chunks"] == "2,4"
    command("profile", "--run", run, *few[:4], "--out", tmp_path / "q.html")


def test_the_card_names_the_method_and_its_source(run, tmp_path):
    settings = run_folder.read_run_settings(run)
    card = model_card.model_card(run, settings, run / "final", name="mine")
    assert "Chunk-GRPO" not in card.split("##")[0]
    assert "method `crd-chunk`" in card
    described = {
        "chunk": "Chunk-GRPO ([arXiv 2510.21583](https://arxiv.org/abs/2510.21583), method `chunk`)",
        "steps": "GRPO on single steps",
        "whole": "GRPO with one ratio per image",
        "mix": "GRPO with one ratio per step, with window ",
        "guard-chunk": "GRPO with one ratio per chunk, with statistic guard",
    }
    for method, words in described.items():
        given = load_settings("pocket/tiny", {"method": method})
        assert model_card._describe_method(given).startswith(words)
    assert re.search(
        r"arXiv \d{4}\.\d{5}\]",
        model_card._describe_method(load_settings("pocket/tiny", {"method": "nft"})),
    )


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_card_without_hybrid_inference_loads_no_second_transformer(run, hybrid):
    settings = run_folder.read_run_settings(run)
    settings = settings.model_copy(update={"hybrid_split": 2 if hybrid else settings.eval_steps})
    card = model_card.model_card(run, settings, run / "final", name="mine")
    assert ("first = type(trained)" in card) == hybrid


# Methods that use only the order of a group's images.


@pytest.mark.parametrize("clamp", [1.0, 5.0])
@pytest.mark.parametrize("name", ["best-of-n", "online-dpo"])
def test_the_best_image_is_the_best_however_large_the_rewards_are(name, clamp):
    two_rewards = {"pocket-clip": 1.0, "pocket-geneval": 1.0}
    changes = {"method": name, "credit": "none", "reward": two_rewards}
    settings = load_settings("pocket/tiny", changes)
    settings = settings.model_copy(update={"advantage_clamp": clamp})
    rewards = torch.tensor([[20.0, 30.0, 0.0, 0.0]])
    advantages = load_method(settings).advantages({"r": rewards}, {"r": 1.0})
    assert int(advantages.argmax()) == 1 and int((advantages == advantages.max()).sum()) == 1


@pytest.mark.parametrize("name", ["best-of-n", "online-dpo"])
def test_a_clamp_has_no_effect_on_an_order_and_is_refused(name):
    with pytest.raises(InputError, match="`advantage_clamp` must stay"):
        load_settings("pocket/tiny", {"method": name, "advantage_clamp": 2.0})


def test_weights_of_steps_act_on_single_levels_even_if_one_chunk_selects_them_all():
    changes = {"chunks": "whole", "train_chunks": "all", "step_weights": "interval"}
    awm = load_settings("pocket/demo", {"method": "awm", **changes})
    assert awm.step_weights == "interval"
    with pytest.raises(InputError, match="`step_weights` must stay"):
        load_settings("pocket/demo", changes)


def test_a_card_shows_no_secret_of_a_reward():
    options = {
        "my.py:Judge": {"api_key": "sk-1", "Token": "t", "url": "http://a:1", "max_tokens": 4},
        "other": {"login": {"password": "p"}, "token_variable": "NAME"},
    }
    assert model_card._remove_private_options(options) == {
        "my.py:Judge": {"max_tokens": 4},
        "other": {},
    }
