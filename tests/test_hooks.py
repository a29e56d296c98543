"""What a method's functions and an own surrogate are given, and what they return, is checked in every method."""

import pytest
import torch
from commands import call
from test_method_table import FITTED, SMALL

from chunk_grpo import InputError
from chunk_grpo.core.settings import METHODS, load_settings
from chunk_grpo.models import trainable
from chunk_grpo.rewards.rewards import score_images
from chunk_grpo.training import trainer
from chunk_grpo.training.gradient import accumulate_gradients, compute_transition_stats
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, sample_trajectories
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state
from chunk_grpo.training.update_batch import build_update_batch

TINY = [
    "iterations=1",
    "steps=7",
    "chunks=2,4",
    "images_per_prompt=4",
    "eval_every=0",
    "eval_count=1",
    "eval_steps=2",
    "hybrid_split=1",
    "threads=1",
    "learning_rate=3e-4",
    "shared_noise=false",
]
CLIP = """import torch

SHAPES = set()


def clip(ratio, advantage, clip_range):
    SHAPES.add((ratio.ndim, ratio.shape == advantage.shape))
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)
"""


@pytest.fixture(scope="module")
def policy():
    return trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)


def moved_gradient(policy, method) -> torch.Tensor:
    """Return the gradient of an update after the weights have moved, so that some ratios are clipped."""
    keys = [(0, 0, p, g) for p in range(2) for g in range(4)]
    rows = policy.encode(["a red star", "two blue rings"])
    row = torch.arange(8) // 4
    shared = method.settings.shared_noise
    paths = sample_trajectories(
        policy=policy,
        conditioning=rows,
        prompt_index=row,
        keys=keys,
        options=RolloutOptions(
            method.sampler(0),
            batch_size=8,
            shared_noise=shared,
            noise_spread=method.settings.noise_spread,
            noise_owner=method.noise_owner,
        ),
    )
    copies = {
        name: [p.detach().clone() for p in policy.trained] for name in method.reference_decays
    }
    context = ReplayContext(policy, rows, paths, copies)
    places = method.trainable_steps(paths.sampler)
    chunks = method.chunks(torch.ones(len(places)))
    chosen = torch.arange(len(chunks)).expand(8, -1)
    work = build_update_batch(
        torch.arange(8), chosen, chunks, 64, method.transition_weights(paths.sampler), places
    )
    old = compute_transition_stats(context, work, method) if method.has_ratio else None
    kept = [p.detach().clone() for p in policy.trained]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.trained:
            p += 1e-3 * torch.randn(p.shape, generator=generator)
    policy.transformer.zero_grad()
    try:
        accumulate_gradients(context, work, torch.tensor([1.0, -1.0, 0.5, -0.5] * 2), method, old)
    finally:
        with torch.no_grad():
            for p, before in zip(policy.trained, kept, strict=True):
                p.copy_(before)
    return torch.cat([p.grad.flatten() for p in policy.trained])


@pytest.mark.parametrize("name", METHODS)
def test_clip_given_as_a_file_has_the_gradient_of_the_built_in_one(name, policy, tmp_path):
    (tmp_path / "own.py").write_text(CLIP)
    values = SMALL | {
        "method": name,
        **FITTED.get(name, {}),
        "images_per_prompt": 4,
    }
    values |= {
        "shared_noise": name == "neighbor",
        "updates_per_iteration": METHODS[name].get("settings", {}).get("updates_per_iteration", 2),
    }
    if "clip_range" not in METHODS[name].get("unused", ()):
        values["clip_range"] = 0.002
    built_in = load_method(load_settings("pocket/tiny", values | {"surrogate": "clip"}))
    try:
        own = load_method(
            load_settings("pocket/tiny", values | {"surrogate": f"{tmp_path / 'own.py'}:clip"})
        )
    except InputError as error:  # methods that have an objective of their own
        assert "surrogate" in str(error)
        return
    expected = moved_gradient(policy, built_in)
    assert expected.norm() > 0
    torch.testing.assert_close(
        moved_gradient(policy, own), expected, rtol=1e-4, atol=1e-6 * expected.abs().max()
    )
    if own.custom_surrogate is not None:
        assert own.custom_surrogate.__globals__["SHAPES"] <= {(1, True)}  # (N,) and (N,)


