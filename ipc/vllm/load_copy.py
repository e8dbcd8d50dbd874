"""The copying of one load, by the thread that owns it and by whichever others come.

All take piece by piece.  The owner ends it: nobody begins a piece after that, and it waits until the last one that was
begun has ended, however long that takes, so that no byte is written into the engine's blocks any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.ipc.vllm.groups import BlockTable
from kvkeep.ipc.vllm.memory import KVMemory
from kvkeep.ipc.vllm.metadata import LoadFailure


class LoadCopy:
    """``parts``: the blocks of each chunk of ``reading``; ``stops(copied)``: why to copy no more, asked before each
    piece with the number of chunks that are there."""

    def __init__(
        self,
        memory: KVMemory,
        reading: Any,
        parts: Sequence[BlockTable],
        after: Any,
        stops: Callable[[int], LoadFailure | None],
    ) -> None:
        self._memory, self._reading, self._parts, self._after, self._stops = memory, reading, parts, after, stops
        size = memory.at_once(memory.bytes_of(parts[0]))
        self._pieces = deque(slice(at, min(at + size, len(parts))) for at in range(0, len(parts), size))
        self._views = reading.views
        self._changed = threading.Condition()
        self._under_way = 0
        self.copied = [False] * len(parts)
        self.stopped: LoadFailure | None = None
        self._error: Exception | None = None

    def __len__(self) -> int:
        """Pieces that nobody has begun."""
        return len(self._pieces)

    def run(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Copy pieces until none is left, something stops it, or ``goes_on()`` is no more true.  Raises nothing; `end`
        does."""
        while goes_on() and (piece := self._take()) is not None:
            done = False
            try:
                with self._reading.copying() as allowed:  # not when the daemon is gone: extents may be given away
                    if allowed:
                        self._memory.scatter_all(self._views[piece], self._parts[piece], self._after)
                        done = True
            except Exception as error:
                self._error = error
            finally:
                self._give_back(piece, done)

    def end(self) -> None:
        """Raises what a copy raised."""
        with self._changed:
            self._pieces.clear()
            while self._under_way:
                self._changed.wait()
        if self._error is not None:
            raise self._error

    def _take(self) -> slice | None:
        with self._changed:
            if not self._pieces:
                return None
            try:
                self.stopped = self._stops(sum(self.copied))
            except Exception as error:
                self._error = error
            if self.stopped is not None or self._error is not None:
                self._pieces.clear()
                return None
            self._under_way += 1
            return self._pieces.popleft()

    def _give_back(self, piece: slice, done: bool) -> None:
        with self._changed:
            self._under_way -= 1
            if done:
                self.copied[piece] = [True] * (piece.stop - piece.start)
            else:
                self._pieces.clear()
            self._changed.notify_all()
