"""Properties of schedule, sampler and dynamics that must hold for any setting; the lessons check chosen ones."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunk_grpo import InputError
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.dynamics import (
    DISTANCE_KINDS,
    chunk_probabilities,
    chunks_from_profile,
    count_trained_chunks,
    gaussian_profile,
    relative_distance,
    sample_without_replacement,
)
from chunk_grpo.theory.sampler import (
    MAX_ETA,
    SAMPLER_KINDS,
    Sampler,
)
from chunk_grpo.theory.schedule import (
    add_noise,
    gaussian_velocity,
    predict_endpoints,
    shift_sigmas,
    sigmas,
    velocity_target,
)
from chunk_grpo.theory.surrogates import step_weights_by_name

RANDOM_KINDS = ("flow", "dance", "cps")
quick = settings(max_examples=40, deadline=None, derandomize=True)
steps_ = st.integers(2, 60)
shift_ = st.floats(0.2, 12.0)
seed_ = st.integers(0, 2**31)
eta_ = st.floats(0.05, 1.0)
sizes_ = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def uniform(seed, *shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# schedule


@quick
@given(steps_, shift_, st.sampled_from([torch.float32, torch.float64]))
def test_sigmas_fall_from_one_to_zero(steps, shift, dtype):
    levels = sigmas(steps, shift, dtype)
    assert levels.shape == (steps + 1,) and levels.dtype == dtype
    assert levels[0] == 1 and levels[-1] == 0 and (levels.diff() < 0).all()


@quick
@given(shift_, shift_, steps_)
def test_shifts_multiply(first, second, steps):
    u = torch.linspace(0, 1, steps, dtype=torch.float64)
    torch.testing.assert_close(
        shift_sigmas(shift_sigmas(u, first), second), shift_sigmas(u, first * second)
    )


@quick
@given(seed_, st.floats(0, 1))
def test_a_line_is_known_from_one_point_and_its_velocity(seed, t):
    data = normal(seed, 3, 4)
    noise = normal(seed + 1, 3, 4)
    ends = predict_endpoints(add_noise(data, noise, t), velocity_target(data, noise), t)
    torch.testing.assert_close(ends, (data, noise))


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_bad_steps_are_refused(steps):
    with pytest.raises(InputError, match="`steps` of sigmas must be a whole number from 1; got"):
        sigmas(steps)


# sampler


@quick
@given(steps_, shift_, eta_, st.sampled_from(SAMPLER_KINDS), seed_)
def test_an_index_a_sample_is_the_loop(steps, shift, eta, kind, seed):
    levels = sigmas(steps, shift, torch.float64)
    index = torch.randint(0, steps, (5,), generator=torch.Generator().manual_seed(seed))
    x = normal(seed, 5, 2, 3)
    v = normal(seed + 1, 5, 2, 3)
    sampler = Sampler(levels, kind, eta)
    mean, std = sampler.mean_std(v, x, index)
    assert mean.shape == x.shape and std.shape == (5, 1, 1)
    for i, one in enumerate(index.tolist()):
        one_mean, one_std = sampler.mean_std(v[i : i + 1], x[i : i + 1], one)
        assert (
            one_std.ndim == 0
            and torch.equal(one_mean[0], mean[i])
            and torch.equal(one_std, std[i, 0, 0])
        )


@quick
@given(
    steps_,
    shift_,
    eta_,
    st.sampled_from(RANDOM_KINDS),
    seed_,
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_log_prob_is_the_mean_of_a_normal(steps, shift, eta, kind, seed, shape):
    levels = sigmas(steps, shift, torch.float64)
    x, v, noise = (normal(seed + k, 3, *shape) for k in range(3))
    sampler = Sampler(levels, kind, eta)
    mean, std = sampler.mean_std(v, x, seed % (steps - 1))
    after = sampler.step(v, x, seed % (steps - 1), noise)
    wide = torch.full_like(std, math.sqrt(0.5)) if kind == "cps" else std
    expected = torch.distributions.Normal(mean, wide).log_prob(after).flatten(1).mean(1)
    expected = expected + 0.5 * math.log(math.pi) * (kind == "cps")
    torch.testing.assert_close(sampler.log_prob(after, mean, std), expected)
    assert (sampler.log_prob(mean, mean, std) >= sampler.log_prob(after, mean, std)).all()


@quick
@given(
    st.sampled_from(SAMPLER_KINDS),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    eta_,
    seed_,
)
def test_low_precision_comes_out_as_float32(kind, dtype, eta, seed):
    x = normal(seed, 2, 3, dtype=dtype)
    v = normal(seed + 1, 2, 3, dtype=dtype)
    sampler = Sampler(sigmas(9), kind, eta)
    mean, std = sampler.mean_std(v, x, 2)
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean, sampler.mean_std(v.float(), x.float(), 2)[0], rtol=0, atol=0)
    assert sampler.step(v, x, 2, x).dtype == torch.float32
    assert sampler.mean_std(v.double(), x, 2)[0].dtype == torch.float64
    if kind != "ode":
        assert (
            sampler.log_prob(x, mean, std).dtype
            == sampler.kl(mean, mean, std).dtype
            == torch.float32
        )


@quick
@given(steps_, shift_, st.sampled_from(SAMPLER_KINDS))
def test_without_noise_every_sampler_is_the_ode(steps, shift, kind):
    levels = sigmas(steps, shift, torch.float64)
    index = torch.arange(steps)
    torch.testing.assert_close(
        Sampler(levels, kind, 0.0).coefficients(index), Sampler(levels, "ode").coefficients(index)
    )


@quick
@given(steps_, shift_, eta_, st.sampled_from(SAMPLER_KINDS))
def test_only_the_last_transition_of_a_random_sampler_is_deterministic(steps, shift, eta, kind):
    levels = sigmas(steps, shift, torch.float64)
    sampler = Sampler(levels, kind, eta)
    a, b, std = sampler.coefficients(torch.arange(steps))
    assert sampler.stochastic_steps.tolist() == ([] if kind == "ode" else list(range(steps - 1)))
    assert (a[-1], b[-1], std[-1]) == (1, -levels[-2], 0)
    assert (std[:-1] > 0).all() if kind != "ode" else (std == 0).all()
    if kind == "flow":
        torch.testing.assert_close(
            std[0], torch.tensor(eta, dtype=torch.float64)
        )  # whatever the schedule
    if kind != "ode":
        with pytest.raises(InputError, match="`sampler` must have noise"):
            sampler.log_prob(torch.zeros(1, 2), torch.zeros(1, 2), std[-1])


@quick
@given(steps_, shift_, eta_, st.sampled_from(RANDOM_KINDS), seed_)
def test_a_window_is_the_sampler_inside_and_the_ode_outside(steps, shift, eta, kind, seed):
    levels = sigmas(steps, shift, torch.float64)
    inside = torch.rand(steps, generator=torch.Generator().manual_seed(seed)) < 0.5
    inside[-1] = False
    window = Sampler(levels, kind, [eta if noisy else 0.0 for noisy in inside.tolist()])
    assert window.stochastic_steps.tolist() == inside.nonzero()[:, 0].tolist()
    full = Sampler(levels, kind, eta)
    ode = Sampler(levels, "ode")
    for i in range(steps):
        assert window.coefficients(i) == (full if inside[i] else ode).coefficients(i)


@pytest.mark.parametrize("kind", ["flow", "dance", "ode"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_many_steps_keep_the_variance_of_gaussian_data(kind, scale):
    """x_{i+1} = g x_i + std eps on Gaussian data, so the final variance follows exactly; it must be the data's."""
    levels = sigmas(4000, 3.0, torch.float64)
    a, b, std = Sampler(levels, kind, 0.5).coefficients(torch.arange(4000))
    gain = a + b * gaussian_velocity(torch.ones(4000, dtype=torch.float64), levels[:-1], 0.0, scale)
    variance = 1.0
    for g, s in zip(gain.tolist(), std.tolist(), strict=True):
        variance = g**2 * variance + s**2
    assert variance / scale**2 == pytest.approx(1, abs=0.005)


