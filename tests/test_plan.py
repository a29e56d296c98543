"""What a plan counts, and what a model costs."""

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_families
import torch
from commands import run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from chunk_grpo import InputError
from chunk_grpo.cli import main, training
from chunk_grpo.core import machine, settings
from chunk_grpo.models import activations, inputs, policy, trainable
from chunk_grpo.models.activations import (
    activation_bytes,
    decode_batch_size,
    decode_bytes_on_gpu,
    fit_update_batch,
)
from chunk_grpo.models.cost import (
    count_trained_parameters,
    find_model_config,
    forward_flops,
    known_model_configs,
    latent_numel,
    model_sizes,
)
from chunk_grpo.planning import devices, plan
from chunk_grpo.planning.counts import (
    IterationCounts,
    evaluation_forwards,
    forward_backward_cost,
    iteration_counts,
    iteration_flops,
    read_held_out_prompts,
    transitions_per_image,
)
from chunk_grpo.planning.devices import find_device, iteration_seconds, recognise_gpu
from chunk_grpo.planning.disk import count_encoded_prompts, run_disk_bytes
from chunk_grpo.planning.memory import host_memory, peak_memory, training_memory
from chunk_grpo.planning.plan import describe_counts, describe_estimates
from chunk_grpo.planning.processes import choose_process_count
from chunk_grpo.runs import launch

ROOT = Path(__file__).resolve().parents[1]
# what studies and papers state; machines stand in runs/hosts
OTHERS = ("methods.yaml", "published_tables.yaml", "study.yaml", "base.yaml", "tuned.yaml")
FILES = sorted(
    f for f in (ROOT / "runs").rglob("*.yaml") if f.name not in OTHERS and f.parent.name != "hosts"
)
DEMO = ROOT / "runs/results/demo/seed-0"
SIDE, TOKENS = 64, 16


@pytest.mark.parametrize(
    "chunks, expected",
    [
        ("2,3,4,7", (5, 8.0, 11)),
        ("steps", (8, 8.0, 8)),
        ("whole", (16, 16.0, 16)),
        ("equal:4", (8, 8.0, 8)),
        ("profile", (1, 8.0, 16)),
    ],
)
def test_transitions_of_an_image(chunks, expected):
    assert transitions_per_image(settings.load_settings({"chunks": chunks})) == expected


def test_an_iterations_forwards():
    """Two passes where a chunk does not fit, one more for KL, the base's images, guidance; a run without LoRA is longer."""
    run_settings = settings.load_settings({"gradient_checkpointing": False, "update_batch": 64})
    counts = iteration_counts(run_settings)
    assert (
        counts == IterationCounts(192 * 16 + 16, 1536, 768, 0, 192)
        and forward_backward_cost(run_settings) == 3
    )
    two = settings.load_settings(
        run_settings, {"update_batch": 4, "kl": 0.1, "gradient_checkpointing": True, "lora_rank": 4}
    )
    assert iteration_counts(two).extra == 1536 + 768 * 2 and forward_backward_cost(two) == 3
    looking = iteration_counts(settings.load_settings(run_settings, {"baseline_images": 2}))
    assert looking == dataclasses.replace(counts, baseline=16 * 2 * 16 + 16, scored=192 + 32)
    network = find_model_config("black-forest-labs/FLUX.1-dev")
    flops = [
        iteration_flops(settings.load_settings(run_settings, {"true_cfg_scale": scale}), network)
        for scale in (1, 3)
    ]
    assert all(flops[1][phase] == 2 * n for phase, n in flops[0].items())
    other = IterationCounts(rollout=10, trained=2, extra=1)  # of another method
    forward = forward_flops(network, run_settings.resolution, run_settings.max_tokens)
    assert iteration_flops(run_settings, network, other) == {
        "rollout": 10 * forward,
        "update": 7 * forward,
    }


def test_a_final_evaluation_draws_five_arms():
    words = {
        "eval_steps": 50,
        "hybrid_split": 0,
        "true_cfg_scale": 3.0,
        "eval_resolution": 64,
        "resolution": 128,
    }
    assert evaluation_forwards(settings.load_settings(words)) == {
        "ODE": (2, 100, (64,)),
        "as trained": (2, 34, (128,)),
    }
    assert read_held_out_prompts(settings.load_settings({"eval_prompts": "not-here.txt"})) == []
    network = find_model_config("black-forest-labs/FLUX.1-dev")
    sizes = [
        run_disk_bytes(settings.load_settings("pocket/tiny", {"ema": x}), network) for x in (0, 0.9)
    ]
    assert [parts["checkpoints"] / model_sizes(network)["transformer"] for parts in sizes] == [
        12 * 3,
        16 * 3,
    ]
    whole, parts = (
        host_memory(settings.load_settings({"sharding": x}), network, 8) for x in ("none", "fsdp")
    )
    assert (
        whole["weights while they load"] == 2 * parts["weights while they load"]
    )  # float32 and bfloat16


