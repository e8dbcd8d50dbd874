"""A small Llama whose weights have real variance, so that one wrong byte of KV changes what it says.

float32 throughout: in bfloat16 a fresh CPU engine that starts with a one-token step (a full hit) dies on some CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
MAX_TOKENS = 4096
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
IMAGE_TOKEN, IMAGE_TOKENS, IMAGE_SIDE = 3, 19, 56  # its id, how many an image takes, and the pixels of an image's side
WIDE_BYTES_PER_TOKEN = 16 * 2 * 8 * 128 * 4  # of KV: layers, K and V, heads, head size, float32


def build(folder: Path, *, seed: int = 7, wide: bool = False, spread: float = 0.3) -> Path:
    """Write the model and a tokenizer of whole words (``t0`` .. ``t511``) into `folder`.  ``wide``: much KV a token;
    ``spread``: of the weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_SMALL | {"initializer_range": spread},
        num_hidden_layers=16 if wide else 3,
        num_attention_heads=8 if wide else 4,
        num_key_value_heads=8 if wide else 2,
        head_dim=128 if wide else 32,
    )
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(config).float(), folder)


def _save(model: Any, folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model.save_pretrained(folder, safe_serialization=True)
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": MAX_TOKENS}))
    return folder


def gemma3(folder: Path, *, window: int = 128, seed: int = 7) -> Path:
    """Layers with a sliding window and layers with full attention, unevenly many: several KV cache groups."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    config = Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=window,
        layer_types=kinds,
    )
    torch.manual_seed(seed)
    return _save(Gemma3ForCausalLM(config).float(), folder)


def mla(folder: Path, *, seed: int = 7) -> Path:
    """Multi-head latent attention: one latent vector a token instead of K and V of each head.

    The engine computes it in bfloat16 only.  With larger weights its own prefix cache would change what it says."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_SMALL | {"initializer_range": 0.06},
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=3,
    )
    torch.manual_seed(seed)
    return _save(DeepseekV2ForCausalLM(config).float(), folder)


def idefics3(folder: Path, *, seed: int = 7) -> Path:
    """The Llama of `build` behind a vision tower: vLLM makes `IMAGE_TOKENS` of the one token that stands for an image.

    (The usual ones of this size need torchvision, which a CPU build of vLLM does without.)"""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision["initializer_range"] = 0.3
    text = _SMALL | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    patches = 2 * int((IMAGE_TOKENS - 3) ** 0.5)  # a side; 2 * 2 of them become a token, and 3 tokens stand around
    config = Idefics3Config(
        vision_config=vision | {"image_size": IMAGE_SIDE, "patch_size": IMAGE_SIDE // patches},
        text_config=text | {"model_type": "llama"},
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    _save(Idefics3ForConditionalGeneration(config).float(), folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    for number, mark in enumerate(marks, IMAGE_TOKEN):
        words["model"]["vocab"][mark] = words["model"]["vocab"].pop(f"t{number}")
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        words["added_tokens"].append({"id": number, "content": mark, "special": True} | plain)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    edge = {"longest_edge": IMAGE_SIDE}
    pixels = {"image_processor_type": "Idefics3ImageProcessor", "size": edge, "max_image_size": edge, "resample": 1}
    pixels |= dict.fromkeys(("do_resize", "do_rescale", "do_convert_rgb", "do_normalize", "do_pad"), True)
    pixels |= {"do_image_splitting": False, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    whole = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS - 3}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Token ids; equal seeds share their prefix."""
    import random

    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
