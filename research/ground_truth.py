"""Steps and chunks against the truth on the pocket model: wrong signs of advantages, cosine and variance of gradients.

    python research/ground_truth.py [--prompts 30] [--images 12] [--branches 4] [--sampler flow] [--out FILE.json]

Trajectories of the base model, reward pocket-clip, T 17, eta 0.7, with both samplers unless one is named. N branches
from every latent estimate the true advantage of every transition with its standard error. Gradients are those of an
adapter of rank 16 on the attention layers, as in training. Each finished prompt is saved in the folder FILE.json.parts,
so the same command resumes where it was stopped. It deletes the folder at its end.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from credit import (
    alignment_statistics,
    alignment_with_errors,
    attribution_distance,
    branch_rewards,
    branch_values,
    chunk_sampling_variance,
    coefficient_gradients,
    coefficient_sets,
    inner_products,
    jackknife_error,
    state_sign_estimates,
    step_advantages,
    weighted_inner_products,
    wrong_sign_estimates,
)
from safetensors.torch import load_file, save_file

from chunk_grpo import pocket
from chunk_grpo.core import machine
from chunk_grpo.core.files import atomic_write, write_json
from chunk_grpo.models import trainable
from chunk_grpo.models.inputs import sample_prompt_indices
from chunk_grpo.models.policy import decode_latents
from chunk_grpo.rewards import rewards
from chunk_grpo.theory.chunks import Chunks, chunk_transition_weights
from chunk_grpo.theory.dynamics import count_trained_chunks
from chunk_grpo.theory.objective import group_advantages
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas
from chunk_grpo.training.replay import ReplayContext
from chunk_grpo.training.rollout import RolloutOptions, make_generator, sample_trajectories

ETA = {"flow": 0.7, "cps": 0.7}
STEPS = 17
RANK = 16
MANY = 100
TRAINED = STEPS - 1
PAPER = Chunks((2, 3, 4, 7))


def measure(policy, clip, texts, prompt, images, branches, kind):
    """Measure the prompt with index `prompt` in `texts`, with G = `images`, N = `branches` and the sampler `kind`.

    The keys are score (G,), branches (G, T + 1, N), which are rewards, and gradients (4, n, D) of the `coefficient_sets`.
    """
    keys = [(0, 0, prompt, g) for g in range(images)]
    grid = sigmas(STEPS, 3.0)
    conditioning = policy.encode([texts[prompt]])

    def outcome(latents, images):
        """Return the rewards (M,) of final latents (M, S, C)."""
        decoded = decode_latents(policy, latents, 48)
        return rewards.score_images("pocket-clip", clip, decoded, [texts[prompt]] * len(latents))

    row = torch.zeros(images, dtype=torch.long)
    paths = sample_trajectories(
        policy=policy,
        conditioning=conditioning,
        prompt_index=row,
        keys=keys,
        options=RolloutOptions(Sampler(grid, kind, ETA[kind]), batch_size=48),
    )
    context = ReplayContext(policy, conditioning, paths)
    of_branches = branch_rewards(context, outcome, branches)
    score = of_branches[:, -1, 0]
    unit = score.std()
    step, _ = step_advantages(of_branches)
    _, error = branch_values(of_branches)
    signs = make_generator(0, 0, prompt, -1, stream="signs")
    advantage = group_advantages(score[None])[0]
    sets = coefficient_sets(advantage, step / unit, error[:, :STEPS] / unit, signs)
    gradients = coefficient_gradients(context, sets, torch.arange(images))
    return {"score": score.clone(), "branches": of_branches, "gradients": gradients}


def collect(policy, chosen, kinds, parts):
    """Measure all prompts with all samplers, and return the tensors of `measure`, stacked over prompts.

    They are keyed by sampler, then by name. `chosen` has the command's options. A measurement is read from the folder
    `parts` if its file exists there, and otherwise written to it.
    """
    texts = pocket.read_pocket_prompts("train")
    clip = rewards.load_reward("pocket-clip")
    work = [
        (prompt, kind)
        for prompt in sample_prompt_indices(len(texts), chosen.prompts, 0, 0)
        for kind in kinds
    ]
    out = {kind: [] for kind in kinds}
    for number, (prompt, kind) in enumerate(work):
        file = parts / f"{kind}-{chosen.images}x{chosen.branches}-{prompt}.safetensors"
        start = time.process_time()
        if not file.exists():
            found = measure(policy, clip, texts, prompt, chosen.images, chosen.branches, kind)
            found["seconds"] = torch.tensor(time.process_time() - start)
            with atomic_write(file) as new:
                save_file(found, new)
        out[kind].append(load_file(file))
        spent = [float(x["seconds"]) for rows in out.values() for x in rows]
        left = sum(spent) / len(spent) * (len(work) - number - 1) / 60
        print(
            f"{number + 1} of {len(work)}, prompt {prompt}, {kind}; {left:.1f} minutes of one core left",
            flush=True,
        )
    return {
        kind: {name: torch.stack([x[name] for x in rows]) for name in rows[0]}
        for kind, rows in out.items()
    }


def signs(found):
    """Yield a row of `wrong_sign_estimates` for each transition and for each of the paper's chunks.

    `found` has one sampler's tensors from `collect`.
    """
    level = sigmas(STEPS, 3.0)
    for parts in (Chunks.steps(TRAINED), PAPER):
        table = wrong_sign_estimates(found["score"], found["branches"].flatten(0, 1), parts)
        for k, part in enumerate(parts.slices):
            yield {
                "parts": "steps" if len(parts) == TRAINED else str(parts),
                "first": part.start,
                "last": part.stop - 1,
                "sigma": float(level[part].mean()),
            } | row_of(table, k)


def states(found):
    """Yield a row of `state_sign_estimates` for each state that a transition leads to, and then a row of their means.

    `found` has one sampler's tensors from `collect`.
    """
    table = state_sign_estimates(found["score"], found["branches"].flatten(0, 1))
    level = sigmas(STEPS, 3.0)
    means = {name: x for name, x in table.items() if name.startswith("mean_")}
    by_transition = {name: x for name, x in table.items() if name not in means}
    for k in range(TRAINED):
        place = {"parts": "steps", "index": k, "sigma": float(level[k + 1])}
        yield place | row_of(by_transition, k)
    yield {"parts": "all"} | row_of(means)


def row_of(table, k=None):
    """Convert a dict of tensors to a dict of floats: the entries with index k or, if k is None, the tensors () themselves."""
    return {name: float(x if k is None else x[k]) for name, x in table.items()}


def proposition(found):
    """Yield the distances of Proposition 1 for whole trajectories and for each of the paper's chunks.

    They use the raw signs; standard errors are over prompts. `found` has one sampler's tensors from `collect`.
    """
    step, _ = step_advantages(found["branches"].flatten(0, 1))
    count, group = found["score"].shape
    advantage = (found["score"] - found["score"].mean(1, keepdim=True)).flatten()
    wrong = advantage[:, None] * step < 0
    for part in (slice(0, TRAINED), *PAPER.slices):
        table = attribution_distance(wrong[:, part])
        by_prompt = torch.stack([x.double().reshape(count, group).mean(1) for x in table.values()])
        value, error = jackknife_error(lambda p, x=by_prompt: x[:, p].mean(1), count)
        names = [*table, *(f"{name}_se" for name in table)]
        numbers = dict(zip(names, [*value.tolist(), *error.tolist()], strict=True))
        yield {"first": part.start, "last": part.stop - 1} | numbers


def gradients(found):
    """Yield a row with cosine, variance and needed images for every estimator, over all transitions and over three chunks.

    `found` has one sampler's tensors from `collect`.
    """
    gram = inner_products(found["gradients"])
    images = found["score"].shape[1]
    second = images * torch.stack([gram[k, 2, :, k, 2] for k in range(len(gram))]).mean(0)
    for last in (TRAINED, sum(PAPER.sizes[:3])):
        truth = (torch.arange(TRAINED) < last).double()
        base = None
        for name, row, chunks, w, count in estimators(last):
            w = torch.cat([w.double(), torch.zeros(TRAINED - last)])
            extra = 0.0
            if chunks is not None:
                relative_weights = w[:last] / chunk_transition_weights(
                    chunks
                )  # relative to the chunks' weights
                extra = chunk_sampling_variance(
                    second=second[:last, :last] * relative_weights[:, None] * relative_weights,
                    chunks=chunks,
                    count=count,
                )
            if name.endswith("noise"):
                extra = -alignment_with_errors(
                    weighted_inner_products(gram, truth, truth, row=3), images
                )["variance"]
            # by_theorem: expectation from set 1, (c) of the page gradient-bias
            shrink = 1.0 if row else (images - 1) / images
            tables = [
                weighted_inner_products(gram, w, truth, row, mean) for mean in (None, (1, shrink))
            ]
            base = tables[1] if base is None else base
            direct, theorem = (alignment_with_errors(x, images, extra, MANY) for x in tables)
            ratio, ratio_se = jackknife_error(
                lambda p, x=(tables[1], base, extra): relative_images(p, images, *x), len(gram)
            )
            yield {
                "transitions": last,
                "estimator": name,
                "trained": last * count / len(chunks) if chunks else last,
                "drawing": max(extra, 0.0),
                "images_of_steps": float(ratio),
                "images_of_steps_se": float(ratio_se),
                **direct,
                **{f"{key}_by_theorem": x for key, x in theorem.items() if "variance" not in key},
            }


def relative_images(keep, images, tables, base, extra):
    """Compute the number of images that an estimator needs, as a multiple of what steps need, from the blocks in `keep`.

    `tables` and `base` are the `weighted_inner_products` of the estimator and of steps, and `extra` is the variance that
    the estimator's blocks lack.
    """
    one, other = (x[:, keep][:, :, keep] for x in (tables, base))
    return alignment_statistics(one, images, extra)[4] / alignment_statistics(other, images)[4]


def estimators(last):
    """Yield the estimators for the first `last` transitions.

    Each is a tuple: its name, the index of its set of coefficients, its chunks, its weights (last,) and its number of
    trained chunks. Chunks and number are None for true advantages.
    """
    paper = Chunks(PAPER.sizes if last == TRAINED else PAPER.sizes[:3])
    steps = Chunks.steps(last)
    equal = {f"equal {c}": Chunks.equal(last, c) for c in (2, 3, 4, 8, 16) if last % c == 0}
    heavy = chunk_transition_weights(paper)
    cases = {"steps": (steps, chunk_transition_weights(steps)), "steps re-weighted": (steps, heavy)}
    cases |= {
        name: (chunks, chunk_transition_weights(chunks))
        for name, chunks in ({str(paper): paper} | equal).items()
    }
    for name, (chunks, w) in cases.items():
        yield name, 0, chunks, w, len(chunks)
        yield f"{name}, half drawn", 0, chunks, w, count_trained_chunks(len(chunks), 0.5)
    for name, w in (
        ("true advantages", torch.ones(last)),
        ("true advantages, re-weighted", heavy),
        ("true advantages, without the branches' noise", torch.ones(last)),
    ):
        yield name, 1, None, w, None


TABLES = {"signs": signs, "states": states, "proposition": proposition, "gradients": gradients}


def main():
    """Measure all prompts, print the tables, and write them to the file given by --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("prompts", 30), ("images", 12), ("branches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sampler", choices=list(ETA))
    parser.add_argument("--out")
    chosen = parser.parse_args()
    tables = {name: [] for name in TABLES}
    size = {"resolution": pocket.IMAGE_SIZE, "max_tokens": pocket.MAX_TOKENS}
    policy = trainable.load_trainable_policy("pocket", **size, lora_rank=RANK)
    named = policy.transformer.named_parameters()
    # These factors start at zero, so the gradient of the other factors is zero.
    policy.trained = [p for name, p in named if "lora_B" in name]
    parts = Path(f"{chosen.out}.parts") if chosen.out else Path("ground_truth.parts")
    parts.mkdir(parents=True, exist_ok=True)
    found = collect(policy, chosen, [chosen.sampler] if chosen.sampler else list(ETA), parts)
    for kind, measured in found.items():
        for name, rows in TABLES.items():
            tables[name] += [{"sampler": kind} | row for row in rows(measured)]
    for r in tables["signs"]:
        print(
            "{sampler:5} {parts:8} {first:2}-{last:2}: wrong {raw:.3f}, by share {by_share:.3f}".format(
                **r
            )
        )
    for r in tables["states"]:
        if r["parts"] == "all":
            print(
                "{sampler:5} states: wrong {mean_raw:.3f}, by share {mean_by_share:.3f}".format(**r)
            )
    for r in tables["gradients"]:
        print(
            "{sampler:5} {transitions:2} {estimator:45} cosine {cosine:6.3f} +- {cosine_se:.3f}, of 100 images "
            "{cosine_many:6.3f} +- {cosine_many_se:.3f}".format(**r)
        )
    seconds = sum(float(x["seconds"].sum()) for x in found.values())
    sizes = {name: getattr(chosen, name) for name in ("prompts", "images", "branches")} | {
        "core_seconds": seconds
    }
    where = {
        "git_commit": machine.current_git_commit(),
        "machine": machine.machine_info(),
        "versions": machine.library_versions(),
    }
    if chosen.out:
        about = {
            "eta": ETA,
            "steps": STEPS,
            "sigmas": sigmas(STEPS, 3.0).tolist(),
            "lora_rank": RANK,
            "many": MANY,
        }
        # JSON has no nan, which appears if noise leaves no variance to divide by.
        for rows in tables.values():
            for row in rows:
                row |= {name: None for name, value in row.items() if value != value}
        write_json(Path(chosen.out), sizes | about | where | tables)
    shutil.rmtree(parts)


if __name__ == "__main__":
    main()
