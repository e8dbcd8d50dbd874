"""References that lookups hold for the workers of LMCache, and who ends them.

A lookup of the daemon is one reference on its chunks until it is released.  LMCache counts finer: each rank's object of
each chunk is held by as many readers as the lookup said.  So a `Hold` keeps these counts and the daemon's lookup until
the last of them is gone and nobody reads.  It ends by: all readers' commits, FREE, END_SESSION, another lookup of the
same request, the end of the connection that asked.  A reader that was told where to read keeps it, whatever else ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkeep.ipc.client import Lookup, Namespace
from kvkeep.ipc.messages import HASH_BYTES


class Hold:
    def __init__(self, lookup: Lookup, namespace: Namespace, hashes: bytes, readers: int) -> None:
        self.lookup, self.namespace = lookup, namespace
        self._hashes = hashes
        self._left = np.full((namespace.shards, lookup.ready), readers, np.int32)
        self._reading = 0

    @property
    def alive(self) -> bool:
        return self.lookup.alive

    def covers(self, namespace: Namespace, hashes: bytes, start: int, end: int, shard: int) -> bool:
        """Whether chunks ``start`` to ``end`` of this chain are held for a reader of this shard."""
        return (
            self.alive
            and namespace is self.namespace
            and end <= self.lookup.ready
            and hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]
            == self._hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]
            and bool((self._left[shard, start:end] > 0).all())
        )

    def begin_reading(self) -> None:
        self._reading += 1

    def end_reading(self, shard: int, start: int, end: int) -> None:
        self._reading -= 1
        self._left[shard, start:end] -= 1
        self._settle()

    def free(self, start: int, end: int) -> None:
        """All readers' shares of these chunks."""
        self._left[:, start:end] = 0
        self._settle()

    def end(self) -> None:
        self._left[:] = 0
        self._settle()

    def _settle(self) -> None:
        if self._reading <= 0 and not (self._left > 0).any():
            self.lookup.release()


class Session:
    """One request of one connection: its lookup, while it runs and after."""

    def __init__(self, namespace: Namespace | None, hashes: bytes, readers: int, pending: Any) -> None:
        self.namespace, self.hashes, self.readers = namespace, hashes, readers
        self.pending = pending  # PendingLookup, None = there is nothing to wait for
        self.hold: Hold | None = None
        self._told = False

    def answered(self) -> bool:
        """Whether the daemon has said what is there."""
        if self.pending is None:
            return True
        lookup = self.pending.poll()
        if lookup is None:
            return False
        self.pending = None
        if lookup.ready > 0 and self.namespace is not None:
            self.hold = Hold(lookup, self.namespace, self.hashes, self.readers)
        return True

    def chunks(self) -> int:
        """What the lookup found; 0 for the second who asks."""
        told, self._told = self._told, True
        return 0 if told or self.hold is None else int(self.hold.lookup.ready)

    def free(self, start: int, end: int) -> None:
        if self.answered() and self.hold is not None:
            self.hold.free(start, end)
        elif self.pending is not None and start == 0 and end * HASH_BYTES >= len(self.hashes):
            self.end()

    def end(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None
        if self.hold is not None:
            self.hold.end()
