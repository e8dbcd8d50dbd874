"""A worker process is killed while it loads or stores.  vLLM ends that engine; what it held in the daemon comes back,
and another engine of the same daemon does not notice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
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
RELEASED_S = 30.0  # a bound for a loaded machine, not a target


@pytest.fixture(scope="module")
def other(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Engine:
    """Of the same model on the same daemon."""
    return make_engine(daemon=shared_daemon).ready()


def held_by_clients(daemon: Daemon) -> dict[int, tuple[int, int]]:
    """References and reserved bytes by pid."""
    with Client.attach(daemon.run_dir, arena=False) as client:
        rows: list[dict[str, Any]] = client.stats()["clients"]
    return {row["pid"]: (row["references"], row["reserved_bytes"]) for row in rows if row["pid"] != os.getpid()}


@pytest.mark.parametrize(
    ("point", "ranks"), [("load", 1), ("store", 2)], ids=["while it loads", "one of two ranks while it stores"]
)
def test_what_a_killed_worker_held_comes_back_and_nobody_else_notices(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, other: Engine, tmp_path: Path, point: str, ranks: int
) -> None:
    strike = tmp_path / "strike"
    victim = make_engine(
        daemon=shared_daemon,
        multiprocessing=True,
        engine={"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"},
        environment=CORES | {"KVKEEP_TEST_STRIKE_WHEN": str(strike)},
        options=PATIENCE,
        connector_class=FAULTY,
    ).ready()
    seed = 1000 * len(point)
    prompts = [prompt(seed + n, 4 * CHUNK + 5) for n in range(6)]
    wanted = other.generate(prompts)
    other.ask("settle")
    before = held_by_clients(shared_daemon)
    assert len(before) == 1 + 1 + ranks  # the other engine, and of this one the engine core and its workers
    if point == "load":
        assert_same_outputs(victim.generate(prompts), wanted)
        until("the victim's prefix cache being empty", lambda: victim.ask("reset_prefix_cache"))
    strike.write_text(json.dumps({"at": point, "signal": signal.SIGKILL, "who": f" {ranks - 1}"}))
    victim.send("generate", prompts=prompts)
    assert other.ask("forget_local")
    hits = other.external_hits()
    for _ in range(3):  # while the victim dies
        assert_same_outputs(other.generate(prompts), wanted)
        assert other.ask("forget_local")
    assert other.external_hits() - hits == 3 * 6 * 4 * CHUNK
    with pytest.raises(AssertionError, match=r"EngineDeadError|engine ended"):
        victim.answer()
    gone = set(before) - {other.process.pid}
    until("the victim being gone", lambda: not gone & set(held_by_clients(shared_daemon)))
    until("nobody holding anything", lambda: set(held_by_clients(shared_daemon).values()) == {(0, 0)})
    with Client.attach(shared_daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
        l1 = client.stats()["l1"]
        assert l1["references"] == 0
        # a chunk of which one rank's shard is in and the other's never comes is nobody's: see shm/incomplete.py
        assert l1["reserved_bytes"] == 0 or (ranks, point) == (2, "store")
    assert_same_outputs(other.generate(prompts), wanted)
    assert_nothing_held(other.ask("settle"))


def until(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + RELEASED_S
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {RELEASED_S:g} s"
        time.sleep(0.02)
