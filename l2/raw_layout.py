"""The bytes of a raw block medium: superblock, journal, slabs, slots.

    block 0            superblock                    written once, when the medium is formatted
    block 8            probe block                   scratch for the write-and-read test at every open
    64 KiB             superblock, second copy
    128 KiB            journal                       a ring of pages, see raw_journal
    after it           slab 0, slab 1, ...           slab_bytes each

    slab:   [ table: one head block + a record per live slot ][ slot 0 ][ slot 1 ] ...      [ copy of the head block ]
    slot:   [ header block: record.py's header, then a seal ][ payload, whole blocks ]

A slab holds slots of one size class; the class is a number of payload blocks, in sixteen steps an octave, so that
rounding costs at most 6 %.  A slab is a power of two plus 1/64 of it: objects of a power of two, with their headers,
then fill it without leaving a nearly full slot over.

What a client stored lies in payload blocks, and slabs change their class, so a block at the place of a header may hold
bytes that a client chose.  A header therefore counts only with its *seal*: a hash under the medium's secret over the
header, the slot's place and the slab's generation (which changes whenever the slab gets a class).  It also makes
everything from before the last format, and from a slab's earlier classes, void without being overwritten.

All numbers little-endian.  Nothing here does I/O.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from kvkeep.l2 import record

MIN_BLOCK = 4096
VERSION = 1
SECOND_COPY = 64 << 10
PROBE_BLOCK = 32 << 10
JOURNAL_START = 128 << 10
MIN_BYTES = 8 << 20

_SUPER_MAGIC = b"KVKEEPB1"
_SUPER = struct.Struct(
    "<8sIIQQQQQ16s32sQ"
)  # magic version block size slab_bytes slabs first_slab journal_pages uuid...
_SUM = struct.Struct("<Q")
_HEAD_MAGIC = b"KVKEEPT1"
_HEAD = struct.Struct("<8s16sIIQQQQ")  # magic uuid slab blocks generation lsn records checksum-of-records
_SEAL_MAGIC = b"KVKEEPS1"
_SEAL = struct.Struct("<8sIIQ32s")  # magic slab slot generation seal
_SEALED = struct.Struct("<IIQ")

# One live slot in a slab's table, and one step in the journal.
RECORD = np.dtype(
    [
        ("op", "<u4"),
        ("slab", "<u4"),
        ("slot", "<u4"),
        ("shard", "<u4"),
        ("shards", "<u4"),
        ("size", "<u4"),
        ("sequence", "<u8"),
        ("recency", "<u8"),
        ("namespace", "<u8", (4,)),
        ("chunk", "<u8", (4,)),
    ]
)
Records = npt.NDArray[np.void]
assert RECORD.itemsize == 104


class SuperblockError(Exception):
    """A superblock of ours that cannot be used; the text says why."""


def blocks_of(size: int, block: int) -> int:
    """Payload blocks of the size class for ``size`` bytes."""
    n = max(1, -(-size // block))
    if n <= 16:
        return n
    step = 1 << ((n - 1).bit_length() - 5)
    return -(-n // step) * step


@dataclass(frozen=True)
class Geometry:
    """What the superblock fixes for the life of the medium."""

    block: int
    size: int
    slab_bytes: int
    slabs: int
    first_slab: int
    journal_pages: int
    uuid: bytes
    secret: bytes

    @staticmethod
    def plan(size: int, block: int) -> Geometry:
        """A new medium of ``size`` bytes."""
        size -= size % block
        power = 1 << max(22, min(28, (size // 32).bit_length() - 1))
        slab = power + power // 64
        slab += -slab % block
        journal = max(64, min((64 << 20) // block, size // 64 // block))
        first = JOURNAL_START + journal * block
        return Geometry(block, size, slab, (size - first) // slab, first, journal, os.urandom(16), os.urandom(32))

    def pack(self) -> bytes:
        body = _SUPER.pack(
            _SUPER_MAGIC, VERSION, self.block, self.size, self.slab_bytes, self.slabs, self.first_slab,
            self.journal_pages, self.uuid, self.secret, 0,
        )  # fmt: skip
        return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(self.block, b"\0")

    @staticmethod
    def unpack(data: bytes) -> Geometry | None:
        """None: no superblock of ours.  SuperblockError: ours, of a version that we cannot use."""
        body = data[: _SUPER.size]
        if body[:8] != _SUPER_MAGIC:
            return None
        if _SUM.unpack_from(data, _SUPER.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, version, block, size, slab_bytes, slabs, first, journal, uuid, secret, _ = _SUPER.unpack(body)
        if version != VERSION:
            raise SuperblockError(f"has layout version {version}, and this kvkeep knows version {VERSION}")
        found = Geometry(block, size, slab_bytes, slabs, first, journal, uuid, secret)
        return found if found._sane() else None

    def _sane(self) -> bool:
        return (
            self.block >= MIN_BLOCK
            and self.block & (self.block - 1) == 0
            and self.slabs > 0
            and self.slab_bytes % self.block == 0
            and self.journal_pages >= 64
            and self.first_slab >= JOURNAL_START + self.journal_pages * self.block
            and self.first_slab + self.slabs * self.slab_bytes <= self.size
        )

    def slots(self, blocks: int) -> int:
        """Slots of a slab of class ``blocks``; its table and the copy of its head are paid for.  0 = does not fit."""
        room = self.slab_bytes // self.block - 1
        n = room // (1 + blocks)
        while n > 0 and n * (1 + blocks) + self.table_blocks(n) > room:
            n -= 1
        return n

    def table_blocks(self, slots: int) -> int:
        return 1 + -(-slots * RECORD.itemsize // self.block)

    def largest(self) -> int:
        """The most payload bytes of one object."""
        blocks = self.slab_bytes // self.block - 1 - self.table_blocks(1) - 1
        while blocks > 1 and (blocks_of(blocks * self.block, self.block) != blocks or not self.slots(blocks)):
            blocks -= 1
        return min(blocks * self.block, 0xFFFFFFFF)

    def slab_offset(self, slab: int) -> int:
        return self.first_slab + slab * self.slab_bytes

    def foot_offset(self, slab: int) -> int:
        return self.slab_offset(slab) + self.slab_bytes - self.block

    def slot_offset(self, slab: int, slot: int, blocks: int) -> int:
        table = self.table_blocks(self.slots(blocks))
        return self.slab_offset(slab) + (table + slot * (1 + blocks)) * self.block


class Head(NamedTuple):
    """The first block of a slab."""

    slab: int
    blocks: int  # the class; 0 = none yet
    generation: int
    lsn: int  # the table has every step of the journal up to here
    records: int
    checksum: int  # of the records

    def pack(self, geometry: Geometry) -> bytes:
        body = _HEAD.pack(_HEAD_MAGIC, geometry.uuid, *self)
        return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(geometry.block, b"\0")

    @staticmethod
    def unpack(data: bytes | memoryview, geometry: Geometry, slab: int) -> Head | None:
        body = bytes(data[: _HEAD.size])
        if body[:8] != _HEAD_MAGIC or body[8:24] != geometry.uuid:
            return None
        if _SUM.unpack_from(data, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        head = Head(*_HEAD.unpack(body)[2:])
        slots = geometry.slots(head.blocks) if head.blocks else 0
        return head if head.slab == slab and (slots or not head.blocks) and head.records <= slots else None


def records_checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _seal(secret: bytes, header: bytes, slab: int, slot: int, generation: int) -> bytes:
    return blake3.blake3(header + _SEALED.pack(slab, slot, generation), key=secret).digest()


def pack_slot_header(header: record.Header, geometry: Geometry, slab: int, slot: int, generation: int) -> bytes:
    """The header block of a slot, without its padding."""
    body = record.pack(header)
    return body + _SEAL.pack(_SEAL_MAGIC, slab, slot, generation, _seal(geometry.secret, body, slab, slot, generation))


SLOT_HEADER_BYTES = record.HEADER_BYTES + _SEAL.size


def unpack_slot_header(
    data: bytes | memoryview, geometry: Geometry, slab: int, slot: int, generation: int
) -> record.Header | None:
    """The header, if it verifies and belongs to this slot of this slab's present life."""
    body = bytes(data[: record.HEADER_BYTES])
    expected = _SEAL.pack(_SEAL_MAGIC, slab, slot, generation, _seal(geometry.secret, body, slab, slot, generation))
    if bytes(data[record.HEADER_BYTES : SLOT_HEADER_BYTES]) != expected:
        return None
    return record.unpack(body)
