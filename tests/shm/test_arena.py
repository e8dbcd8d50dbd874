from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from kvkeep.shm.arena import BUSY, FULL, GRANTED, LOST, ORPHAN, PRESENT, SEALED, WAITING, Arena
from kvkeep.shm.layout import State
from tests.shm.helpers import Memory, chain, check, prefix_length, store

ALL = np.ones(1000, dtype=bool)


def namespace(arena: Arena, *, shards: int = 1, shard_bytes: int = 4096, name: bytes = b"{}"):  # type: ignore[no-untyped-def]
    return arena.namespaces.add(arena.namespaces.free_id(), name, shards, shard_bytes)


def test_a_chunk_is_readable_only_after_its_commit() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    grant = arena.reserve(ns, chain("a", 4), 0, 0)
    assert (grant.verdicts == GRANTED).all()
    assert prefix_length(arena, ns, chain("a", 4)) == 0
    assert (arena.commit(grant.granted, 0, ALL[:4], None) == SEALED).all()
    assert prefix_length(arena, ns, chain("a", 6)) == 4
    check(arena)


def test_storing_again_grants_nothing() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 4))
    grant = arena.reserve(ns, chain("a", 6), 0, 0)
    assert grant.verdicts.tolist() == [PRESENT] * 4 + [GRANTED] * 2


def test_another_writer_is_told_busy() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    arena.reserve(ns, chain("a", 2), 0, 0)
    assert arena.reserve(ns, chain("a", 2), 0, 0).verdicts.tolist() == [BUSY, BUSY]


def test_a_chunk_behind_an_absent_head_is_refused() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 2))
    grant = arena.reserve(ns, chain("a", 6), 4, 0)
    assert grant.verdicts.tolist() == [ORPHAN, ORPHAN]
    assert grant.missing == 2


def test_a_tail_waits_for_a_head_that_another_writes_and_follows_it() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    head = arena.reserve(ns, chain("a", 2), 0, 0)
    tail = arena.reserve(ns, chain("a", 4), 2, 0)
    assert arena.commit(tail.granted, 0, ALL[:2], None).tolist() == [WAITING, WAITING]
    assert prefix_length(arena, ns, chain("a", 4)) == 0
    arena.commit(head.granted, 0, ALL[:2], None)
    assert prefix_length(arena, ns, chain("a", 4)) == 4
    check(arena)


def test_a_tail_is_given_up_with_its_head() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    head = arena.reserve(ns, chain("a", 2), 0, 0)
    done = arena.reserve(ns, chain("a", 3), 2, 0)
    arena.commit(done.granted, 0, ALL[:1], None)
    writing = arena.reserve(ns, chain("a", 4), 3, 0)
    arena.abandon(head.granted, 0)
    check(arena, writing=Counter(writing.granted.tolist()))
    assert arena.reserve(ns, chain("a", 4), 3, 0).verdicts.tolist() == [ORPHAN]
    assert arena.commit(writing.granted, 0, ALL[:1], None).tolist() == [LOST]
    assert arena.table.used_count == 0
    check(arena)


def test_one_bad_chunk_takes_what_hangs_on_it_and_nothing_else() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    grant = arena.reserve(ns, chain("a", 4), 0, 0)
    good = np.array([True, True, False, True])
    assert arena.commit(grant.granted, 0, good, None).tolist() == [SEALED, SEALED, 2, LOST]
    assert prefix_length(arena, ns, chain("a", 4)) == 2
    check(arena)


def test_a_chunk_is_present_only_with_all_its_shards() -> None:
    arena = Memory().arena()
    ns = namespace(arena, shards=3)
    for shard in (2, 0):
        grant = arena.reserve(ns, chain("a", 2), 0, shard)
        assert (arena.commit(grant.granted, shard, ALL[:2], None) == WAITING).all()
        assert prefix_length(arena, ns, chain("a", 2)) == 0
    assert arena.reserve(ns, chain("a", 2), 0, 0).verdicts.tolist() == [PRESENT, PRESENT]
    grant = arena.reserve(ns, chain("a", 2), 0, 1)
    assert (arena.commit(grant.granted, 1, ALL[:2], None) == SEALED).all()
    assert prefix_length(arena, ns, chain("a", 2)) == 2
    check(arena)


