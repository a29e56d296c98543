"""Measure on a GPU, stage by stage, without network and without weights: `make gpu`, or `make gpu STAGE=3`.

    python tools/gpu.py [STAGE ...] [--out runs/results/gpu] [--small]

Each stage runs in a process of its own, for eight minutes at most, and leaves a JSON file; the page
nbs/findings/speed.ipynb says what it holds and how to read it. `--small` runs the same code with tiny
sizes on whatever is there, a CPU too: what tests do. Files of small stages are marked, and no page counts them.
"""

import argparse
import functools
import gc
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import gpu_stages
import orders
import torch
from safetensors.torch import load_file
from torch import Tensor

from chunk_grpo import InputError, pocket
from chunk_grpo.core import machine
from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.machine import terminate_process_group
from chunk_grpo.measurements import speed
from chunk_grpo.models.policy import TORCH_DTYPES, ModelConfig, decode_latents
from chunk_grpo.planning import plan
from chunk_grpo.rewards.hpsv3 import IMAGE_TOKEN, REWARD_TOKEN, HPSv3, build_reward_head
from chunk_grpo.runs import run_folder
from chunk_grpo.training import trainer

ROOT = Path(__file__).resolve().parents[1]
STAGE_SECONDS = 480  # that a stage may take
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL_TRANSFORMER = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
                     "in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32,
                     "axes_dims_rope": (4, 6, 6), "guidance_embeds": True}
SMALL_VAE = speed._FLUX_VAE_CONFIG | {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "latent_channels": 4}


def say(text: str) -> None:
    "Progress."
    print(text, file=sys.stderr, flush=True)


def device_name() -> str:
    "What torch computes on."
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


def gigabytes(count: int | None) -> float | None:
    "Bytes as GB."
    return None if count is None else count / 1e9


def time_calls(call, repeats: int = 3) -> float:
    "Median seconds of a call, after one that does not count."
    call()
    return statistics.median(speed.time_call(call, DEVICE)[1] for _ in range(repeats))


def sizes(small: bool) -> tuple[dict, dict, ModelConfig]:
    "FLUX.1-dev's transformer and VAE, or tiny ones, and the same as the plan knows them."
    if not small:
        known = plan.find_model_config("black-forest-labs/FLUX.1-dev")
        return speed._FLUX_TRANSFORMER_CONFIG, speed._FLUX_VAE_CONFIG, known
    names = ("FluxPipeline", *map(json.dumps, (SMALL_TRANSFORMER, SMALL_VAE)))
    return SMALL_TRANSFORMER, SMALL_VAE, ModelConfig(*names)


# --------------------------------------------------------------------------------------------- 1: the pocket model


def start(words: list, on_cpu: bool = False, log: Path | None = None) -> subprocess.Popen:
    "The command line in a session of its own."
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    command = [sys.executable, "-m", "chunk_grpo.cli.main", *map(str, words)]
    with open(log or os.devnull, "ab") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)


def run(words: list, log: Path, on_cpu: bool = False) -> None:
    "The command line to its end; RuntimeError with its last line where it fails."
    child = start(words, on_cpu, log)
    try:
        code = child.wait()
    finally:
        terminate_process_group(child)
    if code:
        raise RuntimeError((log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1])


VARIANTS = {"cpu": [], "gpu": [], "bfloat16": ["dtype=bfloat16"], "checkpointing": ["gradient_checkpointing=true"],
            "sharded": ["sharding=fsdp"], "adapter": ["lora_rank=4", "ema=0.9", "kl=0.01"],
            "compiled": ["compile=true"]}
COMPARED = ("reward_mean", "grad_norm", "ratio_mean", "ratio_max_dev", "ratio_floor", "ratio_floor_rollout")


def pocket_metrics(folder: Path, changes: list[str], on_cpu: bool = False) -> list[dict]:
    "Train a pocket run; the metrics of its iterations."
    run(["train", "pocket/tiny", *changes, "eval_every=0", "--out", folder, "--no-report"], folder.with_suffix(".log"),
        on_cpu)
    return run_folder.read_metrics_lines(folder)[1:]


