"""Signal and noise of gradients, the true advantage of each transition, and how estimators of the gradient differ.

The pages gradient-noise, credit-assignment and gradient-bias of nbs/findings derive each function and show examples;
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
    statistic: Callable[[Tensor], Tensor],  # maps the indices of units to any tensor
    count: int,  # number of units, such as prompts
) -> tuple[Tensor, Tensor]:  # value for all units, and its standard error
    """Compute a statistic and its jackknife standard error, leaving out one unit at a time."""
    units = torch.arange(count)
    leave_one_out = torch.stack([statistic(units[units != i]) for i in range(count)])
    return statistic(units), ((count - 1) * leave_one_out.var(0, correction=0)).sqrt()


def signal_to_noise(
    gram: Tensor,  # inner products of the gradients (a), (K, n, K, n)
    weights: Tensor,  # w_i of each transition, (n,)
    images: int,  # m, number of images in a block
) -> dict[str, float]:  # keyed by snr, se (the standard error of snr) and noise (the root of N)
    """Compute the signal-to-noise ratio (b) of a weighted gradient for one image.

    A gradient from 1 / snr images has equal signal and noise. Raises InputError for fewer than three blocks.
    """
    w = weights.double()
    products = torch.einsum("isjt,s,t->ij", gram.double(), w, w)
    count = len(products)
    if count < 3:
        raise InputError(f"`gram` must have at least 3 blocks for a standard error; got {count}")

    def ratio(p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ratio for one image and the noise, from inner products of blocks."""
        k = len(p)
        signal = (p.sum() - p.trace()) / (k * (k - 1))
        noise = p.trace() / k - signal
        return signal / noise / images, noise

    snr, noise = ratio(products)
    leave_one_out = []
    for i in range(count):
        rows = [j for j in range(count) if j != i]
        leave_one_out.append(ratio(products[rows][:, rows])[0])
    error = ((count - 1) * torch.stack(leave_one_out).var(correction=0)).sqrt()
    return {"snr": float(snr), "se": float(error), "noise": float(noise) ** 0.5}


def block_gradient(
    context: ReplayContext,  # trajectories sampled with the current weights
    advantage: Tensor,  # (B,)
    index: int,  # index of the transition
    images: Tensor,  # indices of the block's images, (m,)
    limit: int = 96,  # largest number of transitions in one forward pass
) -> list[Tensor]:  # one per trained parameter
    """Compute the gradient (a) of one block: the mean over its images of advantage times gradient of one log-probability."""
    trained = context.policy.trained
    positions = torch.arange(len(images))
    sampler = context.trajectories.sampler
    total = [torch.zeros_like(p) for p in trained]
    for part in positions.split(limit):
        path = (
            context.trajectories.latents[images[part], index : index + 2]
            .float()
            .to(context.policy.device)
        )
        current, following = path.unbind(1)
        network_sigma = compute_network_sigma(
            context.policy, sampler.sigmas[index].expand(len(part))
        )
        v = context.policy.velocity(
            current, network_sigma, context.image_conditioning(images[part])
        )
        log_prob = sampler.log_prob(following, *sampler.mean_std(v, current, index))
        value = (log_prob * advantage[images[part]].to(log_prob)).sum() / len(images)
        gradients = torch.autograd.grad(value, trained, materialize_grads=True)
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    return total


LAYER_GROUPS = {
    "attention": ("attn",),
    "modulation": ("norm",),
    "mlp": ("ff", "mlp"),
    "embedding": ("embed",),
}


def layer_group(name: str) -> str:
    """Return the layer group of a FLUX parameter by its name: attention, modulation, mlp, embedding or output."""
    for group, parts in LAYER_GROUPS.items():
        if any(part in name for part in parts):
            return group
    # The last layer of a single block has no group of its own.
    return "mlp" if "single_transformer_blocks" in name else "output"