def test_counts_name_everything_once():
    names = [name for name, _ in describe_counts(settings.Settings(), 8)]
    assert len(set(names)) == len(names)
    text = dict(describe_counts(settings.Settings(), 8))
    assert text["images per process"].startswith("24,")
    with pytest.raises(InputError, match="`processes` must be"):
        describe_counts(settings.Settings(), 5)


def test_rows_are_named_per_iteration_and_keep_their_keys_in_json():
    words = ["plan", "paper/chunk", "lora_rank=32", "--rate", "1000"]
    printed = CliRunner().invoke(main.app, words).output
    tables = json.loads(CliRunner().invoke(main.app, [*words, "--json"]).output)["rows"]
    keys = {key for table in tables.values() for key in table}
    for name, key in {
        "images per iteration": "images an iteration",
        "images per process": "images a process",
        "updates per iteration": "updates an iteration",
        "transitions per image": "transitions an image",
        "forward passes per image": "forwards an image",
        "arithmetic per evaluation": "arithmetic an evaluation",
        "memory per process": "memory a process",
        "least time per iteration": "least time an iteration",
    }.items():
        assert name in printed and key not in printed
        assert key in keys and name not in keys


def test_a_broken_model_folder_is_named(tmp_path):
    def fails():
        with pytest.raises(InputError, match="config.json|model_index.json"):
            find_model_config(str(tmp_path))

    fails()
    for part in ("transformer", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    fails()
    (tmp_path / "vae" / "config.json").write_text("{")
    (tmp_path / "model_index.json").write_text('{"_class_name": "ZImagePipeline"}')
    fails()


@pytest.fixture(scope="module", params=[*tiny_families.BUILDERS, *tiny_families.EDITING_BUILDERS])
def family(request, tmp_path_factory):
    """A family in miniature: its folder."""
    return str(tiny_families.build(request.param, tmp_path_factory.mktemp(request.param) / "model"))


def full_rows(model, network: policy.ModelConfig) -> dict[str, torch.Tensor]:
    """Two rows of conditioning whose prompts are as long as they may be."""
    config = model.transformer.config
    length = TOKENS + network.extra_tokens + model.image_text_tokens
    width = config.get("joint_attention_dim") or config.get("cap_feat_dim")
    noise = model.noise(torch.Generator())
    image = {"image_latents": torch.randn(2, *noise.shape)} if model.edits_images else {}
    return image | {
        "prompt_embeds": torch.randn(2, length, width),
        "prompt_embeds_mask": torch.ones(2, length, dtype=bool),
        "pooled_prompt_embeds": torch.randn(2, config.get("pooled_projection_dim", 1)),
    }


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_what_is_counted_is_what_the_real_network_has_and_does(family, rank):
    """Parameters, trained parameters, operations of a forward and bytes it keeps, against the loaded weights."""
    network = find_model_config(family)
    real = trainable.load_trainable_policy(
        family, resolution=SIDE, max_tokens=TOKENS, lora_rank=rank
    )
    base = [p for name, p in real.transformer.named_parameters() if "lora" not in name]
    assert model_sizes(network)["transformer"] == sum(p.numel() for p in base)
    trained = count_trained_parameters(network, rank)
    assert trained == sum(p.numel() for p in real.trained)

    rows = full_rows(real, network)
    x = torch.stack([real.noise(torch.Generator().manual_seed(i)) for i in range(2)])
    assert latent_numel(network, SIDE) == x[0].numel()
    if not rank:
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):  # it counts this
            real.velocity(x, torch.tensor([0.9, 0.3]), rows)
        assert 2 * forward_flops(network, SIDE, TOKENS) == counter.get_total_flops()

    with activations._track_saved_tensors(real) as kept:
        real.velocity(x, torch.tensor([0.9, 0.3]), rows)
    words = {
        "model": family,
        "resolution": SIDE,
        "max_tokens": TOKENS,
        "dtype": "float32",
        "lora_rank": rank,
    }
    run_settings = settings.load_settings(
        {**words, "update_batch": 2, "gradient_checkpointing": False}
    )
    assert counted_bytes(network, run_settings) == pytest.approx(sum(kept.values()), rel=0.001)


def counted_bytes(network: policy.ModelConfig, run_settings: settings.Settings) -> int:
    """What the settings' own batch keeps, counted for every family."""
    given = (
        run_settings.resolution,
        run_settings.max_tokens,
        run_settings.dtype,
        run_settings.lora_rank,
        run_settings.lora_targets if run_settings.lora_rank else (),
    )
    fixed, row = activations._count_activation_bytes(
        network, *given, run_settings.gradient_checkpointing
    )
    return fixed + row * run_settings.update_batch


