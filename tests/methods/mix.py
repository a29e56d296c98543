"""MixGRPO (2507.21802): noise in a window of transitions that slides over the training, the ODE outside of it."""

from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training.method import Method

WIDTH, EVERY = 4, 25  # transitions of the window, iterations until it moves by one


class Mix(Method):
    """Steps in a progressive window."""

    def sampler(self, iteration):
        last = len(self.sigmas) - 2  # transitions that may have noise
        first = iteration // EVERY % max(last - WIDTH + 1, 1)
        inside = range(first, min(first + WIDTH, last))
        eta = [self.settings.eta if i in inside else 0.0 for i in range(last + 1)]
        return Sampler(self.sigmas, self.settings.sampler, eta)

    def chunks(self, profile):
        return Chunks.steps(len(profile))

    def select_chunks(self, trajectories, chunks, profile, iteration):
        import torch

        return torch.arange(len(chunks)).expand(len(trajectories.keys), -1)
