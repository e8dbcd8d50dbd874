"""A worker process is killed while it loads or stores.  vLLM ends that engine; what it held in the daemon comes back,
and another engine of the same daemon does not notice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.test_model_families import CORES, FAULTY, PATIENCE
from tests.vllm.tiny_model import prompt

CHUNK = 64
COMPUTED = {"kvkeep.load": False, "kvkeep.store": False}
RELEASED_S = 30.0  # a bound for a loaded machine, not a target


@pytest.fixture(scope="module")
def other(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Engine:
    """Of the same model on the same daemon."""
    return make_engine(daemon=shared_daemon, options=PATIENCE).ready()


def held_by_clients(daemon: Daemon) -> dict[int, tuple[int, int]]:
    """References and reserved bytes by pid."""
    with Client.attach(daemon.run_dir, arena=False) as client:
        rows: list[dict[str, Any]] = client.stats()["clients"]
    return {row["pid"]: (row["references"], row["reserved_bytes"]) for row in rows if row["pid"] != os.getpid()}


def vllm_memory(pid: int) -> set[Path]:
    """What ranks share by name: vLLM leaves it behind when they are killed."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/vllm_dist_" in line}


class Victim:
    """An engine whose workers have processes of their own."""

    def __init__(self, engine: Engine, daemon: Daemon, aim: Path) -> None:
        self.engine, self.daemon, self._aim = engine, daemon, aim

    def strike(self, **strike: Any) -> None:
        """See Faults.reach."""
        self._aim.with_suffix(".new").write_text(json.dumps(strike))
        self._aim.with_suffix(".new").rename(self._aim)

    def forget_local(self) -> None:
        until("the victim's prefix cache being empty", lambda: self.engine.ask("reset_prefix_cache"))


@pytest.fixture
def make_victim(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, folder: Path
) -> Iterator[Callable[[int], Victim]]:
    def make(ranks: int) -> Victim:
        aim = folder / f"strike-{ranks}"
        engine = make_engine(
            daemon=shared_daemon,
            multiprocessing=True,
            engine={"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"},
            environment=CORES | {"KVKEEP_TEST_STRIKE_WHEN": str(aim)},
            options=PATIENCE,
            connector_class=FAULTY,
        )
        victim = Victim(engine.ready(), shared_daemon, aim)
        left.update(path for pid in held_by_clients(shared_daemon) for path in vllm_memory(pid))
        return victim

    left: set[Path] = set()
    yield make
    for path in left:
        path.unlink(missing_ok=True)


def test_a_worker_that_is_killed_while_it_loads(
    make_victim: Callable[[int], Victim], shared_daemon: Daemon, other: Engine
) -> None:
    victim = make_victim(1)
    prompts = [prompt(4000 + n, 4 * CHUNK + 5) for n in range(6)]
    wanted = other.generate(prompts)
    other.ask("settle")
    assert_same_outputs(victim.engine.generate(prompts), wanted)
    victim.forget_local()
    kill_worker(victim, "load", 0, prompts, shared_daemon, other)
    with Client.attach(shared_daemon.run_dir) as client:
        assert client.stats()["l1"]["reserved_bytes"] == 0


def test_two_ranks_lose_the_daemon_and_then_one_of_them_is_killed_while_it_stores(
    make_victim: Callable[[int], Victim], shared_daemon: Daemon, other: Engine
) -> None:
    """In one test, since such an engine takes long to start."""
    victim = make_victim(2)
    prompts = [prompt(5000 + n, 4 * CHUNK + 5) for n in range(6)]
    wanted = victim.engine.generate(prompts, salts=["computed"] * 6, wishes=COMPUTED)
    assert_same_outputs(victim.engine.generate(prompts), wanted)
    victim.forget_local()
    clients = set(held_by_clients(shared_daemon))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        victim.strike(at="load", signal=number, pid=shared_daemon.pid, who=" 1")
        assert_same_outputs(victim.engine.generate(prompts), wanted)
        if number == signal.SIGSTOP:
            os.kill(shared_daemon.pid, signal.SIGCONT)
        else:
            assert shared_daemon.process is not None
            assert shared_daemon.process.wait(RELEASED_S) == -signal.SIGKILL
            shared_daemon.start()
        until("all being attached again", lambda: set(held_by_clients(shared_daemon)) == clients)
        until("nobody holding anything", lambda: set(held_by_clients(shared_daemon).values()) == {(0, 0)})
        victim.forget_local()
    hits = victim.engine.external_hits()
    assert_same_outputs(victim.engine.generate(prompts), wanted)
    assert victim.engine.external_hits() > hits
    kill_worker(victim, "store", 1, [prompt(5500 + n, 4 * CHUNK + 5) for n in range(6)], shared_daemon, other)


def kill_worker(victim: Victim, point: str, rank: int, prompts: list[list[int]], daemon: Daemon, other: Engine) -> None:
    """At this point of serving these prompts.  References and reservations come back; the other engine works on.

    Of two ranks, what one stored and the other never will is nobody's, and given up a little later (shm/incomplete.py).
    """
    wanted = other.generate(prompts)
    assert other.ask("forget_local")
    clients = set(held_by_clients(daemon))
    assert len(clients) >= 3  # the other engine, and of this one the engine core and its workers
    victim.strike(at=point, signal=signal.SIGKILL, who=f" {rank}")
    victim.engine.send("generate", prompts=prompts)
    hits = other.external_hits()
    for _ in range(3):  # while the victim dies
        assert_same_outputs(other.generate(prompts), wanted)
        assert other.ask("forget_local")
    assert other.external_hits() - hits == 3 * sum(len(p) // CHUNK for p in prompts) * CHUNK
    with pytest.raises(AssertionError, match=r"EngineDeadError|engine ended"):
        victim.engine.answer()
    until("only the other engine being attached", lambda: set(held_by_clients(daemon)) == {other.process.pid})
    until("nobody holding anything", lambda: set(held_by_clients(daemon).values()) == {(0, 0)})
    with Client.attach(daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
        assert client.stats()["l1"]["references"] == 0
    assert_same_outputs(other.generate(prompts), wanted)
    assert_nothing_held(other.ask("settle"))


def until(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + RELEASED_S
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {RELEASED_S:g} s"
        time.sleep(0.02)
