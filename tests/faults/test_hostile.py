"""Hostile input on both sockets, while a client that behaves keeps getting right answers.

F11 B12 and section O of the cases.  One reply for each request; control's memory bounded; its log without a surprise.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc import messages as m
from kvkeep.ipc.attach import AttachRefused
from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import Unavailable
from tests.conftest import Daemon
from tests.faults.account import assert_at_rest, surprises
from tests.faults.fuzz import MANIFESTS, attach_fuzzer, rpc_fuzzer, zmtp_frames, zmtp_peer
from tests.faults.oracle import MANIFEST, chain, contents, read
from tests.faults.processes import Worker, eventually
from tests.faults.raw import Raw, dial

SIZE = 4096
MIB = 1 << 20
GROWTH_MIB = 96  # what hostile clients may make control take, whatever they do


def own_memory(daemon: Daemon) -> int:
    """Bytes of the control process that are neither arena nor files."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


class WellBehaved:
    """A client that holds a chain, and in a thread keeps asking for it, reading it, and storing more."""

    def __init__(self, daemon: Daemon, packed: bytes) -> None:
        self.kv = Client.attach(daemon.run_dir, name="well-behaved", deadline_s=20)
        self.ns = self.kv.register(MANIFEST, shard_bytes=SIZE)
        self.packed = packed
        assert self.kv.store(self.ns, packed, contents(packed, SIZE)).stored == len(packed) // 32
        self.held = self.kv.lookup(self.ns, packed)
        self.rounds, self.slowest, self.hiccups = 0, 0.0, 0
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        count = len(self.packed) // 32
        try:
            while not self._stop.is_set():
                late, began = self.kv.counters["late_calls"], time.monotonic()
                missing = []
                found = self.kv.lookup(self.ns, self.packed, deadline_s=20)
                if found.ready != count:
                    missing.append(f"{found.ready} of {count} that are held; {self.kv.state}")
                loaded, wrong = read(self.kv, self.ns, self.packed, found)
                if wrong:
                    self.problems.append(f"wrong bytes in {wrong}")
                if loaded != found.ready:
                    missing.append(f"{loaded} of {found.ready} read")
                more = chain(("more", self.rounds), 3)
                result = self.kv.store(self.ns, more, contents(more, SIZE), deadline_s=20)
                if result.failed:
                    missing.append(str(result))
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.rounds += 1
                if missing and (self.kv.hung or self.kv.counters["late_calls"] != late):
                    self.hiccups += 1  # a short deadline passed on a host that is busy with attackers: a miss is right
                    time.sleep(0.05)
                else:
                    self.problems += missing
        except Exception as error:
            self.problems.append(repr(error))

    def finish(self) -> None:
        self._stop.set()
        self._thread.join()
        print(f"well-behaved: {self.rounds} rounds, {self.hiccups} of them misses, slowest {self.slowest:.3f} s")
        assert self.problems == []
        assert self.rounds > self.hiccups
        eventually(lambda: not self.kv.hung, 30)
        assert self.kv.lookup(self.ns, self.packed, readers=0, deadline_s=20).ready == len(self.packed) // 32
        assert self.slowest < 10.0


@contextlib.contextmanager
def well_behaved(daemon: Daemon) -> Iterator[WellBehaved]:
    good = WellBehaved(daemon, chain("well-behaved", 20))
    try:
        yield good
    finally:
        good.finish()
        good.held.release()
        assert_at_rest(daemon, good.kv)
        good.kv.close()


