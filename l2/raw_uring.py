"""io_uring by ctypes: the engine for media that like depth.

One ring per calling thread, so there is no lock, and where the kernel knows it, completions are posted only inside our
own `io_uring_enter` (DEFER_TASKRUN, 6.1).  The file is registered.  Reads and writes are in flight only during `run`.

A process that is killed holds its file, and so the medium's lock, until the kernel has ended what was in flight: the
next owner never meets a write of the one before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Sequence

from kvkeep.l2.raw_io import (
    MAX_PIECES,
    Engine,
    Finished,
    Flusher,
    Meanwhile,
    Memory,
    Part,
    Progress,
    Transfer,
    advance,
    cut,
)

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture
_REGISTER_FILES = 2
_CLAMP, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 4, 1 << 12, 1 << 13
_SINGLE_MMAP = 1
_GETEVENTS = 1
_FIXED_FILE = 1
_READV, _WRITEV, _READ, _WRITE = 1, 2, 22, 23
_SQES_AT = 0x10000000
_PARAMS = struct.Struct("<7I12x10I10I")  # both offset tables end in a u64 that we do not use
_SQE = struct.Struct("<BBHiQQIIQHHiQQ")
_CQE = struct.Struct("<QiI")
_IOVEC = struct.Struct("<QQ")
_AGAIN = (errno.EAGAIN, errno.EINTR)
_DONE = object()

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _call(number: int, *arguments: int) -> int:
    """A system call: its result, or -errno."""
    done: int = _syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return done if done >= 0 else -ctypes.get_errno()


class Ring:
    """Used by the thread that made it.  OSError where the kernel or a filter refuses io_uring."""

    def __init__(self, fd: int, depth: int) -> None:
        params = ctypes.create_string_buffer(120)
        for flags in (_CLAMP | _SINGLE_ISSUER | _DEFER_TASKRUN, _CLAMP):
            _PARAMS.pack_into(params, 0, 0, 0, flags, *[0] * 24)
            ring = _call(_SETUP, depth, ctypes.addressof(params))
            if ring >= 0 or ring != -errno.EINVAL:
                break
        if ring < 0:
            raise OSError(-ring, os.strerror(-ring), "io_uring_setup")
        self._close = weakref.finalize(self, os.close, ring)
        self._fd = ring
        fields = _PARAMS.unpack(params)
        if not fields[5] & _SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "the kernel's io_uring is older than 5.4")
        self.depth, completions = int(fields[0]), int(fields[1])
        sq, cq = fields[7:17], fields[17:27]
        size = max(sq[6] + self.depth * 4, cq[5] + completions * _CQE.size)
        self._rings = mmap.mmap(ring, size)
        self._sqes = mmap.mmap(ring, self.depth * _SQE.size, offset=_SQES_AT)
        self._view = view = memoryview(self._rings)
        for i in range(self.depth):  # entry i of the array always names slot i
            struct.pack_into("<I", view, sq[6] + 4 * i, i)
        self._sq_tail = view[sq[1] : sq[1] + 4].cast("I")
        self._cq_head = view[cq[0] : cq[0] + 4].cast("I")
        self._cq_tail = view[cq[1] : cq[1] + 4].cast("I")
        self._cqes, self._cq_mask = cq[5], completions - 1
        self._vectors = Memory(self.depth * MAX_PIECES * _IOVEC.size)
        self._fixed_file = self._register(_REGISTER_FILES, struct.pack("<i", fd), 1)
        self._file = 0 if self._fixed_file else fd

    def _register(self, what: int, table: bytes, count: int) -> bool:
        memory = ctypes.create_string_buffer(table, len(table))
        return _call(_REGISTER, self._fd, what, ctypes.addressof(memory), count) >= 0

    def close(self) -> None:
        """The kernel lets go of the file a moment after the last mapping went."""
        for view in (self._sq_tail, self._cq_head, self._cq_tail, self._view):
            view.release()
        self._rings.close()
        self._sqes.close()
        self._close()

    def _prepare(self, at: int, slot: int, write: bool, part: Part) -> None:
        """Fill submission entry ``at``; ``slot`` names the request while it is in flight."""
        address, length = part.pieces[0]
        if len(part.pieces) > 1:
            code = _WRITEV if write else _READV
            base = slot * MAX_PIECES * _IOVEC.size
            for i, piece in enumerate(part.pieces):
                _IOVEC.pack_into(self._vectors.view, base + i * _IOVEC.size, *piece)
            address, length = self._vectors.address + base, len(part.pieces)
        else:
            code = _WRITE if write else _READ
        flags = _FIXED_FILE if self._fixed_file else 0
        _SQE.pack_into(
            self._sqes, at * _SQE.size, code, flags, 0, self._file, part.offset, address, length,
            0, slot, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def run(
        self,
        write: bool,
        parts: list[Part],
        progress: Progress,
        finished: Finished | None,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """Carry out ``parts``, and a step of ``meanwhile`` now and then, to its end, while some are in flight; what is
        through is told to ``finished``."""
        flying: dict[int, Part] = {}
        free = list(range(self.depth))
        todo = parts[::-1]
        through: list[int] = []
        stopped: BaseException | None = None
        while todo or flying or through or meanwhile is not None:
            fresh = 0
            while todo and free:
                part = todo.pop()
                slot = free.pop()
                tail = self._sq_tail[0]
                self._prepare(tail & (self.depth - 1), slot, write, part)
                self._sq_tail[0] = (tail + 1) & 0xFFFFFFFF
                flying[slot] = part
                fresh += 1
            wait = 0 if through or meanwhile is not None else max(1, len(flying) // 4)
            try:
                while fresh or (wait and flying):
                    done = _call(_ENTER, self._fd, fresh, wait, _GETEVENTS, 0, 0)
                    if done >= 0:
                        fresh -= done
                        if not fresh:
                            break
                    elif done not in (-errno.EINTR, -errno.EAGAIN, -errno.EBUSY):
                        if fresh == len(flying):  # nothing has started: safe to give up
                            raise OSError(-done, os.strerror(-done), "io_uring_enter")
                        time.sleep(0.01)
                    if self._cq_head[0] != self._cq_tail[0] and not fresh:
                        break
            except KeyboardInterrupt as error:
                stopped, todo, meanwhile = error, [], None
            try:
                if finished is not None:
                    for owner in through:
                        finished(owner, progress.results[owner])
                if meanwhile is not None and next(meanwhile, _DONE) is _DONE:
                    meanwhile = None
            except BaseException as error:  # memory stays lent until everything has landed
                stopped, todo, finished, meanwhile = error, [], None, None
            ended = self._reap(flying, free, todo, progress)
            through = ended if finished is not None else []
        if stopped is not None:
            raise stopped

    def _reap(self, flying: dict[int, Part], free: list[int], todo: list[Part], progress: Progress) -> list[int]:
        """Take what has come.  Returns the transfers that are through."""
        through: list[int] = []
        head, tail = self._cq_head[0], self._cq_tail[0]
        while head != tail:
            slot, done, _ = _CQE.unpack_from(self._rings, self._cqes + (head & self._cq_mask) * _CQE.size)
            head = (head + 1) & 0xFFFFFFFF
            part = flying.pop(slot)
            free.append(slot)
            if 0 < done < part.length:
                todo.append(Part(part.owner, part.offset + done, advance(part.pieces, done), part.length - done))
            elif -done in _AGAIN:
                todo.append(part)
            elif progress.end(part.owner, 0 if done == part.length else -done or errno.EIO):
                through.append(part.owner)
        self._cq_head[0] = head
        return through


class Uring(Engine):
    """A ring for each thread that calls."""

    name = "uring"

    def __init__(self, fd: int, queue_depth: int) -> None:
        self._fd, self._depth = fd, queue_depth
        self._flusher = Flusher(fd)
        self._local = threading.local()
        self._rings: weakref.WeakSet[Ring] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._ring()  # OSError here, not in the first store

    def _ring(self) -> Ring:
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None:
            ring = Ring(self._fd, self._depth)
            self._local.ring = ring
            with self._lock:
                self._rings.add(ring)
        return ring

    def _forget(self) -> None:
        """The calling thread's ring; its next call makes a new one."""
        with contextlib.suppress(AttributeError):
            self._local.ring.close()
            del self._local.ring

    def run(
        self,
        write: bool,
        transfers: Sequence[Transfer],
        finished: Finished | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[int]:
        parts = cut(transfers)
        progress = Progress(parts, len(transfers))
        try:
            self._ring().run(write, parts, progress, finished, meanwhile)
        except OSError as error:  # no memory for a ring, or the ring itself failed: nothing of this batch is certain
            self._forget()
            return [error.errno or errno.EIO] * len(transfers)
        return progress.results

    def sync(self) -> int:
        return self._flusher.flush()

    def close(self) -> None:
        with self._lock:
            for ring in list(self._rings):
                ring.close()
            self._rings.clear()
        self._local = threading.local()
