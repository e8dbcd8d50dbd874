"""Workers are killed in every state, stopped and continued; what they held comes back, and nobody else notices.

B1 B3 B4 B8 B9 B13 B15 of the cases.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.faults.account import assert_at_rest
from tests.faults.oracle import MANIFEST, chain, content, contents, read
from tests.faults.processes import Worker, eventually
from tests.faults.raw import dial

SIZE = 65536
COUNT = 8
SHARED = chain("shared", COUNT)  # sealed before the first worker starts
BLOCKED = chain("blocked", COUNT)  # reserved by the test: a lookup of it waits
RELEASED_S = 1.0  # what a death may take to be accounted for
SLACK_S = 4.0  # of the scheduler
RUBBISH = 0xEE


def worker(link: Connection, run_dir: str, state: str, number: object) -> None:
    """Goes into ``state``, says what it holds, and stays there."""
    if state == "mid-attach":
        half = dial(Path(run_dir) / "attach.sock")
        half.sendall(b"\x20\0\0\0\x80")
        link.send(None)
        while True:
            time.sleep(60)
    kv = Client.attach(run_dir, name=state, deadline_s=30)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    mine = chain((state, number), COUNT)
    keep: list[Any] = []
    offsets: list[int] = []
    if state in ("reserved", "copying"):
        reservation = kv.reserve(ns, mine, deadline_s=30)
        offsets = list(reservation._offsets)
        keep.append(reservation)
        link.send((mine, offsets))
        rubbish = np.full(SIZE, RUBBISH, np.uint8)
        while state == "copying":
            for i in range(COUNT):
                reservation.write(i, rubbish)
    elif state == "committed":
        assert kv.store(ns, mine, contents(mine, SIZE), deadline_s=30).stored == COUNT
        link.send((mine, []))
    elif state in ("looked up", "reading"):
        found = kv.lookup(ns, SHARED, deadline_s=30)
        assert found.ready == COUNT
        keep.append(found)
        reading = kv.open_read(found.handle, 0, 0, COUNT, deadline_s=30) if state == "reading" else None
        link.send((mine, []))
        target = np.zeros(SIZE, np.uint8)
        while reading is not None:
            for i in range(COUNT):
                assert reading.read(i, target)
    elif state == "waiting":
        keep.append(kv.begin_lookup(ns, BLOCKED, wait_s=60.0))
        eventually(lambda: kv.stats()["l1"]["lookups_waiting"] > 0, 30)
        link.send((mine, []))
    else:
        link.send((mine, []))
    while True:
        time.sleep(60)


STATES = ("attached", "reserved", "copying", "committed", "looked up", "reading", "waiting", "mid-attach")


class Watch:
    """What the daemon counts, and a client that must not be disturbed."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.kv = Client.attach(daemon.run_dir, name="watch", deadline_s=30)
        self.ns = self.kv.register(MANIFEST, shard_bytes=SIZE)
        self.kv.store(self.ns, SHARED, contents(SHARED, SIZE))
        self.blocker = self.kv.reserve(self.ns, BLOCKED)
        assert len(self.blocker.granted) == COUNT

    def counts(self) -> dict[str, int]:
        stats = self.kv.stats()
        held = {k: stats["l1"][k] for k in ("references", "reserved_bytes", "lookups_waiting")}
        return held | {"clients": stats["clients_total"]}

    def works(self) -> None:
        with self.kv.lookup(self.ns, SHARED, deadline_s=30) as found:
            assert read(self.kv, self.ns, SHARED, found) == (COUNT, [])

    def finish(self) -> None:
        self.blocker.abort()
        assert_at_rest(self.daemon, self.kv)
        self.kv.close()


def kill_in(watch: Watch, state: str, times: int, seed: int, *, at_once: int = 5) -> None:
    rng = random.Random(seed)
    before = watch.counts()
    slowest, done = 0.0, 0
    while done < times:
        batch = min(at_once, times - done)
        workers = [Worker(worker, str(watch.daemon.run_dir), state, (seed, done + i)) for i in range(batch)]
        held = [w.expect() for w in workers]
        if state not in ("mid-attach", "attached", "committed"):
            assert watch.counts() != before
        time.sleep(rng.uniform(0.0, 0.03))
        watch.works()
        for w in workers:
            w.kill()
        if state in ("reserved", "copying"):  # a device may still be writing for them: not given away at once
            eventually(lambda: watch.kv.stats()["l1"]["bytes_quarantined"] >= batch * COUNT * SIZE, 5)  # noqa: B023
            resting = {offset for _, offsets in held for offset in offsets}
            fresh = watch.kv.reserve(watch.ns, chain(("fresh", seed, done), 2 * COUNT), deadline_s=30)
            assert len(fresh.granted) == 2 * COUNT
            if watch.kv.stats()["l1"]["bytes_quarantined"] >= batch * COUNT * SIZE:
                assert not resting & set(fresh._offsets)
            fresh.abort()
        slowest = max(slowest, eventually(lambda: watch.counts() == before, RELEASED_S + SLACK_S, say=watch.counts))
        for entry in held if state != "mid-attach" else []:
            mine = entry[0]
            with watch.kv.lookup(watch.ns, mine, deadline_s=30) as found:
                assert found.ready == (COUNT if state == "committed" else 0)
                assert read(watch.kv, watch.ns, mine, found) == (found.ready, [])
        watch.works()
        for w in workers:
            w.end()
        done += batch
    print(f"{done} workers killed {state}: all given back within {slowest:.3f} s")


