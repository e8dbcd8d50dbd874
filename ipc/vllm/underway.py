"""Which chunks this engine is loading right now, so that equal prompts that come together are loaded once.

vLLM puts loaded blocks into its own prefix cache in the step after the load was reported, and before it asks about the
requests that wait.  So a second request whose first missing chunk is under way is told to ask again, and then finds it
there.  A sliding window's blocks serve only a hit that ends where the load ends: with such groups only a request that
would load exactly as far waits.
"""

from __future__ import annotations

from kvkeep.ipc.messages import HASH_BYTES


class UnderWay:
    def __init__(self) -> None:
        self._loaders: dict[bytes, str] = {}  # chunk -> request that loads it
        self._chunks: dict[str, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def begin(self, request_id: str, chain: bytes, first: int, end: int) -> None:
        """``chain``: the request's chunks from the root, of which ``first`` .. ``end`` - 1 are loaded."""
        keys = [chain[at : at + HASH_BYTES] for at in range(first * HASH_BYTES, end * HASH_BYTES, HASH_BYTES)]
        self._chunks[request_id] = keys
        for key in keys:
            self._loaders[key] = request_id

    def end(self, request_id: str) -> None:
        """However it ended."""
        for key in self._chunks.pop(request_id, ()):
            if self._loaders.get(key) == request_id:
                del self._loaders[key]

    def serves(self, chain: bytes, first: int, end: int, *, windows: bool) -> bool:
        """Is a load under way after which a request that misses ``first`` .. ``end`` - 1 should look again?"""
        loader = self._loaders.get(chain[first * HASH_BYTES : (first + 1) * HASH_BYTES])
        if loader is None:
            return False
        return not windows or self._chunks[loader][-1] == chain[(end - 1) * HASH_BYTES : end * HASH_BYTES]
