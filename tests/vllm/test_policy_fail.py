"""With vLLM's default kv_load_failure_policy, `fail`: the request whose load failed ends with an error, no other does,
and the log names the setting."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
COUNT = 8
COMPUTED = {"kvkeep.load": False, "kvkeep.store": False}
FAMILIES = {"llama": tiny_model.build, "gemma3": tiny_model.gemma3}
ENDS = "ends with an error because its load failed"
SETTING = "kv_load_failure_policy is 'fail'"


@pytest.fixture(scope="module", params=FAMILIES)
def engine(
    request: pytest.FixtureRequest,
    make_engine: Callable[..., Engine],
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Engine:
    path = FAMILIES[request.param](tmp_path_factory.mktemp("model"))
    options = {"kvkeep.transfer_deadline_s": 1.0}
    return make_engine(daemon=shared_daemon, path=path, options=options, policy="fail").ready()


def stored(engine: Engine, seed: int) -> tuple[list[list[int]], list[dict[str, object]]]:
    """Prompts whose KV is in the daemon and not in the engine, and what is said to them without it."""
    prompts = [prompt(seed + n, 3 * CHUNK + 5) for n in range(COUNT)]
    wanted = engine.generate(prompts, salts=[f"computed {seed}"] * COUNT, wishes=COMPUTED)
    engine.generate(prompts, max_tokens=1)
    engine.ask("settle")
    assert engine.ask("forget_local")
    return prompts, wanted


def test_the_log_says_at_the_start_what_the_setting_does(engine: Engine) -> None:
    assert engine.log.read_text().count(f"{SETTING}: a failed load ends its request with an error; set it to") == 1


@pytest.mark.parametrize("fault", ["fail_loads", "refuse_loads"])
def test_exactly_the_request_whose_load_failed_ends_with_an_error(engine: Engine, fault: str) -> None:
    prompts, wanted = stored(engine, 100 * len(fault))
    engine.ask("fault", **{fault: 1 / COUNT, "_owed": 0.0})  # the last of them
    answers = engine.generate(prompts)
    engine.ask("fault", **{fault: 0.0})
    assert sorted(answer["finish"] for answer in answers) == ["error"] + ["length"] * (COUNT - 1)
    failed = next(n for n, answer in enumerate(answers) if answer["finish"] == "error")
    assert answers[failed]["tokens"] == []
    assert_same_outputs([*answers[:failed], *answers[failed + 1 :]], [*wanted[:failed], *wanted[failed + 1 :]])
    said = [line for line in engine.log.read_text().splitlines() if ENDS in line]
    assert len(said) == 1, "once an engine"
    assert f"{SETTING}; set it to 'recompute' in --kv-transfer-config" in said[0]
    assert_nothing_held(engine.ask("settle"))
    assert engine.ask("forget_local")
    before = engine.external_hits()
    assert_same_outputs(engine.generate(prompts), wanted)  # also the one that failed
    assert engine.external_hits() - before == COUNT * 3 * CHUNK


def test_equal_prompts_of_which_one_fails(engine: Engine) -> None:
    """They wait for one load.  It fails one request; the others load for themselves."""
    prompts, wanted = stored(engine, 5000)
    engine.ask("fault", refuse_loads=0.4, _owed=0.6)  # the first load, and none of the next two
    answers = engine.generate([prompts[0]] * 3)
    engine.ask("fault", refuse_loads=0.0)
    right = [answer for answer in answers if answer["finish"] != "error"]
    assert len(right) == 2
    assert_same_outputs(right, [wanted[0]] * 2)
    assert_nothing_held(engine.ask("settle"))


def test_without_a_daemon_no_request_fails_but_those_that_wait_for_it(engine: Engine, shared_daemon: Daemon) -> None:
    prompts, wanted = stored(engine, 6000)
    engine.ask("fault", strike={"at": "open_read", "signal": signal.SIGKILL, "pid": shared_daemon.pid})
    answers = engine.generate(prompts)
    assert {answer["finish"] for answer in answers} == {"error"}  # each was promised a hit
    assert shared_daemon.process is not None
    shared_daemon.process.wait(20)
    assert engine.ask("forget_local")
    assert_same_outputs(engine.generate(prompts), wanted)
    assert_nothing_held(engine.ask("settle"))
    shared_daemon.start()


def test_at_the_end_nothing_is_held(engine: Engine, shared_daemon: Daemon) -> None:
    assert_nothing_held(engine.ask("settle"))
    with Client.attach(shared_daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
        assert client.stats()["l1"]["references"] == 0
