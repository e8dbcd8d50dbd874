"""ARC (Megiddo and Modha, FAST 2003): how much room new entries get follows the ghosts that come back.

A ghost that was evicted as new says that new entries had too little room, a ghost of something read before that they
had too much.  Each moves the target by the ratio of the two ghost lists, as in the paper.  Ghosts are not kept in
lists here, so the lengths are a running count of what was evicted from where; and new entries keep a small least share.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkeep.shm.levels import NEWCOMERS, GivesWay, LeveledOrder


class Arc(LeveledOrder):
    name = "ARC"

    def __init__(self, recency: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> None:
        super().__init__(recency, keys)
        self._target = 0.0  # entries on level 0
        self._gone = [1.0, 1.0]  # ghosts of each level, together not many more than there are entries

    def came_back(self, was: npt.NDArray[np.int64]) -> None:
        again = int(np.count_nonzero(was))
        new = len(was) - again
        ratio = self._gone[1] / self._gone[0]
        self._target += new * max(1.0, ratio) - again * max(1.0, 1 / ratio)
        self._target = min(max(self._target, 0.0), float(sum(self.sizes)))

    def gone(self, level: int, count: int) -> None:
        self._gone[level] += count
        excess = sum(self._gone) / max(1, sum(self.sizes))
        if excess > 1:
            self._gone = [max(1.0, ghosts / excess) for ghosts in self._gone]

    def gives_way(self, oldest: dict[int, int]) -> GivesWay:
        excess = self.sizes[0] - int(max(self._target, NEWCOMERS * sum(self.sizes)))
        return GivesWay(0, excess) if excess > 0 and 0 in oldest else GivesWay(max(oldest), self.sizes[1])
