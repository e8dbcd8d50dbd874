"""IsolatedLRU on a medium: who has how many bytes there, and whose objects go first.

The same rule as in L1 (`kvkeep.shm.isolated`), in bytes, because objects at rest differ in size:

* a tenant above his quota loses his own oldest objects, whoever is the most above it (relative to the quota) first,
  whether or not room is needed; what is being stored for him counts already (`coming`);
* as long as anything of those above can go, nothing of others goes; then the least recent of all goes;
* who has no quota has no limit of his own and no right to room either.

`Tenants` is one account per medium; a `TenantOrder` is the order of last use of some of its objects (all of them, or
those of one size class).  An object's owner is the tenant that its namespace's manifest names; as long as nobody has
told the manifest it is nobody's, and `TenantOrder.reown` moves it when somebody does.

Not thread-safe: called under the adapter's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import AdapterError, TenantUse
from kvkeep.l2.options import Options
from kvkeep.shm.isolated import MAX_TENANTS, IsolatedLru
from kvkeep.shm.namespaces import tenant_of
from kvkeep.shm.recency import NEVER, Evictable, LruOrder

I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]
U64 = npt.NDArray[np.uint64]

POLICY = IsolatedLru.name
NOBODY = 0
KEPT = 0xFFFF  # the owner of what is in no order and never goes: the catalogue
MAX_QUOTA_GIB = 1 << 20


class Above(NamedTuple):
    tenant: int  # -1 = nobody
    over: int  # bytes above the quota


def quotas_of(options: Options, policy: str) -> dict[str, int]:
    """Bytes per tenant, from "tenant_quotas" (GiB) of an adapter's "eviction".  Raises AdapterError."""
    quotas = options.table("tenant_quotas")
    if quotas and policy != POLICY:
        raise AdapterError(
            f'{options.what}: \'tenant_quotas\' needs "eviction_policy": "{POLICY}", which is {policy!r}: set it, or '
            "leave out the quotas"
        )
    for tenant, gib in quotas.items():
        known = isinstance(gib, int | float) and not isinstance(gib, bool)
        if not known or not 0 <= gib <= MAX_QUOTA_GIB:  # type: ignore[operator]
            raise AdapterError(f"{options.what}: the quota of {tenant!r} is {gib!r}: give 0 to {MAX_QUOTA_GIB} GiB")
    if len(quotas) > MAX_TENANTS:
        raise AdapterError(f"{options.what}: there are {len(quotas)} quotas, the limit is {MAX_TENANTS}")
    return {tenant: int(gib * (1 << 30)) for tenant, gib in quotas.items()}  # type: ignore[operator]


class Tenants:
    """See the module.  Tenants are numbers; 0 is nobody in particular."""

    def __init__(self, quotas: Mapping[str, int]) -> None:
        self._names = [""]
        self._numbers = {"": NOBODY}
        self.used = [0]  # bytes of objects that are in an order
        self.coming = [0]  # bytes of objects that are being stored
        self._of: dict[bytes, int] = {}  # by namespace
        self._quotas = {self._number(name): nbytes for name, nbytes in quotas.items()}

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self._names) > MAX_TENANTS:
                return NOBODY  # those beyond share what the nameless have
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
            self.used.append(0)
            self.coming.append(0)
        return number

    def learn(self, namespace: bytes, manifest: bytes) -> bool:
        """True = its objects are somebody else's than they were until now."""
        number = self._number(tenant_of(manifest))
        if self._of.get(namespace) == number:
            return False
        self._of[namespace] = number
        return True

    def of(self, namespace: bytes) -> int:
        return self._of.get(namespace, NOBODY)

    def most_above(self, barren: Set[int] = frozenset()) -> Above:
        """Who is the most above his quota, of those that are not ``barren``."""
        worst, above = 0.0, Above(-1, 0)
        for tenant, quota in self._quotas.items():
            holds = self.used[tenant] + self.coming[tenant]
            if holds > quota and tenant not in barren and self.used[tenant] and holds / max(quota, 0.5) > worst:
                worst, above = holds / max(quota, 0.5), Above(tenant, holds - quota)
        return above

    def usage(self) -> dict[str, TenantUse]:
        return {
            name: TenantUse(self.used[number], self._quotas.get(number, -1))
            for number, name in enumerate(self._names)
            if self.used[number] or number in self._quotas
        }


