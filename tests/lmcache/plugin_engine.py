"""One life of a real LMCache engine on CPU, whose only storage behind CPU memory is kvkeep.  Prints one line of JSON.

plugin_engine.py store|load RUN_DIR TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

CHUNK, PART = 16, 64  # tokens of a chunk; chunks that are loaded at once
SHAPE = (4, 2, CHUNK, 2, 64)


class Connector(MockGPUConnector):  # type: ignore[misc]
    """Content is a function of the position of the chunk, made here and checked here."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.right = self.asked = 0

    @staticmethod
    def content(obj: Any, start: int) -> Any:
        return torch.randn(obj.tensor.shape, generator=torch.Generator().manual_seed(start)).to(torch.bfloat16)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start in zip(memory_objs, starts, strict=True):
            obj.tensor.copy_(self.content(obj, start))

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start in zip(memory_objs, starts, strict=True):
            self.right += bool(torch.equal(obj.tensor, self.content(obj, start)))


def main(what: str, run_dir: str, tokens: int) -> dict[str, Any]:
    options = {"module_path": "kvkeep.ipc.lmcache.storage", "class_name": "KVKeepStorageBackend", "run_dir": run_dir}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=True,
        max_local_cpu_size=10 / 1024,
        save_unfull_chunk=True,
        storage_plugins=["kvkeep"],
        extra_config={f"storage_plugin.kvkeep.{name}": value for name, value in options.items()},
    )
    metadata = LMCacheMetadata("m/tiny", 1, 1, 0, 0, torch.bfloat16, SHAPE, role="worker", chunk_size=CHUNK)
    connector = Connector()
    engine = LMCacheEngineBuilder.get_or_create("plugin", config, metadata, connector, lambda *_: None, lambda *_: None)
    engine.post_init()
    backend = engine.storage_manager.storage_backends["kvkeep"]
    cpu = engine.storage_manager.storage_backends["LocalCPUBackend"]
    until = time.monotonic() + 30
    while not backend._client.attached:
        assert time.monotonic() < until, "no daemon"
        time.sleep(0.01)
    prompt = list(range(tokens))
    ends = [*range(PART * CHUNK, tokens, PART * CHUNK), tokens]
    if what == "store":
        for end in ends:  # as prefill does: a part at a time, which is evicted for the parts that follow
            mask = torch.ones(end, dtype=torch.bool)
            mask[: (end - 1) // (PART * CHUNK) * PART * CHUNK] = False
            engine.store(prompt[:end], mask=mask)
            assert backend._put_tasks.drain(30)
    in_cpu = len(cpu.hot_cache)
    found = 0
    for end in ends:
        mask = torch.ones(end, dtype=torch.bool)
        mask[: (end - 1) // (PART * CHUNK) * PART * CHUNK] = False
        found = engine.lookup(prompt[:end], lookup_id=str(end), pin=True)
        engine.lookup_unpin(str(end))
        connector.asked += -(-int(engine.retrieve(prompt[:end], mask).sum()) // CHUNK)
    cpu.clear()
    allocated = cpu.memory_allocator.pin_allocator.total_allocated_size
    answer = {
        "chunks": -(-tokens // CHUNK), "in_cpu": in_cpu, "found": found, "allocated": allocated,
        "right": connector.right, "asked": connector.asked, **backend.counters,
    }  # fmt: skip
    LMCacheEngineBuilder.destroy("plugin")
    return answer


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
