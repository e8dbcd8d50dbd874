"""Getting hold of the file or device: ownership, size, alignment, what is on it, how it can be used.

    open or make ──► lock ──► size, alignment ──► superblock found, or made (where nothing of others lies) ──► probe

One process owns a medium: flock on the open file, and on a device an exclusive open besides, which also keeps out a
mounted file system.  Nothing is done to it before it is locked, also not to a file just made; who waited for the lock
looks whether the path still leads to that file.  A medium that holds anything that is not ours is refused, unless the
configuration says "format".  "format" never wipes a medium of ours that can be used.

O_DIRECT is proven by a real write and read of the probe block, since some file systems accept it at open and refuse it
at the first write.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
from typing import NamedTuple

from kvkeep.l2.adapter import AdapterError
from kvkeep.l2.raw_io import Memory, Part, transfer_now
from kvkeep.l2.raw_layout import MIN_BLOCK, MIN_BYTES, PROBE_BLOCK, SECOND_COPY, Geometry, SuperblockError

_BLKGETSIZE64, _BLKSSZGET = 0x80081272, 0x1268
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000
PAGE = 4096  # sizes that are asked for are multiples of it
_LOCK_WAIT_S = 3.0  # the kernel may still be ending the I/O of an owner that was killed
_LOOKED_AT = 1 << 20  # bytes at the start that must be zero on a medium that we format unasked
_TAIL_LOOKED_AT = 64 << 10  # some keep their signature at the end
_SIGNATURES = (
    (1080, b"\x53\xef", "an ext2/3/4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (65600, b"_BHRfS_M", "a btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (512, b"LABELONE", "an LVM physical volume"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4096, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (512, b"EFI PART", "a GPT partition table"),
    (510, b"\x55\xaa", "a partition table"),
)


class Medium(NamedTuple):
    fd: int
    path: str
    is_device: bool
    direct: bool
    memory_alignment: int  # what O_DIRECT asks of addresses
    geometry: Geometry
    formatted: bool  # by this open
    notes: tuple[str, ...]  # for the log

    def shrunk(self) -> str:
        """Bytes of it are gone, though they may come back as zeros: what is wrong, "" = nothing."""
        try:
            actual = _size(self.fd, self.is_device)
        except OSError as error:
            return f"raw_block {self.path} cannot be used any more ({error.strerror}): check the device"
        if actual >= self.geometry.size:
            return ""
        return (
            f"raw_block {self.path} was cut from {self.geometry.size} to {actual} bytes while in use, what it held is "
            "lost: delete it, and it is made anew"
        )

    def moved(self) -> str:
        """The path does not lead to it any more, so the next start will not find it: what is wrong, "" = nothing."""
        try:
            there, here = os.stat(self.path), os.fstat(self.fd)
        except OSError as error:
            what = f"is not there any more ({error.strerror})"
        else:
            if there.st_rdev == here.st_rdev if self.is_device else os.path.samestat(there, here):
                return ""
            what = "was replaced while in use"
        return f"raw_block {self.path} {what}: put it back, or what it holds is lost"


def claim(path: str, size: int, direct_io: str, reformat: bool) -> Medium:
    """Open and own the medium.  ``size`` 0 = as it is.  AdapterError says what stands in the way."""
    fd, made = _own(path, size)
    try:
        is_device = stat.S_ISBLK(os.fstat(fd).st_mode)
        actual = _size(fd, is_device)
        if size > actual and not is_device and _is_blank(fd, actual):  # new, or its maker was killed
            _allocate(fd, path, size)
            actual = size
        if size and not is_device and actual // PAGE * PAGE != size:
            raise AdapterError(
                f"raw_block file {path} has {actual} bytes and size_gb asks for {size}: set size_gb to "
                f"{actual / (1 << 30)!r}, or delete the file to lose its content and start with the new size"
            )
        if is_device and size:
            if size > actual:
                raise AdapterError(
                    f"raw_block device {path} has {actual} bytes, and size_gb asks for {size}: leave size_gb out"
                )
            actual = size
        if actual < MIN_BYTES:
            raise AdapterError(f"raw_block {path} has {actual} bytes, the least is {MIN_BYTES}: make it larger")
        memory_alignment, block = _alignment(fd, is_device)
        geometry, formatted, notes = _superblock(fd, path, actual, block, reformat)
        if geometry.block < block:
            raise AdapterError(
                f"raw_block {path} was formatted with blocks of {geometry.block} bytes, but the device now wants "
                f'{block}: copy it back to where it was, or set "format": true to lose its content'
            )
        direct, note = _probe(fd, path, geometry, direct_io, max(memory_alignment, 1))
        return Medium(
            fd, path, is_device, direct, memory_alignment if direct else 1, geometry, formatted,
            tuple(n for n in (*notes, note) if n),
        )  # fmt: skip
    except OSError as error:
        _let_go(fd, path, made)
        raise AdapterError(f"raw_block {path} cannot be used: {os.strerror(error.errno or errno.EIO)}") from error
    except BaseException:
        _let_go(fd, path, made)
        raise


def _let_go(fd: int, path: str, made: bool) -> None:
    if made and _is_at(fd, path):
        os.unlink(path)
    os.close(fd)


def _own(path: str, size: int) -> tuple[int, bool]:
    """The medium, open and locked.  True = a new file, still empty, so nobody's loss if this comes to nothing."""
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        fd, created = _open(path, size)
        try:
            _lock(fd, path, until)
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            if not is_file or _is_at(fd, path):
                return fd, created and not os.fstat(fd).st_size
            if time.monotonic() > until:
                raise AdapterError(f"raw_block {path} is replaced again and again: give each process its own path")
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # who had it before us has removed it


