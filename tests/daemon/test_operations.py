"""The operations of the protocol, through the client, against a real daemon."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvkeep.ipc import Client
from kvkeep.ipc.errors import ProtocolError
from kvkeep.ipc.messages import Outcome, Verdict
from tests.conftest import Daemon

SHARD = 8192


def hashes(name: object, n: int) -> bytes:
    return b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(n))


def content(name: object, n: int, shard: int = 0) -> np.ndarray:
    out = np.empty((n, SHARD), dtype=np.uint8)
    for i in range(n):
        seed = int.from_bytes(hashlib.sha256(f"{name}/{i}/{shard}".encode()).digest()[:8], "little")
        out[i] = np.random.default_rng(seed).integers(0, 256, SHARD, dtype=np.uint8)
    return out


@pytest.fixture
def attach(daemon: Daemon) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(name: str = "test") -> Client:
        clients.append(Client.attach(daemon.run_dir, name=name))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def settled(client: Client) -> dict:
    """The L1 part of the status, once every hand-back has arrived."""
    until = time.monotonic() + 5
    while True:
        l1 = client.stats()["l1"]
        if (not l1["references"] and not l1["reserved_bytes"]) or time.monotonic() > until:
            return l1
        time.sleep(0.01)


def test_what_one_client_stores_another_retrieves(attach: Callable[..., Client]) -> None:
    writer, reader = attach("writer"), attach("reader")
    ns = writer.register({"model": "m"}, shard_bytes=SHARD)
    result = writer.store(ns, hashes("a", 5), content("a", 5))
    assert result.stored == 5
    other = reader.register({"model": "m"}, shard_bytes=SHARD)
    target = np.zeros((5, SHARD), dtype=np.uint8)
    with reader.lookup(other, hashes("a", 9)) as found:
        assert found.ready == 5
        assert reader.retrieve(found, target) == [True] * 5
    assert (target == content("a", 5)).all()
    assert settled(writer)["references"] == 0
    assert writer.check()["ok"]


def test_every_rank_stores_its_shard_and_reads_it_back(attach: Callable[..., Client]) -> None:
    ranks = [attach(f"rank{i}") for i in range(3)]
    spaces = [c.register({"model": "tp"}, shard_bytes=SHARD, shards=3) for c in ranks]
    for rank in (1, 2, 0):
        assert ranks[0].lookup(spaces[0], hashes("a", 4)).ready == 0
        ranks[rank].store(spaces[rank], hashes("a", 4), content("a", 4, rank), shard=rank)
    found = ranks[0].lookup(spaces[0], hashes("a", 4))
    assert found.ready == 4
    for rank in range(3):
        reading = ranks[rank].open_read(found.handle, rank, 0, 4)
        assert reading is not None
        target = np.zeros((4, SHARD), dtype=np.uint8)
        assert reading.read_all(list(target)) == [True] * 4
        reading.confirm()
        assert (target == content("a", 4, rank)).all()
    assert settled(ranks[0])["references"] == 0
    assert ranks[0].check()["ok"]


def test_a_lookup_that_may_wait_gets_what_is_just_being_written(attach: Callable[..., Client]) -> None:
    writer, reader = attach("writer"), attach("reader")
    ns, other = (c.register({"model": "m"}, shard_bytes=SHARD) for c in (writer, reader))
    reservation = writer.reserve(ns, hashes("a", 3))
    pending = reader.begin_lookup(other, hashes("a", 3), wait_s=10)
    time.sleep(0.05)
    assert pending.poll() is None
    for i, view in enumerate(reservation.views):
        view[:] = content("a", 3)[i]
    assert reservation.commit() == [Outcome.SEALED] * 3
    assert os.read(reader.eventfd, 8) if _readable(reader.eventfd) else False
    found = pending.wait(5)
    assert found.ready == 3
    found.release()
    assert settled(writer)["references"] == 0


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 5)[0])


def test_a_lookup_that_waits_ends_at_its_deadline_with_what_is_ready(attach: Callable[..., Client]) -> None:
    writer, reader = attach("writer"), attach("reader")
    ns, other = (c.register({"model": "m"}, shard_bytes=SHARD) for c in (writer, reader))
    writer.store(ns, hashes("a", 2), content("a", 2))
    reservation = writer.reserve(ns, hashes("a", 4), start=2)
    found = reader.lookup(other, hashes("a", 4), wait_s=0.2)
    assert found.ready == 2
    found.release()
    reservation.abort()
    assert settled(writer)["references"] == 0
    assert writer.check()["ok"]


def test_a_lookup_that_waits_is_released_when_the_writer_gives_up(attach: Callable[..., Client]) -> None:
    writer, reader = attach("writer"), attach("reader")
    ns, other = (c.register({"model": "m"}, shard_bytes=SHARD) for c in (writer, reader))
    reservation = writer.reserve(ns, hashes("a", 4))
    timer = threading.Timer(0.1, reservation.abort)
    timer.start()
    began = time.monotonic()
    assert reader.lookup(other, hashes("a", 4), wait_s=30).ready == 0
    assert time.monotonic() - began < 20
    timer.join()


def test_releasing_a_tail_keeps_the_head(attach: Callable[..., Client]) -> None:
    client = attach()
    ns = client.register({"model": "m"}, shard_bytes=SHARD)
    client.store(ns, hashes("a", 6), content("a", 6))
    found = client.lookup(ns, hashes("a", 6))
    entries = client.list(ns.id)["entries"]
    assert sum(e["references"] for e in entries) == 6
    found.release(keep=2)
    entries = client.list(ns.id)["entries"]
    assert sum(e["references"] for e in entries) == 2
    found.release()
    assert settled(client)["references"] == 0


def test_two_namespaces_with_equal_hashes_never_meet(attach: Callable[..., Client]) -> None:
    client = attach()
    one = client.register({"model": "m", "revision": 1}, shard_bytes=SHARD)
    two = client.register({"model": "m", "revision": 2}, shard_bytes=SHARD)
    client.store(one, hashes("a", 3), content("a", 3))
    assert client.lookup(two, hashes("a", 3)).ready == 0
    assert client.lookup(one, hashes("a", 3), readers=0).ready == 3


def test_a_pinned_prefix_survives_pressure_until_it_is_unpinned(attach: Callable[..., Client]) -> None:
    client = attach()
    ns = client.register({"model": "m"}, shard_bytes=SHARD)
    client.store(ns, hashes("pinned", 4), content("pinned", 4))
    pin, count = client.pin(ns, hashes("pinned", 4))
    assert count == 4
    for i in range(80):
        client.store(ns, hashes(i, 128), np.zeros((128, SHARD), dtype=np.uint8))
    assert client.lookup(ns, hashes("pinned", 4), readers=0).ready == 4
    client.unpin(pin)
    for i in range(80, 160):
        client.store(ns, hashes(i, 128), np.zeros((128, SHARD), dtype=np.uint8))
    assert client.lookup(ns, hashes("pinned", 4), readers=0).ready == 0
    assert client.check()["ok"]
    assert client.stats()["counters"]["entries_evicted"] > 0


def test_clear_drops_all_but_what_is_referenced(attach: Callable[..., Client]) -> None:
    client = attach()
    ns = client.register({"model": "m"}, shard_bytes=SHARD)
    client.store(ns, hashes("a", 4), content("a", 4))
    client.store(ns, hashes("b", 4), content("b", 4))
    found = client.lookup(ns, hashes("b", 2))
    assert client.clear(ns.id) == 6
    assert client.lookup(ns, hashes("a", 4), readers=0).ready == 0
    assert client.lookup(ns, hashes("b", 4), readers=0).ready == 2
    found.release()
    assert client.clear() == 2
    assert settled(client)["entries"] == 0


def test_a_shard_that_cannot_fit_is_refused_with_the_limit_and_the_fix(attach: Callable[..., Client]) -> None:
    client = attach()
    with pytest.raises(ProtocolError, match=r"does not fit .* --l1-size-gb"):
        client.register({"model": "m"}, shard_bytes=1 << 40)


def test_namespaces_that_nobody_uses_make_room_for_new_ones(attach: Callable[..., Client], daemon: Daemon) -> None:
    for generation in range(4):
        with Client.attach(daemon.run_dir) as client:
            for i in range(100):
                client.register({"model": "m", "n": generation * 100 + i}, shard_bytes=SHARD)
    client = attach()
    assert len(client.stats()["namespaces"]) <= 256


def test_an_engine_may_reset_its_cache_any_number_of_times(attach: Callable[..., Client]) -> None:
    client = attach()
    for generation in range(600):
        ns = client.register({"model": "m", "generation": generation}, shard_bytes=SHARD)
        assert client.store(ns, hashes(generation, 2), content(generation, 2)).stored == 2
    assert client.lookup(ns, hashes(599, 2), readers=0).ready == 2
    assert client.check()["ok"]


def test_listing_pages_through_everything_once(attach: Callable[..., Client]) -> None:
    client = attach()
    ns = client.register({"model": "m"}, shard_bytes=SHARD)
    client.store(ns, hashes("a", 50), content("a", 50))
    keys, cursor = [], 0
    while True:
        page = client.list(ns.id, cursor, 7)
        keys += [e["key"] for e in page["entries"]]
        cursor = page["cursor"]
        if not cursor:
            break
    assert sorted(keys) == sorted(hashes("a", 50)[i : i + 32].hex() for i in range(0, 1600, 32))


def test_a_chunk_another_is_writing_is_busy_and_present_later(attach: Callable[..., Client]) -> None:
    one, two = attach("one"), attach("two")
    ns, other = (c.register({"model": "m"}, shard_bytes=SHARD) for c in (one, two))
    mine = one.reserve(ns, hashes("a", 2))
    theirs = two.reserve(other, hashes("a", 3))
    assert [Verdict(v) for v in theirs.verdicts] == [Verdict.BUSY, Verdict.BUSY, Verdict.GRANTED]
    theirs.views[0][:] = content("a", 3)[2]
    assert theirs.commit() == [Outcome.WAITING]
    for i, view in enumerate(mine.views):
        view[:] = content("a", 3)[i]
    mine.commit()
    target = np.zeros((3, SHARD), dtype=np.uint8)
    assert two.retrieve(two.lookup(other, hashes("a", 3)), target) == [True] * 3
    assert (target == content("a", 3)).all()


def test_everything_sealed_is_there_after_a_kill_with_the_same_bytes(
    daemon: Daemon, attach: Callable[..., Client]
) -> None:
    client = attach()
    ns = client.register({"model": "m"}, shard_bytes=SHARD)
    client.store(ns, hashes("a", 100), content("a", 100))
    epoch = client.epoch
    daemon.restart()
    until = time.monotonic() + 10
    while client.epoch == epoch or not client.attached:
        assert time.monotonic() < until
        time.sleep(0.01)
    target = np.zeros((100, SHARD), dtype=np.uint8)
    with client.lookup(ns, hashes("a", 100)) as found:
        assert client.retrieve(found, target) == [True] * 100
    assert (target == content("a", 100)).all()
    assert client.check()["ok"]


def test_an_orderly_stop_keeps_the_arena_and_forget_drops_it(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as client:
        ns = client.register({"model": "m"}, shard_bytes=SHARD)
        client.store(ns, hashes("a", 10), content("a", 10))
    assert daemon.stop() == 0
    assert not (daemon.run_dir / "attach.sock").exists()
    daemon.start()
    with Client.attach(daemon.run_dir) as client:
        ns = client.register({"model": "m"}, shard_bytes=SHARD)
        assert client.lookup(ns, hashes("a", 10), readers=0).ready == 10
    assert daemon.stop() == 0
    daemon.start("--forget")
    with Client.attach(daemon.run_dir) as client:
        ns = client.register({"model": "m"}, shard_bytes=SHARD)
        assert client.lookup(ns, hashes("a", 10), readers=0).ready == 0
