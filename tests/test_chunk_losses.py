"""Chunks in methods that train noised final images: where they train, what one item is, and what is rejected."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_method_table import ADVANTAGE, context_of

from chunk_grpo import InputError
from chunk_grpo.core.settings import METHODS, load_settings
from chunk_grpo.methods.decoupled import Decoupled, renoise
from chunk_grpo.models import trainable
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.training import trainer, update
from chunk_grpo.training.credit_assignment import chunk_gains
from chunk_grpo.training.gradient import accumulate_gradients, compute_transition_stats
from chunk_grpo.training.groups import sample_groups
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state
from chunk_grpo.training.update_batch import build_update_batch

SMALL = {
    "images_per_prompt": 4,
    "shared_noise": False,
    "prompts_per_iteration": 2,
    "eval_every": 0,
    "eval_count": 1,
    "threads": 1,
    "iterations": 4,
}
ROWS = {
    "crd-chunk": "crd",
    "nft-chunk": "nft",
    "awm-chunk": "awm",
    "elbo-chunk": "elbo-clip",
}  # and what each is of
SEVEN = {"steps": 7, "chunks": "2,2,3", "train_chunks": "2,3"}
FITTED = {"awm-chunk": {**SEVEN, "chunks": "2,2,2"}}  # of nine tenths of the levels


@pytest.fixture(scope="module")
def policy():
    return trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)


def method_of(name: str, **more):
    return load_method(load_settings("pocket/tiny", {**SMALL, "method": name, **more}))


def draw(method, context):
    """Return the partition and what each image trains of it."""
    paths = context.trajectories
    profile = context.trajectories.distance.double().mean(0)
    made = method.partition(paths, profile)
    return made, method.select_chunks(paths, made, profile, 0)


def gradient(context, method, advantage=ADVANTAGE) -> torch.Tensor:
    """Return the gradient of a first update on what the method draws."""
    made, chosen = draw(method, context)
    sampler = context.trajectories.sampler
    work = build_update_batch(
        torch.arange(8),
        chosen,
        made,
        64,
        method.transition_weights(sampler),
        method.trainable_steps(sampler),
    )
    context.policy.transformer.zero_grad()
    accumulate_gradients(context, work, advantage, method)
    return torch.cat([p.grad.flatten() for p in context.policy.trained])


def moved(context) -> None:
    """Move the weights of a policy away from its copies."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in context.policy.trained:
            p += 1e-2 * torch.randn(p.shape, generator=generator)


@pytest.fixture
def unmoved(policy):
    """Give the weights back after a test."""
    kept = [p.detach().clone() for p in policy.trained]
    yield
    with torch.no_grad():
        for p, before in zip(policy.trained, kept, strict=True):
            p.copy_(before)


@pytest.mark.parametrize(
    "name, levels",
    [
        ("crd-chunk", (5, 17)),
        ("nft-chunk", (5, 17)),
        ("elbo-chunk", (5, 17)),
        ("awm-chunk", (5, 15)),
    ],
)
def test_chunks_3_and_4_are_levels_5_to_the_last(policy, name, levels):
    method = method_of(name, steps=17)
    made, chosen = draw(method, context_of(policy, method))
    assert made == Chunks.steps(levels[1]) and torch.equal(
        chosen, torch.arange(*levels).expand(8, -1)
    )
    assert method.counts().trained == 8 * (levels[1] - levels[0])


@pytest.mark.parametrize("chunks", ["steps", "1,1,1,1,1,1,1", "equal:1"])
@pytest.mark.parametrize("name", ROWS)
def test_a_chunk_row_of_single_levels_is_the_published_row(policy, name, chunks):
    """The same draws and the same gradient, to the last bit."""
    if name == "awm-chunk" and chunks[0] == "1":
        chunks = chunks[2:]
    published = method_of(ROWS[name], steps=7, chunk_fraction=0.5)
    ours = method_of(name, steps=7, chunks=chunks, train_chunks="all", chunk_fraction=0.5)
    context = context_of(policy, published)
    (made, chosen), (cut, drawn) = draw(published, context), draw(ours, context)
    assert made == cut and torch.equal(chosen, drawn) and chosen.shape == (8, 3)
    expected = gradient(context, published)
    assert torch.equal(gradient(context, ours), expected) and expected.norm() > 0


