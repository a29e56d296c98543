"""Properties that every chunker must have for any profile, and the profile's parts; the lessons check chosen ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ruptures import Dynp

from chunk_grpo import InputError
from chunk_grpo.measurements.profiles import profile_departure, variance_shares
from chunk_grpo.theory.chunk_search import (
    adaptive_chunks,
    centered_log_profile,
    optimal_chunks,
    paper_rule_chunks,
)
from chunk_grpo.theory.chunks import chunks_from_setting
from chunk_grpo.theory.dynamics import chunks_from_profile

quick = settings(max_examples=60, deadline=None, derandomize=True)
value_ = st.floats(1e-4, 10.0)
drawn_ = st.lists(value_, min_size=1, max_size=60)
level_ = st.builds(lambda value, n: [value] * n, value_, st.integers(1, 60))  # ties everywhere
slope_ = st.builds(
    lambda ratio, n: [0.5 * ratio**i for i in range(n)], st.floats(0.8, 1.25), st.integers(1, 60)
)
profile_ = st.one_of(drawn_, level_, slope_).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
CHUNKERS = {
    "fixed steps": lambda p: chunks_from_setting("steps", len(p)),
    "fixed list": lambda p: chunks_from_setting(",".join("1" * len(p)), len(p)),
    "paper's rule": paper_rule_chunks,
    "paper's rule, tilted": lambda p: paper_rule_chunks(
        p, p * torch.linspace(1, 1.3, len(p), dtype=torch.float64), 3, 0.2
    ),
    "optimal, 4": lambda p: optimal_chunks(p, 4),
    "optimal, penalty": lambda p: optimal_chunks(p, penalty=0.02),
    "adaptive, 1": lambda p: adaptive_chunks(p[None], 1)[0],
    "adaptive, 2": lambda p: adaptive_chunks(p[None])[0],
    "adaptive, 4": lambda p: adaptive_chunks(p[None], 4)[0],
}


@pytest.mark.parametrize("name", CHUNKERS)
@quick
@given(profile=profile_, factor=st.floats(1e-3, 1e3))
def test_chunks_cover_any_profile_whatever_its_scale(name, profile, factor):
    before = profile.clone()
    chunks = CHUNKERS[name](profile)
    assert chunks.transitions == len(profile) and min(chunks.sizes) >= 1
    assert CHUNKERS[name](profile) == chunks and torch.equal(profile, before)
    assert CHUNKERS[name](factor * profile) == chunks


@quick
@given(profile_, st.integers(1, 5))
def test_the_papers_rule_makes_no_more_chunks_than_asked(profile, middle):
    assert len(paper_rule_chunks(profile, middle=middle)) <= middle + 2


@quick
@given(profile_, st.integers(1, 12))
def test_a_given_number_of_chunks_is_made(profile, count):
    assert len(optimal_chunks(profile, count)) == min(count, len(profile))


@quick
@given(st.lists(value_, min_size=1, max_size=14), st.floats(1e-3, 0.5))
def test_no_cut_is_cheaper_than_the_penalised_one(values, penalty):
    y = centered_log_profile(torch.tensor(values))
    total = float((y - y.mean()).square().sum())

    def cost(sizes):
        spread = sum(float((part - part.mean()).square().sum()) for part in y.split(list(sizes)))
        return spread + penalty * total * len(sizes)

    best = []
    for count in range(1, len(y) + 1):
        ends = [0, *Dynp(model="l2", min_size=1, jump=1).fit(y.numpy()).predict(count - 1)]
        best.append(cost([b - a for a, b in zip(ends, ends[1:], strict=False)]))
    assert cost(optimal_chunks(torch.tensor(values), penalty=penalty).sizes) <= min(best) + 1e-9


@quick
@given(profile_, st.floats(0.001, 0.4))
def test_a_higher_penalty_makes_no_more_chunks(profile, penalty):
    assert len(optimal_chunks(profile, penalty=2 * penalty)) <= len(
        optimal_chunks(profile, penalty=penalty)
    )


@quick
@given(profile_, st.integers(1, 9))
def test_adaptive_sizes_lie_between_the_smallest_and_its_double(profile, size):
    sizes = adaptive_chunks(profile[None], size)[0].sizes
    assert max(sizes) <= 2 * size - 1 if len(profile) >= size else sizes == (len(profile),)
    assert min(sizes) >= min(size, len(profile))


@quick
@given(st.integers(0, 2**31), st.integers(1, 30))
def test_a_trajectory_is_cut_by_its_own_distances_only(seed, n):
    distance = torch.rand(5, n, generator=torch.Generator().manual_seed(seed)) + 0.01
    assert adaptive_chunks(distance) == [adaptive_chunks(row[None])[0] for row in distance]


def own_sizes(values, count):
    """Best cut by dynamic programming in plain Python, the oracle of the library's."""

    def cost(run):
        return sum((value - sum(run) / len(run)) ** 2 for value in run)

    best = {(0, 0): (0.0, [])}  # (runs, end) -> (cost, sizes)
    for runs in range(1, count + 1):
        for end in range(runs, len(values) - (count - runs) + 1):
            best[runs, end] = min(
                (
                    best[runs - 1, begin][0] + cost(values[begin:end]),
                    best[runs - 1, begin][1] + [end - begin],
                )
                for begin in range(runs - 1, end)
                if (runs - 1, begin) in best
            )
    return best[count, len(values)][1]


