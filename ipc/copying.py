"""Copies of many bytes, split over threads: one core does not fill the memory's bandwidth.

The helpers of a copy live no longer than it does: whoever asked for it holds the extents, and gives them back when this
returns or raises.  So it returns or raises only after the last byte, even when signals interrupt it.

A signal handler may raise after any call of the main thread, also inside `threading`: a `Thread` that was started is
not known to be, an `Event` or a `Condition` stays locked.  So helpers are started and awaited with single calls of C,
and what has happened is read from where those leave it:

    nobody ──claim──► "helper": copies, finished, ends
        └────claim──► "caller": it never begins
"""

from __future__ import annotations

import _thread
import os
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
    if threads < 2:
        _copy(deque(pairs))
    else:
        _copy_with(threads - 1, deque(_pieces(pairs)))


def _copy_with(others: int, pieces: deque[Pair]) -> None:
    helpers = [_Helper(pieces) for _ in range(others)]
    try:
        try:
            for helper in helpers:
                helper.start()
            _copy(pieces)
        finally:
            _finish(helpers, pieces)
    finally:
        _finish(helpers, pieces)  # again, for a signal that came just before the first began, or two at once during it
    for helper in helpers:
        if helper.error is not None:
            raise helper.error


def _finish(helpers: Sequence[_Helper], pieces: deque[Pair]) -> None:
    """When this returns, or raises what interrupted it, no helper writes any more, nor ever will."""
    interrupted: BaseException | None = None
    while True:
        try:
            pieces.clear()
            for helper in helpers:
                helper.end()
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


class _Helper:
    def __init__(self, pieces: deque[Pair]) -> None:
        self.error: BaseException | None = None
        self._pieces = pieces
        claims: dict[str, str] = {}
        self._claim = claims.setdefault  # atomic, and the same answer however often it is asked
        self._finished = False
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def start(self) -> None:
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads for this process: nobody claims it until `end` does
            pass

    def end(self) -> None:
        """Wait for its last byte, or see to it that it never begins.  May be interrupted, and called again."""
        if self._claim("by", "caller") == "helper":
            while not self._finished:
                self._ended.acquire()

    def _run(self) -> None:
        if self._claim("by", "helper") == "helper":
            try:
                _copy(self._pieces)
            except BaseException as error:
                self.error = error
            finally:
                self._finished = True
                self._ended.release()


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
