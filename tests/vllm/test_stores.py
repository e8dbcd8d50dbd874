from __future__ import annotations

from dataclasses import replace

import pytest

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm import stores
from kvkeep.ipc.vllm.controls import Scope
from kvkeep.ipc.vllm.groups import Group
from kvkeep.ipc.vllm.metadata import StoreEnd, StoreJob, StoreReport
from tests.vllm.bench import BLOCK, CHUNK, PER_CHUNK, Bench, Request


@pytest.fixture
def bench() -> Bench:
    return Bench()


def chunks(job: StoreJob) -> tuple[int, int]:
    return job.start, len(job.hashes) // HASH_BYTES


def report(bench: Bench, job: StoreJob, end: StoreEnd = StoreEnd.DONE, missing: int = -1) -> None:
    bench.stores.on_report(StoreReport(job.job_id, end, 1, missing))


def test_a_chunk_is_stored_in_the_step_that_completes_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "JOB_TOKENS", CHUNK)
    request = bench.add(Request("a", 3 * CHUNK + 5))
    found = []
    for tokens in (CHUNK - 1, 1, CHUNK + 10, CHUNK - 10, 5):  # a prompt computed in pieces
        found.append([chunks(job) for job in bench.step(request, tokens)])
    assert found == [[], [(0, 1)], [(1, 2)], [(2, 3)], []]


def steps_of(bench: Bench, chunk_count: int) -> list[list[tuple[int, int]]]:
    request = bench.add(Request("a", chunk_count * CHUNK + 5))
    return [[chunks(job) for job in bench.step(request, tokens)] for tokens in [CHUNK] * chunk_count + [5]]


def test_of_a_long_prompt_one_job_stores_what_several_steps_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "JOB_TOKENS", 3 * CHUNK)
    assert steps_of(Bench(blocks=201), 5) == [[], [], [(0, 3)], [], [], [(3, 5)]]


def test_jobs_of_several_steps_leave_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last chunks of a job would find all pins in use."""
    bench = Bench(blocks=101, pinned_fraction=0.2)  # 20 blocks: five chunks
    assert steps_of(bench, 5) == [[], [], [(0, 3)], [(3, 4)], [(4, 5)], []]
    assert bench.counters["chunks_skipped_pins"] == 0


def test_where_windows_pass_each_step_stores_what_it_completes() -> None:
    bench = Bench(blocks=201)
    bench.active = replace(bench.active, groups=(Group(BLOCK, window=4 * CHUNK),))
    assert steps_of(bench, 3) == [[(0, 1)], [(1, 2)], [(2, 3)], []]


def test_a_generated_token_counts_once_it_is_computed(bench: Bench) -> None:
    request = bench.add(Request("a", CHUNK - 2), blocks=10)
    assert bench.step(request, CHUNK - 2) == []
    for _ in range(3):  # each step samples one token and computes the one before
        request.grow(1)
        jobs = bench.step(request, 1)
    assert request.num_tokens == CHUNK + 1
    assert jobs == []
    assert bench.stores._progress["a"].stored == 1


def test_of_a_request_whose_prompt_is_stored_the_chunk_with_generated_tokens_is_left_out(bench: Bench) -> None:
    request = bench.add(Request("a", CHUNK + 10), blocks=20, scope=Scope.PROMPT)
    assert [chunks(job) for job in bench.step(request, CHUNK + 10)] == [(0, 1)]
    request.grow(2 * CHUNK)
    assert bench.step(request, 2 * CHUNK) == []


def test_of_a_request_that_is_not_to_be_stored_nothing_is(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK), scope=Scope.NONE)
    assert bench.step(request, 2 * CHUNK) == []
    assert bench.stores.pinned_blocks == 0


def test_the_blocks_of_a_job_are_pinned_until_it_is_reported(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    free = bench.pool.get_num_free_blocks()
    (job,) = bench.step(request, 2 * CHUNK)
    bench.finish(request)
    assert bench.pool.get_num_free_blocks() == free  # finished, and not one block given back
    assert bench.stores.pending()
    given = {block.block_id for block in bench.pool.get_new_blocks(free)}
    assert given.isdisjoint(job.blocks[0])
    report(bench, job)
    assert bench.pool.get_num_free_blocks() == 2 * PER_CHUNK
    assert not bench.stores.pending()


def test_a_preempted_request_does_not_store_again_what_it_stored(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK + 5))
    (job,) = bench.step(request, 2 * CHUNK + 5)
    bench.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    report(bench, job)
    bench.tables["a"] = bench.pool.get_new_blocks(20)
    request.grow(CHUNK)
    assert [chunks(job) for job in bench.step(request, 3 * CHUNK + 5)] == [(2, 3)]


def test_a_preempted_request_that_is_computed_in_pieces_stores_nothing_twice(bench: Bench) -> None:
    request = bench.add(Request("a", 4 * CHUNK))
    (job,) = bench.step(request, 4 * CHUNK)
    report(bench, job)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert [bench.step(request, CHUNK) for _ in range(4)] == [[]] * 4


def test_chunks_that_the_lookup_found_are_not_stored(bench: Bench) -> None:
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 3)
    bench.lookups.matched_tokens(request, 0, bench.active)
    assert [chunks(job) for job in bench.step(request, 4 * CHUNK)] == [(3, 4)]


def test_a_missing_head_is_stored_again_from_there_a_few_times(bench: Bench) -> None:
    request = bench.add(Request("a", 4 * CHUNK), blocks=60)
    (job,) = bench.step(request, 4 * CHUNK)
    found = []
    for _ in range(6):
        report(bench, job, StoreEnd.ORPHAN, missing=1)
        request.grow(1)
        jobs = bench.step(request, 1)
        if not jobs:
            break
        (job,) = jobs
        found.append(chunks(job))
    assert found == [(1, 4)] * 3


def test_a_full_arena_ends_the_storing_of_that_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "JOB_TOKENS", CHUNK)
    request = bench.add(Request("a", 2 * CHUNK), blocks=60)
    (job,) = bench.step(request, CHUNK)
    report(bench, job, StoreEnd.FULL)
    assert bench.step(request, CHUNK) == []
    other = bench.add(Request("b", CHUNK, prompt="other"))
    assert len(bench.step(other, CHUNK)) == 1


def test_pins_never_exceed_their_share_and_the_rest_is_counted() -> None:
    bench = Bench(blocks=101, pinned_fraction=0.1)  # 10 blocks: two chunks of four
    request = bench.add(Request("a", 5 * CHUNK))
    (job,) = bench.step(request, 5 * CHUNK)
    assert chunks(job) == (0, 2)
    assert bench.counters["chunks_skipped_pins"] == 3
    other = bench.add(Request("b", CHUNK, prompt="other"))
    assert bench.step(other, CHUNK) == []
    report(bench, job)
    third = bench.add(Request("c", CHUNK, prompt="third"))
    assert len(bench.step(third, CHUNK)) == 1


def test_a_chunk_that_is_not_stored_is_counted_once() -> None:
    bench = Bench(blocks=101, pinned_fraction=0.0)
    request = bench.add(Request("a", 5 * CHUNK))
    for _ in range(5):
        assert bench.step(request, CHUNK) == []
    assert bench.counters["chunks_skipped_pins"] == 5


def test_the_engine_has_let_go_of_a_window_once() -> None:
    bench = Bench()
    bench.active = replace(bench.active, groups=(Group(BLOCK, window=BLOCK),))
    request = bench.add(Request("a", 5 * CHUNK))
    bench.pool.free_blocks([bench.tables["a"][PER_CHUNK - 1]])
    bench.tables["a"][PER_CHUNK - 1] = bench.pool.null_block
    for _ in range(5):
        assert bench.step(request, CHUNK) == []
    assert bench.counters["chunks_skipped_window"] == 5


def test_a_head_that_went_before_a_preemption_counts_nothing_backwards(bench: Bench) -> None:
    """Prometheus raises if a counter is to fall, and vLLM's frontend ends with that."""
    request = bench.add(Request("a", 4 * CHUNK))
    (job,) = bench.step(request, 4 * CHUNK)
    report(bench, job, StoreEnd.ORPHAN, missing=2)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    bench.step(request, CHUNK)
    assert min(bench.counters.values()) >= 0


