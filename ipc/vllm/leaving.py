"""Storing late: chunks that are complete and still in the engine's memory, and which of them are about to leave it.

The engine's prefix cache is the first tier.  With ``kvkeep.store_when`` = "leaving" a complete chunk is only
remembered; it is stored when a block of it comes near the head of vLLM's free queue, from which new blocks are taken.
What stays in the engine is never stored, and costs nothing but its record.

A chunk's last block is freed before its first ones, and whoever touches it touches those, too; so of each KV cache
group only that one is watched.  vLLM frees the tail of a prompt first, and a chunk can be stored only after those
before it: when a tail is about to leave, all before it that the daemon does not have is stored with it.

A record belongs to its block: it goes when another chunk ends in that block, so there are never more than blocks.  The
block's hash tells whether the chunk is still in it; most blocks behind a window have none, so all groups must see all
tokens, and a chunk of blocks without hashes has no record.  Cost: one look at the head of the queue in each step; when
it has moved, and stores have room, a walk over as many blocks as a few steps may take.  One thread, the engine's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.ipc.vllm.groups import BlockTable
from kvkeep.ipc.vllm.metadata import StoreEnd, StoreReport

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored

    from kvkeep.ipc.vllm.adapters import Files

MAX_REWINDS = 3  # times a chunk is stored again because one before it had gone

Held = tuple[tuple[Any, ...], ...]  # vLLM's blocks of one chunk, per group


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
    events: tuple[BlockStored, ...] = ()  # to publish when it is stored
    stage: Stage = Stage.WAITS
    rewinds: int = 0

    def here(self) -> bool:
        """Its blocks still hold it."""
        blocks = (block for group in self.held for block in group)
        pairs = zip(blocks, self.hashes, strict=True)
        return all(value is not None and block.block_hash == value for block, value in pairs)

    def again(self) -> None:
        """The daemon does not have it: what is known of storing it is void."""
        if self.stage in (Stage.STORED, Stage.LOST):
            self.stage, self.rewinds = Stage.WAITS, 0


def recordable(held: Held) -> bool:
    """Whether it can be told later that the blocks still hold what they hold now.  The null block has no hash, nor has
    a block that vLLM does not cache yet."""
    return all(block.block_hash is not None for group in held for block in group)


class Batch(NamedTuple):
    """Chunks that are stored with one job."""

    chain: bytes  # hashes, from the root to the last of them
    start: int
    chunks: tuple[Kept, ...]
    place: Any  # the block that follows theirs in the queue
    epoch: int  # of the daemon

    @property
    def table(self) -> BlockTable:
        groups = zip(*(kept.held for kept in self.chunks), strict=True)
        return tuple(tuple(block.block_id for part in group for block in part) for group in groups)

    def begin(self) -> None:
        """Its chunks are under way from here on."""
        for kept in self.chunks:
            kept.stage = Stage.STORING

    def blocks(self) -> list[Any]:
        return [block for kept in self.chunks for group in kept.held for block in group]


class Leaving:
    def __init__(self, pool: Any, near: int, step: int) -> None:
        """``near``: that many blocks at the head of the free queue are about to leave.  ``step``: one step may take so
        many of them; what is being stored should be back in its place before the others are used up."""
        self._pool, self._near, self.step = pool, near, step
        self._epoch = 0
        self._by_chunk: dict[bytes, Kept] = {}
        self._by_block: dict[int, Kept] = {}
        self._head: tuple[int, int] | None = None
        self._lost = 0

    def __len__(self) -> int:
        return len(self._by_chunk)

    def find(self, chunk: bytes) -> Kept | None:
        return self._by_chunk.get(chunk)

    def keep(self, kept: Kept, *, missing: bool = False) -> Kept:
        """Remember a chunk; the record that stands for it from now on.  ``missing``: the daemon said it has it not."""
        other = self._by_chunk.get(kept.chunk)
        if other is not None and other.generation == kept.generation and other.here():
            if kept.stage is Stage.STORED and other.stage in (Stage.WAITS, Stage.LOST):
                other.stage = Stage.STORED
            elif missing:
                other.again()
            return other
        self._by_chunk[kept.chunk] = kept
        for group in kept.held:
            if group:
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
        for one in self._queued(block, self.step if next_step else self._near):
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

    def daemon_changed(self) -> None:
        """What another daemon had, or would not take, this one may lack and take."""
        self._epoch += 1
        for kept in self._by_chunk.values():
            if kept.here():
                kept.again()
        self.look_again()

    def batch(self, tail: Kept, room: int) -> Batch | None:
        """What to store now, so that this chunk is there: all that is missing up to it, from the first on, but not more
        than ``room`` chunks, of which there is one at least.  Looks at no more of them than that."""
        missing, head = self._missing(tail)
        first = missing[:room]
        lost = next((n for n, kept in enumerate(first) if not kept.here()), len(missing))
        if head is not None and head.stage is Stage.LOST:
            lost = 0
        for kept in missing[lost:]:
            kept.stage = Stage.LOST
        self._lost += len(missing[lost:])
        chosen = tuple(first[:lost])
        if not chosen:
            return None
        if len(chosen) < min(lost, len(missing)):
            self.look_again()
        chain = b"".join(kept.chunk for kept in self._chain(chosen[-1]))
        return Batch(chain, chosen[0].position, chosen, self._place(chosen), self._epoch)

    def failed(self, kept: Kept) -> None:
        """No job could be made for it."""
        self._lost += kept.stage is Stage.WAITS
        kept.stage = Stage.LOST

    def ended(self, batch: Batch, report: StoreReport) -> None:
        again: list[Kept] = []
        if report.end is StoreEnd.ORPHAN and report.missing >= 0:  # heads have gone from the daemon, not from here
            whole = self._chain(batch.chunks[-1])
            again = [kept for kept in whole[report.missing :] if kept.stage is not Stage.LOST]
        for kept in batch.chunks:
            done = report.end is StoreEnd.DONE or kept.position < report.missing
            kept.stage = Stage.STORED if done else Stage.LOST
            if batch.epoch != self._epoch:
                kept.again()
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

    def _missing(self, tail: Kept) -> tuple[list[Kept], Kept | None]:
        """The chunks up to this one that wait, back to the nearest that does not; and that one, if there is one."""
        found: list[Kept] = []
        at: Kept | None = tail
        while at is not None:
            at = self._by_chunk.get(at.chunk, at)
            if at.stage is not Stage.WAITS:
                break
            found.append(at)
            at = at.before
        return found[::-1], at

    def _place(self, chosen: Sequence[Kept]) -> Any:
        """Where the blocks of these chunks are in the queue: the block that follows them, or None."""
        own = {id(block) for kept in chosen for group in kept.held for block in group}
        block = next(block for group in chosen[0].held for block in group)
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
