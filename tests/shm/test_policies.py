"""What every eviction policy must do, by name, as an order by itself and inside an arena."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvkeep.shm import recency
from kvkeep.shm.isolated import IsolatedLru
from kvkeep.shm.levels import LeveledOrder
from kvkeep.shm.policies import POLICIES, Order
from kvkeep.shm.recency import Clock
from tests.shm import test_arena
from tests.shm.helpers import Memory, chain, check, prefix_length, store

EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]
SCANS = ["Adaptive", "ARC", "S3FIFO"]  # which do not let one-time chunks drive out what is read


def make(name: str, capacity: int) -> tuple[Order, np.ndarray]:
    column = np.zeros(capacity, dtype=np.uint64)
    keys = np.random.default_rng(capacity).integers(1, 1 << 63, (capacity, 4), dtype=np.uint64)
    return POLICIES[name](column, keys), column


def everything(entries: np.ndarray) -> np.ndarray:
    return np.ones(len(entries), dtype=bool)


def miscounted(order: Order, column: np.ndarray) -> bool:
    """Whether what the policy believes about its sizes is not what is in the order."""
    if isinstance(order, LeveledOrder):
        return np.bincount(order._level[column != 0], minlength=order.levels).tolist() != order.sizes
    if isinstance(order, IsolatedLru):
        return np.bincount(order._tenant[column != 0], minlength=len(order.used)).tolist() != order.used
    return False


@pytest.mark.parametrize("name", EVICTING)
def test_a_chain_goes_tail_first_whatever_happened(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains share heads; paths are read in part, stored, referenced and let go; every eviction leaves prefixes."""
    monkeypatch.setattr(recency, "_SQUEEZE_SLACK", 0)
    monkeypatch.setattr(recency._Segment.__init__, "__defaults__", (32,))
    rng = random.Random(seed)
    parent = {0: -1}
    for node in range(1, 300):
        parent[node] = rng.randrange(max(0, node - 20), node)

    def path_to(node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = parent[node]
        return path[::-1]

    order, column = make(name, 300)
    clock = Clock()
    resident: set[int] = set()
    readers: list[list[int]] = []
    references: Counter[int] = Counter()

    def evictable(entries: np.ndarray) -> np.ndarray:
        return np.array([not references[int(e)] for e in entries], dtype=bool)

    for _ in range(700):
        path = path_to(min(299, int(rng.expovariate(1 / 80))))
        found = [node for node in path if node in resident]
        what = rng.random()
        if what < 0.35 and found:
            order.touch(np.array(found), clock.stamps(len(found)))
            if rng.random() < 0.5:
                readers.append(found)
                references.update(found)
        elif what < 0.75:
            order.touch(np.array(path), clock.stamps(len(path)), read=False)
            resident.update(path)
        elif readers and what < 0.9:
            references.subtract(readers.pop(rng.randrange(len(readers))))
            order.released()
        elif what > 0.98:
            leaves = sorted(resident - {parent[n] for n in resident} - set(+references))[:3]
            order.leave(np.array(leaves, dtype=np.int64))
            column[leaves] = 0
            resident.difference_update(leaves)
        if rng.random() < 0.5:
            free = sum(not references[n] for n in resident)
            want = rng.choice([1, 5, 30])
            gone = order.pop(want, evictable).tolist()
            assert len(gone) == len(set(gone)) == min(want, free), "all that may go can be had"
            assert not any(references[n] for n in gone)
            resident.difference_update(gone)
        assert all(parent[n] in resident or parent[n] < 0 for n in resident), "a tail outlived its head"
        assert not miscounted(order, column)
        order.squeeze(len(resident))
    assert sorted(order.members().tolist()) == sorted(resident)
    assert order.oldest() == min((int(column[n]) for n in resident), default=0)


@pytest.mark.parametrize("name", EVICTING)
def test_adopted_entries_go_in_the_order_of_their_stamps(name: str) -> None:
    order, column = make(name, 100)
    column[:] = np.random.default_rng(3).permutation(np.arange(1, 101, dtype=np.uint64))
    by_age = np.argsort(column)
    order.adopt(by_age, column[by_age])
    assert order.pop(40, everything).tolist() == by_age[:40].tolist()
    assert not miscounted(order, column)
    clock = Clock(200)
    kept = by_age[40:][::-1]
    order.touch(kept[:20], clock.stamps(20))
    assert set(order.pop(40, everything).tolist()) == set(kept[20:].tolist())


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_does_not_drive_out_what_is_read(name: str) -> None:
    """A chain as long as half the cache is asked for between scans that are each longer than the cache."""
    order, column = make(name, 12_000)
    clock = Clock()
    hot = np.arange(100)
    found = []
    for at, first in enumerate(range(100, 12_000, 20)):
        if at % 15 == 0:
            there = hot[column[hot] != 0]
            found.append(len(there))
            if len(there):
                order.touch(there, clock.stamps(len(there)))
            order.touch(hot, clock.stamps(100), read=False)
        order.touch(np.arange(first, first + 20), clock.stamps(20), read=False)
        order.pop(max(0, int(np.count_nonzero(column)) - 200), everything)
    assert len(found) == 40
    assert min(found[20:]) >= 90


@pytest.mark.parametrize("name", SCANS)
def test_what_comes_back_soon_after_its_eviction_is_not_new(name: str) -> None:
    order, _column = make(name, 1000)
    clock = Clock()
    order.touch(np.arange(100), clock.stamps(100), read=False)
    gone = order.pop(40, everything)
    assert gone.tolist() == list(range(99, 59, -1))
    assert isinstance(order, LeveledOrder)
    order.touch(np.arange(100), clock.stamps(100), read=False)
    assert order.sizes[1] == 100, "and its head is worth no less"


def test_storing_a_chain_in_pieces_is_not_reading_it() -> None:
    order, _column = make("Adaptive", 100)
    clock = Clock()
    for end in range(10, 101, 10):
        order.touch(np.arange(end), clock.stamps(end), read=False)
    assert isinstance(order, LeveledOrder)
    assert order.sizes == [100, 0, 0, 0]


def test_who_is_above_his_quota_gives_way_first() -> None:
    column = np.zeros(300, dtype=np.uint64)
    order, clock = IsolatedLru(column), Clock()
    order.set_quota("scanner", 50)
    quiet, scanner = order.tenant("quiet"), order.tenant("scanner")
    order.touch(np.arange(100), clock.stamps(100), tenant=quiet)
    order.touch(np.arange(100, 180), clock.stamps(80), tenant=scanner)
    assert order.excess() == 30
    assert order.pop(30, everything).tolist() == list(range(179, 149, -1)), "the tail of his chain, not the old ones"
    assert order.excess() == 0
    assert order.pop(1, everything).tolist() == [99], "within the quotas the least recent goes"


def test_a_tenant_whose_entries_are_held_does_not_stop_the_others() -> None:
    column = np.zeros(100, dtype=np.uint64)
    order, clock = IsolatedLru(column), Clock()
    order.set_quota("a", 0)
    order.touch(np.arange(50), clock.stamps(50), tenant=order.tenant("a"))
    order.touch(np.arange(50, 100), clock.stamps(50), tenant=order.tenant("b"))
    assert set(order.pop(100, lambda entries: entries >= 50).tolist()) == set(range(50, 100))
    order.released()
    assert len(order.pop(100, everything)) == 50


def test_a_quota_below_nothing_is_refused() -> None:
    order = IsolatedLru(np.zeros(1, dtype=np.uint64))
    with pytest.raises(ValueError, match="-1 entries"):
        order.set_quota("a", -1)


# ---- inside an arena -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[name for name in EVICTING if name != "LRU"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy of every arena in this test."""
    name: str = request.param
    monkeypatch.setitem(Memory.arena.__kwdefaults__, "policy", name)
    return name


def test_under_pressure_every_chain_keeps_a_prefix(policy: str, seed: int) -> None:
    """Chains stored in pieces, read in part, evicted on demand: a resident chunk always has its whole head."""
    rng = random.Random(seed)
    arena = Memory(units=1).arena(watermark=0.9, ratio=0.2)
    ns = test_arena.namespace(arena)
    chains = [chain(name, 12) for name in range(6)]
    for _ in range(300):
        keys = rng.choice(chains)
        if rng.random() < 0.5:
            there = prefix_length(arena, ns, keys)
            store(arena, ns, keys[: min(12, there + rng.randint(1, 4))], min(there, 11))
        else:
            arena.touch(ns, arena.prefix(ns, keys[: rng.randint(1, 12)]).entries)
        arena.evict_step()
        for other in chains:
            resident = arena.index.find(other, ns.id).entries >= 0
            assert resident[: int(resident.sum())].all(), "a chain has a hole"
    check(arena)


def test_any_mixture_of_operations_keeps_the_books(policy: str, seed: int) -> None:
    test_arena.test_any_mixture_of_operations_keeps_the_books(seed)


@pytest.mark.parametrize(
    "of_lru",
    [
        test_arena.test_a_full_arena_evicts_for_a_store_and_never_what_is_referenced,
        test_arena.test_a_store_longer_than_the_arena_keeps_its_head,
        test_arena.test_the_watermark_counts_bytes_and_stops_at_the_ratio,
        test_arena.test_a_second_model_gets_memory_from_the_first_one,
        test_arena.test_more_chunks_than_records_evicts_by_records,
    ],
)
def test_an_arena_makes_room_as_with_lru(policy: str, of_lru) -> None:  # type: ignore[no-untyped-def]
    of_lru()


def test_an_arena_is_adopted_under_the_policy(policy: str) -> None:
    memory = Memory(units=1)
    arena = memory.arena()
    ns = test_arena.namespace(arena)
    for name in "abc":
        store(arena, ns, chain(name, 5))
        arena.touch(ns, arena.prefix(ns, chain(name, 5)).entries)
    adopted, result, _ = memory.crash()
    assert result.kept == 15
    ns = next(iter(adopted.namespaces))
    assert store(adopted, ns, chain("d", 6)) == 6
    assert prefix_length(adopted, ns, chain("a", 5)) == 0
    assert prefix_length(adopted, ns, chain("c", 5)) == 5
    check(adopted)


def test_deleting_keeps_the_policy_right(policy: str) -> None:
    arena = Memory(units=1).arena()
    ns = test_arena.namespace(arena)
    for round_ in range(20):
        store(arena, ns, chain(round_, 12))
        entries = arena.prefix(ns, chain(round_, 12)).entries
        arena.touch(ns, entries)
        arena.drop(entries[6:])
        given_up = arena.reserve(ns, chain((round_, "given up"), 3), 0, 0)
        arena.abandon(given_up.granted, 0)
        arena.now += 3600
        arena.resting.end_quarantine(arena.now)
        assert not miscounted(next(iter(arena.orders)), arena.table.recency)
    check(arena)