def worth_by_hand(name, v, copy, target, x, t, advantage):
    """Write the loss of each level out (m,), of images of two groups of four at one level after the other."""

    def error(off):
        return off.square().mean((1, 2)) / off.detach().abs().mean((1, 2))

    if name == "elbo-chunk":
        new = -t * error(v - target)
        return (new - new.detach()).exp() * advantage
    if name == "awm-chunk":
        new = -t * 4 * ((v - target).square().mean((1, 2)) + 1e-10) ** 0.25
        return (new - new.detach()).exp() * advantage / 5 - (v - copy).square().mean((1, 2))
    if name == "nft-chunk":
        clean = x - t[:, None, None] * target
        at = t[:, None, None]
        near = error(x - at * v - clean)
        far = error(x - at * (2 * copy - v) - clean)
        good = advantage / 10 + 0.5
        return -5 * (good * near + (1 - good) * far)
    implicit = (error(copy - target) - error(v - target)).reshape(
        -1, 4
    )  # of a level and prompt, its four images
    wanted = advantage.reshape(-1, 4) / 10
    away = (implicit - implicit.mean(1, keepdim=True).detach()) - (
        wanted - wanted.mean(1, keepdim=True)
    )
    return (-5 * away.square()).flatten()


@pytest.mark.parametrize("name", ROWS)
def test_a_chunk_row_has_the_gradient_of_its_loss_at_its_levels_alone(policy, name, unmoved):
    """Written out by hand, with the policy away from its copies; in CRD another mean of a group has no gradient."""
    method = method_of(name, **FITTED.get(name, SEVEN))
    context = context_of(policy, method)
    moved(context)
    ours = gradient(context, method)
    levels = list(range(2, len(method.trainable_steps(context.trajectories.sampler))))
    image = torch.arange(8).repeat(len(levels))
    index = torch.tensor(levels).repeat_interleave(8)
    x, target = renoise(context, image, index, method.noise_per_group)
    t = context.trajectories.sampler.sigmas[index]
    rows = context.image_conditioning(image)
    copy = torch.zeros_like(x)
    if method.reference_decays:
        with context.use_weights(method.references[0]):
            copy = policy.velocity(x, t, rows)
    worth = worth_by_hand(
        name, policy.velocity(x, t, rows), copy, target, x, t, ADVANTAGE.repeat(len(levels))
    )
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(-worth.mean(), policy.trained)])
    assert expected.norm() > 0
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name, fraction, count",
    [("crd", 0.71, 12), ("nft", 0.71, 12), ("elbo-clip", 0.71, 12), ("awm", 0.67, 10)],
)
def test_the_control_draws_as_many_levels_at_random(policy, name, fraction, count):
    control = method_of(name, steps=17, chunk_fraction=fraction)
    row = method_of({v: k for k, v in ROWS.items()}[name], steps=17)
    context = context_of(policy, control)
    _, chosen = draw(control, context)
    assert chosen.shape == draw(row, context)[1].shape == (8, count)
    assert (chosen < 5).any() and control.counts() == row.counts()
    one_a_group = torch.equal(chosen, chosen[[0, 0, 0, 0, 4, 4, 4, 4]])
    assert one_a_group == control.noise_per_group and not torch.equal(chosen[0], chosen[4])


