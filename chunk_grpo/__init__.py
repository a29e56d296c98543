"""Chunk-GRPO: reinforcement learning of flow-matching text-to-image models, as a book that runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; a program imports each name when it first asks for it
    from .core.settings import Settings as Settings
    from .core.settings import load_settings as load_settings
    from .evaluation.evaluate import evaluate as evaluate
    from .method.chunks import Chunks as Chunks
    from .method.dynamics import chunk_weights as chunk_weights
    from .method.dynamics import chunks_from_profile as chunks_from_profile
    from .method.dynamics import relative_distance as relative_distance
    from .method.objective import chunk_ratio as chunk_ratio
    from .method.objective import clipped_objective as clipped_objective
    from .method.objective import group_advantages as group_advantages
    from .method.sampler import Sampler as Sampler
    from .method.schedule import sigmas as sigmas
    from .models.policy import load_policy as load_policy
    from .reporting.publish import export_run as export_run
    from .reporting.publish import sample_run as sample_run
    from .reporting.publish import sample_widget as sample_widget
    from .reporting.reports import compare_runs as compare_runs
    from .reporting.reports import write_run_report as write_run_report
    from .reward_serving.placement import load_placed_reward as load_placed_reward
    from .runs.run_folder import read_metrics as read_metrics
    from .runs.launch import train as train
    from .training.rollout import sample_images as sample_images

__version__ = "0.1.0"

MODULE_OF = {
    "Settings": "core.settings",
    "load_settings": "core.settings",
    "train": "runs.launch",
    "evaluate": "evaluation.evaluate",
    "read_metrics": "runs.run_folder",
    "compare_runs": "reporting.reports",
    "write_run_report": "reporting.reports",
    "sample_run": "reporting.publish",
    "sample_widget": "reporting.publish",
    "export_run": "reporting.publish",
    "load_policy": "models.policy",
    "sample_images": "training.rollout",
    "load_placed_reward": "reward_serving.placement",
    "sigmas": "method.schedule",
    "Sampler": "method.sampler",
    "Chunks": "method.chunks",
    "chunk_ratio": "method.objective",
    "clipped_objective": "method.objective",
    "group_advantages": "method.objective",
    "relative_distance": "method.dynamics",
    "chunks_from_profile": "method.dynamics",
    "chunk_weights": "method.dynamics",
}
__all__ = ["InputError", *MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


class InputError(ValueError):
    """Bad input, said in one plain sentence; the command line prints it and exits with code 2."""


def __getattr__(name: str) -> Any:
    """What a script needs, from its chapter's module; torch is imported with the first name that needs it."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
