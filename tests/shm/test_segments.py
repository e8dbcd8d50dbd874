from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvkeep.shm import layout, segments
from kvkeep.shm.leases import LeaseTable
from kvkeep.shm.segments import Geometry, InUse, Reserver, open_segments, unlink
from tests.conftest import unique_name

GEOMETRY = Geometry(1 << 20, 64, 1 << 18)


@pytest.fixture
def name() -> Iterator[str]:
    value = unique_name("seg")
    yield value
    unlink(value)


def test_a_second_owner_of_a_name_is_refused_while_the_first_lives(name: str) -> None:
    first = open_segments(name, GEOMETRY)
    with pytest.raises(InUse, match="in use by another kvkeepd"):
        open_segments(name, GEOMETRY)
    first.close()
    again = open_segments(name, GEOMETRY)
    assert again.adopted
    again.close()


def test_a_killed_owner_leaves_no_lock(name: str) -> None:
    code = (
        "import sys, time; from kvkeep.shm.segments import *; "
        f"s = open_segments({name!r}, Geometry(1 << 20, 64, 1 << 18)); print('up', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd="/")
    assert owner.stdout is not None
    owner.stdout.readline()
    with pytest.raises(InUse):
        open_segments(name, GEOMETRY)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    open_segments(name, GEOMETRY).close()


def test_forget_makes_a_new_arena_and_says_why(name: str) -> None:
    first = open_segments(name, GEOMETRY)
    inode = os.fstat(first.data_fd).st_ino
    first.close()
    second = open_segments(name, GEOMETRY, forget=True)
    assert not second.adopted
    assert second.why == "--forget was given"
    assert os.fstat(second.data_fd).st_ino != inode
    second.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda s: s.superblock.__setitem__("abi", 99), "format is version 99"),
        (lambda s: s.superblock.__setitem__("boot_id", b"another"), "does not verify"),
        (lambda s: s.superblock.__setitem__("magic", 0), "never finished"),
        (lambda s: os.ftruncate(s.data_fd, 4096), "wrong size"),
        (lambda s: os.ftruncate(s.meta_fd, 64), "cut short"),
        (lambda s: os.unlink(f"/dev/shm/kvkeep-{s.name}-data"), "data segment is gone"),
    ],
)
def test_an_arena_that_is_not_whole_is_dropped_with_its_reason(name: str, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    first = open_segments(name, GEOMETRY)
    damage(first)
    first.close()
    second = open_segments(name, GEOMETRY)
    assert not second.adopted
    assert reason in second.why
    assert not second.entries.any()
    second.close()


def test_an_arena_from_before_a_reboot_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_segments(name, GEOMETRY).close()
    monkeypatch.setattr(segments, "boot_id", lambda: "another-boot")
    second = open_segments(name, GEOMETRY)
    assert "before a reboot" in second.why
    second.close()


def test_a_data_segment_of_another_arena_is_not_adopted(name: str) -> None:
    open_segments(name, GEOMETRY).close()
    path = f"/dev/shm/kvkeep-{name}-data"
    with open(path + "2", "wb") as f:
        f.truncate(GEOMETRY.data_bytes)
    os.rename(path + "2", path)
    second = open_segments(name, GEOMETRY)
    assert "another arena" in second.why
    second.close()


def test_another_size_is_a_new_arena(name: str) -> None:
    open_segments(name, GEOMETRY).close()
    second = open_segments(name, Geometry(2 << 20, 64, 1 << 18))
    assert "its size was 1048576 bytes" in second.why
    assert os.stat(f"/dev/shm/kvkeep-{name}-data").st_size == 2 << 20
    second.close()


def test_reserving_allocates_every_byte(name: str) -> None:
    arena = open_segments(name, GEOMETRY)
    reserver = Reserver(arena.data_fd, GEOMETRY.data_bytes)
    reserver.start()
    reserver.join(10)
    assert reserver.done
    assert not reserver.failed
    assert reserver.ready == GEOMETRY.data_bytes
    assert os.fstat(arena.data_fd).st_blocks * 512 >= GEOMETRY.data_bytes
    arena.close()


def test_memory_that_runs_out_while_reserving_leaves_what_is_ready_usable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = open_segments(name, GEOMETRY)
    monkeypatch.setattr(segments, "RESERVE_STEP", 1 << 18)
    monkeypatch.setattr(segments, "RESERVE_LEAST", 1 << 18)
    real = os.posix_fallocate

    def limited(fd: int, at: int, size: int) -> None:
        if at >= 1 << 19:
            raise OSError(28, "No space left on device")
        real(fd, at, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    reserver = Reserver(arena.data_fd, GEOMETRY.data_bytes)
    reserver.start()
    reserver.join(10)
    assert reserver.ready == 1 << 19
    assert "only 524288 of 1048576 bytes" in reserver.failed
    assert "--l1-size-gb" in reserver.failed
    arena.close()


def client_holding(fd: int) -> subprocess.Popen:  # type: ignore[type-arg]
    """Another process that has inherited the lease descriptor, as a client has it by SCM_RIGHTS."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
        cwd="/",
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    os.close(fd)
    return process


def test_a_new_daemon_sees_which_clients_of_the_old_one_live(name: str) -> None:
    arena = open_segments(name, GEOMETRY)
    table = LeaseTable(arena.leases, arena.meta_fd)
    living, fd = table.add(epoch=1, pid=1, uid=0, name="living")
    client = client_holding(fd)
    _, fd = table.add(epoch=1, pid=2, uid=0, name="dead")
    dead = client_holding(fd)
    dead.kill()
    dead.wait()
    arena.close()

    again = open_segments(name, GEOMETRY)
    table = LeaseTable(again.leases, again.meta_fd)
    table.adopt()
    assert set(table.ghosts) == {living}
    assert table.bury_dead_ghosts() == 1
    fresh, fd = table.add(epoch=2, pid=3, uid=0, name="fresh")
    os.close(fd)
    assert fresh > living
    client.kill()
    client.wait()
    deadline = time.monotonic() + 5
    while table.bury_dead_ghosts() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not table.ghosts
    again.close()


def test_a_lease_descriptor_cannot_write(name: str) -> None:
    arena = open_segments(name, GEOMETRY)
    table = LeaseTable(arena.leases, arena.meta_fd)
    _, fd = table.add(epoch=1, pid=1, uid=0, name="x")
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)
    arena.close()


def test_all_lease_slots_can_be_used_and_used_again(name: str) -> None:
    arena = open_segments(name, GEOMETRY)
    table = LeaseTable(arena.leases, arena.meta_fd)
    for _ in range(2):
        ids = []
        for _ in range(layout.MAX_LEASES):
            lease, fd = table.add(epoch=1, pid=1, uid=0, name="x")
            os.close(fd)
            ids.append(lease)
        with pytest.raises(IndexError):
            table.add(epoch=1, pid=1, uid=0, name="x")
        for lease in ids:
            table.remove(lease)
    arena.close()


def test_the_stats_page_is_read_whole_or_not_at_all() -> None:
    from kvkeep.shm.stats import read_stats, write_stats

    meta = np.zeros(layout.ENTRY_OFFSET, dtype=np.uint8)
    page = meta[layout.STATS_OFFSET : layout.STATS_OFFSET + layout.STATS_BYTES]
    assert read_stats(meta) == b""
    assert write_stats(page, b'{"a": 1}')
    assert read_stats(meta) == b'{"a": 1}'
    assert not write_stats(page, b"x" * layout.STATS_BYTES)
    assert read_stats(meta) == b'{"a": 1}'
    page[:8].view(np.uint64)[0] += 1  # a writer died in the middle
    assert read_stats(meta, tries=3) == b""
    assert write_stats(page, b"{}")
    assert read_stats(meta) == b"{}"


def test_only_the_process_that_held_a_lease_can_say_that_its_copies_ended(name: str) -> None:
    arena = open_segments(name, GEOMETRY)
    table = LeaseTable(arena.leases, arena.meta_fd)
    lease, fd = table.add(epoch=1, pid=10, uid=5, name="living")
    client = client_holding(fd)
    table = LeaseTable(arena.leases, arena.meta_fd)
    table.adopt()
    assert table.is_ghost_of(lease, pid=10, uid=5)
    assert not table.is_ghost_of(lease, pid=11, uid=5)
    assert not table.is_ghost_of(lease, pid=10, uid=6)
    assert not table.is_ghost_of(lease + 1, pid=10, uid=5)
    client.kill()
    client.wait()
    arena.close()