@quick
@given(seed_, st.floats(0.01, 2.0), st.sampled_from(RANDOM_KINDS))
def test_kl_is_symmetric_and_zero_only_for_equal_means(seed, std, kind):
    p, q, std = normal(seed, 3, 4), normal(seed + 1, 3, 4), torch.tensor(std)
    kl = Sampler(sigmas(17), kind, 0.3).kl
    torch.testing.assert_close(kl(p, q, std), kl(q, p, std))
    assert (kl(p, q, std) > 0).all() and (kl(p, p, std) == 0).all()


@pytest.mark.parametrize("kind", RANDOM_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replaying_a_stored_step_gives_ratio_one(kind, dtype):
    x = normal(1, 4, 64, dtype=dtype)
    v = normal(2, 4, 64, dtype=dtype)
    sampler = Sampler(sigmas(17), kind, 0.3)
    stored = sampler.step(v, x, 3, normal(3, 4, 64)).to(dtype)
    old, new = (sampler.log_prob(stored, *sampler.mean_std(v, x, 3)) for _ in range(2))
    assert torch.equal((new - old).exp(), torch.ones(4))


@pytest.mark.parametrize("kind", SAMPLER_KINDS)
@pytest.mark.parametrize(
    "index", [-1, 9, torch.tensor([0, 9]), torch.tensor([0.5]), torch.tensor([[1]])]
)
def test_transitions_outside_of_the_schedule_are_refused(kind, index):
    with pytest.raises(InputError, match="`index` must be"):
        Sampler(sigmas(9), kind, 0.3).coefficients(index)


@pytest.mark.parametrize("kind", RANDOM_KINDS)
@pytest.mark.parametrize("eta", [-0.1, 1.5, math.inf, math.nan])
def test_eta_out_of_range_is_refused(kind, eta):
    assert eta != 1.5 or MAX_ETA[kind] < 1.5
    with pytest.raises(InputError, match=f"with the sampler {kind}|must be a finite number"):
        Sampler(sigmas(9), kind, eta).coefficients(0)


def test_unknown_sampler_is_refused():
    with pytest.raises(InputError, match="must be one of flow, dance, cps, ode"):
        Sampler(sigmas(9), "euler", 0.3).coefficients(0)


# dynamics


@quick
@given(seed_, st.sampled_from(DISTANCE_KINDS), st.floats(0.01, 100))
def test_distance_does_not_see_the_scale(seed, kind, factor):
    latents = normal(seed, 2, 5, 3, 2)
    distance = relative_distance(latents, kind)
    assert distance.shape == (2, 4) and (distance >= 0).all() and not distance.requires_grad
    torch.testing.assert_close(relative_distance(factor * latents, kind), distance)


@quick
@given(seed_, sizes_)
def test_chunk_weights_sum_to_one(seed, sizes):
    chunks = Chunks(tuple(sizes))
    weights = chunk_probabilities(uniform(seed, 3, chunks.transitions) + 1e-3, chunks)
    assert weights.shape == (3, len(sizes)) and (weights > 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))