def gradient_gram(
    context: ReplayContext,  # trajectories sampled with the current weights; images of a group are adjacent
    advantage: Tensor,  # (B,)
    blocks: int = 8,  # K, number of blocks; must divide B into whole groups
    # maps a parameter's name to its layer group; None: the groups of FLUX, `layer_group`
    group: Callable[[str], str] | None = None,
) -> dict[str, Tensor]:  # layer group -> (K, n, K, n), float64
    """Compute the inner products of the gradients (a) of all blocks and transitions, by layer group.

    Holds K n gradients in memory. Raises InputError if the blocks do not divide the images.
    """
    trajectories = context.trajectories
    policy = context.policy
    image_blocks = torch.arange(len(trajectories.keys)).chunk(blocks)
    if len({len(images) for images in image_blocks}) > 1 or len(image_blocks) < blocks:
        raise InputError(f"`blocks` must divide the {len(trajectories.keys)} images; got {blocks}")
    group = group or layer_group
    names = [group(name) for name, p in policy.transformer.named_parameters() if p.requires_grad]
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    transitions = trajectories.latents.shape[1] - 2  # the last is not trained
    for images in image_blocks:
        for index in range(transitions):
            block = block_gradient(context, advantage, index, images)
            for name in gradients:
                in_group = [
                    g.flatten().cpu() for g, n in zip(block, names, strict=True) if n == name
                ]
                gradients[name].append(torch.cat(in_group))
    gram = {}
    for name, vectors in gradients.items():
        stack = torch.stack(vectors)
        gram[name] = (stack @ stack.T).double().reshape(blocks, transitions, blocks, transitions)
    return gram


@dataclass
class GaussianWorld:
    """A policy with an exact affine velocity, which can be sampled and trained like a model, and a reward of its latents."""

    mean: Tensor  # mean m of the data, (C,)
    scale: Tensor  # standard deviation s of the data, (C,)
    target: Tensor  # target y of the reward, (C,)
    trained: list[Tensor]  # theta_1 (C,) and theta_2 (C,), which require gradients
    tokens: int = 4  # S, number of tokens of an image
    device: torch.device = torch.device("cpu")
    truncate_timesteps: bool = False

    def noise(self, generator: torch.Generator) -> Tensor:  # (S, C)
        """Sample the latents of one image at sigma 1."""
        return torch.randn(self.tokens, len(self.mean), generator=generator)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: dict) -> Tensor:
        """Return the affine velocity of latents (B, S, C), in their dtype; `rows` is ignored."""
        mean, scale, theta_1, theta_2 = (
            x.to(latents.dtype) for x in (self.mean, self.scale, *self.trained)
        )
        return (1 + theta_1) * gaussian_velocity(latents, sigma, mean, scale) + theta_2

    def reward(self, latents: Tensor, images: Tensor | None = None) -> Tensor:
        """Return minus the mean squared distance of final latents (..., S, C) to the target; `images` is ignored."""
        return -(latents.double() - self.target).square().mean((-2, -1))


def gaussian_value(
    world: GaussianWorld,
    latents: Tensor,  # (..., S, C)
    index: int,  # index of the transition that starts at these latents
    sampler: Sampler,
    variance: float = 0.0,  # variance of the latents around the given ones
) -> Tensor:  # (...,) float64
    """Compute the exact value (c) of the latents before a transition.

    Its gradient with respect to the parameters covers the stochastic steps only.
    """
    mean = latents.double()
    variances = torch.full_like(world.mean, variance, dtype=torch.float64)
    # The velocity is affine, so its values at 0 and 1 determine it.
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64) * torch.ones_like(variances)
    exact = replace(sampler, sigmas=sampler.sigmas.double())
    for i in range(index, len(exact)):
        a, b, std = exact.coefficients(i)
        with torch.set_grad_enabled(i < len(exact) - 1 and torch.is_grad_enabled()):
            at_zero, at_one = world.velocity(ends, exact.sigmas[i].expand(2), {})
        gain = a + b * (at_one - at_zero)
        mean = gain * mean + b * at_zero
        variances = gain**2 * variances + std**2
    return -((mean - world.target).square() + variances).mean((-2, -1))


def branch_noise(
    keys: Sequence[ImageKey],  # one per image
    index: int,  # index of the transition at which the branch leaves the trajectory
    branch: list[int],  # number of the branch, one per image
    shape: tuple[int, ...],  # shape of one image's noise, (T - index, S, C)
) -> Tensor:  # (B, T - index, S, C) float32 on the CPU
    """Sample the noise of all transitions of one branch per image; each image, index and branch has its own noise."""
    streams = [f"branch/{index}/{number}" for number in branch]
    noise = [
        torch.randn(shape, generator=make_generator(*key, stream=stream))
        for key, stream in zip(keys, streams, strict=True)
    ]
    return torch.stack(noise)


