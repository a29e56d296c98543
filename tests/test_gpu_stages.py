"""`make gpu` at the small size on whatever is here: every part of every stage gives numbers, or says why not."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
import gpu_stages  # noqa: E402

spec = importlib.util.spec_from_file_location("gpu_tool", ROOT / "tools/gpu.py")
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)


def measured(number: int, out: Path, only: list[str] | None = None) -> dict:
    "The parts of a small stage, of which each must have numbers."
    content = gpu.run_stage(number, True, out, only)
    assert json.loads(gpu_stages.stage_file(number, out).read_text()) == json.loads(json.dumps(content))
    gone = {name: part for name, part in content["parts"].items() if not isinstance(part, dict)}
    assert not gone
    return content["parts"]


def test_size_stands_beside_the_plan(tmp_path):
    parts = measured(4, tmp_path)
    assert parts["decode 3"]["peak_gb"] > 2 * parts["decode one"]["peak_gb"] > 0
    for name in ("decode one", "decode 3", "update", "update, checkpointed"):
        assert 0.3 < parts[name]["peak_gb"] / parts[name]["planned_gb"] < 3, name
    assert parts["decode 3"]["from one by one"] < 1e-5 and parts["forward at 64 px"]["finite"]


def test_encoders_have_a_rate(tmp_path):
    parts = measured(6, tmp_path)
    assert all(part["a second"] > 0 and part["peak_gb"] > 0 for part in parts.values())
    assert parts["HPSv3's Qwen2-VL-7B"]["finite"]


def test_encoders_have_the_published_sizes():
    "4.76e9 weights in T5-XXL's encoder, 7.75e9 in HPSv3 less its head and `lm_head`."
    t5 = gpu.t5_encoder(gpu.T5_XXL, torch.device("meta"), torch.bfloat16)
    qwen = gpu.hpsv3_scorer(gpu.QWEN2_VL_7B, torch.device("meta"), torch.bfloat16, 1).model
    counts = [sum(p.numel() for p in net.parameters()) for net in (t5, qwen)]
    assert counts == [pytest.approx(4.76e9, rel=0.01), pytest.approx(7.75e9, rel=0.01)]


def test_speed_has_both_orders(tmp_path):
    parts = measured(5, tmp_path, ["plain", "checkpointed"])
    assert parts["plain"]["update"]["reference_seconds"] > 0 and parts["plain"]["gradient_error"] < 1e-4
    assert "reference_seconds" not in parts["checkpointed"]["update"]


@pytest.mark.slow
def test_compiled_blocks_have_a_speed(tmp_path):
    assert measured(5, tmp_path, ["compiled"])["compiled"]["compilations"] > 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_pocket_model_in_each_way(tmp_path):
    parts = measured(1, tmp_path)
    for name in ("checkpointing", "sharded"):
        assert parts[name]["from_cpu"]["reward_mean"] < 1e-3, name
    assert parts["gpu"]["from_cpu"]["reward_mean"] < 1e-3 and "ratio_floor" in parts["bfloat16"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_killed_run_beside_two_equal_ones(tmp_path):
    parts = measured(2, tmp_path)
    assert set(parts) == {"two equal runs", "killed and resumed"}
    if not torch.cuda.is_available():  # what a GPU's kernels keep equal is what the stage is to find out
        assert all(part[what] for part in parts.values() for what in ("metrics equal", "weights equal"))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_tests_of_a_gpu_are_counted(tmp_path):
    part = measured(3, tmp_path)["pytest"]
    assert part["passed"] >= 10 and not part["failed"] and len(part["names passed"]) == part["passed"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_weights_of_a_part_go_through_a_checkpoint(tmp_path):
    parts = measured(7, tmp_path)
    assert parts["resumed"]["checkpoint_gb"] > 0 and parts["resumed"]["iterations"] == 2
    if not torch.cuda.is_available():
        assert parts["uninterrupted"]["metrics equal"] and parts["uninterrupted"]["weights equal"]


def tool(*words) -> subprocess.CompletedProcess:
    "The command, as `make gpu` starts it."
    return subprocess.run([sys.executable, ROOT / "tools/gpu.py", *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_files_say_so_and_measurements_stay(tmp_path):
    gpu_stages.stage_file(4, tmp_path).write_text('{"kept": true}')
    done = tool(4, 6, "--out", tmp_path)
    assert done.returncode == 1 and "no CUDA device" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(gpu_stages.stage_file(4, tmp_path).read_text()) == {"kept": True}
    note = json.loads(gpu_stages.stage_file(6, tmp_path).read_text())
    assert note["parts"]["all"].startswith("not measured: ")


@pytest.mark.slow
def test_a_stage_ends_in_time_and_says_what_it_did_not_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STAGE_SECONDS", 0)
    gpu_stages.stage_file(6, tmp_path).write_text('{"parts": {"T5-XXL": "not measured: the stage ended before it"}}')
    assert gpu.run_in_time(6, True, tmp_path) is False


def test_a_part_that_cannot_be_measured_says_why(tmp_path, monkeypatch):
    def fails(*given, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 PiB.")

    monkeypatch.setattr(gpu, "t5_encoder", fails)
    parts = gpu.run_stage(6, True, tmp_path)["parts"]
    assert parts["T5-XXL"] == "not measured: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 PiB."
    assert isinstance(parts["HPSv3's Qwen2-VL-7B"], dict)


def test_stages_are_read_as_a_table_and_a_sentence(tmp_path):
    "A stage that ended early keeps what it had measured; one of the tests' small size counts for nothing."
    def too_much():
        raise MemoryError("1 PB were asked for")

    parts = {"first": lambda: {"images": 12, "peak": {"gb": 1.25}}, "second": too_much, "third": lambda: {"ok": True}}
    about = {"stage": 4, "device": "an invented one", "small": False}
    left = gpu_stages.measure_parts(parts, gpu_stages.stage_file(4, tmp_path), about)
    assert json.loads((tmp_path / "4-size.json").read_text()) == left
    assert [gpu_stages.describe_part(part) for part in left["parts"].values()] == [
        "images 12, peak.gb 1.25", "not measured: MemoryError: 1 PB were asked for", "ok True"]
    found = gpu_stages.read_gpu_stages(tmp_path)
    assert found.keys() == {4} and len(gpu_stages.gpu_rows(found)) == 6 + 3
    said = gpu_stages.gpu_sentence(found)
    assert "an invented one, 1 of 7 stages" in said and "1 of their parts" in said
    (tmp_path / "4-size.json").write_text(json.dumps(left | {"small": True}))
    assert gpu_stages.read_gpu_stages(tmp_path) == {}
    assert gpu_stages.gpu_sentence({}).startswith("Nothing here was run on a GPU")
