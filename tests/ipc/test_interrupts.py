"""Signals whose handlers raise (Ctrl-C) in the middle of any call: nothing stays behind, and the client goes on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.client_arena import Guard
from kvkeep.ipc.client_lookup import Lookup
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
