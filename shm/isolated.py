"""IsolatedLRU: one order of last use per tenant, with quotas.

Who is above his quota gives way first, whoever is the most above it, relative to the quota; then the least recent entry
of all.  A tenant without a quota has no limit of his own and no right to room either.  So within their quotas nobody's
scan evicts another's chunks before the scanner has gone back to his quota.  What is above the quotas may go at any time
(`pop_excess`), also while there is room.

A tenant is a number here: `tenant` gives one for a name (a salt, say).  The chains of two tenants share no chunk, as
the salt is in every hash of a chain; should one be touched by another tenant after all, it is that one's from then on.
Quotas are in entries of this order; who has quotas in bytes divides by the size of an extent.

Only the stamps outlive the daemon: whoever adopts entries says whose they are, or they are the nameless tenant's until
somebody touches them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkeep.shm.recency import NEVER, Evictable, LruOrder

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

MAX_TENANTS = 1024


class IsolatedLru:
    name = "IsolatedLRU"
    evicts = True

    def __init__(self, recency: U64, keys: U64 | None = None) -> None:
        self._recency = recency
        self._tenant = np.zeros(len(recency), dtype=np.uint16)
        self._names: dict[str, int] = {"": 0}
        self._logs = [LruOrder(recency)]
        self.used = [0]  # entries per tenant
        self._quota: dict[int, int] = {}

    def tenant(self, name: str) -> int:
        """The number of a tenant, for `touch`; "" is the nameless one, 0."""
        number = self._names.get(name)
        if number is None:
            if len(self._names) > MAX_TENANTS:
                raise ValueError(f"there are {len(self._names)} tenants already, which is the limit; use fewer salts")
            number = self._names[name] = len(self._logs)
            self._logs.append(LruOrder(self._recency))
            self.used.append(0)
        return number

    def set_quota(self, name: str, entries: int | None) -> None:
        """None takes the quota away."""
        number = self.tenant(name)
        if entries is None:
            self._quota.pop(number, None)
        elif entries < 0:
            raise ValueError(f"a quota of {entries} entries is below 0; give None for no quota")
        else:
            self._quota[number] = entries

    def excess(self) -> int:
        """Entries above the quotas, all tenants together: what a background eviction may pop without need of room."""
        return sum(max(0, self.used[tenant] - quota) for tenant, quota in self._quota.items())

    def touch(self, chain: I64, stamps: U64, *, read: bool = True, tenant: int = 0) -> None:
        known = self._recency[chain] != 0
        owners = self._tenant[chain]
        if not known.all() or (owners != tenant).any():
            for owner, count in zip(*np.unique(owners[known], return_counts=True), strict=True):
                self.used[int(owner)] -= int(count)
            self.used[tenant] += len(chain)
            self._tenant[chain] = tenant
        self._recency[chain] = stamps
        self._logs[tenant].append(chain[::-1].astype(np.uint32), stamps[::-1])

    def pop(self, want: int, evictable: Evictable) -> I64:
        """Up to ``want`` entries to evict, of every chain the tail first.  They leave the order."""
        return self._pop(want, evictable, excess_only=False)

    def pop_excess(self, want: int, evictable: Evictable) -> I64:
        """The same, but only from those above their quotas, down to these."""
        return self._pop(want, evictable, excess_only=True)

    def _pop(self, want: int, evictable: Evictable, *, excess_only: bool) -> I64:
        parts: list[I64] = []
        barren: set[int] = set()  # tenants of whom nothing can go now
        while want > 0:
            tenant, most, before = self._next(barren, excess_only)
            if tenant < 0:
                break
            log = self._logs[tenant]
            candidate = log.candidate()
            victims = log.pop(min(want, most), evictable, before)
            if not len(victims) and log.candidate() == candidate:  # it holds some that may not go, and then newer ones
                victims = log.pop(min(want, most), evictable)
                if not len(victims):
                    barren.add(tenant)
            self.used[tenant] -= len(victims)
            parts.append(victims)
            want -= len(victims)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _next(self, barren: set[int], excess_only: bool) -> tuple[int, int, int]:
        """Whose entries go next, how many at most, and up to which stamp; -1 = nobody's."""
        above = [
            (self.used[tenant] / max(quota, 0.5), tenant)
            for tenant, quota in self._quota.items()
            if self.used[tenant] > quota and tenant not in barren
        ]
        if above:
            tenant = max(above)[1]
            return tenant, self.used[tenant] - self._quota[tenant], NEVER
        if excess_only:
            return -1, 0, 0
        stamps = [(log.candidate(), tenant) for tenant, log in enumerate(self._logs) if tenant not in barren]
        stamps = sorted(pair for pair in stamps if pair[0])[:2]
        if not stamps:
            return -1, 0, 0
        return stamps[0][1], self.used[stamps[0][1]], stamps[1][0] if len(stamps) > 1 else NEVER

    def leave(self, entries: I64) -> None:
        owners = self._tenant[entries[self._recency[entries] != 0]]
        for owner, count in zip(*np.unique(owners, return_counts=True), strict=True):
            self.used[int(owner)] -= int(count)

    def released(self) -> None:
        for log in self._logs:
            log.released()

    def oldest(self) -> int:
        return min((stamp for stamp in (log.oldest() for log in self._logs) if stamp), default=0)

    def squeeze(self, live: int) -> bool:
        return any(log.squeeze(used) for log, used in zip(self._logs, self.used, strict=True))

    def adopt(self, entries: I64, stamps: U64, tenant: int = 0) -> None:
        self._tenant[entries] = tenant
        self.used[tenant] += len(entries)
        self._logs[tenant].adopt(entries, stamps)

    def members(self) -> I64:
        return np.concatenate([log.members() for log in self._logs])
