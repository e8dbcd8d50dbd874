"""IsolatedLRU on the adapters: whose objects go first, in bytes on the medium, through restarts, beside readers."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.l2.adapter import Adapter, AdapterError, Key, Outcome
from kvkeep.l2.catalogue import CATALOGUE, entry_key
from kvkeep.l2.fs import FsAdapter
from kvkeep.l2.fs_io import PAGE, FileIO, file_bytes
from kvkeep.l2.maintenance import What
from kvkeep.l2.raw_block import RawBlockAdapter
from kvkeep.l2.raw_io import Engine, Finished, Meanwhile, Transfer
from kvkeep.l2.raw_layout import blocks_of
from kvkeep.l2.registry import create_adapter
from kvkeep.l2.tenants import TenantOrder, Tenants
from kvkeep.shm.recency import Clock
from tests.l2.conformance import MIB, AdapterConformance, Medium, get, key, put
from tests.l2.test_fs import FsMedium, file_of
from tests.l2.test_fs_media import du
from tests.l2.test_maintenance import steps
from tests.l2.test_raw_block import RawFile

TENANTS = ("", "chat", "scan", "batch")
KINDS = pytest.mark.parametrize("kind", ["fs", "raw_block"])


def space(tenant: str, number: int = 0) -> bytes:
    return (tenant.encode() + b"/%d" % number).ljust(32, b".")


def manifest(tenant: str) -> bytes:
    return json.dumps({"model": "m", **({"tenant": tenant} if tenant else {})}).encode()


def of(tenant: str, number: int) -> Key:
    return key(number, namespace=space(tenant))


def config(kind: str, path: Path, quotas: dict[str, int], mib: float = 48, **more: Any) -> dict[str, Any]:
    eviction = {"eviction_policy": "IsolatedLRU", "tenant_quotas": {t: n / (1 << 30) for t, n in quotas.items()}}
    where = {"base_path": str(path / "fs"), "capacity_gb": mib / 1024}
    if kind == "raw_block":
        where = {"path": str(path / "raw"), "size_gb": mib / 1024, "durability": "none"}
    return {"type": kind, **where, "eviction": {**eviction, **more}}


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens an adapter, after closing the one before it."""
    adapters: list[Any] = []

    def open_it(kind: str, quotas: dict[str, int], *, knows: bool = True, **more: Any) -> Any:
        for one in adapters:
            one.close()
        adapters.append(create_adapter(config(kind, tmp_path, quotas, **more)))
        adapters[-1].open()
        for tenant in TENANTS if knows else ():
            assert adapters[-1].describe(space(tenant), manifest(tenant)).outcome == Outcome.OK
        return adapters[-1]

    yield open_it
    for one in adapters:
        one.close()


def check(adapter: Any) -> None:
    (adapter._index if isinstance(adapter, FsAdapter) else adapter).check_integrity()


def held(adapter: Adapter, tenant: str) -> int:
    return adapter.tenants()[tenant].bytes_used


class TestFs(AdapterConformance):
    """What every adapter must do, also by this policy."""

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return FsMedium(tmp_path, eviction={"eviction_policy": "IsolatedLRU"})


class IsolatedRaw(RawFile):
    def adapter(self, capacity: int) -> Adapter:
        if self.size and capacity != self.size:
            raise NotImplementedError
        self.size = capacity
        eviction = {"eviction_policy": "IsolatedLRU"}
        return RawBlockAdapter({
            "type": "raw_block", "path": str(self.path), "size_gb": capacity / (1 << 30), "eviction": eviction,
        })  # fmt: skip


class TestRawBlock(AdapterConformance):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return IsolatedRaw(tmp_path, "auto", "none")


# ---- the rule --------------------------------------------------------------------------------------------------------


class Model:
    """The rule in its simplest form.  ``objects``: bytes on the medium, least recent first."""

    def __init__(self, quotas: dict[str, int]) -> None:
        self.quotas = quotas
        self.objects: OrderedDict[Key, int] = OrderedDict()

    def held(self, tenant: str) -> int:
        return sum(size for one, size in self.objects.items() if one.namespace == space(tenant))

    def store(self, tenant: str, one: Key, size: int, asked: int) -> None:
        """``asked``: bytes that it counts as until it is there."""
        mine = [old for old in self.objects if old.namespace == space(tenant)]
        while mine and self.held(tenant) + asked > self.quotas.get(tenant, 1 << 62):
            del self.objects[mine.pop(0)]
        self.objects[one] = size