def test_a_chunk_that_some_ranks_never_store_is_given_up_in_time() -> None:
    arena = Memory().arena()
    ns = namespace(arena, shards=2)
    grant = arena.reserve(ns, chain("a", 2), 0, 0)
    arena.commit(grant.granted, 0, ALL[:2], None)
    arena.now += 3600
    arena.incomplete.end(arena.now)
    assert arena.table.used_count == 0
    check(arena)


def test_chunks_that_some_ranks_never_store_give_way_under_pressure() -> None:
    arena = Memory(units=1).arena()
    ns = namespace(arena, shards=2)
    for shard_of_one_rank in range(8):
        grant = arena.reserve(ns, chain(shard_of_one_rank, 1), 0, 0)
        arena.commit(grant.granted, 0, ALL[:1], None)
    assert (arena.reserve(ns, chain("a", 2), 0, 0).verdicts == FULL).all(), "their ranks may just be a little late"
    arena.now += 3
    grant = arena.reserve(ns, chain("a", 2), 0, 0)
    assert (grant.verdicts == GRANTED).all()
    check(arena, writing=Counter(grant.granted.tolist()))


def test_a_store_never_gives_up_its_own_head_for_its_tail() -> None:
    arena = Memory(units=1).arena()
    ns = namespace(arena, shards=2)
    head = arena.reserve(ns, chain("a", 8), 0, 0)
    arena.commit(head.granted, 0, ALL[:8], None)
    arena.now += 3
    grant = arena.reserve(ns, chain("a", 10), 8, 0)
    assert (grant.verdicts == FULL).all()
    assert arena.bytes_reserved == 8 * ns.extent_bytes
    check(arena)


@pytest.mark.parametrize("behind_another", [False, True])
@pytest.mark.parametrize("good", [False, True])
def test_a_store_never_gives_up_its_own_head_even_if_that_is_due(behind_another: bool, good: bool) -> None:
    """A STORE is handled before the deadlines of its round.  The head of its head may be of another chain."""
    arena = Memory(units=4, capacity=64).arena()
    ns = namespace(arena, shards=2, shard_bytes=1 << 15)
    older, own = chain("older", 1), chain("a", 2)
    resident = np.concatenate((older, own[:1])) if behind_another else own[:1]
    incomplete = arena.reserve(ns, resident, 0, 0).granted
    arena.commit(incomplete, 0, ALL[: len(incomplete)], None)
    others = arena.reserve(ns, chain("b", 4 - len(resident)), 0, 0).granted
    arena.now += 61.0
    grant = arena.reserve(ns, own, 0, 0)
    assert grant.verdicts.tolist() == [PRESENT, FULL]
    assert grant.chain.tolist() == incomplete[-1:].tolist()
    arena.commit(grant.granted, 0, np.full(len(grant.granted), good), None)
    check(arena, writing=Counter(others.tolist()))
    arena.now += 61.0
    arena.incomplete.end(arena.now)
    assert arena.table.used_count == len(others), "what is spared for a store is given up later"
    check(arena, writing=Counter(others.tolist()))


def test_pressure_does_not_make_an_incomplete_chunk_wait_longer() -> None:
    """Stores that find no room spare it each time, as they hold it; its own time ends all the same."""
    arena = Memory(units=4, capacity=64).arena()
    ns, own = namespace(arena, shards=2, shard_bytes=1 << 15), chain("a", 2)
    incomplete = arena.reserve(ns, own[:1], 0, 0).granted
    arena.commit(incomplete, 0, ALL[:1], None)
    others = arena.reserve(ns, chain("b", 3), 0, 0).granted
    for seconds in (10, 30, 59):
        arena.now = float(seconds)
        assert arena.reserve(ns, own, 0, 0).verdicts.tolist() == [PRESENT, FULL]
    arena.incomplete.end(arena.now)
    assert arena.table.used_count == len(others) + 1
    arena.incomplete.end(61.0)
    assert arena.table.used_count == len(others)
    check(arena, writing=Counter(others.tolist()))


def test_extents_of_a_dead_writer_rest_before_they_are_used_again() -> None:
    arena = Memory(units=1).arena()
    ns = namespace(arena)
    grant = arena.reserve(ns, chain("a", 16), 0, 0)
    arena.abandon(grant.granted, 0)
    assert arena.bytes_reserved == 0
    assert (arena.reserve(ns, chain("b", 2), 0, 0).verdicts == FULL).all()
    arena.now += 2
    arena.resting.end_quarantine(arena.now)
    assert (arena.reserve(ns, chain("b", 2), 0, 0).verdicts == GRANTED).all()


