"""The share of a profile's variation that depends on the prompt: the base model, many prompts, several samplers.

    python research/profile_shares.py [--prompts 48] [--images 4] [--out FILE.json]

Shares (a) and (b) of the notebook measurements/profiles over the 16 trained transitions of T 17; standard errors are
jackknife errors over prompts, and 95% intervals use the t distribution.
"""

import argparse
from pathlib import Path

import torch
from scipy import stats

from chunk_grpo import pocket
from chunk_grpo.core import machine
from chunk_grpo.core.files import write_json
from chunk_grpo.measurements.profiles import DEFAULT_ETAS, measure_distances, variance_shares
from chunk_grpo.models import trainable
from chunk_grpo.models.inputs import sample_prompt_indices
from chunk_grpo.theory.sampler import Sampler
from chunk_grpo.theory.schedule import sigmas


def shares_with_interval(
    distance: torch.Tensor,  # (prompts, images, transitions)
) -> dict[str, float]:
    """Compute the `variance_shares`, and for the share `prompt_only` its standard error `se` and 95% interval `lo`, `hi`."""
    found = variance_shares(distance)
    count = len(distance)
    leave_one_out = []
    for p in range(count):
        others = torch.cat([distance[:p], distance[p + 1 :]])
        leave_one_out.append(torch.tensor(variance_shares(others)["prompt_only"]))
    estimates = torch.stack(leave_one_out).double()
    error = float(((count - 1) * estimates.var(correction=0)).sqrt())
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return found | {
        "se": error,
        "lo": found["prompt_only"] - half,
        "hi": found["prompt_only"] + half,
    }


def main():
    """Measure all samplers, print the shares, and write them to the file given by --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("prompts", 48), ("images", 4), ("batch", 48), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    a = parser.parse_args()
    policy = trainable.load_trainable_policy(
        "pocket", resolution=pocket.IMAGE_SIZE, max_tokens=pocket.MAX_TOKENS
    )
    texts = pocket.read_pocket_prompts("train")
    grid = sigmas(17, 3.0)
    rows = []
    chosen = sample_prompt_indices(len(texts), a.prompts, a.seed, 0)
    for kind, eta in DEFAULT_ETAS.items():
        found = measure_distances(
            policy, texts, chosen, a.images, a.seed, Sampler(grid, kind, eta), a.batch
        )
        for name, distance in found.items():
            row = shares_with_interval(distance[..., :16])
            rows.append({"sampler": kind, "eta": eta, "distance": name} | row)
            print(
                f"{kind:6}{name:8}" + "  ".join(f"{k} {x:.4f}" for k, x in row.items()), flush=True
            )
    if a.out:
        about = {
            "prompts": a.prompts,
            "images": a.images,
            "seed": a.seed,
            "git_commit": machine.current_git_commit(),
        }
        write_json(Path(a.out), about | {"machine": machine.machine_info(), "rows": rows})


if __name__ == "__main__":
    main()
