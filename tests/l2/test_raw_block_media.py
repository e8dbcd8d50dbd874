"""raw_block and its medium: whose it is, what lies on it, damage to its own structures, errors, devices, eviction."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvkeep.l2 import raw_medium, raw_store
from kvkeep.l2.adapter import AdapterError, Item, Key, Outcome
from kvkeep.l2.raw_block import RawBlockAdapter
from kvkeep.l2.raw_io import Engine, Finished, Meanwhile, Transfer
from kvkeep.l2.raw_layout import JOURNAL_START, SECOND_COPY, Geometry, blocks_of
from kvkeep.l2.raw_objects import Batch, Objects
from tests.l2.conformance import MIB, content, get, key, put, view

SIZE = 64 * MIB


def config(at: Path, **more: object) -> dict[str, object]:
    return {"type": "raw_block", "path": str(at), "size_gb": SIZE / (1 << 30), "durability": "none", **more}


def opened(at: Path, wrap: Callable[[Engine], Engine] | None = None, **more: object) -> RawBlockAdapter:
    adapter = RawBlockAdapter(config(at, **more), wrap)
    adapter.open()
    return adapter


def done(adapter: RawBlockAdapter) -> None:
    adapter.check_integrity()
    adapter.close()


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.raw"


# ---- whose it is, and what lies there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "mark", "name"),
    [
        (1080, b"\x53\xef", "ext2/3/4"),
        (0, b"XFSB", "XFS"),
        (510, b"\x55\xaa", "partition"),
        (70_000, b"?", "not kvkeep's"),
    ],
)
def test_a_medium_with_foreign_content_is_refused_unless_told_to_format(
    path: Path, offset: int, mark: bytes, name: str
) -> None:
    path.write_bytes(bytes(SIZE))
    overwrite(path, offset, mark)
    before = path.read_bytes()
    with pytest.raises(AdapterError, match=name) as refused:
        opened(path)
    assert '"format": true' in str(refused.value)
    assert path.read_bytes() == before
    adapter = opened(path, format=True)
    assert put(adapter, key(1)) == [Outcome.OK]
    done(adapter)
    adapter = opened(path, format=True)  # does not wipe what is ours
    assert get(adapter, key(1)) == [Outcome.OK]
    done(adapter)


def test_an_empty_preallocated_file_is_taken(path: Path) -> None:
    path.write_bytes(bytes(SIZE))
    done(opened(path))


def test_a_file_whose_making_was_interrupted_is_finished(path: Path) -> None:
    path.write_bytes(b"")
    done(opened(path))
    assert path.stat().st_size == SIZE


def test_a_made_file_is_private(path: Path) -> None:
    done(opened(path))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_being_made_has_an_owner_from_the_first_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot reserve room at once, it takes minutes to make a large one."""
    refused: list[str] = []

    def slow(fd: int, at: int, size: int) -> None:
        with pytest.raises(AdapterError, match="another process") as error:
            opened(path)
        refused.append(str(error.value))
        os.truncate(path, size)

    monkeypatch.setattr(raw_medium, "_LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(raw_medium.os, "posix_fallocate", slow)
    adapter = opened(path)
    assert len(refused) == 1
    assert path.exists()
    assert put(adapter, key(1)) == [Outcome.OK]
    done(adapter)
    adapter = opened(path)
    assert get(adapter, key(1)) == [Outcome.OK]
    done(adapter)


@pytest.mark.parametrize("still_open", [True, False])
def test_who_made_a_file_and_lost_it_to_another_does_it_no_harm(
    path: Path, monkeypatch: pytest.MonkeyPatch, still_open: bool
) -> None:
    """Between making it and locking it."""
    lock, others = fcntl.flock, list[RawBlockAdapter]()

    def flock(fd: int, how: int) -> None:
        monkeypatch.setattr(raw_medium.fcntl, "flock", lock)
        others.append(opened(path))
        assert put(others[0], key(1)) == [Outcome.OK]
        if not still_open:
            done(others[0])
        lock(fd, how)

    monkeypatch.setattr(raw_medium, "_LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(raw_medium.fcntl, "flock", flock)
    if still_open:
        with pytest.raises(AdapterError, match="another process"):
            opened(path)
        done(others[0])
    else:
        done(opened(path))
    adapter = opened(path)
    assert get(adapter, key(1)) == [Outcome.OK]
    done(adapter)


def test_who_waited_for_a_file_whose_maker_gave_up_makes_it_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate, lock, waits = os.posix_fallocate, fcntl.flock, threading.Event()
    adapters: list[RawBlockAdapter] = []
    waiter = threading.Thread(target=lambda: adapters.append(opened(path)))

    def full(fd: int, at: int, size: int) -> None:
        monkeypatch.setattr(raw_medium.os, "posix_fallocate", fallocate)
        waiter.start()
        assert waits.wait(30)
        raise OSError(errno.ENOSPC, "as asked")

    def flock(fd: int, how: int) -> None:
        try:
            lock(fd, how)
        except BlockingIOError:
            waits.set()
            raise

    monkeypatch.setattr(raw_medium, "_LOCK_WAIT_S", 30)
    monkeypatch.setattr(raw_medium.os, "posix_fallocate", full)
    monkeypatch.setattr(raw_medium.fcntl, "flock", flock)
    with pytest.raises(AdapterError, match="set a smaller size_gb"):
        opened(path)
    waiter.join()
    assert put(adapters[0], key(1)) == [Outcome.OK]
    done(adapters[0])
    adapter = opened(path)
    assert get(adapter, key(1)) == [Outcome.OK]
    done(adapter)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"size_gb": 0.001}, "least"),
        ({"size_gb": 1 << 20}, "set a smaller size_gb"),
        ({"quue_depth": 3}, "queue_depth"),
        ({"durability": "full"}, "none, data"),
        ({"path": "/nonexistent/kv.raw"}, "cannot be made"),
        ({"path": "/dev/null"}, "neither a file nor a block device"),
    ],
)
def test_a_wrong_configuration_gets_one_sentence(path: Path, more: dict[str, object], text: str) -> None:
    with pytest.raises(AdapterError, match=text):
        opened(path, **more)
    assert not path.exists()


