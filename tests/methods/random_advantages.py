import torch

from chunk_grpo.training.method import Method


class RandomAdvantages(Method):
    "Advantages that do not depend on the images."

    def advantages(self, scores, weights):
        shape = next(iter(scores.values())).shape
        return torch.randn(shape, generator=self.generator())
