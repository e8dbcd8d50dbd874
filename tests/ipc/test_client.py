"""The client against a daemon that behaves: what a user of the library sees."""

from __future__ import annotations

import copy
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.client_store import Stored
from kvkeep.ipc.errors import AttachRefused, Denied, ProtocolError, Unavailable
from tests.ipc.conftest import SIZE, content, eventually, hashes
from tests.ipc.fake_daemon import FakeDaemon


def test_what_was_stored_is_found_and_read_back(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = hashes(8)
    result = kv.store(ns, chain, [content(i) for i in range(8)])
    assert (result.stored, result.present, result.refused, result.failed) == (8, 0, 0, 0)
    assert result
    targets = np.zeros((9, SIZE), np.uint8)
    with kv.lookup(ns, chain + hashes(1, salt=9)) as found:
        assert found.ready == len(found) == 8
        assert kv.retrieve(found, targets) == [True] * 8 + [False]
    assert all((targets[i] == content(i)).all() for i in range(8))
    assert fake.lookups == fake.stores == {}


def test_storing_again_says_present_and_only_the_missing_are_copied(kv: Client, ns: Namespace) -> None:
    kv.store(ns, hashes(4), [content(i) for i in range(4)])
    result = kv.store(ns, hashes(6), [content(i) for i in range(6)])
    assert result.outcome == [Stored.PRESENT] * 4 + [Stored.STORED] * 2
    with kv.lookup(ns, hashes(6)) as found:
        target = np.zeros(SIZE, np.uint8)
        assert kv.retrieve(found, [target], start=5) == [True]
    assert (target == content(5)).all()


def test_a_part_of_a_chain_can_be_stored(kv: Client, ns: Namespace) -> None:
    kv.store(ns, hashes(2), [content(0), content(1)])
    assert kv.store(ns, hashes(4), [content(2), content(3)], start=2).stored == 2
    assert kv.lookup(ns, hashes(4)).ready == 4
    assert kv.store(ns, hashes(4), [], start=4).outcome == []


def test_a_full_arena_is_refused_and_counted_and_nothing_waits(kv: Client, ns: Namespace) -> None:
    result = kv.store(ns, hashes(300), np.zeros((300, SIZE), np.uint8))
    assert result.stored + result.refused == 300
    assert result.refused > 0
    assert not result


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "float16", "array", "list of rows", "rows"])
def test_all_kinds_of_buffers(kv: Client, ns: Namespace, kind: str) -> None:
    source: Any = np.stack([content(0), content(1)])
    target: Any = np.zeros((2, SIZE), np.uint8)
    given = {
        "bytes": [row.tobytes() for row in source],
        "bytearray": [bytearray(row) for row in source],
        "memoryview": [memoryview(row) for row in source],
        "float16": list(source.view(np.float16).reshape(2, 4, -1)),
        "array": source,
        "list of rows": list(source),
        "rows": np.concatenate([source, source], axis=1)[:, :SIZE],  # rows with a stride
    }[kind]
    assert kv.store(ns, hashes(2), given).stored == 2
    if kind == "float16":
        target = list(target.view(np.float16).reshape(2, 4, -1))
    elif kind in ("bytearray", "memoryview"):
        target = [bytearray(SIZE), bytearray(SIZE)]
    assert kv.retrieve(kv.lookup(ns, hashes(2)), target) == [True, True]
    assert b"".join(bytes(t) for t in target) == source.tobytes()


