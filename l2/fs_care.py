"""Management of the fs adapter's directories: check every file, and give back what is of no use to anybody.

    verify    every file that could be one of ours is read: header, key, name, length, checksum.  Rubbish goes.
    compact   spares, temporaries of dead processes, marks that were never finished, files that no key leads to (another
              secret, another root since), index entries without a file, folders without files

Both walk the directories, not the index: the directories are the truth.  Neither counts as a use of what it reads.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from kvkeep.l2.adapter import Key, Verified
from kvkeep.l2.fs_index import NAME_BYTES
from kvkeep.l2.fs_objects import ObjectFiles
from kvkeep.l2.fs_room import Room
from kvkeep.l2.fs_root import FOLDERS, Root
from kvkeep.l2.fs_tally import GONE, NOT_OURS, Tally

_STEP = 64  # files that a step of a compaction looks into
_STEP_S = 0.1  # that a step may take to remove spares

Where = Callable[[Key], tuple[Root, bytes]]


class Care:
    """``where`` says in which root, and under which name, a key belongs."""

    def __init__(
        self, roots: list[Root], files: ObjectFiles, room: Room, where: Where, shared: bool, tally: Tally
    ) -> None:
        self._roots, self._files, self._room, self._where = roots, files, room, where
        self._shared, self._tally = shared, tally

    def verify(self, cursor: bytes, nbytes: int) -> Verified:
        """Cursor: number of the root, name of the last file."""
        objects = read = corrupt = unreadable = 0
        details: list[str] = []
        number, after = (cursor[0], cursor[1 : 1 + NAME_BYTES]) if cursor else (0, b"")
        for root in self._roots[number:]:
            last = after
            for name in root.names_from(after[0] if after else 0, after):
                if read >= nbytes:
                    return Verified(objects, read, corrupt, unreadable, details, bytes([root.number]) + last)
                last = name
                try:
                    size, why = self._check(root, name)
                except OSError as error:
                    if error.errno not in (*GONE, *NOT_OURS):
                        unreadable += 1
                        details.append(f"{name.hex()} in {root.path} cannot be read: {error.strerror}")
                    continue
                objects, read = objects + 1, read + size
                if why:
                    corrupt += 1
                    details.append(f"{name.hex()} in {root.path}: {why}; it is removed")
            after = b""
        unreadable += sum(root.take_unreadable() for root in self._roots)
        return Verified(objects, read, corrupt, unreadable, details, b"")

    def _check(self, root: Root, name: bytes) -> tuple[int, str]:
        """Bytes of the payload, and what is wrong.  Raises OSError."""
        known = self._room.index.begin_read(name)
        try:
            header = self._files.read_header(root, name)
            if header is None:
                return 0, self._remove(root, name, "the header does not verify")
            if root.name(header.key) != name:
                return 0, self._remove(root, name, "the name is not that of its key")
            seen = self._files.fetch(root, name, header.key, header.stored_bytes, 0)
            if seen.header is None:
                return 0, self._remove(root, name, "the payload does not verify", seen.identity)
            return header.stored_bytes, ""
        finally:
            if known:
                self._room.index.end_read(name)

    def _remove(self, root: Root, name: bytes, why: str, only: tuple[int, int] | None = None) -> str:
        self._tally.count("corrupt")
        if not self._room.remove(root, name, only) and name not in self._room.index:
            try:
                root.unlink(name)  # nobody knew it
            except OSError as error:
                if error.errno not in GONE:
                    raise
        return why

    # ---- compact -----------------------------------------------------------------------------------------------------

    def compact(self) -> Iterator[tuple[str, int]]:
        while dropped := self._room.drop_spares(_STEP_S):
            yield "spare_bytes_removed", dropped
        for root in self._roots:
            before = self._tally.counters["stale_temps_removed"]
            root.remove_dead_temps()
            yield "stale_temporaries_removed", self._tally.counters["stale_temps_removed"] - before
            if not self._shared:
                yield "unfinished_marks_removed", root.remove_dead_marks()
            for number, folder in enumerate(FOLDERS):
                yield from self._compact_folder(root, number)
                if root.remove_folder(folder):
                    yield "empty_folders_removed", 1

    def _compact_folder(self, root: Root, number: int) -> Iterator[tuple[str, int]]:
        began = self._room.index.times(1)[0]
        before = self._tally.counters["truncated_removed"]
        there = {found.name for found in root.scan(FOLDERS[number])}
        yield "truncated_files_removed", self._tally.counters["truncated_removed"] - before
        gone = [name for name in self._room.index.names_in(number, root.number) if name not in there]
        forgotten = sum(self._room.index.forget(name, older_than=began) for name in gone)
        yield "vanished_files_forgotten", forgotten
        removed = 0
        for at, name in enumerate(sorted(there)):
            removed += self._is_lost(root, name)
            if at % _STEP == _STEP - 1 or at == len(there) - 1:
                yield "unreachable_files_removed", removed
                removed = 0

    def _is_lost(self, root: Root, name: bytes) -> bool:
        """No key leads to this file: it is removed."""
        try:
            header = self._files.read_header(root, name)
            if header is not None and self._where(header.key) == (root, name):
                return False
            self._remove(root, name, "")
        except OSError as error:
            if error.errno in (*GONE, *NOT_OURS, errno.EIO):
                return False
            self._tally.failed("compact", root.path, error)
            return False
        return True
