"""The two POSIX shared-memory segments of an arena: finding, creating, locking, reserving, dropping.

    /kvkeep-<name>-meta     the daemon holds a flock on it for life; a kill releases it
    /kvkeep-<name>-data     its inode number, kept in the superblock, ties it to its meta segment

Only the daemon opens by name or unlinks.  A client gets descriptors (see ipc/attach.py); its meta descriptor is opened
read-only and carries an OFD lock on its lease slot (see leases.py).

Memory is reserved with posix_fallocate, which fails at once where ftruncate would succeed and a later touch be a
SIGBUS.  The meta segment is reserved before anything else; the data segment in steps by a thread that only calls into
the kernel, so that a daemon of any size is ready to attach at once.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc

from kvkeep.shm.layout import (
    ABI_VERSION,
    ENTRY_BYTES,
    ENTRY_OFFSET,
    LEASE_OFFSET,
    MAGIC,
    NAMESPACE_OFFSET,
    PAGE,
    SLAB,
    SLAB_OFFSET,
    STATS_OFFSET,
    SUPERBLOCK,
    meta_bytes,
)
from kvkeep.shm.records import word_sums

U8 = npt.NDArray[np.uint8]

RESERVE_STEP = 32 << 20
RESERVE_LEAST = 1 << 20
_SUMMED = SUPERBLOCK.fields["checksum"][1]  # type: ignore[index]


class SegmentError(Exception):
    """The arena cannot be made or is in use; the text is for the operator."""


class InUse(SegmentError):
    """Another daemon has this arena."""


@dataclass(frozen=True)
class Geometry:
    data_bytes: int
    capacity: int
    slab_bytes: int


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


class Segments:
    """Both segments, open and mapped (meta only; the daemon never maps the data it keeps)."""

    def __init__(self, name: str, meta_fd: int, data_fd: int, geometry: Geometry, adopted: bool, why: str) -> None:
        self.name = name
        self.meta_fd = meta_fd
        self.data_fd = data_fd
        self.geometry = geometry
        self.adopted = adopted
        self.why = why  # the reason when an earlier arena was dropped, else ""
        size = meta_bytes(geometry.capacity)
        self._map = mmap.mmap(meta_fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self.meta: U8 = np.frombuffer(self._map, dtype=np.uint8)
        self.superblock = self.meta[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0]

    @property
    def leases(self) -> U8:
        return self.meta[LEASE_OFFSET:STATS_OFFSET]

    @property
    def stats(self) -> U8:
        return self.meta[STATS_OFFSET:NAMESPACE_OFFSET]

    @property
    def namespaces(self) -> U8:
        return self.meta[NAMESPACE_OFFSET:SLAB_OFFSET]

    @property
    def slabs(self) -> npt.NDArray[Any]:
        return self.meta[SLAB_OFFSET:ENTRY_OFFSET].view(SLAB)

    @property
    def entries(self) -> U8:
        return self.meta[ENTRY_OFFSET : ENTRY_OFFSET + self.geometry.capacity * ENTRY_BYTES]

    @property
    def fully_reserved(self) -> bool:
        """An adopted data segment whose memory is all there already."""
        return self.adopted and os.fstat(self.data_fd).st_blocks * 512 >= self.geometry.data_bytes

    def damaged(self) -> str:
        """Why the segments can no longer be trusted, or "" (somebody with the descriptor could shrink the data)."""
        size = os.fstat(self.data_fd).st_size
        if size < self.geometry.data_bytes:
            return f"the data segment was cut to {size} of {self.geometry.data_bytes} bytes by another process"
        return ""

    def unlink(self) -> None:
        unlink(self.name)

    def close(self) -> None:
        """Give up descriptors and the lock; the mapping goes with the process."""
        fcntl.flock(self.meta_fd, fcntl.LOCK_UN)  # the mapping keeps a duplicate of the descriptor
        os.close(self.meta_fd)
        os.close(self.data_fd)


def segment_names(name: str) -> tuple[str, str]:
    return f"/kvkeep-{name}-meta", f"/kvkeep-{name}-data"


def unlink(name: str) -> None:
    for segment in segment_names(name):
        try:
            posix_ipc.unlink_shared_memory(segment)
        except posix_ipc.ExistentialError:
            pass


def _open(segment: str) -> int:
    """Descriptor of an existing segment, or -1."""
    try:
        fd = posix_ipc.SharedMemory(segment).fd
    except posix_ipc.ExistentialError:
        return -1
    os.set_inheritable(fd, False)
    return int(fd)


def _create(segment: str) -> int:
    fd = posix_ipc.SharedMemory(segment, posix_ipc.O_CREX, mode=0o600).fd
    os.set_inheritable(fd, False)
    return int(fd)


def _lock(fd: int, name: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse(
            f"the arena {name!r} is in use by another kvkeepd; stop that one, or start this one with another --name"
        ) from None


def open_segments(name: str, geometry: Geometry, *, forget: bool = False) -> Segments:
    """Adopt the arena ``name`` if it is whole and has this geometry, else make a new one.

    Raises SegmentError if another daemon has it, or if there is not enough memory for the metadata.
    """
    meta_name, data_name = segment_names(name)
    why = ""
    while (meta_fd := _open(meta_name)) >= 0:
        _lock(meta_fd, name)
        if not _still_named(meta_name, meta_fd):
            os.close(meta_fd)  # its last owner unlinked it while we waited for the lock
            continue
        data_fd = _open(data_name)
        why = "--forget was given" if forget else _distrust(meta_fd, data_fd, geometry)
        if not why:
            return Segments(name, meta_fd, data_fd, geometry, adopted=True, why="")
        unlink(name)
        os.close(meta_fd)
        if data_fd >= 0:
            os.close(data_fd)
        break
    return _make(name, geometry, why)


def _make(name: str, geometry: Geometry, why: str) -> Segments:
    meta_name, data_name = segment_names(name)
    try:
        posix_ipc.unlink_shared_memory(data_name)  # a data segment without its meta is nobody's
    except posix_ipc.ExistentialError:
        pass
    try:
        meta_fd = _create(meta_name)
    except posix_ipc.ExistentialError:
        raise InUse(f"the arena {name!r} was made by another kvkeepd just now; start one only") from None
    _lock(meta_fd, name)
    try:
        size = meta_bytes(geometry.capacity)
        os.ftruncate(meta_fd, size)
        os.posix_fallocate(meta_fd, 0, size)
        data_fd = _create(data_name)
        os.ftruncate(data_fd, geometry.data_bytes)
    except OSError as e:
        unlink(name)
        raise SegmentError(
            f"cannot reserve {meta_bytes(geometry.capacity)} bytes of /dev/shm for the arena's metadata: {e.strerror}; "
            "enlarge /dev/shm or lower --l1-size-gb"
        ) from None
    segments = Segments(name, meta_fd, data_fd, geometry, adopted=False, why=why)
    _format(segments)
    return segments


def _format(segments: Segments) -> None:
    block, geometry = segments.superblock, segments.geometry
    block["abi"], block["entry_bytes"] = ABI_VERSION, ENTRY_BYTES
    block["meta_bytes"], block["data_bytes"] = meta_bytes(geometry.capacity), geometry.data_bytes
    block["capacity"], block["slab_bytes"] = geometry.capacity, geometry.slab_bytes
    block["boot_id"] = boot_id().encode()
    block["epoch"] = 0
    block["data_inode"] = os.fstat(segments.data_fd).st_ino
    block["checksum"] = 0
    block["magic"] = MAGIC
    block["checksum"] = _sum(block)


def _sum(block: Any) -> np.uint64:
    words = np.frombuffer(block.tobytes()[:_SUMMED], dtype=np.uint64).reshape(1, -1)
    return np.uint64(word_sums(words)[0])


def _still_named(segment: str, fd: int) -> bool:
    again = _open(segment)
    if again < 0:
        return False
    same = os.path.sameopenfile(fd, again)
    os.close(again)
    return same


def _distrust(meta_fd: int, data_fd: int, geometry: Geometry) -> str:
    """Why this arena cannot be adopted, or ""."""
    if data_fd < 0:
        return "its data segment is gone"
    if os.fstat(meta_fd).st_size < SUPERBLOCK.itemsize:
        return "its metadata is cut short"
    block = np.frombuffer(os.pread(meta_fd, SUPERBLOCK.itemsize, 0), dtype=SUPERBLOCK)[0]
    if int(block["magic"]) != MAGIC:
        return "it was never finished"
    if int(block["abi"]) != ABI_VERSION or int(block["entry_bytes"]) != ENTRY_BYTES:
        return f"its format is version {int(block['abi'])}, this daemon writes {ABI_VERSION}"
    if block["checksum"] != _sum(block):
        return "its superblock does not verify"
    if block["boot_id"].decode(errors="replace") != boot_id():
        return "it is from before a reboot"
    if int(block["data_inode"]) != os.fstat(data_fd).st_ino:
        return "its data segment belongs to another arena"
    there = Geometry(int(block["data_bytes"]), int(block["capacity"]), int(block["slab_bytes"]))
    if there != geometry:
        return (
            f"its size was {there.data_bytes} bytes and {there.capacity} entries, "
            f"now it is {geometry.data_bytes} and {geometry.capacity}"
        )
    if os.fstat(meta_fd).st_size != meta_bytes(geometry.capacity):
        return "its metadata has the wrong size"
    if os.fstat(data_fd).st_size != geometry.data_bytes:
        return "its data segment has the wrong size"
    return ""


class Reserver(threading.Thread):
    """Reserves the data segment in steps, in the background; the control loop learns of each step by an eventfd.

    ``ready`` only grows.  ``failed`` is one sentence when the memory ran out; what is ready stays usable.
    """

    def __init__(self, data_fd: int, data_bytes: int, *, prepare: Callable[[int, int], None] | None = None) -> None:
        super().__init__(name="reserver", daemon=True)
        self.ready = 0
        self.failed = ""
        self.done = False
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fd, self._bytes, self._prepare = data_fd, data_bytes, prepare
        self._step = RESERVE_STEP
        self._halt = threading.Event()

    def run(self) -> None:
        while self.step() and not self._halt.is_set():
            os.eventfd_write(self.eventfd, 1)
        self.done = True
        os.eventfd_write(self.eventfd, 1)

    def step(self) -> bool:
        """Reserve one more piece.  False = that was the last, or it failed."""
        at = self.ready
        size = min(self._step, self._bytes - at)
        if size <= 0 or self.failed:
            return False
        try:
            os.posix_fallocate(self._fd, at, size)
            if self._prepare:
                self._prepare(at, size)
        except OSError as e:
            if e.errno == errno.ENOSPC and size > RESERVE_LEAST:
                self._step = max(RESERVE_LEAST, size // 2 // PAGE * PAGE)  # take what there is
                return self.step()
            what = "no space left in /dev/shm" if e.errno == errno.ENOSPC else e.strerror
            self.failed = (
                f"only {at} of {self._bytes} bytes of L1 could be reserved: {what}; "
                "enlarge /dev/shm or lower --l1-size-gb"
            )
            return False
        self.ready = at + size
        return True

    def stop(self) -> None:
        self._halt.set()
        self.join(timeout=5)
