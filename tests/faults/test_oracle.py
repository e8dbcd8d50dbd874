"""Many clients over three times the arena's size: every load is right or a miss, and the books balance at the end.

B8 B9 D1 D4 D8 D10 F1 F15 H1 of the cases.  Chains branch, two namespaces compete for the memory (one of them with two
shards a chunk), everything is aborted, cancelled, released in parts or simply dropped now and then, and a client is
killed every other second.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.messages import Outcome
from kvkeep.ipc.namespace import Namespace
from tests.conftest import Daemon
from tests.faults.account import assert_at_rest
from tests.faults.oracle import MANIFEST, chain, content, contents, read, split, wrong_in
from tests.faults.processes import Worker

ARENA_MIB = 48
SIZE = 65536
SMALL = 20480  # of the second namespace, per shard
STEM, STEMS, LEAF, LEAVES = 12, 10, 24, 9  # (12 + 9 * 24) * 10 = 2280 chunks of 64 KiB: three times the arena
DEADLINE_S = 20.0  # nothing here is about deadlines


def leaf(stem: int, number: int, count: int = STEM + LEAF) -> bytes:
    whole = chain(("leaf", number), LEAF, stem=chain(("stem", stem), STEM))
    return whole[: 32 * count]


class Trouble:
    """One client's life."""

    def __init__(self, run_dir: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv = Client.attach(run_dir, name="oracle", deadline_s=30, checksums=self.rng.random() < 0.3)
        self.single = self.kv.register(MANIFEST, shard_bytes=SIZE)
        self.double = self.kv.register({**MANIFEST, "tensor_parallel": 2}, shard_bytes=SMALL, shards=2)
        self.seen: dict[str, Any] = {"operations": 0, "loaded": 0, "stored": 0, "full": 0, "wrong": [], "vanished": []}

    def pick(self) -> tuple[Namespace, bytes]:
        rng = self.rng
        stem = min(int(rng.expovariate(0.3)), STEMS - 1)
        packed = leaf(stem, rng.randrange(LEAVES), rng.randint(1, STEM + LEAF))
        return (self.single if rng.random() < 0.8 else self.double), packed

    def store(self) -> None:
        rng, (ns, packed) = self.rng, self.pick()
        total = len(packed) // 32
        shard = rng.randrange(ns.shards)
        known = self.kv.lookup(ns, packed, readers=0, deadline_s=DEADLINE_S).ready
        start = rng.choice((0, 0, known, rng.randrange(total)))
        if start >= total:
            return
        how = rng.random()
        if how < 0.5:
            result = self.kv.store(
                ns, packed, contents(packed[32 * start :], ns.shard_bytes, shard), start=start, shard=shard,
                deadline_s=DEADLINE_S,
            )  # fmt: skip
            self.seen["stored"] += result.stored
            self.seen["full"] += sum(o.name == "FULL" for o in result.outcome)
            return
        reservation = self.kv.reserve(ns, packed, start=start, shard=shard, deadline_s=DEADLINE_S)
        ok = []
        for i, position in enumerate(reservation.granted):
            good = rng.random() < 0.9
            rubbish = np.full(ns.shard_bytes, 0xEE, np.uint8)
            data = content(packed[32 * position : 32 * position + 32], ns.shard_bytes, shard) if good else rubbish
            ok.append(reservation.write(i, data) and good)
        if how < 0.8:
            outcomes = reservation.commit(ok, deadline_s=DEADLINE_S)
            self.seen["stored"] += sum(o in (Outcome.SEALED, Outcome.WAITING) for o in outcomes)
        elif how < 0.9:
            reservation.abort()
        # else: dropped

    def load(self) -> None:
        rng, (ns, packed) = self.rng, self.pick()
        shard = rng.randrange(ns.shards)
        wait_s = rng.choice((0, 0, 0.02))
        found = self.kv.lookup(ns, packed, readers=rng.choice((1, 1, 2)), wait_s=wait_s, deadline_s=DEADLINE_S)
        if not found.ready:
            return
        if rng.random() < 0.3:  # what is held cannot have gone
            again = self.kv.lookup(ns, packed, readers=0, deadline_s=DEADLINE_S)
            if again.ready < found.ready and not self.kv.counters["late_calls"]:
                self.seen["vanished"].append((again.ready, found.ready))
        if rng.random() < 0.2:
            found.release(keep=rng.randint(1, found.ready))
        start = rng.randrange(found.ready) if rng.random() < 0.3 else 0
        targets = np.zeros((found.ready - start, ns.shard_bytes), np.uint8)
        good = self.kv.retrieve(
            found, targets, shard=shard, start=start, confirm=rng.random() < 0.7, deadline_s=DEADLINE_S
        )
        self.seen["wrong"] += wrong_in(packed[32 * start :], targets, good, shard)
        if not all(good) and not self.kv.counters["late_calls"]:
            self.seen["vanished"].append((good, found.ready))  # held, attached, and yet not readable
        self.seen["loaded"] += sum(good)
        if rng.random() < 0.7:
            found.release()
        # else: dropped

    def change_its_mind(self) -> None:
        ns, packed = self.pick()
        pending = self.kv.begin_lookup(ns, packed, wait_s=self.rng.choice((0, 0.05)), deadline_s=DEADLINE_S)
        if self.rng.random() < 0.5:
            pending.poll()
        pending.cancel()

    def live(self, link: Connection) -> None:
        link.send("alive")
        while not link.poll():
            self.rng.choice((self.store, self.load, self.load, self.change_its_mind))()
            self.seen["operations"] += 1
        link.recv()
        self.seen["late"] = self.kv.counters["late_calls"]
        self.seen["protocol_errors"] = self.kv.counters["protocol_errors"]
        link.send(self.seen)
        self.kv.close()


def trouble(link: Connection, run_dir: str, seed: int) -> None:
    Trouble(run_dir, seed).live(link)


def resident(kv: Client, ns: Namespace) -> set[bytes]:
    keys, cursor = set(), 0
    while True:
        page = kv.list(ns, cursor, 1000)
        for entry in page["entries"]:
            assert entry["state"] == "SEALED"
            keys.add(bytes.fromhex(entry["key"]))
        cursor = page["cursor"]
        if not cursor:
            return keys


def assert_only_prefixes_are_resident(kv: Client, ns: Namespace) -> int:
    """D4: eviction took tails before heads.  And what is listed is found, no more, no less."""
    there = resident(kv, ns)
    for stem in range(STEMS):
        for number in range(LEAVES):
            packed = leaf(stem, number)
            flags = [key in there for key in split(packed)]
            length = flags.index(False) if False in flags else len(flags)
            assert not any(flags[length:]), f"a tail without its head: {flags}"
            with kv.lookup(ns, packed, deadline_s=DEADLINE_S) as found:
                assert found.ready == length
                for shard in range(ns.shards):
                    assert read(kv, ns, packed, found, shard=shard) == (length, [])
    return len(there)


def complete(kv: Client, ns: Namespace) -> None:
    """Chunks of which one shard came wait a minute for the other; here it comes.  Again if eviction was faster."""
    for _ in range(5):
        for stem in range(STEMS):
            for number in range(LEAVES):
                packed = leaf(stem, number)
                for shard in range(ns.shards):
                    kv.store(ns, packed, contents(packed, ns.shard_bytes, shard), shard=shard, deadline_s=DEADLINE_S)
        if not kv.stats()["l1"]["reserved_bytes"]:
            return


def oracle(daemon: Daemon, seed: int, seconds: float, clients: int = 8) -> dict[str, int]:
    rng = random.Random(seed)
    totals = {"operations": 0, "loaded": 0, "stored": 0, "full": 0, "killed": 0, "late": 0}

    def new() -> Worker:
        return Worker(trouble, str(daemon.run_dir), rng.getrandbits(32))

    workers = [new() for _ in range(clients)]
    for w in workers:
        assert w.expect() == "alive"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(1.0, 3.0))
        victim = workers.pop(rng.randrange(len(workers)))
        assert victim.process.exitcode is None, victim.expect()
        victim.end()
        totals["killed"] += 1
        workers.append(new())
        assert workers[-1].expect() == "alive"
    for w in workers:
        w.tell("stop")
    for w in workers:
        seen = w.expect()
        assert (seen["wrong"], seen["vanished"], seen["protocol_errors"]) == ([], [], 0)
        for key in totals:
            totals[key] += seen.get(key, 0)
        w.process.join(10)
        w.end()
    with Client.attach(daemon.run_dir, deadline_s=30) as kv:
        single = kv.register(MANIFEST, shard_bytes=SIZE)
        double = kv.register({**MANIFEST, "tensor_parallel": 2}, shard_bytes=SMALL, shards=2)
        complete(kv, double)
        stats = assert_at_rest(daemon, kv)
        assert stats["counters"]["entries_evicted"] > 0
        assert stats["l1"]["bytes_used"] <= stats["l1"]["bytes_total"]
        totals["resident"] = assert_only_prefixes_are_resident(kv, single)
        totals["resident"] += assert_only_prefixes_are_resident(kv, double)
        assert_at_rest(daemon, kv)
    assert min(totals["loaded"], totals["stored"], totals["resident"]) > 0
    return totals


