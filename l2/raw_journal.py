"""What changed since the tables were written: a ring of pages, and the tables that let it move on.

    page    64 bytes of head, then up to 38 records (raw_layout.RECORD)
    record  INSERT  this object is in this slot (its header and payload are on the medium already)
            DROP    these slots hold nothing any more; ``slot`` says how many are named in namespace and chunk
            ASSIGN  this slab has class ``size`` and generation ``sequence`` from here on, and is empty

Pages are numbered (LSN) and written strictly one after the other, by whoever comes first for all who wait (group
commit); a store is acknowledged after its page.  So the pages are a gapless history, and what a killed process had
acknowledged is in it.  Each page names the *tail*: the first page that is still needed.

A slab is *dirty* from the page that first changed it until its table is written again; the tail is the oldest such
page.  Tables are written a few at a time as the ring fills past its half, by the stores themselves: nothing waits for
a quiet moment, and no amount of content is too large.  Pages at or behind the tail of the last page on the medium are
never overwritten.

If a page cannot be written its records stay first in line, and whoever waited learns the errno and appends what undoes
its own.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvkeep.l2.raw_io import Engine, Memory, Transfer
from kvkeep.l2.raw_layout import JOURNAL_START, RECORD, Geometry, Head, Records, records_checksum

I64 = npt.NDArray[np.int64]

INSERT, DROP, ASSIGN = 1, 2, 3
NAMED = 16  # slots that one DROP record names

_MAGIC = b"KVKEEPJ1"
_PAGE = struct.Struct("<8s16sQQII")  # magic uuid lsn tail records 0
_SUM = struct.Struct("<Q")
_PAGE_HEAD = 64
_MOST_PAGES = 64  # in one write
_TABLES_AT_ONCE = 8
_MARGIN = 8  # pages that are used only to move the tail

Snapshot = Callable[[int], tuple[int, int, Records]]  # slab -> class, generation, live records; under the mutex


def drops(slabs: Sequence[int], slots: Sequence[int]) -> Records:
    """Records that empty these slots."""
    groups: dict[int, list[int]] = {}
    for slab, slot in zip(slabs, slots, strict=True):
        groups.setdefault(slab, []).append(slot)
    out: list[tuple[int, list[int]]] = []
    for slab, named in groups.items():
        out += [(slab, named[i : i + NAMED]) for i in range(0, len(named), NAMED)]
    records = np.zeros(len(out), dtype=RECORD)
    records["op"] = DROP
    for record, (slab, named) in zip(records, out, strict=True):
        packed = np.zeros(NAMED, dtype="<u4")
        packed[: len(named)] = named
        words = packed.view("<u8")
        record["slab"], record["slot"] = slab, len(named)
        record["namespace"], record["chunk"] = words[:4], words[4:]
    return records


def dropped(records: Records) -> tuple[I64, I64, I64]:
    """(record number, slab, slot) of every slot that these DROP records name."""
    words = np.concatenate((records["namespace"], records["chunk"]), axis=1)
    named = np.ascontiguousarray(words).view("<u4").reshape(len(records), NAMED)
    rows, columns = np.nonzero(np.arange(NAMED) < records["slot"][:, None])
    return rows, records["slab"][rows].astype(np.int64), named[rows, columns].astype(np.int64)


def assign(slab: int, blocks: int, generation: int) -> Records:
    record = np.zeros(1, dtype=RECORD)
    record["op"], record["slab"], record["size"], record["sequence"] = ASSIGN, slab, blocks, generation
    return record


def per_page(geometry: Geometry) -> int:
    return (geometry.block - _PAGE_HEAD) // RECORD.itemsize


def pack_page(geometry: Geometry, lsn: int, tail: int, records: Records) -> bytes:
    head = _PAGE.pack(_MAGIC, geometry.uuid, lsn, tail, len(records), 0)
    body = records.tobytes()
    page = head + _SUM.pack(xxhash.xxh3_64_intdigest(head + body)) + bytes(_PAGE_HEAD - _PAGE.size - _SUM.size) + body
    return page.ljust(geometry.block, b"\0")


def unpack_page(geometry: Geometry, index: int, data: bytes | memoryview) -> tuple[int, int, Records] | None:
    """LSN, tail, records of the page at place ``index`` of the ring."""
    head = bytes(data[: _PAGE.size])
    if head[:24] != _MAGIC + geometry.uuid:
        return None
    _, _, lsn, tail, count, _ = _PAGE.unpack(head)
    total = geometry.journal_pages
    if count > per_page(geometry) or lsn % total != index or not lsn - total < tail <= lsn:
        return None
    body = bytes(data[_PAGE_HEAD : _PAGE_HEAD + count * RECORD.itemsize])
    if _SUM.unpack_from(data, _PAGE.size)[0] != xxhash.xxh3_64_intdigest(head + body):
        return None
    return lsn, tail, np.frombuffer(body, dtype=RECORD)


class Journal:
    """Thread-safe, except where a method says that the caller holds the mutex (which is the adapter's)."""

    def __init__(
        self, geometry: Geometry, engine: Engine, mutex: threading.Lock, snapshot: Snapshot, flush: bool
    ) -> None:
        self._geometry, self._engine, self._mutex, self._snapshot = geometry, engine, mutex, snapshot
        self._flush = flush  # before `commit` says that it is done
        self._per_page = per_page(geometry)
        self._queue: list[Records] = []
        self.queued = 0
        self._appended = self._written = 0  # records, ever
        self._commit_lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._pages = Memory(_MOST_PAGES * geometry.block)
        self._dirty: dict[int, int] = {}
        self._writing: dict[int, int] = {}
        self.next_lsn = 1
        self._tail = 1
        self._tail_on_medium = 1
        self.tables_written = 0

    def resume(self, next_lsn: int, tail: int, dirty: dict[int, int]) -> None:
        """Go on after recovery."""
        self.next_lsn, self._tail, self._tail_on_medium = next_lsn, tail, tail
        self._dirty = dict(dirty)

    def append(self, records: Records) -> None:
        """Mutex held, in the same hold as the change itself: a table written later has it anyhow."""
        for slab in np.unique(records["slab"]).tolist():
            self._dirty.setdefault(slab, self.next_lsn)
        self._queue.append(records)
        self._appended += len(records)
        self.queued += len(records)

    def mark(self, slab: int) -> None:
        """Mutex held: the slab's table should be written again, for what no record says."""
        self._dirty.setdefault(slab, self.next_lsn)

    @property
    def used(self) -> int:
        """Pages of the ring that cannot be overwritten."""
        return self.next_lsn - self._tail_on_medium

    def commit(self, flush: bool = True) -> int:
        """Everything appended before this call is on the medium.  0 or errno."""
        with self._mutex:
            target = self._appended
        if self._written < target:
            with self._commit_lock:
                while self._written < target:
                    if number := self._make_room() or self._write_some():
                        return number
        return self._engine.sync() if flush and self._flush else 0

    def anchor(self) -> int:
        """Write a page even if nothing is queued: a start then begins at the present tail.  0 or errno."""
        with self._commit_lock:
            return self._write_some()

    def _write_some(self) -> int:
        geometry, total = self._geometry, self._geometry.journal_pages
        with self._mutex:
            pages = min(_MOST_PAGES, max(1, total - self.used - _MARGIN))
            if self.used >= total:
                return errno.ENOSPC  # tables could not be written for long
            records = np.concatenate([np.empty(0, dtype=RECORD), *self._queue])
            taken, rest = records[: pages * self._per_page], records[pages * self._per_page :]
            self._queue = [rest] if len(rest) else []
            lsn, tail = self.next_lsn, self._tail
            pages = max(1, -(-len(taken) // self._per_page))
        view = self._pages.view
        for i in range(pages):
            part = taken[i * self._per_page : (i + 1) * self._per_page]
            view[i * geometry.block : (i + 1) * geometry.block] = pack_page(geometry, lsn + i, tail, part)
        transfers: list[Transfer] = []
        done = 0
        while done < pages:
            at = (lsn + done) % total
            run = min(pages - done, total - at)
            piece = (self._pages.address + done * geometry.block, run * geometry.block)
            transfers.append(Transfer(JOURNAL_START + at * geometry.block, (piece,)))
            done += run
        results = self._engine.run(True, transfers)
        with self._mutex:
            if number := max(results):
                self._queue.insert(0, taken)
                return number
            self.next_lsn += pages
            self._tail_on_medium = tail
            self._written += len(taken)
            self.queued -= len(taken)
        return 0

    def _make_room(self) -> int:
        """Write some tables if the ring is more than half full, and enough of them if it is about to be full."""
        total = self._geometry.journal_pages
        while True:
            with self._mutex:
                ahead = self.next_lsn - self._tail  # what would be in use after the next page
                if 2 * ahead < total:
                    return 0
                full = ahead >= total - _MARGIN
                count = max(_TABLES_AT_ONCE, len(self._dirty) * _MOST_PAGES // max(1, total - ahead))
                slabs = sorted(self._dirty, key=self._dirty.__getitem__)[:count]
            number = self.checkpoint(slabs)
            if number and full:
                return number
            if not full or not slabs:
                return 0

    def checkpoint(self, slabs: Sequence[int]) -> int:
        """Write the tables of ``slabs``, and let go of the pages that only they needed.  0 or errno."""
        geometry = self._geometry
        with self._table_lock:
            for i in range(0, len(slabs), _TABLES_AT_ONCE):
                part = slabs[i : i + _TABLES_AT_ONCE]
                transfers, memory = [], []
                with self._mutex:
                    lsn = self.next_lsn - 1
                    taken = [self._snapshot(slab) for slab in part]
                    for slab in part:
                        self._writing[slab] = self._dirty.pop(slab, self.next_lsn)
                for slab, (blocks, generation, records) in zip(part, taken, strict=True):
                    size = geometry.block - (-records.nbytes // geometry.block) * geometry.block
                    memory.append(table := Memory(size))
                    head = Head(slab, blocks, generation, lsn, len(records), records_checksum(records.tobytes()))
                    table.view[: geometry.block] = head.pack(geometry)
                    table.view[geometry.block : geometry.block + records.nbytes] = records.tobytes()
                    transfers.append(Transfer(geometry.slab_offset(slab), ((table.address, size),)))
                number = max(self._engine.run(True, transfers)) or self._engine.sync()
                with self._mutex:
                    for slab in part:
                        mark = self._writing.pop(slab)
                        if number:
                            self._dirty[slab] = min(mark, self._dirty.get(slab, mark))
                    marks = (*self._dirty.values(), *self._writing.values())
                    self._tail = min(marks, default=self.next_lsn)
                    self.tables_written += len(part)
                if number:
                    return number
        return 0

    def write_foot(self, slab: int, blocks: int, generation: int) -> int:
        """The copy of a head that is needed if the head itself is damaged: class and generation."""
        geometry = self._geometry
        memory = Memory(geometry.block)
        memory.view[: geometry.block] = Head(slab, blocks, generation, 0, 0, 0).pack(geometry)
        at = geometry.foot_offset(slab)
        return max(self._engine.run(True, [Transfer(at, ((memory.address, geometry.block),))]))

    def dirty_slabs(self) -> list[int]:
        """Mutex held."""
        return sorted(self._dirty)
