"""Least recently used order, kept as a log.

A touch of a chain of n chunks must cost a few array operations, not n list splices.  So a touch *appends*: the entry
table's ``recency`` column gets a new stamp per entry, and (entry, stamp) goes to the end of a log.  A log record whose
stamp is no longer the entry's stamp is stale and skipped when met; the first record that is not stale is the least
recently used entry.  Stale records are squeezed out segment by segment, a bounded step at a time.

Heads outlive tails by the stamps themselves: a touch covers a chain from its root and gives the root the highest stamp
(`Clock.stamps`), so along every chain, whatever mixture of partial touches happened, a head's stamp is above all stamps
of its tail; eviction in stamp order takes tails first.

Records of entries that are met but cannot go now (referenced, being written) move to a *held* list, older than the log.
It is looked through again once something was released, or sealed.

Other policies are made of several such logs over one ``recency`` column, see levels.py; policies.py has them by name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Evictable = Callable[[I64], npt.NDArray[np.bool_]]

SEGMENT = 8192
_SQUEEZE_SLACK = 65536
NEVER = (1 << 63) - 1  # above every stamp


class Clock:
    """The recency clock of one arena: grows by one per touched entry, across all classes, so that ages compare."""

    def __init__(self, now: int = 1) -> None:
        self.now = now

    def stamps(self, n: int) -> U64:
        """n stamps for a chain in root-to-tail order: descending, all above every earlier stamp."""
        self.now += n
        return np.arange(self.now, self.now - n, -1, dtype=np.uint64)


class _Segment:
    __slots__ = ("end", "entries", "first", "stamps")

    def __init__(self, capacity: int = SEGMENT) -> None:
        self.entries = np.empty(capacity, dtype=np.uint32)
        self.stamps = np.empty(capacity, dtype=np.uint64)
        self.first = 0
        self.end = 0


class LruOrder:
    """The order of one size class.  ``recency`` is the column of the entry table; 0 = not in any order."""

    name = "LRU"
    evicts = True

    def __init__(self, recency: U64, keys: U64 | None = None) -> None:
        self._recency = recency
        self._segments: list[_Segment] = [_Segment()]
        self._held_entries = np.empty(0, dtype=np.uint32)
        self._held_stamps = np.empty(0, dtype=np.uint64)
        self._held_changed = False
        self._squeeze_at = 0
        self.records = 0  # in the log, stale ones included

    def touch(self, chain: I64, stamps: U64, *, read: bool = True, tenant: int = 0) -> None:
        """``chain`` root to tail with its `Clock.stamps`: new entries and known ones alike."""
        self._recency[chain] = stamps
        self.append(chain[::-1].astype(np.uint32), stamps[::-1])

    def leave(self, entries: I64) -> None:
        """These are about to be freed by somebody else than `pop`.  A log finds out by itself."""

    def append(self, entries: npt.NDArray[np.uint32], stamps: U64) -> None:
        """The log's part of a touch, in ascending order of stamp; the ``recency`` column has the stamps already."""
        self.records += len(entries)
        done = 0
        while done < len(entries):
            segment = self._segments[-1]
            room = len(segment.entries) - segment.end
            if not room:
                self._segments.append(_Segment())
                continue
            k = min(room, len(entries) - done)
            segment.entries[segment.end : segment.end + k] = entries[done : done + k]
            segment.stamps[segment.end : segment.end + k] = stamps[done : done + k]
            segment.end += k
            done += k

    def released(self) -> None:
        """Something lost a reference, or was sealed: held entries may go now."""
        self._held_changed = True

    def pop(self, want: int, evictable: Evictable, before: int = NEVER) -> I64:
        """Up to ``want`` entries to evict, least recent first.  They leave the order (their recency becomes 0).

        ``before``: only entries with a lower stamp."""
        parts: list[I64] = []
        if self._held_changed and len(self._held_entries):
            entries, stamps = self._live(self._held_entries, self._held_stamps)
            may = evictable(entries.astype(np.int64))
            going = np.flatnonzero(may & (stamps < np.uint64(before)))[:want]
            stay = np.ones(len(entries), dtype=bool)
            stay[going] = False
            self._held_entries, self._held_stamps = entries[stay], stamps[stay]
            self._held_changed = len(going) < int(may.sum())
            parts.append(entries[going].astype(np.int64))
            want -= len(going)
        look = max(64, want)
        while want > 0:
            segment = self._segments[0]
            if segment.first == segment.end:
                if len(self._segments) == 1:
                    segment.first = segment.end = 0
                    break
                del self._segments[0]
                self._squeeze_at = max(0, self._squeeze_at - 1)
                continue
            k = min(segment.end - segment.first, look)
            if int(segment.stamps[segment.first + k - 1]) >= before:
                k = int(np.searchsorted(segment.stamps[segment.first : segment.first + k], np.uint64(before)))
                if not k:
                    break
            look *= 2  # a long stale stretch is crossed in few steps
            part = slice(segment.first, segment.first + k)
            live = np.flatnonzero(self._recency[segment.entries[part]] == segment.stamps[part])
            entries = segment.entries[part][live]
            may = evictable(entries.astype(np.int64))
            going = np.flatnonzero(may)
            if len(going) > want:  # stop right after the last one taken
                going = going[:want]
                cut = int(going[-1]) + 1
                k = int(live[cut - 1]) + 1
                live, entries, may = live[:cut], entries[:cut], may[:cut]
            if not may.all():
                stay = ~may
                self._held_entries = np.concatenate((self._held_entries, entries[stay]))
                self._held_stamps = np.concatenate((self._held_stamps, segment.stamps[part][live[stay]]))
            parts.append(entries[going].astype(np.int64))
            want -= len(going)
            segment.first += k
            self.records -= k
        victims = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        self._recency[victims] = 0
        return victims

    def oldest(self) -> int:
        """Stamp of the least recent entry, held ones included; 0 = nothing is in the order."""
        entries, stamps = self._live(self._held_entries, self._held_stamps)
        self._held_entries, self._held_stamps = entries, stamps
        return int(stamps[0]) if len(stamps) else self._oldest_logged()

    def candidate(self) -> int:
        """Stamp of the first entry that `pop` would look at; 0 = there is none."""
        return self.oldest() if self._held_changed else self._oldest_logged()

    def _oldest_logged(self) -> int:
        while True:
            segment = self._segments[0]
            part = slice(segment.first, segment.end)
            live = self._recency[segment.entries[part]] == segment.stamps[part]
            at = int(live.argmax()) if len(live) else 0
            found = bool(len(live)) and bool(live[at])
            passed = at if found else len(live)  # stale records, not to be looked at again
            segment.first += passed
            self.records -= passed
            if found:
                return int(segment.stamps[segment.first])
            if len(self._segments) == 1:
                return 0
            del self._segments[0]
            self._squeeze_at = max(0, self._squeeze_at - 1)

    def _live(self, entries: npt.NDArray[np.uint32], stamps: U64) -> tuple[npt.NDArray[np.uint32], U64]:
        live = self._recency[entries] == stamps
        return (entries, stamps) if live.all() else (entries[live], stamps[live])

    def squeeze(self, live: int) -> bool:
        """One bounded step of dropping stale records, if there are many for ``live`` entries.  True = worth another."""
        if self.records <= 2 * live + _SQUEEZE_SLACK or len(self._segments) < 2:
            return False
        if self._squeeze_at >= len(self._segments) - 1:
            self._squeeze_at = 0
        segment = self._segments[self._squeeze_at]
        entries, stamps = segment.entries[segment.first : segment.end], segment.stamps[segment.first : segment.end]
        kept_entries, kept_stamps = self._live(entries, stamps)
        self.records -= len(entries) - len(kept_entries)
        before = self._segments[self._squeeze_at - 1] if self._squeeze_at else None
        if before is not None and before.end + len(kept_entries) <= len(before.entries):
            before.entries[before.end : before.end + len(kept_entries)] = kept_entries
            before.stamps[before.end : before.end + len(kept_entries)] = kept_stamps
            before.end += len(kept_entries)
            del self._segments[self._squeeze_at]
            return True
        segment.entries[: len(kept_entries)] = kept_entries.copy()
        segment.stamps[: len(kept_entries)] = kept_stamps.copy()
        segment.first, segment.end = 0, len(kept_entries)
        self._squeeze_at += 1
        return True

    def adopt(self, entries: I64, stamps: U64) -> None:
        """Entries with the stamps they already have, in ascending order of stamp."""
        self.append(entries.astype(np.uint32), stamps)

    def members(self) -> I64:
        """Every entry in the order, least recent first.  For checks and listings; O(log)."""
        entries, _ = self._live(self._held_entries, self._held_stamps)
        parts = [entries]
        for s in self._segments:
            parts.append(self._live(s.entries[s.first : s.end], s.stamps[s.first : s.end])[0])
        return np.concatenate(parts).astype(np.int64)


class NoEviction(LruOrder):
    """Keeps the order, for listings, but never gives anything up: a full L1 refuses stores."""

    name = "noop"
    evicts = False

    def pop(self, want: int, evictable: Evictable, before: int = NEVER) -> I64:
        return np.empty(0, dtype=np.int64)
