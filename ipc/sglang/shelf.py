"""The pages of one host pool in the daemon: a namespace, of which this engine rank is one shard.

A page is one chunk without any header, named by SGLang's key, which is a hash of the page and all before it.  A batch
of keys is a piece of a chain, and goes as one STORE or LOOKUP of its own: two round trips to store, three to load,
however many pages.  (`KVStore` would do with any keys; it costs a header, a STORE and a COMMIT for each, and one more
copy where a page is not one run of bytes.)

    Each batch is a chain that begins with it: nothing that it hangs on must be resident.  Within it, a page is sealed
    after the page before it, and evicted before it.
    With ``prefix`` (SGLang's hicache_storage_pass_prefix_keys) the batch hangs on what is before it, so that heads stay
    younger than tails also across batches; where that is not resident (any more) it stands alone after all.

All ranks that hold a part of a page are shards of it: a page that one rank does not have is nobody's, and it goes as a
whole.  Pages that all ranks hold alike (MLA) are one shard, which the first rank writes.

What L2 has is loaded by `exists` when it waits, and held until it is read, or for HOLD_S.

Nothing here raises because of the daemon.  Any thread may call anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client
from kvkeep.ipc.client_lookup import Lookup
from kvkeep.ipc.client_store import Reservation, Stored, outcomes
from kvkeep.ipc.client_wave import ask_all
from kvkeep.ipc.copying import Pair, copy_all
from kvkeep.ipc.errors import Denied, ProtocolError, Unavailable
from kvkeep.ipc.kvstore_pins import Pins
from kvkeep.ipc.messages import HASH_BYTES, MAX_CHUNKS
from kvkeep.ipc.sglang.options import Options
from kvkeep.ipc.sglang.pages import Page, Targets

HOLD_S = 30.0  # the engine's own limit for a prefetch is of this order
HOLD_SHARE = 0.25  # of L1, by all ranks' pages that were loaded for them
CLEAR_S = 5.0
REGISTER_S = 1.0
_STORED = (Stored.STORED, Stored.WAITING, Stored.PRESENT, Stored.BUSY)


class Role(NamedTuple):
    """Which part of a page this rank holds."""

    shards: int
    shard: int
    writes: bool  # False = another rank writes this shard


def name_of(key: str) -> bytes:
    """32 bytes.  SGLang's keys are hex of a sha256; any other text is hashed."""
    if len(key) == 2 * HASH_BYTES:
        with contextlib.suppress(ValueError):
            raw = bytes.fromhex(key)
            if raw.hex() == key:
                return raw
    return blake3(b"kvkeep.sglang.key\0" + key.encode()).digest()


def _names(keys: Sequence[str]) -> bytes:
    return b"".join(map(name_of, keys))


class _Until:
    def __init__(self, deadline_s: float) -> None:
        self._end = time.monotonic() + deadline_s

    @property
    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())


