"""The header that every object at rest carries, whatever the medium.

    0    magic            8   "KVKEEPR1"
    8    version          4   FORMAT_VERSION
    12   flags            4   reserved, 0
    16   namespace        32
    48   chunk            32
    80   shard            4
    84   shards           4
    88   original bytes   8   of the payload before any serde
    96   stored bytes     8   of the payload that follows the header
    104  checksum         8   xxh3_64 of the stored bytes
    112  serde ids        8   four u16, in the order they were applied; 0 = none
    120  serde params     96  owned by the serdes (key id, nonce, ...)
    216  sequence         8   grows with each store on this medium: the newer of two headers for one key wins
    224  reserved         24
    248  header checksum  8   xxh3_64 of bytes 0..248

Little-endian.  A header that does not verify, or names another key than was asked for, is a miss.  The serde chain is
in the header, so a changed configuration cannot misread what an earlier one wrote.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvkeep.l2.adapter import Encoding, Item, Key

HEADER_BYTES = 256
FORMAT_VERSION = 1
MAGIC = b"KVKEEPR1"
MAX_SERDES = 4
SERDE_PARAM_BYTES = 96

_LAYOUT = struct.Struct("<8sII32s32sIIQQQ4H96sQ24x")
_SUM = struct.Struct("<Q")
_SUMMED = HEADER_BYTES - _SUM.size
assert _LAYOUT.size == _SUMMED


class Header(NamedTuple):
    key: Key
    original_bytes: int
    stored_bytes: int
    checksum: int
    serdes: tuple[int, ...] = ()
    params: bytes = b""  # padded with zeros to SERDE_PARAM_BYTES when unpacked
    sequence: int = 0

    @property
    def encoding(self) -> Encoding | None:
        """None = the payload is plain."""
        return Encoding(self.original_bytes, self.serdes, self.params) if self.serdes else None


def header_of(item: Item, sequence: int = 0) -> Header:
    """The header of the record that keeps ``item``; computes its checksum if nobody has yet."""
    stored = len(item.payload)
    checksum = item.checksum or payload_checksum(item.payload)
    if item.encoding is None:
        return Header(item.key, stored, stored, checksum, sequence=sequence)
    return Header(item.key, item.encoding.original_bytes, stored, checksum, *item.encoding[1:], sequence)


def pack(header: Header) -> bytes:
    """HEADER_BYTES bytes.  ValueError for a chain or parameters that do not fit."""
    if len(header.serdes) > MAX_SERDES or len(header.params) > SERDE_PARAM_BYTES:
        raise ValueError(
            f"{len(header.serdes)} serdes with {len(header.params)} bytes of parameters; "
            f"the limits are {MAX_SERDES} and {SERDE_PARAM_BYTES}"
        )
    key = header.key
    ids = (*header.serdes, 0, 0, 0, 0)[:MAX_SERDES]
    body = _LAYOUT.pack(
        MAGIC,
        FORMAT_VERSION,
        0,
        key.namespace,
        key.chunk,
        key.shard,
        key.shards,
        header.original_bytes,
        header.stored_bytes,
        header.checksum,
        *ids,
        header.params,
        header.sequence,
    )
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes | memoryview) -> Header | None:
    """The header at the start of ``data``, or None if there is none that verifies."""
    if len(data) < HEADER_BYTES:
        return None
    body = bytes(data[:_SUMMED])
    if body[:8] != MAGIC or _SUM.unpack(data[_SUMMED:HEADER_BYTES])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    fields = _LAYOUT.unpack(body)
    version, namespace, chunk, shard, shards = fields[1], *fields[3:7]
    if version != FORMAT_VERSION:
        return None
    serdes = tuple(number for number in fields[10:14] if number)
    return Header(Key(namespace, chunk, shard, shards), fields[7], fields[8], fields[9], serdes, fields[14], fields[15])


def payload_checksum(payload: bytes | memoryview) -> int:
    """xxh3_64, never 0: in L1 and on the wire 0 means that nobody computed one."""
    return xxhash.xxh3_64_intdigest(payload) or 1
