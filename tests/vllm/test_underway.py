"""Equal prompts that come together are loaded once; nobody waits for a load that does not come."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kvkeep.ipc.vllm import lookups
from kvkeep.ipc.vllm.groups import Group
from kvkeep.ipc.vllm.lookups import Active
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadReport
from kvkeep.ipc.vllm.pace import ENOUGH, Pace
from tests.vllm.bench import BLOCK, CHUNK, SHARD_BYTES, Bench, Request

DEADLINE_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lookups, "time", clock)
    return clock


@pytest.fixture
def bench(clock: Clock) -> Bench:
    return Bench(transfer_deadline_s=DEADLINE_S)


def ask(bench: Bench, request: Request, local: int = 0) -> int | None:
    return bench.lookups.matched_tokens(request, local, bench.active)


def admit(bench: Bench, request: Request, tokens: int | None) -> None:
    assert tokens
    bench.lookups.after_alloc(request, bench.blocks_of(request), tokens, bench.active.generation)


def ends(bench: Bench, request: Request, failure: LoadFailure | None = None) -> None:
    bench.lookups.on_load_report(LoadReport(request.request_id, failure, False))


def first_of(bench: Bench, *names: str, chunks: int = 4, stored: int = 4) -> list[Request]:
    """Requests with one prompt; the first of them is being loaded."""
    requests = [bench.add(Request(name, chunks * CHUNK), blocks=chunks * CHUNK // BLOCK) for name in names]
    bench.put(requests[0], stored)
    admit(bench, requests[0], ask(bench, requests[0]))
    return requests


def test_of_two_equal_prompts_one_is_loaded(bench: Bench) -> None:
    one, two = first_of(bench, "one", "two")
    assert [ask(bench, two) for _ in range(50)] == [None] * 50
    assert len(bench.lookups.take_new_loads()) == 1
    ends(bench, one)
    assert ask(bench, two, local=4 * CHUNK - BLOCK) == 0  # the engine's own prefix cache has it now
    assert bench.lookups.take_new_loads() == ()
    assert bench.counters["loads_waited_for"] == 1
    assert bench.daemon.messages["LOOKUP"] == 2


def test_what_is_longer_than_the_first_is_loaded_from_where_the_first_ends(bench: Bench) -> None:
    one = bench.add(Request("one", 2 * CHUNK))
    two = bench.add(Request("two", 4 * CHUNK))
    bench.put(two, 4)
    admit(bench, one, ask(bench, one))
    assert ask(bench, two) is None
    ends(bench, one)
    assert ask(bench, two, local=2 * CHUNK) == 2 * CHUNK


def test_what_begins_inside_the_first_waits_too(bench: Bench) -> None:
    one, two = first_of(bench, "one", "two")
    assert ask(bench, two, local=CHUNK + BLOCK) is None
    ends(bench, one)
    assert ask(bench, two, local=CHUNK + BLOCK) == 3 * CHUNK - BLOCK


def test_other_prompts_do_not_wait(bench: Bench) -> None:
    first_of(bench, "one")
    other = bench.add(Request("other", 2 * CHUNK, prompt="q"))
    bench.put(other, 2)
    assert ask(bench, other) == 2 * CHUNK


def test_after_a_load_that_failed_the_second_loads_for_itself(bench: Bench) -> None:
    one, two, three = first_of(bench, "one", "two", "three", chunks=3, stored=3)
    assert (ask(bench, two), ask(bench, three)) == (None, None)
    ends(bench, one, LoadFailure.INVALID)
    assert ask(bench, one) == 0
    admit(bench, two, ask(bench, two))
    assert ask(bench, three) is None  # one at a time
    ends(bench, two)
    assert ask(bench, three, local=3 * CHUNK - BLOCK) == 0


def test_a_load_that_hangs_holds_the_second_up_for_its_deadline_and_no_longer(bench: Bench, clock: Clock) -> None:
    names = ["one", *(f"r{n}" for n in range(5))]
    one, *others = first_of(bench, *names)
    for _ in range(10):
        clock.now += DEADLINE_S / 11
        assert [ask(bench, other) for other in others] == [None] * 5
    clock.now += DEADLINE_S
    assert [ask(bench, other) for other in others] == [0] * 5  # computed: nobody waits a second time
    ends(bench, one, LoadFailure.DEADLINE)
    assert [ask(bench, other) for other in others] == [0] * 5
    gc.collect()
    assert bench.daemon.references() == 0
    assert bench.lookups.held() == 0


def test_where_computing_is_known_to_be_faster_nobody_waits_longer_than_that(clock: Clock) -> None:
    pace = Pace(clock=clock.monotonic)
    for _ in range(ENOUGH):
        number = pace.step_began([(1000, 0)])
        clock.now += 0.1
        pace.step_ended(number)
    bench = Bench(transfer_deadline_s=DEADLINE_S, pace=pace)
    _, two = first_of(bench, "one", "two")
    seconds = pace.compute_s(4 * CHUNK)
    assert seconds is not None
    assert seconds < DEADLINE_S / 10
    assert ask(bench, two) is None
    clock.now += seconds * 0.9
    assert ask(bench, two) is None
    clock.now += seconds * 0.2
    assert ask(bench, two) == 0


@pytest.mark.parametrize("reported", [True, False])
def test_a_first_request_that_is_aborted_does_not_starve_the_second(bench: Bench, reported: bool, clock: Clock) -> None:
    one, two = first_of(bench, "one", "two")
    bench.finish(one)
    assert ask(bench, two) is None  # the copy may be running still
    if reported:
        ends(bench, one, LoadFailure.CANCELLED)
        assert ask(bench, two) == 4 * CHUNK
    else:
        clock.now += DEADLINE_S
        assert ask(bench, two) == 0


def test_a_second_request_that_goes_while_it_waits_gives_its_references_back(bench: Bench) -> None:
    one, two = first_of(bench, "one", "two")
    assert ask(bench, two) is None
    bench.finish(two)
    ends(bench, one)
    gc.collect()
    assert (bench.daemon.references(), bench.lookups.held()) == (0, 0)


def test_without_a_prefix_cache_in_the_engine_nobody_waits(clock: Clock) -> None:
    bench = Bench()
    bench.lookups._shares_blocks = False
    _, two = first_of(bench, "one", "two")
    assert ask(bench, two) == 4 * CHUNK


def test_with_a_sliding_window_only_equal_hits_wait(bench: Bench) -> None:
    """What the first left of a window serves a hit that ends where it ends."""
    groups = (Group(BLOCK), Group(BLOCK, window=2 * BLOCK))
    bench.active = Active(bench.active.namespace, 0, CHUNK, groups, BLOCK, chunk_bytes=SHARD_BYTES)
    one, equal, shorter = (bench.add(Request(name, n * CHUNK), blocks=0) for name, n in (("a", 4), ("b", 4), ("c", 2)))
    bench.put(one, 4)
    assert ask(bench, one)
    asked = bench.lookups._states["a"]
    bench.lookups._under_way.begin("a", asked.hashes, 0, asked.usable)
    assert ask(bench, equal) is None
    assert ask(bench, shorter)


def test_all_chunks_are_forgotten_when_their_loads_have_ended(bench: Bench) -> None:
    requests = [bench.add(Request(f"r{n}", 2 * CHUNK, prompt=f"p{n}"), blocks=8) for n in range(10)]
    for request in requests:
        bench.put(request, 2)
        admit(bench, request, ask(bench, request))
    assert len(bench.lookups._under_way) == 10
    for request in requests:
        ends(bench, request)
    under_way: Any = bench.lookups._under_way
    assert (under_way._loaders, under_way._chunks) == ({}, {})
