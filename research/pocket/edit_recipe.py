"""What the editing base was made with: lists of edits, wrong instructions, and the network with a source image.

The lesson nbs/01_pocket/07_edits shows these, research/pocket/train_edit_base.py trains with them.
"""

from collections import Counter
from itertools import product

import numpy as np
import torch
from diffusers import AutoencoderKL
from pocket_recipe import (
    PocketFlow,
    encode_in_batches,
    load_flow,
    new_tokenizer,
    pack_flow_latents,
    sample_flow_images,
)

from chunk_grpo.pocket.edits import (
    DIRECTIONS,
    EDIT_KINDS,
    Edit,
    free_cells,
    possible_edits,
    sample_edit_scene,
)
from chunk_grpo.pocket.world import POCKET_COLOURS, SHAPES, Scene

EDIT_SPLITS = ("train", "validation", "test")
SCENES = {"train": 64, "validation": 16, "test": 32}  # images of each list, three edits each
NEW_WORDS = ("recolour", "move", "add", "remove", "the", "up", "down")  # to the pocket world


def all_edits(kind: str) -> list[Edit]:  # kind: one of EDIT_KINDS
    """Return every edit of a kind that an instruction can name."""
    changes = {"recolour": tuple(POCKET_COLOURS), "move": tuple(DIRECTIONS)}.get(kind, (None,))
    return [
        Edit(kind, colour, shape, change)
        for colour, shape, change in product(POCKET_COLOURS, SHAPES, changes)
        if change != colour
    ]


def split_instructions(
    seed: int = 0,
) -> dict[str, set[Edit]]:  # by split; no edit is in two of them
    """Split the edits of each kind: a quarter for the test, an eighth for validation, the rest for training."""
    split = {name: set() for name in EDIT_SPLITS}
    for number, kind in enumerate(EDIT_KINDS):
        edits = all_edits(kind)
        order = np.random.default_rng([seed, 23, number]).permutation(len(edits))
        test, validation = len(edits) // 4, len(edits) // 8
        split["test"] |= {edits[i] for i in order[:test]}
        split["validation"] |= {edits[i] for i in order[test : test + validation]}
        split["train"] |= {edits[i] for i in order[test + validation :]}
    return split


def scene_content(scene: Scene) -> frozenset:
    """Return what identifies a scene, whatever its background and the order of its objects."""
    return frozenset(scene.things)


def sample_edit_list(
    count: int,  # scenes, which have one and two objects in turn
    allowed: set[Edit],  # edits that the list may have
    excluded: set[frozenset],  # contents of scenes in other lists; those of this one are added
    rng: np.random.Generator,  # advanced
) -> list[tuple[Scene, list[Edit]]]:  # each scene with three edits
    """Sample scenes, and take for each an edit of every kind that is possible, the one that the list has least often."""
    used = Counter()
    edited = []
    while len(edited) < count:
        scene = sample_edit_scene(rng, count=1 + len(edited) % 2)
        possible = [edit for edit in possible_edits(scene) if edit in allowed]
        possible = [possible[i] for i in rng.permutation(len(possible))]
        by_kind = {kind: [edit for edit in possible if edit.kind == kind] for kind in EDIT_KINDS}
        by_kind = {kind: edits for kind, edits in by_kind.items() if edits}
        if scene_content(scene) in excluded or len(by_kind) < 3:
            continue
        chosen = [min(edits, key=lambda edit: used[edit]) for edits in by_kind.values()]
        used.update(chosen)
        excluded.add(scene_content(scene))
        edited.append((scene, chosen))
    return edited


def make_edit_lists(
    seed: int = 0,
) -> dict[str, list[tuple[Scene, list[Edit]]]]:  # by split
    """Make the shipped lists of edits: they share no instruction and no scene."""
    allowed = split_instructions(seed)
    excluded = set()
    return {
        split: sample_edit_list(
            SCENES[split], allowed[split], excluded, np.random.default_rng([seed, 29, number])
        )
        for number, split in enumerate(EDIT_SPLITS)
    }


def choose_wrong_edit(
    scene: Scene,
    edit: Edit,  # that is shown
    allowed: set[Edit],  # edits that may be trained on
    rng: np.random.Generator,  # advanced
) -> Edit:
    """Return another edit that is possible for the scene: of the same kind if there is one, else of any kind."""
    others = [other for other in possible_edits(scene) if other in allowed and other != edit]
    same = [other for other in others if other.kind == edit.kind]
    choice = same or others
    return choice[rng.integers(len(choice))]


