"""DiffusionNFT (2509.16117): mixed velocities pushed to good images, their mirror to bad ones; no noise, no ratio."""

import torch

from chunk_grpo.method.chunks import Chunks
from chunk_grpo.method.sampler import Sampler
from chunk_grpo.method.schedule import add_noise
from chunk_grpo.models.policy import told_sigma
from chunk_grpo.models.trainable import base_weights
from chunk_grpo.training.methods import Method
from chunk_grpo.training.rollout import make_generator


class NFT(Method):
    "An average of the policy draws by the ODE; the final images, noised anew, train it."

    beta, ratio = 1.0, False
    copies = {"old": lambda iteration: min(0.001 * iteration, 0.5)}
    sampled_by, beside = "old", 1  # each trained forward has one of the old copy beside it

    def sampler(self, iteration):
        return Sampler(self.sigmas, "ode")

    def places(self, sampler):
        return torch.arange(len(sampler))

    def chunks(self, profile):
        return Chunks.steps(len(profile))

    def replay(self, context, image, index, anchor=True):
        paths, policy, rows = context.trajectories, context.policy, context.rows(image)
        clean, t = paths.latents[image, -1].float().to(policy.device), paths.sampler.sigmas[index]
        noise = [torch.randn(clean.shape[1:], generator=make_generator(*paths.keys[b], stream=f"noised {i}"))
                 for b, i in zip(image.tolist(), index.tolist(), strict=True)]
        x, told = add_noise(clean, torch.stack(noise).to(clean), t), told_sigma(policy, t)
        with context.weights("old"):
            old = policy.velocity(x, told, rows)
        base = None
        if anchor and self.s.kl:
            with torch.no_grad(), base_weights(policy):
                base = policy.velocity(x, told, rows)
        v, t, losses = policy.velocity(x, told, rows), t.to(x).reshape(-1, 1, 1), []
        for mixed in ((1 - self.beta) * old + self.beta * v, (1 + self.beta) * old - self.beta * v):
            off = x - t * mixed - clean
            losses.append((off.square() / off.detach().abs().mean((1, 2), keepdim=True).clamp(min=1e-5)).mean((1, 2)))
        return (torch.stack(losses, 1),), None if base is None else (v - base).square().mean((1, 2))

    def statistic(self, new, old):
        return new[0]

    def objective(self, statistic, advantage, group):
        good = (advantage / 10 + 0.5).clamp(0, 1)
        return -5 / self.beta * (good * statistic[:, 0] + (1 - good) * statistic[:, 1])

    def item_metrics(self, statistic, slope, advantage):
        return {"loss": -self.objective(statistic, advantage, None)}

    def metrics(self, items, chunk, count):
        return {"loss_mean": items["loss"].mean().item()}
