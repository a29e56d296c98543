"""What a gradient tells: its signal and noise, what each transition was worth, and how estimators of that differ.

The pages gradient-noise, credit-assignment and gradient-bias of nbs/findings derive each function and show it at work;
`research/ground_truth.py` and `research/gradient_signal.py` measure with these functions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chunk_grpo import InputError
from chunk_grpo.models.policy import compute_network_sigma
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import gaussian_velocity
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import ImageKey, make_generator


def jackknife_error(
    statistic: Callable[[Tensor], Tensor],  # positions of the units that are used -> any tensor
    count: int,  # units, such as prompts
) -> tuple[Tensor, Tensor]:  # value with all units, and its standard error
    """Standard error of any statistic, by leaving out one unit at a time."""
    every = torch.arange(count)
    left = torch.stack([statistic(every[every != i]) for i in range(count)])
    return statistic(every), ((count - 1) * left.var(0, correction=0)).sqrt()


def signal_to_noise(
    gram: Tensor,  # inner products of the gradients (a), (K, n, K, n)
    weights: Tensor,  # w_t of each transition, (n,)
    images: int,  # m, in a block
) -> dict[str, float]:  # snr of one image, its standard error se, and noise, the root of N
    """Signal-to-noise ratio (b) of a weighted gradient; `images` it takes to be half signal are 1 / snr."""
    w = weights.double()
    products = torch.einsum("isjt,s,t->ij", gram.double(), w, w)
    count = len(products)
    if count < 3:
        raise InputError(f"gram: got {count} blocks, allowed are at least 3, for an error.")

    def ratio(p):
        k = len(p)
        signal = (p.sum() - p.trace()) / (k * (k - 1))
        noise = p.trace() / k - signal
        return signal / noise / images, noise

    snr, noise = ratio(products)
    keep = [[j for j in range(count) if j != i] for i in range(count)]
    left = torch.stack([ratio(products[rows][:, rows])[0] for rows in keep])
    error = ((count - 1) * left.var(correction=0)).sqrt()
    return {"snr": float(snr), "se": float(error), "noise": float(noise) ** 0.5}


def block_gradient(
    what: ReplayContext,  # stored trajectories of the present weights
    advantage: Tensor,  # (B,)
    index: int,  # transition
    images: Tensor,  # the block's positions, (m,)
    limit: int = 96,  # transitions in one forward
) -> list[Tensor]:  # one for each trained parameter
    """The gradient (a) of one block and transition."""
    trained = what.policy.trained
    item = torch.arange(len(images))
    sampler = what.trajectories.sampler
    total = [torch.zeros_like(p) for p in trained]
    for part in item.split(limit):
        path = (
            what.trajectories.latents[images[part], index : index + 2]
            .float()
            .to(what.policy.device)
        )
        now, then = path.unbind(1)
        told = compute_network_sigma(what.policy, sampler.sigmas[index].expand(len(part)))
        v = what.policy.velocity(now, told, what.rows(images[part]))
        logp = sampler.log_prob(then, *sampler.mean_std(v, now, index))
        value = (logp * advantage[images[part]].to(logp)).sum() / len(images)
        found = torch.autograd.grad(value, trained, materialize_grads=True)
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total


LAYER_GROUPS = {
    "attention": ("attn",),
    "modulation": ("norm",),
    "mlp": ("ff", "mlp"),
    "embedding": ("embed",),
}


def layer_group(name: str) -> str:
    """attention, modulation, mlp, embedding or output of a FLUX, by a parameter's name."""
    found = next(
        (k for k, words in LAYER_GROUPS.items() if any(word in name for word in words)), "output"
    )
    return (
        "mlp" if found == "output" and "single_transformer_blocks" in name else found
    )  # a single block's last layer


