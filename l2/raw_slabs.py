"""Which slab has which class, which slot holds which row, and who goes when room is needed.

    slot:   free ──take──► reserved ──fill──► holds a row ──empty──► reserved ──give──► free

A slot on its way in or out is *reserved*: nobody else gets it, and a table written meanwhile does not list it.  On the
way out it stays so until the journal has the removal, so that after a crash the index never names a slot that was
already being overwritten.

A slab without rows goes to whichever class asks next.  Room is made by the order of recency.  Each class has its own
order over one clock, so ages compare: the class with the oldest object gives.  If that is another class than the one
that needs room, it gives its emptiest slab as a whole.

With IsolatedLRU the orders of all classes share one account of tenants (tenants.py), and who is above his quota gives
before age is looked at.

Bytes are counted as slots, with their share of the slab's table and rounding: a full medium is full at 100 %.

Not thread-safe: everything here is called under the adapter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.raw_layout import Geometry
from kvkeep.l2.tenants import TenantOrder, Tenants
from kvkeep.shm.recency import NEVER, LruOrder

I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Evictable = Callable[[I64], npt.NDArray[np.bool_]]

_RESERVED = np.uint32(0xFFFFFFFF)
_AT_ONCE = 64  # rows that one class gives before ages are compared again


class Place(NamedTuple):
    slab: int
    slot: int
    blocks: int
    generation: int


@dataclass(eq=False)
class SizeClass:
    blocks: int
    slots: int  # of one slab
    charge: int  # bytes that one slot counts as
    order: LruOrder | TenantOrder
    live: int = 0  # rows in its slots
    slabs: set[int] = field(default_factory=set)
    roomy: dict[int, None] = field(default_factory=dict)  # with a free slot; used as an ordered set


class Slabs:
    """See the module."""

    def __init__(
        self, geometry: Geometry, recency: U64, tenants: Tenants | None = None, owner: U16 | None = None
    ) -> None:
        """Columns by row; ``owner``, the tenants' numbers, is there if ``tenants`` are told apart."""
        self.geometry = geometry
        self._recency = recency
        self._tenants, self._owner = tenants, owner
        n = geometry.slabs
        self.blocks = np.zeros(n, dtype=np.int32)  # class, 0 = none
        self.generation = np.zeros(n, dtype=np.uint64)
        self.busy = np.zeros(n, dtype=np.int64)  # slots not free
        self._holds: list[U32 | None] = [None] * n  # row + 1 per slot
        self._unused = list(range(n - 1, -1, -1))
        self.classes: dict[int, SizeClass] = {}
        self.bytes_used = 0
        self.bytes_limit = n * geometry.slab_bytes

    def size_class(self, blocks: int) -> SizeClass | None:
        """None = no slab is large enough."""
        found = self.classes.get(blocks)
        if found is None:
            slots = self.geometry.slots(blocks)
            if not slots:
                return None
            charge = self.geometry.slab_bytes // slots
            found = SizeClass(blocks, slots, charge, self._ordered(charge))
            self.classes[blocks] = found
        return found

    def _ordered(self, charge: int) -> LruOrder | TenantOrder:
        if self._tenants is None or self._owner is None:
            return LruOrder(self._recency)
        return TenantOrder(self._recency, self._owner, self._tenants, lambda rows: np.full(len(rows), charge))

    def assign(self, slab: int, blocks: int, generation: int) -> None:
        """Give an empty slab its class."""
        if self.busy[slab]:
            raise AssertionError(f"slab {slab} changes its class with {self.busy[slab]} slots in use")
        old = self.classes.get(int(self.blocks[slab]))
        if old is not None:
            old.slabs.discard(slab)
            old.roomy.pop(slab, None)
        new = self.size_class(blocks)
        assert new is not None
        self.blocks[slab], self.generation[slab] = blocks, generation
        self._holds[slab] = np.zeros(new.slots, dtype=np.uint32)
        new.slabs.add(slab)
        new.roomy[slab] = None

    def set_unused(self, used: set[int]) -> None:
        """After recovery: the slabs that have no class."""
        self._unused = [s for s in range(self.geometry.slabs - 1, -1, -1) if s not in used]

    def take(self, size_class: SizeClass, n: int) -> list[Place]:
        """Up to n free slots of slabs that the class has."""
        places: list[Place] = []
        while len(places) < n and size_class.roomy:
            slab = next(iter(size_class.roomy))
            holds = self._rows(slab)
            free = np.flatnonzero(holds == 0)[: n - len(places)]
            holds[free] = _RESERVED
            self.busy[slab] += len(free)
            self.bytes_used += len(free) * size_class.charge
            if self.busy[slab] == size_class.slots:
                del size_class.roomy[slab]
            generation = int(self.generation[slab])
            places += [Place(slab, slot, size_class.blocks, generation) for slot in free.tolist()]
        return places

    def spare(self) -> int:
        """A slab that has no class, or of whose slots none is in use; -1 = there is none."""
        if self._unused:
            return self._unused.pop()
        empty = np.flatnonzero(self.busy == 0)
        return int(empty[0]) if len(empty) else -1

    def fill(self, slabs: I64, slots: I64, rows: I64) -> None:
        """Reserved slots now hold rows."""
        for slab, slot, row in zip(slabs.tolist(), slots.tolist(), rows.tolist(), strict=True):
            self._rows(slab)[slot] = row + 1
            self.classes[int(self.blocks[slab])].live += 1

    def adopt(self, slab: int, slots: I64, rows: I64) -> None:
        """Free slots hold rows: for recovery."""
        size_class = self.classes[int(self.blocks[slab])]
        holds = self._rows(slab)
        holds[slots] = rows + 1
        size_class.live += len(slots)
        self.busy[slab] = np.count_nonzero(holds)
        self.bytes_used += len(slots) * size_class.charge
        if self.busy[slab] == size_class.slots:
            size_class.roomy.pop(slab, None)

    def empty(self, slabs: I64, slots: I64) -> None:
        """The rows go; the slots stay reserved."""
        for slab, slot in zip(slabs.tolist(), slots.tolist(), strict=True):
            self._rows(slab)[slot] = _RESERVED
            self.classes[int(self.blocks[slab])].live -= 1

    def give(self, slabs: I64, slots: I64) -> None:
        """Reserved slots are free."""
        for slab, slot in zip(slabs.tolist(), slots.tolist(), strict=True):
            self._rows(slab)[slot] = 0
            self.busy[slab] -= 1
            size_class = self.classes[int(self.blocks[slab])]
            self.bytes_used -= size_class.charge
            size_class.roomy[slab] = None

    def rows(self, slab: int) -> I64:
        """Rows that the slab holds, by slot."""
        held = self._holds[slab]
        if held is None:
            return np.empty(0, dtype=np.int64)
        rows: I64 = held[(held != 0) & (held != _RESERVED)].astype(np.int64) - 1
        return rows

    def holder(self, slab: int, slot: int) -> int:
        """The row in a slot, or -1."""
        value = int(self._rows(slab)[slot])
        return value - 1 if value != int(_RESERVED) else -1

    def _rows(self, slab: int) -> U32:
        rows = self._holds[slab]
        assert rows is not None
        return rows

    # Who goes

    def order_of(self, slab: int) -> LruOrder | TenantOrder:
        return self.classes[int(self.blocks[slab])].order

    def released(self) -> None:
        for size_class in self.classes.values():
            size_class.order.released()

    def _by_age(self) -> list[SizeClass]:
        aged = [(size_class.order.oldest(), size_class) for size_class in self.classes.values()]
        return [c for age, c in sorted(((a, c) for a, c in aged if a), key=lambda pair: pair[0])]

    def oldest(self, target: int, evictable: Evictable, most: int) -> Iterator[I64]:
        """Up to ``most`` rows to evict until ``target`` bytes would be used, about in their order over all classes."""
        excess = self.bytes_used - target
        for size_class, rows in self._above(most, evictable):
            excess -= len(rows) * size_class.charge
            most -= len(rows)
            yield rows
        while excess > 0 and most > 0:
            for size_class in self._by_age():
                rows = size_class.order.pop(min(most, -(-excess // size_class.charge), _AT_ONCE), evictable)
                if len(rows):
                    excess -= len(rows) * size_class.charge
                    most -= len(rows)
                    yield rows
                    break
            else:
                return

    def make_room(self, wanted: SizeClass, n: int, evictable: Evictable) -> I64:
        """Rows to evict so that ``wanted`` gets slots, at best n of them; none = nothing can go now."""
        above = self.excess(max(n, _AT_ONCE), evictable)
        if len(above):
            return above
        for size_class in self._by_age():
            if size_class is wanted:
                rows = size_class.order.pop(n, evictable)
            else:
                rows = self._whole_slab(size_class, evictable)
            if len(rows):
                return rows
        return np.empty(0, dtype=np.int64)

    def excess(self, most: int, evictable: Evictable) -> I64:
        """Up to ``most`` rows of tenants that are above their quotas, each tenant's oldest over all classes first."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(rows for _, rows in self._above(most, evictable))])

    def _above(self, most: int, evictable: Evictable) -> Iterator[tuple[SizeClass, I64]]:
        barren: set[int] = set()  # tenants of whom nothing can go now
        while most > 0 and self._tenants is not None:
            tenant, over = self._tenants.most_above(barren)
            if tenant < 0:
                break
            orders = ((c.order, c.blocks) for c in self.classes.values())
            ages = ((o.candidate_of(tenant), blocks) for o, blocks in orders if isinstance(o, TenantOrder))
            first = sorted(age for age in ages if age[0])[:2]
            if not first:
                barren.add(tenant)
                continue
            size_class, before = self.classes[first[0][1]], first[1][0] if len(first) > 1 else NEVER
            assert isinstance(size_class.order, TenantOrder)
            n = min(most, max(1, -(-over // size_class.charge)))
            rows = size_class.order.pop_of(tenant, n, evictable, before)
            if not len(rows) and size_class.order.candidate_of(tenant) == first[0][0]:
                barren.add(tenant)
            most -= len(rows)
            if len(rows):
                yield size_class, rows

    def _whole_slab(self, size_class: SizeClass, evictable: Evictable) -> I64:
        for slab in sorted(size_class.slabs, key=lambda s: int(self.busy[s])):
            rows = self.rows(slab)
            if len(rows) == self.busy[slab] and self._recency[rows].all() and evictable(rows).all():
                size_class.order.leave(rows)
                self._recency[rows] = 0
                return rows
        return np.empty(0, dtype=np.int64)

    def check_integrity(self, places: tuple[I64, I64], rows: I64) -> int:
        """Raise unless the visible rows and the slots name each other.  Returns how many slots are reserved."""
        used = reserved = held_rows = 0
        for slab, held in enumerate(self._holds):
            if held is None:
                continue
            size_class = self.classes[int(self.blocks[slab])]
            busy = int(np.count_nonzero(held))
            if busy != self.busy[slab] or (busy < size_class.slots) != (slab in size_class.roomy):
                raise AssertionError(f"slab {slab}: {busy} slots are busy, counted {self.busy[slab]}")
            used += busy * size_class.charge
            here = int(np.count_nonzero(held == _RESERVED))
            reserved += here
            held_rows += busy - here
        if used != self.bytes_used:
            raise AssertionError(f"{used} bytes are used, counted {self.bytes_used}")
        for slab, slot, row in zip(places[0].tolist(), places[1].tolist(), rows.tolist(), strict=True):
            if self.holder(slab, slot) != row:
                raise AssertionError(f"row {row} says slab {slab} slot {slot}, which holds {self.holder(slab, slot)}")
        if held_rows != len(rows):
            raise AssertionError(f"{held_rows} slots hold rows, {len(rows)} rows are visible")
        if len(self._unused) + sum(len(c.slabs) for c in self.classes.values()) != self.geometry.slabs:
            raise AssertionError(f"{len(self._unused)} slabs without a class do not add up to {self.geometry.slabs}")
        return reserved
