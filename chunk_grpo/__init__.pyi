# What a script needs, from its chapter's module: `lazy_loader` imports each name when it is first asked for.
from .core.settings import Settings as Settings, load_settings as load_settings
from .evaluation.evaluate import evaluate as evaluate
from .models.inputs import write_prompts as write_prompts
from .models.policy import load_policy as load_policy
from .reporting.export import export_run as export_run
from .reporting.reports import compare_runs as compare_runs, write_run_report as write_run_report
from .reporting.samples import sample_run as sample_run, sample_widget as sample_widget
from .reward_serving.placement import load_placed_reward as load_placed_reward
from .runs.launch import train as train
from .runs.run_folder import read_metrics as read_metrics
from .theory.chunks import Chunks as Chunks
from .theory.dynamics import (
    chunk_probabilities as chunk_probabilities,
    chunks_from_profile as chunks_from_profile,
)
from .theory.dynamics import relative_distance as relative_distance
from .theory.objective import chunk_ratio as chunk_ratio, clipped_objective as clipped_objective
from .theory.objective import group_advantages as group_advantages
from .theory.sampler import Sampler as Sampler
from .theory.schedule import sigmas as sigmas
from .training.rollout import sample_images as sample_images

__version__: str

class InputError(ValueError):
    exit_code: int
