"""A setting that leaves its default changes what is trained, or is rejected in one sentence that names it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from chunk_grpo import InputError
from chunk_grpo.core.settings import dump_settings, load_settings
from chunk_grpo.models import trainable
from chunk_grpo.theory.credit import select_exploiting_images
from chunk_grpo.theory.sharing import label_shared_states
from chunk_grpo.training.gradient import accumulate_gradients
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update_batch import build_update_batch

SPEC = importlib.util.spec_from_file_location("sweep", Path(__file__).parents[1] / "tools/sweep.py")
sweep = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sweep)

REJECTED = [
    ("tree", {"credit": "batch"}, "credit"),
    ("branch", {"credit": "none"}, "credit"),
    ("tree-chunk", {"credit": "wins"}, "credit"),
    ("steps", {"credit": "scale"}, "credit"),
    ("neighbor", {"credit": "none"}, "credit"),
    ("neighbor", {"sampler": "dance"}, "sampler"),
    ("neighbor", {"eta": 0.3}, "eta"),
    ("neighbor", {"surrogate": "epg"}, "surrogate"),
    ("tmpo", {"surrogate": "epg"}, "surrogate"),
    ("tmpo", {"surrogate": "dppo:1e-6"}, "surrogate"),
    ("self-opd", {"surrogate": "par"}, "surrogate"),
    ("self-opd", {"train_chunks": "1"}, "train_chunks"),
    ("tmpo", {"step_weights": "noise"}, "step_weights"),
    ("whole", {"step_weights": "interval"}, "step_weights"),
    ("whole", {"chunk_fraction": 0.3}, "chunk_fraction"),
    ("steps", {"anchor": "velocity"}, "anchor"),
    ("nft", {"kl": 0.1, "anchor": "transition"}, "anchor"),
    ("neighbor", {"kl": 0.1}, "anchor"),
    ("flow", {"chunk_weighting": "dynamics"}, "chunk_weighting"),
    ("mix", {"chunk_weighting": "profile"}, "chunk_weighting"),
    ("tree", {"surrogate": "epg"}, "surrogate"),
    ("tempflow", {"credit_of": "gain"}, "credit_of"),
    ("steps", {"updates_per_iteration": 1, "surrogate": "par"}, "surrogate"),
    ("steps", {"updates_per_iteration": 1, "statistic": "centred"}, "statistic"),
    ("steps", {"surrogate": "asymmetric:0.1:0.2", "clip_range": 0.5}, "clip_range"),
    *[
        (name, {"clip_range": 0.5}, "clip_range")
        for name in (
            *("dppo", "dppo-chunk", "pcpo", "elbo-epg", "elbo-pepg", "elbo-par", "v-grpo", "tmpo"),
            *("self-opd", "nft", "nft-chunk", "crd", "crd-chunk", "best-of-n", "online-dpo"),
        )
    ],
    *[
        (name, {"sharing": "tree:2@0,1"}, "sharing")
        for name in ("flash", "tempflow", "g2", "g2-strides", "mix", "mix-random", "chunk-mix")
    ],
    ("mix-frozen", {"sharing": "tree:2@0,4"}, "sharing"),
    *[
        (name, {"credit": form}, "credit")
        for name in ("best-of-n", "online-dpo")
        for form in ("sum", "gdpo")
    ],
    ("branch", {"window": "frozen:2"}, "sharing"),
    *[
        (name, {"drop_flat_groups": True}, "drop_flat_groups")
        for name in ("awm", "awm-chunk", "nft", "nft-chunk", "crd", "elbo-par", "elbo-pepg")
    ],
    ("steps", {"drop_flat_groups": True, "surrogate": "par"}, "drop_flat_groups"),
    *[
        (name, {"sampler": "cps"}, "sampler")
        for name in ("nft", "awm", "dgpo", "crd", "elbo-par", "v-grpo", "best-of-n")
    ],
    *[
        (name, {"eta": 0.3}, "eta")
        for name in ("elbo-epg", "elbo-pepg", "elbo-clip", "online-dpo", "nft")
    ],
]


@pytest.mark.parametrize("method, changes, name", REJECTED)
def test_idle_setting_is_rejected_by_name(method, changes, name):
    with pytest.raises(InputError, match=f"`{name}` must") as rejected:
        sweep.make_settings(method, **changes)
    assert len(str(rejected.value).splitlines()) == 1


@pytest.mark.parametrize("method", ["chunk", "steps", "elbo-clip", "dgpo", "best-of-n", "tmpo"])
def test_groups_with_equal_rewards_may_be_dropped_where_they_have_no_gradient(method):
    assert sweep.make_settings(method, drop_flat_groups=True).drop_flat_groups


@pytest.mark.parametrize("base", ["pocket/demo", "pocket/tiny", "paper/dance"])
@pytest.mark.parametrize("method", ["nft", "neighbor", "tree", "whole", "self-opd"])
def test_what_a_preset_sets_for_its_own_method_does_not_keep_another_from_training(base, method):
    more = {"neighbor": {"shared_noise": True}, "nft": {"shared_noise": False}}
    settings = load_settings(base, {"method": method, **more.get(method, {})})
    load_method(settings)
    load_method(load_settings(settings))
    load_method(load_settings(settings.model_dump(mode="json")))
    assert load_settings(settings, {"seed": 3}).seed == 3


def test_tree_may_split_in_the_part_of_a_window_that_never_moves():
    for window, split, fits in (
        ("frozen:2", 1, True),
        ("frozen:2", 2, False),
        ("random:4", 2, True),  # of six transitions: it begins at 0, 1 or 2
        ("random:4", 1, False),
        ("progressive:4:1", 3, True),
        ("early:1", 0, False),
    ):
        changes = {"sharing": f"tree:4@{split}", "window": window, "shared_noise": False}
        if fits:
            assert sweep.make_settings("steps", **changes).window == window
            continue
        with pytest.raises(InputError, match=f"`sharing` must split at .* {window} these are"):
            sweep.make_settings("steps", **changes)


def test_idle_setting_in_a_file_is_rejected_and_one_of_the_file_that_it_is_like_is_not(tmp_path):
    (tmp_path / "a.yaml").write_text("like: pocket/demo\nmethod: nft\n")
    assert load_settings(tmp_path / "a.yaml").eta == 1.0
    (tmp_path / "b.yaml").write_text("like: pocket/demo\nmethod: nft\neta: 0.5\n")
    with pytest.raises(InputError, match="`eta` must stay 0.7 with nft"):
        load_settings(tmp_path / "b.yaml")


def test_another_method_takes_the_axes_of_the_one_before_away(tmp_path):
    guard = load_settings("authors/guard")
    for base in ("authors/guard", guard, guard.model_dump(mode="json")):
        settings = load_settings(base, {"method": "steps"})
        assert (settings.statistic, settings.step_weights, settings.clip_range) == (
            "ratio",
            "one",
            2e-6,
        ), base
    tree = load_settings("pocket/tiny", {"method": "tree"})
    assert load_settings(tree, {"method": "steps", "images_per_prompt": 4}).sharing == "own"
    (tmp_path / "one.yaml").write_text("like: authors/guard\nmethod: mix\n")
    assert load_settings(tmp_path / "one.yaml").statistic == "ratio"
    (tmp_path / "two.yaml").write_text("like: authors/guard\nstatistic: scaled\nmethod: guard\n")
    assert load_settings(tmp_path / "two.yaml").statistic == "scaled"
    assert load_settings("authors/guard", {"method": "guard"}) == load_settings("authors/guard")
    (tmp_path / "three.yaml").write_text(dump_settings(load_settings("authors/guard")))
    assert load_settings(tmp_path / "three.yaml") == load_settings("authors/guard")


def test_what_a_base_says_itself_stays_with_another_method():
    settings = load_settings("pocket/demo", {"method": "guard"})
    assert (settings.eta, settings.shared_noise, settings.steps, settings.statistic) == (
        1.0,
        False,
        13,
        "guard",
    )


def test_share_of_held_images_is_exact_without_other_rewards():
    trained = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    for share, count in ((0.1, 10), (0.25, 24), (0.01, 1), (1.0, 96)):
        chosen = select_exploiting_images(trained, [], share)
        assert int(chosen.sum()) == count
    best = (trained - trained.mean(1, keepdim=True)) / trained.std(1, keepdim=True)
    chosen = select_exploiting_images(
        trained, [], 0.05
    )  # fewer than there are groups: the best that are furthest ahead
    assert best[chosen].min() > 0 and chosen.sum(1).max() == 1


@pytest.fixture(scope="module")
def policy():
    return trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)


@pytest.mark.parametrize(
    "method, batch", [("tempflow", 3), ("tree", 2), ("tree-chunk", 5), ("g2", 1)]
)
def test_group_larger_than_a_batch_shares_one_path_bit_for_bit(policy, method, batch):
    method = load_method(sweep.make_settings(method))
    sampler = method.sampler(0)
    rows = policy.encode(["a red star", "two cats"])
    keys = [(0, 0, p, g) for p in range(2) for g in range(4)]
    paths = sample_trajectories(
        policy=policy,
        conditioning=rows,
        prompt_index=torch.arange(8) // 4,
        keys=keys,
        options=RolloutOptions(sampler, batch_size=batch, noise_owner=method.noise_owner),
    )
    states = label_shared_states(method.noise_owner[: len(sampler) + 1], sampler.stochastic_steps)
    assert (states[:-1] != torch.arange(4)).any()
    for step, row in enumerate(states.tolist()):
        for group in range(2):
            for image, same in enumerate(row):
                own = paths.latents[4 * group + image, step]
                first = paths.latents[4 * group + same, step]
                assert torch.equal(own, first)


@pytest.mark.parametrize(
    "surrogate, proportional", [("par", False), ("pepg", False), ("epg", True), ("clip", True)]
)
def test_step_weights_scale_the_loss_and_not_its_target(policy, surrogate, proportional):
    """With weights, the gradient of a step is its weight times that without, at a ratio that has moved."""
    wide = {"clip_range": 0.5} if surrogate == "clip" else {}
    method = load_method(sweep.make_settings("steps", surrogate=surrogate, **wide))
    sampler = method.sampler(0)
    rows = policy.encode(["a red star"])
    keys = [(0, 0, 0, g) for g in range(4)]
    paths = sample_trajectories(
        policy=policy,
        conditioning=rows,
        prompt_index=torch.zeros(4, dtype=torch.long),
        keys=keys,
        options=RolloutOptions(sampler, batch_size=4),
    )
    context = ReplayContext(policy, rows, paths)
    chosen = torch.full((4, 1), 2)
    chunks = method.chunks(torch.ones(6))
    places = method.trainable_steps(sampler)
    found = []
    for weights in (None, torch.full((7,), 3.0)):
        work = build_update_batch(torch.arange(4), chosen, chunks, 64, weights, places)
        new = method.replay(context, work.image_index, work.step_index)[0]
        old = tuple(x.detach() - 0.3 for x in new)
        policy.transformer.zero_grad()
        stats = accumulate_gradients(
            context, work, torch.tensor([1.0, -1.0, 0.5, -0.2]), method, old
        )
        found.append((torch.cat([p.grad.flatten() for p in policy.trained]), stats.objective))
    (plain, worth), (weighted, more) = found
    assert method.is_proportional == proportional and plain.norm() > 0
    torch.testing.assert_close(weighted, 3 * plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))
    assert more == pytest.approx(3 * worth, rel=1e-3)


@pytest.mark.parametrize(
    "method, pairs",
    [
        ("chunk", ["clip_range", "sampler", "eta", "kl", "credit", "step_weights"]),
        ("nft", ["kl", "anchor", "credit", "eta"]),
        ("tree", ["credit", "statistic", "sharing"]),
        ("tmpo", ["surrogate", "sampler"]),
        ("elbo-par", ["credit", "solver"]),
        (
            "elbo-chunk",
            ["chunks", "train_chunks", "chunk_fraction", "chunk_weighting", "step_weights"],
        ),
        ("elbo-clip-chunk", ["chunks", "clip_range", "eta"]),
        ("chunk-mixture", ["sampler", "train_chunks", "statistic", "surrogate", "window"]),
    ],
)
def test_pairs_of_the_sweep_are_trained_or_rejected(method, pairs):
    torch.set_num_threads(1)
    runs = sweep.Runs()
    for needed, name, value in sweep.list_pairs(method):
        if name in pairs:
            outcome = runs.try_pair(method, needed, name, value)
            assert outcome in ("trained", "rejected", None), (name, value, needed, outcome)


def test_the_sweep_knows_whether_two_runs_trained_the_same_chunks():
    torch.set_num_threads(1)
    runs = sweep.Runs()
    plain = runs.train_without("chunk", {})
    whole = runs.train(sweep.make_settings("chunk", chunks="whole"))
    assert sweep.chose_same_chunks("chunks", plain, plain)
    assert not sweep.chose_same_chunks("chunks", whole, plain)
    assert not sweep.chose_same_chunks("eta", plain, plain)  # does not choose chunks


def test_the_sweep_tries_a_pair_again_before_it_calls_a_setting_idle():
    """The first update with the large learning rate saturates the objective, and `weighting_anneal` acts from the second."""
    weighting = {"chunk_weighting": "dynamics", "weighting_temperature": 0.1}
    pair = ("online-dpo", weighting, "weighting_anneal", 1)
    assert sweep.Runs().try_pair(*pair) == "trained"
