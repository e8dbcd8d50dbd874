"""Management of the fs adapter's directories: check every file, and give back what is of no use to anybody.

    verify    every file that could be one of ours is read: header, key, name, length, checksum.  Rubbish goes.
    compact   spares, temporaries of dead processes, marks that were never finished, files that no key leads to (another
              secret, another root since), index entries without a file, folders without files

Both walk the directories, not the index: the directories are the truth.  Neither counts as a use of what it reads.

Others store and evict meanwhile.  A file is pinned while it is looked into; one that cannot be, because the index does
not know it, may be on its way out, and be written over under our eyes.  So a file is judged only if it is still there
afterwards, the same one under the same name, and its removal makes sure of that, too (`Room.discard`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvkeep.l2.adapter import Key, Verified
from kvkeep.l2.fs_index import NAME_BYTES
from kvkeep.l2.fs_objects import ObjectFiles, Seen
from kvkeep.l2.fs_room import Room
from kvkeep.l2.fs_root import FOLDERS, Root, identity_of
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
                    details.append(f"{name.hex()} in {root.path}: {why}")
            after = b""
        unreadable += sum(root.take_unreadable() for root in self._roots)
        return Verified(objects, read, corrupt, unreadable, details, b"")

    def _check(self, root: Root, name: bytes) -> tuple[int, str]:
        """Bytes of the payload, and what is wrong.  Raises OSError."""
        with self._pinned(name):
            seen = self._files.read_header(root, name)
            header = seen.header
            if header is None:
                return 0, self._judge(root, name, seen, "the header does not verify")
            if root.name(header.key) != name:
                return 0, self._judge(root, name, seen, "the name is not that of its key")
            seen = self._files.fetch(root, name, header.key, header.stored_bytes, 0)
            if seen.header is None:
                return 0, self._judge(root, name, seen, "the payload does not verify")
            return header.stored_bytes, ""

    @contextmanager
    def _pinned(self, name: bytes) -> Iterator[None]:
        """If the index knows it."""
        known = self._room.index.begin_read(name)
        try:
            yield
        finally:
            if known:
                self._room.index.end_read(name)

    def _judge(self, root: Root, name: bytes, seen: Seen, why: str) -> str:
        """It is no good: what to say of it.  Raises FileNotFoundError if it is gone, or another one, by now."""
        if self._discard(root, name, seen):
            return f"{why}; it is removed"
        return f"{why}; it cannot be removed"

    def _discard(self, root: Root, name: bytes, seen: Seen) -> bool:
        """False = it stays.  Raises FileNotFoundError like `_judge`."""
        gone = self._room.discard(root, name, seen.identity)
        if not gone and identity_of(root.stat(name)) != seen.identity:
            raise FileNotFoundError(errno.ENOENT, "another file by now")
        self._tally.count("corrupt")
        return gone

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
        there = {found.name for found in root.scan(FOLDERS[number], self._room.discard)}
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
            with self._pinned(name):
                seen = self._files.read_header(root, name)
                if seen.header is not None and self._where(seen.header.key) == (root, name):
                    return False
                return self._discard(root, name, seen)
        except OSError as error:
            if error.errno in (*GONE, *NOT_OURS, errno.EIO):
                return False
            self._tally.failed("compact", root.path, error)
            return False