def test_another_size_than_the_files_is_refused(path: Path) -> None:
    done(opened(path))
    with pytest.raises(AdapterError, match=r"set size_gb to 0\.0625"):
        opened(path, size_gb=1)


def test_the_size_that_the_refusal_names_is_taken(path: Path) -> None:
    size = int(0.0654321 * (1 << 30)) + 1000
    with path.open("wb") as file:
        file.truncate(size)
    done(opened(path, size_gb=size / (1 << 30)))
    with pytest.raises(AdapterError) as refused:
        opened(path, size_gb=1)
    named = float(str(refused.value).split("set size_gb to ")[1].split(",")[0])
    done(opened(path, size_gb=named))


def test_the_second_superblock_replaces_a_damaged_first_one(path: Path) -> None:
    adapter = opened(path)
    put(adapter, key(1))
    done(adapter)
    overwrite(path, 20, b"\xff")
    adapter = opened(path)
    assert get(adapter, key(1)) == [Outcome.OK]
    done(adapter)
    assert path.read_bytes()[:4096] == path.read_bytes()[SECOND_COPY : SECOND_COPY + 4096]


def test_two_damaged_superblocks_are_no_reason_to_wipe(path: Path) -> None:
    done(opened(path))
    overwrite(path, 20, b"\xff")
    overwrite(path, SECOND_COPY + 20, b"\xff")
    with pytest.raises(AdapterError, match="not kvkeep's"):
        opened(path)


def test_content_from_before_a_format_never_comes_back(path: Path) -> None:
    adapter = opened(path)
    put(adapter, *[key(n) for n in range(20)])
    offset = adapter.slot_of(key(3))
    done(adapter)
    overwrite(path, 20, b"\xff")
    overwrite(path, SECOND_COPY + 20, b"\xff")
    adapter = opened(path, format=True)
    assert adapter.usage().objects == 0
    put(adapter, key(100))
    assert offset is not None
    slab = adapter.geometry.slab_offset(0) + adapter.geometry.block
    done(adapter)
    overwrite(path, JOURNAL_START, bytes(adapter.geometry.journal_pages * 4096))
    overwrite(path, slab, b"\xff" * 8)
    adapter = opened(path)  # now by a scan of headers
    assert adapter.counters["slabs_scanned"] == 1
    assert {one for one, _ in adapter.list(b"", 100).objects} == {key(100)}
    done(adapter)


