"""A small daemon in this process, on real sockets, that misbehaves on request: the place for fault tests of the client.

It keeps chunks in a dict and extents in a bump allocator of a memfd arena.  Faults: `hang`, `hold` (answer late),
`twist` (change or replace replies), `restart`, `refuse`, and direct access to the entry table.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from kvkeep.ipc import messages as m
from kvkeep.ipc.attach import Admission, AttachListener, Credentials
from kvkeep.shm import layout
from kvkeep.shm.namespaces import namespace_digest

CAPACITY = 1024
DATA_BYTES = 1 << 20


class FakeArena:
    def __init__(self) -> None:
        self.meta_fd, self.data_fd = os.memfd_create("meta"), os.memfd_create("data")
        size = layout.meta_bytes(CAPACITY)
        os.ftruncate(self.meta_fd, size)
        os.posix_fallocate(self.data_fd, 0, DATA_BYTES)
        memory = np.frombuffer(mmap.mmap(self.meta_fd, size), np.uint8)
        self.block = memory[: layout.SUPERBLOCK.itemsize].view(layout.SUPERBLOCK)
        for field, value in {
            "magic": layout.MAGIC,
            "abi": layout.ABI_VERSION,
            "entry_bytes": layout.ENTRY_BYTES,
            "meta_bytes": size,
            "data_bytes": DATA_BYTES,
            "capacity": CAPACITY,
            "data_inode": os.fstat(self.data_fd).st_ino,
        }.items():
            self.block[field] = value
        self.entries = memory[layout.ENTRY_OFFSET :].view(layout.ENTRY)[:CAPACITY]
        self.used = 0
        self.chunks: dict[tuple[int, bytes], int] = {}  # (namespace, hash) -> entry

    def reserve(self, key: tuple[int, bytes], size: int) -> int:
        entry = len(self.chunks)
        self.chunks[key] = entry
        self.entries[entry]["offset"] = self.used
        self.entries[entry]["generation"] += 1
        self.entries[entry]["state"] = layout.State.RESERVED
        self.used += layout.align(size)
        return entry

    def close(self) -> None:
        os.close(self.meta_fd)
        os.close(self.data_fd)


class FakeDaemon:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.epoch = 0
        self.arena = FakeArena()
        self.refuse: m.Refused | None = None
        self.refuse_namespaces = False
        self.hellos: list[m.Hello] = []
        self.requests: list[m.AnyRequest] = []
        self.admitted_at: list[float] = []
        self.twist: Callable[[m.AnyRequest, m.AnyReply], m.AnyReply | bytes | None] | None = None
        self.pending = False  # lookups are answered later
        self._commands: list[Callable[[], None]] = []
        self._wake = os.eventfd(0)
        self._thread: threading.Thread | None = None
        self.hung = threading.Event()
        self.asleep = threading.Event()
        self.start()

    # ---- faults ------------------------------------------------------------------------------------------------------

    def start(self, *, fresh_arena: bool = False) -> None:
        if fresh_arena:
            self.arena.close()
            self.arena = FakeArena()
        self.epoch += 1
        self.leases: dict[int, bytes] = {}
        self.eventfds: dict[int, int] = {}
        self.spaces: dict[int, tuple[int, int]] = {}  # id -> shard_bytes, shards
        self.digests: dict[bytes, int] = {}
        self.lookups: dict[int, list[int]] = {}  # handle -> entries
        self.confirms: dict[int, int] = {}
        self.stores: dict[int, list[int]] = {}
        self.unfinished: list[tuple[bytes, bytes, m.Lookup]] = []
        self.held: list[list[bytes]] | None = None
        self.hung.clear()
        self._next = self.epoch * 1000
        self._stop = False
        self._listener = AttachListener(
            str(self.run_dir / "attach.sock"), admit=self._admit, closed=self._closed, handshake_s=5
        )
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        path = self.run_dir / "rpc.sock"
        path.unlink(missing_ok=True)
        self._router.bind(f"ipc://{path}")
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._thread.start()

    def stop(self) -> None:
        """As suddenly as a kill: connections just end."""
        if self._thread is None:
            return
        self.hung.clear()
        self._stop = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        for fd in self.eventfds.values():
            os.close(fd)
        self._listener.close()
        self._router.close(0)
        self._context.term()

    def restart(self, *, fresh_arena: bool = False) -> None:
        self.stop()
        self.start(fresh_arena=fresh_arena)

    def close(self) -> None:
        self.stop()
        self.arena.close()
        os.close(self._wake)

    def hang(self) -> None:
        self.asleep.clear()
        self.hung.set()
        os.eventfd_write(self._wake, 1)
        assert self.asleep.wait(30)

    def resume(self) -> None:
        self.hung.clear()

    def hold(self) -> None:
        """Requests are carried out, replies are kept until `let_go`."""
        self.do(lambda: setattr(self, "held", []))

    def let_go(self) -> None:
        def send() -> None:
            held, self.held = self.held or [], None
            for frames in held:
                self._router.send_multipart(frames)

        self.do(send)

    def finish_lookups(self) -> None:
        """Answer what was pending."""

        def finish() -> None:
            waiting, self.unfinished = self.unfinished, []
            for identity, request_id, request in waiting:
                done = self._find(request)
                self._send(identity, request_id, request, m.LookupDone(self.epoch, done.handle, done.ready))
            for fd in self.eventfds.values():
                os.eventfd_write(fd, 1)

        self.do(finish)

    def do(self, command: Callable[[], None]) -> None:
        """Run it in the daemon's thread, and wait."""
        done = threading.Event()
        self._commands += [command, done.set]
        os.eventfd_write(self._wake, 1)
        assert done.wait(10)

    def stopping(self) -> bool:
        return self._stop

    def drop_clients(self) -> None:
        def drop() -> None:
            for lease in list(self.leases):
                self._listener.drop(lease)

        self.do(drop)

    def count(self, kind: type[m.Request]) -> int:
        return sum(isinstance(request, kind) for request in list(self.requests))

    # ---- its work ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for fd in (self._listener.fileno(), self._wake):
            poller.register(fd, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(1000))
            while self.hung.is_set() and not self._stop:
                self.asleep.set()
                time.sleep(0.002)
            if self.stopping():
                return
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._commands:
                    self._commands.pop(0)()
            self._listener.service()
            while True:
                try:
                    identity, request_id, body = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                request = m.decode_request(body)
                self.requests.append(request)
                reply = self._handle(request)
                self._send(identity, request_id, request, reply)
                if isinstance(reply, m.LookupReply) and reply.pending:
                    assert isinstance(request, m.Lookup)
                    self.unfinished.append((identity, request_id, request))

    def _send(self, identity: bytes, request_id: bytes, request: m.AnyRequest, reply: m.AnyReply) -> None:
        twisted = self.twist(request, reply) if self.twist is not None else reply
        if twisted is None:
            return
        frames = [identity, request_id, twisted if isinstance(twisted, bytes) else m.encode(twisted)]
        if self.held is not None:
            self.held.append(frames)
        else:
            self._router.send_multipart(frames)

    def _admit(self, hello: m.Hello, who: Credentials) -> Admission | m.Refused:
        self.hellos.append(hello)
        self.admitted_at.append(time.monotonic())
        if self.refuse is not None:
            return self.refuse
        self._next += 1
        lease_id, token = self._next, os.urandom(16)
        self.leases[lease_id] = token
        fds: tuple[int, ...] = ()
        if hello.want_arena:
            self.eventfds[lease_id] = os.eventfd(0, os.EFD_NONBLOCK)
            meta = os.open(f"/proc/self/fd/{self.arena.meta_fd}", os.O_RDONLY)
            fds = (meta, os.dup(self.arena.data_fd), os.dup(self.eventfds[lease_id]))
        size = int(self.arena.block["meta_bytes"][0])
        return Admission(
            m.Welcome(1, token, lease_id, self.epoch, "boot", "ipc:///nowhere", size, DATA_BYTES, 256), fds
        )

    def _closed(self, lease_id: int) -> None:
        del self.leases[lease_id]
        fd = self.eventfds.pop(lease_id, None)
        if fd is not None:
            os.close(fd)
        if not self.leases:
            self.lookups.clear()
            self.stores.clear()
            self.unfinished.clear()

    def _handle(self, request: m.AnyRequest) -> m.AnyReply:
        if request.epoch != self.epoch:
            return m.Error("stale_epoch", "attach again", self.epoch)
        if request.lease not in self.leases.values():
            return m.Error("unknown_lease", "attach again", self.epoch)
        if isinstance(request, m.Register):
            if self.refuse_namespaces:
                return m.Error("limit", "all namespaces are in use; clear some", self.epoch)
            digest = namespace_digest(request.manifest, request.shards, request.shard_bytes)
            number = self.digests.setdefault(digest, len(self.digests) + 1 + self.epoch * 10)
            self.spaces[number] = (request.shard_bytes, request.shards)
            return m.Registered(self.epoch, number, digest, layout.align(request.shard_bytes))
        if isinstance(request, m.Lookup):
            return m.LookupReply(self.epoch, 0, 0, True) if self.pending and request.wait_ms else self._find(request)
        if isinstance(request, m.Retrieve):
            return self._extents(request)
        if isinstance(request, m.Confirm | m.Release):
            if self.lookups.pop(request.handle, None) is None:
                return m.Error("unknown_handle", "no such lookup", self.epoch)
            return m.Ok(self.epoch, 1)
        if isinstance(request, m.Store):
            return self._store(request)
        if isinstance(request, m.Commit | m.Abort):
            entries = self.stores.pop(request.handle, None)
            if entries is None:
                return m.Error("unknown_handle", "no such store", self.epoch)
            if isinstance(request, m.Abort):
                self._forget(entries)
                return m.Ok(self.epoch, len(entries))
            self._forget([e for e, ok in zip(entries, request.results, strict=True) if not ok])
            sums = np.frombuffer(request.checksums, "<u8") if request.checksums else np.zeros(len(entries), "<u8")
            for entry, ok, checksum in zip(entries, request.results, sums, strict=True):
                if ok:
                    self.arena.entries[entry]["checksums"][0] = checksum
                    self.arena.entries[entry]["state"] = layout.State.SEALED
            return m.CommitReply(self.epoch, bytes(0 if ok else 2 for ok in request.results))
        if isinstance(request, m.Stats | m.List | m.Check):
            return m.Document(self.epoch, b'{"kind": "%s"}' % type(request).__name__.encode())
        if isinstance(request, m.Pin):
            return m.Pinned(self.epoch, 7, 1)
        if isinstance(request, m.Clear):
            return m.Error("denied", "uid 5 may not do this", self.epoch)
        return m.Ok(self.epoch, 3)

    def _find(self, request: m.Lookup) -> m.LookupReply:
        entries: list[int] = []
        for i in range(0, len(request.hashes), 32):
            entry = self.arena.chunks.get((request.namespace % 10, request.hashes[i : i + 32]), -1)
            if entry < 0 or self.arena.entries[entry]["state"] != layout.State.SEALED:
                break
            entries.append(entry)
        if not entries or not request.readers:
            return m.LookupReply(self.epoch, 0, len(entries))
        self._next += 1
        self.lookups[self._next] = entries
        return m.LookupReply(self.epoch, self._next, len(entries))

    def _extents(self, request: m.Retrieve) -> m.AnyReply:
        entries = self.lookups.get(request.handle)
        if entries is None:
            return m.Error("unknown_handle", "no such lookup", self.epoch)
        part = np.array(entries[request.start : request.start + request.count], "<u4")
        rows = self.arena.entries[part]
        length = next(iter(self.spaces.values()))[0]
        return m.Extents(
            self.epoch,
            length,
            rows["offset"].tobytes(),
            part.tobytes(),
            rows["generation"].tobytes(),
            rows["checksums"][:, 0].tobytes(),
        )

    def _store(self, request: m.Store) -> m.StoreReply:
        length, _ = self.spaces[request.namespace]
        verdicts, granted = bytearray(), []
        for i in range(request.start * 32, len(request.hashes), 32):
            key = (request.namespace % 10, request.hashes[i : i + 32])
            entry = self.arena.chunks.get(key, -1)
            if entry >= 0:
                sealed = self.arena.entries[entry]["state"] == layout.State.SEALED
                verdicts.append(m.Verdict.PRESENT if sealed else m.Verdict.BUSY)
            elif self.arena.used + length > DATA_BYTES:
                verdicts.append(m.Verdict.FULL)
            else:
                granted.append(self.arena.reserve(key, length))
                verdicts.append(m.Verdict.GRANTED)
        self._next += 1
        if granted:
            self.stores[self._next] = granted
        offsets = self.arena.entries[granted]["offset"].tobytes() if granted else b""
        return m.StoreReply(self.epoch, self._next if granted else 0, length, bytes(verdicts), offsets)

    def _forget(self, entries: list[int]) -> None:
        for key in [key for key, entry in self.arena.chunks.items() if entry in entries]:
            self.arena.chunks[(0, os.urandom(32))] = self.arena.chunks.pop(key)  # its place is not used again
