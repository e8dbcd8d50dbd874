"""The wire of `lmcache server`, and what that server does wrong in version 0.5.6, done right."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.lmcache.peer import BYTES, CHUNK, OPS, Peer, Refused, Worker, key, look_up, url_of

FLAGS = ("--port=0", f"--chunk-size={CHUNK}")


def tokens(seed: int, count: int) -> list[int]:
    return [random.Random(seed + i // CHUNK).randrange(1 << 17) + i % CHUNK for i in range(count)]


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon(*FLAGS)


@pytest.fixture
def url(daemon: Daemon) -> str:
    return url_of(daemon)


@pytest.fixture
def scheduler(url: str) -> Iterator[Peer]:
    with Peer(url) as peer:
        yield peer


@pytest.fixture
def worker(url: str) -> Iterator[Worker]:
    with Worker(url, 7001) as peer:
        yield peer


def l1(daemon: Daemon) -> dict[str, Any]:
    with Client.attach(daemon.run_dir, arena=False) as kv:
        found: dict[str, Any] = kv.stats()["l1"]
        return found


def gateway_pid(daemon: Daemon) -> int:
    return next(
        one.pid for one in psutil.Process(daemon.pid).children() if "lmcache_gateway" in " ".join(one.cmdline())
    )


def eventually(happened: Callable[[], object], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def assert_at_rest(daemon: Daemon) -> None:
    eventually(lambda: l1(daemon)["references"] == 0 and l1(daemon)["reserved_bytes"] == 0)


def test_what_one_request_stores_the_next_one_retrieves(daemon: Daemon, scheduler: Peer, worker: Worker) -> None:
    said = tokens(1, 5 * CHUNK + 3)
    assert scheduler.call("chunk_size") == CHUNK
    assert scheduler.call("experimental") == []
    assert look_up(scheduler, said, "a") == 0
    assert worker.store(said, "a") == 5
    assert worker.store(said, "a") == 0  # all there
    assert scheduler.call("end_session", "a") is None
    assert look_up(scheduler, said, "b") == 5
    assert scheduler.call("query", "b") == 0  # told once
    assert worker.retrieve(said, "b", 2 * CHUNK)
    assert scheduler.call("free", key(said, "b", 0, 2 * CHUNK), 1) is None
    assert_at_rest(daemon)
    other = said[: 2 * CHUNK] + tokens(99, 3 * CHUNK)
    assert look_up(scheduler, other, "c") == 2
    assert scheduler.call("end_session", "c") is None
    assert_at_rest(daemon)


def test_a_growing_request_stores_piece_by_piece(scheduler: Peer, worker: Worker) -> None:
    said = tokens(2, 8 * CHUNK)
    for end in range(2, 9, 2):
        assert worker.store(said[: end * CHUNK], "a", (end - 2) * CHUNK, end * CHUNK) == 2
    assert look_up(scheduler, said, "b") == 8
    assert worker.retrieve(said, "b")


def test_all_ranks_must_have_stored(url: str, scheduler: Peer, daemon: Daemon) -> None:
    said = tokens(3, 3 * CHUNK)
    with Worker(url, 1, rank=0, ranks=2) as first, Worker(url, 2, rank=1, ranks=2) as second:
        assert first.store(said, "a") == 3
        assert look_up(scheduler, said, "b", world_size=2) == 0
        assert second.store(said, "a") == 3
        assert look_up(scheduler, said, "c", world_size=2) == 3
        assert first.retrieve(said, "c")
        assert l1(daemon)["references"] > 0  # the second has not read
        assert second.retrieve(said, "c")
        assert_at_rest(daemon)


def test_each_of_several_readers_counts(scheduler: Peer, worker: Worker, url: str, daemon: Daemon) -> None:
    """Ranks of a model with MLA read one and the same object."""
    said = tokens(4, 2 * CHUNK)
    worker.store(said, "a")
    assert look_up(scheduler, said, "b", num_kv_readers=2) == 2
    assert worker.retrieve(said, "b")
    assert l1(daemon)["references"] > 0
    with Worker(url, 2) as other:
        assert other.retrieve(said, "b")
    assert_at_rest(daemon)


def test_salts_share_nothing(scheduler: Peer, worker: Worker) -> None:
    said = tokens(5, 2 * CHUNK)
    assert worker.store(said, "a", cache_salt="one") == 2
    assert look_up(scheduler, said, "b", cache_salt="two") == 0
    assert look_up(scheduler, said, "c", cache_salt="one") == 2
    assert worker.retrieve(said, "c", cache_salt="one")


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"x"], [b"\xc1", b"\x16"], [b"\x01"], [b"\x01", b"\xc1"], [b"\x01", b"\x16", b"\xc1"], [b"", b"", b""]],
)
def test_a_malformed_message_harms_nobody(scheduler: Peer, worker: Worker, frames: list[bytes]) -> None:
    scheduler.socket.send_multipart(frames)
    with Peer(url_of_peer(scheduler)) as other:
        assert other.call("ping", None) is True
    assert worker.store(tokens(6, CHUNK), "a") == 1


def url_of_peer(peer: Peer) -> str:
    return str(peer.socket.getsockopt_string(32))  # ZMQ_LAST_ENDPOINT


@pytest.mark.parametrize(
    ("op", "payloads"),
    [
        (77, ()),
        ("no_such_operation", ()),
        (OPS["ping"], ()),
        (OPS["ping"], (None, None)),
        (OPS["lookup"], ({"model_name": "m"}, 1)),
        (OPS["lookup"], (key([1] * CHUNK, "a", num_kv_readers=0), 1)),
        (OPS["prepare_store"], (key([1] * CHUNK, "a", 1, 2, worker_id=0), 7001)),
        (OPS["prepare_store"], (key([1] * CHUNK, "a", 0, 9 * CHUNK, worker_id=0), 7001)),
        (OPS["prepare_store"], (key([-1] * CHUNK, "a", worker_id=0), 7001)),
        (OPS["prepare_store"], (key([1 << 40] * CHUNK, "a", worker_id=0), 7001)),
        (1, (1, [], "m", 1, "vllm", {}, [])),
        (6, ({}, 1, [[1]], b"")),
    ],
)
def test_what_cannot_be_served_is_answered_at_once(scheduler: Peer, worker: Worker, op: Any, payloads: Any) -> None:
    """`lmcache server` says nothing, and its client waits for 300 s."""
    uid = scheduler.send(op, *payloads)
    got, named, value = scheduler.receive()
    assert got == uid
    assert named != op  # so the client raises
    assert "kvkeep" in named or " " in named
    assert value is None


def test_a_registration_for_the_servers_own_copies_says_what_to_set(scheduler: Peer) -> None:
    scheduler.send(1, 1, [], "m", 1, "vllm", {}, [])
    assert "mp_transfer_mode to engine_driven" in scheduler.receive()[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype_str", "float3"), ("num_layers", 0), ("hidden_dim_size", -1), ("world_size", 1 << 30), ("model_name", "")],
)
def test_a_registration_that_cannot_be_is_refused(url: str, field: str, value: Any) -> None:
    with pytest.raises(Refused, match="kvkeep refuses worker 5"):
        Worker(url, 5, **{field: value})


def test_an_unregistered_worker_gets_misses(scheduler: Peer, url: str) -> None:
    said = key(tokens(7, 2 * CHUNK), "a", worker_id=0)
    assert scheduler.call("prepare_store", said, 999)["context"] == {}
    assert scheduler.call("commit_store", said, 999, b"") is False
    assert scheduler.call("prepare_retrieve", said, 999)["success"] is False
    assert scheduler.call("commit_retrieve", said, 999) is True
    assert look_up(scheduler, tokens(7, 2 * CHUNK), "a") == 0


@pytest.mark.parametrize("how", ["unregister", "close"])
def test_what_a_worker_began_and_left_never_becomes_readable(
    daemon: Daemon, scheduler: Peer, url: str, how: str
) -> None:
    said = tokens(8, 3 * CHUNK)
    worker = Worker(url, 7002)
    assert len(worker.call("prepare_store", worker.key(said, "a"), 7002)["context"]["slots"]) == 3
    if how == "unregister":
        assert worker.call("unregister", 7002) is None
    worker.close()
    with Worker(url, 7002):
        assert look_up(scheduler, said, "b") == 0
    assert l1(daemon)["reserved_bytes"] > 0  # it may still be copying
    assert_at_rest(daemon)
    assert look_up(scheduler, said, "c") == 0


def test_the_same_request_id_with_other_tokens_is_another_request(scheduler: Peer, worker: Worker) -> None:
    one, other = tokens(9, 3 * CHUNK), tokens(900, 3 * CHUNK)
    assert worker.store(one, "same") == 3
    assert worker.store(other, "same") == 3
    assert look_up(scheduler, one, "same") == 3
    assert worker.retrieve(one, "same")
    assert look_up(scheduler, other, "same") == 3
    assert worker.retrieve(other, "same")


def test_a_full_l1_is_no_success(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(*FLAGS, "--eviction-policy=noop", l1_mib=8)
    url = url_of(daemon)
    with Worker(url, 1) as worker, Peer(url) as scheduler:
        seed = 0
        while worker.store(tokens(seed, 64 * CHUNK), "a"):
            seed += 1000
            assert seed < 1_000_000
        said = worker.key(tokens(seed, 64 * CHUNK), "a")
        assert worker.call("prepare_store", said, 1)["context"] == {}
        assert worker.call("commit_store", said, 1, b"") is False
        assert "no room" in daemon.output()
        assert look_up(scheduler, tokens(0, 64 * CHUNK), "b") == 64


def test_an_abort_before_and_during_the_load_frees_all(daemon: Daemon, scheduler: Peer, worker: Worker) -> None:
    said = tokens(10, 4 * CHUNK)
    worker.store(said, "a")
    for number in range(50):
        request = f"abort-{number}"
        scheduler.call("lookup", key(said, request), 1)
        if number % 2:
            assert scheduler.call("query", request) == 4
        scheduler.call("end_session", request)
    assert_at_rest(daemon)
    assert look_up(scheduler, said, "b") == 4
    where = worker.key(said, "b")
    assert worker.call("prepare_retrieve", where, worker.instance)["success"]
    scheduler.call("end_session", "b")
    assert l1(daemon)["references"] > 0  # the worker is still reading
    worker.call("commit_retrieve", where, worker.instance)
    assert_at_rest(daemon)


def test_what_a_connection_held_goes_with_it(daemon: Daemon, url: str, worker: Worker) -> None:
    said = tokens(11, 4 * CHUNK)
    worker.store(said, "a")
    with Peer(url) as scheduler:
        assert look_up(scheduler, said, "b") == 4
        scheduler.call("lookup", key(said, "c"), 1)  # its answer is never asked for
        assert l1(daemon)["references"] > 0
    assert_at_rest(daemon)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch " + os.environ["KVKEEP_TEST_BOMB"],)


def test_a_pickle_is_never_loaded(
    daemon: Daemon, scheduler: Peer, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_TEST_BOMB", str(tmp_path / "went-off"))
    said = tokens(12, 2 * CHUNK)
    where = worker.key(said, "a")
    worker.call("prepare_store", where, worker.instance)
    assert worker.call("commit_store", where, worker.instance, pickle.dumps(Bomb())) is False
    assert not (tmp_path / "went-off").exists()
    assert "pickle, which is never loaded" in daemon.output()
    assert look_up(scheduler, said, "b") == 0
    assert worker.store(said, "c") == 2


def test_a_killed_daemon_comes_back_with_everything_and_workers_need_not_register(daemon: Daemon) -> None:
    """`lmcache server` loses all, and whoever registered with it is not told."""
    daemon.flags[daemon.flags.index("--port=0")] = f"--port={url_of(daemon).rpartition(':')[2]}"
    said = tokens(13, 4 * CHUNK)
    with Worker(url_of(daemon), 21) as worker, Peer(url_of(daemon)) as scheduler:
        worker.store(said, "a")
        assert len(worker.call("prepare_store", worker.key(tokens(14, CHUNK), "x"), 21)["context"]["slots"]) == 1
        daemon.restart()
        url_of(daemon)
        assert look_up(scheduler, said, "b") == 4
        assert worker.retrieve(said, "b")
        assert worker.retrieve(said, "looked up before the restart")
        assert worker.call("ping", 21) is True
        assert look_up(scheduler, tokens(14, CHUNK), "c") == 0
        eventually(lambda: worker.store(tokens(15, 2 * CHUNK), "d") or look_up(scheduler, tokens(15, 2 * CHUNK), "e"))


def test_with_another_segment_a_worker_is_told_by_its_ping(daemon: Daemon) -> None:
    daemon.flags[daemon.flags.index("--port=0")] = f"--port={url_of(daemon).rpartition(':')[2]}"
    said = tokens(16, 2 * CHUNK)
    with Worker(url_of(daemon), 31) as worker, Peer(url_of(daemon)) as scheduler:
        worker.store(said, "a")
        daemon.kill()
        daemon.start("--forget")
        url_of(daemon)
        assert worker.call("prepare_store", worker.key(said, "b"), 31)["context"] == {}
        assert look_up(scheduler, said, "b") == 0
        assert worker.call("ping", 31) is False  # it is unwell now
        assert worker.call("ping", 31) is True  # it is well again, and registers
        worker.register()
        assert worker.store(said, "c") == 2
        assert look_up(scheduler, said, "d") == 2
        assert worker.retrieve(said, "d")


def test_a_killed_gateway_leaves_resting_what_workers_may_be_writing(daemon: Daemon) -> None:
    daemon_url = url_of(daemon)
    with Worker(daemon_url, 41) as worker:
        assert worker.call("prepare_store", worker.key(tokens(17, 2 * CHUNK), "a"), 41)["context"]["slots"]
        (daemon.run_dir / "lmcache.url").unlink()
        os.kill(gateway_pid(daemon), signal.SIGKILL)
        eventually(lambda: (daemon.run_dir / "lmcache.url").exists())
        assert l1(daemon)["reserved_bytes"] > 0
        assert_at_rest(daemon)


def test_wait_answers_at_once_and_clear_empties(scheduler: Peer, worker: Worker) -> None:
    said = tokens(18, 3 * CHUNK)
    worker.store(said, "a")
    scheduler.call("lookup", key(said, "b"), 1)
    assert scheduler.call("wait", "b", 5.0) == 3
    assert scheduler.call("wait", "never asked", 5.0) == 0
    scheduler.call("end_session", "b")
    assert scheduler.call("clear", False) is None
    assert look_up(scheduler, said, "c") == 0
    assert scheduler.call("allocations", 1, "org/m", [{"req_id": "a"}]) is None


def test_what_l1_lost_comes_from_l2(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    medium = {"type": "fs", "base_path": str(tmp_path), "capacity_gb": 1, "fsync": "none"}
    daemon = make_daemon(*FLAGS, f"--l2-adapter={json.dumps(medium)}")
    said = tokens(19, 6 * CHUNK)
    with Worker(url_of(daemon), 51) as worker:
        worker.store(said, "a")
        with Client.attach(daemon.run_dir, arena=False) as kv:
            eventually(lambda: kv.stats()["l2"][0]["chunks_stored"] == 6)
    daemon.stop()
    daemon.start("--forget")
    url = url_of(daemon)
    with Worker(url, 51) as worker, Peer(url) as scheduler:
        assert look_up(scheduler, said, "b") == 6
        assert worker.retrieve(said, "b")
    assert_at_rest(daemon)


def test_random_requests_of_three_engines_never_see_wrong_bytes(make_daemon: Callable[..., Daemon], seed: int) -> None:
    """Stores, retrieves, aborts, deaths, with an L1 that holds a part; each byte read is compared."""
    daemon = make_daemon(*FLAGS, l1_mib=8)
    url, source = url_of(daemon), random.Random(seed)
    known = [tokens(source.randrange(1 << 20), source.randrange(2, 80) * CHUNK) for _ in range(40)]
    workers = [Worker(url, 100 + n) for n in range(3)]
    schedulers = [Peer(url) for _ in range(3)]
    hits = 0
    for number in range(400):
        n, request = source.randrange(3), f"r{source.randrange(20)}"
        said = source.choice(known)
        said = said[: source.randrange(1, len(said) // CHUNK + 1) * CHUNK]
        found = look_up(schedulers[n], said, request)
        if found and source.random() < 0.8:
            start = source.randrange(found) * CHUNK
            assert workers[n].retrieve(said, request, start, found * CHUNK)
            hits += 1
        if source.random() < 0.7 and found * CHUNK < len(said):
            workers[n].store(said, request, found * CHUNK)
        if source.random() < 0.8:
            schedulers[n].call("end_session", request)
        if number % 50 == 49:
            workers[n].call("prepare_store", workers[n].key(tokens(number, 3 * CHUNK), "dead"), 100 + n)
            workers[n].close()
            schedulers[n].close()
            workers[n], schedulers[n] = Worker(url, 100 + n), Peer(url)
    for peer in (*workers, *schedulers):
        peer.close()
    assert hits > 50
    assert_at_rest(daemon)
    assert BYTES == 1536
    assert unique_name("x") != unique_name("x")
