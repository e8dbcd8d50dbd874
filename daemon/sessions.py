"""Who holds what: one session per attached client, and the handles it owns.

    Session ── LookupHandle   references on a sealed prefix, until its readers confirmed, RELEASE, or its owner's death
            ── StoreHandle    reservations of one shard, and references on the rest of the chain, until COMMIT or ABORT
            ── reading        shares of lookup handles (its own or another client's) that it is copying from now

Every reference and reservation in the arena is owned by exactly one handle here, so the end of a session costs what
that client held, and the handles' sum can be compared with the arena's counts at any time (`Engine.held`).  How much
each holds, and all together (``arena.references_owned``), is counted as it changes: nobody walks over handles for it.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.ipc.attach import Credentials
from kvkeep.shm.arena import Arena
from kvkeep.shm.namespaces import Namespace

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


def distinct(values: npt.NDArray[Any]) -> bool:
    """No value occurs twice."""
    ordered = np.sort(values)  # several times faster than np.unique
    return not (ordered[1:] == ordered[:-1]).any()


class References:
    """References on distinct entries, remembered with the generations they were taken under."""

    __slots__ = ("_arena", "_owner", "entries", "generations")

    def __init__(self, arena: Arena, entries: I64, owner: Session | None = None) -> None:
        """``owner``: the client that holds them, if it is one."""
        self._arena, self._owner = arena, owner
        self.entries = entries
        self.generations: U32 = arena.table.generation[entries]
        arena.acquire(entries)
        self._count(len(entries))

    def _count(self, change: int) -> None:
        self._arena.references_owned += change
        if self._owner is not None:
            self._owner.references += change

    def __len__(self) -> int:
        return len(self.entries)

    def extend(self, entries: I64) -> None:
        self._arena.acquire(entries)
        self.entries = np.concatenate((self.entries, entries))
        self.generations = np.concatenate((self.generations, self._arena.table.generation[entries]))
        self._count(len(entries))

    def trim(self, keep: int) -> int:
        """Give back all but the first ``keep``.  Returns how many went."""
        dropped = len(self.entries) - keep
        if dropped > 0:
            self._arena.release(self.entries[keep:], self.generations[keep:])
            self.entries, self.generations = self.entries[:keep], self.generations[:keep]
            self._count(-dropped)
        return max(dropped, 0)


@dataclass(eq=False)
class LookupHandle:
    id: int
    owner: Session | None  # None: the owner died while others still read
    namespace: Namespace
    references: References
    readers: list[int]  # confirmations still expected, per shard
    reading: int = 0  # shares being copied from now, by any session
    readers_now: set[tuple[Session, int]] = field(default_factory=set)  # (session, shard) of these shares
    waiting: Any = None  # the record of a lookup that is not answered yet, see waiting.py


@dataclass(eq=False)
class StoreHandle:
    id: int
    owner: Session
    namespace: Namespace
    shard: int
    granted: I64
    chain: References


@dataclass(eq=False)
class Session:
    lease_id: int
    token: bytes
    credentials: Credentials
    name: str
    mapped: bool
    external: bool = False  # it stands for processes that map the arena by themselves; see shm/leases.py
    lookups: dict[int, LookupHandle] = field(default_factory=dict)
    stores: dict[int, StoreHandle] = field(default_factory=dict)
    reading: Counter[tuple[int, int]] = field(default_factory=Counter)  # (lookup handle, shard)
    namespaces: dict[int, None] = field(default_factory=dict)  # registered by this client, oldest first
    last_seen: float = field(default_factory=time.monotonic)
    references: int = 0  # of its lookups and stores, also those that others still read when it has gone
    reserved_bytes: int = 0
    held_chunks: int = 0  # over all handles, and hashes of parked lookups: bounded, see engine.MAX_HELD_CHUNKS
