"""A small Llama whose weights have real variance, so that one wrong byte of KV changes what it says.

float32 throughout: in bfloat16 a fresh CPU engine that starts with a one-token step (a full hit) dies on some CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512
MAX_TOKENS = 4096
WIDE_BYTES_PER_TOKEN = 16 * 2 * 8 * 128 * 4  # of KV: layers, K and V, heads, head size, float32


def build(folder: Path, *, seed: int = 7, wide: bool = False) -> Path:
    """Write the model and a tokenizer of whole words (``t0`` .. ``t511``) into `folder`.  ``wide``: much KV a token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=16 if wide else 3,
        num_attention_heads=8 if wide else 4,
        num_key_value_heads=8 if wide else 2,
        head_dim=128 if wide else 32,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).float().save_pretrained(folder, safe_serialization=True)
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": MAX_TOKENS}))
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Token ids; equal seeds share their prefix."""
    import random

    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