def pocket_variant(folder: Path, name: str, reference: list[dict]) -> dict:
    "The metrics of a variant, and how far they are from the CPU's."
    lines = pocket_metrics(folder / name, VARIANTS[name], on_cpu=name == "cpu")
    reference.extend(lines if name == "cpu" else [])
    found = {key: lines[-1][key] for key in COMPARED if key in lines[-1]} | {
        key: lines[0][key] for key in COMPARED if key in lines[0] and key not in lines[-1]}
    found["seconds"] = sum(sum(line["seconds"].values()) for line in lines)
    if reference and name != "cpu":
        pairs = list(zip(lines, reference, strict=True))
        found["from_cpu"] = {key: max(abs(mine[key] - theirs[key]) for mine, theirs in pairs)
                             for key in ("reward_mean", "grad_norm")}
    return found


def stage_pocket(small: bool, folder: Path) -> dict:
    "The pocket model on the CPU, on the device, and in each way of training."
    reference: list[dict] = []
    return {name: functools.partial(pocket_variant, folder, name, reference) for name in VARIANTS}


# ------------------------------------------------------------------------------------- 2: equal runs and a killed one


LONGER = ["iterations=5", "checkpoint_every=1"]


def killed_run(folder: Path) -> None:
    "A run that is killed after its second iteration, and resumed."
    words = ["train", "pocket/tiny", *LONGER, "eval_every=0", "--out", folder, "--no-report"]
    child, lines = start(words, log=folder.with_suffix(".log")), folder / "metrics.jsonl"
    while child.poll() is None and not (lines.is_file() and '"iteration": 2,' in lines.read_text()):
        time.sleep(0.02)
    os.killpg(child.pid, 9)
    child.wait()
    while run_folder.is_training(folder):  # its trainer dies with it
        time.sleep(0.1)
    if len(run_folder.read_metrics_lines(folder)) > 5:
        raise RuntimeError("the run had ended before it could be killed")
    run([*words, "--resume"], folder.with_suffix(".log"))


def compare_runs(one: Path, other: Path) -> dict:
    "What two runs have in common, and how far apart they are."
    lines = [[{k: v for k, v in line.items() if not k.startswith("seconds")} for line in
              run_folder.read_metrics_lines(folder)] for folder in (one, other)]
    weights = [{name: tensor for file in sorted((folder / "final").glob("*.safetensors"))
                for name, tensor in load_file(file).items()} for folder in (one, other)]
    pictures = [{file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                 for file in sorted((folder / "samples").rglob("*.png"))} for folder in (one, other)]
    apart = max((weights[0][k].float() - weights[1][k].float()).abs().max().item() for k in weights[0])
    return {"metrics equal": lines[0] == lines[1], "pictures equal": pictures[0] == pictures[1],
            "weights equal": apart == 0, "largest difference of a weight": apart,
            "largest difference of reward_mean": max(
                abs(a["reward_mean"] - b["reward_mean"]) for a, b in zip(*(x[1:] for x in lines), strict=True))}


def stage_resume(small: bool, folder: Path) -> dict:
    "Two equal runs and a killed one."
    def twice():
        for name in ("first", "second"):
            pocket_metrics(folder / name, LONGER)
        return compare_runs(folder / "first", folder / "second")

    def killed():
        killed_run(folder / "killed")
        return compare_runs(folder / "first", folder / "killed")

    return {"two equal runs": twice, "killed and resumed": killed}


# ------------------------------------------------------------------------------------------------------ 3: the tests


def run_tests(small: bool, folder: Path) -> dict:
    "The tests of tests/ that need a GPU; at the small size the same ones on a CPU."
    marked = [str(file) for file in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in file.read_text()]
    chosen = ["tests/test_gpu.py", "-k", "cpu"] if small else [*marked, "-m", "gpu"]  # others may need what is not here
    report = folder / "tests.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    if not report.is_file():
        raise RuntimeError((done.stdout + done.stderr).strip().splitlines()[-1])
    results = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        word = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        results[word].append(f"{case.get('classname')}::{case.get('name')}")
    return {word: len(names) for word, names in results.items()} | {f"names {k}": v for k, v in results.items() if v}


def stage_tests(small: bool, folder: Path) -> dict:
    "pytest -m gpu."
    return {"pytest": lambda: run_tests(small, folder)}


