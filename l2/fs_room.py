"""Room for the fs adapter's files: making it, on demand and ahead of need, and knowing what is there.

The index says what goes; here it goes.  A file that cannot be removed stays counted.  One thread, the janitor, evicts
when usage is above the watermark, and, where several processes share the roots, looks at them again every few seconds.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvkeep.l2.catalogue import CATALOGUE, MAX_MANIFEST
from kvkeep.l2.fs_index import CapacityIndex, Found, Victim
from kvkeep.l2.fs_io import PAGE
from kvkeep.l2.fs_objects import ObjectFiles
from kvkeep.l2.fs_root import FOLDERS, Discard, Identity, Root, identity_of
from kvkeep.l2.fs_spares import Spare, Spares
from kvkeep.l2.fs_tally import GONE, Tally

RESCAN_S = 10.0  # where roots are shared; longer if a scan takes long
METADATA = 2 * PAGE  # blocks that a file system may add to a file for its extents
_PATIENCE_S = 5.0
_NOTHING = (-1, 0)  # fits no spare
_LEAST_SPARES = 16  # are kept, however large, when stores have to wait for room
_STEP = 256 << 20  # bytes that the janitor takes out of the index at once
_SCAN_THREADS = 4
_TIDY_S = 1.0  # for spares, at the end; whoever opens the root next removes what is left of them
_EXCESS_STEP = 64  # files of tenants above their quotas that go before the books are looked at again

log = logging.getLogger("kvkeep.l2.fs")


class Eviction(NamedTuple):
    policy: str
    watermark: float  # of the limit
    ratio: float  # of the limit
    quotas: dict[str, int]  # bytes by tenant, with IsolatedLRU


class Room:
    """See the module."""

    def __init__(
        self,
        roots: list[Root],
        files: ObjectFiles,
        index: CapacityIndex,
        eviction: Eviction,
        shared: bool,
        tally: Tally,
    ) -> None:
        self.index = index
        self._files = files
        self._roots, self._shared, self._tally = roots, shared, tally
        self._spares = Spares(roots, index.spare_gone)
        self._high = int(eviction.watermark * index.limit)
        self._share = int(eviction.ratio * index.limit)
        self._stop = False
        self._wake = threading.Event()
        self._janitor = threading.Thread(target=self._clean, name="kvkeep-fs-janitor", daemon=True)

    def start(self) -> None:
        self._janitor.start()

    def stop(self, deadline_s: float) -> bool:
        self._stop = True
        self._wake.set()
        self._janitor.join(deadline_s)
        self.drop_spares(_TIDY_S)
        return not self._janitor.is_alive()

    # ---- making room -------------------------------------------------------------------------------------------------

    def reserve(self, name: bytes, size: int, root: Root, namespace: bytes = b"") -> str | None:
        """Room for a file of ``size`` bytes: a spare to write over, or "" for a new file; None = the limit is reached
        and nothing can go.  Whose it is, comes back to his quota, if he is above it."""
        patience = time.monotonic() + _PATIENCE_S
        new = min(size + METADATA, self.index.limit)
        while True:
            spare = self._spares.take(root.number, size)
            if not (over := self._reserved(name, new, namespace, spare)):
                return "" if spare is None else spare.temp
            if spare is not None:
                self._spares.put(spare)
                gone = self.evict(over, _NOTHING)  # a little is missing
            elif self._spares.drop(over):
                continue  # they were not of this size
            else:  # of this size one is enough: the next turn finds its file
                gone = self.evict(max(1, over - METADATA), (root.number, size))
            if not gone:
                if not self.index.leaving or time.monotonic() > patience:
                    return None
                time.sleep(0.001)  # another thread is making room

    def _reserved(self, name: bytes, size: int, namespace: bytes, spare: Spare | None) -> int:
        """0, or so many bytes are missing.  The spare's bytes are given up once, so this reserves once."""
        self.index.expect(name, size, namespace)
        if self.index.excess():
            self.evict_excess()
        return self.index.reserve(name, size, 0 if spare is None else spare.size)

    def evict_excess(self) -> None:
        """What tenants have above their quotas goes, but for what is being read."""
        while self.index.excess() and (victims := self.index.excess_victims(_EXCESS_STEP)):
            gone = self._evict_all(victims, None)
            self._tally.count("evicted_above_quota", gone)
            if not gone:
                return

    def evict(self, size: int, fitting: tuple[int, int] | None = None) -> int:
        """How many objects went, for so many bytes if possible; 0 = none can.  Their files become spares: those that
        fit a root and size, if that is given, and not more than what the janitor evicts at once."""
        return self._evict_all(self.index.victims(size), fitting)

    def evict_for_full_disk(self, size: int, root: Root) -> bool:
        """So many bytes less on this root's disk, if possible.  False = nothing can go."""
        size -= (freed := self._spares.drop(size, root.number))
        victims = self.index.victims(size, root.number) if size > 0 else []
        return self._evict_all(victims, _NOTHING) > 0 or freed > 0

    def drop_spares(self, seconds: float | None = None) -> int:
        """Bytes that are free now."""
        return self._spares.drop(self.index.limit, until=None if seconds is None else time.monotonic() + seconds)

    def _evict_all(self, victims: list[Victim], fitting: tuple[int, int] | None) -> int:
        gone = sum(self._evict_one(victim, fitting) for victim in victims)
        self._tally.count("evicted", gone)
        return gone

    def _evict_one(self, victim: Victim, fitting: tuple[int, int] | None = None) -> bool:
        root = self._roots[victim.root]
        if self._is_kept(victim, fitting) and (temp := root.set_aside(victim.name)):
            # Known as a spare before it is counted as one: whoever takes it at once finds its bytes still used.
            self._spares.put(Spare(temp, victim.root, victim.size))
            self.index.set_aside(victim.name, victim.size)
            return True
        try:
            root.unlink(victim.name)
        except OSError as error:
            if error.errno not in GONE:
                self._tally.failed("remove", root.path, error)
                self.index.restore(victim.name)
                return False
        self.index.gone(victim.name)
        return True

    def _is_kept(self, victim: Victim, fitting: tuple[int, int] | None) -> bool:
        if self._shared or self._stop:
            return False
        if fitting is None:
            return self._spares.nbytes + victim.size <= self._share
        root, size = fitting
        fits = victim.root == root and size <= victim.size <= size + METADATA
        return fits and (self._spares.nbytes + victim.size <= self._share or len(self._spares) < _LEAST_SPARES)

    def remove(self, root: Root, name: bytes, only: Identity | None = None) -> bool:
        """``only``: if it is still this file."""
        known = self.index.take(name)
        if not known and not self._shared:
            return False
        try:
            _unlink(root, name, only)
        except OSError as error:
            if error.errno in GONE:
                if known:
                    self.index.gone(name)
                return False
            if known:
                self.index.restore(name)
            if error.errno != errno.EEXIST:
                self._tally.failed("remove", root.path, error)
            return False
        if known:
            self.index.gone(name)
        return True

    def discard(self, root: Root, name: bytes, only: Identity) -> bool:
        """A file that is no good, whether or not the index knows it.  False = it is another one by now, or does not go.

        While it goes its name is ours, so nobody can store under it what would then go instead."""
        if self.remove(root, name, only):
            return True
        if not self.index.begin_store(name):
            return False
        try:
            if name not in self.index:
                _unlink(root, name, only)
                return True
        except OSError as error:
            if error.errno not in (*GONE, errno.EEXIST):
                self._tally.failed("remove", root.path, error)
        finally:
            self.index.end_store(name)
        return False

    # ---- the janitor -------------------------------------------------------------------------------------------------

    def stored(self) -> None:
        if self.index.held > self._high or self.index.excess():
            self._wake.set()

    def _clean(self) -> None:
        pause = due = None
        if self._shared:
            pause, due = RESCAN_S, time.monotonic() + RESCAN_S
        while not self._stop:
            self._wake.wait(pause)
            self._wake.clear()
            try:
                if due is not None and (started := time.monotonic()) >= due and not self._stop:
                    self.rescan()
                    pause = max(RESCAN_S, 20 * (time.monotonic() - started))
                    due = time.monotonic() + pause
                self.evict_excess()
                if self.index.used > self._high:
                    target = max(0, self.index.used - self._share)
                    while (over := self.index.used - target) > 0 and not self._stop:
                        if not self.evict(min(over, _STEP)):
                            break
                self._spares.drop(self.index.held - self._high)
            except Exception:
                self._tally.count("janitor_failed")
                log.exception("fs: the janitor stumbled")

    def rescan(self) -> None:
        """Make the index say what is in the roots now.  Names stored since it began are left alone."""
        began = self.index.times(1)[0]
        self.index.begin_scan()
        found = scan(self._roots, self.discard)
        there = {file.name for file in found}
        for name in self.index.names():
            if name not in there:
                self.index.forget(name, older_than=began)
        self.adopt(found)

    def adopt(self, found: list[Found]) -> None:
        """These are there.  Where tenants are told apart, the headers of those that are new say whose they are."""
        catalogue = [file for file in found if self._roots[file.root].is_catalogue(file.name)]
        namespaces = {file.name: CATALOGUE for file in catalogue}
        if self.index.tenants is not None:
            for file in catalogue:
                if file.name not in self.index:
                    self._learn(file)
            new = [file for file in found if file.name not in self.index and file.name not in namespaces]
            with ThreadPoolExecutor(_SCAN_THREADS) as pool:
                namespaces |= dict(zip((file.name for file in new), pool.map(self._namespace_of, new), strict=True))
        self.index.adopt(found, namespaces)

    def _namespace_of(self, file: Found) -> bytes:
        """b"" = it cannot be read; then it is nobody's."""
        header = self._files.header(self._roots[file.root], file.name)
        return b"" if header is None else header.key.namespace

    def _learn(self, file: Found) -> None:
        root = self._roots[file.root]
        header = self._files.header(root, file.name)
        if header is None or root.name(header.key) != file.name:
            return
        try:
            seen = self._files.fetch(root, file.name, header.key, MAX_MANIFEST, 0)
        except OSError as error:
            if error.errno not in GONE:
                self._tally.failed("catalogue", root.path, error)
            return
        if seen.header is not None:
            self.index.learn(header.key.chunk, bytes(seen.payload))


def _unlink(root: Root, name: bytes, only: Identity | None) -> None:
    """Raises FileExistsError if it is not ``only``."""
    if only is not None and identity_of(root.stat(name)) != only:
        raise FileExistsError(errno.EEXIST, "another file by now")
    root.unlink(name)


def scan(roots: list[Root], discard: Discard | None = None) -> list[Found]:
    """Every object.  Raises OSError rather than leave something out."""
    work = [(root, folder) for root in roots for folder in FOLDERS]
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        return [file for files in pool.map(lambda one: one[0].scan(one[1], discard), work) for file in files]