@pytest.mark.parametrize("name", ["elbo-chunk", "crd-chunk"])
@pytest.mark.parametrize(
    "more",
    [
        {"chunk_fraction": 0.5},
        {"chunk_fraction": 0.5, "chunk_weighting": "dynamics"},
        {"chunk_fraction": 0.5, "chunk_weighting": "profile"},
        {"chunks": "profile", "chunk_fraction": 0.5},
        {"chunks": "steps", "train_chunks": "5,17", "chunk_fraction": 1},
    ],
    ids=str,
)
def test_levels_of_drawn_chunks_are_whole_chunks_of_those_that_may_be_drawn(policy, name, more):
    method = method_of(name, steps=17, **more)
    context = context_of(policy, method)
    made, chosen = draw(method, context)
    profile = context.trajectories.distance.double().mean(0)
    chunks = method.partition_levels(context.trajectories, profile)
    allowed = [
        set(range(17)[part])
        for k, part in enumerate(chunks.slices)
        if str(k + 1) in method.settings.train_chunks.split(",")
    ]
    for row in chosen.tolist():
        drawn = {level for level in row if level >= 0}
        assert drawn and drawn == set().union(*[part for part in allowed if part & drawn])
        assert len([level for level in row if level >= 0]) == len(drawn)
    assert torch.equal(chosen[:4], chosen[:1].expand(4, -1)) or not method.noise_per_group
    uneven = bool((chosen < 0).any())
    assert not uneven or isinstance(made, list)  # then the mean over processes counts items


def test_chunks_of_large_motion_are_drawn_more_often(policy):
    """By an image's own latents, of several seeds; for a group that shares its levels by the group's mean."""
    for name in ("elbo-chunk", "crd-chunk"):
        method = method_of(
            name, steps=17, train_chunks="all", chunk_fraction=0.25, chunk_weighting="dynamics"
        )
        context = context_of(policy, method)
        distance = context.trajectories.distance.mean(0)
        assert distance[:2].mean() < distance[9:].mean() / 3
        counts = torch.zeros(2)
        for seed in range(60):
            paths = replace(
                context.trajectories, keys=[(seed, *key[1:]) for key in context.trajectories.keys]
            )
            chosen = method.select_chunks(paths, [], distance, 0)
            counts += torch.tensor(
                [float((chosen == 0).any(1).sum()), float((chosen == 16).any(1).sum())]
            )
        assert counts[1] > 3 * counts[0] > 0


def test_adaptive_chunks_cut_the_levels_of_each_image(policy):
    method = method_of(
        "elbo-chunk", steps=17, chunks="adaptive:3", train_chunks="all", chunk_fraction=0.5
    )
    context = context_of(policy, method)
    made, chosen = draw(method, context)
    assert isinstance(made, list) and all(part == Chunks.steps(17) for part in made)
    assert gradient(context, method).norm() > 0 and (chosen >= 0).any(1).all()


@pytest.mark.parametrize("weighting", ["uniform", "dynamics"])
@pytest.mark.parametrize("name", ["crd", "elbo-clip-chunk"])
def test_select_chunks_samples_from_the_chunks_that_it_is_given(policy, name, weighting):
    method = method_of(
        name,
        steps=7,
        chunks="steps",
        train_chunks="all",
        chunk_fraction=0.5,
        chunk_weighting=weighting,
    )
    paths = context_of(policy, method).trajectories
    chosen = method.select_chunks(paths, Chunks((3, 4)), paths.distance.double().mean(0), 0)
    assert chosen.shape == (8, 1) and set(chosen.flatten().tolist()) <= {0, 1}


@pytest.mark.parametrize("chunks", ["steps", "2,2,3", "profile", "adaptive:2"])
def test_a_decoupled_method_that_overrides_chunks_trains_these_chunks(policy, tmp_path, chunks):
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.methods.decoupled import Elbo\nfrom chunk_grpo.theory.chunks import Chunks\n\n\n"
        "class Mine(Elbo):\n    def chunks(self, profile):\n        return Chunks((3, len(profile) - 3))\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    method = method_of(name, steps=7, chunks=chunks, train_chunks="all", chunk_fraction=1)
    made, chosen = draw(method, context_of(policy, method))
    assert made == Chunks((3, 4)) and chosen.tolist() == [[0, 1]] * 8
    half = method_of(name, steps=7, chunks=chunks, train_chunks="all", chunk_fraction=0.5)
    images = half.settings.prompts_per_iteration * half.settings.images_per_prompt
    assert half.counts().trained == 3.5 * images


