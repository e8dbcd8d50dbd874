"""The two ways of an object: into its slot, and out of it.

    store:  slots reserved ─► payloads ─► flush ─► headers ─► journal page ─► flush ─► visible ─► OK
            ("durability": "none": no flushes; header and payload in one write, if the checksum is known)
    load:   row pinned ─► header and payload in one read ─► seal, key, length, checksum ─► OK

The flushes are there with "durability": "data": a header then never vouches for a payload that the power took, and what
was acknowledged survives a power cut.  With "none" a killed process loses nothing either, since the journal names only
what is written; after a power cut the newest objects may be missing, or their checksum shows that they are torn.

Payloads go from and to the caller's memory.  Only what the medium's blocks force on us is copied: the last, partial
block, or all of a view whose address the device cannot take.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import MISS, OK, Fetched, Item, Key, Outcome, Result
from kvkeep.l2.raw_io import Memory, Piece, Transfer, address_of
from kvkeep.l2.raw_journal import INSERT, drops
from kvkeep.l2.raw_layout import blocks_of, pack_slot_header, unpack_slot_header
from kvkeep.l2.raw_objects import Batch
from kvkeep.l2.raw_room import Room
from kvkeep.l2.raw_slabs import Place
from kvkeep.l2.record import Header, header_of, payload_checksum

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MEDIA_ERRORS = (errno.EIO, errno.EILSEQ, errno.ENODATA)
_BACKLOG = 65536  # records that wait for a journal that cannot be written; beyond it stores fail at once
_UNREAD = Result(Outcome.IO_ERROR, errno.EIO, "the batch could not be read")
_BAD_FOR_S = 5.0  # an object that gives media errors for so long is given up; a medium that is away comes back sooner

I64 = npt.NDArray[np.int64]


class _Pieces:
    """Memory of one object's payload as whole blocks."""

    def __init__(self, view: memoryview, block: int, alignment: int) -> None:
        self.view = view
        n = len(view)
        address = address_of(view)
        self.direct = n - n % block if address % alignment == 0 else 0
        rest = n - self.direct
        self.bounce = Memory(rest + -rest % block) if rest or not n else None
        pieces: list[Piece] = [(address, self.direct)] if self.direct else []
        if self.bounce is not None:
            pieces.append((self.bounce.address, max(block, rest + -rest % block)))
        self.pieces = tuple(pieces)
        # The adapter keeps ``view`` for as long as the device may use these addresses.

    def fill(self) -> None:
        """Before a write."""
        if self.bounce is not None and len(self.view) > self.direct:
            rest = np.frombuffer(self.view, dtype=np.uint8)[self.direct :]
            np.copyto(np.frombuffer(self.bounce.view, dtype=np.uint8)[: len(rest)], rest)

    def drain(self) -> None:
        """After a read."""
        if self.bounce is not None and len(self.view) > self.direct:
            rest = np.frombuffer(self.view, dtype=np.uint8)[self.direct :]
            np.copyto(rest, np.frombuffer(self.bounce.view, dtype=np.uint8)[: len(rest)])


class _Storing(NamedTuple):
    at: int  # in the batch
    place: Place
    item: Item
    sequence: int


class _Loading(NamedTuple):
    at: int
    row: int
    key: Key
    place: Place
    size: int  # stored bytes, by the index


class _Read(NamedTuple):
    """A verified object.  ``view`` is None if only its header was wanted."""

    header: Header
    view: memoryview | None


def _failure(number: int) -> Result:
    outcome = Outcome.NO_SPACE if number in _FULL else Outcome.IO_ERROR
    return Result(outcome, number, f"the medium said {errno.errorcode.get(number, str(number))}")


