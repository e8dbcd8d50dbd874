"""The client's mapping of the arena: views, validation, and the guard that lets a re-attach wait for running copies.

One `Arena` per attachment, that is per epoch.  It lives until its last view is gone, so a daemon's end never takes
memory away under a copy; the mappings also keep the lease's lock on the meta segment (see shm/leases.py).

    open ──revoke()──► revoked        no copy starts any more; `Guard.wait_idle` returns when the last has ended

A new daemon leaves alone what a client of the old one may still read or write until that client attached again.  So
every copy holds the guard, and the client attaches again only when the guard is idle.  A raw view used without the
guard after `revoke` may read bytes that are no longer the chunk's, or write into somebody else's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.ipc.buffers import Bytes
from kvkeep.ipc.messages import Welcome
from kvkeep.shm import layout

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
POPULATE_STEP = 64 << 20
POPULATE_RETRY_S = 0.2
POPULATE_PATIENCE_S = 60.0
IDLE_POLL_S = 0.002


class ArenaError(Exception):
    """What the daemon passed is not an arena this client can read."""


class Guard:
    """Knows the running copies, each a `Copying`.  None begins after `revoke`.

    No lock, nothing to wait on: a signal handler that raises would leave it locked, and an interrupted copy counted for
    ever.  A copy is noted first and asks `revoked` then; `wait_idle` asks in the other order.
    """

    def __init__(self) -> None:
        self.running: set[int] = set()  # ids of copies
        self.revoked = False

    def copying(self) -> Copying:
        """``with guard.copying() as allowed: if allowed: copy``."""
        return Copying(self)

    def revoke(self) -> None:
        self.revoked = True

    def wait_idle(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() >= until:
                return False
            time.sleep(IDLE_POLL_S)
        return True


class Copying:
    """One copy, or one after the other.  Entering is its last chance to not begin."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> bool:
        running = self._guard.running
        try:
            running.add(id(self))
            if not self._guard.revoked:
                return True
        except BaseException:
            running.discard(id(self))
            raise
        running.discard(id(self))
        return False

    def __exit__(self, *_: object) -> None:
        self._guard.running.discard(id(self))

    def __del__(self) -> None:  # an interrupt between entering and the block, if an ExitStack entered for it
        self._guard.running.discard(id(self))


class Arena:
    """Both segments, mapped from the descriptors of a Welcome.  Raises ArenaError or OSError; never trusts a size."""

    def __init__(self, welcome: Welcome, meta_fd: int, data_fd: int) -> None:
        self.guard = Guard()
        for name, fd, size in (("meta", meta_fd, welcome.meta_bytes), ("data", data_fd, welcome.data_bytes)):
            have = os.fstat(fd).st_size
            if not 0 < size <= have:
                raise ArenaError(f"the {name} segment has {have} bytes, the daemon says {size}")
        if welcome.meta_bytes < layout.ENTRY_OFFSET:
            raise ArenaError(f"a meta segment of {welcome.meta_bytes} bytes has no entry table")
        # a mapping keeps the file, and so the lease's lock, alive after the descriptors are closed
        meta = mmap.mmap(meta_fd, welcome.meta_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        block = np.frombuffer(meta, layout.SUPERBLOCK, 1)[0]
        capacity = _check(block, welcome, os.fstat(data_fd).st_ino)
        entries = np.frombuffer(meta, layout.ENTRY, capacity, layout.ENTRY_OFFSET)
        self._states: U32 = entries["state"]
        self._generations: U32 = entries["generation"]
        self.capacity = capacity
        self.data_bytes = welcome.data_bytes
        self.data: Bytes = np.frombuffer(mmap.mmap(data_fd, welcome.data_bytes), np.uint8)
        self.readonly: Bytes = self.data.view()
        self.readonly.flags.writeable = False
        self.reserved = Reserved(data_fd, welcome.data_bytes)

    def inside(self, offsets: U64, length: int) -> bool:
        """Whether all extents of ``length`` bytes lie in the data segment."""
        if not 0 < length <= self.data_bytes:
            return not offsets.size and length >= 0
        return not offsets.size or int(offsets.max()) <= self.data_bytes - length

    def known(self, entries: U32) -> bool:
        return not entries.size or int(entries.max()) < self.capacity

    def valid(self, entries: U32, generations: U32) -> npt.NDArray[np.bool_]:
        """Per chunk: still sealed, still the same.  Asked after a copy: does the copy have the right bytes?"""
        sealed = self._states[entries] == np.uint32(layout.State.SEALED)
        good: npt.NDArray[np.bool_] = np.logical_and(sealed, self._generations[entries] == generations)
        return good

    def populate(self) -> None:
        """Fault the mapping in the background, in steps, as far as the daemon has reserved."""
        args = (weakref.ref(self), self.reserved, self.data_bytes)
        threading.Thread(target=_populate, args=args, name="kvkeep-populate", daemon=True).start()


class Reserved:
    """How many bytes of the data segment, from its start, the daemon has reserved by now.  Any thread."""

    def __init__(self, data_fd: int, size: int) -> None:
        self._fd, self._size = os.dup(data_fd), size

    def __call__(self) -> int:
        """Raises OSError."""
        return min(self._size, os.fstat(self._fd).st_blocks * 512 // layout.PAGE * layout.PAGE)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def _check(block: Any, welcome: Welcome, data_inode: int) -> int:
    """The superblock must be the one of this daemon's arena; returns the number of entries."""
    if int(block["magic"]) != layout.MAGIC:
        raise ArenaError("the meta segment does not begin with a superblock")
    if int(block["abi"]) != layout.ABI_VERSION or int(block["entry_bytes"]) != layout.ENTRY_BYTES:
        raise ArenaError(
            f"the arena has ABI {block['abi']}, this client reads {layout.ABI_VERSION}; use one release for both"
        )
    if int(block["data_inode"]) != data_inode:
        raise ArenaError("the meta and the data segment do not belong together")
    if (int(block["meta_bytes"]), int(block["data_bytes"])) != (welcome.meta_bytes, welcome.data_bytes):
        raise ArenaError("the superblock and the daemon do not agree on the arena's size")
    capacity = int(block["capacity"])
    if layout.ENTRY_OFFSET + capacity * layout.ENTRY_BYTES > welcome.meta_bytes:
        raise ArenaError(f"{capacity} entries do not fit a meta segment of {welcome.meta_bytes} bytes")
    return capacity


def _populate(reference: weakref.ref[Arena], reserved: Reserved, size: int) -> None:
    """Best effort: an old kernel, a full tmpfs or a lost arena just ends it, and the first copy faults its pages."""
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        position, patience = 0, time.monotonic() + POPULATE_PATIENCE_S
        while position < size:
            step = min(POPULATE_STEP, reserved() - position)
            if step <= 0:
                if time.monotonic() > patience or reference() is None:
                    return
                time.sleep(POPULATE_RETRY_S)
                continue
            arena = reference()
            if arena is None or arena.guard.revoked or advise(arena.data.ctypes.data + position, step, POPULATE_WRITE):
                return
            del arena
            position += step
    except (OSError, AttributeError):
        return
