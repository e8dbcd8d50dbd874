"""Management operations: PIN, UNPIN, DELETE, CLEAR, L2, LIST, STATS, CHECK, and the status document.

Those that destroy or pause need an allowed uid.  What would take long runs as a job, a bounded piece per round of the
control loop, and its reply is sent when the job ends.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvkeep.daemon.engine import Engine, Refusal
from kvkeep.daemon.pins import Pins
from kvkeep.daemon.sessions import References, Session
from kvkeep.ipc import messages as m
from kvkeep.ipc.messages import ErrorCode
from kvkeep.shm.layout import State
from kvkeep.shm.namespaces import Namespace

if TYPE_CHECKING:
    from kvkeep.daemon.l2 import L2

CLEAR_STEP = 1024  # entries per round
PIN_SHARE = 0.75  # of L1: what is pinned leaves room for loads from L2 and for stores
SCAN_STEP = 65536  # records per round
MAX_PAGE = 1000
MAX_LISTED_CLIENTS = 256

# So that a reader can count on every name from the first moment on.
COUNTERS = (
    *("lookups", "lookup_chunks", "lookup_chunks_hit", "retrieves", "retrieve_chunks", "retrieve_bytes"),
    *("stores", "store_chunks", "stores_refused_full", "commits", "commit_bytes"),
    *("entries_evicted", "bytes_evicted", "entries_given_up", "entries_incomplete", "entries_deleted"),
    *("attaches", "detaches", "attach_refused", "requests", "malformed", "rpc_connections_cut"),
    *("l2_chunks_stored", "l2_store_failures", "l2_stores_shed", "l2_stores_too_late"),
    *("l2_chunks_loaded", "l2_load_failures", "l2_loads_refused_full"),
    *("l2_prefetches", "l2_prefetches_expired", "entries_passed", "l2_stores_not_wanted"),
)


class Admin:
    def __init__(self, engine: Engine, *, name: str, version: str, admin_uids: tuple[int, ...]) -> None:
        self.engine = engine
        self.name, self.version = name, version
        self.started = time.monotonic()
        self.l2: L2 | None = None
        self.send: Callable[[bytes, bytes, m.AnyReply], None] = lambda *_: None  # for replies that come later
        self.reasons: dict[str, str] = {}  # why health is degraded, by source
        self._admins = {0, os.geteuid(), *admin_uids}
        self.pins = Pins()
        self._jobs: deque[tuple[bytes, bytes, Iterator[m.AnyReply | None]]] = deque()
        engine.operations.update(
            {
                m.Pin: self.pin,
                m.Unpin: self.unpin,
                m.Delete: self.delete,
                m.Clear: self.clear,
                m.Manage: self.manage,
                m.Stats: self.stats,
                m.List: self.listing,
                m.Check: self.check,
            }
        )

    def _only_admins(self, session: Session) -> None:
        uid = session.credentials.uid
        if uid not in self._admins:
            raise Refusal(
                ErrorCode.DENIED,
                f"uid {uid} may not do this; add it to --admin-uids, or use root or the daemon's uid",
            )

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def step(self, send: Any) -> bool:
        """One piece of the oldest job.  True = there is more to do."""
        if not self._jobs:
            return False
        identity, request_id, job = self._jobs[0]
        reply = next(job)
        if reply is not None:
            self._jobs.popleft()
            send(identity, request_id, reply)
        return bool(self._jobs)

    # ---- operations --------------------------------------------------------------------------------------------------

    def pin(self, session: Session, request: m.Pin, *_: bytes) -> m.AnyReply:
        self._only_admins(session)
        namespace = self.engine.namespace_of(session, request.namespace)
        if not 0 < request.ttl_s <= 366 * 86400:
            raise Refusal(ErrorCode.BAD_REQUEST, f"a ttl of {request.ttl_s} s; give up to a year")
        keys = np.frombuffer(request.hashes[: len(request.hashes) // 32 * 32], dtype=np.uint64).reshape(-1, 4)
        entries = self.engine.arena.prefix(namespace, keys[: m.MAX_CHUNKS]).entries
        if not len(entries) or len(np.unique(entries)) != len(entries):
            return m.Pinned(self.engine.epoch, 0, 0)
        nbytes = len(entries) * namespace.extent_bytes
        self._leave_room(nbytes)
        pin = self.pins.add(References(self.engine.arena, entries), nbytes, time.monotonic() + request.ttl_s)
        return m.Pinned(self.engine.epoch, pin, len(entries))

    def _leave_room(self, more: int) -> None:
        if self.pins.nbytes + more > PIN_SHARE * self.engine.arena.bytes_total:
            raise Refusal(
                ErrorCode.LIMIT,
                f"{self.pins.nbytes} bytes are pinned and {more} would be added; at most {PIN_SHARE:.0%} of L1 can be "
                "pinned, so that loads and stores find room: unpin some, or raise --l1-size-gb",
            )

    def unpin(self, session: Session, request: m.Unpin, *_: bytes) -> m.AnyReply:
        self._only_admins(session)
        dropped = self.pins.remove(request.pin)
        if dropped is None:
            raise Refusal(ErrorCode.UNKNOWN_HANDLE, f"pin {request.pin} does not exist (any more)")
        return m.Ok(self.engine.epoch, dropped)

    def delete(self, session: Session, request: m.Delete, identity: bytes, request_id: bytes) -> m.AnyReply | None:
        self._only_admins(session)
        namespace = self.engine.namespace_of(session, request.namespace)
        hashes = request.hashes[: min(len(request.hashes) // 32, m.MAX_CHUNKS) * 32]
        keys = np.frombuffer(hashes, dtype=np.uint64).reshape(-1, 4)
        if self.l2 is None or request.l1_only or not len(keys):
            return m.Ok(self.engine.epoch, self._drop(self._found(namespace, keys)))
        if problem := self.l2.forget.room_for(len(keys)):
            raise Refusal(ErrorCode.LIMIT, problem)

        def drop() -> Iterator[int]:
            found = self._found(namespace, keys)
            dropped = self._drop(found)
            removal.in_use += self._keep_from_l2(found, namespace.id)
            yield dropped

        answer = self._answer(identity, request_id)
        removal = self.l2.forget.begin(namespace.digest, namespace.shards, hashes, drop(), answer)
        return None

    def _found(self, namespace: Namespace, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        if self.engine.arena.namespaces.get(namespace.id) is not namespace:
            return np.empty(0, dtype=np.int64)
        found = self.engine.arena.index.find(keys, namespace.id).entries
        return np.unique(found[found >= 0])

    def _drop(self, entries: npt.NDArray[np.int64]) -> int:
        """Tails first, as far as recency tells, so that what stays has its head."""
        return self.engine.arena.drop(entries[np.argsort(self.engine.arena.table.recency[entries])])

    def _keep_from_l2(self, entries: npt.NDArray[np.int64], namespace: int) -> int:
        """Those of ``entries`` that were in use stay in L1, but go to L2 no more.  Returns how many."""
        table = self.engine.arena.table
        left = entries[(table.state[entries] == State.SEALED) & (table.namespace[entries] == namespace)]
        assert self.l2 is not None
        self.l2.stores.withhold(left)
        return len(left)

    def _answer(self, identity: bytes, request_id: bytes) -> Callable[[int, dict[str, Any]], None]:
        def answer(dropped: int, report: dict[str, Any]) -> None:
            self.send(identity, request_id, m.Ok(self.engine.epoch, dropped, json.dumps(report).encode()))

        return answer

    def clear(self, session: Session, request: m.Clear, identity: bytes, request_id: bytes) -> m.AnyReply | None:
        self._only_admins(session)
        namespaces = self.engine.arena.namespaces
        namespace = namespaces.find(request.digest) if request.digest else namespaces.get(request.namespace)
        if request.namespace and namespace is None:
            raise Refusal(ErrorCode.UNKNOWN_NAMESPACE, f"namespace {request.namespace} does not exist; see `kvkeep ls`")
        if len(request.digest) not in (0, 32):
            raise Refusal(ErrorCode.BAD_REQUEST, f"a digest of {len(request.digest)} bytes; it has 32")
        number = namespace.id if namespace is not None else -1 if request.digest else 0
        if self.l2 is None or request.l1_only:
            self._jobs.append((identity, request_id, self._clearing(number, namespace)))
            return None

        def drop() -> Iterator[int]:
            for dropped, left in self._dropping(number, namespace):
                removal.in_use += left
                yield dropped

        digest = request.digest or (namespace.digest if namespace is not None else b"")
        shards = namespace.shards if namespace is not None else 1
        removal = self.l2.forget.begin(digest, shards, None, drop(), self._answer(identity, request_id))
        return None

    def _clearing(self, number: int, namespace: Namespace | None) -> Iterator[m.AnyReply | None]:
        dropped = 0
        for piece, _ in self._dropping(number, namespace):
            dropped += piece
            yield None
        yield m.Ok(self.engine.epoch, dropped)

    def _dropping(self, number: int, namespace: Namespace | None) -> Iterator[tuple[int, int]]:
        """Drop what nobody uses, a piece at a time: (dropped, in use and still there).  0 = of all namespaces.

        This may begin late, and be interrupted: it ends when the number is another namespace's."""
        arena = self.engine.arena
        for at in range(0, arena.table.capacity if number >= 0 else 0, SCAN_STEP):
            if number and arena.namespaces.get(number) is not namespace:
                return
            part = slice(at, at + SCAN_STEP)
            mine = arena.table.state[part] == State.SEALED
            if number:
                mine &= arena.table.namespace[part] == number
            entries = at + np.flatnonzero(mine)
            # Tails first also here: a reader in between must not find a tail without its head.  Within this part only.
            entries = entries[np.argsort(arena.table.recency[entries])]
            generations = arena.table.generation[entries]
            for cut in range(0, len(entries), CLEAR_STEP):
                piece = entries[cut : cut + CLEAR_STEP]
                piece = piece[arena.table.generation[piece] == generations[cut : cut + CLEAR_STEP]]
                of = arena.table.namespace[piece].copy()
                dropped = arena.drop(piece)
                left = 0
                if self.l2 is not None:
                    left = sum(self._keep_from_l2(piece[of == space], int(space)) for space in np.unique(of))
                yield dropped, left

    def manage(self, session: Session, request: m.Manage, identity: bytes, request_id: bytes) -> m.AnyReply | None:
        if self.l2 is None:
            raise Refusal(ErrorCode.BAD_REQUEST, f"there is no L2 adapter {request.adapter!r}: see --l2-adapter")
        from kvkeep.daemon import l2_manage  # a daemon without L2 starts without it

        movers = self.l2.movers
        what, mover = l2_manage.what_of(request.what), l2_manage.find(movers, request.adapter)
        if what is None:
            names = ", ".join(one.value for one in l2_manage.ASKED)
            raise Refusal(ErrorCode.BAD_REQUEST, f"{request.what!r} is no management of L2; there are {names}")
        if what not in l2_manage.READING:
            self._only_admins(session)
        if mover is None:
            names = ", ".join(f"{one.name} ({one.label})" for one in movers)
            raise Refusal(ErrorCode.BAD_REQUEST, f"there is no L2 adapter {request.adapter!r}; there are {names}")

        def reply(found: dict[str, Any]) -> None:
            self.send(identity, request_id, m.Document(self.engine.epoch, l2_manage.encode(found)))

        limit = min(max(0, request.limit), MAX_PAGE)
        l2_manage.ask(mover, what, request.namespace, request.cursor, limit, reply)
        return None

    def stats(self, session: Session, request: m.Stats, *_: bytes) -> m.AnyReply:
        return m.Document(self.engine.epoch, json.dumps(self.document()).encode())

    def listing(self, session: Session, request: m.List, *_: bytes) -> m.AnyReply:
        arena = self.engine.arena
        if not request.namespace:
            namespaces = [self._describe(ns) | {"manifest": _readable(ns.manifest)} for ns in arena.namespaces]
            return m.Document(self.engine.epoch, json.dumps({"namespaces": namespaces}).encode())
        if arena.namespaces.get(request.namespace) is None:
            raise Refusal(ErrorCode.UNKNOWN_NAMESPACE, f"namespace {request.namespace} does not exist; see `kvkeep ls`")
        limit = min(max(1, request.limit), MAX_PAGE)
        cursor = min(max(0, request.cursor), arena.table.capacity)
        part = slice(cursor, cursor + SCAN_STEP)
        mine = (arena.table.state[part] != State.FREE) & (arena.table.namespace[part] == request.namespace)
        at = cursor + np.flatnonzero(mine)
        page = at[:limit]
        if len(at) > limit:
            following = int(at[limit])
        else:
            following = cursor + SCAN_STEP if cursor + SCAN_STEP < arena.table.capacity else 0
        entries = self._entries(page)
        return m.Document(self.engine.epoch, json.dumps({"entries": entries, "cursor": following}).encode())

    def _entries(self, page: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
        table = self.engine.arena.table
        keys = table.keys[page].tobytes()
        columns = (
            [keys[at : at + m.HASH_BYTES].hex() for at in range(0, len(keys), m.HASH_BYTES)],
            [State(state).name for state in table.state[page].tolist()],
            table.extent_bytes[page].tolist(),
            table.references[page].tolist(),
            table.recency[page].tolist(),
        )
        names = ("key", "state", "bytes", "references", "recency")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def check(self, session: Session, request: m.Check, *_: bytes) -> m.AnyReply:
        self._only_admins(session)
        problem = self.integrity_problem()
        return m.Document(self.engine.epoch, json.dumps({"ok": not problem, "problem": problem}).encode())

    def integrity_problem(self) -> str:
        """The broken rule, or ""."""
        references, writing = self.engine.held()
        if self.l2 is not None:
            self.l2.hold(references, writing)
        generation = self.engine.arena.table.generation
        for held in self.pins.held():
            references.update(held.entries[generation[held.entries] == held.generations].tolist())
        references.update(self.inherited())
        try:
            self.engine.arena.check_integrity(references, writing)
        except AssertionError as e:
            return str(e)
        return ""

    inherited_references: npt.NDArray[np.uint32] | None = None  # per entry, of clients of an earlier epoch
    inherited_generations: npt.NDArray[np.uint32] | None = None

    def inherited(self) -> dict[int, int]:
        counts, generations = self.inherited_references, self.inherited_generations
        if counts is None or generations is None:
            return {}
        entries = np.flatnonzero((counts > 0) & (self.engine.arena.table.generation == generations))
        return {int(e): int(counts[e]) for e in entries}

    # ---- the status document -----------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """`kvkeep status --json`, and the stats page."""
        engine, arena = self.engine, self.engine.arena
        sessions = list(engine.sessions.values())
        reasons = [*self.reasons.values(), *filter(None, [engine.broken, arena.orders.trouble])]
        now = time.monotonic()
        held = arena.references_owned
        if self.inherited_references is not None:
            held += int(self.inherited_references.sum())
        return {
            "name": self.name,
            "version": self.version,
            "pid": os.getpid(),
            "epoch": engine.epoch,
            "uptime_s": round(now - self.started, 1),
            "time": round(time.time(), 3),
            "monotonic_s": round(now, 3),
            "health": "degraded" if reasons else "ok",
            "reasons": reasons,
            "l1": {
                "bytes_total": arena.bytes_total,
                "bytes_ready": arena.slabs.bytes_ready,
                "bytes_used": arena.slabs.bytes_used,
                "bytes_quarantined": arena.resting.bytes,
                "reserved_bytes": arena.bytes_reserved,
                "entries": arena.table.used_count,
                "entries_capacity": arena.table.capacity,
                "references": held,
                "lookups_waiting": engine.waiting.count,
                **(self.l2.prefetch.numbers() if self.l2 is not None else {}),
            },
            "clients": [
                {
                    "lease": s.lease_id,
                    "pid": s.credentials.pid,
                    "uid": s.credentials.uid,
                    "name": s.name,
                    "mapped": s.mapped,
                    "references": s.references,
                    "reserved_bytes": s.reserved_bytes,
                    "idle_s": round(now - s.last_seen, 1),
                }
                for s in sessions[:MAX_LISTED_CLIENTS]
            ],
            "clients_total": len(sessions),
            "namespaces": [self._describe(ns) for ns in arena.namespaces],
            "l2": self.l2.rows() if self.l2 is not None else [],
            "counters": dict.fromkeys(COUNTERS, 0) | dict(engine.counters),
        }

    def _describe(self, namespace: Any) -> dict[str, Any]:
        entries = self.engine.arena.entries_of[namespace.id]
        return {
            "id": namespace.id,
            "digest": namespace.digest.hex(),
            "entries": entries,
            "bytes": entries * namespace.extent_bytes,
            "shards": namespace.shards,
            "shard_bytes": namespace.shard_bytes,
        }


def _readable(manifest: bytes) -> Any:
    try:
        return msgspec.json.decode(manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {"unreadable": manifest[:64].hex()}