# ---- damage to tables and journal --------------------------------------------------------------------------------


def damage_head(path: Path, geometry: Geometry) -> None:
    overwrite(path, geometry.slab_offset(0) + 30, b"\xff\xff")


def damage_table(path: Path, geometry: Geometry) -> None:
    overwrite(path, geometry.slab_offset(0) + geometry.block + 50, b"\xff\xff\xff")


def damage_journal(path: Path, geometry: Geometry) -> None:
    overwrite(path, JOURNAL_START, bytes(geometry.journal_pages * geometry.block))


@pytest.mark.parametrize("damage", [damage_head, damage_table, damage_journal])
def test_damaged_metadata_costs_a_scan_and_no_object(path: Path, damage: Callable[[Path, Geometry], None]) -> None:
    adapter = opened(path)
    keys = [key(n) for n in range(60)]
    for length in (5000, 300_000):
        put(adapter, *keys[: 30 if length == 5000 else 60], length=length)
    adapter.delete(keys[:5])
    before = adapter.usage()
    geometry = adapter.geometry
    done(adapter)
    damage(path, geometry)
    for again in range(2):
        adapter = opened(path)
        assert (adapter.counters["slabs_scanned"] > 0) == (again == 0)
        assert adapter.usage() == before
        assert get(adapter, *keys[:30], length=5000) == [Outcome.MISS] * 5 + [Outcome.OK] * 25
        assert get(adapter, *keys[30:], length=300_000) == [Outcome.OK] * 30
        done(adapter)


def test_bytes_that_a_client_chose_are_never_taken_for_a_header(path: Path) -> None:
    """A slab changes its class; where headers are now, payloads were, and these look like headers."""
    adapter = opened(path, size_gb=8 / 1024)  # one slab
    geometry = adapter.geometry
    assert geometry.slabs == 1
    honest = opened(path.with_name("other"), size_gb=8 / 1024)
    put(honest, key(7), length=3000)
    offset = honest.slot_of(key(7))
    done(honest)
    assert offset is not None
    with path.with_name("other").open("rb") as file:
        file.seek(offset)
        forged = file.read(8192)
    payload = forged * 64
    assert adapter.store([Item(key(1), view(payload), 0)])[0].outcome == Outcome.OK
    adapter.delete([key(1)])
    put(adapter, key(2), length=3000)  # class of one block: header places all over the old payload
    done(adapter)
    overwrite(path, JOURNAL_START, bytes(geometry.journal_pages * geometry.block))
    adapter = opened(path, size_gb=8 / 1024)
    assert adapter.counters["slabs_scanned"] == 1
    assert adapter.lookup([key(7), key(1), key(2)]) == [False, False, True]
    done(adapter)


def test_any_flipped_byte_anywhere_gives_exact_bytes_or_a_miss(path: Path) -> None:
    adapter = opened(path, size_gb=16 / 1024)
    keys = [key(n) for n in range(12)]
    put(adapter, *keys, length=20_000)
    geometry = adapter.geometry
    done(adapter)
    image = path.read_bytes()
    random = np.random.default_rng(5)
    used = geometry.slab_offset(0) + 12 * 7 * 4096
    for _ in range(25):
        damaged = bytearray(image)
        for offset in random.integers(0, used, 40):
            damaged[offset] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(damaged)
        try:
            adapter = opened(path, size_gb=16 / 1024)
        except AdapterError:
            continue  # both superblocks
        get(adapter, *keys, length=20_000)  # holds every OK against the oracle
        assert put(adapter, *keys, length=20_000) == [Outcome.OK] * 12
        assert get(adapter, *keys, length=20_000) == [Outcome.OK] * 12
        done(adapter)


# ---- errors ------------------------------------------------------------------------------------------------------