WRONG = {
    "advantages of one image too many": (
        "advantages",
        """
    def advantages(self, scores, weights):
        return torch.cat([super().advantages(scores, weights), torch.zeros(2, 1)], 1)""",
    ),
    "advantages turned over": (
        "advantages",
        """
    def advantages(self, scores, weights):
        return super().advantages(scores, weights).T""",
    ),
    "advantages of whole numbers": (
        "advantages",
        """
    def advantages(self, scores, weights):
        return super().advantages(scores, weights).long()""",
    ),
    "advantages in a list": (
        "advantages",
        """
    def advantages(self, scores, weights):
        return super().advantages(scores, weights).tolist()""",
    ),
    "two statistics, one of which is read": (
        "statistic",
        """
    def statistic(self, new, old):
        return torch.stack([new[0] - old[0]] * 2, 1)""",
    ),
    "a statistic without a gradient": (
        "statistic",
        """
    def statistic(self, new, old):
        return (new[0] - old[0]).detach()""",
    ),
    "chunks that cover too few steps": (
        "chunks",
        """
    def partition(self, paths, profile):
        return Chunks((2, 2))""",
    ),
    "chunks for some images": (
        "partition",
        """
    def partition(self, paths, profile):
        return [Chunks((2, 4))] * 3""",
    ),
    "drawn chunks in one row": (
        "select_chunks",
        """
    def select_chunks(self, paths, chunks, profile, iteration):
        return torch.zeros(len(paths.keys), dtype=torch.long)""",
    ),
    "a chunk that is not there": (
        "select_chunks",
        """
    def select_chunks(self, paths, chunks, profile, iteration):
        return torch.full((len(paths.keys), 1), 2)""",
    ),
    "weights of too many steps": (
        "transition_weights",
        """
    def transition_weights(self, sampler):
        return torch.ones(len(sampler) + 3)""",
    ),
    "places out of order": (
        "trainable_steps",
        """
    def trainable_steps(self, sampler):
        return torch.tensor([5, 4, 3, 2, 1, 0])""",
    ),
    "evidence that is no tuple": (
        "transition_stats",
        """
    def transition_stats(self, batch):
        return super().transition_stats(batch)[0]""",
    ),
    "evidence that is no number": (
        "transition_stats",
        """
    def transition_stats(self, batch):
        return (super().transition_stats(batch)[0] / 0,)""",
    ),
    "one objective for all": (
        "objective",
        """
    def objective(self, terms):
        return super().objective(terms).mean()""",
    ),
    "an objective without a gradient": (
        "objective",
        """
    def objective(self, terms):
        return super().objective(terms).detach()""",
    ),
    "metrics that are no items": (
        "chunk_metrics",
        """
    def chunk_metrics(self, statistic, slope, advantage, objective):
        return {"ratio": statistic.mean(), "clipped": statistic.mean()}""",
    ),
    "a copy that doubles later": (
        "reference_decays",
        """
    reference_decays = {"old": lambda iteration: 0.5 + 2 * iteration}""",
    ),
    "latents written into while chunks are drawn": (
        "select_chunks",
        """
    def select_chunks(self, paths, chunks, profile, iteration):
        paths.latents[:, 3] = 0
        return super().select_chunks(paths, chunks, profile, iteration)""",
    ),
    "latents written into in the update": (
        "replay",
        """
    def states(self, context, image, index):
        context.trajectories.latents.mul_(0.9)
        return super().states(context, image, index)""",
    ),
    "a penalty for each latent": (
        "replay",
        """
    def replay(self, context, image, index, anchor=True):
        transition_stats, penalty = super().replay(context, image, index, anchor)
        return transition_stats, None if penalty is None else penalty.mean()""",
    ),
}
HEAD = """import torch

from chunk_grpo.theory.chunks import Chunks
from chunk_grpo.training.method import Method


class Own(Method):
    "A method of somebody."
"""
VALUES = {
    **SMALL,
    "chunks": "2,4",
    "iterations": 3,
    "eval_every": 0,
    "eval_count": 1,
    "threads": 1,
    "kl": 0.01,
    "prompts_per_iteration": 2,
    "learning_rate": 1e-4,
}