class Store:
    """Thread-safe.  `store` and `load` take at most a group (see raw_block) at a time."""

    def __init__(self, room: Room, alignment: int, flush: bool) -> None:
        self.room, self._alignment, self._flush = room, alignment, flush
        self._block = room.geometry.block
        self._largest = room.geometry.largest()
        self._storing: set[Key] = set()
        self._bad_since: dict[int, float] = {}

    # Store

    def store(self, items: Sequence[Item]) -> list[Result]:
        journal = self.room.journal
        if journal.queued > _BACKLOG and (number := journal.commit(flush=False)):
            return [_failure(number)] * len(items)
        results: list[Result | None] = [None] * len(items)
        mine = self._plan(items, results)
        coming = self.room.expect([items[i] for i in mine.values()])
        try:
            pieces = {i: _Pieces(items[i].payload, self._block, self._alignment) for i in mine.values()}
            writing = self._reserve(items, mine, results)
            writing = self._write(writing, pieces, results)
            self._make_visible(writing, results, coming)
        finally:
            with self.room.mutex:
                self._storing.difference_update(mine)
                self.room.settle(coming)
        self.room.evict_excess()  # a batch may be more than a quota
        for i, result in enumerate(results):
            if result is None:  # the same key stood earlier in the batch
                results[i] = results[mine[items[i].key]]
        counters = self.room.counters
        with self.room.mutex:
            for result in results:
                assert result is not None
                counters[_NAMES[result.outcome]] += 1
        return [result for result in results if result is not None]

    def _plan(self, items: Sequence[Item], results: list[Result | None]) -> dict[Key, int]:
        """What this call will write: key -> place in the batch.  The rest gets its result."""
        room, mine = self.room, {}
        with room.mutex:
            rows = room.objects.find([item.key for item in items])
            for i, (key, view, *_) in enumerate(items):
                if rows[i] >= 0:
                    results[i] = OK
                    room.counters["present"] += 1
                elif key in mine:
                    continue
                elif len(view) > self._largest:
                    detail = f"{len(view)} bytes; the largest object of this medium has {self._largest}"
                    results[i] = Result(Outcome.TOO_LARGE, detail=detail)
                elif key in self._storing:
                    results[i] = Result(Outcome.BUSY, detail="another store of this key is running")
                else:
                    mine[key] = i
                    self._storing.add(key)
            room.touch(rows[rows >= 0])
        return mine

    def _reserve(self, items: Sequence[Item], mine: dict[Key, int], results: list[Result | None]) -> list[_Storing]:
        by_class: dict[int, list[int]] = {}
        for i in mine.values():
            by_class.setdefault(blocks_of(len(items[i].payload), self._block), []).append(i)
        writing: list[_Storing] = []
        room = self.room
        for blocks, members in by_class.items():
            with room.mutex:
                size_class = room.slabs.size_class(blocks)
            places = room.reserve(size_class, len(members)) if size_class is not None else []
            with room.mutex:
                sequences = room.clock.stamps(len(members)).tolist()
            for i, place, sequence in zip(members, places, sequences, strict=False):
                writing.append(_Storing(i, place, items[i], sequence))
            for i in members[len(places) :]:
                used = f"{room.slabs.bytes_used} of {room.slabs.bytes_limit} bytes are used"
                results[i] = Result(Outcome.NO_SPACE, errno.ENOSPC, f"no slot could be made free: {used}")
        writing.sort(key=lambda one: one.at)
        return writing

    def _write(
        self, writing: list[_Storing], pieces: dict[int, _Pieces], results: list[Result | None]
    ) -> list[_Storing]:
        """Payloads and headers.  Returns those of which both are written."""
        if not writing:
            return []
        block, engine = self._block, self.room.engine
        memory = Memory(len(writing) * block)
        headers = [(memory.address + i * block, block) for i in range(len(writing))]

        def make_headers() -> Iterator[None]:
            """Computes payloads' checksums, if nobody has yet."""
            for i, (_, place, item, sequence) in enumerate(writing):
                header = header_of(item, sequence)
                data = pack_slot_header(header, self.room.geometry, place.slab, place.slot, place.generation)
                memory.view[i * block : i * block + len(data)] = data
                yield

        for one in writing:
            pieces[one.at].fill()
        if not self._flush and all(one.item.checksum for one in writing):
            # Nothing is durable before the other: one run of bytes, and the checksum vouches for it.
            for _ in make_headers():
                pass
            transfers = [
                Transfer(self._offset(one.place), (header, *pieces[one.at].pieces))
                for one, header in zip(writing, headers, strict=True)
            ]
            return self._sift(writing, engine.run(True, transfers), results)
        transfers = [Transfer(self._offset(one.place) + block, pieces[one.at].pieces) for one in writing]
        numbers = engine.run(True, transfers, meanwhile=make_headers())
        if self._flush and not all(numbers):
            number = engine.sync()
            numbers = [own or number for own in numbers]
        transfers = [
            Transfer(self._offset(one.place), (header,))
            for one, header, number in zip(writing, headers, numbers, strict=True)
            if not number
        ]
        writing = self._sift(writing, numbers, results)
        return self._sift(writing, engine.run(True, transfers), results)

    def _sift(self, writing: list[_Storing], numbers: list[int], results: list[Result | None]) -> list[_Storing]:
        """Those that went well; the others get their result and give their slots back."""
        failed = [one for one, number in zip(writing, numbers, strict=True) if number]
        if not failed:
            return writing
        for one, number in zip(writing, numbers, strict=True):
            if number:
                results[one.at] = _failure(number)
        with self.room.mutex:
            self.room.slabs.give(*_places(failed))
        return [one for one, number in zip(writing, numbers, strict=True) if not number]

    def _make_visible(self, writing: list[_Storing], results: list[Result | None], coming: dict[int, int]) -> None:
        if not writing:
            return
        room = self.room
        slabs, slots = _places(writing)
        with room.mutex:
            spaces = [room.objects.space(one.item.key) for one in writing]
            batch = Batch(
                np.array(spaces, dtype=np.uint64),
                np.frombuffer(b"".join(one.item.key.chunk for one in writing), dtype=np.uint64).reshape(-1, 4),
                np.array([len(one.item.payload) for one in writing], dtype=np.uint64),
                slabs.astype(np.uint64),
                slots.astype(np.uint64),
                np.array([one.sequence for one in writing], dtype=np.uint64),
            )
            rows = room.objects.add(batch)
            room.slabs.fill(slabs, slots, rows)
            records = room.objects.pack(rows)
            records["op"] = INSERT
            room.journal.append(records)
        number = room.journal.commit()
        with room.mutex:
            if number:  # the records stay first in line, and what undoes them comes behind
                room.slabs.empty(slabs, slots)
                room.journal.append(drops(slabs.tolist(), slots.tolist()))
                room.slabs.give(slabs, slots)
                room.objects.free(rows)
            else:
                room.objects.publish(rows)
                room.touch(rows)
                room.settle(coming)
        for one in writing:
            results[one.at] = _failure(number) if number else OK

    def _offset(self, place: Place) -> int:
        return self.room.geometry.slot_offset(place.slab, place.slot, place.blocks)

    # Load

    def load(self, items: Sequence[tuple[Key, memoryview]]) -> list[Result]:
        views = [view for _, view in items]
        # Of an object that has another size only the header is read: it tells whether it is encoded.
        results, read = self._load(
            [key for key, _ in items], lambda i, size: views[i] if size == len(views[i]) else None
        )
        for i, (header, view) in read.items():
            if header.serdes:
                results[i] = Result(Outcome.ENCODED)
            elif view is None:
                results[i] = self._wrong_length(f"{header.stored_bytes} bytes are stored, {len(views[i])} wanted")
        self._count(results)
        return results

    def fetch(self, items: Sequence[tuple[Key, int]]) -> list[Fetched]:
        most = [limit for _, limit in items]
        results, read = self._load(
            [key for key, _ in items], lambda i, size: Memory(size).view[:size] if size <= most[i] else None
        )
        fetched = [Fetched(result) for result in results]
        for i, (header, view) in read.items():
            if view is None:
                results[i] = self._wrong_length(f"{header.stored_bytes} bytes are stored, at most {most[i]} wanted")
                fetched[i] = Fetched(results[i])
            else:
                fetched[i] = Fetched(OK, view, header.encoding)
        self._count(results)
        return fetched

    def verify(self, keys: Sequence[Key]) -> list[Result]:
        """Read and check, as `fetch` does; this is no use of them."""
        return self._load(keys, lambda _, size: Memory(size).view[:size], used=False)[0]

    def serdes(self, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """From the headers; () for what cannot be read."""
        read = self._load(keys, lambda _, size: None, used=False)[1]
        return [read[i].header.serdes if i in read else () for i in range(len(keys))]

    def _wrong_length(self, detail: str) -> Result:
        with self.room.mutex:
            self.room.counters["wrong_length"] += 1
        return Result(Outcome.MISS, detail=detail)

    def _count(self, results: list[Result]) -> None:
        with self.room.mutex:
            for result in results:
                self.room.counters[_LOADED.get(result.outcome, "io_errors")] += 1

    def _load(
        self, keys: Sequence[Key], target: Callable[[int, int], memoryview | None], *, used: bool = True
    ) -> tuple[list[Result], dict[int, _Read]]:
        """``target`` is given place in the batch and stored bytes, and gives memory for them, or None."""
        room = self.room
        results = [MISS] * len(keys)
        loading: list[_Loading] = []
        with room.mutex:
            rows = room.objects.find(keys)
            for i, key in enumerate(keys):
                row = int(rows[i])
                if row < 0:
                    continue
                slab, slot = room.objects.place(row)
                place = Place(slab, slot, int(room.slabs.blocks[slab]), int(room.slabs.generation[slab]))
                room.pin(row)
                loading.append(_Loading(i, row, key, place, room.objects.size(row)))
            if used:
                room.touch(rows[rows >= 0])
        wrong: set[int] = set()
        read: dict[int, _Read] = {}
        try:
            views = [target(one.at, one.size) for one in loading]
            pieces = [None if view is None else _Pieces(view, self._block, self._alignment) for view in views]
            wrong = self._read(loading, pieces, results, read)
        finally:
            self._end_reading(loading, wrong)
        return results, read

    def _read(
        self, loading: list[_Loading], pieces: list[_Pieces | None], results: list[Result], read: dict[int, _Read]
    ) -> set[int]:
        """Fill the pieces.  Returns the rows that must go."""
        block, geometry = self._block, self.room.geometry
        headers = Memory(len(loading) * block)
        transfers = [
            Transfer(
                self._offset(one.place), ((headers.address + i * block, block), *(wanted.pieces if wanted else ()))
            )
            for i, (one, wanted) in enumerate(zip(loading, pieces, strict=True))
        ]
        wrong: set[int] = set()

        def check(i: int, number: int) -> None:
            """While the device is busy with the others."""
            one, wanted = loading[i], pieces[i]
            if number:
                results[one.at] = _failure(number)
                if number in _MEDIA_ERRORS and self._is_bad(one.row):
                    wrong.add(one.row)
                return
            self._bad_since.pop(one.row, None)
            if wanted is not None:
                wanted.drain()
            data = headers.view[i * block : (i + 1) * block]
            header = unpack_slot_header(data, geometry, one.place.slab, one.place.slot, one.place.generation)
            if (
                header is None
                or header.key != one.key
                or header.stored_bytes != one.size
                or (wanted is not None and header.checksum != payload_checksum(wanted.view))
            ):
                if not self.room.objects.recency[one.row]:  # deleted while we read
                    results[one.at] = MISS
                    return
                what = "payload" if header is not None else "header"
                results[one.at] = Result(Outcome.CORRUPT, detail=f"the {what} did not verify; the object is removed")
                wrong.add(one.row)
            else:
                results[one.at] = OK
                read[one.at] = _Read(header, None if wanted is None else wanted.view)

        for one in loading:
            results[one.at] = _UNREAD
        self.room.engine.run(False, transfers, check)
        return wrong

    def _is_bad(self, row: int) -> bool:
        """Errors may pass, also several at once; an object that keeps giving them would never be stored anew."""
        now = time.monotonic()
        with self.room.mutex:
            if len(self._bad_since) > 4096:
                self._bad_since.clear()
            bad = now - self._bad_since.setdefault(row, now) >= _BAD_FOR_S
            if bad:
                del self._bad_since[row]
            return bad

    def _end_reading(self, loading: list[_Loading], wrong: set[int]) -> None:
        room = self.room
        with room.mutex:
            # Another reader may have removed it already.
            going = np.array([row for row in wrong if room.objects.recency[row]], dtype=np.int64)
            if len(going):
                room.hide(going)
            for one in loading:
                if one.row not in wrong:
                    room.unpin(one.row)
        if wrong:
            room.journal.commit()
            with room.mutex:
                room.let_go(going)
                for one in loading:
                    if one.row in wrong:
                        room.unpin(one.row)

    # Delete

    def delete(self, keys: Sequence[Key]) -> int:
        """Journal first, then the headers, so that no scan brings them back; then the slots are free."""
        room = self.room
        with room.mutex:
            rows = np.unique(room.objects.find(keys))
            rows = rows[rows >= 0]
            if not len(rows):
                return 0
            slabs, slots = room.objects.places(rows)
            blocks = room.slabs.blocks[slabs]
            room.hide(rows)
            room.counters["deleted"] += len(rows)
        failed = room.journal.commit(flush=False)
        memory = Memory(self._block)
        transfers = [
            Transfer(room.geometry.slot_offset(*place), ((memory.address, self._block),))
            for place in zip(slabs.tolist(), slots.tolist(), blocks.tolist(), strict=True)
        ]
        if any(room.engine.run(True, transfers)) or failed or (self._flush and room.engine.sync()):
            with room.mutex:
                room.counters["delete_not_durable"] += 1
        with room.mutex:
            room.let_go(rows)
        return len(rows)


def _places(writing: list[_Storing]) -> tuple[I64, I64]:
    return (
        np.array([one.place.slab for one in writing], dtype=np.int64),
        np.array([one.place.slot for one in writing], dtype=np.int64),
    )


_NAMES = {
    Outcome.OK: "stored",
    Outcome.NO_SPACE: "no_space",
    Outcome.IO_ERROR: "io_errors",
    Outcome.TOO_LARGE: "too_large",
    Outcome.BUSY: "busy",
}
_LOADED = {Outcome.OK: "loaded", Outcome.MISS: "missed", Outcome.CORRUPT: "corrupt", Outcome.ENCODED: "encoded"}
