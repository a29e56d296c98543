"""Variables that other libraries read from the environment change no training, and none is ignored silently."""

import os
import re
from pathlib import Path

import accelerate
import pytest
from commands import call

from chunk_grpo import InputError
from chunk_grpo.core import machine

TINY = [
    "pocket/tiny",
    "iterations=1",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
]
REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_USE_FSDP": "1",
    "ACCELERATE_USE_MEGATRON_LM": "yes",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_USE_SAGEMAKER": "true",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_SPLIT_BATCHES": "true",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FORK_LAUNCHED": "1",
    "DIFFUSERS_ATTN_BACKEND": "flash",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "NVIDIA_TF32_OVERRIDE": "1",
}
HARMLESS = {  # what `accelerate launch` sets by itself, and what only prints
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_USE_FSDP": "",
    "ACCELERATE_LOG_LEVEL": "error",
    "NVIDIA_TF32_OVERRIDE": "0",
}


@pytest.mark.parametrize("name", REFUSED)
def test_variable_that_would_change_training_is_rejected_by_name(name, monkeypatch):
    monkeypatch.setenv(name, REFUSED[name])
    with pytest.raises(InputError) as error:
        machine.check_environment_variables()
    assert f"{name}={REFUSED[name]}" in str(error.value) and "\n" not in str(error.value)


def test_the_setting_that_replaces_a_variable_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(InputError, match="; use the setting `dtype` instead$"):
        machine.check_environment_variables()


@pytest.mark.parametrize("name", HARMLESS)
def test_variable_that_changes_nothing_is_accepted(name, monkeypatch):
    monkeypatch.setenv(name, HARMLESS[name])
    machine.check_environment_variables()


def test_every_variable_that_accelerate_reads_to_train_is_known():
    """Names are read from accelerate's own source, so that a new version with a new prefix is noticed here."""
    root = Path(accelerate.__file__).parent
    files = [
        root / name
        for name in ("accelerator.py", "state.py", "utils/dataclasses.py", "parallelism_config.py")
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    asked = re.findall(
        r"(?:environ(?:\.get\(|\[)|from_env\(|prefix = )\s*\"([A-Z][A-Z0-9_]+)\"", text
    )
    launchers = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_PORT",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
    }  # checked elsewhere, or what torchrun sets
    printing = {"ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"}
    others = re.compile(
        "XLA_|PT_HPU|DEEPSPEED_|NCCL_|PYTORCH_ENABLE_MPS"
    )  # set by accelerate, or other hardware
    names = {name for name in asked if not others.match(name)} - launchers - printing
    assert len(names) > 20
    unknown = {name for name in names if not machine.changes_training(name, "8")}
    assert not unknown


def test_training_is_refused_before_its_folder_is_made(tmp_path):
    done = call(
        "train",
        *TINY,
        "--out",
        tmp_path / "run",
        "--no-report",
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8,
    )
    assert done.returncode == 2 and "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8" in done.stderr
    assert not (tmp_path / "run").exists()


def test_loading_a_model_is_refused(monkeypatch):
    from chunk_grpo import load_policy

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match="ACCELERATE_USE_FSDP=true"):
        load_policy("pocket", resolution=64)


def test_switched_off_compiler_is_refused_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    machine.check_environment_variables()
    with pytest.raises(InputError, match="TORCHDYNAMO_DISABLE=1"):
        machine.check_environment_variables(compile=True)


def test_accelerator_reads_nothing_from_the_environment(monkeypatch, tmp_path):
    """Even values that the check lets through, and names that nobody has thought of."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from chunk_grpo.training.state import make_accelerator

    for name, value in {
        "ACCELERATE_USE_CPU": "",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "",
        "ACCELERATE_TORCH_DEVICE": "",
    }.items():
        monkeypatch.setenv(name, value)
    for shared in (AcceleratorState, PartialState, GradientState):
        monkeypatch.setattr(shared, "_shared_state", {})
    made = make_accelerator(None, tmp_path)
    assert made.gradient_accumulation_steps == 1 and made.mixed_precision == "no"
    assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "0", "it is as it was for others"


@pytest.fixture
def no_accelerator(monkeypatch):
    """Accelerate as it is in a new Python process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, PartialState, GradientState):
        monkeypatch.setattr(shared, "_shared_state", {})


def test_a_run_after_one_on_another_device_gets_its_own(no_accelerator, monkeypatch, tmp_path):
    import torch
    from accelerate.state import PartialState

    from chunk_grpo.training import state

    assert state.make_accelerator(None, tmp_path, "cpu").device.type == "cpu"
    # Any other device stands for a GPU, which this machine may lack.
    monkeypatch.setattr(
        state, "choose_device", lambda device: "meta" if device == "auto" else "cpu"
    )
    monkeypatch.setattr(PartialState, "default_device", torch.device("meta"))
    assert state.make_accelerator(None, tmp_path, "auto").device.type == "meta"
    assert state.make_accelerator(None, tmp_path, "cpu").device.type == "cpu"


def test_a_device_that_accelerate_does_not_use_is_refused(no_accelerator, monkeypatch, tmp_path):
    import torch
    from accelerate.state import PartialState

    from chunk_grpo.training import state

    monkeypatch.setattr(state, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(PartialState, "default_device", torch.device("cpu"))
    with pytest.raises(InputError, match="^`device` must be .*, cpu; got cuda$"):
        state.make_accelerator(None, tmp_path, "cuda")


def test_the_setting_of_threads_counts_although_accelerate_sets_others(monkeypatch, tmp_path):
    import torch

    from chunk_grpo.core.settings import load_settings
    from chunk_grpo.training import state

    before = torch.get_num_threads()
    make = state.make_accelerator

    def with_other_threads(*arguments):
        torch.set_num_threads(before + 2)
        return make(*arguments)

    monkeypatch.setattr(state, "make_accelerator", with_other_threads)
    try:
        state.prepare_state(load_settings("pocket/tiny", {"threads": before + 1}), tmp_path)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("tasks", "machines", "is_wrong"), [("8", "1", True), ("4", "2", True), ("2", "2", False)]
)
def test_several_tasks_of_srun_on_a_machine_are_refused(tmp_path, tasks, machines, is_wrong):
    done = call(
        "train",
        *TINY,
        "--out",
        tmp_path / "run",
        "--no-report",
        "--processes",
        2,
        "--nodes",
        "1",
        "device=cuda",
        SLURM_STEP_NUM_TASKS=tasks,
        SLURM_STEP_NUM_NODES=machines,
    )
    assert done.returncode == 2 and ("srun must start" in done.stderr) == is_wrong, done.stderr
    assert not (tmp_path / "run").exists()
