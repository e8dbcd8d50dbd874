"""The client against a daemon that dies, hangs, answers late, lies, or comes back as another."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvkeep.ipc import client_session, client_upkeep
from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.client_store import Stored, reservation_of
from kvkeep.ipc.errors import ProtocolError, Unavailable
from kvkeep.shm import layout
from tests.ipc.conftest import SIZE, at_epoch, content, eventually, hashes
from tests.ipc.fake_daemon import DATA_BYTES, FakeDaemon


def stored(kv: Client, ns: Namespace, count: int = 2) -> bytes:
    chain = hashes(count)
    assert kv.store(ns, chain, [content(i) for i in range(count)])
    return chain


def works(kv: Client, ns: Namespace, salt: int = 77) -> bool:
    """One whole round trip through every step of the data path."""
    chain, target = hashes(1, salt=salt), bytearray(SIZE)
    kv.store(ns, chain, [content(salt)])
    return kv.retrieve(kv.lookup(ns, chain), [target]) == [True] and bytes(target) == content(salt).tobytes()


# ---- the daemon is gone ----------------------------------------------------------------------------------------------


def test_without_a_daemon_every_call_is_a_miss_at_once(tmp_path: Path) -> None:
    with Client.attach(tmp_path, wait=False) as kv:
        ns = kv.register({"model": "m"}, shard_bytes=SIZE)
        assert (kv.attached, kv.epoch, ns.id) == (False, 0, 0)
        result = kv.store(ns, hashes(2), [content(0), content(1)])
        assert result.outcome == [Stored.UNAVAILABLE] * 2
        assert kv.lookup(ns, hashes(2), wait_s=30).ready == 0
        pending = kv.begin_lookup(ns, hashes(2), wait_s=30).poll()
        assert pending is not None
        assert pending.ready == 0
        reservation = kv.reserve(ns, hashes(2))
        assert (reservation.granted, reservation.views, reservation.commit()) == ([], [], [])
        assert kv.open_read(1, 0, 0, 1) is None
        with pytest.raises(Unavailable):
            kv.ping()
        assert "not attached" in kv.state


def test_a_daemon_that_starts_later_is_found_and_knows_the_namespaces(tmp_path: Path) -> None:
    with Client.attach(tmp_path, wait=False) as kv:
        ns = kv.register({"model": "m"}, shard_bytes=SIZE)
        time.sleep(0.1)
        daemon = FakeDaemon(tmp_path)
        try:
            eventually(lambda: kv.attached)
            assert ns.id > 0
            assert works(kv, ns)
        finally:
            daemon.close()


def test_the_end_of_the_daemon_is_noticed_at_once_and_ends_all_waits(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    fake.hang()
    answers: list[object] = []
    calls: list[Any] = [
        lambda: kv.lookup(ns, hashes(1), deadline_s=60).ready,
        lambda: kv.begin_lookup(ns, hashes(1), wait_s=60).wait(60).ready,
        lambda: kv.reserve(ns, hashes(1), deadline_s=60).granted,
    ]
    threads = [threading.Thread(target=lambda call=call: answers.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    fake.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(map(str, answers)) == ["0", "0", "[]"]


def test_a_restart_needs_nothing_from_the_caller(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain, old_id = stored(kv, ns), ns.id
    for epoch in range(2, 6):
        fake.restart()
        at_epoch(kv, epoch)
        target = np.zeros((2, SIZE), np.uint8)
        assert kv.retrieve(kv.lookup(ns, chain), target) == [True, True]
        assert (target[1] == content(1)).all()
    assert ns.id != old_id
    assert kv.counters["attaches"] == 5


def test_a_restart_between_any_two_steps_is_a_miss(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = stored(kv, ns)
    found = kv.lookup(ns, chain)
    reservation = kv.reserve(ns, hashes(1, salt=5))
    reading = kv.open_read(kv.lookup(ns, chain).hand_over(), 0, 0, 2)
    pending = kv.begin_lookup(ns, chain)
    assert reading is not None
    fake.restart()
    eventually(lambda: kv.epoch == 2)
    assert not found.alive
    assert kv.retrieve(found, [bytearray(SIZE)] * 2) == [False, False]
    assert reservation.revoked
    assert not reservation.write(0, content(0))
    with reservation.copying() as allowed:
        assert not allowed
    assert reservation.commit() == [m.Outcome.LOST]
    assert reading.revoked
    assert not reading.read(0, bytearray(SIZE))
    assert (reading.views[0] == content(0)).all(), "an old view must stay readable"
    assert pending.wait(1).ready == 0
    for thing in (found, reservation, reading, pending):
        end = getattr(thing, "release", None) or getattr(thing, "abort", None) or getattr(thing, "confirm", None)
        (end or thing.cancel)()  # type: ignore[union-attr]
    assert fake.lookups == fake.stores == {}
    assert works(kv, ns)


def test_a_lookup_of_a_dead_daemon_wakes_the_event_loop(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    import select

    fake.pending = True
    pending = kv.begin_lookup(ns, hashes(1), wait_s=60)
    fake.stop()
    assert select.select([kv.eventfd], [], [], 10)[0]
    eventually(lambda: pending.poll() is not None)


def test_the_client_attaches_again_only_after_the_last_copy_has_ended(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    reservation = kv.reserve(ns, hashes(1))
    lease = next(iter(fake.leases))
    with reservation.copying() as allowed:
        assert allowed
        fake.restart()
        eventually(lambda: not kv.attached)
        time.sleep(0.2)
        assert len(fake.hellos) == 1, "attached again during a copy"
        assert kv.lookup(ns, hashes(1)).ready == 0
        ended = time.monotonic()
    eventually(lambda: kv.attached)
    assert fake.admitted_at[-1] >= ended
    assert fake.hellos[-1].previous_lease == lease


def test_objects_that_nobody_finishes_do_not_keep_the_client_away(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    stored(kv, ns)
    kept = [kv.reserve(ns, hashes(1, salt=3)), kv.open_read(kv.lookup(ns, hashes(2)).hand_over(), 0, 0, 2)]
    fake.restart()
    eventually(lambda: kv.epoch == 2)
    assert all(thing is not None and thing.revoked for thing in kept)


def test_the_lease_lock_ends_with_the_last_view_of_the_old_mapping(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:data" in line for line in maps) - 0

    before = mappings()
    reservation: Any = kv.reserve(ns, hashes(1))
    view = reservation.views[0]
    fake.restart(fresh_arena=True)
    eventually(lambda: kv.epoch == 2)
    assert mappings() == before + 1
    view[:] = 1  # the old one is still there
    del view, reservation
    gc.collect()
    eventually(lambda: mappings() == before)


@pytest.mark.parametrize("code", ["stale_epoch", "unknown_lease"])
def test_a_daemon_that_does_not_know_us_is_attached_again(
    kv: Client, ns: Namespace, fake: FakeDaemon, code: str
) -> None:
    chain = stored(kv, ns)
    replies = [m.Error(code, "attach again", fake.epoch)]
    fake.twist = lambda request, reply: replies.pop() if replies else reply
    assert kv.lookup(ns, chain).ready == 0
    eventually(lambda: kv.attached)
    assert kv.counters["attaches"] == 2
    assert kv.lookup(ns, chain).ready == 2


def test_another_epoch_in_any_reply_is_noticed(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = stored(kv, ns)
    replies = [1]
    fake.twist = lambda request, reply: msgspec.structs.replace(reply, epoch=99) if replies and replies.pop() else reply
    assert kv.lookup(ns, chain).ready == 0
    eventually(lambda: kv.counters["attaches"] == 2 and kv.attached)


def test_a_daemon_that_always_throws_us_out_is_not_stormed(
    kv: Client, ns: Namespace, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_session, "STABLE_S", 60.0)
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        fake.drop_clients()
        time.sleep(0.005)
    assert len(fake.hellos) < 12


def test_an_unknown_namespace_is_registered_again(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = stored(kv, ns)
    replies = [m.Error("unknown_namespace", "never heard", fake.epoch)]
    fake.twist = lambda request, reply: replies.pop() if replies else reply
    assert kv.lookup(ns, chain).ready == 0
    eventually(lambda: kv.lookup(ns, chain).ready == 2)


# ---- the daemon hangs, or is late ------------------------------------------------------------------------------------


def test_a_hung_daemon_costs_one_deadline_and_then_nothing_until_it_answers(
    kv: Client, ns: Namespace, fake: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    chain = stored(kv, ns)
    fake.hang()
    assert kv.lookup(ns, chain, deadline_s=0.15).ready == 0
    assert kv.hung
    for _ in range(20):  # each would wait for a minute
        assert kv.lookup(ns, chain, deadline_s=60).ready == 0
        assert kv.store(ns, chain, [content(0), content(1)], deadline_s=60).failed == 2
        assert kv.begin_lookup(ns, chain, wait_s=60).wait(60).ready == 0
        assert kv.open_read(1, 0, 0, 1, deadline_s=60) is None
    assert kv.counters["breaker_opens"] == 1
    assert sum("did not answer LOOKUP of" in record.message for record in caplog.records) == 1
    fake.resume()
    eventually(lambda: not kv.hung)
    assert kv.lookup(ns, chain).ready == 2
    eventually(lambda: not fake.lookups)


def test_a_namespace_of_a_hung_daemon_is_registered_when_it_answers(kv: Client, fake: FakeDaemon) -> None:
    fake.hang()
    ns = kv.register({"model": "later"}, shard_bytes=SIZE, deadline_s=0.05)
    assert ns.id == 0
    fake.resume()
    eventually(lambda: ns.id > 0)
    assert works(kv, ns)
    assert kv.counters["attaches"] == 1


def test_a_refused_request_is_a_miss_and_told_once(
    kv: Client, ns: Namespace, fake: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    chain = stored(kv, ns)
    fake.twist = lambda request, reply: m.Error("limit", "too many handles; release some", fake.epoch)
    for _ in range(3):
        assert kv.lookup(ns, chain).ready == 0
        assert kv.begin_lookup(ns, chain).wait().ready == 0
        assert kv.store(ns, chain, [content(0), content(1)]).failed == 2
    assert sum("release some" in record.message for record in caplog.records) == 1
    assert kv.counters["refused"] == 9


def test_a_caller_in_a_hurry_does_not_open_the_breaker_for_all(
    kv: Client, ns: Namespace, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_upkeep, "UNANSWERED_S", 30.0)
    chain = stored(kv, ns)
    fake.hang()
    assert kv.lookup(ns, chain, deadline_s=0.0).ready == 0
    assert kv.lookup(ns, chain, deadline_s=0.02).ready == 0
    assert kv.store(ns, hashes(1, salt=5), [content(0)], deadline_s=0.001).failed == 1
    assert not kv.hung
    fake.resume()
    assert kv.lookup(ns, chain).ready == 2
    attachment = kv._session.attachment
    eventually(lambda: attachment is not None and not attachment.doubted)  # the ping was answered
    assert (kv.counters["late_calls"] > 0, kv.counters["breaker_opens"]) == (True, 0)
    eventually(lambda: not fake.lookups and not fake.stores)


def test_callers_in_a_hurry_do_not_wait_again_and_again_for_a_daemon_that_hangs(
    kv: Client, ns: Namespace, fake: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    fake.hang()
    assert kv.lookup(ns, hashes(1), deadline_s=0.01).ready == 0
    eventually(lambda: kv.hung)  # a ping was not answered either
    assert any("did not answer a ping" in record.message for record in caplog.records)
    fake.resume()
    eventually(lambda: not kv.hung)
    assert kv.counters["breaker_opens"] == 1


def test_deadlines_of_a_millisecond_are_kept(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    fake.hang()
    begin = time.monotonic()
    assert kv.lookup(ns, hashes(1), deadline_s=0.001).ready == 0
    assert kv.lookup(ns, hashes(1), deadline_s=0.0).ready == 0
    assert time.monotonic() - begin < 30


def test_late_answers_give_their_handles_back(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = stored(kv, ns)
    fake.hold()
    assert kv.lookup(ns, chain, deadline_s=0.05).ready == 0
    eventually(lambda: fake.count(m.Ping) > 0)  # its answer is held too
    kv._session.attachment.hung = False  # type: ignore[union-attr]
    assert kv.reserve(ns, hashes(1, salt=4), deadline_s=0.05).granted == []
    eventually(lambda: len(fake.lookups) == len(fake.stores) == 1)
    fake.let_go()
    eventually(lambda: not fake.lookups and not fake.stores)
    assert kv.counters["given_back"] >= 2
    assert works(kv, ns)


def test_late_answers_of_a_thread_that_has_ended_are_given_back_too(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    chain = stored(kv, ns)
    fake.hold()
    thread = threading.Thread(target=lambda: kv.lookup(ns, chain, deadline_s=0.05))
    thread.start()
    thread.join()
    eventually(lambda: fake.lookups)
    fake.let_go()
    eventually(lambda: not fake.lookups)


def test_a_pending_lookup_answers_after_its_deadline_without_being_waited_for(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    stored(kv, ns)
    fake.pending = True
    pending = kv.begin_lookup(ns, hashes(2), wait_s=0.05, deadline_s=0.05)
    eventually(lambda: pending.poll() is not None)
    found = pending.poll()
    assert found is not None
    assert found.ready == 0
    fake.finish_lookups()
    eventually(lambda: not fake.lookups)


def test_a_commit_without_an_answer_is_not_reported_as_stored(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    fake.twist = lambda request, reply: None if isinstance(request, m.Commit) else reply
    result = kv.store(ns, hashes(1), [content(0)], deadline_s=0.5)
    assert result.outcome in ([Stored.LOST], [Stored.UNAVAILABLE])
    eventually(lambda: not fake.stores)


def test_closing_while_the_daemon_hangs_does_not_wait_for_it(fake: FakeDaemon) -> None:
    kv = Client.attach(fake.run_dir)
    fake.hang()
    begin = time.monotonic()
    kv.close()
    assert time.monotonic() - begin < 30
    fake.resume()
    eventually(lambda: not fake.leases)


def test_closing_during_a_copy_returns_and_keeps_the_lease_until_the_copy_ends(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    reservation = kv.reserve(ns, hashes(1))
    with reservation.copying() as allowed:
        assert allowed
        kv.close()
        time.sleep(0.1)
        assert len(fake.leases) == 1
    eventually(lambda: not fake.leases)


def test_an_idle_client_sends_nothing_and_is_kept(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    works(kv, ns)
    time.sleep(0.2)
    before = len(fake.requests)
    time.sleep(0.5)
    assert len(fake.requests) == before
    assert len(fake.leases) == 1


# ---- the daemon lies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"hello", b"\x91\xa3xyz", bytes(range(100, 200)), b"\x91" * 200])
def test_garbage_instead_of_a_reply_is_a_miss(kv: Client, ns: Namespace, fake: FakeDaemon, garbage: bytes) -> None:
    chain = stored(kv, ns)
    fake.twist = lambda request, reply: garbage
    assert kv.lookup(ns, chain, deadline_s=5).ready == 0
    assert kv.store(ns, chain, [content(0), content(1)]).failed == 2
    assert kv.begin_lookup(ns, chain).wait(5).ready == 0
    with pytest.raises((Unavailable, ProtocolError)):
        kv.stats()
    assert kv.counters["protocol_errors"] >= 4
    assert not kv.hung
    fake.twist = None
    assert kv.lookup(ns, chain).ready == 2


@pytest.mark.parametrize(
    "lie",
    [
        {"offsets": np.array([0, DATA_BYTES], "<u8").tobytes()},
        {"offsets": np.array([0, DATA_BYTES - SIZE + 1], "<u8").tobytes()},
        {"offsets": np.array([0, 2**64 - 1], "<u8").tobytes()},
        {"offsets": b"\0" * 8},
        {"offsets": b"\0" * 17},
        {"entries": np.array([0, 1024], "<u4").tobytes()},
        {"entries": np.array([0, 2**32 - 1], "<u4").tobytes()},
        {"entries": b""},
        {"generations": b"\0" * 4},
        {"checksums": b"\0" * 4},
        {"length": 0},
        {"length": -1},
        {"length": 2**40},
    ],
)
def test_extents_that_cannot_be_right_are_a_miss_and_nothing_is_touched(
    kv: Client, ns: Namespace, fake: FakeDaemon, lie: dict[str, Any]
) -> None:
    chain = stored(kv, ns)
    fake.twist = lambda request, reply: msgspec.structs.replace(reply, **lie) if isinstance(reply, m.Extents) else reply
    target = np.zeros((2, SIZE), np.uint8)
    assert kv.retrieve(kv.lookup(ns, chain), target) == [False, False]
    assert not target.any()
    eventually(lambda: not fake.lookups)


@pytest.mark.parametrize(
    "lie",
    [
        {"offsets": np.array([0, DATA_BYTES - SIZE + 1], "<u8").tobytes()},
        {"offsets": np.array([0], "<u8").tobytes()},
        {"offsets": b"\0" * 15},
        {"verdicts": b"\0"},
        {"verdicts": b"\0\xff"},
        {"verdicts": b"\0" * 100},
        {"length": SIZE * 2},
        {"length": 0},
        {"handle": 0},
    ],
)
def test_grants_that_cannot_be_right_are_not_written_to(
    kv: Client, ns: Namespace, fake: FakeDaemon, lie: dict[str, Any]
) -> None:
    before = os.pread(fake.arena.data_fd, DATA_BYTES, 0)
    fake.twist = lambda request, reply: (
        msgspec.structs.replace(reply, **lie) if isinstance(reply, m.StoreReply) else reply
    )
    assert kv.store(ns, hashes(2), [content(0), content(1)]).failed == 2
    assert os.pread(fake.arena.data_fd, DATA_BYTES, 0) == before
    if "handle" not in lie:
        eventually(lambda: not fake.stores)


def test_answers_of_the_wrong_kind_are_a_miss(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = stored(kv, ns)
    fake.twist = lambda request, reply: m.Ok(fake.epoch)
    assert kv.lookup(ns, chain).ready == 0
    assert kv.store(ns, chain, [content(0), content(1)]).failed == 2
    assert kv.begin_lookup(ns, chain).wait(5).ready == 0
    with pytest.raises(ProtocolError):
        kv.stats()
    fake.twist = lambda request, reply: m.LookupReply(fake.epoch, 5, 1000)
    assert kv.lookup(ns, chain).ready == 0


def test_a_chunk_that_changed_hands_during_the_copy_is_a_miss(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    chain = stored(kv, ns, 3)
    reading = kv.open_read(kv.lookup(ns, chain).hand_over(), 0, 0, 3)
    assert reading is not None
    fake.arena.entries[0]["generation"] += 1
    fake.arena.entries[1]["state"] = layout.State.EVICTING
    assert reading.validate() == [False, False, True]
    assert [reading.read(i, bytearray(SIZE)) for i in range(3)] == [False, False, True]
    reading.confirm()


@pytest.mark.parametrize(
    ("field", "value"), [("magic", 1), ("abi", 99), ("data_inode", 1), ("capacity", 1 << 40), ("data_bytes", 1)]
)
def test_an_arena_that_is_none_is_not_used(fake: FakeDaemon, field: str, value: int) -> None:
    fake.arena.block[field] = value
    with pytest.raises(Unavailable, match=r"superblock|ABI|belong|entries|size"):
        Client.attach(fake.run_dir, deadline_s=0.2)


def test_an_arena_that_is_shorter_than_said_is_not_mapped(fake: FakeDaemon) -> None:
    os.ftruncate(fake.arena.data_fd, DATA_BYTES - 4096)
    with pytest.raises(Unavailable, match="the daemon says"):
        Client.attach(fake.run_dir, deadline_s=0.2)


def test_restarts_under_load_never_give_wrong_bytes_or_errors(fake: FakeDaemon) -> None:
    """Threads store and load all the time; whatever comes back as True is right."""
    stop, hits = threading.Event(), [0]
    wrong: list[object] = []
    with Client.attach(fake.run_dir) as kv:
        ns = kv.register({"model": "m"}, shard_bytes=SIZE)

        def work(number: int) -> None:
            target = np.zeros((4, SIZE), np.uint8)
            chain = hashes(4, salt=number)
            sources = [content(number * 10 + i) for i in range(4)]
            while not stop.is_set():
                try:
                    kv.store(ns, chain, sources)
                    good = kv.retrieve(kv.lookup(ns, chain), target)
                    hits[0] += sum(good)
                    wrong.extend(i for i, ok in enumerate(good) if ok and (target[i] != sources[i]).any())
                except Exception as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(15):
            time.sleep(0.04)
            fake.restart()
        eventually(lambda: hits[0] > 0 and kv.attached)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert hits[0] > 0
        assert works(kv, ns)
        eventually(lambda: not fake.lookups and not fake.stores)


def test_a_daemon_that_ends_right_after_its_answer_made_no_protocol_error(kv: Client, ns: Namespace) -> None:
    attachment = kv._session.attachment
    assert attachment is not None
    reply = m.StoreReply(attachment.epoch, 1, ns.shard_bytes, bytes(1), bytes(8), -1)
    attachment.arena = None  # as the session's thread does when the connection ends
    reservation = reservation_of(kv._session, attachment, reply, chunks=1, start=0, length=ns.shard_bytes)
    assert not reservation.available
    assert kv.counters["protocol_errors"] == 0


def test_a_client_is_not_attached_any_more_as_soon_as_anybody_noticed_the_end(kv: Client) -> None:
    """A caller that meets the end must not be told afterwards that its miss was an attached daemon's answer."""
    attachment = kv._session.attachment
    assert attachment is not None
    assert kv.epoch == attachment.epoch
    attachment.alive = False
    assert (kv.attached, kv.epoch, kv.hung) == (False, 0, False)


