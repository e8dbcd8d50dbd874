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
WIDE_BYTES_PER_TOKEN = 16 * 2 * 8 * 128 * 4  # of KV: layers, K and V, heads, head size, float32


def build(folder: Path, *, seed: int = 7, wide: bool = False) -> Path:
    """Write the model and a tokenizer of whole words (``t0`` .. ``t511``) into `folder`.  ``wide``: much KV a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_SMALL,
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


def prompt(seed: int, length: int) -> list[int]:
    """Token ids; equal seeds share their prefix."""
    import random

    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
