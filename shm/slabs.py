"""Extents of the data segment: slabs assigned to size classes.

The data segment is cut into units of ``slab_bytes``.  A *slab* is a run of one or more units that holds extents of one
size; a *class* is all slabs of one size.  Models differ in chunk size but each has one, so a class never fragments.  A
slab whose extents are all free goes back to the pool of units at once, which is how memory moves between models (who
must give way is the eviction's decision, see arena.py).

A run of several units is used when extents are large, so that at most 1/16 of a slab is lost to rounding, where the
arena is large enough for it.

The slab table in the meta segment mirrors the runs, so that an adoption knows where extents can start.  Units beyond
``ready`` bytes are not handed out: their memory is still being reserved.

Invariants (`check_integrity`): the units of all slabs and the free units make up the ready units, without overlap; in
each slab used + freed + fresh = count; a class's used is the sum over its slabs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

_MAX_UNITS_PER_SLAB = 64
_MAX_WASTE = 1 / 16


def default_slab_bytes(data_bytes: int) -> int:
    """A power of two near 1/512 of the arena, between 256 KiB and 256 MiB."""
    return 1 << min(28, max(18, (data_bytes // 512).bit_length() - 1))


@dataclass(eq=False)
class Slab:
    """A run of units cut into ``count`` extents.  ``fresh`` extents were never used; freed ones wait on a stack."""

    first_unit: int
    units: int
    start: int  # byte offset of extent 0
    extent: int
    count: int
    fresh: int = 0  # extents handed out at least once
    freed: int = 0  # height of the stack
    stack: npt.NDArray[np.uint32] | None = None  # made when something is returned

    @property
    def used(self) -> int:
        return self.fresh - self.freed

    @property
    def free(self) -> int:
        return self.count - self.used

    def take(self, n: int) -> I64:
        """Offsets of up to ``n`` extents."""
        from_stack = min(n, self.freed)
        more = min(n - from_stack, self.count - self.fresh)
        numbers = np.arange(self.fresh, self.fresh + more)
        self.fresh += more
        if from_stack and self.stack is not None:
            self.freed -= from_stack
            returned = self.stack[self.freed : self.freed + from_stack].astype(np.int64)
            numbers = np.concatenate((returned, numbers)) if more else returned
        return self.start + numbers * self.extent

    def give(self, offsets: I64) -> None:
        if self.stack is None:
            self.stack = np.empty(self.count, dtype=np.uint32)
        self.stack[self.freed : self.freed + len(offsets)] = (offsets - self.start) // self.extent
        self.freed += len(offsets)


@dataclass(eq=False)
class SizeClass:
    extent: int
    units: int  # per slab
    per_slab: int
    slabs: set[Slab] = field(default_factory=set)
    partial: dict[Slab, None] = field(default_factory=dict)  # slabs with a free extent, last used last
    used: int = 0

    @property
    def free(self) -> int:
        return len(self.slabs) * self.per_slab - self.used


class Slabs:
    """The allocator.  Not thread-safe; owned by the control thread."""

    def __init__(self, data_bytes: int, slab_bytes: int, table: npt.NDArray[Any]) -> None:
        self.slab_bytes = slab_bytes
        self.units = data_bytes // slab_bytes
        self.classes: dict[int, SizeClass] = {}
        self._table = table  # of the meta segment, dtype layout.SLAB
        self._run_units, self._run_extent = table["units"], table["extent_bytes"]
        self._free = np.zeros(self.units, dtype=bool)
        self._owner: list[Slab | None] = [None] * self.units
        self._ready = 0  # units

    # ---- capacity --------------------------------------------------------------------------------------------------

    def set_ready(self, data_bytes: int) -> None:
        """Hand out units up to ``data_bytes`` from now on.  Only grows."""
        ready = min(self.units, data_bytes // self.slab_bytes)
        for unit in range(self._ready, ready):
            self._free[unit] = self._owner[unit] is None
        self._ready = max(self._ready, ready)

    @property
    def bytes_ready(self) -> int:
        return self._ready * self.slab_bytes

    @property
    def bytes_used(self) -> int:
        return sum(c.used * c.extent for c in self.classes.values())

    @property
    def bytes_free(self) -> int:
        """Upper bound of what can still be handed out without evicting."""
        return int(self._free.sum()) * self.slab_bytes + sum(c.free * c.extent for c in self.classes.values())

    def geometry(self, extent: int) -> tuple[int, int]:
        """(units, extents) per slab for this extent size; (0, 0) if it is larger than the whole data segment."""
        best, best_waste = (0, 0), 2.0
        least = -(-extent // self.slab_bytes)
        for units in range(max(1, least), min(self.units, least + _MAX_UNITS_PER_SLAB) + 1):
            run = units * self.slab_bytes
            waste = (run % extent) / run
            if waste < best_waste - 1e-9:
                best, best_waste = (units, run // extent), waste
            if waste <= _MAX_WASTE:
                break
        return best

    def size_class(self, extent: int) -> SizeClass:
        """The class of this extent size; ValueError if the arena cannot hold even one."""
        found = self.classes.get(extent)
        if found is None:
            units, per_slab = self.geometry(extent)
            if not units:
                raise ValueError(f"an extent of {extent} bytes does not fit in {self.units * self.slab_bytes} bytes")
            found = self.classes[extent] = SizeClass(extent, units, per_slab)
        return found

    def retire_class(self, extent: int) -> bool:
        """Forget a class that nobody will use; False if it still has slabs."""
        found = self.classes.get(extent)
        if found is not None and found.slabs:
            return False
        self.classes.pop(extent, None)
        return True

    # ---- taking and giving -------------------------------------------------------------------------------------------

    def take(self, cls: SizeClass, n: int) -> I64:
        """Offsets of up to ``n`` extents from the class's slabs and, while there are free units, new slabs."""
        if cls.per_slab == 1 == cls.units and not cls.partial:
            return self._take_units(cls, n)
        parts: list[I64] = []
        while n > 0 and (cls.partial or self.grow(cls)):
            slab = next(reversed(cls.partial))
            part = slab.take(n)
            n -= len(part)
            cls.used += len(part)
            parts.append(part)
            if not slab.free:
                del cls.partial[slab]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _take_units(self, cls: SizeClass, n: int) -> I64:
        """`take` where a unit is a slab is an extent: many at once."""
        units = np.flatnonzero(self._free)[:n]
        for unit in units.tolist():
            slab = Slab(unit, 1, unit * self.slab_bytes, cls.extent, 1, fresh=1)
            self._owner[unit] = slab
            cls.slabs.add(slab)
        self._free[units] = False
        self._run_units[units] = 1
        self._run_extent[units] = cls.extent
        cls.used += len(units)
        return units * self.slab_bytes

    def give(self, offsets: I64) -> None:
        """Take back extents that `take` handed out.  A slab that becomes empty goes back to the pool."""
        if not len(offsets):
            return
        units = offsets // self.slab_bytes
        if units[0] == units[-1] and (units == units[0]).all():
            self._give_to(self._owner[int(units[0])], offsets)
            return
        by_slab: dict[Slab | None, list[I64]] = {}
        for unit in np.unique(units):
            by_slab.setdefault(self._owner[int(unit)], []).append(offsets[units == unit])
        for slab, parts in by_slab.items():
            self._give_to(slab, np.concatenate(parts))

    def _give_to(self, slab: Slab | None, offsets: I64) -> None:
        if slab is None:
            raise AssertionError(f"slabs: extent at {int(offsets[0])} is in no slab")
        cls = self.classes[slab.extent]
        cls.used -= len(offsets)
        if slab.used == len(offsets):
            self._retire(cls, slab)
            return
        slab.give(offsets)
        cls.partial.setdefault(slab)

    def grow(self, cls: SizeClass) -> bool:
        """Make one more slab for the class out of free units; False if there is no run of them."""
        unit = self._find_run(cls.units)
        if unit < 0:
            return False
        self._install(cls, unit)
        return True

    def _find_run(self, units: int) -> int:
        if units == 1:
            at = int(self._free.argmax()) if self.units else 0
            return at if self.units and self._free[at] else -1
        sums = np.concatenate(([0], np.cumsum(self._free)))
        windows = np.flatnonzero(sums[units:] - sums[:-units] == units)
        return int(windows[0]) if len(windows) else -1

    def _install(self, cls: SizeClass, unit: int) -> Slab:
        slab = Slab(unit, cls.units, unit * self.slab_bytes, cls.extent, cls.per_slab)
        self._free[unit : unit + cls.units] = False
        self._owner[unit : unit + cls.units] = [slab] * cls.units
        self._run_units[unit] = cls.units
        self._run_extent[unit] = cls.extent
        cls.slabs.add(slab)
        cls.partial[slab] = None
        return slab

    def _retire(self, cls: SizeClass, slab: Slab) -> None:
        self._run_extent[slab.first_unit] = 0
        cls.slabs.discard(slab)
        cls.partial.pop(slab, None)
        self._owner[slab.first_unit : slab.first_unit + slab.units] = [None] * slab.units
        last = min(slab.first_unit + slab.units, self._ready)
        self._free[slab.first_unit : last] = True

    # ---- adoption ----------------------------------------------------------------------------------------------------

    def adopt_runs(self) -> None:
        """Rebuild slabs (all extents still free) from the slab table.  A run that overlaps another, or that this
        geometry would not have made, is forgotten: the entries in it will not verify."""
        unit = 0
        while unit < self.units:
            extent, units = int(self._table[unit]["extent_bytes"]), int(self._table[unit]["units"])
            if extent and extent % 4096 == 0 and units and unit + units <= self.units:
                expected = self.geometry(extent)
                if expected[0] == units and not self._table[unit + 1 : unit + units]["extent_bytes"].any():
                    self._install(self.size_class(extent), unit)
                    unit += units
                    continue
            self._table[unit]["extent_bytes"] = 0
            unit += 1

    def slots_of(self, offsets: I64, extents: I64) -> npt.NDArray[np.bool_]:
        """True where an extent of that size can start at that offset, by the runs that exist."""
        good = (offsets >= 0) & (offsets < self.units * self.slab_bytes)
        units = np.where(good, offsets // self.slab_bytes, 0)
        start = np.full(self.units + 1, -1, dtype=np.int64)
        size = np.zeros(self.units + 1, dtype=np.int64)
        count = np.zeros(self.units + 1, dtype=np.int64)
        for cls in self.classes.values():
            for slab in cls.slabs:
                run = slice(slab.first_unit, slab.first_unit + slab.units)
                start[run], size[run], count[run] = slab.start, slab.extent, slab.count
        within = offsets - start[units]
        good &= (size[units] > 0) & (size[units] == extents)
        safe = np.maximum(size[units], 1)
        result: npt.NDArray[np.bool_] = good & (within % safe == 0) & (within // safe < count[units])
        return result

    def extent_sizes(self, offsets: I64) -> I64:
        """Bytes of the extents that start at these offsets."""
        owners = [self._owner[int(unit)] for unit in offsets // self.slab_bytes]
        return np.array([owner.extent if owner else 0 for owner in owners], dtype=np.int64)

    def adopt_extents(self, offsets: I64) -> None:
        """Mark these extents used.  They passed `slots_of` and are distinct.  Empty slabs go back to the pool."""
        units = offsets // self.slab_bytes
        order = np.argsort(units, kind="stable")
        offsets, units = offsets[order], units[order]
        edges = np.flatnonzero(np.diff(units)) + 1
        taken: dict[Slab, list[I64]] = {}
        for part in np.split(offsets, edges) if len(offsets) else []:
            slab = self._owner[int(part[0]) // self.slab_bytes]
            assert slab is not None
            taken.setdefault(slab, []).append(part)
        for cls in list(self.classes.values()):
            for slab in list(cls.slabs):
                if slab not in taken:
                    self._retire(cls, slab)
                    continue
                numbers = (np.concatenate(taken[slab]) - slab.start) // slab.extent
                slab.fresh = int(numbers.max()) + 1
                hole = np.ones(slab.fresh, dtype=bool)
                hole[numbers] = False
                holes = np.flatnonzero(hole)[::-1]
                if len(holes):
                    slab.stack = np.empty(slab.count, dtype=np.uint32)
                    slab.stack[: len(holes)] = holes
                    slab.freed = len(holes)
                cls.used += slab.used
                if not slab.free:
                    cls.partial.pop(slab, None)

    def check_integrity(self, offsets: I64, extents: I64) -> None:
        """Raise unless exactly these extents are in use."""
        seen = 0
        for cls in self.classes.values():
            used = sum(s.used for s in cls.slabs)
            if used != cls.used or any(not 0 <= s.freed <= s.fresh <= s.count for s in cls.slabs):
                raise AssertionError(f"slabs: class {cls.extent} counts {cls.used} used, its slabs {used}")
            if any((s.free > 0) != (s in cls.partial) for s in cls.slabs):
                raise AssertionError(f"slabs: class {cls.extent} lost track of a partial slab")
            held = int((extents == cls.extent).sum())
            if held != used:
                raise AssertionError(f"slabs: class {cls.extent} has {used} used extents, {held} are accounted for")
            seen += sum(s.units for s in cls.slabs)
        if len(np.unique(offsets)) != len(offsets) or not self.slots_of(offsets, extents).all():
            raise AssertionError("slabs: an extent is used twice or lies outside its slab")
        if seen + int(self._free.sum()) != max(self._ready, 0) and self._ready == self.units:
            raise AssertionError(f"slabs: {seen} units in slabs + {int(self._free.sum())} free != {self._ready} ready")
