"""What lies on the medium, in memory: one row per object, and the index from key to row.

    records    six words a row: chunk hash (4) | space, size | slab, slot
    sequence   of the header, for checkpoints
    recency    the stamp in the eviction order; 0 = not visible: not stored yet, or on its way out

A *space* is a small number for (namespace digest, shard, shards), so that a key is a chunk hash and a number, as
`kvkeep.shm.index` wants it.  About 125 bytes an object, all in arrays: columns 64, index 54 (it doubles when it must),
order 12 or more, slot 4.  The columns are address space for the largest number of objects that the medium could hold;
memory comes with use, since rows are handed out from the front.

Life of a row:   add ──► publish ──► hide ──► free        (add ──► free if the store failed)

Not thread-safe: everything here is called under the adapter's lock.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import Key
from kvkeep.l2.catalogue import CATALOGUE
from kvkeep.l2.raw_layout import RECORD, Records
from kvkeep.shm.index import Index

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

_SPACE = struct.Struct("<32sII")
_NORESERVE = 0x4000
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_STEP = 4096
_CATALOGUE = _SPACE.pack(CATALOGUE, 0, 1)
_FIRST_ROWS = 65536


def reserve(rows: int, words: int) -> U64:
    """Zeroed memory that costs only what is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    data = np.frombuffer(mmap.mmap(-1, max(8, rows * words * 8), flags=flags), dtype=np.uint64)
    return data[: rows * words].reshape(rows, words) if words > 1 else data[:rows]


class GrowingIndex:
    """An Index that doubles without a pause: the next one is filled a few rows with every insertion."""

    def __init__(self, records: U64, recency: U64, rows: int) -> None:
        self._records, self._recency = records, recency
        self._now = Index(records[: min(len(records), rows)])
        self._capacity = min(len(records), rows)
        self._next: Index | None = None
        self._moved = 0  # rows below are in the next one too

    @property
    def count(self) -> int:
        return self._now.count

    def find(self, chunks: U64, space: int) -> I64:
        return self._now.find(chunks, space).entries

    def insert(self, rows: I64) -> None:
        top = int(rows.max()) + 1
        while top > self._capacity * 3 // 4 and self._capacity < len(self._records):
            if self._next is None:
                self._next = Index(self._records[: self._capacity * 2])
                self._moved = 0
            late = top > self._capacity
            self._grow(len(self._records) if late else 5 * len(rows) + _STEP)
            if not late:
                break
        self._now.insert(self._records[rows, :4], self._spaces(rows), rows)
        if self._next is not None and len(rows := rows[rows < self._moved]):
            self._next.insert(self._records[rows, :4], self._spaces(rows), rows)

    def remove(self, rows: I64) -> None:
        self._now.remove(self._records[rows, :4], self._spaces(rows), rows)
        if self._next is not None and len(rows := rows[rows < self._moved]):
            self._next.remove(self._records[rows, :4], self._spaces(rows), rows)

    def _spaces(self, rows: I64) -> U64:
        spaces: U64 = self._records[rows, 4] & _LOW
        return spaces

    def _grow(self, step: int) -> None:
        assert self._next is not None
        end = min(self._moved + step, self._capacity)
        while self._moved < end:
            part = min(end, self._moved + (1 << 16))
            rows = np.flatnonzero(self._recency[self._moved : part]) + self._moved
            if len(rows):
                self._next.insert(self._records[rows, :4], self._spaces(rows), rows)
            self._moved = part
        if self._moved == self._capacity:
            self._now, self._next = self._next, None
            self._capacity = min(len(self._records), self._capacity * 2)

    def check_integrity(self, rows: I64) -> None:
        self._now.check_integrity(self._records[rows, :4], self._spaces(rows), rows)


class Batch(NamedTuple):
    """Columns of n objects."""

    spaces: U64
    chunks: U64  # (n, 4)
    sizes: U64
    slabs: U64
    slots: U64
    sequences: U64


