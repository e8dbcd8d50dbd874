"""What the bytes of a chunk depend on, tokens excepted, and what we refuse to cache.

vLLM's block hashes cover tokens, salt, media and adapter names, and nothing else: not the model, its weights, dtype,
layout or backend (a CPU engine and a GPU engine pack a page differently under the same layout name).  All that goes
into the manifest; change one field and it is another namespace, so a mismatch is a miss and never a wrong byte.

A refusal is one sentence.  The engine then runs without this cache.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from kvkeep.ipc.keys import Manifest
from kvkeep.ipc.vllm import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

CONNECTOR_ABI = "vllm/2"  # how an extent is filled; change it when pages.py changes what it writes
COMPACT_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")  # a page is one run of bytes
SPECS = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
)  # exact types: a subclass may store something else
PAGE_DTYPES = (  # of the KV cache, for which a page says all.  (Scales per token and head lie beside their values.)
    *("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
)
SPECULATION_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
SPECULATION_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")  # whose layers are in the model's KV cache groups


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why this engine is not cached; empty = it is."""
    checks = (_refused_parallel(vllm_config), _refused_hashing(vllm_config), _refused_model(vllm_config))
    return next((sentence for sentence in (*checks, _refused_groups(kv_cache_config)) if sentence), "")


def _refused_parallel(config: VllmConfig) -> str:
    for field in ("pipeline", "prefill_context", "decode_context"):
        size = getattr(config.parallel_config, f"{field}_parallel_size", 1)
        if size != 1:
            return f"{field}_parallel_size is {size}: this version supports 1"
    nodes = getattr(config.parallel_config, "nnodes_within_dp", 1)
    if nodes != 1:
        return f"the ranks of the engine are on {nodes} nodes: all must reach one daemon, on one node"
    return ""


def _refused_hashing(config: VllmConfig) -> str:
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm not in ("sha256", "sha256_cbor") and "PYTHONHASHSEED" not in os.environ:
        return (
            f"prefix_caching_hash_algo is {algorithm}, whose seed is random in each process: use sha256, or set "
            "PYTHONHASHSEED to the same value for all engines"
        )
    return ""


def _refused_model(config: VllmConfig) -> str:
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales is on: KV scales computed at run time are not part of what is stored; turn it off"
    if str(config.cache_config.cache_dtype) not in PAGE_DTYPES:
        return (
            f"kv_cache_dtype is {config.cache_config.cache_dtype}: this version does not know where its scales lie; it "
            f"supports {', '.join(PAGE_DTYPES)}"
        )
    speculation = config.speculative_config
    known = (*SPECULATION_WITHOUT_KV, *SPECULATION_WITH_KV)
    if speculation is not None and speculation.method not in known:
        return f"speculative decoding with {speculation.method}: this version supports {', '.join(known)}"
    return ""


def _refused_groups(config: KVCacheConfig) -> str:
    for group in config.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        if kind == "MambaSpec":
            return (
                f"layer {group.layer_names[0]} has recurrent state (MambaSpec), which vLLM keeps only where one of its "
                "steps ended: this version stores attention layers only"
            )
        if kind not in SPECS:
            return f"layer {group.layer_names[0]} has a {kind}: this version supports {', '.join(SPECS)}"
        if not group.enable_kv_transfer or group.host_resident:
            return f"the KV cache group of layer {group.layer_names[0]} does not take part in external transfer"
    if config.kv_cache_layout not in COMPACT_LAYOUTS:
        return f"KV cache layout {config.kv_cache_layout} is unknown: set VLLM_KV_CACHE_LAYOUT to LBHNC"
    return ""


def refused_chunk(chunk_tokens: int, block_size: int) -> str:
    if chunk_tokens <= 0 or chunk_tokens % block_size:
        return (
            f"a chunk of {chunk_tokens} tokens is not a multiple of the engine's block size {block_size}: set "
            f"kvkeep.chunk_tokens to a multiple, e.g. {block_size * max(1, 256 // block_size)}"
        )
    return ""


