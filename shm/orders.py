"""Who goes next: one eviction order per size class, all by the configured policy.

Classes compete for slabs, so their ages are compared here (the stamps come from one clock); within a class the policy
decides.  A policy of a third party is fenced in (guard.py): when it breaks its promises LRU goes on, and `trouble` says
so.  IsolatedLRU also knows whose chunks they are and what each tenant may keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kvkeep.shm.guard import Guarded
from kvkeep.shm.isolated import IsolatedLru
from kvkeep.shm.namespaces import Namespace, NamespaceTable
from kvkeep.shm.policies import POLICIES, Order, eviction_policy
from kvkeep.shm.recency import Clock, Evictable, LruOrder
from kvkeep.shm.table import EntryTable

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Orders:
    """``quotas``: bytes per tenant, of each size of chunk.  ``resting``: entries that are in use but in no order."""

    def __init__(
        self,
        policy: str,
        table: EntryTable,
        namespaces: NamespaceTable,
        counters: Counter[str],
        *,
        quotas: Mapping[str, int],
        resting: Callable[[], I64],
    ) -> None:
        self.clock = Clock()
        self.trouble = ""  # why it is not the configured policy that decides
        self._policy = eviction_policy(policy)
        self._trusted = policy in POLICIES
        self.evicts = bool(getattr(self._policy, "evicts", True))
        self.has_quotas = bool(quotas)
        self._quotas = dict(quotas)
        self._table, self._namespaces, self._counters = table, namespaces, counters
        self._resting = resting
        self._orders: dict[int, Order] = {}  # by extent size

    def of(self, extent: int) -> Order:
        order = self._orders.get(extent)
        if order is None:
            order = self._orders[extent] = self._made(extent)
        return order

    def __iter__(self) -> Iterator[Order]:
        return iter(self._orders.values())

    def retire(self, extent: int) -> None:
        """Nobody has chunks of this size any more."""
        self._orders.pop(extent, None)

    # ---- what happens to entries -------------------------------------------------------------------------------------

    def touch(self, namespace: Namespace, chain: I64, *, read: bool) -> None:
        """Entries of one chain, root first, become the most recent ones.  ``read``: found, as opposed to stored."""
        order = self.of(namespace.extent_bytes)
        tenant = self._tenant_in(order, namespace)
        order.touch(chain, self.clock.stamps(len(chain)), read=read, tenant=tenant)

    def released(self) -> None:
        """References were lowered: entries that could not go may go now."""
        for order in self._orders.values():
            order.released()

    def leave(self, entries: I64) -> None:
        """For entries that go, but not by `pop`."""
        extents = self._table.extent_bytes[entries]
        for extent in np.unique(extents):
            self.of(int(extent)).leave(entries[extents == extent])

    def adopt(self, extent: int, entries: I64, stamps: U64) -> None:
        """What an earlier daemon left in this class, least recent first."""
        order = self.of(extent)
        if not isinstance(order, IsolatedLru):
            order.adopt(entries, stamps)
            return
        spaces = self._table.namespace[entries]
        tenants = {int(i): self._tenant_in(order, self._namespaces.get(int(i))) for i in np.unique(spaces)}
        owners = np.array([tenants[i] for i in spaces.tolist()], dtype=np.int64)
        for tenant in np.unique(owners):
            mine = owners == tenant
            order.adopt(entries[mine], stamps[mine], int(tenant))

    # ---- who goes ----------------------------------------------------------------------------------------------------

    def by_age(self) -> list[int]:
        """Size classes that evict, the one with the least recent entry first."""
        if len(self._orders) == 1:
            return [extent for extent, order in self._orders.items() if order.evicts]
        stamps = {extent: order.oldest() for extent, order in self._orders.items() if order.evicts}
        return sorted((extent for extent, stamp in stamps.items() if stamp), key=stamps.__getitem__)

    def pop_excess(self, most: int, evictable: Evictable) -> tuple[I64, int]:
        """Up to ``most`` entries that tenants hold above their quotas, all of one size, which is returned with them."""
        for extent, order in self._orders.items():
            if isinstance(order, IsolatedLru) and (over := order.excess()):
                victims = order.pop_excess(min(most, over), evictable)
                if len(victims):
                    return victims, extent
        return np.empty(0, dtype=np.int64), 0

    def squeeze(self, used_of: Callable[[int], int]) -> bool:
        """One bounded step of log compaction.  ``used_of`` an extent size: entries.  True = there is more to do."""
        return any(order.squeeze(used_of(extent)) for extent, order in self._orders.items())

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _tenant_in(self, order: Order, namespace: Namespace | None) -> int:
        if not isinstance(order, IsolatedLru) or namespace is None or not namespace.tenant:
            return 0
        try:
            return order.tenant(namespace.tenant)
        except ValueError:  # too many: those beyond share what the nameless have
            self._counters["tenants_refused"] += 1
            return 0

    def _made(self, extent: int) -> Order:
        table = self._table
        if self._trusted:
            order = self._policy(table.recency, table.keys)
            if isinstance(order, IsolatedLru):
                for name, nbytes in self._quotas.items():
                    order.set_quota(name, nbytes // extent)
            return order
        if self.trouble:
            return LruOrder(table.recency)

        def members() -> I64:
            used = np.setdiff1d(table.used(), self._resting())
            mine: I64 = used[table.extent_bytes[used] == extent]
            return mine

        def tell(trouble: str) -> None:
            self.trouble = trouble

        return Guarded(
            self._policy,
            table.recency,
            table.keys,
            members=members,
            belongs=lambda entries: np.asarray(table.extent_bytes[entries] == extent),
            tell=tell,
        )

    def members(self) -> I64:
        """Every entry that is in an order, for checks."""
        every = [order.members() for order in self._orders.values()]
        return np.concatenate(every) if every else np.empty(0, dtype=np.int64)