@pytest.fixture
def open_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Any user of the host may attach."""
    daemon = make_daemon("--socket-mode", "0666", start=False)
    daemon.run_dir.parent.chmod(0o755)
    return daemon.start()


def fuzz(daemon: Daemon, rng: random.Random, seconds: float) -> None:
    with well_behaved(daemon) as good:
        time.sleep(0.3)
        before = own_memory(daemon)
        stolen = [good.held._attachment.lease] if os.getuid() else []  # type: ignore[union-attr]
        talkers = [Worker(rpc_fuzzer, str(daemon.run_dir), rng.getrandbits(32), stolen) for _ in range(2)]
        knockers = [Worker(attach_fuzzer, str(daemon.run_dir), rng.getrandbits(32)) for _ in range(2)]
        time.sleep(seconds)
        for worker in talkers + knockers:
            worker.tell("stop")
        reports = [worker.expect() for worker in talkers]
        print(*reports, *[worker.expect() for worker in knockers], sep="\n")
        grown = (own_memory(daemon) - before) / MIB
        print(f"control grew by {grown:.1f} MiB")
        for worker in talkers + knockers:
            worker.end()
        for report in reports:
            assert report["replies"] > 0
            assert (report["unanswered"], report["extra"], report["internal"]) == (0, 0, [])
        assert grown < GROWTH_MIB
        eventually(lambda: good.kv.stats()["clients_total"] == 1)


def test_a_fuzzer_on_both_sockets_gets_one_reply_a_request_and_harms_nobody(open_daemon: Daemon, seed: int) -> None:
    fuzz(open_daemon, random.Random(seed), 8)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_fuzzer_on_both_sockets_for_five_minutes(open_daemon: Daemon, seed: int) -> None:
    fuzz(open_daemon, random.Random(seed), 300)


# ---- one by one ----------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[Raw]:
    with Raw(daemon.run_dir) as raw:
        yield raw


def test_a_list_cursor_beyond_64_bits_is_an_empty_page_or_a_refusal(daemon: Daemon, raw: Raw) -> None:
    namespace = raw.register()
    for cursor in (2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)):
        reply = raw.call(m.List, namespace, cursor, 10)
        assert not (isinstance(reply, m.Error) and reply.code == "internal"), (cursor, reply)
    assert surprises(daemon) == []


def test_a_manifest_that_is_no_json_object_does_not_spoil_the_listing_of_others(daemon: Daemon, raw: Raw) -> None:
    for manifest in MANIFESTS:
        reply = raw.call(m.Register, manifest, 4096, 1)
        assert isinstance(reply, m.Registered | m.Error)
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        assert ns.id in [n["id"] for n in kv.list()["namespaces"]]
        assert kv.stats()["health"] == "ok"
    assert surprises(daemon) == []


def test_registering_ever_new_sizes_costs_control_no_memory(daemon: Daemon, raw: Raw) -> None:
    for i in range(300):
        raw.call(m.Register, b'{"n":%d}' % i, 4096 * (1 + i % 1000), 1)
    before = own_memory(daemon)
    sent = 0
    for i in range(30_000):
        raw.send(m.Register, b'{"m":%d}' % i, 4096 * (1 + i % 16000), 1)
        sent += 1
        if sent == 200:
            for _ in range(sent):
                reply = raw.receive()[1]
                assert isinstance(reply, m.Registered) or reply.code in ("limit", "too_large")
            sent = 0
    assert (own_memory(daemon) - before) / MIB < 8


def test_parked_lookups_cannot_make_control_take_memory_without_bound(daemon: Daemon, raw: Raw) -> None:
    """Each may bring a megabyte of hashes, wait for a minute, and be released at once."""
    with Raw(daemon.run_dir) as writer:
        head = chain("parked", 1)
        assert isinstance(writer.call(m.Store, writer.register(), 0, head, 0), m.StoreReply)
        namespace = raw.register()
        before = own_memory(daemon)
        for turn in range(600):
            packed = head + np.random.default_rng(turn).bytes(32 * (m.MAX_CHUNKS - 1))
            reply = raw.call(m.Lookup, namespace, packed, 1, 60_000)
            if isinstance(reply, m.LookupReply) and turn % 2:
                raw.call(m.Release, reply.handle, 0)
        assert (own_memory(daemon) - before) / MIB < GROWTH_MIB


def test_reading_without_confirming_leaves_nothing_behind_in_control(daemon: Daemon, raw: Raw) -> None:
    namespace = raw.register()
    packed = chain("read", 1)
    stored = raw.call(m.Store, namespace, 0, packed, 0)
    raw.call(m.Commit, stored.handle, b"\x01", b"")

    def turns(count: int) -> None:
        for _ in range(count // 100):
            for _ in range(100):
                raw.send(m.Lookup, namespace, packed, 1, 0)
            handles = [raw.receive()[1].handle for _ in range(100)]
            for handle in handles:
                raw.send(m.Retrieve, handle, 0, 0, 1)
                raw.send(m.Release, handle, 0)
            for _ in range(200):
                assert not isinstance(raw.receive()[1], m.Error)

    turns(2000)
    before = own_memory(daemon)
    turns(40_000)
    assert (own_memory(daemon) - before) / MIB < 2


def test_a_handle_of_another_client_cannot_be_released_committed_or_aborted(daemon: Daemon, raw: Raw) -> None:
    with Client.attach(daemon.run_dir) as kv:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("theirs", 3)
        kv.store(ns, packed, contents(packed, SIZE))
        found = kv.lookup(ns, packed)
        writing = kv.reserve(ns, chain("theirs too", 3))
        for kind, fields in (
            (m.Release, (found.handle, 0)),
            (m.Commit, (writing.handle, b"\x01\x01\x01", b"")),
            (m.Abort, (writing.handle,)),
        ):
            reply = raw.call(kind, *fields)
            assert getattr(reply, "code", "") == "unknown_handle", kind
        assert kv.stats()["l1"]["references"] == 3
        assert read(kv, ns, packed, found) == (3, [])
        writing.abort()
        assert_at_rest(daemon, kv)


def test_an_eventfd_that_a_client_made_blocking_and_full_does_not_block_the_daemon(daemon: Daemon, raw: Raw) -> None:
    eventfd = raw.fds[2]
    fcntl.fcntl(eventfd, fcntl.F_SETFL, fcntl.fcntl(eventfd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    os.eventfd_write(eventfd, 2**64 - 2)
    with Client.attach(daemon.run_dir) as kv:
        packed = chain("blocked", 1)
        writing = kv.reserve(kv.register({"model": "raw"}, shard_bytes=4096), packed)
        raw.send(m.Lookup, raw.register(), packed, 1, 30_000)
        assert raw.receive()[1].pending
        writing.abort()
        assert kv.ping(deadline_s=10) < 10


def test_a_reader_that_never_reads_costs_bounded_memory_and_nobody_waits_for_it(daemon: Daemon) -> None:
    with well_behaved(daemon), Raw(daemon.run_dir) as raw:
        namespace = raw.register()
        for i in range(3):
            packed = chain(("bulk", i), 1000)
            stored = raw.call(m.Store, namespace, 0, packed, 0)
            raw.call(m.Commit, stored.handle, b"\x01" * 1000, b"")
        before = own_memory(daemon)
        peers = []
        for _ in range(4):  # who reads nothing, and has asked for a long list ten thousand times
            peer = zmtp_peer(daemon.run_dir / "rpc.sock")
            peer.settimeout(5)
            body = zmtp_frames(bytes(8), m.encode(m.List(raw.lease, raw.epoch, namespace, 0, 10_000)))
            with contextlib.suppress(TimeoutError):
                for _ in range(500):
                    peer.sendall(body)
            peers.append(peer)
        time.sleep(1)
        grown = (own_memory(daemon) - before) / MIB
        print(f"four readers that never read: {grown:.1f} MiB")
        for peer in peers:
            peer.close()
        assert grown < GROWTH_MIB


def endless_sender(link: Connection, rpc_path: str) -> None:
    """One message that never ends: says how many MiB it could send."""
    frame = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)
    with zmtp_peer(Path(rpc_path)) as peer:
        peer.settimeout(20)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4000:
                peer.sendall(frame)
                sent += 1
    link.send(sent)


def test_a_request_without_an_end_costs_its_sender_the_connection_before_it_fills_the_memory(daemon: Daemon) -> None:
    """libzmq keeps every frame until the last one has come."""
    with Client.attach(daemon.run_dir, name="idle") as kv:
        time.sleep(0.3)
        before = peak = own_memory(daemon)
        attacker = Worker(endless_sender, str(daemon.run_dir / "rpc.sock"))
        while not attacker.link.poll(0.01):
            peak = max(peak, own_memory(daemon))
        sent = attacker.expect()
        attacker.end()
        print(f"{sent} MiB sent, control grew by {(peak - before) / MIB:.0f} MiB")
        assert sent < 4000
        assert (peak - before) / MIB < 2000
        eventually(lambda: own_memory(daemon) - before < GROWTH_MIB * MIB)
        eventually(lambda: kv.stats()["health"] == "degraded")
        stats = kv.stats()
        assert "RPC connections were cut" in stats["reasons"][0]
        assert stats["counters"]["rpc_connections_cut"] > 0
        assert kv.counters["attaches"] == 1, "who did nothing is not bothered"
    assert surprises(daemon) == []


def test_a_client_whose_connections_are_cut_attaches_again_and_its_calls_come_through_or_miss(daemon: Daemon) -> None:
    """It is in the process of the attacker.  What it had asked for, and never heard of, does not stay its own."""
    with Client.attach(daemon.run_dir, name="of the attacker", deadline_s=20) as kv, Raw(daemon.run_dir) as raw:
        ns = kv.register(MANIFEST, shard_bytes=SIZE)
        packed = chain("cut", 20)
        assert kv.store(ns, packed, contents(packed, SIZE)).stored == 20
        held, writing = kv.lookup(ns, packed), kv.reserve(ns, chain("never committed", 3))
        assert (held.ready, len(writing)) == (20, 3)
        bulk = chain("bulk", 4000)
        namespace = raw.register()
        stored = raw.call(m.Store, namespace, 0, bulk, 0)
        raw.call(m.Commit, stored.handle, b"\x01" * 4000, b"")
        handle = raw.call(m.Lookup, namespace, bulk, 1, 0).handle
        body = zmtp_frames(bytes(8), m.encode(m.Retrieve(raw.lease, raw.epoch, handle, 0, 0, 4000)))
        peers = [zmtp_peer(daemon.run_dir / "rpc.sock") for _ in range(30)]
        for peer in peers:  # each asks for 14 MB and reads nothing
            peer.sendall(body * 150)
        until = time.monotonic() + 60
        while kv.counters["attaches"] == 1:
            assert time.monotonic() < until
            with kv.lookup(ns, packed) as found:
                assert read(kv, ns, packed, found) in ((20, []), (0, []))
        for peer in peers:
            peer.close()
        raw.close()
        eventually(lambda: kv.lookup(ns, packed, readers=0).ready == 20)
        held.release()
        writing.abort()

        def at_rest() -> bool:
            with contextlib.suppress(Unavailable):  # it is cut once more, for what the peers had asked before
                l1 = kv.stats()["l1"]
                return (l1["references"], l1["reserved_bytes"]) == (0, 0) and kv.check() == {"ok": True, "problem": ""}
            return False

        eventually(at_rest, 30)
    assert surprises(daemon) == []


def test_a_message_over_the_limit_costs_its_sender_the_connection_and_nobody_else_anything(daemon: Daemon) -> None:
    with well_behaved(daemon):
        for size in (2**32, 2**62, m.MAX_MESSAGE_BYTES + 1):
            peer = zmtp_peer(daemon.run_dir / "rpc.sock")
            peer.settimeout(10)
            with contextlib.suppress(OSError):
                peer.sendall(bytes([1, 8]) + bytes(8) + b"\x02" + size.to_bytes(8, "big") + bytes(100_000))
                while peer.recv(4096):
                    pass
            peer.close()


def test_an_attach_frame_that_announces_4_gib_is_refused_with_a_sentence(daemon: Daemon) -> None:
    with dial(daemon.run_dir / "attach.sock") as sock:
        sock.sendall(b"\xff\xff\xff\xff" + bytes(1000))
        answer = m.decode_attach(sock.recv(4096)[4:])
    assert isinstance(answer, m.Refused)
    assert "limit" in answer.message


def test_half_open_handshakes_end_by_themselves_and_do_not_keep_others_out(daemon: Daemon) -> None:
    half = []
    for i in range(300):
        sock = dial(daemon.run_dir / "attach.sock")
        sock.sendall(b"\x40\0\0\0"[: i % 5] + b"\x80" * (i % 3))
        half.append(sock)
    with Client.attach(daemon.run_dir, deadline_s=20) as kv:
        assert kv.ping() < 10
        for sock in half:
            sock.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
            sock.close()


@pytest.mark.timeout(120)
def test_ten_thousand_connections_to_each_socket_do_not_keep_a_client_out(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard // 2 - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ours: list[socket.socket] = []
    try:
        with well_behaved(daemon) as good:
            time.sleep(0.2)
            before = own_memory(daemon)
            for _ in range(count):
                try:
                    ours.append(dial(daemon.run_dir / "attach.sock"))
                except (BlockingIOError, TimeoutError):
                    time.sleep(0.01)
            with Client.attach(daemon.run_dir, deadline_s=30) as kv:
                assert kv.ping() < 20
            for sock in ours:
                sock.close()
            ours.clear()
            ping = m.encode(m.Ping(bytes(16), 0))
            for i in range(count):
                ours.append(zmtp_peer(daemon.run_dir / "rpc.sock"))
                ours[-1].sendall(zmtp_frames(i.to_bytes(8, "little"), ping))
            for sock in ours:
                assert sock.recv(4096)
            with Client.attach(daemon.run_dir, deadline_s=30) as kv:
                assert kv.ping() < 20
            grown = (own_memory(daemon) - before) / MIB
            print(f"{count} connections each: {grown:.1f} MiB, well-behaved slowest {good.slowest:.3f} s")
            for sock in ours:
                sock.close()
            ours.clear()
            eventually(lambda: descriptors(daemon) < 200, 30)
        assert grown < 10 * GROWTH_MIB
    finally:
        for sock in ours:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_daemon_out_of_descriptors_serves_on_refuses_in_words_and_leaks_none(daemon: Daemon) -> None:
    with well_behaved(daemon):
        eventually(lambda: descriptors(daemon) > 10)
        time.sleep(0.3)
        before = descriptors(daemon)
        for room in (40, 41, 42, 43, 44):  # so that each step of an attach is the one that fails
            _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (before + room, hard))
            attached: list[Raw] = []
            refused: list[Any] = []
            for _ in range(40):
                try:
                    attached.append(Raw(daemon.run_dir, deadline_s=3))
                except AttachRefused as no:
                    refused.append(no)
                except OSError as no:
                    refused.append(no)
                if len(refused) > 3:
                    break
            assert attached
            assert refused
            assert all("LimitNOFILE" in str(no) for no in refused if isinstance(no, AttachRefused))
            for raw in attached:
                raw.close()
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))
            eventually(lambda: descriptors(daemon) <= before, 15, say=lambda: (before, descriptors(daemon)))
        with Raw(daemon.run_dir) as raw:
            assert isinstance(raw.call(m.Ping), m.Ok)


def test_rpc_connections_beyond_the_descriptors_do_not_end_the_daemon(daemon: Daemon) -> None:
    """libzmq would abort.  Twice, the second time with holes among the descriptors in use."""
    with well_behaved(daemon):
        time.sleep(0.3)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3200, hard))
        peers: list[socket.socket] = []
        for _ in range(2):
            for _ in range(4000):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(5)
                try:
                    sock.connect(str(daemon.run_dir / "rpc.sock"))
                    peers.append(sock)
                except OSError:
                    sock.close()
                    time.sleep(0.001)
            assert daemon.process is not None
            assert daemon.process.poll() is None
            for peer in peers[: len(peers) // 2]:
                peer.close()
            del peers[: len(peers) // 2]
            time.sleep(0.6)
        for peer in peers:
            peer.close()
        eventually(lambda: descriptors(daemon) < 100)
        with Raw(daemon.run_dir) as raw:
            assert isinstance(raw.call(m.Ping, timeout_s=20), m.Ok)


def test_a_client_that_claims_the_lease_of_another_does_not_end_its_protection(daemon: Daemon) -> None:
    """Two clients with the same name and pid namespace (B12) have leases of their own; none acts for the other."""
    with Raw(daemon.run_dir, name="twin") as one, Raw(daemon.run_dir, name="twin") as two:
        assert one.lease != two.lease
        assert one.welcome.lease_id != two.welcome.lease_id
        packed = chain("twin", 2)
        stored = one.call(m.Store, one.register(), 0, packed, 0)
        two.register()
        two.close()
        assert isinstance(one.call(m.Commit, stored.handle, b"\x01\x01", b""), m.CommitReply)
    assert surprises(daemon) == []
