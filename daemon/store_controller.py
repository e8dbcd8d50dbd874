"""The store controller: what was sealed in L1 goes to every L2 adapter.

    arena seals ──► fresh ──► a queue per adapter ──► Put jobs, which hold References ──► tier bit of the entry set
                                ^        │ full: the oldest is shed and counted
                   rescan ──────┘        ▼

A queue holds no references: an entry that is evicted before its turn is skipped, whatever is in its place by then.
Only Put jobs hold some, and no more than ``cap`` bytes together.  Every entry's record says in its ``tiers`` which
adapters need not be given it any more, so what is still to be done can be found in the entry table at any time: after a
restart, after an adapter was away, after something was shed, the table is rescanned in small steps while the queue has
room.

The store policy (l2_policies.py) says which entries an adapter is given; what it is not to be given counts as given.
One that ``buffers`` makes L1 a buffer: an entry leaves it once every adapter that serves has it and its last reader is
done.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvkeep.daemon.l2_policies import Asked, Chunks, StorePolicy
from kvkeep.daemon.movers import Mover
from kvkeep.daemon.sessions import References
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.shm import trace
from kvkeep.shm.arena import Arena, Part
from kvkeep.shm.layout import CHECKSUM_SHARDS, State
from kvkeep.shm.table import EntryTable

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PUTS = 4  # open Put jobs per adapter
PUT_DEADLINE_S = 30.0
SCAN_STEP = 8192  # records per round: well under a millisecond
RESCAN_S = 1.0  # at the earliest after the last scan ended, when something was shed
RETRY_S = 10.0  # after this, what a medium refused is given to it again: a full or failing one may work by then
WITHHELD = np.uint32(1 << 31)  # in `tiers`: it was cleared while it was in use.  Its other bits are never taken away
_NONE: I64 = np.empty(0, dtype=np.int64)

log = logging.getLogger("kvkeep.store")


@dataclass(eq=False)
class Queue:
    """What one adapter is still to be given.  Oldest first."""

    parts: deque[Part] = field(default_factory=deque)
    nbytes: int = 0

    def push(self, part: Part) -> None:
        self.parts.append(part)
        self.nbytes += part.extent * len(part.entries)

    def pop(self, most: int) -> Part:
        """Up to ``most`` entries of the oldest part."""
        part = self.parts.popleft()
        if len(part.entries) > most:
            self.parts.appendleft(part.cut(most))
            part = part.cut(0, most)
        self.nbytes -= part.extent * len(part.entries)
        return part

    def shed(self, limit: int) -> int:
        """Drop the oldest until no more than ``limit`` bytes are left.  Returns how many entries went."""
        dropped = 0
        while self.nbytes > limit:
            extent = self.parts[0].extent
            dropped += len(self.pop(-(-(self.nbytes - limit) // extent)).entries)
        return dropped


@dataclass(eq=False)
class Feed:
    """Everything about one adapter."""

    mover: Mover
    storing: Mask  # per entry: an open Put of this adapter has it
    queue: Queue = field(default_factory=Queue)
    scan_at: int = -1  # record that the scan has come to; -1 = none is under way
    scan_wanted: bool = True
    next_scan: float = 0.0
    retry_at: float = math.inf  # something failed: scan again then
    was_emptied: bool = False  # whatever the bits say was true of another medium: this scan clears them


class StoreController:
    def __init__(
        self,
        arena: Arena,
        movers: Sequence[Mover],
        *,
        policy: StorePolicy,
        cap: int,
        stored: Callable[[Mover, I64], None] = lambda mover, entries: None,
        trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``stored`` is told what an adapter has from now on; ``trouble`` gets the reason if the policy fails."""
        self.arena = arena
        self._tell_stored = stored
        self.skip_l1 = policy.buffers
        self._selects = type(policy).select is not StorePolicy.select
        self._select = Asked("store", policy, "select", default=True, tell=trouble)
        arena.keeps_heads = not self.skip_l1
        arena.fresh = []
        self.counters = arena.counters
        self._cap = cap
        # In a buffer nothing may be overlooked: what is shed would block L1 until the next scan finds it.
        self._queue_limit = arena.bytes_total if self.skip_l1 else cap
        self._feeds = [Feed(mover, np.zeros(arena.table.capacity, dtype=bool)) for mover in movers]
        self._every_bit = np.uint32(sum(mover.bit for mover in movers))
        self._held: dict[int, References] = {}  # by Put: id of the References

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def take_fresh(self, sealed: list[Part]) -> None:
        """What was sealed since the last round and was not loaded from L2."""
        for part in sealed:
            for feed in self._feeds:
                if feed.mover.available:
                    feed.queue.push(part)
                    self._shed(feed)
                else:
                    feed.scan_wanted = True

    def step(self, now: float) -> bool:
        """One bounded piece of work.  True = there is more to do at once."""
        busy = False
        for feed in self._feeds:
            if now >= feed.retry_at:
                feed.scan_wanted, feed.retry_at = True, math.inf
            if feed.mover.available:
                busy |= self._scan(feed, now)
                self._dispatch(feed, now)
        return busy

    def next_deadline(self, now: float) -> float | None:
        waiting = [f.next_scan for f in self._feeds if f.scan_wanted and f.scan_at < 0 and f.mover.available]
        waiting += [f.retry_at for f in self._feeds if f.retry_at < math.inf]
        return min((at for at in waiting if at > now), default=None)

    def serving(self, mover: Mover) -> None:
        """This adapter serves (again): what it does not have is in the table."""
        feed = self._feeds[mover.index]
        feed.scan_wanted, feed.scan_at, feed.next_scan = True, -1, 0.0
        usage = mover.figures.usage
        feed.was_emptied = usage.objects <= usage.manifests

    def resume(self, mover: Mover) -> None:
        """Something may be given to this adapter that could not be for a while."""
        feed = self._feeds[mover.index]
        feed.scan_wanted, feed.next_scan = True, 0.0

    def withhold(self, entries: I64) -> None:
        """They were cleared, and stay in L1 because they are in use: no adapter is to be given them any more."""
        self.arena.table.tiers[entries] |= self._every_bit | WITHHELD

    def distrust(self) -> None:
        """The bits speak of other adapters than these."""
        tiers = self.arena.table.tiers[: self.arena.table.ever_used]
        tiers[:] = np.where(tiers & WITHHELD, self._every_bit | WITHHELD, np.uint32(0))

    @property
    def idle(self) -> bool:
        """Nothing is left that could be stored now."""
        return not self._held and not any(
            f.mover.available and (f.queue.parts or f.scan_wanted or f.scan_at >= 0) for f in self._feeds
        )

    @property
    def queued_bytes(self) -> list[int]:
        return [feed.queue.nbytes for feed in self._feeds]

    def hold(self, references: Counter[int]) -> None:
        """Add what open Put jobs hold, for the integrity check."""
        for held in self._held.values():
            references.update(held.entries.tolist())

    # ---- finding what is to be stored --------------------------------------------------------------------------------

    def _shed(self, feed: Feed) -> None:
        if feed.queue.nbytes > self._queue_limit:
            dropped = feed.queue.shed(self._queue_limit)
            feed.mover.figures.totals["stores_shed"] += dropped
            self.counters["l2_stores_shed"] += dropped
            feed.scan_wanted = True

    def _scan(self, feed: Feed, now: float) -> bool:
        """One step through the entry table.  True = more steps are to be made now."""
        if feed.scan_at < 0:
            if not feed.scan_wanted or feed.queue.parts or now < feed.next_scan:
                return False
            feed.scan_at, feed.scan_wanted = 0, False
        if feed.queue.nbytes * 2 > self._cap:
            return False  # goes on when there is room
        table = self.arena.table
        part = slice(feed.scan_at, min(feed.scan_at + SCAN_STEP, table.ever_used))
        if feed.was_emptied:
            take_away(table, np.arange(part.start, part.stop), feed.mover)
        sealed = table.state[part] == State.SEALED
        tiers = table.tiers[part]
        missing = part.start + np.flatnonzero(sealed & ~feed.storing[part] & (tiers & np.uint32(feed.mover.bit) == 0))
        if self.skip_l1:
            self._leave(part.start + np.flatnonzero(sealed & (tiers != 0)))
        # Heads first, as far as a scan in table order can see.
        missing = missing[np.argsort(table.recency[missing])[::-1]]
        for namespace in np.unique(table.namespace[missing]):
            mine = self._allowed(feed.mover, missing[table.namespace[missing] == namespace])
            if len(mine):
                feed.queue.push(self.arena.part(mine))
        self._shed(feed)
        feed.scan_at += SCAN_STEP
        if feed.scan_at >= table.ever_used:
            feed.scan_at, feed.next_scan, feed.was_emptied = -1, now + RESCAN_S, False
            return False
        return True

    def _allowed(self, mover: Mover, entries: I64) -> I64:
        """Without what was cleared and may still be on the medium; `resume` finds it again.  Of one namespace."""
        if not mover.bans or not len(entries):
            return entries
        namespace = self.arena.namespaces.get(int(self.arena.table.namespace[entries[0]]))
        assert namespace is not None  # it has entries
        banned = mover.bans.of(namespace.digest, self.arena.table.keys[entries])
        return entries if banned is None else entries[~banned]

    def _selected(self, mover: Mover, entries: I64) -> I64:
        """Those that the policy gives to this adapter.  Of one namespace."""
        table = self.arena.table
        namespace = self.arena.namespaces.get(int(table.namespace[entries[0]]))
        assert namespace is not None  # it has entries
        mask = self._select(Chunks(namespace, table.keys[entries], mover.label))
        passed = entries[~mask]
        if len(passed):
            table.tiers[passed] |= np.uint32(mover.bit)
            self.counters["l2_stores_not_wanted"] += len(passed)
            if self.skip_l1:
                self._leave(passed)
        return entries[mask]

    # ---- Put jobs ----------------------------------------------------------------------------------------------------

    def _dispatch(self, feed: Feed, now: float) -> None:
        while feed.queue.parts and feed.mover.puts < PUTS:
            extent = feed.queue.parts[0].extent
            room = self._cap - sum(f.mover.putting for f in self._feeds)
            most = min(j.MAX_CHUNKS, max(1, j.MAX_CHUNK_BYTES // extent), room // extent)
            if most < 1 and self._held:
                return
            entries = self._batch(feed, max(1, most))
            if len(entries):
                self._put(feed.mover, entries, now)

    def _batch(self, feed: Feed, most: int) -> I64:
        """Up to ``most`` entries of one namespace that are still there and still wanted."""
        table, bit = self.arena.table, np.uint32(feed.mover.bit)
        batch: list[I64] = []
        count, namespace = 0, -1
        while feed.queue.parts and count < most:
            if count and feed.queue.parts[0].namespace != namespace:
                break
            part = feed.queue.pop(most - count)
            entries = part.entries
            live = self.arena.still_sealed(part)
            self.counters["l2_stores_too_late"] += len(live) - int(live.sum())  # it left L1 before its turn
            live &= ~feed.storing[entries] & (table.tiers[entries] & bit == 0)
            entries = self._allowed(feed.mover, entries[live])
            if self._selects and len(entries):
                entries = self._selected(feed.mover, entries)
            if len(entries):
                namespace = part.namespace
                batch.append(entries)
                count += len(entries)
        if not batch:
            return _NONE
        together = np.concatenate(batch)
        distinct = np.unique(together)
        return together if len(distinct) == len(together) else distinct

    def _put(self, mover: Mover, entries: I64, now: float) -> None:
        table = self.arena.table
        namespace = self.arena.namespaces.get(int(table.namespace[entries[0]]))
        assert namespace is not None  # it has entries
        if (table.namespace[entries] != namespace.id).any():
            raise AssertionError("stores: a Put of entries of several namespaces")
        held = References(self.arena, entries)
        shards = namespace.shards
        sums = b""
        if shards <= CHECKSUM_SHARDS:
            sums = np.ascontiguousarray(table.checksums[entries, :shards]).tobytes()
        job = j.Put(
            mover.next_id(),
            now + PUT_DEADLINE_S,
            namespace.digest,
            shards,
            table.keys[entries].tobytes(),
            namespace.shard_bytes,
            namespace.stride,
            table.offset[entries].tobytes(),
            sums,
        )
        self._held[id(held)] = held
        self._feeds[mover.index].storing[entries] = True
        if trace.on(log):
            trace.chunks(log, f"put {mover.name}/{job.id}", table.keys[entries])
        extent = namespace.extent_bytes
        mover.submit(job, lambda codes: self._stored(mover, held, codes, job.id, extent), nbytes=len(entries) * extent)

    def _stored(self, mover: Mover, held: References, codes: Sequence[int], job: int, extent: int) -> None:
        del self._held[id(held)]
        feed, entries = self._feeds[mover.index], held.entries
        feed.storing[entries] = False
        said = np.array(codes, dtype=np.uint8)
        good = said == Code.OK
        if trace.on(log):
            trace.chunks(log, f"stored by {mover.name}/{job}", self.arena.table.keys[entries[good]])
            trace.chunks(log, f"not stored by {mover.name}/{job}", self.arena.table.keys[entries[~good]])
        stored = entries[good]
        done = entries[good | (said == Code.TOO_LARGE)]  # what will never fit need not be given again
        self.arena.table.tiers[done] |= np.uint32(mover.bit)
        self._tell_stored(mover, stored)
        mover.figures.totals["chunks_stored"] += len(stored)
        mover.figures.totals["bytes_stored"] += len(stored) * extent
        self.counters["l2_chunks_stored"] += len(stored)
        self.counters["l2_store_failures"] += len(entries) - int((good | (said == Code.BUSY)).sum())
        failed = set(codes) - {Code.OK, Code.TOO_LARGE}
        if failed & {Code.LOST, Code.STOPPING, Code.EXPIRED}:
            feed.scan_wanted = True  # nothing was wrong with these
        elif failed:
            feed.retry_at = min(feed.retry_at, time.monotonic() + RETRY_S)
        if self.skip_l1:
            self._leave(done)
        held.trim(0)

    def _leave(self, entries: I64) -> None:
        """Let those go that every serving adapter has."""
        needed = np.uint32(sum(f.mover.bit for f in self._feeds if f.mover.available)) & self._every_bit
        tiers = self.arena.table.tiers[entries]
        entries = entries[(tiers != 0) & (tiers & needed == needed)]
        if len(entries):
            self.arena.pass_on(entries, at_once=True)


def take_away(table: EntryTable, entries: I64, mover: Mover) -> None:
    """The adapter does not have these: it is given them again, unless they are withheld."""
    table.tiers[entries] &= ~np.where(table.tiers[entries] & WITHHELD, np.uint32(0), np.uint32(mover.bit))
