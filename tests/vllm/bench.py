"""Requests, block pool and scheduler output as vLLM would hand them to the connector, without an engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from kvkeep.ipc.vllm.controls import Scope
from kvkeep.ipc.vllm.groups import Group
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.leaving import Leaving
from kvkeep.ipc.vllm.lookups import Active, Lookups
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.stats import Tally
from kvkeep.ipc.vllm.stores import Stores
from tests.vllm.fake_client import FakeClient, FakeDaemon

BLOCK, CHUNK = 16, 64
PER_CHUNK = CHUNK // BLOCK
SHARD_BYTES = 256


@dataclass(eq=False)
class Request:
    request_id: str
    num_tokens: int
    prompt: str = "p"  # equal prompts have equal hashes
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens
        self.grow(0)

    def grow(self, tokens: int) -> None:
        self.num_tokens += tokens
        for n in range(len(self.block_hashes), self.num_tokens // BLOCK):
            self.block_hashes.append(hashlib.sha256(f"{self.prompt}/{n}".encode()).digest())


class Bench:
    """Both parts of the scheduler half, a real block pool, and a daemon in this process."""

    def __init__(
        self,
        blocks: int = 101,
        *,
        events: Any = None,
        keys: Any = None,
        pace: Any = None,
        near: int = 0,
        **options: Any,
    ) -> None:
        """``near``: store what is about to leave; so many blocks are, half of them in the next step."""
        self.daemon = FakeDaemon()
        self.client = FakeClient(self.daemon)
        self.guard = Guard(print)
        self.tally = Tally()
        self.counters = self.tally.totals
        self.pool = BlockPool(blocks, True, BLOCK)
        chosen = Options(**options)
        common: Any = {"events": events, "keys": keys}
        self.lookups = Lookups(self.client, chosen, self.guard, self.tally, pace=pace, **common)
        self.leaving = Leaving(self.pool, near, near // 2) if near else None
        self.stores = Stores(self.pool, chosen, self.lookups, self.guard, self.tally, leaving=self.leaving, **common)
        self.active = self.register(0)
        self.tables: dict[str, list[Any]] = {}

    def register(self, generation: int) -> Active:
        space = self.client.register({"generation": generation}, shard_bytes=SHARD_BYTES)
        return Active(space, generation, CHUNK, (Group(BLOCK),), BLOCK, chunk_bytes=SHARD_BYTES)

    def add(self, request: Request, *, blocks: int | None = None, scope: Scope = Scope.ALL) -> Request:
        """Arrives and is given blocks; lookups are left to the test."""
        self.stores.on_new_request(request, self.active.generation, scope)
        count = -(-request.num_tokens // BLOCK) if blocks is None else blocks
        self.tables[request.request_id] = self.pool.get_new_blocks(count)
        return request

    def finish(self, request: Request) -> None:
        self.lookups.on_finished(request.request_id)
        self.stores.on_finished(request.request_id)
        self.free(request)

    def free(self, request: Request) -> None:
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id)))

    def blocks_of(self, request: Request) -> KVCacheBlocks:
        return KVCacheBlocks((self.tables[request.request_id],))

    def step(self, request: Request, tokens: int) -> Any:
        """Schedule `tokens` of it; the store jobs of the step.  Its computed tokens advance afterwards, as in vLLM."""
        jobs = self.stores.new_jobs(self.output({request: tokens}), self.active)
        request.num_computed_tokens += tokens
        return jobs

    def output(self, scheduled: dict[Request, int]) -> Any:
        def block_ids(request_id: str) -> tuple[list[int], ...]:
            return ([block.block_id for block in self.tables[request_id]],)

        return SimpleNamespace(
            num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled.items()},
            kv_connector_block_state=SimpleNamespace(get_block_ids=block_ids),
        )

    def put(self, request: Request, chunks: int) -> None:
        """Make the first chunks of the request's tokens present."""
        with self.client.reserve(self.active.namespace, self.active.chain(request, chunks)) as reservation:
            reservation.commit()
