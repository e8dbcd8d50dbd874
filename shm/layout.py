"""The bytes of the meta segment: what lies where, and the record types.  Format facts only, no behaviour.

    meta   0        superblock          4 KiB   SUPERBLOCK
           4096     lease table         MAX_LEASES * 64 B   LEASE   (the byte range of a slot is also its lock)
           ...      stats page          STATS_BYTES         seqlock u64, length u64, JSON
           ...      namespace table     MAX_NAMESPACES * 16 KiB   NAMESPACE + canonical manifest
           ...      slab table          MAX_SLABS * 16 B    SLAB   (one per unit of slab_bytes)
           ...      entry table         capacity * 192 B    ENTRY
    data   extents, 4 KiB aligned, in slabs (see slabs.py)

Everything is little-endian.  Only the control process writes here; clients map it read-only.  A change of any of this
is a new ABI_VERSION, and an arena of another ABI is dropped at start, with one line that says so.
"""

from __future__ import annotations

import enum

import numpy as np

MAGIC = int.from_bytes(b"KVKeep\0\0", "little")
ABI_VERSION = 1

PAGE = 4096
MAX_LEASES = 4096
MAX_NAMESPACES = 256
NAMESPACE_BYTES = 16384
STATS_BYTES = 256 * 1024
MAX_SLABS = 16384
MAX_SHARDS = 64
CHECKSUM_SHARDS = 8  # shards beyond this have no payload checksum in L1


class State(enum.IntEnum):
    """FREE -> RESERVED -> SEALED -> EVICTING -> FREE, and RESERVED -> FREE on abort.  Nothing else (see table.py)."""

    FREE = 0
    RESERVED = 1
    SEALED = 2
    EVICTING = 3


SUPERBLOCK = np.dtype(
    [
        ("magic", "<u8"),
        ("abi", "<u4"),
        ("entry_bytes", "<u4"),
        ("meta_bytes", "<u8"),
        ("data_bytes", "<u8"),
        ("capacity", "<u8"),  # entries
        ("slab_bytes", "<u8"),
        ("boot_id", "S40"),
        ("data_inode", "<u8"),  # ties the two segments of one arena together
        ("checksum", "<u8"),  # over all of the above
        ("epoch", "<u8"),  # after the checksum: grows at each daemon start
        ("tiers", "<u8"),  # fingerprint of the adapters that the entries' tier bits speak of; 0 = of none
    ]
)

LEASE = np.dtype(
    [
        ("lease_id", "<u8"),  # 0 = slot free
        ("epoch", "<u8"),
        ("pid", "<u4"),  # as seen by the daemon; 0 = in a foreign pid namespace
        ("uid", "<u4"),
        ("name", "S40"),
    ]
)

NAMESPACE = np.dtype(
    [
        ("id", "<u4"),  # 0 = slot free; the slot number + 1
        ("shards", "<u4"),
        ("shard_bytes", "<u8"),
        ("digest", "S32"),
        ("length", "<u4"),  # of the manifest, which follows
        ("generation", "<u4"),
        ("checksum", "<u8"),  # xxh3_64 over the fields above and the manifest
    ]
)

SLAB = np.dtype(
    [
        ("extent_bytes", "<u8"),  # size class of the run that starts at this unit; 0 = no run starts here
        ("units", "<u4"),
        ("reserved", "<u4"),
    ]
)

ENTRY = np.dtype(
    [
        # fixed between RESERVED and FREE; covered by record_sum
        ("key", "<u8", (4,)),  # 32-byte chunk hash
        ("namespace", "<u4"),
        ("generation", "<u4"),  # grows with each reservation of this record: what a reader validates after its copy
        ("offset", "<u8"),
        ("extent_bytes", "<u8"),
        ("shard_bytes", "<u8"),
        ("shards", "<u4"),
        ("reserved0", "<u4"),
        ("checksums", "<u8", (CHECKSUM_SHARDS,)),  # xxh3_64 per shard, 0 = none
        ("record_sum", "<u8"),
        # mutable
        ("state", "<u4"),  # a State; SEALED is the last word written of an entry
        ("references", "<u4"),
        ("recency", "<u8"),
        ("shard_mask", "<u8"),  # shards committed so far
        ("tiers", "<u4"),  # bit per L2 adapter that need not be given it (any more), and WITHHELD
        ("reserved1", "<u4"),
        ("reserved2", "<u8", (2,)),
    ]
)
ENTRY_BYTES = ENTRY.itemsize
SUMMED_WORDS = ENTRY.fields["record_sum"][1] // 8  # type: ignore[index]

LEASE_OFFSET = PAGE
STATS_OFFSET = LEASE_OFFSET + MAX_LEASES * LEASE.itemsize
NAMESPACE_OFFSET = STATS_OFFSET + STATS_BYTES
SLAB_OFFSET = NAMESPACE_OFFSET + MAX_NAMESPACES * NAMESPACE_BYTES
ENTRY_OFFSET = SLAB_OFFSET + MAX_SLABS * SLAB.itemsize

assert ENTRY_BYTES == 192
assert ENTRY_OFFSET % PAGE == 0


def meta_bytes(capacity: int) -> int:
    """Size of the meta segment for ``capacity`` entries, a whole number of pages."""
    return -(-(ENTRY_OFFSET + capacity * ENTRY_BYTES) // PAGE) * PAGE


def align(n: int, to: int = PAGE) -> int:
    return -(-n // to) * to
