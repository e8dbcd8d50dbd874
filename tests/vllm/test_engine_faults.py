"""Everything that can fail between an engine and the daemon fails here; the engine's answers stay what they were."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import LOGPROB_TOLERANCE, assert_nothing_held, assert_same_outputs, difference
from tests.vllm.tiny_model import prompt

CHUNK = 64
NO_FAULTS = {
    "fail_loads": 0.0,
    "lie_about_loads": False,
    "refuse_loads": 0.0,
    "slow_loads_s": 0.0,
    "slow_stores_s": 0.0,
    "raise_in": "",
}


@pytest.fixture(scope="module")
def started(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Engine:
    return make_engine(daemon=shared_daemon, options={"kvkeep.transfer_deadline_s": 1.0}).ready()


@pytest.fixture
def engine(started: Engine) -> Iterator[Engine]:
    yield started
    started.ask("fault", **NO_FAULTS)
    assert_nothing_held(started.ask("settle"))


def stored_prompts(engine: Engine, seed: int, count: int, length: int) -> list[list[int]]:
    """Prompts whose KV is in the daemon and not in the engine."""
    prompts = [prompt(seed + n, length) for n in range(count)]
    engine.generate(prompts)
    engine.ask("settle")
    assert engine.ask("forget_local")
    return prompts


def test_wrong_kv_would_be_seen(engine: Engine, reference: Engine) -> None:
    """The oracle of all tests here: one wrong load that nobody notices changes what the model says."""
    prompts = stored_prompts(engine, 100, 1, 4 * CHUNK)
    wanted = reference.generate(prompts)
    engine.ask("fault", fail_loads=1.0, lie_about_loads=True)
    assert difference(engine.generate(prompts)[0], wanted[0]) > 10 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("fault", ["fail_loads", "refuse_loads"])
def test_failed_loads_are_computed_again(engine: Engine, reference: Engine, fault: str, share: float) -> None:
    prompts = stored_prompts(engine, 1000 + int(share * 10) + len(fault), 12, 3 * CHUNK + 5)
    wanted = reference.generate(prompts)
    failed = engine.ask("report")["counters"].get("loads_failed", 0)
    engine.ask("fault", **{fault: share})
    assert_same_outputs(engine.generate(prompts), wanted)
    failed = engine.ask("settle")["counters"].get("loads_failed", 0) - failed
    assert failed == 12 if share == 1.0 else 0 < failed < 12


def test_one_load_in_a_hundred_fails_and_no_answer_changes(engine: Engine, reference: Engine) -> None:
    prompts = stored_prompts(engine, 2000, 50, CHUNK + 9)
    wanted = reference.generate(prompts, max_tokens=4)
    failed = engine.ask("report")["counters"].get("loads_failed", 0)
    engine.ask("fault", fail_loads=0.01)
    for _ in range(6):
        assert_same_outputs(engine.generate(prompts, max_tokens=4), wanted)
        assert engine.ask("forget_local")
    assert engine.ask("report")["counters"].get("loads_failed", 0) > failed


def test_a_request_whose_load_failed_is_not_offered_a_hit_again(engine: Engine) -> None:
    """vLLM asks again after a failed first block; an answer other than 0 would go on for ever."""
    prompts = stored_prompts(engine, 3000, 1, 2 * CHUNK)
    before = engine.ask("report")["sent"]
    engine.ask("fault", refuse_loads=1.0)
    engine.generate(prompts)
    after = engine.ask("settle")["sent"]
    assert after["open_read"] - before.get("open_read", 0) == 1
    assert after["begin_lookup"] - before["begin_lookup"] == 1


@pytest.mark.parametrize("call", ["begin_lookup", "open_read", "reserve"])
def test_an_exception_in_the_client_costs_only_the_hit(engine: Engine, reference: Engine, call: str) -> None:
    prompts = stored_prompts(engine, 4000 + len(call), 3, 2 * CHUNK + 3)
    wanted = reference.generate(prompts)
    engine.ask("fault", raise_in=call)
    assert_same_outputs(engine.generate(prompts), wanted)
    engine.ask("fault", raise_in="")
    assert engine.ask("forget_local")
    assert_same_outputs(engine.generate(prompts), wanted)


def test_a_load_beyond_its_deadline_is_given_up_after_its_last_write(engine: Engine, reference: Engine) -> None:
    prompts = stored_prompts(engine, 5000, 6, 2 * CHUNK + 3)
    wanted = reference.generate(prompts)
    engine.ask("fault", slow_loads_s=0.7)  # two threads, deadline 1 s: the third pair is not even started
    answer = engine.ask("generate", prompts=prompts)
    assert_same_outputs(answer["answers"], wanted)
    assert engine.ask("settle")["copies"]["loads_not_started"] > 0
    engine.ask("fault", slow_loads_s=0.0)
    assert engine.ask("forget_local")
    assert_same_outputs(engine.generate(prompts), wanted)


def test_aborted_requests_leave_nothing_behind(engine: Engine, reference: Engine) -> None:
    prompts = stored_prompts(engine, 6000, 4, 5 * CHUNK)
    wanted = reference.generate(prompts)
    engine.ask("fault", slow_loads_s=0.02, slow_stores_s=0.02)
    for steps in range(12):
        report = engine.ask("abort_while_loading", prompt=prompts[steps % 4], after_steps=steps % 6)
        assert report["requests"] == 0
        assert_nothing_held(engine.ask("settle"))
        engine.ask("forget_local")
    for steps in range(6):  # and while storing
        report = engine.ask("abort_while_loading", prompt=prompt(6100 + steps, 5 * CHUNK), after_steps=steps)
        assert report["requests"] == 0
        assert_nothing_held(engine.ask("settle"))
    engine.ask("fault", **NO_FAULTS)
    assert engine.ask("forget_local")
    assert_same_outputs(engine.generate(prompts), wanted)


def test_a_daemon_that_hangs_delays_a_request_by_its_deadline_at_most(
    engine: Engine, reference: Engine, shared_daemon: Daemon
) -> None:
    prompts = stored_prompts(engine, 7000, 4, 2 * CHUNK)
    fresh = [prompt(7100 + n, 2 * CHUNK) for n in range(4)]
    wanted, wanted_fresh = reference.generate(prompts), reference.generate(fresh)
    assert shared_daemon.process is not None
    shared_daemon.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert_same_outputs(engine.generate(prompts), wanted)
            assert_same_outputs(engine.generate(fresh), wanted_fresh)
            assert engine.ask("forget_local")
    finally:
        shared_daemon.process.send_signal(signal.SIGCONT)
    assert_same_outputs(engine.generate(prompts), wanted)


def test_the_daemon_counts_no_reference_after_all_this(engine: Engine, shared_daemon: Daemon) -> None:
    assert_nothing_held(engine.ask("settle"))
    with Client.attach(shared_daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
        assert client.stats()["l1"]["references"] == 0
        assert client.stats()["l1"]["reserved_bytes"] == 0
