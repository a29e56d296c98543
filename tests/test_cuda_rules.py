"""A whole small run on a pretended GPU: what CUDA would refuse, it refuses, though nothing but the CPU computes."""

import weakref

import pytest
import tiny_families
import torch
from accelerate.state import AcceleratorState
from pretended_device import PretendedCUDA, pretended_cuda
from small_runs import metrics, write

from chunk_grpo.core import settings
from chunk_grpo.models import policy, trainable
from chunk_grpo.models.policy import decode_latents
from chunk_grpo.reward_serving import placement
from chunk_grpo.rewards import rewards
from chunk_grpo.theory.chunks import chunks_from_setting
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training import trainer
from chunk_grpo.training.callbacks import Callback
from chunk_grpo.training.chunk_sampling import sample_chunks
from chunk_grpo.training.gradient import (
    accumulate_gradients,
    compute_transition_stats,
    max_ratio_error,
)
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update_batch import build_update_batch

EVERYTHING = [
    "eval_every=1",
    "eval_count=2",
    "checkpoint_every=1",
    "images_per_prompt=2",
    "prompts_per_iteration=2",
    "reward=tiny_rewards:red_on_its_device",
    "rollout_batch=3",
    "update_batch=7",
    "steps=8",
    "chunks=2,5",
]
VARIANTS = {
    "full": ["ema=0.9", "latents_on=host", "vae_tiling=true", "update_batch=3"],
    "lora": ["lora_rank=4", "gradient_checkpointing=true"],
    "kl": ["kl=0.01", "updates_per_iteration=1"],
    "bf16-lora": ["dtype=bfloat16", "lora_rank=4", "kl=0.01"],
    "bf16-full": ["dtype=bfloat16", "latents_dtype=bfloat16", "ema=0.9"],
    "adaptive": ["chunks=adaptive:1", "drop_flat_groups=true", "chunk_weighting=dynamics"],
    "hybrid": ["kl=0.1", "ema=0.5", "hybrid_split=1", "chunks=profile", "chunk_weighting=profile"],
    "guided": ["true_cfg_scale=3", "shared_noise=false", "step_weights=noise", "sampler=cps"],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a model, prompts and settings."""
    return write(tmp_path_factory.mktemp("small"))


class OnCUDA(Callback):
    """Looks where the run is."""

    def on_train_begin(self, state):
        assert state.accelerator.device.type == "cuda"


def train(folder, out, words, current):
    """Train in this process as rank `current` would, with scores computed in a thread that keeps the rules too."""
    run_settings = settings.load_settings(folder / "s.yaml", [*EVERYTHING, *words])
    out.mkdir(exist_ok=True)
    with pretended_cuda(current) as mode, pytest.MonkeyPatch.context() as patch:
        score = rewards.score_images

        def in_a_thread(*arguments, **keywords):
            with PretendedCUDA(mode.devices):
                return score(*arguments, **keywords)

        patch.setattr(rewards, "score_images", in_a_thread)
        AcceleratorState._reset_state(
            reset_partial_state=True
        )  # other tests of this process have a CPU
        try:
            trainer.train_run(run_settings, out, [OnCUDA()])
        finally:  # whatever happened: the tests after this one have a CPU
            AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_mixes_no_devices(small, tmp_path, name, monkeypatch):
    """Drawn, scored, updated, evaluated, saved, and resumed, as a rank that is not the first."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    for iterations in (1, 2):
        train(small, tmp_path / "run", [*VARIANTS[name], f"iterations={iterations}"], current=1)
    lines = metrics(tmp_path / "run")
    assert [line["iteration"] for line in lines] == [0, 1, 2] and "ratio_floor" in lines[1]
    assert list((tmp_path / "run" / "final").glob("*.safetensors"))


@pytest.mark.parametrize("free", [80 * 10**9, 0])
@pytest.mark.parametrize("name", tiny_families.BUILDERS)
def test_no_family_mixes_devices(name, free, tmp_path, monkeypatch, capsys):
    """Prompts, trajectories, images, and an update with KL, on a GPU that is not the first.

    Without room for the text encoders the transformer waits on the CPU and returns.
    """
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    folder = str(tiny_families.build(name, tmp_path / "model"))
    with pretended_cuda(current=1, free=free):
        words = {
            "resolution": 64,
            "max_tokens": 16,
            "true_cfg_scale": 2.0,
            "lora_rank": 2,
            "device": "cuda",
        }
        model = trainable.load_trainable_policy(folder, **words)
        rows = model.encode(["a red star", "two cats"])
        assert ("waits in host memory" in capsys.readouterr().out) == (not free)
        assert {p.device for p in model.transformer.parameters()} == {torch.device("cuda:1")}
        keys = [(0, 0, 0, 0), (0, 0, 1, 0)]
        grid = policy.sigmas(4, 3.0)
        paths = sample_trajectories(
            policy=model,
            conditioning=rows,
            prompt_index=torch.arange(2),
            keys=keys,
            options=RolloutOptions(Sampler(grid)),
        )
        assert paths.latents.device == torch.device("cuda:1")
        assert decode_latents(model, paths.latents[:, -1]).device.type == "cpu"
        chunks = chunks_from_setting("1,2", 3)
        work = build_update_batch(
            torch.arange(2), sample_chunks(paths, chunks, 1.0), chunks, limit=3
        )
        method = Method(settings.Settings(clip_range=1.0, kl=0.1))
        accumulate_gradients(
            ReplayContext(model, rows, paths), work, torch.tensor([1.0, -1.0]), method
        )


def test_replay_holds_one_autograd_graph_at_a_time(tmp_path, monkeypatch):
    """The graph of a batch is freed before the next forward pass, whose activations would be added to it otherwise."""
    folder = str(tiny_families.build("dev", tmp_path / "model"))
    model = trainable.load_trainable_policy(
        folder, resolution=64, max_tokens=16, lora_rank=2, device="cpu"
    )
    rows = model.encode(["a red star", "two cats"])
    paths = sample_trajectories(
        policy=model,
        conditioning=rows,
        prompt_index=torch.arange(2),
        keys=[(0, 0, 0, 0), (0, 0, 1, 0)],
        options=RolloutOptions(Sampler(policy.sigmas(4, 3.0))),
    )
    chunks = chunks_from_setting("1,2", 3)
    work = build_update_batch(torch.arange(2), sample_chunks(paths, chunks, 1.0), chunks, limit=2)
    saved = []
    alive = []
    velocity = model.velocity

    class Saved:
        """A tensor that a graph keeps for its backward pass."""

        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output would refer to its own graph
            saved.append(weakref.ref(self))

    def counted(*given):
        alive.append(sum(reference() is not None for reference in saved))
        return velocity(*given)

    monkeypatch.setattr(model, "velocity", counted)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.tensor):
        compute_transition_stats(
            ReplayContext(model, rows, paths), work, Method(settings.Settings()), graph=True
        )
    assert alive == [0] * len(work.batches) and len(alive) > 1 and len(saved) > 10