def sample_added_place(
    scene: Scene,  # before the edit
    rng: np.random.Generator,  # advanced
) -> tuple[float, float]:  # centre, pixels
    """Sample a free place for an object that is added."""
    places = free_cells(scene)
    return places[rng.integers(len(places))]


class EditFlow(PocketFlow):
    """Velocity network and text encoders that also read the image to edit, as FLUX.1-Kontext does."""

    def __init__(self):
        """Make the network of the shipped base, with embeddings of the new words."""
        super().__init__()
        self.tokenizers = {kind: new_tokenizer(kind, NEW_WORDS) for kind in ("clip", "t5")}
        for encoder in (self.clip, self.t5):
            encoder.resize_token_embeddings(len(self.tokenizers["t5"]), mean_resizing=False)
        source_ids = self.ids.clone()
        source_ids[:, 0] = 1  # the first coordinate tells the source's tokens from the image's
        self.register_buffer("both_ids", torch.cat([self.ids, source_ids]), False)

    def forward(
        self,
        x: torch.Tensor,  # latents, (B, 4, 32)
        sigma: torch.Tensor,  # noise levels, (B,)
        t5_tokens: torch.Tensor,  # (B, MAX_TOKENS)
        clip_tokens: torch.Tensor,  # (B, MAX_TOKENS)
        source: torch.Tensor,  # latents of the image to edit, (B, 4, 32)
    ) -> torch.Tensor:  # velocity, (B, 4, 32)
        """Return the velocity at a noise level, given the instruction's tokens and the source image."""
        velocity = self.transformer(
            hidden_states=torch.cat([x, source], 1),
            timestep=sigma,
            encoder_hidden_states=self.t5(t5_tokens).last_hidden_state,
            pooled_projections=self.clip(clip_tokens).pooler_output,
            img_ids=self.both_ids,
            txt_ids=self.ids.new_zeros(t5_tokens.shape[1], 3),
            return_dict=False,
        )[0]
        return velocity[:, : x.shape[1]]


class EditOfSource:
    """An `EditFlow` with the images that it edits, which can be called as a `PocketFlow`."""

    def __init__(
        self,
        model: EditFlow,
        source: torch.Tensor,  # latents of the images to edit, (B, 4, 32)
    ):
        """Keep the model and the sources."""
        self.model = model
        self.tokenizers = model.tokenizers
        self.source = source

    def __call__(self, x, sigma, t5_tokens, clip_tokens):
        """Return the velocity (B, 4, 32), as `PocketFlow` does."""
        return self.model(x, sigma, t5_tokens, clip_tokens, self.source)


def new_edit_flow(
    seed: int = 0,  # of the embeddings of the new words
) -> tuple[EditFlow, AutoencoderKL]:
    """Return an `EditFlow` with the weights of the shipped base, and the shipped autoencoder."""
    start, vae = load_flow()
    torch.manual_seed(seed)
    model = EditFlow()
    state = model.state_dict()
    for name, weights in start.state_dict().items():
        if state[name].shape == weights.shape:
            state[name] = weights
        else:  # an embedding with rows for the new words behind the old ones
            state[name] = torch.cat([weights, state[name][len(weights) :]])
    model.load_state_dict(state)
    return model, vae


def encode_pictures(
    vae: AutoencoderKL,
    pictures: np.ndarray,  # (N, 64, 64, 3), uint8
) -> torch.Tensor:  # (N, 4, 32)
    """Return the latents of pictures as tokens, scaled as the network reads them."""
    latents = encode_in_batches(vae, pictures)
    return pack_flow_latents((latents - vae.config.shift_factor) * vae.config.scaling_factor)


def sample_edited_images(
    model: EditFlow,
    vae: AutoencoderKL,
    pictures: np.ndarray,  # sources, (B, 64, 64, 3), uint8
    instructions: list[str],  # one per source
    steps: int = 20,
    eta: float = 0.0,  # as in `sample_flow_images`
    seed: int = 0,
) -> torch.Tensor:  # (B, 3, 64, 64), in [0, 1]
    """Sample the edited image of every source."""
    conditioned = EditOfSource(model, encode_pictures(vae, pictures))
    return sample_flow_images(conditioned, vae, instructions, steps=steps, eta=eta, seed=seed)
