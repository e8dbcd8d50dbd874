"""Eviction orders with levels: what proved useful is kept apart from what has just come.

An entry is new on level 0 and rises when it is read again, or when it comes back soon after it was evicted (ghosts.py).
Each level is a log in order of last use (recency.py).  Who gives way, the policy decides by level; within a level the
least recent goes.

Along every chain the tail goes first.  Three things see to that, whatever the policy chooses:

* a touch covers a chain from its root, so levels never rise towards the tail (`touch` enforces it for ghosts too);
* within a level, a head's stamp is above its tail's, as in any log;
* across levels: what hangs on an entry is on its level or below, with a lower stamp.  So from a level only those
  entries go that are older than everything on the levels below; where that forbids it, the lower level gives way.

That is why the queues here are ordered by last use where the papers have first-in-first-out.  Stores are no reads: a
request that stores its chain piece by piece touches its head many times and proves nothing by it.

A touch is a fixed number of array operations.  Only the stamps outlive the daemon: after an adoption all entries are
on level 0 in their old order.  Not thread-safe; owned by the control thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.shm.ghosts import Ghosts
from kvkeep.shm.recency import NEVER, Evictable, LruOrder

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

NEWCOMERS = 1 / 32  # of the entries: what was just stored is not squeezed out before anybody could look
_BATCH_SHARE = 64  # the choice of a level is made anew after 1/64 of the entries, but
_BATCH_LEAST = 16  # not more often than this


class GivesWay(NamedTuple):
    level: int
    at_most: int  # entries, before the policy wants to be asked again


class LeveledOrder:
    """The base of policies: they say how many levels and ghosts there are, and which level gives way."""

    name = ""
    evicts = True
    levels = 2
    ghosts = 1.0  # remembered evictions per entry

    def __init__(self, recency: U64, keys: U64) -> None:
        """Columns of the entry table: (n) stamps, (n, 4) keys."""
        self._recency = recency
        self._words = keys[:, 1]  # as fingerprints; the index uses another word
        self._level: U8 = np.zeros(len(recency), dtype=np.uint8)
        self._logs = [LruOrder(recency) for _ in range(self.levels)]
        self._ghosts = Ghosts(self.ghosts)
        self._top = np.uint8(self.levels - 1)
        self.sizes = [0] * self.levels
        self.now = 0  # the highest stamp so far

    # ---- what a policy is ------------------------------------------------------------------------------------------

    def gives_way(self, oldest: dict[int, int]) -> GivesWay:
        """``oldest`` has the levels that hold something that could go, ascending, each with its least stamp."""
        raise NotImplementedError

    def noted(self, was: U8, since: U64) -> None:
        """Entries of these levels, last used at these stamps, are used again: read, or stored after an eviction."""

    def came_back(self, was: I64) -> None:
        """Ghosts of these levels are stored again; called before `noted`."""

    def gone(self, level: int, count: int) -> None:
        """So many entries of the level were evicted."""

    def entered(self, counts: list[int]) -> None:
        """So many entries began another life on each level."""

    # ---- the interface of an order ---------------------------------------------------------------------------------

    def touch(self, chain: I64, stamps: U64, *, read: bool = True, tenant: int = 0) -> None:
        """``chain`` root to tail with its `Clock.stamps`.  ``read``: somebody found it, as opposed to storing it."""
        self.now = int(stamps[0])
        since = self._recency[chain]
        was = self._level[chain]
        fresh = 0 if since.all() else int(np.count_nonzero(since == 0))
        if fresh:
            level = self._place(chain, since, was, read)
        elif not read:
            self._recency[chain] = stamps
            self._append(chain, stamps, was)
            return
        else:
            self.noted(was, since)
            level = was if was[-1] == self._top else np.minimum(was + np.uint8(1), self._top)
            self.entered(self._count(level))
        self._recency[chain] = stamps
        if level is not was:  # else all are on top already
            self._level[chain] = level
            before = self._count(was[since != 0] if fresh else was)
            self.sizes = [n + k - b for n, k, b in zip(self.sizes, self._count(level), before, strict=True)]
        self._append(chain, stamps, level)

    def _place(self, chain: I64, since: U64, was: U8, read: bool) -> U8:
        """Levels for a chain that has new entries."""
        new = since == 0
        at = np.flatnonzero(new)
        level = np.minimum(was + np.uint8(1), self._top) if read else was.copy()
        ghost, stamps = self._ghosts.recall(self._words[chain[at]], sum(self.sizes))
        back = ghost >= 0
        if back.any():
            self.came_back(ghost[back])
            self.noted(ghost[back].astype(np.uint8), stamps[back])
        if read and len(at) < len(chain):
            self.noted(was[~new], since[~new])
        level[at] = np.minimum(ghost + 1, int(self._top))
        raised: U8 = np.maximum.accumulate(level[::-1])[::-1]
        self.entered(self._count(raised if read else raised[at]))
        return raised

    def _count(self, level: U8) -> list[int]:
        if len(level) and level[0] == level[-1]:  # levels fall along a chain
            counts = [0] * self.levels
            counts[int(level[0])] = len(level)
            return counts
        result: list[int] = np.bincount(level, minlength=self.levels).tolist()
        return result

    def _append(self, chain: I64, stamps: U64, level: U8) -> None:
        entries = chain.astype(np.uint32)
        if level[0] == level[-1]:
            self._logs[int(level[0])].append(entries[::-1], stamps[::-1])
            return
        first = 0
        for which in range(int(level[0]), -1, -1):
            end = first + int(np.count_nonzero(level == which))
            if end > first:
                self._logs[which].append(entries[first:end][::-1], stamps[first:end][::-1])
            first = end

    def pop(self, want: int, evictable: Evictable) -> I64:
        """Up to ``want`` entries to evict, of every chain the tail first.  They leave the order."""
        parts: list[I64] = []
        stuck = False
        while want > 0:
            stamps = [log.candidate() for log in self._logs]
            oldest = {level: stamp for level, stamp in enumerate(stamps) if stamp}
            if not oldest:
                break
            lowest = next(iter(oldest))
            level, at_most = (lowest, want) if stuck or len(oldest) == 1 else self.gives_way(oldest)
            before = NEVER
            lower = min(((oldest[low], low) for low in oldest if low < level), default=(NEVER, level))
            if lower[0] < oldest[level]:  # what is older than it on a level below goes first, and no more than that
                before, level = oldest[level], lower[1]
                before = min([before, *(oldest[low] for low in oldest if low < level)])
            elif level != lowest:
                before = lower[0]
            batch = max(1, min(want, at_most, max(_BATCH_LEAST, sum(self.sizes) // _BATCH_SHARE)))
            victims = self._logs[level].pop(batch, evictable, before)
            stuck = not len(victims) and self._logs[level].candidate() == stamps[level]
            if len(victims):
                self._ghosts.remember(self._words[victims], level, stamps[level], sum(self.sizes))
                self.sizes[level] -= len(victims)
                self.gone(level, len(victims))
                parts.append(victims)
                want -= len(victims)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def leave(self, entries: I64) -> None:
        """These are about to be freed by somebody else than `pop`."""
        counts = np.bincount(self._level[entries[self._recency[entries] != 0]], minlength=self.levels).tolist()
        self.sizes = [n - k for n, k in zip(self.sizes, counts, strict=True)]

    def released(self) -> None:
        for log in self._logs:
            log.released()

    def oldest(self) -> int:
        return min((stamp for stamp in (log.oldest() for log in self._logs) if stamp), default=0)

    def squeeze(self, live: int) -> bool:
        return any(log.squeeze(size) for log, size in zip(self._logs, self.sizes, strict=True))

    def adopt(self, entries: I64, stamps: U64) -> None:
        self._level[entries] = 0
        self.sizes[0] += len(entries)
        self.now = max(self.now, int(stamps[-1])) if len(stamps) else self.now
        self._logs[0].adopt(entries, stamps)

    def members(self) -> I64:
        return np.concatenate([log.members() for log in self._logs])
