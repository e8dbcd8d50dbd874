"""What comes together in one round of the control loop: chunks that are sealed, evicted and others' when L2 looks."""

from __future__ import annotations

import mmap
import os
import signal
from typing import cast

import numpy as np
import pytest

from kvkeep.daemon import l2_policies
from kvkeep.daemon.movers import Mover
from kvkeep.daemon.prefetch_controller import PrefetchController
from kvkeep.daemon.store_controller import PUTS, StoreController
from kvkeep.ipc import messages as m
from kvkeep.shm.arena import Arena
from tests.daemon import l2_helpers as h
from tests.daemon.controllers import FakeMover, commit, keys_of, namespaces
from tests.faults.raw import Raw
from tests.ipc.conftest import eventually
from tests.shm.helpers import Memory, chain, store

SIZE = 1 << 14
TOTAL = 8  # chunks that fit


def small() -> Arena:
    return Memory(units=2, slab_bytes=1 << 16, capacity=64).arena()


def controller(arena: Arena, mover: FakeMover) -> StoreController:
    policy = l2_policies.store_policy("default")
    return StoreController(arena, [cast(Mover, mover)], policy=policy, cap=1 << 30)


def test_what_took_the_place_of_a_fresh_chunk_is_not_stored_under_its_namespace() -> None:
    arena, mover = small(), FakeMover()
    one, two = namespaces(arena, SIZE)
    stores = controller(arena, mover)
    mover.puts = PUTS  # it is busy: what is fresh stays queued
    assert store(arena, one, chain("one", TOTAL)) == TOTAL
    grant = arena.reserve(two, chain("two", TOTAL // 2), 0, 0)  # evicts tails of what is fresh, in the same round
    assert len(grant.granted) == TOTAL // 2
    fresh, arena.fresh = arena.fresh, []
    stores.take_fresh(fresh or [])
    commit(arena, grant.granted)
    fresh, arena.fresh = arena.fresh, []
    stores.take_fresh(fresh or [])
    mover.puts = 0
    stores.step(1.0)
    given = {one.digest: set[bytes](), two.digest: set[bytes]()}
    for job in mover.jobs:
        given[job.namespace] |= keys_of(job)
    assert given[one.digest] == {key.tobytes() for key in chain("one", TOTAL // 2)}
    assert given[two.digest] == {key.tobytes() for key in chain("two", TOTAL // 2)}
    assert arena.counters["l2_stores_too_late"] == TOTAL // 2


def test_a_put_of_two_namespaces_is_refused() -> None:
    arena, mover = small(), FakeMover()
    one, two = namespaces(arena, SIZE)
    stores = controller(arena, mover)
    assert store(arena, one, chain("one", 2)) == store(arena, two, chain("two", 2)) == 2
    mixed = np.flatnonzero(arena.table.namespace > 0)
    stores.take_fresh([arena.part(mixed)])
    with pytest.raises(AssertionError, match="several namespaces"):
        stores.step(1.0)
    assert not mover.jobs


def test_a_load_that_is_evicted_in_its_round_leaves_the_next_in_its_place_alone() -> None:
    """Else a chunk that a client stores would be taken for a loaded one: it would leave L1, and not go to L2."""
    arena, mover = small(), FakeMover()
    one, two = namespaces(arena, SIZE)
    arena.fresh = []
    prefetch = PrefetchController(
        arena,
        [cast(Mover, mover)],
        policy=l2_policies.prefetch_policy("default"),
        most=8,
        budget=1 << 30,
        every_bit=1,
        look_again=lambda waiting: None,
        wake=lambda: None,
    )
    assert store(arena, one, chain("one", TOTAL)) == TOTAL
    loaded = arena.fresh[0]
    prefetch._loaded_under[loaded.entries] = loaded.generations
    assert store(arena, two, chain("two", TOTAL)) == TOTAL, "in the place of all of the others"
    left = prefetch.split(arena.fresh)
    assert [part.namespace for part in left] == [two.id]
    entries = arena.prefix(two, chain("two", TOTAL)).entries
    arena.acquire(entries)
    arena.release(entries, arena.table.generation[entries])
    assert len(arena.prefix(two, chain("two", TOTAL)).entries) == TOTAL


def test_no_model_is_served_from_l2_what_only_another_stored(make_daemon: h.Make) -> None:
    """Their hashes are of tokens, not of weights: both may ask for the same."""
    daemon = make_daemon("--eviction-trigger-watermark=1.0", h.adapter(type="mock", capacity_gb=1))
    with h.attach(daemon) as kv, Raw(daemon.run_dir) as raw:
        data = np.frombuffer(mmap.mmap(raw.fds[1], 64 * h.MIB), dtype=np.uint8)
        one, two = raw.register(b'{"model":"a"}', h.SIZE), raw.register(b'{"model":"b"}', h.SIZE)
        mover = h.row(kv)["pid"]

        def fill(reply: m.StoreReply, value: int) -> bytes:
            offsets = np.frombuffer(reply.offsets, "<u8").tolist()
            for at in offsets:
                data[at : at + h.SIZE] = value
            return b"\1" * len(offsets)

        os.kill(mover, signal.SIGSTOP)  # a busy medium: all its jobs are open, and what comes is queued
        for i in range(PUTS):
            reply = raw.call(m.Store, one, 0, h.chain(50 + i, 1)[0])
            raw.call(m.Commit, reply.handle, fill(reply, 7))
            eventually(lambda i=i: h.row(kv)["jobs"] > i)
        first = raw.call(m.Store, one, 0, b"".join(h.chain(1, 960)))
        good = fill(first, 1)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            raw.send(m.Commit, first.handle, good)
            wanted = raw.send(m.Store, two, 0, b"".join(h.chain(2, 100)))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        number, second = raw.receive()
        while number != wanted:
            number, second = raw.receive()
        good = fill(second, 2)
        assert len(good) == 100
        raw.call(m.Commit, second.handle, good)
        os.kill(mover, signal.SIGCONT)
        eventually(lambda: h.row(kv)["bytes_queued"] == 0 and h.row(kv)["bytes_storing"] == 0)
        kv.clear(l1_only=True)
        for key in h.chain(2, 100):
            reply = raw.call(m.Lookup, one, key, 1, 2000)
            if reply.pending:
                _, reply = raw.receive()
            assert reply.ready == 0
