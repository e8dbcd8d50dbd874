"""Where the values of a key/value store lie: names, pages, and finding them (the layout is drawn in kvstore.py).

`Pages` knows one store's namespace.  It hands out lookups and readings; who gets one ends it.  A `Reading` of `open` is
never confirmed: releasing its lookup ends the references.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

from blake3 import blake3

from kvkeep.ipc.arguments import seconds
from kvkeep.ipc.client import MAX_WAIT_MS, Client
from kvkeep.ipc.client_lookup import Lookup, PendingLookup, Reading
from kvkeep.ipc.formats import HEADER_BYTES, MAX_KEY_BYTES, Header, decode
from kvkeep.ipc.keys import Key
from kvkeep.ipc.messages import HASH_BYTES, MAX_CHUNKS
from kvkeep.ipc.namespace import Namespace

StoreKey: TypeAlias = "str | bytes | Key"


class Name(NamedTuple):
    """A key as it is stored."""

    text: bytes  # what the header holds
    hash: bytes  # of the first page


class Until(NamedTuple):
    """When an operation ends (time.monotonic()), and until when L2 may be waited for."""

    end: float
    l2: float

    @classmethod
    def after(cls, deadline_s: float, wait_s: float = 0.0) -> Until:
        now, wait_s = time.monotonic(), seconds("wait_s", wait_s)
        return cls(now + seconds("deadline_s", deadline_s) + wait_s, now + wait_s)

    @property
    def left(self) -> float:
        return max(0.001, self.end - time.monotonic())

    @property
    def wait_s(self) -> float:
        return min(max(0.0, self.l2 - time.monotonic()), MAX_WAIT_MS / 1000)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end


class Tally:
    """Counters that any thread may add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **what: int) -> None:
        with self._lock:
            self._counts.update(what)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


def name_of(key: StoreKey) -> Name:
    """A `Key` and its readable form are the same key; bytes are another, whatever they spell."""
    if isinstance(key, Key):
        key = key.to_string()
    if not isinstance(key, str | bytes):
        raise ValueError(f"a key is a str, bytes or a Key, not {type(key).__name__}")
    text = b"t" + key.encode() if isinstance(key, str) else b"b" + key
    if not 1 < len(text) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES - 1} bytes, this one has {len(text) - 1}")
    return Name(text, blake3(b"kvkeep.value.v1\0" + text).digest())


class Pages:
    def __init__(self, client: Client, namespace: Namespace, page_bytes: int) -> None:
        self.client = client
        self.namespace = namespace
        self.page_bytes = page_bytes  # payload of a first page; of a further one: namespace.shard_bytes

    def further(self, nbytes: int) -> int:
        """Pages after the first of a value of so many bytes."""
        return max(0, -(-(nbytes - self.page_bytes) // self.namespace.shard_bytes))

    def arena_bytes(self, nbytes: int) -> int:
        """What such a value takes of L1."""
        return (1 + self.further(nbytes)) * self.namespace.stride

    def chain(self, name: Name, header: Header) -> bytes:
        """Hashes of all its pages, in the order of their chain: the further ones, then the first."""
        count = self.further(header.nbytes)
        if not count:
            return name.hash
        seed = b"kvkeep.page.v1\0" + name.hash + header.digest + header.nbytes.to_bytes(8, "little")
        return blake3(seed).digest(length=count * HASH_BYTES) + name.hash

    # ---- finding -----------------------------------------------------------------------------------------------------

    def lookup(self, hashes: Any, until: Until, *, l2: bool = False) -> Lookup:
        wait_s = until.wait_s if l2 else 0.0
        return self.client.lookup(self.namespace, hashes, wait_s=wait_s, deadline_s=max(0.001, until.left - wait_s))

    def begin_lookup(self, hash: bytes, until: Until) -> PendingLookup:
        """Of one first page; L2 is asked while there is time for it."""
        wait_s = until.wait_s
        return self.client.begin_lookup(self.namespace, hash, wait_s=wait_s, deadline_s=max(0.001, until.left - wait_s))

    def lookup_whole(self, name: Name, header: Header, until: Until) -> Lookup:
        """All pages of a value that has further ones: all of them or none."""
        chain = self.chain(name, header)
        found = self.lookup(chain, until)
        if found.ready * HASH_BYTES < len(chain) and until.wait_s:
            found.release()
            found = self.lookup(chain, until, l2=True)
        if found.ready * HASH_BYTES < len(chain):
            found.release()
            return self.nothing()
        return found

    def nothing(self) -> Lookup:
        return Lookup(self.client._session, None, 0, 0, 0)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def open(self, found: Lookup, count: int, until: Until) -> Reading | None:
        """The first ``count`` pages of a lookup."""
        if count <= 0 or not found.alive:
            return None
        reading = self.client.open_read(found.handle, 0, 0, count, deadline_s=until.left)
        if reading is not None:
            reading.leave()
        return reading

    def header(self, first: Reading | None, i: int, name: Name) -> Header | None:
        """Of this key, in the i-th page; None = that page has no header that verifies, or another key's."""
        if first is None:
            return None
        with first.copying() as allowed:
            data = first.views[i][:HEADER_BYTES].tobytes() if allowed else b""
        header = decode(data) if data else None
        if header is None or header.key != name.text or self.further(header.nbytes) >= MAX_CHUNKS:
            return None
        return header if len(header.digest) or not self.further(header.nbytes) else None

    def find_header(self, name: Name, until: Until, *, l2: bool = False) -> Header | None:
        """Of a value that is there.  Three round trips."""
        with self.lookup([name.hash], until, l2=l2) as found:
            return self.header(self.open(found, 1, until), 0, name)
