"""Which rank holds what: shards of a chunk, and who writes and reads them.

Each tensor parallel rank has its own heads, which are one shard of a chunk; a chunk can be read when all shards are in.
Where consecutive ranks hold the same KV (MLA, fewer KV heads than ranks) they share a shard: the first of them writes
it, all of them read it.  vLLM says how many they are (`KVCacheConfig.kv_tp_replicas`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Ranks:
    """All of one engine."""

    count: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        return self.count // self.replicas

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Ranks:
        return cls(vllm_config.parallel_config.tensor_parallel_size, kv_cache_config.kv_tp_replicas)


@dataclass(frozen=True)
class Rank:
    rank: int = 0
    shard: int = 0
    stores: bool = True

    @classmethod
    def of_this_process(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Rank:
        ranks = Ranks.of(vllm_config, kv_cache_config)
        if ranks.count == 1:
            return cls()
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        return cls(rank, rank // ranks.replicas, rank % ranks.replicas == 0)
