"""Shared flushes: everybody gets one that began after they asked, and its error."""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep.l2 import raw_io
from kvkeep.l2.raw_io import Flusher


class Device:
    """Stands in for fdatasync: each call waits for `release` if there is one, and can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []  # (begin, end) on one counter
        self.clock = itertools.count()
        self.hold: threading.Event | None = None
        self.began = threading.Event()
        self.fail = 0
        monkeypatch.setattr(raw_io, "sync_now", self.sync)

    def sync(self, fd: int) -> int:
        begin = next(self.clock)
        number, self.fail = self.fail, 0
        self.began.set()
        if self.hold is not None:
            self.hold.wait(10)
        time.sleep(0.0005)
        self.spans.append((begin, next(self.clock)))
        return number


def test_who_asks_while_one_is_running_shares_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.hold = threading.Event()
    flusher = Flusher(-1)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(flusher.flush)
        assert device.began.wait(10)
        device.fail = errno.EIO  # of the second
        others = [pool.submit(flusher.flush) for _ in range(7)]
        time.sleep(0.1)
        assert not any(future.done() for future in others)  # the one that runs may have begun before their writes
        device.hold.set()
        assert first.result(10) == 0
        assert [future.result(10) for future in others] == [errno.EIO] * 7
    assert len(device.spans) == 2
    assert flusher.flush() == 0


def test_a_flush_begins_after_the_call_and_ends_before_its_return(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    device = Device(monkeypatch)
    flusher = Flusher(-1)

    def work(number: int) -> list[tuple[int, int]]:
        rng, calls = random.Random(seed + number), []
        for _ in range(40):
            time.sleep(rng.random() * 0.002)
            asked = next(device.clock)
            assert flusher.flush() == 0
            calls.append((asked, next(device.clock)))
        return calls

    with ThreadPoolExecutor(6) as pool:
        calls = [call for made in pool.map(work, range(6)) for call in made]
    for asked, returned in calls:
        assert any(asked < begin and end < returned for begin, end in device.spans)
    assert len(device.spans) < len(calls)
