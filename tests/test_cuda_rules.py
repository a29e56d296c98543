"""A whole small run on a pretended GPU: what CUDA would refuse, it refuses, though nothing but the CPU computes."""


import pytest
from pretended_device import PretendedCUDA, pretended_cuda
from small_runs import metrics, write

from chunk_grpo.core import settings
from chunk_grpo.rewards import rewards
from chunk_grpo.training import trainer

EVERYTHING = ["eval_every=1", "eval_count=2", "checkpoint_every=1", "images_per_prompt=2", "prompts_per_iteration=2",
              "reward=tiny_rewards:red_on_its_device", "rollout_batch=3", "update_batch=7", "steps=8", "chunks=2,5"]
VARIANTS = {
    "full": [],
    "lora": ["lora_rank=4"],
    "kl": ["kl=0.01", "updates_per_iteration=1"],
    "ema": ["ema=0.9"],
    "bf16-lora": ["dtype=bfloat16", "lora_rank=4", "kl=0.01"],
    "bf16-full": ["dtype=bfloat16", "latents_dtype=bfloat16", "ema=0.9"],
    "checkpointing": ["gradient_checkpointing=true", "lora_rank=2"],
    "host": ["latents_on=host", "vae_tiling=true", "update_batch=3"],
    "adaptive": ["chunks=adaptive:1", "drop_flat_groups=true", "chunk_weighting=dynamics"],
    "hybrid": ["kl=0.1", "ema=0.5", "hybrid_split=1", "chunks=profile", "chunk_weighting=profile"],
    "guided": ["true_cfg_scale=3", "shared_noise=false", "step_weights=noise", "sampler=cps"],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    "A folder with a model, prompts and settings."
    return write(tmp_path_factory.mktemp("small"))


def train(folder, out, words, current):
    "Train in this process as rank `current` would, with scores computed in a thread that keeps the rules too."
    s = settings.load_settings(folder / "s.yaml", [*EVERYTHING, *words])
    out.mkdir(exist_ok=True)
    with pretended_cuda(current) as mode, pytest.MonkeyPatch.context() as patch:
        score = rewards.score_images

        def in_a_thread(*given):
            with PretendedCUDA(mode.devices):
                return score(*given)

        patch.setattr(rewards, "score_images", in_a_thread)
        accelerator = trainer.train_run(s, out)
        assert accelerator.device.type == "cuda"
    return s


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_mixes_no_devices(small, tmp_path, name, monkeypatch):
    "Drawn, scored, updated, evaluated, saved, and resumed, as a rank that is not the first."
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    for iterations in (1, 2):
        train(small, tmp_path / "run", [*VARIANTS[name], f"iterations={iterations}"], current=1)
    lines = metrics(tmp_path / "run")
    assert [line["iteration"] for line in lines] == [0, 1, 2] and "ratio_floor" in lines[1]
    assert list((tmp_path / "run" / "final").glob("*.safetensors"))
