"""What every adapter must do, whatever its medium.  A test file per adapter subclasses `AdapterConformance`:

    class TestFs(AdapterConformance):
        @pytest.fixture
        def medium(self, tmp_path): return FsMedium(tmp_path)

A `Medium` makes adapters over one and the same medium (so a second one, after the first is closed, is a restart), and
knows how to damage an object behind an adapter's back.
"""

from __future__ import annotations

import abc
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvkeep.l2.adapter import Adapter, Encoding, Item, Key, Outcome
from kvkeep.l2.record import payload_checksum
from tests.l2 import serdes

MIB = 1 << 20
OBJECT = 256 * 1024
NAMESPACE = bytes(range(32))


class Medium(abc.ABC):
    persistent = True  # objects outlive close
    keeps_recency = True  # ... and so does the order of eviction

    @abc.abstractmethod
    def adapter(self, capacity: int) -> Adapter:
        """Not opened yet.  ``capacity`` in bytes, the whole of it usable up to rounding."""

    @abc.abstractmethod
    def flip(self, adapter: Adapter, key: Key, part: str, at: int) -> None:
        """Flip one bit of byte ``at`` of the "header" (256 bytes) or of the "payload", at rest."""

    def vanish(self, adapter: Adapter, key: Key) -> bool:
        """Remove the object behind the adapter's back.  False = nobody else can on this medium."""
        return False


def key(number: int, *, shard: int = 0, shards: int = 1, namespace: bytes = NAMESPACE) -> Key:
    return Key(namespace, number.to_bytes(32, "little"), shard, shards)


def content(of: Key, length: int = OBJECT) -> bytes:
    """The oracle: the bytes of an object follow from its key."""
    seed = [of.shard, of.shards, *of.chunk, *of.namespace]
    return np.random.default_rng(seed).bytes(length)


def view(data: bytes | int, *, offset: int = 0) -> memoryview:
    """A page-aligned view as the arena gives them (``offset`` makes it a misaligned one), filled with ``data``."""
    length = data if isinstance(data, int) else len(data)
    memory = memoryview(mmap.mmap(-1, length + offset + 1))[offset : offset + length]
    memory[:] = b"\xa5" * length if isinstance(data, int) else data
    return memory


def put(adapter: Adapter, *keys: Key, length: int = OBJECT) -> list[Outcome]:
    items = []
    for one in keys:
        data = content(one, length)
        items.append(Item(one, view(data), payload_checksum(data)))
    return [result.outcome for result in adapter.store(items)]


def get(adapter: Adapter, *keys: Key, length: int = OBJECT) -> list[Outcome]:
    """Loads, and holds every OK against the oracle."""
    items = [(one, view(length)) for one in keys]
    results = adapter.load(items)
    assert len(results) == len(items)
    for (one, into), result in zip(items, results, strict=True):
        if result.outcome == Outcome.OK:
            assert bytes(into) == content(one, length), f"OK with wrong bytes for {one}"
    return [result.outcome for result in results]


OK, MISS = Outcome.OK, Outcome.MISS
HALF = Encoding(OBJECT, (40_000, 7), b"params\1")  # of serdes that nobody has: an adapter asks nothing about them


def put_encoded(adapter: Adapter, of: Key, length: int, encoding: Encoding = HALF) -> Outcome:
    """The payload at rest is the oracle's, of ``length``."""
    return adapter.store([Item(of, view(content(of, length)), 0, encoding)])[0].outcome


def fetched(adapter: Adapter, of: Key, length: int, most: int = 2 * OBJECT) -> Encoding | None:
    """Must be there with these bytes; returns its encoding, parameters without the padding."""
    (one,) = adapter.fetch([(of, most)])
    assert one.outcome == OK
    assert bytes(one.payload) == content(of, length), "OK with wrong bytes"
    return one.encoding and one.encoding._replace(params=one.encoding.params.rstrip(b"\0"))