def test_tokens_that_a_session_takes_back_are_stored_anew(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK), blocks=60)
    (job,) = bench.step(request, 2 * CHUNK)
    report(bench, job)
    del request.block_hashes[PER_CHUNK:]
    request.prompt, request.num_tokens, request.num_computed_tokens = "changed", CHUNK, CHUNK
    bench.step(request, 0)
    request.grow(2 * CHUNK)
    assert [chunks(job) for job in bench.step(request, 2 * CHUNK)] == [(0, 3)]


def test_a_request_of_before_a_reset_is_not_stored_after_it(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.step(request, CHUNK)
    bench.stores.on_reset()
    bench.active = bench.register(1)
    assert bench.step(request, CHUNK) == []
    later = bench.add(Request("b", CHUNK))
    assert len(bench.step(later, CHUNK)) == 1


def test_a_reset_that_leaves_old_blocks_in_the_engine_stops_all_stores(bench: Bench) -> None:
    bench.pool.cached_block_hash_to_block.insert(b"old" * 12, bench.pool.blocks[1])
    bench.stores.on_reset()
    bench.active = bench.register(1)
    request = bench.add(Request("b", CHUNK))
    assert bench.step(request, CHUNK) == []


def test_a_decode_step_looks_at_nothing(bench: Bench) -> None:
    request = bench.add(Request("a", CHUNK), blocks=60)
    bench.step(request, CHUNK)
    output = bench.output({request: 1})
    output.kv_connector_block_state = None  # would raise if it was looked at
    for _ in range(CHUNK - 1):
        request.grow(1)
        assert bench.stores.new_jobs(output, bench.active) == []
        request.num_computed_tokens += 1


def test_a_request_that_cannot_be_stored_does_not_take_others_with_it(bench: Bench) -> None:
    good, bad, last = (bench.add(Request(name, CHUNK, prompt=name)) for name in ("good", "bad", "last"))
    bench.pool.free_blocks([bench.tables["bad"].pop()])
    jobs = bench.stores.new_jobs(bench.output({good: CHUNK, bad: CHUNK, last: CHUNK}), bench.active)
    assert len(jobs) == 2
    assert bench.stores.pinned_blocks == 2 * PER_CHUNK
    assert list(bench.guard.counters) == ["store_job: RuntimeError"]


def test_an_adapters_requests_are_not_stored(bench: Bench) -> None:
    request = bench.add(Request("a", CHUNK, lora_request=object()))
    assert bench.step(request, CHUNK) == []
    assert BLOCK * PER_CHUNK == CHUNK
