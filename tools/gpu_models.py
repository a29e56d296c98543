"""Models of published sizes with random weights, made where they compute: `make gpu` measures them without a download.

What a kernel takes, in seconds and bytes, does not depend on the values of the weights. What a model has learned does,
so nothing here says how well a released model trains.
"""

import json
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from chunk_grpo.core.settings import Settings
from chunk_grpo.measurements import speed
from chunk_grpo.models import prompt_embeds, trainable
from chunk_grpo.models.cost import find_model_config
from chunk_grpo.models.inputs import import_class, import_family
from chunk_grpo.models.policy import TORCH_DTYPES, ModelConfig, Policy
from chunk_grpo.reward_serving import placement
from chunk_grpo.rewards.hpsv3 import IMAGE_TOKEN, REWARD_TOKEN, HPSv3, build_reward_head
from chunk_grpo.training.rollout import make_generator
from chunk_grpo.training.state import TrainingState, load_policy_and_optimizer, prepare_state

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PUBLISHED = {
    "flux": "black-forest-labs/FLUX.1-dev",
    "qwen": "Qwen/Qwen-Image",
    "z_image": "Tongyi-MAI/Z-Image-Turbo",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "klein": "black-forest-labs/FLUX.2-klein-base-4B",
}
SMALL_VAE = speed._FLUX_VAE_CONFIG | {
    "block_out_channels": [8] * 4,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
SMALL_NETWORKS = {  # of the same classes, for a CPU
    "flux": (
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 6, 6],
            "guidance_embeds": True,
        },
        SMALL_VAE,
    ),
    "qwen": (
        {
            "num_layers": 2,
            "in_channels": 16,
            "out_channels": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": [4, 6, 6],
        },
        {
            "base_dim": 8,
            "z_dim": 4,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
    ),
    "z_image": (
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
            "axes_dims": [4, 6, 6],
            "axes_lens": [128, 32, 32],
        },
        SMALL_VAE,
    ),
    "sd3": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        SMALL_VAE,
    ),
    "klein": (
        {
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 96,
            "axes_dims_rope": [4, 4, 4, 4],
            "guidance_embeds": False,
        },
        {
            "block_out_channels": [8] * 4,
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
    ),
}


def model_config(
    name: str,  # a key of PUBLISHED
    small: bool,  # tiny sizes instead of the published ones
    **changes,  # of the transformer's configuration
) -> ModelConfig:
    """Return the configurations of a model's transformer and VAE."""
    published = find_model_config(PUBLISHED[name])
    transformer = json.loads(published.transformer)
    autoencoder = json.loads(published.autoencoder)
    if small:
        transformer, autoencoder = SMALL_NETWORKS[name]
    network = json.dumps(transformer | changes)
    return ModelConfig(
        published.pipeline,
        network,
        json.dumps(autoencoder),
        4 if small and name == "sd3" else published.extra_tokens,
    )


def random_policy(
    config: ModelConfig,
    settings: Settings,
    folder: Path,  # gets the two small files of a pipeline's folder that a policy reads
) -> Policy:
    """Make a policy of any family with random weights on the device, and random embeddings for every prompt."""
    family = import_family(config.pipeline)
    configs = json.loads(config.transformer), json.loads(config.autoencoder)

    class RandomPolicy(family):
        """A policy whose weights and embeddings are random."""

        key = "random weights"

        def load_networks(
            self, weights_dtype: torch.dtype, keep_on_cpu: bool
        ) -> tuple[nn.Module, ...]:
            """Make transformer and VAE where they compute."""
            made = []
            usual = torch.get_default_dtype()
            with torch.random.fork_rng(), self.device:
                torch.manual_seed(0)
                dtypes = weights_dtype, prompt_embeds.encoder_dtype(self.dtype)
                for name, network_config, dtype in zip(
                    self.network_classes, configs, dtypes, strict=True
                ):
                    torch.set_default_dtype(dtype)
                    network = import_class(name)(**network_config).eval().requires_grad_(False)
                    torch.set_default_dtype(usual)
                    for part, tensor in network.named_parameters():
                        if part.endswith("pad_token"):  # Z-Image leaves them as the memory was
                            tensor.normal_(std=0.02)
                    made.append(network)
            return tuple(made)

        def encode(self, prompts: list[str]) -> dict[str, Tensor]:
            """Return random conditioning, the same for a prompt whenever it is asked for; one row per prompt."""
            negatives = self.get_negative_prompts(prompts)
            rows = [self.random_row(prompt) for prompt in [*prompts, *negatives[:1]]]
            stacked = {
                name: torch.stack([row[name] for row in rows]).to(self.device) for name in rows[0]
            }
            count = len(prompts)
            if not negatives:
                return stacked
            negative = {
                f"negative_{k}": v[count:].expand(count, *v.shape[1:]) for k, v in stacked.items()
            }
            return {k: v[:count] for k, v in stacked.items()} | negative

        def random_row(self, prompt: str) -> dict[str, Tensor]:
            """Return the random conditioning of one prompt; families with masks get prompts of different lengths."""
            net = self.transformer.config
            width = net.get("joint_attention_dim") or net.get("cap_feat_dim")
            length = self.max_tokens + config.extra_tokens
            generator = make_generator(0, 0, prompt, 0, stream="embedding")
            row = {"prompt_embeds": torch.randn(length, width, generator=generator).to(self.dtype)}
            if net.get("pooled_projection_dim"):
                pooled = torch.randn(net["pooled_projection_dim"], generator=generator)
                row["pooled_prompt_embeds"] = pooled.to(self.dtype)
            if self.masks_attention:
                used = length - (len(prompt) % 4) * length // 8
                row["prompt_embeds_mask"] = torch.arange(length) < used
            return row

    write_policy_files(folder)
    stored = TORCH_DTYPES[
        settings.dtype if settings.lora_rank or settings.sharding != "none" else "float32"
    ]
    return RandomPolicy(
        folder,
        settings.resolution,
        max_tokens=settings.max_tokens,
        guidance=settings.guidance,
        true_cfg_scale=settings.true_cfg_scale,
        dtype=TORCH_DTYPES[settings.dtype],
        device=DEVICE,
        weights_dtype=stored,
        vae_tiling=settings.vae_tiling,
    )


