"""The place of `lmcache server`: a ROUTER that its connector attaches to, on top of a client of the daemon.

A process of its own, a child of kvkeepd, since its clients send all tokens with each call: unpacking and hashing them
is not for control.  One thread.  Each request gets one reply, also where LMCache's server is silent.

Workers map the arena's data segment and copy by themselves, as ours do, but tell nobody when they stop.  So whatever
they may still be copying when a connection ends stays reserved or referenced for `PARK_S`, and control does the same
when this process ends (see `EXTERNAL_NAME` in shm/leases.py).

What a connection holds - lookups, reservations, reads - is dropped at its end, which the socket's monitor tells.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import zmq
import zmq.utils.monitor

from kvkeep.ipc.client import Client, Reservation
from kvkeep.ipc.errors import ProtocolError, Unavailable
from kvkeep.ipc.lmcache import wire
from kvkeep.ipc.lmcache.chains import Chains
from kvkeep.ipc.lmcache.holds import Hold, Session
from kvkeep.ipc.lmcache.wire import BadRequest, Key, Op, Registration
from kvkeep.ipc.lmcache.workers import Layout, Workers
from kvkeep.ipc.messages import HASH_BYTES, Outcome, Verdict
from kvkeep.shm.leases import EXTERNAL_S

PARK_S = EXTERNAL_S
L2_WAIT_S = 10.0
CALL_S = 1.0  # for one answer of control
MAX_FRAME = 64 << 20
MAX_READERS = 128
MAX_SESSIONS = 65536
BATCH = 64  # requests between two looks at everything else
IDLE_MS = 1000
MAX_CLEARING = 16
CLEARING_S = 0.05  # between two looks whether it is done
SAME_COMPLAINT_S = 10.0

log = logging.getLogger("kvkeep.lmcache")

_PRESENT = (int(Verdict.PRESENT), int(Verdict.BUSY))


class Range(NamedTuple):
    """One transfer of one worker: of this content, not only of this request's id."""

    instance_id: int
    request_id: str
    start: int
    end: int
    last: bytes  # hash of the last chunk


class Reading(NamedTuple):
    hold: Hold
    shard: int
    start: int
    end: int

    def finish(self) -> None:
        self.hold.end_reading(self.shard, self.start, self.end)


class Waiter(NamedTuple):
    identity: bytes
    uid: bytes
    op: bytes
    session: Session
    until: float


