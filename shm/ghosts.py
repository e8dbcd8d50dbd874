"""What was evicted lately: for a key, how it stood when it went and when it had last been used.

A policy that forgets what it evicts cannot tell a chunk that comes back from one that comes for the first time.  A
ghost is 16 bytes in a direct-mapped table: a newer ghost takes the place of an older one, and two keys share a place
only by chance, which costs a little judgement and nothing else.  The table is sized by the entries that there are when
something is evicted, not by the records that there could be; when it has to grow, the ghosts are forgotten.

    word    28 bits of the key | 4 bits level | 32 bits number of the eviction
    stamp   of the last use

A ghost counts for ``factor`` times as many evictions as there are entries.  Chunk keys are hashes, so bits of the key
are good fingerprints as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_TAG = np.uint64(0xFFFFFFF << 36)
_LEVEL_SHIFT, _LEVEL_MASK = np.uint64(32), np.uint64(15)
_LEAST_SLOTS = 64
_NUMBER = np.uint64(0xFFFFFFFF)


class Ghosts:
    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._evictions = 1
        self._size(_LEAST_SLOTS)

    def _size(self, slots: int) -> None:
        self._words = np.zeros(slots, dtype=np.uint64)
        self._stamps = np.zeros(slots, dtype=np.uint64)
        self._mask = np.uint64(slots - 1)

    def remember(self, words: U64, level: int, stamp: int, entries: int) -> None:
        """Entries that go now, all of one level and about one age.  ``words``: one of each key."""
        if entries * self._factor > len(self._words):
            self._size(1 << (int(entries * self._factor) - 1).bit_length())
        at = words & self._mask
        self._evictions += len(words)
        number = np.uint64(self._evictions & int(_NUMBER))
        self._words[at] = (words & _TAG) | (np.uint64(level) << _LEVEL_SHIFT) | number
        self._stamps[at] = stamp

    def recall(self, words: U64, entries: int) -> tuple[I64, U64]:
        """(level, -1 = no ghost; stamp) per key.  Ghosts that are found are gone.  ``entries`` are in the cache now."""
        at = words & self._mask
        found = self._words[at]
        age = (np.uint64(self._evictions) - found) & _NUMBER
        known = ((found ^ words) & _TAG == 0) & (age <= np.uint64(self._factor * entries)) & (found != 0)
        level = np.where(known, (found >> _LEVEL_SHIFT) & _LEVEL_MASK, 0).astype(np.int64)
        level[~known] = -1
        self._words[at[known]] = 0
        return level, self._stamps[at]
