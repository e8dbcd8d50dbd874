"""S3-FIFO (Yang et al., SOSP 2023), with queues that chains can live in: see levels.py.

New entries wait in a small queue, a tenth of the cache; what is read there, or comes back from among the ghosts, moves
to the main queue.  One-time chunks pass through the tenth and leave the rest alone: good against scans and loops, but
a cache that is large for its load loses reuse that takes longer than the small queue lasts.
"""

from __future__ import annotations

from kvkeep.shm.levels import GivesWay, LeveledOrder

SMALL = 0.1  # the paper's, as is the one ghost per entry


class S3Fifo(LeveledOrder):
    name = "S3FIFO"

    def gives_way(self, oldest: dict[int, int]) -> GivesWay:
        excess = self.sizes[0] - int(SMALL * sum(self.sizes))
        return GivesWay(0, excess) if excess > 0 and 0 in oldest else GivesWay(max(oldest), self.sizes[1])