def test_an_update_with_checkpointing_takes_the_memory_that_is_counted(family):
    """The peak of a forward and backward pass, gradients of weights aside, and the count: at most 15% more."""
    network = find_model_config(family)
    real = trainable.load_trainable_policy(
        family, resolution=SIDE, max_tokens=TOKENS, lora_rank=4, gradient_checkpointing=True
    )
    rows = full_rows(real, network)
    x = torch.stack([real.noise(torch.Generator().manual_seed(i)) for i in range(2)])

    def update():
        real.velocity(x, torch.tensor([0.9, 0.3]), rows).sum().backward()

    update()  # gradients are there from now on
    with activations.LiveBytesMode() as live:
        update()
    run_settings = settings.load_settings(
        {
            "model": family,
            "resolution": SIDE,
            "max_tokens": TOKENS,
            "dtype": "float32",
            "lora_rank": 4,
            "update_batch": 2,
            "gradient_checkpointing": True,
        }
    )
    assert 0.98 * live.peak < counted_bytes(network, run_settings) < 1.15 * live.peak


@contextlib.contextmanager
def run_every_block(net, total):
    """Run every block, in place of `run_two_blocks_per_kind`."""
    blocks = [
        block for part in net.children() if isinstance(part, torch.nn.ModuleList) for block in part
    ]
    each = []

    def watch(block):
        run = block.forward

        def forward(*args, **kwargs):
            before = total()
            out = run(*args, **kwargs)
            each.append(total() - before)
            return out

        block.forward = forward

    for block in blocks:
        watch(block)
    yield [], each
    assert len(each) >= len(blocks) >= 6
    for block in blocks:
        del block.forward


