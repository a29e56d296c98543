"""GRPO-Guard (2510.22319): a centred, scaled log-ratio, and gradients divided by the length of their step."""

import torch

from chunk_grpo.training.method import Method


class Guard(Method):
    """Chunk-GRPO with Guard's ratio."""

    def transition_stats(self, batch):
        mean, std = batch.mean_std()
        log_prob = batch.sampler.log_prob(batch.target, mean, std)
        return log_prob, mean, std.flatten().expand(len(mean))

    def statistic(self, new, old):
        """std (log r + |change of the mean|^2 / (2 std^2)): its mean under the old policy is 0, as log r's is not."""
        logp, mean, std = new
        moved = (mean - old[1]).square().flatten(1).mean(1)
        return std * (logp - old[0] + moved / (2 * std**2))

    def transition_weights(self, sampler):
        weights = torch.zeros(len(sampler))
        weights[self.trainable_steps(sampler)] = (
            1 / -sampler.sigmas.diff()[self.trainable_steps(sampler)]
        )
        return weights / weights[self.trainable_steps(sampler)].mean()