class AdapterConformance:
    """See the module."""

    capacity = 16 * MIB

    @pytest.fixture
    def opened(self, medium: Medium) -> Callable[..., object]:
        @contextmanager
        def use(capacity: int = self.capacity) -> Iterator[Adapter]:
            adapter = medium.adapter(capacity)
            adapter.open()
            try:
                yield adapter
            finally:
                adapter.close()

        return use

    @pytest.fixture
    def adapter(self, opened: Callable[..., object]) -> Iterator[Adapter]:
        with opened() as adapter:
            yield adapter
            used, limit, objects = adapter.usage()
            assert 0 <= used <= limit
            assert objects >= 0

    # ---- one object --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [1, 255, 4095, 4096, 4097, 70_001, 256 * 1024, 3 * MIB])
    def test_what_was_stored_comes_back_exactly(self, adapter: Adapter, length: int) -> None:
        assert put(adapter, key(1), length=length) == [OK]
        assert adapter.lookup([key(1)]) == [True]
        assert get(adapter, key(1), length=length) == [OK]

    @pytest.mark.parametrize("offset", [1, 64, 512])
    def test_views_need_no_alignment(self, adapter: Adapter, offset: int) -> None:
        data = content(key(2), 70_001)
        assert adapter.store([Item(key(2), view(data, offset=offset), 0)])[0].outcome == OK
        into = view(70_001, offset=offset)
        assert adapter.load([(key(2), into)])[0].outcome == OK
        assert bytes(into) == data

    def test_a_store_reads_only_and_a_load_writes_only_inside_its_view(self, adapter: Adapter) -> None:
        around = view(3 * 4096 + 5000)
        data = content(key(3), 5000)
        around[4096 : 4096 + 5000] = data
        assert adapter.store([Item(key(3), around[4096 : 4096 + 5000].toreadonly(), 0)])[0].outcome == OK
        around[:] = b"\x5a" * len(around)
        assert adapter.load([(key(3), around[4096 : 4096 + 5000])])[0].outcome == OK
        assert bytes(around) == b"\x5a" * 4096 + data + b"\x5a" * (2 * 4096)

    def test_what_was_never_stored_is_a_miss(self, adapter: Adapter) -> None:
        assert adapter.lookup([key(1), key(2)]) == [False, False]
        assert get(adapter, key(1), key(2)) == [MISS, MISS]
        assert adapter.delete([key(1)]) == 0

    def test_nothing_is_asked_of_an_empty_batch(self, adapter: Adapter) -> None:
        assert adapter.lookup([]) == []
        assert adapter.store([]) == []
        assert adapter.load([]) == []
        assert adapter.delete([]) == 0

    def test_keys_that_differ_in_one_field_are_different_objects(self, adapter: Adapter) -> None:
        keys = [
            key(1, shard=0, shards=2),
            key(1, shard=1, shards=2),
            key(1, shard=0, shards=4),
            key(2, shard=0, shards=2),
            key(1, shard=0, shards=2, namespace=bytes(32)),
        ]
        assert put(adapter, *keys, length=5000) == [OK] * 5
        assert get(adapter, *keys, length=5000) == [OK] * 5
        assert adapter.delete(keys[:1]) == 1
        assert adapter.lookup(keys) == [False, True, True, True, True]

    def test_a_batch_answers_per_item_and_in_order(self, adapter: Adapter) -> None:
        there, absent = [key(n) for n in (3, 1, 4)], [key(n) for n in (15, 9)]
        assert put(adapter, *there) == [OK] * 3
        asked = [absent[0], there[2], there[0], absent[1], there[1]]
        assert adapter.lookup(asked) == [False, True, True, False, True]
        assert get(adapter, *asked) == [MISS, OK, OK, MISS, OK]

    def test_storing_what_is_there_is_ok_and_takes_no_room(self, adapter: Adapter) -> None:
        assert put(adapter, key(1)) == [OK]
        before = adapter.usage()
        assert put(adapter, key(1), key(1)) == [OK, OK]
        assert adapter.usage() == before
        assert get(adapter, key(1)) == [OK]

    def test_a_view_of_another_length_is_never_ok(self, adapter: Adapter) -> None:
        put(adapter, key(1))
        for length in (OBJECT - 1, OBJECT + 1, 4096, 2 * OBJECT):
            result = adapter.load([(key(1), view(length))])[0]
            assert result.outcome in (MISS, Outcome.CORRUPT)

    # ---- delete, list, usage -----------------------------------------------------------------------------------------

    def test_a_deleted_object_is_gone_and_its_room_is_free(self, adapter: Adapter) -> None:
        empty = adapter.usage()
        put(adapter, key(1), key(2))
        full = adapter.usage()
        assert full.objects == empty.objects + 2
        assert full.bytes_used >= empty.bytes_used + 2 * OBJECT
        assert adapter.delete([key(1), key(7), key(1)]) == 1
        assert adapter.lookup([key(1), key(2)]) == [False, True]
        assert get(adapter, key(1), key(2)) == [MISS, OK]
        assert adapter.delete([key(2)]) == 1
        assert adapter.usage() == empty
        assert put(adapter, key(1)) == [OK]

    def test_a_listing_shows_every_object_once_page_by_page(self, adapter: Adapter) -> None:
        keys = {key(n, shard=n % 2, shards=2): 1000 + n for n in range(23)}
        for one, length in keys.items():
            assert put(adapter, one, length=length) == [OK]
        seen: list[tuple[Key, int]] = []
        cursor, pages = b"", 0
        while True:
            page = adapter.list(cursor, 5)
            assert len(page.objects) <= 5
            seen += page.objects
            cursor, pages = page.cursor, pages + 1
            assert pages < 100
            if not cursor:
                break
        assert len(seen) == 23
        assert dict(seen) == keys

    @pytest.mark.parametrize("cursor", [b"\xff" * 40, b"x", b"../../etc", bytes(1000)])
    def test_a_cursor_that_nobody_gave_does_no_harm(self, adapter: Adapter, cursor: bytes) -> None:
        put(adapter, key(1), length=5000)
        assert len(adapter.list(cursor, 10).objects) <= 1
        assert adapter.lookup([key(1)]) == [True]

    # ---- capacity ----------------------------------------------------------------------------------------------------

    def test_the_limit_holds_and_the_oldest_go_first(self, adapter: Adapter) -> None:
        limit = adapter.usage().bytes_limit
        assert limit <= self.capacity
        total = 3 * (limit // OBJECT)
        for number in range(total):
            assert put(adapter, key(number)) == [OK]
            assert adapter.usage().bytes_used <= limit
        until = time.monotonic() + 10
        while True:
            held = adapter.lookup([key(n) for n in range(total)])
            first = held.index(True)
            if all(held[first:]):
                break
            assert time.monotonic() < until, "an older object outlived a newer one"  # for longer than removing takes
            time.sleep(0.01)
        assert total - first >= (limit // OBJECT) // 2

    def test_a_load_makes_an_object_recent(self, adapter: Adapter) -> None:
        limit = adapter.usage().bytes_limit
        put(adapter, key(0), key(1))
        for number in range(2, 2 * (limit // OBJECT)):
            assert put(adapter, key(number)) == [OK]
            assert get(adapter, key(0)) == [OK]
        assert adapter.lookup([key(0), key(1)]) == [True, False]

    def test_what_can_never_fit_is_refused_and_takes_nothing_with_it(self, adapter: Adapter) -> None:
        put(adapter, key(1))
        length = adapter.usage().bytes_limit + 4096
        result = adapter.store([Item(key(2), view(length), 1)])[0]
        assert result.outcome == Outcome.TOO_LARGE
        assert str(length) in result.detail
        assert adapter.lookup([key(1), key(2)]) == [True, False]
        assert put(adapter, key(3)) == [OK]

    # ---- what cannot be trusted --------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("part", "at"),
        [("header", at) for at in (0, 8, 12, 16, 48, 80, 88, 96, 104, 120, 216, 224, 248, 255)]
        + [("payload", at) for at in (0, 4095, 70_000, OBJECT - 1)],
    )
    def test_a_flipped_bit_is_a_counted_miss_and_the_object_goes(
        self, medium: Medium, adapter: Adapter, part: str, at: int
    ) -> None:
        put(adapter, key(1), key(2))
        medium.flip(adapter, key(1), part, at)
        assert get(adapter, key(1), key(2)) == [Outcome.CORRUPT, OK]
        assert adapter.counters["corrupt"] == 1
        assert adapter.lookup([key(1), key(2)]) == [False, True]
        assert get(adapter, key(1)) == [MISS]
        assert put(adapter, key(1)) == [OK]
        assert get(adapter, key(1)) == [OK]

    def test_a_payload_that_changed_under_its_checksum_never_comes_back(self, adapter: Adapter) -> None:
        data = content(key(1))
        adapter.store([Item(key(1), view(data), payload_checksum(data) ^ 1)])
        assert get(adapter, key(1)) != [OK]
        assert adapter.lookup([key(1)]) == [False]

    def test_a_vanished_object_is_a_miss_and_its_room_is_free(self, medium: Medium, adapter: Adapter) -> None:
        empty = adapter.usage()
        put(adapter, key(1))
        if not medium.vanish(adapter, key(1)):
            pytest.skip("nobody else can remove objects of this medium")
        assert adapter.lookup([key(1)]) == [False]
        assert get(adapter, key(1)) == [MISS]
        assert adapter.usage() == empty
        assert put(adapter, key(1)) == [OK]
        assert get(adapter, key(1)) == [OK]

    # ---- encoded -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [1, 4096, 70_001, OBJECT - 4096, OBJECT - 1, OBJECT, OBJECT + 16])
    def test_encoded_bytes_are_never_given_as_plain_ones(self, adapter: Adapter, length: int) -> None:
        assert put_encoded(adapter, key(1), length) == OK
        assert put(adapter, key(2)) == [OK]
        assert adapter.lookup([key(1)]) == [True]
        for wanted in (OBJECT, length, 5000):
            results = adapter.load([(key(1), view(wanted)), (key(2), view(OBJECT))])
            assert [result.outcome for result in results] == [Outcome.ENCODED, OK]
        assert fetched(adapter, key(1), length) == HALF
        assert fetched(adapter, key(2), OBJECT) is None
        assert adapter.counters["corrupt"] == 0

    def test_a_fetch_answers_per_item_and_no_more_than_is_wanted(self, adapter: Adapter) -> None:
        put_encoded(adapter, key(1), 5000)
        put(adapter, key(2), length=3000)
        asked = [(key(1), 4999), (key(3), OBJECT), (key(2), 3000), (key(2), 2999), (key(1), 5000)]
        answers = adapter.fetch(asked)
        assert [one.outcome for one in answers] == [MISS, MISS, OK, MISS, OK]
        assert all(len(one.payload) <= most for one, (_, most) in zip(answers, asked, strict=True))
        assert adapter.lookup([key(1), key(2)]) == [True, True]
        assert adapter.fetch([]) == []

    def test_storing_what_is_there_in_another_encoding_is_ok_and_writes_nothing(self, adapter: Adapter) -> None:
        assert put_encoded(adapter, key(1), 9000) == OK
        assert put(adapter, key(2)) == [OK]
        before = adapter.usage()
        assert put(adapter, key(1)) == [OK]
        assert put_encoded(adapter, key(2), 9000) == OK
        assert put_encoded(adapter, key(1), 40_000, HALF._replace(serdes=(1,))) == OK
        assert adapter.usage() == before
        assert fetched(adapter, key(1), 9000) == HALF
        assert get(adapter, key(2)) == [OK]

    def test_what_is_used_is_what_is_stored(self, adapter: Adapter) -> None:
        empty = adapter.usage().bytes_used
        put_encoded(adapter, key(1), 9000)
        assert 9000 <= adapter.usage().bytes_used - empty < OBJECT // 2
        assert dict(adapter.list(b"", 10).objects) == {key(1): 9000}

    @pytest.mark.parametrize(("part", "at"), [("header", 88), ("header", 112), ("header", 120), ("payload", 0)])
    def test_a_flipped_bit_in_an_encoded_object_is_a_counted_miss(
        self, medium: Medium, adapter: Adapter, part: str, at: int
    ) -> None:
        put_encoded(adapter, key(1), 9000)
        medium.flip(adapter, key(1), part, at)
        assert adapter.fetch([(key(1), OBJECT)])[0].outcome == Outcome.CORRUPT
        assert adapter.counters["corrupt"] == 1
        assert adapter.lookup([key(1)]) == [False]

    def test_a_restart_keeps_encodings(self, medium: Medium, opened: Callable[..., object]) -> None:
        if not medium.persistent:
            pytest.skip("this medium forgets")
        with opened() as adapter:
            put_encoded(adapter, key(1), 9000)
        with opened() as adapter:
            assert adapter.load([(key(1), view(OBJECT))])[0].outcome == Outcome.ENCODED
            assert fetched(adapter, key(1), 9000) == HALF

    @pytest.mark.parametrize("chain", serdes.CHAINS, ids="+".join)
    def test_what_a_chain_of_serdes_stored_comes_back(
        self, medium: Medium, adapter: Adapter, chain: tuple[str, ...], tmp_path: Path
    ) -> None:
        codec = serdes.codec(chain, tmp_path)
        for number in (1, 2):
            plain = serdes.kv(key(number), OBJECT)
            assert adapter.store([codec.encode(Item(key(number), view(plain)))])[0].outcome == OK
        medium.flip(adapter, key(2), "payload", 1000)
        for number, outcome in ((1, OK), (2, Outcome.CORRUPT)):
            into = view(OBJECT)
            (one,) = adapter.fetch([(key(number), codec.most_stored(OBJECT))])
            assert codec.decode(key(number), one, into).outcome == outcome
            plain = serdes.kv(key(number), OBJECT)
            if outcome == OK and chain[0] == "fp8":
                assert serdes.within_bound(plain, bytes(into))
            elif outcome == OK:
                assert bytes(into) == plain, "fp8 behind another serde changes nothing"

    # ---- at once -----------------------------------------------------------------------------------------------------

    def test_one_key_stored_by_many_at_once_is_one_object(self, adapter: Adapter) -> None:
        outcomes: list[Outcome] = []
        gate = threading.Barrier(6)

        def store() -> None:
            gate.wait()
            outcomes.extend(put(adapter, key(1), length=MIB))

        _together([store] * 6)
        assert outcomes.count(OK) >= 1
        assert set(outcomes) <= {OK, Outcome.BUSY}
        assert adapter.usage().objects == 1
        assert get(adapter, key(1), length=MIB) == [OK]

    def test_threads_that_store_load_and_delete_see_only_exact_bytes(self, adapter: Adapter) -> None:
        seen: list[Outcome] = []

        def work(seed: int) -> Callable[[], None]:
            def run() -> None:
                random = np.random.default_rng(seed)
                for _ in range(40):
                    keys = [key(int(n)) for n in random.choice(90, size=3, replace=False)]
                    seen.extend(put(adapter, *keys))
                    seen.extend(get(adapter, *keys))
                    adapter.lookup(keys)
                    if random.random() < 0.3:
                        adapter.delete(keys[:1])
                    assert adapter.usage().bytes_used <= adapter.usage().bytes_limit

            return run

        _together([work(seed) for seed in range(4)])
        assert set(seen) <= {OK, MISS, Outcome.BUSY, Outcome.NO_SPACE}
        assert seen.count(OK) > len(seen) // 3
        assert adapter.counters["corrupt"] == 0

    # ---- restart -----------------------------------------------------------------------------------------------------

    def test_closing_twice_is_fine(self, medium: Medium) -> None:
        adapter = medium.adapter(self.capacity)
        adapter.open()
        adapter.close()
        adapter.close()

    def test_a_restart_keeps_objects_and_usage(self, medium: Medium, opened: Callable[..., object]) -> None:
        if not medium.persistent:
            pytest.skip("this medium forgets")
        keys = [key(n) for n in range(9)]
        with opened() as adapter:
            assert put(adapter, *keys) == [OK] * 9
            adapter.delete(keys[:2])
            before = adapter.usage()
        with opened() as adapter:
            assert adapter.usage() == before
            assert adapter.lookup(keys) == [False] * 2 + [True] * 7
            assert get(adapter, *keys[2:]) == [OK] * 7
            assert {one for one, _ in adapter.list(b"", 100).objects} == set(keys[2:])

    def test_a_restart_keeps_the_limit_and_the_order(self, medium: Medium, opened: Callable[..., object]) -> None:
        if not (medium.persistent and medium.keeps_recency):
            pytest.skip("this medium forgets")
        with opened() as adapter:
            limit = adapter.usage().bytes_limit
            half = limit // OBJECT // 2
            for number in range(half):
                assert put(adapter, key(number)) == [OK]
            assert get(adapter, key(0)) == [OK]
        with opened() as adapter:
            for number in range(half, limit // OBJECT + 3):
                assert put(adapter, key(number)) == [OK]
                assert adapter.usage().bytes_used <= limit
            assert adapter.lookup([key(0), key(1), key(2)]) == [True, False, False]

    def test_a_smaller_limit_after_a_restart_is_kept(self, medium: Medium, opened: Callable[..., object]) -> None:
        if not medium.persistent:
            pytest.skip("this medium forgets")
        with opened() as adapter:
            assert put(adapter, *[key(n) for n in range(40)]) == [OK] * 40
        try:
            with opened(capacity=self.capacity // 2) as adapter:
                assert put(adapter, key(99)) == [OK]
                used, limit, _ = adapter.usage()
                assert used <= limit <= self.capacity // 2
                assert get(adapter, key(99)) == [OK]
        except NotImplementedError:
            pytest.skip("the size of this medium is fixed")


def _together(work: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        return call

    threads = [threading.Thread(target=guarded(run)) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