@pytest.mark.parametrize(
    "rank, checkpointing", [(0, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_blocks_that_are_alike_keep_alike(family, rank, checkpointing, monkeypatch):
    """Six blocks in each list, of which two of a kind run: the bytes of all six."""
    network = find_model_config(family)
    sizes = json.loads(network.transformer)
    lists = {name: 6 for name in sizes if name in ("num_layers", "num_single_layers", "n_layers")}
    network = dataclasses.replace(network, transformer=json.dumps(sizes | lists))
    assert lists
    given = (
        network,
        SIDE,
        TOKENS,
        "bfloat16",
        rank,
        settings.load_settings().lora_targets,
        checkpointing,
    )
    few = activations._count_activation_bytes.__wrapped__(*given)
    monkeypatch.setattr(activations, "run_two_blocks_per_kind", run_every_block)
    assert few == activations._count_activation_bytes.__wrapped__(*given)


@pytest.mark.parametrize("name, resolution", [("sd3", 64), ("qwen", 320)])
def test_images_and_tiles_that_are_alike_take_alike(name, resolution, tmp_path, monkeypatch):
    """Two images of several tiles: one of a kind is decoded."""
    network = find_model_config(str(tiny_families.build(name, tmp_path / "model")))
    given = network, resolution, "float32", True, 2
    few = activations._decode_bytes.__wrapped__(*given)
    monkeypatch.setattr(activations, "_run_once_per_shape", lambda run: run)
    assert few == activations._decode_bytes.__wrapped__(*given)


@pytest.mark.parametrize(
    "model",
    [
        name
        if name.endswith(("FLUX.1-dev", "klein-4B"))
        else pytest.param(name, marks=pytest.mark.slow)
        for name in known_model_configs()
    ],
)
def test_every_known_model_has_a_whole_plan(model):
    """On a device that has no room for some of them; a model that edits is planned before its list is there."""
    edits = inputs.import_family(known_model_configs()[model].pipeline).edits_images
    lists = dict.fromkeys(("prompts", "eval_prompts"), "edits.jsonl") if edits else {}
    run_settings = settings.load_settings(
        lists
        | {
            "model": model,
            "resolution": 512,
            "eval_resolution": 512,
            "max_tokens": 128,
            "lora_rank": 16,
            "update_batch": 1,
        }
    )
    names = [name for name, _ in describe_estimates(run_settings, 1e15)]
    assert {"parameters", "one forward pass", "memory per process"} <= set(names)
    text = dict(describe_estimates(run_settings, 1e15, device="a100-80"))
    assert "of 80 GB" in text["on 1 x a100-80"] and "assumed" in text["time per iteration"]


@pytest.mark.parametrize(
    "changes, factor", [({}, 1), ({"ema": 0.9}, 4 / 3), ({"lora_rank": 32}, 131 / 11901)]
)
def test_checkpoints_on_the_disk_are_what_is_trained(changes, factor):
    """Three of twelve bytes a weight, or of sixteen with a moving average."""
    m = find_model_config("black-forest-labs/FLUX.1-dev")
    parts = run_disk_bytes(settings.load_settings("paper/chunk", changes), m)
    assert parts["checkpoints"] == pytest.approx(3 * 12 * 11.9e9 * factor, rel=0.02)
    assert parts["embeddings"] == pytest.approx((150 * 16 + 400) * 512 * 4096 * 2, rel=0.01)


def test_a_plan_says_what_the_host_needs():
    words = [
        "plan",
        "machines/8x80gb-full-flux1-dev",
        "--device",
        "h100",
    ]  # the preset carries its eight processes
    answer = CliRunner().invoke(main.app, words)
    assert answer.exit_code == 0, answer.output
    rows = {line.split("  ")[0]: line for line in answer.output.splitlines()}
    assert " fits, " in rows["on 8 x h100"] and "checkpoints 428 GB" in rows["disk"]
    assert "190 GB at most: weights while they load" in rows["memory of the host"]


@pytest.mark.parametrize(
    "changes, processes, part, factor",
    [
        ({"optimizer": "adamw-8bit"}, 1, "moments", 1 / 4),
        ({"sharding": "fsdp"}, 8, "moments", 1 / 8),
        ({"sharding": "fsdp"}, 8, "weights", 1 / 8),
        ({"sharding": "fsdp"}, 8, "gradients", 1 / 8),
        ({"latents_dtype": "bfloat16"}, 1, "trajectories", 1 / 2),
        ({"latents_on": "host"}, 1, "trajectories", 0),
        ({"prompts_per_iteration": 32}, 1, "trajectories", 2),
        ({"lora_rank": 16}, 1, "base weights kept aside", 0),
        ({"sharding": "fsdp", "sharding_group": 4}, 8, "weights", 1 / 4),
        ({"true_cfg_scale": 3.0}, 1, "activations", 2),
        ({"update_batch": 8}, 1, "activations", 2),
    ],
)
def test_a_setting_changes_its_part_of_the_memory(changes, processes, part, factor):
    m = find_model_config("black-forest-labs/FLUX.1-dev")
    base = settings.load_settings({"dtype": "float32"})
    before = training_memory(base, m)
    after = training_memory(settings.load_settings(base, changes), m, processes)
    assert after[part] == pytest.approx(
        before[part] * factor, rel=0.01
    )  # activations have a part of no batch


@pytest.mark.parametrize(
    "changes, share", [({}, 1), ({"sharding_group": 2}, 4), ({"sharding_offload": True}, 0)]
)
def test_the_base_of_an_adapter_is_sharded_and_the_adapter_is_not(changes, share):
    """Eight processes hold an eighth of the base each; or a half; or none, if the host holds it."""
    m = find_model_config("black-forest-labs/FLUX.1-dev")
    whole = settings.load_settings({"lora_rank": 32})
    before = training_memory(whole, m, 8)
    after = training_memory(settings.load_settings(whole, {"sharding": "fsdp", **changes}), m, 8)
    adapter = before["gradients"]
    assert after["weights"] == pytest.approx(adapter + (before["weights"] - adapter) * share / 8)
    assert after["gathered blocks"] == 4 * model_sizes(m)["block"]
    assert {k: v for k, v in after.items() if k not in ("weights", "gathered blocks")} == {
        k: v for k, v in before.items() if k not in ("weights", "gathered blocks")
    }


def test_update_memory_is_used_and_not_exceeded():
    m = find_model_config("black-forest-labs/FLUX.1-dev")
    base = {"lora_rank": 32, "true_cfg_scale": 2.0}
    for gigabytes in (8, 30, 60.5):
        run_settings = fit_update_batch(
            m, settings.load_settings({**base, "update_memory": gigabytes})
        )
        more = settings.load_settings(run_settings, {"update_batch": run_settings.update_batch + 1})
        assert activation_bytes(m, run_settings) <= gigabytes * 1e9 < activation_bytes(m, more)
    assert (
        fit_update_batch(m, settings.load_settings({**base, "update_memory": 0.001})).update_batch
        == 1
    )


def test_every_settings_file_is_a_preset():
    """Each of which is planned in test_cli, or counted in test_method_table."""
    assert [
        str(f.relative_to(ROOT / "runs").with_suffix("")) for f in FILES
    ] == settings.list_presets()


@pytest.mark.parametrize(
    "preset, device, processes",
    [
        ("one-h200-lora", "h200", 1),
        ("one-24gb-lora", "rtx4090", 1),
        ("eight-gpu-full", "h100", 8),
        ("eight-gpu-full", "a100-80", 8),
    ],
)
def test_presets_fit_what_they_are_for(preset, device, processes):
    words = ["plan", f"paper/{preset}", "--device", device, "--processes", str(processes)]
    answer = CliRunner().invoke(main.app, words)
    assert answer.exit_code == 0, answer.output
    assert (
        f"{device}" in answer.output
        and " fits, " in answer.output
        and "not measured on" in answer.output
    )
    shared = "measured on h200 in forwards of FLUX.1-dev" in answer.output
    assert shared == (device == "h200") and ("%, assumed" in answer.output) == (device != "h200")


def test_what_does_not_fit_is_said():
    answer = CliRunner().invoke(
        main.app, ["plan", "paper/chunk", "--device", "h800", "--processes", "8"]
    )
    assert (
        answer.exit_code == 0
        and "does not fit, 302" in answer.output
        and "of 80 GB" in answer.output
    )


def test_a_share_makes_it_longer():
    m = find_model_config("black-forest-labs/FLUX.1-dev")
    run_settings = settings.load_settings({"lora_rank": 16})
    where = find_device("h100")
    half, full = (iteration_seconds(run_settings, m, where, share) for share in (0.5, 1.0))
    assert all(half[phase] == pytest.approx(2 * full[phase]) for phase in full)
    text = dict(describe_estimates(run_settings, 1e15, device="h100", share=0.3))
    assert "at a share of 989 TFLOP/s: 30%, given" in text["time per iteration"]


@pytest.mark.parametrize(
    "words, parts",
    [
        (["pocket/tiny", "--device", "h300"], ["`--device`", "h200", "rtx4090", "'h300'"]),
        (["pocket/tiny", "--share", "0.5"], ["`--share`", "`--device`", "0.5"]),
        (["pocket/tiny", "--device", "h200", "--share", "1.5"], ["`--share`", "at most 1", "1.5"]),
        (["pocket/tiny", "--device", "h200", "--rate", "3"], ["`--rate`", "`--device`", "3"]),
        (["--run", "nowhere"], ["'nowhere'"]),
        ([], ["settings", "--run"]),
    ],
)
def test_wrong_options_are_said_in_a_sentence(words, parts):
    said = run("plan", *words, code=2)
    assert all(part in said for part in parts) and "Traceback" not in said


def test_a_runs_seconds_stand_beside_the_prediction(tmp_path):
    shutil.copytree(DEMO, tmp_path / "demo")
    note = json.loads((DEMO / "run.json").read_text())
    # it was measured before the held-out prompts were divided
    note["settings"]["eval_prompts"] = "pocket:test"
    (tmp_path / "demo/run.json").write_text(json.dumps(note))
    for words in (
        ["--run", tmp_path / "demo"],
        ["pocket/demo", "ema=0.9", "--run", tmp_path / "demo"],
    ):
        answer = CliRunner().invoke(main.app, ["plan", *map(str, words), "--rate", "0.1"])
        assert answer.exit_code == 0, answer.output
        said = {
            line.split()[0]: line for line in answer.output.splitlines() if " measured " in line
        }
        assert {"rollout", "update", "evaluate"} <= set(said)
        assert "predicted at least" in said["rollout"] and "median of 60" in said["update"]
        assert "no prediction" in said["decode"] and "memory" in answer.output
        assert ("settings differ in ema" in answer.output) == (len(words) > 2)


def test_a_plan_imports_no_other_familys_pipeline(tmp_path):
    """All families are asked by name, and only the one that has the model is imported; no weight is read."""
    code = (
        "import sys, chunk_grpo.models.policy; from chunk_grpo.core import settings\n"
        "assert 'chunk_grpo.models.families' not in sys.modules\n"
        "from chunk_grpo.models.inputs import FAMILIES, import_family\n"
        "assert len([import_family(name).known_configs for name in FAMILIES]) == 7\n"
        "pipelines = [n for n in sys.modules if n.startswith('diffusers.pipelines.')]\n"
        "assert not any('_' in n.split('.')[-1] for n in pipelines)\n"
        "from chunk_grpo.planning import plan\n"
        "import safetensors.torch; safetensors.torch.load_file = safetensors.safe_open = None\n"
        "plan.describe_estimates(settings.load_settings('paper/chunk'), 1e15)\n"
        "there = [name for name in sys.modules if name.startswith('diffusers.pipelines.')]\n"
        "words = ('qwen', 'z_image', 'flux2', 'stable_diffusion_3')\n"
        "others = [name for name in there if any(word in name for word in words)]\n"
        "sys.exit(3 + bool(others))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 3


@pytest.fixture
def two_cores(monkeypatch):
    """A machine of two cores without a GPU."""
    monkeypatch.setattr(
        machine, "machine_info", lambda: {"gpus": [], "cores": 2, "memory_gb": 16.0}
    )


def test_a_plan_is_of_as_many_processes_as_a_run_would_have(two_cores):
    def said(*words):
        return CliRunner().invoke(main.app, ["plan", *words]).output

    assert "72, 2 processes" in said("pocket/demo", "--rate", "0.1")
    assert "144, 1 process\n" in said("pocket/demo", "--rate", "0.1", "--processes", "1")
    for words in (("pocket/demo", "--device", "h200"), ("pocket/tiny", "--rate", "1")):
        assert "1 process\n" in said(*words)


@pytest.mark.parametrize(
    "words, before, wanted",
    [
        (["pocket/demo"], None, 2),
        (["pocket/demo", "--processes", "1"], None, 1),
        (["pocket/tiny"], None, 1),
        (["pocket/demo", "--processes", "3"], None, 3),
        (["pocket/demo", "--resume"], 1, 1),
        (["pocket/tiny", "--resume"], 2, 2),
        (["pocket/demo", "--resume", "--processes", "4"], 1, 4),
    ],
)
def test_a_run_has_as_many_processes_as_pay_or_as_it_had(
    words, before, wanted, two_cores, monkeypatch, tmp_path
):
    seen = {}
    monkeypatch.setattr(
        launch, "train", lambda settings, out, processes, **how: seen.update(n=processes) or out
    )
    monkeypatch.setattr(training, "_finish_training", lambda run, report: None)
    if before:
        (tmp_path / "run.json").write_text(json.dumps({"processes": before}))
    answer = CliRunner().invoke(main.app, ["train", *words, "--out", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert seen["n"] == wanted


@pytest.mark.parametrize("gpus, wanted", [(8, 8), (4, 4), (3, 2), (1, 1)])
def test_a_preset_carries_its_processes(gpus, wanted, monkeypatch, tmp_path):
    """To `train` up to the number of devices; to `plan` always, unless a number is given."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("like: machines/8x80gb-full-flux1-dev\nprompts: mine.txt\n")
    monkeypatch.setattr(
        machine, "machine_info", lambda: {"gpus": ["H100"] * gpus, "cores": 64, "memory_gb": 512.0}
    )
    run_settings = settings.load_settings("machines/8x80gb-full-flux1-dev")
    assert choose_process_count(run_settings, "machines/8x80gb-full-flux1-dev") == wanted
    assert choose_process_count(run_settings, "paper/chunk") == 1
    assert choose_process_count(run_settings, str(mine)) == wanted
    # With prompts that eight processes cannot share, `train` and `plan` use as many as can share them.
    mine.write_text("like: machines/8x80gb-full-flux1-dev\nprompts_per_iteration: 4\n")
    assert choose_process_count(settings.load_settings(mine), str(mine)) == min(wanted, 4)
    said = CliRunner().invoke(main.app, ["plan", str(mine), "--device", "h100"]).output
    assert ", 4 processes" in said
    said = CliRunner().invoke(main.app, ["plan", "paper/eight-gpu-full", "--device", "h100"]).output
    assert ", 8 processes" in said


def test_a_plan_says_that_it_does_not_know_the_memory_of_your_reward():
    words = ["plan", "machines/80gb-lora-flux1-dev", "--device", "h100", "reward_options={}"]
    own = [*words, "reward=my_rewards.py:Score", "eval_rewards=[pickscore]"]
    said = CliRunner().invoke(main.app, own).output
    assert re.search(r"not counted +the memory of your rewards my_rewards.py:Score$", said, re.M)
    said = CliRunner().invoke(main.app, [*words, "reward=pickscore"]).output
    assert "fits" in said and "not counted" not in said


def test_the_memory_of_reference_weights_counts_when_processes_are_chosen(monkeypatch):
    words = ["pocket/demo", "method=nft", "shared_noise=false"]
    run_settings = settings.load_settings(words[0], words[1:])
    config = find_model_config("pocket")
    least = sum(training_memory(run_settings, config, 2).values())
    more = sum(training_memory(run_settings, config, 2, reference_weights=1).values())
    for process_bytes, wanted in (((least + more) / 2, 1), (2 * more - least, 2)):
        gigabytes = 2 * 2 * (process_bytes + 1e9) / 1e9
        machine_of = {"gpus": [], "cores": 2, "memory_gb": gigabytes}
        monkeypatch.setattr(machine, "machine_info", lambda found=machine_of: found)
        assert choose_process_count(run_settings, reference_weights=1) == wanted
        said = CliRunner().invoke(main.app, ["plan", *words, "--rate", "1"]).output
        assert (", 2 processes" in said) == (wanted == 2), said


@pytest.mark.parametrize("device, wanted", [("cpu", "cpu"), ("auto", None)])
def test_plan_measures_the_device_of_the_run(device, wanted, monkeypatch):
    asked = []
    monkeypatch.setattr(
        devices, "measure_matmul_rate", lambda dtype, device=None: asked.append(device) or 1e9
    )
    answer = CliRunner().invoke(main.app, ["plan", "pocket/tiny", f"device={device}"])
    assert answer.exit_code == 0 and asked == [wanted], answer.output


def test_under_torchrun_nothing_is_chosen(two_cores, monkeypatch, tmp_path):
    """Else each of four would start two."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    answer = CliRunner().invoke(main.app, ["train", "pocket/demo", "--out", str(tmp_path / "run")])
    assert isinstance(answer.exception, InputError) and "the environment sets WORLD_SIZE=4" in str(
        answer.exception
    )
    assert not list(tmp_path.iterdir())


def test_what_would_fit_is_looked_for_among_settings_that_go_together():
    """All weights in shards have no moments of 8 bits: such a change is not tried, alone or beside another."""
    run_settings = settings.load_settings("machines/8x80gb-full-flux1-dev")
    network = find_model_config(run_settings.model)
    where = find_device("rtx4090")
    assert run_settings.sharding == "fsdp" and not where.fits(
        peak_memory(run_settings, network, 8)[0]
    )
    changes, least = plan._find_savings(run_settings, network, where, 8)
    assert changes is not None and ("optimizer" not in changes or "lora_rank" in changes)
    assert least < peak_memory(run_settings, network, 8)[0]


@pytest.mark.parametrize(
    "preset, changes, device, expected",
    [
        ("paper/one-h200-lora", {}, "l40s", {"gradient_checkpointing", "reward_options"}),
        (
            "paper/one-h200-lora",
            {"gradient_checkpointing": True, "update_batch": 1, "rollout_batch": 1},
            "a100-40",
            {"reward_options"},
        ),
        (
            "machines/24gb-lora-sd35-medium",
            {"vae_tiling": False, "rollout_batch": 12, "eval_resolution": 1024},
            "rtx4090",
            {"vae_tiling"},
        ),
    ],
)
def test_a_saving_that_is_enough_is_offered(preset, changes, device, expected):
    run_settings = settings.load_settings(preset, changes)
    network = find_model_config(run_settings.model)
    where = find_device(device)
    assert not where.fits(peak_memory(run_settings, network)[0])
    found, total = plan._find_savings(run_settings, network, where)
    assert set(found) == expected
    assert (
        where.fits(total)
        and peak_memory(settings.load_settings(run_settings, found), network)[0] == total
    )
    text = dict(describe_estimates(run_settings, 1e15, device=device))["  would fit with"]
    assert all(name in text for name in expected)


@pytest.mark.slow
def test_a_base_in_host_memory_is_offered_only_under_an_adapter():
    run_settings = settings.load_settings(
        "paper/one-h200-lora", {"resolution": 2048, "eval_resolution": 2048}
    )
    network = find_model_config(run_settings.model)
    where = find_device("rtx4090")
    found, total = plan._find_savings(run_settings, network, where)
    assert found["sharding_offload"] and found["sharding"] == "fsdp"
    smaller = settings.load_settings(run_settings, found)
    assert where.fits(total) and peak_memory(smaller, network)[0] == total
    # One process has no other to share weights with, but can leave them in host memory.
    assert plan._merge_savings(run_settings, [{"sharding": "fsdp"}], 1) is None
    offload = [{"sharding": "fsdp", "sharding_offload": True}]
    all_weights = settings.load_settings("paper/chunk")
    assert plan._merge_savings(run_settings, offload, 1)["sharding_offload"]
    assert plan._merge_savings(all_weights, offload, 8) is None
    with_adapter = plan._merge_savings(all_weights, [*offload, {"lora_rank": 32}], 8)
    assert with_adapter["sharding_offload"] and with_adapter["lora_rank"] == 32


def test_a_run_that_no_saving_makes_fit_says_what_it_would_still_take(monkeypatch):
    # Even with the base in host memory, activations at this size leave too little of 12 GB.
    small = dataclasses.replace(find_device("rtx4090"), gigabytes=12)
    monkeypatch.setitem(devices._DEVICES, "rtx4090", small)
    size = {"resolution": 2048, "eval_resolution": 2048}
    run_settings = settings.load_settings("paper/one-h200-lora", size)
    text = dict(describe_estimates(run_settings, 1e15, device="rtx4090"))["  would fit with"]
    assert text.startswith("no setting that `plan` tries: with all savings the run still takes 1")
    assert text.endswith(" GB")


@pytest.mark.parametrize(
    "name, gigabytes",
    [
        ("A100", 80),
        ("a100-40", 40),
        ("l40s", 48),
        ("GH200", 96),
        ("b200", 180),
        ("RTX 4090", 24),
        ("rtx_5090", 32),
    ],
)
def test_devices_are_known_by_their_usual_names(name, gigabytes):
    assert find_device(name).gigabytes == gigabytes


@pytest.mark.parametrize(
    "gpu, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_recognised_by_what_torch_calls_it(gpu, name):
    assert recognise_gpu(gpu) == name


def test_decoding_is_counted_by_the_batch_that_is_decoded():
    """Twelve images of 1024 px are asked for, seven are decoded at once, and each largest activation is there twice."""
    network = find_model_config("black-forest-labs/FLUX.1-dev")
    run_settings = settings.load_settings("paper/one-h200-lora")
    assert decode_batch_size(network, 1024, 12) == 7 and decode_batch_size(network, 512, 12) == 12
    planned = decode_bytes_on_gpu(network, 1024, run_settings.dtype, False, 7)
    assert peak_memory(run_settings, network)[1]["decoding"] == planned
    assert planned == pytest.approx(15.052e9, rel=1e-3)  # measured on an H200, see the page speed
    assert (
        planned - activations._decode_bytes(network, 1024, run_settings.dtype, False, 7)[0]
        == 7 * 256 * 1024**2 * 2
    )


def test_reference_weights_take_memory_and_disk_space():
    """A method that keeps copies of the trained weights, such as nft, needs memory and larger checkpoints for them."""
    network = find_model_config("black-forest-labs/FLUX.1-dev")
    run_settings = settings.load_settings("paper/one-h200-lora")
    trained = 4 * count_trained_parameters(
        network, run_settings.lora_rank, run_settings.lora_targets
    )
    none, two = (training_memory(run_settings, network, reference_weights=n) for n in (0, 2))
    assert two == none | {"reference weights": 2 * trained}
    totals = [peak_memory(run_settings, network, reference_weights=n)[0] for n in (0, 2)]
    assert totals[1] - totals[0] == 2 * trained
    none, two = (run_disk_bytes(run_settings, network, n) for n in (0, 2))
    assert two["checkpoints"] * 12 == none["checkpoints"] * (12 + 2 * 4)

    # The number is among the counts of the method; for an anchor it follows from the settings.
    anchored = settings.load_settings(
        run_settings, {"kl": 0.1, "anchor_every": 5, "drop_flat_groups": False}
    )
    assert iteration_counts(anchored).reference_weights == 1
    counts = dataclasses.replace(iteration_counts(run_settings), reference_weights=2.0)
    memory = plan.estimate_plan(run_settings, 1e15, counts=counts)["memory_bytes"]
    assert memory["reference weights"] == 2 * trained
    rows = dict(describe_estimates(run_settings, 1e15, counts=counts, device="h200"))
    assert rows["  reference weights"] == f"{2 * trained / 1e9:.2f} GB"


def test_sharding_is_not_offered_for_several_sizes():
    """A run with several sizes rejects it."""
    several = settings.load_settings("paper/chunk", {"resolution": [[720, 720], [512, 512]]})
    assert plan._merge_savings(several, [{"sharding": "fsdp"}], 8) is None
    assert plan._merge_savings(several, [{"vae_tiling": True}], 8) == {"vae_tiling": True}
    one = settings.load_settings("paper/chunk")
    assert plan._merge_savings(one, [{"sharding": "fsdp"}], 8)


def test_a_reward_elsewhere_keeps_only_the_options_of_its_requests():
    """The run rejects options of a model that it does not load."""
    preset = settings.load_settings("machines/24gb-lora-sd35-medium")
    assert "dtype" in preset.reward_options["pickscore"]
    elsewhere = plan._reward_options_with_urls(preset)
    assert elsewhere == {"pickscore": {"url": "http://HOST:PORT"}}


def test_memory_of_a_reward_follows_its_number_format():
    config = find_model_config("black-forest-labs/FLUX.1-dev")

    def reward_bytes(**options) -> int:
        run_settings = settings.load_settings(
            "machines/80gb-lora-flux1-dev",
            {"reward": "hpsv3", "eval_rewards": [], "reward_options": {"hpsv3": options}},
        )
        return peak_memory(run_settings, config)[1]["rewards"]

    assert reward_bytes(dtype="float32") == 2 * reward_bytes() == 2 * reward_bytes(dtype="float16")


def test_every_process_saves_images_of_an_evaluation():
    """Up to eight each, and no more than an evaluation samples."""
    config = find_model_config("black-forest-labs/FLUX.1-dev")
    run_settings = settings.load_settings("paper/chunk", {"eval_count": 100})
    one, eight, many = (
        run_disk_bytes(run_settings, config, processes=n)["images"] for n in (1, 8, 1000)
    )
    assert one < eight < many
    sampled = run_settings.eval_count * run_settings.eval_images
    assert (many - one) / (eight - one) == pytest.approx((sampled - 8) / 56)


def test_no_more_prompts_are_counted_than_the_lists_hold(tmp_path):
    (tmp_path / "five.txt").write_text("a\nb\nc\nd\ne\n")
    run_settings = settings.load_settings(
        "pocket/tiny",
        {"prompts": str(tmp_path / "five.txt"), "iterations": 100, "prompts_per_iteration": 5},
    )
    config = find_model_config("pocket")
    assert count_encoded_prompts(run_settings, config) == 5 + run_settings.eval_count


def test_a_rate_of_zero_is_rejected():
    answer = CliRunner().invoke(main.app, ["plan", "pocket/tiny", "--rate", "0"])
    assert isinstance(answer.exception, InputError) and "`--rate` must be above 0" in str(
        answer.exception
    )


def test_a_forward_pass_in_bfloat16_keeps_no_copy_of_the_weights():
    """Autocast would keep one of each weight until the pass ends: two bytes per weight of a full fine-tuning."""
    model = trainable.load_trainable_policy(
        "pocket", resolution=64, max_tokens=12, dtype="bfloat16"
    )
    latents = model.noise(torch.Generator().manual_seed(0))[None]
    conditioning = model.encode(["a red star"])
    with torch.no_grad(), activations.LiveBytesMode() as live:
        model.velocity(latents, torch.tensor([0.5]), conditioning)
    assert model.transformer.dtype == torch.float32
    assert live.peak < sum(p.numel() for p in model.trained)


def test_the_step_of_the_optimizer_takes_four_bytes_per_weight_on_a_gpu():
    weights = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(9)]
    optimizer = torch.optim.AdamW(weights, foreach=True)  # torch's default on a GPU
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with activations.LiveBytesMode() as live:
        optimizer.step()
    assert live.peak == pytest.approx(4 * 9000, rel=0.01)

    run_settings = settings.load_settings("pocket/tiny", {"lora_rank": 0})
    config = find_model_config("pocket")
    trained = count_trained_parameters(config, 0)
    assert peak_memory(run_settings, config)[1]["optimizer step"] == 4 * trained
