"""Families of models × where a hit is and how far it reaches × how the engine schedules: the answers stay the same.

Each cell sends six prompts of which the daemon has some chunks, and the engine itself nothing.  What an engine without
the cache says, what vLLM counts as hits, and what is held afterwards must all be as if nothing else had happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import BFLOAT16_TOLERANCE, assert_nothing_held, difference
from tests.vllm.test_l2 import until, wait_serving, wait_stored
from tests.vllm.test_model_families import BFLOAT16, CORES, FAMILIES, PATIENCE, Family, first_in_line
from tests.vllm.tiny_model import prompt

CHUNK = 64
AT_ONCE = 6  # prompts of a cell
SAID = 20  # tokens of an answer
TIERS, EXTENTS = ("l1", "l2"), ("partial", "full")
MODES = ("plain", "pieces", "aborts", "storm")
PIECE = 96  # tokens of a step
STORM = 6  # times that a request is preempted because the engine has no block for it, and more where few are left
CALM = 0.08  # spread of weights with which bfloat16 and its own prefix cache agree

MATRIX: dict[str, Family] = {
    "float32": Family(tiny_model.build),
    "bfloat16": Family(
        lambda folder: tiny_model.build(folder, spread=CALM), engine=BFLOAT16, tolerance=BFLOAT16_TOLERANCE
    ),
    **{name: FAMILIES[name] for name in ("gemma3", "mla", "fp8", "two ranks")},
}


@dataclass(frozen=True)
class Cell:
    tier: str
    extent: str
    mode: str

    @property
    def seed(self) -> int:
        return 1000 * (1 + CELLS.index(self))

    def stored(self) -> list[list[int]]:
        """What the daemon has of each prompt: 2 to 4 chunks."""
        return [prompt(self.seed + n, (2 + n % 3) * CHUNK) for n in range(AT_ONCE)]

    def asked(self) -> list[list[int]]:
        rest = [40, 65, 128, 1, 31, 150]
        return [
            head + (prompt(self.seed + 500 + n, rest[n]) if self.extent == "partial" else [])
            for n, head in enumerate(self.stored())
        ]


CELLS = [Cell(tier, extent, mode) for tier in TIERS for extent in EXTENTS for mode in MODES]


@dataclass
class Stand:
    """One family: an engine with the cache, one without, and a daemon with L2."""

    family: Family
    engine: Engine
    reference: Engine
    daemon: Daemon
    tiers: set[str] = field(default_factory=set)  # whose prompts are stored

    def wanted(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        """Of the same ranks, under a salt of its own: with other ranks additions have another order."""
        salts = [os.urandom(8).hex()] * len(prompts) if self.family.ranks > 1 else None
        return self.reference.generate(prompts, salts=salts, **arguments)

    def store(self, tier: str) -> None:
        """The prompts of all cells of a tier; in the order of the tests, once."""
        if tier in self.tiers:
            return
        for cell in CELLS:
            if cell.tier == tier:
                self.engine.generate(cell.stored(), max_tokens=1)
                self.engine.ask("settle")
        if tier == "l2":
            self.forget_l1()
        self.tiers.add(tier)

    def attempts(self) -> range:
        """Ranks that wait for each other spin, and a daemon that does not get its turn for seconds is a miss."""
        return range(1 if self.family.ranks == 1 else 4)

    def forget_l1(self) -> None:
        wait_stored(self.daemon, self.engine.ask("report")["counters"]["chunks_stored"])
        self.daemon.stop(60)
        self.daemon.start("--forget")
        wait_serving(self.daemon)
        if self.family.ranks > 1:
            first_in_line(self.daemon.pid)
        until("the engine attaching again", lambda: self.engine.ask("report")["on"])

    @contextlib.contextmanager
    def scheduling(self, mode: str) -> Iterator[None]:
        if mode == "storm":
            self.engine.ask("leave_blocks", count=self.few_blocks())
        if mode == "pieces":
            self.engine.ask("step_tokens", count=PIECE)
        try:
            yield
        finally:
            self.engine.ask("leave_blocks", count=0)
            self.engine.ask("step_tokens", count=0)

    @contextlib.contextmanager
    def faults(self, source: random.Random, *, certain: bool) -> Iterator[None]:
        """Some loads are slow, some fail.  Faults that are set at run time do not reach ranks with own processes."""
        if self.family.ranks == 1:
            kind, share = source.choice(["fail_loads", "refuse_loads"]), 0.3 if certain else source.choice([0.0, 0.3])
            self.engine.ask("fault", **{kind: share}, slow_loads_s=source.random() / 100)
        try:
            yield
        finally:
            self.engine.ask("fault", fail_loads=0.0, refuse_loads=0.0, slow_loads_s=0.0)

    def few_blocks(self) -> int:
        """Room for three or four of the six."""
        return 30 * int(self.engine.ask("groups"))

    def settled(self) -> dict[str, Any]:
        """Nothing is held, here or in the daemon."""
        report: dict[str, Any] = self.engine.ask("settle")
        assert_nothing_held(report)
        assert report["guard"] == {}, self.engine.tail()
        with Client.attach(self.daemon.run_dir) as client:
            until("the daemon having its references back", lambda: client.stats()["l1"]["references"] == 0)
            assert client.stats()["l1"]["reserved_bytes"] == 0
            assert client.check() == {"ok": True, "problem": ""}
        return report

    def assert_same(self, got: list[dict[str, Any] | None], wanted: list[dict[str, Any]]) -> None:
        """But for those that were aborted."""
        pairs = [(one, other) for one, other in zip(got, wanted, strict=True) if one is not None]
        self.family.assert_same([one for one, _ in pairs], [other for _, other in pairs])


@pytest.fixture(scope="module", params=MATRIX)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    family = MATRIX[request.param]
    folder = tmp_path_factory.mktemp("hits")
    (folder / "l2").mkdir()
    medium = {"type": "fs", "base_path": str(folder / "l2"), "capacity_gb": 1, "fsync": "none"}
    name = unique_name("hits")
    daemon = Daemon(folder / name, name, f"--l2-adapter={json.dumps(medium)}", l1_mib=512)
    settings: dict[str, Any] = {"engine": dict(family.engine)}
    ours: dict[str, Any] = {"options": PATIENCE | {"kvkeep.run_dir": str(daemon.run_dir), "kvkeep.l2_wait_ms": 20_000}}
    if family.ranks > 1:
        settings["engine"]["tensor_parallel_size"] = family.ranks
        ours["environment"] = CORES
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.remove)
        daemon.start()
        if family.ranks > 1:
            first_in_line(daemon.pid)
        model = family.build(folder / "model")
        engines = [Engine(folder / "engine.log", model, **settings, **ours)]
        stack.callback(engines[0].close)
        if family.ranks == 1:  # ranks spin while they wait for each other: few cores carry one such engine
            engines.append(Engine(folder / "reference.log", model, connector=False, **settings))
            stack.callback(engines[1].close)
        for started in engines:  # in bfloat16 a fresh engine must not begin with a step of one token
            started.ready().generate([prompt(1, 40)])
        wait_serving(daemon)
        yield Stand(family, engines[0], engines[-1], daemon)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.tier} {cell.extent} {cell.mode}")
def test_answers_hits_and_what_is_held(stand: Stand, cell: Cell, seed: int) -> None:
    stand.store(cell.tier)
    asked = cell.asked()
    wanted = stand.wanted(asked, max_tokens=SAID + 20 * (cell.mode == "storm"))
    hits = sum(stand.family.served(len(head)) for head in cell.stored())
    if cell.extent == "partial":
        hits = sum(map(len, cell.stored()))
    aborts = abort_steps(random.Random(seed)) if cell.mode == "aborts" else [None] * AT_ONCE

    for attempt in stand.attempts():
        assert stand.engine.ask("forget_local")
        before, preemptions = counted(stand.engine), stand.engine.ask("preemptions")
        said, storm = len(wanted[0]["tokens"]), STORM * (cell.mode == "storm")
        with stand.scheduling(cell.mode):
            got = stand.engine.ask("generate_and_abort", prompts=asked, aborts=aborts, max_tokens=said, preempt=storm)
            stand.engine.ask("settle")
        after = counted(stand.engine)
        stand.settled()

        assert [one is None for one in got] == [step is not None for step in aborts]
        stand.assert_same(got, wanted)
        grown = {name: after[name] - before[name] for name in after}
        preempted = stand.engine.ask("preemptions") - preemptions
        assert (preempted > 0) == (cell.mode == "storm")
        again = attempt > 0  # what was missed has been stored again, with the rest of the prompt
        assert grown["vllm"] <= hits or again
        if cell.mode == "aborts" or grown["vllm"] >= hits:
            break
    if cell.mode != "aborts":
        assert hits <= grown["vllm"] <= (sum(map(len, asked)) if again else hits)
        assert grown["failed"] == 0
    if cell.mode in ("plain", "pieces"):
        assert grown["loaded"] == grown["vllm"]
        assert grown[cell.tier] == hits or again


def abort_steps(source: random.Random) -> list[int | None]:
    """Half of the requests; each after so many steps that it cannot have ended, and that its load may still run."""
    chosen = source.sample(range(AT_ONCE), AT_ONCE // 2)
    return [source.randrange(12) if n in chosen else None for n in range(AT_ONCE)]


def counted(engine: Engine) -> dict[str, int]:
    """Tokens: hits as vLLM counts them, and what became of them as we do."""
    counters = engine.ask("report")["counters"]
    found = {name: counters.get(f"{name}_tokens", 0) for name in ("loaded", "failed")}
    found |= {tier: counters.get(f"hit_tokens_{tier}", 0) for tier in TIERS}
    return found | {"vllm": engine.external_hits()}


def test_wrong_kv_would_be_seen(stand: Stand) -> None:
    if stand.family.ranks > 1:
        pytest.skip("faults that are set at run time do not reach ranks in processes of their own")
    prompts = [prompt(70 + n, 4 * CHUNK + n) for n in range(4)]
    wanted = stand.wanted(prompts)
    stand.engine.generate(prompts)
    assert stand.engine.ask("forget_local")
    stand.engine.ask("fault", fail_loads=1.0, lie_about_loads=True)
    got = stand.engine.generate(prompts)
    stand.engine.ask("fault", fail_loads=0.0, lie_about_loads=False)
    stand.engine.ask("forget_local")
    tolerance = stand.family.tolerance
    assert max(difference(one, other, tolerance) for one, other in zip(got, wanted, strict=True)) > tolerance


def walk(stand: Stand, seed: int, rounds: int) -> None:
    """Rounds of everything at once; then what we say we loaded is what vLLM did not compute."""
    source = random.Random(seed)
    known = [prompt(source.randrange(1 << 30), source.randrange(2 * CHUNK, 6 * CHUNK)) for _ in range(8)]
    stand.engine.generate(known, max_tokens=1)
    stand.engine.ask("settle")
    before, started = stand.engine.ask("ledger"), counted(stand.engine)
    for number in range(rounds):
        asked = [source.choice(known)[: source.randrange(40, 6 * CHUNK)] for _ in range(AT_ONCE)]
        asked = [one + prompt(source.randrange(1 << 30), source.randrange(120)) for one in asked]
        wanted = stand.wanted(asked, max_tokens=SAID)
        aborts = abort_steps(source) if source.random() < 0.5 else [None] * AT_ONCE
        preempt = source.choice([0, 2])
        if number < 4 or source.random() < 0.7:
            assert stand.engine.ask("forget_local")
        with stand.scheduling(source.choice(MODES)), stand.faults(source, certain=number < 4):
            got = stand.engine.ask("generate_and_abort", prompts=asked, aborts=aborts, max_tokens=SAID, preempt=preempt)
            stand.assert_same(got, wanted)
            stand.engine.ask("settle")
        stand.settled()
    now, ended = stand.engine.ask("ledger"), counted(stand.engine)
    book = {name: now[name] - before[name] for name in now}
    ours = {name: ended[name] - started[name] for name in ended}
    print(f"schedule {book}, counters {ours}")
    assert ours["l1"] + ours["l2"] == book["promised"] == ours["loaded"] + ours["failed"]
    assert book["served"] <= ours["loaded"] <= book["served"] + book["unseen"]
    assert book["served"] > 0
    assert stand.family.ranks > 1 or ours["failed"] > 0


def test_what_was_loaded_is_what_vllm_did_not_compute(stand: Stand, seed: int) -> None:
    walk(stand, seed, 4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_long_walk_through_all_of_it(stand: Stand, seed: int) -> None:
    walk(stand, seed, 150)


def test_at_the_end_nothing_is_held(stand: Stand) -> None:
    stand.settled()
