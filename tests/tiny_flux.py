"""A FLUX.1-dev in miniature: the real classes with random weights, embedded guidance and dynamic shift."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = "a red green blue star circle square two three cats dogs left of right above below the photo".split()


def tokenizer(end: str, length: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that closes every prompt with `end`."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", end, "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": end, "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=length, **names)


def build(folder: Path, seed: int = 0) -> Path:
    """Save the pipeline under `folder` and return it."""
    torch.manual_seed(seed)
    vocab = len(WORDS) + 3
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    clip = CLIPTextModel(
        CLIPTextConfig(vocab_size=vocab, eos_token_id=1, max_position_embeddings=16, **small)
    )
    t5 = T5EncoderModel(
        T5Config(vocab_size=vocab, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    )
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=0.4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    words = (tokenizer("<end>", 16), tokenizer("</s>", 16))
    FluxPipeline(scheduler, vae, clip, words[0], t5, words[1], transformer).save_pretrained(folder)
    return Path(folder)
