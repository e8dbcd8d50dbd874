"""Storing late: chunks that are complete and still in the engine's memory, and which of them are about to leave it.

The engine's prefix cache is the first tier.  With ``kvkeep.store_when`` = "leaving" a complete chunk is only
remembered; it is stored when a block of it comes near the head of vLLM's free queue, from which new blocks are taken.
What stays in the engine is never stored, and costs nothing but its record.

A chunk's last block is freed before its first ones, and whoever touches it touches those, too; so of each KV cache
group only that one is watched.  vLLM frees the tail of a prompt first, and a chunk can be stored only after those
before it: when a tail is about to leave, all before it that the daemon does not have is stored with it.

A record belongs to its block: it goes when another chunk ends in that block, so there are never more than blocks.  The
block's hash tells whether the chunk is still in it.  Cost: one look at the head of the queue in each step; when it has
moved, a walk over as many blocks as a few steps may take.  One thread, the engine's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.ipc.vllm.groups import ABSENT, BlockTable
from kvkeep.ipc.vllm.metadata import StoreEnd, StoreReport

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvkeep.ipc.vllm.adapters import Files
    from kvkeep.ipc.vllm.lookups import Active

MAX_REWINDS = 3  # times a chunk is stored again because one before it had gone

Held = tuple[tuple[Any, ...], ...]  # vLLM's blocks of one chunk, per group; its null block where there is none


class Stage(enum.Enum):
    WAITS = "waits"
    STORING = "storing"
    STORED = "stored"
    LOST = "lost"  # it cannot be stored any more: it, or one before it, has left


@dataclass(eq=False)
class Kept:
    """One complete chunk."""

    chunk: bytes  # hash
    before: Kept | None
    position: int
    held: Held
    hashes: tuple[Any, ...]  # of its blocks, as vLLM's prefix cache has them
    generation: int
    low: bool = False  # priority of the request that completed it
    files: Files | None = None  # of its adapter
    request: Request | None = None  # for the event
    stage: Stage = Stage.WAITS
    rewinds: int = 0

    def here(self) -> bool:
        """Its blocks still hold it."""
        blocks = (block for group in self.held for block in group)
        return all(block.block_hash == value for block, value in zip(blocks, self.hashes, strict=True))

    def storable(self, active: Active) -> bool:
        """It has all blocks that a hit that ends with it needs."""
        if self.stage is Stage.LOST or not self.here():
            return False
        tokens = (self.position + 1) * active.chunk_tokens
        return not any(
            block.is_null and group.needs(self.position * len(blocks) + n, tokens)
            for group, blocks in zip(active.groups, self.held, strict=True)
            for n, block in enumerate(blocks)
        )


class Batch(NamedTuple):
    """Chunks that are stored with one job."""

    chain: bytes  # hashes, from the root to the last of them
    start: int
    chunks: tuple[Kept, ...]
    place: Any  # the block that follows theirs in the queue

    @property
    def table(self) -> BlockTable:
        groups = zip(*(kept.held for kept in self.chunks), strict=True)
        return tuple(
            tuple(ABSENT if block.is_null else block.block_id for part in group for block in part) for group in groups
        )

    def blocks(self) -> list[Any]:
        return [block for kept in self.chunks for group in kept.held for block in group]


class Leaving:
    def __init__(self, pool: Any, near: int, step: int) -> None:
        """``near``: that many blocks at the head of the free queue are about to leave.  ``step``: one step may take so
        many of them; what is being stored should be back in its place before the others are used up."""
        self._pool, self._near, self._step = pool, near, step
        self._by_chunk: dict[bytes, Kept] = {}
        self._by_block: dict[int, Kept] = {}
        self._head: tuple[int, int] | None = None
        self._lost = 0

    def __len__(self) -> int:
        return len(self._by_chunk)

    def find(self, chunk: bytes) -> Kept | None:
        return self._by_chunk.get(chunk)

    def keep(self, kept: Kept) -> Kept:
        """Remember a chunk; the record that stands for it from now on."""
        other = self._by_chunk.get(kept.chunk)
        if other is not None and other.generation == kept.generation and other.here():
            if kept.stage is Stage.STORED and other.stage is Stage.WAITS:
                other.stage = Stage.STORED
            return other
        self._by_chunk[kept.chunk] = kept
        for group in kept.held:
            if group and not group[-1].is_null:
                evicted = self._by_block.get(group[-1].block_id)
                self._by_block[group[-1].block_id] = kept
                if evicted is not None and evicted is not kept and self._by_chunk.get(evicted.chunk) is evicted:
                    del self._by_chunk[evicted.chunk]
                    self._lost += evicted.stage is Stage.WAITS
        return kept

    def about_to_leave(self, *, next_step: bool = False) -> list[Kept]:
        """Chunks that wait to be stored, those first that leave first.  ``next_step``: only those that may leave in the
        next step, now that others have been taken out of the queue to be stored."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        head = (block.block_id, queue.num_free_blocks)
        if head == self._head or not self._by_chunk:
            return []
        self._head = head
        found: dict[bytes, Kept] = {}
        for one in self._queued(block, self._step if next_step else self._near):
            kept = self._by_block.get(one.block_id)
            if kept is not None and kept.stage is Stage.WAITS and kept.chunk not in found:
                found[kept.chunk] = kept
        return list(found.values())

    def take_lost(self) -> int:
        """How many chunks left without having been stored, as far as it has been noticed."""
        lost, self._lost = self._lost, 0
        return lost

    def look_again(self) -> None:
        """In the next step, also if the queue has not moved: not all was stored that should have been."""
        self._head = None

    def forget(self) -> None:
        self._by_chunk.clear()
        self._by_block.clear()
        self._head = None

    def batch(self, tail: Kept, active: Active, room: int) -> Batch | None:
        """What to store now, so that this chunk is there: all that is missing up to it, from the first on, but not more
        than ``room`` chunks.  Its chunks are under way from here on."""
        whole = self._chain(tail)
        start = 1 + max((n for n, kept in enumerate(whole) if kept.stage in (Stage.STORED, Stage.STORING)), default=-1)
        lost = next((n for n in range(start, len(whole)) if not whole[n].storable(active)), len(whole))
        for kept in whole[lost:]:
            self._lost += kept.stage is Stage.WAITS
            kept.stage = Stage.LOST
        end = min(lost, start + room)
        if end < lost:
            self.look_again()
        if end <= start:
            return None
        chosen = tuple(whole[start:end])
        for kept in chosen:
            kept.stage = Stage.STORING
        return Batch(b"".join(kept.chunk for kept in whole[:end]), start, chosen, self._place(chosen))

    def ended(self, batch: Batch, report: StoreReport) -> None:
        again: list[Kept] = []
        if report.end is StoreEnd.ORPHAN and report.missing >= 0:  # heads have gone from the daemon, not from here
            whole = self._chain(batch.chunks[-1])
            again = [kept for kept in whole[report.missing :] if kept.stage is not Stage.LOST]
        for kept in batch.chunks:
            done = report.end is StoreEnd.DONE or kept.position < report.missing
            kept.stage = Stage.STORED if done else Stage.LOST
        for kept in again:
            kept.rewinds += 1
            kept.stage = Stage.WAITS if kept.rewinds <= MAX_REWINDS else Stage.LOST
        if again:
            self.look_again()

    def give_back(self, blocks: Sequence[Any], place: Any) -> None:
        """End the pin of stored blocks, from the first to the last, and put them where they were.  vLLM's own
        `free_blocks` would make them the youngest; then others would be about to leave, and be stored, in turn."""
        free = []
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                free.append(block)
        queue = self._pool.free_block_queue
        if place is None or place.ref_cnt or place.prev_free_block is None:  # that one has gone
            queue.prepend_n(free)
            return
        before = place.prev_free_block
        for block in free:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, place.prev_free_block = place, before
        queue.num_free_blocks += len(free)

    def _chain(self, kept: Kept) -> list[Kept]:
        """From the first chunk to this one, each as it is known now."""
        found: list[Kept] = []
        at: Kept | None = kept
        while at is not None:
            found.append(self._by_chunk.get(at.chunk, at))
            at = at.before
        return found[::-1]

    def _place(self, chosen: Sequence[Kept]) -> Any:
        """Where the blocks of these chunks are in the queue: the block that follows them, or None."""
        own = {id(block) for kept in chosen for group in kept.held for block in group}
        block = next(block for group in chosen[0].held for block in group if not block.is_null)
        if block.ref_cnt:
            return None
        while id(block) in own:
            block = block.next_free_block
        return block

    def _queued(self, block: Any, count: int) -> Iterator[Any]:
        for _ in range(count):
            if block is None or block.next_free_block is None:  # the queue's end is marked by a block of its own
                return
            yield block
            block = block.next_free_block