def _is_at(fd: int, path: str) -> bool:
    """The path leads to this open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def _open(path: str, size: int) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISBLK(kind):
            return _open_device(path, flags | os.O_EXCL), False
        if not stat.S_ISREG(kind):
            raise AdapterError(f"raw_block path {path} is neither a file nor a block device: name one of these")
        return os.open(path, flags), False
    except FileNotFoundError:
        if not size:
            raise AdapterError(f"raw_block file {path} does not exist: set size_gb, and it will be made") from None
        if size < MIN_BYTES:
            raise AdapterError(f"raw_block size_gb asks for {size} bytes, the least is {MIN_BYTES}") from None
        return _make(path, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise AdapterError(f"raw_block device {path} is in use (mounted, or another process owns it)") from error
        raise AdapterError(f"raw_block {path} cannot be opened: {os.strerror(error.errno or 0)}") from error


def _open_device(path: str, flags: int) -> int:
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.02)


def _make(path: str, flags: int) -> tuple[int, bool]:
    try:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            return os.open(path, flags), False  # another process has just made it
    except OSError as error:
        raise AdapterError(f"raw_block file {path} cannot be made: {os.strerror(error.errno or 0)}") from error


def _allocate(fd: int, path: str, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        free = os.statvfs(os.path.dirname(os.path.abspath(path)))
        raise AdapterError(
            f"raw_block file {path} cannot get its {size} bytes ({os.strerror(error.errno or 0)}); "
            f"{free.f_bavail * free.f_frsize} are free: set a smaller size_gb"
        ) from error


def _lock(fd: int, path: str, until: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise AdapterError(f"raw_block {path} belongs to another process: give each its own path") from None
            time.sleep(0.02)


def _size(fd: int, is_device: bool) -> int:
    if not is_device:
        return os.fstat(fd).st_size
    answer = fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8))
    return int(struct.unpack("<Q", answer)[0])


def _is_blank(fd: int, size: int) -> bool:
    start = os.pread(fd, min(size, _LOOKED_AT), 0)
    return start.count(0) == len(start)


def _alignment(fd: int, is_device: bool) -> tuple[int, int]:
    """What O_DIRECT asks of memory addresses, and the block size to use."""
    memory, offset = 512, 512
    answer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "statx") and libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) == 0:
        mask = struct.unpack_from("<I", answer, 0)[0]
        found = struct.unpack_from("<II", answer, 152)
        if mask & _STATX_DIOALIGN and all(found):
            memory, offset = found
    if is_device:
        logical = struct.unpack("<i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))[0]
        memory, offset = max(memory, 512), max(offset, logical)
    return memory, max(MIN_BLOCK, offset)


def _superblock(fd: int, path: str, size: int, block: int, reformat: bool) -> tuple[Geometry, bool, list[str]]:
    problem = ""
    for at in (0, SECOND_COPY):
        try:
            geometry = Geometry.unpack(os.pread(fd, MIN_BLOCK, at))
        except SuperblockError as error:
            problem = f"raw_block {path} {error}"
            continue
        if geometry is None:
            continue
        if geometry.size > size:
            problem = f"raw_block {path} was formatted with {geometry.size} bytes and has {size} now"
            continue
        if at:
            _write_superblock(fd, geometry)
            return geometry, False, [f"raw_block {path}: first superblock restored from the second"]
        return geometry, False, []
    found = problem or _foreign(fd, path, size)
    if found and not reformat:
        raise AdapterError(f'{found}: choose another path, or set "format": true to lose everything on it')
    geometry = Geometry.plan(size, block)
    if geometry.slabs < 1:
        raise AdapterError(f"raw_block {path} has {size} bytes, too few for one slab: make it larger")
    # Marks of earlier owners would make others believe that it is theirs.
    os.pwrite(fd, bytes(geometry.first_slab), 0)
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        os.pwrite(fd, bytes(_TAIL_LOOKED_AT), size - _TAIL_LOOKED_AT)
    os.fdatasync(fd)
    _write_superblock(fd, geometry)
    return geometry, True, [f"raw_block {path}: formatted, {geometry.slabs} slabs of {geometry.slab_bytes} bytes"]


def _write_superblock(fd: int, geometry: Geometry) -> None:
    for at in (SECOND_COPY, 0):
        os.pwrite(fd, geometry.pack(), at)
        os.fdatasync(fd)


def _foreign(fd: int, path: str, size: int) -> str:
    """What lies there, or "" if nothing does."""
    start = os.pread(fd, _LOOKED_AT, 0)
    for at, signature, what in _SIGNATURES:
        if start[at : at + len(signature)] == signature:
            return f"raw_block {path} holds {what}"
    end = os.pread(fd, _TAIL_LOOKED_AT, max(0, size - _TAIL_LOOKED_AT))
    if start.count(0) != len(start) or end.count(0) != len(end):
        return f"raw_block {path} holds data that is not kvkeep's"
    return ""


def _probe(fd: int, path: str, geometry: Geometry, wanted: str, alignment: int) -> tuple[bool, str]:
    """Write and read back the probe block the way the medium will be used.  (O_DIRECT?, note)"""
    # What was written and read through the page cache until here must not shadow what O_DIRECT sees.
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if wanted != "off":
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            failure = _try(fd, geometry)
        except OSError as error:
            failure = error.errno or errno.EINVAL
        if not failure:
            return True, ""
        if wanted == "on" or failure != errno.EINVAL:
            raise AdapterError(
                f'raw_block {path} refuses O_DIRECT ({os.strerror(failure)}): set "direct_io": "auto" or "off"'
            )
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    failure = _try(fd, geometry)
    if failure:
        raise AdapterError(f"raw_block {path} cannot be written and read: {os.strerror(failure)}")
    return False, "" if wanted == "off" else f"raw_block {path}: O_DIRECT is refused, using the page cache"


def _try(fd: int, geometry: Geometry) -> int:
    block = geometry.block
    memory = Memory(2 * block)
    memory.view[:block] = os.urandom(block)
    if failure := transfer_now(fd, True, Part(0, PROBE_BLOCK, ((memory.address, block),), block)):
        return failure
    there = memory.address + block
    if failure := transfer_now(fd, False, Part(0, PROBE_BLOCK, ((there, block),), block)):
        return failure
    return 0 if memory.view[:block] == memory.view[block : 2 * block] else errno.EIO