class Shelf:
    """Raises ProtocolError if the daemon refuses such pages."""

    def __init__(
        self, client: Client, manifest: Mapping[str, Any], page_bytes: int, role: Role, options: Options
    ) -> None:
        self._client, self._role, self._options = client, role, options
        self._page_bytes = page_bytes
        self.namespace = client.register(
            manifest, shard_bytes=max(1, page_bytes), shards=role.shards, deadline_s=REGISTER_S
        )
        self._held = Pins()

    def close(self) -> None:
        self._held.close()

    # ---- is it there? ------------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> int:
        """How many of the first keys are there, and will be for a while if they come from L2."""
        lookup_s, wait_s = self._options.lookup_deadline_ms / 1000, self._options.l2_wait_ms / 1000
        names, until = _names(keys), _Until(lookup_s)
        there = 0
        while there < len(keys):
            part = names[there * HASH_BYTES :][: MAX_CHUNKS * HASH_BYTES]
            found = self._client.lookup(self.namespace, part, readers=0, deadline_s=until.left).ready
            if found * HASH_BYTES < len(part) and wait_s and self._client.has_l2:
                waited = self._client.lookup(self.namespace, part, wait_s=wait_s, deadline_s=until.left)
                found = waited.ready
                self._hold(part, waited)
            there += found
            if found * HASH_BYTES < len(part):
                break
        return there

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which of these are in L1, whatever the others are."""
        bound = self._client._bound(self.namespace)
        if bound is None:
            return [False] * len(keys)
        attachment, namespace_id = bound
        requests = [m.Lookup(attachment.lease, attachment.epoch, namespace_id, name_of(key), 0, 0) for key in keys]
        answers = ask_all(self._client._session, attachment, requests, self._options.lookup_deadline_ms / 1000)
        return [isinstance(one.reply, m.LookupReply) and one.reply.ready == 1 for one in answers]

    def _hold(self, names: bytes, found: Lookup) -> None:
        """Under the name of its last page: who reads that has read all."""
        attachment = self._client._session.attachment
        nbytes = found.ready * self.namespace.stride * self._role.shards
        total = attachment.welcome.data_bytes if attachment is not None else 0
        if not found.ready or self._held.nbytes + nbytes > HOLD_SHARE * total:
            found.release()
            return
        self._held.add(names[(found.ready - 1) * HASH_BYTES : found.ready * HASH_BYTES], [found], nbytes, HOLD_S)

    def _let_go(self, names: bytes) -> None:
        if len(self._held):
            for at in range(0, len(names), HASH_BYTES):
                self._held.drop(names[at : at + HASH_BYTES])

    # ---- read --------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[str], targets: Targets, prefix: Sequence[str] = ()) -> list[bool]:
        """The pages up to the first that is not there.  True = exactly its bytes are in the target; what is in the
        others is undefined."""
        until = _Until(self._options.transfer_deadline_s)
        names = _names(keys)
        good: list[bool] = []
        with self._find(names, _names(prefix), until) as (found, start):
            count = found.ready - start
            if count > 0:
                good = self._copy_out(found, start, targets.pages[:count], until)
        for i, ok in enumerate(good):
            if ok:
                targets.done(i)
        self._let_go(names)
        return good + [False] * (len(keys) - len(good))

    @contextlib.contextmanager
    def _find(self, names: bytes, prefix: bytes, until: _Until) -> Iterator[tuple[Lookup, int]]:
        """(lookup, position of the first of ``names`` in it).  What is before them is touched, if it is there."""
        start = len(prefix) // HASH_BYTES
        if len(prefix) + len(names) > MAX_CHUNKS * HASH_BYTES:
            start = 0
        found = self._client.lookup(self.namespace, prefix[: start * HASH_BYTES] + names, deadline_s=until.left)
        try:
            if start and found.ready <= start:
                found.release()
                found, start = self._client.lookup(self.namespace, names, deadline_s=until.left), 0
            yield found, start
        finally:
            found.release()

    def _copy_out(self, found: Lookup, start: int, pages: Sequence[Page], until: _Until) -> list[bool]:
        reading = self._client.open_read(found.handle, self._role.shard, start, len(pages), deadline_s=until.left)
        if reading is None:
            return []
        reading.leave()  # releasing the lookup ends it
        with reading.copying() as allowed:
            if not allowed:
                return []
            pairs: list[Pair] = []
            for view, page in zip(reading.views, pages, strict=True):
                at = 0
                for run in page:
                    pairs.append((run, view[at : at + run.size]))
                    at += run.size
            copy_all(pairs, self._options.copy_threads)
        return reading.validate()

    # ---- write -------------------------------------------------------------------------------------------------------

    def write(self, keys: Sequence[str], pages: Sequence[Page], prefix: Sequence[str] = ()) -> list[bool]:
        """True = this rank has nothing more to do for that page: it is stored, was there already, waits for the other
        ranks, or is being written by somebody else at this moment."""
        if not self._role.writes:
            return [True] * len(keys)
        until = _Until(self._options.transfer_deadline_s)
        names, before = _names(keys), _names(prefix)
        start = len(prefix) if len(before) + len(names) <= MAX_CHUNKS * HASH_BYTES else 0
        reservation = self._reserve(before[: start * HASH_BYTES] + names, start, until)
        if reservation.missing >= 0 and start:
            reservation.abort()
            start = 0
            reservation = self._reserve(names, 0, until)
        try:
            committed: list[m.Outcome] = []
            if reservation.granted and self._copy_in(reservation, [pages[i - start] for i in reservation.granted]):
                committed = reservation.commit(deadline_s=until.left)
            elif reservation.granted:
                committed = [m.Outcome.LOST] * len(reservation.granted)
            return [stored in _STORED for stored in outcomes(reservation, committed, len(keys))]
        finally:
            reservation.abort()

    def _reserve(self, names: bytes, start: int, until: _Until) -> Reservation:
        return self._client.reserve(self.namespace, names, start=start, shard=self._role.shard, deadline_s=until.left)

    def _copy_in(self, reservation: Reservation, pages: Sequence[Page]) -> bool:
        with reservation.copying() as allowed:
            if not allowed:
                return False
            pairs: list[Pair] = []
            for view, page in zip(reservation.views, pages, strict=True):
                at = 0
                for run in page:
                    pairs.append((view[at : at + run.size], run))
                    at += run.size
                view[at:] = 0  # of a page without bytes: nothing of an earlier owner stays in it
            copy_all(pairs, self._options.copy_threads)
        return True

    # ---- clear -------------------------------------------------------------------------------------------------------

    def clear(self) -> str:
        """Drop all pages of all ranks.  Returns why some may be left, "" = none are."""
        self._held.close()
        self._held = Pins()
        bound = self._client._bound(self.namespace)
        if bound is None:
            return "there is no daemon now"
        until = _Until(CLEAR_S)
        try:
            while True:
                self._client.management.ask(m.Ok, m.Clear, bound[1], False, b"", deadline_s=until.left)
                if not self._sealed(bound[1], until):
                    return ""
                if until.left < 0.1:
                    return "others are reading some of it"
                time.sleep(0.02)
        except (Unavailable, Denied, ProtocolError) as error:
            return str(error)

    def _sealed(self, namespace_id: int, until: _Until) -> bool:
        """Whether any page can be read still."""
        cursor = 0
        while True:
            listed = self._client.management.document(m.List, namespace_id, cursor, 1000, deadline_s=until.left)
            if any(entry["state"] == "SEALED" for entry in listed["entries"]):
                return True
            cursor = int(listed["cursor"])
            if not cursor:
                return False
