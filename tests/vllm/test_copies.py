"""Every job that goes into the copy threads comes out exactly once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm.copies import CopyThreads, LoadEnd
from kvkeep.ipc.vllm.groups import ABSENT
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadJob, NamespaceSpec, StoreEnd, StoreJob, StoreReport
from kvkeep.ipc.vllm.pages import Pages, Plane
from tests.vllm.fake_client import FakeClient, FakeDaemon

LAYERS, BLOCKS, PAGE, PER_CHUNK = 2, 32, 64, 4


class Rig:
    def __init__(self, deadline_s: float = 5.0, load_threads: int = 2) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, PAGE), dtype=np.uint8)
        pages = Pages([[Plane(self.memory)]], [16])
        self.daemon, self.guard = FakeDaemon(), Guard(print)
        self.client = FakeClient(self.daemon)
        self.spec = NamespaceSpec({"model": "m"}, pages.bytes_of(((0,) * PER_CHUNK,)), 1, 64, 0)
        self.space = self.client.register(self.spec.manifest, shard_bytes=self.spec.shard_bytes)
        self.copies = CopyThreads(
            self.client, pages, shard=0, load_threads=load_threads, deadline_s=deadline_s, log=self.guard.note
        )

    def hashes(self, chunks: int, name: str = "h") -> bytes:
        return b"".join(f"{name}{n}".encode().ljust(HASH_BYTES, b".") for n in range(chunks))

    def store(self, job_id: int, chunks: int, first_block: int, start: int = 0, name: str = "h") -> StoreReport:
        ids = tuple(range(first_block, first_block + (chunks - start) * PER_CHUNK))
        self.copies.submit_store(StoreJob(job_id, self.hashes(chunks, name), start, (ids,), 0), self.spec)
        return self.collect(stores=1)[1][0]

    def handle(self, chunks: int) -> int:
        lookup = self.client.begin_lookup(self.space, self.hashes(chunks)).poll()
        assert lookup is not None
        assert lookup.ready == chunks
        return lookup.hand_over()

    def collect(self, loads: int = 0, stores: int = 0) -> tuple[list[LoadEnd], list[StoreReport]]:
        """What comes out, until so much has; and a moment longer, in case something comes twice."""
        ended: tuple[list[LoadEnd], list[StoreReport]] = ([], [])
        until = time.monotonic() + 10
        extra = 0
        while extra < 3:
            got = self.copies.take_ended()
            ended[0].extend(got[0])
            ended[1].extend(got[1])
            enough = len(ended[0]) >= loads and len(ended[1]) >= stores
            extra += enough
            assert time.monotonic() < until, "nothing came out"
            time.sleep(0.005)
        assert (len(ended[0]), len(ended[1])) == (loads, stores)
        return ended


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.copies.close()


@pytest.fixture
def lone() -> Iterator[Rig]:
    """With one thread for loads, so that chunks are copied in order."""
    made = Rig(load_threads=1)
    yield made
    made.copies.close()


def load(rig: Rig, chunks: int, blocks: list[int], **changes: Any) -> LoadJob:
    fields: dict[str, Any] = {
        "request_id": "r",
        "handle": rig.handle(chunks),
        "first_chunk": 0,
        "chunks": chunks,
        "blocks": (tuple(blocks),),
        "generation": 0,
    }
    return LoadJob(**fields | changes)


def test_what_was_stored_is_what_is_loaded(rig: Rig) -> None:
    assert rig.store(1, 2, first_block=0) == StoreReport(1, StoreEnd.DONE, 2)
    before = rig.memory.copy()
    rig.copies.submit_load(load(rig, 2, [20, 22, 21, 9, 30, 31, 8, 10]))
    ((end,), _) = rig.collect(loads=1)
    assert (end.bad_blocks, end.confirmed, end.failure) == ((), True, None)
    for source, target in enumerate([20, 22, 21, 9, 30, 31, 8, 10]):
        assert np.array_equal(rig.memory[:, target], before[:, source])
    assert rig.daemon.references() == 0


def test_a_load_from_inside_a_chunk_writes_only_what_was_asked(rig: Rig) -> None:
    rig.store(1, 3, first_block=0)
    before = rig.memory.copy()
    job = load(rig, 3, [ABSENT, ABSENT, 20, 21, 22, 23, 24, 25], first_chunk=1)
    rig.copies.submit_load(dataclasses.replace(job, chunks=2))
    rig.collect(loads=1)
    for n, target in enumerate(range(20, 26)):
        assert np.array_equal(rig.memory[:, target], before[:, 6 + n])
    assert np.array_equal(rig.memory[:, :20], before[:, :20])


def test_bad_chunks_are_named_by_their_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1, 3, first_block=0)
    from tests.vllm.fake_client import FakeReading

    monkeypatch.setattr(FakeReading, "validate", lambda self: [True, False, True])
    rig.copies.submit_load(load(rig, 3, list(range(12, 24))))
    ((end,), _) = rig.collect(loads=1)
    assert end.bad_blocks == (16, 17, 18, 19)
    assert (end.confirmed, end.failure, end.good_chunks) == (True, LoadFailure.INVALID, 1)


def test_a_handle_that_means_nothing_fails_the_whole_load(rig: Rig) -> None:
    rig.store(1, 1, first_block=0)
    for handle, why in ((0, LoadFailure.ERROR), (999, LoadFailure.REFUSED)):
        rig.copies.submit_load(load(rig, 1, [1, 2, 3, 4], handle=handle))
        ((end,), _) = rig.collect(loads=1)
        assert (end.bad_blocks, end.confirmed, end.failure) == ((1, 2, 3, 4), False, why)
        assert end.good_chunks == 0


@pytest.mark.parametrize("when", ["before it is read", "while it is copied"])
def test_a_load_that_the_daemon_left_says_so(lone: Rig, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    lone.store(1, 2, first_block=0)
    job = load(lone, 2, list(range(8, 16)))
    if when == "before it is read":
        lone.daemon.up = False
    else:
        scatter = Pages.scatter

        def dies(self: Pages, *args: Any, **kwargs: Any) -> None:
            scatter(self, *args, **kwargs)
            lone.daemon.up = False

        monkeypatch.setattr(Pages, "scatter", dies)
    lone.copies.submit_load(job)
    ((end,), _) = lone.collect(loads=1)
    assert end.failure is LoadFailure.DAEMON_AWAY
    assert end.bad_blocks


def test_an_exception_while_copying_fails_the_load_and_ends_the_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1, 1, first_block=0)

    def broken(self: Pages, *args: Any, **kwargs: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(Pages, "scatter", broken)
    rig.copies.submit_load(load(rig, 1, [1, 2, 3, 4]))
    ((end,), _) = rig.collect(loads=1)
    assert (end.bad_blocks, end.failure) == ((1, 2, 3, 4), LoadFailure.ERROR)
    assert rig.daemon.references() == 0
    monkeypatch.setattr(Pages, "gather", broken)
    assert rig.store(2, 1, first_block=0, name="other").end is StoreEnd.FAILED
    assert sum(rig.guard.counters.values()) == 2
    assert not any(space.writing for space in rig.daemon.spaces.values())  # the reservation was given back


def test_a_running_load_is_reported_only_after_its_last_write(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(deadline_s=0.05, load_threads=1)
    rig.store(1, 2, first_block=0)
    inside, go = threading.Event(), threading.Event()
    scatter = Pages.scatter

    def slow(self: Pages, *args: Any, **kwargs: Any) -> None:
        inside.set()
        assert go.wait(10)
        scatter(self, *args, **kwargs)

    monkeypatch.setattr(Pages, "scatter", slow)
    rig.copies.submit_load(load(rig, 2, [10, 11, 12, 13, 14, 15, 16, 17]))
    assert inside.wait(10)
    time.sleep(0.1)  # the deadline is over
    rig.copies.cancel_load("r")
    assert rig.copies.take_ended() == ([], [])
    go.set()
    ((end,), _) = rig.collect(loads=1)
    assert end.bad_blocks == (14, 15, 16, 17)  # the first chunk was complete, the second never begun
    assert (end.failure, end.good_chunks) == (LoadFailure.DEADLINE, 1)
    rig.copies.close()


def test_a_load_whose_request_goes_meanwhile_stops_between_chunks(lone: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    lone.store(1, 2, first_block=0)
    scatter = Pages.scatter

    def goes(self: Pages, *args: Any, **kwargs: Any) -> None:
        scatter(self, *args, **kwargs)
        lone.copies.cancel_load("r")

    monkeypatch.setattr(Pages, "scatter", goes)
    lone.copies.submit_load(load(lone, 2, [10, 11, 12, 13, 14, 15, 16, 17]))
    ((end,), _) = lone.collect(loads=1)
    assert (end.bad_blocks, end.failure, end.good_chunks) == ((14, 15, 16, 17), LoadFailure.CANCELLED, 1)


def test_a_thread_with_nothing_else_to_do_helps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two threads is inside a copy at the same time, and nothing is reported before the later one is out."""
    rig.store(1, 4, first_block=0)
    before = rig.memory.copy()
    both, names, go = threading.Barrier(2), set(), threading.Event()
    scatter = Pages.scatter

    def slow(self: Pages, *args: Any, **kwargs: Any) -> None:
        name = threading.current_thread().name
        if name not in names:
            names.add(name)
            both.wait(10)
            assert name == "kvkeep-load-0" or go.wait(10)
        scatter(self, *args, **kwargs)

    monkeypatch.setattr(Pages, "scatter", slow)
    rig.copies.submit_load(load(rig, 4, list(range(16, 32))))
    until = time.monotonic() + 10
    while not np.array_equal(rig.memory[:, 28:32], before[:, 12:16]) and time.monotonic() < until:
        time.sleep(0.001)  # the last of three that one thread copied while the other holds its first
    time.sleep(0.05)
    assert rig.copies.take_ended() == ([], [])
    go.set()
    ((end,), _) = rig.collect(loads=1)
    assert (end.bad_blocks, end.failure) == ((), None)
    assert len(names) == 2
    assert np.array_equal(rig.memory[:, 16:32], before[:, :16])