def gradient_gram(
    what: ReplayContext,  # stored trajectories of the present weights; groups together
    advantage: Tensor,  # (B,)
    blocks: int = 8,  # K; divides B into whole groups
    group: Callable[[str], str] | None = None,  # of a parameter, by its name; None: FLUX's layers
) -> dict[str, Tensor]:  # group -> (K, n, K, n) float64 inner products of the gradients (a)
    """Inner products of the gradients of all blocks and transitions; holds K n gradients in memory."""
    trajectories, policy = what.trajectories, what.policy
    places = torch.arange(len(trajectories.keys)).chunk(blocks)
    if len({len(part) for part in places}) > 1 or len(places) < blocks:
        raise InputError(
            f"blocks: got {blocks} for {len(trajectories.keys)} images, allowed is a divisor."
        )
    group = group or layer_group
    names = [group(name) for name, p in policy.transformer.named_parameters() if p.requires_grad]
    held: dict[str, list[Tensor]] = {name: [] for name in names}
    transitions = trajectories.latents.shape[1] - 2  # the last is not trained
    for part in places:
        for found in (block_gradient(what, advantage, index, part) for index in range(transitions)):
            for name in held:
                mine = [g.flatten().cpu() for g, n in zip(found, names, strict=True) if n == name]
                held[name].append(torch.cat(mine))
    out = {}
    for name, gradients in held.items():
        stack = torch.stack(gradients)
        out[name] = (stack @ stack.T).double().reshape(blocks, transitions, blocks, transitions)
    return out


@dataclass
class GaussianWorld:
    """A policy with the names that a rollout and an update ask for, and a reward of its latents."""

    mean: Tensor  # of the data, (C,)
    scale: Tensor  # standard deviation of the data, (C,)
    target: Tensor  # y of the reward, (C,)
    trained: list[Tensor]  # [theta_1 (C,), theta_2 (C,)], leaves with gradient
    tokens: int = 4  # S
    device: torch.device = torch.device("cpu")
    truncate_timesteps: bool = False

    def noise(self, generator: torch.Generator) -> Tensor:  # (S, C)
        """The latents of one image at sigma 1."""
        return torch.randn(self.tokens, len(self.mean), generator=generator)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: dict) -> Tensor:
        """The affine velocity of every sample, in the latents' dtype."""
        mean, scale, by, plus = (
            x.to(latents.dtype) for x in (self.mean, self.scale, *self.trained)
        )
        return (1 + by) * gaussian_velocity(latents, sigma, mean, scale) + plus

    def reward(self, latents: Tensor, images: Tensor | None = None) -> Tensor:
        """Minus the mean squared distance of the last latents (..., S, C) to the target."""
        return -(latents.double() - self.target).square().mean((-2, -1))


def gaussian_value(
    world: GaussianWorld,
    latents: Tensor,  # (..., S, C)
    index: int,  # transition that they stand before
    sampler: Sampler,
    spread: float = 0.0,  # variance of the latents around the given ones
) -> Tensor:  # (...,) float64
    """The exact value (c) of latents before a transition; gradient of the random steps."""
    at, spread = latents.double(), torch.full_like(world.mean, spread, dtype=torch.float64)
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64) * torch.ones_like(spread)
    exact = replace(sampler, sigmas=sampler.sigmas.double())
    for i in range(index, len(exact)):
        a, b, std = exact.coefficients(i)
        with torch.set_grad_enabled(i < len(exact) - 1 and torch.is_grad_enabled()):
            offset, there = world.velocity(ends, exact.sigmas[i].expand(2), {})
        gain = a + b * (there - offset)
        at, spread = gain * at + b * offset, gain**2 * spread + std**2
    return -((at - world.target).square() + spread).mean((-2, -1))


def branch_noise(
    keys: Sequence[ImageKey],  # of each image
    index: int,  # transition at which the branch leaves the trajectory
    branch: list[int],  # number of each image's branch
    shape: tuple[int, ...],  # (T - index, S, C), of one image
) -> Tensor:  # (B, T - index, S, C) float32 on the CPU
    """The noise of a branch's transitions, another one for each index and branch."""
    streams = [f"branch/{index}/{number}" for number in branch]
    drawn = [
        torch.randn(shape, generator=make_generator(*k, stream=s))
        for k, s in zip(keys, streams, strict=True)
    ]
    return torch.stack(drawn)


@torch.no_grad()
def continue_from(
    policy,  # with `velocity`
    rows: dict[str, Tensor],  # conditioning, a row an image
    latents: Tensor,  # x_index, (B, S, C), in the storage dtype
    index: int,  # first transition to take
    noise: Tensor,  # (B, T - index, S, C)
    sampler: Sampler,
) -> Tensor:  # (B, S, C) at sigma 0, in the storage dtype
    """The SDE of `rollout.sample_sde` from a transition on."""
    store = latents.dtype
    for i in range(index, len(sampler)):
        now = latents.float()
        velocity = policy.velocity(now, sampler.sigmas[i].expand(len(now)), rows)
        mean, std = sampler.mean_std(velocity, now, i)
        latents = (mean + std * noise[:, i - index].to(mean.device)).to(store)
    return latents


