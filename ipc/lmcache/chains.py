"""Chunk hashes of token lists that come again and again.

The clients of LMCache send all tokens of a request with each of its calls, packed.  What was hashed for the same bytes
is found by comparing bytes, and only those are unpacked that are new.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import xxhash
from blake3 import blake3

from kvkeep.ipc.keys import ChunkHasher
from kvkeep.ipc.lmcache.wire import BadRequest
from kvkeep.ipc.messages import HASH_BYTES, MAX_CHUNKS

KEPT = 64  # token lists
KEPT_BYTES = 32 << 20
_ROOT = blake3(b"kvkeep: lmcache wire, chunks v1").digest()  # in the place of a namespace, which differs anyway

_tokens = msgspec.msgpack.Decoder(list[int])


class Chains:
    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._hasher = ChunkHasher(_ROOT, chunk_tokens=chunk_tokens)
        self._kept: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()  # packed tokens and hashes, by a digest
        self._bytes = 0
        self._last: dict[str, tuple[np.ndarray[Any, Any], bytes]] = {}  # of a request, which grows

    def of(self, packed: bytes | memoryview, request_id: str) -> bytes:
        """Hashes of all whole chunks, one after the other.  Raises BadRequest."""
        packed = bytes(packed)  # comparing memoryviews takes a hundred times as long
        mark = xxhash.xxh3_64_intdigest(packed)
        found = self._kept.get(mark)
        if found is not None and found[0] == packed:
            self._kept.move_to_end(mark)
            return found[1]
        hashes = self._hash(packed, request_id)
        if found is not None:
            self._bytes -= len(found[0])
        self._kept[mark] = (packed, hashes)
        self._bytes += len(packed)
        while len(self._kept) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= len(self._kept.popitem(last=False)[1][0])
        return hashes

    def forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)

    def _hash(self, packed: bytes, request_id: str) -> bytes:
        try:
            tokens = np.frombuffer(array("I", _tokens.decode(packed)), np.uint32)  # a third of what np.array takes
        except (msgspec.MsgspecError, OverflowError, ValueError) as error:
            raise BadRequest(f"token_ids cannot be read: {error}") from None
        size = self.chunk_tokens
        whole = len(tokens) // size
        if whole > MAX_CHUNKS:
            raise BadRequest(f"{len(tokens)} tokens are {whole} chunks, the limit is {MAX_CHUNKS}; use larger chunks")
        hashes, same = b"", 0
        if (before := self._last.get(request_id)) is not None:
            shorter = min(len(before[0]), whole * size)
            if shorter and np.array_equal(before[0][:shorter], tokens[:shorter]):
                same = shorter // size
                hashes = before[1][: same * HASH_BYTES]
        if same < whole:
            parent = hashes[-HASH_BYTES:] or None
            hashes += self._hasher.chunk_hashes(tokens[same * size : whole * size], parent=parent)
        if len(self._last) >= KEPT:
            self._last.pop(next(iter(self._last)))
        self._last[request_id] = (tokens, hashes)
        return hashes
