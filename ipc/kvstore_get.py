"""Reading values: one `Get` is one `batched_get`.

Round trips that the caller waits for, of one key: absent 1; one page 3 (LOOKUP, RETRIEVE, RELEASE); several pages 6.  A
batch of n one-page values that are all there needs 3 in all; what comes after a first miss is looked up at once and
read one by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from kvkeep.ipc.buffers import Buffer, Bytes, as_bytes
from kvkeep.ipc.client_lookup import Lookup, Reading
from kvkeep.ipc.copying import Pair, copy_all
from kvkeep.ipc.formats import HEADER_BYTES, Header, Value, digest_of, restore
from kvkeep.ipc.kvstore_pages import Name, Pages, Tally, Until
from kvkeep.ipc.messages import MAX_CHUNKS

log = logging.getLogger("kvkeep.store")

WINDOW = 64  # lookups on their way

Allocate: TypeAlias = Callable[[Header], "Buffer | None"]


class Get:
    """``spoiled``: keys whose value will never be read; the caller clears them away when this has ended."""

    def __init__(self, pages: Pages, until: Until, tally: Tally, *, allocate: Allocate | None, checksums: bool) -> None:
        self._pages, self._until, self._tally = pages, until, tally
        self._allocate, self._checksums = allocate, checksums
        self._values: dict[bytes, Value | None] = {}
        self.spoiled: list[Name] = []

    def values(self, names: Sequence[Name], *, l2: bool) -> dict[bytes, Value | None]:
        """By the hash of the name, for distinct names; one that is not in it is a miss too."""
        values = self._values
        while len(values) < len(names):  # those that are there, from the first on, in one go
            part = names[len(values) : len(values) + MAX_CHUNKS]
            with self._pages.lookup([name.hash for name in part], self._until) as found:
                self._read(found, part)
                if found.ready < len(part):
                    break
        rest = names[len(values) + (not l2) :]  # without L2 the next one is known to be absent
        for at in range(0, len(rest), WINDOW):
            part = rest[at : at + WINDOW]
            pending = [self._pages.begin_lookup(name.hash, self._until) for name in part]
            for name, one in zip(part, pending, strict=True):
                with one.wait(self._until.left) as found:
                    self._read(found, [name])
        return values

    def _read(self, found: Lookup, names: Sequence[Name]) -> None:
        """The values of the first ``found.ready`` names."""
        names = names[: found.ready]
        self._values.update((name.hash, None) for name in names)
        first = self._pages.open(found, len(names), self._until)
        if first is None:
            return
        read = [(name, self._read_one(first, i, name)) for i, name in enumerate(names)]
        for (name, value), good in zip(read, first.validate(), strict=True):
            self._values[name.hash] = value if good else None

    def _read_one(self, first: Reading, i: int, name: Name) -> Value | None:
        pages = self._pages
        header = pages.header(first, i, name)
        if header is None:
            if first.validate()[i] and not first.revoked:
                self._corrupt(name)
            return None
        further = pages.further(header.nbytes)
        with pages.lookup_whole(name, header, self._until) if further else pages.nothing() as whole:
            others = pages.open(whole, further, self._until)
            if others is None and further:
                if not whole.ready:
                    self._incomplete(name)
                return None
            target = np.empty(header.nbytes, np.uint8) if self._allocate is None else self._allocate(header)
            if target is None:
                return None
            flat = as_bytes(target, writable=True)
            if flat.size != header.nbytes:
                raise ValueError(f"the buffer for {name.text[1:]!r} has {flat.size} bytes, the value {header.nbytes}")
            if not self._copy(flat, first, i, others):
                return None
        if self._checksums and header.digest and digest_of(flat) != header.digest:
            self._corrupt(name)
            return None
        data = restore(header, flat) if self._allocate is None else target
        return Value(data, header.format, header.dtype, header.shape, header.nbytes)

    def _copy(self, flat: Bytes, first: Reading, i: int, others: Reading | None) -> bool:
        """True = the bytes of the other pages are right; the caller validates the first."""
        rest = others.copying() if others is not None else contextlib.nullcontext(True)
        with first.copying() as allowed, rest as allowed_too:
            if not (allowed and allowed_too):
                return False
            sources = [first.views[i][HEADER_BYTES:], *(others.views if others is not None else ())]
            pairs: list[Pair] = []
            at = 0
            for source in sources:
                piece = flat[at : at + source.size]
                pairs.append((piece, source[: piece.size]))
                at += piece.size
            copy_all(pairs, self._pages.client._session.options.copy_threads)
        return others is None or all(others.validate())

    def _incomplete(self, name: Name) -> None:
        """A page is gone.  With L2 it may be there, for a `get` that waits."""
        client = self._pages.client
        if not client.attached or client.hung or self._until.over:
            return
        self._tally.add(incomplete=1)
        if not client.has_l2:
            self.spoiled.append(name)

    def _corrupt(self, name: Name) -> None:
        log.warning("the value of %r does not verify: a miss", name.text[1:200])
        self._tally.add(corrupt=1)
        self.spoiled.append(name)