# ---- threads that end ------------------------------------------------------------------------------------------------


def in_a_thread(call: Any) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


def test_a_pending_lookup_outlives_the_thread_that_began_it(kv: Client, ns: Namespace, fake: FakeDaemon) -> None:
    stored(kv, ns, 1)
    fake.pending = True
    pending = in_a_thread(lambda: kv.begin_lookup(ns, hashes(1), wait_s=60))
    in_a_thread(kv.ping)  # whoever opens a channel closes those that nobody needs
    fake.finish_lookups()
    with pending.wait() as found:
        assert found.ready == 1
    assert fake.lookups == {}


def test_what_comes_late_for_a_thread_that_ended_is_given_back_before_its_channel_is_closed(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    stored(kv, ns, 1)
    fake.hold()
    in_a_thread(lambda: kv.lookup(ns, hashes(1), deadline_s=0.2))
    kv._session.attachment.hung = False  # type: ignore[union-attr]
    in_a_thread(lambda: kv.begin_lookup(ns, hashes(1)).cancel())
    eventually(lambda: len(fake.lookups) == 2)
    fake.let_go()
    eventually(lambda: not fake.lookups)
    in_a_thread(kv.ping)
    kv._session._local = threading.local()
    kv.ping()
    eventually(lambda: len(kv._session._channels) <= 2)


def test_a_lookup_that_was_begun_and_dropped_is_given_back_without_another_call(
    kv: Client, ns: Namespace, fake: FakeDaemon
) -> None:
    stored(kv, ns, 1)
    kv.begin_lookup(ns, hashes(1))
    eventually(lambda: fake.count(m.Release) == 1)
    assert fake.lookups == {}
