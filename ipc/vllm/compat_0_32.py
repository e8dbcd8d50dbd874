"""vLLM 0.32, the newest: the names that each compat file has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.ipc.vllm.stats import Tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HIT_SOURCES = {Tier.L1: CacheHitSource.HOST, Tier.L2: CacheHitSource.DISK}  # for vLLM's own counters
DEFAULT_SOURCE = CacheHitSource.HOST


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one of a request's block hashes."""
    return int(kv_cache_config.hash_block_size or kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
