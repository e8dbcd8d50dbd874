"""Index from (namespace, chunk hash) to entry, for whole batches of keys at once.

Two-choice hashing into buckets of eight 64-bit slots, one cache line each: a key lives in one of two buckets, so a
lookup reads at most two lines whatever the fill, a removal just clears its slot (no tombstones), and nothing ever
rehashes: the table is sized once, for the entry table's capacity, at a load of at most one quarter.  The few keys that
find both buckets full go to a small dict.

    slot = tag (upper 32 bits of the hash, never 0) << 32 | entry + 1          0 = empty

The hash is multilinear with constants drawn at random at each start, because clients choose their own keys: nobody can
aim many keys at one bucket.  The index is private memory, rebuilt from the entry table on adoption.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

WAYS = 8
_KEY_WORDS = 4
_NAMESPACE_WORD = 4  # of an entry record: namespace (low half) and generation (high half)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(0xFFFFFFFF00000000)
_TAG_ONE = np.uint64(1 << 32)
_32 = np.uint64(32)
_MIX_INT = 0xD6E8FEB86659FD93
_MIX = np.uint64(_MIX_INT)
_ALL = (1 << 64) - 1
_SPREAD = np.uint64(0x9E3779B1)


class Place(NamedTuple):
    """Where keys belong; computed once for a search and the insertion that follows it."""

    tag: U64
    first: I64
    second: I64

    def part(self, which: I64 | slice) -> Place:
        return Place(self.tag[which], self.first[which], self.second[which])


class Found(NamedTuple):
    entries: I64  # (n,) entry per key, -1 = not there
    records: U64  # (n, words) copies of the entry records; rows of missing keys are meaningless
    place: Place


class Index:
    """Not thread-safe; owned by the control thread.  ``records`` is the entry table as (capacity, words) u64."""

    def __init__(self, records: U64) -> None:
        capacity = len(records)
        buckets = 1 << max(3, (max(1, capacity) * 4 // WAYS - 1).bit_length())
        self._records = records
        self._slots = np.zeros((buckets, WAYS), dtype=np.uint64)
        self._flat = self._slots.reshape(-1)
        self._mask = np.uint64(buckets - 1)
        self._constants = np.frombuffer(os.urandom(8 * _KEY_WORDS), dtype=np.uint64) | np.uint64(1)
        self._overflow: dict[tuple[bytes, int], int] = {}
        self.count = 0

    def _place(self, keys: U64, namespace: U64 | int) -> Place:
        h = keys @ self._constants
        h += np.uint64(namespace * _MIX_INT & _ALL) if isinstance(namespace, int) else namespace * _MIX
        h ^= h >> _32
        h *= _MIX
        h ^= h >> np.uint64(29)
        first = h & self._mask
        tag = h & _HIGH
        tag |= _TAG_ONE
        second = first ^ (((tag >> _32) * _SPREAD) & self._mask)
        return Place(tag, first.view(np.int64), second.view(np.int64))

    def find(self, keys: U64, namespace: int) -> Found:
        """Entries of ``keys`` (n, 4) in ``namespace``."""
        n = len(keys)
        place = self._place(keys, namespace)
        rows = self._slots[place.first]
        match = (rows & _HIGH) == place.tag[:, None]
        column = match.argmax(axis=1)
        slots = rows[np.arange(n), column]
        hit = (slots & _HIGH) == place.tag
        if not hit.all():
            rest = np.flatnonzero(~hit)
            rows = self._slots[place.second[rest]]
            match = (rows & _HIGH) == place.tag[rest, None]
            column = match.argmax(axis=1)
            slots[rest] = rows[np.arange(len(rest)), column]
            hit[rest] = (slots[rest] & _HIGH) == place.tag[rest]
        entries = (slots & _LOW).astype(np.int64) - 1
        entries[~hit] = -1
        records = self._records[entries]
        differ = records[:, :_KEY_WORDS] ^ keys
        wrong = (differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) != 0
        wrong |= (records[:, _NAMESPACE_WORD] & _LOW) != np.uint64(namespace)
        wrong &= hit
        if self._overflow and not hit.all():
            for i in np.flatnonzero(~hit):
                entries[i] = self._overflow.get((keys[i].tobytes(), namespace), -1)
            records = self._records[entries]
        if wrong.any():
            for i in np.flatnonzero(wrong):
                entries[i] = self._find_one(keys[i], namespace, place, int(i))
            records = self._records[entries]
        return Found(entries, records, place)

    def _find_one(self, key: U64, namespace: int, place: Place, i: int) -> int:
        """The slow path: every slot of both buckets whose tag matches (two keys can share a tag), then the overflow."""
        for bucket in (place.first[i], place.second[i]):
            for slot in self._slots[bucket]:
                if slot & _HIGH == place.tag[i]:
                    entry = int(slot & _LOW) - 1
                    record = self._records[entry]
                    if (record[:_KEY_WORDS] == key).all() and int(record[_NAMESPACE_WORD] & _LOW) == namespace:
                        return entry
        return self._overflow.get((key.tobytes(), namespace), -1)

    def insert(self, keys: U64, namespace: U64 | int, entries: I64, place: Place | None = None) -> None:
        """Add keys that are not there.  ``namespace`` is one id, or one per key; ``place`` as `find` returned it."""
        if place is None:
            place = self._place(keys, namespace)
        values = place.tag | (entries.astype(np.uint64) + np.uint64(1))
        todo = np.arange(len(keys))
        for buckets in (place.first, place.second):
            # Two keys of one batch may pick the same free slot; the later write wins and the loser tries again.
            while len(todo):
                empty = self._slots[buckets[todo]] == 0
                column = empty.argmax(axis=1)
                free = empty[np.arange(len(todo)), column]
                trying = todo[free]
                if not len(trying):
                    break
                at = buckets[trying] * WAYS + column[free]
                self._flat[at] = values[trying]
                lost = np.zeros(len(keys), dtype=bool)
                lost[todo[~free]] = True
                lost[trying[self._flat[at] != values[trying]]] = True
                settled = not lost[trying].any()
                todo = np.flatnonzero(lost)
                if settled:
                    break
        for i in todo:
            ns = int(namespace[i]) if isinstance(namespace, np.ndarray) else namespace
            self._overflow[(keys[i].tobytes(), ns)] = int(entries[i])
        self.count += len(keys)

    def remove(self, keys: U64, namespaces: U64, entries: I64) -> None:
        """Remove keys that are there, each under its own namespace."""
        place = self._place(keys, namespaces)
        wanted = entries.astype(np.uint64) + np.uint64(1)
        todo = np.arange(len(keys))
        for buckets in (place.first, place.second):
            match = (self._slots[buckets[todo]] & _LOW) == wanted[todo, None]
            column = match.argmax(axis=1)
            there = match[np.arange(len(todo)), column]
            self._flat[buckets[todo[there]] * WAYS + column[there]] = 0
            todo = todo[~there]
            if not len(todo):
                break
        for i in todo:
            del self._overflow[(keys[i].tobytes(), int(namespaces[i]))]
        self.count -= len(keys)

    def check_integrity(self, keys: U64, namespaces: U64, entries: I64) -> None:
        """Raise if the index is not exactly ``keys`` -> ``entries``."""
        held = int(np.count_nonzero(self._slots)) + len(self._overflow)
        if not held == self.count == len(entries):
            raise AssertionError(f"index: {held} slots used, count {self.count}, table has {len(entries)} keys")
        for ns in np.unique(namespaces):
            mine = namespaces == ns
            if (self.find(keys[mine], int(ns)).entries != entries[mine]).any():
                raise AssertionError(f"index: a key of namespace {ns} does not lead to its entry")