@pytest.mark.parametrize("state", STATES)
def test_a_worker_killed_in_any_state_gives_everything_back_and_leaves_nothing_readable(
    make_daemon: Callable[..., Daemon], seed: int, state: str
) -> None:
    watch = Watch(make_daemon(l1_mib=192))
    kill_in(watch, state, 20, seed)
    watch.finish()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("state", STATES)
def test_a_hundred_workers_killed_in_each_state(make_daemon: Callable[..., Daemon], seed: int, state: str) -> None:
    watch = Watch(make_daemon(l1_mib=192))
    kill_in(watch, state, 100, seed)
    watch.finish()


def starter(link: Connection, run_dir: str) -> None:
    """Attaches, works and detaches as fast as it can: to be killed anywhere."""
    link.send("started")
    while True:
        with Client.attach(run_dir, deadline_s=30) as kv:
            ns = kv.register(MANIFEST, shard_bytes=SIZE)
            with kv.lookup(ns, SHARED) as found:
                read(kv, ns, SHARED, found)


def test_workers_killed_at_random_instants_of_attaching_and_working_leave_nothing(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    rng = random.Random(seed)
    watch = Watch(make_daemon(l1_mib=64))
    before = watch.counts()
    inodes = [p.stat().st_ino for p in sorted(Path("/dev/shm").glob(f"kvkeep-{watch.daemon.name}-*"))]
    for _ in range(10):
        workers = [Worker(starter, str(watch.daemon.run_dir)) for _ in range(4)]
        for w in workers:
            w.expect()
        time.sleep(rng.uniform(0.0, 0.2))
        for w in workers:
            w.kill()
        watch.works()
        for w in workers:
            w.end()
        eventually(lambda: watch.counts() == before, RELEASED_S + SLACK_S, say=watch.counts)
    # B15: a client's death unlinks nothing and replaces nothing
    assert [p.stat().st_ino for p in sorted(Path("/dev/shm").glob(f"kvkeep-{watch.daemon.name}-*"))] == inodes
    watch.finish()


def obedient(link: Connection, run_dir: str) -> None:
    """Holds a lookup and a reservation; uses them when told."""
    kv = Client.attach(run_dir, name="obedient", deadline_s=30)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    found = kv.lookup(ns, SHARED)
    mine = chain("obedient", COUNT)
    reservation = kv.reserve(ns, mine)
    link.send(kv.epoch)
    while link.recv() == "work":
        loaded, wrong = read(kv, ns, SHARED, found)
        for i, key in enumerate(mine[k : k + 32] for k in range(0, len(mine), 32)):
            assert reservation.write(i, content(key, SIZE))
        link.send((loaded, wrong, [o.name for o in reservation.commit(deadline_s=30)], kv.epoch))
    kv.close()
    link.send("closed")


@pytest.mark.parametrize("stopped", [False, True], ids=["idle", "stopped"])
@pytest.mark.parametrize(
    "seconds", [5, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(900)])], ids=["5s", "10min"]
)
def test_an_idle_or_stopped_worker_is_never_reaped_and_works_afterwards(
    make_daemon: Callable[..., Daemon], stopped: bool, seconds: int
) -> None:
    """B4: alive is alive, however silent."""
    watch = Watch(make_daemon(l1_mib=64))
    w = Worker(obedient, str(watch.daemon.run_dir))
    epoch = w.expect()
    before = watch.counts()
    if stopped:
        w.stop()
    time.sleep(seconds)
    assert watch.counts() == before
    if stopped:
        w.resume()
    w.tell("work")
    assert w.expect() == (COUNT, [], ["SEALED"] * COUNT, epoch)
    w.tell("close")
    assert w.expect() == "closed"
    w.end()
    watch.finish()