def test_eight_clients_over_three_arenas_get_right_bytes_or_misses(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    print(oracle(make_daemon(l1_mib=ARENA_MIB), seed, 20))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_eight_clients_over_three_arenas_for_five_minutes(make_daemon: Callable[..., Daemon], seed: int) -> None:
    print(oracle(make_daemon(l1_mib=ARENA_MIB), seed, 300, clients=9))


def residents(daemon: Daemon) -> tuple[set[bytes], set[bytes]]:
    """Keys that can be read in each namespace.  Which of the two holds more is for eviction to say, not for a test."""
    with Client.attach(daemon.run_dir, deadline_s=30) as kv:
        single = kv.register(MANIFEST, shard_bytes=SIZE)
        double = kv.register({**MANIFEST, "tensor_parallel": 2}, shard_bytes=SMALL, shards=2)
        for ns in (single, double):
            assert_only_prefixes_are_resident(kv, ns)
        return resident(kv, single), resident(kv, double)


def test_a_restart_under_pressure_keeps_prefixes_prefixes(make_daemon: Callable[..., Daemon], seed: int) -> None:
    """The same, with the daemon killed in between: adoption keeps every entry, and the order of eviction."""
    daemon = make_daemon(l1_mib=ARENA_MIB)
    for turn in range(3):
        oracle(daemon, seed + turn, 3, clients=3)
        before = residents(daemon)
        assert any(before)
        daemon.restart()
        assert residents(daemon) == before


def test_room_is_made_whatever_holds_the_oldest_entry(make_daemon: Callable[..., Daemon]) -> None:
    """D3: a store of size S succeeds whenever free + evictable >= S, also when all of its own class is in use."""
    daemon = make_daemon("--eviction-trigger-watermark", "1.0", l1_mib=16)
    with Client.attach(daemon.run_dir, deadline_s=30) as kv:
        small = kv.register({"model": "small"}, shard_bytes=SMALL)
        large = kv.register({"model": "large"}, shard_bytes=SIZE)
        oldest = kv.reserve(small, chain("oldest", 4))
        assert len(oldest.granted) == 4
        for i in range(30):
            packed = chain(("fill", i), 10)
            kv.store(large, packed, contents(packed, SIZE))
        packed = chain("newest", 100)
        assert kv.store(small, packed, contents(packed, SMALL)).stored == 100
        oldest.abort()
        assert_at_rest(daemon, kv)


def test_a_chunk_whose_head_was_evicted_while_it_waited_for_a_shard_is_not_sealed_before_its_head(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon("--eviction-trigger-watermark", "1.0", l1_mib=8)
    with Client.attach(daemon.run_dir, deadline_s=30) as kv:
        filler = kv.register({"model": "filler"}, shard_bytes=SIZE)
        ns = kv.register({"model": "two ranks"}, shard_bytes=SMALL, shards=2)
        packed = chain("two ranks", 10)
        heads, both = packed[: 5 * 32], (contents(packed, SMALL, 0), contents(packed, SMALL, 1))
        for shard in (0, 1):
            assert kv.store(ns, heads, both[shard][:5], shard=shard).stored == 5
        assert kv.store(ns, packed, both[0], shard=0).stored == 5  # the other rank's half of 5..9 is missing
        for i in range(20):
            more = chain(("filler", i), 10)
            kv.store(filler, more, contents(more, SIZE))
        assert kv.lookup(ns, packed).ready == 0  # the heads are gone, 5..9 still wait
        kv.store(ns, packed, both[1], shard=1)
        sealed = {entry["key"] for entry in kv.list(ns)["entries"] if entry["state"] == "SEALED"}
        assert sealed == set()
        assert kv.check()["ok"]
        kv.store(ns, packed, both[0], shard=0)
        with kv.lookup(ns, packed, readers=2) as found:
            assert found.ready == 10
            for shard in (0, 1):
                assert read(kv, ns, packed, found, shard=shard) == (10, [])
        assert_at_rest(daemon, kv)
