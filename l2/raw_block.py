"""The `raw_block` adapter: objects in slots of a block device, or of one preallocated file.

    {"type": "raw_block", "path": "/dev/nvme1n1" | "/nvme/kv.raw", "size_gb": 500, "format": false,
     "direct_io": "auto|on|off", "io": "auto|uring|threads", "queue_depth": 32, "durability": "data|none",
     "eviction": {"eviction_policy": "LRU|IsolatedLRU|noop", "trigger_watermark": 0.95, "eviction_ratio": 0.05,
                  "tenant_quotas": {"team-a": 64}}}

A file that does not exist is made with ``size_gb``; a device is used whole, or up to ``size_gb``.  It belongs to one
process at a time.

    raw_medium     ownership, size, what lies there, O_DIRECT proven
    raw_layout     superblock, slabs, slots, seals: the bytes
    raw_io, _uring batches of reads and writes with depth
    raw_objects    rows, index            raw_slabs   slots, classes, who goes
    raw_journal    what changed, tables   raw_recovery  all of it back again
    raw_room       room and eviction      raw_store   the way in and out

Invariants:

* with "durability": "data" a header is written when its payload is durable; the journal's page comes after both, and
  only then the store says OK: whatever is cut off is a miss.  "none" leaves the flushes out and relies on the checksum;
* every load checks seal, key, length and checksum; what does not verify is removed and counted;
* a start reads the tables and the journal; everything acknowledged is there after a kill, and usage is the truth before
  the first store.  What does not verify costs a scan of headers, never a wrong object;
* after a kill nothing of the old process is still being written: the medium is locked until the kernel is done.
"""

from __future__ import annotations

import builtins
import fcntl
import logging
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from kvkeep.l2 import catalogue
from kvkeep.l2.adapter import (
    OK,
    Adapter,
    AdapterError,
    Fetched,
    Item,
    Key,
    Listing,
    Outcome,
    Result,
    TenantUse,
    Usage,
    Verified,
)
from kvkeep.l2.options import Options
from kvkeep.l2.raw_io import Engine, Threads
from kvkeep.l2.raw_layout import Geometry
from kvkeep.l2.raw_medium import PAGE, Medium, claim
from kvkeep.l2.raw_recovery import read_heads, read_history, recover
from kvkeep.l2.raw_room import Eviction, Room
from kvkeep.l2.raw_store import Store
from kvkeep.l2.raw_uring import Uring
from kvkeep.l2.tenants import POLICY, quotas_of

GROUP = 64  # objects that go through their steps together
CATALOGUE_SLABS = 8  # entries need a slab of their size class: a medium of fewer slabs than this keeps none
COMPACT_TABLES = 16  # written in one step of a compaction
_CURSOR = struct.Struct("<Q")
_LIST_STEP = 65536
_CLOSED = Result(Outcome.UNAVAILABLE, detail="the adapter is closed")
_CLOSE_PATIENCE_S = 5.0

log = logging.getLogger("kvkeep.l2.raw_block")
T = TypeVar("T")


def make_engine(fd: int, io: str, queue_depth: int, path: str) -> Engine:
    if io != "threads":
        try:
            return Uring(fd, queue_depth)
        except OSError as error:
            if io == "uring":
                raise AdapterError(
                    f'raw_block {path}: the kernel refuses io_uring ({os.strerror(error.errno or 0)}): set "io": "auto"'
                ) from error
    return Threads(fd, queue_depth)


