"""What requests may say about their own caching, the learned threshold and equal prompts, on a real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.ipc.conftest import eventually
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
PATIENT = {"kvkeep.lookup_deadline_ms": 20_000.0, "kvkeep.transfer_deadline_s": 60.0}  # for a busy machine


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Engine:
    return make_engine(daemon=shared_daemon, options=PATIENT | {"kvkeep.max_pin_s": 600.0}).ready()


def counters(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.ask("settle")["counters"]
    return found


def served(engine: Engine, prompts: list[list[int]], **more: Any) -> int:
    """Tokens from the daemon, not from the engine's own cache."""
    assert engine.ask("forget_local")
    before = engine.external_hits()
    engine.generate(prompts, **more)
    return engine.external_hits() - before


def test_by_default_prompts_are_stored_and_generated_tokens_are_not(engine: Engine) -> None:
    question = prompt(100, CHUNK + 10)
    answer = engine.generate([question], max_tokens=2 * CHUNK)[0]["tokens"]
    assert served(engine, [question + answer]) == CHUNK


def test_a_request_that_says_all_is_stored_with_what_it_generated(engine: Engine) -> None:
    question = prompt(200, CHUNK + 10)
    answer = engine.generate([question], max_tokens=2 * CHUNK, wishes={"kvkeep.store": "all"})[0]["tokens"]
    assert served(engine, [question + answer]) == 3 * CHUNK


def test_a_request_that_says_no_is_not_stored(engine: Engine) -> None:
    prompts = [prompt(300, 4 * CHUNK)]
    before = counters(engine).get("chunks_stored", 0)
    engine.generate(prompts, wishes={"kvkeep.store": False})
    assert counters(engine).get("chunks_stored", 0) == before
    assert served(engine, prompts) == 0
    assert served(engine, prompts) == 4 * CHUNK


def test_a_request_that_wants_no_loads_is_computed(engine: Engine, reference: Engine) -> None:
    prompts = [prompt(400, 4 * CHUNK)]
    engine.generate(prompts)
    assert served(engine, prompts, wishes={"kvkeep.load": False}) == 0
    assert engine.ask("forget_local")
    assert_same_outputs(engine.generate(prompts), reference.generate(prompts))


def test_a_bad_wish_is_one_line_in_the_log_and_no_error(engine: Engine, reference: Engine) -> None:
    prompts = [prompt(500, 2 * CHUNK)]
    wanted = reference.generate(prompts)
    for _ in range(2):
        assert_same_outputs(engine.generate(prompts, wishes={"kvkeep.store": "everything", "other": [1]}), wanted)
    assert engine.log.read_text().count("kvkeep.store is 'everything': it may be true, false, 'prompt' or 'all'") == 1
    assert served(engine, prompts) == 2 * CHUNK


def test_a_prompt_is_kept_while_it_is_pinned(engine: Engine, shared_daemon: Daemon) -> None:
    prompts = [prompt(600, 4 * CHUNK)]
    engine.generate(prompts, wishes={"kvkeep.pin_s": 300})
    engine.ask("settle")
    with Client.attach(shared_daemon.run_dir) as client:
        eventually(lambda: client.stats()["l1"]["references"] == 4)
        client.clear()
    assert served(engine, prompts) == 4 * CHUNK


def test_equal_prompts_that_come_together_are_loaded_once(engine: Engine, reference: Engine) -> None:
    one = prompt(700, 8 * CHUNK)
    prompts = [one, one, one + prompt(701, 9)]
    wanted = reference.generate(prompts)
    engine.generate([one])
    engine.ask("settle")
    assert engine.ask("forget_local")
    before, sent = counters(engine), engine.ask("report")["sent"]
    engine.ask("fault", slow_loads_s=0.2)
    hits = engine.external_hits()
    assert_same_outputs(engine.generate(prompts), wanted)
    engine.ask("fault", slow_loads_s=0.0)
    after = counters(engine)
    assert engine.external_hits() - hits == 8 * CHUNK
    assert after["loads"] - before.get("loads", 0) == 1
    assert engine.ask("report")["sent"]["open_read"] - sent.get("open_read", 0) == 1
    assert_nothing_held(engine.ask("settle"))


def test_a_load_that_fails_leaves_the_second_request_right_and_not_waiting(engine: Engine, reference: Engine) -> None:
    one = prompt(800, 8 * CHUNK)
    wanted = reference.generate([one, one, one])
    engine.generate([one])
    engine.ask("settle")
    assert engine.ask("forget_local")
    engine.ask("fault", slow_loads_s=0.05, refuse_loads=1.0)
    assert_same_outputs(engine.generate([one, one, one]), wanted)
    engine.ask("fault", slow_loads_s=0.0, refuse_loads=0.0)
    assert_nothing_held(engine.ask("settle"))


def test_hits_that_take_longer_than_computing_are_declined(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, reference: Engine
) -> None:
    learner = make_engine(daemon=shared_daemon, options=PATIENT | {"kvkeep.min_hit": "learned"}).ready()
    prompts = [prompt(900 + n, 6 * CHUNK) for n in range(12)]
    wanted = [reference.generate([one])[0] for one in prompts]
    for one in prompts:
        learner.generate([one])
    learner.ask("settle")
    assert learner.ask("forget_local")
    learner.ask("fault", slow_loads_s=0.5)
    answers = [learner.generate([one])[0] for one in prompts]
    assert_same_outputs(answers, wanted)
    found = counters(learner)
    assert 0 < found["loads"] < len(prompts)
    assert found["hits_declined"] == len(prompts) - found["loads"]
    assert learner.ask("report")["guard"] == {}
