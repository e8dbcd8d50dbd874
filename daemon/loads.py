"""Open loads: chunks that movers are writing into L1, from the reservation to the seal, and on whose behalf.

    start ─► with an adapter ─┬─ good ──────────────────────────────────────────────────────────────► sealed
               ▲              ├─ failed, there is time: with the next adapter that was not asked ──┐
               │              ├─ EXPIRED, but somebody waits longer by now: the same one again ────┤
               │              └─ failed for good ───────────────────────────────────────► given up │
               └───────────────────────────────────────────────────────────────────────────────────┘

A `Demand` is what some lookups want of one chain.  A load belongs to one, and is wanted until its deadline: that of the
last of its lookups, those included that joined it while it was under way (`join`).

A load that has no answer when it should be there is *late*.  It is waited for while somebody does and its adapter is
not left alone, but nobody joins it any more; then it is doomed: lookups stop waiting for it at once, its extents are
free only when the mover has answered or is dead.

Every adapter may be writing ``budget`` bytes of L1 at a time, or one chunk; so one that hangs holds no more than that,
and nothing that the others need.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvkeep.daemon.movers import Mover
from kvkeep.daemon.waiting import Waiting
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.shm import trace
from kvkeep.shm.arena import ALL_SHARDS, Arena
from kvkeep.shm.namespaces import Namespace

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

GET_CHUNKS = 32  # per Get, so that the mover's threads share a window
GET_BYTES = 16 << 20  # ... unless one chunk is larger
L1 = -1  # in the place of an adapter's index: it was there when it was looked for

log = logging.getLogger("kvkeep.prefetch")


@dataclass(eq=False)
class Demand:
    """Lookups that want chunks of one chain."""

    namespace: Namespace
    deadline: float = -math.inf  # the latest of theirs
    lookups: dict[Waiting, None] = field(default_factory=dict)  # every one that ever waited for it
    loads: int = 0  # open

    def join(self, waiting: Waiting) -> None:
        self.deadline = max(self.deadline, waiting.deadline)
        self.lookups[waiting] = None

    @property
    def wanted(self) -> bool:
        return any(w.handle.waiting is w for w in self.lookups)

    def note_missed(self, key: bytes) -> None:
        """This chunk cannot be had: none of them is to ask for it again."""
        for waiting in self.lookups:
            waiting.missed.add(key)

    @property
    def who(self) -> str:
        """For the log."""
        return "lookup " + ", ".join(str(w.handle.id) for w in list(self.lookups)[:8])


@dataclass(eq=False)
class Load:
    """A Get, while the mover has it.  Its extents are the mover's for so long."""

    demand: Demand
    entries: I64
    mover: Mover
    deadline: float  # of the job
    late: bool = False
    given_up: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.entries) * self.demand.namespace.extent_bytes


