"""Whole objects to and from files of a root.  No accounting here; `fs` does that around it.

    write:  draft (or spare) ─► header + payload ─► time of use as mtime ─► fsync ─► name
    read:   open ─► header page + payload ─► header, key, length, checksum ─► time of use as mtime

If the medium refuses O_DIRECT in the middle of use, as some do after having accepted it at open, the root does without
from then on, and the call at hand is repeated.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from typing import NamedTuple

from kvkeep.l2.adapter import Item, Key
from kvkeep.l2.fs_io import PAGE, FileIO, aligned, file_bytes, read_raw, read_record, write_record
from kvkeep.l2.fs_root import Draft, Identity, Root, identity_of
from kvkeep.l2.fs_tally import GONE, NOT_OURS, Tally
from kvkeep.l2.record import HEADER_BYTES, Header, payload_checksum, unpack

log = logging.getLogger("kvkeep.l2.fs")


class Seen(NamedTuple):
    """What a read found.  ``header`` with another length than was asked for, or encoded: nothing was read."""

    header: Header | None  # None = what is there does not verify
    size: int  # on the medium
    identity: Identity
    payload: memoryview = memoryview(b"")  # of a fetch


class ObjectFiles:
    """See the module.  Everything raises OSError."""

    def __init__(self, io: FileIO, fsync: str, tally: Tally) -> None:
        self._io = io
        self._fsync = fsync
        self._count = tally.count
        self._lock = threading.Lock()

    def write(self, root: Root, name: bytes, item: Item, used_ns: int, spare: str = "") -> int:
        """Bytes on the medium.  ``spare``: a temporary of the root to write over; it is gone in any case."""
        direct = root.direct and aligned(item.payload)
        draft = root.reuse(spare, file_bytes(len(item.payload)), direct) if spare else None
        self._count("reused", draft is not None)
        try:
            return self._write(root, name, item, used_ns, draft or root.create(name, direct))
        except OSError as error:
            self._without_direct(root, error, direct)
            return self._write(root, name, item, used_ns, root.create(name, False))

    def _write(self, root: Root, name: bytes, item: Item, used_ns: int, draft: Draft) -> int:
        try:
            header = write_record(self._io, draft.fd, item, draft.direct)
            os.utime(draft.fd, ns=(used_ns, used_ns))
            if self._fsync != "none":
                self._io.sync_data(draft.fd)
            size = os.fstat(draft.fd).st_blocks * 512
            try:
                draft.publish(name)
            except FileExistsError:
                if there := self._of_another(root, name, header):
                    size = there
                else:
                    draft.publish(name)
            if self._fsync == "full":
                root.sync_folder(name)
            return size
        finally:
            draft.close()

    def _of_another(self, root: Root, name: bytes, header: Header) -> int:
        """The name is taken: by another process that shares the root (its size), or by rubbish, which goes (0)."""
        try:
            fd = root.open(name, False)
        except OSError as error:
            if error.errno not in (*GONE, *NOT_OURS):
                raise
        else:
            try:
                about = os.fstat(fd)
                there = self._whole(fd, about)
                if there is not None and there.key == header.key and there.original_bytes == header.original_bytes:
                    self._count("stored_by_another")
                    return about.st_blocks * 512
            finally:
                os.close(fd)
        self._count("rubbish_removed")
        try:
            root.unlink(name)
        except FileNotFoundError:
            pass
        return 0

    def read(self, root: Root, name: bytes, key: Key, into: memoryview, used_ns: int) -> Seen:
        direct = root.direct and aligned(into)
        try:
            return self._read(root, name, key, into, used_ns, direct)
        except OSError as error:
            self._without_direct(root, error, direct)
            return self._read(root, name, key, into, used_ns, False)

    def _read(self, root: Root, name: bytes, key: Key, into: memoryview, used_ns: int, direct: bool) -> Seen:
        fd = root.open(name, direct)
        try:
            about = _regular(fd)
            asked = about.st_size == file_bytes(len(into))
            page, checksum = read_record(self._io, fd, into if asked else into[:0], direct) or (None, 0)
            header = None if page is None else _header(page, key, about)
            if header is None or header.serdes or header.stored_bytes != len(into):
                return _seen(header, about)
            if checksum != header.checksum:
                return _seen(None, about)
            self._touch(fd, used_ns)
            return _seen(header, about)
        finally:
            os.close(fd)

    def fetch(self, root: Root, name: bytes, key: Key, most: int, used_ns: int) -> Seen:
        """The object in fresh memory, if it has no more than ``most`` bytes.  ``used_ns`` 0: this is no use of it."""
        try:
            return self._fetch(root, name, key, most, used_ns, root.direct)
        except OSError as error:
            self._without_direct(root, error, root.direct)
            return self._fetch(root, name, key, most, used_ns, False)

    def _fetch(self, root: Root, name: bytes, key: Key, most: int, used_ns: int, direct: bool) -> Seen:
        fd = root.open(name, direct)
        try:
            about = _regular(fd)
            asked = 2 * PAGE <= about.st_size <= file_bytes(most)
            page, content = read_raw(self._io, fd, about.st_size - PAGE if asked else 0) or (None, memoryview(b""))
            header = None if page is None else _header(page, key, about)
            if header is None or header.stored_bytes > most:
                return _seen(header, about)
            payload = content[: header.stored_bytes]
            if payload_checksum(payload) != header.checksum:
                return _seen(None, about)
            self._touch(fd, used_ns)
            return _seen(header, about)._replace(payload=payload)
        finally:
            os.close(fd)

    def _touch(self, fd: int, used_ns: int) -> None:
        if not used_ns:
            return  # a check is no use
        try:
            os.utime(fd, ns=(used_ns, used_ns))
        except OSError:
            self._count("recency_not_kept")

    def _without_direct(self, root: Root, error: OSError, direct: bool) -> None:
        """Raises unless O_DIRECT may be the reason."""
        if not direct or error.errno != errno.EINVAL:
            raise error
        with self._lock:
            lost, root.direct = root.direct, False
        if lost:
            self._count("direct_io_fallbacks")
            log.warning("fs: %s: O_DIRECT was refused (%s), the page cache from now on", root.path, error.strerror)

    def header(self, root: Root, name: bytes) -> Header | None:
        """None = nothing of ours, or not readable."""
        try:
            fd = root.open(name, False)
        except OSError:
            return None
        try:
            return self._head(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def read_header(self, root: Root, name: bytes) -> Seen:
        """Without one = it does not verify, or the file is not as long as it says.  Raises OSError."""
        fd = root.open(name, False)
        try:
            about = _regular(fd)
            return _seen(self._whole(fd, about), about)
        finally:
            os.close(fd)

    def in_another_encoding(self, root: Root, name: bytes, item: Item) -> bool:
        """All of this object is there, though not with the bytes of ``item``.  Raises OSError if it has vanished."""
        try:
            fd = root.open(name, False)
        except OSError as error:
            if error.errno in NOT_OURS:
                return False
            raise
        try:
            header = self._whole(fd, os.fstat(fd))
            return header is not None and header.key == item.key and bool(header.serdes or item.encoding)
        finally:
            os.close(fd)

    def _whole(self, fd: int, about: os.stat_result) -> Header | None:
        """The header of a file that has all its bytes."""
        header = self._head(fd) if stat.S_ISREG(about.st_mode) else None
        return header if header is not None and file_bytes(header.stored_bytes) == about.st_size else None

    def _head(self, fd: int) -> Header | None:
        page = bytearray(HEADER_BYTES)
        return unpack(memoryview(page)[: max(0, self._io.readv(fd, [memoryview(page)], 0))])


def _regular(fd: int) -> os.stat_result:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EISDIR, "not a file")
    return about


def _header(page: memoryview, key: Key, about: os.stat_result) -> Header | None:
    header = unpack(page)
    good = header is not None and header.key == key and file_bytes(header.stored_bytes) == about.st_size
    return header if good else None


def _seen(header: Header | None, about: os.stat_result) -> Seen:
    return Seen(header, about.st_blocks * 512, identity_of(about))
