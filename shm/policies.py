"""The eviction policies by name, and what one must be.

A policy is a class whose objects are orders: one per size class in L1, made from two columns of the entry table.  The
columns belong to the table; an entry whose ``recency`` is 0 is in no order.  To add one, write the class and name it
in POLICIES: tests/shm runs every name through the properties that all must have.  Or keep it in a package of one's own,
see registry.py and docs/policies.md; in the daemon such a one is behind a fence (guard.py).

    LRU          tails before heads; the least recent goes                                        recency.py
    Adaptive     what this cache's own history says is least likely to be used soon; recommended  adaptive.py
    ARC          room for new entries follows the ghosts that come back                           arc.py
    S3FIFO       a tenth for what is new, the rest for what was read                              s3fifo.py
    IsolatedLRU  LRU per tenant, who is above his quota gives way first                           isolated.py
    noop         nothing goes, stores are refused                                                 recency.py
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from kvkeep.shm import registry
from kvkeep.shm.adaptive import Adaptive
from kvkeep.shm.arc import Arc
from kvkeep.shm.isolated import IsolatedLru
from kvkeep.shm.recency import Evictable, LruOrder, NoEviction
from kvkeep.shm.s3fifo import S3Fifo

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Order(Protocol):
    """Not thread-safe.  Entries are record numbers, chains are root to tail, stamps come from one `Clock`."""

    name: str
    evicts: bool  # False: `pop` gives nothing, ever

    def touch(self, chain: I64, stamps: U64, *, read: bool = True, tenant: int = 0) -> None:
        """A chain from its root, new entries and known ones, was used.  ``read`` is False when it is being stored."""

    def pop(self, want: int, evictable: Evictable) -> I64:
        """Up to ``want`` entries to evict now.  Of every chain the tail goes before the head.

        Fewer only if ``evictable`` allows no more.  They leave the order: their recency becomes 0."""

    def leave(self, entries: I64) -> None:
        """Entries that go without `pop`; called before their recency becomes 0."""

    def released(self) -> None:
        """Something that ``evictable`` refused may be evictable now."""

    def oldest(self) -> int:
        """The stamp of the least recent entry, 0 = none: which size class gives way."""

    def squeeze(self, live: int) -> bool:
        """One bounded step of housekeeping for ``live`` entries.  True = worth another."""

    def adopt(self, entries: I64, stamps: U64) -> None:
        """Entries of an earlier daemon with the stamps they have, ascending."""

    def members(self) -> I64:
        """Every entry in the order, each once.  For checks."""


class Policy(Protocol):
    name: str
    evicts: bool

    def __call__(self, recency: U64, keys: U64) -> Order:
        """Columns of the entry table: (n) stamps, (n, 4) keys."""


POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (LruOrder, Adaptive, Arc, S3Fifo, IsolatedLru, NoEviction)
}
GROUP = "kvkeep.eviction_policies"


def eviction_policy(name: str) -> Policy:
    """Built in or not.  ValueError with the rest of a sentence."""
    return POLICIES.get(name) or cast(Policy, registry.load(GROUP, name, POLICIES))