def test_train_chunks_names_the_chunks_that_a_decoupled_method_overrides(policy, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.methods.decoupled import Elbo\nfrom chunk_grpo.theory.chunks import Chunks\n\n\n"
        "class Mine(Elbo):\n    def chunks(self, profile):\n        return Chunks((3, 4))\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    method = method_of(name, steps=7, chunks="steps", train_chunks="2", chunk_fraction=1)
    assert draw(method, context_of(policy, method))[1].tolist() == [[1]] * 8
    with pytest.raises(InputError, match="from 1 to 2"):
        method_of(name, steps=7, chunks="steps", train_chunks="3", chunk_fraction=1)


@pytest.mark.parametrize("text", ["interval", "inverse-interval", "2,2,3"])
def test_weights_of_levels_scale_the_gradient_of_each_level(policy, text):
    method, plain = (
        method_of("elbo-clip", steps=7, chunk_fraction=1, step_weights=x) for x in (text, "one")
    )
    context = context_of(policy, plain)
    length = -context.trajectories.sampler.sigmas.diff()
    expected = {
        "interval": length,
        "inverse-interval": 1 / length,
        "2,2,3": torch.tensor([7 / 6] * 4 + [7 / 9] * 3),
    }[text]
    weights = method.transition_weights(context.trajectories.sampler)
    torch.testing.assert_close(weights, expected / expected.mean())
    each = []
    for level in range(7):
        one = method_of("elbo-clip", steps=7, train_chunks=str(level + 1), chunk_fraction=1)
        each.append(gradient(context, one) * weights[level] / 7)
    torch.testing.assert_close(gradient(context, method), sum(each), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "name, more, field",
    [
        ("crd", {"train_chunks": "8"}, "train_chunks"),
        ("crd-chunk", {"train_chunks": "4"}, "train_chunks"),
        ("awm", {"train_chunks": "7"}, "train_chunks"),
        ("crd-chunk", {"chunks": "2,2,2"}, "chunks"),
        ("awm-chunk", {"chunks": "2,2,3"}, "chunks"),
        ("nft", {"chunks": "equal:2"}, "chunks"),
        ("crd", {"chunks": "adaptive"}, "chunks"),
        ("v-grpo", {"chunks": "2,2,3"}, "chunks"),
        ("elbo-chunk", {"step_weights": "noise"}, "step_weights"),
        ("nft", {"step_weights": "2,3,4"}, "step_weights"),
        ("elbo-chunk", {"chunk_weighting": "dynamics"}, "chunk_weighting"),
        ("chunk", {"chunks": "2,4", "train_chunks": "3"}, "train_chunks"),
    ],
)
def test_chunks_of_levels_that_do_not_fit_are_rejected_by_name(name, more, field):
    with pytest.raises(InputError, match=f"`{field}`") as rejected:
        method_of(name, **{"steps": 7} | (FITTED.get(name, SEVEN) if name in ROWS else {}) | more)
    assert len(str(rejected.value).splitlines()) == 1


def test_a_users_method_whose_chunks_are_fewer_than_train_chunks_names_is_rejected(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.theory.chunks import Chunks\nfrom chunk_grpo.training.method import Method\n\n\n"
        "class Mine(Method):\n    def chunks(self, profile):\n        return Chunks.whole(len(profile))\n"
    )
    with pytest.raises(
        InputError, match="`train_chunks` must be all, or different numbers from 1 to 1"
    ):
        load_method(load_settings("pocket/demo", {"method": f"{tmp_path / 'mine.py'}:Mine"}))


@pytest.mark.parametrize(
    ("chunk_sizes", "depends"),
    [("(1, 10, 1)", False), ("(6, 6) if profile[0] < profile[-1] else (4, 8)", True)],
)
def test_gains_need_chunks_that_do_not_depend_on_the_profile(tmp_path, chunk_sizes, depends):
    """The gains of an iteration are measured before its profile, so both must see the same chunks."""
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.theory.chunks import Chunks\nfrom chunk_grpo.training.method import Method\n\n\n"
        f"class Mine(Method):\n    def chunks(self, profile):\n        return Chunks({chunk_sizes})\n"
    )
    changes = {"method": f"{tmp_path / 'mine.py'}:Mine", "credit_of": "gain"}
    chosen = load_settings("pocket/demo", changes)
    if not depends:
        load_method(chosen)
        return
    with pytest.raises(InputError, match="must return the same chunks for every profile"):
        load_method(chosen)


