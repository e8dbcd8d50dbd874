"""A real mover process, fed by hand: order, deadlines, retries, what it does to extents, and how it ends."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.daemon import movers
from kvkeep.daemon.breaker import Circuit
from kvkeep.daemon.movers import MANAGE_JOBS, Mover, Phase
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.l2.maintenance import Step, What

SIZE = 4096
ARENA = 16 << 20
SLICED = {"SLICE_BYTES": SIZE, "CALM_SLICE_BYTES": SIZE, "MAX_ASIDE_S": 60.0}  # a chunk a slice
ROOT = str(Path(__file__).parents[2])


class Bench:
    """A mover, an arena for it, and what it answered."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.fd = os.memfd_create("kvk-test-arena")
        os.ftruncate(self.fd, ARENA)
        self.data = np.frombuffer(mmap.mmap(self.fd, ARENA), dtype=np.uint8)
        self.answers: list[tuple[str, list[int]]] = []
        plugin = {"type": "plugin", "module_path": "tests.l2.slow_adapter", "class_name": "SlowAdapter"}
        self.mover = Mover(
            0,
            {**plugin, "folder": str(folder), **config},
            data_fd=self.fd,
            data_bytes=ARENA,
            lease_fd=self.fd,
            log_level="debug",
            log_format="text",
        )
        self.mover.start()

    def pump(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        until = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < until, "did not happen in time"
            self.mover.on_child()
            self.mover.receive()
            self.mover.tick(time.monotonic())
            time.sleep(0.002)

    def serving(self) -> None:
        self.pump(lambda: self.mover.phase is Phase.SERVING)

    def done(self, name: str) -> Callable[[Sequence[int]], None]:
        return lambda codes: self.answers.append((name, list(codes)))

    def put(self, name: str, chunks: Sequence[int], *, deadline_s: float = 20, offset: int = 0) -> None:
        """Chunk i lies at i * SIZE (+ offset)."""
        job = j.Put(self.mover.next_id(), time.monotonic() + deadline_s, *self._where(chunks, offset), b"")
        self.mover.submit(job, self.done(name), nbytes=len(chunks) * SIZE)

    def get(self, name: str, chunks: Sequence[int], *, deadline_s: float = 20, offset: int = 0) -> None:
        job = j.Get(self.mover.next_id(), time.monotonic() + deadline_s, *self._where(chunks, offset))
        self.mover.submit(job, self.done(name), nbytes=len(chunks) * SIZE)

    def find(self, name: str, chunks: Sequence[int]) -> None:
        namespace, shards, keys, *_ = self._where(chunks, 0)
        self.mover.submit(j.Find(self.mover.next_id(), time.monotonic() + 20, namespace, shards, keys), self.done(name))

    @staticmethod
    def _where(chunks: Sequence[int], offset: int) -> tuple[bytes, int, bytes, int, int, bytes]:
        keys = b"".join(chunk.to_bytes(32, "little") for chunk in chunks)
        offsets = np.array([chunk * SIZE + offset for chunk in chunks], dtype="<u8").tobytes()
        return bytes(range(32)), 1, keys, SIZE, SIZE, offsets

    def answered(self, count: int) -> dict[str, list[int]]:
        self.pump(lambda: len(self.answers) >= count)
        return dict(self.answers)

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def began(self, what: str, chunk: int) -> bool:
        return f"{what} {chunk.to_bytes(32, 'little').hex()} 0" in self.log()

    def close(self) -> None:
        self.mover.stop(time.monotonic() + 5)
        self.mover.close()
        os.close(self.fd)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    made: list[Bench] = []

    def make(**config: Any) -> Bench:
        made.append(Bench(tmp_path, **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_was_put_is_found_and_got(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    b.data[: 3 * SIZE] = np.arange(3 * SIZE, dtype=np.uint64).astype(np.uint8)
    b.put("put", [0, 1, 2])
    assert b.answered(1) == {"put": [Code.OK] * 3}
    b.find("find", [0, 1, 2, 3])
    b.get("get", [0, 1, 2, 3], offset=8 << 20)
    answers = b.answered(3)
    assert answers["find"] == [Code.OK, Code.OK, Code.OK, Code.MISS]
    assert answers["get"] == [Code.OK, Code.OK, Code.OK, Code.MISS]
    assert (b.data[8 << 20 : (8 << 20) + 3 * SIZE] == b.data[: 3 * SIZE]).all()


def test_an_overdue_job_is_answered_and_not_started(bench: Callable[..., Bench]) -> None:
    b = bench(load_s=0.3, threads=1)
    b.serving()
    b.get("first", [0])
    b.get("late", [1, 2], deadline_s=0.1)
    assert b.answered(2)["late"] == [Code.EXPIRED] * 2
    assert sum(line.startswith("load") for line in b.log()) == 1
    assert b.mover.breaker.closed, "the medium is not to blame for a queue"


def test_loads_go_before_stores_and_one_thread_never_stores(bench: Callable[..., Bench]) -> None:
    b = bench(store_s=0.4, threads=2)
    b.serving()
    for i in range(6):
        b.put(f"put {i}", [i])
    b.get("get", [100])
    order = [name for name, _ in (b.answered(7) and b.answers)]
    assert order[0] == "get", "while one store runs and five wait, the other thread loads"


def test_a_store_that_steps_aside_takes_no_wakeup_of_an_idle_thread(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is woken by a job is a matter of luck, so this is tried often; and the end of any job wakes everybody."""
    monkeypatch.setattr(movers, "MEASURE_S", 1e6)
    b = bench(threads=6, mover=SLICED)
    b.serving()
    for first in range(0, 400, 100):
        _loads_beside_a_store_that_steps_aside(b, first)


def _loads_beside_a_store_that_steps_aside(b: Bench, first: int) -> None:
    b.answers.clear()
    (b.folder / "hold").touch()
    b.get("held", [first])
    b.pump(lambda: b.began("load", first))
    b.put("put", [first + 1, first + 2])
    b.pump(lambda: b.began("store", first + 1))
    for n in range(3):
        b.find(f"found {n}", [first])
    b.answered(3)
    for at in range(first + 10, first + 14):  # a thread for each
        b.get(f"got {at}", [at])
        b.pump(partial(b.began, "load", at))
    assert not b.began("store", first + 2), "it steps aside"
    (b.folder / "hold").unlink()
    b.answered(9)
    assert b.began("store", first + 2)


def test_a_fault_is_tried_again_and_then_reported(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    (b.folder / "fail").touch()
    b.put("put", [1])
    assert b.answered(1) == {"put": [Code.IO_ERROR]}
    assert sum(line.startswith("store") for line in b.log()) == 3
    (b.folder / "fail").unlink()
    b.put("again", [1])
    assert b.answered(2)["again"] == [Code.OK]


def test_an_adapter_that_raises_without_extents_fails_its_job_only(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    (b.folder / "raise").touch()
    b.find("find", [1, 2])
    assert b.answered(1) == {"find": [Code.UNAVAILABLE] * 2}
    (b.folder / "raise").unlink()
    b.put("again", [1])
    assert b.answered(2)["again"] == [Code.OK]
    assert b.mover.child.restarts == 0


def test_an_adapter_that_raises_with_extents_ends_its_mover(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    (b.folder / "raise").touch()
    b.get("get", [1])
    assert b.answered(1) == {"get": [Code.LOST]}
    (b.folder / "raise").unlink()
    b.serving()
    b.put("again", [1])
    assert b.answered(2)["again"] == [Code.OK]


def test_an_extent_outside_the_arena_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    b.get("get", [1], offset=ARENA - SIZE)
    assert b.answered(1) == {"get": [Code.UNAVAILABLE]}


def test_the_breaker_opens_and_a_probe_closes_it(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    (b.folder / "fail").touch()
    for i in range(3):
        b.put(f"put {i}", [i])
    b.answered(3)
    assert b.mover.breaker.circuit is not Circuit.CLOSED
    assert not b.mover.available
    assert any("left alone" in reason for reason in b.mover.reasons())
    b.pump(lambda: sum(line.startswith("store") for line in b.log()) >= 11)  # 9 by the jobs, then probes that fail
    assert not b.mover.available
    (b.folder / "fail").unlink()
    b.pump(lambda: b.mover.available)
    assert b.mover.reasons() == []


def test_a_medium_in_trouble_is_a_fault_of_every_job_and_no_miss(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    (b.folder / "trouble").touch()
    b.find("find", [1])
    assert b.answered(1) == {"find": [Code.UNAVAILABLE]}
    assert b.log() == [], "the adapter was not asked"
    assert any("the folder has a file 'trouble'" in reason for reason in b.mover.reasons())
    for n in range(2):
        b.find(f"find {n}", [1])
    b.answered(3)
    assert not b.mover.available


def test_a_medium_in_trouble_is_noticed_when_it_is_measured(bench: Callable[..., Bench], tmp_path: Path) -> None:
    (tmp_path / "trouble").touch()
    b = bench()
    b.serving()
    b.pump(lambda: any("the folder has a file 'trouble'" in reason for reason in b.mover.reasons()))


def test_jobs_of_a_killed_mover_fail_and_the_next_one_gets_none_of_them(bench: Callable[..., Bench]) -> None:
    b = bench(store_s=5.0, threads=2)
    b.serving()
    for i in range(10):
        b.put(f"put {i}", [i])
    b.pump(lambda: any(line.startswith("store") for line in b.log()))
    os.kill(b.mover.child.pid, signal.SIGKILL)
    answers = b.answered(10)
    assert set(map(tuple, answers.values())) == {(Code.LOST,)}
    before = len(b.log())
    b.serving()
    b.find("find", [0])
    assert b.answered(11)["find"] == [Code.MISS]
    assert [line.split()[0] for line in b.log()[before:]] == ["lookup"]


def test_a_stopped_mover_is_killed_and_only_then_its_jobs_are_over(bench: Callable[..., Bench]) -> None:
    b = bench(load_s=0.05)
    b.serving()
    os.kill(b.mover.child.pid, signal.SIGSTOP)
    late: list[float] = []
    job = j.Get(b.mover.next_id(), time.monotonic() + 0.1, *b._where([1], 0))
    began = time.monotonic()
    b.mover.submit(job, b.done("get"), late=lambda: late.append(time.monotonic() - began))
    b.pump(lambda: bool(late))
    assert not b.answers, "it may still write"
    assert b.answered(1) == {"get": [Code.LOST]}
    assert b.mover.child.restarts <= 1
    b.serving()


def test_one_that_cannot_open_says_why_and_is_tried_again(bench: Callable[..., Bench], tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    b = bench()
    b.pump(lambda: any("remove its file 'refuse'" in reason for reason in b.mover.reasons()))
    (tmp_path / "refuse").unlink()
    b.serving()
    assert b.mover.reasons() == []


def test_a_stop_gives_back_what_waits_and_closes_the_adapter(bench: Callable[..., Bench]) -> None:
    b = bench(store_s=0.3, threads=2)
    b.serving()
    for i in range(5):
        b.put(f"put {i}", [i])
    b.pump(lambda: any(line.startswith("store") for line in b.log()))
    b.mover.stop(time.monotonic() + 5)
    answers = dict(b.answers)
    assert answers["put 0"] == [Code.OK]
    assert answers["put 4"] in ([Code.STOPPING], [Code.LOST])  # LOST: it had not read it yet
    assert b.log()[-1] == "close"


def test_management_comes_last_and_its_problems_are_no_fault_of_the_medium(bench: Callable[..., Bench]) -> None:
    b = bench(threads=1, store_s=0.5)
    steps: list[tuple[Step | None, str]] = []
    b.mover.manage(What.LIST, lambda *answer: steps.append(answer))
    assert steps[0][0] is None
    assert "not open" in steps[0][1]
    b.serving()
    b.put("first", [1])
    b.pump(lambda: any(line.startswith("store") for line in b.log()))  # the one worker is busy
    b.mover.manage(What.LIST, lambda *answer: steps.append(answer))
    b.put("second", [2])
    b.get("get", [1])
    b.answered(3)
    b.pump(lambda: len(steps) == 2)
    assert [line.split()[0] for line in b.log()] == ["store", "load", "store", "list"]
    step, problem = steps[1]
    assert (step, problem) == (Step(), "")
    for _ in range(MANAGE_JOBS + 1):
        b.mover.manage(What.LIST, lambda *answer: steps.append(answer))
    assert "steps of management to do already" in steps[2][1]
    b.pump(lambda: len(steps) == 3 + MANAGE_JOBS)
    assert b.mover.breaker.circuit is Circuit.CLOSED
    assert b.mover.open_jobs == 0


def test_a_step_whose_mover_dies_is_answered_once(bench: Callable[..., Bench]) -> None:
    b = bench(threads=1, store_s=2)
    b.serving()
    steps: list[tuple[Step | None, str]] = []
    b.put("put", [1])
    b.pump(lambda: any(line.startswith("store") for line in b.log()))
    b.mover.manage(What.LIST, lambda *answer: steps.append(answer))
    assert b.mover.is_storing(b"")
    assert not b.mover.is_storing(bytes(32))
    os.kill(b.mover.child.pid, signal.SIGKILL)
    b.pump(lambda: bool(steps))
    assert steps == [(None, "l2-0 (plugin) did not do it: its process ended meanwhile; ask again when it is back")]
    assert not b.mover.is_storing(b"")


def test_a_step_on_a_medium_in_trouble_says_what_it_is(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.serving()
    (b.folder / "trouble").touch()
    steps: list[tuple[Step | None, str]] = []
    b.mover.manage(What.LIST, lambda *answer: steps.append(answer))
    b.pump(lambda: bool(steps))
    assert steps == [(None, "l2-0 (plugin) did not do it: the folder has a file 'trouble'")]