def test_a_worker_killed_while_the_daemon_is_down_is_not_waited_for(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(l1_mib=64)
    watch = Watch(daemon)
    workers = [Worker(worker, str(daemon.run_dir), state, "down") for state in STATES]
    for w in workers:
        w.expect()
    daemon.kill()
    for w in workers:
        w.end()
    daemon.start()
    eventually(lambda: watch.kv.attached, 20)
    eventually(lambda: watch.counts()["clients"] == 1, 10, say=watch.counts)
    watch.works()
    watch.finish()
    assert "doubtful" in daemon.output()


def slow_writer(link: Connection, run_dir: str) -> None:
    """In the middle of a copy: the guard is held, half of the bytes are written; goes on with the other half when the
    clock of the test says so (it is stopped by a signal in between)."""
    kv = Client.attach(run_dir, name="slow", deadline_s=30)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    reservation = kv.reserve(ns, chain("slow", COUNT))
    views = reservation.views
    with reservation.copying() as allowed:
        assert allowed
        link.send(list(reservation._offsets))
        while not link.poll(0):
            for view in views:
                view[:] = RUBBISH
        link.recv()
    link.send([o.name for o in reservation.commit(deadline_s=30)])
    eventually(lambda: kv.attached, 60)
    link.send(kv.lookup(ns, chain("slow", COUNT), deadline_s=30).ready)
    link.recv()


@pytest.mark.parametrize("restarts", [1, 2, 3])
def test_an_extent_that_a_stopped_worker_is_writing_is_given_to_nobody_across_restarts_of_the_daemon(
    make_daemon: Callable[..., Daemon], restarts: int
) -> None:
    daemon = make_daemon("--eviction-trigger-watermark", "1.0", l1_mib=16)
    w = Worker(slow_writer, str(daemon.run_dir))
    theirs = set(w.expect())
    w.stop()
    for _ in range(restarts):
        daemon.restart()
        time.sleep(1.5)  # longer than a dead writer's extents rest
    with Client.attach(daemon.run_dir, deadline_s=30) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        chains = [chain(("filler", i), 10) for i in range(40)]  # more than fits: every extent that is free is used
        taken: set[int] = set()
        for packed in chains:
            reservation = kv.reserve(ns, packed)
            taken |= set(reservation._offsets)
            reservation.write_all([content(packed[32 * p : 32 * p + 32], SIZE) for p in reservation.granted])
            reservation.commit()
        assert len(taken) > 100
        assert not taken & theirs
        w.resume()
        time.sleep(0.3)
        for packed in chains:
            with kv.lookup(ns, packed) as found:
                assert read(kv, ns, packed, found)[1] == []
        w.tell("finish")
        assert w.expect() == ["LOST"] * COUNT
        assert w.expect() == 0
        eventually(lambda: kv.stats()["l1"]["bytes_quarantined"] == 0, 10, say=kv.stats)
        w.tell("end")
        w.end()
        assert_at_rest(daemon, kv)


def test_a_worker_that_dies_with_its_forked_child_alive_is_dead(make_daemon: Callable[..., Daemon]) -> None:
    """An engine forks helpers; such a child must not keep its parent's lease."""
    watch = Watch(make_daemon(l1_mib=64))
    before = watch.counts()
    w = Worker(forking, str(watch.daemon.run_dir))
    child = w.expect()
    try:
        assert watch.counts()["references"] == before["references"] + COUNT
        w.end()
        eventually(lambda: watch.counts() == before, RELEASED_S + SLACK_S, say=watch.counts)
    finally:
        import os
        import signal

        os.kill(child, signal.SIGKILL)
    watch.finish()


def forking(link: Connection, run_dir: str) -> None:
    import os

    kv = Client.attach(run_dir, deadline_s=30)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    found = kv.lookup(ns, SHARED)
    child = os.fork()
    if not child:
        link.close()
        while True:
            time.sleep(60)
    link.send(child)
    while found.alive:
        time.sleep(1)


def test_one_client_that_dies_while_another_reads_its_lookup_takes_nothing_away_from_the_reader(
    make_daemon: Callable[..., Daemon],
) -> None:
    """B13: scheduler looks up, worker reads by handle, scheduler dies."""
    watch = Watch(make_daemon(l1_mib=64))
    before = watch.counts()
    w = Worker(scheduler, str(watch.daemon.run_dir))
    handle = w.expect()
    reading = watch.kv.open_read(handle, 0, 0, COUNT)
    assert reading is not None
    w.end()
    eventually(lambda: watch.counts()["clients"] == before["clients"])
    assert watch.counts()["references"] == before["references"] + COUNT
    watch.kv.clear()
    target = np.zeros(SIZE, np.uint8)
    for i in range(COUNT):
        assert reading.read(i, target)
        assert np.array_equal(target, content(SHARED[32 * i : 32 * i + 32], SIZE))
    reading.confirm()
    assert watch.counts() == before
    watch.finish()


def scheduler(link: Connection, run_dir: str) -> None:
    kv = Client.attach(run_dir, deadline_s=30)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    link.send(kv.lookup(ns, SHARED).hand_over())
    link.recv()
