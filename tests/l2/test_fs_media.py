"""The fs adapter and its file system: full, refusing, shared, tampered with, remounted."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.l2.adapter import AdapterError, Item, Key, Outcome
from kvkeep.l2.faults import Schedule
from kvkeep.l2.fs import FsAdapter
from kvkeep.l2.fs_io import FileIO, file_bytes
from kvkeep.l2.record import HEADER_BYTES, payload_checksum, unpack
from kvkeep.shm.policies import POLICIES
from tests.conftest import unique_name
from tests.l2.conformance import MIB, MISS, OBJECT, OK, content, get, key, put, view
from tests.l2.test_fs import NamedTemps, file_of, flip

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
ROOM = OBJECT + 4096


def du(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for of in ("objects/*/*", "tmp/*.*") for path in root.glob(of))


def fill(path: Path) -> None:
    """To the last block."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FsAdapter]]:
    adapters: list[FsAdapter] = []

    def make(path: Path = tmp_path / "kv", io: FileIO | None = None, *, opened: bool = True, **more: Any) -> FsAdapter:
        adapter = FsAdapter({"type": "fs", "base_path": str(path), "capacity_gb": 16 / 1024, **more}, io)
        adapters.append(adapter)
        if opened:
            adapter.open()
        return adapter

    yield make
    for adapter in adapters:
        was_open = adapter._is_open
        adapter.close()
        adapter._index.check_integrity()
        if was_open and not adapter._shared:
            assert adapter._index.used <= adapter._index.limit


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    path = tmp_path / unique_name("tmpfs")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "kvk-test", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def loop_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB in a file."""
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if mkfs is None:
        pytest.skip("no mkfs.ext4")
    image, path = tmp_path / "image", tmp_path / unique_name("ext4")
    image.touch()
    os.truncate(image, 64 * MIB)
    path.mkdir()
    subprocess.run([mkfs, "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


class Faulty(FileIO):
    """System calls that fail on schedule."""

    def __init__(self, *rules: dict[str, object], seed: int = 1) -> None:
        self.schedule = Schedule(rules, seed, ("open", "writev", "readv", "sync", "link", "rename", "unlink"))
        self.on = False

    def _may(self, operation: str) -> bool:
        """True = the transfer is cut short."""
        fault = self.schedule.next(operation) if self.on else None
        if fault is not None and fault.kind == "stall":
            time.sleep(fault.seconds)
        elif fault is not None and fault.kind != "short":
            raise OSError(getattr(errno, fault.kind), fault.kind)
        return fault is not None and fault.kind == "short"

    def open(self, path: str, flags: int, *, dir_fd: int) -> int:
        self._may("open")
        return super().open(path, flags, dir_fd=dir_fd)

    def writev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return super().writev(fd, buffers[:1] if self._may("writev") else buffers, offset)

    def readv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return super().readv(fd, buffers[:1] if self._may("readv") else buffers, offset)

    def sync_data(self, fd: int) -> None:
        self._may("sync")
        super().sync_data(fd)

    def link(self, fd: int, path: str, *, dir_fd: int) -> None:
        self._may("link")
        super().link(fd, path, dir_fd=dir_fd)

    def rename(self, source: str, target: str, *, source_fd: int, target_fd: int) -> None:
        self._may("rename")
        super().rename(source, target, source_fd=source_fd, target_fd=target_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._may("unlink")
        super().unlink(path, dir_fd=dir_fd)


# ---- what others can see ---------------------------------------------------------------------------------------------


def test_only_the_owner_can_read_anything_and_names_tell_nothing(
    tmp_path: Path, make: Callable[..., FsAdapter]
) -> None:
    old = os.umask(0)
    try:
        first = make(tmp_path / "one")
        second = make(tmp_path / "two")
        assert put(first, key(1), key(2)) == put(second, key(1), key(2)) == [OK, OK]
    finally:
        os.umask(old)
    for path in (tmp_path / "one").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700
    assert file_of(first, key(1)).name != file_of(second, key(1)).name, "the same prompt has the same name elsewhere"


def test_a_directory_that_others_may_change_is_refused(tmp_path: Path, make: Callable[..., FsAdapter]) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(AdapterError, match="mode 0777"):
        make(tmp_path / "open")


def test_what_cannot_be_a_directory_is_said_in_one_sentence(tmp_path: Path, make: Callable[..., FsAdapter]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="give a directory"):
        make(tmp_path / "file" / "kv")


# ---- one owner, or several -------------------------------------------------------------------------------------------


def test_a_second_owner_is_refused_until_the_first_is_gone(make: Callable[..., FsAdapter]) -> None:
    first = make()
    for shared in (False, True):
        with pytest.raises(AdapterError, match=rf"in use by pid {os.getpid()}.*shared"):
            make(shared=shared)
    first.close()
    second = make(shared=True)
    with pytest.raises(AdapterError, match="shared"):
        make()
    second.close()
    make()


def test_two_that_share_see_each_others_objects(tmp_path: Path, make: Callable[..., FsAdapter]) -> None:
    one, two = make(shared=True), make(shared=True)
    assert put(one, key(1)) == [OK]
    assert two.lookup([key(1)]) == [True]
    assert get(two, key(1)) == [OK]
    assert put(two, key(1)) == [OK]
    assert len(list((tmp_path / "kv").glob("objects/*/*"))) == 1
    two._room.rescan()
    assert two.usage() == one.usage()
    assert two.delete([key(1)]) == 1
    assert one.lookup([key(1)]) == [False]
    assert get(one, key(1)) == [MISS]
    assert one.usage().objects == 0


def test_two_that_share_keep_the_limit_when_they_have_looked(tmp_path: Path, make: Callable[..., FsAdapter]) -> None:
    one, two = make(shared=True), make(shared=True)
    for number in range(120):
        assert put(one if number % 2 else two, key(number)) == [OK]
        if number % 10 == 9:
            one._room.rescan()
            two._room.rescan()
    for adapter in (one, two):
        adapter._room.rescan()
        while adapter.usage().bytes_used > adapter.usage().bytes_limit:
            assert adapter._room.evict(1)
    assert du(tmp_path / "kv") <= one.usage().bytes_limit
    one._room.rescan()
    assert one.usage().bytes_used == du(tmp_path / "kv")
    held = [number for number in range(120) if one.lookup([key(number)])[0]]
    assert held
    assert get(two, *[key(number) for number in held]) == [OK] * len(held)


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_without_a_capacity_a_share_of_the_free_space_is_the_limit(tmp_path: Path) -> None:
    adapter = FsAdapter({"type": "fs", "base_path": str(tmp_path / "kv")})
    adapter.open()
    free = shutil.disk_usage(tmp_path).free
    assert 0.5 * free < adapter.usage().bytes_limit < free
    adapter.close()


def test_usage_is_what_du_says_before_the_first_store_after_a_restart(
    tmp_path: Path, make: Callable[..., FsAdapter]
) -> None:
    first = make()
    for number in range(40):
        put(first, key(number), length=1000 + 7919 * number)
    assert first.usage().bytes_used == du(tmp_path / "kv")
    first.close()
    second = make()
    assert second.usage().bytes_used == du(tmp_path / "kv")
    assert second.usage().objects == 40


def test_the_watermark_is_kept_ahead_of_need(make: Callable[..., FsAdapter]) -> None:
    adapter = make(eviction={"trigger_watermark": 0.5, "eviction_ratio": 0.1})
    limit = adapter.usage().bytes_limit
    for number in range(limit // ROOM):
        assert put(adapter, key(number)) == [OK]
    until = time.monotonic() + 10
    while adapter.usage().bytes_used > 0.5 * limit and time.monotonic() < until:
        adapter._room.stored()
        time.sleep(0.01)
    assert 0.3 * limit < adapter.usage().bytes_used <= 0.5 * limit


def test_without_eviction_a_full_adapter_refuses_and_serves_on(make: Callable[..., FsAdapter]) -> None:
    adapter = make(eviction={"eviction_policy": "noop"})
    outcomes = [put(adapter, key(number))[0] for number in range(80)]
    first = outcomes.index(Outcome.NO_SPACE)
    assert set(outcomes[:first]) == {OK}
    assert set(outcomes[first:]) == {Outcome.NO_SPACE}
    assert get(adapter, *[key(number) for number in range(first)]) == [OK] * first
    adapter.delete([key(0)])
    assert put(adapter, key(79)) == [OK]


def test_what_is_being_read_is_not_evicted(make: Callable[..., FsAdapter]) -> None:
    adapter = make(io_threads=1)
    put(adapter, key(0), key(1))
    name = adapter._place(key(0))[1]
    assert adapter._index.begin_read(name)
    for number in range(2, 150):
        assert put(adapter, key(number)) == [OK]
    assert adapter.lookup([key(0), key(1)]) == [True, False]
    adapter._index.end_read(name)
    for number in range(150, 230):
        put(adapter, key(number))
    assert adapter.lookup([key(0)]) == [False]


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"noop"}))
def test_every_policy_keeps_the_limit_and_the_accounts(
    make: Callable[..., FsAdapter], tmp_path: Path, policy: str
) -> None:
    adapter = make(eviction={"eviction_policy": policy})
    put(adapter, key(0), length=50_000)
    for number in range(1, 600):
        assert put(adapter, key(number), length=50_000) == [OK]
        if number % 20 == 0:
            assert get(adapter, key(0), length=50_000) == [OK]
        if number % 100 == 0:
            adapter.delete([key(number)])
    assert adapter.counters["evicted"] > 200
    adapter.close()  # nothing is on its way out any more
    used, limit, objects = adapter.usage()
    assert limit // 2 < used <= limit
    assert (used, objects) == (du(tmp_path / "kv"), len(list(tmp_path.glob("kv/objects/*/*"))))


def test_in_one_batch_the_tail_goes_before_the_head(make: Callable[..., FsAdapter]) -> None:
    adapter = make()
    chain = [key(number) for number in range(8)]
    put(adapter, *chain)
    adapter.close()
    adapter = make()
    for _ in range(4):
        adapter._room.evict(1)
    assert adapter.lookup(chain) == [True] * 4 + [False] * 4


@needs_root
def test_a_disk_that_others_fill_makes_us_evict_and_then_resume(
    small_disk: Path, make: Callable[..., FsAdapter]
) -> None:
    adapter = make(small_disk)  # 16 MiB allowed, 8 MiB there
    assert put(adapter, *[key(n) for n in range(10)]) == [OK] * 10
    filler = small_disk / "filler"
    fill(filler)
    assert put(adapter, key(100)) == [OK], "ours had to go for it"
    assert adapter.counters["evicted_for_full_disk"] >= 1
    assert get(adapter, key(100)) == [OK]
    for number in range(101, 140):
        assert put(adapter, key(number)) == [OK]
    assert adapter.usage().bytes_used == du(small_disk)
    adapter.delete([one for one, _ in adapter.list(b"", 1000).objects])
    fill(filler)
    result = adapter.store([Item(key(1), view(content(key(1))), 0)])[0]
    assert (result.outcome, result.errno) == (Outcome.NO_SPACE, errno.ENOSPC)
    assert adapter.lookup([key(1)]) == [False]
    assert adapter.usage().bytes_used == du(small_disk) == 0
    filler.unlink()
    assert put(adapter, key(1)) == [OK]
    assert get(adapter, key(1)) == [OK]


@needs_root
def test_what_is_on_a_full_disk_is_served_after_a_restart(small_disk: Path, make: Callable[..., FsAdapter]) -> None:
    adapter = make(small_disk)
    assert put(adapter, key(1)) == [OK]
    adapter.close()
    fill(small_disk / "filler")
    adapter = make(small_disk)
    assert get(adapter, key(1)) == [OK]
    assert put(adapter, key(2)) == [OK]


@needs_root
def test_a_real_small_disk_is_filled_with_direct_io_and_remounted(
    loop_disk: Path, make: Callable[..., FsAdapter], tmp_path: Path
) -> None:
    adapter = make(loop_disk, direct_io="on", fsync="full", capacity_gb=1)  # 64 MiB are there
    assert adapter._roots[0].direct
    for number in range(0, 280, 8):
        assert set(put(adapter, *[key(n) for n in range(number, number + 8)])) == {OK}
    assert adapter.counters["evicted"] > 0
    adapter.close()  # nothing is on its way out any more
    used = adapter.usage()
    assert used.bytes_used == du(loop_disk)
    subprocess.run(["umount", loop_disk], check=True)
    subprocess.run(["mount", "-o", "loop", tmp_path / "image", loop_disk], check=True)
    adapter = make(loop_disk, capacity_gb=1)
    assert adapter.usage().bytes_used == used.bytes_used == du(loop_disk)
    assert get(adapter, *[key(n) for n in range(260, 280)]) == [OK] * 20


# ---- O_DIRECT --------------------------------------------------------------------------------------------------------


class NoDirect(FileIO):
    """Takes O_DIRECT at open and refuses the first transfer, as some file systems do."""

    def __init__(self) -> None:
        self.refuse = True
        self._direct: set[int] = set()

    def open(self, path: str, flags: int, *, dir_fd: int) -> int:
        fd = super().open(path, flags, dir_fd=dir_fd)
        (self._direct.add if flags & os.O_DIRECT else self._direct.discard)(fd)
        return fd

    def writev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.refuse and fd in self._direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().writev(fd, buffers, offset)


def test_o_direct_that_works_is_used(make: Callable[..., FsAdapter]) -> None:
    adapter = make(direct_io="on")
    assert put(adapter, key(1), length=70_001) == [OK]
    assert get(adapter, key(1), length=70_001) == [OK]
    assert adapter.counters["direct_io_fallbacks"] == 0


def test_o_direct_that_fails_the_probe_is_not_used(
    make: Callable[..., FsAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AdapterError, match=r"with O_DIRECT.*auto"):
        make(io=NoDirect(), direct_io="on")
    with caplog.at_level(logging.WARNING):
        adapter = make(io=NoDirect())
    assert put(adapter, key(1), key(2), key(3)) == [OK] * 3
    assert get(adapter, key(1), key(2), key(3)) == [OK] * 3
    assert adapter.counters["direct_io_fallbacks"] == 1
    assert caplog.text.count("O_DIRECT") == 1


def test_o_direct_that_is_refused_later_is_given_up(
    make: Callable[..., FsAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    io = NoDirect()
    io.refuse = False
    adapter = make(io=io, direct_io="on")
    io.refuse = True
    with caplog.at_level(logging.WARNING):
        assert put(adapter, *[key(n) for n in range(8)]) == [OK] * 8
    assert get(adapter, *[key(n) for n in range(8)]) == [OK] * 8
    assert adapter.counters["direct_io_fallbacks"] == 1
    assert caplog.text.count("O_DIRECT") == 1


# ---- faults of the medium --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temps", [False, True])
@pytest.mark.parametrize(
    ("operation", "fault", "outcome"),
    [
        ("open", "EIO", Outcome.IO_ERROR),
        ("writev", "EIO", Outcome.IO_ERROR),
        ("writev", "EINVAL", Outcome.IO_ERROR),
        ("writev", "ENOSPC", Outcome.NO_SPACE),
        ("sync", "EIO", Outcome.IO_ERROR),
        ("link", "EIO", Outcome.IO_ERROR),
    ],
)
def test_a_store_that_fails_is_counted_leaves_nothing_and_the_next_one_works(
    make: Callable[..., FsAdapter], tmp_path: Path, operation: str, fault: str, outcome: Outcome, temps: bool
) -> None:
    if temps and operation == "link":
        pytest.skip("named temporaries are renamed")
    io = Faulty({"operation": operation, "fault": fault})
    if temps:
        io._no_tmpfile = True  # type: ignore[attr-defined]
        real = io.open
        io.open = lambda path, flags, *, dir_fd: (  # type: ignore[method-assign]
            NamedTemps().open(path, flags, dir_fd=dir_fd)
            if flags & os.O_TMPFILE == os.O_TMPFILE
            else real(path, flags, dir_fd=dir_fd)
        )
    adapter = make(io=io, fsync="data")
    assert put(adapter, key(1)) == [OK]
    before = adapter.usage()
    io.on = True
    if fault == "ENOSPC":
        adapter._index.begin_read(adapter._place(key(1))[1])  # so that it cannot go
    result = adapter.store([Item(key(2), view(content(key(2))), 0)])[0]
    assert (result.outcome, result.errno) == (outcome, getattr(errno, fault))
    assert adapter.counters[f"errno_{fault}"] == 1
    io.on = False
    assert adapter.lookup([key(1), key(2)]) == [True, False]
    assert adapter.usage() == before
    assert du(tmp_path / "kv") == before.bytes_used
    assert not list((tmp_path / "kv" / "tmp").glob("*.[0-9]*"))
    assert put(adapter, key(2)) == [OK]
    assert get(adapter, key(1), key(2)) == [OK, OK]


def test_short_transfers_are_continued(make: Callable[..., FsAdapter]) -> None:
    io = Faulty(
        {"operation": "writev", "fault": "short", "every": 2}, {"operation": "readv", "fault": "short", "every": 2}
    )
    adapter = make(io=io)
    io.on = True
    keys = [key(n) for n in range(6)]
    assert put(adapter, *keys, length=70_001) == [OK] * 6
    assert get(adapter, *keys, length=70_001) == [OK] * 6


LARGE = 9 * MIB + 4097  # more than is written at once


@pytest.mark.parametrize("short", [False, True])
def test_a_large_object_written_in_steps_is_one_record(make: Callable[..., FsAdapter], short: bool) -> None:
    io = Faulty({"operation": "writev", "fault": "short", "every": 2})
    adapter = make(io=io, capacity_gb=0.1)
    io.on = short
    assert put(adapter, key(1), length=LARGE) == [OK]
    io.on = False
    assert get(adapter, key(1), length=LARGE) == [OK]
    path = file_of(adapter, key(1))
    header = unpack(path.read_bytes()[:HEADER_BYTES])
    assert header is not None
    assert (header.key, header.stored_bytes, path.stat().st_size) == (key(1), LARGE, file_bytes(LARGE))
    assert header.checksum == payload_checksum(content(key(1), LARGE))


def test_a_large_object_that_fails_in_the_middle_leaves_nothing(make: Callable[..., FsAdapter], tmp_path: Path) -> None:
    for at in range(4):  # three pieces, then the header
        io = Faulty({"operation": "writev", "fault": "EIO", "at": [at]})
        adapter = make(io=io, capacity_gb=0.1)
        io.on = True
        result = adapter.store([Item(key(1), view(content(key(1), LARGE)), 0)])[0]
        assert (result.outcome, result.errno) == (Outcome.IO_ERROR, errno.EIO)
        assert adapter.lookup([key(1)]) == [False]
        assert adapter.usage().bytes_used == du(tmp_path / "kv") == 0
        adapter.close()


def test_a_load_that_fails_is_no_miss_and_the_object_stays(make: Callable[..., FsAdapter]) -> None:
    io = Faulty({"operation": "readv", "fault": "EIO"})
    adapter = make(io=io)
    put(adapter, key(1))
    io.on = True
    result = adapter.load([(key(1), view(OBJECT))])[0]
    assert (result.outcome, result.errno) == (Outcome.IO_ERROR, errno.EIO)
    io.on = False
    assert get(adapter, key(1)) == [OK]


def test_a_victim_that_will_not_go_stays_counted(make: Callable[..., FsAdapter], tmp_path: Path) -> None:
    io = Faulty(
        {"operation": "rename", "fault": "EIO", "at": [0]}, {"operation": "unlink", "fault": "EIO", "at": [0, 1]}
    )
    adapter = make(io=io)
    put(adapter, key(1))
    io.on = True
    assert adapter._room.evict(1) == 0
    assert adapter.delete([key(1)]) == 0
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == ROOM
    assert get(adapter, key(1)) == [OK]
    assert adapter.delete([key(1)]) == 1


def test_while_one_call_stalls_the_others_go_on(make: Callable[..., FsAdapter]) -> None:
    io = Faulty({"operation": "writev", "fault": "stall", "seconds": 1.0, "at": [0]})
    adapter = make(io=io)
    put(adapter, key(1))
    io.on = True
    slow = threading.Thread(target=put, args=(adapter, key(2)))
    slow.start()
    while adapter._index.begin_store(adapter._place(key(2))[1]):
        adapter._index.end_store(adapter._place(key(2))[1])
        time.sleep(0.001)
    assert put(adapter, key(2)) == [Outcome.BUSY]
    assert get(adapter, key(1)) == [OK]
    assert put(adapter, key(3)) == [OK]
    assert slow.is_alive()
    adapter.close()  # waits for it
    assert not slow.join(5)
    assert get(adapter, key(1)) == [Outcome.UNAVAILABLE]


# ---- what else may lie there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 100, 4096, 4096 + 512, 8192, OBJECT])
def test_a_truncated_file_is_a_miss_and_goes(make: Callable[..., FsAdapter], length: int) -> None:
    adapter = make()
    put(adapter, key(1))
    path = file_of(adapter, key(1))
    os.truncate(path, length)
    assert get(adapter, key(1))[0] in (MISS, Outcome.CORRUPT)
    assert not path.exists()
    assert adapter.usage().bytes_used == 0
    put(adapter, key(1))
    os.truncate(path, length)
    adapter.close()
    adapter = make()
    assert get(adapter, key(1))[0] in (MISS, Outcome.CORRUPT)
    assert not path.exists()


def test_storing_over_a_truncated_file_makes_it_whole(make: Callable[..., FsAdapter]) -> None:
    adapter = make()
    put(adapter, key(1))
    os.truncate(file_of(adapter, key(1)), 8192)
    assert put(adapter, key(1)) == [OK]
    assert get(adapter, key(1)) == [OK]
    assert adapter.usage().bytes_used == ROOM


def test_a_failing_medium_does_not_flood_the_log(
    make: Callable[..., FsAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = make()
    keys = [key(n) for n in range(50)]
    put(adapter, *keys, length=5000)
    for one in keys:
        flip(file_of(adapter, one), 5000)
    assert set(get(adapter, *keys, length=5000)) == {Outcome.CORRUPT}
    assert adapter.counters["corrupt"] == 50
    assert caplog.text.count("did not verify") == 1


def test_a_whole_file_under_another_name_is_not_that_object(make: Callable[..., FsAdapter]) -> None:
    adapter = make()
    put(adapter, key(1), key(2))
    shutil.copy(file_of(adapter, key(1)), file_of(adapter, key(2)))
    assert get(adapter, key(1), key(2)) == [OK, Outcome.CORRUPT]
    assert not file_of(adapter, key(2)).exists()


def test_foreign_files_stay_and_are_not_counted(make: Callable[..., FsAdapter], tmp_path: Path) -> None:
    make().close()
    root = tmp_path / "kv"
    strangers = [
        root / "notes.txt",
        root / "objects/ab/README",
        root / "tmp/mine.txt",
        root / "objects/ff" / ("aa" * 20),
    ]
    for path in strangers:
        path.write_bytes(bytes(8192))
    (root / "objects/cd/subdir").mkdir()
    adapter = make()
    assert adapter.usage().bytes_used == 0
    assert adapter.list(b"", 100).objects == []
    adapter.close()
    assert all(path.read_bytes() == bytes(8192) for path in strangers)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_a_link_a_fifo_or_a_directory_under_one_of_our_names_is_a_miss(
    make: Callable[..., FsAdapter], tmp_path: Path, kind: str
) -> None:
    adapter = make()
    put(adapter, key(1))
    path, outside = file_of(adapter, key(1)), tmp_path / "outside"
    path.rename(outside)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert adapter.lookup([key(1)]) == [False]
    assert get(adapter, key(1)) == [MISS]
    outcome = put(adapter, key(1))[0]
    assert outcome == (OK if kind != "directory" else Outcome.IO_ERROR)
    if outcome == OK:
        assert get(adapter, key(1)) == [OK]
    assert outside.stat().st_size == ROOM


def test_a_removed_folder_costs_its_objects_only(make: Callable[..., FsAdapter], tmp_path: Path) -> None:
    for io in (FileIO(), NamedTemps()):
        adapter = make(io=io)
        assert put(adapter, *[key(n) for n in range(20)]) == [OK] * 20
        shutil.rmtree(tmp_path / "kv/objects")
        (tmp_path / "kv/objects").mkdir(0o700)
        adapter.close()
        adapter = make(io=io)
        for folder in (tmp_path / "kv/objects").iterdir():
            folder.rmdir()
        assert put(adapter, *[key(n) for n in range(20)]) == [OK] * 20
        assert get(adapter, *[key(n) for n in range(20)]) == [OK] * 20
        adapter.close()


def test_a_damaged_mark_costs_the_content_but_not_the_limit(make: Callable[..., FsAdapter], tmp_path: Path) -> None:
    adapter = make()
    put(adapter, key(1))
    adapter.close()
    flip(tmp_path / "kv/KVKEEP-FS", 20)
    with pytest.raises(AdapterError, match="damaged"):
        make(shared=True)
    adapter = make()
    assert adapter.lookup([key(1)]) == [False]
    assert adapter.usage().bytes_used == du(tmp_path / "kv") == ROOM
    for number in range(80):
        assert put(adapter, key(number)) == [OK]
    adapter.close()
    assert adapter.usage().bytes_used == du(tmp_path / "kv") <= adapter.usage().bytes_limit


def test_temporaries_of_the_dead_go_and_those_of_the_living_stay(
    make: Callable[..., FsAdapter], tmp_path: Path
) -> None:
    living = make(shared=True, io=NamedTemps())
    draft = living._roots[0].create(bytes(20), False)
    tmp = tmp_path / "kv/tmp"
    dead, stranger = tmp / f"{'0' * 16}.5", tmp / "holiday.jpg"
    for path in (dead, tmp / f"{'0' * 16}.lock", tmp / f"{'1' * 16}.0", stranger):
        path.write_bytes(b"x")
    other = make(shared=True)
    assert other.counters["stale_temps_removed"] == 2
    assert not dead.exists()
    assert stranger.exists()
    assert (tmp / draft.temp).exists()
    draft.close()


def test_another_root_moves_only_its_own_share(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in "abc"]
    keys = [key(n) for n in range(60)]
    adapter = FsAdapter({"type": "fs", "base_path": roots[:2], "capacity_gb": 0.1})
    adapter.open()
    put(adapter, *keys, length=5000)
    counts = [len(list(Path(root).glob("objects/*/*"))) for root in roots[:2]]
    assert min(counts) > 10
    adapter.close()
    adapter = FsAdapter({"type": "fs", "base_path": roots[::-1], "capacity_gb": 0.1})
    adapter.open()
    kept = adapter.lookup(keys)
    assert 25 < sum(kept) < 60
    assert get(adapter, *[one for one, there in zip(keys, kept, strict=True) if there], length=5000) == [OK] * sum(kept)
    adapter.close()


def test_a_key_is_not_guessed_from_its_neighbours(make: Callable[..., FsAdapter]) -> None:
    adapter = make()
    names = {adapter._place(Key(bytes(32), n.to_bytes(32, "big"), shard, 2))[1] for n in range(50) for shard in (0, 1)}
    assert len(names) == 100


def test_what_a_batch_found_there_does_not_go_for_the_rest_of_it(make: Callable[..., FsAdapter]) -> None:
    adapter = make(io_threads=1, capacity_gb=4 / 1024, eviction={"trigger_watermark": 1.0})
    for number in range(20):  # more than there is room for
        assert put(adapter, key(number)) == [OK]
    there = [number for number in range(20) if adapter.lookup([key(number)])[0]]
    assert 4 < len(there) < 20
    oldest = key(there[0])
    assert put(adapter, oldest, *[key(number) for number in range(100, 104)]) == [OK] * 5
    assert get(adapter, oldest) == [OK]
    assert adapter.lookup([key(there[1])]) == [False]
