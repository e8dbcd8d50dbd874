"""A key/value store over a running daemon, for programs that have keys of their own.

    with KVStore.attach(space="my-project") as store:
        store.put(key, tensor, MemoryFormat.KV_SPLIT)     # Put.STORED, or why not; true if the key has a value now
        value = store.get(key)                            # Value(data, format, dtype, shape, nbytes), or None
        store.batched_contains(keys)                      # how many of the first keys are there

Keys are strings, bytes, or `keys.Key`; each is independent of all others.  Values are bytes, numpy arrays or torch CPU
tensors of any size, and come back as what they were (formats.py).

How a value lies in the arena
  A store is one namespace of chunks of HEADER_BYTES + ``page_bytes``.  A value of up to ``page_bytes`` is one chunk,
  its *first page*: header and payload.  A longer one goes on in further pages, which are all payload:

      first page   hash = blake3("kvkeep.value.v1\\0" | key)
      page i       hash = bytes 32 * i to 32 * i + 32 of blake3("kvkeep.page.v1\\0" | first hash | digest | length u64)

  The digest (xxh3_128 of the payload) stands in the header, so pages of two values can never be mixed.  The chain of a
  value is its further pages and *then* its first: that one is sealed last and evicted first, and so a first page that
  is there means a whole value.  If another page is gone all the same, the value is a miss, and is cleared away.

  Each value has a STORE of its own: in one STORE for many, the daemon would let later keys wait for earlier ones and
  give them up together.  `batched_put` sends many at once instead.

Which value a key has
  The first one, until it is evicted or removed: `put` of another value answers `Put.PRESENT` and changes nothing.
  Keys should name their content (a hash of the tokens before it, say), as keys of a KV cache do.

What never happens: an exception because of the daemon (it is a miss, `Put.UNAVAILABLE`, False, 0), a wait beyond
``deadline_s`` (+ ``wait_s``, the time that L2 may take; a copy that has begun is finished), bytes that were not put
under that key in a store of the same space, identity, format and page size.  ValueError is for arguments that make no
sense; RuntimeError for the use in a fork, as with `Client`.

kvstore_pages.py: names, pages, lookups; kvstore_get.py, kvstore_put.py, kvstore_pins.py: one operation each.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvkeep.ipc import messages as m
from kvkeep.ipc.arguments import MAX_WHOLE, seconds, whole
from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import Denied, ProtocolError, Unavailable
from kvkeep.ipc.formats import HEADER_BYTES, Header, MemoryFormat, Value, describe, digest_of
from kvkeep.ipc.kvstore_get import Allocate, Get
from kvkeep.ipc.kvstore_pages import Name, Pages, StoreKey, Tally, Until, name_of
from kvkeep.ipc.kvstore_pins import Pins
from kvkeep.ipc.kvstore_put import Outgoing, Put, Putting
from kvkeep.ipc.messages import HASH_BYTES, MAX_CHUNKS

log = logging.getLogger("kvkeep.store")

PAGE_BYTES = 1 << 20
DEADLINE_S = 1.0
COPY_DEADLINE_S = 5.0
REMOVE_DEADLINE_S = 10.0
PIN_SHARE = 0.75  # of L1, as for the daemon's own pins: what is pinned leaves room for others
PUT_WINDOW = 32  # values, ...
PUT_WINDOW_BYTES = 64 << 20  # ... or bytes that `batched_put` holds reserved at once


class KVStore:
    """See the module.  Any thread may call anything."""

    def __init__(
        self,
        client: Client,
        *,
        space: str,
        identity: Mapping[str, Any] | None = None,
        format: MemoryFormat | None = None,
        page_bytes: int = PAGE_BYTES,
        checksums: bool = False,
    ) -> None:
        """``space``: whose keys these are.  ``identity``: what else the bytes depend on (JSON; model, revision, …).
        ``format``: of all values, None = each says its own.  Another space, identity, format or page size is another
        store.  ``page_bytes``: payload of one page: the usual value, or a part of it if sizes differ much.
        ``checksums``: keep one of each payload, and compare it with what is read.  The client stays the caller's.
        Raises ProtocolError if the daemon refuses such a store, ValueError for arguments that make no sense."""
        page_bytes = whole("page_bytes", page_bytes, 1, MAX_WHOLE - HEADER_BYTES)
        if not space:
            raise ValueError("the space of a store has no name; say whose keys these are")
        self.client = client
        self.format = format
        self.page_bytes = page_bytes
        self.namespace = client.register(
            {
                "kind": "kvkeep.kvstore",
                "version": 1,
                "space": space,
                "format": format.name if format is not None else None,
                "identity": dict(identity or {}),
            },
            shard_bytes=HEADER_BYTES + page_bytes,
        )
        self._pages = Pages(client, self.namespace, page_bytes)
        self._checksums = checksums
        self._owns_client = False
        self._pins = Pins()
        self._tally = Tally()
        weakref.finalize(self, self._pins.abandon)  # a store that is dropped without `close` pins nothing

    @classmethod
    def attach(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        name: str = "kvstore",
        attach_s: float = 1.0,
        **options: Any,
    ) -> KVStore:
        """A store with a client of its own, which waits up to ``attach_s`` for the daemon and goes on without it: then
        all is a miss until there is one.  ``options``: those of `KVStore`."""
        client = Client.attach(run_dir, name=name, wait=False)
        try:
            client._session.wait_attached(attach_s)
            store = cls(client, **options)
        except BaseException:
            client.close()
            raise
        store._owns_client = True
        return store

    def close(self) -> None:
        """Give back all pins, and detach if the client is our own."""
        self._pins.close()
        if self._owns_client:
            self.client.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> dict[str, int]:
        """hits and misses of `get`; of the misses: corrupt (did not verify), incomplete (a page was gone); and one per
        kind of `Put`."""
        names = ("hits", "misses", "corrupt", "incomplete", *(put.value for put in Put))
        return {name: self._tally[name] for name in names}

    # ---- is it there? ------------------------------------------------------------------------------------------------

    def contains(self, key: StoreKey, *, wait_s: float = 0.0, deadline_s: float = DEADLINE_S) -> bool:
        """Whether it is there.  One round trip.  ``wait_s``: L2 may be asked for so long; what it loads stays in L1
        only under a prefetch policy that retains it: `get` or `pin` what is to be used."""
        return self.batched_contains([key], wait_s=wait_s, deadline_s=deadline_s) == 1

    def batched_contains(self, keys: Sequence[StoreKey], *, wait_s: float = 0.0, deadline_s: float = DEADLINE_S) -> int:
        """How many of the first keys are there; stops at the first that is not.  One round trip for all."""
        until = Until.after(deadline_s, wait_s)
        hashes = [name_of(key).hash for key in keys]
        distinct = list(dict.fromkeys(hashes))
        there = 0
        for at in range(0, len(distinct), MAX_CHUNKS):
            part = distinct[at : at + MAX_CHUNKS]
            found = self.client.lookup(self.namespace, part, readers=0, deadline_s=until.left).ready
            if found < len(part) and wait_s:
                with self._pages.lookup(part, until, l2=True) as waited:
                    found = waited.ready
            there += found
            if found < len(part):
                break
        if there == len(distinct):
            return len(hashes)
        return hashes.index(distinct[there])

    # ---- get ---------------------------------------------------------------------------------------------------------

    def get(
        self,
        key: StoreKey,
        *,
        wait_s: float = 0.0,
        deadline_s: float = COPY_DEADLINE_S,
        allocate: Allocate | None = None,
    ) -> Value | None:
        """The value as it was put, or None.  ``allocate`` gives the memory for it: called with the header (``format``,
        ``dtype``, ``shape``, ``nbytes``), returns a writable buffer of ``nbytes``, which becomes ``Value.data`` as it
        is, or None for a miss after all; what is in the buffer after a miss is undefined."""
        return self.batched_get([key], wait_s=wait_s, deadline_s=deadline_s, allocate=allocate)[0]

    def batched_get(
        self,
        keys: Sequence[StoreKey],
        *,
        wait_s: float = 0.0,
        deadline_s: float = COPY_DEADLINE_S,
        allocate: Allocate | None = None,
    ) -> list[Value | None]:
        """One per key.  A key that stands twice is read once, and its two values share memory."""
        names = [name_of(key) for key in keys]
        until = Until.after(deadline_s, wait_s)
        get = Get(self._pages, until, self._tally, allocate=allocate, checksums=self._checksums)
        values = get.values(list({name.hash: name for name in names}.values()), l2=wait_s > 0)
        for name in get.spoiled:
            self._clear_away(name)
        result = [values.get(name.hash) for name in names]
        misses = sum(value is None for value in result)
        self._tally.add(hits=len(result) - misses, misses=misses)
        return result

    # ---- put ---------------------------------------------------------------------------------------------------------

    def put(
        self, key: StoreKey, data: Any, format: MemoryFormat | None = None, *, deadline_s: float = COPY_DEADLINE_S
    ) -> Put:
        """Keep ``data`` under ``key``, unless the key has a value already.  ``format``: default is the store's, or
        BINARY.  ``data`` may be changed when this returns.  Raises ValueError for what cannot be kept."""
        return self.batched_put([(key, data)], format, deadline_s=deadline_s)[0]

    def batched_put(
        self,
        items: Iterable[tuple[StoreKey, Any]],
        format: MemoryFormat | None = None,
        *,
        deadline_s: float = COPY_DEADLINE_S,
    ) -> list[Put]:
        """One `Put` per item.  Items are independent: what happens to one says nothing about another.  All are checked
        before the first is stored."""
        until = Until.after(deadline_s)
        outgoing = [self._outgoing(name_of(key), data, format) for key, data in items]
        putting = Putting(self._pages, until)
        results: list[Put] = []
        while len(results) < len(outgoing):
            size = 0
            window: list[Outgoing] = []
            for one in outgoing[len(results) : len(results) + PUT_WINDOW]:
                size += self._pages.arena_bytes(one.flat.size)
                if window and size > PUT_WINDOW_BYTES:
                    break
                window.append(one)
            results += putting.store(window)
        for put in results:
            self._tally.add(**{put.value: 1})
        return results

    def _outgoing(self, name: Name, data: Any, format: MemoryFormat | None) -> Outgoing:
        if format is None:
            format = self.format or MemoryFormat.BINARY
        if self.format not in (None, format):
            raise ValueError(f"a value of format {format.name} in a store of {self.format!r}; open a store for each")
        flat, kind, dtype, shape = describe(data)
        format.check(shape)
        further = self._pages.further(flat.size)
        if further >= MAX_CHUNKS:
            raise ValueError(
                f"a value of {flat.size} bytes has {further + 1} pages, the limit is {MAX_CHUNKS}; raise page_bytes"
            )
        digest = digest_of(flat) if further or self._checksums else b""
        header = Header(name.text, kind, format, dtype, shape, flat.size, digest)
        return Outgoing(name, header, flat, self._pages.chain(name, header))

    # ---- remove ------------------------------------------------------------------------------------------------------

    def remove(self, key: StoreKey, *, deadline_s: float = REMOVE_DEADLINE_S) -> bool:
        """Drop a value, so that the key may get another.  False = it is not there, somebody reads or pins it, there is
        no daemon or no answer in time, or this user may not (root, the daemon's user and its admin uids may)."""
        until = Until.after(deadline_s / 2, deadline_s / 2)
        name = name_of(key)
        header = self._pages.find_header(name, until, l2=self.client.has_l2)  # names its further pages
        known = (
            header is not None
            or self.client.lookup(self.namespace, name.hash, readers=0, deadline_s=until.left).ready > 0
        )
        removed = self._delete(name.hash, until)
        if removed and header is not None and self._pages.further(header.nbytes):
            self._delete(self._pages.chain(name, header)[:-HASH_BYTES], until)
        return removed and known

    def batched_remove(self, keys: Sequence[StoreKey], *, deadline_s: float = REMOVE_DEADLINE_S) -> int:
        """How many were dropped."""
        until = Until.after(deadline_s)
        return sum(self.remove(key, deadline_s=until.left) for key in keys)

    def clear(self) -> int:
        """Drop all values of this store that nobody uses.  Returns how many pages left L1; 0 also where `remove` would
        answer False."""
        with contextlib.suppress(Unavailable, Denied, ProtocolError):
            return self.client.clear(self.namespace)
        return 0

    def _delete(self, hashes: bytes, until: Until) -> bool:
        """Whether something went; with L2: whether there is nothing of it any more."""
        bound = self.client._bound(self.namespace)
        if bound is None:
            return False
        try:
            reply = self.client.management.ask(m.Ok, m.Delete, bound[1], hashes, deadline_s=until.left)
        except Denied as error:
            if not self._tally["denied"]:
                log.warning("values cannot be removed: %s", error)
            self._tally.add(denied=1)
            return False
        except (Unavailable, ProtocolError) as error:
            log.debug("a value was not removed: %s", error)
            return False
        report: dict[str, Any] = {"in_use": 0, "l2": []}
        if reply.detail:  # of a daemon with L2, see daemon/forget.py
            report = json.loads(reply.detail)
        return not report["in_use"] and bool(reply.count or any(row["removed"] for row in report["l2"]))

    def _clear_away(self, name: Name) -> None:
        """A value that does not verify would be a miss for ever, and keep its key from getting another.  Nobody waits
        for it; a user who may not delete has to wait for its eviction."""
        if (bound := self.client._bound(self.namespace)) is not None:
            attachment, namespace_id = bound
            request = m.Delete(attachment.lease, attachment.epoch, namespace_id, name.hash)
            self.client._session.returns.give_back(attachment, request)

    # ---- pins --------------------------------------------------------------------------------------------------------

    def pin(self, key: StoreKey, *, ttl_s: float = 3600.0, wait_s: float = 0.0, deadline_s: float = DEADLINE_S) -> bool:
        """Keep a value from being evicted or removed until `unpin`, ``ttl_s``, `close`, or the end of this process or
        of the daemon.  False = it is not there, or PIN_SHARE of L1 is pinned by this store already.  Pins of one key
        are counted: each needs an `unpin`; the longest time counts."""
        if not seconds("ttl_s", ttl_s):
            raise ValueError(f"a ttl of {ttl_s} s; it must be positive")
        name, until, pages = name_of(key), Until.after(deadline_s, wait_s), self._pages
        self.client._session.check_process()
        if self._pins.again(name.hash, ttl_s):
            return True
        found = pages.lookup([name.hash], until)
        if not found.ready and wait_s:
            found = pages.begin_lookup(name.hash, until).wait(until.left)
        header = pages.header(pages.open(found, 1, until), 0, name)
        holds = [found]
        if header is not None and pages.further(header.nbytes):
            holds.append(pages.lookup_whole(name, header, until))
        if header is not None and all(hold.ready for hold in holds) and self._may_pin(header.nbytes):
            return self._pins.add(name.hash, holds, pages.arena_bytes(header.nbytes), ttl_s)
        for hold in holds:
            hold.release()
        return False

    def unpin(self, key: StoreKey) -> bool:
        """One pin less.  False = there was none, or it had ended."""
        return self._pins.drop(name_of(key).hash)

    def batched_pin(
        self, keys: Sequence[StoreKey], *, ttl_s: float = 3600.0, wait_s: float = 0.0, deadline_s: float = DEADLINE_S
    ) -> int:
        """Pin the first keys; stops at the first that cannot be.  Returns how many."""
        begin = time.monotonic()
        for done, key in enumerate(keys):
            spent = time.monotonic() - begin
            if not self.pin(key, ttl_s=ttl_s, wait_s=max(0.0, wait_s - spent), deadline_s=deadline_s + wait_s - spent):
                return done
        return len(keys)

    def batched_unpin(self, keys: Sequence[StoreKey]) -> int:
        """How many pins were given back."""
        return sum(self.unpin(key) for key in keys)

    @property
    def pinned(self) -> int:
        """Keys that are pinned by this store now."""
        return len(self._pins)

    def _may_pin(self, nbytes: int) -> bool:
        attachment = self.client._session.attachment
        total = attachment.welcome.data_bytes if attachment is not None else 0
        return self._pins.nbytes + self._pages.arena_bytes(nbytes) <= PIN_SHARE * total


__all__ = ["Allocate", "Header", "KVStore", "MemoryFormat", "Put", "StoreKey", "Value"]
