"""A fake daemon and a client of it, and the small things that all client tests need."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvkeep.ipc import client_lookup, client_store
from kvkeep.ipc.client import Client, Namespace, PendingLookup, Reservation
from tests.ipc.fake_daemon import FakeDaemon

SIZE = 4096
PATIENCE_S = 60.0


def hashes(count: int, salt: int = 0) -> bytes:
    """A chain; longer ones begin with shorter ones."""
    return b"".join(hashlib.sha256(b"%d/%d" % (salt, i)).digest() for i in range(count))


def content(i: int, size: int = SIZE) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8)


def eventually(condition: Callable[[], object], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


def at_epoch(kv: Client, epoch: int) -> None:
    eventually(lambda: kv.epoch == epoch)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default deadlines are for engines; a test on a busy machine must not fail by one.  Faults set their own."""
    for function in (
        Client.attach.__func__,  # type: ignore[attr-defined]
        Client.store,
        Client.reserve,
        Client.lookup,
        Client.begin_lookup,
        Client.retrieve,
        Client.open_read,
        Reservation.commit,
    ):
        defaults: Any = function.__kwdefaults__
        monkeypatch.setitem(defaults, "deadline_s", PATIENCE_S)
    monkeypatch.setattr(PendingLookup.wait, "__defaults__", (PATIENCE_S,))
    monkeypatch.setattr(client_lookup, "RELEASE_DEADLINE_S", PATIENCE_S)
    monkeypatch.setattr(client_store, "COMMIT_DEADLINE_S", PATIENCE_S)


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    run_dir = Path(tempfile.mkdtemp(prefix="kvk-fake-"))
    daemon = FakeDaemon(run_dir)
    yield daemon
    daemon.close()
    shutil.rmtree(run_dir)
    eventually(lambda: not [t for t in threading.enumerate() if t.name in ("kvkeep-client", "fake-daemon")])


@pytest.fixture
def kv(fake: FakeDaemon) -> Iterator[Client]:
    with Client.attach(fake.run_dir, name=f"test-{os.getpid()}") as client:
        yield client


@pytest.fixture
def ns(kv: Client) -> Namespace:
    return kv.register({"model": "m"}, shard_bytes=SIZE)
