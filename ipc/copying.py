"""Copies of many bytes, split over threads: one core does not fill the memory's bandwidth.

The helpers of a copy live no longer than it does: whoever asked for it holds the extents, and gives them back when this
returns or raises.  So it returns or raises only after the last byte, even when a signal interrupts it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from kvkeep.ipc.buffers import Bytes

SPLIT_BYTES = 16 << 20  # a thread costs some 0.1 ms to start, this much takes 3 ms to copy
DEFAULT_THREADS = 2
PIECE_BYTES = 8 << 20

Pair = tuple[Bytes, Bytes]  # (target, source), flat, of equal size


def copy_all(pairs: Sequence[Pair], threads: int = DEFAULT_THREADS) -> None:
    """Copy each source into its target, with up to ``threads`` threads when there is enough to copy.  They take piece
    by piece, so that one that gets no core in time holds the others up for no more than one.
    Raises ValueError, before anything is copied, if a source and its target differ in size."""
    total = 0
    for target, source in pairs:
        if source.size != target.size:
            raise ValueError(f"a source of {source.size} bytes for a target of {target.size}")
        total += target.size
    threads = min(threads, _cores()) if total >= SPLIT_BYTES else 1
    pieces = deque(pairs if threads < 2 else _pieces(pairs))
    helpers = [_Helper(pieces) for _ in range(threads - 1)]
    try:
        _copy(pieces)
    finally:
        interrupted: BaseException | None = None
        for helper in helpers:
            while not helper.ended.is_set():
                try:
                    helper.ended.wait()
                except BaseException as error:  # KeyboardInterrupt: not before the helper is done
                    pieces.clear()
                    interrupted = error
        if interrupted is not None:
            raise interrupted
    for helper in helpers:
        if helper.error is not None:
            raise helper.error


class _Helper:
    def __init__(self, pieces: deque[Pair]) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._pieces = pieces
        try:
            threading.Thread(target=self._run, name="kvkeep-copy", daemon=True).start()
        except RuntimeError:  # no more threads for this process
            self.ended.set()

    def _run(self) -> None:
        try:
            _copy(self._pieces)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def _copy(pieces: deque[Pair]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(target, source)


def _pieces(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for target, source in pairs:
        for at in range(0, target.size, PIECE_BYTES):
            yield target[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
