"""Chunks that are stored only when they are about to leave the engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm.leaving import Stage
from kvkeep.ipc.vllm.metadata import StoreEnd, StoreJob, StoreReport
from tests.conftest import Daemon
from tests.vllm.bench import BLOCK, CHUNK, PER_CHUNK, Bench, Request
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.test_model_families import PATIENCE
from tests.vllm.tiny_model import prompt

NEAR = 2 * PER_CHUNK


@pytest.fixture
def bench() -> Bench:
    return Bench(blocks=1 + 10 * PER_CHUNK, near=NEAR, pinned_fraction=0.5)


def serve(bench: Bench, name: str, chunks: int) -> list[StoreJob]:
    """A prompt is computed, its blocks are in the engine's prefix cache, and it ends.  The jobs of its step."""
    request = bench.add(Request(name, chunks * CHUNK, prompt=name))
    for n, (value, block) in enumerate(zip(request.block_hashes, bench.tables[name], strict=True), 1):
        if bench.pool.get_cached_block(value, [0]) is None:
            bench.pool._insert_block_hash(make_block_hash_with_group_id(value, 0), block, n * BLOCK)
    jobs = bench.step(request, chunks * CHUNK)
    bench.finish(request)
    return jobs  # type: ignore[no-any-return]


def idle(bench: Bench) -> list[StoreJob]:
    """A step in which nothing is scheduled."""
    return bench.stores.new_jobs(bench.output({}), bench.active)


def take(bench: Bench, blocks: int) -> list[Any]:
    return bench.pool.get_new_blocks(blocks)  # type: ignore[no-any-return]


def chunks(job: StoreJob) -> tuple[int, int]:
    return job.start, len(job.hashes) // HASH_BYTES


def report(bench: Bench, job: StoreJob, end: StoreEnd = StoreEnd.DONE, missing: int = -1) -> None:
    bench.stores.on_report(StoreReport(job.job_id, end, 1, missing))


def test_what_stays_in_the_engine_is_not_stored(bench: Bench) -> None:
    assert serve(bench, "a", 3) == []
    for _ in range(5):
        assert serve(bench, "a", 3) == []  # again and again
        assert idle(bench) == []
    assert bench.stores.pinned_blocks == 0


def test_a_prompt_is_stored_from_its_first_chunk_on_when_its_tail_is_about_to_leave(bench: Bench) -> None:
    serve(bench, "a", 4)
    rest = take(bench, 10 * PER_CHUNK - 4 * PER_CHUNK - NEAR)
    assert idle(bench) == []  # as many others go first as two steps can take
    rest += take(bench, 1)
    (job,) = idle(bench)
    assert chunks(job) == (0, 4)
    assert bench.stores.pinned_blocks == 4 * PER_CHUNK
    assert idle(bench) == []  # it is on its way
    report(bench, job)
    bench.pool.free_blocks(rest)


def test_what_is_pinned_has_not_left_and_leaves_next() -> None:
    bench = Bench(blocks=1 + 10 * PER_CHUNK, near=NEAR, pinned_fraction=0.2)  # two chunks
    serve(bench, "a", 2)
    serve(bench, "b", 2)
    taken = take(bench, 6 * PER_CHUNK)
    (job,) = idle(bench)
    assert chunks(job) == (0, 2)
    of_a = set(job.blocks[0])
    assert of_a.isdisjoint(block.block_id for block in taken)
    report(bench, job)
    assert {block.block_id for block in take(bench, 2 * PER_CHUNK)} == of_a  # not b, which is younger
    (other,) = idle(bench)
    assert set(other.blocks[0]).isdisjoint(of_a)


