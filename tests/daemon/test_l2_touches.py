"""What is always read from L1 does not age in L2, and nobody is told of it more often than that needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvkeep.daemon.movers import Mover
from kvkeep.daemon.store_controller import WITHHELD
from kvkeep.daemon.touches import ROUNDS, TOUCH_KEYS, Touches
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.shm.arena import Arena
from kvkeep.shm.namespaces import Namespace
from tests.daemon import l2_helpers as h
from tests.daemon.controllers import FakeMover, keys_of
from tests.shm.helpers import Memory, chain, store

LIMIT = 800  # bytes of the medium; a round every 100


def small_fs(path: Path) -> str:
    return h.adapter(type="fs", base_path=str(path), capacity_gb=128 / 1024, fsync="none")


@pytest.mark.parametrize("medium", [small_fs, lambda path: h.raw(path, 128 / 1024)], ids=["fs", "raw_block"])
def test_the_hottest_prefix_survives_a_reboot(
    make_daemon: h.Make, tmp_path: Path, medium: Callable[[Path], str]
) -> None:
    daemon = make_daemon(medium(tmp_path))
    with h.attach(daemon) as kv:
        ns, hot = h.register(kv), h.chain(1, 20)
        h.store(kv, ns, hot)
        h.stored(kv, 20)
        for i in range(30):  # half as much again as the medium holds
            assert h.read(kv, ns, hot) == 20
            h.store(kv, ns, h.chain(100 + i, 100))
            h.stored(kv, 20 + 100 * (i + 1))
        assert kv.stats()["counters"]["l2_chunks_loaded"] == 0, "it was always in L1"
    daemon.kill()
    daemon.start("--forget")
    with h.attach(daemon) as kv:
        assert h.read(kv, h.register(kv), hot) == 20


# ---- by itself -------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self) -> None:
        self.arena: Arena = Memory(units=64, capacity=1024).arena()
        self.ns: Namespace = self.arena.namespaces.add(1, b"{}", 1, 4096)
        self.mover = FakeMover()
        self.mover.figures.usage = j.Usage(0, LIMIT, 0)
        self.resumed: list[Any] = []
        self.touches = Touches(self.arena, [cast(Mover, self.mover)], resume=self.resumed.append)

    def stored(self, name: object, n: int) -> Any:
        """A chain that L1 and the adapter have."""
        assert store(self.arena, self.ns, chain(name, n)) == n
        entries = self.entries(name, n)
        self.arena.table.tiers[entries] |= np.uint32(self.mover.bit)
        self.touches.stored(cast(Mover, self.mover), entries)
        return entries

    def entries(self, name: object, n: int) -> Any:
        return self.arena.prefix(self.ns, chain(name, n)).entries

    def read(self, name: object, n: int) -> None:
        self.arena.touch(self.ns, self.entries(name, n))

    def bytes_stored(self, count: int) -> None:
        self.mover.figures.totals["bytes_stored"] += count

    def settle(self, code: Code = Code.OK) -> list[set[bytes]]:
        """The keys of each job, all of them answered with this."""
        jobs = []
        for _ in range(100):
            self.touches.step(0.0)
            while self.mover.jobs:
                job = self.mover.jobs.pop()
                jobs.append(keys_of(job))
                self.mover.answer(job, code)
        return jobs


def keys(name: object, n: int) -> set[bytes]:
    return {key.tobytes() for key in chain(name, n)}


def test_nothing_is_touched_while_nothing_is_stored() -> None:
    bench = Bench()
    bench.stored("hot", 4)
    bench.read("hot", 4)
    bench.bytes_stored(LIMIT // ROUNDS - 1)
    assert bench.settle() == []
    bench.bytes_stored(1)
    assert bench.settle() == [keys("hot", 4)]


def test_only_what_was_read_since_it_was_told_last_is_touched_once_a_round() -> None:
    bench = Bench()
    for name in ("hot", "cold"):
        bench.stored(name, 4)
    for _ in range(3):
        bench.read("hot", 3)
        bench.bytes_stored(LIMIT // ROUNDS)
        assert bench.settle() == [keys("hot", 3)]
    bench.bytes_stored(LIMIT)
    assert bench.settle() == [], "nobody has read it since"
    assert bench.mover.figures.totals["chunks_touched"] == 9


def test_the_most_recent_are_touched_last_and_heads_first() -> None:
    bench = Bench()
    for name in ("long", "new"):
        bench.stored(name, TOUCH_KEYS // 2 if name == "long" else TOUCH_KEYS)
        bench.read(name, TOUCH_KEYS)
    bench.bytes_stored(LIMIT)
    order: list[bytes] = []
    for _ in range(10):
        bench.touches.step(0.0)
        while bench.mover.jobs:
            job = bench.mover.jobs.pop()
            batch = [job.chunks[at : at + 32] for at in range(0, len(job.chunks), 32)]
            order = batch + order  # within a job the first counts as the most recent
            bench.mover.answer(job, Code.OK)
    expected = [key.tobytes() for key in (*chain("new", TOUCH_KEYS), *chain("long", TOUCH_KEYS // 2))]
    assert order == expected


def test_what_the_adapter_has_lost_is_stored_again() -> None:
    bench = Bench()
    entries = bench.stored("hot", 4)
    bench.read("hot", 4)
    bench.bytes_stored(LIMIT)
    bench.settle(Code.MISS)
    assert bench.resumed == [bench.mover]
    assert not bench.arena.table.tiers[entries].any()


def test_what_is_withheld_is_not_given_to_an_adapter_because_it_has_it_not() -> None:
    """A clear leaves chunks that are in use in L1."""
    bench = Bench()
    entries = bench.stored("hot", 4)
    bench.arena.table.tiers[entries] |= WITHHELD
    bench.read("hot", 4)
    bench.bytes_stored(LIMIT)
    bench.settle(Code.MISS)
    assert (bench.arena.table.tiers[entries] == np.uint32(bench.mover.bit) | WITHHELD).all()


def test_what_only_another_adapter_has_is_not_pushed_to_this_one_by_every_reader() -> None:
    """A load sets the bits of all."""
    bench = Bench()
    assert store(bench.arena, bench.ns, chain("hot", 4)) == 4
    entries = bench.entries("hot", 4)
    bench.arena.table.tiers[entries] |= np.uint32(bench.mover.bit)
    bench.read("hot", 4)
    bench.bytes_stored(LIMIT)
    assert bench.settle(Code.MISS) == [keys("hot", 4)]
    assert bench.arena.table.tiers[entries].all()


def test_what_is_banned_is_not_asked_for() -> None:
    bench = Bench()
    bench.stored("hot", 4)
    bench.read("hot", 4)
    bench.mover.bans.add(bench.ns.digest, keys("hot", 1))
    bench.bytes_stored(LIMIT)
    assert bench.settle() == [keys("hot", 4) - keys("hot", 1)]


@pytest.mark.parametrize("code", [Code.LOST, Code.EXPIRED, Code.UNAVAILABLE])
def test_an_adapter_that_does_not_say_loses_nothing(code: Code) -> None:
    bench = Bench()
    entries = bench.stored("hot", 4)
    bench.read("hot", 4)
    bench.bytes_stored(LIMIT)
    bench.settle(code)
    assert bench.arena.table.tiers[entries].all()
    bench.bytes_stored(LIMIT)
    assert bench.settle() == [keys("hot", 4)], "asked again in the next round"