def write_policy_files(folder: Path) -> None:
    """Write the files, besides weights, that policies read from a pipeline's folder."""
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps({"is_distilled": False}))


def trainable_policy(config: ModelConfig, settings: Settings, folder: Path) -> Policy:
    """Make a random policy, with the trainable weights that the settings select."""
    policy = random_policy(config, settings, folder)
    trainable.set_attention_backend(policy, settings.attention)
    if settings.compile:
        trainable.compile_blocks(policy)
    names = (
        "lora_rank",
        "lora_targets",
        "lora_alpha",
        "gradient_checkpointing",
        "seed",
        "sharding",
        "sharding_offload",
        "sharding_group",
    )
    policy.trained = trainable.make_trainable(
        policy, **{name: getattr(settings, name) for name in names}
    )
    return policy


def replaced_loaders(config: ModelConfig, settings: Settings, folder: Path, scorer):
    """Replace the functions that read weights from disk by ones that make random weights, within this context."""
    return (
        mock.patch.object(placement, "load_placed_reward", lambda name, **options: scorer),
        mock.patch.object(
            trainable,
            "load_trainable_policy",
            lambda model, **given: trainable_policy(config, settings, folder),
        ),
        mock.patch.object(prompt_embeds, "cache_prompt_embeds", lambda *given: {}),
    )


def prepare_training(
    config: ModelConfig, settings: Settings, folder: Path, scorer
) -> TrainingState:
    """Prepare a run of a random model up to its first iteration, with the code that trains."""
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    rewards, policies, embeds = replaced_loaders(config, settings, folder / "model", scorer)
    with rewards, policies, embeds:
        state = prepare_state(settings, run)
        return load_policy_and_optimizer(state)


# ------------------------------------------------------------------------------------------- text encoders and scorers


T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}
SMALL_T5 = T5_XXL | {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 64,
}
QWEN2_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 151658,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "rope_theta": 1e6,
        },
    },
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "num_heads": 16,
        "mlp_ratio": 4,
    },
}
SMALL_QWEN2_VL = {
    "text_config": QWEN2_VL_7B["text_config"]
    | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
    },
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 4,
    },
}
CLIP_H = {  # PickScore's
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    "projection_dim": 1024,
}
_SMALL_CLIP_PART = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SMALL_CLIP = {
    "text_config": _SMALL_CLIP_PART | {"vocab_size": 64},
    "vision_config": _SMALL_CLIP_PART | {"patch_size": 14},
    "projection_dim": 16,
}


def made_on(device: torch.device, dtype: torch.dtype, make) -> nn.Module:
    """Make a network with random weights on a device, frozen."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)


def t5_encoder(small: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Make a T5-XXL encoder with random weights."""
    from transformers import T5Config, T5EncoderModel

    return made_on(
        device, dtype, lambda: T5EncoderModel(T5Config(**(SMALL_T5 if small else T5_XXL)))
    )


def word_tokenizer():
    """Make a tokenizer of words that knows HPSv3's two marks: nearly as many tokens as the published one makes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([IMAGE_TOKEN, REWARD_TOKEN])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<unk>")


def hpsv3_scorer(small: bool, device: torch.device, dtype: torch.dtype, batch: int) -> HPSv3:
    """Make HPSv3 with random weights; every word is the same token."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    tokenizer = word_tokenizer()
    sizes = SMALL_QWEN2_VL if small else QWEN2_VL_7B
    config = Qwen2VLConfig(**sizes, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    model = made_on(device, dtype, lambda: Qwen2VLModel(config))
    head = made_on(device, torch.float32, lambda: build_reward_head(config.text_config.hidden_size))
    return HPSv3(tokenizer, device, dtype, batch, model, head)


class RandomPickScore:
    """A CLIP of PickScore's size with random weights: (images, prompts) -> scores of the images alone."""

    def __init__(self, small: bool, device: torch.device, dtype: torch.dtype):
        from transformers import CLIPConfig, CLIPModel

        config = CLIPConfig(**(SMALL_CLIP if small else CLIP_H))
        self.model = made_on(device, dtype, lambda: CLIPModel(config))
        self.device, self.dtype = device, dtype

    @torch.inference_mode()
    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Score a batch of images (B, 3, H, W); returns (B,)."""
        resized = nn.functional.interpolate(
            images.to(self.device), size=(224, 224), mode="bilinear"
        )
        vision = self.model.vision_model(pixel_values=resized.to(self.dtype)).pooler_output
        features = self.model.visual_projection(vision).float()
        return features.mean(dim=1).cpu()