def trained(folder, **values) -> list[dict]:
    """Train an iteration and return its metrics and its advantages."""
    state = prepare_state(load_settings("pocket/tiny", VALUES | values), folder)
    return trainer.train_iteration(load_policy_and_optimizer(state))


@pytest.mark.parametrize("fault", WRONG)
def test_what_a_function_must_not_return_is_rejected_by_its_name_in_the_first_iteration(
    fault, tmp_path
):
    hook, code = WRONG[fault]
    (tmp_path / "own.py").write_text(HEAD + code + "\n")
    with pytest.raises(InputError, match=f"`{hook}` of (.*own.py:)?Own must") as rejected:
        trained(tmp_path, method=f"{tmp_path / 'own.py'}:Own")
    assert len(str(rejected.value).splitlines()) == 1


@pytest.mark.parametrize(
    "code",
    [
        "ratio[:, None] * advantage",
        "(ratio * advantage) / 0",
    ],
)
def test_what_an_own_surrogate_must_not_return_is_rejected(code, tmp_path):
    (tmp_path / "own.py").write_text(
        f"def clip(ratio, advantage, clip_range):\n    return {code}\n"
    )
    with pytest.raises(
        InputError,
        match="`surrogate` (of chunk must return finite|must name a function that works)",
    ):
        trained(tmp_path, surrogate=f"{tmp_path / 'own.py'}:clip")


def test_a_rejected_return_ends_the_command_with_one_sentence(tmp_path):
    (tmp_path / "own.py").write_text(HEAD + WRONG["advantages of one image too many"][1] + "\n")
    done = call(
        "train",
        "pocket/tiny",
        "method=own.py:Own",
        "--out",
        tmp_path / "run",
        "--no-report",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "`advantages` of" in done.stderr.strip().splitlines()[-1], (
        done.stderr
    )
    assert "(P, G)" in done.stderr and "(2, 5)" in done.stderr


def test_a_function_that_writes_into_what_it_is_given_changes_nothing_else(tmp_path):
    (tmp_path / "own.py").write_text(
        HEAD
        + """
    def advantages(self, scores, weights):
        out = super().advantages(scores, weights)
        for score in scores.values():
            score.mul_(100)
        weights.clear()
        return out

    def select_chunks(self, paths, chunks, profile, iteration):
        out = super().select_chunks(paths, chunks, profile, iteration)
        profile.zero_()
        return out

    def objective(self, terms):
        out = super().objective(terms)
        terms.group.zero_()
        return out

    def chunk_metrics(self, statistic, slope, advantage, objective):
        objective.mul_(0)
        return super().chunk_metrics(statistic, slope, advantage, objective)
"""
    )
    plain = trained(tmp_path)
    writing = trained(tmp_path, method=f"{tmp_path / 'own.py'}:Own")
    times = {key for key in plain if key.startswith("seconds")}
    assert {key: writing[key] for key in plain.keys() - times} == {
        key: plain[key] for key in plain.keys() - times
    }


def test_a_reward_that_writes_into_images_leaves_them_to_the_next_one():
    images = torch.rand(3, 3, 8, 8)
    kept = images.clone()
    score_images(
        "own.py:dark", lambda given, prompts: given.mul_(0).mean((1, 2, 3)), images, ["a"] * 3
    )
    assert torch.equal(images, kept)