class Loads:
    def __init__(self, arena: Arena, movers: Sequence[Mover], *, budget: int, wake: Callable[[], None]) -> None:
        """``budget``: bytes per adapter.  ``wake`` is for those that wait for entries: some were sealed or given up."""
        self._arena = arena
        self._counters = arena.counters
        self._movers = movers
        self._budget = budget
        self._wake = wake
        self._open: set[Load] = set()
        self._of: dict[int, Load] = {}  # by entry
        self._bytes = [0 for _ in movers]  # of open loads
        self._late_bytes = [0 for _ in movers]

    # ---- limits ------------------------------------------------------------------------------------------------------

    def takes(self, mover: Mover, extent: int) -> bool:
        """It loads, now or when it has answered; not so one that is left alone, or is full of loads that are late."""
        at_work = self._bytes[mover.index] > self._late_bytes[mover.index]
        return mover.available and (at_work or self.room(mover.index, extent) > 0)

    def room(self, index: int, extent: int) -> int:
        """How many chunks of this size this adapter may be given now."""
        used = self._bytes[index]
        return max(0, self._budget - used) // extent if used else max(1, self._budget // extent)

    @property
    def bytes_loading(self) -> int:
        return sum(self._bytes)

    # ---- the life of a load ------------------------------------------------------------------------------------------

    def start(self, demand: Demand, entries: I64, source: int) -> None:
        """``entries``, reserved for it in chain order, are loaded from this adapter, or L1 if it lost them since."""
        if source != L1 and self._movers[source].available:
            self._get(demand, entries, self._movers[source])
        else:
            self._ended(demand, entries, source, np.full(len(entries), Code.UNAVAILABLE, np.uint8), again=False)

    def _get(self, demand: Demand, entries: I64, mover: Mover) -> None:
        """In jobs of a good size."""
        most = min(GET_CHUNKS, max(1, GET_BYTES // demand.namespace.extent_bytes))
        for at in range(0, len(entries), most):
            self._submit(Load(demand, entries[at : at + most], mover, demand.deadline))

    def _submit(self, load: Load) -> None:
        mover, namespace, table = load.mover, load.demand.namespace, self._arena.table
        self._open.add(load)
        self._of.update(dict.fromkeys(load.entries.tolist(), load))
        self._bytes[mover.index] += load.nbytes
        load.demand.loads += 1
        job = j.Get(
            mover.next_id(),
            load.deadline,
            namespace.digest,
            namespace.shards,
            table.keys[load.entries].tobytes(),
            namespace.shard_bytes,
            namespace.stride,
            table.offset[load.entries].tobytes(),
        )
        if trace.on(log):
            trace.chunks(log, f"get {mover.name}/{job.id} for {load.demand.who}", table.keys[load.entries])
        mover.submit(
            job,
            lambda codes: self._answered(load, codes, job.id),
            late=lambda: self._is_late(load),
            nbytes=load.nbytes,
        )

    def _answered(self, load: Load, codes: Sequence[int], job: int) -> None:
        """The mover has answered, or is dead: nobody writes to these extents any more."""
        mover, demand, entries = load.mover, load.demand, load.entries
        self._open.discard(load)
        for entry in entries.tolist():
            del self._of[entry]
        self._bytes[mover.index] -= load.nbytes
        self._late_bytes[mover.index] -= load.nbytes * load.late
        said = np.array(codes, dtype=np.uint8)
        good = said == Code.OK
        count = int(good.sum())
        mover.figures.totals["chunks_loaded"] += count
        mover.figures.totals["bytes_loaded"] += demand.namespace.extent_bytes * count
        if trace.on(log):
            keys = self._arena.table.keys[entries]
            trace.chunks(log, f"loaded by {mover.name}/{job} for {demand.who}", keys[good])
            trace.chunks(log, f"not loaded by {mover.name}/{job} for {demand.who}", keys[~good])
        demand.loads -= 1
        self._ended(demand, entries, mover.index, said, again=demand.deadline > load.deadline)

    def _ended(self, demand: Demand, entries: I64, source: int, said: npt.NDArray[np.uint8], *, again: bool) -> None:
        """This source is through with them.  ``again``: there is more time now than it had."""
        good = said == Code.OK
        self._counters["l2_chunks_loaded"] += int(good.sum())
        plan = np.full(len(entries), L1)  # whom to ask for which
        if not good.all() and demand.wanted and time.monotonic() < demand.deadline:
            failed = ~good & ~self._arena.given_up(entries)
            plan = self._others(demand.namespace, entries, failed, (said == Code.EXPIRED) & again, source)
        self._commit(demand, entries[plan == L1], good[plan == L1])
        lost = (plan != L1) & self._arena.given_up(entries)  # what they hung on was
        self._commit(demand, entries[lost], good[lost])
        plan[lost] = L1
        for index in dict.fromkeys(plan[plan != L1].tolist()):
            self._get(demand, entries[plan == index], self._movers[index])
        self._wake()

    def _others(self, namespace: Namespace, entries: I64, failed: Mask, expired: Mask, source: int) -> I64:
        """Per entry the adapter that is asked next, L1 = nobody.  Those behind ``source`` were not asked yet."""
        plan = np.full(len(entries), L1)
        for mover in self._movers[max(0, source) :]:
            if not self.takes(mover, namespace.extent_bytes):
                continue
            mine = failed & (plan == L1)
            if mover.index == source:
                mine &= expired
            banned = mover.bans.of(namespace.digest, self._arena.table.keys[entries])
            plan[mine if banned is None else mine & ~banned] = mover.index
        return plan

    def _commit(self, demand: Demand, entries: I64, good: Mask) -> None:
        failed = self._arena.table.keys[entries[~good]].copy()
        self._counters["l2_load_failures"] += len(failed)
        for key in failed:
            demand.note_missed(key.tobytes())
        self._arena.commit(entries, ALL_SHARDS, good, None)

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def join(self, waiting: Waiting, entry: int) -> None:
        """A lookup waits for an entry, which may be one that is being loaded."""
        load = self._of.get(entry)
        if load is not None and not load.late:
            load.demand.join(waiting)

    def _is_late(self, load: Load) -> None:
        load.late = True
        self._late_bytes[load.mover.index] += load.nbytes
        self.end_late(time.monotonic())

    def end_late(self, now: float) -> None:
        for load in [load for load in self._open if load.late and not load.given_up]:
            if now >= load.demand.deadline or not load.mover.available:
                load.given_up = True
                self._doom(load, load.entries)

    def next_deadline(self) -> float | None:
        return min((load.demand.deadline for load in self._open if load.late and not load.given_up), default=None)

    def doom(self, namespace: bytes, keys: Set[bytes] | None) -> None:
        """It is being cleared (digest, b"" = all; keys None = all of it): nothing of it is loaded any more."""
        for load in list(self._open):
            if namespace not in (b"", load.demand.namespace.digest):
                continue
            entries = load.entries
            if keys is not None:
                hit = [key.tobytes() in keys for key in self._arena.table.keys[entries]]
                entries = entries[np.array(hit, dtype=bool)]
            self._doom(load, entries)

    def _doom(self, load: Load, entries: I64) -> None:
        self._arena.doom(entries, self._arena.table.generation[entries])
        for key in self._arena.table.keys[entries]:
            load.demand.note_missed(key.tobytes())
        self._wake()

    # ---- for checks --------------------------------------------------------------------------------------------------

    def hold(self, writing: Counter[int]) -> None:
        """Add what open loads write, for the integrity check."""
        for load in self._open:
            for entry in load.entries.tolist():
                writing[entry] += load.demand.namespace.shards