@torch.no_grad()
def continue_from(
    policy,  # object with the method `velocity`
    rows: dict[str, Tensor],  # conditioning, one row per image
    latents: Tensor,  # latents before the transition, (B, S, C), in the storage dtype
    index: int,  # index of the first transition to take
    noise: Tensor,  # (B, T - index, S, C)
    sampler: Sampler,
) -> Tensor:  # (B, S, C) at sigma 0, in the storage dtype
    """Integrate the SDE of `rollout.sample_sde` from a transition to the end, with the given noise."""
    storage_dtype = latents.dtype
    for i in range(index, len(sampler)):
        current = latents.float()
        velocity = policy.velocity(current, sampler.sigmas[i].expand(len(current)), rows)
        mean, std = sampler.mean_std(velocity, current, i)
        latents = (mean + std * noise[:, i - index].to(mean.device)).to(storage_dtype)
    return latents


def branch_rewards(
    context: ReplayContext,  # trajectories of B images
    # maps latents (M, S, C) at sigma 0 and the indices of their images (M,) to rewards (M,)
    outcome: Callable[[Tensor, Tensor], Tensor],
    branches: int = 4,  # N, number of branches from every latent
    batch: int = 48,  # number of images in one forward pass
) -> Tensor:  # (B, T + 1, N) float64
    """Compute the rewards of N continuations from every latent.

    The branches from the last two latents get the reward of the trajectory. Costs N T (T + 3) / 2 - N forward passes
    per image.
    """
    paths = context.trajectories
    count = len(paths.keys)
    steps = paths.latents.shape[1] - 1
    ends = torch.cat(
        [outcome(paths.latents[part, -1], part) for part in torch.arange(count).split(batch)]
    )
    rewards = ends.double()[:, None, None].repeat(1, steps + 1, branches)
    image = torch.arange(count).repeat_interleave(branches)
    branch = torch.arange(branches).repeat(count)
    for index in range(steps - 1):
        for part in torch.arange(len(image)).split(batch):
            image_index = image[part]
            branch_number = branch[part]
            shape = (steps - index, *paths.latents.shape[2:])
            noise = branch_noise(
                keys=[paths.keys[b] for b in image_index.tolist()],
                index=index,
                branch=branch_number.tolist(),
                shape=shape,
            )
            rows = {k: v[paths.prompt_index[image_index]] for k, v in context.conditioning.items()}
            start = paths.latents[image_index, index].to(context.policy.device)
            last = continue_from(context.policy, rows, start, index, noise, paths.sampler)
            rewards[image_index, index, branch_number] = outcome(last, image_index).double()
    return rewards


def branch_values(
    rewards: Tensor,  # rewards of the branches, (B, T + 1, N)
) -> tuple[Tensor, Tensor]:  # value and its standard error (d), both (B, T + 1)
    """Estimate the value of each latent with its standard error; raise InputError for fewer than two branches."""
    if rewards.shape[-1] < 2:
        raise InputError(
            f"`rewards` must have at least 2 branches for a standard error; got {rewards.shape[-1]}"
        )
    return rewards.mean(-1), rewards.std(-1) / math.sqrt(rewards.shape[-1])


def step_advantages(
    rewards: Tensor,  # rewards of the branches, (B, T + 1, N)
) -> tuple[Tensor, Tensor]:  # advantage and its standard error (d), both (B, T - 1)
    """Estimate the advantage of every transition except the last, which has no noise."""
    value, error = branch_values(rewards)
    square = error.square()
    return value.diff()[:, :-1], (square[:, 1:] + square[:, :-1]).sqrt()[:, :-1]


