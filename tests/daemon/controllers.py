"""What the tests of the L2 controllers share: an arena in ordinary memory, and movers that keep what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvkeep.daemon.bans import Bans
from kvkeep.daemon.mover_health import Figures
from kvkeep.l2 import jobs as j
from kvkeep.shm.arena import Arena
from kvkeep.shm.namespaces import Namespace


class FakeMover:
    """Has no process: the test answers its jobs."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.bit = index, 1 << index
        self.name = self.label = f"l2-{index}"
        self.bans, self.figures = Bans(), Figures()
        self.available = True
        self.puts = self.putting = 0
        self.jobs: list[Any] = []
        self._done: dict[int, Callable[[Sequence[int]], None]] = {}
        self._ids = iter(range(1, 1 << 30))

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, job: Any, done: Callable[[Sequence[int]], None], *, late: Any = None, nbytes: int = 0) -> None:
        self.jobs.append(job)
        self._done[job.id] = done
        self.puts += isinstance(job, j.Put)

    def answer(self, job: Any, code: j.Code) -> None:
        """The same for every chunk."""
        self.puts -= isinstance(job, j.Put)
        self._done.pop(job.id)([code] * j.chunk_count(job))


def keys_of(job: j.Chunks) -> set[bytes]:
    return {job.chunks[at : at + 32] for at in range(0, len(job.chunks), 32)}


def commit(arena: Arena, granted: Any) -> None:
    arena.commit(granted, 0, np.ones(len(granted), dtype=bool), None)


def namespaces(arena: Arena, size: int) -> tuple[Namespace, Namespace]:
    """Two models whose chunks have the same size."""
    return (
        arena.namespaces.add(1, b'{"model":"a"}', 1, size),
        arena.namespaces.add(2, b'{"model":"b"}', 1, size),
    )
