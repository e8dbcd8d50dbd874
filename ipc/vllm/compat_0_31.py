"""vLLM 0.31: hits are not counted by source, and the size of hashed blocks is computed anew by whoever needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HIT_SOURCES: dict[Any, Any] = {}
DEFAULT_SOURCE = None


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one of a request's block hashes."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
