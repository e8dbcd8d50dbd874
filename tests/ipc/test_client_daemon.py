"""The client against a real daemon: restarts by kill, hangs by SIGSTOP, deaths of clients, another process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc.client import Client, Namespace
from tests.conftest import Daemon
from tests.ipc.conftest import at_epoch, content, eventually, hashes

SIZE = 65536


def register(kv: Client) -> Namespace:
    return kv.register({"model": "m", "test": "client"}, shard_bytes=SIZE)


def attach(daemon: Daemon, **options: Any) -> Client:
    """Also waits until all of L1 is reserved, so that nothing is FULL for a start."""
    kv = Client.attach(daemon.run_dir, **options)
    eventually(lambda: kv.stats()["l1"]["bytes_ready"] == kv.stats()["l1"]["bytes_total"])
    return kv


def held(kv: Client) -> tuple[int, int]:
    l1 = kv.stats()["l1"]
    return l1["references"], l1["reserved_bytes"]


def test_store_kill_restart_and_everything_is_still_there(daemon: Daemon) -> None:
    with attach(daemon) as kv:
        ns, chain = register(kv), hashes(20)
        sources = [content(i, SIZE) for i in range(20)]
        assert kv.store(ns, chain, sources).stored == 20
        for epoch in (2, 3):
            daemon.restart()
            at_epoch(kv, epoch)
            target = np.zeros((20, SIZE), np.uint8)
            with kv.lookup(ns, chain) as found:
                assert kv.retrieve(found, target) == [True] * 20
            assert all((target[i] == sources[i]).all() for i in range(20))
        assert held(kv) == (0, 0)
        assert kv.check()["ok"]


def test_a_chunk_is_there_when_all_its_shards_are(daemon: Daemon) -> None:
    with attach(daemon, checksums=True) as kv:
        ns, chain = kv.register({"model": "m"}, shard_bytes=5000, shards=2), hashes(3)
        first = [content(i, 5000) for i in range(3)]
        second = [content(10 + i, 5000) for i in range(3)]
        assert {o.value for o in kv.store(ns, chain, first, shard=0).outcome} == {"waiting"}
        assert kv.lookup(ns, chain, readers=0).ready == 0
        assert {o.value for o in kv.store(ns, chain, second, shard=1).outcome} == {"stored"}
        found = kv.lookup(ns, chain)
        target = np.zeros((3, 5000), np.uint8)
        for shard, sources in ((0, first), (1, second)):
            assert found.alive
            assert kv.retrieve(found, target, shard=shard) == [True] * 3
            assert (target == np.stack(sources)).all()
        assert not found.alive, "the last confirmation ends the handle"
        assert held(kv) == (0, 0)


def test_a_stopped_daemon_opens_the_breaker_and_a_continued_one_closes_it(daemon: Daemon) -> None:
    with attach(daemon) as kv:
        ns, chain = register(kv), hashes(2)
        kv.store(ns, chain, [content(i, SIZE) for i in range(2)])
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert kv.lookup(ns, chain, deadline_s=0.2).ready == 0
            assert kv.hung
            assert kv.store(ns, chain, [content(i, SIZE) for i in range(2)], deadline_s=60).failed == 2
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: not kv.hung)
        assert kv.lookup(ns, chain).ready == 2
        eventually(lambda: held(kv) == (0, 0))
        assert kv.counters["attaches"] == 1


def test_a_waiting_lookup_is_answered_when_another_client_commits(daemon: Daemon) -> None:
    with attach(daemon) as writer, attach(daemon) as reader:
        ns, other, chain = register(writer), register(reader), hashes(2)
        reservation = writer.reserve(ns, chain)
        pending = reader.begin_lookup(other, chain, wait_s=30)
        time.sleep(0.1)
        assert pending.poll() is None
        for i in range(2):
            assert reservation.write(i, content(i, SIZE))
        reservation.commit()
        found = pending.wait(60)
        assert found.ready == 2
        assert reader.retrieve(found, np.zeros((2, SIZE), np.uint8)) == [True, True]
        parked = reader.begin_lookup(other, hashes(3), wait_s=30)
        parked.cancel()
        eventually(lambda: held(writer) == (0, 0))


def test_a_lookup_tells_what_was_there_at_once_from_what_came_while_it_waited(daemon: Daemon) -> None:
    with attach(daemon) as writer, attach(daemon) as reader:
        ns, other, chain = register(writer), register(reader), hashes(3)
        writer.store(ns, hashes(1), [content(0, SIZE)])
        reservation = writer.reserve(ns, chain, start=1)
        pending = reader.begin_lookup(other, chain, wait_s=30)
        time.sleep(0.1)
        for i in range(2):
            assert reservation.write(i, content(1 + i, SIZE))
        reservation.commit()
        waited, asked_again = pending.wait(60), reader.lookup(other, chain)
        assert (waited.ready, waited.at_once) == (3, 1)
        assert (asked_again.ready, asked_again.at_once) == (3, 3)


CHILD = """
import os, sys, numpy as np
from kvkeep.ipc.client import Client
from tests.ipc.conftest import hashes
kv = Client.attach(sys.argv[1])
ns = kv.register({"model": "m", "test": "client"}, shard_bytes=65536)
found = kv.lookup(ns, hashes(4))
reservation = kv.reserve(ns, hashes(8))
reservation.write(0, np.full(65536, 7, np.uint8))
print(found.ready, len(reservation.granted), flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_no_reference_and_no_reservation(daemon: Daemon) -> None:
    root = Path(__file__).parents[2]
    with attach(daemon) as kv:
        ns, chain = register(kv), hashes(8)
        kv.store(ns, hashes(4), [content(i, SIZE) for i in range(4)])
        for _ in range(3):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(daemon.run_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(root)},
            )
            assert child.stdout is not None
            assert child.stdout.readline() == b"4 4\n"
            assert held(kv)[0] > 0
            child.kill()
            child.communicate()
            eventually(lambda: held(kv) == (0, 0))
            assert kv.lookup(ns, chain, readers=0).ready == 4


