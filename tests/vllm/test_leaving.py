"""Chunks that are stored only when they are about to leave the engine."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request as VllmRequest

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm.controls import Scope
from kvkeep.ipc.vllm.events import Events
from kvkeep.ipc.vllm.groups import ABSENT, groups_of
from kvkeep.ipc.vllm.groups import chunks as cut_chunks
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.leaving import Kept, Leaving, Stage
from kvkeep.ipc.vllm.lookups import Active, Lookups
from kvkeep.ipc.vllm.metadata import StoreEnd, StoreJob, StoreReport
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.scheduler import SchedulerHalf
from kvkeep.ipc.vllm.stats import Tally
from kvkeep.ipc.vllm.stores import Stores
from tests.conftest import Daemon
from tests.vllm.bench import BLOCK, CHUNK, PER_CHUNK, Bench, Request
from tests.vllm.engines import Engine
from tests.vllm.fake_client import FakeClient, FakeDaemon
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.test_identity import engine as identity_engine
from tests.vllm.test_model_families import PATIENCE
from tests.vllm.tiny_model import prompt

NEAR = 2 * PER_CHUNK


@pytest.fixture
def bench() -> Bench:
    return Bench(blocks=1 + 10 * PER_CHUNK, near=NEAR, pinned_fraction=0.5)


def serve(bench: Bench, name: str, chunks: int, tokens: int = 0) -> list[StoreJob]:
    """A prompt is computed (or only so many of its tokens), its blocks are in the engine's prefix cache, and it ends.
    The jobs of its step."""
    request = bench.add(Request(name, chunks * CHUNK, prompt=name))
    for n, (value, block) in enumerate(zip(request.block_hashes, bench.tables[name], strict=True), 1):
        if bench.pool.get_cached_block(value, [0]) is None:
            bench.pool._insert_block_hash(make_block_hash_with_group_id(value, 0), block, n * BLOCK)
    jobs = bench.step(request, tokens or chunks * CHUNK)
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


def test_what_a_prompt_had_computed_when_it_was_aborted_is_stored_when_it_leaves(bench: Bench) -> None:
    serve(bench, "a", 3, tokens=CHUNK)
    rest = take(bench, 8 * PER_CHUNK)
    (job,) = idle(bench)
    assert chunks(job)[0] == 0
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
    found = []
    while jobs := idle(bench):  # not all at once: as many blocks as a step takes stay free
        found += [chunks(job) for job in jobs]
        for job in jobs:
            report(bench, job)
    assert found == [(0, 1), (1, 2)]
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


# ---- whose blocks they are -------------------------------------------------------------------------------------------

STEP_TOKENS = 512


class Manager:
    """vLLM's own KV cache manager with our stores, and what each block holds, by the tokens' hashes."""

    def __init__(self, *specs: Any, blocks: int = 141, prefill_lookahead: int = 0) -> None:
        init_none_hash(sha256)
        groups = [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)]
        config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=0
        )
        sizes = {"scheduler_block_size": BLOCK, "hash_block_size": BLOCK, "max_in_flight_tokens": STEP_TOKENS}
        self.manager = KVCacheManager(config, max_model_len=4096, num_prefill_lookahead=prefill_lookahead, **sizes)
        self.pool = self.manager.block_pool
        self.client = FakeClient(FakeDaemon())
        self.guard, self.tally, options = Guard(print), Tally(), Options(pinned_fraction=0.5)
        self.lookups = Lookups(self.client, options, self.guard, self.tally)  # type: ignore[arg-type]
        self.leaving = Leaving(self.pool, 40, 10)
        self.stores = Stores(
            self.pool,
            options,
            self.lookups,
            self.guard,
            self.tally,
            leaving=self.leaving,
            blocks_of=lambda name: self.manager.get_blocks(name).blocks,
        )
        space = self.client.register({}, shard_bytes=256)
        self.active = Active(space, 0, CHUNK, groups_of(config), BLOCK, chunk_bytes=256)
        self.holds: dict[int, Any] = {}
        self.wrong: list[int] = []
        self.right = 0
        self.chunk_of: dict[bytes, list[bytes]] = {}

    def request(self, name: str, tokens: list[int], *, output: int = 1) -> VllmRequest:
        made = VllmRequest(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=output),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        for n in range(len(tokens) // CHUNK):
            of_chunk = [bytes(value) for value in made.block_hashes[n * PER_CHUNK : (n + 1) * PER_CHUNK]]
            self.chunk_of[of_chunk[-1]] = of_chunk
        self.stores.on_new_request(made, 0, Scope.PROMPT)
        return made

    def compute(self, request: VllmRequest) -> None:
        """Its tokens, in steps."""
        name = request.request_id
        while (left := request.num_tokens - request.num_computed_tokens) > 0:
            base, count = request.num_computed_tokens, min(STEP_TOKENS, left)
            assert self.manager.allocate_slots(request, count) is not None
            jobs = self.stores.new_jobs(SimpleNamespace(num_scheduled_tokens={name: count}), self.active)
            for group, blocks in enumerate(self.manager.get_blocks(name).blocks):
                for n in range(base // BLOCK, -(-(base + count) // BLOCK)):
                    if not blocks[n].is_null:
                        whole = n < len(request.block_hashes)
                        self.holds[blocks[n].block_id] = (group, bytes(request.block_hashes[n]) if whole else name)
            self.check(jobs)
            request.num_computed_tokens += count

    def end(self, request: VllmRequest) -> None:
        self.manager.free(request)
        self.stores.on_finished(request.request_id)

    def idle(self) -> None:
        self.check(self.stores.new_jobs(SimpleNamespace(num_scheduled_tokens={}), self.active))

    def check(self, jobs: list[StoreJob]) -> None:
        for job in jobs:
            hashes = [job.hashes[at : at + HASH_BYTES] for at in range(0, len(job.hashes), HASH_BYTES)][job.start :]
            for value, part in zip(hashes, cut_chunks(job.blocks, len(hashes)), strict=True):
                for group, ids in enumerate(part):
                    for block, wanted in zip(ids, self.chunk_of[value], strict=True):
                        if block != ABSENT and self.holds.get(block) != (group, wanted):
                            self.wrong.append(block)
                        self.right += block != ABSENT
            self.stores.on_report(StoreReport(job.job_id, StoreEnd.DONE, 1))


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding() -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=32)


@pytest.mark.parametrize("specs", [(full(),), (full(), sliding())])
def test_no_other_requests_block_is_stored_whatever_has_no_hash(specs: tuple[Any, ...], seed: int) -> None:
    """vLLM keeps most blocks behind a window without a hash; the same blocks hold other tokens later, without one."""
    source, kv = random.Random(seed), Manager(*specs)
    decoding = kv.request("decoding", [source.randrange(1000) for _ in range(12)], output=500)
    for _ in range(5):  # its next token takes new blocks
        kv.compute(decoding)
        decoding.append_output_token_ids(source.randrange(1000))
    leaves = kv.request("leaves", [source.randrange(1000) for _ in range(300)])
    kv.compute(leaves)
    kv.end(leaves)
    kv.compute(decoding)
    for block in kv.pool.get_new_blocks(kv.pool.get_num_free_blocks() - 50):  # a load: no hash before it ends
        kv.holds[block.block_id] = "load"
    kv.idle()
    assert kv.wrong == []
    assert kv.guard.counters == {}
    assert (kv.right > 0) == (len(specs) == 1)


def test_a_block_that_the_engine_does_not_cache_yet_is_not_recorded() -> None:
    """Multi-module MTP computes the last tokens of a prompt once more."""
    kv = Manager(full(), prefill_lookahead=3)
    request = kv.request("a", list(range(2 * CHUNK)))
    kv.compute(request)
    assert len(kv.leaving) == 1
    assert all(value is not None for kept in kv.leaving._by_chunk.values() for value in kept.hashes)
    kv.end(request)
    assert kv.tally.totals["chunks_skipped_window"] == 1


def test_a_chunk_whose_blocks_a_window_passed_has_no_record_that_stays(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.pool.free_blocks(bench.tables["a"])
    bench.tables["a"] = [bench.pool.null_block] * 2 * PER_CHUNK
    assert bench.step(request, 2 * CHUNK) == []
    assert bench.leaving is not None
    assert len(bench.leaving) == 0
    bench.tables["a"] = []
    bench.finish(request)
    assert bench.counters["chunks_skipped_window"] == 2


def make_half(*specs: Any, log: Callable[[str], None]) -> SchedulerHalf:
    vllm_config, kv = identity_engine(Path("/nowhere"))
    vllm_config.lora_config = vllm_config.kv_events_config = None
    vllm_config.cache_config.enable_prefix_caching = True
    vllm_config.scheduler_config = SimpleNamespace(max_num_batched_tokens=STEP_TOKENS)
    half = SchedulerHalf(vllm_config, kv, Options(store_when="leaving"), Guard(print), log)
    half._groups = groups_of(SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["l"], spec) for spec in specs]))  # type: ignore[arg-type]
    half.bind_block_pool(BlockPool(101, True, BLOCK))
    return half


def test_with_a_window_chunks_are_stored_when_complete_and_a_line_says_so() -> None:
    said: list[str] = []
    assert make_half(full(), log=said.append)._make_leaving() is not None
    assert said == []
    assert make_half(full(), sliding(), log=said.append)._make_leaving() is None
    (line,) = said
    assert "kvkeep.store_when" in line
    assert "stored when complete" in line


# ---- what it costs the engine ----------------------------------------------------------------------------------------


def test_a_long_prompt_costs_a_look_at_what_fits_and_nothing_while_it_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        method = getattr(Kept if name == "here" else Leaving, name)
        monkeypatch.setattr(
            Kept if name == "here" else Leaving,
            name,
            lambda *args, **kw: (calls.update([name]), method(*args, **kw))[1],
        )

    bench = Bench(blocks=1 + 100 * PER_CHUNK, near=80, pinned_fraction=0.1)  # ten chunks
    serve(bench, "a", 80)
    taken = take(bench, 10 * PER_CHUNK)
    for name in ("here", "_chain", "_missing", "_queued"):
        count(name)
    (job,) = idle(bench)
    assert chunks(job) == (0, 10)
    assert calls["here"] <= 10
    calls.clear()
    for _ in range(3):
        assert idle(bench) == []
    assert calls == {}
    report(bench, job)
    (job,) = idle(bench)
    assert chunks(job) == (10, 20)
    assert calls["here"] <= 10
    bench.pool.free_blocks(taken)


def test_what_is_stored_leaves_free_blocks_to_running_requests() -> None:
    bench = Bench(blocks=101, near=24, pinned_fraction=0.25)  # a step takes twelve
    for name in "abcdef":
        serve(bench, name, 1)
    take(bench, 100 - 24)  # what is free holds cached prompts
    assert len(idle(bench)) == 3
    assert bench.pool.get_num_free_blocks() == 12
    for _ in range(3):
        take(bench, 1)
        assert idle(bench) == []


def test_a_request_without_a_block_waits_for_stores_and_no_others_begin() -> None:
    bench = Bench(blocks=101, near=24, pinned_fraction=0.25)
    for name in "abcdef":
        serve(bench, name, 1)
    take(bench, 100 - 24)
    assert not bench.stores.frees_soon()
    jobs = idle(bench)
    take(bench, 12)
    assert bench.stores.frees_soon()  # and nobody is preempted
    report(bench, jobs.pop())
    assert idle(bench) == []  # what has come back is that request's
    bench.pool.touch([bench.pool.blocks[block] for job in jobs for block in job.blocks[0]])  # others have these, too
    assert not bench.stores.frees_soon()
    take(bench, PER_CHUNK)
    for job in jobs:
        report(bench, job)
    assert not bench.stores.frees_soon()


def test_a_store_past_its_deadline_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(blocks=101, near=24, pinned_fraction=0.25)
    serve(bench, "a", 1)
    take(bench, 100 - 24)
    assert len(idle(bench)) == 1
    now = time.monotonic()
    monkeypatch.setattr("kvkeep.ipc.vllm.stores.time.monotonic", lambda: now + Options().transfer_deadline_s + 1)
    assert not bench.stores.frees_soon()


# ---- what the daemon lost --------------------------------------------------------------------------------------------


def ask_again(bench: Bench, name: str, count: int) -> None:
    """The same prompt comes again, finds its blocks in the engine, and its lookup is answered."""
    request = Request("again", count * CHUNK, prompt=name)
    bench.stores.on_new_request(request, bench.active.generation)
    bench.lookups.matched_tokens(request, 0, bench.active)  # type: ignore[arg-type]
    bench.lookups.after_alloc(request, None, 0, 0)  # type: ignore[arg-type]
    bench.tables["again"] = [bench.pool.get_cached_block(value, [0])[0] for value in request.block_hashes]
    bench.pool.touch(bench.tables["again"])
    bench.step(request, count * CHUNK)
    bench.finish(request)


@pytest.mark.parametrize("end", [StoreEnd.DONE, StoreEnd.FULL])
def test_what_the_daemon_does_not_have_any_more_is_stored_when_it_leaves(bench: Bench, end: StoreEnd) -> None:
    serve(bench, "a", 4)
    rest = take(bench, 5 * PER_CHUNK)
    (job,) = idle(bench)
    report(bench, job, end)
    bench.put(Request("a", 4 * CHUNK, prompt="a"), 2)
    ask_again(bench, "a", 4)  # two are there
    bench.pool.free_blocks(rest)
    take(bench, 6 * PER_CHUNK)
    assert [chunks(job) for job in idle(bench)] == [(2, 4)]


def test_a_silent_daemon_says_nothing_of_what_it_has(bench: Bench) -> None:
    serve(bench, "a", 4)
    rest = take(bench, 5 * PER_CHUNK)
    (job,) = idle(bench)
    report(bench, job)
    bench.daemon.answer_lookups = False
    ask_again(bench, "a", 4)
    bench.pool.free_blocks(rest)
    take(bench, 6 * PER_CHUNK)
    assert idle(bench) == []


def test_another_daemon_gets_what_leaves_the_engine(bench: Bench) -> None:
    serve(bench, "a", 4)
    serve(bench, "b", 2)
    rest = take(bench, 4 * PER_CHUNK)
    first, *others = idle(bench)
    report(bench, first)
    bench.stores.on_other_daemon()
    for job in others:
        report(bench, job)  # what the one before has
    assert bench.leaving is not None
    assert {kept.stage for kept in bench.leaving._by_chunk.values()} == {Stage.WAITS}
    assert chunks(idle(bench)[0]) == (0, 4)
    bench.pool.free_blocks(rest)


def test_a_new_epoch_of_the_daemon_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    half = make_half(full(), log=print)
    calls: list[int] = []
    monkeypatch.setattr(bench.stores, "on_other_daemon", lambda: calls.append(1))
    half.stores, half._client, half._facts = bench.stores, bench.client, object()  # type: ignore[assignment]
    spec = SimpleNamespace(generation=0, chunk_tokens=CHUNK, shard_bytes=1, shards=1)
    half._keeper = SimpleNamespace(current=SimpleNamespace(namespace=None, spec=spec))  # type: ignore[assignment]
    half.active()
    calls.clear()
    half.active()
    assert calls == []
    monkeypatch.setattr(bench.client, "epoch", 7, raising=False)
    half.active()
    assert calls == [1]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_record_does_not_keep_its_request_and_the_event_is_the_same() -> None:
    init_none_hash(sha256)
    spec = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["l"], full())])
    events = Events(spec, BLOCK)  # type: ignore[arg-type]
    bench = Bench(blocks=1 + 10 * PER_CHUNK, near=NEAR, pinned_fraction=0.5, events=events)
    request = VllmRequest(
        request_id="a",
        prompt_token_ids=list(range(3 * CHUNK)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt="tenant",
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    chain = bench.active.chain(request, 3)
    events.planned(0, request, chain, 0, CHUNK)
    events.settled(0, stored=True)
    wanted = events.take()
    bench.add(request)  # type: ignore[arg-type]
    for n, (value, block) in enumerate(zip(request.block_hashes, bench.tables["a"], strict=True), 1):
        bench.pool._insert_block_hash(make_block_hash_with_group_id(value, 0), block, n * BLOCK)
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 3 * CHUNK},
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: ([block.block_id for block in bench.tables[name]],)
        ),
    )
    assert bench.stores.new_jobs(output, bench.active) == []
    bench.finish(request)  # type: ignore[arg-type]
    gone = weakref.ref(request)
    del request
    gc.collect()
    assert gone() is None
    rest = take(bench, 6 * PER_CHUNK)
    (job,) = idle(bench)
    assert chunks(job) == (0, 3)
    report(bench, job)
    assert events.take() == wanted
    bench.pool.free_blocks(rest)


def test_a_request_that_was_preempted_is_recorded_again() -> None:
    bench = Bench(blocks=101, near=8, pinned_fraction=0.5)
    request = bench.add(Request("a", 4 * CHUNK))

    def cached() -> None:
        for n, (value, block) in enumerate(zip(request.block_hashes, bench.tables["a"], strict=True), 1):
            if block.block_hash is None:
                bench.pool._insert_block_hash(make_block_hash_with_group_id(value, 0), block, n * BLOCK)

    cached()
    bench.step(request, 4 * CHUNK)
    bench.free(request)
    request.num_computed_tokens, request.num_preemptions = 2 * CHUNK, 1
    bench.tables["a"] = bench.pool.get_new_blocks(4 * PER_CHUNK)
    cached()
    bench.step(request, CHUNK)
    bench.step(request, CHUNK)
    request.grow(2 * CHUNK)
    bench.tables["a"] += bench.pool.get_new_blocks(2 * PER_CHUNK)
    cached()
    bench.step(request, 2 * CHUNK)
    assert bench.guard.counters == {}
    assert bench.leaving is not None
    assert len(bench.leaving) == 6


def test_a_table_that_is_too_short_gives_no_records(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.pool.free_blocks([bench.tables["a"].pop()])
    assert bench.step(request, 2 * CHUNK) == []
    assert sum(bench.guard.counters.values()) == 1
    assert bench.leaving is not None
    assert len(bench.leaving) == 0


@pytest.mark.parametrize("where", ["_place", "touch"])
def test_a_job_that_cannot_be_made_leaves_the_others_of_its_step(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    bench = Bench(blocks=1 + 20 * PER_CHUNK, near=4 * PER_CHUNK, pinned_fraction=0.5)
    for name, count in (("a", 1), ("b", 2), ("c", 1)):
        serve(bench, name, count)
    owner: Any = Leaving if where == "_place" else bench.pool
    method, calls = getattr(owner, where), Counter[str]()

    def sometimes(*args: Any) -> Any:
        calls[where] += 1
        if calls[where] == 2:
            raise RuntimeError
        return method(*args)

    monkeypatch.setattr(owner, where, sometimes)
    take(bench, 16 * PER_CHUNK)
    free = bench.pool.get_num_free_blocks()
    jobs = idle(bench)
    assert len(jobs) == 2
    assert bench.stores.pinned_blocks == 2 * PER_CHUNK == free - bench.pool.get_num_free_blocks()
    for job in jobs:
        report(bench, job)
    assert bench.leaving is not None
    assert Stage.STORING not in {kept.stage for kept in bench.leaving._by_chunk.values()}
    assert bench.stores.pinned_blocks == 0
    assert bench.pool.get_num_free_blocks() == free
    assert sum(bench.guard.counters.values()) == 1


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


def test_running_requests_are_not_preempted_for_stores(engine: Engine, reference: Engine) -> None:
    engine.generate([prompt(9200 + n, 9 * CHUNK) for n in range(10)])  # they leave while the next ones run
    prompts = [prompt(9300 + n, 16 * CHUNK) for n in range(4)]  # 34 blocks each at their end, of 159
    before, stored = engine.ask("preemptions"), counted(engine, "chunks_stored")
    engine.ask("fault", slow_stores_s=1.0)
    got = engine.generate(prompts, max_tokens=60)
    assert engine.ask("preemptions") == before
    engine.ask("fault", slow_stores_s=0.0)
    assert counted(engine, "chunks_stored") > stored
    assert_same_outputs(got, reference.generate(prompts, max_tokens=60))
    assert_nothing_held(engine.ask("settle"))


def test_an_unknown_time_to_store_is_refused() -> None:
    from kvkeep.ipc.extra_config import OptionError
    from kvkeep.ipc.vllm.options import parse

    with pytest.raises(OptionError, match=r"kvkeep.store_when is 'lazy': it must be 'complete' or 'leaving'"):
        parse({"kvkeep.store_when": "lazy"})
