"""The daemon is killed, restarted, stopped and continued under clients that work: they notice misses at most.

A1 A2 A4 A5 E6 F1 of the cases.  Each client judges every byte itself and keeps the list of what the daemon said is
sealed; the arena is large enough to never evict, so after any number of kills all of that list must be found.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.client_store import Stored
from tests.conftest import Daemon
from tests.faults.account import assert_at_rest, surprises
from tests.faults.oracle import MANIFEST, chain, content, contents, read
from tests.faults.processes import Worker, eventually, shared_counters

SIZE = 16384
LARGE = 4 << 20
DEADLINE_S = 1.0
SLACK_S = 3.0  # of a scheduler with more processes than cores


def busy(
    link: Connection, progress: Any, run_dir: str, number: int, seed: int, shard_bytes: int, chains: int, length: int
) -> None:
    """Stores, looks up and loads until told to stop; then reports what it saw.  ``progress`` counts what succeeded."""
    rng = random.Random(seed)
    kv = Client.attach(run_dir, name=f"busy-{number}", deadline_s=30)
    ns = kv.register(MANIFEST, shard_bytes=shard_bytes)
    sealed: dict[int, int] = {}  # chain -> chunks that the daemon said are sealed
    seen: dict[str, Any] = {"operations": 0, "loaded": 0, "wrong": [], "lost": [], "late": [], "slowest": 0.0}
    link.send("working")
    while not link.poll():
        which = rng.randrange(chains)
        count = rng.randint(1, length)
        packed = chain((number if rng.random() < 0.7 else "shared", which), count)
        mine = which if packed == chain((number, which), count) else -1
        epoch, late = kv.epoch, kv.counters["late_calls"]
        began = time.monotonic()
        if rng.random() < 0.5:
            result = kv.store(ns, packed, contents(packed, shard_bytes), deadline_s=DEADLINE_S)
            took = time.monotonic() - began
            readable = 0
            while readable < count and result.outcome[readable] in (Stored.STORED, Stored.PRESENT):
                readable += 1
            progress[number] += readable > 0
            if mine >= 0:
                sealed[mine] = max(sealed.get(mine, 0), readable)
        else:
            found = kv.lookup(ns, packed, deadline_s=DEADLINE_S)
            took = time.monotonic() - began
            undisturbed = kv.epoch == epoch != 0 and kv.counters["late_calls"] == late and not kv.hung
            if undisturbed and found.ready < min(count, sealed.get(mine, 0)):
                # A daemon that has died just now is a miss too.  What is lost stays lost: nobody else stores it.
                time.sleep(0.1)
                again = kv.lookup(ns, packed, readers=0, deadline_s=DEADLINE_S)
                undisturbed = kv.epoch == epoch and kv.counters["late_calls"] == late and not kv.hung
                if undisturbed and again.ready < min(count, sealed[mine]):
                    seen["lost"].append((mine, found.ready, again.ready, sealed[mine]))
            loaded, wrong = read(kv, ns, packed, found)
            seen["loaded"] += loaded
            progress[number] += loaded > 0
            seen["wrong"] += [(number, which, i) for i in wrong]
            found.release()
        seen["operations"] += 1
        seen["slowest"] = max(seen["slowest"], took)
        if took > DEADLINE_S + SLACK_S:
            seen["late"].append(round(took, 2))
        if not kv.attached:
            time.sleep(0.002)
    link.recv()
    eventually(lambda: kv.attached, 30)
    seen["sealed"], seen["attaches"] = sealed, kv.counters["attaches"]
    seen["protocol_errors"] = kv.counters["protocol_errors"]
    kv.close()
    link.send(seen)


def kill_under_load(
    daemon: Daemon, rng: random.Random, kills: int, *, clients: int = 3, shard_bytes: int = SIZE, length: int = 40
) -> dict[str, int]:
    """The daemon must be running, with an arena that holds everything.  Returns what was done."""
    progress = shared_counters(clients)
    workers = [
        Worker(busy, progress, str(daemon.run_dir), n, rng.getrandbits(32), shard_bytes, 6, length)
        for n in range(clients)
    ]
    for worker in workers:
        assert worker.expect() == "working"

    def all_progress() -> None:
        """Every client has attached again by itself, and works."""
        before = list(progress)
        eventually(
            lambda: (
                all(p.process.exitcode is None for p in workers) is False
                or all(now > then for now, then in zip(progress, before, strict=True))
            ),
            60,
            say=lambda: (before, list(progress)),
        )
        assert [p.process.exitcode for p in workers] == [None] * clients  # no SIGBUS, no SIGSEGV

    early = 0
    for _ in range(kills):
        if rng.random() < 0.7:
            all_progress()
        time.sleep(rng.uniform(0.0, 0.3))
        daemon.kill()
        if rng.random() < 0.2:  # and again while it adopts
            early += 1
            daemon.start(wait=False)
            time.sleep(rng.uniform(0.0, 0.5))
            daemon.kill()
        daemon._seen = daemon.output().count(" is ready: epoch ")
        daemon.start()
    all_progress()
    totals = {"kills": kills + early, "operations": 0, "loaded": 0, "sealed": 0}
    reports = []
    for worker in workers:
        worker.tell("stop")
    for worker in workers:
        reports.append(worker.expect())
        worker.process.join(20)
        assert worker.end() == 0
    print(*reports, sep="\n")
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=shard_bytes)
        for number, seen in enumerate(reports):
            assert seen["wrong"] == []
            assert seen["lost"] == []
            assert seen["late"] == []
            assert seen["protocol_errors"] == 0
            assert seen["attaches"] >= 2
            totals["operations"] += seen["operations"]
            totals["loaded"] += seen["loaded"]
            for which, count in seen["sealed"].items():
                packed = chain((number, which), count)
                with kv.lookup(ns, packed) as found:
                    assert found.ready == count, f"{count - found.ready} sealed chunks of {number, which} are gone"
                    assert read(kv, ns, packed, found) == (count, [])
                totals["sealed"] += count
        assert_at_rest(daemon, kv)
    assert totals["loaded"] > 0
    assert totals["sealed"] > 0
    return totals


def test_a_daemon_killed_15_times_under_load_gives_no_wrong_byte_and_loses_nothing_sealed(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    print(kill_under_load(make_daemon(l1_mib=128), random.Random(seed), 15))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_daemon_killed_100_times_under_load_gives_no_wrong_byte_and_loses_nothing_sealed(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    print(kill_under_load(make_daemon(l1_mib=128), random.Random(seed), 100, clients=4))


def test_a_daemon_killed_in_the_middle_of_large_copies_kills_no_client(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    daemon = make_daemon(l1_mib=640)
    print(kill_under_load(daemon, random.Random(seed), 6, clients=2, shard_bytes=LARGE, length=10))


def test_everything_that_commit_called_sealed_is_there_after_a_kill_that_follows_at_once(daemon: Daemon) -> None:
    for turn in range(5):
        with Client.attach(daemon.run_dir) as kv:
            ns = kv.register(MANIFEST, shard_bytes=SIZE)
            packed = chain(("at once", turn), 100)
            assert kv.store(ns, packed, contents(packed, SIZE)).stored == 100
            daemon.restart()
            eventually(lambda: kv.attached)
            for before in range(turn + 1):
                old = chain(("at once", before), 100)
                with kv.lookup(ns, old) as found:
                    assert found.ready == 100
                    assert read(kv, ns, old, found) == (100, [])
            assert_at_rest(daemon, kv)


def test_what_was_reserved_and_not_committed_is_a_miss_after_a_kill_and_its_commit_says_lost(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("unfinished", 8)
        reservation = kv.reserve(ns, packed)
        assert len(reservation.granted) == 8
        for i in range(8):
            assert reservation.write(i, content(packed[i * 32 : i * 32 + 32], SIZE))
        daemon.kill()
        eventually(lambda: not kv.attached)
        # Not ours any more, once the client's thread has ended the old epoch; until then it is nobody else's either.
        eventually(lambda: not reservation.write(0, np.zeros(SIZE, np.uint8)))
        daemon.start()
        eventually(lambda: kv.attached)
        assert {o.name for o in reservation.commit()} == {"LOST"}
        assert kv.lookup(ns, packed).ready == 0
        assert kv.store(ns, packed, contents(packed, SIZE)).stored == 8
        assert_at_rest(daemon, kv)


def test_a_reader_that_holds_chunks_across_a_kill_reads_right_bytes_or_none(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("held", 50)
        kv.store(ns, packed, contents(packed, SIZE))
        found = kv.lookup(ns, packed)
        reading = kv.open_read(found.handle, 0, 0, 50)
        assert reading is not None
        target = np.zeros(SIZE, np.uint8)
        assert reading.read(0, target)
        daemon.restart()
        for i in range(50):
            if reading.read(i, target):
                assert np.array_equal(target, content(packed[i * 32 : i * 32 + 32], SIZE))
        reading.confirm()
        found.release()
        eventually(lambda: kv.attached)
        assert_at_rest(daemon, kv)


def test_views_of_the_arena_outlive_the_daemon_and_its_successor(daemon: Daemon) -> None:
    """A2: a mapping is never taken away under its user."""
    kv = Client.attach(daemon.run_dir)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    packed = chain("views", 4)
    kv.store(ns, packed, contents(packed, SIZE))
    found = kv.lookup(ns, packed)
    reading = kv.open_read(found.handle, 0, 0, 4)
    assert reading is not None
    views = reading.views
    daemon.kill()
    daemon.start("--forget")
    eventually(lambda: kv.attached)
    kv.close()
    for i, view in enumerate(views):
        assert np.array_equal(view, content(packed[i * 32 : i * 32 + 32], SIZE))


def test_without_a_daemon_every_call_is_a_miss_at_once(daemon: Daemon) -> None:
    """A5.  The median is printed; what is asserted is an order of magnitude that no scheduler explains away."""
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("gone", 100)
        kv.store(ns, packed, contents(packed, SIZE))
        found = kv.lookup(ns, packed)
        daemon.kill()
        eventually(lambda: not kv.attached)
        targets = np.zeros((100, SIZE), np.uint8)
        calls: dict[str, Callable[[], Any]] = {
            "lookup": lambda: kv.lookup(ns, packed).ready == 0,
            "lookup that waits": lambda: kv.lookup(ns, packed, wait_s=5.0).ready == 0,
            "begin_lookup": lambda: kv.begin_lookup(ns, packed, wait_s=5.0).poll().ready == 0,  # type: ignore[union-attr]
            "store": lambda: set(kv.store(ns, packed, targets).outcome) == {Stored.UNAVAILABLE},
            "reserve": lambda: not kv.reserve(ns, packed).granted,
            "retrieve": lambda: kv.retrieve(found, targets) == [False] * 100,
            "open_read": lambda: kv.open_read(found.handle, 0, 0, 1) is None,
            "release": lambda: found.release() is None,
        }
        medians = {}
        for what, call in calls.items():
            times = []
            for _ in range(100):
                began = time.perf_counter()
                assert call(), what
                times.append(time.perf_counter() - began)
            medians[what] = round(statistics.median(times) * 1e6)
        print("median microseconds without a daemon:", medians)
        assert max(medians.values()) < 10_000


def test_a_lookup_that_waits_when_the_daemon_dies_is_a_miss_at_once_not_at_its_deadline(daemon: Daemon) -> None:
    """E6: whatever was begun comes back, and is not held until its own timeout."""
    with Client.attach(daemon.run_dir) as writer, Client.attach(daemon.run_dir) as kv:
        packed = chain("parked", 3)
        writing = writer.reserve(writer.register(MANIFEST, shard_bytes=SIZE), packed)
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        pending = kv.begin_lookup(ns, packed, wait_s=60.0)
        eventually(lambda: writer.stats()["l1"]["lookups_waiting"] == 1)
        assert pending.poll() is None
        daemon.kill()
        began = time.monotonic()
        assert pending.wait(60.0).ready == 0
        assert time.monotonic() - began < 10
        assert len(writing.granted) == 3


def test_a_stopped_daemon_costs_one_deadline_then_nothing_and_is_used_again_when_it_goes_on(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("stopped", 20)
        kv.store(ns, packed, contents(packed, SIZE))
        try:
            for turn in range(3):
                os.kill(daemon.pid, signal.SIGSTOP)
                began = time.monotonic()
                assert kv.lookup(ns, packed, deadline_s=0.3).ready == 0
                assert time.monotonic() - began < 0.3 + SLACK_S
                assert kv.hung
                began = time.monotonic()
                for _ in range(50):  # the breaker is open: none of these waits
                    assert kv.lookup(ns, packed, deadline_s=5.0).ready == 0
                    assert kv.store(ns, packed, contents(packed[:32], SIZE) * 20, deadline_s=5.0).stored == 0
                assert time.monotonic() - began < 5.0
                os.kill(daemon.pid, signal.SIGCONT)
                eventually(lambda: not kv.hung, 30)
                with kv.lookup(ns, packed, deadline_s=10) as found:
                    assert found.ready == 20, f"turn {turn}"
                    assert read(kv, ns, packed, found) == (20, [])
                assert_at_rest(daemon, kv)  # answers that came late were given back
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_handles_that_a_stopped_daemon_grants_too_late_are_given_back(daemon: Daemon) -> None:
    """Every kind of request is under way when the daemon stops, from several threads."""
    import threading

    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("late", 10)
        kv.store(ns, packed, contents(packed, SIZE))
        held = [kv.lookup(ns, packed) for _ in range(4)]
        reading = kv.open_read(held[0].handle, 0, 0, 5)
        reserved = kv.reserve(ns, chain("late too", 5))
        assert reading is not None
        assert len(reserved.granted) == 5
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            pending = [kv.begin_lookup(ns, packed, deadline_s=0.2) for _ in range(20)]
            calls: list[Callable[[], Any]] = [
                lambda: kv.lookup(ns, packed, deadline_s=0.2),
                lambda: kv.reserve(ns, chain("never", 6), deadline_s=0.2),
                lambda: kv.retrieve(held[1], np.zeros((10, SIZE), np.uint8), deadline_s=0.2),
                lambda: reserved.commit(deadline_s=0.2),
                lambda: reading.confirm(),
                lambda: held[2].release(),
            ]
            threads = [threading.Thread(target=call) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            assert all(p.wait(1.0).ready == 0 for p in pending)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: not kv.hung, 30)
        for found in held:
            found.release()
        assert_at_rest(daemon, kv)
        assert surprises(daemon) == []


def test_a_client_that_gave_up_attaching_for_long_finds_a_new_daemon_by_itself(
    make_daemon: Callable[..., Daemon],
) -> None:
    """A4, A7: no state in which only a restart of the engine helps; also when the folder itself went and came."""
    daemon = make_daemon(start=False)
    with Client.attach(daemon.run_dir, wait=False) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("patient", 5)
        assert kv.lookup(ns, packed).ready == 0
        daemon.start()
        eventually(lambda: kv.attached, 15)
        assert kv.store(ns, packed, contents(packed, SIZE)).stored == 5
        daemon.stop()
        time.sleep(1.5)
        for file in Path(daemon.run_dir).iterdir():
            file.unlink()
        Path(daemon.run_dir).rmdir()
        daemon.start()
        eventually(lambda: kv.attached, 15)
        assert kv.lookup(ns, packed).ready == 5
