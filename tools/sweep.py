"""Try every setting of sampling, chunks, credit, objective and anchor with every method of the table.

    python tools/sweep.py [--label after] [--methods steps,nft] [--out runs/results/sweep.json]

A pair is a method and one setting that leaves the method's own value. Two short runs on the pocket model, one with the
setting and one without, must end with different weights, or the settings must be rejected before anything is trained.
Outcomes of a pair:

    trained    the weights differ by more than rounding
    rejected   one sentence, before training
    equal      the weights do not differ, and need not: the setting chose the chunks that were trained without it, the
               surrogates have one gradient, or the ratio is 1 and no clip range limits it
    same       the weights do not differ: the setting does nothing, without a word
    late       one sentence, but only while training
    crashed    an unforeseen error

A pair whose weights do not differ is tried again with a hundredth of the learning rate, before it is counted as `same`.
Everything runs in one process with one thread, the run without the setting once for each method. What was tried is
written as it comes. A sweep that was stopped continues where it was as long as the package is the same, and tries the last
three outcomes again.
"""

import argparse
import hashlib
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import chunk_grpo
from chunk_grpo import InputError
from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.settings import METHODS, Settings, load_settings, read_settings_file
from chunk_grpo.models import trainable
from chunk_grpo.reward_serving import placement
from chunk_grpo.training import trainer
from chunk_grpo.training import update as updating
from chunk_grpo.training.method_loading import load_method
from chunk_grpo.training.state import load_policy_and_optimizer, prepare_state

