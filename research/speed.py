"""Measure the time of an iteration, the gain of each optimisation and the growth of cost, for nbs/findings/speed.ipynb.

    python research/speed.py --out runs/results/benchmarks/speed.json                        on two cores
    python research/speed.py --model flux-size --out runs/results/benchmarks/speed_gpu.json  on a GPU
        [--repeats 5] [--parts profile,iteration,orders,levers,growth,ranks] [NAME=VALUE ...]

The two sides of an optimisation are measured alternately in one process, and their medians are compared. NAME=VALUE
changes settings of the workload, as in `chunk-grpo speed`. It takes about ten minutes and needs a machine that does
nothing else; each part is written when it is finished.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orders
import torch

from chunk_grpo.core import machine
from chunk_grpo.core import settings as setting
from chunk_grpo.core.files import write_json
from chunk_grpo.measurements import speed
from chunk_grpo.models import prompt_embeds, trainable
from chunk_grpo.models.policy import decode_latents
from chunk_grpo.rewards import rewards
from chunk_grpo.rewards.rewards import StreamingScores
from chunk_grpo.runs import launch, run_folder
from chunk_grpo.training.gradient import accumulate_gradients, compute_transition_stats
from chunk_grpo.training.method import Method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update_batch import build_update_batch

PARTS = ("profile", "iteration", "orders", "levers", "growth", "ranks")
MIDDLE = {
    "num_layers": 2,
    "num_single_layers": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 28, 28),
    "guidance_embeds": True,
}
FEW = speed._FLUX_VAE_CONFIG | {"block_out_channels": (32, 32, 64, 64)}
AT_256 = [
    "resolution=256",
    "max_tokens=64",
    "dtype=float32",
    "steps=5",
    "chunks=2,2",
    "images_per_prompt=2",
    "rollout_batch=2",
    "update_batch=2",
]
AT_256_IN_GROUPS = [
    *AT_256[:-3],
    "prompts_per_iteration=2",
    "images_per_prompt=4",
    "updates_per_iteration=1",
    "rollout_batch=8",
    "update_batch=8",
]

RANKS = {  # settings that `measure_processes` changes in pocket/demo
    "eval_every": 0,
    "eval_count": 2,
    "eval_steps": 1,
    "hybrid_split": 0,
}


def log(text):
    """Print a status line to the error stream."""
    print(text, file=sys.stderr, flush=True)


def median(function, device, repeats):
    """Return the median time of `repeats` calls in seconds, after a first call that does not count."""
    function()
    return statistics.median(speed.time_call(function, device)[1] for _ in range(repeats))


def alternate(before, after, device, repeats):
    """Return the median times of two functions in seconds, as [before, after]; they are called alternately."""
    before()
    after()
    spent = [
        (speed.time_call(before, device)[1], speed.time_call(after, device)[1])
        for _ in range(repeats)
    ]
    return [statistics.median(column) for column in zip(*spent, strict=True)]


def with_settings(b, **changes):
    """Return a copy of a `Workload` with changed settings."""
    return dataclasses.replace(b, settings=b.settings.model_copy(update=changes))


# -------------------------------------------------------------------------------------------------- where the time goes


def profile_operations(b):
    """Profile rollout and update of a `Workload`; return their eight longest operations, keyed by phase.

    A row has the keys operation, share (of the time, 0 to 1) and calls. One more row counts reads of a value from a tensor.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if b.policy.device.type == "cuda" else []
    found = {}
    paths = b.rollout()
    for name, call in (("rollout", b.rollout), ("update", lambda: b.update(paths))):
        with torch.profiler.profile(activities=kinds) as profiler:
            call()
        field = (
            "self_device_time_total" if b.policy.device.type == "cuda" else "self_cpu_time_total"
        )
        events = sorted(profiler.key_averages(), key=lambda e: -getattr(e, field))
        total = sum(getattr(e, field) for e in events)
        found[name] = [
            {"operation": e.key, "share": getattr(e, field) / total, "calls": e.count}
            for e in events[:8]
        ]
        waits = sum(e.count for e in events if e.key == "aten::_local_scalar_dense")
        found[name].append({"operation": "looks into a tensor", "share": None, "calls": waits})
    return found


# -------------------------------------------------------------------------------------------------------------- levers


def without_compilation(b, call):
    """Return a function that calls `call` without compiled blocks, and otherwise unchanged."""

    def run_eagerly():
        """Run the call with compilation switched off."""
        with torch.compiler.set_stance("force_eager"):
            b.policy.compiled = False
            call()
            b.policy.compiled = True

    return run_eagerly


