"""Runs whose groups have several sizes: settings, draw, replay, gradient, training, resuming, evaluation, plan."""

import json
import math
from types import SimpleNamespace

import pytest
import tiny_families
import torch
from commands import run
from PIL import Image
from small_runs import alike, metrics, trained, write

from chunk_grpo import InputError
from chunk_grpo.core.settings import (
    Settings,
    dump_settings,
    format_resolution,
    load_settings,
    training_sizes,
)
from chunk_grpo.evaluation import run_images
from chunk_grpo.measurements.profiles import measure_distances
from chunk_grpo.measurements.speed import load_workload_settings
from chunk_grpo.models.activations import fit_update_batch
from chunk_grpo.models.cost import find_model_config
from chunk_grpo.models.trainable import load_trainable_policy
from chunk_grpo.planning.counts import iteration_flops
from chunk_grpo.planning.disk import run_disk_bytes
from chunk_grpo.planning.memory import training_memory
from chunk_grpo.planning.plan import describe_counts, describe_estimates, estimate_plan
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.training.gradient import accumulate_gradients, compute_transition_stats
from chunk_grpo.training.groups import measure_profile, sample_groups, score_base
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import (
    RolloutOptions,
    as_image_keys,
    draw_size,
    sample_trajectories,
)
from chunk_grpo.training.state import TrainingState, load_policy_and_optimizer, prepare_state
from chunk_grpo.training.update import update_policy
from chunk_grpo.training.update_batch import build_update_batch

SIZES = [[64, 64], [32, 96], [96, 32]]
WIDE, TALL = (32, 96), (96, 32)
KEYS = as_image_keys((0, 0, p, g) for p in range(4) for g in range(4))
ADVANTAGE = torch.tensor([1.0, -0.5, 0.3, -0.8]).repeat(4) * torch.linspace(0.5, 2, 16)


def test_a_list_of_sizes_is_written_and_read_back(tmp_path):
    settings = load_settings("pocket/tiny", [f"resolution={json.dumps(SIZES)}"])
    assert training_sizes(settings) == (64, WIDE, TALL)
    (tmp_path / "s.yaml").write_text(dump_settings(settings))
    assert load_settings(tmp_path / "s.yaml") == settings
    assert load_settings(json.loads(settings.model_dump_json())) == settings
    assert format_resolution(settings.resolution) == (
        "64 x 64, 32 x 96, 96 x 32 px (height x width)"
    )
    # Two numbers stay a height and a width, and a list of one size is that size.
    assert training_sizes(Settings(resolution=[512, 768])) == ((512, 768),)
    assert Settings(resolution=[[512, 512], [512, 512]]).resolution == 512
    assert Settings(resolution=[[512, 768]]).resolution == (512, 768)


@pytest.mark.parametrize(
    "value", [[], [[]], [[512, 512], 768], [[512, 512], [512, 700]], [[512, 512, 512]], [["512"]]]
)
def test_a_list_that_holds_anything_but_sizes_is_rejected(value):
    with pytest.raises(InputError, match=r"`resolution` must be .* or a list of several"):
        Settings(resolution=value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"compile": True}, r"`compile` must be false with several sizes in `resolution`"),
        (
            {"sharding": "fsdp", "lora_rank": 0},
            r"`sharding` must be none with several sizes in `resolution`",
        ),
        ({"eval_resolution": SIZES}, r"`eval_resolution` must be the side length"),
    ],
)
def test_what_needs_one_size_says_so(change, sentence):
    with pytest.raises(InputError, match=sentence):
        Settings(**{"resolution": SIZES} | change)


def test_a_measurement_of_speed_needs_one_size():
    with pytest.raises(
        InputError, match=r"`resolution` must be one size in a speed measurement; got 64 x 64"
    ):
        load_workload_settings("pocket", {"resolution": SIZES})


def test_an_editing_model_needs_one_size():
    settings = Settings(model="black-forest-labs/FLUX.1-Kontext-dev", resolution=SIZES)
    with pytest.raises(InputError, match=r"`resolution` must be one size with FluxKontextPipeline"):
        estimate_plan(settings, rate=1e12)


def state_of(folder, process: int = 0, processes: int = 1, **more) -> TrainingState:
    """A state without a policy, as one of several processes has it."""
    words = {"resolution": SIZES, "prompts_per_iteration": 8, "images_per_prompt": 4} | more
    state = prepare_state(load_settings("pocket/tiny", words), folder)
    state.accelerator = SimpleNamespace(
        process_index=process, num_processes=processes, device=torch.device("cpu")
    )
    return state


