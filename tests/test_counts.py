"""What a plan and the table of methods count is what a hook on the transformer counts, for every row."""

import json
from collections import Counter

import pytest
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core.settings import METHODS, load_settings, read_settings_file
from chunk_grpo.methods.table import method_row
from chunk_grpo.planning.counts import iteration_counts
from chunk_grpo.training.groups import measure_profile, sample_groups, score_base
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state
from chunk_grpo.training.update import update_policy

SMALL = {
    "steps": 13,
    "chunks": "2,3,4,3",
    "resolution": 32,
    "eval_resolution": 32,
    "max_tokens": 8,
    "images_per_prompt": 4,
    "prompts_per_iteration": 2,
    "iterations": 3,
    "reward": "incompressibility",
    "eval_rewards": (),
    "eval_every": 0,
    "eval_count": 1,
    "threads": 1,
}
FITTED = {
    "reweighted": {"step_weights": "2,3,4,3"},
    "branch": {"sharing": "tree:2@0,3", "images_per_prompt": 4},
    "tree": {"sharing": "tree:2@0,1", "images_per_prompt": 4},
    "tree-chunk": {"sharing": "tree:2@0,3", "chunks": "3,3,3,3", "images_per_prompt": 4},
    "gardo": {"eval_rewards": ("incompressibility", "compressibility")},
    "tempflow-seeds": {"sharing": "seeds:2"},
    "neighbor": {"shared_noise": True},
    **dict.fromkeys(
        ["crd-chunk", "nft-chunk", "elbo-chunk", "elbo-clip-chunk", "chunk-mixture"],
        {"chunks": "2,3,4,4"},
    ),
    "awm-chunk": {"chunks": "2,3,4,2"},  # of the 11 levels that it trains
}
UNEVEN = (
    "chunk",
    "cps",
    "guard-chunk",
    "dppo-chunk",
    "chunk-recut",
    "chunk-gain",
)  # chunks of several sizes are drawn


def settings_of(name: str, **more):
    base = {**read_settings_file("pocket/tiny"), **SMALL}
    return load_settings(base, {"method": name, **FITTED.get(name, {}), **more})


def count_by_hook(settings, folder) -> Counter:
    """Train the run's iterations and count the images that go through the transformer, and those that are scored."""
    seen = Counter()
    state = load_policy_and_optimizer(prepare_state(settings, folder))
    phase = ""

    def note(module, args, kwargs, out):
        seen[phase] += len(kwargs.get("hidden_states", args[0] if args else ()))

    state.policy.transformer.register_forward_hook(note, with_kwargs=True)
    for name, reward in list(state.rewards.items()):

        def scoring(images, prompts, reward=reward, name=name):
            seen["scored"] += len(images) * (name in state.reward_weights)
            return reward(images, prompts)

        state.rewards[name] = scoring
    for number in range(settings.iterations):
        state.iteration = number
        phase = "rollout"
        rollout = sample_groups(state)
        if number == 0:
            measure_profile(state, rollout.context.trajectories)
        if settings.baseline_images:
            phase = "baseline"
            score_base(state, rollout)
        phase = "update"
        state.iteration = max(number, 1)  # what the first iteration alone measures is not counted
        update = update_policy(state, rollout)
        seen["trained"] += sum(len(work.chunk_sample_ids) for work in update.batches)
    state.executor.shutdown()
    return Counter({name: n / settings.iterations for name, n in seen.items()})


@pytest.mark.parametrize("name", METHODS)
def test_every_row_costs_what_a_hook_on_the_transformer_counts(name, tmp_path):
    settings = settings_of(name)
    counted = count_by_hook(settings, tmp_path)
    planned = load_method(settings).counts()
    near = pytest.approx if name not in UNEVEN else lambda x: pytest.approx(x, rel=0.35)
    assert counted["rollout"] == pytest.approx(planned.rollout)
    assert counted["scored"] == pytest.approx(planned.scored)
    assert counted["trained"] == near(planned.trained)
    assert counted["update"] - counted["trained"] == near(planned.extra)
    assert planned.extra / planned.trained == pytest.approx(
        (counted["update"] - counted["trained"]) / counted["trained"],
        rel=0.1 if name in UNEVEN else 1e-6,
    )