def listed(adapter: Adapter) -> set[Key]:
    """Without a touch."""
    found, cursor = set(), b""
    while True:
        page = adapter.list(cursor, 100)
        found |= {one for one, _ in page.objects if one.namespace != CATALOGUE}
        if not (cursor := page.cursor):
            return found


def weight(adapter: Adapter, one: Key, length: int) -> tuple[int, int]:
    """Bytes on the medium of an object that is there, and while it is being stored."""
    if isinstance(adapter, FsAdapter):
        return file_of(adapter, one).stat().st_blocks * 512, file_bytes(length) + 2 * PAGE
    assert isinstance(adapter, RawBlockAdapter)
    geometry = adapter.geometry
    charge = geometry.slab_bytes // geometry.slots(blocks_of(length, geometry.block))
    return charge, charge


@KINDS
def test_within_the_capacity_exactly_what_is_above_a_quota_goes(opened: Open, kind: str, seed: int) -> None:
    random_ = random.Random(seed)
    quotas = {"chat": 3 * MIB, "scan": 1 * MIB, "batch": 2 * MIB}  # with what nobody has, always less than the capacity
    adapter = opened(kind, quotas)
    model, lengths = Model(quotas), [5000, 40_000, 100_000, 200_000, 60_000]
    for step in range(250):
        tenant = random_.choice(TENANTS[1:])
        one = of(tenant, random_.randrange(60))
        if tenant == "batch":
            one = of(tenant, random_.randrange(20))
        length = lengths[int.from_bytes(one.chunk, "little") % 5]
        act = random_.random()
        if act < 0.6:
            assert put(adapter, one, length=length) == [Outcome.OK]
            if one in model.objects:
                model.objects.move_to_end(one)
            else:
                model.store(tenant, one, *weight(adapter, one, length))
        elif act < 0.85:
            there = one in model.objects
            assert get(adapter, one, length=length) == [Outcome.OK if there else Outcome.MISS]
            if there:
                model.objects.move_to_end(one)
        elif act < 0.97:
            assert adapter.delete([one]) == (model.objects.pop(one, None) is not None)
        else:
            adapter = opened(kind, quotas, knows=False)  # the medium says whose its objects are
        assert listed(adapter) == set(model.objects), f"step {step}"
        used = {name: use.bytes_used for name, use in adapter.tenants().items()}
        assert used == {name: model.held(name) for name in quotas}, f"step {step}"
        check(adapter)
    assert adapter.counters["evicted"] == adapter.counters["evicted_above_quota"]


@KINDS
def test_when_the_medium_is_full_nobody_within_his_quota_pays_for_one_above(opened: Open, kind: str, seed: int) -> None:
    """Random stores and loads of many at once, also of those who have no quota."""
    random_ = random.Random(seed)
    quotas = {"chat": 8 * MIB, "scan": 10 * MIB}
    adapter = opened(kind, quotas, mib=32, trigger_watermark=1.0)
    order: OrderedDict[Key, int] = OrderedDict()
    went: Counter[str] = Counter()
    for step in range(100):
        tenant = random_.choice(TENANTS)
        keys = [of(tenant, random_.randrange(400)) for _ in range(random_.randrange(1, 9))]
        keys = list(dict.fromkeys(keys))
        before = listed(adapter)
        assert set(put(adapter, *keys)) == {Outcome.OK}
        for one in reversed(keys):
            order[one] = 0
            order.move_to_end(one)
        after = listed(adapter)
        gone = [one for one in order if one in before | set(keys) and one not in after]
        others = [one for one in gone if one.namespace != space(tenant) or tenant not in quotas]
        went.update(one.namespace[:1].decode() for one in others)
        if kind == "fs" and others:  # only the least recent of all, when there was no room
            last = list(order).index(others[-1])
            stayed = [one for one in list(order)[:last] if one in after]
            assert not stayed, f"step {step}: {len(stayed)} older ones stayed"
        usage = adapter.usage()
        assert usage.bytes_used <= usage.bytes_limit
        for name, quota in quotas.items():
            assert held(adapter, name) <= quota, f"step {step}"
        for one in gone:
            del order[one]
        check(adapter)
        if step % 40 == 39:
            adapter = opened(kind, quotas, mib=32, trigger_watermark=1.0, knows=False)
    assert went["."] or went["/"] or went["b"], "who has no quota gave way too"