def test_processes_draw_the_prompts_and_sizes_of_one(tmp_path):
    """A size depends on seed, iteration and prompt; in a share, prompts of one size stand side by side."""
    alone = state_of(tmp_path)
    shares = [state_of(tmp_path, process, 2) for process in range(2)]
    seen = set()
    for i in range(5):
        parts = [share.local_prompt_indices(i) for share in shares]
        assert sorted(parts[0] + parts[1]) == sorted(alone.local_prompt_indices(i))
        assert shares[1].iteration_prompt_indices(i) == parts[0] + parts[1]
        for share, part in zip(shares, parts, strict=True):
            sizes = [share.size_of(i, p) for p in part]
            assert sizes == [alone.size_of(i, p) for p in part]
            changes = sum(a != b for a, b in zip(sizes, sizes[1:], strict=False))
            assert changes == len(set(sizes)) - 1
            seen |= set(sizes)
    assert seen == {64, WIDE, TALL}
    one_size = state_of(tmp_path, resolution=64)
    assert one_size.sizes_of(KEYS) is None


@pytest.fixture(scope="module")
def policy():
    return load_trainable_policy("pocket", resolution=64, max_tokens=12)


def context_of(policy, method, prompts: list[int]) -> ReplayContext:
    """Groups of four for some of four prompts: two in a square, one wide, one tall."""
    of_prompt = [64, 64, WIDE, TALL]
    keys = [key for key in KEYS if key.prompt in prompts]
    texts = ["a red star", "two blue rings", "a green square", "three red stars"]
    rows = policy.encode([texts[p] for p in prompts])
    paths = sample_trajectories(
        policy=policy,
        conditioning=rows,
        prompt_index=torch.arange(len(keys)) // 4,
        keys=keys,
        options=RolloutOptions(method.sampler(0), batch_size=8),
        sizes=[of_prompt[key.prompt] for key in keys],
    )
    return ReplayContext(policy, rows, paths)


def gradient_of(context, method, advantage, limit: int, moved: bool) -> torch.Tensor:
    """The gradient of an update of all images, on-policy or after the weights have moved."""
    count = len(context.trajectories.keys)
    steps = method.trainable_steps(context.trajectories.sampler)
    chunks = Chunks((2, len(steps) - 2))
    work = build_update_batch(
        torch.arange(count),
        torch.tensor([[0, 1]] * count),
        chunks,
        limit,
        trainable_steps=steps,
        sizes=context.trajectories.sizes,
    )
    for batch in work.batches:
        sizes = {context.trajectories.sizes[i] for i in work.image_index[batch].tolist()}
        assert len(sizes) == 1 and len(batch) <= limit
    old = None
    if moved:
        old = compute_transition_stats(context, work, method)
        # It depends on the step alone, so that parts of the images get the same.
        shift = 5e-4 * torch.linspace(-1, 1, len(steps))[work.step_index]
        old = (old[0] + shift, *old[1:])
    context.policy.transformer.zero_grad()
    accumulate_gradients(context, work, advantage, method, old)
    return torch.cat([p.grad.flatten() for p in context.policy.trained])


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("statistic", ["ratio", "guard"])
@pytest.mark.parametrize("limit", [64, 4])
def test_the_gradient_is_the_mean_of_those_of_each_size(policy, statistic, limit, moved):
    """Batches of one size change nothing: 16 images in three sizes, or the same images size by size."""
    words = {"statistic": statistic, "images_per_prompt": 4, "kl": 0.01, "steps": 8}
    words |= {"chunks": "2,5"}
    method = load_method(load_settings("pocket/tiny", words))
    together = context_of(policy, method, [0, 1, 2, 3])
    whole = gradient_of(together, method, ADVANTAGE, limit=limit, moved=moved)
    parts = []
    for prompts in ([0, 1], [2], [3]):
        context = context_of(policy, method, prompts)
        images = [i for i, key in enumerate(KEYS) if key.prompt in prompts]
        share = gradient_of(context, method, ADVANTAGE[images], limit=limit, moved=moved)
        parts.append(share * len(images) / len(KEYS))
    policy.set_resolution(64)
    assert whole.abs().max() > 0
    torch.testing.assert_close(whole, sum(parts), rtol=1e-3, atol=1e-5 * whole.abs().max().item())


