"""Signals whose handlers raise (Ctrl-C) in the middle of any call: nothing stays behind, and the client goes on."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvkeep.ipc import client_session
from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.client_arena import Guard
from kvkeep.ipc.client_lookup import Lookup
from kvkeep.ipc.kvstore import KVStore
from kvkeep.ipc.kvstore_pins import Pins
from tests.ipc.conftest import SIZE, content, eventually, hashes
from tests.ipc.fake_daemon import FakeDaemon
from tests.ipc.interrupts import at_every_point


def within(seconds: float, call: object) -> None:
    """A lock that stayed locked makes a test fail instead of hanging."""
    thread = threading.Thread(target=call, daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "a lock stayed locked"


# ---- locks, and copies that are counted ------------------------------------------------------------------------------


def test_an_interrupt_at_any_point_of_a_copy_leaves_the_guard_idle() -> None:
    guard, points = Guard(), 0

    def copy() -> None:
        with guard.copying() as allowed:
            assert allowed
            len(b"a copy")

    for point in at_every_point(copy):
        points += 1
        assert guard.wait_idle(0), f"interrupted at point {point}, the copy counts for ever"
    assert points >= 4
    guard.revoke()
    with guard.copying() as allowed:
        assert not allowed
    assert guard.wait_idle(0)


def test_an_interrupted_copy_does_not_keep_the_client_from_attaching_again(
    kv: Client, ns: Namespace, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = kv._session.attachment
    assert attachment is not None
    assert attachment.arena is not None
    reservation, sources = kv.reserve(ns, hashes(1)), [content(0)]
    for _ in at_every_point(lambda: reservation.write_all(sources)):
        pass
    fake.restart()
    eventually(lambda: kv.attached, within_s=10)


def test_an_interrupt_at_any_point_of_a_registration_leaves_no_lock(kv: Client, fake: FakeDaemon) -> None:
    for point in at_every_point(lambda: kv._session.adopt(Namespace(b"{}", SIZE, 1))):
        within(10, lambda: kv._session.adopt(Namespace(b"{}", SIZE, 1)))
        assert kv.attached, f"interrupted at point {point}"


def test_an_interrupt_at_any_point_of_attaching_leaves_no_client_behind(fake: FakeDaemon) -> None:
    """Interrupted inside `Thread.start` the thread may hang in `threading`, before anything of ours."""
    points = 0
    for _ in at_every_point(lambda: Client.attach(fake.run_dir, wait=False).close(), outside=(threading.__file__,)):
        points += 1
    assert points > 30
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "kvkeep-client"])
    eventually(lambda: not fake.leases)


def test_an_interrupt_at_any_point_of_pinning_leaves_no_lock() -> None:
    pins, nothing = Pins(), np.arange(0)

    def pin_and_unpin() -> None:
        pins.add(b"k", [Held()], nothing.nbytes, 60.0)
        pins.again(b"k", 60.0)
        pins.drop(b"k")

    for _ in at_every_point(pin_and_unpin, outside=(threading.__file__,)):
        within(10, lambda: len(pins))
    pins.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "kvkeep-pins"])


# ---- requests and what they bring ------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attaching again after each of hundreds of interrupts is not to be slowed down."""
    monkeypatch.setattr(client_session, "STABLE_S", 0.0)
    monkeypatch.setattr(client_session, "BACKOFF_S", (0.001, 1.0))


def survives(kv: Client, fake: FakeDaemon, call: Callable[[], object], *, least: int) -> None:
    """Interrupted at any point of ``call`` the client gives everything back, and is there again, soon and by itself."""
    points = 0
    for point in at_every_point(call, outside=(threading.__file__, logging.__file__)):
        points += 1
        eventually(lambda: not fake.lookups and not fake.stores and kv.attached, within_s=10)
        attachment = kv._session.attachment
        assert attachment is None or attachment.arena is None or attachment.arena.guard.wait_idle(0), point
        forget(fake)
    print(points, "points")
    assert points >= least


def forget(fake: FakeDaemon) -> None:
    def clear() -> None:
        fake.arena.chunks.clear()
        fake.arena.used = 0

    fake.do(clear)


