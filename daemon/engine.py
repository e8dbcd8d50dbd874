"""The data path: REGISTER, LOOKUP, RETRIEVE, CONFIRM, RELEASE, STORE, COMMIT, ABORT, and the end of a client.

One method per operation: check the request's fields, act on the arena, keep the books of the session, return the reply.
`handle` guards them all: whatever goes wrong inside one becomes an `Error` reply to its sender.  Management operations
are in admin.py.

A LOOKUP that may wait (``wait_ms``) for what it misses is answered ``pending`` and completed later by waiting.py.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvkeep.daemon.sessions import LookupHandle, References, Session, StoreHandle, distinct
from kvkeep.daemon.waiting import Send, Waiting, WaitingLookups
from kvkeep.ipc import messages as m
from kvkeep.ipc.messages import ErrorCode
from kvkeep.shm.arena import Arena
from kvkeep.shm.layout import MAX_NAMESPACES, MAX_SHARDS
from kvkeep.shm.namespaces import Namespace, namespace_digest

log = logging.getLogger("kvkeep.engine")

MAX_HELD_CHUNKS = 1 << 20  # references and reservations one client may hold
MAX_HANDLES = 65536  # per client
MAX_WAIT_MS = 60_000
MAX_NAMESPACES_OF_ONE = MAX_NAMESPACES // 4  # the newest that one client registered; it cannot use up the table
LEAVE_STEP = 256  # handles of a client that is gone, or chunks it was writing, per round of the control loop
CHUNKS_LIKE_A_HANDLE = 256  # that are only referenced: to let go of so many costs as much as another handle
RECYCLE_LIMIT = 16384  # entries that one REGISTER may drop to get an id

U64 = npt.NDArray[np.uint64]


class Refusal(Exception):
    """A request that cannot be served; becomes the `Error` reply."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Engine:
    def __init__(self, arena: Arena, *, epoch: int, send: Send, notify: Callable[[Session], None]) -> None:
        self.arena = arena
        self.epoch = epoch
        self.sessions: dict[bytes, Session] = {}
        self.lookups: dict[int, LookupHandle] = {}
        self.stores: dict[int, StoreHandle] = {}
        self._leaving: deque[tuple[Session, Iterator[int]]] = deque()  # sessions that are closed, what is left of each
        self.counters = arena.counters
        self.broken = ""  # an invariant that did not hold: health is degraded from then on
        self.waiting = WaitingLookups(arena, epoch=epoch, send=send, notify=notify, drop=self._drop_lookup)
        self._ids = itertools.count(secrets.randbits(48) << 8)
        self.operations: dict[type[Any], Callable[..., m.AnyReply | None]] = {
            m.Ping: self.ping,
            m.Register: self.register,
            m.Lookup: self.lookup,
            m.Retrieve: self.retrieve,
            m.Confirm: self.confirm,
            m.Release: self.release,
            m.Store: self.store,
            m.Commit: self.commit,
            m.Abort: self.abort,
        }

    # ---- the border --------------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, request_id: bytes, request: m.AnyRequest) -> m.AnyReply | None:
        session = self.sessions.get(request.lease)
        if request.epoch != self.epoch:
            return m.Error(
                ErrorCode.STALE_EPOCH.value,
                f"epoch {request.epoch} is over, attach again (now {self.epoch})",
                self.epoch,
            )
        if session is None:
            return m.Error(ErrorCode.UNKNOWN_LEASE.value, "this lease is not attached; attach again", self.epoch)
        session.last_seen = time.monotonic()
        try:
            reply = self.operations[type(request)](session, request, identity, request_id)
        except Refusal as e:
            self.counters["refused_" + e.code.value] += 1
            return m.Error(e.code.value, str(e), self.epoch)
        except Exception as e:
            log.exception("internal error in %s", type(request).__name__)
            self.broken = f"internal error in {type(request).__name__}: {e}"
            return m.Error(ErrorCode.INTERNAL.value, self.broken[:300], self.epoch)
        self.waiting.wake()
        return reply

    def _keys(self, hashes: bytes) -> U64:
        if len(hashes) % m.HASH_BYTES:
            raise Refusal(ErrorCode.BAD_REQUEST, f"{len(hashes)} bytes of hashes are not a multiple of {m.HASH_BYTES}")
        if len(hashes) > m.MAX_CHUNKS * m.HASH_BYTES:
            raise Refusal(
                ErrorCode.TOO_LARGE,
                f"{len(hashes) // m.HASH_BYTES} chunks in one request, the limit is {m.MAX_CHUNKS}; use larger chunks",
            )
        return np.frombuffer(hashes, dtype=np.uint64).reshape(-1, 4)

    def namespace_of(self, session: Session, namespace_id: int) -> Namespace:
        """Only ids that this client registered: an id may mean something else by now."""
        found = self.arena.namespaces.get(namespace_id) if namespace_id in session.namespaces else None
        if found is None:
            raise Refusal(ErrorCode.UNKNOWN_NAMESPACE, f"namespace {namespace_id} was not registered by this client")
        return found

    def _shard_of(self, namespace: Namespace, shard: int) -> int:
        if not 0 <= shard < namespace.shards:
            raise Refusal(ErrorCode.BAD_REQUEST, f"shard {shard} of a namespace with {namespace.shards}")
        return shard

    def _charge(self, session: Session, chunks: int) -> None:
        if session.held_chunks + chunks > MAX_HELD_CHUNKS:
            raise Refusal(
                ErrorCode.LIMIT,
                f"this client already holds {session.held_chunks} chunks, the limit is {MAX_HELD_CHUNKS}",
            )
        if len(session.lookups) + len(session.stores) >= MAX_HANDLES:
            raise Refusal(ErrorCode.LIMIT, f"this client already holds {MAX_HANDLES} handles; release some")

    # ---- operations --------------------------------------------------------------------------------------------------

    def ping(self, session: Session, request: m.Ping, *_: bytes) -> m.AnyReply:
        return m.Ok(self.epoch)

    def register(self, session: Session, request: m.Register, *_: bytes) -> m.AnyReply:
        if not 1 <= request.shards <= MAX_SHARDS:
            raise Refusal(ErrorCode.BAD_REQUEST, f"{request.shards} shards, a chunk has 1 to {MAX_SHARDS}")
        if not 0 < len(request.manifest) <= m.MAX_MANIFEST_BYTES:
            raise Refusal(
                ErrorCode.TOO_LARGE, f"a manifest of {len(request.manifest)} bytes, the limit is {m.MAX_MANIFEST_BYTES}"
            )
        if not 0 < request.shard_bytes <= self.arena.bytes_total:
            raise Refusal(
                ErrorCode.TOO_LARGE,
                f"a shard of {request.shard_bytes} bytes does not fit an arena of {self.arena.bytes_total} bytes; "
                "raise --l1-size-gb or use smaller chunks",
            )
        try:
            msgspec.json.decode(request.manifest, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Refusal(ErrorCode.BAD_REQUEST, "the manifest is not a JSON object; see keys.canonical") from None
        table = self.arena.namespaces
        namespace = table.find(namespace_digest(request.manifest, request.shards, request.shard_bytes))
        if namespace is None:
            candidate = Namespace(0, b"", b"", request.shards, request.shard_bytes)
            if not self.arena.slabs.geometry(candidate.extent_bytes)[0]:
                raise Refusal(
                    ErrorCode.TOO_LARGE,
                    f"a chunk of {candidate.extent_bytes} bytes does not fit {self.arena.bytes_total} bytes of L1; "
                    "raise --l1-size-gb or use smaller chunks",
                )
            namespace = table.add(self._free_namespace_id(), request.manifest, request.shards, request.shard_bytes)
            log.log(
                logging.INFO if len(table) < MAX_NAMESPACES_OF_ONE else logging.DEBUG,
                "new namespace %d %s",
                namespace.id,
                namespace.digest.hex()[:16],
            )
        session.namespaces[namespace.id] = None
        if len(session.namespaces) > MAX_NAMESPACES_OF_ONE:  # an engine leaves one behind with each reset of its cache
            del session.namespaces[next(iter(session.namespaces))]
        return m.Registered(self.epoch, namespace.id, namespace.digest, namespace.stride)

    def _free_namespace_id(self) -> int:
        table = self.arena.namespaces
        free = table.free_id()
        if free:
            return free
        wanted = set().union(*(s.namespaces for s in (*self.sessions.values(), *(s for s, _ in self._leaving))))
        unused = [namespace for namespace in table if namespace.id not in wanted]
        if unused:
            least = min(unused, key=lambda namespace: self.arena.entries_of[namespace.id])
            self.arena.drop_namespace(least, RECYCLE_LIMIT)
            if not self.arena.entries_of[least.id]:
                self.arena.remove_namespace(least)
                return int(least.id)
        raise Refusal(
            ErrorCode.LIMIT,
            f"all {len(table)} namespaces have chunks or are registered by attached clients; `kvkeep clear` those that "
            "nobody uses, or stop the clients that register so many",
        )

    def lookup(self, session: Session, request: m.Lookup, identity: bytes, request_id: bytes) -> m.AnyReply:
        namespace = self.namespace_of(session, request.namespace)
        keys = self._keys(request.hashes)
        if not 0 <= request.readers <= 1024 or not 0 <= request.wait_ms <= MAX_WAIT_MS:
            raise Refusal(
                ErrorCode.BAD_REQUEST, f"readers {request.readers} (0..1024), wait_ms {request.wait_ms} (0..60000)"
            )
        prefix = self.arena.prefix(namespace, keys)
        ready = len(prefix.entries)
        self.counters["lookups"] += 1
        self.counters["lookup_chunks"] += len(keys)
        self.counters["lookup_chunks_hit"] += ready
        waits = request.wait_ms > 0 and request.readers > 0 and ready < len(keys)
        waits = waits and self.waiting.may_help(prefix, keys)
        if not (ready or waits) or not request.readers:
            return m.LookupReply(self.epoch, 0, ready)
        self._charge(session, 2 * len(keys) if waits else ready)
        if not distinct(prefix.entries):
            raise Refusal(ErrorCode.BAD_REQUEST, "the same hash stands twice in one chain")
        self.arena.touch(namespace, prefix.entries)
        handle = LookupHandle(
            next(self._ids),
            session,
            namespace,
            References(self.arena, prefix.entries, session),
            [request.readers] * namespace.shards,
        )
        session.lookups[handle.id] = self.lookups[handle.id] = handle
        session.held_chunks += ready
        if waits:
            deadline = time.monotonic() + request.wait_ms / 1000
            self.waiting.begin(Waiting(handle, identity, request_id, keys, deadline), prefix.blocked_by)
        return m.LookupReply(self.epoch, handle.id, ready, waits)

    def retrieve(self, session: Session, request: m.Retrieve, *_: bytes) -> m.AnyReply:
        handle = self._lookup_handle(request.handle)
        shard = self._shard_of(handle.namespace, request.shard)
        start, end = request.start, request.start + request.count
        if not 0 <= start < end <= len(handle.references):
            raise Refusal(
                ErrorCode.BAD_REQUEST, f"chunks {start}..{end} of a handle that holds {len(handle.references)}"
            )
        if not handle.readers[shard]:
            raise Refusal(ErrorCode.UNKNOWN_HANDLE, f"all readers of shard {shard} have confirmed this handle")
        entries = handle.references.entries[start:end]
        records = self.arena.table.rows[entries]
        session.reading[handle.id, shard] += 1
        handle.readers_now.add((session, shard))
        handle.reading += 1
        self.counters["retrieves"] += 1
        self.counters["retrieve_chunks"] += len(entries)
        self.counters["retrieve_bytes"] += len(entries) * handle.namespace.shard_bytes
        sums = (
            records["checksums"][:, shard] if shard < records["checksums"].shape[1] else np.zeros(len(entries), "<u8")
        )
        return m.Extents(
            self.epoch,
            handle.namespace.shard_bytes,
            (records["offset"] + np.uint64(shard * handle.namespace.stride)).tobytes(),
            entries.astype(np.uint32).tobytes(),
            records["generation"].tobytes(),
            sums.tobytes(),
        )

    def confirm(self, session: Session, request: m.Confirm, *_: bytes) -> m.AnyReply:
        handle = self._lookup_handle(request.handle)
        shard = self._shard_of(handle.namespace, request.shard)
        if session.reading.get((handle.id, shard)):
            self._stop_reading(session, handle, shard)
        if not handle.readers[shard]:
            raise Refusal(ErrorCode.BAD_REQUEST, f"all readers of shard {shard} have confirmed already")
        handle.readers[shard] -= 1
        return m.Ok(self.epoch, self._drop_if_done(handle))

    def _stop_reading(self, session: Session, handle: LookupHandle, shard: int) -> None:
        """One RETRIEVE may be followed by others before the CONFIRM that ends them all."""
        handle.reading -= session.reading.pop((handle.id, shard), 0)
        handle.readers_now.discard((session, shard))

    def _drop_if_done(self, handle: LookupHandle) -> int:
        if any(handle.readers) and (handle.owner is not None or handle.reading):
            return 0
        return self._drop_lookup(handle)

    def _drop_lookup(self, handle: LookupHandle) -> int:
        del self.lookups[handle.id]
        self.waiting.end(handle)
        for session, shard in handle.readers_now:  # who never confirmed what the owner released
            session.reading.pop((handle.id, shard), None)
        dropped = handle.references.trim(0)
        if handle.owner is not None:
            handle.owner.lookups.pop(handle.id, None)
            handle.owner.held_chunks -= dropped
        return dropped

    def _lookup_handle(self, handle_id: int) -> LookupHandle:
        handle = self.lookups.get(handle_id)
        if handle is None:
            raise Refusal(ErrorCode.UNKNOWN_HANDLE, f"lookup handle {handle_id} does not exist (any more)")
        return handle

    def release(self, session: Session, request: m.Release, *_: bytes) -> m.AnyReply:
        handle = session.lookups.get(request.handle)
        if handle is None:
            raise Refusal(ErrorCode.UNKNOWN_HANDLE, f"lookup handle {request.handle} is not held by this client")
        if request.keep <= 0:
            return m.Ok(self.epoch, self._drop_lookup(handle))
        dropped = handle.references.trim(request.keep)
        session.held_chunks -= dropped
        return m.Ok(self.epoch, dropped)

    def store(self, session: Session, request: m.Store, *_: bytes) -> m.AnyReply:
        namespace = self.namespace_of(session, request.namespace)
        shard = self._shard_of(namespace, request.shard)
        keys = self._keys(request.hashes)
        if not 0 <= request.start < len(keys):
            raise Refusal(ErrorCode.BAD_REQUEST, f"start {request.start} of a chain of {len(keys)} chunks")
        self._charge(session, len(keys))
        if not distinct(keys[:, 0]) and len(np.unique(keys, axis=0)) != len(keys):
            raise Refusal(ErrorCode.BAD_REQUEST, "the same hash stands twice in one chain")
        grant = self.arena.reserve(namespace, keys, request.start, shard)
        self.counters["stores"] += 1
        self.counters["store_chunks"] += len(grant.granted)
        if not len(grant.granted):
            return m.StoreReply(self.epoch, 0, namespace.shard_bytes, grant.verdicts.tobytes(), b"", grant.missing)
        chain = References(self.arena, grant.chain, session)
        handle = StoreHandle(next(self._ids), session, namespace, shard, grant.granted, chain)
        session.stores[handle.id] = self.stores[handle.id] = handle
        session.reserved_bytes += len(grant.granted) * namespace.extent_bytes
        session.held_chunks += len(grant.granted) + len(grant.chain)
        offsets = self.arena.table.offset[grant.granted] + np.uint64(shard * namespace.stride)
        return m.StoreReply(
            self.epoch, handle.id, namespace.shard_bytes, grant.verdicts.tobytes(), offsets.tobytes(), grant.missing
        )

    def commit(self, session: Session, request: m.Commit, *_: bytes) -> m.AnyReply:
        handle = self._store_handle(session, request.handle)
        n = len(handle.granted)
        if len(request.results) != n or len(request.checksums) not in (0, 8 * n):
            raise Refusal(
                ErrorCode.BAD_REQUEST,
                f"{len(request.results)} results and {len(request.checksums)} bytes of checksums for {n} chunks",
            )
        good = np.frombuffer(request.results, dtype=np.uint8) == 1
        sums = np.frombuffer(request.checksums, dtype=np.uint64) if request.checksums else None
        outcomes = self.arena.commit(handle.granted, handle.shard, good, sums)
        self._drop_store(handle)
        self.counters["commits"] += 1
        self.counters["commit_bytes"] += int(good.sum()) * handle.namespace.shard_bytes
        return m.CommitReply(self.epoch, outcomes.tobytes())

    def abort(self, session: Session, request: m.Abort, *_: bytes) -> m.AnyReply:
        handle = self._store_handle(session, request.handle)
        self.arena.commit(handle.granted, handle.shard, np.zeros(len(handle.granted), dtype=bool), None)
        self._drop_store(handle)
        return m.Ok(self.epoch, len(handle.granted))

    def _store_handle(self, session: Session, handle_id: int) -> StoreHandle:
        handle = session.stores.get(handle_id)
        if handle is None:
            raise Refusal(ErrorCode.UNKNOWN_HANDLE, f"store handle {handle_id} is not held by this client")
        return handle

    def _drop_store(self, handle: StoreHandle) -> None:
        self._uncharge(handle, len(handle.granted))
        handle.owner.held_chunks -= handle.chain.trim(0)
        del self.stores[handle.id]
        del handle.owner.stores[handle.id]

    def _uncharge(self, handle: StoreHandle, ended: int) -> None:
        """So many of its reservations have ended."""
        handle.owner.held_chunks -= ended
        handle.owner.reserved_bytes -= ended * handle.namespace.extent_bytes

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def open_session(self, session: Session) -> None:
        self.sessions[session.token] = session

    def close_session(self, session: Session) -> None:
        """The client is gone: nothing more is done for it, and all that it held goes with it, piece by piece (`step`).

        Until its turn a handle is what it was: it holds what it holds, and others may go on reading by it."""
        del self.sessions[session.token]
        self._leaving.append((session, self._let_go(session)))

    def step(self) -> bool:
        """One bounded piece of what clients that are gone held.  True = there is more to do."""
        if not self._leaving:
            return False
        cost = 0
        for part in self._leaving[0][1]:
            cost += part
            if cost >= LEAVE_STEP:
                break
        else:
            self._leaving.popleft()
        self.waiting.wake()
        return bool(self._leaving)

    def _let_go(self, session: Session) -> Iterator[int]:
        """Of everything that it held, one thing at a time; gives what that cost, in handles."""
        for store in list(session.stores.values()):
            while len(store.granted):
                ended = store.granted[-LEAVE_STEP:]  # the tail first, so that nothing loses its head
                self.arena.abandon(ended, store.shard)
                store.granted = store.granted[: -len(ended)]
                self._uncharge(store, len(ended))
                yield len(ended)
            self._drop_store(store)
            yield 1
        for handle_id, shard in list(session.reading):
            if handle := self.lookups.get(handle_id):
                self._stop_reading(session, handle, shard)
                handle.readers[shard] = max(0, handle.readers[shard] - 1)
                self._drop_if_done(handle)
            yield 1
        for handle in list(session.lookups.values()):
            if handle.id not in self.lookups:  # its readers have confirmed it meanwhile
                continue
            cost = 1 + len(handle.references) // CHUNKS_LIKE_A_HANDLE
            if handle.reading:  # another client copies from it now; its confirmation or death ends it
                handle.owner = None
                del session.lookups[handle.id]
            else:
                self._drop_lookup(handle)
            yield cost

    def held(self) -> tuple[Counter[int], Counter[int]]:
        """(references, shards being written) per entry, by the handles' own account."""
        references: Counter[int] = Counter()
        writing: Counter[int] = Counter()
        generation = self.arena.table.generation
        every = [h.references for h in self.lookups.values()] + [h.chain for h in self.stores.values()]
        for held in every:
            references.update(held.entries[generation[held.entries] == held.generations].tolist())
        for store in self.stores.values():
            writing.update(store.granted.tolist())
        return references, writing
