"""Chains of chunks to fill an arena with, and the content that belongs to a chunk.

Every chunk's bytes are its own hash, repeated: whoever reads a chunk can tell whether it is the right one, and no copy
of what was stored is kept.  Shards are small (4 KiB), so that a million entries fit into 4 GiB.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkeep.bench.common import SPARE_BYTES, BenchError
from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.messages import HASH_BYTES

CHUNK_TOKENS = 256
SMALL_SHARD = 4096
SPARE_ENTRIES = 8192
FILLED = 0.94  # of the bytes; the daemon evicts from 0.95 on
FILL_CHAIN = 512  # chunks: 131,072 tokens

Bytes = npt.NDArray[np.uint8]


def manifest(what: str) -> dict[str, object]:
    return {"model": f"kvkeep-bench/{what}", "kv_dtype": "uint8", "chunk_tokens": CHUNK_TOKENS}


def arena_for(entries: int) -> tuple[int, str]:
    """(bytes, flag): an arena for so many small chunks and some room beside them, below the eviction watermark.

    It is bytes that run out first, as with chunks of an ordinary size."""
    size = int(entries * SMALL_SHARD / FILLED) + SPARE_BYTES
    return size, f"--l1-entries={size // SMALL_SHARD + SPARE_ENTRIES}"


def content(chain: bytes, shard_bytes: int = SMALL_SHARD) -> Bytes:
    """(chunks, shard_bytes)."""
    hashes = np.frombuffer(chain, np.uint8).reshape(-1, HASH_BYTES)
    return np.tile(hashes, (1, shard_bytes // HASH_BYTES))


def fresh_chain(rng: np.random.Generator, chunks: int) -> bytes:
    return rng.bytes(chunks * HASH_BYTES)


def store_chain(client: Client, namespace: Namespace, chain: bytes) -> None:
    result = client.store(namespace, chain, content(chain))
    if result.stored != len(chain) // HASH_BYTES:
        raise BenchError(f"a chain of {len(result.outcome)} chunks was not stored whole: {result.outcome[:1]}")


def fill(client: Client, namespace: Namespace, entries: int, rng: np.random.Generator) -> list[bytes]:
    """Store ``entries`` chunks in chains of FILL_CHAIN by the real protocol.  Returns the chains."""
    chains = []
    while entries > 0:
        chain = fresh_chain(rng, min(entries, FILL_CHAIN))
        store_chain(client, namespace, chain)
        chains.append(chain)
        entries -= FILL_CHAIN
    return chains