def branch_rewards(
    what: ReplayContext,  # stored trajectories of B images
    # latents (M, S, C) at sigma 0 and their images (M,) -> rewards (M,)
    outcome: Callable[[Tensor, Tensor], Tensor],
    branches: int = 4,  # N, from every latent
    batch: int = 48,  # images in one forward
) -> Tensor:  # (B, T + 1, N) float64, of the branches that leave at each latent
    """Rewards of N continuations from every latent; costs N T (T + 3) / 2 - N forwards an image."""
    paths = what.trajectories
    count = len(paths.keys)
    steps = paths.latents.shape[1] - 1
    ends = torch.cat(
        [outcome(paths.latents[part, -1], part) for part in torch.arange(count).split(batch)]
    )
    out = ends.double()[:, None, None].repeat(1, steps + 1, branches)
    image = torch.arange(count).repeat_interleave(branches)
    branch = torch.arange(branches).repeat(count)
    for index in range(steps - 1):
        for part in torch.arange(len(image)).split(batch):
            own, number = image[part], branch[part]
            shape = (steps - index, *paths.latents.shape[2:])
            noise = branch_noise(
                [paths.keys[b] for b in own.tolist()], index, number.tolist(), shape
            )
            rows = {k: v[paths.prompt_index[own]] for k, v in what.conditioning.items()}
            start = paths.latents[own, index].to(what.policy.device)
            last = continue_from(what.policy, rows, start, index, noise, paths.sampler)
            out[own, index, number] = outcome(last, own).double()
    return out


def branch_values(
    rewards: Tensor,  # (B, T + 1, N)
) -> tuple[Tensor, Tensor]:  # value and its standard error (d), both (B, T + 1)
    """Mean and standard error over branches. InputError on fewer than 2 branches."""
    if rewards.shape[-1] < 2:
        raise InputError(
            f"branches: got {rewards.shape[-1]}, allowed are at least 2, for an error."
        )
    return rewards.mean(-1), rewards.std(-1) / math.sqrt(rewards.shape[-1])


def step_advantages(
    rewards: Tensor,  # (B, T + 1, N)
    # advantage and its standard error (d) of the trained transitions, both (B, T - 1)
) -> tuple[Tensor, Tensor]:
    """The advantage of every transition but the last, which has no noise."""
    value, error = branch_values(rewards)
    square = error.square()
    return value.diff()[:, :-1], (square[:, 1:] + square[:, :-1]).sqrt()[:, :-1]


def wrong_sign_shares(
    # of the trajectories, less the group's mean, in units of its deviation, (P, G)
    advantage: Tensor,
    step: Tensor,  # estimated advantage of each transition, in the same units, (P, G, n)
    error: Tensor,  # its standard error, (P, G, n)
    parts: Chunks,  # transitions whose moments are averaged, K parts of n
    certain: float = 2.0,  # standard errors from which a sign counts as certain
) -> (
    Tensor
):  # (6, K): raw, certain, corrected, by_share, share of one transition, how many are certain
    """Shares of wrong signs by (e) and (f), and the share of the variance decided at a transition."""

    def mean(x: Tensor) -> Tensor:
        return torch.stack([x[..., part].mean() for part in parts.slices])

    wrong = (advantage[..., None] * step < 0).double()
    sure = (step.abs() > certain * error).double()
    square = advantage.square().mean()
    group = advantage.shape[1]
    share = mean(advantage[..., None] * step) / square  # the mean of A in a group is 0
    signal = mean((step - step.mean((0, 1))).square()) - mean(error.square())
    rho = share * (square / signal).sqrt()  # (e); nan where the noise leaves no variance
    by_share = ((group - 1) / group * share.clamp(0, 1)).sqrt()  # (f)
    angles = [x.clamp(-1, 1).arccos() / math.pi for x in (rho, by_share)]
    return torch.stack([mean(wrong), mean(wrong * sure) / mean(sure), *angles, share, mean(sure)])