class Objects:
    """See the module."""

    def __init__(self, capacity: int, expected: int = 0) -> None:
        self.capacity = max(1024, capacity)
        self.records = reserve(self.capacity, 6)
        self.sequence = reserve(self.capacity, 1)
        self.recency = reserve(self.capacity, 1)
        self.index = GrowingIndex(self.records, self.recency, max(_FIRST_ROWS, expected * 5 // 4))
        self._fresh = 0  # rows handed out at least once
        self._freed: U32 = np.empty(1024, dtype=np.uint32)
        self._height = 0
        self._ids: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._counts: list[int] = []
        self._idle_ids: dict[int, None] = {}  # of spaces without a row; taken off as soon as somebody asks for them

    @property
    def count(self) -> int:
        """Visible objects."""
        return self.index.count

    @property
    def catalogued(self) -> int:
        """Objects of the catalogue, those included that are just coming or going."""
        space = self._ids.get(_CATALOGUE)
        return 0 if space is None else self._counts[space]

    @property
    def rows_left(self) -> int:
        return self.capacity - self._fresh + self._height

    # Spaces

    def space(self, key: Key) -> int:
        """The number of the key's space, made if need be.  Rows must follow: until then it is not used for another."""
        return self.space_of(_SPACE.pack(key.namespace, key.shard, key.shards))

    def space_of(self, name: bytes) -> int:
        number = self._ids.get(name)
        if number is None:
            if self._idle_ids:
                number, _ = self._idle_ids.popitem()
                del self._ids[self._names[number]]
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
                self._counts.append(0)
            self._ids[name] = number
        else:
            self._idle_ids.pop(number, None)  # another name of the same batch might be given it
        return number

    def _count(self, spaces: U64, sign: int) -> None:
        numbers, counts = np.unique(spaces, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._counts[number] += sign * count
            if not self._counts[number]:
                self._idle_ids[number] = None
            else:
                self._idle_ids.pop(number, None)

    def namespaces(self) -> list[bytes]:
        """By the number of the space."""
        return [name[:32] for name in self._names]

    def spaces(self, rows: I64) -> I64:
        spaces: I64 = (self.records[rows, 4] & _LOW).astype(np.int64)
        return spaces

    def kept(self, rows: I64) -> npt.NDArray[np.bool_]:
        """Which are of the catalogue: they have a stamp, so that they are visible, but are in no order."""
        space = self._ids.get(_CATALOGUE)
        if space is None:
            return np.zeros(len(rows), dtype=bool)
        mask: npt.NDArray[np.bool_] = self.spaces(rows) == space
        return mask

    # Rows

    def add(self, batch: Batch) -> I64:
        """Rows for objects that nobody can see yet.  There must be `rows_left`."""
        n = len(batch.sizes)
        old = min(n, self._height)
        rows = np.empty(n, dtype=np.int64)
        rows[:old] = self._freed[self._height - old : self._height]
        rows[old:] = np.arange(self._fresh, self._fresh + n - old)
        self._height -= old
        self._fresh += n - old
        self.records[rows, :4] = batch.chunks
        self.records[rows, 4] = batch.spaces | (batch.sizes << _32)
        self.records[rows, 5] = (batch.slabs << _32) | batch.slots
        self.sequence[rows] = batch.sequences
        self._count(batch.spaces, 1)
        return rows

    def publish(self, rows: I64) -> None:
        """Visible from now on.  The caller gives them their place in the order at once."""
        if len(rows):
            self.index.insert(rows)

    def hide(self, rows: I64) -> None:
        if len(rows):
            self.index.remove(rows)
            self.recency[rows] = 0

    def free(self, rows: I64) -> None:
        if not len(rows):
            return
        self._count(self.records[rows, 4] & _LOW, -1)
        top = self._height + len(rows)
        if top > len(self._freed):
            self._freed = np.concatenate((self._freed, np.empty(max(top, len(self._freed)), dtype=np.uint32)))
        self._freed[self._height : top] = rows
        self._height = top

    def find(self, keys: Sequence[Key]) -> I64:
        """Row per key, -1 = not there."""
        rows = np.full(len(keys), -1, dtype=np.int64)
        groups: dict[tuple[bytes, int, int], list[int]] = {}
        for i, key in enumerate(keys):
            groups.setdefault((key.namespace, key.shard, key.shards), []).append(i)
        for name, places in groups.items():
            space = self._ids.get(_SPACE.pack(*name))
            if space is not None:
                chunks = np.frombuffer(b"".join(keys[i].chunk for i in places), dtype=np.uint64).reshape(-1, 4)
                rows[places] = self.index.find(chunks, space)
        return rows

    def key(self, row: int) -> Key:
        namespace, shard, shards = _SPACE.unpack(self._names[int(self.records[row, 4] & _LOW)])
        return Key(namespace, self.records[row, :4].tobytes(), shard, shards)

    def size(self, row: int) -> int:
        return int(self.records[row, 4] >> _32)

    def place(self, row: int) -> tuple[int, int]:
        """Slab and slot."""
        word = int(self.records[row, 5])
        return word >> 32, word & 0xFFFFFFFF

    def places(self, rows: I64) -> tuple[I64, I64]:
        words = self.records[rows, 5]
        return (words >> _32).astype(np.int64), (words & _LOW).astype(np.int64)

    def visible(self, start: int = 0, end: int | None = None) -> I64:
        end = self._fresh if end is None else min(end, self._fresh)
        return np.flatnonzero(self.recency[start:end]) + start

    @property
    def end(self) -> int:
        return self._fresh

    # Records at rest

    def pack(self, rows: I64) -> Records:
        """For a table or the journal."""
        out = np.zeros(len(rows), dtype=RECORD)
        words = self.records[rows]
        out["slab"], out["slot"] = words[:, 5] >> _32, words[:, 5] & _LOW
        out["size"], out["chunk"] = words[:, 4] >> _32, words[:, :4]
        out["sequence"], out["recency"] = self.sequence[rows], self.recency[rows]
        spaces = (words[:, 4] & _LOW).astype(np.int64)
        for number in np.unique(spaces).tolist():
            namespace, shard, shards = _SPACE.unpack(self._names[number])
            mine = spaces == number
            out["namespace"][mine] = np.frombuffer(namespace, dtype=np.uint64)
            out["shard"][mine], out["shards"][mine] = shard, shards
        return out

    def unpack(self, records: Records) -> Batch:
        """Columns for `add`."""
        n = len(records)
        names = np.empty((n, 5), dtype=np.uint64)
        names[:, :4] = records["namespace"]
        names[:, 4] = records["shard"].astype(np.uint64) | (records["shards"].astype(np.uint64) << _32)
        spaces = np.empty(n, dtype=np.uint64)
        if n and (names == names[0]).all():
            spaces[:] = self.space_of(names[0].tobytes())
        elif n:
            unique, inverse = np.unique(names, axis=0, return_inverse=True)
            numbers = np.array([self.space_of(name.tobytes()) for name in unique], dtype=np.uint64)
            spaces = numbers[inverse.reshape(-1)]
        return Batch(
            spaces,
            np.ascontiguousarray(records["chunk"]),
            records["size"].astype(np.uint64),
            records["slab"].astype(np.uint64),
            records["slot"].astype(np.uint64),
            records["sequence"].astype(np.uint64),
        )

    def check_integrity(self) -> None:
        rows = self.visible()
        self.index.check_integrity(rows)
        if sum(self._counts) != self._fresh - self._height:
            raise AssertionError(f"{sum(self._counts)} rows by space, {self._fresh - self._height} handed out")
        named = {name: number for number, name in enumerate(self._names)}
        if named != self._ids:
            raise AssertionError(f"{len(self._names)} spaces have {len(self._ids)} names")
        if any(self._counts[number] for number in self._idle_ids):
            raise AssertionError(f"spaces with rows are idle: {[n for n in self._idle_ids if self._counts[n]]}")
