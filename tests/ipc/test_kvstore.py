"""The key/value store against real daemons: what comes back, what never does, and what is left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc import kvstore, kvstore_put
from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client
from kvkeep.ipc.client_rpc import Channel
from kvkeep.ipc.errors import ProtocolError
from kvkeep.ipc.formats import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    Header,
    Kind,
    MemoryFormat,
    Value,
    decode,
    describe,
    encode,
    restore,
)
from kvkeep.ipc.keys import Key
from kvkeep.ipc.kvstore import KVStore, Put
from kvkeep.ipc.kvstore_pages import name_of
from tests.conftest import Daemon
from tests.daemon.l2_helpers import fs, stored
from tests.ipc.conftest import PATIENCE_S, at_epoch, eventually

ROOT = Path(__file__).parents[2]
PAGE = 65536
SHARD = HEADER_BYTES + PAGE


@pytest.fixture(autouse=True)
def _store_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("contains", "batched_contains", "get", "batched_get", "put", "batched_put", "remove",
                 "batched_remove", "pin", "batched_pin"):  # fmt: skip
        monkeypatch.setitem(getattr(KVStore, name).__kwdefaults__, "deadline_s", PATIENCE_S)
    monkeypatch.setitem(KVStore.attach.__func__.__kwdefaults__, "attach_s", PATIENCE_S)  # type: ignore[attr-defined]


def ready(store: KVStore) -> KVStore:
    """All of L1 is reserved: nothing is FULL for a start."""
    eventually(lambda: store.client.stats()["l1"]["bytes_ready"] == store.client.stats()["l1"]["bytes_total"])
    return store


def attach(daemon: Daemon, **options: Any) -> KVStore:
    return ready(KVStore.attach(daemon.run_dir, **{"space": "test", "page_bytes": PAGE, **options}))


@pytest.fixture
def store(daemon: Daemon) -> Iterator[KVStore]:
    with attach(daemon) as one:
        yield one


def at_rest(store: KVStore) -> None:
    def held() -> tuple[int, int]:
        l1 = store.client.stats()["l1"]
        return l1["references"], l1["reserved_bytes"]

    eventually(lambda: held() == (0, 0))
    assert store.client.check() == {"ok": True, "problem": ""}


def payload(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def data_of(value: Value | None) -> Any:
    return None if value is None else value.data


# ---- what comes back -------------------------------------------------------------------------------------------------

SIZES = [0, 1, 4096, PAGE - 1, PAGE, PAGE + 1, PAGE + SHARD, PAGE + SHARD + 1, 5 << 20]


def test_bytes_of_any_size_come_back(store: KVStore) -> None:
    for size in SIZES:
        key, value = f"k{size}", payload(size, size)
        assert not store.contains(key)
        assert store.get(key) is None
        assert store.put(key, value) is Put.STORED
        assert store.contains(key)
        found = store.get(key)
        assert found is not None
        assert (found.data, found.format, found.dtype) == (value, MemoryFormat.BINARY, "uint8")
        assert (found.shape, found.nbytes) == ((size,), size)
        assert store.put(key, value) is Put.PRESENT
    at_rest(store)


SHAPES = [
    (MemoryFormat.BINARY, ()),
    (MemoryFormat.BINARY, (3, 0, 2)),
    (MemoryFormat.KV_SPLIT, (2, 3, 7, 40)),
    (MemoryFormat.KV_SPLIT_LAYER, (2, 256, 64)),
    (MemoryFormat.TOKEN_MAJOR, (256, 2, 64)),
    (MemoryFormat.MLA, (1, 5, 33, 96)),
    (MemoryFormat.MLA_LAYER, (33, 576)),
]
DTYPES = ["<f2", "<f4", ">f8", "|i1", "<u4", "|b1", "<c8", "<M8[s]", "<U3", "|S2"]


def test_arrays_come_back_with_shape_dtype_and_format(store: KVStore) -> None:
    for (format, shape), dtype in itertools.product(SHAPES, DTYPES):
        key = f"{format.name} {shape} {dtype}"
        array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
        assert store.put(key, array, format), key
        found = store.get(key)
        assert found is not None
        assert isinstance(found.data, np.ndarray)
        assert (found.format, found.dtype, found.shape) == (format, dtype, shape)
        assert (found.data.dtype.str, found.data.shape) == (dtype, shape)
        assert found.data.tobytes() == array.tobytes()
        assert found.format.tokens(found.shape) in (None, 7, 256, 33)
        if array.size:
            found.data.reshape(-1)[0] = found.data.reshape(-1)[-1]  # it is the caller's own
            assert np.array_equal(data_of(store.get(key)), array)


TORCH_DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float32", "bool", "int64", "complex64", "uint16"]


def test_torch_tensors_come_back_as_tensors(store: KVStore) -> None:
    torch = pytest.importorskip("torch")

    def bits(tensor: Any) -> Any:
        return tensor.reshape(-1).view(torch.uint8)

    for (format, shape), name in itertools.product(SHAPES, TORCH_DTYPES):
        key = f"{format.name} {shape} {name}"
        numbers = torch.arange(int(np.prod(shape)), dtype=torch.int64).remainder(97).reshape(shape)
        tensor = numbers.to(getattr(torch, name))
        assert store.put(key, tensor, format) is Put.STORED
        found = store.get(key)
        assert found is not None
        assert (found.format, found.dtype, found.shape) == (format, name, shape)
        assert (found.data.dtype, tuple(found.data.shape)) == (tensor.dtype, shape)
        assert bool((bits(found.data) == bits(tensor)).all())
    strided = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()
    assert store.put("strided", strided)
    assert torch.equal(data_of(store.get("strided")), strided)
    with pytest.raises(ValueError, match="kept"):
        store.put("quantised", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


def test_a_tensor_is_its_bytes_where_there_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    header = Header(b"tk", Kind.TORCH, MemoryFormat.BINARY, "bfloat16", (3,), 6)
    monkeypatch.setitem(sys.modules, "torch", None)
    flat = np.arange(6, dtype=np.uint8)
    assert decode(encode(header).tobytes()) == header
    assert restore(header, flat) is flat


def test_arrays_that_are_not_contiguous_come_back_in_c_order(store: KVStore) -> None:
    array = np.arange(60000, dtype=np.float32).reshape(200, 300)
    for key, view in (("t", array.T), ("step", array[::2, ::3]), ("fortran", np.asfortranarray(array))):
        assert store.put(key, view)
        assert np.array_equal(data_of(store.get(key)), view)
    assert store.put("view", memoryview(b"0123456789")[::3])
    assert data_of(store.get("view")) == b"0369"


def test_a_full_and_a_last_chunk_in_one_key_space(store: KVStore) -> None:
    full = np.random.default_rng(1).random((2, 4, 256, 128), dtype=np.float32)
    keys = [f"chunk-{i}" for i in range(4)]
    chunks = [full, full + 1, full + 2, np.ascontiguousarray(full[:, :, :17])]
    assert store.batched_put(zip(keys, chunks, strict=True), MemoryFormat.KV_SPLIT) == [Put.STORED] * 4
    for value, chunk in zip(store.batched_get(keys), chunks, strict=True):
        assert value is not None
        assert value.format.tokens(value.shape) == chunk.shape[2]
        assert np.array_equal(value.data, chunk)
    assert store.batched_contains([*keys, "another"]) == 4


def test_memory_of_the_callers_own(store: KVStore) -> None:
    array = np.random.default_rng(2).random((300, 2, 128), dtype=np.float32)
    store.put("k", array, MemoryFormat.TOKEN_MAJOR)
    asked: list[Header] = []
    pool = np.zeros(array.size * 2, np.float32)

    def allocate(header: Header) -> Any:
        asked.append(header)
        return pool[: array.size].reshape(header.shape)

    value = store.get("k", allocate=allocate)
    assert value is not None
    assert np.shares_memory(value.data, pool)
    assert np.array_equal(pool[: array.size].reshape(array.shape), array)
    assert (asked[0].shape, asked[0].dtype, asked[0].format) == (array.shape, "<f4", MemoryFormat.TOKEN_MAJOR)
    assert store.get("k", allocate=lambda header: None) is None
    with pytest.raises(ValueError, match="has 4 bytes"):
        store.get("k", allocate=lambda header: bytearray(4))
    at_rest(store)


def test_what_cannot_be_kept_is_refused_in_one_sentence(store: KVStore) -> None:
    record = np.zeros(3, [("a", "<i4"), ("b", "<f4")])
    for data in (record, np.array([object()]), "text", 5, None, ["list"]):
        with pytest.raises(ValueError, match=r"kept|is bytes"):
            store.put("k", data)
    for shape, format in (((3, 4), MemoryFormat.KV_SPLIT), ((3, 1, 1, 1), MemoryFormat.KV_SPLIT)):
        with pytest.raises(ValueError, match=r"shape \(2, layer, token, hidden\)"):
            store.put("k", np.zeros(shape), format)
    for key in ("", b"", "x" * MAX_KEY_BYTES, 7):
        with pytest.raises(ValueError, match="key"):
            store.get(key)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page_bytes"):
        KVStore(store.client, space="s", page_bytes=0)
    with pytest.raises(ProtocolError, match="does not fit"):
        KVStore(store.client, space="s", page_bytes=1 << 40)
    with pytest.raises(ValueError, match="ttl"):
        store.pin("k", ttl_s=0)
    assert store.put("k", b"1")
    with pytest.raises(ValueError):
        store.batched_put([("first", b"fine"), ("second", object())])
    assert not store.contains("first"), "all items are checked before one is stored"


# ---- identity --------------------------------------------------------------------------------------------------------

KEY = Key("org/model", 8, 3, bytes(range(32)), "bfloat16", None, (("user", "alice"),))


def test_every_field_of_a_key_and_of_a_store_is_another_value(daemon: Daemon) -> None:
    keys: list[Any] = [
        KEY,
        KEY._replace(model="org/model2"),
        KEY._replace(world=9),
        KEY._replace(rank=4),
        KEY._replace(hash=bytes(32)),
        KEY._replace(dtype="float16"),
        KEY._replace(tags=()),
        KEY._replace(tags=(("user", "bob"),)),
        *KEY.layers(4),
        KEY.to_string().encode(),  # bytes are a key of another kind than text
        "text",
        b"text",
    ]
    with Client.attach(daemon.run_dir) as client:
        stores = [
            KVStore(client, space="a", page_bytes=PAGE),
            KVStore(client, space="b", page_bytes=PAGE),
            KVStore(client, space="a", page_bytes=PAGE + 1),
            KVStore(client, space="a", page_bytes=PAGE, format=MemoryFormat.MLA_LAYER),
            KVStore(client, space="a", page_bytes=PAGE, format=MemoryFormat.BINARY),
            KVStore(client, space="a", page_bytes=PAGE, identity={"revision": "1"}),
            KVStore(client, space="a", page_bytes=PAGE, identity={"revision": "2"}),
        ]
        ready(stores[0])
        expected = {}
        for s, store in enumerate(stores):
            for k, key in enumerate(keys):
                assert store.get(key) is None
                expected[s, k] = np.full((2, 3), 100 * s + k)
                assert store.put(key, expected[s, k]) is Put.STORED
        for (s, k), array in expected.items():
            assert np.array_equal(data_of(stores[s].get(keys[k])), array)
        assert stores[0].contains(KEY.to_string()), "a Key and its readable form are one key"
        assert Key.from_string(KEY.layers(4)[2].to_string()).layer == 2
        assert data_of(KVStore(client, space="a", page_bytes=PAGE).get(KEY)) is not None
        with pytest.raises(ValueError, match="open a store for each"):
            stores[3].put("x", np.zeros((2, 3, 4)), MemoryFormat.KV_SPLIT_LAYER)


def test_a_key_keeps_its_first_value(store: KVStore) -> None:
    for first, second in ((100, 200), (100, 3 * PAGE), (3 * PAGE, 100), (3 * PAGE, 5 * PAGE), (3 * PAGE, 3 * PAGE)):
        key = f"{first}/{second}"
        assert store.put(key, payload(1, first)) is Put.STORED
        used = store.client.stats()["l1"]["entries"]
        assert store.put(key, payload(2, second)) is Put.PRESENT
        assert data_of(store.get(key)) == payload(1, first)
        assert store.client.stats()["l1"]["entries"] == used, "nothing of the second is kept"
        assert store.remove(key)
        assert store.get(key) is None
        assert store.put(key, payload(2, second)) is Put.STORED
        assert data_of(store.get(key)) == payload(2, second)
    at_rest(store)


# ---- independent keys ------------------------------------------------------------------------------------------------


def test_contains_counts_the_first_keys_and_takes_repeated_ones(store: KVStore) -> None:
    store.batched_put([("a", b"1"), ("b", b"2"), ("d", b"4")])
    assert store.batched_contains([]) == 0
    for wait_s in (0.0, 0.05):
        assert store.batched_contains(["a", "b", "c", "d"], wait_s=wait_s) == 2
        assert store.batched_contains(["a", "a", "b", "a", "c", "d"], wait_s=wait_s) == 4
        assert store.batched_contains(["d", "b", "a", "d"], wait_s=wait_s) == 4
        assert store.batched_contains(["c", "a"], wait_s=wait_s) == 0
    values = store.batched_get(["x", "b", "a", "y", "b", "d"])
    assert [data_of(v) for v in values] == [None, b"2", b"1", None, b"2", b"4"]
    assert store.batched_get([]) == []
    assert store.batched_put([]) == []
    at_rest(store)


def test_a_key_that_stands_twice_in_a_batch_is_stored_once(store: KVStore) -> None:
    assert store.batched_put([("a", b"1"), ("a", b"2"), ("b", b"3")]) == [Put.STORED, Put.BUSY, Put.STORED]
    assert data_of(store.get("a")) == b"1"
    at_rest(store)


def test_what_one_writer_does_never_touches_another_key(daemon: Daemon) -> None:
    """The chain of a STORE would tie these keys together: a store of each has its own."""
    with attach(daemon) as store, Client.attach(daemon.run_dir) as other:
        namespace = other.register(json.loads(store.namespace.manifest), shard_bytes=SHARD)
        assert namespace.digest == store.namespace.digest
        stuck = other.reserve(namespace, name_of("stuck").hash)  # another client is writing this one
        assert len(stuck) == 1
        items = [("before", b"0"), ("stuck", b"1"), ("after", b"2")]
        assert store.batched_put(items) == [Put.STORED, Put.BUSY, Put.STORED]
        assert [data_of(v) for v in store.batched_get(["before", "stuck", "after"])] == [b"0", None, b"2"]
        assert store.pin("after")
        assert store.remove("before"), "neither a pin nor a store of other keys holds it"
        stuck.abort()
        assert data_of(store.get("after")) == b"2"
        assert store.put("stuck", b"1") is Put.STORED
        store.unpin("after")
        at_rest(store)


def test_removing_while_other_values_are_written_loses_nothing(daemon: Daemon) -> None:
    wrong: list[Any] = []
    stop = threading.Event()
    with attach(daemon) as store:
        keep = {f"keep-{i}": payload(i, 1000 + 30000 * (i % 4)) for i in range(20)}
        assert all(store.batched_put(keep.items()))

        def churn() -> None:
            round_ = 0
            while not stop.is_set():
                round_ += 1
                items = [(f"churn-{round_}-{i}", payload(i, 50000 * (i % 3) + 1)) for i in range(8)]
                if store.batched_put(items) != [Put.STORED] * 8:
                    wrong.append("put")
                if store.batched_remove([key for key, _ in items]) != 8:
                    wrong.append("remove")

        thread = threading.Thread(target=churn)
        thread.start()
        for _ in range(15):
            values = store.batched_get(list(keep))
            wrong += [key for key, value in zip(keep, values, strict=True) if data_of(value) != keep[key]]
        stop.set()
        thread.join()
        assert wrong == []
        at_rest(store)


def test_eviction_takes_whole_values_and_gives_no_wrong_byte(make_daemon: Callable[..., Daemon], seed: int) -> None:
    rng = random.Random(seed)
    with attach(make_daemon(l1_mib=8)) as store:
        sizes = {f"k{i}": rng.choice((10, PAGE, 3 * PAGE, 7 * PAGE)) for i in range(150)}
        for i, (key, size) in enumerate(sizes.items()):
            assert store.put(key, payload(i, size)) in (Put.STORED, Put.FULL)
        there = 0
        for i, (key, size) in enumerate(sizes.items()):
            value = store.get(key)
            there += value is not None
            assert value is None or value.data == payload(i, size)
        assert 0 < there < len(sizes)
        assert store.client.stats()["counters"]["entries_evicted"] > 0
        assert store.counters["corrupt"] == 0
        assert store.counters["incomplete"] == 0, "the first page is the first to go"
        assert store.put("large", bytes(16 << 20)) is Put.FULL
        assert store.put("small", b"fits") is Put.STORED
        at_rest(store)


# ---- broken values ---------------------------------------------------------------------------------------------------


def overwrite(store: KVStore, name: str, at: int, data: bytes) -> None:
    """Damage the first page of a value where it lies."""
    with store.client.lookup(store.namespace, name_of(name).hash) as found:
        reading = store.client.open_read(found.handle, 0, 0, 1)
        assert reading is not None
        reading._arena.data[reading._offsets[0] + at :][: len(data)] = np.frombuffer(data, np.uint8)
        reading.leave()


def test_a_damaged_header_is_a_miss_and_makes_room_for_a_new_value(store: KVStore) -> None:
    store.put("other", b"other")
    for count, at in enumerate((0, 8, 10, 12, 13, 16, 23, 24, 26, 30, 50), start=1):
        key = f"k{at}"
        store.put(key, payload(1, 3 * PAGE))
        overwrite(store, key, at, b"\xa5")
        assert not store.pin(key)
        assert store.get(key) is None
        assert store.counters["corrupt"] == count
        eventually(lambda: not store.contains(key))  # noqa: B023
        assert store.put(key, b"again") is Put.STORED
        assert data_of(store.get(key)) == b"again"
    assert data_of(store.get("other")) == b"other"
    at_rest(store)


def test_a_header_of_another_key_is_a_miss(store: KVStore) -> None:
    for key in ("a", "b"):
        store.put(key, key.encode())
    overwrite(store, "a", 0, encode(Header(b"tb", Kind.BYTES, MemoryFormat.BINARY, "uint8", (1,), 1)).tobytes())
    assert store.get("a") is None
    assert data_of(store.get("b")) == b"b"


def test_a_header_that_verifies_but_makes_no_sense_is_none() -> None:
    good = Header(b"tk", Kind.NUMPY, MemoryFormat.BINARY, "<f4", (2, 3), 24, bytes(16))
    assert decode(encode(good).tobytes()) == good
    for change in (
        {"nbytes": 25},
        {"shape": (2, -3)},
        {"shape": (2, 3, 1 << 62)},
        {"shape": (1,) * 17, "nbytes": 4},
        {"dtype": "O"},
        {"dtype": "|O"},
        {"dtype": "f4"},
        {"dtype": "V4"},
        {"dtype": "(2,)f4"},
        {"dtype": "i4,i4"},
        {"dtype": "__import__('os')"},
        {"dtype": "bfloat16"},
        {"kind": Kind.BYTES},
        {"kind": Kind.TORCH, "dtype": "Tensor"},
        {"kind": 9},
        {"format": 0},
        {"digest": b"short"},
    ):
        fields = {name: getattr(good, name) for name in Header.__struct_fields__} | change
        assert decode(encode(Header(**fields)).tobytes()) is None, change


def test_random_bytes_are_never_a_header(seed: int) -> None:
    rng = random.Random(seed)
    good = encode(Header(b"tk", Kind.NUMPY, MemoryFormat.MLA, "<f4", (1, 2, 3, 4), 96)).tobytes()
    end = 24 + int.from_bytes(good[12:16], "little")
    for _ in range(2000):
        at = rng.randrange(end)
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        assert decode(bytes(bad)) is None
        assert decode(good[:24] + rng.randbytes(HEADER_BYTES - 24)) is None
    assert decode(bytes(HEADER_BYTES)) is None


def test_a_damaged_payload_is_a_miss_with_checksums(daemon: Daemon) -> None:
    with attach(daemon, checksums=True) as store:
        for size in (100, 3 * PAGE):
            store.put("k", payload(1, size))
            assert data_of(store.get("k")) == payload(1, size)
            overwrite(store, "k", HEADER_BYTES + 50, bytes([payload(1, size)[50] ^ 1]))
            assert store.get("k") is None
            eventually(lambda: not store.contains("k"))
        assert store.counters["corrupt"] == 2


def test_a_lost_page_is_a_miss_and_the_same_value_can_be_put_again(store: KVStore) -> None:
    value = payload(1, 4 * PAGE)
    for round_ in range(2):
        assert store.put("k", value) is Put.STORED
        header = Header(b"tk", *_declared(value))
        chain = store._pages.chain(name_of("k"), header)
        assert len(chain) == 4 * 32
        assert store.client.delete(store.namespace, chain[32:64]) == 1
        if round_ == 0:  # put back before anybody missed it
            assert store.put("k", payload(2, 4 * PAGE)) is Put.PRESENT
            assert store.put("k", value) is Put.STORED
            assert data_of(store.get("k")) == value
            assert store.remove("k")
        else:
            assert not store.pin("k")
            assert store.get("k") is None
            assert store.counters["incomplete"] == 1
            eventually(lambda: not store.contains("k"))
    at_rest(store)


def test_pages_that_an_evicted_value_left_are_not_taken_for_the_next_ones(store: KVStore) -> None:
    assert store.put("k", payload(1, 4 * PAGE)) is Put.STORED
    assert store.client.delete(store.namespace, name_of("k").hash) == 1, "its first page is the first to go"
    assert store.get("k") is None
    assert store.put("k", payload(2, 4 * PAGE)) is Put.STORED
    assert data_of(store.get("k")) == payload(2, 4 * PAGE)
    assert store.client.delete(store.namespace, name_of("k").hash) == 1
    assert store.put("k", payload(1, 4 * PAGE)) is Put.STORED
    assert data_of(store.get("k")) == payload(1, 4 * PAGE)


def _declared(value: bytes) -> tuple[Any, ...]:
    flat, kind, dtype, shape = describe(value)
    return kind, MemoryFormat.BINARY, dtype, shape, flat.size, kvstore.digest_of(flat)


def test_what_a_page_has_left_is_zeros(store: KVStore) -> None:
    for i in range(50):
        store.put(f"k{i}", b"\xff" * (3 * PAGE))
    assert store.clear() > 0
    for i in range(50):
        store.put(f"n{i}", b"\xff" * (PAGE + 10))
    name = name_of("n7")
    header = store._pages.find_header(name, kvstore.Until.after(PATIENCE_S))
    assert header is not None
    pages = np.zeros((2, SHARD), np.uint8)
    with store.client.lookup(store.namespace, store._pages.chain(name, header)) as found:
        assert store.client.retrieve(found, pages) == [True, True]
    assert pages[0, :10].min() == 255
    assert not pages[0, 10:].any()


# ---- pins ------------------------------------------------------------------------------------------------------------


def fill(store: KVStore, mib: int) -> None:
    for i in range(mib):
        store.put(f"filler-{time.monotonic_ns()}-{i}", payload(i, 1 << 20))


def test_pinned_values_survive_eviction_until_they_are_unpinned(make_daemon: Callable[..., Daemon]) -> None:
    with attach(make_daemon(l1_mib=8)) as store:
        for key, size in (("one", 10), ("many", 5 * PAGE)):
            store.put(key, payload(size, size))
            assert store.pin(key)
        assert store.pin("one"), "pins are counted"
        assert store.pinned == 2
        assert not store.pin("absent")
        assert not store.remove("one")
        assert not store.remove("many")
        fill(store, 20)
        assert data_of(store.get("one")) == payload(10, 10)
        assert data_of(store.get("many")) == payload(5 * PAGE, 5 * PAGE)
        assert store.batched_unpin(["one", "many", "absent"]) == 2
        assert not store.remove("one"), "one pin is left"
        assert store.unpin("one")
        assert not store.unpin("one")
        fill(store, 20)
        assert store.batched_contains(["one"]) == store.batched_contains(["many"]) == 0
        at_rest(store)


def test_a_pin_ends_with_its_time(store: KVStore) -> None:
    store.batched_put([("a", b"1"), ("b", b"2")])
    assert store.pin("a", ttl_s=0.05)
    assert store.pin("b", ttl_s=600)
    assert store.pin("b", ttl_s=0.01), "the longest counts"
    eventually(lambda: store.pinned == 1)
    eventually(lambda: store.client.stats()["l1"]["references"] == 1)
    assert not store.unpin("a")
    assert store.remove("a")
    assert not store.remove("b")


def test_pins_end_with_close_and_with_the_daemon(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as client:
        with KVStore(client, space="test", page_bytes=PAGE) as store:
            ready(store)
            store.batched_put([("a", b"1"), ("b", payload(1, 3 * PAGE))])
            assert store.batched_pin(["a", "b", "c"]) == 2
            daemon.restart()
            at_epoch(client, 2)
            assert store.pinned == 0
            assert store.batched_pin(["a", "b"]) == 2
            assert store.pinned == 2
        at_rest(KVStore(client, space="test", page_bytes=PAGE))
    eventually(lambda: "kvkeep-pins" not in {thread.name for thread in threading.enumerate()})


def test_a_store_that_is_dropped_pins_nothing(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as client:
        store = ready(KVStore(client, space="test", page_bytes=PAGE))
        store.put("k", payload(1, 3 * PAGE))
        assert store.pin("k")
        del store
        gc.collect()
        at_rest(KVStore(client, space="test", page_bytes=PAGE))


def test_pins_cannot_take_all_of_l1(make_daemon: Callable[..., Daemon]) -> None:
    with attach(make_daemon(l1_mib=8)) as store:
        keys = [f"k{i}" for i in range(12)]
        pinned = 0
        for i, key in enumerate(keys):
            assert store.put(key, payload(i, 700_000)) in (Put.STORED, Put.FULL)
            pinned += store.pin(key)
        assert 6 <= pinned <= 8
        assert store.put("still", payload(9, 700_000)) is Put.STORED


CHILD = f"""
import sys
from kvkeep.ipc.kvstore import KVStore
store = KVStore.attach(sys.argv[1], space="test", page_bytes={PAGE}, attach_s=30)
value = store.get("parent", deadline_s=30)
put = store.put("child", value.data * 2, deadline_s=30)
print(value.shape, put.name, store.pin("parent", deadline_s=30), flush=True)
sys.stdin.read()
"""


def test_two_processes_share_values_and_a_killed_one_holds_nothing(daemon: Daemon) -> None:
    with attach(daemon) as store:
        array = np.arange(60000, dtype=np.float64)
        store.put("parent", array)
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(daemon.run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"(60000,) STORED True\n"
            assert not store.remove("parent"), "the child has pinned it"
            child.kill()
        assert np.array_equal(data_of(store.get("child")), array * 2)
        eventually(lambda: store.remove("parent"))
        at_rest(store)


# ---- daemons that come and go ----------------------------------------------------------------------------------------


def test_without_a_daemon_all_is_a_miss_and_with_one_it_works(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    with KVStore.attach(daemon.run_dir, space="test", page_bytes=PAGE, attach_s=0.01) as store:
        assert not store.contains("k", wait_s=0.01)
        assert store.batched_contains(["a", "b"]) == 0
        assert store.get("k", wait_s=0.01) is None
        assert store.batched_get(["a", "b"]) == [None, None]
        assert store.put("k", b"1") is Put.UNAVAILABLE
        assert store.batched_put([("a", b"1"), ("b", b"2")]) == [Put.UNAVAILABLE] * 2
        assert not store.put("k", b"1")
        assert not store.remove("k")
        assert not store.pin("k")
        assert not store.unpin("k")
        assert store.clear() == 0
        daemon.start()
        eventually(lambda: store.put("k", b"1"))
        assert data_of(store.get("k")) == b"1"


def test_a_killed_daemon_is_a_miss_and_the_next_one_has_the_values(daemon: Daemon) -> None:
    with attach(daemon) as store:
        items = {f"k{i}": payload(i, 40000 * i + 1) for i in range(12)}
        assert store.batched_put(items.items()) == [Put.STORED] * 12
        for epoch in (2, 3):
            daemon.kill()
            eventually(lambda: not store.client.attached)
            assert store.get("k1") is None
            assert store.put("k99", b"1") is Put.UNAVAILABLE
            daemon.start()
            at_epoch(store.client, epoch)
            assert [data_of(v) for v in store.batched_get(list(items))] == list(items.values())
        at_rest(store)


def test_a_stopped_daemon_costs_the_deadline_once_and_nothing_stays_reserved(daemon: Daemon) -> None:
    with attach(daemon) as store:
        store.put("k", b"1")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            puts = store.batched_put([(f"n{i}", b"2") for i in range(100)], deadline_s=0.2)
            assert puts == [Put.UNAVAILABLE] * 100
            assert store.client.hung
            assert store.get("k") is None
            assert not store.contains("k")
            assert not store.remove("k")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: not store.client.hung)
        assert data_of(store.get("k")) == b"1"
        at_rest(store)
        assert store.batched_put([(f"n{i}", b"2") for i in range(100)]) == [Put.STORED] * 100


def test_kills_under_load_give_no_error_and_no_wrong_byte(make_daemon: Callable[..., Daemon], seed: int) -> None:
    daemon = make_daemon(l1_mib=8)  # less than is stored: eviction goes on all the time
    stop, hits, wrong = threading.Event(), [0], []
    with attach(daemon) as store:

        def work(number: int) -> None:
            rng = random.Random(seed + number)
            while not stop.is_set():
                chosen = [rng.randrange(60) for _ in range(6)]
                try:
                    store.batched_put([(f"k{i}", payload(i, 20000 * (i % 12) + i)) for i in set(chosen)])
                    if rng.random() < 0.2:
                        store.remove(f"k{chosen[0]}")
                    values = store.batched_get([f"k{i}" for i in chosen])
                except Exception as error:
                    wrong.append(error)
                    return
                hits[0] += len(values) - values.count(None)
                wrong.extend(
                    i
                    for i, value in zip(chosen, values, strict=True)
                    if value is not None and value.data != payload(i, 20000 * (i % 12) + i)
                )

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for epoch in range(2, 6):
            time.sleep(0.3)
            daemon.restart()
            at_epoch(store.client, epoch)
        eventually(lambda: hits[0] > 0)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert store.counters["corrupt"] == 0
        at_rest(store)


def test_random_operations_agree_with_a_dict(daemon: Daemon, seed: int) -> None:
    rng = random.Random(seed)
    model: dict[str, bytes] = {}
    pins: dict[str, int] = {}
    with attach(daemon) as store, attach(daemon) as other:
        keys = [f"key-{i}" for i in range(24)]
        for step in range(600):
            one, many = rng.choice(keys), rng.sample(keys, rng.randrange(1, 8))
            user = rng.choice((store, other))
            what = rng.choice(("put", "puts", "get", "gets", "contains", "leading", "remove", "pin", "unpin"))
            if what == "put":
                value = payload(step, rng.choice((0, 5, 1000, PAGE, 2 * PAGE, 3 * PAGE + 5)))
                assert user.put(one, value) is (Put.PRESENT if one in model else Put.STORED)
                model.setdefault(one, value)
            elif what == "puts":
                items = [(key, payload(step + i, rng.choice((7, PAGE + 7)))) for i, key in enumerate(many)]
                wanted = [Put.PRESENT if key in model else Put.STORED for key in many]
                assert user.batched_put(items) == wanted
                for key, value in items:
                    model.setdefault(key, value)
            elif what == "get":
                assert data_of(user.get(one)) == model.get(one)
            elif what == "gets":
                assert [data_of(v) for v in user.batched_get(many)] == [model.get(key) for key in many]
            elif what == "contains":
                assert user.contains(one) == (one in model)
            elif what == "leading":
                leading = next((i for i, key in enumerate(many) if key not in model), len(many))
                assert user.batched_contains(many) == leading
            elif what == "remove":
                assert user.remove(one) == (one in model and not pins.get(one))
                if not pins.get(one):
                    model.pop(one, None)
            elif what == "pin":
                assert store.pin(one) == (one in model)
                pins[one] = pins.get(one, 0) + (one in model)
            else:
                assert store.unpin(one) == (pins.get(one, 0) > 0)
                pins[one] = max(0, pins.get(one, 0) - 1)
        assert store.pinned == sum(count > 0 for count in pins.values())
        assert store.counters["corrupt"] == other.counters["corrupt"] == 0
        store._pins.close()
        at_rest(store)


def test_a_fork_is_told_to_attach_again(store: KVStore) -> None:
    store.put("k", b"1")
    pid = os.fork()
    if pid == 0:
        code = 0
        for call in (store.get, store.contains, store.pin, store.remove, lambda key: store.put(key, b"2")):
            try:
                call("k")
                code = 1
            except RuntimeError:
                pass
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert data_of(store.get("k")) == b"1"


# ---- L2 --------------------------------------------------------------------------------------------------------------


def test_what_l1_forgot_comes_from_l2_for_those_who_wait(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path))
    items = {f"k{i}": payload(i, size) for i, size in enumerate((1, PAGE, 3 * PAGE, 10, 9 * PAGE, 100))}
    with attach(daemon) as store:
        eventually(lambda: all(row["phase"] == "serving" for row in store.client.stats()["l2"]))
        assert store.batched_put(items.items()) == [Put.STORED] * len(items)
        pages = sum(len(value) > PAGE and -(-(len(value) - PAGE) // SHARD) for value in items.values()) + len(items)
        stored(store.client, pages)
    daemon.kill()
    daemon.start("--forget")
    with attach(daemon) as store:
        eventually(lambda: all(row["phase"] == "serving" for row in store.client.stats()["l2"]))
        keys = list(items)
        assert store.batched_contains(keys) == 0, "who does not wait sees L1 only"
        assert store.get("k2") is None
        assert store.batched_contains([*keys, "absent"], wait_s=20) == len(keys)
        assert data_of(store.get("k4", wait_s=20)) == items["k4"]
        assert store.pin("k2", wait_s=20)
        assert data_of(store.get("k2")) == items["k2"], "a pin keeps in L1 what was loaded"
        values = store.batched_get(["absent", *keys, "too"], wait_s=20)
        assert [data_of(v) for v in values] == [None, *items.values(), None]
        assert store.unpin("k2")
        at_rest(store)


def test_what_is_removed_does_not_come_back_from_l2(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path))
    with attach(daemon) as store:
        eventually(lambda: all(row["phase"] == "serving" for row in store.client.stats()["l2"]))
        for size in (100, 3 * PAGE):
            before = store.client.stats()["l2"][0]["chunks_stored"]
            pages = 1 + (size > PAGE) * 2
            assert store.put("k", payload(1, size)) is Put.STORED
            stored(store.client, before + pages)
            assert store.remove("k")
            assert store.get("k", wait_s=2) is None
            assert not store.remove("k")
            assert store.put("k", payload(2, size)) is Put.STORED
            stored(store.client, before + 2 * pages)
            eventually(lambda: store.client.management.ask(m.Ok, m.Clear, store.namespace.id, True).count > 0)
            assert data_of(store.get("k", wait_s=20)) == payload(2, size)
            assert store.put("other", b"1")
            assert store.remove("k"), "also what only L2 has"
            assert store.get("k", wait_s=2) is None
            store.remove("other")
        at_rest(store)


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_example_of_the_document_runs(daemon: Daemon) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kvstore.md").read_text(), re.DOTALL)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
    environ["KVKEEP_RUN_DIR"] = str(daemon.run_dir)
    with attach(daemon):
        subprocess.run([sys.executable, "-c", code], env=environ, timeout=120, check=True)


def test_the_stated_round_trips_are_the_ones_that_are_made(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = [0]
    call, wave = Channel.call, kvstore_put.ask_all

    def counted_call(*arguments: Any) -> Any:
        trips[0] += 1
        return call(*arguments)

    def counted_wave(*arguments: Any) -> Any:
        trips[0] += bool(arguments[2])
        return wave(*arguments)

    monkeypatch.setattr(Channel, "call", counted_call)
    monkeypatch.setattr(kvstore_put, "ask_all", counted_wave)
    keys = [f"k{i}" for i in range(20)]
    assert store.batched_put([(key, b"1") for key in keys]) == [Put.STORED] * 20
    assert trips == [2]
    store.put("large", payload(1, 3 * PAGE))
    operations: list[tuple[Callable[[], Any], int]] = [
        (lambda: store.contains("absent"), 1),
        (lambda: store.get("absent"), 1),
        (lambda: store.get("k1"), 3),
        (lambda: store.get("large"), 6),
        (lambda: store.batched_contains(keys), 1),
        (lambda: store.batched_get(keys), 3),
        (lambda: store.put("new", b"1"), 2),
        (lambda: store.put("new large", payload(1, 3 * PAGE)), 2),
        (lambda: store.put("k1", b"1"), 1),
    ]
    for number, (operation, wanted) in enumerate(operations):
        trips[0] = 0
        operation()
        assert trips[0] == wanted, number
