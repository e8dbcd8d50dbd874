"""Batches of positioned reads and writes, many in flight at once.

A *transfer* is a run of bytes of the medium and the pieces of memory that it comes from or goes to, by address.  An
engine carries out a batch of transfers with up to ``queue_depth`` of them in flight, and says for each 0 or an errno;
it raises nothing for what the medium does.  Large transfers are cut, so that one large object also gets depth.  A short
read or write is continued where it stopped; one that makes no progress is EIO.

`run` returns only when nothing is in flight any more: the memory is the caller's again, whatever happened.

Two engines, the same contract: io_uring (raw_uring) where the kernel lets us, else preadv/pwritev in threads.
Both are used from many threads at once.
"""

from __future__ import annotations

import abc
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

CUT = 1 << 20  # bytes of one request; a multiple of every block size
MAX_PIECES = 8
MAX_THREADS = 64
_FAILURES_KEPT = 1024  # of flushes: more than threads can still be about to ask for

Piece = tuple[int, int]  # address, length


class Transfer(NamedTuple):
    offset: int
    pieces: tuple[Piece, ...]


class Part(NamedTuple):
    """One request: at most CUT bytes of one transfer of the batch."""

    owner: int
    offset: int
    pieces: tuple[Piece, ...]
    length: int


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer lies.  The caller keeps it alive."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if len(view) else 0


def advance(pieces: tuple[Piece, ...], done: int) -> tuple[Piece, ...]:
    """``pieces`` without their first ``done`` bytes."""
    rest: list[Piece] = []
    for address, length in pieces:
        skip = min(done, length)
        done -= skip
        if length > skip:
            rest.append((address + skip, length - skip))
    return tuple(rest)


def _head(pieces: tuple[Piece, ...], want: int) -> tuple[Piece, ...]:
    first: list[Piece] = []
    for address, length in pieces:
        if not want:
            break
        first.append((address, min(length, want)))
        want -= min(length, want)
    return tuple(first)


def cut(transfers: Sequence[Transfer], limit: int = CUT) -> list[Part]:
    parts: list[Part] = []
    for owner, (offset, pieces) in enumerate(transfers):
        left = sum(length for _, length in pieces)
        if left <= limit:
            parts.append(Part(owner, offset, pieces, left))
            continue
        while left:
            # A small rest (a header, a tail block) travels with its neighbour.
            take = left if left <= limit + limit // 4 else limit
            parts.append(Part(owner, offset, _head(pieces, take), take))
            pieces = advance(pieces, take)
            offset, left = offset + take, left - take
    return parts


class Memory:
    """Page-aligned private memory, for blocks that have no place in the caller's buffers."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        self.view = memoryview(self._map)
        self.address = address_of(self.view)


Finished = Callable[[int, int], None]  # transfer, 0 or errno
Meanwhile = Iterator[object]  # work in steps of about a millisecond


class Progress:
    """Which transfers of a batch are through, and what came of them."""

    def __init__(self, parts: Sequence[Part], transfers: int) -> None:
        self.results = [0] * transfers
        self._left = [0] * transfers
        for part in parts:
            self._left[part.owner] += 1

    def end(self, owner: int, number: int) -> bool:
        """One part is through.  True = that was its transfer's last."""
        self.results[owner] = number or self.results[owner]
        self._left[owner] -= 1
        return not self._left[owner]


class Engine(abc.ABC):
    """See the module."""

    name: str

    @abc.abstractmethod
    def run(
        self,
        write: bool,
        transfers: Sequence[Transfer],
        finished: Finished | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[int]:
        """0 or errno for each transfer.  In this thread, while transfers are in flight, ``finished`` is called as each
        one ends, and ``meanwhile`` is carried out, to its end."""

    @abc.abstractmethod
    def sync(self) -> int:
        """Everything written before is on the medium, caches of the device included.  0 or errno."""

    @abc.abstractmethod
    def close(self) -> None: ...


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.preadv, _libc.pwritev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


def transfer_now(fd: int, write: bool, part: Part) -> int:
    """One part, by preadv or pwritev in the calling thread."""
    call = _libc.pwritev if write else _libc.preadv
    offset, pieces = part.offset, part.pieces
    while pieces:
        vector = (_Iovec * len(pieces))(*(_Iovec(*piece) for piece in pieces))
        done = call(fd, ctypes.addressof(vector), len(pieces), offset)
        if done < 0:
            number = ctypes.get_errno()
            if number in (errno.EINTR, errno.EAGAIN):
                continue
            return number
        if done == 0:
            return errno.EIO
        pieces = advance(pieces, done)
        offset += done
    return 0


def sync_now(fd: int) -> int:
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


class Flusher:
    """fdatasync for many threads: who asks while one is running shares the next one, which covers them all.

    A device flushes its whole cache each time, so three threads that store would else wait for each other's flushes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._started = 0
        self._ended = 0
        self._failed: dict[int, int] = {}  # number of a flush -> errno; the kernel tells an error only once

    def flush(self) -> int:
        """Everything written before this call is on the medium.  0 or errno."""
        with self._changed:
            mine = self._started + 1  # one that is running may have begun before our last write
            while self._started > self._ended and self._ended < mine:
                self._changed.wait()
            if self._ended >= mine:
                return self._failed.get(mine, 0)
            self._started = mine
        number = errno.EIO
        try:
            number = sync_now(self._fd)
        finally:
            with self._changed:
                self._ended = mine
                if number:
                    self._failed[mine] = number
                    while len(self._failed) > _FAILURES_KEPT:
                        del self._failed[next(iter(self._failed))]
                self._changed.notify_all()
        return number


class Threads(Engine):
    """preadv and pwritev, ``queue_depth`` threads for all callers together."""

    name = "threads"

    def __init__(self, fd: int, queue_depth: int) -> None:
        self._fd = fd
        self._flusher = Flusher(fd)
        self._pool = ThreadPoolExecutor(min(queue_depth, MAX_THREADS), thread_name_prefix="raw-io")

    def run(
        self,
        write: bool,
        transfers: Sequence[Transfer],
        finished: Finished | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[int]:
        parts = cut(transfers)
        progress = Progress(parts, len(transfers))
        waiting: list[Future[int]] = []
        try:
            for part in parts[1:]:
                waiting.append(self._pool.submit(transfer_now, self._fd, write, part))
            for _ in meanwhile or ():
                pass
            if parts:  # the caller's own thread is one of the hands
                self._end(progress, parts[0].owner, transfer_now(self._fd, write, parts[0]), finished)
            for part, future in zip(parts[1:], waiting, strict=True):
                self._end(progress, part.owner, future.result(), finished)
        finally:
            wait(waiting)
        return progress.results

    @staticmethod
    def _end(progress: Progress, owner: int, number: int, finished: Finished | None) -> None:
        if progress.end(owner, number) and finished is not None:
            finished(owner, progress.results[owner])

    def sync(self) -> int:
        return self._flusher.flush()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
