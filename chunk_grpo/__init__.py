"""Chunk-GRPO: reinforcement learning of flow-matching text-to-image models, as a book that runs."""

import lazy_loader

__version__ = "0.1.0"

__getattr__, _, __all__ = lazy_loader.attach_stub(
    __name__, __file__
)  # the names that stand in __init__.pyi
__all__ += ["InputError"]


class InputError(ValueError):
    """Bad input, described in one plain sentence; the command line prints it and exits with `exit_code`."""

    exit_code = 2


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