def test_what_fails_in_the_helping_thread_fails_the_load(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(1, 4, first_block=0)
    both, first = threading.Barrier(2), threading.local()
    scatter = Pages.scatter
    helper: list[str] = []

    def broken(self: Pages, *args: Any, **kwargs: Any) -> None:
        if not hasattr(first, "seen"):
            first.seen = True
            if both.wait(10) == 0:
                helper.append(threading.current_thread().name)
                raise OSError("no")
        scatter(self, *args, **kwargs)

    monkeypatch.setattr(Pages, "scatter", broken)
    rig.copies.submit_load(load(rig, 4, list(range(16, 32))))
    ((end,), _) = rig.collect(loads=1)
    assert helper
    assert (end.failure, end.bad_blocks) == (LoadFailure.ERROR, tuple(range(16, 32)))
    assert rig.daemon.references() == 0


def test_who_helps_leaves_for_a_load_that_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short load does not wait for all of a long one."""
    rig.store(1, 4, first_block=0)
    both, names, go = threading.Barrier(3), set(), threading.Event()
    scatter = Pages.scatter

    def slow(self: Pages, *args: Any, **kwargs: Any) -> None:
        name = threading.current_thread().name
        first = name not in names
        if first:
            names.add(name)
            both.wait(10)
        if args[1][0][0] < 24 and not (first and name != owner):  # of the long one all but the helper's first piece
            assert go.wait(10)
        scatter(self, *args, **kwargs)

    owner = ""
    open_read = FakeClient.open_read

    def opens(self: FakeClient, *args: Any, **kwargs: Any) -> Any:
        nonlocal owner
        owner = owner or threading.current_thread().name
        return open_read(self, *args, **kwargs)

    monkeypatch.setattr(FakeClient, "open_read", opens)
    monkeypatch.setattr(Pages, "scatter", slow)
    rig.copies.submit_load(load(rig, 4, [*range(8, 24)], request_id="long"))
    until = time.monotonic() + 10
    while len(names) < 2 and time.monotonic() < until:  # both are in their first piece of it
        time.sleep(0.001)
    rig.copies.submit_load(load(rig, 1, [*range(24, 28)], request_id="short"))
    both.wait(10)
    ended: list[LoadEnd] = []
    while not ended and time.monotonic() < until:
        ended, _ = rig.copies.take_ended()
    assert [end.job.request_id for end in ended] == ["short"]
    go.set()
    ended, _ = rig.collect(loads=1)
    assert (ended[0].job.request_id, ended[0].failure) == ("long", None)


def test_an_error_between_pieces_fails_the_load_and_no_thread_is_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.store(1, 4, first_block=0)
    monkeypatch.setattr(rig.copies, "_stops", lambda *_: 1 / 0)
    rig.copies.submit_load(load(rig, 4, [*range(16, 32)]))
    ((end,), _) = rig.collect(loads=1)
    assert end.failure is LoadFailure.ERROR
    monkeypatch.undo()
    assert all(thread.is_alive() for thread in rig.copies._threads)
    for n in range(2):
        rig.copies.submit_load(load(rig, 4, [*range(16, 32)], request_id=f"r{n}"))
    ended, _ = rig.collect(loads=2)
    assert {end.failure for end in ended} == {None}


def test_loads_that_wait_go_before_helping(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many loads as threads each has its own; nobody is kept waiting by another's pieces."""
    rig.store(1, 2, first_block=0)
    both, began = threading.Barrier(2), threading.local()
    loads: list[str] = []
    open_read = FakeClient.open_read

    def together(self: FakeClient, *args: Any, **kwargs: Any) -> Any:
        loads.append(threading.current_thread().name)
        if not hasattr(began, "seen"):
            began.seen = True
            both.wait(10)
        return open_read(self, *args, **kwargs)

    monkeypatch.setattr(FakeClient, "open_read", together)
    for n in range(2):
        rig.copies.submit_load(load(rig, 2, list(range(8 + 8 * n, 16 + 8 * n)), request_id=f"r{n}"))
    ended, _ = rig.collect(loads=2)
    assert {end.failure for end in ended} == {None}
    assert len(set(loads)) == 2


def test_a_load_that_no_thread_took_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(deadline_s=0.05)
    rig.store(1, 1, first_block=0)
    go = threading.Event()
    open_read = FakeClient.open_read

    def stuck(self: FakeClient, *args: Any, **kwargs: Any) -> Any:
        go.wait(10)
        return open_read(self, *args, **kwargs)

    monkeypatch.setattr(FakeClient, "open_read", stuck)
    for n in range(3):  # two threads
        rig.copies.submit_load(load(rig, 1, [n * 4 + 8, n * 4 + 9, n * 4 + 10, n * 4 + 11], request_id=f"r{n}"))
    until = time.monotonic() + 10
    ended: list[LoadEnd] = []
    while not ended and time.monotonic() < until:
        ended, _ = rig.copies.take_ended()
    assert [(end.job.request_id, end.failure) for end in ended] == [("r2", LoadFailure.DEADLINE)]
    go.set()
    ended, _ = rig.collect(loads=2)
    assert {end.job.request_id for end in ended} == {"r0", "r1"}
    rig.copies.close()


def test_a_cancelled_load_comes_out_once(rig: Rig) -> None:
    rig.store(1, 1, first_block=0)
    for n in range(50):
        rig.copies.submit_load(load(rig, 1, [8, 9, 10, 11], request_id=f"r{n}"))
        rig.copies.cancel_load(f"r{n}")
    ended, _ = rig.collect(loads=50)
    assert {end.job.request_id for end in ended} == {f"r{n}" for n in range(50)}
    assert {end.failure for end in ended} <= {LoadFailure.CANCELLED, None}  # a thread may have been faster
    rig.copies.cancel_load("unknown")


def test_each_end_of_a_store_is_named(rig: Rig) -> None:
    assert rig.store(1, 2, first_block=0).end is StoreEnd.DONE
    assert rig.store(2, 2, first_block=0) == StoreReport(2, StoreEnd.DONE, 0)  # was there
    assert rig.store(3, 3, first_block=0, start=2, name="new") == StoreReport(3, StoreEnd.ORPHAN, 0, 0)
    rig.daemon.capacity = 3
    assert rig.store(4, 4, first_block=0, start=2) == StoreReport(4, StoreEnd.FULL, 1)
    rig.daemon.up = False
    assert rig.store(5, 1, first_block=0, name="away").end is StoreEnd.FAILED


def test_a_store_beyond_its_deadline_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(deadline_s=0.02)
    reserve = FakeClient.reserve

    def slow(self: FakeClient, *args: Any, **kwargs: Any) -> Any:
        found = reserve(self, *args, **kwargs)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(FakeClient, "reserve", slow)
    assert rig.store(1, 2, first_block=0) == StoreReport(1, StoreEnd.FAILED, 0)
    assert rig.daemon.stored() == 0
    rig.copies.close()
