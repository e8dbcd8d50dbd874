"""What eviction met while it could not go is looked at again when it can: sealing is one of the ways to become so."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.shm.arena import ALL_SHARDS
from tests.daemon import l2_helpers as h
from tests.shm.helpers import Memory, chain, check, store

POLICIES = ("LRU", "ARC", "S3FIFO", "IsolatedLRU", "Adaptive")
SIZE = 1 << 14
GOOD = np.ones(64, dtype=bool)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shard", [0, ALL_SHARDS])
def test_what_eviction_met_while_it_was_written_can_go_once_it_is_sealed(policy: str, shard: int) -> None:
    arena = Memory(units=16, slab_bytes=4 * SIZE, capacity=256).arena(watermark=0.95, policy=policy)
    ns = arena.namespaces.add(1, b"{}", 1, SIZE)
    grant = arena.reserve(ns, chain("one", 64), 0, shard)
    assert not arena.evict_step(), "it is above the watermark, but nothing can go yet"
    arena.commit(grant.granted, shard, GOOD, None)
    assert store(arena, ns, chain("two", 24)) == 24
    check(arena)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_waited_for_another_shard_or_for_its_head_can_go_once_it_is_sealed(policy: str) -> None:
    arena = Memory(units=16, slab_bytes=8 * SIZE, capacity=256).arena(watermark=0.95, policy=policy)
    ns = arena.namespaces.add(1, b"{}", 2, SIZE)
    grants = [arena.reserve(ns, chain("one", 64), 0, shard) for shard in (0, 1)]
    arena.commit(grants[0].granted, 0, GOOD, None)
    head, tail = grants[1].granted[:1], grants[1].granted[1:]
    arena.commit(tail, 1, GOOD[1:], None)
    assert not arena.evict_step()
    arena.commit(head, 1, GOOD[:1], None)
    assert len(arena.reserve(ns, chain("two", 24), 0, 0).granted) == 24


def test_a_full_l1_takes_the_next_store(make_daemon: h.Make) -> None:
    daemon = make_daemon()
    with h.attach(daemon) as kv:
        ns = h.register(kv, h.MIB)
        assert h.store(kv, ns, h.chain(1, 64), h.MIB) == 64
        assert h.store(kv, ns, h.chain(2, 24), h.MIB) == 24