class Failing(Engine):
    name = "failing"

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.fail: Callable[[bool, Transfer], int] = lambda write, transfer: 0
        self.sync_fails = 0
        self.before: Callable[[], None] = lambda: None

    def run(
        self,
        write: bool,
        transfers: Sequence[Transfer],
        finished: Finished | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[int]:
        self.before()
        answers = [self.fail(write, transfer) for transfer in transfers]
        good = [t for t, answer in zip(transfers, answers, strict=True) if not answer]
        did = iter(self.inner.run(write, good, meanwhile=meanwhile))
        results = [answer or next(did) for answer in answers]
        for i, number in enumerate(results):
            if finished is not None:
                finished(i, number)
        return results

    def sync(self) -> int:
        return self.sync_fails or self.inner.sync()

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def failing(path: Path) -> Iterator[tuple[RawBlockAdapter, Failing]]:
    made: list[Failing] = []

    def wrap(inner: Engine) -> Engine:
        made.append(Failing(inner))
        return made[0]

    adapter = opened(path, wrap, durability="data")
    yield adapter, made[0]
    done(adapter)
    adapter = opened(path)
    usage = adapter.usage()
    keys = [one for one, _ in adapter.list(b"", 1000).objects]
    assert len(keys) == usage.objects
    assert set(get(adapter, *keys)) <= {Outcome.OK}
    done(adapter)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.ETIMEDOUT])
@pytest.mark.parametrize("what", ["payload", "header", "journal", "sync"])
def test_a_failed_write_is_a_result_with_its_errno_and_leaves_nothing(
    failing: tuple[RawBlockAdapter, Failing], number: int, what: str
) -> None:
    adapter, engine = failing
    assert put(adapter, key(1)) == [Outcome.OK]
    before = adapter.usage()
    journal_end = JOURNAL_START + adapter.geometry.journal_pages * 4096

    def fail(write: bool, transfer: Transfer) -> int:
        if not write:
            return 0
        kind = "journal" if transfer.offset < journal_end else "payload" if len_of(transfer) > 4096 else "header"
        return number if kind == what else 0

    engine.fail = fail
    engine.sync_fails = number if what == "sync" else 0
    for _ in range(3):
        results = adapter.store([Item(key(n), view(content(key(n))), 0) for n in (1, 2, 3)])
        assert results[0].outcome == Outcome.OK
        for result in results[1:]:
            assert result.outcome == (Outcome.NO_SPACE if number == errno.ENOSPC else Outcome.IO_ERROR)
            assert result.errno == number
    assert adapter.lookup([key(1), key(2), key(3)]) == [True, False, False]
    assert adapter.usage() == before
    engine.fail, engine.sync_fails = lambda write, transfer: 0, 0
    assert put(adapter, key(2), key(3)) == [Outcome.OK] * 2
    assert get(adapter, key(1), key(2), key(3)) == [Outcome.OK] * 3


def len_of(transfer: Transfer) -> int:
    return sum(length for _, length in transfer.pieces)