def test_a_full_arena_evicts_for_a_store_and_never_what_is_referenced() -> None:
    arena = Memory(units=1).arena()
    ns = namespace(arena)
    assert store(arena, ns, chain("a", 8)) == 8
    assert store(arena, ns, chain("b", 8)) == 8
    held = arena.prefix(ns, chain("a", 8)).entries
    arena.acquire(held)
    assert store(arena, ns, chain("c", 8)) == 8
    assert prefix_length(arena, ns, chain("a", 8)) == 8
    assert prefix_length(arena, ns, chain("b", 8)) == 0
    assert arena.reserve(ns, chain("d", 9), 0, 0).verdicts.tolist() == [GRANTED] * 8 + [FULL]


def test_a_store_longer_than_the_arena_keeps_its_head() -> None:
    arena = Memory(units=1).arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 16))
    assert store(arena, ns, chain("b", 40)) == 16
    assert prefix_length(arena, ns, chain("b", 40)) == 16
    assert store(arena, ns, chain("b", 50), start=0) == 0, "its own head must not be evicted for its tail"


def test_the_watermark_counts_bytes_and_stops_at_the_ratio() -> None:
    arena = Memory(units=1, slab_bytes=1 << 20).arena(watermark=0.8, ratio=0.3)
    ns = namespace(arena)
    store(arena, ns, chain("a", 204))
    assert not arena.evict_step()
    assert arena.slabs.bytes_used == 204 * 4096
    store(arena, ns, chain("b", 4))
    while arena.evict_step():
        pass
    assert arena.slabs.bytes_used <= 0.5 * arena.bytes_total + 128 * 4096
    assert prefix_length(arena, ns, chain("b", 4)) == 4
    check(arena)


def test_noop_never_evicts() -> None:
    arena = Memory(units=1).arena(policy="noop", watermark=0.5)
    ns = namespace(arena)
    assert store(arena, ns, chain("a", 30)) == 16
    assert not arena.evict_step()
    assert (arena.reserve(ns, chain("b", 1), 0, 0).verdicts == FULL).all()


def test_a_second_model_gets_memory_from_the_first_one() -> None:
    arena = Memory(units=8).arena()
    small, large = namespace(arena), namespace(arena, shard_bytes=60_000, name=b"[]")
    store(arena, small, chain("a", 128))
    assert store(arena, large, chain("b", 3)) == 3
    check(arena)
    assert prefix_length(arena, small, chain("a", 128)) > 0


def test_more_chunks_than_records_evicts_by_records() -> None:
    arena = Memory(units=16, capacity=32).arena()
    ns = namespace(arena)
    store(arena, ns, chain("a", 32))
    assert store(arena, ns, chain("b", 20)) == 20
    check(arena)


@pytest.mark.parametrize("lookups_between", [True, False])
def test_under_pressure_every_chain_keeps_a_prefix(seed: int, lookups_between: bool) -> None:
    """Chains stored in pieces, read in part, evicted on demand: a resident chunk always has its whole head."""
    rng = random.Random(seed)
    arena = Memory(units=4).arena(watermark=0.9, ratio=0.2)
    ns = namespace(arena)
    stored: Counter = Counter()
    for _ in range(800):
        name = rng.randint(0, 30)
        if rng.random() < 0.6 or not lookups_between:
            end = min(40, stored[name] + rng.randint(1, 8))
            keys = chain(name, end)
            start = min(stored[name], prefix_length(arena, ns, keys), end - 1)
            store(arena, ns, keys, start)
            stored[name] = end % 40
        else:
            found = arena.prefix(ns, chain(name, rng.randint(1, 40))).entries
            arena.touch(ns, found)
        if rng.random() < 0.3:
            arena.evict_step()
        while arena.housekeep():
            pass
        for other in range(31):
            entries = arena.index.find(chain(other, 40), ns.id).entries
            resident = int((entries >= 0).sum())
            assert (entries[:resident] >= 0).all(), f"chain {other} has a hole"
    check(arena)


@dataclass
class Writing:
    chain: str
    shard: int
    granted: np.ndarray
    held: np.ndarray
    generations: np.ndarray