def test_a_chunk_weighs_by_its_mean_distance():
    weights = chunk_probabilities(torch.tensor([[0.6, 0.4, 0.1, 0.2, 0.3, 0.2]]), Chunks((2, 4)))
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.2]]) / 0.7)


def test_first_draws_follow_the_weights():
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    n = 40_000
    seen = (
        sample_without_replacement(weights.expand(n, 4), 1, uniform(0, n, 4))
        .flatten()
        .bincount(minlength=4)
        / n
    )
    assert ((seen - weights).abs() <= 4 * (weights * (1 - weights) / n).sqrt()).all()


@quick
@given(seed_, st.integers(1, 12), st.data())
def test_draws_never_repeat_and_never_take_what_has_no_weight(seed, K, data):
    weights = uniform(seed, 50, K) + 0.01
    if K > 1:
        weights[:, data.draw(st.integers(0, K - 1))] = 0
    count = data.draw(st.integers(1, max(1, K - 1)))
    drawn = sample_without_replacement(weights, count, uniform(seed + 1, 50, K))
    assert drawn.shape == (50, count) and drawn.dtype == torch.long
    assert (drawn.diff(dim=1) > 0).all() and 0 <= drawn.min() and drawn.max() < K
    assert (weights.gather(1, drawn) > 0).all()