OUT = Path(__file__).parents[1] / "runs" / "results" / "sweep.json"
SMALLEST_CHANGE = 1e-4  # of what training moves the weights: less is rounding
ITERATIONS = 2
# of plain gradient descent: AdamW's step would be the same for a gradient of any size
LEARNING_RATE = 0.03
SMALL_LEARNING_RATE = LEARNING_RATE / 100  # for a pair that trained the same at `LEARNING_RATE`
BASE = {
    "steps": 7,
    "chunks": "1,2,3",
    "resolution": 32,
    "eval_resolution": 32,
    "max_tokens": 8,
    "images_per_prompt": 4,
    "prompts_per_iteration": 1,
    "iterations": ITERATIONS + 1,  # the last would end with an evaluation
    "rollout_batch": 64,
    "learning_rate": LEARNING_RATE,
    "max_grad_norm": 1e6,
    "clip_range": 1e-6,
    "shared_noise": False,
    "reward": {"pocket-clip": 1.0, "incompressibility": 0.5},
    "reward_options": {"pocket-clip": {"worker": False}},
    "eval_rewards": ["pocket-clip", "incompressibility", "pocket-partial"],
    "eval_every": 0,
    "eval_count": 1,
    "threads": 1,
}
FITTED: dict[str, dict] = {  # what a row needs beside that, with four images and seven steps
    "reweighted": {"step_weights": "1,2,3"},
    "branch": {"sharing": "tree:2@0,3", "images_per_prompt": 4},
    "dppo-chunk": {"surrogate": "dppo:1e-9"},  # the mean over a chunk does not reach the row's own
    "tree": {"sharing": "tree:2@0,1", "images_per_prompt": 4},
    "tree-chunk": {"sharing": "tree:2@0,3", "chunks": "3,3", "images_per_prompt": 4},
    "tempflow-seeds": {"sharing": "seeds:2"},
    "mix-flash": {"steps": 12},
    "mix-flash-frozen": {"steps": 12, "merge": "rest:0.4"},
    "neighbor": {"shared_noise": True},
    # Only the best and the worst image count, so a change of advantages needs many images to show.
    "best-of-n": {"images_per_prompt": 16, "prompts_per_iteration": 2},
    "online-dpo": {"images_per_prompt": 10, "prompts_per_iteration": 2},
    **dict.fromkeys(
        ["crd-chunk", "nft-chunk", "elbo-chunk", "elbo-clip-chunk"],
        {"chunks": "2,2,3", "train_chunks": "2,3"},
    ),
    "awm-chunk": {"chunks": "2,2,2", "train_chunks": "2,3"},
    "chunk-mixture": {"chunks": "1,2,4", "window": "frozen:3"},
}
KL = {"kl": 0.5}
WINDOW = {"window": "frozen:2"}
TREE = {"sharing": "tree:2@0,1"}
# Where siblings share one step and all or none of them train it, `leaves` is the same as `image`, by proof.
LATE_TREE = {"sharing": "tree:2@0,4"}
DYNAMICS = {"chunk_weighting": "dynamics"}
SHARP = {**DYNAMICS, "weighting_temperature": 0.1}
VARIANTS: dict[
    str, list
] = {  # setting -> values, or pairs of other settings that give it a meaning and a value
    "steps": [9],
    "shift": [1.0],
    "sampler": ["flow", "dance", "cps"],
    "eta": [0.35],
    "solver": ["dpm2", (WINDOW, "dpm2")],
    "truncate_timesteps": [True],
    "shared_noise": [True, False],
    "noise_spread": [({"shared_noise": True}, 0.5)],
    "sharing": ["group", "seeds:2", "tree:2@0,1"],
    "seed": [1],
    "true_cfg_scale": [2.0],
    "negative_prompt": [({"true_cfg_scale": 2.0}, "a red star")],
    "chunks": ["steps", "whole", "3,3", "equal:2", "profile", "adaptive:2"],
    "window": ["frozen:2", "random:2", "early:1", "progressive:2:1", "exponential:2:1"],
    "merge": [(WINDOW, "window"), ({"window": "random:1"}, "entropy:30"), (WINDOW, "rest:0.5")],
    "chunk_fraction": [0.7, 1.0],
    "train_chunks": ["1", "1,2"],
    "chunk_weighting": [
        "dynamics",
        ({"images_per_prompt": 8, "prompts_per_iteration": 2}, "profile"),
    ],
    "weighting_uniform": [0.9, (SHARP, 0.9)],
    "weighting_anneal": [1, (SHARP, 1)],
    "weighting_temperature": [5.0, (DYNAMICS, 5.0)],
    "profile_every": [1, ({"chunks": "profile"}, 1)],
    "step_weights": ["noise", "interval", "inverse-interval", "flash", "2,4"],
    "prompts_per_iteration": [2],
    "images_per_prompt": [8],
    "updates_per_iteration": [1, 4],
    "learning_rate": [LEARNING_RATE / 3],
    "weight_decay": [0.5],
    "clip_range": [0.5],
    "statistic": ["centred", "scaled", "guard"],
    "surrogate": ["asymmetric:0.5:0.5", "dppo:100", "hinge:1e-3", "epg", "pepg", "par"],
    "credit": ["batch", "none", "sum", ({"prompts_per_iteration": 2}, "gdpo"), "wins", "scale"],
    "credit_of": ["gain", "all-gains", "depth", "leaves", (TREE, "depth"), (LATE_TREE, "leaves")],
    "completion_steps": [2, ({"credit_of": "gain"}, 2)],
    "completion_strides": ["1,2", (WINDOW, "1,2")],
    "advantage_clamp": [0.3],
    "diversity": [True],
    "max_grad_norm": [1e-6],
    "kl": [0.5],
    "anchor": ["velocity", (KL, "velocity"), (KL, "transition")],
    "anchor_share": [0.6, (KL, 0.6)],
    "anchor_every": [1, (KL, 1)],
    "ema": [0.5],
}

# Rows without a limit, to which a wide one changes nothing.
NARROW = dict.fromkeys(["elbo-epg", "v-grpo"], {"asymmetric:0.5:0.5": "asymmetric:1e-9:2e-9"})


def list_pairs(method: str) -> list[tuple[dict, str, object]]:
    """List the pairs of a method: the settings that a setting needs, the name of the setting, and its value."""
    pairs = []
    for name, values in VARIANTS.items():
        for value in values:
            needed, value = value if isinstance(value, tuple) else ({}, value)
            if name == "surrogate":
                value = NARROW.get(method, {}).get(value, value)
            pairs.append((needed, name, value))
    return pairs


