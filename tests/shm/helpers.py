"""An arena in ordinary memory, with no daemon and no segments around it."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np

from kvkeep.shm import layout
from kvkeep.shm.arena import Arena
from kvkeep.shm.namespaces import NamespaceTable
from kvkeep.shm.recovery import Adoption, adopt
from kvkeep.shm.slabs import Slabs
from kvkeep.shm.table import EntryTable


class Memory:
    """The bytes of a meta segment; `arena` builds an Arena over them, `crash` a fresh one over a copy."""

    def __init__(self, *, units: int = 16, slab_bytes: int = 1 << 16, capacity: int = 512) -> None:
        self.units, self.slab_bytes, self.capacity = units, slab_bytes, capacity
        self.entries = np.zeros(capacity * layout.ENTRY_BYTES, dtype=np.uint8)
        self.namespaces = np.zeros(layout.MAX_NAMESPACES * layout.NAMESPACE_BYTES, dtype=np.uint8)
        self.slabs = np.zeros(layout.MAX_SLABS, dtype=layout.SLAB)

    def arena(self, *, watermark: float = 1.0, ratio: float = 0.05, policy: str = "LRU") -> Arena:
        slabs = Slabs(self.units * self.slab_bytes, self.slab_bytes, self.slabs)
        arena = Arena(
            EntryTable(self.entries),
            NamespaceTable(self.namespaces),
            slabs,
            watermark=watermark,
            ratio=ratio,
            policy=policy,
        )
        slabs.set_ready(self.units * self.slab_bytes)
        arena.reserving = False
        return arena

    def crash(self, *, ghosts: bool = False) -> tuple[Arena, Adoption, Memory]:
        """What a daemon started after a kill right now would adopt."""
        copy = Memory(units=self.units, slab_bytes=self.slab_bytes, capacity=self.capacity)
        copy.entries[:] = self.entries
        copy.namespaces[:] = self.namespaces
        copy.slabs[:] = self.slabs
        arena = copy.arena()
        return arena, adopt(arena, ghosts=ghosts), copy


def chain(name: object, n: int, start: int = 0) -> np.ndarray:
    """Keys (n, 4) of the chain ``name``; two chains share nothing unless they share a name."""
    text = b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(start, start + n))
    return np.frombuffer(text, dtype=np.uint64).reshape(-1, 4)


def store(arena: Arena, namespace, keys: np.ndarray, start: int = 0) -> int:  # type: ignore[no-untyped-def]
    """Store what is missing, at once; returns how many chunks were sealed."""
    grant = arena.reserve(namespace, keys, start, 0)
    return int((arena.commit(grant.granted, 0, np.ones(len(grant.granted), dtype=bool), None) == 0).sum())


def check(arena: Arena, references: Counter | None = None, writing: Counter | None = None) -> None:
    arena.check_integrity(references or Counter(), writing or Counter())


def prefix_length(arena: Arena, namespace, keys: np.ndarray) -> int:  # type: ignore[no-untyped-def]
    return len(arena.prefix(namespace, keys).entries)
