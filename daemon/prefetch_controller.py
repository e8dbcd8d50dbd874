"""The prefetch controller: the missing tail of a lookup is looked for in L2 and loaded.

A task follows one chain, a window of chunks at a time:

    begin ─► queued ─► asking adapter 0, 1, … for what L1 lacks ─► reserving (with eviction) ─► loads ─┐
                          ▲       ▲                                      │ no room for loads: starved  │
                          │       └─── an adapter that has it does not load (any more) ────┘           │
                          └──────── next window, if all of this one was found ◄────────────────────────┘

A lookup waits on the task while nothing is reserved yet, and on the RESERVED entry that it needs next from then on,
exactly as it does for a client that stores; so one load serves everybody, and the prefix grows as loads come in.  A
task never reports anything: it lets its lookups look again.  No lookup asks for a chunk twice.

A task lasts until the deadline of the last of its lookups: what an adapter had no time for is asked of it again when
somebody who waits longer has come meanwhile.

Limits: ``most`` tasks at a time, the others queue (their deadlines run); ``budget`` bytes of loads at a time, shared
equally among the adapters.  Loads are loads.py's, from their reservation on.

The prefetch policy (l2_policies.py) says what of it stays in L1 after its last reader.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvkeep.daemon.l2_policies import Asked, Chunks, PrefetchPolicy
from kvkeep.daemon.loads import L1, Demand, Loads
from kvkeep.daemon.movers import Mover
from kvkeep.daemon.waiting import Waiting
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.shm import trace
from kvkeep.shm.arena import ALL_SHARDS, FULL, GRANTED, ORPHAN, Arena, Part

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

WINDOW = 256  # chunks asked for at once
_NOWHERE = -2  # besides adapters' indices and L1

log = logging.getLogger("kvkeep.prefetch")

TaskKey = tuple[int, bytes]  # namespace id, the chunk that its window begins with


class Stage(enum.Enum):
    QUEUED = "queued"
    ASKING = "asking"
    STARVED = "starved"
    OVER = "over"


@dataclass(eq=False, kw_only=True)
class Task(Demand):
    keys: U64  # the whole chain
    at: int  # the window begins here
    key: TaskKey
    stage: Stage = Stage.QUEUED
    waiters: list[Waiting] = field(default_factory=list)  # that wait for this window to be reserved, or missed
    source: list[int] = field(default_factory=list)  # per chunk of the window: an adapter's index, or L1, _NOWHERE
    to_ask: list[Mover] = field(default_factory=list)


class PrefetchController:
    def __init__(
        self,
        arena: Arena,
        movers: Sequence[Mover],
        *,
        policy: PrefetchPolicy,
        most: int,
        budget: int,
        every_bit: int,
        look_again: Callable[[Waiting], None],
        wake: Callable[[], None],
        trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``look_again`` is for one lookup that waits; ``wake`` is for those that wait for entries; ``trouble`` gets
        the reason if the policy fails."""
        self.arena = arena
        self._keeps = Asked("prefetch", policy, "keep", default=False, tell=trouble)
        self.counters = arena.counters
        self._movers = movers
        self._most = most
        self._loads = Loads(arena, movers, budget=budget // max(1, len(movers)), wake=wake)
        self._every_bit = np.uint32(every_bit)
        self._look_again = look_again
        self._tasks: dict[TaskKey, Task] = {}  # by where they are now
        self._queue: deque[Task] = deque()
        self._active: set[Task] = set()
        self._loaded_under = np.zeros(arena.table.capacity, dtype=np.uint32)  # generation of an entry made for a load

    # ---- from lookups that wait --------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        return any(mover.available for mover in self._movers)

    def begin(self, waiting: Waiting) -> bool:
        """Look for what this lookup misses next.  False = there is nothing (more) to be had from L2.

        A lookup begins at most once for each chunk, so it comes to an end whatever happens to its tasks."""
        at = len(waiting.handle.references)
        first = waiting.keys[at].tobytes()
        if first in waiting.missed or not self.available:
            return False
        waiting.missed.add(first)
        namespace = waiting.handle.namespace
        key = (namespace.id, first)
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = Task(namespace=namespace, keys=waiting.keys, at=at, key=key)
            self._queue.append(task)
            self.counters["l2_prefetches"] += 1
        task.join(waiting)
        task.waiters.append(waiting)
        return True

    def join(self, waiting: Waiting, entry: int) -> None:
        """A lookup waits for an entry, which may be one that is being loaded."""
        self._loads.join(waiting, entry)

    @property
    def waiting(self) -> int:
        """Lookups that wait for a task."""
        return sum(w.handle.waiting is w for task in self._tasks.values() for w in task.waiters)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Start what may start, end what is overdue."""
        self._loads.end_late(now)
        for task in [t for t in self._active if now >= t.deadline]:
            if task.stage is not Stage.OVER:
                self.counters["l2_prefetches_expired"] += 1
                self._end(task, None)
            self._active.discard(task)  # what it still loads is bounded by the budget
        self._active = {task for task in self._active if task.stage is not Stage.OVER or task.loads}
        for task in [t for t in self._active if t.stage is Stage.STARVED]:
            self._reserve(task)
        while self._queue and len(self._active) < self._most:
            task = self._queue.popleft()
            if now >= task.deadline or not task.wanted:
                self._end(task, None)
            else:
                self._active.add(task)
                self._ask_window(task)

    def next_deadline(self, now: float) -> float | None:
        if any(task.stage is Stage.STARVED and self._stale(task) for task in self._active):
            return now
        ends = [task.deadline for task in self._active]
        return min((end for end in (*ends, self._loads.next_deadline()) if end is not None), default=None)

    def split(self, sealed: list[Part]) -> list[Part]:
        """Of what was sealed: let the policy decide about what was loaded; returns the rest."""
        stored: list[Part] = []
        for part in sealed:
            entries = part.entries
            loaded = self._loaded_under[entries] == part.generations
            if not loaded.any():
                stored.append(part)
                continue
            mine = entries[loaded & self.arena.still_sealed(part)]
            going = mine[~self._kept(mine)] if len(mine) else mine
            if len(going):
                # Nobody took them up in time: they stay for the next who asks, where eviction can make room for others.
                self.arena.pass_on(going, at_once=not self.arena.orders.evicts)
            if not loaded.all():
                stored.append(part.only(~loaded))
        return stored

    def _kept(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Which of them stay; they are of one namespace."""
        table = self.arena.table
        namespace = self.arena.namespaces.get(int(table.namespace[entries[0]]))
        assert namespace is not None  # it has entries
        return self._keeps(Chunks(namespace, table.keys[entries], ""))

    def doom(self, namespace: bytes, keys: Set[bytes] | None) -> None:
        """It is being cleared (digest, b"" = all; keys None = all of it): nothing of it is loaded any more."""
        self._loads.doom(namespace, keys)

    # ---- asking ------------------------------------------------------------------------------------------------------

    def _ask_window(self, task: Task) -> None:
        keys = task.keys[task.at : task.at + WINDOW]
        found = self.arena.index.find(keys, task.namespace.id).entries
        task.source = [L1 if entry >= 0 else _NOWHERE for entry in found.tolist()]
        task.to_ask = [mover for mover in self._movers if mover.available]
        task.stage = Stage.ASKING
        self._ask_next(task)

    def _ask_next(self, task: Task) -> None:
        """Ask the next adapter for what nobody had so far; with nobody left to ask, go on."""
        missing = [i for i, source in enumerate(task.source) if source == _NOWHERE]
        while missing and task.to_ask:
            mover = task.to_ask.pop(0)
            allowed = [i for i in missing if not self._banned(task, mover, i)] if mover.bans else missing
            if mover.available and allowed:
                self._ask(task, mover, allowed)
                return
        self._reserve(task)

    @staticmethod
    def _banned(task: Task, mover: Mover, i: int) -> bool:
        """Chunk i of the window was cleared, and the adapter may still have it."""
        digest = task.namespace.digest
        return mover.bans.all_of(digest) or task.keys[task.at + i].tobytes() in mover.bans.keys_of(digest)

    def _ask(self, task: Task, mover: Mover, missing: list[int]) -> None:
        at = task.at
        chunks = b"".join(task.keys[at + i].tobytes() for i in missing)
        job = j.Find(mover.next_id(), task.deadline, task.namespace.digest, task.namespace.shards, chunks)
        mover.figures.totals["finds"] += 1
        if trace.on(log):
            trace.chunks(log, f"asked {mover.name}/{job.id} for {task.who}", task.keys[[at + i for i in missing]])
        mover.submit(job, lambda codes: self._found(task, mover, at, missing, job.deadline, codes))

    def _found(
        self, task: Task, mover: Mover, at: int, missing: list[int], deadline: float, codes: Sequence[int]
    ) -> None:
        if task.stage is not Stage.ASKING or task.at != at:
            return  # it ended meanwhile
        for i, code in zip(missing, codes, strict=True):
            if code == Code.OK:
                task.source[i] = mover.index
        expired = [i for i, code in zip(missing, codes, strict=True) if code == Code.EXPIRED]
        if expired and mover.available and deadline < task.deadline and time.monotonic() < task.deadline:
            self._ask(task, mover, expired)  # somebody waits longer by now
            return
        if trace.on(log):
            there = [at + i for i in missing if task.source[i] == mover.index]
            trace.chunks(log, f"found in {mover.name} for {task.who}", task.keys[there])
        self._ask_next(task)

    # ---- loading -----------------------------------------------------------------------------------------------------

    def _reserve(self, task: Task) -> None:
        """Everybody was asked: reserve and load the longest run that has a source."""
        namespace = task.namespace
        if not task.wanted or self.arena.namespaces.get(namespace.id) is not namespace:
            self._end(task, None)
            return
        if any(mover.bans for mover in self._movers):  # since they were asked, perhaps
            for i, source in enumerate(task.source):
                if source >= 0 and self._banned(task, self._movers[source], i):
                    task.source[i] = _NOWHERE
        if stale := self._stale(task):
            for i in stale:
                task.source[i] = _NOWHERE
            if task.to_ask:
                task.stage = Stage.ASKING
                self._ask_next(task)
                return
        run = next((i for i, source in enumerate(task.source) if source == _NOWHERE), len(task.source))
        whole = run == len(task.source)
        loads = [i for i in range(run) if task.source[i] != L1]
        if loads:
            fit = self._fitting(task, loads)
            if not fit:
                task.stage = Stage.STARVED
                return
            if fit < len(loads):
                run, whole = loads[fit], False
            refused = self._load(task, run)
            if refused >= 0:
                run, whole = refused, False
                self._end(task, run)
                return
        if run == 0:
            self._end(task, 0)
        elif run < len(task.source) and task.source[run] != _NOWHERE:
            self._move_on(task, run)  # the budget cut it: the rest is asked for again
        elif whole and task.at + run < len(task.keys):
            self._move_on(task, run)
        else:
            self._end(task, run)

    def _stale(self, task: Task) -> list[int]:
        """Chunks of the window that were found in an adapter which does not load (any more)."""
        extent = task.namespace.extent_bytes
        not_now = {mover.index for mover in self._movers if not self._loads.takes(mover, extent)}
        return [i for i, source in enumerate(task.source) if source in not_now]

    def _fitting(self, task: Task, loads: list[int]) -> int:
        """How many of these chunks of the window, in order, their adapters have room for."""
        room = {mover.index: self._loads.room(mover.index, task.namespace.extent_bytes) for mover in self._movers}
        for count, i in enumerate(loads):
            if not room[task.source[i]]:
                return count
            room[task.source[i]] -= 1
        return len(loads)

    def _load(self, task: Task, run: int) -> int:
        """Get jobs for the first ``run`` chunks of the window.  Returns the first that found no room, or -1."""
        namespace, table = task.namespace, self.arena.table
        end = task.at + run
        grant = self.arena.reserve(namespace, task.keys[:end], task.at, ALL_SHARDS)
        refused = np.flatnonzero((grant.verdicts == FULL) | (grant.verdicts == ORPHAN))
        if (grant.verdicts == FULL).any():
            self.counters["l2_loads_refused_full"] += int((grant.verdicts == FULL).sum())
        positions = np.flatnonzero(grant.verdicts == GRANTED)
        entries = grant.granted
        self._loaded_under[entries] = table.generation[entries]
        table.tiers[entries] = self._every_bit  # what an adapter had, and another lost, is not pushed back at it
        sources = [task.source[i] for i in positions.tolist()]
        start = 0
        for stop in range(1, len(entries) + 1):
            if stop == len(entries) or sources[stop] != sources[start]:
                self._loads.start(task, entries[start:stop], sources[start])
                start = stop
        return int(refused[0]) if len(refused) else -1

    # ---- moving and ending -------------------------------------------------------------------------------------------

    def _move_on(self, task: Task, run: int) -> None:
        """This window is reserved: its lookups wait for its entries now.  Go on behind it."""
        self._tasks.pop(task.key, None)
        task.at += run
        task.key = (task.namespace.id, task.keys[task.at].tobytes())
        other = self._tasks.get(task.key)
        if other is not None:  # somebody is there already, and will find the rest
            self._end(task, None)
            return
        self._tasks[task.key] = task
        waiters, task.waiters = task.waiters, []
        task.stage = Stage.QUEUED
        self._active.discard(task)
        self._queue.appendleft(task)
        for waiting in waiters:
            self._look_again(waiting)

    def _end(self, task: Task, missed: int | None) -> None:
        """The task is over.  ``missed``: the chunk of its window that could not be had."""
        if task.stage is Stage.OVER:
            return
        if missed is not None and task.at + missed < len(task.keys):
            task.note_missed(task.keys[task.at + missed].tobytes())
        if self._tasks.get(task.key) is task:
            del self._tasks[task.key]
        task.stage = Stage.OVER
        waiters, task.waiters = task.waiters, []
        if not task.loads:
            self._active.discard(task)
        for waiting in waiters:
            self._look_again(waiting)

    # ---- for checks and status ---------------------------------------------------------------------------------------

    def hold(self, writing: Counter[int]) -> None:
        """Add what open loads write, for the integrity check."""
        self._loads.hold(writing)

    def numbers(self) -> dict[str, int]:
        return {
            "prefetches": len(self._active),
            "prefetches_queued": len(self._queue),
            "bytes_loading": self._loads.bytes_loading,
        }
