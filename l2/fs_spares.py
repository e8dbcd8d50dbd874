"""Files of evicted objects that the fs adapter keeps to write into again, since blocks that have been written before
take a write faster than a new file, for which the file system has to find space (half as fast again on ext4).

    object ──set_aside──► spare (a temporary name) ──take──► written over, then named like any new file
                               └──drop──► removed from the medium

A spare belongs to the bytes on the medium until it is dropped: `CapacityIndex` counts it.  Only what is evicted becomes
one, never what is deleted: what somebody wants gone leaves the medium.  A killed process leaves its spares as it leaves
other temporaries.  There are none where roots are shared: another process might still be reading the file.

If the power goes, an old name may come back with new content, which its header, key and checksum turn into a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvkeep.l2.fs_io import PAGE
from kvkeep.l2.fs_root import Root

_EXTENTS = (0, PAGE, 2 * PAGE)  # blocks that a file system may have added to a file for its extents


class Spare(NamedTuple):
    temp: str
    root: int
    size: int  # on the medium


class Spares:
    """Thread-safe.  ``gone(size)`` is told of bytes that left the medium."""

    def __init__(self, roots: list[Root], gone: Callable[[int], None]) -> None:
        self._roots, self._gone = roots, gone
        self._by_size: dict[tuple[int, int], list[str]] = {}  # (root, size): the latest is taken first
        self._bytes = self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._bytes

    def put(self, spare: Spare) -> None:
        with self._lock:
            self._by_size.setdefault((spare.root, spare.size), []).append(spare.temp)
            self._bytes += spare.size
            self._count += 1

    def take(self, root: int, size: int) -> Spare | None:
        """One that is as large as a file of ``size`` bytes.  It is the caller's, and so are its bytes."""
        with self._lock:
            for more in _EXTENTS:
                if (root, size + more) in self._by_size:
                    return self._pop((root, size + more))
        return None

    def _pop(self, kind: tuple[int, int]) -> Spare:
        temps = self._by_size[kind]
        temp = temps.pop()
        if not temps:
            del self._by_size[kind]
        self._bytes -= kind[1]
        self._count -= 1
        return Spare(temp, *kind)

    def drop(self, size: int, root: int | None = None, until: float | None = None) -> int:
        """Remove spares of ``size`` bytes together, or all there are, in one root or any; until a time (monotonic).
        How many bytes are free now."""
        freed = 0
        while freed < size and (until is None or time.monotonic() < until):
            with self._lock:
                kind = next((kind for kind in self._by_size if root is None or kind[0] == root), None)
                if kind is None:
                    break
                spare = self._pop(kind)
            if not self._roots[spare.root].drop_temp(spare.temp):
                self.put(spare)  # the medium does not let go of it: it stays counted
                break
            self._gone(spare.size)
            freed += spare.size
        return freed