# ----------------------------------------------------------------------------------------------------- 4: FLUX's size


def flux_settings(small: bool, **changes) -> setting.Settings:
    "The settings of a FLUX of that size with an adapter."
    size = {"resolution": 64, "max_tokens": 16, "dtype": "float32", "lora_rank": 2} if small else {}
    return speed.load_workload_settings("flux-size", size | changes)


def kept_forward(policy, rows: dict, count: int) -> None:
    "A forward of some rows, and its backward."
    latents = policy.noise(torch.Generator().manual_seed(0)).expand(count, -1, -1).to(policy.device)
    given = {k: v[:1].expand(count, *v.shape[1:]) for k, v in rows.items()}
    policy.velocity(latents, torch.full((count,), 0.5), given).sum().backward()


def stage_size(small: bool, folder: Path) -> dict:
    "Forward, decoding and update of FLUX.1-dev's size, beside the plan."
    transformer, vae, config = sizes(small)
    large, many = (128, 3) if small else (1024, 12)

    @functools.cache
    def made():
        return speed.load_workload_policy(flux_settings(small), transformer, vae)

    def load():
        policy, before = made(), torch.cuda.memory_allocated() if DEVICE.type == "cuda" else None
        parts = plan.training_memory(flux_settings(small), config)
        own = sum(p.numel() for p in plan.meta_policy(config, 64, 16).vae.parameters())
        planned = parts["weights"] + own * TORCH_DTYPES[flux_settings(small).dtype].itemsize
        return {"parameters": sum(p.numel() for p in policy.transformer.parameters()), "held_gb": gigabytes(before),
                "planned_gb": gigabytes(planned)}

    def forward(resolution: int, count: int):
        policy = made().set_resolution(resolution)
        rows = {k: v.expand(count, *v.shape[1:]) for k, v in policy.encode(["a prompt"]).items()}
        latents = policy.noise(torch.Generator().manual_seed(0)).expand(count, -1, -1).to(policy.device)

        @torch.no_grad()
        def call():
            return policy.velocity(latents, torch.full((count,), 0.5), rows)

        return {"pixels": resolution, "rows": count, "seconds": time_calls(call),
                "peak_gb": gigabytes(speed._measure_peak_bytes(call, DEVICE)), "finite": bool(call().isfinite().all())}

    def decode(count: int):
        policy = made().set_resolution(large)
        latents = torch.stack([policy.noise(torch.Generator().manual_seed(i)) for i in range(count)]).to(policy.device)

        def call():
            return decode_latents(policy, latents, count)

        at_once = min(count, policy.decode_limit)
        planned = plan._peak_decode_bytes(config, large, flux_settings(small).dtype, False, at_once)
        one = torch.cat([decode_latents(policy, row[None], 1) for row in latents[:2]])
        return {"pixels": large, "images": count, "at once": at_once, "seconds": time_calls(call, 1),
                "peak_gb": gigabytes(speed._measure_peak_bytes(call, DEVICE)), "planned_gb": gigabytes(planned),
                "from one by one": (call()[:2] - one).abs().max().item()}

    def update(count: int, checkpointing: bool):
        s = flux_settings(small, update_batch=count, gradient_checkpointing=checkpointing)
        policy = made().set_resolution(s.resolution)
        net = policy.transformer
        (net.enable_gradient_checkpointing if checkpointing else net.disable_gradient_checkpointing)()
        for p in policy.trained:
            p.grad = torch.zeros_like(p)
        rows = policy.encode(["a prompt"])
        peak = speed._measure_peak_bytes(lambda: kept_forward(policy, rows, count), DEVICE)
        planned = plan._batch_activation_bytes(config, s)
        return {"transitions": count, "seconds": time_calls(lambda: kept_forward(policy, rows, count), 1),
                "peak_gb": gigabytes(peak), "planned_gb": gigabytes(planned)}

    side = flux_settings(small).resolution
    forwards = {f"forward at {pixels} px": functools.partial(forward, pixels, 1) for pixels in (side, large)}
    return {"weights": load, **forwards, "decode one": lambda: decode(1), f"decode {many}": lambda: decode(many),
            "update": lambda: update(2, False), "update, checkpointed": lambda: update(4, True)}


