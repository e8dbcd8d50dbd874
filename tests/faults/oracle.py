"""The content oracle: the bytes of a chunk follow from its hash and shard, so any reader can judge any byte.

Chains are deterministic too: ``chain(name, n)`` is a prefix of ``chain(name, n + 1)``, and a branch shares its stem.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvkeep.ipc.client import Client
from kvkeep.ipc.client_lookup import Lookup
from kvkeep.ipc.namespace import Namespace

Bytes = npt.NDArray[np.uint8]
MANIFEST = {"model": "faults/oracle", "kv_dtype": "uint8", "block_size": 16, "chunk_tokens": 256}


def chain(name: object, count: int, *, stem: bytes = b"") -> bytes:
    """``count`` packed hashes, after those of ``stem``."""
    parent, out = stem[-32:], [stem]
    for _ in range(count):
        parent = blake3(parent + repr(name).encode()).digest()
        out.append(parent)
    return b"".join(out)


def split(packed: bytes) -> Iterator[bytes]:
    return (packed[i : i + 32] for i in range(0, len(packed), 32))


def content(key: bytes, size: int, shard: int = 0) -> Bytes:
    return np.frombuffer(blake3(key + shard.to_bytes(4, "little")).digest(length=size), np.uint8)


def contents(packed: bytes, size: int, shard: int = 0) -> list[Bytes]:
    return [content(key, size, shard) for key in split(packed)]


def wrong_in(packed: bytes, targets: Bytes, good: list[bool], shard: int = 0) -> list[int]:
    """Positions that were said to be right and are not."""
    size = targets.shape[1]
    return [
        i
        for i, (key, ok) in enumerate(zip(split(packed), good, strict=False))
        if ok and not np.array_equal(targets[i], content(key, size, shard))
    ]


def read(kv: Client, ns: Namespace, packed: bytes, found: Lookup, *, shard: int = 0) -> tuple[int, list[int]]:
    """(chunks loaded, positions with wrong bytes) of a lookup.  Confirms."""
    targets = np.zeros((found.ready, ns.shard_bytes), np.uint8)
    good = kv.retrieve(found, targets, shard=shard)
    return sum(good), wrong_in(packed, targets, good, shard)