def wrong_sign_estimates(
    rewards: Tensor,  # of the trajectories, (P, G)
    branches: Tensor,  # rewards of the branches, (P G, T + 1, N)
    parts: Chunks | None = None,  # transitions whose moments are averaged; None: each alone
    # raw, certain, corrected, by_share, share, found: (K,) each, and each with _se
) -> dict[str, Tensor]:
    """How often the trajectory's advantage has the wrong sign at each transition; errors over prompts."""
    count, group = rewards.shape
    spread = branches[:, 0].reshape(count, -1).std(1)
    step, error = (
        x.reshape(count, group, -1) / spread[:, None, None] for x in step_advantages(branches)
    )
    adv = (rewards - rewards.mean(1, keepdim=True)).double() / spread[:, None]
    cut = parts or Chunks.steps(step.shape[2])
    value, se = jackknife_error(lambda p: wrong_sign_shares(adv[p], step[p], error[p], cut), count)
    names = ("raw", "certain", "corrected", "by_share", "share", "found")
    return dict(zip(names, value, strict=True)) | {
        f"{n}_se": x for n, x in zip(names, se, strict=True)
    }


def state_sign_shares(
    # of the trajectories, less the group's mean, in units of its deviation, (P, G)
    advantage: Tensor,
    # estimated value of each state less the group's mean, in the same units, (P, G, n)
    value: Tensor,
) -> Tensor:  # (3, n): raw, by_share, decided
    """Shares of states whose value and final reward lie on different sides of the group's mean, raw and by (i)."""
    raw = (advantage[..., None] * value < 0).double().mean((0, 1))
    decided = (advantage[..., None] * value).mean((0, 1)) / advantage.square().mean()
    return torch.stack([raw, decided.clamp(0, 1).sqrt().arccos() / math.pi, decided])


def state_sign_estimates(
    rewards: Tensor,  # of the trajectories, (P, G)
    branches: Tensor,  # rewards of the branches, (P G, T + 1, N)
    # raw, by_share, decided: (T - 1,) by transition; mean_ of the first two: (); each with _se
) -> dict[str, Tensor]:
    """How often the state that a transition leads to is wrongly attributed, as version 3 counts; errors over prompts."""
    count, group = rewards.shape
    spread = branches[:, 0].reshape(count, -1).std(1)
    value = branch_values(branches)[0][:, 1:-1].reshape(count, group, -1)
    value = (value - value.mean(1, keepdim=True)) / spread[:, None, None]
    adv = (rewards - rewards.mean(1, keepdim=True)).double() / spread[:, None]
    shares, shares_se = jackknife_error(lambda p: state_sign_shares(adv[p], value[p]), count)
    means, means_se = jackknife_error(
        lambda p: state_sign_shares(adv[p], value[p])[:2].mean(1), count
    )
    out = dict(
        zip(
            ("raw", "by_share", "decided", "mean_raw", "mean_by_share"),
            [*shares, *means],
            strict=True,
        )
    )
    return out | {f"{name}_se": x for name, x in zip(out, [*shares_se, *means_se], strict=True)}


def attribution_distance(
    wrong: Tensor,  # wrong signs of each trajectory, or their chances, (B, n)
    # (B,) each: k, step (36), chunk (37), zero, scaled and cosine (h), nearer (40)
) -> dict[str, Tensor]:
    """Proposition 1's distances to the true coefficients, and those that do not depend on length."""
    n = wrong.shape[1]
    k = wrong.double().sum(1)
    step = 4 * k
    chunk = ((n - 1) ** 2 + 4 * k) / n
    return {
        "k": k,
        "step": step,
        "chunk": chunk,
        "zero": torch.full_like(k, n),
        "scaled": n - (n - 2 * k) ** 2 / n,
        "cosine": 1 - 2 * k / n,
        "nearer": k > (n - 1) / 4,
    }


def coefficient_gradients(
    what: ReplayContext,  # stored trajectories of the present weights
    coefficients: Tensor,  # R sets of one coefficient an image and transition, (R, B, n)
    images: Tensor,  # the block's positions, (m,)
) -> Tensor:  # (R, n, D) float32 on the CPU; D numbers in all trained parameters
    """Mean over a block's images of coefficient times gradient, for each set and transition."""

    def flat(row: Tensor, i: int) -> Tensor:
        return torch.cat([g.flatten() for g in block_gradient(what, row[:, i], i, images)]).cpu()

    return torch.stack(
        [torch.stack([flat(row, i) for i in range(row.shape[1])]) for row in coefficients]
    )


def coefficient_sets(
    advantage: Tensor,  # A of the trajectories, (B,)
    step: Tensor,  # measured advantages of the transitions, (B, n)
    error: Tensor,  # standard errors of the values at both ends, (B, n + 1)
    generator: torch.Generator,  # of the random signs
) -> Tensor:  # (4, B, n) float64: trajectory's, transition's, signed, branches' noise
    """The coefficients of which gradients are taken."""

    def signs(*shape: int) -> Tensor:
        return 2.0 * torch.randint(2, shape, generator=generator) - 1

    each = advantage.double()[:, None].expand_as(step)
    noise = (signs(*error.shape) * error).diff(dim=1)
    return torch.stack([each, step.double(), signs(len(step), 1) * each, noise.double()])


