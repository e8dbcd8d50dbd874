"""Two engines in processes of their own share one daemon; what they say is what an engine without kvkeep says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
BLOCK = 32


class Pair(NamedTuple):
    first: Engine
    second: Engine  # computes prompts in pieces of 96 tokens
    daemon: Daemon


@pytest.fixture(scope="module")
def pair(make_engine: Callable[..., Engine], shared_daemon: Daemon) -> Pair:
    first = make_engine(daemon=shared_daemon, options={"kvkeep.store_generated": True})
    second = make_engine(daemon=shared_daemon, engine={"max_num_batched_tokens": 96})
    return Pair(first.ready(), second.ready(), shared_daemon)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 1500])
def test_the_second_engine_is_served_from_what_the_first_stored(pair: Pair, reference: Engine, length: int) -> None:
    prompts = [prompt(1000 + length, length)]
    wanted = reference.generate(prompts)
    assert_same_outputs(pair.first.generate(prompts), wanted)
    pair.first.ask("settle")
    before = pair.second.external_hits()
    assert_same_outputs(pair.second.generate(prompts), wanted)
    assert pair.second.external_hits() - before == length // CHUNK * CHUNK
    assert_nothing_held(pair.second.ask("settle"))


def test_eight_requests_at_once_are_all_served_and_right(pair: Pair, reference: Engine) -> None:
    prompts = [prompt(2000 + n, 3 * CHUNK + 7 * n) for n in range(8)]
    wanted = reference.generate(prompts, max_tokens=24)
    assert_same_outputs(pair.first.generate(prompts, max_tokens=24), wanted)
    pair.first.ask("settle")
    before = pair.second.external_hits()
    assert_same_outputs(pair.second.generate(prompts, max_tokens=24), wanted)
    assert pair.second.external_hits() - before == sum(len(p) // CHUNK * CHUNK for p in prompts)
    assert_nothing_held(pair.second.ask("settle"))


def test_prompts_computed_in_pieces_are_stored_whole(pair: Pair, reference: Engine) -> None:
    prompts = [prompt(3000 + n, 5 * CHUNK + 11) for n in range(4)]
    wanted = reference.generate(prompts)
    assert_same_outputs(pair.second.generate(prompts), wanted)  # four of them compete for 96 tokens a step
    pair.second.ask("settle")
    before = pair.first.external_hits()
    assert_same_outputs(pair.first.generate(prompts), wanted)
    assert pair.first.external_hits() - before == 4 * 5 * CHUNK


def test_a_local_hit_that_ends_inside_a_chunk_loads_only_the_blocks_after_it(pair: Pair, reference: Engine) -> None:
    whole = prompt(4000, 5 * CHUNK)
    wanted = reference.generate([whole])
    pair.first.generate([whole])
    pair.first.ask("settle")
    pair.second.generate([whole[: CHUNK + BLOCK + 5]])  # leaves three blocks in the engine: a chunk and a half
    before = pair.second.external_hits()
    assert_same_outputs(pair.second.generate([whole]), wanted)
    assert pair.second.external_hits() - before == 5 * CHUNK - (CHUNK + BLOCK)


def test_a_hit_of_less_than_a_chunk_is_a_miss(pair: Pair) -> None:
    whole = prompt(4100, 2 * CHUNK)
    pair.first.generate([whole])
    pair.first.ask("settle")
    pair.second.generate([whole[: CHUNK + BLOCK + 5]])
    before = pair.second.external_hits()
    pair.second.generate([whole])
    assert pair.second.external_hits() == before


def test_generated_tokens_serve_the_next_turn(pair: Pair, reference: Engine) -> None:
    question = prompt(5000, CHUNK + 10)
    answer = pair.first.generate([question], max_tokens=2 * CHUNK)[0]["tokens"]
    pair.first.ask("settle")
    next_turn = question + answer + prompt(5001, 9)
    before = pair.second.external_hits()
    assert_same_outputs(pair.second.generate([next_turn]), reference.generate([next_turn]))
    # the last generated token was never computed by the first engine
    assert pair.second.external_hits() - before == (len(question) + len(answer) - 1) // CHUNK * CHUNK


def test_a_salt_keeps_prompts_apart(pair: Pair, reference: Engine) -> None:
    prompts = [prompt(6000, 3 * CHUNK)]
    wanted = reference.generate(prompts)
    pair.first.generate(prompts, salts=["one"])
    pair.first.ask("settle")
    before = pair.second.external_hits()
    for salts in (["two"], None):
        assert_same_outputs(pair.second.generate(prompts, salts=salts), wanted)
    assert pair.second.external_hits() == before
    assert_same_outputs(pair.second.generate(prompts, salts=["one"]), wanted)
    assert pair.second.external_hits() - before == 3 * CHUNK


def test_decoding_sends_no_message_until_a_chunk_is_complete(pair: Pair) -> None:
    pair.first.ask("settle")
    before = pair.first.ask("report")["sent"]
    pair.first.generate([prompt(7000, 10)], max_tokens=CHUNK - 12)  # never completes a chunk
    assert pair.first.ask("settle")["sent"] == before
    pair.first.generate([prompt(7001, 2 * CHUNK + 1)], max_tokens=CHUNK - 3)  # one lookup, one store, then decodes
    after = pair.first.ask("settle")["sent"]
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)} == {
        "begin_lookup": 1,
        "reserve": 1,
    }


def test_what_is_there_already_is_not_stored_again(pair: Pair) -> None:
    prompts = [prompt(8000, 4 * CHUNK)]
    pair.first.generate(prompts)
    stored = pair.first.ask("settle")["counters"]["chunks_stored"]
    assert pair.first.ask("forget_local")
    pair.first.generate(prompts)
    assert pair.first.ask("settle")["counters"]["chunks_stored"] == stored


def test_a_cache_reset_hides_what_was_stored_before(pair: Pair, reference: Engine) -> None:
    prompts = [prompt(9000, 4 * CHUNK + 3)]
    wanted = reference.generate(prompts)
    pair.first.generate(prompts)
    pair.first.ask("settle")
    assert pair.first.ask("reset_all")
    before = pair.first.external_hits()
    assert_same_outputs(pair.first.generate(prompts), wanted)
    assert pair.first.external_hits() == before
    pair.first.ask("settle")
    assert pair.first.ask("forget_local")
    assert_same_outputs(pair.first.generate(prompts), wanted)  # what was stored since then is found
    assert pair.first.external_hits() - before == 4 * CHUNK
    before = pair.second.external_hits()
    pair.second.generate(prompts)  # another engine did not reset
    assert pair.second.external_hits() - before == 4 * CHUNK


def test_at_the_end_the_daemon_holds_no_reference_for_idle_engines(pair: Pair) -> None:
    for engine in (pair.first, pair.second):
        report = engine.ask("settle")
        assert_nothing_held(report)
        assert report["guard"] == {}
    with Client.attach(pair.daemon.run_dir) as client:
        assert client.check() == {"ok": True, "problem": ""}
        assert client.stats()["l1"]["references"] == 0