def test_torch_tensors_are_taken_without_importing_torch(kv: Client, ns: Namespace) -> None:
    code = "import sys; import kvkeep.ipc.client; sys.exit('torch' in sys.modules or 'zmq.asyncio' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    torch = pytest.importorskip("torch")
    source = torch.arange(2 * SIZE // 2, dtype=torch.int16).view(torch.bfloat16).reshape(2, -1)
    target = torch.zeros_like(source)
    assert kv.store(ns, hashes(2), source).stored == 2
    assert kv.retrieve(kv.lookup(ns, hashes(2)), target) == [True, True]
    assert torch.equal(source.view(torch.int16), target.view(torch.int16))


@pytest.mark.parametrize(
    ("buffers", "why"),
    [
        ([np.zeros(SIZE - 1, np.uint8)] * 2, "has 4095 bytes"),
        (np.zeros((2, 10), np.uint8), "rows have 10"),
        ([np.zeros((SIZE, 2), np.uint8)[:, 0]] * 2, "not contiguous"),
        ([np.zeros(SIZE, np.uint8)], "1 buffers for the 2 chunks"),
        ([b""] * 2, "has 0 bytes"),
    ],
)
def test_buffers_that_cannot_be_right_are_one_clear_error(
    kv: Client, ns: Namespace, fake: FakeDaemon, buffers: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        kv.store(ns, hashes(2), buffers)
    assert fake.stores == {}, "a reservation stayed behind"
    assert kv.store(ns, hashes(2), [content(0), content(1)]).stored == 2


def test_a_read_only_target_is_refused_and_the_reader_is_still_confirmed(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    kv.store(ns, hashes(1), [content(0)])
    with pytest.raises(ValueError, match="read-only"):
        kv.retrieve(kv.lookup(ns, hashes(1)), [bytes(SIZE)])
    assert fake.lookups == {}


@pytest.mark.parametrize("bad", [b"x" * 31, [b"x" * 31], [b"x" * 31, b"y" * 33]])
def test_hashes_of_a_wrong_length_are_refused(kv: Client, ns: Namespace, bad: Any) -> None:
    with pytest.raises(ValueError, match="32"):
        kv.lookup(ns, bad)


def test_an_endless_deadline_has_an_end(kv: Client, ns: Namespace) -> None:
    assert kv.lookup(ns, hashes(1), deadline_s=float("inf")).ready == 0
    assert kv.begin_lookup(ns, hashes(1), wait_s=1e9, deadline_s=float("inf")).wait(float("inf")).ready == 0


def test_hashes_come_packed_or_as_a_list(kv: Client, ns: Namespace) -> None:
    packed = hashes(3)
    kv.store(ns, [packed[i : i + 32] for i in range(0, 96, 32)], [content(i) for i in range(3)])
    for form in (packed, bytearray(packed), memoryview(packed), np.frombuffer(packed, np.uint8)):
        assert kv.lookup(ns, form, readers=0).ready == 3
    assert kv.lookup(ns, b"").ready == 0


def test_a_lookup_that_only_asks_holds_nothing(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    found = kv.lookup(ns, hashes(1), readers=0)
    assert (found.ready, found.handle, found.alive) == (1, 0, False)
    assert kv.retrieve(found, [bytearray(SIZE)]) == [False]
    assert fake.lookups == {}


def test_low_level_reserve_writes_and_commits_what_is_complete(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    with kv.reserve(ns, hashes(3)) as reservation:
        assert reservation.granted == [0, 1, 2]
        assert reservation.write(0, content(0))
        with reservation.copying() as allowed:
            assert allowed
            reservation.views[1][:] = content(1)
        assert reservation.commit([True, True, False]) == [m.Outcome.SEALED, m.Outcome.SEALED, m.Outcome.ABORTED]
        assert not reservation.write(2, content(2)), "written after the commit"
    assert kv.lookup(ns, hashes(3)).ready == 2


def test_a_reservation_that_is_left_is_aborted(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    def fail() -> None:
        with kv.reserve(ns, hashes(1)) as reservation:
            reservation.write(0, content(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert fake.stores == {}
    assert kv.lookup(ns, hashes(1)).ready == 0


def test_dropped_objects_give_their_handles_back(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    kv.lookup(ns, hashes(1))
    kv.reserve(ns, hashes(2), start=1)
    kv.begin_lookup(ns, hashes(1))
    kv.open_read(kv.lookup(ns, hashes(1)).hand_over(), 0, 0, 1)
    eventually(lambda: not fake.lookups and not fake.stores)


def test_another_client_reads_by_handle(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(2), [content(0), content(1)])
    handle = kv.lookup(ns, hashes(2)).hand_over()
    with Client.attach(fake.run_dir) as worker:
        reading = worker.open_read(handle, 0, 0, 2)
        assert reading is not None
        target = bytearray(SIZE)
        assert reading.read(1, target)
        assert bytes(target) == content(1).tobytes()
        assert (reading.views[0] == content(0)).all()
        assert reading.validate() == [True, True]
        with pytest.raises(ValueError, match="read-only"):
            reading.views[0][0] = 1
        reading.confirm()
        assert not reading.read(0, target), "read after the confirmation"
        assert fake.lookups == {}
        assert worker.open_read(handle, 0, 0, 2) is None
        assert worker.open_read(0, 0, 0, 2) is None


def test_a_handle_can_be_given_up_or_confirmed_without_reading(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    kv.release_handle(kv.lookup(ns, hashes(1)).hand_over())
    assert fake.lookups == {}
    kv.confirm_handle(kv.lookup(ns, hashes(1)).hand_over(), 0)
    assert fake.lookups == {}


def test_release_keeps_the_head_that_is_asked_for(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(3), [content(i) for i in range(3)])
    found = kv.lookup(ns, hashes(3))
    found.release(keep=2)
    assert found.ready == 2
    assert fake.requests[-1] == m.Release(fake.requests[-1].lease, fake.epoch, found.handle, 2)
    found.release()
    found.release()
    assert fake.count(m.Release) == 2


def test_a_range_can_be_read_in_parts_and_is_confirmed_once(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(4), [content(i) for i in range(4)])
    found, target = kv.lookup(ns, hashes(4)), np.zeros((2, SIZE), np.uint8)
    assert kv.retrieve(found, target, confirm=False) == [True, True]
    assert kv.retrieve(found, target, start=2, confirm=False) == [True, True]
    assert (target[1] == content(3)).all()
    kv.ping()
    assert fake.count(m.Confirm) == 0
    assert kv.retrieve(found, [], start=4) == []
    assert fake.count(m.Confirm) == 1


def test_checksums_are_stored_and_a_flipped_bit_is_a_miss(fake: FakeDaemon) -> None:
    with Client.attach(fake.run_dir, checksums=True) as kv:
        ns = kv.register({"model": "m"}, shard_bytes=SIZE)
        kv.store(ns, hashes(2), [content(0), content(1)])
        assert kv.retrieve(kv.lookup(ns, hashes(2)), np.zeros((2, SIZE), np.uint8)) == [True, True]
        os.pwrite(fake.arena.data_fd, b"\xff\x00\xff", int(fake.arena.entries[1]["offset"]))
        assert kv.retrieve(kv.lookup(ns, hashes(2)), np.zeros((2, SIZE), np.uint8)) == [True, False]
        reading = kv.open_read(kv.lookup(ns, hashes(2)).hand_over(), 0, 0, 2)
        assert reading is not None
        assert [reading.read(i, bytearray(SIZE)) for i in range(2)] == [True, False]
        reading.confirm()


def test_pending_lookups_are_announced_by_the_eventfd(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    fake.pending = True
    pending = kv.begin_lookup(ns, hashes(1), wait_s=5)
    eventually(lambda: fake.count(m.Lookup) == 1)
    assert pending.poll() is None
    fake.finish_lookups()
    eventually(lambda: readable(kv.eventfd))
    eventually(lambda: pending.poll() is not None)
    found = pending.poll()
    assert found is not None
    assert found.ready == 1
    assert kv.retrieve(found, [bytearray(SIZE)]) == [True]


def test_waiting_for_a_pending_lookup(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    assert kv.begin_lookup(ns, hashes(1)).wait().ready == 1
    fake.pending = True
    timer = threading.Timer(0.1, fake.finish_lookups)
    timer.start()
    assert kv.lookup(ns, hashes(1), wait_s=5).ready == 1
    timer.join()


def test_a_cancelled_lookup_leaves_nothing_whenever_the_answer_comes(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    kv.store(ns, hashes(1), [content(0)])
    before = kv.begin_lookup(ns, hashes(1))
    before.cancel()
    after = kv.begin_lookup(ns, hashes(1))
    after.wait()
    after.cancel()
    fake.pending = True
    parked = kv.begin_lookup(ns, hashes(1), wait_s=5)
    eventually(lambda: len(fake.unfinished) == 1)
    parked.cancel()
    fake.finish_lookups()
    eventually(lambda: not fake.lookups)
    assert [p.poll().ready for p in (before, parked)] == [0, 0]  # type: ignore[union-attr]


def test_any_thread_may_call_anything(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for round_ in range(20):
            chain = hashes(2, salt=number * 100 + round_)
            kv.store(ns, chain, [content(number), content(round_)])
            target = np.zeros((2, SIZE), np.uint8)
            if kv.retrieve(kv.lookup(ns, chain), target) == [True, True] and (
                (target[0] != content(number)).any() or (target[1] != content(round_)).any()
            ):
                wrong.append((number, round_))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    eventually(lambda: not fake.lookups and not fake.stores)


def test_a_pending_lookup_may_be_polled_by_another_thread(kv: Client, ns: Namespace) -> None:
    kv.store(ns, hashes(1), [content(0)])
    pending = kv.begin_lookup(ns, hashes(1))
    ready: list[int] = []
    thread = threading.Thread(target=lambda: ready.append(pending.wait(5).ready))
    thread.start()
    thread.join()
    assert ready == [1]


def test_sockets_of_ended_threads_are_closed(kv: Client, ns: Namespace) -> None:
    for _ in range(10):
        thread = threading.Thread(target=lambda: kv.lookup(ns, hashes(1)))
        thread.start()
        thread.join()
    kv.lookup(ns, hashes(1))
    assert len(kv._session._channels) <= 2


def test_registering_is_idempotent_and_geometry_matters(kv: Client, ns: Namespace) -> None:
    assert kv.register({"model": "m"}, shard_bytes=SIZE) is ns
    assert ns.id > 0
    assert ns.stride == SIZE
    assert kv.register({"model": "m"}, shard_bytes=SIZE, shards=2) is not ns
    with pytest.raises(ValueError, match="positive"):
        kv.register({"model": "m"}, shard_bytes=0)


def test_a_refused_namespace_is_an_error_and_then_only_misses(kv: Client, fake: FakeDaemon) -> None:
    fake.refuse_namespaces = True
    for _ in range(2):
        with pytest.raises(ProtocolError, match="clear some") as caught:
            kv.register({"model": "n"}, shard_bytes=SIZE)
        assert caught.value.code == "limit"
    fake.refuse_namespaces = False
    assert kv.register({"model": "n"}, shard_bytes=SIZE).id > 0


def test_management_answers_or_raises(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    assert kv.stats() == {"kind": "Stats"}
    assert kv.list(ns) == {"kind": "List"}
    assert kv.check() == {"kind": "Check"}
    assert kv.ping() < 5
    assert kv.pin(ns, hashes(1)) == (7, 1)
    assert kv.unpin(7) == 3
    assert kv.delete(ns, hashes(1)) == 3
    with pytest.raises(Denied, match="uid 5"):
        kv.clear()
    fake.stop()
    eventually(lambda: not kv.attached)
    with pytest.raises(Unavailable, match="not attached"):
        kv.stats()


def test_a_management_client_maps_nothing(fake: FakeDaemon) -> None:
    with Client.attach(fake.run_dir, arena=False, name="cli") as kv:
        assert fake.hellos[-1].name == "cli"
        assert kv.stats() == {"kind": "Stats"}
        ns = kv.register({"model": "m"}, shard_bytes=SIZE)
        with pytest.raises(ValueError, match="arena=False"):
            kv.reserve(ns, hashes(1))


def test_attaching_to_nothing_is_one_sentence_within_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"attach.sock within 0.1 s .*start kvkeepd"):
        Client.attach(tmp_path, deadline_s=0.1)


@pytest.mark.parametrize("code", ["version", "denied"])
def test_a_refusal_is_raised_with_the_daemons_sentence(fake: FakeDaemon, code: str) -> None:
    fake.refuse = m.Refused(code, "upgrade the client")
    with pytest.raises(AttachRefused, match="upgrade the client") as caught:
        Client.attach(fake.run_dir)
    assert caught.value.code == code


def test_a_refusal_is_logged_once_by_a_client_that_does_not_wait(
    fake: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.ipc.client_session.REFUSED_BACKOFF_S", 0.01)
    fake.refuse = m.Refused("denied", "uid 5 is not allowed")
    with Client.attach(fake.run_dir, wait=False) as kv:
        eventually(lambda: len(fake.hellos) > 3)
        assert sum("uid 5" in record.message for record in caplog.records) == 1
        fake.refuse = None
        eventually(lambda: kv.attached)


def test_a_refusal_is_one_line_however_many_clients_a_process_has_and_news_after_an_attach(
    fake: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the daemon was refused so often that the pause has grown."""
    monkeypatch.setattr("kvkeep.ipc.client_session.REFUSED_BACKOFF_S", 0.01)
    monkeypatch.setattr("kvkeep.ipc.client_session.BACKOFF_S", (0.01, 0.02))

    def told() -> int:
        return sum("upgrade the client" in record.message for record in caplog.records)

    for times in (1, 2):
        fake.refuse = m.Refused("version", "upgrade the client")
        with Client.attach(fake.run_dir, wait=False) as one, Client.attach(fake.run_dir, wait=False) as other:
            seen = len(fake.hellos)
            eventually(lambda: len(fake.hellos) > seen + 12)  # noqa: B023
            assert told() == times
            fake.refuse = None
            eventually(lambda: one.attached and other.attached)


def test_the_environment_says_where(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_RUN_DIR", str(fake.run_dir))
    with Client.attach() as kv:
        assert kv.attached


def test_a_client_is_not_pickled_or_copied(kv: Client) -> None:
    for duplicate in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="attach a new one"):
            duplicate(kv)


def test_a_fork_is_told_and_does_not_keep_the_lease(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    ready, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kv.lookup(ns, hashes(1))
        except RuntimeError as error:
            status = 0 if "after the fork" in str(error) else 2
        os.write(write, bytes([status]))
        import time

        time.sleep(30)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"\0"
        assert kv.lookup(ns, hashes(1)).ready == 0  # the parent goes on
        assert len(fake.leases) == 1
        kv.close()
        eventually(lambda: not fake.leases)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(write)


def in_a_fork(call: Callable[[], object]) -> str:
    """What it raises there; "" = nothing."""
    ready, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode() or b" ")
        os._exit(0)
    try:
        assert select.select([ready], [], [], 20)[0], "the fork hangs"
        return os.read(ready, 4096).decode().strip()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(write)


def test_nothing_is_copied_or_waited_for_in_a_fork(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    before = os.pread(fake.arena.data_fd, 2 * SIZE, 0)
    fake.pending = True
    with kv.lookup(ns, hashes(1)) as found, kv.reserve(ns, hashes(2), start=1) as reservation:
        reading = kv.open_read(found.handle, 0, 0, 1)
        assert reading is not None
        pending = kv.begin_lookup(ns, hashes(1), wait_s=60)
        calls: list[Callable[[], object]] = [
            lambda: reservation.write(0, content(1)),
            lambda: reservation.copying().__enter__(),
            lambda: reading.read(0, bytearray(SIZE)),
            lambda: reading.read_all([np.empty(SIZE, np.uint8)]),
            lambda: reading.copying().__enter__(),
            pending.poll,
            lambda: pending.wait(0.1),
            reservation.commit,
            found.release,
        ]
        for call in calls:
            assert "RuntimeError" in in_a_fork(call)
            assert "after the fork" in in_a_fork(call)
        assert os.pread(fake.arena.data_fd, 2 * SIZE, 0) == before
        fake.finish_lookups()
        assert pending.wait().ready == 1  # the parent goes on
        assert reservation.write(0, content(1))
        assert reservation.commit() == [m.Outcome.SEALED]
    assert kv.counters["attaches"] == 1


def test_nothing_works_after_close_and_views_stay(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    kv.store(ns, hashes(1), [content(0)])
    reading = kv.open_read(kv.lookup(ns, hashes(1)).hand_over(), 0, 0, 1)
    assert reading is not None
    kv.close()
    kv.close()
    assert not kv.attached
    assert (reading.views[0] == content(0)).all()
    assert not reading.read(0, bytearray(SIZE))
    assert kv.store(ns, hashes(1), [content(0)]).failed == 1
    assert kv.lookup(ns, hashes(1)).ready == 0
    eventually(lambda: not fake.leases)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
