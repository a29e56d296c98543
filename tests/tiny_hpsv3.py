"""Writes a tiny HPSv3 with random weights in the package's own layout; the environment `hpsv3` runs it."""

import json
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

KEEP = torch.library.Library("torchvision", "DEF")
if torch.version.cuda is None:
    for operator in ("nms", "qnms"):
        KEEP.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import hpsv3  # noqa: E402
from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT  # noqa: E402
from transformers import Qwen2TokenizerFast, Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLProcessor  # noqa: E402

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
         "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path) -> None:
    "Tokenizer, base model, the package's YAML and HPSv3.safetensors."
    base = folder / "base"
    words = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=words, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = Qwen2TokenizerFast(tokenizer_object=plain, pad_token=MARKS[0], eos_token=MARKS[2], unk_token=MARKS[0],
                                   additional_special_tokens=MARKS[1:])
    number = tokenizer.convert_tokens_to_ids
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, chat_template=TEMPLATE)
    processor.save_pretrained(base)
    config = Qwen2VLConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
    )
    config.image_token_id, config.video_token_id = number("<|image_pad|>"), number("<|video_pad|>")
    config.vision_start_token_id, config.vision_end_token_id = number("<|vision_start|>"), number("<|vision_end|>")
    torch.manual_seed(0)
    given = {"output_dim": 2, "reward_token": "special", "rm_head_type": "ranknet", "rm_head_kwargs": None}
    model = Qwen2VLRewardModelBT(config, special_token_ids=[len(tokenizer)], **given)
    model.save_pretrained(base)
    model.resize_token_embeddings(len(tokenizer) + 1)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, folder / "HPSv3.safetensors")
    settings = yaml.safe_load((Path(hpsv3.__file__).parent / "config/HPSv3_7B.yaml").read_text())
    settings |= {"model_name_or_path": str(base), "report_to": "none", "output_dir": str(folder / "out")}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