# ---------------------------------------------------------------------------------------------------------- 5: speed


def stage_speed(small: bool, folder: Path) -> dict:
    "An iteration of that size: plain beside the reference order, compiled, checkpointed."
    transformer, vae, _ = sizes(small)
    few = {"steps": 5, "chunks": "2,2", "images_per_prompt": 2 if small else 4, "rollout_batch": 4, "update_batch": 2}

    def measure(reference: bool, **changes):
        gc.collect()
        s = flux_settings(small, **few, **changes)
        measure_it = orders.measure if reference else speed.measure_iteration
        found = measure_it(s, 1 if small else 2, say, configs=(transformer, vae))
        kept = ("seconds", "images_per_second", "share", "peak_bytes", "reference_seconds")
        phases = {name: {key: phase[key] for key in kept if phase.get(key) is not None}
                  for name, phase in found["phases"].items()}
        rest = ("matrix_rate", "images", "transitions", "gradient_error", "compilations", "orders")
        return phases | {key: found.get(key) for key in rest}

    return {"plain": lambda: measure(True), "checkpointed": lambda: measure(False, gradient_checkpointing=True),
            "compiled": lambda: measure(False, compile=True)}


# ------------------------------------------------------------------------------------------------------- 6: encoders


T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
          "feed_forward_proj": "gated-gelu"}
SMALL_T5 = T5_XXL | {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
QWEN2_VL_7B = {
    "text_config": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                    "num_key_value_heads": 4, "vocab_size": 151658, "max_position_embeddings": 32768,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}},
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4}}
SMALL_QWEN = {
    "text_config": QWEN2_VL_7B["text_config"] | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}},
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 4}}


def t5_encoder(config: dict, device: torch.device, dtype: torch.dtype):
    "A T5 encoder with random weights."
    from transformers import T5Config, T5EncoderModel

    with torch.device(device):
        return T5EncoderModel(T5Config(**config)).to(dtype).eval().requires_grad_(False)


def word_tokenizer():
    "A tokenizer of words that knows HPSv3's two marks: as many tokens as the published one, nearly."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([IMAGE_TOKEN, REWARD_TOKEN])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<unk>")


def hpsv3_scorer(config: dict, device: torch.device, dtype: torch.dtype, batch: int) -> HPSv3:
    "HPSv3 with random weights, and words for tokens."
    from transformers import Qwen2VLConfig, Qwen2VLModel

    tokenizer = word_tokenizer()
    made = Qwen2VLConfig(**config, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2VLModel(made).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
    with torch.device(device):
        head = build_reward_head(made.text_config.hidden_size).eval().requires_grad_(False)
    return HPSv3(tokenizer, device, dtype, batch, model, head)


def stage_encoders(small: bool, folder: Path) -> dict:
    "Prompts and images a second of the two large models beside the transformer."
    dtype = torch.float32 if small else torch.bfloat16

    def measured(call, count: int, model) -> dict:
        seconds = time_calls(call)
        return {"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds,
                "a second": count / seconds, "peak_gb": gigabytes(speed._measure_peak_bytes(call, DEVICE)),
                "weights_gb": gigabytes(sum(p.nbytes for p in model.parameters()))}

    def prompts():
        count, length = (2, 16) if small else (64, 512)
        model = t5_encoder(SMALL_T5 if small else T5_XXL, DEVICE, dtype)
        ids = torch.randint(model.config.vocab_size, (count, length), device=DEVICE)

        @torch.no_grad()
        def call():
            return model(ids).last_hidden_state

        return {"prompts": count, "tokens": length} | measured(call, count, model)

    def images():
        gc.collect()
        count, batch = (2, 2) if small else (24, 8)
        scorer = hpsv3_scorer(SMALL_QWEN if small else QWEN2_VL_7B, DEVICE, dtype, batch)
        side = 64 if small else 720
        drawn = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))

        def call() -> Tensor:
            return scorer(drawn, ["a cat under a tree"] * count)

        finite = bool(call().isfinite().all())
        return {"images": count, "at once": batch, "finite": finite} | measured(call, count, scorer.model)

    return {"T5-XXL": prompts, "HPSv3's Qwen2-VL-7B": images}


