"""Arguments that make no sense: one sentence with the value, the limit and the fix, before anything is sent."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.errors import Unavailable
from kvkeep.ipc.kvstore import KVStore
from tests.ipc.conftest import SIZE, content, eventually, hashes
from tests.ipc.fake_daemon import FakeDaemon

HUGE = 2**70
ONE = [bytes(SIZE)]

CALLS: dict[str, tuple[Callable[[Client, Namespace], object], str]] = {
    "lookup deadline NaN": (lambda kv, ns: kv.lookup(ns, hashes(1), deadline_s=math.nan), "deadline_s is not a number"),
    "lookup deadline None": (lambda kv, ns: kv.lookup(ns, hashes(1), deadline_s=None), "deadline_s is None"),  # type: ignore[arg-type]
    "lookup wait NaN": (lambda kv, ns: kv.lookup(ns, hashes(1), wait_s=math.nan), "wait_s is not a number"),
    "lookup readers -1": (lambda kv, ns: kv.lookup(ns, hashes(1), readers=-1), "readers is -1; it must be 0 or more"),
    "lookup readers 5000": (lambda kv, ns: kv.lookup(ns, hashes(1), readers=5000), "at most 1024"),
    "lookup readers huge": (lambda kv, ns: kv.begin_lookup(ns, hashes(1), readers=HUGE), "at most 1024"),
    "lookup readers 1.0": (lambda kv, ns: kv.lookup(ns, hashes(1), readers=1.0), "whole number"),  # type: ignore[arg-type]
    "hashes of str": (lambda kv, ns: kv.lookup(ns, ["a" * 32]), "32 bytes each"),  # type: ignore[list-item]
    "hashes of int": (lambda kv, ns: kv.lookup(ns, [1, 2]), "32 bytes each"),  # type: ignore[list-item]
    "hashes None": (lambda kv, ns: kv.lookup(ns, None), "NoneType"),  # type: ignore[arg-type]
    "hashes hex": (lambda kv, ns: kv.lookup(ns, hashes(1).hex()), "32 bytes each"),
    "namespace int": (lambda kv, ns: kv.lookup(ns.id, hashes(1)), "what `register` returns"),  # type: ignore[arg-type]
    "store twice": (lambda kv, ns: kv.store(ns, hashes(1) * 2, ONE * 2), "stands twice among 2 chunks"),
    "store int": (lambda kv, ns: kv.store(ns, hashes(1), [5]), "not 5 .int."),
    "store no list": (lambda kv, ns: kv.store(ns, hashes(1), 5), "a list of buffers"),
    "store objects": (lambda kv, ns: kv.store(ns, hashes(1), [np.array([object()] * 512)]), "Python objects"),
    "store strides": (lambda kv, ns: kv.store(ns, hashes(1), [memoryview(bytes(2 * SIZE))[::2]]), "not contiguous"),
    "store deadline NaN": (lambda kv, ns: kv.store(ns, hashes(1), ONE, deadline_s=math.nan), "deadline_s"),
    "store start -1": (lambda kv, ns: kv.store(ns, hashes(1), ONE, start=-1), "start is -1"),
    "store shard 1": (lambda kv, ns: kv.store(ns, hashes(1), ONE, shard=1), "shard is 1; it must be at most 0"),
    "reserve start": (lambda kv, ns: kv.reserve(ns, hashes(1), start=2), "start is 2; it must be at most 1"),
    "commit deadline": (lambda kv, ns: kv.reserve(ns, hashes(1)).commit(deadline_s=math.nan), "deadline_s"),
    "retrieve shard": (lambda kv, ns: kv.retrieve(kv.lookup(ns, b""), ONE, shard=HUGE), "shard is"),
    "retrieve buffers": (lambda kv, ns: kv.retrieve(kv.lookup(ns, b""), None), "a list of buffers"),
    "open_read": (lambda kv, ns: kv.open_read(HUGE, 0, 0, 1), "handle is"),
    "release_handle": (lambda kv, ns: kv.release_handle(HUGE), "handle is"),
    "confirm_handle": (lambda kv, ns: kv.confirm_handle(5, HUGE), "shard is"),
    "release keep": (lambda kv, ns: kv.lookup(ns, hashes(1)).release(HUGE), "keep is"),
    "list cursor": (lambda kv, ns: kv.list(ns, HUGE), "cursor is"),
    "unpin": (lambda kv, ns: kv.unpin(HUGE), "pin is"),
    "ping deadline": (lambda kv, ns: kv.ping(deadline_s=math.nan), "deadline_s"),
    "register 1.5": (lambda kv, ns: kv.register({"a": 1}, shard_bytes=1.5), "shard_bytes is 1.5 .float."),  # type: ignore[arg-type]
    "register huge": (lambda kv, ns: kv.register({"a": 1}, shard_bytes=2**80), "shard_bytes is"),
    "register 0": (
        lambda kv, ns: kv.register({"a": 1}, shard_bytes=SIZE, shards=0),
        "shards is 0; it must be positive",
    ),
    "page_bytes 1.5": (lambda kv, ns: KVStore(kv, space="s", page_bytes=1.5), "page_bytes is 1.5"),  # type: ignore[arg-type]
    "page_bytes huge": (lambda kv, ns: KVStore(kv, space="s", page_bytes=2**63 - 1), "page_bytes is"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_makes_no_sense_is_refused_and_harms_nobody(
    kv: Client, ns: Namespace, fake: FakeDaemon, name: str
) -> None:
    call, why = CALLS[name]
    with pytest.raises(ValueError, match=why):
        call(kv, ns)
    assert kv.store(ns, hashes(1, salt=1), [content(1)]), kv.state
    eventually(lambda: not fake.stores and not fake.lookups)
    assert (kv.counters["attaches"], kv.counters["refused"], kv.hung) == (1, 0, False)


def test_a_namespace_of_another_client_is_refused(kv: Client, fake: FakeDaemon) -> None:
    with Client.attach(fake.run_dir) as other:
        theirs = other.register({"model": "m"}, shard_bytes=SIZE)
        for call in (lambda: kv.store(theirs, hashes(1), ONE), lambda: kv.lookup(theirs, hashes(1))):
            with pytest.raises(ValueError, match="register it with this one"):
                call()


def test_a_hash_that_stands_twice_in_a_chain_is_told_when_the_daemon_refuses_it(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    fake.twist = lambda request, reply: m.Error("bad_request", "no", fake.epoch)
    twice = hashes(2) + hashes(1)
    for call in (lambda: kv.lookup(ns, twice), lambda: kv.reserve(ns, twice, start=2)):
        with pytest.raises(ValueError, match="stands twice among 3 chunks"):
            call()
    assert kv.lookup(ns, hashes(2)).ready == 0
    assert kv.counters["attaches"] == 1


def test_hashes_may_come_from_a_generator(kv: Client, ns: Namespace) -> None:
    def each() -> Iterator[bytes]:
        yield hashes(1)
        yield hashes(2)[32:]

    kv.store(ns, each(), [content(0), content(1)])  # type: ignore[arg-type]
    assert kv.lookup(ns, each(), readers=0).ready == 2  # type: ignore[arg-type]


def test_infinite_times_are_as_long_as_they_may_be(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    assert kv.store(ns, hashes(1), ONE, deadline_s=math.inf)
    assert kv.lookup(ns, hashes(1), wait_s=math.inf, deadline_s=math.inf).ready == 1
    assert max(r.wait_ms for r in fake.requests if isinstance(r, m.Lookup)) == 60_000
    assert kv.lookup(ns, hashes(1), deadline_s=-1.0).ready in (0, 1)
    assert not kv.hung


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"run_dir": 5}, "run_dir is 5 .int."),
        ({"name": "n" * 1000}, "name has 1000 characters, the limit is 256"),
        ({"name": "\ud800"}, "lone surrogate"),
        ({"name": 5}, "name is 5 .int."),
        ({"deadline_s": math.nan}, "deadline_s is not a number"),
        ({"copy_threads": 0}, "copy_threads is 0"),
    ],
)
def test_attaching_with_what_makes_no_sense_starts_nothing(
    tmp_path: Path, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=why):
        Client.attach(**{"run_dir": tmp_path, **options})
    assert not [thread for thread in threading.enumerate() if thread.name == "kvkeep-client"]
    assert not caplog.records


def test_times_of_a_store_of_values_are_checked_and_no_pin_lasts_for_ever(fake: FakeDaemon) -> None:
    with KVStore.attach(fake.run_dir, space="s", page_bytes=SIZE) as store:
        calls: list[Callable[[], object]] = [
            lambda: store.pin("a", ttl_s=math.nan),
            lambda: store.pin("a", ttl_s=-1),
            lambda: store.batched_pin(["a"], ttl_s=math.nan),
            lambda: store.get("a", deadline_s=math.nan),
            lambda: store.get("a", wait_s=math.nan),
            lambda: store.put("a", b"1", deadline_s=math.nan),
            lambda: store.contains("a", deadline_s=None),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"ttl|not a number|number of seconds"):
                call()
        assert store.get("a", wait_s=math.inf) is None
        assert store.client.counters["attaches"] == 1


def test_a_closed_client_says_that_it_is_closed(kv: Client, ns: Namespace) -> None:
    kv.close()
    assert "was closed; attach a new one" in kv.state
    with pytest.raises(Unavailable, match="was closed; attach a new one"):
        kv.ping()
    assert kv.lookup(ns, hashes(1)).ready == 0


def test_a_client_whose_daemon_left_says_so(kv: Client, fake: FakeDaemon) -> None:
    fake.stop()
    eventually(lambda: not kv.attached)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert "not tried yet" not in kv.state


def test_a_client_goes_on_when_its_working_directory_is_gone(tmp_path: Path, fake: FakeDaemon) -> None:
    """A relative run_dir is looked up for each attempt."""
    here, gone = os.getcwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    try:
        with Client.attach("run", wait=False) as kv:
            gone.rmdir()
            eventually(lambda: kv._session.counters["attach_failures"] > 8)  # the backoff is at its end: it is told
            assert kv._session._thread.is_alive()
            assert "run" in kv.state
    finally:
        os.chdir(here)
