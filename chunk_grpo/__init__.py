"""Chunk-GRPO: reinforcement learning of flow-matching text-to-image models, as a book that runs."""

__version__ = "0.1.0"


class InputError(ValueError):
    """Bad input, said in one plain sentence; the command line prints it and exits with code 2."""
