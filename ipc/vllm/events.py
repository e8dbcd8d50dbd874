"""KV events: tells routers which blocks this engine's node can load, through vLLM's own event stream.

    StoreJob made ──planned──▶ a BlockStored is built, while the request with its tokens is at hand
    job reported  ──settled──▶ published if the chunks are in, else dropped
    lookup answer ──missing──▶ BlockRemoved for what was announced and is not there any more

Events have the shape that vLLM's engines and its own offloading publish: one `BlockStored` for each KV cache group with
full attention, with the hash of every block, ``medium`` "CPU", ``locality`` "LOCAL".  Other groups' blocks do not tell
a prefix and are not announced; a chunk comes and goes with all its groups.

The daemon does not report evictions, so a removal is told when a lookup or a load of this engine finds the chunk gone,
not when it goes.  What another engine stored is announced by that engine.  Only made when the engine publishes events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvkeep.ipc.messages import HASH_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOCALITY = "LOCAL"  # of this node
WHOLE_PREFIX = ("full_attention", "mla_attention", "sink_full_attention")  # kinds whose blocks are a prefix
MAX_ANNOUNCED = 16384  # announced ones that we remember, about 1 KB each; of the oldest beyond, no removal is told


@dataclass(frozen=True)
class _Group:
    index: int
    block_size: int
    kind: str


@dataclass(frozen=True)
class _Plan:
    events: tuple[BlockStored, ...]  # one per group
    chunks: tuple[bytes, ...]


class Events:
    """Of the scheduler half: one thread, the engine's."""

    def __init__(self, kv_cache_config: KVCacheConfig, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self._groups = tuple(_groups(kv_cache_config))
        self._plans: dict[int, _Plan] = {}  # by job id, until the job is reported
        self._announced: OrderedDict[bytes, tuple[list[Any], ...]] = OrderedDict()  # chunk -> its blocks, per group
        self._queue: list[KVCacheEvent] = []

    def planned(self, job_id: int, request: Request, hashes: bytes, start: int, chunk_tokens: int) -> None:
        """A job that stores chunks ``start`` … of the chain ``hashes`` was made."""
        end = len(hashes) // HASH_BYTES
        events = tuple(self._stored(request, group, start * chunk_tokens, end * chunk_tokens) for group in self._groups)
        self._plans[job_id] = _Plan(events, tuple(_chunks(hashes, start)))

    def of_chunk(self, request: Request, position: int, chunk_tokens: int) -> tuple[BlockStored, ...]:
        """What to publish of one chunk that is stored when its request may have ended."""
        begin, end = position * chunk_tokens, (position + 1) * chunk_tokens
        return tuple(self._stored(request, group, begin, end) for group in self._groups)

    def planned_late(self, job_id: int, hashes: bytes, start: int, parts: Sequence[tuple[BlockStored, ...]]) -> None:
        """A job that stores chunks ``start`` … of the chain ``hashes`` was made; ``parts``: of each, `of_chunk`."""
        events = tuple(_joined(of_group) for of_group in zip(*parts, strict=True))
        self._plans[job_id] = _Plan(events, tuple(_chunks(hashes, start)))

    def settled(self, job_id: int, *, stored: bool) -> None:
        """The job was reported; `stored` = all its chunks are there."""
        plan = self._plans.pop(job_id, None)
        if plan is None or not stored:
            return
        self._queue += plan.events
        for position, chunk in enumerate(plan.chunks):
            self._announced[chunk] = tuple(
                _share(event.block_hashes, position, len(plan.chunks)) for event in plan.events
            )
            self._announced.move_to_end(chunk)
        while len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)

    def missing(self, hashes: bytes, ready: int) -> None:
        """The daemon was asked for the chain ``hashes`` and has its first `ready` chunks, no more."""
        self._remove([chunk for chunk in _chunks(hashes, ready) if chunk in self._announced])

    def reset(self) -> None:
        """Nothing stored so far is served to this engine any more."""
        self._plans.clear()
        self._remove(list(self._announced))

    def take(self) -> list[KVCacheEvent]:
        if not self._queue:
            return []
        queue, self._queue = self._queue, []
        return queue

    def _remove(self, chunks: list[bytes]) -> None:
        if not chunks:
            return
        gone = [self._announced.pop(chunk) for chunk in chunks]
        for position, group in enumerate(self._groups):
            hashes = [value for blocks in gone for value in blocks[position]]
            self._queue.append(BlockRemoved(hashes, medium=MEDIUM_CPU, group_idx=group.index, locality=LOCALITY))

    def _stored(self, request: Request, group: _Group, begin: int, end: int) -> BlockStored:
        size = group.block_size
        hashes = resolve_block_hashes(request.block_hashes, self._hash_block_size, size)
        extra, media = [], 0
        for at in range(begin, end, size):
            keys, media = generate_block_hash_extra_keys(request, at, at + size, media)
            extra.append(keys)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[at // size]) for at in range(begin, end, size)],
            parent_block_hash=maybe_convert_block_hash(hashes[begin // size - 1]) if begin else None,
            token_ids=list(request.all_token_ids[begin:end]),
            block_size=size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora is not None else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            locality=LOCALITY,
            session_id=request.session_id,
        )


def wanted(vllm_config: VllmConfig) -> bool:
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def _groups(config: KVCacheConfig) -> list[_Group]:
    found = []
    for index, group in enumerate(config.kv_cache_groups):
        kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
        if kind in WHOLE_PREFIX:
            found.append(_Group(index, group.kv_cache_spec.block_size, kind))
    return found


def _chunks(hashes: bytes, start: int) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(start * HASH_BYTES, len(hashes), HASH_BYTES)]


def _joined(parts: Sequence[BlockStored]) -> BlockStored:
    """One event of consecutive chunks of a group."""
    return msgspec.structs.replace(
        parts[0],
        block_hashes=[value for part in parts for value in part.block_hashes],
        token_ids=[token for part in parts for token in part.token_ids],
        extra_keys=[keys for part in parts for keys in part.extra_keys or ()],
    )


def _share(blocks: list[Any], position: int, of: int) -> list[Any]:
    size = len(blocks) // of
    return blocks[position * size : (position + 1) * size]
