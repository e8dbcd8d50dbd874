"""An eviction policy of a third party, behind a fence: whatever it does, L1 stays consistent and goes on.

Every call is checked against the contract in policies.py.  At the first exception or broken promise the order is made
anew as LRU from what the entry table says, and stays so until the next start; ``tell`` gets the reason once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvkeep.shm.recency import Evictable, LruOrder

if TYPE_CHECKING:
    from kvkeep.shm.policies import Order, Policy

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

SLOW_S = 0.05  # a call that takes longer is told in the log: the whole daemon waits for it

log = logging.getLogger("kvkeep.policies")


class BrokenPromise(Exception):
    """A policy did what the contract forbids."""


class Guarded:
    """An `Order`.  From the entry table, ``members`` gives every entry that should be in it, and ``belongs`` says which
    of some could be."""

    def __init__(
        self,
        policy: Policy,
        recency: U64,
        keys: U64,
        *,
        members: Callable[[], I64],
        belongs: Evictable,
        tell: Callable[[str], None],
    ) -> None:
        self.name = getattr(policy, "name", "?")
        self._recency, self._members, self._belongs, self._tell = recency, members, belongs, tell
        self._fallen = False
        self._slow = False
        self._order: Order = LruOrder(recency)
        try:
            self._order = policy(recency, keys)
            self.evicts = bool(self._order.evicts)
        except Exception as problem:
            self.evicts = True
            self._fall_back(problem)

    def _fall_back(self, problem: Exception) -> None:
        if self._fallen:
            raise problem  # LRU itself: a bug of ours
        self._fallen = True
        log.error("eviction policy %s fails", self.name, exc_info=problem)
        entries = self._members()
        stamps = self._recency[entries]
        at = np.argsort(stamps, kind="stable")
        entries, stamps = entries[at], np.maximum(stamps[at], np.uint64(1))
        self._recency[entries] = stamps
        self._order = LruOrder(self._recency)
        self._order.adopt(entries, stamps)
        self._tell(
            f"eviction policy {self.name}: {type(problem).__name__}: {problem}; LRU decides until the next start"
        )

    def _timed(self, began: float) -> None:
        took = time.perf_counter() - began
        if took > SLOW_S and not self._slow:
            self._slow = True
            log.warning("eviction policy %s took %.0f ms for one call; everybody waits for that", self.name, took * 1e3)

    # ---- Order -------------------------------------------------------------------------------------------------------

    def touch(self, chain: I64, stamps: U64, *, read: bool = True, tenant: int = 0) -> None:
        began = time.perf_counter()
        try:
            self._order.touch(chain, stamps, read=read, tenant=tenant)
            if not self._recency[chain].all():
                raise BrokenPromise("touch left entries of the chain with recency 0")
        except Exception as problem:
            self._fall_back(problem)
            self._order.touch(chain, stamps, read=read)
        self._timed(began)

    def pop(self, want: int, evictable: Evictable) -> I64:
        began = time.perf_counter()
        try:
            victims = np.asarray(self._order.pop(want, evictable), dtype=np.int64)
            self._check(victims, want, evictable)
        except Exception as problem:
            self._fall_back(problem)
            victims = self._order.pop(want, evictable)
        self._timed(began)
        return victims

    def _check(self, victims: I64, want: int, evictable: Evictable) -> None:
        if not len(victims):
            return
        if len(victims) > want or len(np.unique(victims)) != len(victims):
            raise BrokenPromise(f"pop gave {len(victims)} entries, some twice perhaps, when {want} were wanted")
        if victims.min() < 0 or victims.max() >= len(self._recency) or not evictable(victims).all():
            raise BrokenPromise("pop gave entries that must not go")
        if not self._belongs(victims).all():
            raise BrokenPromise("pop gave entries of another order")
        if self._recency[victims].any():
            raise BrokenPromise("pop did not set the recency of what it gave to 0")

    def leave(self, entries: I64) -> None:
        try:
            self._order.leave(entries)
        except Exception as problem:
            self._fall_back(problem)
            self._order.leave(entries)

    def released(self) -> None:
        try:
            self._order.released()
        except Exception as problem:
            self._fall_back(problem)

    def oldest(self) -> int:
        try:
            return int(self._order.oldest())
        except Exception as problem:
            self._fall_back(problem)
            return int(self._order.oldest())

    def squeeze(self, live: int) -> bool:
        try:
            return bool(self._order.squeeze(live))
        except Exception as problem:
            self._fall_back(problem)
            return False

    def adopt(self, entries: I64, stamps: U64) -> None:
        try:
            self._order.adopt(entries, stamps)
        except Exception as problem:
            self._fall_back(problem)  # which finds them in the table

    def members(self) -> I64:
        try:
            return np.asarray(self._order.members(), dtype=np.int64)
        except Exception as problem:
            self._fall_back(problem)
            return self._order.members()
