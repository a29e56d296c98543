"""Properties of chunks and objective on drawn inputs: what must hold for every partition, ratio and advantage."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chunk_grpo import InputError
from chunk_grpo.theory.chunks import (
    Chunks,
    chunk_transition_weights,
    chunks_from_setting,
    fits_in_batch,
    flatten_chunks,
    split_into_batches,
)
from chunk_grpo.theory.objective import (
    chunk_ratio,
    chunk_sample_ratio,
    clipped_objective,
    group_advantages,
    is_clipped,
)

partitions = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda sizes: Chunks(tuple(sizes))
)
seeds = st.integers(0, 2**31)
clips = st.sampled_from([1e-4, 1e-2, 0.2])
texts = st.one_of(
    st.text(max_size=12), st.text(alphabet="0123456789,: -equalstpwhofi", max_size=12)
)


def drawn(*strategies):
    """Like `given`, with the same draws on every run."""
    return lambda test: settings(max_examples=60, deadline=None, derandomize=True)(
        given(*strategies)(test)
    )


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged(seed, chunks, samples):
    """Segments of `samples` images that drew chunks without replacement, in shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, len(chunks) + 1, (), generator=generator))
    chosen = torch.stack(
        [torch.randperm(len(chunks), generator=generator)[:count] for _ in range(samples)]
    )
    _, _, chunk_sample_ids = flatten_chunks(chunks, chosen)
    return chunk_sample_ids[torch.randperm(len(chunk_sample_ids), generator=generator)]


# chunks


@drawn(partitions)
def test_text_and_back(chunks):
    assert Chunks.parse(str(chunks)) == chunks
    assert chunks_from_setting(f" {str(chunks).replace(',', ' , ')} ", chunks.transitions) == chunks


@drawn(partitions)
def test_a_partition_holds_every_transition_once(chunks):
    places = list(range(chunks.transitions))
    assert [i for part in chunks.slices for i in places[part]] == places
    assert len(chunks) == len(chunks.slices) == len(chunks.sizes)


@drawn(partitions)
def test_chunks_weigh_alike(chunks):
    weights = chunk_transition_weights(chunks, torch.float64)
    assert weights.shape == (chunks.transitions,)
    for part in chunks.slices:
        assert weights[part].sum().item() == pytest.approx(chunks.transitions / len(chunks))


@drawn(texts, st.integers(1, 40))
def test_any_text_is_chunks_or_one_sentence(text, transitions):
    try:
        chunks = chunks_from_setting(text, transitions)
    except InputError as error:
        assert (
            str(error).startswith("`chunks` ") and "got " in str(error) and "\n" not in str(error)
        )
    else:
        assert chunks.transitions == transitions and Chunks.parse(str(chunks)) == chunks


@drawn(st.integers(1, 60), st.integers(-2, 70))
def test_equal_chunks_divide(transitions, size):
    if size > 0 and transitions % size == 0:
        assert set(Chunks.equal(transitions, size).sizes) == {size}
        assert Chunks.equal(transitions, size).transitions == transitions
    else:
        with pytest.raises(InputError, match=f"got {size}$"):
            Chunks.equal(transitions, size)


@drawn(partitions, seeds, st.integers(1, 5))
def test_segments_are_three_loops(chunks, seed, samples):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(chunks), (samples, 3), generator=generator)
    expected = [
        (b, i, 3 * b + p)
        for b in range(samples)
        for p in range(3)
        for i in range(chunks.transitions)[chunks.slices[chosen[b, p]]]
    ]
    assert list(zip(*(v.tolist() for v in flatten_chunks(chunks, chosen)), strict=True)) == expected


@drawn(partitions, seeds, st.integers(1, 6), st.integers(1, 20))
def test_batches_cover_once_and_keep_items_whole(chunks, seed, samples, limit):
    chunk_sample_ids = ragged(seed, chunks, samples)
    parts = split_into_batches(chunk_sample_ids, limit)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(chunk_sample_ids)))
    assert all(1 <= len(part) <= limit for part in parts)
    sizes = chunk_sample_ids.bincount()
    homes = [
        {n for n, part in enumerate(parts) if (chunk_sample_ids[part] == item).any()}
        for item in range(len(sizes))
    ]
    assert all(
        len(home) == 1 for home, size in zip(homes, sizes.tolist(), strict=True) if size <= limit
    )
    assert (
        fits_in_batch(chunk_sample_ids, limit)
        == all(len(home) == 1 for home in homes)
        == bool((sizes <= limit).all())
    )


# objective


