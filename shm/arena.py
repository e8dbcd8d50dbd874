"""The arena: what is in L1, as operations on whole chains of chunks.

This ties the parts together and keeps them in step; each part owns one thing:

    table.py       records and their states             slabs.py       extents
    index.py       key -> entry                         orders.py      eviction orders, one per size class
    heads.py       which RESERVED waits for which       resting.py     extents that nobody may use yet
    incomplete.py  what waits for shards of others      namespaces.py  identity
    here           who writes which shard (`_taken`), what is given up but still written (`_doomed`), what goes when its
                   last reader does (`_passing`)

Ownership of references and reservations is the caller's (see daemon/sessions.py); here are only the counts, and
`check_integrity` compares them with what the caller says it holds.  Nothing here blocks or touches the data segment.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.shm import trace
from kvkeep.shm.heads import Heads
from kvkeep.shm.incomplete import Incomplete
from kvkeep.shm.index import Found, Index, Place
from kvkeep.shm.layout import State
from kvkeep.shm.namespaces import Namespace, NamespaceTable
from kvkeep.shm.orders import Orders
from kvkeep.shm.resting import Resting
from kvkeep.shm.slabs import SizeClass, Slabs
from kvkeep.shm.table import EntryTable

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

EVICT_STEP = 128  # entries per background step, well under a millisecond
HEADS_CLIMB = 65536  # heads that one reservation may look at to keep chains free of circles
DEMAND_LIMIT = 4096  # entries one reservation may evict from other size classes
ALL_SHARDS = -1  # a mover that loads a chunk writes all its shards
_STATE_WORD = 18  # of a record: state (low half), references (high half)
_LOW = np.uint64(0xFFFFFFFF)
_SEALED_WORD = np.uint64(State.SEALED)
_EMPTY = np.empty(0, dtype=np.int64)

log = logging.getLogger("kvkeep.arena")

# STORE verdicts, as in ipc.messages.Verdict (shm does not import ipc)
GRANTED, PRESENT, BUSY, FULL, ORPHAN = range(5)
# COMMIT outcomes, as in ipc.messages.Outcome
SEALED, WAITING, ABORTED, LOST = range(4)


def _bits(shard: int, shards: int) -> np.uint64:
    return np.uint64((1 << shards) - 1 if shard == ALL_SHARDS else 1 << shard)


class Prefix(NamedTuple):
    entries: I64  # the sealed prefix
    blocked_by: int  # the RESERVED entry right after it, -1 = none


class Grant(NamedTuple):
    verdicts: U8  # per chunk from start
    granted: I64  # entries, in chain order
    chain: I64  # every other resident entry of the chain: to be referenced while the store runs
    missing: int  # position of the first absent head before start, -1 = none


class Part(NamedTuple):
    """Entries of one namespace, as they are now; later, those of them that still have these generations."""

    entries: I64
    generations: U32
    namespace: int  # id
    extent: int  # bytes of each

    def cut(self, start: int, end: int | None = None) -> Part:
        return self._replace(entries=self.entries[start:end], generations=self.generations[start:end])

    def only(self, which: npt.NDArray[np.bool_]) -> Part:
        return self._replace(entries=self.entries[which], generations=self.generations[which])


class Arena:
    def __init__(
        self,
        table: EntryTable,
        namespaces: NamespaceTable,
        slabs: Slabs,
        *,
        policy: str = "LRU",
        watermark: float = 0.95,
        ratio: float = 0.05,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        """``quotas``: bytes per tenant (see isolated.py), of each size of chunk."""
        self.table = table
        self.namespaces = namespaces
        self.slabs = slabs
        self.index = Index(table.words)
        self.heads = Heads(table.capacity)
        self.resting = Resting(table, slabs)
        self.counters: Counter[str] = Counter()
        self.orders = Orders(
            policy, table, namespaces, self.counters, quotas=quotas or {}, resting=lambda: self.resting.zombies
        )
        self.entries_of: Counter[int] = Counter()  # per namespace, RESERVED included
        self.watch: set[int] = set()  # entries whose next seal or free goes to `settled`
        self.settled: list[int] = []
        self.fresh: list[Part] | None = None  # what was sealed, for whoever makes this a list and empties it
        self.read_at: U64 | None = None  # recency clock of each entry's last read, for whoever makes this an array
        self.keeps_heads = True  # False: L1 is a mere buffer, a tail may be stored whose head has left it
        self.bytes_reserved = 0
        self.references_owned = 0  # counted by the owners' account, see daemon/sessions.py
        self.reserving = True  # memory is still being made ready: wait for it rather than evict
        self.bytes_total = slabs.units * slabs.slab_bytes
        self.now = 0.0  # set by the loop: time.monotonic() of the current round
        self._watermark, self._ratio = watermark, ratio
        self._draining_to: int | None = None  # bytes; a watermark eviction is under way
        self._taken = np.zeros(table.capacity, dtype=np.uint64)  # shards being written
        self._doomed = np.zeros(table.capacity, dtype=bool)  # given up, but a writer is still at it
        self._passing = np.zeros(table.capacity, dtype=bool)  # leaves L1 with its last reference
        self._any_passing = False
        self.incomplete = Incomplete(
            table,
            self.counters,
            busy=lambda entry: bool(self._taken[entry] or self._doomed[entry]),
            give_up=lambda entry: self.give_up(entry, quarantine=False),
        )

    # ---- reading -----------------------------------------------------------------------------------------------------

    def prefix(self, namespace: Namespace, keys: U64) -> Prefix:
        """The longest sealed prefix of a chain of keys (n, 4)."""
        found = self.index.find(keys, namespace.id)
        state = found.records[:, _STATE_WORD] & _LOW
        there = found.entries >= 0
        sealed = there & (state == State.SEALED)
        n = len(keys) if sealed.all() else int(sealed.argmin())
        blocked = n < len(keys) and there[n] and int(state[n]) == State.RESERVED
        blocked = blocked and not self._doomed[found.entries[n]]  # nobody waits for what is given up
        return Prefix(found.entries[:n], int(found.entries[n]) if blocked else -1)

    def part(self, entries: I64) -> Part:
        """These entries, all of one namespace and at least one, as they are now."""
        table, first = self.table, entries[0]
        return Part(entries, table.generation[entries], int(table.namespace[first]), int(table.extent_bytes[first]))

    def still_sealed(self, part: Part) -> npt.NDArray[np.bool_]:
        """Which of them are there, and still what they were."""
        table, entries = self.table, part.entries
        sealed = table.state[entries] == State.SEALED
        result: npt.NDArray[np.bool_] = sealed & (table.generation[entries] == part.generations)
        return result

    def given_up(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Which of these, that somebody is writing, nobody waits for any more."""
        result: npt.NDArray[np.bool_] = self._doomed[entries]
        return result

    def touch(self, namespace: Namespace, chain: I64, *, read: bool = True) -> None:
        """Entries of one chain, root first, become the most recent ones.  ``read``: found, as opposed to stored."""
        if len(chain):
            self.orders.touch(namespace, chain, read=read)
            if read and self.read_at is not None:
                self.read_at[chain] = self.orders.clock.now

    def acquire(self, entries: I64) -> None:
        """One more reference on each; ``entries`` are distinct."""
        self.table.references[entries] += np.uint32(1)

    def release(self, entries: I64, generations: npt.NDArray[np.uint32]) -> None:
        """One reference less on each that is still what it was when acquired."""
        same = self.table.generation[entries] == generations
        if not same.all():
            entries = entries[same]
        self.table.references[entries] -= np.uint32(1)
        for extent in {int(e) for e in self.table.extent_bytes[entries[:1]]}:
            self.orders.of(extent).released()
        if self._any_passing:
            self._let_pass(entries[self._passing[entries]])

    def pass_on(self, entries: I64, *, at_once: bool) -> None:
        """These sealed entries leave L1 with their last reference; ``at_once`` also if they have none now."""
        self._passing[entries] = True
        self._any_passing = True
        if at_once:
            self._let_pass(entries)

    def _let_pass(self, entries: I64) -> None:
        self.drop(entries, counted_as="entries_passed")

    def references_dropped(self) -> None:
        """References were lowered behind our back: entries that could not go may go now."""
        self.orders.released()

    def release_all(self) -> None:
        """No reference of an earlier epoch is honoured any longer.  Only when no current one exists."""
        self.table.references[self.table.used()] = 0
        self.references_dropped()

    def drop_namespace(self, namespace: Namespace, limit: int) -> int:
        """Drop up to ``limit`` of its entries that nobody uses, tails first.  O(capacity).  Returns how many went."""
        table = self.table
        entries = np.flatnonzero((table.namespace == namespace.id) & (table.state == State.SEALED))
        return self.drop(entries[np.argsort(table.recency[entries])][:limit])

    def remove_namespace(self, namespace: Namespace) -> None:
        """A namespace without entries goes, and its size class with it if it was the last of that size."""
        self.namespaces.remove(namespace)
        extent = namespace.extent_bytes
        if all(ns.extent_bytes != extent for ns in self.namespaces) and self.slabs.retire_class(extent):
            self.orders.retire(extent)

    # ---- storing -----------------------------------------------------------------------------------------------------

    def reserve(self, namespace: Namespace, keys: U64, start: int, shard: int) -> Grant:
        """Extents for the chunks from ``start`` on that are missing (or miss this shard).  Touches the whole chain.

        ``shard`` ALL_SHARDS is for a load, which never joins chunks that others are writing."""
        n = len(keys)
        found = self.index.find(keys, namespace.id)
        entries = found.entries
        absent = entries < 0
        resident = n - int(np.count_nonzero(absent))
        if (start <= resident or not self.keeps_heads) and self._is_new_tail(found, absent, resident):
            return self._reserve_tail(namespace, keys, start, shard, found, resident)
        verdicts = np.zeros(n - start, dtype=np.uint8)
        if absent[:start].any() and self.keeps_heads:
            verdicts[:] = ORPHAN
            return Grant(verdicts, np.empty(0, np.int64), np.empty(0, np.int64), int(absent[:start].argmax()))
        state = found.records[:, _STATE_WORD] & _LOW
        state[absent] = 0
        verdicts[state[start:] == State.SEALED] = PRESENT
        writing = np.flatnonzero(state[start:] == State.RESERVED)
        joined = self._join(entries[start:][writing], shard, namespace.shards, verdicts, writing)
        wanted = np.flatnonzero(absent[start:])
        dying = (state == State.RESERVED) & self._doomed[entries]
        if dying.any():  # nothing can be hung on a head that is being given up
            after = np.arange(n) > int(dying.argmax())
            verdicts[(absent & after)[start:]] = BUSY
            wanted = np.flatnonzero((absent & ~after)[start:])
        made = self._make(namespace, keys[start:], wanted, entries, start, shard, found.place.part(slice(start, None)))
        if len(made) < len(wanted):
            first_refused = int(wanted[len(made)])
            verdicts[first_refused:][absent[start:][first_refused:]] = FULL
            self.counters["stores_refused_full"] += len(wanted) - len(made)
        granted_at = np.concatenate((writing[joined], wanted[: len(made)])) if len(joined) else wanted[: len(made)]
        entries[start:][wanted[: len(made)]] = made
        self.touch(namespace, entries[entries >= 0], read=False)
        granted_at = np.sort(granted_at)
        verdicts[granted_at] = GRANTED
        granted = entries[start:][granted_at]
        own = np.zeros(n, dtype=bool)
        own[start:][granted_at] = True
        chain = entries[(entries >= 0) & ~own]
        if self._any_passing and self.keeps_heads and shard != ALL_SHARDS and len(granted):
            self._passing[chain] = False  # something hangs on them now: they stay as long as their tail may
        return Grant(verdicts, granted, chain, -1)

    def _is_new_tail(self, found: Found, absent: npt.NDArray[np.bool_], resident: int) -> bool:
        """A sealed prefix, and nothing of the chain after it: what most stores find."""
        return bool(absent[resident:].all()) and bool(
            (found.records[:resident, _STATE_WORD] & _LOW == _SEALED_WORD).all()
        )

    def _reserve_tail(
        self, namespace: Namespace, keys: U64, start: int, shard: int, found: Found, resident: int
    ) -> Grant:
        """`reserve` for a chain of which the first ``resident`` chunks are sealed and the others are not there."""
        present = max(0, resident - start)
        wanted = np.arange(present, len(keys) - start)
        place = found.place.part(slice(start, None))
        made = self._make(namespace, keys[start:], wanted, found.entries, start, shard, place)
        verdicts = np.zeros(len(keys) - start, dtype=np.uint8)  # GRANTED
        verdicts[:present] = PRESENT
        if len(made) < len(wanted):
            verdicts[present + len(made) :] = FULL
            self.counters["stores_refused_full"] += len(wanted) - len(made)
        chain = found.entries[:resident]
        self.touch(namespace, np.concatenate((chain, made)) if resident else made, read=False)
        if self._any_passing and self.keeps_heads and shard != ALL_SHARDS and len(made):
            self._passing[chain] = False  # as above
        return Grant(verdicts, made, chain, -1)

    def _join(self, entries: I64, shard: int, shards: int, verdicts: U8, at: I64) -> I64:
        """Another rank started these chunks: take this shard of them where it is free.  Positions within ``at``."""
        if not len(entries):
            return at
        if shard == ALL_SHARDS:
            verdicts[at] = BUSY
            return at[:0]
        bit = np.uint64(1 << shard)
        done = (self.table.shard_mask[entries] & bit) != 0
        taken = (self._taken[entries] & bit) != 0
        free = ~done & ~taken & ~self._doomed[entries] if shards > 1 else np.zeros(len(entries), dtype=bool)
        verdicts[at[done]] = PRESENT
        verdicts[at[~done & ~free]] = BUSY
        self._taken[entries[free]] |= bit
        return np.flatnonzero(free)

    def _make(
        self, namespace: Namespace, keys: U64, wanted: I64, entries: I64, start: int, shard: int, place: Place
    ) -> I64:
        """New RESERVED entries for the first so many of ``wanted``, hung on their heads.  ``wanted`` (ascending) and
        ``place`` count from ``start`` on, as ``keys`` does; ``entries`` are those of the whole chain."""
        if not len(wanted):
            return wanted
        extent = namespace.extent_bytes
        cls = self.slabs.size_class(extent)
        held = entries[entries >= 0]
        if len(held):  # what makes room must not take this chain's own head, nor what would take that along
            held = np.concatenate((held, self.heads.above(held)))
            self.acquire(held)
        try:
            offsets = self._take(cls, len(wanted))
        finally:
            if len(held):
                self.table.references[held] -= np.uint32(1)
                self.orders.of(extent).released()
        if not len(offsets):
            return wanted[:0]
        wanted = wanted[: len(offsets)]
        new_keys = keys[wanted]
        made = self.table.reserve(
            new_keys,
            namespace.id,
            offsets,
            extent_bytes=extent,
            shard_bytes=namespace.shard_bytes,
            shards=namespace.shards,
        )
        self.index.insert(new_keys, namespace.id, made, place.part(wanted))
        self._taken[made] = _bits(shard, namespace.shards)
        self._doomed[made] = False
        self.entries_of[namespace.id] += len(made)
        self.bytes_reserved += extent * len(made)
        climb = HEADS_CLIMB
        in_one_run = int(wanted[-1]) - int(wanted[0]) == len(wanted) - 1
        breaks = _EMPTY if in_one_run else np.flatnonzero(wanted[1:] - wanted[:-1] != 1) + 1
        for first, end in itertools.pairwise((0, *breaks.tolist(), len(made))):
            position = start + int(wanted[first])
            head = int(entries[position - 1]) if position else -1
            waits = head >= 0 and self.table.state[head] == State.RESERVED
            self.heads.hang_run(made[first:end], head if waits else -1)
            after = position + end - first
            tail = int(entries[after]) if after < len(entries) else -1
            if tail >= 0 and self.table.state[tail] == State.RESERVED and not self._doomed[tail]:
                # It waited for its other shards while its sealed head was evicted: it waits for the new head now.
                climb = self.heads.hang(tail, int(made[end - 1]), climb)
        return made

    def commit(self, granted: I64, shard: int, good: npt.NDArray[np.bool_], checksums: U64 | None) -> U8:
        """The writer of ``shard`` has finished with ``granted`` (chain order).  Outcome per entry."""
        table = self.table
        if not len(granted):
            return np.empty(0, dtype=np.uint8)
        shards = int(table.shards[granted[0]])
        bit = _bits(shard, shards)
        self._taken[granted] &= ~bit
        if good.all() and not self._doomed[granted].any():
            table.shard_mask[granted] |= bit
            if checksums is not None:
                table.set_checksums(granted, shard, checksums)
            if (shards == 1 or shard == ALL_SHARDS) and self.heads.is_plain_run(granted):
                self.heads.settle_run(granted)
                self._seal(granted)
                return np.full(len(granted), SEALED, dtype=np.uint8)
            self._seal_complete(granted)
            self.incomplete.wait(granted, self.now)
            return np.where(table.state[granted] == State.SEALED, SEALED, WAITING).astype(np.uint8)
        outcomes = np.full(len(granted), LOST, dtype=np.uint8)
        generation = table.generation[granted].copy()
        for i, entry in enumerate(granted):
            if not table.is_reserved(int(entry), int(generation[i])):
                continue
            if self._doomed[entry]:
                self._free_doomed([int(entry)], quarantine=False)
            elif not good[i]:
                outcomes[i] = ABORTED
                self.give_up(int(entry), quarantine=False)
            else:
                table.shard_mask[entry] |= bit
                if checksums is not None:
                    table.set_checksums(granted[i : i + 1], shard, checksums[i : i + 1])
                outcomes[i] = WAITING
        kept = granted[outcomes == WAITING]
        self._seal_complete(kept)
        self.incomplete.wait(kept, self.now)
        outcomes[(outcomes == WAITING) & (table.state[granted] == State.SEALED)] = SEALED
        gone = (outcomes == WAITING) & (table.generation[granted] != generation)
        outcomes[gone] = LOST
        return outcomes

    def abandon(self, granted: I64, shard: int) -> None:
        """The writer of ``shard`` died: what it had reserved is given up and rests in quarantine."""
        table = self.table
        self._taken[granted] &= ~np.uint64(1 << shard)
        generation = table.generation[granted].copy()
        for entry, gen in zip(granted, generation, strict=True):
            if table.is_reserved(int(entry), int(gen)):
                if self._doomed[entry]:
                    self._free_doomed([int(entry)], quarantine=True)
                else:
                    self.give_up(int(entry), quarantine=True)

    def give_up(self, entry: int, *, quarantine: bool) -> None:
        """A RESERVED entry will never be complete; nor will what hangs on it."""
        lost = self.heads.cut(entry)
        self._doomed[lost] = True
        self._free_doomed(lost, quarantine=quarantine)
        self._notice(np.array(lost, dtype=np.int64))

    def doom(self, entries: I64, generations: npt.NDArray[np.uint32]) -> None:
        """Whoever writes these is late: nobody waits for them any more.  They are freed when the writer has ended."""
        table = self.table
        for entry, generation in zip(entries.tolist(), generations.tolist(), strict=True):
            if table.is_reserved(entry, generation) and not self._doomed[entry]:
                self.give_up(entry, quarantine=False)

    def _free_doomed(self, entries: list[int], *, quarantine: bool) -> None:
        ready = np.array([e for e in entries if not self._taken[e]], dtype=np.int64)
        if len(ready):
            self.counters["entries_given_up"] += len(ready)
            self.bytes_reserved -= int(self.table.extent_bytes[ready].sum())
            self.orders.leave(ready)
            self._forget(ready, quarantine=quarantine)

    def _seal(self, entries: I64) -> None:
        self.table.seal(entries)
        if trace.on(log):
            trace.chunks(log, "sealed", self.table.keys[entries])
        if self.fresh is not None:
            self.fresh.append(self.part(entries))  # by the end of the round some may be another namespace's
        extent = int(self.table.extent_bytes[entries[0]])
        self.bytes_reserved -= extent * len(entries)
        self.orders.of(extent).released()  # eviction may have met them while they were being written
        self._notice(entries)

    def _seal_complete(self, entries: I64) -> None:
        """Seal those that have all shards and a sealed head, and whatever was only waiting for them."""
        table = self.table
        stack = [int(e) for e in entries[::-1]]
        while stack:
            entry = stack.pop()
            full = (1 << int(table.shards[entry])) - 1
            if (
                table.state[entry] == State.RESERVED
                and not self._doomed[entry]
                and int(table.shard_mask[entry]) == full
                and self.heads.rooted(entry)
            ):
                stack.extend(self.heads.settle(entry))
                self._seal(np.array([entry], dtype=np.int64))

    # ---- making room -------------------------------------------------------------------------------------------------

    def _take(self, cls: SizeClass, n: int) -> I64:
        """Up to n extents (and as many free records), evicting if that is what it takes."""
        n = min(n, self.bytes_total // cls.extent + 1)
        while self.table.free_count < n:
            if self.reserving or not self._evict_oldest(max(EVICT_STEP, n)):
                break
        n = min(n, self.table.free_count)
        offsets = self.slabs.take(cls, n)
        if len(offsets) < n and not self.reserving:
            self._make_room(cls, n - len(offsets))
            offsets = np.concatenate((offsets, self.slabs.take(cls, n - len(offsets))))
        return offsets

    def _make_room(self, cls: SizeClass, n: int) -> None:
        """Evict until ``n`` extents of the class are free or can be made, or nothing more can go.

        Whoever holds the least recent entry gives way.  If that is another class, it is evicted in its own order until
        one of its slabs is empty; if its slabs will not come free, the class falls back on its own entries.
        """
        limit = DEMAND_LIMIT
        while cls.free < n:
            ages = self.orders.by_age()
            oldest = ages[0] if ages else None  # the class with the least recent entry, in use or not
            if oldest is not None and oldest != cls.extent and limit > 0:
                evicted = self._evict_from(oldest, min(EVICT_STEP, self.slabs.classes[oldest].per_slab))
                limit -= evicted
                if self.slabs.grow(cls) or evicted:
                    continue
            if self.slabs.grow(cls):
                continue
            if self._evict_from(cls.extent, n - cls.free):
                continue
            # All of its own are in use, the oldest of them perhaps since long: whoever can give way must.
            evicted = self._evict_oldest(EVICT_STEP, but=cls.extent) if limit > 0 else 0
            limit -= evicted
            if not evicted and not self.incomplete.end_early(self.now):
                break

    def _evict_oldest(self, want: int, *, but: int = 0) -> int:
        """From the oldest class of which something can go.  Returns how many went; 0 = nothing can go at all."""
        for extent in self.orders.by_age():
            if extent != but and (evicted := self._evict_from(extent, want)):
                return evicted
        return 0

    def _evict_from(self, extent: int, want: int) -> int:
        victims = self.orders.of(extent).pop(want, self._evictable)
        if len(victims):
            self._let_go(victims, extent)
        return len(victims)

    def _let_go(self, victims: I64, extent: int) -> None:
        """They have left their order."""
        if trace.on(log):
            trace.chunks(log, "evicted", self.table.keys[victims])
        self.counters["entries_evicted"] += len(victims)
        self.counters["bytes_evicted"] += len(victims) * extent
        self.table.begin_evict(victims)
        self._forget(victims, quarantine=False)

    def _evictable(self, entries: I64) -> npt.NDArray[np.bool_]:
        word = self.table.words[entries, _STATE_WORD]
        result: npt.NDArray[np.bool_] = word == np.uint64(State.SEALED)  # and no references: the upper half
        return result

    def evict_step(self) -> bool:
        """One bounded step of eviction by watermark and quotas.  True = there is more to do."""
        if self.orders.has_quotas:
            victims, extent = self.orders.pop_excess(EVICT_STEP, self._evictable)
            if len(victims):
                self._let_go(victims, extent)
                return True
        used = self.slabs.bytes_used
        if self._draining_to is None:
            if used <= self._watermark * self.bytes_total:
                return False
            self._draining_to = max(0, int((self._watermark - self._ratio) * self.bytes_total))
        if used <= self._draining_to or not self._evict_oldest(EVICT_STEP):
            self._draining_to = None
            return False
        return True

    def housekeep(self) -> bool:
        """One bounded step of log compaction.  True = there is more to do."""
        return self.orders.squeeze(lambda extent: self.slabs.classes[extent].used)

    def drop(self, entries: I64, *, counted_as: str = "entries_deleted") -> int:
        """Remove those of ``entries`` that are sealed and not referenced.  Returns how many."""
        entries = entries[self._evictable(entries)]
        if len(entries):
            if trace.on(log):
                passed = counted_as == "entries_passed"
                trace.chunks(log, "left with its last reader" if passed else "deleted", self.table.keys[entries])
            self.counters[counted_as] += len(entries)
            self.table.begin_evict(entries)
            self.orders.leave(entries)
            self._forget(entries, quarantine=False)
        return len(entries)

    def _forget(self, entries: I64, *, quarantine: bool) -> None:
        table = self.table
        namespaces = table.namespace[entries].astype(np.uint64)
        offsets = table.offset[entries].astype(np.int64)
        self.index.remove(table.keys[entries], namespaces, entries)
        if (namespaces == namespaces[0]).all():  # np.unique costs as much as the rest of this
            self.entries_of[int(namespaces[0])] -= len(entries)
        else:
            for namespace, count in zip(*np.unique(namespaces, return_counts=True), strict=True):
                self.entries_of[int(namespace)] -= int(count)
        if quarantine:
            self.resting.quarantine(offsets, int(table.extent_bytes[entries].sum()), self.now)
        else:
            self.slabs.give(offsets)
        if self._any_passing:
            self._passing[entries] = False
        table.free(entries)
        self._notice(entries)

    def _notice(self, entries: I64) -> None:
        if self.watch:
            self.settled.extend(int(e) for e in entries if int(e) in self.watch)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    @property
    def bytes_evictable(self) -> int:
        """O(entries): for status, not for decisions."""
        used = self.table.used()
        return int(self.table.extent_bytes[used[self._evictable(used)]].sum())

    def check_integrity(self, references: Counter[int], writing: Counter[int]) -> None:
        """Raise AssertionError, naming the broken rule, unless everything adds up.

        ``references``: entry -> references that the owners say they hold; ``writing``: entry -> shards being written.
        """
        table = self.table
        table.check_integrity()
        used = np.setdiff1d(table.used(), self.resting.zombies)
        sealed = used[table.state[used] == State.SEALED]
        reserved = used[table.state[used] == State.RESERVED]
        self.index.check_integrity(table.keys[used], table.namespace[used].astype(np.uint64), used)
        resting, resting_sizes = self.resting.extents()
        offsets = np.concatenate([table.offset[used].astype(np.int64), resting])
        sizes = np.concatenate([table.extent_bytes[used].astype(np.int64), resting_sizes])
        self.slabs.check_integrity(offsets, sizes)
        self.heads.check_integrity(reserved)
        counted = {int(e): int(table.references[e]) for e in used if table.references[e]}
        if counted != {e: n for e, n in references.items() if n}:
            raise AssertionError(f"references: {sum(counted.values())} counted, {sum(references.values())} owned")
        taken = {int(e): int(self._taken[e]).bit_count() for e in reserved if self._taken[e]}
        if taken != {e: n for e, n in writing.items() if n}:
            raise AssertionError(f"reservations: {sum(taken.values())} being written, {sum(writing.values())} owned")
        size = int(table.extent_bytes[reserved].sum())
        if size != self.bytes_reserved:
            raise AssertionError(f"reservations: {size} bytes RESERVED, {self.bytes_reserved} counted")
        if +self.entries_of != +Counter(table.namespace[used].tolist()):
            raise AssertionError("namespaces: the entries per namespace are miscounted")
        members = self.orders.members()
        if len(np.unique(members)) != len(members) or not np.isin(sealed, members).all():
            raise AssertionError("recency: a sealed entry is in no eviction order, or in one twice")
