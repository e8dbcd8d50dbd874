"""Copies split over threads: every byte arrives, nothing goes on after the end, whatever interrupts it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc import copying
from kvkeep.ipc.copying import copy_all
from tests.ipc.interrupts import at_every_point


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_cores", lambda: 4)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_byte_arrives(threads: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "SPLIT_BYTES", 64)
    monkeypatch.setattr(copying, "PIECE_BYTES", 13)
    rng = random.Random(seed)
    for _ in range(200):
        sizes = [rng.choice((0, 1, 7, 64, 1000)) for _ in range(rng.randrange(6))]
        sources = [np.frombuffer(rng.randbytes(size), np.uint8) for size in sizes]
        targets = [np.zeros(size, np.uint8) for size in sizes]
        copy_all(list(zip(targets, sources, strict=True)), threads)
        assert all((target == source).all() for target, source in zip(targets, sources, strict=True))


class Helpers:
    """The helpers of a copy, watched: how many may write now.

    ``wait_for_begin``: the caller copies only when one has begun; ``slow``: what a helper does before it copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = threading.get_ident()
        self.begun = threading.Event()
        self.writing = self.started = self.ended = 0
        self.wait_for_begin = False
        self.slow: Callable[[], None] = lambda: None
        self._copy, self._run = copying._copy, copying._Helper._run
        self._start = copying._thread.start_new_thread
        monkeypatch.setattr(copying, "_copy", self.copy)
        monkeypatch.setattr(copying._thread, "start_new_thread", self.start)

    def start(self, run: Callable[[], None], args: tuple[()]) -> None:
        self.started += 1

        def counted() -> None:
            run()
            self.ended += 1

        self._start(counted, args)

    def copy(self, pieces: Any) -> None:
        if threading.get_ident() == self.main:
            if self.wait_for_begin:
                assert self.begun.wait(10)
            self._copy(pieces)
            return
        self.writing += 1
        self.begun.set()
        self.slow()
        self._copy(pieces)
        self.writing -= 1


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Helpers:
    return Helpers(monkeypatch)


@pytest.fixture
def raising_signals() -> Iterator[None]:
    """SIGINT and SIGALRM raise KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def large() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(copying.SPLIT_BYTES, np.uint8), np.ones(copying.SPLIT_BYTES, np.uint8)


def test_a_large_copy_uses_a_second_thread_and_a_small_one_does_not(helpers: Helpers) -> None:
    helpers.wait_for_begin = True
    copy_all([large()])
    assert helpers.started == 1
    helpers.wait_for_begin = False
    copy_all([(np.zeros(copying.SPLIT_BYTES // 2, np.uint8), np.ones(copying.SPLIT_BYTES // 2, np.uint8))])
    assert helpers.started == 1


def test_sizes_that_differ_are_refused_before_a_byte_is_copied() -> None:
    targets = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="a source of 9 bytes for a target of 8"):
        copy_all([(targets[0], np.ones(8, np.uint8)), (targets[1], np.ones(9, np.uint8))])
    assert not targets[0].any()


def test_interrupts_wait_for_the_last_byte(helpers: Helpers, raising_signals: None) -> None:
    """The caller gives its extents back after the exception: a helper that still writes would write into others'."""

    def interrupted_three_times() -> None:
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(helpers.main, signal.SIGINT)
        time.sleep(0.1)

    helpers.wait_for_begin, helpers.slow = True, interrupted_three_times
    with pytest.raises(KeyboardInterrupt):
        copy_all([large()])
    assert (helpers.started, helpers.writing) == (1, 0)


def test_two_signals_at_once_wait_for_the_last_byte(helpers: Helpers, raising_signals: None) -> None:
    """The handler of the second runs while the exception of the first is being handled."""

    def interrupted_twice() -> None:
        time.sleep(0.05)
        signal.pthread_kill(helpers.main, signal.SIGINT)
        signal.pthread_kill(helpers.main, signal.SIGALRM)
        time.sleep(0.1)

    helpers.wait_for_begin, helpers.slow = True, interrupted_twice
    for _ in range(5):
        helpers.begun.clear()
        with pytest.raises(KeyboardInterrupt):
            copy_all([large()])
        assert helpers.writing == 0


def test_an_interrupt_at_any_point_leaves_no_helper_that_writes(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SPLIT_BYTES", 64)
    monkeypatch.setattr(copying, "PIECE_BYTES", 13)
    helpers.slow = lambda: time.sleep(0.002)
    target, source = np.zeros(1000, np.uint8), np.ones(1000, np.uint8)
    points = 0
    for point in at_every_point(lambda: copy_all([(target, source)], 3)):
        points += 1
        assert helpers.writing == 0, f"a helper still writes after an interrupt at point {point}"
        target[:] = 7
        until = time.monotonic() + 30
        while helpers.ended < helpers.started:
            assert time.monotonic() < until
        assert (target == 7).all(), f"a helper wrote after an interrupt at point {point}"
    assert points > 50


def test_interrupts_at_random_moments_leave_no_helper_that_writes(
    helpers: Helpers, raising_signals: None, seed: int
) -> None:
    rng, (target, source), interrupts = random.Random(seed), large(), 0
    begin = time.perf_counter()
    copy_all([(target, source)])
    usual = time.perf_counter() - begin
    for _ in range(60):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.choice((rng.uniform(1e-5, usual), rng.uniform(1e-5, 4e-4))))
            copy_all([(target, source)])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
            assert helpers.writing == 0
    assert interrupts


def test_an_error_in_a_helper_is_the_callers(helpers: Helpers) -> None:
    def fail() -> None:
        raise MemoryError("in the helper")

    helpers.wait_for_begin, helpers.slow = True, fail
    with pytest.raises(MemoryError, match="in the helper"):
        copy_all([large()])


def test_no_more_threads_is_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying._thread, "start_new_thread", refuse)
    target, source = large()
    copy_all([(target, source)])
    assert target.all()
