"""Files of evicted objects that are written into again: what they save, and what they must never cost."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.l2.adapter import Outcome
from kvkeep.l2.fs import FsAdapter
from kvkeep.l2.fs_io import FileIO
from tests.l2.conformance import MIB, OBJECT, OK, get, key, put
from tests.l2.test_fs import NamedTemps, file_of, flip
from tests.l2.test_fs_media import ROOM, Faulty, du, fill, needs_root, small_disk

__all__ = ["small_disk"]
Make = Callable[..., FsAdapter]
LIMIT = 8 * MIB


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    adapters: list[FsAdapter] = []

    def make(path: Path = tmp_path / "kv", io: FileIO | None = None, **more: Any) -> FsAdapter:
        adapter = FsAdapter({"type": "fs", "base_path": str(path), "capacity_gb": LIMIT / 2**30, **more}, io)
        adapters.append(adapter)
        adapter.open()
        return adapter

    yield make
    for adapter in adapters:
        adapter.close()
        adapter._index.check_integrity()


def temporaries(path: Path) -> list[Path]:
    return [file for file in path.glob("tmp/*") if not file.name.endswith(".lock")]


def fill_up(adapter: FsAdapter, first: int = 0, count: int = 3 * LIMIT // ROOM, length: int = OBJECT) -> None:
    for number in range(first, first + count):
        assert put(adapter, key(number), length=length) == [OK]


def inodes(path: Path) -> set[int]:
    return {file.stat().st_ino for of in ("objects/*/*", "tmp/*") for file in path.glob(of)}


@pytest.mark.parametrize("io", [FileIO, NamedTemps])
@pytest.mark.parametrize("fsync", ["none", "data", "full"])
def test_in_a_full_directory_hardly_a_file_is_new(
    make: Make, tmp_path: Path, io: type[FileIO], fsync: str, seed: int
) -> None:
    adapter = make(io=io(), fsync=fsync, eviction={"eviction_ratio": 0.3})
    fill_up(adapter)
    before, reused = inodes(tmp_path / "kv"), adapter.counters["reused"]
    fill_up(adapter, 1000)
    assert adapter.counters["reused"] - reused > 0.7 * (3 * LIMIT // ROOM)  # the janitor lets some go, to its watermark
    assert len(inodes(tmp_path / "kv") & before) > 0.6 * len(before)
    adapter.close()
    assert temporaries(tmp_path / "kv") == []
    assert LIMIT // 2 < adapter.usage().bytes_used == du(tmp_path / "kv") <= LIMIT
    adapter = make(fsync=fsync)
    found = get(adapter, *[key(n) for n in range(1000, 1000 + 3 * LIMIT // ROOM)])
    assert found.count(OK) == adapter.usage().objects
    assert adapter.counters["corrupt"] == 0


def test_the_limit_holds_at_every_moment_and_every_load_is_right(make: Make, tmp_path: Path, seed: int) -> None:
    """Several sizes from several threads, evicted by need and ahead of it, deleted, erased and compacted meanwhile."""
    adapter = make(eviction={"trigger_watermark": 0.8, "eviction_ratio": 0.2})
    most: list[int] = []
    failed: list[object] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            most.append(adapter.usage().bytes_used)
            time.sleep(0.0005)

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        try:
            for _ in range(250):
                n = rng.randrange(120)
                length = (OBJECT, OBJECT, 50_000, 4096)[n % 4]
                what = rng.random()
                if what < 0.55:
                    assert set(put(adapter, key(n), length=length)) <= {OK, Outcome.BUSY, Outcome.NO_SPACE}
                elif what < 0.95:
                    assert set(get(adapter, key(n), length=length)) <= {OK, Outcome.MISS}
                elif what < 0.97:
                    adapter.delete([key(n)])
                elif what < 0.99:
                    adapter.erase([key(n)])
                else:
                    list(adapter.compact())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert failed == []
    assert max(most) <= LIMIT
    assert adapter.counters["corrupt"] == 0
    assert adapter.counters["reused"] > 10
    adapter.close()
    assert adapter.usage().bytes_used == du(tmp_path / "kv")


def test_spares_of_another_size_make_room(make: Make, tmp_path: Path) -> None:
    adapter = make(eviction={"eviction_ratio": 0.5})
    fill_up(adapter)
    while adapter._room.evict(ROOM):  # all that may be kept is kept
        pass
    assert temporaries(tmp_path / "kv")
    fill_up(adapter, length=3 * OBJECT, count=8)
    adapter.close()
    assert adapter.usage().bytes_used == du(tmp_path / "kv") <= LIMIT


def test_spares_go_before_the_watermark_is_passed(make: Make) -> None:
    adapter = make(eviction={"trigger_watermark": 0.5, "eviction_ratio": 0.5})
    high = LIMIT // 2
    fill_up(adapter, count=14)
    assert adapter._room.evict(8 * ROOM) == 8
    fill_up(adapter, 100, count=2, length=3 * OBJECT)
    until = time.monotonic() + 10
    while adapter.usage().bytes_used > high and time.monotonic() < until:
        time.sleep(0.01)
    assert adapter.usage().bytes_used <= high
    assert adapter.usage().objects == 8, "no object had to go"


def test_what_is_being_read_is_not_written_over(make: Make, tmp_path: Path) -> None:
    io = Faulty({"operation": "readv", "fault": "stall", "seconds": 1.0, "at": [0]})
    adapter = make(io=io, io_threads=1)
    assert put(adapter, key(0)) == [OK]
    found: list[Outcome] = []
    reader = threading.Thread(target=lambda: found.extend(get(adapter, key(0))))
    io.on = True
    reader.start()
    time.sleep(0.1)
    io.on = False
    fill_up(adapter, 1)
    assert adapter.counters["reused"]
    reader.join()
    assert found == [OK]


def test_a_pin_holds_for_its_name_when_another_file_comes_under_it(make: Make) -> None:
    adapter = make()
    put(adapter, key(1))
    name = adapter._place(key(1))[1]
    assert adapter._index.begin_read(name)
    adapter.delete([key(1)])
    put(adapter, key(1))
    assert adapter._room.evict(1) == 0, "who pinned the name may only now open the file"
    assert adapter._index.begin_read(name)
    adapter._index.end_read(name)
    assert adapter._room.evict(1) == 0, "one of the two still reads"
    adapter._index.end_read(name)
    assert adapter._room.evict(1) == 1


class Once(FileIO):
    """Does something once ``at`` a system call: after an open or a read, before an unlink."""

    def __init__(self, at: str) -> None:
        self.at, self.do = at, list[Callable[[], object]]()

    def _is_at(self, what: str) -> None:
        if what == self.at and self.do:
            self.do.pop()()

    def open(self, path: str, flags: int, *, dir_fd: int) -> int:
        fd = super().open(path, flags, dir_fd=dir_fd)
        self._is_at("open")
        return fd

    def readv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        done = super().readv(fd, buffers, offset)
        self._is_at("readv")
        return done

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._is_at("unlink")
        super().unlink(path, dir_fd=dir_fd)


def check(adapter: FsAdapter, how: str) -> int:
    """Corrupt files, or files that no key leads to, by its own word."""
    if how == "verify":
        return adapter.verify(b"", 1 << 30).corrupt
    return sum(count for what, count in adapter.compact() if what == "unreachable_files_removed")


@pytest.mark.parametrize("how", ["verify", "compact"])
def test_a_check_that_reads_a_file_being_written_over_removes_nothing(make: Make, how: str) -> None:
    """An object on its way out is opened; then its file is used again, and it is stored anew under its old name."""
    io = Once("open")
    adapter = make(io=io)
    put(adapter, key(1))
    leaving = adapter._index.victims(1)

    def written_over() -> None:
        assert adapter._room._evict_all(leaving, None) == 1
        assert put(adapter, key(2), key(1)) == [OK, OK]

    before = adapter.counters["reused"]
    io.do.append(written_over)
    assert check(adapter, how) == 0
    assert io.do == []
    assert adapter.counters["reused"] == before + 1
    assert adapter.counters["corrupt"] == 0
    assert get(adapter, key(1), key(2)) == [OK, OK]


@pytest.mark.parametrize("how", ["verify", "compact"])
def test_a_check_removes_what_it_saw_and_not_what_was_stored_since(make: Make, how: str) -> None:
    io = Once("readv")
    adapter = make(io=io)
    put(adapter, key(1))
    flip(file_of(adapter, key(1)), 20)  # in the header
    io.do.append(lambda: (adapter.delete([key(1)]), put(adapter, key(1))))
    assert check(adapter, how) == 0
    assert io.do == []
    assert adapter.counters["corrupt"] == 0
    assert get(adapter, key(1)) == [OK]


@pytest.mark.parametrize("damage", ["header", "length"])
@pytest.mark.parametrize("how", ["verify", "compact"])
def test_while_a_file_is_removed_nothing_is_stored_under_its_name(
    make: Make, tmp_path: Path, how: str, damage: str
) -> None:
    io = Once("unlink")
    adapter = make(io=io)
    put(adapter, key(1))
    file = file_of(adapter, key(1))
    if damage == "header":
        flip(file, 20)
    else:
        os.truncate(file, 5000)
    said: list[Outcome] = []
    io.do.append(lambda: said.extend(put(adapter, key(1), length=OBJECT - 4096)))
    check(adapter, how)
    assert said == [Outcome.BUSY]
    assert get(adapter, key(1)) == [Outcome.MISS]
    assert put(adapter, key(1)) == get(adapter, key(1)) == [OK]
    assert adapter.usage().bytes_used == du(tmp_path / "kv")


def test_what_is_deleted_leaves_the_medium(make: Make, tmp_path: Path) -> None:
    adapter = make()
    put(adapter, key(1), key(2))
    adapter.delete([key(1)])
    assert temporaries(tmp_path / "kv") == []
    assert adapter._room.evict(1)
    assert len(temporaries(tmp_path / "kv")) == 1
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == ROOM
    adapter.erase([key(3)])  # "forget": also what of it was evicted before
    assert temporaries(tmp_path / "kv") == []
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == 0


def test_a_compaction_gives_them_back(make: Make, tmp_path: Path) -> None:
    adapter = make()
    put(adapter, key(1))
    adapter._room.evict(1)
    assert dict(adapter.compact())["spare_bytes_removed"] == ROOM
    assert temporaries(tmp_path / "kv") == []
    assert adapter.usage().bytes_used == 0


def test_a_backup_by_hard_links_does_not_change(make: Make, tmp_path: Path) -> None:
    adapter = make()
    put(adapter, key(0))
    backup = tmp_path / "backup"
    os.link(file_of(adapter, key(0)), backup)
    before = backup.read_bytes()
    fill_up(adapter, 1)
    assert adapter.counters["reused"]
    assert backup.read_bytes() == before


def test_where_others_may_be_reading_no_file_is_used_again(make: Make, tmp_path: Path) -> None:
    adapter = make(shared=True)
    put(adapter, key(0))
    with file_of(adapter, key(0)).open("rb") as file:
        fill_up(adapter, 1)
        assert adapter.counters["evicted"] > 0
        assert adapter.counters["reused"] == 0
        assert temporaries(tmp_path / "kv") == []
        file.seek(4096)
        assert len(file.read()) == OBJECT


def test_a_spare_that_will_not_go_stays_counted(make: Make, tmp_path: Path) -> None:
    io = Faulty({"operation": "unlink", "fault": "EIO"})
    adapter = make(io=io)
    put(adapter, key(1))
    adapter._room.evict(1)
    io.on = True
    assert adapter._room.drop_spares() == 0
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == ROOM
    io.on = False
    assert adapter._room.drop_spares() == ROOM
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == 0


def test_spares_that_somebody_removed_are_new_files(make: Make, tmp_path: Path) -> None:
    adapter = make()
    fill_up(adapter)
    adapter._room.evict(1)
    assert temporaries(tmp_path / "kv")
    for file in temporaries(tmp_path / "kv"):
        file.unlink()
    fill_up(adapter, 1000)
    adapter.close()
    assert adapter.usage().bytes_used == du(tmp_path / "kv") <= LIMIT


def test_a_write_that_fails_over_a_spare_leaves_nothing(make: Make, tmp_path: Path) -> None:
    io = Faulty(
        {"operation": "writev", "fault": "EIO", "at": [0]}, {"operation": "writev", "fault": "EINVAL", "at": [1]}
    )
    adapter = make(io=io)
    put(adapter, key(1))
    adapter._room.evict(1)
    io.on = True
    assert put(adapter, key(2)) == [Outcome.IO_ERROR]
    assert temporaries(tmp_path / "kv") == []
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == 0
    io.on = False
    put(adapter, key(1))
    adapter._room.evict(1)
    io.on = True
    assert put(adapter, key(2)) == ([OK] if adapter.counters["direct_io_fallbacks"] else [Outcome.IO_ERROR])
    assert adapter.usage().bytes_used == du(tmp_path / "kv")


@needs_root
def test_on_a_full_disk_spares_go_first(small_disk: Path, make: Make) -> None:
    adapter = make(small_disk, eviction={"eviction_ratio": 0.5})
    assert put(adapter, *[key(n) for n in range(10)]) == [OK] * 10
    assert adapter._room.evict(4 * ROOM) == 4
    fill(small_disk / "filler")
    assert put(adapter, key(100), length=OBJECT + 4096) == [OK]
    assert adapter.usage().objects == 7, "none of the objects had to go"