@pytest.mark.parametrize(
    "name, more",
    [
        ("dgpo", {"kl": 0.1}),
        ("nft", {"kl": 0.1}),
        ("online-dpo", {"kl": 0.1, "anchor_every": 2}),
        ("steps", {"kl": 0.1}),
        ("dgpo", {"updates_per_iteration": 2}),
        ("whole", {"update_batch": 4}),
        ("tmpo", {"update_batch": 4}),
        ("steps", {"shared_noise": True, "baseline_images": 2}),
        ("branch", {"baseline_images": 2}),
        ("mix-flash", {"shared_noise": True}),
        ("mix-flash-frozen", {"shared_noise": True}),
        ("g2-strides", {"completion_strides": "1,2,3"}),
        ("stepwise", {"completion_steps": 2, "sharing": "seeds:2"}),
        ("dense", {"window": "random:3"}),
        ("tempflow", {"rollout_batch": 3}),
        ("tree", {"rollout_batch": 3}),
        ("e-grpo", {"merge": "entropy:30"}),
        ("crd", {"train_chunks": "6,7,13", "chunk_fraction": 1}),
        ("nft", {"chunks": "equal:13"}),
        ("elbo-clip", {"chunks": "4,4,5", "train_chunks": "1,2"}),
        ("elbo-chunk", {"chunks": "profile", "train_chunks": "all"}),
    ],
)
def test_settings_beside_a_row_cost_what_a_hook_counts(name, more, tmp_path):
    settings = settings_of(name, **more)
    counted = count_by_hook(settings, tmp_path)
    planned = load_method(settings).counts()
    assert counted["rollout"] == pytest.approx(planned.rollout)
    assert counted["update"] == pytest.approx(planned.trained + planned.extra)
    assert counted["baseline"] == pytest.approx(planned.baseline)
    assert counted["scored"] == pytest.approx(planned.scored)


@pytest.mark.parametrize("name", ["chunk", "dense", "tempflow", "mix-flash", "dgpo"])
def test_plan_and_the_table_of_methods_say_one_number(name):
    done = call("plan", "paper/chunk", f"method={name}", "--rate", "1", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)["numbers"]["forwards_per_image"]
    row = method_row(name, "paper/chunk")
    assert {key: round(planned[key], 2) for key in ("rollout", "trained", "extra", "scored")} == {
        key: row[key] for key in ("rollout", "trained", "extra", "scored")
    }


def test_a_random_window_costs_its_mean_over_the_run():
    settings = load_settings("paper/chunk", {"method": "tempflow", "iterations": 200})
    method = load_method(settings)
    images = settings.prompts_per_iteration * settings.images_per_prompt
    states = [
        int(method.sampler(i).stochastic_steps) for i in range(200)
    ]  # one forward a group up to the branch
    expected = (
        sum((k + 1) / settings.images_per_prompt + settings.steps - 1 - k for k in states) / 200
    )
    assert (
        method.counts().rollout / images
        == pytest.approx(expected)
        != pytest.approx(
            load_method(load_settings(settings, {"iterations": 1})).counts().rollout / images
        )
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl": 0.1, "updates_per_iteration": 4, "update_batch": 4},
        {"baseline_images": 2},
        {"baseline_images": 2, "shared_noise": False},
        {"noise_spread": 0.5},
        {"chunks": "profile", "chunk_fraction": 1.0},
        {"chunks": "adaptive:3", "update_batch": 1},
        {"train_chunks": "1,2"},
    ],
)
def test_formulas_of_chunk_grpo_agree_with_the_counts_of_its_method(changes):
    settings = load_settings("paper/chunk", changes)
    assert iteration_counts(settings) == load_method(settings).counts()


def test_counts_of_chunk_grpo_do_not_stand_in_for_those_of_other_settings():
    plain = load_settings("paper/chunk")
    for name in ("dense", "tempflow", "nft", "mix"):
        with pytest.raises(InputError, match="`counts` must"):
            iteration_counts(load_settings(plain, {"method": name}))
