"""What an L2 adapter is: a small class that keeps shards of chunks on one medium.

An adapter lives in a mover process and is called from several of its threads at once, so it is thread-safe.  Calls
block and work on batches; payloads are views of the arena, and go to and from the medium without a copy where it can.
Deadlines, retries, back-pressure and the circuit breaker are the mover's; an adapter reports what happened, one Result
per item, and never raises for what the medium did.

    open ──► lookup | store | load | delete | list | usage  (any order, any thread) ──► close

`open` proves with a real write and read that the medium works the way it will be used, or raises AdapterError with one
sentence.  An object is visible to `lookup` and `load` only after its `store` said OK.  An object that does not verify
is a miss, is removed, and is counted.

Payloads may be *encoded* (see serde.py): the bytes that are kept are then others than the arena's, and an `Encoding`
with them says how to get back.  An adapter keeps it with the object (in the record header), never interprets it, and
never gives encoded bytes as plain ones: `load` says ENCODED, and `fetch` has the object as it lies there.
"""

from __future__ import annotations

import abc
import builtins
import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Key(NamedTuple):
    """One rank's part of one chunk, under one identity."""

    namespace: bytes  # 32-byte digest of the identity manifest and geometry
    chunk: bytes  # 32-byte chained content hash
    shard: int
    shards: int


class Outcome(enum.IntEnum):
    OK = 0
    MISS = 1
    CORRUPT = 2  # was there, did not verify, is gone now
    NO_SPACE = 3  # the medium or the configured capacity is full, also after eviction
    IO_ERROR = 4  # see errno
    TOO_LARGE = 5  # can never fit
    BUSY = 6  # somebody else is storing this key just now
    UNAVAILABLE = 7  # the medium does not answer; nothing is known about the object
    ENCODED = 8  # it is there, but its bytes are not the plain ones: `fetch` it


class Result(NamedTuple):
    outcome: Outcome
    errno: int = 0
    detail: str = ""  # one sentence for the log


OK = Result(Outcome.OK)
MISS = Result(Outcome.MISS)


class Encoding(NamedTuple):
    """How a payload came out of the arena's bytes."""

    original_bytes: int  # of the plain payload
    serdes: tuple[int, ...]  # ids in the order in which they were applied; never empty
    params: bytes  # theirs; comes back with zeros behind it


class Item(NamedTuple):
    """What is to be stored."""

    key: Key
    payload: memoryview
    checksum: int = 0  # xxh3_64 of the payload; 0 = not computed
    encoding: Encoding | None = None  # None = the payload is plain


class Fetched(NamedTuple):
    """An object as it lies on the medium.  Whatever the result is, there is no more memory behind it than asked for."""

    result: Result
    payload: memoryview = memoryview(b"")
    encoding: Encoding | None = None  # None = the payload is plain

    @property
    def outcome(self) -> Outcome:
        return self.result.outcome


class Usage(NamedTuple):
    bytes_used: int  # on the medium, headers and rounding included
    bytes_limit: int
    objects: int


class TenantUse(NamedTuple):
    bytes_used: int  # on the medium, headers and rounding included
    quota: int  # bytes, -1 = none


class Listing(NamedTuple):
    objects: list[tuple[Key, int]]  # with payload bytes at rest
    cursor: bytes  # give it back for the next page; b"" = that was the last
    unreadable: int = 0  # objects or folders that could not be looked at: what is in them is not in this page


class Verified(NamedTuple):
    """What a piece of `Adapter.verify` found."""

    objects: int  # looked at, the corrupt ones included
    nbytes: int  # of payload, read
    corrupt: int  # did not verify, and are removed
    unreadable: int  # could not be read; they stay
    details: list[str]  # a sentence about some of those
    cursor: bytes  # as in Listing


class AdapterError(Exception):
    """The medium cannot be used as configured; the text is for the operator: what, which limit, what to change."""


