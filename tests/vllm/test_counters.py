"""Each event moves its counters once, and no others; failures, too."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.ipc.vllm.metadata import LoadFailure, LoadReport, StoreEnd, StoreJob, StoreReport
from kvkeep.ipc.vllm.stats import Tally
from tests.vllm.bench import BLOCK, CHUNK, PER_CHUNK, SHARD_BYTES, Bench, Request


def moved(tally: Tally) -> dict[str, int]:
    """What went to vLLM since the last call."""
    stats = tally.take()
    return dict(stats.data["add"]) if stats is not None else {}


def ask(bench: Bench, request: Request, local: int = 0) -> int | None:
    return bench.lookups.matched_tokens(request, local, bench.active)


def admitted(bench: Bench, chunks: int = 2, *, local: int = 0, at_once: int | None = None) -> Request:
    """A request whose load is under way; what came before is taken from the tally."""
    request = bench.add(Request("a", chunks * CHUNK))
    bench.put(request, chunks)
    tokens = ask(bench, request, local)
    assert tokens
    if at_once is not None:
        bench.lookups._states["a"].lookup.at_once = at_once
    moved(bench.tally)
    bench.lookups.after_alloc(request, bench.blocks_of(request), tokens, bench.active.generation)
    return request


@pytest.fixture
def bench() -> Bench:
    return Bench(min_hit=0)


def test_a_lookup_ends_as_a_hit_or_a_miss_however_often_vllm_asks(bench: Bench) -> None:
    there, absent = bench.add(Request("a", 2 * CHUNK)), bench.add(Request("b", 2 * CHUNK, prompt="never stored"))
    bench.put(there, 2)
    for request, end in ((there, "lookups_hit"), (absent, "lookups_miss")):
        for _ in range(3):
            ask(bench, request)
        stats = bench.tally.take()
        assert stats is not None
        assert stats.data["add"] == {end: 1}
        assert len(stats.data["seen"]["lookup_seconds"]) == 1


def test_a_lookup_that_nobody_waits_for_is_dropped_and_one_without_an_answer_expires() -> None:
    bench = Bench(lookup_deadline_ms=1.0, min_hit=0)
    bench.daemon.answer_lookups = False
    dropped, late = bench.add(Request("a", CHUNK)), bench.add(Request("b", CHUNK, prompt="q"))
    bench.lookups.on_new_request(dropped, bench.active)
    bench.finish(dropped)
    assert moved(bench.tally) == {"lookups_dropped": 1}
    while ask(bench, late) is None:
        pass
    bench.finish(late)
    stats = bench.tally.take()
    assert stats is not None
    assert stats.data["add"] == {"lookups_expired": 1}
    assert stats.data["seen"]["lookup_seconds"][0] >= 0.001


def test_a_prompt_shorter_than_a_chunk_counts_nothing(bench: Bench) -> None:
    request = bench.add(Request("a", CHUNK - 1))
    bench.lookups.on_new_request(request, bench.active)
    ask(bench, request)
    bench.finish(request)
    assert bench.tally.take() is None


@pytest.mark.parametrize(("at_once", "l1"), [(3, 2 * CHUNK + BLOCK), (2, CHUNK + BLOCK), (1, BLOCK), (0, 0)])
def test_the_tokens_of_a_hit_are_told_apart_by_when_they_came(bench: Bench, at_once: int, l1: int) -> None:
    admitted(bench, 3, local=CHUNK - BLOCK, at_once=at_once)
    counts = moved(bench.tally)
    assert counts.get("hit_tokens_l1", 0) == l1
    assert counts.get("hit_tokens_l1", 0) + counts.get("hit_tokens_l2", 0) == 2 * CHUNK + BLOCK
    assert counts.get("hit_bytes_l1", 0) == l1 * SHARD_BYTES // CHUNK
    by_tier = {tier.value: tokens for tier, tokens in bench.lookups.tokens_by_tier("a").items() if tokens}
    assert by_tier == {tier: counts[f"hit_tokens_{tier}"] for tier in ("l1", "l2") if f"hit_tokens_{tier}" in counts}


def test_a_load_counts_its_tokens_when_it_has_ended(bench: Bench) -> None:
    admitted(bench)
    moved(bench.tally)
    for _ in range(2):  # the second is none of ours
        bench.lookups.on_load_report(LoadReport("a", None, True))
    stats = bench.tally.take()
    assert stats is not None
    assert stats.data["add"] == {"loads": 1, "loaded_tokens": 2 * CHUNK, "loaded_bytes": 2 * SHARD_BYTES}
    assert len(stats.data["seen"]["load_seconds"]) == 1


@pytest.mark.parametrize("failure", list(LoadFailure))
def test_a_failed_load_counts_its_reason_and_its_tokens(bench: Bench, failure: LoadFailure) -> None:
    admitted(bench)
    moved(bench.tally)
    bench.lookups.on_load_report(LoadReport("a", failure, False))
    assert moved(bench.tally) == {
        f"load_failures_{failure.value}": 1,
        "failed_tokens": 2 * CHUNK,
        "failed_bytes": 2 * SHARD_BYTES,
    }


def test_what_is_good_of_a_failed_load_counts_as_loaded(bench: Bench) -> None:
    admitted(bench, 3, local=CHUNK - BLOCK)
    moved(bench.tally)
    bench.lookups.on_load_report(LoadReport("a", LoadFailure.INVALID, True, good_chunks=1))
    counts = moved(bench.tally)
    assert (counts["loaded_tokens"], counts["failed_tokens"]) == (BLOCK, 2 * CHUNK)
    assert counts["load_failures_invalid"] == 1
    assert "loads" not in counts


def test_a_load_of_two_ranks_is_counted_once_with_the_first_reason_and_the_least_that_is_good() -> None:
    for reports, expected in (
        ([None, None], {"loads": 1, "loaded_tokens": 3 * CHUNK}),
        ([None, LoadFailure.DEADLINE], {"load_failures_deadline": 1, "failed_tokens": 3 * CHUNK}),
        ([LoadFailure.INVALID, LoadFailure.CANCELLED], {"load_failures_invalid": 1, "failed_tokens": 3 * CHUNK}),
    ):
        bench = Bench(min_hit=0)
        bench.lookups._ranks = 2
        admitted(bench, 3)
        moved(bench.tally)
        for number, failure in enumerate(reports):
            bench.lookups.on_load_report(LoadReport("a", failure, False, good_chunks=0 if number else 2))
        counts = moved(bench.tally)
        assert {key: value for key, value in counts.items() if not key.endswith("_bytes")} == expected


@pytest.mark.parametrize("good", [(1, 2), (2, 1)])
def test_of_what_two_ranks_read_only_what_both_have_is_loaded(good: tuple[int, int]) -> None:
    bench = Bench(min_hit=0)
    bench.lookups._ranks = 2
    admitted(bench, 3)
    moved(bench.tally)
    for chunks in good:
        bench.lookups.on_load_report(LoadReport("a", LoadFailure.INVALID, True, good_chunks=chunks))
    counts = moved(bench.tally)
    assert (counts["loaded_tokens"], counts["failed_tokens"]) == (CHUNK, 2 * CHUNK)


def test_a_promise_that_cannot_be_kept_is_a_failed_load(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.lookups.after_alloc(request, bench.blocks_of(request), CHUNK, 0)  # nobody was told of a hit
    assert moved(bench.tally) == {"hit_tokens_l1": CHUNK}
    bench.lookups.on_load_report(LoadReport("a", LoadFailure.ERROR, False))
    assert moved(bench.tally) == {"load_failures_error": 1, "failed_tokens": CHUNK}


def job_of(bench: Bench, chunks: int = 2) -> StoreJob:
    request = bench.add(Request("a", chunks * CHUNK))
    (job,) = bench.step(request, chunks * CHUNK)
    assert isinstance(job, StoreJob)
    return job


@pytest.mark.parametrize("end", list(StoreEnd))
def test_a_store_is_counted_by_how_it_ended_with_what_it_stored(bench: Bench, end: StoreEnd) -> None:
    job = job_of(bench)
    assert moved(bench.tally) == {}
    bench.stores.on_report(StoreReport(job.job_id, end, stored=1))
    stats = bench.tally.take()
    assert stats is not None
    assert stats.data["add"] == {f"stores_{end.value}": 1, "stored_tokens": CHUNK, "stored_bytes": SHARD_BYTES}
    assert len(stats.data["seen"]["store_seconds"]) == 1


def test_a_store_of_two_ranks_is_counted_once_by_the_worse_end(bench: Bench) -> None:
    bench.stores._ranks = 2
    job = job_of(bench)
    bench.stores.on_report(StoreReport(job.job_id, StoreEnd.DONE, stored=2))
    assert bench.tally.take() is None
    bench.stores.on_report(StoreReport(job.job_id, StoreEnd.FAILED, stored=1))
    counts = moved(bench.tally)
    assert (counts["stores_failed"], counts["stored_tokens"]) == (1, CHUNK)
    assert "stores_done" not in counts


def test_chunks_for_which_there_is_no_room_are_counted_as_skipped() -> None:
    bench = Bench(pinned_fraction=(2 * PER_CHUNK + 1) / 101, min_hit=0)
    job_of(bench, 5)
    assert moved(bench.tally) == {"chunks_skipped_pins": 3}


def test_a_step_that_completes_no_chunk_makes_no_payload(bench: Bench) -> None:
    request = bench.add(Request("a", CHUNK), blocks=10)
    (job,) = bench.step(request, CHUNK)
    bench.stores.on_report(StoreReport(job.job_id, StoreEnd.DONE, 1))
    bench.tally.take()
    for _ in range(CHUNK // 2):
        request.grow(1)
        assert bench.step(request, 1) == []
        assert bench.tally.take() is None


class Heard:
    """In place of events.Events: what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def planned(self, job_id: int, request: Any, hashes: bytes, start: int, chunk_tokens: int) -> None:
        self.calls.append(("planned", job_id, start, chunk_tokens))

    def settled(self, job_id: int, *, stored: bool) -> None:
        self.calls.append(("settled", job_id, stored))

    def missing(self, hashes: bytes, ready: int) -> None:
        self.calls.append(("missing", len(hashes) // 32, ready))

    def reset(self) -> None:
        self.calls.append(("reset",))


@pytest.mark.parametrize("end", list(StoreEnd))
def test_events_hear_of_each_job_and_how_it_ended(end: StoreEnd) -> None:
    heard = Heard()
    bench = Bench(events=heard, min_hit=0)
    job = job_of(bench)
    bench.stores.on_report(StoreReport(job.job_id, end, stored=2))
    bench.stores.on_reset()
    told = [("planned", job.job_id, 0, CHUNK), ("settled", job.job_id, end is StoreEnd.DONE), ("reset",)]
    assert heard.calls == told


def test_events_hear_of_what_a_lookup_or_a_load_did_not_find_and_of_nothing_if_nobody_answered() -> None:
    heard = Heard()
    bench = Bench(events=heard, min_hit=0)
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 3)
    tokens = ask(bench, request) or 0
    assert heard.calls == [("missing", 4, 3)]
    bench.lookups.after_alloc(request, bench.blocks_of(request), tokens, 0)
    bench.lookups.on_load_report(LoadReport("a", LoadFailure.INVALID, True, good_chunks=1))
    assert heard.calls[1:] == [("missing", 4, 1)]
    other = bench.add(Request("b", 4 * CHUNK, prompt="q"))
    bench.lookups.on_new_request(other, bench.active)
    bench.daemon.up = False
    ask(bench, other)
    assert len(heard.calls) == 2


def test_an_event_that_cannot_be_made_costs_no_store_and_no_pin() -> None:
    class Broken(Heard):
        def planned(self, *_: Any) -> None:
            raise ZeroDivisionError

    bench = Bench(events=Broken(), min_hit=0)
    job = job_of(bench)
    assert bench.guard.counters == {"event: ZeroDivisionError": 1}
    bench.stores.on_report(StoreReport(job.job_id, StoreEnd.DONE, stored=2))
    assert bench.stores.pinned_blocks == 0
