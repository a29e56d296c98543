"""Steps and chunks against the truth on the pocket model: wrong signs of advantages, cosine and variance of gradients.

    python nbs/benchmarks/ground_truth.py [--prompts 30] [--images 12] [--branches 4] [--sampler flow] [--out FILE.json]

Trajectories of the base model, reward pocket-clip, T 17, eta 0.7, with both samplers unless one is named. From every
latent N branches give the true advantage of every transition, with its error. Gradients are those of an adapter of rank
16 on the attention layers, as training has it. Every prompt is kept as it is finished, in the folder FILE.json.parts: the
same command goes on where it was stopped, and takes the folder away at its end.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from chunk_grpo import folder, pocket, rewards, weights
from chunk_grpo.branching import (
    attribution_distance,
    branch_rewards,
    branch_values,
    jackknife,
    step_advantages,
    wrong_sign,
)
from chunk_grpo.checkpoint import beside, write_json
from chunk_grpo.chunks import Chunks, step_weights
from chunk_grpo.dynamics import chunk_count
from chunk_grpo.objective import group_advantages
from chunk_grpo.rollout import decode, draw_prompts, generator, rollout
from chunk_grpo.schedule import sigmas
from chunk_grpo.truth import alignment, coefficient_gradients, coefficient_sets, drawing_variance, inner_products
from chunk_grpo.update import Replay

ETA, STEPS, RANK, MANY = {"flow": 0.7, "cps": 0.7}, 17, 16, 100
TRAINED = STEPS - 1
PAPER = Chunks((2, 3, 4, 7))
CHUNKS = {"steps": Chunks.steps(TRAINED)} | {f"equal {c}": Chunks.equal(TRAINED, c) for c in (2, 4, 8, 16)}
CHUNKS |= {"2,3,4,7": PAPER}


def measure(policy, clip, texts, prompt, images, branches, kind):
    "One prompt: rewards (G,), rewards of its branches (G, T + 1, N), and gradients (4, n, D)."
    keys, grid = [(0, 0, prompt, g) for g in range(images)], sigmas(STEPS, 3.0)
    conditioning = policy.encode([texts[prompt]])

    def outcome(latents, which):
        return rewards.score("pocket-clip", clip, decode(policy, latents, 48), [texts[prompt]] * len(latents))

    paths = rollout(policy, conditioning, torch.zeros(images, dtype=torch.long), keys, grid, kind, ETA[kind], 48)
    what = Replay(policy, conditioning, paths, grid, kind, ETA[kind])
    drawn = branch_rewards(what, outcome, branches)
    score = drawn[:, -1, 0]
    unit = score.std()
    step, _ = step_advantages(drawn)
    _, error = branch_values(drawn)
    signs = generator(0, 0, prompt, -1, stream="signs")
    advantage = group_advantages(score[None])[0]
    sets = coefficient_sets(advantage, step / unit, error[:, :STEPS] / unit, signs)
    gradients = coefficient_gradients(what, sets, torch.arange(images))
    return {"score": score.clone(), "branches": drawn, "gradients": gradients}


def collect(policy, chosen, kinds, parts):
    "The measurements of all prompts by sampler, from the folder `parts` where they are there already."
    texts, clip = pocket.prompts("train"), rewards.load("pocket-clip")
    work = [(prompt, kind) for prompt in draw_prompts(len(texts), chosen.prompts, 0, 0) for kind in kinds]
    out = {kind: [] for kind in kinds}
    for number, (prompt, kind) in enumerate(work):
        file, start = parts / f"{kind}-{chosen.images}x{chosen.branches}-{prompt}.safetensors", time.process_time()
        if not file.exists():
            found = measure(policy, clip, texts, prompt, chosen.images, chosen.branches, kind)
            found["seconds"] = torch.tensor(time.process_time() - start)
            with beside(file) as new:
                save_file(found, new)
        out[kind].append(load_file(file))
        spent = [float(x["seconds"]) for rows in out.values() for x in rows]
        left = sum(spent) / len(spent) * (len(work) - number - 1) / 60
        print(f"{number + 1} of {len(work)}, prompt {prompt}, {kind}; {left:.1f} minutes of one core left", flush=True)
    return {kind: {name: torch.stack([x[name] for x in rows]) for name in rows[0]} for kind, rows in out.items()}


def signs(found):
    "Wrong signs by transition and by the paper's chunks."
    level = sigmas(STEPS, 3.0)
    for parts in (Chunks.steps(TRAINED), PAPER):
        table = wrong_sign(found["score"], found["branches"].flatten(0, 1), parts)
        for k, part in enumerate(parts.slices):
            place = {"first": part.start, "last": part.stop - 1, "sigma": float(level[part].mean())}
            yield {"parts": "steps" if len(parts) == TRAINED else str(parts)} | place | at(table, k)


def at(table, k=None):
    "A row of numbers: those at position k, or single ones."
    return {name: float(x if k is None else x[k]) for name, x in table.items()}


def proposition(found):
    "Proposition 1 with the raw signs of whole trajectories and of the paper's chunks; errors over prompts."
    step, _ = step_advantages(found["branches"].flatten(0, 1))
    count, group = found["score"].shape
    advantage = (found["score"] - found["score"].mean(1, keepdim=True)).flatten()
    wrong = advantage[:, None] * step < 0
    for part in (slice(0, TRAINED), *PAPER.slices):
        table = attribution_distance(wrong[:, part])
        by_prompt = torch.stack([x.double().reshape(count, group).mean(1) for x in table.values()])
        value, error = jackknife(lambda p, x=by_prompt: x[:, p].mean(1), count)
        names = [*table, *(f"{name}_se" for name in table)]
        numbers = dict(zip(names, [*value.tolist(), *error.tolist()], strict=True))
        yield {"first": part.start, "last": part.stop - 1} | numbers


def gradients(found):
    "Cosine and variance of every estimator, with all of the chunks and with half of them drawn."
    gram, images = inner_products(found["gradients"]), found["score"].shape[1]
    second = images * torch.stack([gram[k, 2, :, k, 2] for k in range(len(gram))]).mean(0)
    ones, heavy = torch.ones(TRAINED), step_weights(PAPER).double()
    cases = {name: (chunks, step_weights(chunks), second) for name, chunks in CHUNKS.items()}
    cases["steps re-weighted"] = (CHUNKS["steps"], heavy, second * heavy[:, None] * heavy)
    for name, (chunks, w, inner) in cases.items():
        for fraction in (1.0, 0.5):
            count = chunk_count(len(chunks), fraction)
            extra = drawing_variance(inner, chunks, count)
            trained = TRAINED * count / len(chunks)
            about = {"estimator": name, "fraction": fraction, "transitions": trained, "drawing": extra}
            yield about | alignment(gram, w, images, extra=extra, many=MANY)
    noise = alignment(gram, ones, images, row=3)["variance"]
    truths = {"true advantages": (ones, 0.0), "true advantages, without the branches' noise": (ones, -noise),
              "true advantages, re-weighted": (heavy, 0.0)}
    for name, (w, extra) in truths.items():
        about = {"estimator": name, "fraction": 1.0, "transitions": TRAINED, "drawing": 0.0}
        yield about | alignment(gram, w, images, row=1, extra=extra, many=MANY)


def main():
    "Measure, print, and write where --out says."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("prompts", 30), ("images", 12), ("branches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sampler", choices=list(ETA))
    parser.add_argument("--out")
    chosen, tables = parser.parse_args(), {"signs": [], "proposition": [], "gradients": []}
    policy = weights.load("pocket", resolution=pocket.SIZE, max_tokens=pocket.MAX_TOKENS, lora_rank=RANK)
    named = policy.transformer.named_parameters()
    policy.trained = [p for name, p in named if "lora_B" in name]  # they start at zero, so the others' gradient is zero
    parts = Path(f"{chosen.out}.parts") if chosen.out else Path("ground_truth.parts")
    parts.mkdir(parents=True, exist_ok=True)
    found = collect(policy, chosen, [chosen.sampler] if chosen.sampler else list(ETA), parts)
    for kind, measured in found.items():
        for name, rows in (("signs", signs), ("proposition", proposition), ("gradients", gradients)):
            tables[name] += [{"sampler": kind} | row for row in rows(measured)]
    for r in tables["signs"]:
        print("{sampler:5} {parts:8} {first:2}-{last:2}: wrong {raw:.3f}, by share {by_share:.3f}".format(**r))
    for r in tables["gradients"]:
        print("{sampler:5} {estimator:45} {fraction:3} cosine {cosine:6.3f} +- {cosine_se:.3f}, of 100 images "
              "{cosine_many:6.3f} +- {cosine_many_se:.3f}".format(**r))
    seconds = sum(float(x["seconds"].sum()) for x in found.values())
    sizes = {name: getattr(chosen, name) for name in ("prompts", "images", "branches")} | {"core_seconds": seconds}
    where = {"git_commit": folder.commit(), "machine": folder.machine(), "versions": folder.versions()}
    if chosen.out:
        about = {"eta": ETA, "steps": STEPS, "sigmas": sigmas(STEPS, 3.0).tolist(), "lora_rank": RANK, "many": MANY}
        for row in (row for rows in tables.values() for row in rows):  # null where noise left nothing to divide by
            row |= {name: None for name, value in row.items() if value != value}
        write_json(Path(chosen.out), sizes | about | where | tables)
    shutil.rmtree(parts)


if __name__ == "__main__":
    main()
