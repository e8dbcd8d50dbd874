"""The client library: what an engine, a connector or a script uses to keep and find KV.

    with Client.attach() as kv:
        ns = kv.register({"model": "org/model", "kv_dtype": "bfloat16", ...}, shard_bytes=1 << 20)
        kv.store(ns, hashes, buffers)                      # StoreResult: .stored .present .refused .failed
        with kv.lookup(ns, hashes) as found:               # found.ready chunks, held until the end of the block
            exact = kv.retrieve(found, targets[: found.ready])   # [True, ...]: the exact bytes are in the target

Promises
  * A data-path call (store, lookup, retrieve, reserve, open_read) never raises because of the daemon and never waits
    longer than its deadline.  Without a daemon it answers at once: miss, unavailable.  It raises ValueError for
    arguments that make no sense, and RuntimeError in a fork of the process that attached.
  * A restart of the daemon needs nothing from the caller: the client attaches and registers again by itself.
  * A signal handler may raise anywhere (Ctrl-C): nothing stays reserved or referenced, no lock stays taken.  At worst
    the client attaches again by itself, and its other handles end as on a restart.
  * Any thread may call anything.  `close` takes half a second at most; a client that is killed needs no closing.

One module per concept: `client_session` (attach, lose, attach again), `client_rpc` (one socket), `client_arena` (the
mapping), `client_lookup`, `client_store`, `client_manage`, `namespace`, `buffers`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from kvkeep.ipc import messages as m
from kvkeep.ipc.arguments import seconds, text, whole
from kvkeep.ipc.buffers import Buffers, Hashes, check_distinct, count_of, pack_hashes, rows
from kvkeep.ipc.client_arena import Arena
from kvkeep.ipc.client_attach import Options
from kvkeep.ipc.client_lookup import Lookup, PendingLookup, Reading, open_reading
from kvkeep.ipc.client_manage import CLEAR_S, MANAGEMENT_S, Dropped, Management, id_of
from kvkeep.ipc.client_rpc import Attachment
from kvkeep.ipc.client_session import Session
from kvkeep.ipc.client_store import Reservation, Stored, StoreResult, outcomes, reservation_of
from kvkeep.ipc.copying import DEFAULT_THREADS
from kvkeep.ipc.errors import AttachRefused, ProtocolError, Unavailable
from kvkeep.ipc.keys import Manifest, canonical
from kvkeep.ipc.messages import HASH_BYTES, MAX_CHUNKS
from kvkeep.ipc.namespace import Namespace

MAX_WAIT_MS = 60_000  # the daemon's limits
MAX_READERS = 1024
MAX_NAME_CHARS = 256
_LEAST_S = 0.001


class Client:
    """See the module.  Made by `attach`."""

    def __init__(self, session: Session, *, checksums: bool) -> None:
        self._session = session
        self._checksums = checksums
        self.management = Management(session)
        self._finalizer = weakref.finalize(self, session.close)

    # ---- life --------------------------------------------------------------------------------------------------------

    @classmethod
    def attach(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        name: str = "",
        deadline_s: float = 5.0,
        wait: bool = True,
        checksums: bool = False,
        arena: bool = True,
        copy_threads: int = DEFAULT_THREADS,
    ) -> Client:
        """Attach to the daemon at ``run_dir`` (default: see rundir.py); ``name`` is what `kvkeep status` calls us.

        ``wait=False`` returns at once and attaches in the background; until then everything is a miss.  With ``wait``
        raises Unavailable, or AttachRefused with the daemon's sentence.  ``checksums`` adds an xxh3 of every stored
        shard and verifies it when loading.  ``arena=False`` is for management: no memory is mapped.
        ``copy_threads``: how many threads a `store` or `retrieve` of 16 MiB and more may copy with.
        """
        whole("copy_threads", copy_threads, 1)
        if not isinstance(run_dir, str | os.PathLike | None):
            raise ValueError(f"run_dir is {run_dir!r} ({type(run_dir).__name__}); it must be the path of a directory")
        text("name", name, MAX_NAME_CHARS)
        deadline_s = seconds("deadline_s", deadline_s)
        session = Session(Options(run_dir, name, arena, copy_threads))
        try:
            session.start()
            client = cls(session, checksums=checksums)
            if not wait or session.wait_attached(deadline_s):
                return client
            if session.refused is not None:
                raise AttachRefused(session.refused.code, session.refused.message)
            raise Unavailable(
                f"no daemon let us in at {session.where()} within {deadline_s:g} s ({session.last_error}); "
                "start kvkeepd, or say where it runs with run_dir or KVKEEP_RUN_DIR"
            )
        except BaseException:
            session.close()
            raise

    @property
    def attached(self) -> bool:
        return self._session.attachment is not None

    @property
    def hung(self) -> bool:
        """Attached, but a deadline expired and the daemon has not answered since: everything is a miss."""
        attachment = self._session.attachment
        return attachment is not None and attachment.hung

    @property
    def epoch(self) -> int:
        """Of the current attachment; 0 = none."""
        attachment = self._session.attachment
        return attachment.epoch if attachment is not None else 0

    @property
    def chunk_tokens(self) -> int:
        """The daemon's default, for callers that have none of their own; 0 = not attached."""
        attachment = self._session.attachment
        return attachment.welcome.chunk_tokens if attachment is not None else 0

    @property
    def has_l2(self) -> bool:
        """The daemon may find in L2 what L1 lacks, for a lookup with ``wait_s``."""
        attachment = self._session.attachment
        return attachment is not None and attachment.welcome.l2

    def watch_arena(self, watcher: Callable[[Arena | None], None]) -> None:
        """For those who must prepare the mapping, or undo that: ``watcher`` is called with the arena of each attachment
        when it begins, at once if there is one, and with None when it is over and its last copy has ended.  Calls come
        from the client's own thread, must return at once, and may repeat themselves.  One watcher a client; whoever
        holds the arena's ``data`` keeps it mapped."""
        self._session.watch_arena(watcher)

    @property
    def eventfd(self) -> int:
        """Readable (8 bytes) when a pending lookup may have an answer.  The same for the client's whole life; take it
        out of your event loop before `close`."""
        return self._session.eventfd

    @property
    def counters(self) -> dict[str, int]:
        """What has happened on this side: attaches, late calls, stray replies, …"""
        return dict(self._session.counters)

    @property
    def state(self) -> str:
        """One line for logs: attached, or why not."""
        return self._session.state

    def close(self) -> None:
        """Detach: the daemon drops all references and reservations of this client.  Views stay readable."""
        self._session.close()
        self._finalizer.detach()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a kvkeep client cannot be pickled or copied; attach a new one in the other process")

    def __repr__(self) -> str:
        return f"Client({self.state})"

    # ---- namespaces --------------------------------------------------------------------------------------------------

    def register(
        self,
        manifest: Mapping[str, Any] | Manifest,
        *,
        shard_bytes: int,
        shards: int = 1,
        tenant: str = "",
        deadline_s: float = 5.0,
    ) -> Namespace:
        """The namespace of this manifest and geometry; the same object for the same identity.  Without a daemon it is
        registered when there is one.  Raises ProtocolError if the daemon refuses it.

        ``tenant`` becomes part of the manifest, so tenants share no chunk; IsolatedLRU evicts by it."""
        if tenant:
            plain = msgspec.to_builtins(manifest) if isinstance(manifest, Manifest) else manifest
            manifest = {**plain, "tenant": tenant}
        self._session.check_process()
        shard_bytes, shards = whole("shard_bytes", shard_bytes, 1), whole("shards", shards, 1)
        deadline_s = seconds("deadline_s", deadline_s)
        fresh = Namespace(canonical(manifest), shard_bytes, shards)
        session = self._session
        namespace, attachment = session.adopt(fresh)
        binding = namespace.binding(attachment) if attachment is not None else None
        if attachment is not None and (binding is None or not binding.id):
            reply = session.call(attachment, namespace.request(attachment), deadline_s)
            if reply is not None:
                problem = namespace.bind(attachment, reply)
                if problem:
                    raise ProtocolError(problem, reply.code if isinstance(reply, m.Error) else "")
            else:
                session.register_later()
        return namespace

    def _bound(self, namespace: Namespace) -> tuple[Attachment, int] | None:
        """Where to ask, and what it is called there.  None = nowhere now."""
        session = self._session
        session.check_process()
        if not isinstance(namespace, Namespace):
            raise ValueError(f"a namespace is what `register` returns, not {namespace!r}")
        if session.namespaces.get(namespace.digest) is not namespace:
            raise ValueError(f"{namespace!r} was registered with another client; register it with this one")
        attachment = session.attachment
        if attachment is None or attachment.hung:
            return None
        binding = namespace.binding(attachment)
        return (attachment, binding.id) if binding is not None and binding.id else None

    # ---- store -------------------------------------------------------------------------------------------------------

    def store(
        self,
        ns: Namespace,
        hashes: Hashes,
        buffers: Buffers,
        *,
        start: int = 0,
        shard: int = 0,
        deadline_s: float = 5.0,
    ) -> StoreResult:
        """Keep the bytes of ``shard`` of chunks ``start``… of the chain ``hashes`` (all of it, from the root).
        ``buffers[i]`` belongs to chunk ``start + i``.  They may be reused when this returns."""
        packed = pack_hashes(hashes)
        chunks = len(packed) // HASH_BYTES - whole("start", start, 0)
        if count_of(buffers) != chunks:
            raise ValueError(f"{len(buffers)} buffers for the {chunks} chunks from start {start} on")
        until = time.monotonic() + seconds("deadline_s", deadline_s)
        committed: list[m.Outcome] = []
        reservation = self.reserve(ns, packed, start=start, shard=shard, deadline_s=deadline_s)
        try:
            if reservation.granted:
                if len(reservation.granted) == chunks:
                    sources = rows(buffers, ns.shard_bytes)
                else:
                    sources = rows([buffers[i - start] for i in reservation.granted], ns.shard_bytes)
                if reservation.write_all(sources):
                    committed = reservation.commit(deadline_s=max(_LEAST_S, until - time.monotonic()))
                else:
                    committed = [m.Outcome.LOST] * len(sources)
            return StoreResult(outcomes(reservation, committed, chunks), reservation.missing)
        finally:
            reservation.abort()

    def reserve(
        self, ns: Namespace, hashes: Hashes, *, start: int = 0, shard: int = 0, deadline_s: float = 1.0
    ) -> Reservation:
        """Ask for extents for the chunks from ``start`` on that are missing.  Blocks for one round trip."""
        bound, packed, deadline_s = self._bound(ns), pack_hashes(hashes), seconds("deadline_s", deadline_s)
        total = len(packed) // HASH_BYTES
        start, shard = whole("start", start, 0, total), whole("shard", shard, 0, ns.shards - 1)
        if total > MAX_CHUNKS:
            raise ValueError(f"a chain of {total} chunks, the limit is {MAX_CHUNKS}; use larger chunks")
        check_distinct(packed, start)
        if bound is None or start == total:
            return Reservation(self._session)
        attachment, namespace_id = bound
        if not attachment.mapped:
            raise ValueError("this client was attached with arena=False; it cannot store")
        request = m.Store(attachment.lease, attachment.epoch, namespace_id, shard, packed, start)
        with attachment.exchange():
            reply = self._session.call(attachment, request, deadline_s)
            if isinstance(reply, m.StoreReply):
                return reservation_of(
                    self._session,
                    attachment,
                    reply,
                    chunks=total - start,
                    start=start,
                    length=ns.shard_bytes,
                    checksums=self._checksums,
                )
            self._unexpected(attachment, reply)
        _blame_caller(reply, packed)
        return Reservation(self._session)

    # ---- lookup and retrieve -----------------------------------------------------------------------------------------

    def lookup(
        self, ns: Namespace, hashes: Hashes, *, readers: int = 1, wait_s: float = 0.0, deadline_s: float = 1.0
    ) -> Lookup:
        """The longest present prefix.  It is held for ``readers`` confirmations of each shard, or until `release`;
        ``readers=0`` only asks.  ``wait_s``: how long the daemon may wait for chunks that are just being written; the
        deadline counts on top of it."""
        if seconds("wait_s", wait_s):
            return self.begin_lookup(ns, hashes, readers=readers, wait_s=wait_s, deadline_s=deadline_s).wait(
                wait_s + deadline_s
            )
        session = self._session
        bound, packed = self._bound(ns), pack_hashes(hashes)[: MAX_CHUNKS * HASH_BYTES]
        readers, deadline_s = whole("readers", readers, 0, MAX_READERS), seconds("deadline_s", deadline_s)
        if bound is not None and packed:
            attachment, namespace_id = bound
            request = m.Lookup(attachment.lease, attachment.epoch, namespace_id, packed, readers, 0)
            with attachment.exchange():
                reply = session.call(attachment, request, deadline_s)
                if type(reply) is m.LookupReply and not reply.pending and 0 <= reply.ready <= len(packed) // HASH_BYTES:
                    return Lookup(session, attachment, reply.handle, reply.ready, readers * ns.shards)
                self._unexpected(attachment, reply)
            _blame_caller(reply, packed)
        return Lookup(session, None, 0, 0, 0)

    def begin_lookup(
        self, ns: Namespace, hashes: Hashes, *, readers: int = 1, wait_s: float = 0.0, deadline_s: float = 1.0
    ) -> PendingLookup:
        """Sends, and returns at once.  ``deadline_s`` after ``wait_s``, `PendingLookup.poll` answers with a miss."""
        bound, packed = self._bound(ns), pack_hashes(hashes)[: MAX_CHUNKS * HASH_BYTES]
        readers, deadline_s = whole("readers", readers, 0, MAX_READERS), seconds("deadline_s", deadline_s)
        wait_s = min(seconds("wait_s", wait_s), MAX_WAIT_MS / 1000)
        if bound is None or not packed:
            return PendingLookup(self._session, None)
        attachment, namespace_id = bound
        pending = PendingLookup(
            self._session, attachment, confirmations=readers * ns.shards, wait_s=wait_s, deadline_s=deadline_s
        )
        request = m.Lookup(attachment.lease, attachment.epoch, namespace_id, packed, readers, round(wait_s * 1000))
        pending.send(m.encode(request))
        return pending

    def retrieve(
        self,
        lookup: Lookup,
        buffers: Buffers,
        *,
        shard: int = 0,
        start: int = 0,
        deadline_s: float = 5.0,
        confirm: bool = True,
    ) -> list[bool]:
        """Copy chunks ``start``… of a lookup into ``buffers``.  True = the exact bytes are in the buffer; False = a
        miss, and the buffer's content is undefined.  ``confirm`` ends this reader's share of ``shard`` in any case."""
        session, attachment, total = self._session, lookup._attachment, count_of(buffers)
        session.check_process()
        start, shard = whole("start", start, 0), whole("shard", shard, 0)
        deadline_s = seconds("deadline_s", deadline_s)
        if not lookup.alive or attachment is None:
            return [False] * total
        if lookup._session is not session:
            raise ValueError("this lookup belongs to another client; use open_read with its handle")
        count = min(total, lookup.ready - start)
        reading = None
        request = m.Retrieve(attachment.lease, attachment.epoch, lookup.handle, shard, start, count)
        try:
            if count > 0:
                reading = open_reading(session, attachment, request, deadline_s, lookup=lookup, verify=self._checksums)
            if reading is None:
                return [False] * total
            good = reading.read_all(rows(buffers, reading.length, writable=True, limit=count))
            return good + [False] * (total - count)
        finally:
            if reading is not None:
                (reading.confirm if confirm else reading.leave)()
            elif confirm:
                confirmation = m.Confirm(attachment.lease, attachment.epoch, lookup.handle, shard)
                with attachment.exchange():
                    lookup.confirmed()
                    session.settle(attachment, confirmation, deadline_s)

    def open_read(self, handle: int, shard: int, start: int, count: int, *, deadline_s: float = 1.0) -> Reading | None:
        """Extents by handle, also of a lookup that another client made.  None = cannot be read, confirm not needed."""
        session = self._session
        session.check_process()
        handle, shard, deadline_s = whole("handle", handle), whole("shard", shard), seconds("deadline_s", deadline_s)
        start, count = whole("start", start), whole("count", count)
        attachment = session.attachment
        if attachment is None or handle <= 0 or count <= 0 or start < 0 or shard < 0:
            return None
        request = m.Retrieve(attachment.lease, attachment.epoch, handle, shard, start, count)
        return open_reading(session, attachment, request, deadline_s, lookup=None, verify=self._checksums)

    def release_handle(self, handle: int) -> None:
        """Give back a handle that was handed over (`Lookup.hand_over`) and will not be read after all."""
        attachment, handle = self._session.attachment, whole("handle", handle)
        if attachment is not None and handle > 0:
            self._session.settle(attachment, m.Release(attachment.lease, attachment.epoch, handle), 0.5)

    def confirm_handle(self, handle: int, shard: int) -> None:
        """Confirm without reading: this reader does not need its share."""
        attachment, handle, shard = self._session.attachment, whole("handle", handle), whole("shard", shard)
        if attachment is not None and handle > 0:
            self._session.settle(attachment, m.Confirm(attachment.lease, attachment.epoch, handle, shard), 0.5)

    def _unexpected(self, attachment: Attachment, reply: m.AnyReply | None) -> None:
        """A data-path answer that is none: a miss, counted; a namespace that is not known there is registered anew."""
        if isinstance(reply, m.Error):
            self._session.refusal(reply)
            if reply.code == m.ErrorCode.UNKNOWN_NAMESPACE.value:
                attachment.end(reply.message)
        elif reply is not None:
            self._session.counters["protocol_errors"] += 1
            self._session.returns.give_back_reply(attachment, reply)

    # ---- management: raises Unavailable, Denied, ProtocolError -------------------------------------------------------

    def ping(self, *, deadline_s: float = MANAGEMENT_S) -> float:
        """Seconds of one round trip."""
        begin = time.monotonic()
        self.management.ask(m.Ok, m.Ping, deadline_s=deadline_s)
        return time.monotonic() - begin

    def stats(self) -> dict[str, Any]:
        return self.management.document(m.Stats)

    def list(self, namespace: int | Namespace = 0, cursor: int = 0, limit: int = 1000) -> dict[str, Any]:
        return self.management.document(m.List, id_of(namespace), cursor, limit)

    def check(self) -> dict[str, Any]:
        return self.management.document(m.Check, deadline_s=60.0)

    def clear(self, namespace: int | Namespace = 0, *, l1_only: bool = False, digest: bytes = b"") -> Dropped:
        """Drop what nobody uses from L1, and everything from L2.  ``digest`` instead of the id is for a namespace that
        only L2 knows.  After this nothing of it is served from L2; what is still to be removed there is told."""
        number = id_of(namespace) if not digest else 0
        reply = self.management.ask(m.Ok, m.Clear, number, l1_only, digest, deadline_s=CLEAR_S)
        return Dropped.of(reply)

    def delete(self, namespace: int | Namespace, hashes: Hashes, *, l1_only: bool = False) -> Dropped:
        """Drop these chunks, as `clear` does; chunks that hang on them stay until they are evicted, unreadable."""
        return Dropped.of(
            self.management.ask(m.Ok, m.Delete, id_of(namespace), pack_hashes(hashes), l1_only, deadline_s=CLEAR_S)
        )

    def l2(
        self, adapter: str, what: str, *, namespace: bytes = b"", cursor: str = "", limit: int = 0
    ) -> dict[str, Any]:
        """One step of "list", "tally", "verify" or "compact" on one L2 adapter ("l2-0"): a document with the ``cursor``
        of the next step ("" = that was the last), or with a ``problem``."""
        fields = (adapter, what, namespace, bytes.fromhex(cursor), limit)
        return self.management.document(m.Manage, *fields, deadline_s=CLEAR_S)

    def pin(self, namespace: int | Namespace, hashes: Hashes, *, ttl_s: float = 3600.0) -> tuple[int, int]:
        """(pin, chunks protected); pin 0 = nothing was there."""
        reply = self.management.ask(m.Pinned, m.Pin, id_of(namespace), pack_hashes(hashes), ttl_s)
        return reply.pin, reply.count

    def unpin(self, pin: int) -> int:
        return int(self.management.ask(m.Ok, m.Unpin, pin).count)


def _blame_caller(reply: m.AnyReply | None, packed: bytes) -> None:
    """A refusal for what would have cost too much to look for in each call."""
    if isinstance(reply, m.Error) and reply.code == m.ErrorCode.BAD_REQUEST.value:
        check_distinct(packed, 0)


__all__ = [
    "Client",
    "Dropped",
    "Lookup",
    "Namespace",
    "PendingLookup",
    "Reading",
    "Reservation",
    "StoreResult",
    "Stored",
]