def wrong_sign_shares(
    # reward minus the group's mean, in units of the group's standard deviation, (P, G)
    advantage: Tensor,
    step: Tensor,  # estimated advantage of each transition, in the same units, (P, G, n)
    error: Tensor,  # standard error of `step`, (P, G, n)
    parts: Chunks,  # K parts of the n transitions; moments are averaged within a part
    certain: float = 2.0,  # number of standard errors from which a sign counts as certain
) -> Tensor:  # (6, K)
    """Compute in which share of a part's transitions the trajectory's and the transition's advantage differ in sign.

    The rows are: raw share, share among certain signs, corrected share (e), share (f), the fraction of the reward's
    variance that one transition decides, and the fraction of signs that are certain.
    """

    def mean(x: Tensor) -> Tensor:
        """Average over images and over the transitions of each part; returns (K,)."""
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
    parts: Chunks | None = None,  # parts in which moments are averaged; None: single transitions
) -> dict[str, Tensor]:  # (K,) each
    """Estimate how often the trajectory's advantage has the wrong sign at each transition.

    The keys are those of `wrong_sign_shares`: raw, certain, corrected, by_share, share and found. Each has a jackknife
    standard error over prompts under its name with the suffix _se.
    """
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
    # reward minus the group's mean, in units of the group's standard deviation, (P, G)
    advantage: Tensor,
    # estimated value of each state minus the group's mean, in the same units, (P, G, n)
    value: Tensor,
) -> Tensor:  # (3, n): raw share, share by (i), and decided fraction of the variance
    """Compute the shares of states whose value and final reward lie on different sides of the group's mean."""
    raw = (advantage[..., None] * value < 0).double().mean((0, 1))
    decided = (advantage[..., None] * value).mean((0, 1)) / advantage.square().mean()
    return torch.stack([raw, decided.clamp(0, 1).sqrt().arccos() / math.pi, decided])


def state_sign_estimates(
    rewards: Tensor,  # of the trajectories, (P, G)
    branches: Tensor,  # rewards of the branches, (P G, T + 1, N)
) -> dict[str, Tensor]:
    """Estimate how often a state's value and the final reward lie on different sides of the group's mean, as version 3 counts.

    A state is the latent to which a transition leads.

    The keys raw, by_share and decided have a value per transition (T - 1,); mean_raw and mean_by_share are their means
    (). Each has a jackknife standard error over prompts under its name with the suffix _se.
    """
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
    wrong: Tensor,  # 1 for each wrong sign of a trajectory, or its probability, (B, n)
) -> dict[str, Tensor]:  # (B,) each
    """Compute the distances of Proposition 1 to the true coefficients, and two measures that do not depend on length.

    The keys are k, step (36), chunk (37), zero, scaled and cosine (h), and nearer (40).
    """
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
    context: ReplayContext,  # trajectories sampled with the current weights
    coefficients: Tensor,  # R sets with one coefficient per image and transition, (R, B, n)
    images: Tensor,  # indices of the block's images, (m,)
) -> Tensor:  # (R, n, D) float32 on the CPU, with D trained parameters
    """Average coefficient times gradient over a block's images, for each set and transition."""

    def flat(row: Tensor, i: int) -> Tensor:
        """Return the block's gradient for one set and transition as a vector (D,)."""
        return torch.cat([g.flatten() for g in block_gradient(context, row[:, i], i, images)]).cpu()

    return torch.stack(
        [torch.stack([flat(row, i) for i in range(row.shape[1])]) for row in coefficients]
    )


def coefficient_sets(
    advantage: Tensor,  # advantages of the trajectories, (B,)
    step: Tensor,  # measured advantages of the transitions, (B, n)
    error: Tensor,  # standard errors of the values at both ends, (B, n + 1)
    generator: torch.Generator,  # generates the random signs
) -> Tensor:  # (4, B, n) float64
    """Build the four sets of coefficients for which gradients are computed.

    They are the advantage of the trajectory, that of the transition, that of the trajectory with a random sign per
    image, and a sample of the branches' noise.
    """

    def signs(*shape: int) -> Tensor:
        """Sample random signs, -1.0 or 1.0."""
        return 2.0 * torch.randint(2, shape, generator=generator) - 1

    each = advantage.double()[:, None].expand_as(step)
    noise = (signs(*error.shape) * error).diff(dim=1)
    return torch.stack([each, step.double(), signs(len(step), 1) * each, noise.double()])


def inner_products(
    blocks: Tensor,  # gradients, (K, R, n, D)
) -> Tensor:  # (K, R, n, K, R, n) float64
    """Compute the inner products of all gradients of all blocks."""
    flat = blocks.flatten(0, 2)
    return (flat @ flat.T).double().reshape(*blocks.shape[:3], *blocks.shape[:3])


def cross_block_mean(
    products: Tensor,  # inner products of blocks, (K, K)
) -> Tensor:  # ()
    """Average the inner products over pairs of different blocks."""
    count = len(products)
    return (products.sum() - products.trace()) / (count * (count - 1))