def test_a_read_error_is_a_result_and_an_object_that_keeps_failing_is_given_up(
    failing: tuple[RawBlockAdapter, Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, engine = failing
    put(adapter, key(1), key(2))
    bad = adapter.slot_of(key(1))
    engine.fail = lambda write, transfer: errno.EIO if not write and transfer.offset == bad else 0
    assert get(adapter, key(1), key(2)) == [Outcome.IO_ERROR, Outcome.OK]
    for _ in range(5):  # a medium that is away for a moment costs no object
        assert get(adapter, key(1)) == [Outcome.IO_ERROR]
    assert adapter.lookup([key(1)]) == [True]
    monkeypatch.setattr(raw_store, "_BAD_FOR_S", 0.0)
    assert get(adapter, key(1)) == [Outcome.IO_ERROR]
    assert adapter.lookup([key(1)]) == [False]
    engine.fail = lambda write, transfer: 0
    assert put(adapter, key(1)) == [Outcome.OK]


def test_io_that_the_kernel_cuts_short_is_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the end of the file a read stops short; EIO then, not wrong bytes."""
    adapter = opened(path)
    put(adapter, key(1))
    monkeypatch.setattr(raw_medium.Medium, "shrunk", lambda _: "")
    os.truncate(path, adapter.slot_of(key(1)) + 8192)
    assert get(adapter, key(1)) == [Outcome.IO_ERROR]
    os.truncate(path, SIZE)
    assert get(adapter, key(1)) == [Outcome.CORRUPT]
    done(adapter)


# ---- a file that somebody does something to --------------------------------------------------------------------------


def outcomes(adapter: RawBlockAdapter, of: Key) -> set[Outcome]:
    """What is said to each kind of call, and that nothing is said to be there, or gone."""
    assert adapter.lookup([of]) == [False]
    assert adapter.erase([of]) == [False]
    return {*put(adapter, of, key(99)), *get(adapter, of), adapter.fetch([(of, MIB)])[0].outcome}


def test_a_file_that_is_moved_away_is_out_of_use_until_it_is_put_back(path: Path) -> None:
    adapter = opened(path)
    put(adapter, key(1))
    path.rename(path.with_name("away"))
    assert "put it back" in adapter.trouble()
    assert outcomes(adapter, key(1)) == {Outcome.UNAVAILABLE}
    shutil.copy(path.with_name("away"), path)
    assert "replaced" in adapter.trouble()
    assert outcomes(adapter, key(1)) == {Outcome.UNAVAILABLE}
    path.with_name("away").rename(path)
    assert adapter.trouble() == ""
    assert put(adapter, key(2)) == [Outcome.OK]
    assert get(adapter, key(1), key(2)) == [Outcome.OK] * 2
    done(adapter)
    adapter = opened(path)
    assert get(adapter, key(1), key(2)) == [Outcome.OK] * 2
    done(adapter)


def test_a_file_that_was_removed_is_made_anew_by_the_next_to_open_it(path: Path) -> None:
    adapter = opened(path)
    put(adapter, key(1))
    path.unlink()
    assert outcomes(adapter, key(1)) == {Outcome.UNAVAILABLE}
    adapter.close()
    assert not path.exists()
    adapter = opened(path)
    assert get(adapter, key(1)) == [Outcome.MISS]
    assert put(adapter, key(1)) == [Outcome.OK]
    done(adapter)


@pytest.mark.parametrize("left", [0, SIZE // 2])
def test_nothing_is_acknowledged_into_a_file_that_was_cut(path: Path, left: int) -> None:
    adapter = opened(path)
    put(adapter, key(1))
    os.truncate(path, left)
    assert f"from {SIZE} to {left} bytes" in adapter.trouble()
    os.truncate(path, SIZE)  # as large as before, but what it held is lost
    assert outcomes(adapter, key(1)) == {Outcome.UNAVAILABLE}
    os.truncate(path, left)
    adapter.close()
    assert path.stat().st_size == left, "nothing was written into it any more"
    if left:
        with pytest.raises(AdapterError, match="delete the file"):
            opened(path)
        path.unlink()
    adapter = opened(path)
    assert get(adapter, key(1)) == [Outcome.MISS]
    assert put(adapter, key(1)) == [Outcome.OK]
    done(adapter)


def test_a_file_that_is_cut_while_it_is_written_into_is_noticed_before_that_is_acknowledged(
    failing: tuple[RawBlockAdapter, Failing], path: Path
) -> None:
    adapter, engine = failing
    engine.before = lambda: path.rename(path.with_name("away")) if path.exists() else None  # type: ignore[assignment]
    assert put(adapter, key(1)) == [Outcome.UNAVAILABLE]
    path.with_name("away").rename(path)
    engine.before = lambda: None
    assert get(adapter, key(1)) == [Outcome.OK], "it was written after all"


# ---- eviction and slabs ------------------------------------------------------------------------------------------


def test_slabs_move_to_another_size_when_they_are_needed_there(path: Path) -> None:
    adapter = opened(path)
    for n in range(300):
        assert put(adapter, key(n), length=300_000) == [Outcome.OK]
    for n in range(1000, 1040):
        assert put(adapter, key(n), length=2 * MIB) == [Outcome.OK]
    big = adapter.lookup([key(n) for n in range(1000, 1040)]).count(True)
    assert big > 20, "the older, smaller objects should have made room"
    for n in range(300):
        assert put(adapter, key(n), length=300_000) == [Outcome.OK]
    done(adapter)
    adapter = opened(path)
    for one, length in adapter.list(b"", 10_000).objects:
        assert get(adapter, one, length=length) == [Outcome.OK]
    done(adapter)


def test_what_is_being_read_is_not_evicted(path: Path) -> None:
    made: list[Failing] = []

    def wrap(inner: Engine) -> Engine:
        made.append(Failing(inner))
        return made[0]

    adapter = opened(path, wrap)
    put(adapter, key(0))
    reading, go = threading.Event(), threading.Event()

    def stall() -> None:
        if threading.current_thread() is reader:
            reading.set()
            assert go.wait(30)

    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(get(adapter, key(0))))
    made[0].before = stall
    reader.start()
    assert reading.wait(30)
    for n in range(1, 400):
        assert put(adapter, key(n)) == [Outcome.OK]
    assert adapter.lookup([key(0), key(1)]) == [True, False]
    assert adapter.delete([key(0)]) == 1  # now it goes, and its slot when the reader is through
    put(adapter, *[key(n) for n in range(400, 420)])
    go.set()
    reader.join(30)
    assert outcomes[0] in (Outcome.OK, Outcome.MISS)
    made[0].before = lambda: None
    done(adapter)


def test_the_watermark_and_the_ratio_are_kept(path: Path) -> None:
    adapter = opened(path, eviction={"trigger_watermark": 0.5, "eviction_ratio": 0.1})
    limit = adapter.usage().bytes_limit
    highest = 0
    for n in range(600):
        assert put(adapter, key(n)) == [Outcome.OK]
        highest = max(highest, adapter.usage().bytes_used)
    assert 0.39 * limit < adapter.usage().bytes_used <= 0.5 * limit
    assert highest <= 0.5 * limit
    assert adapter.counters["evicted"] > 0
    done(adapter)


def test_without_eviction_a_full_medium_refuses_and_goes_on_when_there_is_room(path: Path) -> None:
    adapter = opened(path, eviction={"eviction_policy": "noop"})
    n = 0
    while put(adapter, key(n)) == [Outcome.OK]:
        n += 1
    result = adapter.store([Item(key(n), view(content(key(n))), 0)])[0]
    assert (result.outcome, result.errno) == (Outcome.NO_SPACE, errno.ENOSPC)
    assert adapter.usage().objects == n
    adapter.delete([key(0)])
    assert put(adapter, key(n)) == [Outcome.OK]
    done(adapter)


def test_many_small_objects_pass_through_a_small_journal(path: Path) -> None:
    """More history than the ring holds, several times over; tables move the tail."""
    adapter = opened(path)
    keys = [key(n) for n in range(64)]
    data = [Item(one, view(content(one, 500)), 0) for one in keys]
    for _ in range(160):
        adapter.store(data)
        adapter.delete(keys)
    pages = adapter._parts[1].journal.next_lsn  # type: ignore[index]
    assert pages > 1.2 * adapter.geometry.journal_pages
    adapter.store(data)
    adapter.close()
    adapter = opened(path)
    assert adapter.counters["slabs_scanned"] == 0
    assert get(adapter, *keys, length=500) == [Outcome.OK] * 64
    done(adapter)


def test_size_classes_waste_little_and_slabs_hold_what_they_say() -> None:
    for size in (1, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, 33 << 20):
        blocks = blocks_of(size, 4096)
        assert size <= blocks * 4096 <= max(4096, size * 1.0626 + 4096)
    geometry = Geometry.plan(100 << 30, 4096)
    for size in (4096, 1 << 20, 4 << 20, 32 << 20):
        blocks = blocks_of(size, 4096)
        slots = geometry.slots(blocks)
        assert slots * size >= geometry.slab_bytes * (0.45 if size == 4096 else 0.97)
        end = geometry.slot_offset(0, slots - 1, blocks) + (1 + blocks) * 4096
        assert end <= geometry.foot_offset(0)


def test_the_index_grows_while_it_is_used() -> None:
    objects = Objects(1 << 20)
    chunks = np.random.default_rng(1).integers(0, 1 << 63, size=(150_000, 4), dtype=np.uint64)
    space = objects.space(Key(bytes(32), bytes(32), 0, 1))
    rows: list[int] = []
    for start in range(0, len(chunks), 50):
        part = chunks[start : start + 50]
        one = np.ones(50, dtype=np.uint64)
        new = objects.add(Batch(one * np.uint64(space), part, one, one, one, one))
        objects.publish(new)
        objects.recency[new] = 1
        rows += new.tolist()
        if start % 500 == 0:
            going = np.array(rows[-20:-10])
            objects.hide(going)
            objects.free(going)
            del rows[-20:-10]
    assert (objects.index.find(objects.records[rows, :4], space) == rows).all()
    objects.check_integrity()


def test_a_batch_of_a_known_and_a_new_space_gives_them_two_numbers(path: Path) -> None:
    """One of its spaces is idle, which is when a number is given to another space."""
    adapter = opened(path)
    of_two, other = [key(1, shard=s, shards=2) for s in (0, 1)], key(9, namespace=b"B" * 32)
    assert put(adapter, *of_two) == [Outcome.OK] * 2
    assert adapter.delete(of_two) == 2
    assert put(adapter, other) == [Outcome.OK]  # has the number of one of the two now
    assert put(adapter, *of_two) == [Outcome.OK] * 2
    assert get(adapter, *of_two, other) == [Outcome.OK] * 3
    done(adapter)
    adapter = opened(path)
    assert get(adapter, *of_two, other) == [Outcome.OK] * 3
    done(adapter)


def test_spaces_that_come_and_go_keep_their_objects_apart(path: Path, seed: int) -> None:
    adapter, random, there = opened(path), np.random.default_rng(seed), set[Key]()
    keys = [key(n, shard=s, shards=3, namespace=bytes([n]) * 32) for n in range(8) for s in range(3)]
    for _ in range(150):
        batch = [keys[i] for i in random.permutation(len(keys))[: random.integers(1, 12)]]
        if random.random() < 0.5:
            assert put(adapter, *batch, length=5000) == [Outcome.OK] * len(batch)
            there.update(batch)
        else:
            adapter.delete(batch)
            there.difference_update(batch)
        adapter.check_integrity()
        assert get(adapter, *keys, length=5000) == [Outcome.OK if k in there else Outcome.MISS for k in keys]
    done(adapter)


# ---- devices -----------------------------------------------------------------------------------------------------


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[str]:
    if os.geteuid() or not shutil.which("losetup"):
        pytest.skip("loop devices need root")
    backing = tmp_path / "kvk-test-loop"
    backing.write_bytes(bytes(SIZE))
    made = subprocess.run(["losetup", "--show", "-f", str(backing)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    yield device
    subprocess.run(["losetup", "-d", device], check=True)


def test_a_block_device_works_like_a_file_and_has_one_owner(loop_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_medium, "_LOCK_WAIT_S", 0.5)
    device = {"type": "raw_block", "path": loop_device}
    adapter = RawBlockAdapter(device)
    adapter.open()
    keys = [key(n) for n in range(20)]
    assert put(adapter, *keys) == [Outcome.OK] * 20
    with pytest.raises(AdapterError, match="in use"):
        RawBlockAdapter(device).open()
    adapter.close()
    with pytest.raises(AdapterError, match="leave size_gb out"):
        RawBlockAdapter({**device, "size_gb": 1}).open()
    adapter = RawBlockAdapter(device)
    adapter.open()
    assert get(adapter, *keys) == [Outcome.OK] * 20
    done(adapter)


def test_a_device_with_a_file_system_is_refused(loop_device: str) -> None:
    if not shutil.which("mkfs.ext4"):
        pytest.skip("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", loop_device], check=True)
    with pytest.raises(AdapterError, match="ext2/3/4"):
        RawBlockAdapter({"type": "raw_block", "path": loop_device}).open()
