"""Copies split over threads: every byte arrives, nothing goes on after the end, whatever interrupts it."""

from __future__ import annotations

import random
import signal
import threading
import time

import numpy as np
import pytest

from kvkeep.ipc import copying
from kvkeep.ipc.copying import copy_all


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


def test_a_large_copy_uses_a_second_thread_and_a_small_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    real = copying._copy
    monkeypatch.setattr(copying, "_copy", lambda pairs: (seen.add(threading.get_ident()), real(pairs))[1])
    for size, threads in ((copying.SPLIT_BYTES, 2), (copying.SPLIT_BYTES // 2, 1)):
        seen.clear()
        copy_all([(np.zeros(size, np.uint8), np.ones(size, np.uint8))])
        assert len(seen) == threads


def test_sizes_that_differ_are_refused_before_a_byte_is_copied() -> None:
    targets = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="a source of 9 bytes for a target of 8"):
        copy_all([(targets[0], np.ones(8, np.uint8)), (targets[1], np.ones(9, np.uint8))])
    assert not targets[0].any()


def test_an_interrupt_waits_for_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives its extents back after the exception: a helper that still writes would write into others'."""
    ended = []
    waiting = threading.Event()
    main = threading.get_ident()
    real_handler = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def slow(_pieces: object) -> None:
        if threading.get_ident() == main:
            waiting.set()
            return
        waiting.wait(5)
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        ended.append(True)

    monkeypatch.setattr(copying, "_copy", slow)
    signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            copy_all([(np.zeros(copying.SPLIT_BYTES, np.uint8), np.zeros(copying.SPLIT_BYTES, np.uint8))])
    finally:
        signal.signal(signal.SIGINT, real_handler)
    assert ended == [True]


def test_an_error_in_a_helper_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("in the helper")

    monkeypatch.setattr(copying, "_copy", fails)
    with pytest.raises(MemoryError, match="in the helper"):
        copy_all([(np.zeros(copying.SPLIT_BYTES, np.uint8), np.zeros(copying.SPLIT_BYTES, np.uint8))])


def test_no_more_threads_is_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    target = np.zeros(copying.SPLIT_BYTES, np.uint8)
    copy_all([(target, np.ones_like(target))])
    assert target.all()
