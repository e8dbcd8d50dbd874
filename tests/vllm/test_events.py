"""KV events as routers need them, without an engine: the hashes are those that vLLM's own events carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvkeep.ipc.vllm import events
from kvkeep.ipc.vllm.events import Events

BLOCK, CHUNK = 16, 64
PER_CHUNK = CHUNK // BLOCK


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def sliding(block_size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)


def config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)])


def request(tokens: int, *, first: int = 0, salt: str | None = None) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=list(range(first, first + tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def chain(of: Request, chunks: int) -> bytes:
    return b"".join(of.block_hashes[PER_CHUNK - 1 : chunks * PER_CHUNK : PER_CHUNK])


def blocks(of: Request, start: int, end: int) -> list[Any]:
    """Hashes of the blocks of chunks start .. end - 1, as vLLM's own events carry them."""
    return [maybe_convert_block_hash(value) for value in of.block_hashes[start * PER_CHUNK : end * PER_CHUNK]]


def stored(log: Events, of: Request, start: int, end: int, job: int = 1) -> list[Any]:
    log.planned(job, of, chain(of, end), start, CHUNK)
    log.settled(job, stored=True)
    return log.take()


@pytest.fixture
def log() -> Events:
    return Events(config(full(BLOCK)), BLOCK)


def test_a_stored_chunk_is_announced_block_by_block_with_what_leads_to_it(log: Events) -> None:
    one = request(3 * CHUNK + 5)
    (event,) = stored(log, one, 1, 3)
    assert event == BlockStored(
        block_hashes=blocks(one, 1, 3),
        parent_block_hash=blocks(one, 0, 1)[-1],
        token_ids=list(range(CHUNK, 3 * CHUNK)),
        block_size=BLOCK,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        extra_keys=[None] * 2 * PER_CHUNK,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        locality="LOCAL",
    )
    assert log.take() == []


def test_the_first_chunk_has_no_parent_and_a_salt_travels_with_the_first_block(log: Events) -> None:
    (event,) = stored(log, request(CHUNK, salt="tenant"), 0, 1)
    assert event.parent_block_hash is None
    assert event.extra_keys == [("tenant",), None, None, None]


def test_nothing_is_announced_before_the_store_is_reported_nor_if_it_failed(log: Events) -> None:
    one = request(CHUNK)
    log.planned(1, one, chain(one, 1), 0, CHUNK)
    assert log.take() == []
    log.settled(1, stored=False)
    log.settled(1, stored=True)  # a job is reported once: this is none of ours
    assert log.take() == []
    assert log._plans == {}


def test_a_chunk_that_a_lookup_does_not_find_is_removed_once_and_those_behind_it(log: Events) -> None:
    one = request(4 * CHUNK)
    stored(log, one, 0, 4)
    log.missing(chain(one, 4), 4)
    assert log.take() == []
    log.missing(chain(one, 4), 2)
    (event,) = log.take()
    assert event == BlockRemoved(blocks(one, 2, 4), medium="CPU", group_idx=0, locality="LOCAL")
    log.missing(chain(one, 4), 2)
    assert log.take() == []
    log.missing(chain(one, 4), 0)
    assert len(log.take()[0].block_hashes) == 2 * PER_CHUNK


def test_what_was_never_announced_is_not_removed(log: Events) -> None:
    log.missing(chain(request(2 * CHUNK), 2), 0)
    assert log.take() == []


def test_a_chunk_that_comes_back_is_announced_again(log: Events) -> None:
    one = request(CHUNK)
    first = stored(log, one, 0, 1)
    log.missing(chain(one, 1), 0)
    log.take()
    assert stored(log, one, 0, 1) == first
    log.missing(chain(one, 1), 0)
    assert len(log.take()) == 1


def test_a_reset_removes_everything_that_was_announced_and_drops_what_is_under_way(log: Events) -> None:
    one, other = request(CHUNK), request(CHUNK, first=1000)
    stored(log, one, 0, 1)
    log.planned(2, other, chain(other, 1), 0, CHUNK)
    log.reset()
    (event,) = log.take()
    assert event.block_hashes == blocks(one, 0, 1)
    log.settled(2, stored=True)
    log.reset()
    assert log.take() == []


def test_each_group_with_full_attention_has_its_events_others_have_none() -> None:
    log = Events(config(sliding(BLOCK), full(2 * BLOCK), full(BLOCK)), BLOCK)
    one = request(2 * CHUNK)
    wide, narrow = stored(log, one, 0, 2)
    assert (wide.group_idx, wide.block_size, narrow.group_idx, narrow.block_size) == (1, 32, 2, 16)
    assert len(wide.block_hashes) == PER_CHUNK
    assert narrow.block_hashes == blocks(one, 0, 2)
    assert wide.token_ids == narrow.token_ids == list(range(2 * CHUNK))
    log.missing(chain(one, 2), 1)
    removed = log.take()
    assert [event.group_idx for event in removed] == [1, 2]
    assert removed[0].block_hashes == wide.block_hashes[PER_CHUNK // 2 :]
    assert removed[1].block_hashes == narrow.block_hashes[PER_CHUNK:]


def test_a_model_without_full_attention_announces_nothing() -> None:
    log = Events(config(sliding(BLOCK)), BLOCK)
    one = request(CHUNK)
    assert stored(log, one, 0, 1) == []
    log.missing(chain(one, 1), 0)
    assert log.take() == []


def test_what_is_remembered_is_bounded_and_the_oldest_goes(log: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_ANNOUNCED", 3)
    requests = [request(CHUNK, first=1000 * n) for n in range(5)]
    for one in requests:
        stored(log, one, 0, 1)
    for one in requests:
        log.missing(chain(one, 1), 0)
    removed = [event.block_hashes for event in log.take()]
    assert removed == [blocks(one, 0, 1) for one in requests[2:]]


@pytest.mark.parametrize("numbers", ["0", "1"])
def test_events_are_of_the_form_in_which_vllm_publishes(
    numbers: str, log: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", numbers)
    one = request(CHUNK)
    batch = KVEventBatch(ts=0.0, events=stored(log, one, 0, 1))
    log.missing(chain(one, 1), 0)
    batch.events += log.take()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert decoded == batch
    assert [type(event).__name__ for event in decoded.events] == ["BlockStored", "BlockRemoved"]
    assert all(type(value) is (bytes if numbers == "0" else int) for value in decoded.events[0].block_hashes)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (None, False),
        (SimpleNamespace(enable_kv_cache_events=False), False),
        (SimpleNamespace(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_made_only_for_an_engine_that_publishes_them(setting: Any, wanted: bool) -> None:
    assert events.wanted(SimpleNamespace(kv_events_config=setting)) is wanted
