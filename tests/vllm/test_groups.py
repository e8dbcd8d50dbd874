"""What a hit needs, by kind of attention, against the managers that allot and free the blocks in vLLM."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from kvkeep.ipc.vllm.groups import Group

BLOCK = 16
COMMON = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}


def skipped(group: Group, tokens: int) -> int:
    """Blocks that vLLM has let go of before the step that computes the next token."""
    if group.local:
        manager = object.__new__(ChunkedLocalAttentionManager)
        manager.kv_cache_spec = ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=group.local)
        manager.attention_chunk_size = group.local
    else:
        manager = object.__new__(SlidingWindowManager)
        manager.kv_cache_spec = SlidingWindowSpec(**COMMON, sliding_window=group.window)
        manager.extra_retained_tokens = 0
        manager.sliding_window = group.window
    return int(manager.get_num_skipped_tokens(tokens)) // BLOCK


@pytest.mark.parametrize(
    "group", [Group(BLOCK, window=64), Group(BLOCK, window=33), Group(BLOCK, local=64), Group(BLOCK, local=40)], ids=str
)
def test_what_the_engine_has_blocks_for_after_a_hit_is_what_the_hit_needs(group: Group) -> None:
    for end in range(BLOCK, 20 * BLOCK, BLOCK):
        have = range(skipped(group, end), end // BLOCK)
        assert all(group.needs(block, end) for block in have)  # else they would be loaded with zeros
        if not group.lacks_last(end):
            needed = [block for block in range(end // BLOCK) if block >= skipped(group, end - 1)]
            assert set(needed) <= set(have), end


def test_where_a_piece_ends_the_last_token_cannot_be_computed_again() -> None:
    group = Group(BLOCK, local=4 * BLOCK)
    assert [end // BLOCK for end in range(BLOCK, 9 * BLOCK, BLOCK) if group.lacks_last(end)] == [4, 8]
