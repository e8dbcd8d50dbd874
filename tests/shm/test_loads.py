"""What the arena knows for L2: loads that write all shards, entries that pass through, a list of what was sealed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from kvkeep.shm.arena import ALL_SHARDS, BUSY, GRANTED, ORPHAN, PRESENT, SEALED, WAITING, Arena
from kvkeep.shm.layout import State
from tests.shm.helpers import Memory, chain, check, prefix_length, store

GOOD = np.ones(1000, dtype=bool)


def namespace(arena: Arena, shards: int = 1):  # type: ignore[no-untyped-def]
    return arena.namespaces.add(arena.namespaces.free_id(), b"{}", shards, 4096)


def test_a_load_writes_all_shards_of_a_chunk_and_seals_it() -> None:
    arena = Memory().arena()
    ns = namespace(arena, 3)
    grant = arena.reserve(ns, chain("a", 4), 0, ALL_SHARDS)
    assert arena.reserve(ns, chain("a", 4), 0, 1).verdicts.tolist() == [BUSY] * 4, "no rank can join it"
    arena.check_integrity(Counter(), Counter({int(e): 3 for e in grant.granted}))
    assert (arena.commit(grant.granted, ALL_SHARDS, GOOD[:4], None) == SEALED).all()
    assert prefix_length(arena, ns, chain("a", 4)) == 4
    check(arena)


def test_a_load_never_joins_what_a_client_writes() -> None:
    arena = Memory().arena()
    ns = namespace(arena, 2)
    one = arena.reserve(ns, chain("a", 2), 0, 0)
    load = arena.reserve(ns, chain("a", 4), 0, ALL_SHARDS)
    assert load.verdicts.tolist() == [BUSY, BUSY, GRANTED, GRANTED]
    assert (arena.commit(load.granted, ALL_SHARDS, GOOD[:2], None) == WAITING).all(), "its head is not sealed yet"
    arena.commit(one.granted, 0, GOOD[:2], None)
    other = arena.reserve(ns, chain("a", 2), 0, 1)
    arena.commit(other.granted, 1, GOOD[:2], None)
    assert prefix_length(arena, ns, chain("a", 4)) == 4
    check(arena)


def test_a_chunk_that_failed_to_load_takes_what_hangs_on_it_along() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    first = arena.reserve(ns, chain("a", 3), 0, ALL_SHARDS)
    second = arena.reserve(ns, chain("a", 6), 3, ALL_SHARDS)
    arena.commit(first.granted, ALL_SHARDS, np.array([True, True, False]), None)
    assert prefix_length(arena, ns, chain("a", 6)) == 2
    assert arena.slabs.bytes_used == 5 * 4096, "the second load is still writing"
    arena.commit(second.granted, ALL_SHARDS, GOOD[:3], None)
    assert arena.slabs.bytes_used == 2 * 4096
    check(arena)


def test_nobody_waits_for_a_load_that_is_late_and_its_extents_stay_with_it() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    grant = arena.reserve(ns, chain("a", 2), 0, ALL_SHARDS)
    arena.watch.add(int(grant.granted[0]))
    assert arena.prefix(ns, chain("a", 2)).blocked_by == int(grant.granted[0])
    arena.doom(grant.granted, arena.table.generation[grant.granted].copy())
    assert arena.settled == [int(grant.granted[0])], "who waited is told"
    assert arena.prefix(ns, chain("a", 2)).blocked_by == -1
    assert arena.slabs.bytes_used == 2 * 4096
    assert arena.reserve(ns, chain("a", 2), 0, 0).verdicts.tolist() == [BUSY, BUSY]
    arena.commit(grant.granted, ALL_SHARDS, GOOD[:2], None)
    assert arena.slabs.bytes_used == 0
    assert store(arena, ns, chain("a", 2)) == 2
    check(arena)


def test_an_entry_that_passes_leaves_with_its_last_reference() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 3))
    entries = arena.prefix(ns, chain("a", 3)).entries
    generations = arena.table.generation[entries].copy()
    arena.acquire(entries)
    arena.acquire(entries[:1])
    arena.pass_on(entries, at_once=True)
    arena.release(entries, generations)
    assert prefix_length(arena, ns, chain("a", 3)) == 1
    arena.release(entries[:1], generations[:1])
    assert arena.table.used_count == 0
    check(arena)


def test_what_a_store_hangs_on_passes_no_more() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 2))
    entries = arena.prefix(ns, chain("a", 2)).entries
    arena.pass_on(entries, at_once=False)
    assert prefix_length(arena, ns, chain("a", 2)) == 2
    store(arena, ns, chain("a", 3), 2)
    generations = arena.table.generation[entries].copy()
    arena.acquire(entries)
    arena.release(entries, generations)
    assert prefix_length(arena, ns, chain("a", 3)) == 3
    check(arena)


def test_a_record_used_again_does_not_pass() -> None:
    arena = Memory(capacity=4).arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 2))
    arena.pass_on(arena.prefix(ns, chain("a", 2)).entries, at_once=True)
    store(arena, ns, chain("b", 4))
    entries = arena.prefix(ns, chain("b", 4)).entries
    arena.acquire(entries)
    arena.release(entries, arena.table.generation[entries].copy())
    assert prefix_length(arena, ns, chain("b", 4)) == 4
    check(arena)


def test_in_a_buffer_a_tail_may_be_stored_whose_head_has_left() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    assert arena.reserve(ns, chain("a", 4), 2, 0).verdicts.tolist() == [ORPHAN, ORPHAN]
    arena.keeps_heads = False
    assert store(arena, ns, chain("a", 4), 2) == 2
    assert arena.reserve(ns, chain("a", 4), 2, 0).verdicts.tolist() == [PRESENT, PRESENT]
    check(arena)


def test_what_was_sealed_is_listed_once_somebody_listens(seed: int) -> None:
    arena = Memory(units=64).arena()  # nothing is evicted: a record that is used again would be listed again
    ns, rng = namespace(arena, 2), random.Random(seed)
    arena.fresh = []
    for i in range(40):
        n = rng.randrange(1, 6)
        for shard in rng.choice([(0, 1), (1, 0), (0,), (ALL_SHARDS,)]):
            grant = arena.reserve(ns, chain(i, n), 0, shard)
            arena.commit(grant.granted, shard, GOOD[: len(grant.granted)], None)
    listed = sorted(int(e) for part in arena.fresh for e in part.entries)
    sealed = np.flatnonzero(arena.table.state == State.SEALED).tolist()
    assert listed == sealed
    check(arena)
