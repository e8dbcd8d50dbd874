"""Which kind of memory the engine's KV is in, and what copies there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvkeep.ipc.vllm import places
from kvkeep.ipc.vllm.memory import KVMemory, UnknownLayout
from kvkeep.ipc.vllm.pages import Pages

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvkeep")


def open_memory(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    warn: Callable[[str], None],
) -> KVMemory:
    """``warn`` takes sentences that the operator should see.  Raises UnknownLayout."""
    import torch

    found = places.from_vllm(kv_caches, kv_cache_config)
    if found.device.type == "cpu":
        return Pages.at(found)
    if found.device.type != "cuda" or torch.version.hip:
        kind = "ROCm GPU" if found.device.type == "cuda" else found.device.type
        raise UnknownLayout(f"the KV memory is on a {kind}: this version supports CPUs and NVIDIA GPUs")
    if vllm_config.model_config.enable_sleep_mode:
        raise UnknownLayout("enable_sleep_mode is on: falling asleep takes the KV memory away while it is copied")
    return _cuda(found, warn)


def _cuda(found: places.Places, warn: Callable[[str], None]) -> KVMemory:
    from kvkeep.ipc.vllm.cuda.driver import TorchDriver
    from kvkeep.ipc.vllm.cuda.lane import STAGING_BYTES
    from kvkeep.ipc.vllm.cuda.memory import CudaMemory

    try:
        memory = CudaMemory(found, TorchDriver(found.device), warn)
    except Exception as error:
        raise UnknownLayout(f"{found.device} cannot be copied from: {error}") from error
    log.info(
        "kvkeep: copies on %s allocate no GPU memory themselves (`kvkeep bench gpu` reports what the driver's page "
        "tables take), and %d MiB of pinned host memory for each copy thread until the arena is pinned",
        found.device,
        STAGING_BYTES >> 20,
    )
    return memory