def inner_products(
    blocks: Tensor,  # gradients, (K, R, n, D)
) -> Tensor:  # (K, R, n, K, R, n) float64
    """Inner products of all gradients of all blocks."""
    flat = blocks.flatten(0, 2)
    return (flat @ flat.T).double().reshape(*blocks.shape[:3], *blocks.shape[:3])


def cross_block_mean(
    products: Tensor,  # inner products of blocks, (K, K)
) -> Tensor:  # ()
    """Mean over pairs of different blocks."""
    count = len(products)
    return (products.sum() - products.trace()) / (count * (count - 1))


def weighted_inner_products(
    gram: Tensor,  # inner products of blocks, (K, R, n, K, R, n); set 1 is the truth
    weights: Tensor,  # w of the estimator, (n,)
    truth: Tensor,  # of the truth (a): ones, (n,), or 0 on transitions that are left out
    row: int = 0,  # the estimator's set
    # set whose expectation, times the number, is the estimator's; None: its own
    mean: tuple[int, float] | None = None,
) -> (
    Tensor
):  # (4, K, K): of the estimator, of its expectation, of that with the truth, of the truth
    """Inner products of the blocks' weighted gradients."""
    w = weights.double()
    t = truth.double()
    own, c = mean or (row, 1.0)
    pairs = ((row, w, row, w), (own, c * w, own, c * w), (own, c * w, 1, t), (1, t, 1, t))
    return torch.stack(
        [torch.einsum("isjt,s,t->ij", gram[:, a, :, :, b], u, v) for a, u, b, v in pairs]
    )


def alignment_statistics(
    tables: Tensor,  # from `weighted_inner_products`, (4, K, K)
    images: int,  # m, in a block
    # variance of one image's part that is not in the blocks, such as that of drawing
    extra: float = 0.0,
    many: int = 100,  # M
) -> Tensor:  # (5,): cosine, cosine_many, variance, along (length in units of the truth's), half
    """Direction and variance (d) of a weighted gradient against the truth; nan where a square is negative."""
    square, ee, eg, gg = (cross_block_mean(x) for x in tables)
    noise = images * (tables[0].diagonal().mean() - square) + extra
    cosines = [eg / ((ee + part) * gg).sqrt() for part in (0.0, noise / many)]
    return torch.stack([*cosines, noise, eg / gg, noise * gg / eg.square()])


def alignment_with_errors(
    tables: Tensor,  # from `weighted_inner_products`, (4, K, K)
    images: int,  # m, in a block
    extra: float = 0.0,  # variance of one image's part that is not in the blocks
    many: int = 100,  # M
) -> dict[str, float]:  # cosine, cosine_many, variance, along, half; each with _se
    """The `alignment_statistics` by name, with the jackknife's errors over blocks. InputError on fewer than 3 blocks."""
    count = tables.shape[1]
    if count < 3:
        raise InputError(f"gram: got {count} blocks, allowed are at least 3, for an error.")
    found = jackknife_error(
        lambda p: alignment_statistics(tables[:, p][:, :, p], images, extra, many), count
    )
    names = ("cosine", "cosine_many", "variance", "along", "half")
    value, error = (x.tolist() for x in found)
    return dict(zip(names, value, strict=True)) | {
        f"{n}_se": e for n, e in zip(names, error, strict=True)
    }


def chunk_sampling_variance(
    second: Tensor,  # mean over images of the inner products of one image's own gradients, (n, n)
    chunks: Chunks,  # K chunks of n transitions
    count: int,  # k, chunks drawn, 1 ... K
) -> float:
    """What drawing k of K chunks adds (e) to the variance of an image's part of a gradient of weights n / (K cs)."""
    total = len(chunks)
    if not 1 <= count <= total:
        raise InputError(f"count: got {count}, allowed is 1 to {total} chunks.")
    if count == total:
        return 0.0
    mean = torch.zeros(total, chunks.transitions, dtype=torch.float64)
    for c, part in enumerate(chunks.slices):
        mean[c, part] = chunks.transitions / chunks.sizes[c]
    products = mean @ second.double() @ mean.T
    spread = (products.trace() - products.mean() * total) / (total - 1)
    return float(spread / count * (1 - count / total))