def test_chunks_of_each_image_and_named_chunks_exclude_each_other(policy, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.theory.chunks import Chunks\nfrom chunk_grpo.training.method import Method\n\n\n"
        "class Mine(Method):\n    def partition(self, paths, profile):\n"
        "        return [Chunks((2, 4))] * len(paths.keys)\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    method = method_of(name, steps=7, chunks="2,4", train_chunks="2", chunk_fraction=1)
    with pytest.raises(
        InputError, match="`train_chunks` must be all if each image has chunks .* got 2$"
    ):
        draw(method, context_of(policy, method))
    method = method_of(name, steps=7, chunks="2,4", train_chunks="all", chunk_fraction=1)
    assert draw(method, context_of(policy, method))[1].tolist() == [[0, 1]] * 8


def test_a_users_decoupled_method_trains_the_last_level_and_a_chunk_as_one_item(policy, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from chunk_grpo.methods.decoupled import Crd\n\n\n"
        "class Mine(Crd):\n    statistic_per_chunk = True\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    last = method_of(name, steps=7, chunks="steps", train_chunks="7", chunk_fraction=1)
    assert draw(last, context_of(policy, last))[1].tolist() == [[6]] * 8
    method = method_of(name, **SEVEN, chunk_fraction=1)
    made, chosen = draw(method, context_of(policy, method))
    assert (
        made == Chunks((2, 2, 3))
        and chosen.tolist() == [[1, 2]] * 8
        and isinstance(method, Decoupled)
    )


@pytest.mark.parametrize("name", [name for name, of in METHODS.items() if of.get("contender")])
def test_a_contender_says_that_it_is_ours_and_trains(name, tmp_path):
    assert METHODS[name]["source"] == "our choice"
    settings = load_settings(
        "pocket/tiny", {**SMALL, "method": name, "learning_rate": 1e-3, "images_per_prompt": 8}
    )
    state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
    lines = [trainer.train_iteration(state) for _ in range(2)]
    assert all(
        0 < line["grad_norm"] < float("inf") and line["skipped_updates"] == 0 for line in lines
    )


def moved_gradient(context, method, advantage=ADVANTAGE):
    """Return the gradient, its items and their transition statistics before, after the weights have moved."""
    made, chosen = draw(method, context)
    sampler = context.trajectories.sampler
    work = build_update_batch(
        torch.arange(8),
        chosen,
        made,
        64,
        method.transition_weights(sampler),
        method.trainable_steps(sampler),
    )
    old = compute_transition_stats(context, work, method)
    moved(context)
    context.policy.transformer.zero_grad()
    stats = accumulate_gradients(context, work, advantage, method, old)
    return torch.cat([p.grad.flatten() for p in context.policy.trained]), work, old, stats


def bounds_by_hand(context, image, index):
    """Write minus the weighted flow-matching loss of levels out (m,)."""
    x, target = renoise(context, image, index)
    t = context.trajectories.sampler.sigmas[index]
    off = context.policy.velocity(x, t, context.image_conditioning(image)) - target
    return -t * off.square().mean((1, 2)) / off.detach().abs().mean((1, 2))


def clipped(ratio, advantage, eps):
    """Write the clipped objective out."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)


@pytest.mark.parametrize("eps", [1e-3, 0.1])
def test_an_elbo_by_chunks_clips_the_geometric_mean_of_its_levels_ratios(policy, eps, unmoved):
    method = method_of("elbo-clip-chunk", **SEVEN, chunk_fraction=1, clip_range=eps)
    context = context_of(policy, method)
    image = torch.arange(8)
    before = torch.stack(
        [bounds_by_hand(context, image, torch.full((8,), i)).detach() for i in range(7)], 1
    )
    ours, work, _, stats = moved_gradient(context, method)
    ratios = (
        torch.stack([bounds_by_hand(context, image, torch.full((8,), i)) for i in range(7)], 1)
        - before
    ).exp()
    chunk = torch.stack(
        [(ratios[:, 2] * ratios[:, 3]) ** (1 / 2), ratios[:, 4:].prod(1) ** (1 / 3)], 1
    )
    worth = clipped(chunk, ADVANTAGE[:, None], eps).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(-worth, policy.trained)])
    assert len(work.chunk_number) == 16 and expected.norm() > 0
    assert (
        0 < stats.chunk_metrics["clipped"].mean() < 1
        if eps < 0.01
        else not stats.chunk_metrics["clipped"].any()
    )
    torch.testing.assert_close(ours, expected, rtol=5e-3, atol=1e-3 * float(expected.abs().max()))
    assert stats.objective == pytest.approx(worth.item(), rel=1e-3, abs=1e-6)


def test_an_elbo_by_chunks_of_single_levels_is_the_published_clip(policy, unmoved):
    """The same items, ratios and gradient, after the weights have moved."""
    published = method_of("elbo-clip", steps=7, chunk_fraction=1, clip_range=1e-3)
    ours = method_of(
        "elbo-clip-chunk",
        steps=7,
        chunks="steps",
        train_chunks="all",
        chunk_fraction=1,
        clip_range=1e-3,
    )
    context = context_of(policy, published)
    kept = [p.detach().clone() for p in policy.trained]
    found = []
    for method in (published, ours):
        with torch.no_grad():
            for p, before in zip(policy.trained, kept, strict=True):
                p.copy_(before)
        found.append(moved_gradient(context, method)[0])
    assert torch.equal(*found) and found[0].norm() > 0


def test_before_an_update_one_ratio_a_chunk_and_one_a_level_have_one_gradient_where_chunks_are_equal(
    policy,
):
    more = {"steps": 6, "chunks": "2,2,2", "train_chunks": "2,3", "chunk_fraction": 1}
    context = context_of(policy, method_of("elbo-chunk", **more))
    level, chunk = (
        gradient(context, method_of(name, **more)) for name in ("elbo-chunk", "elbo-clip-chunk")
    )
    torch.testing.assert_close(level, chunk, rtol=1e-3, atol=1e-4 * float(level.abs().max()))


MIXED = {"steps": 7, "chunks": "1,2,4", "window": "frozen:3"}


@pytest.mark.parametrize("statistic", ["ratio", "guard"])
def test_a_mixture_has_the_ratio_of_transitions_early_and_of_noised_images_late(
    policy, statistic, unmoved
):
    """Written out by hand, after the weights have moved and some ratios are clipped."""
    method = method_of("chunk-mixture", **MIXED, statistic=statistic, clip_range=1e-4)
    context = context_of(policy, method)
    image = torch.arange(8)
    paths, sampler = context.trajectories, context.trajectories.sampler
    assert sampler.stochastic_steps.tolist() == [0, 1, 2]

    def means():
        found = []
        for i in range(3):
            now = paths.latents[:, i]
            index = torch.full((8,), i)
            v = policy.velocity(now, sampler.sigmas[index], context.image_conditioning(image))
            found.append(sampler.mean_std(v, now, index))
        return found

    with torch.no_grad():
        old = means()
        before = torch.stack(
            [bounds_by_hand(context, image, torch.full((8,), i)) for i in range(3, 7)], 1
        )
    ours, work, _, stats = moved_gradient(context, method)
    logs = []
    for i, ((mean, std), (was, _)) in enumerate(zip(means(), old, strict=True)):
        away = [
            ((paths.latents[:, i + 1] - m).square().mean((1, 2)) / (2 * std.flatten() ** 2))
            for m in (mean, was)
        ]
        log = away[1] - away[0]
        if statistic == "guard":
            log = std.flatten() * (
                log + (mean - was).square().mean((1, 2)) / (2 * std.flatten() ** 2)
            )
        logs.append(log)
    late = (
        torch.stack([bounds_by_hand(context, image, torch.full((8,), i)) for i in range(3, 7)], 1)
        - before
    )
    ratio = torch.stack([logs[0].exp(), ((logs[1] + logs[2]) / 2).exp(), late.mean(1).exp()], 1)
    worth = clipped(ratio, ADVANTAGE[:, None], 1e-4).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(-worth, policy.trained)])
    gone = stats.chunk_metrics["clipped"].reshape(8, 3)
    assert (
        len(work.chunk_number) == 24 and gone[:, :2].any() and gone[:, 2].any() and not gone.all()
    )
    torch.testing.assert_close(ours, expected, rtol=5e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_mixture_of_its_early_chunks_alone_is_guard_in_a_window_and_of_its_late_ones_the_elbo(
    policy,
):
    mixed = method_of("chunk-mixture", **MIXED)
    context = context_of(policy, mixed)
    early = gradient(context, method_of("chunk-mixture", **MIXED, train_chunks="1,2"))
    guard = method_of("guard-chunk", steps=7, chunks="1,2", window="frozen:3", chunk_fraction=1)
    assert torch.equal(guard.sampler(0).eta, mixed.sampler(0).eta)
    torch.testing.assert_close(early, gradient(context, guard), rtol=1e-4, atol=1e-6)
    late = gradient(context, method_of("chunk-mixture", **MIXED, train_chunks="3"))
    elbo = gradient(
        context,
        method_of("elbo-clip-chunk", steps=7, chunks="1,2,4", train_chunks="3", chunk_fraction=1),
    )
    torch.testing.assert_close(late, elbo, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        gradient(context, mixed), (2 * early + late) / 3, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(
    "more, field",
    [
        ({"window": "all"}, "window"),
        ({"window": "random:3"}, "window"),
        ({"window": "progressive:3:2"}, "window"),
        ({"window": "frozen:2"}, "window"),
        ({"chunks": "whole"}, "window"),
        ({"chunks": "1,2,3"}, "chunks"),
        ({"chunks": "profile"}, "chunks"),
        ({"chunks": "adaptive"}, "chunks"),
        ({"train_chunks": "4"}, "train_chunks"),
        ({"credit_of": "all-gains"}, "credit_of"),
        ({"credit_of": "gain"}, "credit_of"),
        ({"sharing": "group"}, "sharing"),
        ({"merge": "window"}, "merge"),
        ({"merge": "rest:0.5"}, "merge"),
        ({"step_weights": "noise"}, "step_weights"),
        ({"step_weights": "interval"}, "step_weights"),
        ({"step_weights": "1,2"}, "step_weights"),
        ({"surrogate": "dppo:1e-3"}, "surrogate"),
        ({"kl": 0.1, "anchor": "transition"}, "anchor"),
        ({"completion_strides": "1,2"}, "completion_strides"),
        ({"sampler": "cps", "statistic": "guard"}, "statistic"),
    ],
)
def test_a_mixture_that_cannot_be_is_rejected_in_one_sentence(more, field):
    with pytest.raises(InputError, match=f"`{field}` must|`{field}` of equal") as rejected:
        method_of("chunk-mixture", **MIXED | more)
    assert len(str(rejected.value).splitlines()) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"window": "frozen:1"},
        {"chunks": "steps", "window": "frozen:2"},
        {"step_weights": "3,4"},
        {"kl": 0.1, "anchor": "velocity"},
        {"solver": "dpm2"},
        {"sampler": "dance", "eta": 0.3},
        {"chunk_fraction": 0.67},
    ],
    ids=str,
)
def test_a_mixture_trains_with_other_cuts_and_settings(more, tmp_path):
    settings = load_settings(
        "pocket/tiny", {**SMALL, **MIXED, "method": "chunk-mixture", "learning_rate": 1e-3} | more
    )
    state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
    lines = [trainer.train_iteration(state) for _ in range(2)]
    assert all(0 < line["grad_norm"] < float("inf") for line in lines)


def test_gains_of_all_chunks_are_compared_in_one_group(tmp_path):
    """Guard by chunks, each with its gain: one mean and deviation for all chunks of a prompt's images."""
    more = {"steps": 7, "chunks": "1,2,3", "method": "guard-chunk-gains"}
    settings = load_settings(
        "pocket/tiny", {**SMALL, **more, "reward_options": {"pocket-clip": {"worker": False}}}
    )
    state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
    drawn = sample_groups(state)
    gains = chunk_gains(state, drawn.context, drawn.scores)
    every = torch.stack([gain["pocket-clip"] for _, gain in gains], 1)[:, [2, 1, 0]].reshape(2, 12)
    wanted = (every - every.mean(1, keepdim=True)) / (every.std(1, keepdim=True) + 1e-8)
    ours = drawn.advantage[:, [0, 1, 3]].reshape(2, 12)
    torch.testing.assert_close(ours, wanted.clamp(-5, 5).to(ours), rtol=1e-3, atol=1e-3)
    row = load_settings("pocket/tiny", {"method": "guard-chunk-gains"})
    assert state.method.counts().scored == 8 * 4 and (row.clip_range, row.statistic) == (
        1e-4,
        "guard",
    )
    assert not torch.allclose(
        ours.reshape(2, 4, 3).mean(1), torch.zeros(2, 3), atol=1e-2
    )  # no chunk by itself


@pytest.mark.parametrize("limit", [3, 64])
def test_only_the_last_pass_of_an_update_waits_for_other_processes(policy, monkeypatch, limit):
    """Compiled passes have a graph even without a backward pass, for which DDP would wait in the next forward pass."""
    method = load_method(load_settings("pocket/tiny", SMALL))
    context = context_of(policy, method)
    made, chosen = draw(method, context)
    work = build_update_batch(
        torch.arange(8),
        chosen,
        made,
        limit,
        method.transition_weights(context.trajectories.sampler),
        method.trainable_steps(context.trajectories.sampler),
    )
    old = compute_transition_stats(context, work, method)
    monkeypatch.setattr(policy, "compiled", True)
    waiting = [True]

    @contextlib.contextmanager
    def sync(last):
        waiting.append(last)
        yield
        waiting.pop()

    seen = []
    replay = method.replay

    def watched(*arguments):
        seen.append(waiting[-1])
        return replay(*arguments)

    monkeypatch.setattr(method, "replay", watched)
    accumulate_gradients(
        context, replace(work, chunk_samples_fit=False), ADVANTAGE, method, old, sync
    )
    assert len(seen) == 2 * len(work.batches) and seen == [False] * (len(seen) - 1) + [True]


def test_old_statistics_wait_for_no_other_process(monkeypatch):
    class Found(Exception):
        pass

    waits = [True]

    @contextlib.contextmanager
    def no_sync(module):
        waits.append(False)
        yield
        waits.pop()

    def stop(*arguments):
        raise Found(waits[-1])

    monkeypatch.setattr(update, "build_update_batches", lambda *_: ([None, None], [None, None]))
    monkeypatch.setattr(update, "compute_transition_stats", stop)
    state = SimpleNamespace(
        settings=load_settings("pocket/tiny"),
        accelerator=SimpleNamespace(no_sync=no_sync),
        method=SimpleNamespace(has_ratio=True),
        optimizer=SimpleNamespace(param_groups=[]),
        policy=SimpleNamespace(module=None),
    )
    with pytest.raises(Found) as found:
        update.update_policy(state, SimpleNamespace(context=None))
    assert found.value.args == (False,)
