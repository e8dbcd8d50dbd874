"""What one copy thread copies with: a stream of its own, and staging memory for extents that are not pinned.

Extents in pinned memory are one batch of copies.  Others go through two halves of staging memory in turns: the thread
copies between extent and one half while the GPU copies between the other half and its pages.  (The driver would take
pageable memory, too, but each of thousands of small copies would then wait for one of its own staging buffers.)

`load` and `store` return, or raise, only when the stream is idle, whatever happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvkeep.ipc.vllm.cuda.descriptors import Copies, cut, joined
from kvkeep.ipc.vllm.cuda.driver import Driver, Event
from kvkeep.ipc.vllm.cuda.pins import PinnedRun
from kvkeep.ipc.vllm.memory import Bytes

HALF_BYTES = 8 << 20
STAGING_BYTES = 2 * HALF_BYTES  # pinned host memory per copy thread, from its first unpinned extent on

Work = Sequence[tuple[Bytes, Copies]]  # extents, and copies by offset in it
PinnedAt = Callable[[int, int], PinnedRun | None]  # address, size -> the pinned memory that it is in


class _Piece(NamedTuple):
    part: Bytes  # of an extent, HALF_BYTES or less
    copies: Copies  # by offset in the part


class _Half:
    def __init__(self, memory: Bytes) -> None:
        self.memory, self.address = memory, int(memory.ctypes.data)
        self.busy: Event | None = None

    def settle(self) -> None:
        """Wait until the GPU is done with it."""
        if self.busy is not None:
            self.busy.wait()
            self.busy = None


class Lane:
    """Belongs to the thread that made it."""

    def __init__(self, driver: Driver, pinned_at: PinnedAt) -> None:
        driver.enter_thread()
        self._driver, self._pinned_at = driver, pinned_at
        self._stream = driver.stream()
        self._halves: list[_Half] = []

    def load(self, work: Work, after: Event) -> None:
        """From extents to the GPU."""
        try:
            self._stream.wait(after)
            self._load_staged(self._submit_pinned(work, to_device=True))
        finally:
            self._drain()

    def store(self, work: Work, after: Event) -> None:
        """From the GPU to extents."""
        try:
            self._stream.wait(after)
            self._store_staged(self._submit_pinned(work, to_device=False))
        finally:
            self._drain()

    def _submit_pinned(self, work: Work, *, to_device: bool) -> Work:
        """Begin with the extents that are pinned; returns the others."""
        parts: list[Copies] = []
        rest: list[tuple[Bytes, Copies]] = []
        for extent, copies in work:
            address = int(extent.ctypes.data)
            pinned = self._pinned_at(address, extent.nbytes)
            if pinned is None:
                rest.append((extent, copies))
            else:  # the driver takes no copy that crosses from one registration to the next
                parts.append(cut(copies.moved(address), *pinned))
        if parts:
            self._copy(joined(parts), to_device=to_device)
        return rest

    def _load_staged(self, work: Work) -> None:
        for number, (part, copies) in enumerate(_pieces(work)):
            half = self._half(number)
            half.settle()
            np.copyto(half.memory[: part.nbytes], part)
            self._copy(copies.moved(half.address), to_device=True)
            half.busy = self._stream.record()

    def _store_staged(self, work: Work) -> None:
        before: tuple[_Half, _Piece] | None = None
        for number, piece in enumerate(_pieces(work)):
            half = self._half(number)
            self._copy(piece.copies.moved(half.address), to_device=False)
            half.busy = self._stream.record()
            if before is not None:
                _fetch(*before)
            before = (half, piece)
        if before is not None:
            _fetch(*before)

    def _copy(self, copies: Copies, *, to_device: bool) -> None:
        if not len(copies.sizes):
            return
        targets, sources = (copies.device, copies.host) if to_device else (copies.host, copies.device)
        self._stream.copy(targets, sources, copies.sizes, to_device=to_device)

    def _half(self, number: int) -> _Half:
        if not self._halves:
            memory = self._driver.pinned_memory(2 * HALF_BYTES)
            self._halves = [_Half(memory[:HALF_BYTES]), _Half(memory[HALF_BYTES:])]
        return self._halves[number % 2]

    def _drain(self) -> None:
        """If it raises, the stream has failed, and moves nothing any more, either."""
        for half in self._halves:
            half.busy = None
        self._stream.drain()


def _fetch(half: _Half, piece: _Piece) -> None:
    half.settle()
    np.copyto(piece.part, half.memory[: piece.part.nbytes])


def _pieces(work: Work) -> Iterator[_Piece]:
    for extent, copies in work:
        short = cut(copies, 0, HALF_BYTES)
        edges = np.arange(0, extent.nbytes + HALF_BYTES, HALF_BYTES)
        bounds = np.searchsorted(short.host, edges).tolist()
        for start, first, last in zip(edges.tolist(), bounds, bounds[1:], strict=False):
            if last > first:
                copies_here = Copies(*(column[first:last] for column in short)).moved(-start)
                yield _Piece(extent[start : start + HALF_BYTES], copies_here)