def test_files_that_are_used_again_are_counted_once(opened: Open, tmp_path: Path) -> None:
    """The room of a file that comes above its tenant's quota is made by one of his own, which is written over."""
    adapter = opened("fs", {"chat": 4 * MIB}, mib=16, eviction_ratio=0.2)
    for number in range(100):
        assert put(adapter, of("chat", number), of("scan", number)) == [Outcome.OK] * 2
    assert adapter.counters["reused"] > 20
    adapter.close()
    check(adapter)
    assert adapter.usage().bytes_used == du(tmp_path / "fs") <= 16 * MIB


@KINDS
def test_a_flood_costs_the_flooded_tenant_only(opened: Open, kind: str) -> None:
    adapter = opened(kind, {"chat": 12 * MIB, "scan": 12 * MIB}, mib=40)
    chat = [of("chat", number) for number in range(40)]
    assert set(put(adapter, *chat)) == {Outcome.OK}
    for number in range(0, 400, 20):
        assert set(put(adapter, *[of("scan", n) for n in range(number, number + 20)])) == {Outcome.OK}
    assert adapter.lookup(chat) == [True] * 40
    assert not any(adapter.lookup([of("scan", n) for n in range(300)]))
    assert 8 * MIB < held(adapter, "scan") <= 12 * MIB


@KINDS
def test_without_tenants_it_is_lru(opened: Open, kind: str) -> None:
    adapter = opened(kind, {}, knows=False)
    for number in range(400):
        assert put(adapter, key(number)) == [Outcome.OK]
        assert get(adapter, key(0)) == [Outcome.OK]
    there = adapter.lookup([key(number) for number in range(400)])
    assert there[0]
    assert all(there[there.index(True, 1) :])
    assert set(adapter.tenants()) == {""}


@KINDS
def test_lower_quotas_hold_from_the_next_start_on(opened: Open, kind: str) -> None:
    adapter = opened(kind, {"chat": 20 * MIB})
    assert set(put(adapter, *[of("chat", n) for n in range(40)], *[of("scan", n) for n in range(20)])) == {Outcome.OK}
    adapter = opened(kind, {"chat": 3 * MIB}, knows=False)
    assert 2 * MIB < held(adapter, "chat") <= 3 * MIB
    assert adapter.lookup([of("scan", n) for n in range(20)]) == [True] * 20
    assert listed(adapter) >= {of("chat", 0), of("chat", 1)}, "of a batch the root stays longest"


@KINDS
def test_objects_become_a_tenants_when_their_namespace_is_described(opened: Open, kind: str) -> None:
    adapter = opened(kind, {"chat": 4 * MIB}, knows=False)
    put(adapter, *[of("chat", n) for n in range(30)])
    assert held(adapter, "") > 7 * MIB
    adapter.describe(space("chat"), manifest("chat"))
    assert "" not in adapter.tenants()
    check(adapter)
    put(adapter, of("scan", 1))
    put(adapter, of("chat", 99))
    assert held(adapter, "chat") <= 4 * MIB
    assert adapter.lookup([of("chat", 0), of("chat", 29), of("scan", 1)]) == [True, False, True]


# ---- readers ---------------------------------------------------------------------------------------------------------


class Gate:
    """Reads wait while it is closed."""

    def __init__(self) -> None:
        self.open, self.waiting = threading.Event(), threading.Event()
        self.open.set()

    def pass_(self) -> None:
        if not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(30)


class GatedIO(FileIO):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def readv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._gate.pass_()
        return super().readv(fd, buffers, offset)


