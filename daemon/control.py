"""The control process: one thread, one poll loop, the only writer of all L1 metadata.

Each round: what arrived on the sockets (a bounded amount), expired deadlines, then one bounded step of background work
(watermark eviction, log compaction, a management job).  It does no disk or network I/O and never waits for anybody; a
poll with nothing to do sleeps until the next deadline.  An orderly stop leaves the arena in memory, as a kill does.

Ghosts: clients of the daemon before us that are still alive (see shm/leases.py).  Until each has attached again or
died, references are honoured and quarantined extents rest.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import zmq

from kvkeep.daemon.admin import Admin
from kvkeep.daemon.config import Config
from kvkeep.daemon.engine import Engine
from kvkeep.daemon.memory import ADAPTER_BYTES, CONNECTION_BYTES, ENTRY_BYTES, HANDLE_BYTES, MemoryGuard
from kvkeep.daemon.sdnotify import Notifier
from kvkeep.daemon.sessions import Session
from kvkeep.ipc import descriptors
from kvkeep.ipc.attach import Admission, AttachListener, Credentials
from kvkeep.ipc.messages import Hello, Refused, Welcome
from kvkeep.ipc.server import RpcServer
from kvkeep.shm.arena import Arena
from kvkeep.shm.layout import ABI_VERSION, PAGE
from kvkeep.shm.leases import EXTERNAL_NAME, EXTERNAL_S, LeaseTable
from kvkeep.shm.namespaces import NamespaceTable
from kvkeep.shm.recovery import adopt
from kvkeep.shm.segments import Geometry, Reserver, Segments, boot_id
from kvkeep.shm.slabs import Slabs, default_slab_bytes
from kvkeep.shm.stats import write_stats
from kvkeep.shm.table import EntryTable

if TYPE_CHECKING:
    from kvkeep.daemon.l2 import L2

log = logging.getLogger("kvkeep.control")

PUBLISH_S = 0.25  # the stats page follows activity at this interval, and rests when nothing happens
IDLE_PUBLISH_S = 5.0  # ... but stays visibly alive
GHOST_POLL_S = 0.25  # only while there are ghosts
DAMAGE_POLL_S = 1.0
REFUSAL_LOG_S = 1.0  # one line a second says enough
STUCK_ROUND_S = 1.0  # a round longer than this is logged


def geometry_of(config: Config) -> Geometry:
    slab = config.l1_slab_mb << 20 or default_slab_bytes(config.l1_bytes)
    data = config.l1_bytes // slab * slab
    return Geometry(max(data, slab), config.entries, slab)


class Control:
    """Everything of one running daemon.  Built by `run.run`."""

    def __init__(self, config: Config, segments: Segments, version: str) -> None:
        self.config = config
        self.segments = segments
        geometry = segments.geometry
        table = EntryTable(segments.entries)
        slabs = Slabs(geometry.data_bytes, geometry.slab_bytes, segments.slabs)
        self.arena = Arena(
            table,
            NamespaceTable(segments.namespaces),
            slabs,
            policy=config.eviction_policy,
            watermark=config.eviction_trigger_watermark,
            ratio=config.eviction_ratio,
            quotas={tenant: int(gib * (1 << 30)) for tenant, gib in config.quotas.items()},
        )
        self.arena.now = time.monotonic()
        self.leases = LeaseTable(segments.leases, segments.meta_fd)
        self.epoch = int(segments.superblock["epoch"]) + 1
        segments.superblock["epoch"] = self.epoch
        self._by_lease: dict[int, Session] = {}
        self._eventfds: dict[int, int] = {}
        gid = _gid(config)
        self.engine = Engine(self.arena, epoch=self.epoch, send=self._send, notify=self._notify)
        self.admin = Admin(self.engine, name=config.name, version=version, admin_uids=config.admin_uids)
        if segments.adopted:
            self._adopt()
        self.rpc = RpcServer(config.rpc_path, self.engine.handle, epoch=self.epoch, mode=config.socket_mode, gid=gid)
        self.listener = AttachListener(
            config.attach_path,
            admit=self._admit,
            closed=self._closed,
            skewed=lambda refused: self._refused(refused.code, refused.message),
            mode=config.socket_mode,
            gid=gid,
            max_connections=config.max_clients,
        )
        self.reserver = Reserver(segments.data_fd, geometry.data_bytes, prepare=_preparation(config, segments))
        self.l2: L2 | None = None
        self.memory = MemoryGuard(
            explained=self._explained_memory,
            note_busy=lambda: self.rpc.note_busy(),
            cut=self._cut,
            counters=self.engine.counters,
        )
        self.notifier = Notifier()
        self.stopping = False
        self._poller = zmq.Poller()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._poller.register(self.rpc.socket, zmq.POLLIN)
        self._poller.register(self.rpc.monitor, zmq.POLLIN)
        self.watch(self.listener.fileno(), self.listener.service)
        self.watch(self.reserver.eventfd, self._on_reserved)
        self._published = 0.0
        self._dirty = True
        self._next_ghosts = 0.0
        self._next_damage = 0.0
        self._next_refusal_log = 0.0
        self.gateway_pid: Callable[[], int] = lambda: 0  # of the child that serves LMCache
        self._external_ends: deque[tuple[float, int]] = deque()  # leases of such children that are gone
        self.timers: list[Callable[[float], float | None]] = []  # called each round; return the next deadline
        # called at the end of each round; True = there is more to do
        self.steps: list[Callable[[float], bool]] = [lambda now: self.engine.step()]
        self.stop_requests = 0
        self.l2 = _l2(self, config)
        self.admin.l2, self.admin.send = self.l2, self._send

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._callbacks[fd] = callback
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        if self._callbacks.pop(fd, None):
            self._poller.unregister(fd)

    def loop(self) -> None:
        busy = False
        while not self.stopping:
            now = time.monotonic()
            deadline = self._next_deadline(now)
            timeout = 0.0 if busy else max(0.0, min(deadline, self.memory.next_look()) - now)
            ready = self._poller.poll(int(timeout * 1000) + 1 if timeout else 0)
            self.arena.now = time.monotonic()
            if not (ready or busy) and self.arena.now < deadline:  # often, and all that an idle daemon does
                self._look_at_memory(self.arena.now)
                continue
            busy = False
            for what, _ in ready:
                self._dirty = True
                if what is self.rpc.socket:
                    busy = self.rpc.service()
                elif what is self.rpc.monitor:
                    self.rpc.connected()
                elif callback := self._callbacks.get(what):
                    callback()
            self._expire(self.arena.now)
            busy = self.arena.evict_step() or self.arena.housekeep() or self.admin.step(self.rpc.send) or busy
            for step in self.steps:
                busy = step(self.arena.now) or busy
            took = time.monotonic() - self.arena.now
            if took > STUCK_ROUND_S:
                log.warning("a round of the control loop took %.1f s", took)

    def _next_deadline(self, now: float) -> float:
        publish = self._published + (PUBLISH_S if self._dirty else IDLE_PUBLISH_S)
        candidates = [
            publish,
            self.engine.waiting.next_deadline(),
            self.admin.pins.next_end(),
            self.listener.next_deadline(),
            self.rpc.next_deadline(),
            self.arena.resting.next_end(),
            self.arena.incomplete.next_end(),
            self._next_ghosts if self.leases.ghosts else None,
            self._external_ends[0][0] if self._external_ends else None,
            self._next_damage,
        ]
        candidates += [timer(now) for timer in self.timers]
        return min(c for c in candidates if c is not None)

    def _expire(self, now: float) -> None:
        self.engine.waiting.expire(now)
        self.admin.pins.end(now)
        self.listener.expire(now)
        self.rpc.expire(now)
        self._look_at_memory(now)
        self.arena.resting.end_quarantine(self.arena.now)
        self.arena.incomplete.end(self.arena.now)
        self.engine.waiting.wake()
        while self._external_ends and self._external_ends[0][0] <= now:
            self._closed(self._external_ends.popleft()[1])
        if self.leases.ghosts and now >= self._next_ghosts:
            self._next_ghosts = now + GHOST_POLL_S
            if not self.leases.bury_dead_ghosts():
                self._no_more_ghosts()
        if now >= self._next_damage:
            self._next_damage = now + DAMAGE_POLL_S
            if damage := self.segments.damaged():
                self._drop_damaged(damage)
        if now - self._published >= (PUBLISH_S if self._dirty else IDLE_PUBLISH_S):
            self.publish()

    def changed(self) -> None:
        """Something that the stats page shows: publish soon, not at the idle interval."""
        self._dirty = True

    def publish(self) -> None:
        self.engine.counters["requests"] = self.rpc.requests
        self.engine.counters["malformed"] = self.rpc.malformed
        write_stats(self.segments.stats, json.dumps(self.admin.document()).encode())
        self._published = time.monotonic()
        self._dirty = False

    # ---- attaching ---------------------------------------------------------------------------------------------------

    def _admit(self, hello: Hello, credentials: Credentials) -> Admission | Refused:
        allowed_uids, allowed_gids = self.config.allow_uids, self.config.allow_gids
        named = allowed_uids or allowed_gids
        inside = credentials.uid in allowed_uids or credentials.gid in allowed_gids
        if named and not inside and credentials.uid not in (0, os.geteuid()):
            return self._refused(
                "denied",
                f"uid {credentials.uid}, gid {credentials.gid} may not attach; add it to --allow-uids or --allow-gids",
            )
        if hello.want_arena and hello.abi != ABI_VERSION:
            return self._refused(
                "abi",
                f"the client reads arena format {hello.abi}, this daemon writes {ABI_VERSION}; install the same kvkeep "
                "version on both sides",
            )
        if descriptors.scarce_for_attach():
            return self._refused("limit", f"{descriptors.left()} descriptors are left; raise LimitNOFILE")
        fds: tuple[int, ...] = ()
        name = hello.name[:40]
        external = name == EXTERNAL_NAME and credentials.pid == self.gateway_pid() > 0
        if name == EXTERNAL_NAME and not external:
            name += "?"
        try:
            lease_id, meta_fd = self.leases.add(epoch=self.epoch, pid=credentials.pid, uid=credentials.uid, name=name)
        except (OSError, IndexError) as e:
            return self._refused("limit", f"no lease for another client ({e}); raise LimitNOFILE or --max-clients")
        if hello.want_arena:
            eventfd = -1
            try:
                eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._eventfds[lease_id] = os.dup(eventfd)
                fds = (meta_fd, os.dup(self.segments.data_fd), eventfd)
            except OSError as e:
                os.close(meta_fd)
                for fd in (eventfd, self._eventfds.pop(lease_id, -1)):
                    if fd >= 0:
                        os.close(fd)
                self.leases.remove(lease_id)
                return self._refused("limit", f"out of descriptors ({e.strerror}); raise LimitNOFILE")
        else:
            os.close(meta_fd)
        if self.leases.is_ghost_of(hello.previous_lease, pid=credentials.pid, uid=credentials.uid):
            self.leases.settle(hello.previous_lease)
            if not self.leases.ghosts:
                self._no_more_ghosts()
        session = Session(lease_id, secrets.token_bytes(16), credentials, name, hello.want_arena, external)
        self._by_lease[lease_id] = session
        self.engine.open_session(session)
        self.engine.counters["attaches"] += 1
        log.debug("client attached: lease %d, pid %d, uid %d, %s", lease_id, *credentials[:2], hello.name[:40])
        geometry = self.segments.geometry
        welcome = Welcome(
            version=1,
            lease=session.token,
            lease_id=lease_id,
            epoch=self.epoch,
            boot_id=boot_id(),
            rpc_endpoint=f"ipc://{self.config.rpc_path}",
            meta_bytes=len(self.segments.meta),
            data_bytes=geometry.data_bytes,
            chunk_tokens=self.config.chunk_size,
            l2=bool(self.config.l2_adapter),
        )
        return Admission(welcome, fds)

    def _refused(self, code: str, message: str) -> Refused:
        self.engine.counters["attach_refused"] += 1
        if time.monotonic() >= self._next_refusal_log:
            self._next_refusal_log = time.monotonic() + REFUSAL_LOG_S
            log.warning("attach refused: %s (%d so far)", message, self.engine.counters["attach_refused"])
        return Refused(code, message)

    def _closed(self, lease_id: int) -> None:
        session = self._by_lease.get(lease_id)
        if session is not None and session.external and not self.stopping:
            session.external = False
            self._external_ends.append((time.monotonic() + EXTERNAL_S, lease_id))
            return
        session = self._by_lease.pop(lease_id, None)
        if session is None:
            return
        self.engine.close_session(session)
        self.leases.remove(lease_id)
        eventfd = self._eventfds.pop(lease_id, None)
        if eventfd is not None:
            os.close(eventfd)
        self.engine.counters["detaches"] += 1

    def _notify(self, session: Session) -> None:
        eventfd = self._eventfds.get(session.lease_id)
        if eventfd is not None:
            # The client has the same open file: it may have filled the counter (then it is readable all the same), and
            # may have made writing to it block.
            room = select.poll()
            room.register(eventfd, select.POLLOUT)
            if room.poll(0):
                os.set_blocking(eventfd, False)
                try:
                    os.eventfd_write(eventfd, 1)
                except BlockingIOError:
                    pass

    def _send(self, identity: bytes, request_id: bytes, reply: object) -> None:
        self.rpc.send(identity, request_id, reply)  # type: ignore[arg-type]

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _explained_memory(self) -> int:
        handles = len(self.engine.lookups) + len(self.engine.stores)
        connections = self.rpc.connections + len(self.listener)
        entry = ENTRY_BYTES + (ADAPTER_BYTES * len(self.l2.movers) if self.l2 is not None else 0)
        return self.arena.table.ever_used * entry + handles * HANDLE_BYTES + connections * CONNECTION_BYTES

    def _cut(self, only_busy: bool) -> int:
        """RPC connections, and have the clients behind them attach again: requests and replies were lost."""
        pids = self.rpc.cut(only_busy=only_busy)
        for session in self._by_lease.values():
            if session.credentials.pid in pids:
                self.listener.hang_up(session.lease_id)
        return len(pids)

    def _look_at_memory(self, now: float) -> None:
        before = self.memory.reason
        self.memory.look(now)
        if self.memory.reason != before:
            self.changed()
            if self.memory.reason:
                self.admin.reasons["rpc"] = self.memory.reason
            else:
                del self.admin.reasons["rpc"]

    def _adopt(self) -> None:
        began = time.monotonic()
        self.leases.adopt()
        result = adopt(self.arena, ghosts=bool(self.leases.ghosts))
        if self.leases.ghosts:
            self.admin.inherited_references = self.arena.table.references.copy()
            self.admin.inherited_generations = self.arena.table.generation.copy()
        else:
            self.arena.release_all()
        log.info(
            "adopted the arena: %d entries kept, %d dropped as doubtful, %d unfinished, %d clients still alive, %.3f s",
            result.kept,
            result.dropped,
            result.unfinished,
            len(self.leases.ghosts),
            time.monotonic() - began,
        )

    def _no_more_ghosts(self) -> None:
        """Every client of the daemon before us has attached again or died."""
        inherited = self.admin.inherited()
        if inherited:
            entries = np.fromiter(inherited, dtype=np.int64)
            counts = np.fromiter(inherited.values(), dtype=np.uint32)
            self.arena.table.references[entries] -= counts
            self.arena.references_dropped()
        self.admin.inherited_references = self.admin.inherited_generations = None
        self.arena.resting.bury_zombies()

    def reserve_first(self) -> None:
        """Some memory before the first client, so that a small store never finds nothing; a few milliseconds."""
        self.reserver.step()
        self.arena.slabs.set_ready(self.reserver.ready)

    def memory_is_ready(self) -> None:
        """The arena of an earlier daemon: nothing is left to reserve."""
        self.arena.slabs.set_ready(self.arena.bytes_total)
        self.arena.reserving = False

    def _on_reserved(self) -> None:
        try:
            os.eventfd_read(self.reserver.eventfd)
        except BlockingIOError:
            return
        self.arena.slabs.set_ready(self.reserver.ready)
        if self.reserver.done:
            self.unwatch(self.reserver.eventfd)
            self.arena.reserving = False
            if self.reserver.failed:
                self.admin.reasons["memory"] = self.reserver.failed
                log.error("%s", self.reserver.failed)
            else:
                log.info("all %d bytes of L1 are reserved", self.arena.bytes_total)
            self.notifier.status(self.reserver.failed or "serving")

    def _drop_damaged(self, damage: str) -> None:
        """A client shrank the segment under everybody: nothing in it can be trusted, the next start makes a new one."""
        log.critical("%s: dropping the arena and stopping", damage)
        self.segments.unlink()
        self.stopping = True
        self.exit_code = 1

    exit_code = 0

    # ---- stopping ----------------------------------------------------------------------------------------------------

    def close_sockets(self) -> None:
        """Clients see the end now.  Their leases stay: they may still be copying, and the next daemon must know."""
        self.listener.close()
        self.rpc.close()
        for path in (self.config.attach_path, self.config.rpc_path):
            if os.path.lexists(path):
                os.unlink(path)

    def close(self) -> None:
        if self.reserver.is_alive():
            self.reserver.stop()
        self.publish()
        self.segments.close()


def _l2(control: Control, config: Config) -> L2 | None:
    """Imported only where it is configured: that is a third of what a start has to import."""
    if not config.l2_adapter:
        return None
    from kvkeep.daemon.l2 import L2

    return L2(control, config.adapters)


def _gid(config: Config) -> int | None:
    if not config.socket_group:
        return None
    import grp

    return grp.getgrnam(config.socket_group).gr_gid


def _preparation(config: Config, segments: Segments) -> Callable[[int, int], None] | None:
    """What the reserver does with each step beyond reserving it: mlock, on request."""
    if not config.l1_mlock and not config.l1_use_hugepages:
        return None
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    view = mmap.mmap(segments.data_fd, segments.geometry.data_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    said: set[str] = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            log.warning("%s", text)

    def prepare(at: int, size: int) -> None:
        where, length = ctypes.c_void_p(base + at), ctypes.c_size_t(size // PAGE * PAGE)
        if config.l1_use_hugepages and libc.madvise(where, length, 14):  # MADV_HUGEPAGE
            once("huge pages were refused for shared memory; going on with 4 KiB pages")
        if config.l1_mlock and libc.mlock(where, length):
            once(f"mlock was refused ({os.strerror(ctypes.get_errno())}); raise LimitMEMLOCK; going on unlocked")

    return prepare