class RawBlockAdapter(Adapter):
    """See the module.  ``engine`` is for tests that stand between the adapter and its medium."""

    type_name = "raw_block"
    keeps_encodings = True

    def __init__(self, config: Mapping[str, object], engine: Callable[[Engine], Engine] | None = None) -> None:
        options = Options("raw_block", config)
        self.path = options.path("path")
        self._size = options.gib("size_gb", above=0) // PAGE * PAGE
        self._format = options.flag("format", False)
        self._direct_io = options.choice("direct_io", "auto", ("auto", "on", "off"))
        self._io = options.choice("io", "auto", ("auto", "uring", "threads"))
        self._queue_depth = options.count("queue_depth", 32, least=1, most=4096)
        self._flush = options.choice("durability", "data", ("none", "data")) == "data"
        eviction = Options("raw_block: eviction", options.table("eviction"), ignore=())
        policy = eviction.choice("eviction_policy", "LRU", ("LRU", POLICY, "noop"))
        watermark = eviction.number("trigger_watermark", 0.95, most=1.0, above=0)
        ratio = eviction.number("eviction_ratio", 0.05, most=1.0, above=0)
        quotas = quotas_of(eviction, policy)
        eviction.done()
        options.done()
        self._eviction = Eviction(policy, watermark, min(ratio, watermark), quotas)
        self._wrap = engine
        self.counters: Counter[str] = Counter()
        self._medium: Medium | None = None
        self._lost = ""  # why what the medium held is lost: it stays so until it is opened anew
        self._parts: tuple[Engine, Room, Store] | None = None
        self._state = threading.Condition()
        self._running = 0

    # Open and close

    def open(self) -> None:
        started = time.monotonic()
        medium = claim(self.path, self._size, self._direct_io, self._format)
        engine: Engine | None = None
        try:
            engine = make_engine(medium.fd, self._io, self._queue_depth, self.path)
            if self._wrap is not None:
                engine = self._wrap(engine)
            room = self._recover(medium, engine)
        except BaseException:
            if engine is not None:
                engine.close()
            os.close(medium.fd)
            raise
        store = Store(room, medium.memory_alignment, self._flush)
        self._read_catalogue(room, store)
        self._medium, self._parts, self._lost = medium, (engine, room, store), ""
        for note in medium.notes:
            log.warning("%s", note)
        log.info(
            "raw_block: %s open: %d objects, %.2f of %.2f GiB, O_DIRECT %s, %s, %.2f s",
            self.path,
            room.objects.count,
            room.slabs.bytes_used / (1 << 30),
            room.slabs.bytes_limit / (1 << 30),
            "on" if medium.direct else "off",
            engine.name,
            time.monotonic() - started,
        )

    def _recover(self, medium: Medium, engine: Engine) -> Room:
        geometry = medium.geometry
        heads = read_heads(geometry, engine)
        room = Room(geometry, engine, self._eviction, self._flush, sum(head.records for head in heads))
        room.counters = self.counters
        history, unreadable = read_history(geometry, engine)
        report = recover(geometry, engine, room.objects, room.slabs, heads, history)
        room.start_clock(report.clock)
        if report.gapless:
            room.journal.resume(report.next_lsn, report.tail, report.dirty)
        else:  # what the headers said is the new beginning; the next page says that nothing before it is needed
            used = [slab for slab in range(geometry.slabs) if room.slabs.blocks[slab]]
            room.journal.resume(report.next_lsn, report.next_lsn, dict.fromkeys(used, report.next_lsn))
        fresh = medium.formatted or not any(head.blocks for head in heads)
        if not report.gapless and not fresh:
            self.counters["journal_gaps"] += 1
        self.counters["slabs_scanned"] += len(report.scanned)
        self.counters["doubles"] += report.doubles
        self.counters["unreadable_at_open"] += unreadable + report.unreadable
        if report.scanned:
            log.warning(
                "raw_block: %s: %d of %d slabs were read header by header, because %s",
                self.path,
                len(report.scanned),
                geometry.slabs,
                "a table did not verify" if report.gapless else "the journal has a gap",
            )
        if report.scanned or not report.gapless:
            with room.mutex:
                dirty = room.journal.dirty_slabs()
            if not room.journal.checkpoint(dirty):
                room.journal.anchor()
        return room

    def _read_catalogue(self, room: Room, store: Store) -> None:
        """Whose what lies here is, if somebody has to know."""
        if room.tenants is None:
            return
        rows = room.objects.visible()
        keys = [room.objects.key(row) for row in rows[room.objects.kept(rows)].tolist()]
        manifests: dict[bytes, bytes] = {}
        for start in range(0, len(keys), GROUP):
            group = keys[start : start + GROUP]
            fetched = store.fetch([(key, catalogue.MAX_MANIFEST) for key in group])
            read = zip(group, fetched, strict=True)
            manifests |= {key.chunk: bytes(one.payload) for key, one in read if one.outcome == Outcome.OK}
        room.learn(manifests)
        room.evict_excess()

    def close(self) -> None:
        with self._state:
            parts, self._parts = self._parts, None
            self._state.wait_for(lambda: not self._running, _CLOSE_PATIENCE_S)
        if parts is None:
            return
        engine, room, _ = parts
        assert self._medium is not None
        if not (self._lost or self._medium.shrunk()):  # else it would not look new to the next one to open it
            self._write_index(engine, room)
        engine.close()
        fcntl.flock(self._medium.fd, fcntl.LOCK_UN)
        os.close(self._medium.fd)

    @staticmethod
    def _write_index(engine: Engine, room: Room) -> None:
        with room.mutex:
            changed = set(room.journal.dirty_slabs()) | set(np.flatnonzero(room.touched).tolist())
        room.journal.commit()
        if not room.journal.checkpoint(sorted(slab for slab in changed if room.slabs.blocks[slab])):
            room.journal.anchor()
        engine.sync()

    @contextmanager
    def _use(self) -> Iterator[tuple[Room, Store] | None]:
        with self._state:
            parts = self._parts
            if parts is not None:
                self._running += 1
        try:
            yield parts[1:] if parts is not None else None
        finally:
            if parts is not None:
                with self._state:
                    self._running -= 1
                    if not self._running:
                        self._state.notify_all()

    def trouble(self) -> str:
        """A file that somebody removed, replaced or cut still takes everything, and has lost it with the next start."""
        with self._use() as parts:
            if parts is None:
                return ""
            assert self._medium is not None
            self._lost = self._lost or self._medium.shrunk()
            return self._lost or self._medium.moved()

    @contextmanager
    def _working(self) -> Iterator[tuple[Room, Store] | Result]:
        """Like `_use`, or why nothing can be done."""
        with self._use() as parts:
            trouble = self.trouble()
            if trouble:
                yield Result(Outcome.UNAVAILABLE, detail=trouble)
            else:
                yield parts if parts is not None else _CLOSED

    # Objects

    def lookup(self, keys: Sequence[Key]) -> builtins.list[bool]:
        with self._working() as parts:
            if isinstance(parts, Result):
                return [False] * len(keys)
            room = parts[0]
            with room.mutex:
                rows = room.objects.find(keys)
                room.touch(rows[rows >= 0])
            return [bool(row >= 0) for row in rows]

    def store(self, items: Sequence[Item]) -> builtins.list[Result]:
        with self._working() as parts:
            if isinstance(parts, Result):
                return [parts] * len(items)
            results: builtins.list[Result] = []
            for start in range(0, len(items), GROUP):
                results += parts[1].store(items[start : start + GROUP])
            if trouble := self.trouble():  # since then
                return [Result(Outcome.UNAVAILABLE, detail=trouble)] * len(items)
            return results

    def load(self, items: Sequence[tuple[Key, memoryview]]) -> builtins.list[Result]:
        with self._working() as parts:
            if isinstance(parts, Result):
                return [parts] * len(items)
            results: builtins.list[Result] = []
            for start in range(0, len(items), GROUP):
                results += parts[1].load(items[start : start + GROUP])
            return results

    def fetch(self, items: Sequence[tuple[Key, int]]) -> builtins.list[Fetched]:
        with self._working() as parts:
            if isinstance(parts, Result):
                return [Fetched(parts)] * len(items)
            fetched: builtins.list[Fetched] = []
            for start in range(0, len(items), GROUP):
                fetched += parts[1].fetch(items[start : start + GROUP])
            return fetched

    def delete(self, keys: Sequence[Key]) -> int:
        with self._working() as parts:
            return parts[1].delete(keys) if not isinstance(parts, Result) else 0

    def list(self, cursor: bytes, limit: int) -> Listing:
        with self._use() as parts:
            if parts is None or limit <= 0:
                return Listing([], b"")
            objects = parts[0].objects
            at = _CURSOR.unpack(cursor)[0] if len(cursor) == _CURSOR.size else 0
            found: builtins.list[tuple[Key, int]] = []
            with parts[0].mutex:
                while at < objects.end and len(found) < limit:
                    rows = objects.visible(at, at + _LIST_STEP)[: limit - len(found)].tolist()
                    found += [(objects.key(row), objects.size(row)) for row in rows]
                    at = rows[-1] + 1 if rows and len(found) == limit else at + _LIST_STEP
                more = at < objects.end
            return Listing(found, _CURSOR.pack(at) if more else b"")

    # The catalogue and tenants

    def describe(self, namespace: bytes, manifest: bytes) -> Result:
        with self._use() as parts:
            if parts is None:
                return _CLOSED
            parts[0].learn({namespace: manifest})
            if parts[0].geometry.slabs < CATALOGUE_SLABS:
                return OK
        return catalogue.keep(self, namespace, manifest)

    def described(self, namespace: bytes) -> bytes:
        return catalogue.read(self, namespace)

    def undescribe(self, namespace: bytes) -> bool:
        return self.erase([catalogue.entry_key(namespace)])[0]

    def manifests(self) -> int:
        with self._use() as parts:
            return parts[0].objects.catalogued if parts is not None else 0

    def tenants(self) -> dict[str, TenantUse]:
        with self._use() as parts:
            return {} if parts is None else parts[0].usage_by_tenant()

    # Management

    def erase(self, keys: Sequence[Key]) -> builtins.list[bool]:
        """Gone also after a power cut, or it is not said that they are gone."""
        before = self.counters["delete_not_durable"]
        self.delete(keys)
        durable = self.counters["delete_not_durable"] == before
        gone = [durable and not there for there in self.lookup(keys)]
        return gone if not self.trouble() else [False] * len(keys)

    def serdes(self, keys: Sequence[Key]) -> builtins.list[tuple[int, ...]]:
        with self._use() as parts:
            found: builtins.list[tuple[int, ...]] = []
            for start in range(0, len(keys), GROUP):
                group = keys[start : start + GROUP]
                found += parts[1].serdes(group) if parts is not None else [()] * len(group)
            return found

    def verify(self, cursor: bytes, nbytes: int) -> Verified:
        counts: Counter[Outcome] = Counter()
        details: builtins.list[str] = []
        read, closed = 0, True
        while read < nbytes:
            page = self.list(cursor, 1)
            cursor = page.cursor
            with self._use() as parts:
                closed = parts is None
                for key, size in page.objects:
                    result = parts[1].verify([key])[0] if parts is not None else _CLOSED
                    counts[result.outcome] += 1
                    read += size
                    if result.detail and result.outcome not in (Outcome.OK, Outcome.MISS):
                        self.counters[result.outcome.name.lower()] += 1
                        details.append(f"{key.chunk.hex()[:12]} shard {key.shard}: {result.detail}")
            if not cursor:
                break
        unreadable = int(closed) + counts[Outcome.IO_ERROR] + counts[Outcome.UNAVAILABLE]
        looked = counts.total() - counts[Outcome.MISS]
        return Verified(looked, read, counts[Outcome.CORRUPT], unreadable, details, cursor)

    def compact(self) -> Iterator[tuple[str, int]]:
        """Checkpoint the index, so that the next start has no journal to read; empty slabs are free for any size."""
        with self._use() as parts:
            if parts is None:
                return
            room = parts[0]
            with room.mutex:
                pages = room.journal.used
                dirty = room.journal.dirty_slabs()
                empty = int(((room.slabs.blocks > 0) & (room.slabs.busy == 0)).sum())
        for start in range(0, len(dirty), COMPACT_TABLES):
            with self._use() as parts:
                if parts is None or parts[0].journal.checkpoint(dirty[start : start + COMPACT_TABLES]):
                    yield "tables_not_written", 1
                    return
            yield "tables_written", len(dirty[start : start + COMPACT_TABLES])
        with self._use() as parts:
            if parts is not None and dirty and not parts[0].journal.anchor():
                yield "journal_pages_freed", max(0, pages - parts[0].journal.used)
        if empty:
            yield "empty_slabs", empty

    def usage(self) -> Usage:
        with self._use() as parts:
            if parts is None:
                return Usage(0, 0, 0)
            room = parts[0]
            with room.mutex:
                return Usage(room.slabs.bytes_used, room.slabs.bytes_limit, room.objects.count)

    # Looking inside

    @property
    def geometry(self) -> Geometry:
        assert self._medium is not None
        return self._medium.geometry

    def slot_of(self, key: Key) -> int | None:
        """Byte offset of the object's header on the medium."""
        with self._use() as parts:
            if parts is None:
                return None
            room = parts[0]
            with room.mutex:
                row = int(room.objects.find([key])[0])
                if row < 0:
                    return None
                slab, slot = room.objects.place(row)
                return room.geometry.slot_offset(slab, slot, int(room.slabs.blocks[slab]))

    def check_integrity(self) -> None:
        """When nothing is running.  Raises if a slot is lost or used twice, or a count is wrong."""
        with self._use() as parts:
            if parts is not None:
                parts[0].check_integrity()