# --------------------------------------------------------------------------------------------- 7: all weights, sharded


SHARDED = {"prompts": "pocket:train", "eval_prompts": "pocket:test", "max_tokens": 12, "prompts_per_iteration": 1,
           "images_per_prompt": 4, "steps": 5, "chunks": "2,2", "sharding": "fsdp", "reward": "pocket-clip",
           "eval_every": 1, "eval_steps": 2, "hybrid_split": 1, "eval_count": 1, "rollout_batch": 4, "update_batch": 2,
           "checkpoint_every": 1, "keep_checkpoints": 1, "clip_range": 1e-3}  # each evaluated: a run ends with one


DISK_BYTES = 2 + 2 * 12 + 3 * 4  # of a weight: the model, a checkpoint beside the next one, trained weights of two runs


def part_of_flux(divisor: int, small: bool) -> tuple[dict, dict]:
    "Configurations of a part of FLUX.1-dev's blocks behind the pocket's text encoders, and its VAE."
    text = {"joint_attention_dim": 64, "pooled_projection_dim": 64}
    if small:
        return SMALL_TRANSFORMER | text, SMALL_VAE
    blocks = {"num_layers": 19 // divisor, "num_single_layers": 38 // divisor}
    return speed._FLUX_TRANSFORMER_CONFIG | blocks | text, speed._FLUX_VAE_CONFIG


def write_random_model(folder: Path, transformer: dict, vae: dict, dtype: torch.dtype) -> Path:
    "A FLUX pipeline's folder: the pocket's text encoders and schedule, a random transformer and VAE."
    shutil.copytree(pocket.pocket_model_path(), folder, ignore=shutil.ignore_patterns("transformer", "vae"))
    s = speed.load_workload_settings("flux-size", {"dtype": str(dtype)[6:], "resolution": 64, "max_tokens": 16})
    policy = speed.RandomFluxPolicy(s, transformer, vae)
    for part in ("transformer", "vae"):
        getattr(policy, part).save_pretrained(folder / part, max_shard_size="5GB")
    return folder


def train_and_tell(words: list[str]) -> None:
    "Train a folder with settings from a file, and write the most memory that it took; in a process of its own."
    s, out = setting.load_settings(words[0]), Path(words[1])
    out.mkdir(exist_ok=True)
    trainer.train_run(s, out)
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None
    write_json(out / "peak.json", {"peak_bytes": peak})


def train_alone(out: Path, settings: dict) -> None:
    "`train_and_tell` in a process of its own; RuntimeError with its last line where it fails."
    file = out.with_suffix(".json")
    write_json(file, settings)
    words = [sys.executable, __file__, "--train", str(file), str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])


def stage_sharded(small: bool, folder: Path) -> dict:
    "All weights of a part of FLUX.1-dev, sharded; a checkpoint and back."
    side = 64 if small else 512
    base = SHARDED | {"model": str(folder / "model"), "resolution": side, "eval_resolution": side}
    base["dtype"] = "float32" if small else "bfloat16"
    free = 1e12 if small or DEVICE.type == "cpu" else torch.cuda.get_device_properties(DEVICE).total_memory
    room = shutil.disk_usage(folder).free

    @functools.cache
    def chosen():
        for divisor in range(3, 20):  # a third of the blocks, or as many as device and disk have room for
            transformer, vae = part_of_flux(divisor, small)
            config = ModelConfig("FluxPipeline", json.dumps(transformer), json.dumps(vae))
            parts = plan.training_memory(setting.load_settings(base), config)
            if sum(parts.values()) < 0.85 * free and plan.model_sizes(config)["transformer"] * DISK_BYTES < 0.9 * room:
                return transformer, vae, config, parts
        raise InputError(f"the device's {free / 1e9:.0f} GB or the disk's {room / 1e9:.0f} GB hold no such model")

    def model():
        transformer, vae, config, _ = chosen()
        write_random_model(folder / "model", transformer, vae, torch.float32 if small else torch.bfloat16)
        return {"parameters": plan.model_sizes(config)["transformer"], "double blocks": transformer["num_layers"],
                "single blocks": transformer["num_single_layers"]}

    def train(name: str, iterations: int):
        start_ = time.perf_counter()
        train_alone(folder / name, base | {"iterations": iterations})
        line = run_folder.read_metrics_lines(folder / name)[-1]
        peak = read_json(folder / name / "peak.json")["peak_bytes"]
        return {"iterations": iterations, "reward_mean": line["reward_mean"], "grad_norm": line["grad_norm"],
                "seconds": time.perf_counter() - start_, "peak_gb": gigabytes(peak),
                "planned_gb": gigabytes(sum(chosen()[3].values()))}

    def resumed():
        files = list((folder / "run" / "checkpoints").rglob("*"))
        held = sum(file.stat().st_size for file in files if file.is_file())
        return {"checkpoint_gb": gigabytes(held)} | train("run", 2)

    def uninterrupted():
        shutil.rmtree(folder / "run" / "checkpoints")
        found = train("whole", 2)
        return found | compare_runs(folder / "whole", folder / "run")

    first = functools.partial(train, "run", 1)
    return {"model": model, "one iteration": first, "resumed": resumed, "uninterrupted": uninterrupted}