class Connection:
    """What one client's socket holds here."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.stores: dict[Range, Reservation] = {}
        self.readings: dict[Range, Reading] = {}


class Gateway:
    def __init__(self, client: Client, chunk_tokens: int, segment: Path, saved: Path) -> None:
        self.counters: Counter[str] = Counter()
        self._client, self._chunk_tokens = client, chunk_tokens
        self._chains = Chains(chunk_tokens)
        self._workers = Workers(client, chunk_tokens, segment, saved)
        self._connections: dict[bytes, Connection] = {}
        self._waiters: list[Waiter] = []
        self._parked: list[tuple[float, Callable[[], object]]] = []
        self._complained: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(1, "clear")
        self._clearing: list[tuple[Future[None], bytes, list[bytes]]] = []
        self._send: Callable[[bytes, Sequence[bytes]], None] = lambda identity, frames: None
        self._handlers: dict[Op, Callable[..., object]] = {
            Op.LOOKUP: self._lookup,
            Op.QUERY: self._query,
            Op.FREE: self._free,
            Op.END_SESSION: self._end_session,
            Op.REGISTER: self._register,
            Op.UNREGISTER: self._unregister,
            Op.PREPARE_STORE: self._prepare_store,
            Op.COMMIT_STORE: self._commit_store,
            Op.PREPARE_RETRIEVE: self._prepare_retrieve,
            Op.COMMIT_RETRIEVE: self._commit_retrieve,
            Op.CHUNK_SIZE: lambda connection: chunk_tokens,
            Op.PING: lambda connection, instance_id: self._workers.alive(instance_id),
            Op.ALLOCATIONS: lambda connection, *_: None,
            Op.NOOP: lambda connection: "OK",
            Op.EXPERIMENTAL: lambda connection: [],
        }

    # ---- requests ----------------------------------------------------------------------------------------------------

    def answer(self, identity: bytes, frames: list[Any]) -> None:
        """One request, all frames after the identity.  What has not even a number cannot be answered."""
        self.counters["requests"] += 1
        if not frames:
            self.counters["malformed"] += 1
            return
        uid, op_frame = bytes(frames[0]), bytes(frames[1]) if len(frames) > 1 else b""
        connection = self._connections.setdefault(identity, Connection())
        try:
            op = wire.operation(op_frame)
            arguments = wire.payloads(op, frames[2:])
            if op is Op.WAIT:
                self._wait(identity, uid, op_frame, connection, *arguments)
                return
            if op is Op.CLEAR:
                self._clear(identity, [uid, op_frame])
                return
            reply = wire.result(self._handlers[op](connection, *arguments))
            self._send(identity, [uid, op_frame, *reply])
        except BadRequest as refused:
            self.counters["refused"] += 1
            self._complain(str(refused))
            self._send(identity, [uid, wire.refusal(str(refused))])
        except Exception as error:
            self.counters["failed"] += 1
            log.exception("a request failed here")
            self._send(identity, [uid, wire.refusal(f"kvkeep failed ({error!r}); its log says more")])

    def _lookup(self, connection: Connection, key: Key, _: int) -> None:
        if not 1 <= key.num_kv_readers <= MAX_READERS:
            raise BadRequest(
                f"num_kv_readers is {key.num_kv_readers}, it must be between 1 and {MAX_READERS}; use lmcache 0.5.6"
            )
        self._drop_session(connection, key.request_id)
        if len(connection.sessions) >= MAX_SESSIONS:
            self._drop_session(connection, next(iter(connection.sessions)))
        namespace, pending, hashes = self._workers.of_scheduler(key), None, b""
        if namespace is not None:
            chunks = max(0, key.end) // self._chunk_tokens
            hashes = self._chains.of(key.token_ids, key.request_id)[: chunks * HASH_BYTES]
        else:
            self.counters["lookups_of_unknown_models"] += 1
        if namespace is not None and hashes:
            pending = self._client.begin_lookup(
                namespace, hashes, wait_s=L2_WAIT_S if self._client.has_l2 else 0.0, deadline_s=CALL_S
            )
            if not self._client.has_l2:
                pending.wait(CALL_S)
        connection.sessions[key.request_id] = Session(namespace, hashes, key.num_kv_readers, pending)

    def _query(self, connection: Connection, request_id: str) -> int | None:
        session = connection.sessions.get(request_id)
        if session is None:
            return 0
        return session.chunks() if session.answered() else None

    def _wait(
        self, identity: bytes, uid: bytes, op: bytes, connection: Connection, request_id: str, seconds: float
    ) -> None:
        session = connection.sessions.get(request_id)
        if session is None or session.answered():
            self._send(identity, [uid, op, *wire.result(session.chunks() if session is not None else 0)])
        else:
            until = time.monotonic() + min(max(0.0, seconds), L2_WAIT_S + CALL_S)
            self._waiters.append(Waiter(identity, uid, op, session, until))

    def _free(self, connection: Connection, key: Key, _: int) -> None:
        session = connection.sessions.get(key.request_id)
        if session is not None:
            session.free(max(0, key.start) // self._chunk_tokens, -(-max(0, key.end) // self._chunk_tokens))

    def _end_session(self, connection: Connection, request_id: str) -> None:
        self._drop_session(connection, request_id)
        self._chains.forget(request_id)

    def _register(self, connection: Connection, registration: Registration) -> dict[str, object]:
        self._workers.register(registration)
        log.info(
            "worker %d of LMCache: model %r, %d ranks, %s %s a chunk",
            registration.instance_id, registration.model_name, registration.world_size, registration.dtype_str,
            registration.shape(self._chunk_tokens),
        )  # fmt: skip
        return {"shm_name": f"/{self._workers.segment_name}", "pool_size": self._workers.segment_bytes}

    def _unregister(self, connection: Connection, instance_id: int) -> None:
        for one in self._connections.values():
            self._park([one.stores.pop(key).abort for key in list(one.stores) if key.instance_id == instance_id])
            self._park([one.readings.pop(key).finish for key in list(one.readings) if key.instance_id == instance_id])
        self._workers.unregister(instance_id)

    def _prepare_store(self, connection: Connection, key: Key, instance_id: int) -> dict[str, Any]:
        """An answer without slots is "there already" for the worker, one without the list is a failed store."""
        failed: dict[str, Any] = {"context": {}}
        if (where := self._of_worker(key, instance_id)) is None:
            return failed
        layout, namespace, shard = where
        which, hashes = self._range(key, instance_id)
        if (earlier := connection.stores.pop(which, None)) is not None:
            self._park([earlier.abort])
        reservation = self._client.reserve(namespace, hashes, start=which.start, shard=shard, deadline_s=CALL_S)
        if not reservation.available:
            self.counters["stores_without_daemon"] += 1
            return failed
        refused = sum(verdict not in _PRESENT for verdict in reservation.verdicts) - len(reservation.granted)
        if refused:
            self.counters["chunks_refused"] += refused
            self._complain("chunks were not stored: L1 has no room for them, or for what comes before them")
        if not reservation.granted:
            return failed if refused else {"context": {"slots": [], "chunk_indices": []}}
        connection.stores[which] = reservation
        indices = [chunk - which.start for chunk in reservation.granted]
        return {"context": {"slots": _slots(reservation.offsets, layout), "chunk_indices": indices}}

    def _commit_store(self, connection: Connection, key: Key, instance_id: int, data: bytes) -> bool:
        which, _ = self._range(key, instance_id)
        reservation = connection.stores.pop(which, None)
        if data:
            self.counters["pickles_refused"] += 1
            self._complain(
                f"worker {instance_id} sent its KV as a pickle, which is never loaded: it could not map /dev/shm/"
                f"{self._workers.segment_name}; run it as the same user, with the same /dev/shm"
            )
            if reservation is not None:
                reservation.abort()  # it writes nothing into the arena
            return False
        if reservation is None:
            return False
        outcomes = reservation.commit(deadline_s=CALL_S)
        self.counters["chunks_stored"] += sum(outcome is not Outcome.LOST for outcome in outcomes)
        return Outcome.LOST not in outcomes

    def _prepare_retrieve(self, connection: Connection, key: Key, instance_id: int) -> dict[str, Any]:
        failed = {"success": False, "data": b"", "context": {}}
        if (where := self._of_worker(key, instance_id)) is None:
            return failed
        layout, namespace, shard = where
        which, hashes = self._range(key, instance_id)
        hold = self._hold_for(namespace, hashes, which, shard)
        if hold is None:  # its lookup was made before a restart
            lookup = self._client.lookup(namespace, hashes, deadline_s=CALL_S)
            if lookup.ready < which.end:
                lookup.release()
                return failed
            hold = Hold(lookup, namespace, hashes, 0)
        hold.begin_reading()
        reading = Reading(hold, shard, which.start, which.end)
        where_to = self._client.open_read(
            hold.lookup.handle, shard, which.start, which.end - which.start, deadline_s=CALL_S
        )
        if where_to is None:
            reading.finish()
            return failed
        where_to.leave()  # the hold is what keeps them
        if (earlier := connection.readings.pop(which, None)) is not None:
            earlier.finish()
        connection.readings[which] = reading
        self.counters["chunks_retrieved"] += which.end - which.start
        return {"success": True, "data": b"", "context": {"slots": _slots(where_to.offsets, layout)}}

    def _commit_retrieve(self, connection: Connection, key: Key, instance_id: int) -> bool:
        reading = connection.readings.pop(self._range(key, instance_id)[0], None)
        if reading is not None:
            reading.finish()
        return True

    def _clear(self, identity: bytes, reply: list[bytes]) -> None:
        """From both levels, since an engine asks when its weights have changed.  Not here: it may take seconds."""
        namespaces = self._workers.namespaces()

        def drop() -> None:
            for namespace in namespaces:
                try:
                    self._client.clear(namespace)
                except (ProtocolError, Unavailable) as error:
                    log.warning("%r was not cleared: %s", namespace, error)

        if len(self._clearing) >= MAX_CLEARING:
            raise BadRequest(f"{MAX_CLEARING} requests to clear are waiting already; ask again later")
        self._clearing.append((self._pool.submit(drop), identity, reply))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _of_worker(self, key: Key, instance_id: int) -> tuple[Layout, Any, int] | None:
        where = self._workers.of_worker(instance_id, key)
        if where is None:
            self.counters["requests_of_unknown_workers"] += 1
            self._complain(f"worker {instance_id} is not registered with this key; it does so after its next two pings")
        return where

    def _range(self, key: Key, instance_id: int) -> tuple[Range, bytes]:
        """Raises BadRequest."""
        size = self._chunk_tokens
        if key.start < 0 or key.start >= key.end or key.start % size or key.end % size:
            raise BadRequest(f"tokens {key.start} to {key.end} are no whole chunks of {size}; use --chunk-size {size}")
        start, end = key.start // size, key.end // size
        hashes = self._chains.of(key.token_ids, key.request_id)[: end * HASH_BYTES]
        if len(hashes) < end * HASH_BYTES:
            raise BadRequest(f"tokens {key.start} to {key.end} of only {len(hashes) // HASH_BYTES * size} that came")
        return Range(instance_id, key.request_id, start, end, hashes[-HASH_BYTES:]), hashes

    def _hold_for(self, namespace: Any, hashes: bytes, which: Range, shard: int) -> Hold | None:
        for connection in self._connections.values():
            session = connection.sessions.get(which.request_id)
            if session is None or not session.answered() or session.hold is None:
                continue
            if session.hold.covers(namespace, hashes, which.start, which.end, shard):
                return session.hold
        return None

    def _drop_session(self, connection: Connection, request_id: str) -> None:
        session = connection.sessions.pop(request_id, None)
        if session is not None:
            session.end()

    def _complain(self, sentence: str) -> None:
        now = time.monotonic()
        if now - self._complained.get(sentence, -SAME_COMPLAINT_S) >= SAME_COMPLAINT_S:
            if len(self._complained) > 256:
                self._complained.clear()
            self._complained[sentence] = now
            log.warning("%s", sentence)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def disconnected(self, identity: bytes) -> None:
        """Its process has ended, or closed its socket and may still be copying."""
        connection = self._connections.pop(identity, None)
        if connection is None:
            return
        for session in connection.sessions.values():
            session.end()
        self._park([reservation.abort for reservation in connection.stores.values()])
        self._park([reading.finish for reading in connection.readings.values()])
        self._waiters = [waiter for waiter in self._waiters if waiter.identity != identity]

    def _park(self, ends: list[Callable[[], object]]) -> None:
        until = time.monotonic() + PARK_S
        self._parked += [(until, end) for end in ends]

    def upkeep(self) -> float:
        """What is due.  Returns seconds until it must be called again."""
        now = time.monotonic()
        while self._parked and self._parked[0][0] <= now:
            self._parked.pop(0)[1]()
        while self._clearing and self._clearing[0][0].done():
            _, identity, reply = self._clearing.pop(0)
            self._send(identity, reply)
        waiting, self._waiters = self._waiters, []
        for waiter in waiting:
            if waiter.session.answered() or now >= waiter.until:
                value = waiter.session.chunks() if waiter.session.pending is None else None
                self._send(waiter.identity, [waiter.uid, waiter.op, *wire.result(value)])
            else:
                self._waiters.append(waiter)
        dues = [self._parked[0][0]] if self._parked else []
        dues += [waiter.until for waiter in self._waiters] + [now + CLEARING_S] * bool(self._clearing)
        return max(0.0, min(dues) - now) if dues else IDLE_MS / 1000


class Router:
    """The socket, and which identity is behind which of its descriptors."""

    def __init__(self, host: str, port: int, gateway: Gateway, context: zmq.Context[Any]) -> None:
        """Raises zmq.ZMQError: the address is taken, or not ours."""
        self._gateway = gateway
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self.socket.setsockopt(zmq.IPV6, ":" in host)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self._behind: dict[int, bytes] = {}  # descriptor -> identity
        gateway._send = self._send

    @property
    def address(self) -> str:
        return str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _send(self, identity: bytes, frames: Sequence[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # who does not read gets nothing; who is gone neither
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK)

    def look_at_ends(self) -> None:
        for event, fd in self._events():
            identity = self._behind.pop(fd, None)
            if identity is not None and event in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
                self._gateway.disconnected(identity)

    def _events(self) -> Iterator[tuple[int, int]]:
        while self.monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)
            yield event["event"], event["value"]

    def serve(self) -> None:
        """A batch of what has come."""
        for _ in range(BATCH):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            name = identity.bytes
            self._behind[identity.get(zmq.SRCFD)] = name
            self._gateway.answer(name, [frame.buffer for frame in frames])


def _slots(offsets: list[int], layout: Layout) -> list[dict[str, Any]]:
    shape, length, dtype = list(layout.shape), layout.shard_bytes, layout.dtype
    return [{"offset": offset, "length": length, "shape": shape, "dtype": dtype} for offset in offsets]
