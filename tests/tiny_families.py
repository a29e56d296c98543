"""Every family in miniature: the real classes with random weights, built from configurations, nothing downloaded."""

import shutil
from pathlib import Path

import tiny_flux
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)
from transformers.utils import is_torchvision_available

WORDS = [
    *tiny_flux.WORDS,
    *(
        "system user assistant Describe image by detailing color shape size texture quantity text "
        "spatial relationships objects and background think"
    ).split(),
    ",",
    ":",
    "\n",
    "/",
]
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# transformers prepares images with Pillow if there is no torchvision, and videos with torchvision alone
PROCESSOR_PARTS = Qwen2VLProcessor.get_attributes
if not is_torchvision_available():
    Qwen2VLProcessor.get_attributes = classmethod(lambda kind: ["image_processor", "tokenizer"])
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
VAE = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def chat_tokenizer(more_marks: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Qwen's tokenizer with whole words: line ends are tokens, and the template's beginning has its 34."""
    words = [*MARKS, "<unk>", *WORDS, *more_marks]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    pieces = Regex(r"\n|\w+|[^\w\s]")
    core.pre_tokenizer = pre_tokenizers.Split(pieces, "removed", invert=True)
    core.add_special_tokens([*MARKS, *more_marks])
    names = {"pad_token": MARKS[0], "eos_token": MARKS[2], "unk_token": "<unk>"}
    out = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=2048, padding_side="right", **names
    )
    out.chat_template = CHAT
    return out


def qwen_sizes(layers: int) -> dict:
    """The sizes of a small Qwen language model."""
    return {
        "vocab_size": len(MARKS) + 1 + len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def small_vae() -> AutoencoderKL:
    """FLUX.1's and SD3's VAE."""
    return AutoencoderKL(
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1, scaling_factor=0.4, **VAE
    )


def loud(net: torch.nn.Module, scale: float = 0.1) -> torch.nn.Module:
    """The same network with larger biases and modulations, so that every input moves what comes out."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(scale * torch.randn_like(p))
    return net


def schnell(folder: Path) -> None:
    """FLUX.1-schnell: no embedded guidance, shift 1."""
    tiny_flux.build(folder)
    pipe = FluxPipeline.from_pretrained(folder)
    config = dict(pipe.transformer.config) | {"guidance_embeds": False}
    pipe.transformer = loud(FluxTransformer2DModel.from_config(config))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipe.save_pretrained(folder)


def sd3(folder: Path) -> None:
    """SD3.5: three text encoders, dual attention in the first block, static shift 3."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"projection_dim": 16, "vocab_size": len(tiny_flux.WORDS) + 3, "eos_token_id": 1}
    clips = [
        CLIPTextModelWithProjection(CLIPTextConfig(max_position_embeddings=16, **sizes))
        for _ in range(2)
    ]
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=sizes["vocab_size"], d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2
        )
    )
    net = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    words = [tiny_flux.tokenizer(end, 16) for end in ("<end>", "<end>", "</s>")]
    StableDiffusion3Pipeline(
        loud(net),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        small_vae(),
        clips[0],
        words[0],
        clips[1],
        words[1],
        t5,
        words[2],
    ).save_pretrained(folder)


def qwen(folder: Path) -> None:
    """Qwen-Image: a language model that sees, a video VAE, a schedule that ends at 0.02."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=qwen_sizes(2) | {"rope_parameters": rope}, vision_config=vision
        )
    )
    net = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[-0.7, 0.1, 0.9, -0.2],
        latents_std=[2.8, 1.4, 2.3, 1.1],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    QwenImagePipeline(scheduler, vae, encoder, chat_tokenizer(), loud(net)).save_pretrained(folder)


def z_image(folder: Path) -> None:
    """Z-Image: Qwen3's second last layer, captions of their own lengths, static shift 3."""
    encoder = Qwen3Model(Qwen3Config(head_dim=16, **qwen_sizes(3)))
    net = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    ZImagePipeline(
        scheduler, small_vae(), encoder, chat_tokenizer(), loud(net, 0.05)
    ).save_pretrained(folder)


def klein(folder: Path, distilled: bool = False) -> None:
    """FLUX.2-klein: three of Qwen3's layers, batch norm in the VAE, a shift that knows the steps."""
    encoder = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **qwen_sizes(28)))
    net = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=96,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(**VAE)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    Flux2KleinPipeline(
        scheduler, vae, encoder, chat_tokenizer(), loud(net), distilled
    ).save_pretrained(folder)


def dev(folder: Path) -> None:
    """FLUX.1-dev: embedded guidance, dynamic shift."""
    tiny_flux.build(folder)


def kontext(folder: Path) -> None:
    """FLUX.1-Kontext: the parts of FLUX.1-dev in a pipeline that edits images."""
    tiny_flux.build(folder)
    parts = FluxPipeline.from_pretrained(folder).components
    loud(parts["transformer"], 0.05)
    FluxKontextPipeline(**parts).save_pretrained(folder)


def qwen_edit(folder: Path) -> None:
    """Qwen-Image-Edit: the parts of Qwen-Image, and a processor that shows the image to the language model."""
    qwen(folder)
    parts = QwenImagePipeline.from_pretrained(folder).components
    first = len(MARKS) + 1 + len(WORDS)
    config = parts["text_encoder"].config
    names = ("vision_start", "vision_end", "image", "video")
    for i, name in enumerate(names):
        setattr(config, f"{name}_token_id", first + i)
    config.text_config.vocab_size = first + len(names)
    torch.manual_seed(0)
    parts["text_encoder"] = Qwen2_5_VLForConditionalGeneration(config)
    parts["tokenizer"] = chat_tokenizer(VISION_MARKS)
    video = Qwen2VLVideoProcessor() if is_torchvision_available() else None
    parts["processor"] = Qwen2VLProcessor(Qwen2VLImageProcessor(), parts["tokenizer"], video)
    shutil.rmtree(folder)
    QwenImageEditPipeline(**parts).save_pretrained(folder)


BUILDERS = {
    "dev": dev,
    "schnell": schnell,
    "sd3": sd3,
    "qwen": qwen,
    "z_image": z_image,
    "klein": klein,
}
# families whose prompts each have an image
EDITING_BUILDERS = {"kontext": kontext, "qwen_edit": qwen_edit}


def build(name: str, folder: Path) -> Path:
    """Save a family's pipeline under `folder` and return it."""
    torch.manual_seed(0)
    (BUILDERS | EDITING_BUILDERS)[name](folder)
    return folder