@quick
@given(seed_, st.integers(2, 8))
def test_a_trajectory_draws_by_its_own_uniforms_only(seed, K):
    weights = uniform(seed, 6, K) + 0.01
    uniforms = uniform(seed + 1, 6, K)
    together = sample_without_replacement(weights, K // 2, uniforms)
    alone = torch.cat(
        [
            sample_without_replacement(weights[i : i + 1], K // 2, uniforms[i : i + 1])
            for i in range(6)
        ]
    )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_draws_survive_the_ends_of_the_uniforms(edge):
    drawn = sample_without_replacement(torch.tensor([[0.0, 0.5, 0.5]]), 2, torch.full((1, 3), edge))
    assert drawn.tolist() == [[1, 2]]


@quick
@given(seed_, st.integers(1, 20), st.integers(1, 8), st.floats(0.01, 100))
def test_chunks_from_a_profile_cover_it(seed, n, K, factor):
    profile = uniform(seed, n) + 0.05
    chunks = chunks_from_profile(profile, K)
    assert chunks.transitions == n and len(chunks) == min(K, n)
    if n % len(chunks) == 0:  # never worse than equal chunks
        y = profile.log()
        equal = sum(part.var(unbiased=False) * len(part) for part in y.split(n // len(chunks)))
        ours = sum(part.var(unbiased=False) * len(part) for part in y.split(list(chunks.sizes)))
        assert ours <= equal + 1e-9
    cost = [
        sum(part.var(unbiased=False) * len(part) for part in profile.log().split(list(c.sizes)))
        for c in (chunks, chunks_from_profile(factor * profile, K))
    ]
    assert abs(cost[0] - cost[1]) < 1e-9  # the scale does not matter


@quick
@given(st.integers(1, 40), st.floats(0.01, 1.0))
def test_at_least_one_chunk_is_drawn(K, fraction):
    assert 1 <= count_trained_chunks(K, fraction) <= K


def test_a_sampler_with_second_order_steps_has_no_closed_profile():
    sampler = Sampler(sigmas(9, 3.0, torch.float64), "flow", 0.0, solver="dpm2")
    with pytest.raises(InputError, match="`sampler` must have the solver euler"):
        gaussian_profile(sampler)


@pytest.mark.parametrize("kind", SAMPLER_KINDS)
def test_the_closed_profile_is_the_measured_one(kind):
    """A wide Gaussian trajectory has the profile of the closed form, to the one percent of its finite width."""
    levels = sigmas(9, 3.0, torch.float64)
    eta = 0.5
    x = [normal(0, 8, 20_000)]
    for i in range(9):
        v = gaussian_velocity(x[-1], levels[i], 0.0, 0.6)
        x.append(Sampler(levels, kind, eta).step(v, x[-1], i, normal(i + 1, 8, 20_000)))
    measured = relative_distance(torch.stack(x, 1)).mean(0)
    torch.testing.assert_close(
        measured, gaussian_profile(Sampler(levels, kind, eta), 0.6), rtol=0.01, atol=0
    )


def test_no_page_uses_the_noise_level_t_as_an_index_of_transitions():
    """The page on the proposition keeps the letters of the paper, and a sum over a set may run over noise levels."""
    book = Path(__file__).parent.parent / "nbs"
    pages = [page for page in book.rglob("*.ipynb") if page.stem != "04_proposition"]
    found = {}
    for page in pages:
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        found[page.name] = re.findall(r"x_\{t[+-]1\}|g_\w\^t\b|[wt]_t\b|t_\{?k\b", text)
    assert len(pages) > 50 and not {page: uses for page, uses in found.items() if uses}


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_flash_gives_all_transitions_gradients_of_one_size(kind):
    """What multiplies the gradient of a log-probability is |b| / std, or |b| std for the squared distance of cps."""
    sampler = Sampler(sigmas(12, 3.0), kind, 0.3)
    steps = sampler.stochastic_steps
    _, factor, std = sampler.coefficients(steps)
    weight = step_weights_by_name("flash", sampler, steps)[steps]
    size = weight * factor.abs() * (std if kind == "cps" else 1 / std)
    assert float(size.max() / size.min()) == pytest.approx(1, abs=1e-4)