def weighted_inner_products(
    gram: Tensor,  # inner products of blocks, (K, R, n, K, R, n); set 1 is the truth
    weights: Tensor,  # weights w of the estimator, (n,)
    truth: Tensor,  # weights of the true gradient (a), (n,): 1, or 0 for transitions that are left out
    row: int = 0,  # index of the estimator's set of coefficients
    # a set and a factor that give the estimator's expectation; None: the estimator itself
    mean: tuple[int, float] | None = None,
) -> Tensor:  # (4, K, K)
    """Compute the inner products of the blocks' weighted gradients.

    The four tables are: estimator with itself, expectation with itself, expectation with the true gradient, and true
    gradient with itself.
    """
    w = weights.double()
    t = truth.double()
    mean_row, factor = mean or (row, 1.0)
    mean_weights = factor * w
    pairs = (
        (row, w, row, w),
        (mean_row, mean_weights, mean_row, mean_weights),
        (mean_row, mean_weights, 1, t),
        (1, t, 1, t),
    )
    return torch.stack(
        [torch.einsum("isjt,s,t->ij", gram[:, a, :, :, b], u, v) for a, u, b, v in pairs]
    )


def alignment_statistics(
    tables: Tensor,  # from `weighted_inner_products`, (4, K, K)
    images: int,  # m, number of images in a block
    # variance of one image's contribution that the blocks lack, such as that of sampling chunks
    extra: float = 0.0,
    many: int = 100,  # M, number of images of the gradient whose cosine is computed
) -> Tensor:  # (5,)
    """Compute direction and variance (d) of a weighted gradient relative to the true one.

    Returns the cosine of the expectation, the cosine for M images, the variance of one image's contribution, the length
    along the true gradient in units of its length, and the number of images at which noise is as long as that. A cosine
    is nan if an estimated square is negative.
    """
    square, ee, eg, gg = (cross_block_mean(x) for x in tables)
    noise = images * (tables[0].diagonal().mean() - square) + extra
    cosines = [eg / ((ee + part) * gg).sqrt() for part in (0.0, noise / many)]
    return torch.stack([*cosines, noise, eg / gg, noise * gg / eg.square()])


def alignment_with_errors(
    tables: Tensor,  # from `weighted_inner_products`, (4, K, K)
    images: int,  # m, number of images in a block
    extra: float = 0.0,  # variance of one image's contribution that the blocks lack
    many: int = 100,  # M, see `alignment_statistics`
) -> dict[str, float]:
    """Return the `alignment_statistics` with jackknife standard errors over blocks.

    The keys are cosine, cosine_many, variance, along and half; standard errors have the suffix _se. Raises InputError
    for fewer than three blocks.
    """
    count = tables.shape[1]
    if count < 3:
        raise InputError(f"`tables` must have at least 3 blocks for a standard error; got {count}")
    found = jackknife_error(
        lambda p: alignment_statistics(tables[:, p][:, :, p], images, extra, many), count
    )
    names = ("cosine", "cosine_many", "variance", "along", "half")
    value, error = (x.tolist() for x in found)
    return dict(zip(names, value, strict=True)) | {
        f"{n}_se": e for n, e in zip(names, error, strict=True)
    }


def chunk_sampling_variance(
    second: Tensor,  # (n, n), inner products of a single image's gradients, averaged over images
    chunks: Chunks,  # K chunks of n transitions
    count: int,  # k, number of chunks that are sampled, 1 to K
) -> float:
    """Compute the variance (e) that sampling k of K chunks adds to one image's contribution to the gradient.

    The gradient has the weights n / (K cs) of chunks. Raises InputError if k is not between 1 and K.
    """
    total = len(chunks)
    if not 1 <= count <= total:
        raise InputError(f"`count` must be between 1 and {total}; got {count}")
    if count == total:
        return 0.0
    mean = torch.zeros(total, chunks.transitions, dtype=torch.float64)
    for c, part in enumerate(chunks.slices):
        mean[c, part] = chunks.transitions / chunks.sizes[c]
    products = mean @ second.double() @ mean.T
    spread = (products.trace() - products.mean() * total) / (total - 1)
    return float(spread / count * (1 - count / total))
