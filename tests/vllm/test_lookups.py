from __future__ import annotations

import gc

import pytest

from kvkeep.ipc.vllm.groups import ABSENT
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadReport
from tests.vllm.bench import BLOCK, CHUNK, PER_CHUNK, Bench, Request


@pytest.fixture
def bench() -> Bench:
    return Bench()


def ask(bench: Bench, request: Request, local: int = 0) -> int | None:
    return bench.lookups.matched_tokens(request, local, bench.active)


def admit(bench: Bench, request: Request, tokens: int) -> None:
    bench.lookups.after_alloc(request, bench.blocks_of(request), tokens, bench.active.generation)


@pytest.mark.parametrize(
    ("length", "present", "local", "tokens"),
    [
        (4 * CHUNK, 4, 0, 4 * CHUNK),  # all of the prompt: vLLM computes the last token again by itself
        (4 * CHUNK - 1, 3, 0, 3 * CHUNK),
        (4 * CHUNK + 1, 4, CHUNK, 3 * CHUNK),
        (4 * CHUNK, 2, CHUNK + BLOCK, 0),  # less than a chunk beyond the local hit
        (4 * CHUNK, 3, CHUNK + BLOCK, 2 * CHUNK - BLOCK),  # from inside a chunk
        (4 * CHUNK, 2, 3 * CHUNK, 0),  # the engine has more than we
        (4 * CHUNK, 0, 0, 0),
        (CHUNK - 1, 0, 0, 0),
    ],
)
def test_the_answer_is_whole_chunks_from_the_root_less_the_local_hit(
    bench: Bench, length: int, present: int, local: int, tokens: int
) -> None:
    request = bench.add(Request("a", length))
    bench.put(request, present)
    assert ask(bench, request, local) == tokens


def test_a_question_that_is_repeated_sends_nothing(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    bench.lookups.on_new_request(request, bench.active)
    assert [ask(bench, request) for _ in range(100)] == [2 * CHUNK] * 100
    assert bench.daemon.messages["LOOKUP"] == 1
    other = bench.add(Request("b", 2 * CHUNK, prompt="never stored"))
    assert [ask(bench, other) for _ in range(100)] == [0] * 100
    assert bench.daemon.messages["LOOKUP"] == 2


def test_an_answer_that_does_not_come_is_waited_for_until_its_deadline() -> None:
    bench = Bench(lookup_deadline_ms=1.0)
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    bench.daemon.answer_lookups = False
    answers = []
    while 0 not in answers:
        answers.append(ask(bench, request))
    assert set(answers) <= {None, 0}
    bench.daemon.answer_lookups = True
    assert ask(bench, request) == 0  # what comes later does not change the answer
    assert bench.counters["lookups_expired"] == 1
    gc.collect()
    assert bench.daemon.references() == 0


def test_only_the_blocks_after_the_local_hit_are_loaded(bench: Bench) -> None:
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 4)
    tokens = ask(bench, request, CHUNK + BLOCK)
    assert tokens is not None
    admit(bench, request, tokens)
    (job,) = bench.lookups.take_new_loads()
    assert (job.first_chunk, job.chunks) == (1, 3)
    table = [block.block_id for block in bench.tables["a"]]
    assert job.blocks == ((ABSENT, *table[PER_CHUNK + 1 : 4 * PER_CHUNK]),)
    assert bench.lookups.take_new_loads() == ()


@pytest.mark.parametrize("confirmed", [True, False])
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("finished_first", [True, False])
def test_references_end_however_the_load_ends(bench: Bench, confirmed: bool, ok: bool, finished_first: bool) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    admit(bench, request, ask(bench, request) or 0)
    (job,) = bench.lookups.take_new_loads()
    assert bench.daemon.references() == 1
    if finished_first:
        bench.finish(request)
    assert bench.daemon.references() == 1  # the worker reads
    if confirmed:
        reading = bench.client.open_read(job.handle, 0, job.first_chunk, job.chunks)
        assert reading is not None
        reading.confirm()
    bench.lookups.on_load_report(LoadReport("a", None if ok else LoadFailure.INVALID, confirmed))
    if not finished_first:
        admit(bench, request, 0)  # vLLM's second call, after the load
        bench.finish(request)
    gc.collect()
    assert (bench.daemon.references(), bench.lookups.held()) == (0, 0)


