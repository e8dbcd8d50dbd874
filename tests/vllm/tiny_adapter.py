"""A LoRA adapter for tiny_model in PEFT's file format, strong enough that it changes what the model says."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8
LAYERS, HIDDEN = 3, 64
OUT = {"q_proj": 4 * 32, "k_proj": 2 * 32, "v_proj": 2 * 32}


def build(folder: Path, *, seed: int) -> Path:
    """Equal seeds make equal files."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, out in OUT.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=source) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=source) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(OUT),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