def test_kills_under_load_give_no_error_and_no_wrong_byte(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(l1_mib=16)  # less than is stored: eviction goes on all the time
    stop, hits = threading.Event(), [0]
    wrong: list[object] = []
    with attach(daemon) as kv:
        ns = register(kv)

        def work(number: int) -> None:
            target = np.zeros((8, SIZE), np.uint8)
            round_ = 0
            while not stop.is_set():
                round_ += 1
                salt = number * 1000 + round_ % 20
                sources: list[Any] = [np.full(SIZE, (salt * 7 + i) % 251, np.uint8) for i in range(8)]
                try:
                    kv.store(ns, hashes(8, salt=salt), sources)
                    good = kv.retrieve(kv.lookup(ns, hashes(8, salt=salt)), target)
                except Exception as error:
                    wrong.append(error)
                    return
                hits[0] += sum(good)
                wrong.extend((salt, i) for i, ok in enumerate(good) if ok and (target[i] != sources[i]).any())

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for epoch in range(2, 7):
            time.sleep(0.3)
            daemon.restart()
            at_epoch(kv, epoch)
        eventually(lambda: hits[0] > 0)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert hits[0] > 0
        eventually(lambda: held(kv) == (0, 0))


def test_a_child_forked_while_its_parent_attaches_does_not_keep_the_lease(daemon: Daemon) -> None:
    code = f"""
import os, sys, time
from kvkeep.ipc.client import Client
kv = Client.attach({str(daemon.run_dir)!r}, name="parent", wait=False)
time.sleep(0.5)  # it waits for the Welcome of a stopped daemon by now
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("forked", flush=True)
time.sleep(600)
"""
    with attach(daemon) as kv:

        def names() -> list[str]:
            return [client["name"] for client in kv.stats()["clients"]]

        os.kill(daemon.pid, signal.SIGSTOP)
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            assert parent.stdin is not None
            assert parent.stdout.readline() == b"forked\n"
            os.kill(daemon.pid, signal.SIGCONT)
            eventually(lambda: "parent" in names())
            parent.kill()
            parent.wait()
            eventually(lambda: "parent" not in names())
            parent.stdin.close()  # the child ends


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some come in finalizers
def test_signals_at_random_moments_spoil_nothing_and_leave_nothing(daemon: Daemon, seed: int) -> None:
    """Ctrl-C in large stores and loads, real signals: what was given back is not written to, and all is given back."""
    rng, size, interrupts = random.Random(seed), 16 << 20, 0
    mine, theirs = content(1, size), content(2, size)
    target = np.zeros((1, size), np.uint8)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def one_round(number: int) -> None:
        with kv.lookup(ns, hashes(1, salt=number)) as found:
            if kv.retrieve(found, target[: found.ready]) == [True]:
                assert (target[0] == mine).all()
        kv.store(ns, hashes(1, salt=number), [mine])

    with attach(daemon) as kv, attach(daemon) as other:
        ns = kv.register({"model": "m"}, shard_bytes=size)
        there = other.register({"model": "m"}, shard_bytes=size)
        handler = signal.signal(signal.SIGALRM, interrupt)
        try:
            for i in range(80):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.015))
                    one_round(i // 2)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupts += 1
                    if other.store(there, hashes(1, salt=1000 + i), [theirs]).stored:  # where the first was, perhaps
                        time.sleep(0.005)
                        with other.lookup(there, hashes(1, salt=1000 + i)) as found:
                            assert other.retrieve(found, target[: found.ready]) in ([True], [])
                            assert not found.ready or (target[0] == theirs).all()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        assert interrupts
        eventually(lambda: held(other) == (0, 0))
        assert other.check()["ok"]
        eventually(lambda: kv.attached)