def test_the_floor_of_the_ratio_is_taken_on_the_gpu():
    """Its segments come from the CPU, and CUDA reduces no segments that lie elsewhere."""
    work = build_update_batch(
        torch.arange(2), torch.tensor([[0, 1]] * 2), chunks_from_setting("1,2", 3), limit=4
    )
    with pretended_cuda():
        logp = torch.zeros(len(work.chunk_sample_ids), device="cuda")
        assert max_ratio_error(logp, logp, work) == 0.0


WATCHED = """import threading, torch
gpus = torch.cuda.gpu_of_threads = {}
torch.cuda.is_available = lambda: True
torch.cuda.is_initialized = lambda: bool(gpus)
torch.cuda.current_device = lambda: gpus.get(threading.get_ident(), 0)
torch.cuda.set_device = lambda gpu: gpus.update({threading.get_ident(): gpu})
"""


@pytest.mark.parametrize("gpu", [None, 3])
def test_a_worker_uses_the_gpu_of_its_parent(gpu, monkeypatch, tmp_path):
    """A child begins on the first GPU unless its parent says which is theirs; so does each of the child's threads."""
    (tmp_path / "sitecustomize.py").write_text(WATCHED)  # the child's
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu)
    child = placement.load_placed_reward("tiny_rewards:gpu_of_thread", worker=True)
    assert child(torch.zeros(2, 3, 8, 8), ["a", "b"]).tolist() == [-1 if gpu is None else gpu] * 2
    child.close()