def test_any_mixture_of_operations_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory(units=6, capacity=200)
    arena = memory.arena(watermark=0.9, ratio=0.3)
    spaces = [
        namespace(arena),
        namespace(arena, shards=2, name=b"[1]"),
        namespace(arena, shard_bytes=20_000, name=b"[2]"),
    ]
    writers: list[tuple[int, Writing]] = []
    readers: list[tuple[np.ndarray, np.ndarray]] = []
    for step in range(1500):
        which = rng.randrange(3)
        ns = spaces[which]
        keys = chain((which, rng.randint(0, 8)), rng.randint(1, 20))
        action = rng.random()
        if action < 0.4:
            shard = rng.randrange(ns.shards)
            grant = arena.reserve(ns, keys, rng.randrange(len(keys)), shard)
            if len(grant.granted):
                arena.acquire(grant.chain)
                generations = arena.table.generation[grant.chain]
                writers.append((shard, Writing("", shard, grant.granted, grant.chain, generations)))
        elif action < 0.7 and writers:
            shard, writing = writers.pop(rng.randrange(len(writers)))
            if rng.random() < 0.2:
                arena.abandon(writing.granted, shard)
            else:
                arena.commit(writing.granted, shard, np.array([rng.random() < 0.9 for _ in writing.granted]), None)
            arena.release(writing.held, writing.generations)
        elif action < 0.85:
            found = arena.prefix(ns, keys).entries
            if len(found):
                arena.touch(ns, found)
                arena.acquire(found)
                readers.append((found, arena.table.generation[found]))
        elif readers:
            arena.release(*readers.pop(rng.randrange(len(readers))))
        arena.now += rng.random() * 2
        arena.resting.end_quarantine(arena.now)
        arena.incomplete.end(arena.now)
        arena.evict_step()
        if step % 25 == 0 or step > 1450:
            references: Counter = Counter()
            for found, generations in [*readers, *((w.held, w.generations) for _, w in writers)]:
                references.update(found[arena.table.generation[found] == generations].tolist())
            writing = Counter(e for _, w in writers for e in w.granted.tolist())
            check(arena, references, writing)
            sealed = np.flatnonzero(arena.table.state == State.SEALED)
            _, result, _ = memory.crash()
            assert result.kept == len(sealed)
            assert result.dropped == 0
    for shard, writing in writers:
        arena.abandon(writing.granted, shard)
        arena.release(writing.held, writing.generations)
    for found, generations in readers:
        arena.release(found, generations)
    arena.now += 3600
    arena.incomplete.end(arena.now)
    arena.now += 3600
    arena.resting.end_quarantine(arena.now)
    check(arena)
    assert arena.bytes_reserved == 0


def test_a_chain_that_puts_a_chunk_behind_two_heads_leaves_it_behind_the_first() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    head, tail = chain("a", 2)
    other = chain("b", 1)[0]
    first = arena.reserve(ns, np.array([head, tail]), 0, 0)
    second = arena.reserve(ns, np.array([other, tail]), 0, 0)
    assert second.verdicts.tolist() == [GRANTED, BUSY]
    arena.commit(first.granted, 0, ~ALL[:2], None)
    arena.commit(second.granted, 0, ~ALL[:1], None)
    assert not arena.table.used().size
    check(arena)


def test_chains_that_would_make_chunks_wait_for_each_other_do_not() -> None:
    arena = Memory().arena()
    ns = namespace(arena)
    head, tail = chain("a", 2)
    between = chain("b", 1)[0]
    first = arena.reserve(ns, np.array([head, tail]), 0, 0)
    second = arena.reserve(ns, np.array([tail, between, head]), 0, 0)
    assert second.verdicts.tolist() == [BUSY, GRANTED, BUSY]
    assert (arena.commit(second.granted, 0, ALL[:1], None) == WAITING).all()
    assert (arena.commit(first.granted, 0, ALL[:2], None) == SEALED).all()
    assert arena.bytes_reserved == 0
    check(arena)


def test_a_long_look_for_a_circle_ends() -> None:
    heads = Memory().arena().heads
    run = np.arange(100)
    heads.hang_run(run, -1)
    assert heads.hang(200, 99, 10) == 0
    assert heads.rooted(200)
    assert heads.hang(200, 99, 1000) == 900
    assert not heads.rooted(200)
