"""KV cache groups: sets of layers that share a block table, and what of their blocks a hit needs.

A chunk holds the blocks of all groups for its tokens.  A group with a sliding window has let go of blocks that no later
token can see, so a chunk need not have them either: a hit that ends with this chunk, or with a later one, needs only
those that reach into the window before the chunk's end.  What a chunk does not have is `ABSENT`, zeros in its extent.
With chunked local attention the window begins at the last multiple of ``local`` tokens.

vLLM drops a block once all its tokens are ``window - 1`` and more before the next token (SlidingWindowManager), or
before the next token's piece (ChunkedLocalAttentionManager); we ask for what the token before that one sees, too, since
after a hit of the whole prompt the last token is computed once again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

ABSENT = -1  # in place of a block id: nothing to copy

T = TypeVar("T")
BlockTable = tuple[tuple[int, ...], ...]  # per group


@dataclass(frozen=True)
class Group:
    block_size: int  # tokens
    window: int = 0  # tokens before the end of a hit that are needed; 0 = all
    local: int = 0  # tokens of a piece outside of which its tokens see nothing; 0 = no pieces

    @property
    def sees_all(self) -> bool:
        """Every token sees all tokens before it."""
        return not self.window and not self.local

    def needs(self, block: int, end: int) -> bool:
        """Whether a hit that ends after ``end`` tokens reads the block at this position of the table."""
        block_end = (block + 1) * self.block_size
        if self.local:
            return block_end > (end - 1) // self.local * self.local
        return not self.window or block_end > end - self.window

    def lacks_last(self, end: int) -> bool:
        """Whether the engine has no block for the first token that the last one of ``end`` tokens sees."""
        if self.local:
            return end % self.local == 0
        return bool(self.window) and end > self.window and (end - self.window + 1) % self.block_size == 0


def groups_of(config: KVCacheConfig) -> tuple[Group, ...]:
    return tuple(_group(group.kv_cache_spec) for group in config.kv_cache_groups)


def _group(spec: Any) -> Group:
    kind, size = type(spec).__name__, int(spec.block_size)
    if kind == "SlidingWindowSpec":
        return Group(size, window=int(spec.sliding_window + spec.extra_retained_tokens))
    if kind == "ChunkedLocalAttentionSpec":
        return Group(size, local=int(spec.attention_chunk_size))
    return Group(size)


def alignment(groups: Sequence[Group]) -> int:
    """What a number of tokens must be a multiple of to end at a block's end in every group."""
    return math.lcm(*(group.block_size for group in groups))


def cut(table: Sequence[Sequence[T]], groups: Sequence[Group], start: int, end: int) -> tuple[tuple[T, ...], ...]:
    """The blocks of tokens ``start`` to ``end``, both multiples of the alignment."""
    return tuple(
        tuple(blocks[start // group.block_size : end // group.block_size])
        for blocks, group in zip(table, groups, strict=True)
    )


def chunks(table: tuple[tuple[T, ...], ...], count: int) -> list[tuple[tuple[T, ...], ...]]:
    """The blocks of each of ``count`` chunks of equal length."""
    per_chunk = [len(blocks) // count for blocks in table]
    return [
        tuple(blocks[n * size : (n + 1) * size] for blocks, size in zip(table, per_chunk, strict=True))
        for n in range(count)
    ]


def present(table: BlockTable) -> tuple[int, ...]:
    """Every block id in it; a block belongs to one group at a time."""
    if len(table) == 1 and ABSENT not in table[0]:  # nearly always, and a long prompt has a thousand
        return table[0]
    return tuple(block for blocks in table for block in blocks if block != ABSENT)