METHODS = {
    "chunk-gain": {"window": "early:2", "chunks": "whole"},
    "self-opd": {},
    "neighbor": {},
    "nft": {},
    "crd": {},
    "chunk": {"chunks": "adaptive", "diversity": False, "shared_noise": True},
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_train_groups_of_several_sizes(name, tmp_path):
    words = {"method": name, "steps": 9, "iterations": 2, "prompts_per_iteration": 4}
    words |= {"eval_every": 0, "eval_count": 1, "threads": 1, "baseline_images": 1}
    words |= {"images_per_prompt": 4, "updates_per_iteration": 1, "rollout_batch": 6}
    settings = load_settings("pocket/tiny", words | {"resolution": SIZES} | METHODS[name])
    state = load_policy_and_optimizer(prepare_state(settings, tmp_path))
    sampled = set()
    for _ in range(2):
        rollout = sample_groups(state)
        paths = rollout.context.trajectories
        sampled |= set(paths.sizes)
        for group in range(4):
            assert len(set(paths.sizes[4 * group : 4 * group + 4])) == 1
        assert rollout.advantage.isfinite().all()
        base = score_base(state, rollout)
        assert all(len(scores) == 4 for scores in base.values())
        profile = measure_profile(state, paths)
        assert "latent_numel" not in profile and min(profile["mean"]) >= 0
        update = update_policy(state, rollout)
        assert all(map(math.isfinite, update.norms)) and max(update.norms) > 0
        assert all(error < 1e-4 for error in update.ratio_errors)
        assert state.policy.resolution == 64
        state.iteration += 1
    assert len(sampled) > 1


@pytest.mark.parametrize(
    "name",
    [
        "dev",
        pytest.param("sd3", marks=pytest.mark.slow),
        pytest.param("qwen", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_several_sizes_resumes_bit_for_bit(name, tmp_path):
    """The ratio is 1 before the first update, and images as trained have the sizes of training."""
    sizes = [[32, 64], [64, 32], [32, 32]]
    folder = write(
        tmp_path,
        model=str(tiny_families.build(name, tmp_path / name)),
        resolution=sizes,
        eval_resolution=32,
    )
    few = ["prompts_per_iteration=4", "images_per_prompt=2", "eval_every=1", "eval_count=2"]
    few = ["train", folder / "s.yaml", *few, "steps=5", "chunks=2,2", "--no-report"]
    run(*few, "iterations=2", "--out", folder / "whole")
    run(*few, "iterations=1", "--out", folder / "parts")
    run(*few, "iterations=2", "--out", folder / "parts", "--resume")
    assert trained(folder / "whole") == trained(folder / "parts")
    assert metrics(folder / "whole")[-1] == metrics(folder / "parts")[-1]
    assert metrics(folder / "whole")[1]["ratio_floor"] < 1e-5

    run("evaluate", folder / "whole", "eval_prompts=" + str(folder / "prompts.txt"))
    evaluation = folder / "whole" / "evaluation"
    summary = json.loads((evaluation / "summary.json").read_text())
    assert summary["resolution"] == 32 and summary["as_trained"]["resolution"] == sizes
    settings = load_settings(folder / "s.yaml")
    drawn = set()
    for line in (evaluation / "scores.jsonl").read_text().splitlines():
        record = json.loads(line)
        size = run_images.arm_image_size(settings, record["arm"], record["prompt_index"])
        height, width = (size, size) if isinstance(size, int) else size
        assert Image.open(evaluation / record["file"]).size == (width, height)
        if record["arm"] == "as-trained":
            drawn.add((height, width))
    assert len(drawn) > 1


def test_two_processes_train_what_one_trains(tmp_path):
    """The same images in the same sizes, up to the rounding of other batches."""
    words = ["iterations=2", "prompts_per_iteration=4", "images_per_prompt=2", "threads=1"]
    words += [f"resolution={json.dumps(SIZES)}", "eval_every=1", "eval_count=4", "--no-report"]
    run("train", "pocket/tiny", *words, "--out", tmp_path / "one")
    run("train", "pocket/tiny", *words, "--processes", "2", "--out", tmp_path / "two")
    assert alike(tmp_path / "one", tmp_path / "two")


def test_a_profile_measures_each_prompt_at_its_size(policy):
    sampler = Sampler(sigmas(6, 3.0))
    prompts = ["a red star", "two blue rings", "a green square"]
    sizes = [WIDE, 64, WIDE]
    mixed = measure_distances(policy, prompts, [0, 1, 2], 2, 0, sampler, sizes=sizes)
    assert policy.resolution == 64
    square = measure_distances(policy, prompts, [1], 2, 0, sampler)
    torch.testing.assert_close(mixed["l1"][1:2], square["l1"])
    policy.set_resolution(WIDE)
    wide = measure_distances(policy, prompts, [0, 2], 2, 0, sampler)
    policy.set_resolution(64)
    torch.testing.assert_close(mixed["l1"][[0, 2]], wide["l1"])


@pytest.mark.slow
def test_plan_takes_the_largest_size_for_memory_and_the_mean_for_time():
    model = "black-forest-labs/FLUX.1-dev"
    config = find_model_config(model)
    small, large, mixed = 512, (512, 1024), [[512, 512], [512, 1024], [512, 512]]

    def of(function, size):
        """The result of a function of plan for runs of a size."""
        return function(Settings(model=model, lora_rank=8, resolution=size), config)

    assert of(training_memory, mixed) == of(training_memory, large)
    assert of(training_memory, mixed) != of(training_memory, small)
    assert of(run_disk_bytes, mixed) == of(run_disk_bytes, large)
    flops = {str(size): of(iteration_flops, size) for size in (small, large, mixed)}
    for phase, operations in flops[str(mixed)].items():
        mean = (2 * flops[str(small)][phase] + flops[str(large)][phase]) / 3
        assert operations == pytest.approx(mean)
    fitted = {
        str(size): fit_update_batch(
            config, Settings(model=model, lora_rank=8, resolution=size, update_memory=40)
        ).update_batch
        for size in (small, large, mixed)
    }
    assert fitted[str(mixed)] == fitted[str(large)] < fitted[str(small)]
    lines = dict(describe_estimates(Settings(model=model, resolution=mixed), 1e12))
    assert lines["one forward pass"].endswith(
        "on average over 512 x 512, 512 x 1024 px (height x width)"
    )
    counts = dict(describe_counts(load_settings("pocket/tiny", {"resolution": SIZES}), 1))
    assert counts["evaluation at the end"].endswith(
        "as trained at 64 x 64, 32 x 96, 96 x 32 px (height x width)"
    )


def test_a_drawn_size_depends_on_nothing_but_its_arguments():
    sizes = (64, WIDE, TALL)
    first = [draw_size(sizes, 3, i, p) for i in range(20) for p in range(20)]
    assert first == [draw_size(sizes, 3, i, p) for i in range(20) for p in range(20)]
    assert set(first) == set(sizes)
    assert first != [draw_size(sizes, 4, i, p) for i in range(20) for p in range(20)]


def test_a_record_names_the_size_of_its_images(tmp_path):
    """A record's own size stands above the draw; it must be one of the run's, in a list that is trained on."""
    lines = [{"prompt": "a red star", "resolution": [32, 96]} for _ in range(6)]
    lines += [{"prompt": "a blue ring", "height": 96, "width": 32}, {"prompt": "two dogs"}]
    file = tmp_path / "mine.jsonl"

    def write_list(records):
        """Write the records as the list of prompts."""
        file.write_text("".join(json.dumps(record) + "\n" for record in records))

    write_list(lines)
    (tmp_path / "run").mkdir()
    state = state_of(tmp_path / "run", prompts=str(file))
    for i in range(6):
        sizes = {p: state.size_of(i, p) for p in state.local_prompt_indices(i)}
        assert all(sizes[p] == WIDE for p in range(6)) and sizes[6] == TALL
        assert sizes[7] == draw_size((64, WIDE, TALL), state.settings.seed, i, 7)

    described = dict(describe_counts(state.settings))
    assert any("7 with a size, which must be one of several" in text for text in described.values())

    wrong = {
        "must name one of the sizes in `resolution`": {"resolution": [64, 32]},
        "must name the size of its images": {"width": 32},
        "must name the size of its images by": {"resolution": "wide"},
    }
    for sentence, size in wrong.items():
        write_list([*lines[1:], {"prompt": "a red star", **size}])
        with pytest.raises(InputError, match=sentence):
            state_of(tmp_path / "run", prompts=str(file))
    write_list(lines)
    for words in ({"eval_prompts": str(file)}, {"prompts": str(file), "resolution": 64}):
        with pytest.raises(InputError, match="but a run samples all prompts in the same way"):
            state_of(tmp_path / "run", **words)