def measure_optimisations(b, repeats):
    """Measure each optimisation on a `Workload`, and return one row per optimisation.

    The keys are change, expected (the expected gain, in words), before, after (both in seconds) and note.
    """
    rows = []
    device = b.policy.device
    paths = b.rollout()
    context = ReplayContext(b.policy, b.conditioning, paths)
    every = torch.arange(len(b.keys))
    chosen = b.sample_chunks(paths)
    work = build_update_batch(every, chosen, b.chunks, b.settings.update_batch)

    def add_row(change, expected, before, after, note=""):
        """Time the functions `before` and `after`, and add the row of this change."""
        seconds_before, seconds_after = alternate(before, after, device, repeats)
        rows.append(
            {
                "change": change,
                "expected": expected,
                "before": seconds_before,
                "after": seconds_after,
                "note": note,
            }
        )
        log(
            f"{change}: {seconds_before:.3g} s, {seconds_after:.3g} s, {seconds_before / seconds_after:.2f} times"
        )

    def forward_backward(which=work, **given):
        """Run the forward and backward passes of an update batch."""
        b.policy.transformer.zero_grad()
        accumulate_gradients(context, which, b.advantage, Method(b.settings), **given)

    one_image = with_settings(b, rollout_batch=1)
    no_chunk = with_settings(b, update_batch=1)
    add_row(
        "rollout: batches of images, not one",
        "several times as fast; a row of FLUX.1-dev fills a GPU alone",
        one_image.rollout,
        b.rollout,
    )
    add_row(
        "update: whole chunks in one forward, not one transition",
        "as the rollout",
        lambda: no_chunk.update(paths),
        lambda: b.update(paths),
    )
    images = len(b.keys)
    prompts = len(b.prompts)
    saved = (images - prompts) / (images * b.settings.steps)
    add_row(
        "rollout: one first forward for the images of a prompt",
        f"{saved:.0%} less, the forwards that are left out",
        with_settings(b, shared_noise=False).rollout,
        with_settings(b, shared_noise=True).rollout,
    )
    share = 1 / 4 if not b.settings.lora_rank else 1 / 3
    add_row(
        "update: the old log-probability is the new one, detached",
        f"{share:.0%} less, a forward of its own",
        lambda: forward_backward(old=compute_transition_stats(context, work, Method(b.settings))),
        forward_backward,
    )
    half = build_update_batch(every[: images // 2], chosen, b.chunks, b.settings.update_batch)
    add_row(
        "update: half of the groups have no spread and are dropped",
        "50% less",
        forward_backward,
        lambda: forward_backward(half),
        "the share of such groups is the reward's",
    )
    net = b.policy.transformer

    def checkpointed():
        """Run the passes with gradient checkpointing."""
        net.enable_gradient_checkpointing()
        forward_backward()
        net.disable_gradient_checkpointing()

    add_row(
        "update: activations kept, not computed again",
        f"{share:.0%} less, the forward that is computed again",
        checkpointed,
        forward_backward,
        "gradient_checkpointing: false, where the memory is there",
    )
    kernels = [
        name
        for name in ("_native_flash", "_native_cudnn", "_native_efficient", "_native_math")
        if not trainable.try_attention_backend(name, device, b.policy.dtype)
    ]
    for name in kernels:

        def other(call, name=name):
            """Run the call with the attention backend `name`, then restore torch's own choice."""
            trainable.set_attention_backend(b.policy, name)
            call()
            with trainable.attention_backend("native"):
                net.set_attention_backend("native")

        add_row(
            f"rollout: torch's own attention, not {name.removeprefix('_native_')}",
            "math writes all weights down; torch's own is the best",
            lambda other=other: other(b.rollout),
            b.rollout,
            "attention: native",
        )
    final = paths.latents[:, -1]

    def channels_last():
        """Decode with the VAE in channels-last format."""
        b.policy.vae.to(memory_format=torch.channels_last)
        decode_latents(b.policy, final, b.settings.rollout_batch)
        b.policy.vae.to(memory_format=torch.contiguous_format)

    add_row(
        "decode: the VAE's channels last",
        "fewer conversions of layout; another order of sums",
        lambda: decode_latents(b.policy, final, b.settings.rollout_batch),
        channels_last,
        "not taken: images differ in the last digits, and kept runs would not be repeated bit for bit",
    )
    if b.scorers:
        rows += measure_reward_optimisations(b, repeats)
    count = torch.get_num_threads()
    if device.type == "cpu" and count > 1:

        def alone():
            """Run rollout and update with one thread."""
            torch.set_num_threads(1)
            b.update(b.rollout())
            torch.set_num_threads(count)

        add_row(
            f"rollout and update: {count} threads, not one",
            "less than as many times: small matrices",
            alone,
            lambda: b.update(b.rollout()),
        )
    log("compiling")
    trainable.compile_blocks(b.policy)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds = speed.time_call(lambda: b.update(b.rollout()), device)[1]
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    note = f"compile: true; {count} compilations, {seconds:.0f} s with the first iteration, before that"
    add_row(
        "rollout: compiled blocks",
        "what lies between the matrices is fused: a fifth to a half less",
        without_compilation(b, b.rollout),
        b.rollout,
        note,
    )
    add_row(
        "update: compiled blocks",
        "as the rollout",
        without_compilation(b, forward_backward),
        forward_backward,
        note,
    )
    return rows


def measure_reward_optimisations(b, repeats):
    """Measure what prompt embeddings from disk and scoring during the rollout gain; return rows as `measure_optimisations`."""
    rows = []
    texts = [b.prompts[i] for i in b.prompt_index.tolist()]
    (reward,) = b.scorers.values()  # the shipped settings have one reward
    scorers = {"reward": reward}

    def encode_from_scratch():
        """Load the text encoders and encode the prompts."""
        with prompt_embeds.lazy_prompt_encoder(b.policy) as encode:
            encode(b.prompts)

    def score_afterwards():
        """Sample all images, then decode and score them."""
        paths = b.rollout()
        images = decode_latents(b.policy, paths.latents[:, -1], b.settings.rollout_batch)
        rewards.score_images("reward", reward, images, texts)

    def score_during_rollout():
        """Decode and score each batch while the next one is sampled."""
        settings = b.settings
        with ThreadPoolExecutor(1) as executor:
            streaming = StreamingScores(executor, scorers, texts, settings.rollout_batch)
            sample_trajectories(
                policy=b.policy,
                conditioning=b.conditioning,
                prompt_index=b.prompt_index,
                keys=b.keys,
                options=RolloutOptions(
                    b.sampler, batch_size=settings.rollout_batch, shared_noise=settings.shared_noise
                ),
                on_batch=lambda final: streaming.add(
                    decode_latents(b.policy, final, settings.rollout_batch)
                ),
            )
            streaming.scores()

    pairs = [
        (
            "encode: embeddings from disk, the encoders not loaded",
            "nearly all of it",
            encode_from_scratch,
            lambda: b.policy.encode(b.prompts),
        ),
        (
            "rollout to scores: scored while the next batch is drawn",
            "nothing where both want the same cores",
            score_afterwards,
            score_during_rollout,
        ),
    ]
    for change, expected, before, after in pairs:
        seconds_before, seconds_after = alternate(before, after, b.policy.device, repeats)
        rows.append(
            {
                "change": change,
                "expected": expected,
                "before": seconds_before,
                "after": seconds_after,
                "note": "",
            }
        )
        log(
            f"{change}: {seconds_before:.3g} s, {seconds_after:.3g} s, {seconds_before / seconds_after:.2f} times"
        )
    return rows


# -------------------------------------------------------------------------------------------------------------- growth


def growth_points(model):
    """Yield (quantity, points) for images, transitions, resolution and chunk; a point is a value and its settings.

    An example is ("images", [(12, ["prompts_per_iteration=1"]), ...]).
    """
    large = model == "flux-size"
    prompts = (1, 2, 4) if large else (1, 2, 4, 8)
    lengths = (1, 2, 4, 8, 16)
    yield "images", [(12 * p, [f"prompts_per_iteration={p}"]) for p in prompts]
    yield (
        "transitions",
        [(t, [f"steps={t}", "chunks=steps"]) for t in ((5, 9, 17) if large else (5, 9, 17, 33))],
    )
    yield (
        "resolution",
        [(r, [f"resolution={r}"]) for r in ((512, 720, 1024) if large else (32, 64, 96, 128))],
    )
    yield (
        "chunk",
        [(n, [f"chunks=equal:{n}", "chunk_fraction=1", "images_per_prompt=2"]) for n in lengths],
    )


def measure_growth(model, repeats, changes):
    """Measure seconds, operations and memory at each of the `growth_points`; return lists of entries, keyed by quantity.

    The keys of an entry are value, rollout and update (seconds), transitions, flop and memory (bytes).
    """
    found = {}
    for what, values in growth_points(model):
        found[what] = []
        for value, more in values:
            gc.collect()
            b = speed.prepare_workload(speed.load_workload_settings(model, [*changes, *more]))
            paths = b.rollout()
            one = speed._count_flops(b.policy, b.conditioning)
            trained = b.update(paths)
            memory = orders.measure_two_passes(b) if what == "chunk" else {}
            entry = {
                "value": value,
                "rollout": median(b.rollout, b.policy.device, repeats),
                "transitions": trained,
                "update": median(
                    lambda b=b, paths=paths: b.update(paths), b.policy.device, repeats
                ),
                "flop": one,
                "memory": dict(
                    zip(("one", "two passes", "one pass"), memory.values(), strict=False)
                ),
            }
            found[what].append(entry)
            log(f"{what} {value}: rollout {entry['rollout']:.3g} s, update {entry['update']:.3g} s")
            del b, paths
    return found


def measure_orders(settings, repeats):
    """Measure our order and those of three papers with one thread; return the results of `orders.measure`, keyed by model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    middle = speed.load_workload_settings("flux-size", AT_256_IN_GROUPS)
    found = {
        "pocket": orders.measure(settings, repeats, log),
        "a FLUX of middle size": orders.measure(middle, repeats, log, configs=(MIDDLE, FEW)),
    }
    torch.set_num_threads(threads)
    return found


def measure_processes(iterations):
    """Measure a training iteration with one and two processes of one thread, and with one process of two threads.

    Returns one entry per case with the keys processes, threads and seconds, which is keyed by phase.
    """
    found = []
    for processes, threads in ((1, 1), (2, 1), (1, 2)):
        settings = setting.load_settings(
            "pocket/demo",
            {
                **RANKS,
                "iterations": iterations,
                "threads": threads,
                "checkpoint_every": iterations,
            },
        )
        with tempfile.TemporaryDirectory() as tmp:
            lines = run_folder.read_metrics(
                launch.train(settings, Path(tmp) / "run", processes=processes)
            ).iloc[2:]
        phases = {
            name: float(lines[f"seconds_{name}"].median())
            for name in ("rollout", "decode", "reward", "update")
        }
        found.append({"processes": processes, "threads": threads, "seconds": phases})
        log(
            f"{processes} processes, {threads} threads each: {sum(phases.values()):.3g} s an iteration"
        )
    return found


def main():
    """Measure the parts given by --parts, and write them to the file given by --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out")
    a = parser.parse_args()
    settings = speed.load_workload_settings(a.model, a.changes)
    parts = a.parts.split(",")
    result = {
        "model": a.model,
        "changes": a.changes,
        "repeats": a.repeats,
        "machine": machine.machine_info(),
        "threads": torch.get_num_threads(),
        "versions": machine.library_versions(),
        "git_commit": machine.current_git_commit(),
    }

    def save(**found):
        """Add results and write all results so far, so that they survive if the program is stopped."""
        result.update(found)
        if a.out:
            write_json(Path(a.out), result)

    middle = speed.load_workload_settings("flux-size", AT_256)
    if "profile" in parts:
        log("profile")
        shares = {a.model: profile_operations(speed.prepare_workload(settings))}
        if a.model == "pocket":
            shares["a FLUX of middle size"] = profile_operations(
                speed.prepare_workload(middle, MIDDLE, FEW)
            )
        save(profile=shares)
    if "iteration" in parts:
        save(iteration=orders.measure(settings, a.repeats, log))
    if "orders" in parts and a.model == "pocket":
        save(orders=measure_orders(settings, a.repeats))
    if "growth" in parts:
        save(growth=measure_growth(a.model, a.repeats, a.changes))
    if "ranks" in parts and a.model == "pocket":
        save(ranks=measure_processes(2 + a.repeats))
    if "levers" in parts:  # the last, since they leave the policy compiled
        save(levers=measure_optimisations(speed.prepare_workload(settings), a.repeats))
        if a.model == "pocket":
            log("a FLUX of middle size")
            save(
                **{
                    "levers of a middle size": measure_optimisations(
                        speed.prepare_workload(middle, MIDDLE, FEW), a.repeats
                    )
                }
            )
    if a.out:
        log(f"numbers: {a.out}")


if __name__ == "__main__":
    main()
