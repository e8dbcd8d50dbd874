"""Adoption: take over the arena of a daemon that is gone, however it went.

The frame (superblock, geometry, boot) was judged by segments.py.  Here each entry is judged by itself: it is kept if it
is SEALED, its record verifies, its namespace exists with this geometry, its extent lies where its slab can have one,
and no other entry claims the extent or the key.  Everything else is freed.  All of it is array work: about half a
second per million entries.

What clients of the old daemon may still be doing is not known, only which of them live (leases.py).  While any of these
ghosts lives, references are left as they were found, and RESERVED records stay as they are, outside the index
(*zombies*), so that their extents are not used again, not even when this daemon is killed too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.shm.arena import Arena
from kvkeep.shm.layout import SUMMED_WORDS, State
from kvkeep.shm.records import word_sums

_BLOCK = 16384  # records whose words fit the second-level cache


class Adoption(NamedTuple):
    kept: int
    dropped: int  # SEALED by their state, but something about them was wrong
    unfinished: int  # RESERVED or EVICTING when the daemon went


def adopt(arena: Arena, *, ghosts: bool = False) -> Adoption:
    """Rebuild everything private from the meta segment.  Call once, before any client attaches."""
    table = arena.table
    arena.namespaces.adopt()
    arena.slabs.adopt_runs()
    state = table.state.copy()
    sealed = np.flatnonzero(state == State.SEALED)
    keep = sealed[_verifies(arena, sealed)]
    keep = keep[_distinct(table.offset[keep])]
    keep = keep[_distinct(_fingerprints(arena, keep))]
    unfinished = np.flatnonzero((state == State.RESERVED) | (state == State.EVICTING))
    resting = _still_claimed(arena, unfinished[state[unfinished] == State.RESERVED], keep)
    kept_mask = np.zeros(table.capacity, dtype=bool)
    kept_mask[keep] = True
    kept_mask[resting] = ghosts
    offsets = table.offset[resting].astype(np.int64)
    table.adopt(kept_mask)
    arena.slabs.adopt_extents(np.concatenate((table.offset[keep].astype(np.int64), offsets)))
    if ghosts:
        arena.resting.keep_zombies(resting)
    elif len(resting):
        arena.resting.quarantine(offsets, int(arena.slabs.extent_sizes(offsets).sum()), arena.now)
    for at in range(0, len(keep), _BLOCK * 4):
        part = keep[at : at + _BLOCK * 4]
        arena.index.insert(table.keys[part], table.namespace[part].astype(np.uint64), part)
    ids, counts = np.unique(table.namespace[keep], return_counts=True)
    arena.entries_of.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    _rebuild_order(arena, keep)
    return Adoption(len(keep), len(sealed) - len(keep), len(unfinished))


def _verifies(arena: Arena, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    table = arena.table
    good = np.zeros(len(entries), dtype=bool)
    for at in range(0, len(entries), _BLOCK):
        part = entries[at : at + _BLOCK]
        good[at : at + _BLOCK] = word_sums(table.words[part, :SUMMED_WORDS]) == table.record_sum[part]
    namespace = table.namespace[entries]
    extents = table.extent_bytes[entries]
    fits = np.zeros(len(entries), dtype=bool)
    for ns in arena.namespaces:
        fits |= (
            (namespace == ns.id)
            & (extents == ns.extent_bytes)
            & (table.shard_bytes[entries] == ns.shard_bytes)
            & (table.shards[entries] == ns.shards)
        )
    good &= fits
    offsets = table.offset[entries]
    good &= offsets < np.uint64(arena.bytes_total)
    where = np.flatnonzero(good)
    good[where] = arena.slabs.slots_of(offsets[where].astype(np.int64), extents[where].astype(np.int64))
    return good


def _fingerprints(arena: Arena, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """64 bits of (key, namespace): equal keys give equal ones; chunk hashes make other collisions a non-event."""
    table = arena.table
    mixed: npt.NDArray[np.uint64] = table.namespace[entries].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= table.keys[entries, 0]
    return mixed


def _distinct(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """True where a value occurs once.  Two entries that claim the same thing are both in doubt."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    same = ordered[1:] == ordered[:-1]
    twice = np.zeros(len(values), dtype=bool)
    twice[order[1:][same]] = True
    twice[order[:-1][same]] = True
    return ~twice


def _still_claimed(arena: Arena, reserved: npt.NDArray[np.int64], keep: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """RESERVED entries whose extent a client may still be writing: one entry per extent that no kept entry claims."""
    table = arena.table
    reserved = reserved[table.offset[reserved] < np.uint64(arena.bytes_total)]
    offsets, extents = table.offset[reserved].astype(np.int64), table.extent_bytes[reserved].astype(np.int64)
    claimed = np.sort(table.offset[keep].astype(np.int64))  # np.isin takes almost a second for a million of them
    at = np.searchsorted(claimed, offsets)
    unclaimed = np.ones(len(offsets), dtype=bool)
    inside = at < len(claimed)
    unclaimed[inside] = claimed[at[inside]] != offsets[inside]
    possible = arena.slabs.slots_of(offsets, extents) & unclaimed
    reserved, offsets = reserved[possible], offsets[possible]
    _, first = np.unique(offsets, return_index=True)
    return np.sort(reserved[first])


def _rebuild_order(arena: Arena, keep: npt.NDArray[np.int64]) -> None:
    table = arena.table
    stamps = table.recency[keep]
    order = np.argsort(stamps, kind="stable")
    keep, stamps = keep[order], stamps[order]
    if len(stamps):
        if (
            int(stamps[0]) == 0 or (stamps[1:] == stamps[:-1]).any()
        ):  # sealed but in no order: cannot be, but live with it
            stamps = np.arange(1, len(keep) + 1, dtype=np.uint64) + np.uint64(stamps[-1])
            table.recency[keep] = stamps
        arena.orders.clock.now = int(stamps[-1]) + 1
    extents = table.extent_bytes[keep]
    for extent in np.unique(extents):
        mine = extents == extent
        arena.orders.adopt(int(extent), keep[mine], stamps[mine])
