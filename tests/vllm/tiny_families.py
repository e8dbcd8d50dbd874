"""Small models of families that need more than attention over all tokens; see tiny_model.py."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.tiny_model import _SMALL, _save


def llama4(folder: Path, *, piece: int = 128, seed: int = 7) -> Path:
    """Chunked local attention: in three layers of four a token sees the tokens of its own piece only."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_SMALL | {"hidden_size": 128},
        intermediate_size_mlp=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=piece,
        interleave_moe_layer_step=100,
        moe_layers=[],
        no_rope_layers=[1, 1, 1, 0],
    )
    torch.manual_seed(seed)
    return _save(Llama4ForCausalLM(config).float(), folder)


def eagle(folder: Path, *, seed: int = 7) -> tuple[Path, Path]:
    """A Llama of one layer, and an EAGLE head that is that layer again: it sees all tokens but the first, so it guesses
    what the model will say.  The head has no norm before its layer; embeddings of unit length in root mean square need
    none."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    _save(model, folder / "model")
    layer = {
        name.replace("model.layers.0.", "layers.0."): weight.clone()
        for name, weight in model.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    size = config.hidden_size
    tokens_only = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)  # of (embedding, hidden state)
    head = folder / "head"
    head.mkdir()
    save_file(layer | {"fc.weight": tokens_only, "embed_tokens.weight": embedding.clone()}, head / "model.safetensors")
    (head / "config.json").write_text((folder / "model" / "config.json").read_text())
    return folder / "model", head