@drawn(partitions, seeds, st.sampled_from([torch.float32, torch.float64]))
def test_the_ratio_is_exactly_one_where_nothing_changed(chunks, seed, dtype):
    logp = (3 * randn(seed, 4, chunks.transitions)).to(dtype)
    assert torch.equal(chunk_ratio(logp, logp, chunks), torch.ones(4, len(chunks), dtype=dtype))
    chunk_sample_ids = ragged(seed, chunks, 4)
    flat = randn(seed, len(chunk_sample_ids)).to(dtype)
    assert torch.equal(
        chunk_sample_ratio(flat, flat, chunk_sample_ids),
        torch.ones(int(chunk_sample_ids.max()) + 1, dtype=dtype),
    )


@drawn(partitions, seeds)
def test_flat_and_rectangular_ratios_agree(chunks, seed):
    new = randn(seed, 3, chunks.transitions)
    old = randn(seed + 1, 3, chunks.transitions)
    sample, index, chunk_sample_ids = flatten_chunks(
        chunks, torch.arange(len(chunks)).expand(3, -1)
    )
    order = torch.randperm(len(chunk_sample_ids), generator=torch.Generator().manual_seed(seed))
    flat = chunk_sample_ratio(
        new[sample, index][order], old[sample, index][order], chunk_sample_ids[order]
    )
    torch.testing.assert_close(
        flat.reshape(3, -1), chunk_ratio(new, old, chunks), rtol=1e-12, atol=0
    )


@drawn(seeds, clips)
def test_no_gradient_exactly_where_clipped_on_the_side_of_the_advantage(seed, clip_range):
    advantage = randn(seed, 200)
    ratio = (2 * clip_range * randn(seed + 1, 200)).exp().requires_grad_()
    clipped_objective(ratio[:, None], advantage, clip_range).backward()
    passed = torch.where(advantage > 0, ratio > 1 + clip_range, ratio < 1 - clip_range)
    assert passed.any() and not passed.all()
    assert torch.equal(is_clipped(ratio.detach(), advantage, clip_range), passed)
    assert torch.equal(ratio.grad == 0, passed)
    torch.testing.assert_close(ratio.grad[~passed], advantage[~passed] / 200, rtol=1e-12, atol=0)


@drawn(partitions, seeds, clips)
def test_order_of_a_group_does_not_matter(chunks, seed, clip_range):
    rewards = randn(seed, 1, 6)
    change = 0.05 * randn(seed + 1, 6, chunks.transitions)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    ratio = chunk_ratio(change, 0 * change, chunks)
    one = clipped_objective(ratio, group_advantages(rewards)[0], clip_range)
    other = clipped_objective(ratio[order], group_advantages(rewards[:, order])[0], clip_range)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@drawn(
    st.floats(-1e4, 1e4, width=32),
    st.integers(2, 40),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rewards_have_no_advantage(reward, group, dtype):
    rewards = torch.full((2, group), reward, dtype=dtype)
    assert torch.equal(group_advantages(rewards), torch.zeros(2, group, dtype=dtype))


@drawn(seeds, st.integers(2, 40), st.floats(0.5, 5.0))
def test_advantages_are_centred_and_bounded(seed, group, clamp):
    rewards = randn(seed, 3, group) ** 3
    free = group_advantages(rewards, clamp=1e9)
    held = group_advantages(rewards, clamp)
    assert free.mean(1).abs().max() < 1e-9
    assert free.abs().max() <= (group - 1) / group**0.5 + 1e-9
    assert torch.equal(held, free.clamp(-clamp, clamp))


@drawn(partitions, seeds)
def test_to_first_order_chunks_are_weights_on_steps(chunks, seed):
    assume(chunks.transitions > 1)
    advantage = randn(seed, 3)
    n = chunks.transitions
    gradients = []
    for partition in (chunks, Chunks.steps(n)):
        new = torch.zeros(3, n, dtype=torch.float64, requires_grad=True)
        clipped_objective(chunk_ratio(new, new.detach(), partition), advantage, 0.1).backward()
        gradients.append(new.grad)
    torch.testing.assert_close(
        gradients[0],
        gradients[1] * chunk_transition_weights(chunks, torch.float64),
        rtol=1e-12,
        atol=0,
    )


def test_wrong_shapes_are_rejected_with_what_must_hold_and_what_came():
    chunk_sample_ids = torch.tensor([0, 0, 1])
    for call in (
        lambda: chunk_sample_ratio(torch.ones(3), torch.ones(2), chunk_sample_ids),
        lambda: chunk_sample_ratio(torch.ones(3), torch.ones(3), chunk_sample_ids.float()),
        lambda: chunk_ratio(torch.ones(2, 3), torch.ones(2, 3), Chunks((2, 2))),
        lambda: clipped_objective(torch.ones(2, 3), torch.ones(3), 0.1),
        lambda: group_advantages(torch.tensor([[1.0, float("inf")]])),
    ):
        with pytest.raises(InputError, match=r"must .*; got "):
            call()
