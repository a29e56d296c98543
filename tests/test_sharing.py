"""Images that share noise: the same states in the rollout, whatever the batch, and credit for what is not shared."""

import pytest
import torch

from chunk_grpo import InputError
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models import trainable
from chunk_grpo.models.policy import decode_latents
from chunk_grpo.theory.sharing import (
    Sharing,
    edge_advantages,
    forward_passes_per_group,
    label_shared_states,
)
from chunk_grpo.training.credit_assignment import chunk_gains
from chunk_grpo.training.groups import sample_groups
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.rollout import RolloutOptions, sample_sde, sample_trajectories
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state

BASE = {
    "steps": 6,
    "images_per_prompt": 4,
    "chunks": "steps",
    "shared_noise": False,
    "updates_per_iteration": 2,
}


@pytest.fixture(scope="module")
def policy():
    return trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)


def draw(policy, batch=8, **more):
    """Trajectories of two groups of four, and how they were drawn."""
    method = load_method(load_settings("pocket/tiny", {**BASE, **more}))
    rows = policy.encode(["a red star", "two blue rings"])
    row = torch.arange(8) // 4
    keys = [(0, 0, p, g) for p in range(2) for g in range(4)]
    return sample_trajectories(
        policy=policy,
        conditioning=rows,
        prompt_index=row,
        keys=keys,
        options=RolloutOptions(method.sampler(0), batch_size=batch, noise_owner=method.noise_owner),
    ), method


@pytest.mark.parametrize(
    "sharing, window",
    [("group", "frozen:1"), ("seeds:2", "all"), ("tree:2@1,3", "all"), ("group", "random:2")],
)
def test_images_in_one_state_have_one_path(policy, sharing, window):
    paths, method = draw(policy, sharing=sharing, window=window)
    states = label_shared_states(method.noise_owner, paths.sampler.stochastic_steps)
    for i, row in enumerate(states.tolist()):
        for g, first in enumerate(row):
            for group in (0, 4):
                assert torch.equal(paths.latents[group + g, i], paths.latents[group + first, i])
        assert len({tuple(x.flatten().tolist()) for x in paths.latents[:4, i]}) == len(set(row))


