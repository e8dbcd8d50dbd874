"""Movers that are killed, stopped, stuck or slow: engines get right bytes or a miss, in time, and L1 serves on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import Unavailable
from tests.conftest import Daemon
from tests.daemon.l2_helpers import (
    SIZE,
    Make,
    adapter,
    at_rest,
    attach,
    chain,
    fs,
    payload,
    raw,
    read,
    register,
    row,
    store,
    stored,
)
from tests.ipc.conftest import eventually

WAIT_S = 0.4  # of each lookup, for L2
SLACK_S = 3.0  # what a loaded machine may add; a stuck lookup would take its own deadline of a minute


class Load:
    """A client that stores, forgets and reads chains, until told to end."""

    def __init__(self, daemon: Daemon, number: int, seed: int) -> None:
        self.daemon, self.number, self.rng = daemon, number, random.Random(seed + number)
        self.hits = self.misses = 0
        self.longest = 0.0
        self.problem: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Client.attach(self.daemon.run_dir, deadline_s=30) as kv:
                ns = register(kv)
                while not self._end.is_set():
                    self._one(kv, ns, chain(self.number * 1000 + self.rng.randrange(12), 12))
        except BaseException as e:
            self.problem = e

    def _one(self, kv: Client, ns: Any, keys: list[bytes]) -> None:
        began = time.monotonic()
        good = read(kv, ns, keys, wait_s=WAIT_S)
        self.longest = max(self.longest, time.monotonic() - began)
        self.hits += good
        self.misses += len(keys) - good
        if good < len(keys):
            kv.store(ns, keys, [payload(k) for k in keys[good:]], start=good)
        if self.rng.random() < 0.5:
            with contextlib.suppress(Unavailable):
                kv.delete(ns, keys, l1_only=True)

    def end(self) -> None:
        self._end.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "a client is stuck"
        if self.problem is not None:
            raise self.problem
        assert self.longest < WAIT_S + SLACK_S, f"a lookup took {self.longest:.1f} s"


def strike(kv: Client, rng: random.Random, rounds: int) -> None:
    """Kill or stop movers at random points: while they start, open, load, store."""
    struck = {0}
    for _ in range(rounds):
        eventually(lambda: {r["pid"] for r in kv.stats()["l2"]} - struck, 60)
        time.sleep(rng.random() * 0.5)
        pids = {r["pid"] for r in kv.stats()["l2"]} - struck
        if not pids:
            continue
        pid = rng.choice(sorted(pids))
        struck.add(pid)
        kind = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        try:
            os.kill(pid, kind)
        except ProcessLookupError:
            continue
        if kind is signal.SIGSTOP and rng.random() < 0.7:  # the others are left to the heartbeat
            time.sleep(rng.random())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(400)
def test_killed_and_stopped_movers_under_load(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    daemon = make_daemon(raw(tmp_path, 0.02), fs(tmp_path), l1_mib=16)
    rng = random.Random(seed)
    with attach(daemon) as kv:
        loads = [Load(daemon, number, seed) for number in range(2)]
        strike(kv, rng, 24)
        for load in loads:
            load.end()
        assert sum(load.hits for load in loads) > 0
        eventually(lambda: all(r["phase"] == "serving" and r["breaker"] == "closed" for r in kv.stats()["l2"]), 90)
        at_rest(kv)
        assert sum(r["restarts"] for r in kv.stats()["l2"]) >= 20
        ns, keys = register(kv), chain(999_999, 10)
        before = [r["chunks_stored"] for r in kv.stats()["l2"]]
        store(kv, ns, keys)
        # not "nothing is queued": that is so for a moment before the store is
        eventually(lambda: all(r["chunks_stored"] >= b + 10 for r, b in zip(kv.stats()["l2"], before, strict=True)), 60)
        kv.delete(ns, keys, l1_only=True)
        assert read(kv, ns, keys) == 10, "L2 works again"
        at_rest(kv)


@pytest.mark.timeout(240)
def test_killed_daemons_under_load(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    daemon = make_daemon(fs(tmp_path), l1_mib=16)
    rng = random.Random(seed)
    loads = [Load(daemon, number, seed) for number in range(2)]
    for _ in range(6):
        time.sleep(0.3 + rng.random())
        daemon.restart()
    time.sleep(1)
    for load in loads:
        load.end()
    with attach(daemon) as kv:
        at_rest(kv)


def test_a_stopped_mover_costs_no_more_than_the_deadline_and_l1_serves_on(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, in_l2, in_l1 = register(kv), chain(1, 10), chain(2, 10)
        store(kv, ns, in_l2)
        store(kv, ns, in_l1)
        stored(kv, 20)
        kv.delete(ns, in_l2, l1_only=True)
        pid = row(kv)["pid"]
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert read(kv, ns, in_l2, wait_s=0.3) == 0
        assert time.monotonic() - began < 0.3 + SLACK_S
        assert read(kv, ns, in_l1) == 10
        eventually(lambda: row(kv)["pid"] not in (0, pid) and row(kv)["phase"] == "serving", 40)
        assert read(kv, ns, in_l2) == 10
        at_rest(kv)


def test_a_hung_load_keeps_its_extents_until_the_mover_is_gone(make_daemon: Make) -> None:
    stall = [{"operation": "load", "fault": "stall", "seconds": 600}]
    daemon = make_daemon(adapter(type="fault_inject", inner={"type": "mock"}, faults=stall), l1_mib=16)
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 10)
        store(kv, ns, keys)
        stored(kv, 10)
        kv.delete(ns, keys, l1_only=True)
        assert read(kv, ns, keys, wait_s=0.2) == 0
        assert kv.stats()["l1"]["reserved_bytes"] > 0, "the mover may still write there"
        eventually(lambda: row(kv)["jobs_late"] > 0)
        began = time.monotonic()
        assert read(kv, ns, keys, wait_s=20) == 0, "given up: nobody waits for it a second time"
        assert time.monotonic() - began < 10
        for i in range(2, 8):
            assert store(kv, ns, chain(i, 40)) == 40, "L1 serves on"
        assert kv.check()["ok"]
        os.kill(row(kv)["pid"], signal.SIGKILL)
        at_rest(kv)


def test_a_failing_medium_opens_the_breaker_and_closes_it_when_it_works(make_daemon: Make, tmp_path: Path) -> None:
    faults = [{"operation": "store", "fault": "EIO", "until": 50}]
    daemon = make_daemon(adapter(type="fault_inject", inner={"type": "mock"}, faults=faults))
    with attach(daemon) as kv:
        ns = register(kv)
        for i in range(4):
            store(kv, ns, chain(i, 4))
            time.sleep(0.1)
        eventually(lambda: row(kv)["breaker_opened"] >= 1)
        document = kv.stats()
        if document["l2"][0]["breaker"] != "closed":
            assert document["health"] == "degraded"
            assert any("l2-0" in reason for reason in document["reasons"])
        eventually(lambda: row(kv)["breaker"] == "closed", 60)
        stored(kv, 16)  # what failed meanwhile is in the table, and is given to it now
        eventually(lambda: kv.stats()["health"] == "ok")
        at_rest(kv)


def test_a_slow_medium_sheds_the_oldest_stores_and_loads_go_first(make_daemon: Make) -> None:
    daemon = make_daemon(adapter(type="mock", bandwidth_gb=0.01), l1_mib=32)
    with attach(daemon) as kv:
        ns, wanted = register(kv), chain(1, 16)
        store(kv, ns, wanted)
        stored(kv, 16)
        kv.delete(ns, wanted, l1_only=True)
        for i in range(2, 10):  # 32 MiB at 10 MB/s
            store(kv, ns, chain(i, 64))
        l1_bytes = kv.stats()["l1"]["bytes_total"]
        r = row(kv)
        assert r["stores_shed"] > 0
        assert r["bytes_queued"] <= l1_bytes // 4
        assert r["bytes_storing"] <= l1_bytes // 4
        assert kv.stats()["counters"]["l2_stores_shed"] == r["stores_shed"]
        assert read(kv, ns, wanted, wait_s=10) == 16, "stores for more than a second are queued before it"
        eventually(lambda: row(kv)["bytes_queued"] == 0 and row(kv)["jobs"] == 0, 60)
        at_rest(kv)


def test_damaged_objects_are_misses(make_daemon: Make, tmp_path: Path) -> None:
    faults = [{"operation": "store", "fault": "bit_flip", "rate": 0.2}]
    daemon = make_daemon(adapter(type="fault_inject", inner={"type": "mock"}, seed=3, faults=faults))
    with attach(daemon) as kv:
        ns = register(kv)
        chains = [chain(i, 10) for i in range(10)]
        for keys in chains:
            store(kv, ns, keys)
        stored(kv, 100)
        kv.clear(l1_only=True)
        hits = sum(read(kv, ns, keys) for keys in chains)
        assert 0 < hits < 100
        assert row(kv)["failures"]["corrupt"] > 0
        at_rest(kv)


def test_the_budget_of_loads_bounds_what_a_hung_mover_holds(make_daemon: Make) -> None:
    stall = [{"operation": "load", "fault": "stall", "seconds": 600}]
    daemon = make_daemon(adapter(type="fault_inject", inner={"type": "mock"}, faults=stall), l1_mib=32)
    with attach(daemon) as kv:
        ns, chains = register(kv), [chain(i, 40) for i in range(10)]
        for keys in chains:
            store(kv, ns, keys)
        stored(kv, 400)
        kv.clear(l1_only=True)
        pending = [kv.begin_lookup(ns, keys, wait_s=0.5) for keys in chains]
        for p in pending:
            assert p.wait(20).ready == 0
        l1 = kv.stats()["l1"]
        assert 0 < l1["bytes_loading"] <= l1["bytes_total"] // 4
        assert l1["bytes_total"] // 4 < SIZE * 400
        os.kill(row(kv)["pid"], signal.SIGKILL)
        at_rest(kv)
