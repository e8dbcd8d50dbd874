"""Adapters, requests' wishes and the threshold, in the scheduler half's two parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvkeep.ipc.vllm import stores
from kvkeep.ipc.vllm.adapters import Adapters, Files, Keys, salted_chain
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadReport, StoreEnd, StoreJob
from kvkeep.ipc.vllm.pace import Pace
from tests.vllm.bench import CHUNK, Bench, Request
from tests.vllm.test_adapters import adapter, write
from tests.vllm.test_copies import Rig


def ask(bench: Bench, request: Request, local: int = 0) -> int | None:
    return bench.lookups.matched_tokens(request, local, bench.active)


# ---- adapters --------------------------------------------------------------------------------------------------------


class Named:
    """Adapters whose digests the test sets."""

    def __init__(self) -> None:
        self.digests: dict[str, bytes] = {}
        self.being_read = False

    def digest(self, name: str) -> bytes | None:
        return self.digests.get(name)

    def reading(self, name: str) -> bool:
        return self.being_read

    def files(self, name: str) -> None:
        return None


@pytest.fixture
def named() -> Named:
    return Named()


@pytest.fixture
def bench(named: Named) -> Bench:
    return Bench(keys=Keys(named), lookup_deadline_ms=60_000.0)  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.copies.close()


def keys_of(jobs: list[StoreJob]) -> bytes:
    (job,) = jobs
    return job.hashes


def test_chunks_of_an_adapter_have_keys_of_their_own(bench: Bench, named: Named) -> None:
    named.digests = {"A": blake3(b"a").digest(), "B": blake3(b"b").digest()}
    base = Request("base", 2 * CHUNK)
    chain = bench.active.chain(base, 2)  # type: ignore[arg-type]
    assert keys_of(bench.step(bench.add(base), 2 * CHUNK)) == chain
    for name in ("A", "B"):
        request = bench.add(Request(name, 2 * CHUNK, lora_request=name))
        assert keys_of(bench.step(request, 2 * CHUNK)) == salted_chain(chain, named.digests[name])


def put(bench: Bench, chain: bytes) -> None:
    with bench.client.reserve(bench.active.namespace, chain) as reservation:
        reservation.commit()


def test_only_requests_of_the_same_content_hit(bench: Bench, named: Named) -> None:
    named.digests = {"A": blake3(b"a").digest(), "B": blake3(b"b").digest(), "copy of A": blake3(b"a").digest()}
    base = bench.add(Request("base", 2 * CHUNK))
    put(bench, salted_chain(bench.active.chain(base, 2), named.digests["A"]))  # type: ignore[arg-type]
    found = {}
    for name in ("A", "B", "copy of A", None):
        found[name] = ask(bench, bench.add(Request(f"r-{name}", 2 * CHUNK, lora_request=name)))
    assert found == {"A": 2 * CHUNK, "B": 0, "copy of A": 2 * CHUNK, None: 0}


def test_a_request_whose_adapter_is_being_read_waits_for_that(bench: Bench, named: Named) -> None:
    named.being_read = True
    request = bench.add(Request("a", 2 * CHUNK, lora_request="A"))
    put(bench, salted_chain(bench.active.chain(request, 2), b"\1" * 32))  # type: ignore[arg-type]
    bench.lookups.on_new_request(request, bench.active)  # type: ignore[arg-type]
    assert [ask(bench, request) for _ in range(5)] == [None] * 5
    assert bench.daemon.messages["LOOKUP"] == 0
    named.being_read, named.digests["A"] = False, b"\1" * 32
    assert ask(bench, request) == 2 * CHUNK
    assert bench.daemon.messages["LOOKUP"] == 1


def test_it_waits_no_longer_than_for_a_lookup(named: Named) -> None:
    bench = Bench(keys=Keys(named), lookup_deadline_ms=1.0)  # type: ignore[arg-type]
    named.being_read = True
    request = bench.add(Request("a", 2 * CHUNK, lora_request="A"))
    answers = []
    while 0 not in answers:
        answers.append(ask(bench, request))
    assert set(answers) <= {None, 0}
    assert ask(bench, request) == 0


def test_a_chunk_that_was_complete_before_its_adapter_was_known_is_stored_then(bench: Bench, named: Named) -> None:
    named.being_read = True
    request = bench.add(Request("a", CHUNK, lora_request="A"), blocks=20)
    assert bench.step(request, CHUNK) == []
    request.grow(1)
    assert bench.step(request, 1) == []
    named.being_read, named.digests["A"] = False, b"\1" * 32
    request.grow(1)
    assert len(bench.step(request, 1)) == 1


def test_a_request_of_an_unknown_adapter_is_neither_looked_up_nor_stored(bench: Bench, named: Named) -> None:
    request = bench.add(Request("a", CHUNK, lora_request="A"), blocks=20)
    bench.put(request, 1)  # under the base model's key
    assert ask(bench, request) == 0
    assert bench.step(request, CHUNK) == []
    named.digests["A"] = b"\1" * 32  # too late for this one
    request.grow(1)
    assert bench.step(request, 1) == []


def test_a_store_job_carries_the_files_of_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "JOB_TOKENS", CHUNK)  # a job for each chunk
    folder = write(tmp_path / "a")
    adapters = Adapters(print, started=time.time() + 1e6)
    bench = Bench(keys=Keys(adapters))
    request = bench.add(Request("a", 2 * CHUNK, lora_request=adapter(folder)))
    adapters.digest(request.lora_request)
    until = time.monotonic() + 20
    while adapters.reading(request.lora_request):
        assert time.monotonic() < until
        time.sleep(0.001)
    (job,) = bench.step(request, CHUNK)
    assert job.adapter is not None
    assert job.adapter.unchanged()
    write(folder, value=2)
    assert not job.adapter.unchanged()  # the worker will not publish it
    assert bench.step(request, CHUNK) == []
    (other,) = bench.step(bench.add(Request("b", CHUNK)), CHUNK)
    assert other.adapter is None


def test_kv_of_an_adapter_whose_files_changed_meanwhile_is_not_published(rig: Rig, tmp_path: Path) -> None:
    folder = write(tmp_path)
    files = Files.look((str(folder / "adapter_model.safetensors"),))
    for job_id, stored in ((1, 2), (2, 0)):
        hashes = rig.hashes(2, name=f"job{job_id}")
        rig.copies.submit_store(StoreJob(job_id, hashes, 0, (tuple(range(8)),), 0, files), rig.spec)
        ((), (report,)) = rig.collect(stores=1)
        assert report.stored == stored
        write(folder, value=2)
    assert report.end is StoreEnd.FAILED
    assert rig.daemon.stored() == 2


# ---- what a request wants --------------------------------------------------------------------------------------------


def test_a_request_that_wants_no_loads_is_not_looked_up(bench: Bench) -> None:
    request = bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    bench.lookups.on_new_request(request, bench.active, wanted=False)  # type: ignore[arg-type]
    assert ask(bench, request) == 0
    assert bench.daemon.messages["LOOKUP"] == 0
    assert len(bench.step(request, 2 * CHUNK)) == 1


# ---- the threshold ---------------------------------------------------------------------------------------------------


class Judge(Pace):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.ended: list[Any] = []
        self.least = 0

    def worth(self, tokens: int, context: int = 0) -> bool:
        self.asked.append((tokens, context))
        return tokens >= self.least

    def load_ended(self, tokens: int, context: int, seconds: float, *, ok: bool) -> None:
        self.ended.append((tokens, context, seconds, ok))


def test_a_hit_that_is_not_worth_it_is_declined_and_judged_once() -> None:
    judge = Judge()
    judge.least = 2 * CHUNK
    bench = Bench(pace=judge)
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 3)
    assert [ask(bench, request, 2 * CHUNK) for _ in range(20)] == [0] * 20
    assert judge.asked == [(CHUNK, 2 * CHUNK)]
    assert bench.counters["hits_declined"] == 1
    assert [ask(bench, request, CHUNK) for _ in range(20)] == [2 * CHUNK] * 20  # another hit, another answer
    assert judge.asked == [(CHUNK, 2 * CHUNK), (2 * CHUNK, CHUNK)]


def test_what_is_declined_is_not_stored_again() -> None:
    judge = Judge()
    judge.least = 100 * CHUNK
    bench = Bench(pace=judge)
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 3)
    assert ask(bench, request) == 0
    bench.lookups.after_alloc(request, bench.blocks_of(request), 0, 0)  # type: ignore[arg-type]
    (job,) = bench.step(request, 4 * CHUNK)
    assert job.start == 3
    assert bench.daemon.references() == 0


def test_less_than_a_chunk_is_never_worth_it_and_never_asked() -> None:
    judge = Judge()
    bench = Bench(pace=judge)
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 2)
    assert ask(bench, request, 2 * CHUNK - 16) == 0
    assert judge.asked == []


@pytest.mark.parametrize(("compute_s", "wait_s"), [(None, 1.0), (0.25, 0.25), (60.0, 1.0)])
def test_l2_is_not_waited_for_longer_than_computing_takes(
    monkeypatch: pytest.MonkeyPatch, compute_s: float | None, wait_s: float
) -> None:
    judge = Judge()
    monkeypatch.setattr(judge, "compute_s", lambda tokens, context=0: compute_s and compute_s * tokens / (3 * CHUNK))
    bench = Bench(pace=judge)
    asked: list[float] = []
    begin = bench.client.begin_lookup
    monkeypatch.setattr(bench.client, "has_l2", True, raising=False)
    monkeypatch.setattr(bench.client, "begin_lookup", lambda *a, **k: (asked.append(k["wait_s"]), begin(*a, **k))[1])
    ask(bench, bench.add(Request("a", 3 * CHUNK + 1)))
    assert asked == [wait_s]


@pytest.mark.parametrize(
    ("failure", "learned"),
    [(None, True), (LoadFailure.DEADLINE, True), (LoadFailure.INVALID, True), (LoadFailure.CANCELLED, False)],
)
def test_what_a_load_took_is_learned_unless_nobody_wanted_it(failure: LoadFailure | None, learned: bool) -> None:
    judge = Judge()
    bench = Bench(pace=judge)
    request = bench.add(Request("a", 4 * CHUNK))
    bench.put(request, 3)
    tokens = ask(bench, request, CHUNK)
    assert tokens == 2 * CHUNK
    bench.lookups.after_alloc(request, bench.blocks_of(request), tokens, 0)  # type: ignore[arg-type]
    bench.lookups.on_load_report(LoadReport("a", failure, True, 0, 0.25))
    assert judge.ended == ([(2 * CHUNK, CHUNK, 0.25, failure is None)] if learned else [])


def test_loads_that_fail_together_are_learned_from_once() -> None:
    judge = Judge()
    bench = Bench(blocks=401, pace=judge)

    def begin(name: str) -> None:
        request = bench.add(Request(name, 2 * CHUNK, prompt=name))
        bench.put(request, 2)
        bench.lookups.after_alloc(request, bench.blocks_of(request), ask(bench, request) or 0, 0)  # type: ignore[arg-type]

    def ends(name: str, failure: LoadFailure | None) -> None:
        bench.lookups.on_load_report(LoadReport(name, failure, True, 0, 1.0))

    burst = [f"r{n}" for n in range(20)]
    for name in burst:
        begin(name)
    for name in burst[:-1]:
        ends(name, LoadFailure.DAEMON_AWAY)
    ends(burst[-1], None)
    assert [ok for *_, ok in judge.ended] == [False, True]
    begin("later")
    ends("later", LoadFailure.DAEMON_AWAY)
    assert [ok for *_, ok in judge.ended] == [False, True, False]