def test_an_interrupt_at_any_point_of_a_store_leaves_no_reservation(
    kv: Client, ns: Namespace, fake: FakeDaemon, quick: None
) -> None:
    survives(kv, fake, lambda: kv.store(ns, hashes(2), [content(0), content(1)]), least=100)
    assert kv.store(ns, hashes(2), [content(0), content(1)])


def test_an_interrupt_at_any_point_of_a_reservation_leaves_none(
    kv: Client, ns: Namespace, fake: FakeDaemon, quick: None
) -> None:
    def reserve() -> None:
        with kv.reserve(ns, hashes(2)) as reservation:
            reservation.write(0, content(0))

    survives(kv, fake, reserve, least=80)


def test_an_interrupt_at_any_point_of_a_load_leaves_no_reference(
    kv: Client, ns: Namespace, fake: FakeDaemon, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv.store(ns, hashes(2), [content(0), content(1)])
    monkeypatch.setitem(globals(), "forget", lambda _: None)
    target = np.zeros((2, SIZE), np.uint8)

    def load() -> None:
        with kv.lookup(ns, hashes(2)) as found:
            kv.retrieve(found, target[: found.ready])

    survives(kv, fake, load, least=100)
    with kv.lookup(ns, hashes(2)) as found:
        assert kv.retrieve(found, target) == [True, True]


def test_an_interrupt_at_any_point_of_a_finalizer_loses_nothing(
    kv: Client, ns: Namespace, fake: FakeDaemon, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv.store(ns, hashes(1), [content(0)])
    monkeypatch.setitem(globals(), "forget", lambda _: None)

    def drop_all() -> None:
        found = kv.lookup(ns, hashes(1))
        kv.open_read(found.handle, 0, 0, 1)
        kv.reserve(ns, hashes(2), start=1)
        kv.begin_lookup(ns, hashes(1))

    survives(kv, fake, drop_all, least=200)


@pytest.mark.parametrize("pending", [False, True])
def test_an_interrupt_at_any_point_of_a_lookup_that_waits_leaves_no_reference(
    kv: Client, ns: Namespace, fake: FakeDaemon, quick: None, pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv.store(ns, hashes(2), [content(0), content(1)])
    monkeypatch.setitem(globals(), "forget", lambda _: None)
    fake.pending = pending

    def look() -> None:
        lookup = kv.begin_lookup(ns, hashes(2), wait_s=5)
        if pending:
            until = time.monotonic() + 10
            while kv.attached and not fake.unfinished and time.monotonic() < until:
                time.sleep(0.001)
            fake.finish_lookups()
        lookup.wait().release()

    survives(kv, fake, look, least=50)


def test_an_interrupt_at_any_point_of_a_batched_put_leaves_no_reservation(
    kv: Client, fake: FakeDaemon, quick: None
) -> None:
    with KVStore(kv, space="s", page_bytes=SIZE) as store:
        survives(kv, fake, lambda: store.batched_put([("a", b"1"), ("b", b"2")]), least=200)
        assert all(store.batched_put([("a", b"1"), ("b", b"2")]))


def test_an_interrupt_while_waiting_gives_back_what_comes_without_another_call(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    fake.hold()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kv.reserve(ns, hashes(1))
    timer.join()
    fake.let_go()
    eventually(lambda: not fake.stores)
    eventually(lambda: kv.attached)


def test_signals_that_do_not_raise_change_nothing(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    heard: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
        for i in range(100):
            chain, target = hashes(1, salt=i), bytearray(SIZE)
            assert kv.store(ns, chain, [content(i)])
            with kv.lookup(ns, chain) as found:
                assert kv.retrieve(found, [target]) == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert heard
    assert kv.counters["attaches"] == 1


class Held(Lookup):
    """A lookup that holds nothing, but is alive."""

    def __init__(self) -> None:
        pass

    @property
    def alive(self) -> bool:
        return True

    def release(self, keep: int = 0) -> None:
        pass

    def __del__(self) -> None:
        pass
