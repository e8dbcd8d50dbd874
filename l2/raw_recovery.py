"""From what lies on the medium back to rows and slots.

    journal pages ─► history from the tail on, gapless?
    each slab's table, minus what the history changed since, plus what it inserted      ─► rows
    a slab whose table does not verify (a kill during its write, a flipped bit)         ─► scan of its headers
    history with a gap (pages lost with the power, a flipped bit)                       ─► scan of all slabs

Normally a start reads 104 bytes an object in large pieces, and no header.  After a scan two headers can claim one key
(a slot that was given up keeps its header until it is used again): the higher sequence wins, the other slot is free.
Slots that were dropped by the history known are not brought back.

Nothing that is read is trusted: numbers are checked against the geometry, a table that names a slot twice or outside
is treated as damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.raw_io import Engine, Memory, Transfer
from kvkeep.l2.raw_journal import ASSIGN, DROP, INSERT, dropped, unpack_page
from kvkeep.l2.raw_layout import (
    JOURNAL_START,
    RECORD,
    SLOT_HEADER_BYTES,
    Geometry,
    Head,
    Records,
    blocks_of,
    records_checksum,
    unpack_slot_header,
)
from kvkeep.l2.raw_objects import Objects
from kvkeep.l2.raw_slabs import Slabs

I64 = npt.NDArray[np.int64]
_PIECE = 1 << 20
_TABLES_AT_ONCE = 16 << 20  # bytes
_ORDER_STEP = 1 << 20
_SMALL_SLOT = 64 << 10  # headers closer together than this are read with everything between them


class History(NamedTuple):
    next_lsn: int
    tail: int
    gapless: bool
    records: Records  # oldest first
    lsns: I64  # per record


@dataclass
class Report:
    scanned: set[int] = field(default_factory=set)
    doubles: int = 0
    gapless: bool = True
    dirty: dict[int, int] = field(default_factory=dict)
    next_lsn: int = 1
    tail: int = 1
    clock: int = 1
    unreadable: int = 0  # pieces that gave an I/O error


def read_history(geometry: Geometry, engine: Engine) -> tuple[History, int]:
    """The journal, and how many pieces of it could not be read."""
    size = geometry.journal_pages * geometry.block
    memory = Memory(size)
    results = engine.run(
        False,
        [
            Transfer(JOURNAL_START + at, ((memory.address + at, min(_PIECE, size - at)),))
            for at in range(0, size, _PIECE)
        ],
    )
    pages: dict[int, tuple[int, Records]] = {}
    for index in range(geometry.journal_pages):
        page = unpack_page(geometry, index, memory.view[index * geometry.block : (index + 1) * geometry.block])
        if page is not None:
            pages[page[0]] = page[1:]
    unreadable = sum(1 for number in results if number)
    if not pages:
        # A fresh medium has no page; then no slab has a table either, and a scan finds that at once.
        return History(1, 1, False, np.empty(0, dtype=RECORD), np.empty(0, dtype=np.int64)), unreadable
    last = max(pages)
    tail = pages[last][0]
    wanted = [lsn for lsn in range(tail, last + 1) if lsn in pages]
    parts = [pages[lsn][1] for lsn in wanted]
    lsns = np.repeat(np.array(wanted, dtype=np.int64), [len(part) for part in parts])
    gapless = len(wanted) == last + 1 - tail and not unreadable
    return History(last + 1, tail, gapless, np.concatenate(parts), lsns), unreadable


def read_heads(geometry: Geometry, engine: Engine) -> list[Head]:
    """The head of every slab, from its copy if need be.  Class 0 = the slab has none, or both are damaged."""
    heads: list[Head | None] = [None] * geometry.slabs
    step = 256
    memory = Memory(step * geometry.block)
    for first in range(0, geometry.slabs, step):
        group = range(first, min(first + step, geometry.slabs))
        for foot in (False, True):
            missing = [s for s in group if heads[s] is None]
            memory.view[:] = bytes(len(memory.view))
            transfers = []
            for s in missing:
                at = geometry.foot_offset(s) if foot else geometry.slab_offset(s)
                transfers.append(Transfer(at, ((memory.address + (s - first) * geometry.block, geometry.block),)))
            engine.run(False, transfers)
            for s in missing:
                at = (s - first) * geometry.block
                head = Head.unpack(memory.view[at : at + geometry.block], geometry, s)
                # The copy knows the class and the generation, not the content.
                heads[s] = head._replace(lsn=-1) if head is not None and foot else head
    return [Head(s, 0, 0, -1, 0, 0) if head is None else head for s, head in enumerate(heads)]


class _Recovery:
    def __init__(self, geometry: Geometry, engine: Engine, objects: Objects, slabs: Slabs, heads: list[Head]) -> None:
        self.geometry, self.engine, self.objects, self.slabs = geometry, engine, objects, slabs
        self.report = Report()
        self.heads = heads
        self.changed: dict[int, set[int]] = {}  # slots of a slab that the history speaks of
        self.doubtful = False  # two records may have one key

    def run(self, history: History) -> Report:
        report, geometry = self.report, self.geometry
        report.next_lsn, report.tail, report.gapless = history.next_lsn, history.tail, history.gapless
        self._apply_assigns(history)
        inserts = self._final_steps(history)
        for slab, head in enumerate(self.heads):
            if head.blocks:
                self.slabs.assign(slab, head.blocks, head.generation)
                report.clock = max(report.clock, head.generation)
        self.slabs.set_unused({s for s, head in enumerate(self.heads) if head.blocks})
        for slab, table in self._tables():
            if table is None or not history.gapless:
                report.scanned.add(slab)
                self.doubtful = True
                table = self._scan(slab, self.heads[slab])
            self._adopt(slab, self._without_changed(slab, table))
        self.doubtful = self.doubtful or not history.gapless
        for slab in np.unique(inserts["slab"]).tolist():
            if slab < geometry.slabs and self.slabs.blocks[slab]:
                self._adopt(slab, self._plausible(slab, inserts[inserts["slab"] == slab]))
        self._order()
        for slab in report.scanned:
            report.dirty[slab] = report.tail
        return report

    def _read(self, transfers: list[Transfer]) -> None:
        for number in self.engine.run(False, transfers):
            self.report.unreadable += number != 0

    def _apply_assigns(self, history: History) -> None:
        """A slab that got its class after its table was written starts from nothing."""
        for i in np.flatnonzero(history.records["op"] == ASSIGN).tolist():
            record, lsn = history.records[i], int(history.lsns[i])
            slab, blocks, generation = int(record["slab"]), int(record["size"]), int(record["sequence"])
            if slab >= self.geometry.slabs or not self.geometry.slots(blocks):
                continue
            if generation > self.heads[slab].generation:
                self.heads[slab] = Head(slab, blocks, generation, lsn, 0, records_checksum(b""))

    def _final_steps(self, history: History) -> Records:
        """The inserts that stand at the end; fills ``changed``.

        A table is newer than the first steps for its slab, and may have steps that never came to the journal.  Going
        through all of them again does no harm: of the steps for one slot the last stands."""
        records, report = history.records, self.report
        if not history.gapless:  # then only headers are believed
            return np.empty(0, dtype=RECORD)
        assigns = np.flatnonzero(records["op"] == ASSIGN)
        inserts = np.flatnonzero(records["op"] == INSERT)
        drops = np.flatnonzero(records["op"] == DROP)
        which, drop_slabs, drop_slots = dropped(records[drops])
        order = np.concatenate((inserts, drops[which]))
        slabs = np.concatenate((records["slab"][inserts].astype(np.int64), drop_slabs))
        slots = np.concatenate((records["slot"][inserts].astype(np.int64), drop_slots))
        for slab, lsn in zip(records["slab"].tolist(), history.lsns.tolist(), strict=True):
            if slab < self.geometry.slabs:
                report.dirty.setdefault(slab, lsn)
        born = np.full(self.geometry.slabs, -1, dtype=np.int64)  # the step that gave the slab its present class
        for i in assigns.tolist():
            slab = int(records["slab"][i])
            if slab < self.geometry.slabs and int(records["sequence"][i]) == self.heads[slab].generation:
                born[slab] = i
        inside = slabs < self.geometry.slabs
        keep = inside & (order > born[np.where(inside, slabs, 0)])  # not from an earlier life of the slab
        order, slabs, slots = order[keep], slabs[keep], slots[keep]
        place = (slabs << 32) | slots
        # Of several steps for one slot the last stands.
        by_age = np.argsort(order, kind="stable")[::-1]
        _, last = np.unique(place[by_age], return_index=True)
        standing = np.sort(by_age[last])
        for slab, slot in zip(slabs[standing].tolist(), slots[standing].tolist(), strict=True):
            self.changed.setdefault(slab, set()).add(slot)
        steps = order[standing]
        last_inserts: Records = records[np.sort(steps[records["op"][steps] == INSERT])]
        return last_inserts

    def _tables(self) -> Iterator[tuple[int, Records | None]]:
        """Every slab that has a class, with what its table says; None = that cannot be believed.

        Many tables are read at once, as far as a bounded piece of memory goes."""
        group: list[int] = []
        size = 0
        for slab, head in enumerate(self.heads):
            if head.blocks:
                group.append(slab)
                size += head.records * RECORD.itemsize
                if size >= _TABLES_AT_ONCE:
                    yield from self._read_tables(group)
                    group, size = [], 0
        yield from self._read_tables(group)

    def _read_tables(self, group: list[int]) -> Iterator[tuple[int, Records | None]]:
        geometry = self.geometry
        sizes = [self.heads[slab].records * RECORD.itemsize for slab in group]
        rounded = [size + -size % geometry.block for size in sizes]
        memory = Memory(sum(rounded))
        starts = [sum(rounded[:i]) for i in range(len(group))]
        transfers = [
            Transfer(geometry.slab_offset(slab) + geometry.block, ((memory.address + start, size),) if size else ())
            for slab, start, size in zip(group, starts, rounded, strict=True)
        ]
        wanted = [i for i, transfer in enumerate(transfers) if transfer.pieces]
        failed = dict(zip(wanted, self.engine.run(False, [transfers[i] for i in wanted]), strict=True))
        for i, slab in enumerate(group):
            head, data = self.heads[slab], memory.view[starts[i] : starts[i] + sizes[i]]
            if failed.get(i):
                self.report.unreadable += 1
                yield slab, None
            elif head.lsn < 0 or records_checksum(data) != head.checksum:
                yield slab, None
            else:
                records = np.frombuffer(data, dtype=RECORD)
                yield slab, records if len(self._plausible(slab, records)) == len(records) else None

    def _plausible(self, slab: int, records: Records) -> Records:
        """Those that can be true."""
        blocks = int(self.slabs.blocks[slab])
        fits = (records["slot"] < self.geometry.slots(blocks)) & (records["slab"] == slab)
        fits &= records["size"].astype(np.int64) <= blocks * self.geometry.block
        _, first = np.unique(records["slot"], return_index=True)
        once = np.zeros(len(records), dtype=bool)
        once[first] = True
        plausible: Records = records[fits & once]
        return plausible

    def _without_changed(self, slab: int, records: Records) -> Records:
        changed = self.changed.get(slab)
        if not changed or not len(records):
            return records
        return records[~np.isin(records["slot"], np.fromiter(changed, dtype=np.uint32, count=len(changed)))]

    def _scan(self, slab: int, head: Head) -> Records:
        """Records made from the headers of a slab."""
        geometry, out = self.geometry, []
        slots, stride = geometry.slots(head.blocks), (1 + head.blocks) * geometry.block
        first = geometry.slot_offset(slab, 0, head.blocks)
        together = max(1, _PIECE // stride) if stride <= _SMALL_SLOT else 256
        wanted = stride if stride <= _SMALL_SLOT else geometry.block
        memory = Memory(together * wanted)
        for start in range(0, slots, together):
            group = range(start, min(start + together, slots))
            memory.view[:] = bytes(len(memory.view))
            if wanted == stride:
                transfers = [Transfer(first + start * stride, ((memory.address, len(group) * stride),))]
            else:
                transfers = [
                    Transfer(first + s * stride, ((memory.address + (s - start) * wanted, wanted),)) for s in group
                ]
            self._read(transfers)
            for s in group:
                at = (s - start) * wanted
                data = memory.view[at : at + SLOT_HEADER_BYTES]
                header = unpack_slot_header(data, geometry, slab, s, head.generation)
                if header is not None and blocks_of(header.stored_bytes, geometry.block) == head.blocks:
                    key = header.key
                    namespace, chunk = (np.frombuffer(part, dtype="<u8") for part in (key.namespace, key.chunk))
                    out.append((
                        INSERT, slab, s, key.shard, key.shards, header.stored_bytes,
                        header.sequence, header.sequence, namespace, chunk,
                    ))  # fmt: skip
        records = np.array(out, dtype=RECORD) if out else np.empty(0, dtype=RECORD)
        if len(records):
            self.report.clock = max(self.report.clock, int(records["sequence"].max()))
        return records

    def _adopt(self, slab: int, records: Records) -> None:
        """Rows and slots for records whose slots are free."""
        if not len(records):
            return
        if len(records) > self.objects.rows_left:
            records = records[: self.objects.rows_left]
        batch = self.objects.unpack(records)
        if self.doubtful:
            keep = self._newest(batch.spaces, batch.chunks, batch.sequences)
            if not keep.all():
                records = records[keep]
                batch = self.objects.unpack(records)
        rows = self.objects.add(batch)
        recency = records["recency"].astype(np.uint64)
        stamps = np.where(recency == 0, batch.sequences, recency)
        self.objects.publish(rows)
        self.objects.recency[rows] = np.maximum(stamps, 1)
        self.slabs.adopt(slab, batch.slots.astype(np.int64), rows)
        self.report.clock = max(self.report.clock, int(stamps.max()), int(batch.sequences.max()))

    def _newest(
        self, spaces: npt.NDArray[np.uint64], chunks: npt.NDArray[np.uint64], sequences: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Which of these to keep; those that are there and older go."""
        keep = np.ones(len(spaces), dtype=bool)
        seen: dict[tuple[int, bytes], int] = {}
        for i, (space, chunk) in enumerate(zip(spaces.tolist(), chunks, strict=True)):
            other = seen.get((space, chunk.tobytes()))
            if other is not None:
                self.report.doubles += 1
                keep[i if sequences[i] <= sequences[other] else other] = False
                if sequences[i] <= sequences[other]:
                    continue
            seen[(space, chunk.tobytes())] = i
        for space in np.unique(spaces).tolist():
            mine = np.flatnonzero((spaces == space) & keep)
            rows = self.objects.index.find(chunks[mine], space)
            for i, row in zip(mine[rows >= 0].tolist(), rows[rows >= 0].tolist(), strict=True):
                self.report.doubles += 1
                if int(self.objects.sequence[row]) >= int(sequences[i]):
                    keep[i] = False
                else:
                    self._discard(row)
        return keep

    def _discard(self, row: int) -> None:
        rows = np.array([row], dtype=np.int64)
        slabs, slots = self.objects.places(rows)
        self.objects.hide(rows)
        self.objects.free(rows)
        self.slabs.empty(slabs, slots)
        self.slabs.give(slabs, slots)
        self.report.dirty[int(slabs[0])] = self.report.tail

    def _order(self) -> None:
        for size_class in self.slabs.classes.values():
            parts = [self.slabs.rows(slab).astype(np.uint32) for slab in sorted(size_class.slabs)]
            rows = np.concatenate([np.empty(0, dtype=np.uint32), *parts])
            del parts
            rows = rows[np.argsort(self.objects.recency[rows])]
            for start in range(0, len(rows), _ORDER_STEP):
                part = rows[start : start + _ORDER_STEP].astype(np.int64)
                part = part[~self.objects.kept(part)]
                size_class.order.adopt(part, self.objects.recency[part])


def recover(
    geometry: Geometry, engine: Engine, objects: Objects, slabs: Slabs, heads: list[Head], history: History
) -> Report:
    """Fill ``objects`` and ``slabs``, which are empty."""
    return _Recovery(geometry, engine, objects, slabs, heads).run(history)
