"""The entry table: one fixed-size record per chunk, and the only code that writes a state.

               reserve                seal                   begin_evict                free
        FREE ----------> RESERVED ----------> SEALED ----------------> EVICTING ----------------> FREE
                            |                                                                      ^
                            +------------------------------ free (abort) --------------------------+

The fixed part of a record (key, namespace, extent) is written before RESERVED and covered by ``record_sum``; SEALED is
the last word written of an entry, in one aligned store.  A crash between any two stores therefore leaves an entry that
is either complete and SEALED, or not SEALED and dropped by the next start.  A reader outside this process copies
first and then looks whether the record is still SEALED under the same generation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkeep.shm.layout import CHECKSUM_SHARDS, ENTRY, ENTRY_BYTES, SUMMED_WORDS, State
from kvkeep.shm.records import word_sums

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class EntryTable:
    """``memory`` is the entry part of the meta segment, capacity * ENTRY_BYTES bytes."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.capacity = len(memory) // ENTRY_BYTES
        self.words: U64 = memory.view(np.uint64).reshape(self.capacity, ENTRY_BYTES // 8)
        self.rows = memory.view(ENTRY)
        self.keys: U64 = self.rows["key"]
        self.namespace = self.rows["namespace"]
        self.generation = self.rows["generation"]
        self.offset = self.rows["offset"]
        self.extent_bytes = self.rows["extent_bytes"]
        self.shard_bytes = self.rows["shard_bytes"]
        self.shards = self.rows["shards"]
        self.checksums: U64 = self.rows["checksums"]
        self.record_sum = self.rows["record_sum"]
        self.state = self.rows["state"]
        self.references = self.rows["references"]
        self.recency: U64 = self.rows["recency"]
        self.shard_mask: U64 = self.rows["shard_mask"]
        self.tiers = self.rows["tiers"]
        # Free records: those never used, in order, and a stack of returned ones.
        self._fresh = 0
        self._stack = np.empty(self.capacity, dtype=np.uint32)
        self._returned = 0

    @property
    def free_count(self) -> int:
        return self.capacity - self._fresh + self._returned

    @property
    def used_count(self) -> int:
        return self._fresh - self._returned

    @property
    def ever_used(self) -> int:
        """No record from this one on is in use."""
        return self._fresh

    def is_reserved(self, entry: int, generation: int) -> bool:
        """It is RESERVED, and still what it was under this generation."""
        return self.state[entry] == State.RESERVED and int(self.generation[entry]) == generation

    # ---- transitions -------------------------------------------------------------------------------------------------

    def reserve(
        self, keys: U64, namespace: int, offsets: I64, *, extent_bytes: int, shard_bytes: int, shards: int
    ) -> I64:
        """FREE -> RESERVED for len(keys) records; the caller made sure that free_count suffices."""
        n = len(keys)
        from_stack = min(n, self._returned)
        self._returned -= from_stack
        entries = self._stack[self._returned : self._returned + from_stack].astype(np.int64)
        if from_stack < n:
            more = n - from_stack
            entries = np.concatenate((entries, np.arange(self._fresh, self._fresh + more)))
            self._fresh += more
        words = np.zeros((n, ENTRY_BYTES // 8), dtype=np.uint64)
        rows = words.view(ENTRY).reshape(n)
        words[:, :4] = keys
        rows["namespace"] = namespace
        rows["generation"] = self.generation[entries] + np.uint32(1)
        rows["offset"] = offsets
        rows["extent_bytes"] = extent_bytes
        rows["shard_bytes"] = shard_bytes
        rows["shards"] = shards
        rows["record_sum"] = word_sums(words[:, :SUMMED_WORDS])
        self.words[entries] = words  # state FREE is 0, so the record is complete before it is RESERVED
        self.state[entries] = State.RESERVED
        return entries

    def set_checksums(self, entries: I64, shard: int, checksums: U64) -> None:
        """Payload checksums of one shard of RESERVED entries."""
        if shard < CHECKSUM_SHARDS:
            self.checksums[entries, shard] = checksums
            self.record_sum[entries] = word_sums(self.words[entries, :SUMMED_WORDS])

    def seal(self, entries: I64) -> None:
        """RESERVED -> SEALED."""
        self._expect(entries, State.RESERVED)
        self.state[entries] = State.SEALED

    def begin_evict(self, entries: I64) -> None:
        """SEALED -> EVICTING."""
        self._expect(entries, State.SEALED)
        self.state[entries] = State.EVICTING

    def free(self, entries: I64) -> None:
        """RESERVED or EVICTING -> FREE.  References to the record die with it: its owners see another generation."""
        state = self.state[entries]
        if ((state != State.RESERVED) & (state != State.EVICTING)).any():
            raise AssertionError("table: only RESERVED and EVICTING entries can be freed")
        self.state[entries] = State.FREE
        self.generation[entries] += np.uint32(1)  # a reference to what was here no longer matches
        self.references[entries] = 0
        self.recency[entries] = 0
        self._stack[self._returned : self._returned + len(entries)] = entries
        self._returned += len(entries)

    def _expect(self, entries: I64, state: State) -> None:
        if (self.state[entries] != state).any():
            raise AssertionError(f"table: an entry to change is not {state.name}")

    # ---- adoption and checks -----------------------------------------------------------------------------------------

    def adopt(self, keep: npt.NDArray[np.bool_]) -> None:
        """Everything not in ``keep`` (bool per record) becomes FREE; rebuild the free records."""
        drop = np.flatnonzero(~keep & (self.state != State.FREE))
        self.state[drop] = State.FREE
        self.references[drop] = 0
        self.recency[drop] = 0
        used = np.flatnonzero(keep)
        self._fresh = int(used[-1]) + 1 if len(used) else 0
        holes = np.flatnonzero(~keep[: self._fresh])[::-1]
        self._stack[: len(holes)] = holes
        self._returned = len(holes)

    def used(self) -> I64:
        """Every entry that is not FREE."""
        return np.flatnonzero(self.state[: self._fresh] != State.FREE)

    def check_integrity(self) -> None:
        used = len(self.used())
        if used != self.used_count:
            raise AssertionError(f"table: {used} records in use, {self.used_count} by the free list")
        if (self.state[: self._fresh] == State.EVICTING).any():
            raise AssertionError("table: an entry was left EVICTING")
        stack = self._stack[: self._returned]
        if len(np.unique(stack)) != len(stack) or (self.state[stack] != State.FREE).any():
            raise AssertionError("table: the free list holds an entry twice, or one in use")
