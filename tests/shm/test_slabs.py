from __future__ import annotations

import random

import numpy as np
import pytest

from kvkeep.shm.layout import MAX_SLABS, SLAB
from kvkeep.shm.slabs import Slabs, default_slab_bytes


def make(units: int = 32, slab_bytes: int = 1 << 16) -> Slabs:
    slabs = Slabs(units * slab_bytes, slab_bytes, np.zeros(MAX_SLABS, dtype=SLAB))
    slabs.set_ready(units * slab_bytes)
    return slabs


def test_extents_are_never_handed_out_twice_and_all_come_back(seed: int) -> None:
    rng = random.Random(seed)
    slabs = make()
    held: dict[int, int] = {}
    for _ in range(400):
        extent = rng.choice([4096, 12288, 20480, 65536, 4096 * 23])
        cls = slabs.size_class(extent)
        if rng.random() < 0.6:
            for offset in slabs.take(cls, rng.randint(1, 30)).tolist():
                assert offset not in held
                held[offset] = extent
        else:
            back = rng.sample(sorted(held), min(len(held), rng.randint(1, 40)))
            slabs.give(np.array(back, dtype=np.int64))
            for offset in back:
                del held[offset]
        offsets = np.array(sorted(held), dtype=np.int64)
        sizes = np.array([held[o] for o in sorted(held)], dtype=np.int64)
        slabs.check_integrity(offsets, sizes)
        assert slabs.extent_sizes(offsets).tolist() == sizes.tolist()
        ends = offsets + sizes
        assert (ends[:-1] <= offsets[1:]).all()
    slabs.give(np.array(sorted(held), dtype=np.int64))
    assert slabs.bytes_used == 0
    assert slabs.bytes_free == 32 << 16


def test_memory_given_back_by_one_model_serves_another() -> None:
    slabs = make(units=8)
    all_small = slabs.take(slabs.size_class(4096), 1000)
    assert len(all_small) == 8 * 16
    large = slabs.size_class(65536)
    assert len(slabs.take(large, 1)) == 0
    slabs.give(all_small[all_small < 3 << 16])
    assert len(slabs.take(large, 8)) == 3


def test_units_are_handed_out_only_when_their_memory_is_ready() -> None:
    slabs = Slabs(8 << 16, 1 << 16, np.zeros(MAX_SLABS, dtype=SLAB))
    cls = slabs.size_class(65536)
    assert len(slabs.take(cls, 8)) == 0
    slabs.set_ready((3 << 16) + 100)
    assert slabs.take(cls, 8).max() == 2 << 16
    slabs.set_ready(8 << 16)
    assert len(slabs.take(cls, 8)) == 5


@pytest.mark.parametrize("extent", [4096, 4096 * 9, 4096 * 100, 40 << 20, 80 << 20, 132 << 20])
def test_rounding_loses_little_in_a_large_arena(extent: int) -> None:
    data = 64 << 30
    slab_bytes = default_slab_bytes(data)
    slabs = Slabs(data, slab_bytes, np.zeros(MAX_SLABS, dtype=SLAB))
    units, count = slabs.geometry(extent)
    assert count * extent >= units * slab_bytes * 0.9


def test_an_extent_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        make(units=2).size_class(3 << 16)


def test_adopted_runs_and_extents_equal_the_original(seed: int) -> None:
    rng = random.Random(seed)
    slabs = make()
    held: dict[int, int] = {}
    for _ in range(60):
        extent = rng.choice([4096, 12288, 65536, 4096 * 23])
        held.update(dict.fromkeys(slabs.take(slabs.size_class(extent), rng.randint(1, 20)).tolist(), extent))
        back = rng.sample(sorted(held), len(held) // 3)
        slabs.give(np.array(back, dtype=np.int64))
        for offset in back:
            del held[offset]
    other = Slabs(32 << 16, 1 << 16, slabs._table.copy())
    other.adopt_runs()
    other.set_ready(32 << 16)
    offsets = np.array(sorted(held), dtype=np.int64)
    sizes = np.array([held[o] for o in sorted(held)], dtype=np.int64)
    assert other.slots_of(offsets, sizes).all()
    assert not other.slots_of(offsets + 4096, np.full(len(offsets), 1 << 20)).any()
    other.adopt_extents(offsets)
    other.check_integrity(offsets, sizes)
    taken = other.take(other.size_class(4096), 10_000)
    assert not np.isin(taken, offsets).any()