class GatedEngine(Engine):
    def __init__(self, inner: Engine, gate: Gate) -> None:
        self.name, self._inner, self._gate = inner.name, inner, gate

    def run(
        self,
        write: bool,
        transfers: Sequence[Transfer],
        finished: Finished | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[int]:
        if not write:
            self._gate.pass_()
        return self._inner.run(write, transfers, finished, meanwhile)

    def sync(self) -> int:
        return self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def gated(kind: str, path: Path, policy: str, gate: Gate) -> Any:
    made = config(kind, path, {"chat": 4 * MIB} if policy == "IsolatedLRU" else {}, mib=24)
    made["eviction"]["eviction_policy"] = policy
    if kind == "fs":
        return FsAdapter(made, GatedIO(gate))
    return RawBlockAdapter(made, lambda engine: GatedEngine(engine, gate))


@KINDS
@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU"])
def test_what_is_being_read_is_passed_over_and_goes_when_it_is_not(tmp_path: Path, kind: str, policy: str) -> None:
    gate = Gate()
    adapter = gated(kind, tmp_path, policy, gate)
    adapter.open()
    adapter.describe(space("chat"), manifest("chat"))
    first = [of("chat", n) for n in range(3)]
    assert set(put(adapter, *first)) == {Outcome.OK}
    gate.open.clear()
    reader = threading.Thread(target=lambda: get(adapter, first[0]))
    reader.start()
    try:
        assert gate.waiting.wait(30)
        for number in range(10, 130):  # more than the quota, and than the medium
            assert put(adapter, of("chat", number)) == [Outcome.OK]
    finally:
        gate.open.set()
        reader.join(30)
    assert listed(adapter) >= {first[0]}, "it was being read"
    assert not listed(adapter) & set(first[1:])
    for number in range(200, 320):
        assert put(adapter, of("chat", number)) == [Outcome.OK]
    assert first[0] not in listed(adapter), "it was passed over for ever"
    check(adapter)
    adapter.close()


# ---- the catalogue ---------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU"])
def test_the_catalogue_outlives_what_it_tells_of(tmp_path: Path, kind: str, policy: str) -> None:
    made = config(kind, tmp_path, {}, mib=48)
    made["eviction"]["eviction_policy"] = policy
    for start in range(2):
        adapter: Any = create_adapter(made)
        adapter.open()
        if not start:
            assert adapter.describe(space("chat"), manifest("chat")).outcome == Outcome.OK
            before = adapter.usage()
            assert before.objects == 1
            assert adapter.describe(space("chat"), manifest("chat")).outcome == Outcome.OK
            assert adapter.usage() == before
        for number in range(400):
            assert put(adapter, of("chat", start * 1000 + number)) == [Outcome.OK]
        assert adapter.counters["evicted"] > 100
        assert json.loads(adapter.described(space("chat"))) == {"model": "m", "tenant": "chat"}
        assert adapter.described(space("scan")) == b""
        check(adapter)
        adapter.close()


@KINDS
def test_the_catalogue_is_no_object_in_lists_but_goes_with_its_namespace(opened: Open, kind: str) -> None:
    adapter = opened(kind, {})
    put(adapter, *[of("chat", n) for n in range(5)], *[of("scan", n) for n in range(5)])
    assert sum(len(step.rows) for step in steps(adapter, What.LIST)) == 10
    tally = steps(adapter, What.TALLY)
    assert sum(step.objects for step in tally) == 10
    assert tally[-1].tenants["chat"][0] == held(adapter, "chat")
    (found,) = steps(adapter, What.MANIFEST, space("chat"))
    assert json.loads(found.manifest)["tenant"] == "chat"
    assert sum(step.objects for step in steps(adapter, What.WIPE, space("chat"))) == 5
    assert adapter.described(space("chat")) == b""
    assert adapter.described(space("scan"))
    adapter.describe(space("chat"), manifest("chat"))
    assert adapter.described(space("chat")), "what is stored again is described again"
    assert sum(step.objects for step in steps(adapter, What.WIPE)) == 5
    assert adapter.usage()[0] == adapter.usage().objects == 0
    check(adapter)


@KINDS
@pytest.mark.parametrize("quotas", [{}, {"chat": 4 * MIB}])
def test_a_medium_that_holds_nothing_but_its_catalogue_says_so(opened: Open, kind: str, quotas: dict[str, int]) -> None:
    adapter = opened(kind, quotas)  # all tenants are described
    put(adapter, of("chat", 1))
    assert (adapter.usage().objects, adapter.manifests()) == (len(TENANTS) + 1, len(TENANTS))
    adapter.delete([of("chat", 1)])
    adapter.close()
    adapter.open()
    assert adapter.usage().objects == adapter.manifests() == len(TENANTS)
    adapter.undescribe(space("chat"))
    assert adapter.usage().objects == adapter.manifests() == len(TENANTS) - 1
    check(adapter)


@KINDS
def test_a_damaged_entry_is_written_again_with_the_next_store(opened: Open, kind: str, tmp_path: Path) -> None:
    adapter = opened(kind, {"chat": 4 * MIB})
    put(adapter, of("chat", 1))
    medium: Any = FsMedium(tmp_path) if kind == "fs" else IsolatedRaw(tmp_path, "auto", "none")
    if kind == "raw_block":
        medium.path = tmp_path / "raw"
    medium.flip(adapter, entry_key(space("chat")), "payload", 3)
    assert adapter.described(space("chat")) == b""
    adapter.describe(space("chat"), manifest("chat"))
    assert json.loads(adapter.described(space("chat")))["tenant"] == "chat"
    check(adapter)


def test_two_processes_in_one_directory_count_each_others_objects(tmp_path: Path) -> None:
    """... as far as the catalogue has their namespaces; without an entry they are nobody's until there is one."""
    made = config("fs", tmp_path, {"chat": 20 * MIB}) | {"shared": True}
    one, other = FsAdapter(made), FsAdapter(made)
    one.open(), other.open()
    try:
        other.describe(space("chat"), manifest("chat"))
        put(other, *[of("chat", n) for n in range(8)], *[of("scan", n) for n in range(8)])
        one._room.rescan()
        assert held(one, "chat") == held(other, "chat") > 8 * 250_000
        assert held(one, "") > 8 * 250_000
        other.describe(space("scan"), manifest("scan"))
        one._room.rescan()
        assert held(one, "scan") == held(one, "chat")
        check(one)
        other.undescribe(space("chat"))  # a clear by another one
        one._room.rescan()
        one.describe(space("chat"), manifest("chat"))
        assert one.described(space("chat"))
        check(one)
    finally:
        one.close(), other.close()


# ---- settings and pieces ---------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("eviction", "sentence"),
    [
        ({"tenant_quotas": {"a": 1}}, "'tenant_quotas' needs \"eviction_policy\": \"IsolatedLRU\", which is 'LRU'"),
        ({"eviction_policy": "IsolatedLRU", "tenant_quotas": {"a": -1}}, "the quota of 'a' is -1: give 0 to 1048576"),
        ({"eviction_policy": "IsolatedLRU", "tenant_quotas": {"a": True}}, "the quota of 'a' is True"),
        ({"eviction_policy": "IsolatedLRU", "tenant_quotas": 7}, "must be an object"),
        ({"eviction_policy": "IsolatedLRU", "quotas": {"a": 1}}, "did you mean 'tenant_quotas'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    kind: str, tmp_path: Path, eviction: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AdapterError, match=sentence):
        create_adapter(config(kind, tmp_path, {}) | {"eviction": eviction})


def test_an_order_follows_a_change_of_owner_and_of_bytes() -> None:
    recency, owner = np.zeros(100, dtype=np.uint64), np.zeros(100, dtype=np.uint16)
    weights = np.full(100, 10, dtype=np.int64)
    tenants = Tenants({"a": 50})
    tenants.learn(b"space", manifest("a"))
    order, clock = TenantOrder(recency, owner, tenants, lambda entries: weights[entries]), Clock()
    order.touch(np.arange(10), clock.stamps(10))
    assert tenants.usage()[""].bytes_used == 100
    mine = np.array([2, 3, 4, 5, 6, 7])
    order.reown(mine, np.full(6, tenants.of(b"space"), dtype=np.uint16))
    assert {name: use.bytes_used for name, use in tenants.usage().items()} == {"": 40, "a": 60}
    weights[7] = 25
    order.reweighed(7, 15)
    everything = lambda entries: np.ones(len(entries), dtype=bool)
    assert order.pop_excess(100, everything).tolist() == [7], "75 of 50: one of 25 is enough"
    assert order.pop(3, everything).tolist() == [9, 8, 6], "then the least recent of all"
    order.leave(np.array([2]))
    recency[2] = 0
    assert {name: use.bytes_used for name, use in tenants.usage().items()} == {"": 20, "a": 30}
    assert sorted(order.members().tolist()) == [0, 1, 3, 4, 5]