def pair_name(needed: dict, name: str, value: object) -> str:
    """Format a pair in one line."""
    beside = " ".join(f"{key}={x}" for key, x in needed.items())
    return f"{name}={value}" + (f" with {beside}" if beside else "")


def make_settings(method: str, **changes) -> Settings:
    """Make the settings of the short run; raise InputError if they are rejected."""
    base = {**read_settings_file("pocket/tiny"), **BASE}
    settings = load_settings(base, {"method": method, **FITTED.get(method, {}), **changes})
    load_method(settings)
    return settings


FAULTS = ("same", "late", "crashed")
CHOOSE_CHUNKS = (
    "chunks",
    "chunk_fraction",
    "train_chunks",
    "chunk_weighting",
    "weighting_uniform",
    "weighting_anneal",
    "weighting_temperature",
    "profile_every",
)
ONE_GRADIENT = {"pepg", "par"}  # the page on surrogates shows it


@dataclass(frozen=True)
class Trained:
    """The updates of a short run, and the change of its weights."""

    moved: torch.Tensor
    updates: list  # of all iterations, one UpdateBatch each

    def transitions(self) -> list[list]:
        """Return image, step and chunk sample of each transition, update by update."""
        return [
            [x.tolist() for x in (update.image_index, update.step_index, update.chunk_sample_ids)]
            for update in self.updates
        ]


def chose_same_chunks(name: str, changed: Trained, plain: Trained) -> bool:
    """Return True if a setting that selects chunks selected the same ones as the run without it.

    The short runs have six transitions, so this happens often.
    """
    return name in CHOOSE_CHUNKS and changed.transitions() == plain.transitions()


def need_not_differ(name: str, changed: Settings, plain: Settings) -> bool:
    """Return True if two values of a setting provably train the same."""
    if name == "surrogate":
        return {changed.surrogate, plain.surrogate} == ONE_GRADIENT
    # The ratio of an update from the weights that sampled is 1.
    return name == "clip_range" and changed.updates_per_iteration == 1