def manifest(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: dict[str, object], chunk_tokens: int, epoch: str
) -> dict[str, object]:
    """`layout` is what the worker found; `epoch` is empty until the engine's cache is reset.  Reads weight files."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    smallest = min(group.kv_cache_spec.block_size for group in groups)
    document = Manifest(
        model=str(model.model),
        revision=model.revision,
        fingerprint=fingerprint.weights(
            str(model.model), model.revision, str(vllm_config.load_config.load_format), int(model.seed or 0)
        ),
        kv_dtype=str(cache.cache_dtype),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        pipeline_parallel=vllm_config.parallel_config.pipeline_parallel_size,
        context_parallel=vllm_config.parallel_config.decode_context_parallel_size,
        block_size=smallest,
        chunk_tokens=chunk_tokens,
        connector_abi=CONNECTOR_ABI,
        engine=f"vllm {vllm.__version__}",
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=_digest(_hash_seed(str(cache.prefix_caching_hash_algo))),
        extras={
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "model_config": _digest(_model_config(vllm_config)),
            "hash_block_size": getattr(kv_cache_config, "hash_block_size", None) or smallest,
            "layout": str(kv_cache_config.kv_cache_layout),
            "groups": [_group(group) for group in groups],
            "rank_replicas": kv_cache_config.kv_tp_replicas,
            **_draft(vllm_config),
            "memory": layout,
            "epoch": epoch,
        },
    )
    plain: dict[str, object] = msgspec.to_builtins(document)
    return plain


def _group(group: KVCacheGroupSpec) -> dict[str, object]:
    spec = group.kv_cache_spec
    return {
        "type": type(spec).__name__,
        "text": _digest(repr(spec)),
        "layers": {"count": len(group.layer_names), "names": _digest("\n".join(group.layer_names))},
    }


def _hash_seed(algorithm: str) -> str:
    """What the engine derives the root of all block hashes from; it does so after we are asked, so we derive it too."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


def _model_config(config: VllmConfig) -> str:
    """The model's own configuration after overrides (rope and all), and what else changes the values of KV."""
    tree = _plain(config.model_config.hf_config)
    rope = json.dumps([tree.get("rope_scaling"), tree.get("rope_parameters")], sort_keys=True, default=str)
    if any(kind in rope for kind in ("longrope", "dynamic", "yarn", "su")):
        tree["kvkeep.max_model_len"] = config.model_config.max_model_len  # some rotary embeddings depend on it
    return json.dumps(tree, sort_keys=True, default=str)


def _plain(hf_config: Any) -> dict[str, object]:
    tree = dict(hf_config.to_dict())
    for key in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        tree.pop(key, None)
    return tree


def drops_last_chunk(config: VllmConfig) -> bool:
    """Whether the KV of draft layers for the last tokens of a hit may be that of another continuation: they see tokens
    and hidden states beyond their own position, and so the blocks' hashes.  vLLM's prefix cache drops a block then."""
    speculation = config.speculative_config
    return speculation is not None and bool(speculation.use_eagle_block_drop())


def _draft(config: VllmConfig) -> dict[str, object]:
    """Draft layers have weights of their own.  Nothing, where there are none: manifests stay as they were."""
    speculation = config.speculative_config
    if speculation is None or speculation.method not in SPECULATION_WITH_KV:
        return {}
    draft = speculation.draft_model_config
    load_format = str((speculation.draft_load_config or config.load_config).load_format)
    return {
        "draft": {
            "method": str(speculation.method),
            "model": str(draft.model),
            "fingerprint": fingerprint.weights(str(draft.model), draft.revision, load_format, int(draft.seed or 0)),
            "dtype": str(draft.dtype),
            "quantization": str(draft.quantization),
            "model_config": _digest(json.dumps(_plain(draft.hf_config), sort_keys=True, default=str)),
        }
    }


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def describe_platform(vllm_config: VllmConfig, layer_names: list[str]) -> dict[str, object]:
    """Worker side: what decides how a page is packed, beyond the layout's name."""
    import platform

    import torch
    from vllm.platforms import current_platform

    layers = vllm_config.compilation_config.static_forward_context
    backends = {layers[name].get_attn_backend().get_name() for name in layer_names if name in layers}
    found: dict[str, object] = {"platform": str(current_platform.device_type), "backends": sorted(backends)}
    if current_platform.device_type == "cpu":
        found["cpu"] = platform.machine() + ("+amx" if torch.cpu._is_amx_tile_supported() else "")
    return found
