"""The copy threads on a GPU's memory: a job comes out exactly once, and only when the GPU is done with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm.copies import CopyThreads, LoadEnd
from kvkeep.ipc.vllm.cuda import lane, memory
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadJob, NamespaceSpec, StoreEnd, StoreJob, StoreReport
from tests.ipc.conftest import eventually
from tests.ipc.cuda_rig import Model
from tests.vllm.fake_client import FakeClient, FakeDaemon, FakeReading

CHUNKS = 3
BLOCKS = (tuple(range(4 * CHUNKS)), tuple(range(2 * CHUNKS)))
OTHERS = (tuple(range(12, 24)), tuple(range(6, 12)))
HASHES = b"".join(b"%d" % n * HASH_BYTES for n in range(CHUNKS))
DEADLINE_S = 0.1
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")


class Rig:
    """A GPU worker's copy threads, and one chain that is stored."""

    def __init__(self, deadline_s: float = 30.0) -> None:
        self.model, self.guard = Model(), Guard(print)
        self.driver, self.client = self.model.driver, FakeClient(FakeDaemon())
        shard_bytes = self.model.memory.bytes_of(BLOCKS) // CHUNKS
        self.spec = NamespaceSpec({"model": "m"}, shard_bytes, 1, 64, 0)
        self.space = self.client.register(self.spec.manifest, shard_bytes=shard_bytes)
        self.make_threads(deadline_s)

    def make_threads(self, deadline_s: float, load_threads: int = 2) -> None:
        self.copies = CopyThreads(
            self.client,
            self.model.memory,
            shard=0,
            load_threads=load_threads,
            deadline_s=deadline_s,
            log=self.guard.note,
        )

    def store(self, job_id: int = 1) -> None:
        self.copies.submit_store(StoreJob(job_id, HASHES, 0, BLOCKS, 0), self.spec)

    def load(self, request_id: str = "r") -> None:
        lookup = self.client.begin_lookup(self.space, HASHES).poll()
        assert lookup is not None
        assert lookup.ready == CHUNKS
        self.copies.submit_load(LoadJob(request_id, lookup.hand_over(), 0, CHUNKS, OTHERS, 0))

    def stored(self) -> Rig:
        self.store()
        assert self.take(stores=1)[1] == [StoreReport(1, StoreEnd.DONE, CHUNKS)]
        return self

    def with_deadline(self, load_threads: int = 2) -> Rig:
        """From here on there is little time."""
        self.copies.close()
        self.make_threads(DEADLINE_S, load_threads)
        return self

    def take(self, loads: int = 0, stores: int = 0) -> tuple[list[LoadEnd], list[StoreReport]]:
        found: tuple[list[LoadEnd], list[StoreReport]] = ([], [])

        def enough() -> bool:
            for some, more in zip(found, self.copies.take_ended(), strict=True):
                some.extend(more)  # type: ignore[arg-type]
            return len(found[0]) >= loads and len(found[1]) >= stores

        eventually(enough)
        time.sleep(0.02)
        enough()  # in case something comes twice
        assert (len(found[0]), len(found[1])) == (loads, stores)
        return found

    def nothing_comes(self) -> None:
        time.sleep(2 * DEADLINE_S)
        assert self.copies.take_ended() == ([], [])

    def loaded(self) -> bool:
        mine, theirs = (np.zeros(self.model.memory.bytes_of(BLOCKS), np.uint8) for _ in range(2))
        self.model.cpu.gather(mine, BLOCKS)
        self.model.cpu.gather(theirs, OTHERS)
        return bool(np.array_equal(mine, theirs))

    def close(self) -> None:
        self.driver.held = False
        self.driver.complete_fences()
        self.copies.close()
        self.model.close()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "HALF_BYTES", 512)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_what_a_gpu_stores_a_gpu_loads(rig: Rig, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(memory, "AT_ONCE_BYTES", at_once * rig.spec.shard_bytes)
    rig.stored().load()
    ((end,), _) = rig.take(loads=1)
    assert (end.bad_blocks, end.failure, end.good_chunks) == ((), None, CHUNKS)
    assert rig.loaded()
    assert len(rig.driver.fences) == 2, "one for each job"
    assert rig.driver.fence_threads == {threading.current_thread().name}, "taken when it is handed over"


def test_a_load_is_not_reported_while_the_gpu_may_still_write_its_blocks(rig: Rig) -> None:
    rig.stored().with_deadline()
    rig.driver.compute_busy = True
    rig.load()
    eventually(lambda: rig.copies._loads["r"].state.value == "running")
    rig.copies.cancel_load("r")  # it has gone, and its deadline, too: its blocks must not be given away
    rig.nothing_comes()
    rig.driver.complete_fences()
    ((end,), _) = rig.take(loads=1)
    assert end.failure is None, "it came late, but all of it came"
    assert rig.loaded()


def test_a_load_that_is_late_begins_no_other_piece(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AT_ONCE_BYTES", 1)
    rig.stored().with_deadline(load_threads=1)  # each thread has one piece under way
    rig.driver.compute_busy = True
    rig.load()
    eventually(lambda: rig.copies._loads["r"].state.value == "running")
    rig.nothing_comes()
    rig.driver.complete_fences()
    ((end,), _) = rig.take(loads=1)
    assert (end.failure, end.good_chunks) == (LoadFailure.DEADLINE, 1)
    assert set(end.bad_blocks) == {*OTHERS[0][4:], *OTHERS[1][2:]}


def test_a_store_is_not_reported_while_the_gpu_may_still_read_its_blocks(rig: Rig) -> None:
    rig.with_deadline()
    rig.driver.compute_busy = True
    rig.store()
    eventually(lambda: rig.driver.submitted)
    rig.nothing_comes()
    for part in rig.model.memories:
        part[:] = np.random.default_rng(5).integers(0, 256, part.size, dtype=np.uint8)  # the step that it waits for
    rig.driver.complete_fences()
    (_, (report,)) = rig.take(stores=1)
    assert (report.end, report.stored) == (StoreEnd.DONE, CHUNKS)
    wanted = np.zeros(rig.model.memory.bytes_of(BLOCKS), np.uint8)
    rig.model.cpu.gather(wanted[: rig.spec.shard_bytes], (BLOCKS[0][:4], BLOCKS[1][:2]))
    assert np.array_equal(rig.space.chunks[HASHES[:HASH_BYTES]], wanted[: rig.spec.shard_bytes])


def test_chunks_are_validated_after_the_gpu_has_read_them(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.stored()
    moved: list[int] = []

    def validate(self: FakeReading) -> list[bool]:
        moved.append(rig.driver.submitted - rig.driver.moved)
        return [True] * len(self.views)

    monkeypatch.setattr(FakeReading, "validate", validate)
    rig.driver.held = True
    rig.load()
    eventually(lambda: rig.driver.submitted > rig.driver.moved)
    time.sleep(0.02)
    assert moved == []
    rig.driver.held = False
    rig.driver.run()
    rig.take(loads=1)
    assert moved == [0]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_an_error_of_cuda_fails_the_job_once_and_every_job_after_it(rig: Rig, kind: str) -> None:
    rig.stored()
    rig.driver.fail_copy = ILLEGAL
    if kind == "load":
        rig.load()
        ((end,), _) = rig.take(loads=1)
        assert (end.failure, set(end.bad_blocks)) == (LoadFailure.ERROR, {*OTHERS[0], *OTHERS[1]})
    else:
        rig.space.chunks.clear()
        rig.store(2)
        (_, (report,)) = rig.take(stores=1)
        assert report.end is StoreEnd.FAILED
        assert not rig.space.writing, "the reservation was given back"
    assert "illegal memory access" in rig.model.memory.problem
    rig.driver.fail_copy = None
    rig.space.chunks.clear()
    rig.store(3)
    assert rig.take(stores=1)[1][0].end is StoreEnd.FAILED


def test_a_fence_that_cannot_be_had_makes_no_job(rig: Rig) -> None:
    rig.stored()
    rig.driver.fail_fence = ILLEGAL
    for submit in (rig.load, rig.store):
        with pytest.raises(RuntimeError, match="illegal"):
            submit()
    assert rig.copies.take_ended() == ([], [])
    assert rig.model.memory.problem


def test_close_does_not_wait_for_a_gpu_that_hangs(rig: Rig) -> None:
    rig.stored()
    rig.driver.held = True
    rig.load()
    eventually(lambda: rig.driver.submitted > rig.driver.moved)
    rig.copies.close()
    assert rig.copies.take_ended() == ([], [])
