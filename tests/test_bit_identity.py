"""What the page on bit identity promises, with alignment, threads, batches and the random state varied on purpose."""

import json
import shutil

import pytest
import small_runs
import torch
from bit_identity import iteration_tensors, relative_difference
from safetensors.torch import load_file, save_file

from chunk_grpo.core import settings
from chunk_grpo.models import trainable
from chunk_grpo.training import resuming, trainer
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state

FEW = {
    "images_per_prompt": 2,
    "prompts_per_iteration": 2,
    "steps": 5,
    "chunks": "2,2",
    "eval_count": 1,
    "eval_every": 0,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    before = torch.get_num_threads()
    yield small_runs.write(tmp_path_factory.mktemp("bits"), **FEW)
    torch.set_num_threads(before)


def fresh(home, run, **changes):
    """The state of a run before its first iteration."""
    run.mkdir(exist_ok=True)
    run_settings = settings.load_settings(
        home / "s.yaml", {"reward": "incompressibility", **changes}
    )
    return load_policy_and_optimizer(prepare_state(run_settings, run))


@pytest.fixture(scope="module")
def wanted(home):
    return iteration_tensors(fresh(home, home / "run"))


def differences(wanted, found) -> dict[str, float]:
    return {name: relative_difference(wanted[name], found[name]) for name in wanted}


@pytest.mark.parametrize("shift", [8, 24, 40])
def test_the_place_of_weights_in_their_files_changes_nothing(home, wanted, tmp_path, shift):
    shutil.copytree(home / "model", tmp_path / "model")
    places = set()
    for file in (tmp_path / "model").glob("*/*.safetensors"):
        tensors = load_file(file)
        first = next(iter(tensors.values())).data_ptr() % 64
        before = int.from_bytes(file.read_bytes()[:8], "little")
        save_file(tensors, file, {"format": "pt", "note": "x" * (shift + 64)})
        places.add(((int.from_bytes(file.read_bytes()[:8], "little") - before) % 64, first))
    assert any(moved for moved, _ in places), "no weight lies elsewhere than before"
    found = iteration_tensors(fresh(home, tmp_path / "run", model=str(tmp_path / "model")))
    assert set(differences(wanted, found).values()) == {0.0}


@pytest.mark.parametrize(
    "changes", [{}, {"threads": 2}, {"rollout_batch": 3}, {"update_batch": 3}], ids=str
)
def test_threads_and_batches_repeat_themselves_and_never_move_the_noise(
    home, wanted, tmp_path, changes
):
    found, again = (iteration_tensors(fresh(home, tmp_path / "run", **changes)) for _ in range(2))
    assert set(differences(found, again).values()) == {0.0}
    apart = differences(wanted, found)
    assert (
        apart["initial noise"] == 0
        and max(apart[name] for name in ("latents", "log-probabilities")) < 1e-3
    )
    if not changes:
        assert set(apart.values()) == {0.0}


@pytest.mark.parametrize(
    "more", [{}, {"ema": 0.5, "updates_per_iteration": 2, "chunk_weighting": "dynamics"}], ids=str
)
def test_a_resumed_run_asks_nothing_of_torchs_random_state(home, tmp_path, more):
    whole, cut = (fresh(home, tmp_path / name, **more) for name in ("whole", "cut"))
    for state in (whole, cut):
        trainer.train_iteration(state)
    resuming.save_checkpoint(cut)
    stored = {file.name for file in (tmp_path / "cut/checkpoints/000001").glob("*.safetensors")}
    assert stored == {"weights.safetensors", "optimizer.safetensors"} | (
        {"ema.safetensors"} if more else set()
    )
    before = torch.get_rng_state()
    wanted = trainer.train_iteration(whole)
    assert torch.equal(torch.get_rng_state(), before), (
        "something drew from torch's own random numbers"
    )
    resumed = fresh(home, tmp_path / "cut", **more)
    torch.manual_seed(4711)
    resuming.resume(resumed)
    found = trainer.train_iteration(resumed)
    clock = {name for name in wanted if name.startswith("seconds")}
    assert {k: v for k, v in found.items() if k not in clock} == {
        k: v for k, v in wanted.items() if k not in clock
    }
    assert all(
        torch.equal(a, b) for a, b in zip(whole.policy.trained, resumed.policy.trained, strict=True)
    )


def test_the_same_checkpoint_is_written_after_a_resume_as_without(home, tmp_path):
    """Nothing in it depends on how often the run was begun: torch's random state, which did, is not stored."""
    whole, cut = (fresh(home, tmp_path / name) for name in ("whole", "cut"))
    for state in (whole, cut):
        trainer.train_iteration(state)
    resuming.save_checkpoint(cut)
    trainer.train_iteration(whole)
    resumed = fresh(home, tmp_path / "cut")
    resuming.resume(resumed)
    trainer.train_iteration(resumed)
    for state in (whole, resumed):
        resuming.save_checkpoint(state)
    sums = [
        json.loads((tmp_path / name / "checkpoints/000002/manifest.json").read_text())["files"]
        for name in ("whole", "cut")
    ]
    for files in sums:
        files.pop("state.json")  # it holds seconds
    assert sums[0] == sums[1]


def test_shards_begin_with_all_digits_of_the_model():
    """The pocket model's files are float32, so bfloat16 in the forward passes must not round its weights."""
    options = {"resolution": 64, "max_tokens": 12, "dtype": "bfloat16"}
    whole = trainable.load_trainable_policy("pocket", **options)
    try:
        sharded = trainable.load_trainable_policy("pocket", sharding="fsdp", **options)
        for expected, shard in zip(whole.trained, sharded.trained, strict=True):
            assert torch.equal(trainable.full_tensor(shard), expected)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
