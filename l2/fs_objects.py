"""Whole objects to and from files of a root.  No accounting here; `fs` does that around it.

    write:  draft ─► header + payload ─► time of use as mtime ─► fsync ─► name
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

from kvkeep.l2.adapter import Key
from kvkeep.l2.fs_io import FileIO, aligned, file_bytes, read_record, write_record
from kvkeep.l2.fs_root import Root
from kvkeep.l2.fs_tally import GONE, NOT_OURS, Tally
from kvkeep.l2.record import HEADER_BYTES, Header, pack, payload_checksum, unpack

log = logging.getLogger("kvkeep.l2.fs")


class Seen(NamedTuple):
    """What a read found.  ``valid`` with another length than was asked for: nothing was read."""

    valid: bool
    length: int  # of the payload, if valid
    size: int  # on the medium
    identity: tuple[int, int]  # inode, mtime


class ObjectFiles:
    """See the module.  Everything raises OSError."""

    def __init__(self, io: FileIO, fsync: str, tally: Tally) -> None:
        self._io = io
        self._fsync = fsync
        self._count = tally.count
        self._lock = threading.Lock()

    def write(self, root: Root, name: bytes, key: Key, payload: memoryview, checksum: int, used_ns: int) -> int:
        """Bytes on the medium."""
        header = pack(Header(key, len(payload), len(payload), checksum or payload_checksum(payload)))
        direct = root.direct and aligned(payload)
        try:
            return self._write(root, name, key, header, payload, used_ns, direct)
        except OSError as error:
            self._without_direct(root, error, direct)
            return self._write(root, name, key, header, payload, used_ns, False)

    def _write(
        self, root: Root, name: bytes, key: Key, header: bytes, payload: memoryview, used_ns: int, direct: bool
    ) -> int:
        draft = root.create(name, direct)
        try:
            write_record(self._io, draft.fd, header, payload)
            os.utime(draft.fd, ns=(used_ns, used_ns))
            if self._fsync != "none":
                self._io.sync_data(draft.fd)
            size = os.fstat(draft.fd).st_blocks * 512
            try:
                draft.publish(name)
            except FileExistsError:
                if there := self._of_another(root, name, key, len(payload)):
                    size = there
                else:
                    draft.publish(name)
            if self._fsync == "full":
                root.sync_folder(name)
            return size
        finally:
            draft.close()

    def _of_another(self, root: Root, name: bytes, key: Key, length: int) -> int:
        """The name is taken: by another process that shares the root (its size), or by rubbish, which goes (0)."""
        try:
            fd = root.open(name, False)
        except OSError as error:
            if error.errno not in (*GONE, *NOT_OURS):
                raise
        else:
            try:
                about = os.fstat(fd)
                header = self._head(fd) if stat.S_ISREG(about.st_mode) else None
                whole = about.st_size == file_bytes(length)
                if whole and header is not None and header.key == key and header.stored_bytes == length:
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
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EISDIR, "not a file")
            size, identity = about.st_blocks * 512, (about.st_ino, about.st_mtime_ns)
            asked = about.st_size == file_bytes(len(into))
            page, checksum = read_record(self._io, fd, into if asked else into[:0]) or (None, 0)
            header = None if page is None else unpack(page)
            if header is None or header.key != key or file_bytes(header.stored_bytes) != about.st_size:
                return Seen(False, 0, size, identity)
            if header.stored_bytes != len(into):
                return Seen(True, header.stored_bytes, size, identity)
            if checksum != header.checksum:
                return Seen(False, 0, size, identity)
            try:
                os.utime(fd, ns=(used_ns, used_ns))
            except OSError:
                self._count("recency_not_kept")
            return Seen(True, len(into), size, identity)
        finally:
            os.close(fd)

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

    def _head(self, fd: int) -> Header | None:
        page = bytearray(HEADER_BYTES)
        return unpack(memoryview(page)[: max(0, self._io.readv(fd, [memoryview(page)], 0))])