# ------------------------------------------------------------------------------------------------------------ stages


STAGES = {1: stage_pocket, 2: stage_resume, 3: stage_tests, 4: stage_size, 5: stage_speed, 6: stage_encoders,
          7: stage_sharded}


def run_stage(number: int, small: bool, out: Path, only: list[str] | None = None) -> dict:
    "Measure a stage in this process; what its file holds."
    about = {"stage": number, "name": gpu_stages.GPU_STAGES[number], "small": small, "device": device_name(),
             "machine": machine.machine_info(), "versions": machine.library_versions(),
             "git_commit": machine.current_git_commit()}
    with tempfile.TemporaryDirectory(prefix="chunk-grpo-gpu-") as folder:
        parts = STAGES[number](small, Path(folder))
        parts = {name: part for name, part in parts.items() if only is None or name in only}
        return gpu_stages.measure_parts(parts, gpu_stages.stage_file(number, out), about, say)


def run_in_time(number: int, small: bool, out: Path) -> bool:
    "Measure a stage in a process of its own that has eight minutes; whether all of it was measured."
    file, began = gpu_stages.stage_file(number, out), time.monotonic()
    say(f"stage {number}, {gpu_stages.GPU_STAGES[number]}")
    words = [str(number), "--out", str(out), "--inside", *(["--small"] if small else [])]
    child = subprocess.Popen([sys.executable, __file__, *words], cwd=ROOT, start_new_session=True)
    try:
        child.wait(STAGE_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"stage {number} had {STAGE_SECONDS} s; what it had not measured by then is said in {file}")
    finally:
        terminate_process_group(child)
    content = read_json(file)
    write_json(file, content | {"seconds": time.monotonic() - began})
    say(f"stage {number}: {time.monotonic() - began:.0f} s, {file}")
    return all(isinstance(part, dict) for part in content["parts"].values())


def note_no_gpu(number: int, out: Path) -> None:
    "Leave the reason in a stage's file, unless an earlier measurement lies there."
    file = gpu_stages.stage_file(number, out)
    if not file.is_file():
        out.mkdir(parents=True, exist_ok=True)
        why = f"{gpu_stages.NOT_MEASURED}torch sees no CUDA device on this machine"
        write_json(file, {"stage": number, "name": gpu_stages.GPU_STAGES[number], "small": False, "device": "none",
                          "parts": {"all": why}})


def main() -> int:
    "Run the stages that were asked for; 1 where something could not be measured."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", type=int, choices=[[], *STAGES], metavar="STAGE")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/results/gpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on whatever is there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.train:
        train_and_tell(a.train)
        return 0
    stages = a.stages or list(STAGES)
    if a.inside:
        run_stage(stages[0], a.small, a.out)
        return 0
    if not a.small and DEVICE.type != "cuda":
        for number in stages:
            note_no_gpu(number, a.out)
        say("make gpu: torch sees no CUDA device on this machine, so nothing was measured")
        return 1
    done = [run_in_time(number, a.small, a.out.absolute()) for number in stages]
    print(gpu_stages.gpu_sentence(gpu_stages.read_gpu_stages(a.out)) + ".")
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