def test_what_moves_up_in_place_of_what_is_pinned_is_stored_in_the_same_step(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        serve(bench, name, 2)
    rest = take(bench, 4 * PER_CHUNK)
    jobs = idle(bench)
    assert [chunks(job) for job in jobs] == [(0, 2), (0, 2), (0, 1)]  # no more: pins are bounded
    assert bench.counters["chunks_skipped_window"] == 0
    for job in jobs:
        report(bench, job)
    bench.pool.free_blocks(rest)


def test_what_has_a_step_to_go_is_not_stored_because_others_are(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        serve(bench, name, 2)
    take(bench, 4 * PER_CHUNK - NEAR // 2 - 1)
    (job,) = idle(bench)
    assert chunks(job) == (0, 2)  # before b's there are still as many blocks as the next step takes


def test_nothing_is_stored_twice(bench: Bench) -> None:
    serve(bench, "a", 4)
    rest = take(bench, 5 * PER_CHUNK)
    (job,) = idle(bench)
    report(bench, job)
    for _ in range(3):
        assert idle(bench) == []
        serve_again = Request("again", 4 * CHUNK, prompt="a")
        bench.tables["again"] = [bench.pool.get_cached_block(value, [0])[0] for value in serve_again.block_hashes]
        bench.pool.touch(bench.tables["again"])
        bench.stores.on_new_request(serve_again, bench.active.generation)
        assert bench.step(serve_again, 4 * CHUNK) == []
        bench.finish(serve_again)
    bench.pool.free_blocks(rest)


def test_what_left_before_it_could_be_stored_is_counted_and_the_rest_is_stored(bench: Bench) -> None:
    serve(bench, "a", 3)
    rest = take(bench, 7 * PER_CHUNK + 1)  # in one step: more than was foreseen
    (job,) = idle(bench)
    assert chunks(job) == (0, 2)
    report(bench, job)
    bench.pool.free_blocks(rest)
    serve(bench, "b", 7)  # into those blocks
    idle(bench)
    assert bench.counters["chunks_skipped_window"] == 1


def test_pins_are_bounded_and_the_rest_follows_in_its_order() -> None:
    bench = Bench(blocks=1 + 10 * PER_CHUNK, near=NEAR, pinned_fraction=0.2)
    serve(bench, "a", 5)
    order = [block.block_id for block in bench.pool.free_block_queue.get_all_free_blocks()]
    rest = take(bench, 4 * PER_CHUNK)
    found = []
    while jobs := idle(bench):
        assert bench.stores.pinned_blocks <= 0.2 * bench.pool.num_gpu_blocks
        found += [chunks(job) for job in jobs]
        for job in jobs:
            report(bench, job)
    assert found == [(0, 2), (2, 4), (4, 5)]
    left = [block.block_id for block in bench.pool.free_block_queue.get_all_free_blocks()]
    assert left == order[4 * PER_CHUNK :]  # nothing has become younger or older
    bench.pool.free_blocks(rest)


def test_a_head_that_the_daemon_has_lost_is_stored_again_a_few_times(bench: Bench) -> None:
    serve(bench, "a", 4)
    rest = take(bench, 5 * PER_CHUNK)
    found = []
    for _ in range(6):
        jobs = idle(bench)
        if not jobs:
            break
        found += [chunks(job) for job in jobs]
        report(bench, jobs[0], StoreEnd.ORPHAN, missing=1)
    assert found == [(0, 4), (1, 4), (1, 4), (1, 4)]
    assert bench.stores.pinned_blocks == 0
    bench.pool.free_blocks(rest)


def test_a_store_that_failed_is_not_repeated_in_every_step(bench: Bench) -> None:
    serve(bench, "a", 2)
    rest = take(bench, 7 * PER_CHUNK)
    (job,) = idle(bench)
    report(bench, job, StoreEnd.FAILED)
    assert idle(bench) == []
    bench.pool.free_blocks(rest)


def test_after_a_reset_nothing_of_before_is_stored(bench: Bench) -> None:
    serve(bench, "a", 4)
    bench.stores.on_reset()
    bench.stores.blocked = False
    take(bench, 5 * PER_CHUNK)
    assert idle(bench) == []


def test_a_request_that_wants_it_is_stored_at_once(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.stores.on_new_request(request, bench.active.generation, at_once=True)
    assert [chunks(job) for job in bench.step(request, 2 * CHUNK)] == [(0, 2)]


def test_low_priority_leaves_half_of_the_pins_to_others() -> None:
    bench = Bench(blocks=101, pinned_fraction=0.16)
    request = bench.add(Request("a", 4 * CHUNK))
    bench.stores.on_new_request(request, bench.active.generation, low=True)
    assert [chunks(job) for job in bench.step(request, 4 * CHUNK)] == [(0, 2)]
    other = bench.add(Request("b", 2 * CHUNK, prompt="b"))
    assert [chunks(job) for job in bench.step(other, 2 * CHUNK)] == [(0, 2)]


def test_a_step_that_takes_no_block_looks_at_the_head_only(bench: Bench) -> None:
    serve(bench, "a", 4)
    idle(bench)
    assert bench.leaving is not None
    bench.leaving._queued = None  # type: ignore[assignment]  # would raise if it was called
    for _ in range(3):
        assert idle(bench) == []
    assert bench.guard.counters == {}


def test_records_never_outnumber_blocks_and_pins_come_back(seed: int) -> None:
    bench, source = Bench(blocks=1 + 10 * PER_CHUNK, near=NEAR, pinned_fraction=0.4), random.Random(seed)
    stored = 0
    under_way: list[StoreJob] = []
    for _ in range(400):
        if bench.pool.get_num_free_blocks() >= 3 * PER_CHUNK:
            under_way += serve(bench, f"p{source.randrange(30)}", source.randrange(1, 4))
        for job in [job for job in under_way if source.random() < 0.7]:
            under_way.remove(job)
            report(bench, job, source.choice([StoreEnd.DONE] * 5 + [StoreEnd.FULL, StoreEnd.FAILED]))
            stored += 1
        under_way += idle(bench)
        assert bench.leaving is not None
        assert len(bench.leaving) <= 10 * PER_CHUNK
        assert bench.stores.pinned_blocks <= 0.4 * bench.pool.num_gpu_blocks
    for job in under_way:
        report(bench, job)
    assert bench.stores.pinned_blocks == 0
    assert bench.pool.get_num_free_blocks() == 10 * PER_CHUNK
    assert bench.guard.counters == {}
    assert stored > 20
    assert {kept.stage for kept in bench.leaving._by_chunk.values()} <= {Stage.WAITS, Stage.STORED, Stage.LOST}
    assert BLOCK * PER_CHUNK == CHUNK


# ---- with an engine --------------------------------------------------------------------------------------------------

POOL_BLOCKS, STEP = 160, 128


@pytest.fixture(scope="module")
def engine(shared_daemon: Daemon, make_engine: Callable[..., Engine]) -> Engine:
    small = {"num_gpu_blocks_override": POOL_BLOCKS, "max_num_batched_tokens": STEP, "max_num_seqs": 4}
    started = make_engine(daemon=shared_daemon, engine=small, options=PATIENCE | {"kvkeep.store_when": "leaving"})
    return started.ready()


def counted(engine: Engine, name: str) -> int:
    return int(engine.ask("settle")["counters"].get(name, 0))


def test_an_engine_stores_what_leaves_it_and_gets_it_back(engine: Engine, reference: Engine) -> None:
    prompts = [prompt(9000 + n, 8 * CHUNK + 5) for n in range(12)]  # 17 blocks each: the engine can keep nine
    wanted = reference.generate(prompts)
    got = [engine.generate([one])[0] for one in prompts[:2]]
    assert counted(engine, "chunks_stored") == 0
    assert [engine.generate([one])[0] for one in prompts[:2]] == got  # from the engine itself
    assert counted(engine, "chunks_stored") == 0
    got += [engine.generate([one])[0] for one in prompts[2:]]
    assert_same_outputs(got, wanted)
    stored, lost = counted(engine, "chunks_stored"), counted(engine, "chunks_skipped_window")
    assert stored >= 2 * 8  # how much leaves before it is stored depends on how long copies take, in steps
    assert stored + lost >= 3 * 8
    before = engine.external_hits()
    assert_same_outputs([engine.generate([one])[0] for one in prompts[:2]], wanted[:2])
    assert engine.external_hits() - before == 2 * 8 * CHUNK


def test_while_nothing_leaves_the_engine_sends_nothing(engine: Engine) -> None:
    once = prompt(9100, 4 * CHUNK)
    engine.generate([once])
    before = engine.ask("settle")
    engine.generate([once], max_tokens=48)
    after = engine.ask("settle")
    names = ("STORE", "COMMIT")
    assert [after["sent"].get(name, 0) for name in names] == [before["sent"].get(name, 0) for name in names]
    assert_nothing_held(after)


def test_an_unknown_time_to_store_is_refused() -> None:
    from kvkeep.ipc.extra_config import OptionError
    from kvkeep.ipc.vllm.options import parse

    with pytest.raises(OptionError, match=r"kvkeep.store_when is 'lazy': it must be 'complete' or 'leaving'"):
        parse({"kvkeep.store_when": "lazy"})
