"""Every fault between an engine and its data, for models with one KV cache group and with several; policy `recompute`.

One engine per family.  Its own answers without the cache are the reference, and each test starts the daemon that it
needs: the engine attaches again by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.messages import Verdict
from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
DEADLINE_S = 3.0  # of a load or a store
PATIENCE_S = 60.0  # a bound for a loaded machine, not a target
FAMILIES: dict[str, Callable[[Path], Path]] = {"llama": tiny_model.build, "gemma3": tiny_model.gemma3}
BETWEEN = ("open_read", "reserve")  # before the daemon is asked; the other points are in the middle of a copy
PATIENCE = {"kvkeep.lookup_deadline_ms": 5000, "kvkeep.transfer_deadline_s": DEADLINE_S}
NO_FAULTS: dict[str, Any] = {"fail_loads": 0.0, "slow_loads_s": 0.0, "slow_stores_s": 0.0, "strike": {}}
COMPUTED = {"kvkeep.load": False, "kvkeep.store": False}


def until(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE_S:g} s"
        time.sleep(0.02)


@dataclass
class Rig:
    engine: Engine
    daemon: Daemon

    def restart(self, *flags: str, l1_mib: float = 256) -> None:
        """Another daemon, with an empty L1."""
        self.daemon.kill()
        self.daemon.flags = [f"--l1-size-gb={l1_mib / 1024}", *flags]
        self.daemon.start("--forget")
        self.wait_attached()

    def wait_attached(self) -> None:
        until("the engine attaching again", lambda: self.engine.ask("report")["on"])

    def computed(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        """The answers of this engine without the cache."""
        salts = [os.urandom(8).hex()] * len(prompts)
        return self.engine.generate(prompts, salts=salts, wishes=COMPUTED, **arguments)

    def stored(self, seed: int, count: int, length: int) -> list[list[int]]:
        """Prompts whose KV is in the daemon and not in the engine."""
        prompts = [prompt(seed + n, length) for n in range(count)]
        self.engine.generate(prompts, max_tokens=1)
        self.engine.ask("settle")
        assert self.engine.ask("forget_local")
        return prompts

    def hits(self, prompts: list[list[int]], wanted: list[dict[str, Any]], **arguments: Any) -> int:
        """Tokens that the cache served for them; the answers are right."""
        assert self.engine.ask("forget_local")
        before = self.engine.external_hits()
        assert_same_outputs(self.engine.generate(prompts, **arguments), wanted)
        return self.engine.external_hits() - before

    def counter(self, name: str) -> int:
        return int(self.engine.ask("report")["counters"].get(name, 0))

    def sent(self, call: str) -> int:
        return int(self.engine.ask("report")["sent"].get(call, 0))

    def l1(self) -> dict[str, Any]:
        with Client.attach(self.daemon.run_dir, arena=False) as client:
            found: dict[str, Any] = client.stats()["l1"]
            return found

    def at_rest(self) -> None:
        """Nobody holds anything: no block in the engine, no reference and no reservation in the daemon."""
        assert_nothing_held(self.engine.ask("settle"))
        until("the daemon being at rest", lambda: (self.l1()["references"], self.l1()["reserved_bytes"]) == (0, 0))
        with Client.attach(self.daemon.run_dir) as client:
            assert client.check() == {"ok": True, "problem": ""}


@pytest.fixture(scope="module", params=FAMILIES)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("matrix")
    name = unique_name("matrix")
    daemon = Daemon(folder / name, name, l1_mib=256)
    options = {"kvkeep.run_dir": str(daemon.run_dir), "kvkeep.l2_wait_ms": 300} | PATIENCE
    engine = Engine(folder / "engine.log", FAMILIES[request.param](folder / "model"), options=options)
    try:
        daemon.start()
        yield Rig(engine.ready(), daemon)
    finally:
        engine.close()
        daemon.remove()


@pytest.fixture
def rig(started: Rig) -> Iterator[Rig]:
    yield started
    started.engine.ask("fault", **NO_FAULTS)
    started.at_rest()


only_gemma3 = pytest.mark.parametrize("started", ["gemma3"], indirect=True)  # for llama: test_engine_faults.py


@only_gemma3
def test_one_load_in_a_hundred_fails_and_no_answer_changes(rig: Rig) -> None:
    prompts = [prompt(100 + n, CHUNK + 9) for n in range(40)]
    wanted = rig.computed(prompts, max_tokens=4)
    rig.stored(100, 40, CHUNK + 9)
    failed = rig.counter("loads_failed")
    rig.engine.ask("fault", fail_loads=0.01)
    for _ in range(5):
        assert rig.hits(prompts, wanted, max_tokens=4) > 0
    assert rig.counter("loads_failed") > failed


@only_gemma3
def test_of_loads_beyond_their_deadline_no_answer_changes(rig: Rig) -> None:
    prompts = [prompt(300 + n, 2 * CHUNK + 3) for n in range(6)]
    wanted = rig.computed(prompts)
    rig.stored(300, 6, 2 * CHUNK + 3)
    late = rig.counter("load_failures_deadline")
    rig.engine.ask("fault", slow_loads_s=0.6 * DEADLINE_S)  # by two threads: the third pair would be too late
    assert rig.hits(prompts, wanted) == 6 * 2 * CHUNK
    assert rig.counter("load_failures_deadline") - late >= 2
    rig.engine.ask("fault", slow_loads_s=0.0)
    assert rig.hits(prompts, wanted) == 6 * 2 * CHUNK


@pytest.mark.parametrize("point", ["open_read", pytest.param("load", marks=pytest.mark.soak)])
def test_a_daemon_that_stops_under_loads_costs_a_deadline_and_nothing_else(rig: Rig, point: str) -> None:
    """Every load hangs, and then every lookup and store: the lookups were answered, so all requests wait for loads."""
    seed = 1000 + len(point)
    prompts = [prompt(seed + n, 3 * CHUNK + 5) for n in range(6)]
    wanted = rig.computed(prompts)
    rig.stored(seed, 6, 3 * CHUNK + 5)
    failed = rig.counter("loads_failed")
    strike = {"at": point, "signal": signal.SIGSTOP, "pid": rig.daemon.pid}
    rig.engine.ask("fault", strike=strike)
    try:
        for _ in range(2):
            rig.hits(prompts, wanted)
        assert rig.counter("loads_failed") - failed >= (6 if point == "open_read" else 1)
    finally:
        os.kill(rig.daemon.pid, signal.SIGCONT)
    rig.at_rest()
    rig.wait_attached()
    assert rig.hits(prompts, wanted) == 6 * 3 * CHUNK


@pytest.mark.parametrize("point", ["load", "store", *(pytest.param(p, marks=pytest.mark.soak) for p in BETWEEN)])
def test_a_daemon_that_is_killed_in_the_middle_of_a_load_or_store(rig: Rig, point: str) -> None:
    seed = 2000 + 100 * len(point)
    old, fresh = ([prompt(at + n, 3 * CHUNK + 5) for n in range(4)] for at in (seed, seed + 50))
    wanted, wanted_fresh = rig.computed(old), rig.computed(fresh)
    rig.stored(seed, 4, 3 * CHUNK + 5)
    rig.engine.ask("fault", strike={"at": point, "signal": signal.SIGKILL, "pid": rig.daemon.pid})
    assert_same_outputs(rig.engine.generate([*old, *fresh]), [*wanted, *wanted_fresh])
    assert rig.daemon.process is not None
    assert rig.daemon.process.wait(PATIENCE_S) == -signal.SIGKILL
    rig.hits([*old, *fresh], [*wanted, *wanted_fresh])  # without a daemon
    rig.daemon.start()
    rig.wait_attached()
    rig.at_rest()
    assert rig.hits(old, wanted) == 4 * 3 * CHUNK  # what was sealed has survived
    rig.hits(fresh, wanted_fresh)  # what was not is stored now
    rig.engine.ask("settle")
    assert rig.hits(fresh, wanted_fresh) == 4 * 3 * CHUNK


@contextlib.contextmanager
def fill(hoarder: Client, namespace: Any, chain: list[bytes], step: int = 8) -> Iterator[int]:
    """All of L1, and hold it; yields how many chunks that are."""
    with contextlib.ExitStack() as holds:
        for end in range(step, len(chain), step):
            with hoarder.reserve(namespace, chain[:end], start=end - step, deadline_s=PATIENCE_S) as reservation:
                reservation.commit()
            held = holds.enter_context(hoarder.lookup(namespace, chain[:end], deadline_s=PATIENCE_S))
            if Verdict.FULL in reservation.verdicts:
                break
        assert Verdict.FULL in reservation.verdicts
        yield held.ready


def test_an_arena_full_of_pinned_data_costs_a_message_a_request_and_caching_resumes_when_it_is_not(rig: Rig) -> None:
    rig.restart("--eviction-trigger-watermark=1.0", l1_mib=48)
    prompts = [prompt(3000 + n, 2 * CHUNK + 7) for n in range(8)]
    wanted = rig.computed(prompts, max_tokens=12)
    with Client.attach(rig.daemon.run_dir, name="hoarder") as hoarder:
        until("all of L1 being there", lambda: rig.l1()["bytes_ready"] == rig.l1()["bytes_total"])
        namespace = hoarder.register({"model": "somebody else's"}, shard_bytes=1 << 18)
        chain = [os.urandom(32) for _ in range(400)]
        with fill(hoarder, namespace, chain) as held:
            pin, pinned = hoarder.pin(namespace, chain[: held * 2 // 3])  # no more than a part of L1 may be pinned
            assert 0 < pinned < held
            full, sent, lookups = rig.counter("stores_full"), rig.sent("reserve"), rig.sent("begin_lookup")
            for _ in range(2):
                assert rig.hits(prompts, wanted, max_tokens=12) == 0
                assert_nothing_held(rig.engine.ask("settle"))
            full, sent = rig.counter("stores_full") - full, rig.sent("reserve") - sent
            assert full == sent, "a store that found no room is counted, and not tried again"
            assert 2 * 8 <= sent <= 2 * 2 * 8  # a prompt may be computed in two steps
            assert rig.sent("begin_lookup") - lookups == 2 * 8
        assert rig.hits(prompts, wanted, max_tokens=12) == 0
        rig.engine.ask("settle")
        assert rig.hits(prompts[-1:], wanted[-1:], max_tokens=12) > 0, "the part that is not pinned is used again"
        hoarder.unpin(pin)
        rig.hits(prompts, wanted, max_tokens=12)
        rig.engine.ask("settle")
        assert rig.hits(prompts, wanted, max_tokens=12) == 8 * 2 * CHUNK


def test_an_l2_that_stalls_costs_a_wait_and_works_again_when_it_goes_on(rig: Rig, tmp_path: Path) -> None:
    medium = f'{{"type": "fs", "base_path": "{tmp_path}", "capacity_gb": 0.25, "fsync": "none"}}'
    rig.restart(f"--l2-adapter={medium}")
    prompts = [prompt(4000 + n, 3 * CHUNK + 5) for n in range(6)]
    wanted = rig.computed(prompts)
    until("L2 serving", lambda: l2_of(rig)["phase"] == "serving")
    rig.stored(4000, 6, 3 * CHUNK + 5)
    until("L2 having everything", lambda: l2_of(rig)["chunks_stored"] >= 6 * 3)
    rig.restart(f"--l2-adapter={medium}")  # L1 is empty
    until("L2 serving", lambda: l2_of(rig)["phase"] == "serving")
    mover, expired = l2_of(rig)["pid"], rig.counter("lookups_expired")
    os.kill(mover, signal.SIGSTOP)
    try:
        for _ in range(2):
            rig.hits(prompts, wanted)
            assert l2_of(rig)["chunks_loaded"] == 0
            assert rig.counter("lookups_expired") == expired, "the daemon answered in time"
            assert_nothing_held(rig.engine.ask("settle"))
            until("no client holding anything", lambda: not held_by_clients(rig))  # the daemon's own jobs wait for L2
    finally:
        with contextlib.suppress(ProcessLookupError):  # the daemon kills one that hangs for long, and starts another
            os.kill(mover, signal.SIGCONT)
    rig.at_rest()
    with Client.attach(rig.daemon.run_dir) as client:
        client.clear(l1_only=True)

    def served() -> bool:
        return rig.hits(prompts, wanted) == 6 * 3 * CHUNK

    until("L2 serving everything again", served)


def held_by_clients(rig: Rig) -> int:
    with Client.attach(rig.daemon.run_dir, arena=False) as client:
        return sum(row["references"] + row["reserved_bytes"] for row in client.stats()["clients"])


def l2_of(rig: Rig) -> dict[str, Any]:
    with Client.attach(rig.daemon.run_dir, arena=False) as client:
        row: dict[str, Any] = client.stats()["l2"][0]
        return row
