"""The daemon dies at random points while two engines store and load; nobody notices but the hit rate."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
ATTACH_S = 15.0  # a bound for a loaded machine, not a target


class Engines(NamedTuple):
    first: Engine
    second: Engine


@pytest.fixture(scope="module")
def engines(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Engines:
    pair = Engines(make_engine(daemon=shared_daemon), make_engine(daemon=shared_daemon))
    for engine in pair:
        engine.ready()
        engine.ask("fault", slow_loads_s=0.005, slow_stores_s=0.005)  # widens the windows that a kill can hit
    return pair


def wait_attached(engine: Engine) -> None:
    until = time.monotonic() + ATTACH_S
    while not engine.ask("report")["on"]:
        assert time.monotonic() < until, "the engine did not attach again"
        time.sleep(0.05)


def kill_many_times(engines: Engines, reference: Engine, daemon: Daemon, kills: int, seed: int) -> str:
    """How long batches of 8 requests took, for the record."""
    source = random.Random(seed)
    prompts = [prompt(100 + n, CHUNK + 13 * n) for n in range(24)]
    wanted = reference.generate(prompts)
    kept = prompts[-8:]
    engines.second.generate(prompts[:8])  # a first batch is slow by itself
    engines.first.generate(kept)
    engines.first.ask("settle")
    seconds = []
    for number in range(kills):
        batches = []
        for engine in engines:
            chosen = source.sample(range(len(prompts)), 8)
            engine.send("generate", prompts=[prompts[n] for n in chosen])
            batches.append((engine, chosen))
        time.sleep(source.random() * 0.25)
        daemon.kill()
        time.sleep(source.choice([0.0, 0.0, 0.05]))
        daemon.start()
        for engine, chosen in batches:
            answer = engine.answer()
            assert_same_outputs(answer["answers"], [wanted[n] for n in chosen])
            seconds.append(answer["seconds"])
        if number % 2:
            for engine in engines:
                wait_attached(engine)
                engine.ask("forget_local")
    for engine in engines:
        wait_attached(engine)
        report = engine.ask("settle")
        assert_nothing_held(report)
        assert set(report["guard"]) <= {"load: DeadlinePassed"}
    # what was sealed before the first kill is still there
    assert engines.second.ask("forget_local")
    hits = engines.second.external_hits()
    assert_same_outputs(engines.second.generate(kept), wanted[-8:])
    assert engines.second.external_hits() - hits == sum(len(one) // CHUNK * CHUNK for one in kept)
    with Client.attach(daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
    return f"batches of 8 requests: median {statistics.median(seconds):.3f} s, slowest {max(seconds):.3f} s"


def test_25_kills_under_load(engines: Engines, reference: Engine, shared_daemon: Daemon, seed: int) -> None:
    print(kill_many_times(engines, reference, shared_daemon, 25, seed))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_120_kills_under_load(engines: Engines, reference: Engine, shared_daemon: Daemon, seed: int) -> None:
    print(kill_many_times(engines, reference, shared_daemon, 120, seed))


def test_without_a_daemon_engines_do_not_even_try(engines: Engines, reference: Engine, shared_daemon: Daemon) -> None:
    prompts = [prompt(900 + n, 3 * CHUNK + n) for n in range(8)]
    wanted = reference.generate(prompts)
    engines.first.generate(prompts)
    engines.first.ask("settle")
    shared_daemon.kill()
    try:
        engines.first.ask("forget_local")
        time.sleep(0.1)  # the end of the attach connection is seen at once, but not before it is seen
        before = engines.first.ask("report")["sent"]
        assert_same_outputs(engines.first.generate(prompts), wanted)
        report = engines.first.ask("settle")
        assert report["sent"] == before
        assert_nothing_held(report)
    finally:
        shared_daemon.start()
    wait_attached(engines.first)
    assert engines.first.ask("forget_local")
    hits = engines.first.external_hits()
    assert_same_outputs(engines.first.generate(prompts), wanted)
    assert engines.first.external_hits() > hits


def test_an_engine_that_started_before_the_daemon_attaches_by_itself(
    make_engine: Callable[..., Engine], make_daemon: Callable[..., Daemon], reference: Engine
) -> None:
    daemon = make_daemon(name=unique_name("late"), start=False)
    prompts = [prompt(950 + n, 2 * CHUNK + n) for n in range(3)]
    wanted = reference.generate(prompts)
    engine = make_engine(daemon=daemon).ready()
    assert_same_outputs(engine.generate(prompts), wanted)
    assert not engine.ask("report")["on"]
    daemon.start()
    wait_attached(engine)
    for _ in range(2):
        assert engine.ask("forget_local")
        assert_same_outputs(engine.generate(prompts), wanted)
    assert engine.external_hits() == 3 * 2 * CHUNK
