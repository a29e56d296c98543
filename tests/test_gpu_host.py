"""The commands of the page about a GPU host, line by line, with small folders in the places of those that it names."""

import json
import re
import shlex
from pathlib import Path

import nbformat
import pytest
import released
from commands import call, run
from small_runs import SMALL
from tiny_flux import build

from chunk_grpo.core import settings
from chunk_grpo.core.validation import parse_yaml
from chunk_grpo.models.activations import fit_update_batch
from chunk_grpo.models.cost import find_model_config, model_sizes
from chunk_grpo.planning.counts import evaluation_flops, read_held_out_prompts
from chunk_grpo.planning.devices import find_device, iteration_seconds, rate_share
from chunk_grpo.planning.disk import run_disk_bytes
from chunk_grpo.planning.memory import host_memory, peak_memory
from chunk_grpo.planning.processes import machine_presets
from chunk_grpo.runs import run_folder

ROOT = Path(__file__).resolve().parents[1]
CELLS = nbformat.read(ROOT / "nbs/14_cli/12_gpu_host.ipynb", as_version=4).cells
TEXT = "\n\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
BLOCKS = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
MINE = next(block for block in BLOCKS if block.startswith("like: "))
ONE, EIGHT = (
    re.findall(r"^\.venv/bin/(chunk-grpo .*)$", block, re.MULTILINE)
    for block in BLOCKS
    if block.startswith("make install\n")
)
FEWER = {
    "iterations": 2,
    "steps": 5,
    "chunks": "2,2",
    "images_per_prompt": 2,
    "prompts_per_iteration": 2,
    "eval_count": 2,
    "checkpoint_every": 1,
    "dtype": "float32",
    "lora_targets": [],
}


def host(folder: Path) -> None:
    """A folder with the weights, prompts and settings that the page names, small."""
    build(folder / "weights/FLUX.1-dev")
    made = released.hpsv3(folder / "made")
    (folder / "weights/HPSv3").mkdir()
    (made / "HPSv3.safetensors").rename(folder / "weights/HPSv3/HPSv3.safetensors")
    (made / "base").rename(folder / "weights/Qwen2-VL-7B-Instruct")
    (folder / "hpdv2").mkdir()
    texts = ["a red star", "a blue circle", "two cats", "three dogs"]
    for name in ("train", "test"):
        pairs = [
            {"prompt": text, "image_path": ["1.jpg", "2.jpg"], "human_preference": [1, 0]}
            for text in texts * 2
        ]
        (folder / f"hpdv2/{name}.json").write_text(json.dumps(pairs))


