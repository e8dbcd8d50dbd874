"""Extents that nobody may use yet, because somebody may still be writing to them.

quarantine   their writer died: a device may be writing for it for a moment, so they rest for QUARANTINE_S
zombies      RESERVED under an earlier daemon, by clients that still live: they rest until the last of these is gone
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvkeep.shm.slabs import Slabs
from kvkeep.shm.table import EntryTable

I64 = npt.NDArray[np.int64]

QUARANTINE_S = 1.0


class Resting:
    def __init__(self, table: EntryTable, slabs: Slabs) -> None:
        self._table, self._slabs = table, slabs
        self._quarantine: deque[tuple[float, I64]] = deque()  # (end, offsets)
        self.zombies: I64 = np.empty(0, dtype=np.int64)  # entries; nobody finds them
        self.bytes = 0

    def quarantine(self, offsets: I64, size: int, now: float) -> None:
        """``size``: bytes of all of them."""
        self._quarantine.append((now + QUARANTINE_S, offsets))
        self.bytes += size

    def next_end(self) -> float | None:
        return self._quarantine[0][0] if self._quarantine else None

    def end_quarantine(self, now: float) -> None:
        while self._quarantine and self._quarantine[0][0] <= now:
            _, offsets = self._quarantine.popleft()
            self.bytes -= int(self._slabs.extent_sizes(offsets).sum())
            self._slabs.give(offsets)

    def keep_zombies(self, entries: I64) -> None:
        """Adopted RESERVED entries; they keep their records until `bury_zombies`."""
        self._table.references[entries] = 0
        self._table.recency[entries] = 0
        self.zombies = entries
        self.bytes += int(self._table.extent_bytes[entries].sum())

    def bury_zombies(self) -> None:
        """No client of an earlier daemon is left: what they were writing is free."""
        if len(self.zombies):
            self.bytes -= int(self._table.extent_bytes[self.zombies].sum())
            offsets = self._table.offset[self.zombies].astype(np.int64)
            self._table.free(self.zombies)
            self._slabs.give(offsets)
            self.zombies = self.zombies[:0]

    def extents(self) -> tuple[I64, I64]:
        """(offsets, sizes), for checks."""
        offsets = [offsets for _, offsets in self._quarantine]
        offsets.append(self._table.offset[self.zombies].astype(np.int64))
        every = np.concatenate(offsets)
        sizes = [self._slabs.extent_sizes(part) for part in offsets]
        return every, np.concatenate(sizes)
