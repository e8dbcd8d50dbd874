"""A small Llama whose prefill costs something, with random weights of real variance: wrong KV changes its answers.

``engine_model.py FOLDER`` writes it, in an interpreter that has torch and transformers.

float32: on CPUs with AMX a fresh vLLM 0.32 engine in bfloat16 dies when the first step it computes has one token, and a
full hit is such a step.  A token has 4 KiB of KV and costs about 20 MFLOP before attention.  A real model computes more
for each byte of KV (8B parameters with grouped heads: 25 times), so caches look better there than here.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 512
MAX_TOKENS = 33024  # 32,768, an answer, and whole chunks
LAYERS, KV_HEADS, HEAD_SIZE = 4, 2, 64


def write(folder: Path, *, seed: int = 11) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).float().save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