def small_host(folder: Path, preset: str) -> None:
    """`mine.yaml` as the page has it, with small sizes below."""
    mine = parse_yaml(MINE.replace("/weights/", f"{folder}/weights/"), "mine")
    names = (
        "resolution",
        "eval_resolution",
        "max_tokens",
        "rollout_batch",
        "update_batch",
        "eval_steps",
        "hybrid_split",
        "threads",
        "clip_range",
    )
    mine |= {name: SMALL[name] for name in names} | FEWER | {"like": preset}
    (folder / "mine.yaml").write_text(json.dumps(mine))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "number, preset", [(1, "machines/80gb-lora-flux1-dev"), (8, "machines/8x80gb-full-flux1-dev")]
)
def test_the_page_s_commands_run_in_their_order(number, preset, tmp_path):
    """Two processes stand for eight; the command with --resume finds a run that is finished."""
    commands = ONE if number == 1 else EIGHT
    assert preset in TEXT and len(commands) == 6
    assert all(
        (f"--processes {number}" in c) == (number > 1)
        for c in commands
        if re.search("plan|train|evaluate", c)
    )
    host(tmp_path)
    small_host(tmp_path, preset)
    cache = {"CHUNK_GRPO_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
    for command in commands:
        words = shlex.split(command.replace("--processes 8", "--processes 2"))[1:]
        said = run(*words, cwd=tmp_path, **cache)
        if "--out runs/first" in command and "--resume" not in command:
            assert "iteration 2/2" in said and "report.html" in said
    first = tmp_path / "runs/first"
    summary = run_folder.read_evaluation_summary(first)
    assert run_folder.read_run_info(first)["status"] == "finished" and "hpsv3" in summary["rewards"]
    assert run_folder.read_run_info(tmp_path / "runs/dry")["status"] == "finished"


def test_a_host_without_base_is_told_what_to_do(tmp_path):
    """Offline HPSv3 needs the folder `base`, which the page names."""
    assert "base: /weights/Qwen2-VL-7B-Instruct" in MINE
    host(tmp_path)
    small_host(tmp_path, "machines/80gb-lora-flux1-dev")
    lacking = f"reward_options={{hpsv3: {{weights: {tmp_path}/weights/HPSv3}}}}"
    done = call(
        "train",
        "mine.yaml",
        lacking,
        "--out",
        "no",
        "--no-report",
        cwd=tmp_path,
        CHUNK_GRPO_CACHE=str(tmp_path / "cache"),
        HF_HOME=str(tmp_path / "hub"),
    )
    assert done.returncode and "Traceback" not in done.stderr
    assert (
        "got 'Qwen/Qwen2-VL-7B-Instruct', which is not a folder, and config.json"
        in done.stdout + done.stderr
    )


def shown_rows() -> dict[str, list[str]]:
    """The table of presets as the page shows it."""
    lines = [
        line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| machines/")
    ]
    return {row[0].strip(): [cell.strip() for cell in row] for row in lines}


def test_every_machine_s_preset_stands_in_the_table_and_fits():
    rows = shown_rows()
    assert list(rows) == list(machine_presets())
    assert not [row for row in rows.values() if "does not fit" in row[1]]
    for name in rows:
        run_settings = settings.load_settings(name)
        assert (run_settings.sharding == "fsdp") == ("-full-" in name) and bool(
            run_settings.lora_rank
        ) == ("-lora-" in name)


def test_what_does_not_fit_is_said():
    small = find_device("rtx4090")
    for name in ("black-forest-labs/FLUX.1-dev", "Qwen/Qwen-Image"):
        weights = 2 * model_sizes(find_model_config(name))["transformer"]
        said = f"| {name.split('/')[1]} on 24 GB | its weights alone {weights / 1e9:.0f} of 24: does not fit |"
        assert said in TEXT and not small.fits(weights)


@pytest.mark.slow
def test_all_weights_of_qwen_image_leave_no_room_for_hpsv3():
    run_settings = settings.load_settings(
        "machines/8x80gb-full-qwen-image", {"reward": "hpsv3", "reward_options": {}}
    )
    total, _ = peak_memory(run_settings, find_model_config(run_settings.model), 8)
    assert f"with HPSv3, 8 x 80 GB | {total / 1e9:.0f} of 80: does not fit |" in TEXT
    assert not find_device("h100").fits(total)


def preset_row(preset: str) -> list[str]:
    """What a preset takes on its machine, as the page's table has it; hours without decoding and rewards."""
    run_settings, (device, processes) = (
        settings.load_settings(preset),
        machine_presets()[preset],
    )
    config = find_model_config(run_settings.model)
    where = find_device(device)
    run_settings = fit_update_batch(config, run_settings)
    total, _ = peak_memory(run_settings, config, processes)
    once, times, last = evaluation_flops(run_settings, config)
    share = rate_share(device, run_settings.dtype, run_settings.eval_resolution, config).value
    rate = getattr(where, run_settings.dtype) * 1e12 * share * processes
    training = (
        sum(iteration_seconds(run_settings, config, where, processes=processes).values())
        * run_settings.iterations
    )
    hours = (
        training + once * times / rate,
        last * (1 if read_held_out_prompts(run_settings) else 400) / rate,
    )
    sizes = (
        run_disk_bytes(run_settings, config),
        host_memory(run_settings, config, processes),
    )
    there = f"{total / 1e9:.0f} of {where.gigabytes}" + (
        "" if where.fits(total) else ": does not fit"
    )
    return [
        preset,
        there,
        *(f"{x / 3600:.3g}" for x in hours),
        *(f"{sum(n.values()) / 1e9:.3g}" for n in sizes),
    ]


@pytest.mark.parametrize(
    "preset",
    [
        name if "flux1" in name else pytest.param(name, marks=pytest.mark.slow)
        for name in machine_presets()
    ],
)
def test_the_table_has_what_plan_computes(preset):
    assert shown_rows()[preset] == preset_row(preset)