class Adapter(abc.ABC):
    """See the module."""

    type_name: str
    counters: Counter[str]
    keeps_encodings = False  # stores an Item's encoding, and has `fetch`; without it there is no serde on this medium

    @abc.abstractmethod
    def open(self) -> None:
        """Make ready and prove it.  Raises AdapterError."""

    @abc.abstractmethod
    def lookup(self, keys: Sequence[Key]) -> list[bool]:
        """Present or not, per key.  What cannot be found out is not present."""

    def touch(self, keys: Sequence[Key]) -> list[bool]:
        """These are in use, though not from here: they are as recent as if they had been loaded, roots of chains first.

        No payload is read, nothing of the objects is written.  Present or not, per key."""
        return self.lookup(keys)

    @abc.abstractmethod
    def store(self, items: Sequence[Item]) -> list[Result]:
        """Storing a key that is there is OK and writes nothing, also if it is there in another encoding."""

    @abc.abstractmethod
    def load(self, items: Sequence[tuple[Key, memoryview]]) -> list[Result]:
        """Fill the views, each exactly of the payload's length.  OK means: the exact bytes that were stored.

        ENCODED for what was stored with an encoding.  After anything but OK the view's content is undefined."""

    def fetch(self, items: Sequence[tuple[Key, int]]) -> list[Fetched]:
        """(key, the most stored bytes that are wanted): header and stored bytes in fresh memory, key, length and
        checksum verified, plain or encoded.  MISS for an object that has more bytes; it stays."""
        return [Fetched(MISS)] * len(items)

    @abc.abstractmethod
    def delete(self, keys: Sequence[Key]) -> int:
        """How many were there."""

    @abc.abstractmethod
    def list(self, cursor: bytes, limit: int) -> Listing:
        """A page of what is there; concurrent changes may or may not be seen."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """The truth on the medium, also right after a restart."""

    def trouble(self) -> str:
        """Why the medium as a whole cannot be used, as far as that is seen without using it; "" = nothing is known.

        Cheap: asked with every job.  What the adapter then says to each call is UNAVAILABLE, or "not there"."""
        return ""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and let go.  What was acknowledged is kept."""

    # What the objects are, and whose (catalogue.py, tenants.py).  Optional: the defaults keep nothing.

    def describe(self, namespace: bytes, manifest: bytes) -> Result:
        """Remember on the medium what a namespace is.  Said before every store of its objects: cheap when it is known.

        What does not work is no reason not to store; then the medium does not know whose the objects are."""
        return OK

    def described(self, namespace: bytes) -> bytes:
        """The manifest, b"" = not known."""
        return b""

    def undescribe(self, namespace: bytes) -> bool:
        """Forget it: all its objects are gone.  True = it is gone for certain, there before or not."""
        return True

    def manifests(self) -> int:
        """How many of the objects that `usage` counts are such memories: nobody is served from these."""
        return 0

    def tenants(self) -> dict[str, TenantUse]:
        """Bytes on the medium and quotas by tenant, "" = nobody's in particular; {} = they are not told apart."""
        return {}

    # Management.  Optional: the defaults are made of the calls above.  By one thread at a time, beside the other calls.

    def erase(self, keys: Sequence[Key]) -> builtins.list[bool]:
        """`delete` for those who must know: gone for certain, per key, there before or not."""
        self.delete(keys)
        return [not there for there in self.lookup(keys)]

    def serdes(self, keys: Sequence[Key]) -> builtins.list[tuple[int, ...]]:
        """The serde ids in the objects' headers; () for plain objects and for what cannot be found out."""
        return [()] * len(keys)

    def verify(self, cursor: bytes, nbytes: int) -> Verified:
        """Read and check objects from the cursor on, until about ``nbytes`` were read.  This is no use of them."""
        page = self.list(cursor, 1)
        counts: Counter[Outcome] = Counter()
        read, details = 0, []
        for key, size in page.objects:
            result = self._check(key, size)
            counts[result.outcome] += 1
            read += size * (result.outcome == Outcome.OK)
            if result.detail and result.outcome not in (Outcome.OK, Outcome.MISS):
                details.append(f"{key.chunk.hex()[:12]}: {result.detail}")
        unreadable = page.unreadable + counts[Outcome.IO_ERROR] + counts[Outcome.UNAVAILABLE]
        return Verified(len(page.objects), read, counts[Outcome.CORRUPT], unreadable, details, page.cursor)

    def _check(self, key: Key, size: int) -> Result:
        if self.keeps_encodings:
            return self.fetch([(key, size)])[0].result
        return self.load([(key, memoryview(bytearray(size)))])[0]

    def compact(self) -> Iterator[tuple[str, int]]:
        """Give back what the medium can: (what, how many) after each small piece of work.  None = nothing to do."""
        return iter(())
