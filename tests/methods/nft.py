"""DiffusionNFT (2509.16117): mixed velocities pushed to good images, their mirror to bad ones; no noise, no ratio."""

import torch

from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import add_noise
from chunk_grpo.training.method import Method
from chunk_grpo.training.rollout import make_generator


class NFT(Method):
    """An average of the policy draws by the ODE; the final images, noised anew, train it."""

    beta = 1.0
    has_ratio = False
    has_log_prob = False
    reference_decays = {"old": lambda iteration: min(0.001 * iteration, 0.5)}
    sampling_reference = "old"
    references = ("old",)

    def sampler(self, iteration):
        return Sampler(self.sigmas, "ode")

    def trainable_steps(self, sampler):
        return torch.arange(len(sampler))

    def chunks(self, profile):
        return Chunks.steps(len(profile))

    def states(self, context, image_index, step_index):
        paths = context.trajectories
        clean = paths.latents[image_index, -1].float().to(context.policy.device)
        noise = [
            torch.randn(
                clean.shape[1:], generator=make_generator(*paths.keys[b], stream=f"noised {i}")
            )
            for b, i in zip(image_index.tolist(), step_index.tolist(), strict=True)
        ]
        return add_noise(
            clean, torch.stack(noise).to(clean), paths.sampler.sigmas[step_index]
        ), clean

    def transition_stats(self, batch):
        v = batch.velocity
        old = batch.reference_velocities["old"]
        t = batch.sigma
        losses = []
        for mixed in ((1 - self.beta) * old + self.beta * v, (1 + self.beta) * old - self.beta * v):
            off = batch.latents - t * mixed - batch.target
            losses.append(
                (off.square() / off.detach().abs().mean((1, 2), keepdim=True).clamp(min=1e-5)).mean(
                    (1, 2)
                )
            )
        return (torch.stack(losses, 1),)

    def statistic(self, new, old):
        return new[0]

    def objective(self, terms):
        good = (terms.advantage / 10 + 0.5).clamp(0, 1)
        return -5 / self.beta * (good * terms.statistic[:, 0] + (1 - good) * terms.statistic[:, 1])
