"""Each kind of model and of parallelism: what a second engine is served is right, and what is left over is nothing.

The first engine computes whole prompts, the second in pieces of 96 tokens, so that windows pass while it stores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_families, tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import (
    BFLOAT16_TOLERANCE,
    LOGPROB_TOLERANCE,
    assert_nothing_held,
    assert_same_outputs,
    difference,
)
from tests.vllm.tiny_model import prompt

CHUNK = 64
PIECES = {"max_num_batched_tokens": 96}
BFLOAT16 = {"dtype": "bfloat16"}  # the only one that its CPU kernel has
PATIENCE = {"kvkeep.lookup_deadline_ms": 10_000, "kvkeep.transfer_deadline_s": 30.0}
FAULTY = {"kv_connector": "FaultyConnector", "kv_connector_module_path": "tests.vllm.faulty_connector"}
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": str(Path(__file__).parents[2])}


@dataclass(frozen=True)
class Family:
    build: Callable[[Path], Path]
    engine: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    short: bool = False  # a prompt of whole chunks is served one less: see lacks_last
    piece: int = 0  # so is one of whole pieces of chunked local attention
    tolerance: float = LOGPROB_TOLERANCE

    def served(self, length: int) -> int:
        """Tokens of a prompt of this length, all of which was stored."""
        less = self.short and length % CHUNK == 0 and length > CHUNK
        less = less or (bool(self.piece) and length % self.piece == 0)
        return (length // CHUNK - less) * CHUNK

    def assert_same(self, got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
        assert_same_outputs(got, wanted, self.tolerance)


FAMILIES: dict[str, Family] = {
    "gemma3": Family(tiny_model.gemma3),
    "gemma3, a window that is no multiple of a block": Family(lambda f: tiny_model.gemma3(f, window=97), short=True),
    "gemma3, a window longer than most prompts": Family(lambda f: tiny_model.gemma3(f, window=512)),
    "llama4, pieces of two chunks": Family(lambda f: tiny_families.llama4(f, piece=2 * CHUNK), piece=2 * CHUNK),
    "mla": Family(tiny_model.mla, engine=BFLOAT16, tolerance=BFLOAT16_TOLERANCE),
    "fp8": Family(tiny_model.build, engine={"kv_cache_dtype": "fp8"}),
    "two ranks": Family(tiny_model.build, ranks=2),
    "mla, two ranks": Family(tiny_model.mla, engine=BFLOAT16, ranks=2, tolerance=BFLOAT16_TOLERANCE),
    "gemma3, two ranks": Family(tiny_model.gemma3, ranks=2),
}


class Trio(NamedTuple):
    family: Family
    reference: Engine
    first: Engine
    second: Engine
    daemon: Daemon
    refused: Path  # see Faults.refuse_when

    def wanted(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        """What is said without the cache.  By the same ranks, under a salt that nobody else has: with other ranks
        additions have another order."""
        salts = [os.urandom(8).hex()] * len(prompts) if self.family.ranks > 1 else None
        return self.reference.generate(prompts, salts=salts, **arguments)

    def tries(self) -> Iterator[bool]:
        """Whether it is the last one; see first_in_line."""
        yield from [False] * (self.family.ranks - 1) * 4
        yield True


@pytest.fixture(scope="module", params=FAMILIES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    model = family.build(folder / "model")
    name = unique_name("family")
    daemon = Daemon(folder / name, name, l1_mib=512)

    def engine(label: str, more: dict[str, Any], **settings: Any) -> Engine:
        return Engine(folder / f"{label}.log", model, engine=family.engine | more, **settings)

    options = {"kvkeep.run_dir": str(daemon.run_dir)}
    refused = folder / "refused"
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.remove)
        daemon.start()
        if family.ranks > 1:
            first_in_line(daemon.pid)
        if family.ranks == 1:
            engines = [engine("reference", {}, connector=False)]
            engines += [engine("first", {}, options=options), engine("second", PIECES, options=options)]
        else:  # ranks spin while they wait for each other: one such engine is all that few cores can carry
            ranks = PIECES | {"tensor_parallel_size": family.ranks}
            patient = options | PATIENCE
            variables = CORES | {"KVKEEP_TEST_REFUSE_WHEN": str(refused)}
            engines = [engine("ranks", ranks, environment=variables, options=patient, connector_class=FAULTY)]
        for started in engines:
            stack.callback(started.close)
        for started in engines:  # in bfloat16 a fresh engine must not begin with a step of one token
            started.ready().generate([prompt(1, 40)])
        yield Trio(family, engines[0], engines[len(engines) > 1], engines[-1], daemon, refused)


def first_in_line(pid: int) -> None:
    """Ranks that wait for each other spin with sched_yield(2), and with Linux 6.18 nothing else of their control group
    runs then, for 20 s and more: neither control nor a mover.  Where we may not do this, the tries are all there is."""
    daemon = psutil.Process(pid)
    processes = [daemon, *daemon.children(recursive=True)]  # what they start later inherits it
    for thread in (thread for one in processes for thread in Path(f"/proc/{one.pid}/task").iterdir()):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def assert_served(trio: Trio, engine: Engine, prompts: list[list[int]], tokens: int, **arguments: Any) -> None:
    """So many tokens come from the cache, and the answers are right."""
    wanted = trio.wanted(prompts, **arguments)
    for last in trio.tries():
        engine.ask("forget_local")
        hits, answers = hits_after(engine, prompts, **arguments)
        trio.family.assert_same(answers, wanted)
        engine.ask("settle")
        if last or hits == tokens:
            assert hits == tokens
            return


def hits_after(engine: Engine, prompts: list[list[int]], **arguments: Any) -> tuple[int, list[dict[str, Any]]]:
    before = engine.external_hits()
    answers = engine.generate(prompts, **arguments)
    return engine.external_hits() - before, answers


def test_the_engine_uses_the_cache(trio: Trio) -> None:
    for engine in (trio.first, trio.second):
        report = engine.ask("report")
        assert report["on"], engine.tail()
        assert report["guard"] == {}


@pytest.mark.parametrize("length", [CHUNK, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 1500])
def test_the_second_engine_is_served_what_the_first_stored(trio: Trio, length: int) -> None:
    prompts = [prompt(100 + length, length)]
    wanted = trio.wanted(prompts)
    trio.family.assert_same(trio.first.generate(prompts), wanted)
    trio.first.ask("settle")
    assert_served(trio, trio.second, prompts, trio.family.served(length))
    assert_nothing_held(trio.second.ask("settle"))


def test_what_was_stored_in_pieces_serves_prompts_of_every_length(trio: Trio) -> None:
    """A hit may end with any chunk, also long before the end of the prompt that was stored."""
    whole = prompt(2000, 15 * CHUNK)
    trio.second.generate([whole])
    trio.second.ask("settle")
    for length in (CHUNK + 5, 3 * CHUNK, 6 * CHUNK + 1, 11 * CHUNK + 40):
        part = whole[:length] + prompt(2001, 20)
        assert_served(trio, trio.first, [part], length // CHUNK * CHUNK)


def test_a_local_hit_is_completed_from_the_cache(trio: Trio) -> None:
    whole = prompt(3000, 9 * CHUNK)
    wanted = trio.wanted([whole])
    trio.first.generate([whole])
    trio.first.ask("settle")
    for last in trio.tries():
        assert trio.second.ask("forget_local")
        trio.second.generate([whole[: 3 * CHUNK + 37]])
        trio.second.ask("settle")
        hits, answers = hits_after(trio.second, [whole])
        trio.family.assert_same(answers, wanted)
        expected = trio.family.served(len(whole)) - 3 * CHUNK
        if last or hits in (expected, expected - 32):
            assert hits in (expected, expected - 32)
            return


def test_eight_requests_at_once(trio: Trio) -> None:
    prompts = [prompt(4000 + n, 3 * CHUNK + 31 * n) for n in range(8)]
    wanted = trio.wanted(prompts, max_tokens=24)
    trio.family.assert_same(trio.second.generate(prompts, max_tokens=24), wanted)
    trio.second.ask("settle")
    assert_served(trio, trio.first, prompts, sum(trio.family.served(len(p)) for p in prompts), max_tokens=24)


def test_a_failed_load_is_computed_instead(trio: Trio) -> None:
    prompts = [prompt(5000 + n, 5 * CHUNK + n) for n in range(3)]
    wanted = trio.wanted(prompts)
    trio.first.generate(prompts)
    trio.first.ask("settle")
    failed = trio.first.ask("report")["counters"].get("loads_failed", 0)
    with fault(trio):
        for _ in trio.tries():
            assert trio.first.ask("forget_local")
            trio.family.assert_same(trio.first.generate(prompts), wanted)
            report = trio.first.ask("settle")
    assert report["counters"]["loads_failed"] - failed >= 3
    assert_nothing_held(report)


def test_wrong_kv_would_be_seen(trio: Trio) -> None:
    if trio.family.ranks > 1:
        pytest.skip("faults that are set at run time do not reach ranks in processes of their own")
    prompts = [prompt(6000 + n, 5 * CHUNK + n) for n in range(3)]
    wanted = trio.wanted(prompts)
    trio.first.generate(prompts)
    trio.first.ask("settle")
    assert trio.first.ask("forget_local")
    trio.first.ask("fault", fail_loads=1.0, lie_about_loads=True)
    got = trio.first.generate(prompts)
    trio.first.ask("fault", fail_loads=0.0, lie_about_loads=False)
    tolerance = trio.family.tolerance
    assert max(difference(one, other, tolerance) for one, other in zip(got, wanted, strict=True)) > tolerance
    trio.first.ask("settle")
    assert trio.first.ask("forget_local")


@contextlib.contextmanager
def fault(trio: Trio) -> Iterator[None]:
    """Every load gives wrong bytes and knows it; with two ranks, the second of them cannot read."""
    if trio.family.ranks > 1:
        trio.refused.touch()
        yield
        trio.refused.unlink()
    else:
        trio.first.ask("fault", fail_loads=1.0)
        yield
        trio.first.ask("fault", fail_loads=0.0)


def test_at_the_end_nothing_is_held(trio: Trio) -> None:
    for engine in (trio.first, trio.second):
        assert_nothing_held(engine.ask("settle"))
    with Client.attach(trio.daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
        stats = client.stats()
        assert stats["l1"]["references"] == 0
