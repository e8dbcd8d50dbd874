"""Records to and from files: one vectored call each way, header page and payload together, unless they are large.

    file = [ header page, 4096: the record header, zeros ][ payload ][ zeros up to a multiple of 4096 ]

Everything is a multiple of 4096 bytes, and so are the arena's views, so with O_DIRECT payloads move between the medium
and the arena without a copy; only the last, partial page goes through a page of our own.  A view that is not aligned is
read or written through the page cache instead.

`FileIO` has every system call that can fail in an interesting way, so that tests can make them fail.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np
import xxhash

from kvkeep.l2.adapter import Item
from kvkeep.l2.record import HEADER_BYTES, Header, header_of, pack

PAGE = 4096
_STEP = 4 << 20
_CACHED_STEP = 256 << 10  # through the page cache: a piece is still in the CPU's cache when its checksum is computed
_ONE_CALL = 8 << 20  # a payload up to this is written at once, with O_DIRECT
_NOTHING = bytes(PAGE)
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a fifo under one of our names must not block us


class FileIO:
    """The system calls.  They raise OSError; transfers may be short."""

    def open(self, path: str, flags: int, *, dir_fd: int) -> int:
        return os.open(path, flags | _OPEN, 0o600, dir_fd=dir_fd)

    def writev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def readv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def link(self, fd: int, path: str, *, dir_fd: int) -> None:
        """Give an unnamed file its name; FileExistsError if it is taken.

        Without a src_dir_fd Python calls link(2), which does not follow /proc/self/fd and fails with EXDEV."""
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=True)

    def rename(self, source: str, target: str, *, source_fd: int, target_fd: int) -> None:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        os.unlink(path, dir_fd=dir_fd)


class _Pages(threading.local):
    """A header page and a tail page per thread."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # not a fork's, too
        self.header, self.tail = memory[:PAGE], memory[PAGE:]


_pages = _Pages()


def file_bytes(payload_bytes: int) -> int:
    return PAGE + -(-payload_bytes // PAGE) * PAGE


def aligned(view: memoryview) -> bool:
    return len(view) > 0 and int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) % PAGE == 0


def write_record(io: FileIO, fd: int, item: Item, direct: bool) -> Header:
    """The whole record or OSError; a medium that takes less than it was given answers EIO in the end.

    A large payload whose checksum nobody knows goes in steps, the header last: while one thread computes the checksum
    of a piece, the medium works for the others.  Nobody sees the file before it is whole."""
    payload = item.payload
    step = _STEP if direct else _CACHED_STEP
    if item.checksum or len(payload) <= (_ONE_CALL if direct else step):
        header = header_of(item)
        _write_all(io, fd, [_header_page(header), payload], 0)
        return header
    digest = xxhash.xxh3_64()
    for at in range(0, len(payload), step):
        piece = payload[at : at + step]
        digest.update(piece)
        _write_all(io, fd, [piece], PAGE + at)
    header = header_of(item._replace(checksum=digest.intdigest() or 1))
    _write_all(io, fd, [_header_page(header)], 0)
    return header


def _header_page(header: Header) -> memoryview:
    """This thread's, until its next call."""
    _pages.header[:HEADER_BYTES] = pack(header)  # the rest of the page is zeros and stays so
    return _pages.header


def _write_all(io: FileIO, fd: int, buffers: list[memoryview], offset: int) -> None:
    """The last buffer is filled up to a page."""
    *before, last = buffers
    whole = len(last) // PAGE * PAGE
    buffers = [*before, last[:whole]] if whole else before
    if rest := len(last) - whole:
        tail = _pages.tail
        tail[:rest] = last[whole:]
        tail[rest:] = _NOTHING[rest:]
        buffers.append(tail)
    end = offset + sum(map(len, buffers))
    while True:
        done = io.writev(fd, buffers, offset)
        offset += done
        if offset >= end:
            return
        if done <= 0 or offset % 512:
            raise OSError(errno.EIO, f"short write: {end - offset} bytes were not taken")
        buffers = _after(buffers, done)


def read_record(io: FileIO, fd: int, into: memoryview, direct: bool) -> tuple[memoryview, int] | None:
    """Fills ``into``; the header, not yet verified, and the payload's checksum; None = the file is too short.

    In steps, so that while one thread computes the checksum of a piece, the medium works for the others."""
    pages = _pages
    whole = len(into) // PAGE * PAGE
    rest = len(into) - whole
    digest = xxhash.xxh3_64()
    step = _STEP if direct else _CACHED_STEP
    first, at, end = [pages.header], 0, min(whole, step)
    try:
        while True:
            last = end == whole
            if not _fill(
                io, fd, [*first, into[at:end], *([pages.tail] if rest and last else [])], at + (0 if first else PAGE)
            ):
                return None
            digest.update(into[at:end])
            if last:
                break
            first, at, end = [], end, min(whole, end + step)
        if rest:
            into[whole:] = pages.tail[:rest]
            digest.update(into[whole:])
        return memoryview(bytes(pages.header[:HEADER_BYTES])), digest.intdigest() or 1
    finally:
        pages.header[:] = _NOTHING


def read_raw(io: FileIO, fd: int, length: int) -> tuple[memoryview, memoryview] | None:
    """The header, not yet verified, and the ``length`` bytes (whole pages) behind its page, in fresh memory."""
    memory = memoryview(mmap.mmap(-1, PAGE + length))
    if not _fill(io, fd, [memory], 0):
        return None
    return memory[:HEADER_BYTES], memory[PAGE:]


def _fill(io: FileIO, fd: int, buffers: list[memoryview], offset: int) -> bool:
    left = sum(map(len, buffers))
    buffers = [buffer for buffer in buffers if len(buffer)]
    while left:
        done = io.readv(fd, buffers, offset)
        if done <= 0:
            return False
        offset, left = offset + done, left - done
        if left > 0:
            buffers = _after(buffers, done)
    return True


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest
