"""What L1 serves is touched in L2: or the hottest chunks, always read from L1, would be the oldest there and go first.

    a ROUNDS-th of the adapter's limit was stored in it ──► a round: the entry table is walked, in small steps
        ──► what was read in L1 since the adapter last heard of it, least recent first ──► Touch jobs, one at a time
            ──► it is there: it has heard of it    ──► it is gone: its tier bit goes, so that it is stored again

A medium loses objects only when others are stored in it.  So rounds are counted in bytes stored: while nothing is
stored nothing is touched, and between two rounds a chunk that is in use moves by a ROUNDS-th towards the end at most.
What is read and what is stored costs one array operation each.

``heard`` is for entries under the generation noted with it.  Only what the adapter is known to have had is stored
again: what only another has does not come to this one by every reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvkeep.daemon.movers import Mover
from kvkeep.daemon.store_controller import take_away
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.shm.arena import Arena, Part
from kvkeep.shm.layout import State

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

ROUNDS = 8
STEP = 8192  # records per round of the control loop
TOUCH_KEYS = 512  # per job
TOUCH_DEADLINE_S = 30.0


class _Adapter:
    def __init__(self, mover: Mover, capacity: int) -> None:
        self.mover = mover
        self.heard: U64 = np.zeros(capacity, dtype=np.uint64)  # the recency clock when it was last told of the entry
        self.heard_under: U32 = np.zeros(capacity, dtype=np.uint32)  # generation of the entry then
        self.stored = 0  # bytes, when the last round began
        self.at = -1  # record that the walk has come to; -1 = none is under way
        self.found: list[I64] = []
        self.queue: deque[Part] = deque()
        self.busy = False  # with a job

    @property
    def due(self) -> bool:
        limit = self.mover.figures.usage.bytes_limit
        return limit > 0 and (self.mover.figures.totals["bytes_stored"] - self.stored) * ROUNDS >= limit


class Touches:
    def __init__(self, arena: Arena, movers: Sequence[Mover], *, resume: Callable[[Mover], None]) -> None:
        """``resume``: something is to be stored in this adapter again."""
        self._arena = arena
        self._resume = resume
        self._adapters = [_Adapter(mover, arena.table.capacity) for mover in movers]
        arena.read_at = np.zeros(arena.table.capacity, dtype=np.uint64)

    def stored(self, mover: Mover, entries: I64) -> None:
        """The adapter has them now."""
        one = self._adapters[mover.index]
        one.heard[entries] = self._arena.orders.clock.now
        one.heard_under[entries] = self._arena.table.generation[entries]

    def step(self, now: float) -> bool:
        """One bounded piece of work.  True = there is more to do at once."""
        busy = False
        for one in self._adapters:
            busy |= self._step(one, now)
        return busy

    def _step(self, one: _Adapter, now: float) -> bool:
        if not one.mover.available:
            return False
        if one.at >= 0:
            self._walk(one)
        elif one.queue:
            if not one.busy:
                self._send(one, one.queue.popleft(), now)
        elif one.due:
            one.at, one.stored = 0, one.mover.figures.totals["bytes_stored"]
        return one.at >= 0

    def _walk(self, one: _Adapter) -> None:
        table, read_at = self._arena.table, self._arena.read_at
        assert read_at is not None  # it is ours
        part = slice(one.at, min(one.at + STEP, table.ever_used))
        known = one.heard_under[part] == table.generation[part]
        wanted = read_at[part] > np.where(known, one.heard[part], np.uint64(0))
        wanted &= (table.state[part] == State.SEALED) & (table.tiers[part] & np.uint32(one.mover.bit) != 0)
        if wanted.any():
            one.found.append(part.start + np.flatnonzero(wanted))
        one.at += STEP
        if one.at >= table.ever_used:
            one.at = -1
            if one.found:
                self._line_up(one, np.concatenate(one.found))
            one.found = []

    def _line_up(self, one: _Adapter, entries: I64) -> None:
        """Least recent first, so that the most recent are so for the adapter too; in a job heads first, as ever."""
        table = self._arena.table
        entries = entries[table.state[entries] == State.SEALED]
        entries = entries[np.argsort(table.recency[entries])]
        spaces = table.namespace[entries]
        for space in np.unique(spaces).tolist():
            mine = entries[spaces == space]
            most = max(1, TOUCH_KEYS // int(table.shards[mine[0]]))
            one.queue += [self._arena.part(mine[at : at + most][::-1]) for at in range(0, len(mine), most)]

    def _send(self, one: _Adapter, part: Part, now: float) -> None:
        part = part.only(self._arena.still_sealed(part))
        namespace = self._arena.namespaces.get(part.namespace)
        if not len(part.entries) or namespace is None:
            return
        keys = self._arena.table.keys[part.entries]
        banned = one.mover.bans.of(namespace.digest, keys)
        if banned is not None:
            part, keys = part.only(~banned), keys[~banned]
        if not len(keys):
            return
        mover, told = one.mover, self._arena.orders.clock.now
        job = j.Touch(mover.next_id(), now + TOUCH_DEADLINE_S, namespace.digest, namespace.shards, keys.tobytes())
        one.busy = True
        mover.submit(job, lambda codes: self._touched(one, part, told, codes))

    def _touched(self, one: _Adapter, part: Part, told: int, codes: Sequence[int]) -> None:
        one.busy = False
        said = np.array(codes, dtype=np.uint8)
        table, still = self._arena.table, self._arena.still_sealed(part)
        there = part.entries[still & (said == Code.OK)]
        known = one.heard_under[part.entries] == part.generations
        lost = part.entries[still & known & (said == Code.MISS)]
        one.mover.figures.totals["chunks_touched"] += len(there)
        one.heard[there] = told
        one.heard_under[there] = table.generation[there]
        if len(lost):
            one.heard_under[lost] = 0
            take_away(table, lost, one.mover)
            self._resume(one.mover)
