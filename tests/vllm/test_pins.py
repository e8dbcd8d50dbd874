"""Pins that requests asked for, against a real daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import Denied
from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm import pins
from kvkeep.ipc.vllm.pins import TRIES, Pinner
from tests.conftest import Daemon
from tests.ipc.conftest import content, eventually, hashes

SIZE = 4096


class Counting:
    """The client, and which management calls reached the daemon."""

    def __init__(self, inner: Client) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.denied = False

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    def pin(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self.calls.append("pin")
        if self.denied:
            raise Denied("injected")
        return self.inner.pin(*args, **kwargs)

    def unpin(self, pin: int) -> int:
        self.calls.append("unpin")
        return self.inner.unpin(pin)


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Counting]:
    with Client.attach(shared_daemon.run_dir) as inner:
        eventually(lambda: inner.stats()["l1"]["bytes_ready"] == inner.stats()["l1"]["bytes_total"])
        yield Counting(inner)


@pytest.fixture
def namespace(client: Counting, request: pytest.FixtureRequest) -> Any:
    return client.inner.register({"model": request.node.name}, shard_bytes=SIZE)


def store(client: Counting, namespace: Any, chain: bytes) -> None:
    count = len(chain) // HASH_BYTES
    assert client.inner.store(namespace, chain, [content(n, SIZE) for n in range(count)]).stored == count


def pinned(client: Counting) -> int:
    """References that nobody but a pin holds here."""
    return int(client.inner.stats()["l1"]["references"])


def through(pinner: Pinner) -> None:
    eventually(lambda: pinner._thread is None)


def test_a_prompt_is_pinned_until_its_time_is_over(client: Counting, namespace: Any) -> None:
    chain = hashes(4)
    store(client, namespace, chain)
    errors: list[BaseException] = []
    pinner = Pinner(client, lambda _, error: errors.append(error))
    pinner.ask(namespace, chain, 1.0)
    through(pinner)
    assert pinned(client) == 4
    assert client.inner.clear(namespace) == 0  # nothing could be dropped
    eventually(lambda: pinned(client) == 0)
    assert errors == []


def test_what_is_stored_a_little_later_is_pinned_with_the_rest(client: Counting, namespace: Any) -> None:
    chain = hashes(4)
    store(client, namespace, chain[: 2 * HASH_BYTES])
    pinner = Pinner(client, lambda *_: None, pause_s=0.01)
    pinner.ask(namespace, chain, 1.0)
    eventually(lambda: "pin" in client.calls)
    with client.inner.reserve(namespace, chain, start=2) as reservation:
        reservation.commit()
    through(pinner)
    assert pinned(client) in (2, 4)  # the store may have come after the last try
    if client.calls.count("pin") < TRIES:
        assert pinned(client) == 4
    eventually(lambda: pinned(client) == 0)


def test_what_never_comes_leaves_the_rest_pinned(client: Counting, namespace: Any) -> None:
    chain = hashes(4)
    store(client, namespace, chain[: 2 * HASH_BYTES])
    pinner = Pinner(client, lambda *_: None, pause_s=0.001)
    pinner.ask(namespace, chain, 1.0)
    pinner.ask(namespace, hashes(3, salt=9), 1.0)  # nothing of it is there
    through(pinner)
    assert client.calls.count("pin") == 2 * TRIES
    assert pinned(client) == 2
    eventually(lambda: pinned(client) == 0)


def test_what_comes_after_the_last_try_is_pinned_when_the_next_request_asks(client: Counting, namespace: Any) -> None:
    chain = hashes(4)
    store(client, namespace, chain[: 2 * HASH_BYTES])
    pinner = Pinner(client, lambda *_: None, pause_s=0.001)
    pinner.ask(namespace, chain, 30.0)
    through(pinner)
    assert pinned(client) == 2
    with client.inner.reserve(namespace, chain, start=2) as reservation:
        reservation.commit()
    pinner.ask(namespace, chain, 30.0)
    through(pinner)
    assert pinned(client) == 4
    for held in pinner._held.values():
        client.unpin(held.pin)


def test_a_prompt_is_pinned_once_however_many_ask(client: Counting, namespace: Any) -> None:
    chain = hashes(4)
    store(client, namespace, chain)
    pinner = Pinner(client, lambda *_: None)
    for _ in range(20):
        pinner.ask(namespace, chain, 2.0)
    through(pinner)
    assert client.calls == ["pin"]
    assert pinned(client) == 4
    pinner.ask(namespace, chain, 10.0)  # a longer time replaces it
    through(pinner)
    assert client.calls == ["pin", "pin", "unpin"]
    assert pinned(client) == 4
    pinner.ask(namespace, chain, 10.0)
    through(pinner)
    assert len(client.calls) == 3
    for held in pinner._held.values():
        client.unpin(held.pin)


def test_a_refusal_is_told_and_not_tried_again(client: Counting, namespace: Any) -> None:
    errors: list[BaseException] = []
    pinner = Pinner(client, lambda _, error: errors.append(error), pause_s=0.001)
    client.denied = True
    pinner.ask(namespace, hashes(2), 1.0)
    through(pinner)
    assert client.calls == ["pin"]
    assert isinstance(errors[0], Denied)


def test_without_a_daemon_it_ends_after_a_few_tries(client: Counting, namespace: Any) -> None:
    errors: list[BaseException] = []
    pinner = Pinner(client, lambda _, error: errors.append(error), pause_s=0.001)
    client.inner.close()
    pinner.ask(namespace, hashes(2), 1.0)
    through(pinner)
    assert len(errors) == TRIES


def test_the_queue_is_bounded_and_closing_empties_it(
    client: Counting, namespace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "MAX_QUEUED", 3)
    hold, entered = threading.Event(), threading.Event()

    def waits(*_: Any, **__: Any) -> tuple[int, int]:
        entered.set()
        hold.wait(20)
        return 0, 0

    monkeypatch.setattr(client, "pin", waits)
    pinner = Pinner(client, lambda *_: None)
    for n in range(6):
        pinner.ask(namespace, hashes(1, salt=n), 1.0)
        entered.wait(20)
    assert pinner.dropped == 2
    pinner.close()
    hold.set()
    through(pinner)
    pinner.ask(namespace, hashes(1), 1.0)
    assert pinner._thread is None


def test_nothing_to_pin_starts_no_thread(client: Counting, namespace: Any) -> None:
    pinner = Pinner(client, lambda *_: None)
    pinner.ask(namespace, b"", 1.0)
    pinner.ask(namespace, hashes(1), 0.0)
    assert pinner._thread is None


def test_a_pin_of_another_namespace_or_daemon_is_not_this_one() -> None:
    """After a reset of the cache the same prompt is stored anew, and a new daemon's pins may have the old one's ids."""
    calls: list[tuple[str, Any]] = []
    client = SimpleNamespace(
        epoch=1,
        pin=lambda space, hashes, *, ttl_s: (calls.append(("pin", space.digest)), (len(calls), 2))[1],
        unpin=lambda pin: calls.append(("unpin", pin)),
    )
    pinner = Pinner(client, lambda *_: None)
    one, other = SimpleNamespace(digest=b"one"), SimpleNamespace(digest=b"other")
    for space, epoch in ((one, 1), (one, 1), (other, 1), (one, 1), (other, 2)):
        client.epoch = epoch
        pinner.ask(space, hashes(2), 60.0)
        through(pinner)
    client.epoch = 2
    pinner.ask(other, hashes(2), 300.0)
    through(pinner)
    assert calls == [("pin", b"one"), ("pin", b"other"), ("pin", b"other"), ("pin", b"other"), ("unpin", 3)]
