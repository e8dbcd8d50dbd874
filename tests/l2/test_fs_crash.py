"""kill -9 of a process that stores: what it acknowledged is there, nothing partial is, and the accounts are right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from kvkeep.l2.adapter import Item, Key, Outcome
from kvkeep.l2.fs import FsAdapter
from kvkeep.l2.fs_io import FileIO
from tests.l2.conformance import content, key, view
from tests.l2.test_fs import NamedTemps

KEYS = 150


def length_of(number: int) -> int:
    return 1 + 1543 * number  # up to 230 KB, mostly not whole pages


def make(path: Path, capacity_mib: int, named: bool, fsync: str, shared: bool = False) -> FsAdapter:
    config = {"type": "fs", "base_path": str(path), "capacity_gb": capacity_mib / 1024, "fsync": fsync, "io_threads": 2}
    return FsAdapter({**config, "shared": shared}, NamedTemps() if named else FileIO())


def write_until_killed(adapter: FsAdapter, seed: int, report: int) -> None:
    """Reports "+n" when n is acknowledged, "-n" before n is removed: from then on it may be gone."""

    def work(own: int) -> None:
        chance = random.Random(seed * 2 + own)
        while True:
            numbers = [n for n in chance.sample(range(KEYS), 3) if n % 2 == own]  # each thread its own half
            items = [Item(key(n), view(content(key(n), length_of(n))), 0) for n in numbers]
            for number, result in zip(numbers, adapter.store(items), strict=True):
                if result.outcome == Outcome.OK:
                    os.write(report, b"+%d\n" % number)
            if numbers and chance.random() < 0.3:
                os.write(report, b"-%d\n" % numbers[0])
                adapter.delete([key(numbers[0])])

    threads = [threading.Thread(target=work, args=(own,)) for own in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def crash(path: Path, capacity_mib: int, seed: int, after_s: float) -> list[bytes]:
    """The reports of a child that was killed so long after it began to open."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(read)
            adapter = make(path, capacity_mib, named=bool(seed % 2), fsync=("data", "full")[seed // 2 % 2])
            adapter.open()
            os.write(write, b"open\n")
            write_until_killed(adapter, seed, write)
        os._exit(1)
    os.close(write)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with os.fdopen(read, "rb") as reports:
        return reports.read().split()


def crash_often(path: Path, times: int, seed: int, *, evicting: bool) -> None:
    capacity = 6 if evicting else 256
    chance = random.Random(seed)
    safe: set[int] = set()
    opened = acknowledged = 0
    for number in range(times):
        for report in crash(path, capacity, number, chance.choice((0.01, 0.05, 0.15, 0.3)) * (0.5 + chance.random())):
            if report == b"open":
                opened += 1
            else:
                acknowledged += report[:1] == b"+"
                (safe.add if report[:1] == b"+" else safe.discard)(int(report[1:]))
        adapter = make(path, capacity, named=False, fsync="none")
        adapter.open()
        try:
            files = list(path.glob("objects/*/*"))
            used, limit, objects = adapter.usage()
            assert objects == len(files)
            assert used == sum(file.stat().st_blocks * 512 for file in files) <= limit
            assert [file.name for file in path.glob("tmp/*")] == [f"{adapter._roots[0]._id}.lock"], (
                "temporaries are left"
            )
            there = {one for one, _ in adapter.list(b"", 10_000).objects}
            assert len(there) == objects, "a file without a header of ours is visible"
            if not evicting:
                missing = {n for n in safe if key(n) not in there}
                assert not missing, f"acknowledged and lost: {missing}"
            for one in there:
                check(adapter, one)
            adapter._index.check_integrity()
        finally:
            adapter.close()
    print(f"{times} kills, {opened} after open, {acknowledged} stores acknowledged, {len(safe)} objects")
    assert acknowledged


def check(adapter: FsAdapter, one: Key) -> None:
    length = length_of(int.from_bytes(one.chunk, "little"))
    into = view(length)
    assert adapter.load([(one, into)])[0].outcome == Outcome.OK, f"visible, but not whole: {one}"
    assert bytes(into) == content(one, length)


@pytest.mark.parametrize("evicting", [False, True])
def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path, seed: int, evicting: bool) -> None:
    crash_often(tmp_path / "kv", 16, seed, evicting=evicting)


@pytest.mark.soak
@pytest.mark.parametrize("evicting", [False, True])
def test_a_process_killed_often_loses_nothing_that_it_acknowledged(tmp_path: Path, seed: int, evicting: bool) -> None:
    crash_often(tmp_path / "kv", 150, seed, evicting=evicting)


def test_two_that_share_are_killed_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "kv"
    safe: set[int] = set()
    for number in range(8):
        read, write = os.pipe()
        children = []
        for own in (0, 1):
            pid = os.fork()
            if not pid:
                with contextlib.suppress(BaseException):
                    os.close(read)
                    adapter = make(path, 256, named=bool((number + own) % 2), fsync="none", shared=True)
                    adapter.open()
                    while True:  # both store the same keys, in different orders
                        numbers = chance.sample(range(own, KEYS), 2 + own)
                        items = [Item(key(n), view(content(key(n), length_of(n))), 0) for n in numbers]
                        for n, result in zip(numbers, adapter.store(items), strict=True):
                            if result.outcome == Outcome.OK:
                                os.write(write, b"+%d\n" % n)
                os._exit(1)
            children.append(pid)
        os.close(write)
        for pid in children:
            time.sleep(0.02 + 0.2 * chance.random())
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        with os.fdopen(read, "rb") as reports:
            safe |= {int(report[1:]) for report in reports.read().split()}
        adapter = make(path, 256, named=False, fsync="none")
        adapter.open()
        try:
            there = {one for one, _ in adapter.list(b"", 10_000).objects}
            missing = {n for n in safe if key(n) not in there}
            assert not missing, f"acknowledged and lost: {missing}, {adapter.counters}"
            assert adapter.usage().bytes_used == sum(file.stat().st_blocks * 512 for file in path.glob("objects/*/*"))
            for one in there:
                check(adapter, one)
        finally:
            adapter.close()
    assert safe
