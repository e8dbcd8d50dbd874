"""Chunks that wait for other ranks: some shards have come, the others may never.

    wait ─► queued, for INCOMPLETE_S ──end, or end_early: the oldest first──► looked at ─► given up
              ▲                                                                 │  └─► left alone
              └──── in use, and under pressure (end_early): keeps its place ◄───┘

In use is what is referenced: by a store of the same chain that is under way, be it the one that wants room, which would
otherwise get the record of its own head for its tail.

Left alone is what is sealed, free or another chunk by now; what is given up already; what somebody writes at the moment
(it is queued again when that shard is committed); and what has all its shards and only waits for its head.

A place in the queue owns nothing: it is an entry and the generation under which it began to wait.  All wait equally
long, so the queue is in the order of its deadlines.  Who writes what, and what giving up takes, the arena knows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvkeep.shm.layout import State
from kvkeep.shm.table import EntryTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Place = tuple[float, I64, U32]  # end, entries, generations

INCOMPLETE_S = 60.0  # some ranks stored their shard of a chunk, the others never came: given up after this,
INCOMPLETE_UNDER_PRESSURE_S = 2.0  # ... or after this when a store finds no room otherwise


class Incomplete:
    """``busy``: an entry is being written, or was given up.  ``give_up``: it, and what hangs on it, will never be
    complete."""

    def __init__(
        self,
        table: EntryTable,
        counters: Counter[str],
        *,
        busy: Callable[[int], bool],
        give_up: Callable[[int], None],
    ) -> None:
        self._table, self._counters = table, counters
        self._busy, self._give_up = busy, give_up
        self._queue: deque[Place] = deque()

    def wait(self, entries: I64, now: float) -> None:
        """A shard of ``entries`` was committed: those that are not sealed by that wait for the other shards."""
        table = self._table
        entries = entries[(table.state[entries] == State.RESERVED) & (table.shards[entries] > 1)]
        if len(entries):
            self._queue.append((now + INCOMPLETE_S, entries, table.generation[entries].copy()))

    def next_end(self) -> float | None:
        return self._queue[0][0] if self._queue else None

    def end(self, now: float) -> None:
        """Give up what has waited long enough."""
        while self._queue and self._queue[0][0] <= now:
            self._end_oldest()

    def end_early(self, now: float) -> bool:
        """The same for a store that finds no room, until there is some; what is in use is spared, also what is due.
        True = something was given up."""
        due = now + INCOMPLETE_S - INCOMPLETE_UNDER_PRESSURE_S
        spared: list[Place] = []
        given_up = False
        while self._queue and self._queue[0][0] <= due and not given_up:
            given_up = self._end_oldest(spared)
        self._queue.extendleft(reversed(spared))  # `end` is due for them as before
        return given_up

    def _end_oldest(self, spared: list[Place] | None = None) -> bool:
        """Those who began to wait together, or without what is in use, which goes to ``spared``.  True = something was
        given up."""
        table = self._table
        end, entries, generations = self._queue.popleft()
        given_up = False
        for entry, generation in zip(entries.tolist(), generations.tolist(), strict=True):
            if not table.is_reserved(entry, generation) or self._busy(entry):
                continue
            if int(table.shard_mask[entry]) == (1 << int(table.shards[entry])) - 1:
                continue
            if spared is not None and table.references[entry]:
                spared.append((end, np.array([entry], dtype=np.int64), np.array([generation], dtype=np.uint32)))
                continue
            given_up = True
            self._counters["entries_incomplete"] += 1
            self._give_up(entry)
        return given_up