def test_a_shared_forward_draws_what_single_ones_draw(policy):
    """In any batch, and as without sharing forwards: equal to the rounding of another batch size."""
    shared, method = draw(policy, sharing="tree:2@1,3")
    again, _ = draw(policy, batch=4, sharing="tree:2@1,3")
    torch.testing.assert_close(shared.latents, again.latents, rtol=0, atol=1e-4)
    rows = {
        k: v[torch.arange(8) // 4]
        for k, v in policy.encode(["a red star", "two blue rings"]).items()
    }
    blind = Sharing.parse("own").noise_owners(4, 6)  # every image a state of its own
    start = shared.latents[:, 0]
    sampler = method.sampler(0)
    latents, _ = sample_sde(
        policy=policy,
        prompt_embeds=rows,
        latents=start,
        keys=shared.keys,
        options=RolloutOptions(sampler, noise_owner=blind),
    )
    assert not torch.allclose(latents, shared.latents)
    torch.testing.assert_close(
        latents[0], shared.latents[0], rtol=0, atol=1e-4
    )  # its draws are its own throughout


def test_a_plan_counts_shared_forwards(policy):
    """A tree that splits at 1 and 3 of 6: one path for transitions 0 and 1, two for 2 and 3, four for 4 and 5."""
    _, method = draw(policy, sharing="tree:2@1,3", window="all")
    assert (
        forward_passes_per_group(
            label_shared_states(method.noise_owner, method.sampler(0).stochastic_steps)
        )
        == 2 * 1 + 2 * 2 + 2 * 4
    )
    assert method.counts().rollout == 14 * method.settings.prompts_per_iteration


def test_an_edge_gets_what_the_images_below_it_are_worth():
    states = label_shared_states(Sharing.parse("tree:2@0,1").noise_owners(4, 2), torch.arange(2))
    given = edge_advantages(torch.tensor([[4.0, 4.0, 1.0, 3.0]]), states, "depth")[0]
    assert (
        given[0, 0] == given[1, 0] > 0 > given[2, 0] == given[3, 0]
    )  # the first split: 4 and 4 against 1 and 3
    assert given[0, 1] == given[1, 1] > given[3, 1] > given[2, 1]
    leaves = edge_advantages(torch.tensor([[4.0, 4.0, 1.0, 3.0]]), states, "leaves")[0]
    assert leaves[2, 0] == leaves[3, 0] == pytest.approx((leaves[2, 1] + leaves[3, 1]).item() / 2)


def test_images_are_compared_with_those_of_their_initial_noise():
    method = load_method(load_settings("pocket/tiny", {**BASE, "sharing": "seeds:2"}))
    given = method.advantages({"r": torch.tensor([[1.0, 2.0, 8.0, 9.0]])}, {"r": 1.0})
    assert given[0].sign().tolist() == [-1, 1, -1, 1]


@pytest.mark.parametrize(
    "more, field",
    [
        ({"sharing": "tree:2@0"}, "sharing"),
        ({"sharing": "seeds:3"}, "sharing"),
        ({"sharing": "tree:4@9"}, "sharing"),
        ({"sharing": "group", "shared_noise": True}, "sharing"),
        ({"credit_of": "depth"}, "credit_of"),
        ({"sharing": "all"}, "sharing"),
        ({"sharing": "group", "method": "awm"}, "sharing"),
    ],
)
def test_what_cannot_be_shared_is_refused(more, field):
    with pytest.raises(InputError, match=f"`{field}` must"):
        load_method(load_settings("pocket/tiny", {**BASE, **more}))


def groups(tmp_path, changes=(), **more):
    """An iteration's groups, drawn and scored; `changes` are settings that are not checked."""
    settings = load_settings(
        "pocket/tiny", {**BASE, "eval_count": 1, "threads": 1, **more}
    ).model_copy(update=dict(changes))
    state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
    return state, sample_groups(state)


def test_gains_of_chunks_add_up_to_what_the_image_gained(tmp_path):
    """From the ODE's image of the initial noise to the image that was drawn; nothing is lost between chunks."""
    gains = {}
    for chunks in ("1,4", "5"):
        _, drawn = groups(
            tmp_path, chunks=chunks, credit_of="gain", credit="none", train_chunks="all"
        )
        gains[chunks] = drawn.advantage[:, 0] + (drawn.advantage[:, 1] if "," in chunks else 0)
        assert (
            drawn.advantage.shape == (len(drawn.combined_scores), 6)
            and not drawn.advantage[:, 5].any()
        )
    torch.testing.assert_close(gains["1,4"], gains["5"], rtol=0, atol=1e-5)
    assert gains["5"].abs().max() > 1e-3


def test_from_one_noise_the_gain_of_the_whole_path_is_the_images_credit(tmp_path):
    gains = {"credit_of": "gain"}  # rejected otherwise, since it changes nothing
    state, drawn = groups(tmp_path, gains, sharing="group", chunks="whole", train_chunks="all")
    grouped = {name: x.reshape(-1, 4) for name, x in drawn.scores.items()}
    expected = state.method.advantages(grouped, state.reward_weights).flatten()
    torch.testing.assert_close(drawn.advantage[:, 0], expected, rtol=0, atol=1e-3)


def test_gains_of_all_chunks_are_compared_with_each_other(tmp_path):
    """All that a group gained has mean 0; completed in one step the gains are those of one-step previews."""
    state, drawn = groups(
        tmp_path,
        chunks="1,4",
        credit_of="all-gains",
        completion_steps=1,
        train_chunks="all",
        advantage_clamp=100.0,
    )
    of_chunks = drawn.advantage[:, :2].reshape(-1, 8)
    torch.testing.assert_close(of_chunks.mean(1), torch.zeros(len(of_chunks)), rtol=0, atol=1e-5)
    assert drawn.advantage[:, 0].reshape(-1, 4).mean(1).abs().max() > 1e-3
    paths = drawn.context.trajectories
    rows = drawn.context.image_conditioning(torch.arange(len(paths.keys)))
    seen = paths.latents[:, 1] - paths.sampler.sigmas[1] * state.policy.velocity(
        paths.latents[:, 1], paths.sampler.sigmas[1].expand(len(paths.keys)), rows
    )
    images = decode_latents(state.policy, seen.detach(), 4)
    prompts = [state.prompts[key[2]] for key in paths.keys]
    after = torch.as_tensor(state.rewards["pocket-clip"](images, prompts))
    ((_, first), (_, _)) = reversed(chunk_gains(state, drawn.context, drawn.scores))
    ((_, second), (_, _)) = chunk_gains(state, drawn.context, drawn.scores)
    torch.testing.assert_close(
        second["pocket-clip"], drawn.scores["pocket-clip"] - after, rtol=0, atol=1e-4
    )
    assert first["pocket-clip"].shape == after.shape


def test_a_plan_counts_completions():
    """Chunks of 1 and 4 of 6: their first states are 0 and 1, completed by 6 and 5 forwards and scored once each."""
    settings = load_settings(
        "pocket/tiny", {**BASE, "chunks": "1,4", "train_chunks": "all", "credit_of": "gain"}
    )
    plain = load_method(load_settings(settings, {"credit_of": "image"})).counts()
    counts = load_method(settings).counts()
    images = settings.prompts_per_iteration * settings.images_per_prompt
    assert (counts.rollout - plain.rollout, counts.scored - plain.scored) == (
        11 * images,
        2 * images,
    )
    few = load_method(load_settings(settings, {"completion_steps": 2})).counts()
    assert (few.rollout - plain.rollout, few.scored) == (4 * images, counts.scored)


def test_a_branch_is_completed_with_steps_of_several_sizes(tmp_path):
    """G2RPO: the advantages of the images at stride 2 and 6 are added; a stride that jumps to the end is a preview."""
    more = {"steps": 7, "sharing": "group", "window": "frozen:1", "advantage_clamp": 100.0}
    state, drawn = groups(tmp_path, **more, completion_strides="1,2,6")
    _, plain = groups(tmp_path, **more)
    paths, policy = drawn.context.trajectories, state.policy
    sigmas = paths.sampler.sigmas
    rows = drawn.context.image_conditioning(torch.arange(len(paths.keys)))
    after = paths.latents[:, 1]
    total = plain.advantage
    for levels in (sigmas[[1, 3, 5, 7]], sigmas[[1, 7]]):
        x = after
        for now, then in zip(levels[:-1], levels[1:], strict=True):
            with torch.no_grad():
                x = x + (then - now) * policy.velocity(x, now.expand(len(x)), rows)
        images = decode_latents(policy, x, 4)
        prompts = [state.prompts[key[2]] for key in paths.keys]
        scores = {
            name: torch.as_tensor(state.rewards[name](images, prompts)) for name in drawn.scores
        }
        grouped = {name: x.reshape(-1, 4) for name, x in scores.items()}
        total = total + state.method.advantages(grouped, state.reward_weights).flatten()
    torch.testing.assert_close(drawn.advantage, total, rtol=0, atol=2e-2)
    assert (drawn.advantage - plain.advantage).abs().max() > 0.1
    counts, before = (
        load_method(load_settings(state.settings, {"completion_strides": x})).counts()
        for x in ("1,2,6", "1")
    )
    images = state.settings.prompts_per_iteration * 4
    assert (counts.rollout - before.rollout, counts.scored - before.scored) == (
        4 * images,
        2 * images,
    )