def test_a_request_that_is_admitted_without_our_tokens_gives_its_references_back(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    assert ask(bench, request) == 2 * CHUNK
    admit(bench, request, 0)
    gc.collect()
    assert bench.daemon.references() == 0


def test_a_request_that_goes_before_it_is_admitted_gives_its_references_back(bench: Bench) -> None:
    for asked in (False, True):
        request = bench.add(Request("a", 2 * CHUNK))
        bench.put(request, 2)
        bench.lookups.on_new_request(request, bench.active)
        if asked:
            ask(bench, request)
        bench.finish(request)
        gc.collect()
        assert (bench.daemon.references(), bench.lookups.held()) == (0, 0)


def test_after_a_failed_load_the_request_is_never_offered_a_hit(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    admit(bench, request, ask(bench, request) or 0)
    bench.lookups.on_load_report(LoadReport("a", LoadFailure.INVALID, False))
    assert ask(bench, request) == 0
    request.num_preemptions += 1
    assert ask(bench, request) == 0
    assert bench.daemon.messages["LOOKUP"] == 1


def test_a_preempted_request_asks_again_and_finds_what_it_generated(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK), blocks=20)
    assert ask(bench, request) == 0
    admit(bench, request, 0)
    request.grow(CHUNK)
    bench.put(request, 3)
    request.num_preemptions += 1
    assert ask(bench, request) == 3 * CHUNK


def test_an_admission_that_does_not_fit_the_answer_becomes_a_failed_load(bench: Bench) -> None:
    """vLLM waits for every admitted load, so one must come back, whatever went wrong."""
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 2)
    assert ask(bench, request) == 2 * CHUNK
    admit(bench, request, 3 * CHUNK)
    (job,) = bench.lookups.take_new_loads()
    assert job.handle == 0
    assert set(job.blocks[0]) == {block.block_id for block in bench.tables["a"]}
    assert sum(bench.guard.counters.values()) == 1
    gc.collect()
    assert bench.daemon.references() == 0


def test_a_load_that_cannot_be_made_names_no_block_that_others_may_have(bench: Bench) -> None:
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 3)
    assert ask(bench, request, CHUNK) == 2 * CHUNK
    admit(bench, request, 3 * CHUNK + BLOCK)
    (job,) = bench.lookups.take_new_loads()
    assert job.handle == 0
    assert job.blocks == (tuple(block.block_id for block in bench.tables["a"][PER_CHUNK:]),)


def test_without_a_daemon_the_answer_is_no_at_once(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.lookups.on_new_request(request, None)
    assert bench.lookups.matched_tokens(request, 0, None) == 0
    assert bench.daemon.messages["LOOKUP"] == 0


def test_a_hit_of_a_daemon_that_is_gone_is_not_offered(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    assert ask(bench, request) == 2 * CHUNK
    bench.daemon.handles.clear()  # another daemon knows no handles
    assert ask(bench, request) == 0


def test_a_burst_of_requests_waits_for_its_answers_together(bench: Bench) -> None:
    """The scheduler's thread waits a few milliseconds a step, not one for each request."""
    bench.daemon.answer_lookups = False
    for n in range(200):
        assert ask(bench, bench.add(Request(f"r{n}", CHUNK), blocks=0)) is None
    assert bench.lookups._grace_s <= 0
    bench.lookups.take_new_loads()
    assert bench.lookups._grace_s > 0


def test_a_hit_of_before_a_cache_reset_is_not_offered_after_it(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    assert ask(bench, request) == 2 * CHUNK
    bench.active = bench.register(1)
    assert ask(bench, request) == 0


def test_requests_in_the_queue_hold_a_bounded_number_of_references(bench: Bench) -> None:
    requests = [bench.add(Request(f"r{n}", CHUNK), blocks=1) for n in range(60)]
    bench.put(requests[0], 1)
    for request in requests:
        bench.lookups.on_new_request(request, bench.active)
    assert bench.daemon.messages["LOOKUP"] == 16
    for request in requests:
        assert ask(bench, request) == CHUNK
    assert bench.daemon.messages["LOOKUP"] == 60


@pytest.mark.parametrize("kind", ["lora_request", "skip_reading_prefix_cache"])
def test_some_requests_are_not_looked_up(bench: Bench, kind: str) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    setattr(request, kind, True)
    bench.put(request, 2)
    bench.lookups.on_new_request(request, bench.active)
    assert ask(bench, request) == 0
    assert bench.daemon.messages["LOOKUP"] == 0
