"""Methods beside the package: three published ones, a file each, go through everything that a run does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import call, run
from small_runs import alike, metrics, trained
from transitions import batch_of

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.imports import import_callable
from chunk_grpo.models import trainable
from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.training.chunk_sampling import sample_chunks
from chunk_grpo.training.gradient import accumulate_gradients, compute_transition_stats
from chunk_grpo.training.method import Method
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.update_batch import build_update_batch, split_updates

FOLDER = Path(__file__).parent / "methods"
FILES = {"Guard": "guard.py", "Mix": "mix.py", "NFT": "nft.py"}
METHODS = {name: f"{FOLDER / file}:{name}" for name, file in FILES.items()}
SMALL = [
    "iterations=2",
    "steps=7",
    "chunks=2,4",
    "images_per_prompt=4",
    "updates_per_iteration=2",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
    "checkpoint_every=1",
    "threads=1",
    "learning_rate=3e-4",
]
KEYS = [(0, 0, p, g) for p in range(2) for g in range(4)]


def words(name: str) -> list[str]:
    """Settings on the command line that train a method in seconds."""
    return [*SMALL, f"method={METHODS[name]}", *["shared_noise=false"] * (name == "NFT")]


def method_of(name: str, **more) -> Method:
    """A method with small settings."""
    return load_method(
        settings.load_settings(
            "pocket/tiny", [*words(name), *(f"{k}={v}" for k, v in more.items())]
        )
    )


@pytest.fixture(scope="module")
def policy():
    return trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)


def context_of(policy, method, iteration=0) -> ReplayContext:
    """Trajectories that a method draws."""
    rows = policy.encode(["a red star", "two blue rings"])
    row = torch.arange(8) // 4
    paths = sample_trajectories(
        policy=policy,
        conditioning=rows,
        prompt_index=row,
        keys=KEYS,
        options=RolloutOptions(method.sampler(iteration), batch_size=8),
    )
    copies = {
        name: [p.detach().clone() for p in policy.trained] for name in method.reference_decays
    }
    return ReplayContext(policy, rows, paths, copies)


def work_of(context, method, share=0, limit=64):
    """The first or second of two updates, every place trained."""
    profile = torch.linspace(2, 1, len(context.trajectories.sampler))
    chunks = method.partition(context.trajectories, profile)
    chosen = sample_chunks(context.trajectories, chunks, 1.0)
    places = method.trainable_steps(context.trajectories.sampler)
    return build_update_batch(
        split_updates(KEYS, 4, 2)[share],
        chosen,
        chunks,
        limit,
        method.transition_weights(context.trajectories.sampler),
        places,
    )


def gradient(context, work, advantage, method, old=None):
    """The gradient of an update, and what it says of itself."""
    context.policy.transformer.zero_grad()
    stats = accumulate_gradients(context, work, advantage, method, old)
    return torch.cat([p.grad.flatten() for p in context.policy.trained]), stats


@pytest.mark.parametrize("chunks", ["2,4", "profile", "adaptive:2"])
def test_an_override_of_chunks_gets_the_profile_whatever_the_setting_is(policy, tmp_path, chunks):
    file = tmp_path / "mine.py"
    file.write_text(
        "from chunk_grpo.theory.chunks import Chunks\nfrom chunk_grpo.training.method import Method\n\n\n"
        "class Mine(Method):\n"
        "    def chunks(self, profile):\n"
        "        first = 1 if profile[0] > profile[-1] else 2\n"
        "        return Chunks((first, len(profile) - first))\n",
        encoding="utf-8",
    )
    method = load_method(
        settings.load_settings("pocket/tiny", [*SMALL, f"method={file}:Mine", f"chunks={chunks}"])
    )
    trajectories = context_of(policy, method).trajectories
    profile = torch.linspace(2, 1, len(trajectories.sampler))
    assert method.partition(trajectories, profile) == Chunks((1, 5))


@pytest.mark.parametrize("name", FILES)
def test_it_trains_and_goes_on_bit_for_bit(name, tmp_path):
    run("train", "pocket/tiny", *words(name), "--out", tmp_path / "whole", "--no-report")
    cut = [*words(name)[1:], "iterations=1"]
    run("train", "pocket/tiny", *cut, "--out", tmp_path / "cut", "--no-report")
    run("train", "pocket/tiny", *words(name), "--out", tmp_path / "cut", "--resume", "--no-report")
    lines = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "cut")
    ]
    for whole, again in zip(*lines, strict=True):
        for key in whole.keys() & again.keys():
            assert key.startswith(("seconds", "eval_")) or whole[key] == again[key], key
    for file in (tmp_path / "whole/final").rglob("*.safetensors"):
        assert (
            file.read_bytes()
            == (tmp_path / "cut/final" / file.relative_to(tmp_path / "whole/final")).read_bytes()
        )


def test_random_numbers_of_a_method_are_those_of_the_iteration():
    method = method_of("Guard")

    def draw() -> list[float]:
        return torch.rand(3, generator=method.generator()).tolist()

    first = draw()
    assert draw() == first
    method.iteration = 1
    assert draw() != first
    other = method_of("Guard", seed=7)
    assert torch.rand(3, generator=other.generator()).tolist() != first


def test_a_method_draws_the_same_numbers_after_a_resume_and_in_two_processes(tmp_path):
    file = FOLDER / "random_advantages.py"
    mine = [*SMALL, f"method={file}:RandomAdvantages", "--no-report"]
    run("train", "pocket/tiny", *mine, "--out", tmp_path / "whole")
    run("train", "pocket/tiny", *mine, "iterations=1", "--out", tmp_path / "cut")
    run("train", "pocket/tiny", *mine, "--out", tmp_path / "cut", "--resume")
    run("train", "pocket/tiny", *mine, "--out", tmp_path / "pair", "--processes", "2")
    assert trained(tmp_path / "cut") == trained(tmp_path / "whole")
    alike(tmp_path / "pair", tmp_path / "whole")
    norms = [line["grad_norm"] for line in metrics(tmp_path / "whole") if line.get("grad_norm")]
    assert len(set(norms)) == len(norms) == 2


@pytest.mark.parametrize("name", FILES)
def test_a_plan_counts_what_it_computes(name):
    counts = method_of(name).counts()
    images = 2 * 4
    trained = {"Guard": 6 * 0.5, "Mix": 4 * 0.5, "NFT": 3}[
        name
    ]  # of an image: of 6, of a window of 4, of 7 places
    assert counts.trained == images * trained
    assert counts.extra == pytest.approx(
        images * trained * {"Guard": 0.5, "Mix": 0.5, "NFT": 1}[name]
    )


def test_guards_statistic_has_mean_zero_under_the_old_policy_and_the_raw_one_has_not(policy):
    """log r = eps d / std - d^2 / (2 std^2) in expectation over eps: a bias that Guard takes away."""
    method = method_of("Guard")
    sampler = Sampler(torch.linspace(1, 0, 8), eta=0.3)
    generator = torch.Generator().manual_seed(0)
    index = torch.full((4000,), 2)
    v, x = (torch.randn(4000, 4, 4, generator=generator) for _ in range(2))
    mean, std = sampler.mean_std(v, x, index)
    then = mean + std * torch.randn(mean.shape, generator=generator)
    moved = v + 0.2 / sampler.coefficients(2)[1]
    new, old = (
        method.transition_stats(
            batch_of(velocity=at, latents=x, target=then, sampler=sampler, step=index)
        )
        for at in (moved, v)
    )
    guard = method.statistic(new, old)
    raw = Method.statistic(method, new, old)
    error = guard.std() / len(guard) ** 0.5
    assert guard.mean().abs() < 4 * error
    assert raw.mean() < -0.5 * 0.2**2 / (2 * float(std[0]) ** 2)
    torch.testing.assert_close(
        guard, 0.2 * ((then - mean) / std).flatten(1).mean(1), rtol=0, atol=1e-4
    )  # eps d


def test_a_window_of_all_transitions_is_steps(policy):
    mix = method_of("Mix")
    module = __import__("sys").modules[type(mix).__module__]
    before, module.WIDTH = module.WIDTH, 6
    steps = load_method(settings.load_settings("pocket/tiny", [*SMALL, "chunks=steps"]))
    try:
        assert mix.sampler(0).stochastic_steps.tolist() == list(range(6))
        made = []
        advantage = torch.tensor([1.0, -1.0, 0.5, -0.5] * 2)
        for method in (mix, steps):
            context = context_of(policy, method)
            made.append(
                (
                    context.trajectories,
                    gradient(context, work_of(context, method), advantage, method)[0],
                )
            )
    finally:
        module.WIDTH = before
    (a, one), (b, two) = made
    assert (
        torch.equal(a.latents, b.latents)
        and torch.equal(a.log_probs, b.log_probs)
        and torch.equal(one, two)
    )


def test_a_window_slides_and_its_weights_stay_inside(policy):
    method = method_of("Mix", step_weights="2,2", iterations=100)
    starts = [method.sampler(i).stochastic_steps.tolist() for i in (0, 24, 25, 50, 75)]
    assert starts == [[0, 1, 2, 3]] * 2 + [[1, 2, 3, 4], [2, 3, 4, 5], [0, 1, 2, 3]]
    context = context_of(policy, method, 25)
    assert context.trajectories.log_probs.shape == (8, 4)
    work = work_of(context, method)
    assert (
        set(work.step_index.tolist()) == {1, 2, 3, 4}
        and method.transition_weights(context.trajectories.sampler)[1:5].mean() == 1
    )
    again, _ = method.replay(context, work.image_index, work.step_index)
    places = work.step_index - 1
    torch.testing.assert_close(
        again[0].detach(),
        context.trajectories.log_probs[work.image_index, places],
        rtol=0,
        atol=1e-4,
    )


def test_nfts_terms_cancel_in_value_before_the_first_update_and_not_in_gradient(policy):
    method = method_of("NFT")
    context = context_of(policy, method)
    work = work_of(context, method)
    found = {}
    for strength in (2.0, 0.0):
        advantage = strength * torch.tensor([1.0, -1.0, 0.5, -0.5] * 2)
        found[strength] = gradient(context, work, advantage, method)
    assert found[2.0][1].objective == pytest.approx(found[0.0][1].objective, rel=1e-6)
    assert (found[2.0][0] - found[0.0][0]).norm() > 0.1 * found[2.0][0].norm()
    (losses,), _ = method.replay(context, work.image_index, work.step_index)
    assert torch.equal(losses[:, 0], losses[:, 1])


@pytest.mark.parametrize("name", ["Guard", "Mix"])
def test_the_ratio_is_exactly_one_before_the_first_update(policy, name):
    method = method_of(name)
    context = context_of(policy, method)
    for limit in (64, 1):  # in one pass and in two
        work = work_of(context, method, limit=limit)
        for old in (None, compute_transition_stats(context, work, method)):
            ratio = gradient(context, work, torch.ones(8), method, old)[1].chunk_metrics["ratio"]
            assert (
                torch.equal(ratio, torch.ones(len(work.chunk_image_index)))
                or old is not None
                and limit == 1
            )


@pytest.mark.parametrize(
    "name, more, sentence",
    [
        ("NFT", {"shared_noise": "true"}, "`shared_noise` must be false"),
        ("Guard", {"chunks": "2,3"}, "`chunks` must add up to the 6"),
    ],
)
def test_wrong_pairs_are_refused_in_words(name, more, sentence):
    with pytest.raises(InputError, match=sentence):
        method_of(name, **more)


def test_a_ratio_of_deterministic_transitions_is_refused():
    class Clipped(import_callable(METHODS["NFT"], "method")):
        has_ratio = has_log_prob = True

    with pytest.raises(InputError, match="must take ratios of transitions with noise"):
        Clipped(settings.load_settings("pocket/tiny", words("NFT"))).check()


def test_a_file_is_found_beside_its_settings_and_a_missing_one_is_said_before_anything_is_written(
    tmp_path,
):
    shutil.copy(FOLDER / "mix.py", tmp_path / "mix.py")
    (tmp_path / "mine.yaml").write_text("like: pocket/tiny\nmethod: mix.py:Mix\n")
    run_settings = settings.load_settings(tmp_path / "mine.yaml")
    assert (
        run_settings.method == f"{tmp_path / 'mix.py'}:Mix"
        and type(load_method(run_settings)).__name__ == "Mix"
    )
    done = call(
        "train", "pocket/tiny", "method=nowhere.py:Mix", "--out", tmp_path / "run", cwd=tmp_path
    )
    assert (
        done.returncode == 2
        and "nowhere.py" in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    )


def test_a_preset_sets_axes_and_what_stands_beside_it_wins():
    run_settings = settings.load_settings("pocket/tiny", ["method=dance", "eta=0.2"])
    assert (run_settings.method, run_settings.sampler, run_settings.eta, run_settings.chunks) == (
        "chunk",
        "dance",
        0.2,
        "steps",
    )
    with pytest.raises(InputError, match="`method` must be one that `chunk-grpo methods` lists"):
        settings.load_settings("pocket/tiny", ["method=grpo"])


def test_a_run_of_somebody_elses_imports_no_code_without_trust(tmp_path):
    mark = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom chunk_grpo.training.method import Method\n"
    )
    words = [*SMALL[1:], "iterations=1"]
    run("train", "pocket/tiny", *words, "--out", tmp_path / "run", "--no-report")
    file = tmp_path / "run/run.json"
    note = json.loads(file.read_text())
    note["settings"]["method"] = f"{tmp_path / 'evil.py'}:Method"
    file.write_text(json.dumps(note))  # not what this machine remembers of it
    for words in (("evaluate", tmp_path / "run"), ("plan", "--run", tmp_path / "run")):
        assert "evil.py" in call(*words).stderr
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_two_processes_report_and_evaluate(name, tmp_path):
    run("train", "pocket/tiny", *words(name), "--processes", "2", "--out", tmp_path / "run")
    assert (tmp_path / "run/evaluation/summary.json").is_file() and list(
        (tmp_path / "run").glob("*.html")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_study_of_two_seeds(name, tmp_path):
    home = tmp_path / "study"
    home.mkdir()
    shutil.copy(FOLDER / FILES[name], home / FILES[name])
    base = settings.read_settings_file("pocket/tiny") | dict(word.split("=") for word in SMALL[6:])
    base = {
        k: json.loads(v) if isinstance(v, str) and v[0].isdigit() else v for k, v in base.items()
    }
    base |= {"iterations": 2, "shared_noise": False, "eval_prompts": str(home / "prompts.txt")}
    (home / "prompts.txt").write_text("a red circle\na blue square\ntwo stars\n")
    (home / "base.yaml").write_text(json.dumps(base))
    arms = {"chunk": {}, name: {"method": METHODS[name]}}
    asked = {"title": "t", "question": "q", "seeds": 2, "reference": "chunk", "arms": arms}
    (home / "study.yaml").write_text(json.dumps(asked | {"evaluation": {"eval_images": 1}}))
    run("study", home, "--out", tmp_path / "out", "--unplanned")
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert sorted(row["arm"] for row in rows) == sorted([name] * 2 + ["chunk"] * 2)


def test_a_method_that_trains_behind_its_window_weighs_these_transitions_too():
    class Behind(Method):
        has_log_prob = False

        def trainable_steps(self, sampler):
            return torch.arange(len(sampler))

    changes = {"window": "frozen:2", "step_weights": "interval", "chunks": "steps"}
    method = Behind(settings.load_settings("pocket/tiny", changes))
    sampler = method.sampler(0)
    weights = method.transition_weights(sampler)
    step = -sampler.sigmas.diff()
    torch.testing.assert_close(weights / weights[0], step / step[0])


def test_chunks_that_do_not_exist_are_not_sampled(policy):
    context = context_of(policy, method_of("Guard"))
    with pytest.raises(InputError, match="`train_chunks` must name chunks from 1 to 2, .* got 2,3"):
        sample_chunks(context.trajectories, Chunks((2, 4)), 1.0, allowed=[1, 2])


@pytest.mark.parametrize("name", ["noise", "interval", "flash"])
def test_weights_of_a_window_fit_a_grid_that_a_merge_shortens(name):
    changes = {"method": "mix-flash", "step_weights": name, "sampler": "flow", "eta": 0.7}
    run_settings = settings.load_settings("pocket/tiny", changes)
    method = load_method(run_settings)
    sampler = method.sampler(0)
    weights = method.transition_weights(sampler)
    assert len(sampler) < run_settings.steps and weights.shape == (len(sampler),)
    assert weights.nonzero().flatten().tolist() == sampler.stochastic_steps.tolist()
