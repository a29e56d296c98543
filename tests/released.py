"""Tiny random checkpoints of the four scorers, in the layout of the released files; needs no transformers."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import chunk_grpo

INSTRUCTION = (
    (Path(chunk_grpo.__file__).parent / "rewards/hpsv3_instruction.txt").read_bytes().decode()
)

PROMPTS = (
    "a red square",
    "a blue circle on the left of two green triangles",
    "a photo of a fox, asleep in the snow; 35mm, f/1.8",
    "A CAT!",
    "",
    "an oil painting of " + "very " * 60 + "tall trees",
)
WORDS = (
    "a an the of on in red blue green square circle photo painting left right two tall trees very cat dog "
    "fox"
).split()
SIZES = (  # width, height: square, wide, tall, odd, tiny, large, and strips
    (64, 64),
    (256, 256),
    (448, 448),
    (300, 200),
    (200, 301),
    (97, 131),
    (131, 97),
    (33, 500),
    (500, 33),
    (28, 28),
    (29, 27),
    (640, 480),
    (480, 640),
    (1000, 250),
    (223, 225),
    (512, 511),
    (3, 5),
    (150, 1024),
    (701, 333),
    (84, 56),
)


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coloured bands and blocks with a little noise, from whole numbers only."""
    rng = np.random.default_rng([seed, width, height])
    y, x = np.mgrid[:height, :width]
    channels = []
    for a, b, c in rng.integers(1, 9, (3, 3)):
        bands = (int(a) * x * 255 // width + int(b) * y * 255 // height) % 256
        blocks = 90 * ((x * int(c) // width + y * int(c) // height) % 2)
        channels.append((bands + blocks) // 2 + rng.integers(0, 30, (height, width)))
    return Image.fromarray(np.stack(channels, -1).clip(0, 255).astype(np.uint8))


def fill(shapes: dict[str, tuple], seed: int) -> dict[str, torch.Tensor]:
    """Random weights by name, each from its own seed."""
    out = {}
    for name, shape in shapes.items():
        draw = (
            np.random.default_rng([seed, zlib.crc32(name.encode())])
            .standard_normal(shape)
            .astype(np.float32)
        )
        if len(shape) < 2:
            norm = ("norm" in name.lower() or "ln_q" in name) and name.endswith("weight")
            out[name] = torch.from_numpy((1.0 if norm else 0.0) + np.float32(0.1) * draw)
        else:
            wide = (
                1.0
                if "embedding" in name and len(shape) == 2
                else 1.5 / np.sqrt(np.prod(shape[1:]))
            )
            out[name] = torch.from_numpy(draw * np.float32(wide))
    return out


def layer(name: str, into: int, out: int, bias: bool = True) -> dict[str, tuple]:
    """The shapes of a linear layer."""
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def norm(name: str, wide: int) -> dict[str, tuple]:
    """The shapes of a layer norm."""
    return {f"{name}.weight": (wide,), f"{name}.bias": (wide,)}


def write(folder: Path, **files) -> None:
    """JSON files by name; a dot is written as __."""
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(
            json.dumps(content, indent=1), encoding="utf-8"
        )


def letters() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }
    return [table[byte] for byte in range(256)]


def merges_of(words: list[list[str]]) -> list[tuple[str, str]]:
    """Pairs that put each word together from the left."""
    pairs = {}
    for symbols in words:
        whole = symbols[0]
        for symbol in symbols[1:]:
            pairs[(whole, symbol)] = None
            whole += symbol
    return list(pairs)


def numbered(*lists: list[str]) -> dict[str, int]:
    """Words with numbers in order, each once."""
    return {
        word: i for i, word in enumerate(dict.fromkeys(word for words in lists for word in words))
    }


def clip_tokenizer(folder: Path) -> int:
    """CLIP's tokenizer with a small vocabulary: its size."""
    merges = merges_of([[*word[:-1], word[-1] + "</w>"] for word in WORDS if len(word) > 1])
    vocabulary = numbered(
        letters(),
        [c + "</w>" for c in letters()],
        ["".join(pair) for pair in merges],
        ["<|startoftext|>", "<|endoftext|>"],
    )
    write(
        folder,
        vocab__json=vocabulary,
        tokenizer_config__json={
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": 77,
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "do_lower_case": True,
        },
    )
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n", encoding="utf-8"
    )
    return len(vocabulary)


def clip_tower(name: str, wide: int, layers: int) -> dict[str, tuple]:
    """The layers of one of CLIP's towers."""
    shapes = {}
    for i in range(layers):
        at = f"{name}.encoder.layers.{i}"
        shapes |= norm(f"{at}.layer_norm1", wide) | norm(f"{at}.layer_norm2", wide)
        shapes |= layer(f"{at}.mlp.fc1", wide, 2 * wide) | layer(f"{at}.mlp.fc2", 2 * wide, wide)
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes |= layer(f"{at}.self_attn.{part}", wide, wide)
    return shapes


def clip(folder: Path, seed: int = 0) -> Path:
    """A CLIP or PickScore as transformers stores it, old position buffers included."""
    folder.mkdir(parents=True)
    words = clip_tokenizer(folder)
    text = 32
    vision = 48
    shapes = {
        "text_model.embeddings.token_embedding.weight": (words, text),
        "text_model.embeddings.position_embedding.weight": (77, text),
        "visual_projection.weight": (24, vision),
        "vision_model.embeddings.class_embedding": (vision,),
        "text_projection.weight": (24, text),
        "vision_model.embeddings.patch_embedding.weight": (vision, 3, 32, 32),
        "vision_model.embeddings.position_embedding.weight": (50, vision),
    }
    shapes |= clip_tower("text_model", text, 2) | clip_tower("vision_model", vision, 2)
    shapes |= norm("text_model.final_layer_norm", text) | norm("vision_model.pre_layrnorm", vision)
    shapes |= norm("vision_model.post_layernorm", vision)
    tensors = fill(shapes, seed) | {"logit_scale": torch.tensor(100.0).log()}
    tensors |= {
        "text_model.embeddings.position_ids": torch.arange(77)[None],
        "vision_model.embeddings.position_ids": torch.arange(50)[None],
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "quick_gelu",
        "projection_dim": 24,
    }
    write(
        folder,
        config__json={
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "projection_dim": 24,
            "logit_scale_init_value": 2.6592,
            "text_config": sizes
            | {
                "model_type": "clip_text_model",
                "hidden_size": text,
                "intermediate_size": 2 * text,
                "vocab_size": words,
                "max_position_embeddings": 77,
                "bos_token_id": 0,
                "eos_token_id": 2,
            },
            "vision_config": sizes
            | {
                "model_type": "clip_vision_model",
                "hidden_size": vision,
                "intermediate_size": 2 * vision,
                "image_size": 224,
                "patch_size": 32,
            },
        },
        preprocessor_config__json={
            "crop_size": 224,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "resample": 3,
            "size": 224,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    return folder


def hpsv21(folder: Path, seed: int = 0) -> Path:
    """An HPSv2.1 as its authors store it, under open_clip's names, with the tokenizer and configuration of a CLIP."""
    clip(folder, seed)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    for part in ("text_config", "vision_config"):
        config[part]["hidden_act"] = "gelu"
    write(folder, config__json=config)
    words, text, vision, layers = config["text_config"]["vocab_size"], 32, 48, 2
    shapes = {
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": (50, vision),
        "visual.conv1.weight": (vision, 3, 32, 32),
        "visual.proj": (vision, 24),
        "positional_embedding": (77, text),
        "token_embedding.weight": (words, text),
        "text_projection": (text, 24),
    }
    shapes |= norm("visual.ln_pre", vision) | norm("visual.ln_post", vision)
    shapes |= norm("ln_final", text)
    for tower, wide in (("visual.transformer", vision), ("transformer", text)):
        for i in range(layers):
            at = f"{tower}.resblocks.{i}"
            shapes |= norm(f"{at}.ln_1", wide) | norm(f"{at}.ln_2", wide)
            shapes |= {f"{at}.attn.in_proj_weight": (3 * wide, wide)}
            shapes |= {f"{at}.attn.in_proj_bias": (3 * wide,)}
            shapes |= layer(f"{at}.attn.out_proj", wide, wide)
            shapes |= layer(f"{at}.mlp.c_fc", wide, 2 * wide)
            shapes |= layer(f"{at}.mlp.c_proj", 2 * wide, wide)
    tensors = fill(shapes, seed)
    for name in tensors:  # `fill` knows norms by another name
        if re.search(r"ln_\w+\.weight$", name):
            tensors[name] = tensors[name] + 1
    tensors |= {"logit_scale": torch.tensor(100.0).log()}
    torch.save({"epoch": 1, "state_dict": tensors}, folder / "HPS_v2.1_compressed.pt")
    return folder


def imagereward(folder: Path, seed: int = 0) -> Path:
    """ImageReward.pt with all that the released file holds, med_config.json and the files of bert-base-uncased."""
    folder.mkdir(parents=True)
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    words = [
        *marks,
        *characters,
        *("##" + c for c in characters),
        *(word for word in WORDS if len(word) > 1),
    ]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    write(
        folder,
        tokenizer_config__json={"do_lower_case": True, "tokenizer_class": "BertTokenizer"},
        config__json={
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": len(words),
        },
    )
    # [DEC] and [ENC] were added in training
    text = 48
    vision = 64
    rows = len(words) + 2
    med = {
        "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": text,
        "initializer_range": 0.02,
        "intermediate_size": 2 * text,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "model_type": "bert",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "type_vocab_size": 2,
        "vocab_size": rows,
        "encoder_width": vision,
        "add_cross_attention": True,
    }
    write(folder, med_config__json=med)
    see, read = "blip.visual_encoder", "blip.text_encoder"
    shapes = {
        f"{see}.cls_token": (1, 1, vision),
        f"{see}.pos_embed": (1, 197, vision),
        f"{see}.patch_embed.proj.weight": (vision, 3, 16, 16),
        f"{see}.patch_embed.proj.bias": (vision,),
    }
    for i in range(2):
        at = f"{see}.blocks.{i}"
        shapes |= norm(f"{at}.norm1", vision) | layer(f"{at}.attn.qkv", vision, 3 * vision)
        shapes |= layer(f"{at}.attn.proj", vision, vision) | norm(f"{at}.norm2", vision)
        shapes |= layer(f"{at}.mlp.fc1", vision, 4 * vision) | layer(
            f"{at}.mlp.fc2", 4 * vision, vision
        )
    shapes |= norm(f"{see}.norm", vision)
    shapes |= {
        f"{read}.embeddings.word_embeddings.weight": (rows, text),
        f"{read}.embeddings.position_embeddings.weight": (64, text),
    } | norm(f"{read}.embeddings.LayerNorm", text)
    for i in range(2):
        at = f"{read}.encoder.layer.{i}"
        for kind, into in (("attention", text), ("crossattention", vision)):
            shapes |= layer(f"{at}.{kind}.self.query", text, text)
            shapes |= layer(f"{at}.{kind}.self.key", into, text) | layer(
                f"{at}.{kind}.self.value", into, text
            )
            shapes |= layer(f"{at}.{kind}.output.dense", text, text) | norm(
                f"{at}.{kind}.output.LayerNorm", text
            )
        shapes |= layer(f"{at}.intermediate.dense", text, 2 * text) | layer(
            f"{at}.output.dense", 2 * text, text
        )
        shapes |= norm(f"{at}.output.LayerNorm", text)
    shapes |= layer("blip.vision_proj", vision, 256) | layer("blip.text_proj", text, 256)
    for number, into, out in (
        (0, text, 1024),
        (2, 1024, 128),
        (4, 128, 64),
        (6, 64, 16),
        (7, 16, 1),
    ):
        shapes |= layer(f"mlp.layers.{number}", into, out)
    tensors = fill(shapes, seed) | {f"{read}.embeddings.position_ids": torch.arange(64)[None]}
    torch.save(tensors, folder / "ImageReward.pt")
    return folder


QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> "
    "<|video_pad|>"
).split()
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
CHAT = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer(folder: Path) -> int:
    """The tokenizer of Qwen2-VL with a small vocabulary: its size."""
    common = dict.fromkeys(
        [*WORDS, *re.findall("[A-Za-z]+", INSTRUCTION.partition("Please provide the overall")[0])]
    )
    merges = merges_of(
        [list(start + word) for word in common for start in ("", "\u0120") if len(start + word) > 1]
    )
    vocabulary = numbered(sorted(letters()), ["".join(pair) for pair in merges])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(QWEN)
    tokenizer.save(str(folder / "tokenizer.json"))
    write(
        folder,
        vocab__json=vocabulary,
        tokenizer_config__json={
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "bos_token": None,
            "chat_template": CHAT,
            "model_max_length": 32768,
            "errors": "replace",
            "additional_special_tokens": QWEN[1:],
        },
        chat_template__json={"chat_template": CHAT},
    )
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n", encoding="utf-8"
    )
    return len(vocabulary) + len(QWEN)


def hpsv3(folder: Path, seed: int = 0, base_weights: bool = False) -> Path:
    """HPSv3.safetensors, and in the folder `base` the files of Qwen2-VL-7B-Instruct, weights only where asked for."""
    base = folder / "base"
    text = 64
    vision = 32
    head_size = 16
    base.mkdir(parents=True)
    words = qwen_tokenizer(base)
    ids = {
        f"{name}_token_id": words - len(QWEN) + QWEN.index(f"<|{mark}|>")
        for name, mark in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
            ("vision", "vision_pad"),
            ("bos", "endoftext"),
            ("eos", "im_end"),
        )
    }
    write(
        base,
        config__json=ids
        | {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": text,
            "initializer_range": 0.02,
            "intermediate_size": 2 * text,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": text // head_size,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vocab_size": words + 7,
            "vision_config": {
                "depth": 2,
                "embed_dim": vision,
                "mlp_ratio": 4,
                "num_heads": 2,
                "in_chans": 3,
                "hidden_size": text,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
            },
        },
        preprocessor_config__json={
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        },
    )
    shapes = {
        "visual.patch_embed.proj.weight": (vision, 3, 2, 14, 14),
        "model.norm.weight": (text,),
    }
    for i in range(2):
        at = f"visual.blocks.{i}"
        shapes |= norm(f"{at}.norm1", vision) | norm(f"{at}.norm2", vision)
        shapes |= layer(f"{at}.attn.qkv", vision, 3 * vision) | layer(
            f"{at}.attn.proj", vision, vision
        )
        shapes |= layer(f"{at}.mlp.fc1", vision, 4 * vision) | layer(
            f"{at}.mlp.fc2", 4 * vision, vision
        )
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (text,),
            f"{at}.post_attention_layernorm.weight": (text,),
        }
        shapes |= layer(f"{at}.self_attn.q_proj", text, text) | layer(
            f"{at}.self_attn.o_proj", text, text, False
        )
        for part in ("k_proj", "v_proj"):
            shapes |= layer(f"{at}.self_attn.{part}", text, 2 * head_size)
        for part in ("gate_proj", "up_proj"):
            shapes |= layer(f"{at}.mlp.{part}", text, 2 * text, False)
        shapes |= layer(f"{at}.mlp.down_proj", 2 * text, text, False)
    shapes |= norm("visual.merger.ln_q", vision) | layer(
        "visual.merger.mlp.0", 4 * vision, 4 * vision
    )
    shapes |= layer("visual.merger.mlp.2", 4 * vision, text)

    def ends(rows: int) -> dict[str, tuple]:
        return {"model.embed_tokens.weight": (rows, text), "lm_head.weight": (rows, text)}

    head = layer("rm_head.0", text, 1024) | layer("rm_head.3", 1024, 16) | layer("rm_head.5", 16, 2)
    tensors = fill(shapes | ends(words + 1) | head, seed)
    tensors["model.embed_tokens.weight"] *= 8  # of the size of a state, so that words matter
    save_file(tensors, folder / "HPSv3.safetensors", metadata={"format": "pt"})
    if base_weights:  # what HPSv3's own package loads first
        save_file(
            fill(shapes | ends(words + 7), seed + 1),
            base / "model.safetensors",
            metadata={"format": "pt"},
        )
    return folder