class TenantOrder:
    """``recency``: a column of stamps, 0 = not in the order.  ``owner``: a column of tenants, filled in before an entry
    enters.  ``weigh`` gives the bytes of entries; they change through `reweighed` only."""

    name = POLICY
    evicts = True

    def __init__(self, recency: U64, owner: U16, tenants: Tenants, weigh: Callable[[I64], I64]) -> None:
        self._recency, self._owner, self._tenants, self._weigh = recency, owner, tenants, weigh
        self._logs: dict[int, LruOrder] = {}
        self._counts: dict[int, int] = {}  # entries
        self._largest = 1  # bytes of an entry, so far

    def _account(self, entries: I64, sign: int) -> None:
        if not len(entries):
            return
        weights = self._weigh(entries)
        self._largest = max(self._largest, int(weights.max()))
        for tenant, mine in self._by_owner(entries):
            self._tenants.used[tenant] += sign * int(weights[mine].sum())
            self._counts[tenant] = self._counts.get(tenant, 0) + sign * int(np.count_nonzero(mine))

    def _by_owner(self, entries: I64) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        owners = self._owner[entries]
        for tenant in np.unique(owners).tolist():
            yield tenant, owners == tenant

    def _log(self, tenant: int) -> LruOrder:
        log = self._logs.get(tenant)
        if log is None:
            log = self._logs[tenant] = LruOrder(self._recency)
        return log

    def reweighed(self, entry: int, by: int) -> None:
        """The entry has so many bytes more; ``weigh`` says so already."""
        if self._recency[entry]:
            self._tenants.used[int(self._owner[entry])] += by
            self._largest = max(self._largest, int(self._weigh(np.array([entry]))[0]))

    # ---- the interface of an order (shm/policies.py) -----------------------------------------------------------------

    def touch(self, chain: I64, stamps: U64, *, read: bool = True, tenant: int = 0) -> None:
        """Whose they are says the column, not ``tenant``."""
        self._account(chain[self._recency[chain] == 0], 1)
        self._recency[chain] = stamps
        self._append(chain[::-1], stamps[::-1])

    def _append(self, entries: I64, stamps: U64) -> None:
        for tenant, mine in self._by_owner(entries):
            self._log(tenant).append(entries[mine].astype(np.uint32), stamps[mine])

    def pop(self, want: int, evictable: Evictable) -> I64:
        return self._pop(want, evictable, excess_only=False)

    def pop_excess(self, want: int, evictable: Evictable) -> I64:
        """Only of those above their quotas, down to these."""
        return self._pop(want, evictable, excess_only=True)

    def _pop(self, want: int, evictable: Evictable, *, excess_only: bool) -> I64:
        parts: list[I64] = []
        barren: set[int] = set()  # tenants of whom nothing can go now
        while want > 0:
            tenant, over = self._tenants.most_above(barren)
            before = NEVER
            if tenant >= 0:  # so many that before the last of them he is still above
                most = max(1, math.ceil(over / self._largest))
            elif excess_only:
                break
            else:
                tenant, before = self._least_recent(barren)
                most = want
            if tenant < 0:
                break
            candidate = self.candidate_of(tenant)
            victims = self.pop_of(tenant, min(want, most), evictable, before)
            if not len(victims) and self.candidate_of(tenant) in (0, candidate):
                barren.add(tenant)
            parts.append(victims)
            want -= len(victims)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _least_recent(self, barren: Set[int]) -> tuple[int, int]:
        """Who has the least recent entry, and the stamp up to which his go before anybody else's."""
        stamps = ((log.candidate(), tenant) for tenant, log in self._logs.items() if tenant not in barren)
        first = sorted(pair for pair in stamps if pair[0])[:2]
        if not first:
            return -1, 0
        return first[0][1], first[1][0] if len(first) > 1 else NEVER

    def candidate_of(self, tenant: int) -> int:
        """Stamp of the first entry of a tenant that `pop_of` would look at; 0 = there is none."""
        log = self._logs.get(tenant)
        return 0 if log is None else log.candidate()

    def pop_of(self, tenant: int, want: int, evictable: Evictable, before: int = NEVER) -> I64:
        """Up to ``want`` of a tenant's entries with stamps below ``before``, least recent first."""
        log = self._logs.get(tenant)
        victims = np.empty(0, dtype=np.int64) if log is None else log.pop(want, evictable, before)
        self._account(victims, -1)
        return victims

    def leave(self, entries: I64) -> None:
        entries = entries[(self._recency[entries] != 0) & (self._owner[entries] != KEPT)]
        self._account(entries, -1)

    def released(self) -> None:
        for log in self._logs.values():
            log.released()

    def oldest(self) -> int:
        return min((stamp for stamp in (log.oldest() for log in self._logs.values()) if stamp), default=0)

    def squeeze(self, live: int) -> bool:
        share = live / max(1, sum(self._counts.values()))
        return any(log.squeeze(int(self._counts.get(tenant, 0) * share)) for tenant, log in self._logs.items())

    def adopt(self, entries: I64, stamps: U64) -> None:
        """Entries with the stamps that they have, ascending."""
        self._account(entries, 1)
        self._append(entries, stamps)

    def members(self) -> I64:
        return np.concatenate([np.empty(0, dtype=np.int64), *(log.members() for log in self._logs.values())])

    def reown(self, entries: I64, owners: U16) -> None:
        """Entries of this order belong to others from now on; the order of use stays."""
        moved = self._owner[entries] != owners
        if not moved.any():
            return
        entries, owners = entries[moved], owners[moved]
        every = self.members()
        self._account(entries, -1)
        self._owner[entries] = owners
        self._account(entries, 1)
        self._logs.clear()
        every = every[np.argsort(self._recency[every])]
        self._append(every, self._recency[every])