@quick
@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 8))
def test_the_librarys_cut_is_the_best(seed, n, count):
    profile = (
        torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.05
    )
    expected = own_sizes(profile.log().tolist(), min(count, n))
    assert (
        list(chunks_from_profile(profile, count).sizes)
        == list(optimal_chunks(profile, count).sizes)
        == expected
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (paper_rule_chunks, "`base_profile` must hold"),
        (lambda bad: paper_rule_chunks(torch.ones(2), bad), "`trained_profile` must hold"),
        (lambda bad: optimal_chunks(bad, 2), "`profile` must hold"),
        (lambda bad: adaptive_chunks(bad[None]), "`distance` must hold"),
    ],
)
@pytest.mark.parametrize("bad", [[0.1, 0.0], [0.1, -1.0], [0.1, math.nan], [math.inf, 0.1], []])
def test_bad_profiles_are_refused(make, words, bad):
    with pytest.raises(InputError, match=words) as caught:
        make(torch.tensor(bad))
    assert "must hold finite values above 0" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: chunks_from_setting("2,3", len(p)), "`chunks` must add up to the 6 transitions"),
        (lambda p: chunks_from_setting("2,x", len(p)), "`chunks` must be sizes"),
        (lambda p: chunks_from_setting("profile", len(p)), "`chunks` can be profile only"),
        (
            lambda p: paper_rule_chunks(p, p[:5]),
            "`trained_profile` must have 6 values, as `base_profile` has; got 5",
        ),
        (
            lambda p: paper_rule_chunks(p, middle=0),
            "`middle` must be a whole number of chunks from 1; got 0",
        ),
        (
            lambda p: paper_rule_chunks(p, departure_share=0.0),
            "`departure_share` must be above 0 and at most 1; got 0.0",
        ),
        (
            lambda p: optimal_chunks(p),
            "`chunk_count` or `penalty` must be given, and not both; got None and None",
        ),
        (
            lambda p: optimal_chunks(p, 2, 0.1),
            "`chunk_count` or `penalty` must be given, and not both; got 2 and 0.1",
        ),
        (lambda p: optimal_chunks(p, 0), "must be a whole number from 1 or None; got 0"),
        (lambda p: optimal_chunks(p, penalty=0.0), "`penalty` must be a number above 0; got 0.0"),
        (
            lambda p: optimal_chunks(p, penalty=math.nan),
            "`penalty` must be a number above 0; got nan",
        ),
        (lambda p: adaptive_chunks(p), r"`distance` must have shape \(B, n\); got \(6,\)"),
        (
            lambda p: adaptive_chunks(p[None], 0),
            "`min_size` must be a whole number from 1; got 0",
        ),
        (
            lambda p: adaptive_chunks(p[None], 1.5),
            "`min_size` must be a whole number from 1; got 1.5",
        ),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make(torch.tensor([0.7, 0.8, 0.5, 0.4, 0.3, 0.3]))


# what in a profile is the step's, the prompt's and the seed's


@quick
@given(
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(2, 9),
    st.floats(0.01, 100),
)
def test_shares_add_up_and_do_not_see_the_scale(seed, P, G, n, factor):
    distance = (
        torch.rand(P, G, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        + 0.1
    )
    shares = variance_shares(distance)
    assert shares["step"] + shares["prompt"] + shares["seed"] == pytest.approx(1)
    assert variance_shares(factor * distance) == pytest.approx(shares, nan_ok=True)
    assert variance_shares(distance.flip(0).flip(1)) == pytest.approx(shares, nan_ok=True)
    assert math.isnan(shares["prompt_only"]) == (G == 1)


def test_each_share_is_all_where_nothing_else_differs():
    step, prompt, seed = (
        torch.ones(3, 2, 4) + torch.arange(size).reshape(place)
        for size, place in ((4, (1, 1, 4)), (3, (3, 1, 1)), (2, (1, 2, 1)))
    )
    assert [
        variance_shares(x)[name] for x, name in ((step, "step"), (prompt, "prompt"), (seed, "seed"))
    ] == [1, 1, 1]
    with pytest.raises(
        InputError, match="`distance` must have values that differ; got 1.0 everywhere"
    ):
        variance_shares(torch.ones(3, 2, 4))


@quick
@given(st.integers(0, 2**31), st.floats(0.2, 5.0))
def test_a_common_factor_is_its_logarithm_everywhere(seed, factor):
    base = (
        torch.rand(4, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        + 0.1
    )
    mean, error = profile_departure(base, factor * base)
    torch.testing.assert_close(mean, torch.full((6,), math.log(factor), dtype=torch.float64))
    assert float(error.max()) < 1e-12