class Runs:
    """Train short runs in one process, with networks that are loaded once and then reset."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="sweep-"))
        self.networks: dict[str, tuple] = {}
        self.plain: dict[str, Trained] = {}
        self.load = trainable.load_trainable_policy
        self.rewards: dict[str, object] = {}
        self.load_reward = placement.load_placed_reward

    def load_once(self, model: str, **options):
        """Load a policy, or return the loaded one with its initial weights restored."""
        key = repr(sorted(options.items()))
        if key not in self.networks:
            policy = self.load(model, **options)
            self.networks[key] = policy, [p.detach().clone() for p in policy.trained]
        policy, start = self.networks[key]
        with torch.no_grad():
            for p, before in zip(policy.trained, start, strict=True):
                p.copy_(before)
                p.grad = None
        return policy

    def reward_once(self, name: str, **options):
        """Load a reward, or return the loaded one."""
        if name not in self.rewards:
            self.rewards[name] = self.load_reward(name, **options)
        return self.rewards[name]

    def train(self, settings: Settings) -> Trained:
        """Train two iterations."""
        updates = []

        def update_policy(state, rollout):
            update = updating.update_policy(state, rollout)
            updates.extend(update.batches)
            return update

        trainable.load_trainable_policy = self.load_once
        placement.load_placed_reward = self.reward_once
        trainer.update_policy = update_policy
        try:
            state = load_policy_and_optimizer(prepare_state(settings, self.folder))
            state.optimizer = torch.optim.SGD(
                state.policy.trained, lr=settings.learning_rate, weight_decay=settings.weight_decay
            )
            start = torch.cat([p.detach().flatten().clone() for p in state.policy.trained])
            for _ in range(ITERATIONS):
                trainer.train_iteration(state)
        finally:
            trainable.load_trainable_policy = self.load
            placement.load_placed_reward = self.load_reward
            trainer.update_policy = updating.update_policy
        state.executor.shutdown()
        final = state.ema.shadow_params if state.ema is not None else state.policy.trained
        moved = torch.cat([p.detach().flatten() for p in final]) - start
        return Trained(moved=moved, updates=updates)

    def train_without(self, method: str, needed: dict) -> Trained:
        """Train the run without the setting, or return the result of an earlier call."""
        key = repr((method, needed))
        if key not in self.plain:
            self.plain[key] = self.train(make_settings(method, **needed))
        return self.plain[key]

    def try_pair(self, method: str, needed: dict, name: str, value: object) -> str | None:
        """Train a pair and describe its outcome; None if the method already has this value or rejects what the pair needs."""
        try:
            without = make_settings(method, **needed)
        except InputError:
            return None  # the pair of the other setting says so
        if getattr(without, name) == value:
            return None
        try:
            changed = make_settings(method, **{**needed, name: value})
        except InputError:
            return "rejected"
        except Exception:  # any: the sweep goes on, and the pair is counted and named as crashed
            traceback.print_exc()
            return "crashed"
        try:
            trained = self.train(changed)
            plain = self.train_without(method, needed)
        except InputError:
            return "late"
        except Exception:  # any: the sweep goes on, and the pair is counted and named as crashed
            traceback.print_exc()
            return "crashed"
        change = (trained.moved - plain.moved).norm() / plain.moved.norm().clamp(min=1e-12)
        if change > SMALLEST_CHANGE:
            return "trained"
        if chose_same_chunks(name, trained, plain) or need_not_differ(name, changed, without):
            return "equal"
        if "learning_rate" not in needed and name != "learning_rate":
            # The first update may have saturated the objective, so that the second one moves hardly anything.
            needed = {**needed, "learning_rate": SMALL_LEARNING_RATE}
            return self.try_pair(method, needed, name, value)
        return "same"


def package_hash() -> str:
    """Hash the package's code and the table of methods."""
    folder = Path(chunk_grpo.__file__).parent
    files = [*sorted(folder.rglob("*.py")), folder / "presets" / "methods.yaml"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def summarise(pairs: dict[str, dict[str, str]]) -> dict:
    """Count the outcomes, and name the pairs that are neither trained nor rejected."""
    counts = Counter(outcome for of in pairs.values() for outcome in of.values())
    silent = {
        kind: [
            f"{method} {name}"
            for method, of in pairs.items()
            for name, outcome in of.items()
            if outcome == kind
        ]
        for kind in FAULTS
    }
    return {"tried": counts.total(), **counts, "pairs_that_are": silent}


def main():
    """Sweep all pairs, and write the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--label", default="after", help="name of the counts in the file, such as before or after"
    )
    parser.add_argument("--methods", default="", help="these rows alone, such as steps,nft")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    asked = [*filter(None, options.methods.split(","))]
    if unknown := set(asked) - set(METHODS):
        print(
            f"--methods must be of {', '.join(METHODS)}; got {', '.join(sorted(unknown))}",
            file=sys.stderr,
        )
        sys.exit(2)

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kept = read_json(options.out) if options.out.is_file() else {}
    sweep = kept.get(options.label, {})
    if sweep.get("package") != package_hash():
        sweep = {"pairs": {}}
    sweep = {"package": package_hash(), "pairs": sweep["pairs"]}
    runs = Runs()
    start = time.time()
    for method in asked or METHODS:
        listed = {pair_name(*pair): pair for pair in list_pairs(method)}
        before = sweep["pairs"].get(method, {})
        found = {pair: outcome for pair, outcome in before.items() if pair in listed}
        sweep["pairs"][method] = found
        for pair, (needed, name, value) in listed.items():
            if found.get(pair, "same") in FAULTS:  # new, or to be tried again
                outcome = runs.try_pair(method, needed, name, value)
                if outcome is not None:
                    found[pair] = outcome
        runs.plain.clear()
        kept[options.label] = {**summarise(sweep["pairs"]), **sweep}
        write_json(options.out, kept)
        print(f"{method}: {dict(Counter(found.values()))}, {time.time() - start:.0f} s", flush=True)
    silent = kept[options.label]["pairs_that_are"]
    for kind, names in silent.items():
        for name in names:
            print(f"{kind}: {name}")
    sys.exit(int(any(silent.values())))


if __name__ == "__main__":
    main()
