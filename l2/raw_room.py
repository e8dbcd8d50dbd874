"""Rows, slots, journal and order under one lock: how objects get room, and how they leave.

    leave:  hide (nobody finds it) + DROP queued ─► journal page written ─► slot free   (of a row being read: later)

A medium above the watermark shrinks until ratio below it, some with every store, so that no store pays for all.
Room that is needed at once is made at once.  What is being read stays.  With IsolatedLRU each store first brings those
who are above their quotas back to them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import Item, TenantUse
from kvkeep.l2.catalogue import CATALOGUE
from kvkeep.l2.raw_io import Engine
from kvkeep.l2.raw_journal import Journal, assign, drops
from kvkeep.l2.raw_layout import Geometry, Records, blocks_of
from kvkeep.l2.raw_objects import Objects
from kvkeep.l2.raw_slabs import Place, SizeClass, Slabs
from kvkeep.l2.tenants import POLICY, TenantOrder, Tenants
from kvkeep.shm.recency import Clock

I64 = npt.NDArray[np.int64]

_SHRINK_STEP = 1024  # rows that one store evicts beyond what it needs itself
_ATTEMPTS = 8
_DRIFT = 1 << 20  # added to the clock at each start: headers of stores that were never acknowledged stay below
_NONE = np.empty(0, dtype=np.int64)


class Eviction:
    """``quotas``: bytes per tenant, with IsolatedLRU."""

    def __init__(self, policy: str, watermark: float, ratio: float, quotas: Mapping[str, int]) -> None:
        self.evicts, self.watermark, self.ratio = policy != "noop", watermark, ratio
        self.tells_apart, self.quotas = policy == POLICY, quotas


class Room:
    """``mutex`` guards everything in here; methods say whether they take it."""

    def __init__(self, geometry: Geometry, engine: Engine, eviction: Eviction, flush: bool, expected: int = 0) -> None:
        self.geometry, self.engine, self.eviction = geometry, engine, eviction
        self.mutex = threading.Lock()
        self.counters: Counter[str] = Counter()
        most = geometry.size // (2 * geometry.block)
        self.objects = Objects(min(most, max(1 << 24, geometry.size >> 16)), expected)
        self.tenants = Tenants(eviction.quotas) if eviction.tells_apart else None
        self._owner = np.zeros(self.objects.capacity if self.tenants else 0, dtype=np.uint16)
        self.slabs = Slabs(geometry, self.objects.recency, self.tenants, self._owner)
        self.journal = Journal(geometry, engine, self.mutex, self._snapshot, flush)
        self.clock = Clock()
        self.touched = np.zeros(geometry.slabs, dtype=bool)  # order changed since the table was written
        self._reading: dict[int, int] = {}
        self._leaving: set[int] = set()  # hidden while being read; their slots wait for the readers
        self._room_lock = threading.Lock()
        self._shrinking = False

    def start_clock(self, now: int) -> None:
        self.clock.now = max(self.clock.now, now + _DRIFT)

    def _snapshot(self, slab: int) -> tuple[int, int, Records]:
        rows = self.slabs.rows(slab)
        self.touched[slab] = False
        return int(self.slabs.blocks[slab]), int(self.slabs.generation[slab]), self.objects.pack(rows)

    # Order

    def touch(self, rows: I64) -> None:
        """Mutex held.  Rows of a chain, root first."""
        if not len(rows):
            return
        stamps = self.clock.stamps(len(rows))
        slabs = self.objects.places(rows)[0]
        self.touched[slabs] = True
        kept = self.objects.kept(rows)
        if kept.any():
            self.objects.recency[rows[kept]] = stamps[kept]
            rows, stamps, slabs = rows[~kept], stamps[~kept], slabs[~kept]
        if self.tenants is not None:
            self._own(rows[self.objects.recency[rows] == 0])
        blocks = self.slabs.blocks[slabs]
        for number in np.unique(blocks).tolist():
            size_class = self.slabs.classes[number]
            mine = blocks == number
            size_class.order.touch(rows[mine], stamps[mine])
            for _ in range(1 + len(rows) // 1024):
                # The log may be a quarter longer than what lives: 15 bytes an object instead of 24.
                if not size_class.order.squeeze(size_class.live * 5 // 8):
                    break

    def _evictable(self, rows: I64) -> npt.NDArray[np.bool_]:
        free = ~self.objects.kept(rows)
        if not self._reading:
            return free
        return free & ~np.isin(rows, np.fromiter(self._reading, dtype=np.int64, count=len(self._reading)))

    # Tenants

    def _own(self, rows: I64) -> None:
        """Mutex held.  Rows that are not yet in an order."""
        assert self.tenants is not None
        if len(rows):
            spaces, names = self.objects.spaces(rows), self.objects.namespaces()
            for space in np.unique(spaces).tolist():
                self._owner[rows[spaces == space]] = self.tenants.of(names[space])

    def learn(self, manifests: Mapping[bytes, bytes]) -> None:
        """Mutex not held.  Whose these namespaces are; their objects are those tenants' from now on."""
        if self.tenants is None:
            return
        with self.mutex:
            changed = {space for space, manifest in manifests.items() if self.tenants.learn(space, manifest)}
            names = self.objects.namespaces()
            numbers = [number for number, name in enumerate(names) if name in changed]
            if not numbers:
                return
            rows = self.objects.visible()
            rows = rows[np.isin(self.objects.spaces(rows), numbers) & ~self.objects.kept(rows)]
            of_space = np.array([self.tenants.of(name) for name in names], dtype=np.uint16)
            owners = of_space[self.objects.spaces(rows)]
            blocks = self.slabs.blocks[self.objects.places(rows)[0]]
            for number in np.unique(blocks).tolist():
                order = self.slabs.classes[number].order
                assert isinstance(order, TenantOrder)
                order.reown(rows[blocks == number], owners[blocks == number])

    def expect(self, items: Sequence[Item]) -> dict[int, int]:
        """Mutex not held.  What is being stored counts for its tenant from here to `settle`: bytes by tenant."""
        coming: Counter[int] = Counter()
        if self.tenants is not None:
            with self.mutex:
                for item in items:
                    size_class = self.slabs.size_class(blocks_of(len(item.payload), self.geometry.block))
                    if size_class is not None and item.key.namespace != CATALOGUE:
                        coming[self.tenants.of(item.key.namespace)] += size_class.charge
                for tenant, nbytes in coming.items():
                    self.tenants.coming[tenant] += nbytes
        return coming

    def settle(self, coming: dict[int, int]) -> None:
        """Mutex held.  They are visible, or came to nothing."""
        if self.tenants is not None:
            for tenant, nbytes in coming.items():
                self.tenants.coming[tenant] -= nbytes
        coming.clear()

    def usage_by_tenant(self) -> dict[str, TenantUse]:
        with self.mutex:
            return {} if self.tenants is None else self.tenants.usage()

    # Readers

    def pin(self, row: int) -> None:
        """Mutex held."""
        self._reading[row] = self._reading.get(row, 0) + 1

    def unpin(self, row: int) -> None:
        """Mutex held."""
        if self._reading[row] > 1:
            self._reading[row] -= 1
            return
        del self._reading[row]
        if row in self._leaving:
            self._leaving.discard(row)
            self._free(np.array([row], dtype=np.int64))
        else:
            self.slabs.released()

    # Leaving

    def hide(self, rows: I64) -> None:
        """Mutex held.  Nobody finds these any more; `journal.commit` and then `let_go` must follow.

        Rows that an order gave up are hidden in the same hold: nobody may touch or remove them in between."""
        if not len(rows):
            return
        slabs, slots = self.objects.places(rows)
        if self.tenants is not None:
            self._leave_orders(rows, slabs)
        self.objects.hide(rows)
        self.slabs.empty(slabs, slots)
        self.journal.append(drops(slabs.tolist(), slots.tolist()))

    def _leave_orders(self, rows: I64, slabs: I64) -> None:
        staying = ~self.objects.kept(rows)
        rows, blocks = rows[staying], self.slabs.blocks[slabs[staying]]
        for number in np.unique(blocks).tolist():
            self.slabs.classes[number].order.leave(rows[blocks == number])

    def let_go(self, rows: I64) -> None:
        """Mutex held.  Slots and rows are free, as soon as nobody reads them."""
        if self._reading:
            read = [row for row in rows.tolist() if row in self._reading]
            self._leaving.update(read)
            if read:
                rows = rows[~np.isin(rows, np.array(read))]
        self._free(rows)

    def _free(self, rows: I64) -> None:
        self.slabs.give(*self.objects.places(rows))
        self.objects.free(rows)

    def _finish_eviction(self, rows: I64) -> None:
        """Mutex not held; the rows are hidden.

        If the journal cannot be written the slots are free all the same: then stores fail too, and after a restart
        headers decide."""
        self.journal.commit(flush=False)
        with self.mutex:
            self.let_go(rows)
            self.counters["evicted"] += len(rows)

    # Room

    def reserve(self, size_class: SizeClass, n: int) -> list[Place]:
        """Slots for n objects, fewer if no more can be had.  Mutex not held."""
        self.evict_excess()
        self._keep_below_watermark(n * size_class.charge, n)
        with self.mutex:
            places = self._take(size_class, n)
        if len(places) < n:
            with self._room_lock:
                for _ in range(_ATTEMPTS):
                    missing = n - len(places)
                    fresh = -1
                    victims = _NONE
                    with self.mutex:
                        places += self._take(size_class, missing)
                        if len(places) == n:
                            break
                        missing = n - len(places)
                        fresh = self.slabs.spare()
                        if fresh >= 0:
                            self._assign(fresh, size_class)
                            places += self._take(size_class, missing)
                        elif self.eviction.evicts:
                            victims = self.slabs.make_room(size_class, missing, self._evictable)
                            self.hide(victims)
                    if fresh >= 0:
                        self._write_identity(fresh)
                    elif len(victims):
                        self._finish_eviction(victims)
                    else:
                        break
        return places

    def _take(self, size_class: SizeClass, n: int) -> list[Place]:
        return self.slabs.take(size_class, min(n, self.objects.rows_left))

    def _assign(self, slab: int, size_class: SizeClass) -> None:
        generation = int(self.clock.stamps(1)[0])
        self.slabs.assign(slab, size_class.blocks, generation)
        self.journal.append(assign(slab, size_class.blocks, generation))
        self.counters["slabs_assigned"] += 1

    def _write_identity(self, slab: int) -> None:
        """A scan needs to know what the slab is.  Failures show in the store that follows."""
        self.journal.checkpoint([slab])
        self.journal.write_foot(slab, int(self.slabs.blocks[slab]), int(self.slabs.generation[slab]))

    def evict_excess(self) -> None:
        """Mutex not held.  What tenants have above their quotas goes, but for what is being read."""
        while self.tenants is not None and self.tenants.most_above().tenant >= 0:
            with self._room_lock:
                with self.mutex:
                    victims = self.slabs.excess(_SHRINK_STEP, self._evictable)
                    self.hide(victims)
                if not len(victims):
                    return
                self._finish_eviction(victims)
                self.counters["evicted_above_quota"] += len(victims)

    def _keep_below_watermark(self, coming: int, n: int) -> None:
        limit = self.slabs.bytes_limit
        if not self.eviction.evicts:
            return
        above = self.slabs.bytes_used + coming > self.eviction.watermark * limit
        if not above and not self._shrinking and self.objects.rows_left > 4 * n:
            return
        with self._room_lock:
            goal = int((self.eviction.watermark - self.eviction.ratio) * limit) - coming
            with self.mutex:
                above = self.slabs.bytes_used + coming > self.eviction.watermark * limit
                self._shrinking = (self._shrinking or above) and self.slabs.bytes_used > goal
                if self.objects.rows_left <= 4 * n:
                    goal = self.slabs.bytes_used - 4 * coming
                elif not self._shrinking:
                    return
                oldest = self.slabs.oldest(max(0, goal), self._evictable, max(_SHRINK_STEP, 2 * n))
                victims = np.concatenate([_NONE, *oldest])
                self.hide(victims)
            if len(victims):
                self._finish_eviction(victims)

    # Checks

    def check_integrity(self) -> None:
        """When nothing is running.  Raises if a slot is lost or used twice, or a count is wrong."""
        with self.mutex:
            rows = self.objects.visible()
            self.objects.check_integrity()
            reserved = self.slabs.check_integrity(self.objects.places(rows), rows)
            self._check_tenants(rows[~self.objects.kept(rows)])
            if reserved or self._reading or self._leaving:
                raise AssertionError(f"{reserved} slots reserved, {len(self._reading)} rows read: nothing is running")

    def _check_tenants(self, rows: I64) -> None:
        if self.tenants is None:
            return
        blocks = self.slabs.blocks[self.objects.places(rows)[0]]
        charges = np.array([self.slabs.classes[number].charge for number in blocks.tolist()], dtype=np.int64)
        expected = [int(charges[self._owner[rows] == tenant].sum()) for tenant in range(len(self.tenants.used))]
        if expected != self.tenants.used or any(self.tenants.coming):
            raise AssertionError(f"tenants have {expected} bytes, counted {self.tenants.used} + {self.tenants.coming}")
        ordered = sorted(row for c in self.slabs.classes.values() for row in c.order.members().tolist())
        if ordered != rows.tolist():
            raise AssertionError(f"{len(ordered)} rows are in an order, {len(rows)} are visible")
