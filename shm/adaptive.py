"""The adaptive policy: what is least likely to be used soon goes, by what this cache has seen itself.

Entries stand on levels by how often they were read (once stored, read once, twice, more).  For each level it is counted
after what time entries were used again, evicted ones included as far as ghosts reach.  From that, for the oldest entry
of each level, given its age, follows the best rate of hits that keeping it can promise:

    worth(level, age) = max over horizons h of  P(used again before age + h | not until age) / expected time it is kept

which is the Gittins index of the entry, and the hit density of LHD (Beckmann et al., NSDI 2018) with the best horizon.
The level whose oldest entry is worth least gives way.  So nothing is set by hand about how the room is shared: with a
cache that is small for its load, chunks that come once pass quickly, since their first reuse would come too late
anyway; with a large one they stay, and the order approaches plain LRU.  While nothing is known yet, it is LRU.

Time is measured in stamps, that is in touched entries, in half octaves.  The counts lose half their weight while the
cache is touched through eight times: that is twice as far as the ghosts reach, and a changed load is learnt within a
few turnovers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvkeep.shm.levels import NEWCOMERS, GivesWay, LeveledOrder

_PER_OCTAVE = 2
_BUCKETS = 40 * _PER_OCTAVE  # ages up to 2**40 touched entries
_SAMPLES = 4  # of a chain whose entries are of several ages
_EPOCH_LEAST = 1024  # touched entries between two looks at the counts, at least; else half the cache
_HALF_LIFE = 8.0  # of the counts, in times that the cache is touched through

_EDGES = 2.0 ** (np.arange(_BUCKETS + 1) / _PER_OCTAVE) - 1
_WIDTH = np.diff(_EDGES)


class Adaptive(LeveledOrder):
    name = "Adaptive"
    levels = 4
    ghosts = 4.0

    def __init__(self, recency: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> None:
        super().__init__(recency, keys)
        self._lives = [0.0] * self.levels
        self._used_again = [[0.0] * _BUCKETS for _ in range(self.levels)]
        self._learnt_at = 0
        self._chance = np.zeros((self.levels, _BUCKETS + 1))  # of being used before the age of that edge
        self._kept = np.zeros((self.levels, _BUCKETS + 1))  # expected time until then
        self._worth: dict[tuple[int, int], float] = {}
        self._turn = 0

    def noted(self, was: npt.NDArray[np.uint8], since: npt.NDArray[np.uint64]) -> None:
        newest, oldest = _bucket(self.now - int(since[0])), _bucket(self.now - int(since[-1]))
        if newest == oldest and was[0] == was[-1]:  # ages rise and levels fall along a chain: all are alike
            self._used_again[int(was[0])][newest] += len(was)
            return
        step = -(-len(was) // _SAMPLES)
        self._turn = (self._turn + 1) % step
        weight = len(was) / len(range(self._turn, len(was), step))
        levels, stamps = was[self._turn :: step].tolist(), since[self._turn :: step].tolist()
        for level, stamp in zip(levels, stamps, strict=True):
            self._used_again[level][_bucket(self.now - stamp)] += weight

    def entered(self, counts: list[int]) -> None:
        self._lives = [n + k for n, k in zip(self._lives, counts, strict=True)]
        if self.now - self._learnt_at >= max(_EPOCH_LEAST, sum(self.sizes) // 2):
            self._learn()

    def _learn(self) -> None:
        fade = 0.5 ** ((self.now - self._learnt_at) / (_HALF_LIFE * max(1, sum(self.sizes))))
        self._learnt_at = self.now
        used = np.array(self._used_again)
        lives = np.maximum(np.maximum(np.array(self._lives), used.sum(axis=1)), 1.0)
        np.cumsum(used / lives[:, None], axis=1, out=self._chance[:, 1:])
        still = 1 - (self._chance[:, 1:] + self._chance[:, :-1]) / 2
        np.cumsum(still * _WIDTH, axis=1, out=self._kept[:, 1:])
        self._worth.clear()
        self._lives = [n * fade for n in self._lives]
        self._used_again = (used * fade).tolist()

    def worth(self, level: int, age: int) -> float:
        bucket = _bucket(age)
        known = self._worth.get((level, bucket))
        if known is None:
            chance, kept = self._chance[level], self._kept[level]
            gain, time = chance[bucket + 1 :] - chance[bucket], kept[bucket + 1 :] - kept[bucket]
            known = self._worth[level, bucket] = float(np.max(gain / np.maximum(time, 1e-9)))
        return known

    def gives_way(self, oldest: dict[int, int]) -> GivesWay:
        spare = self.sizes[0] - int(NEWCOMERS * sum(self.sizes))
        least: tuple[float, int, int] | None = None
        below = self.now + 1
        for level, stamp in oldest.items():
            if (level or spare > 0) and stamp < below:  # else a level below would have to go first
                worth = (self.worth(level, self.now - stamp), stamp, level)
                least = worth if least is None else min(least, worth)
            below = min(below, stamp)
        level = least[2] if least else max(oldest)
        return GivesWay(level, self.sizes[level] if level else max(spare, 1))


def _bucket(age: int) -> int:
    return min(_BUCKETS - 1, int(_PER_OCTAVE * math.log2(max(age, 0) + 1)))
