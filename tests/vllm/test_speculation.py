"""Speculative decoding: drafts do not get into what is stored, draft layers do, and a hit costs no acceptance.

A draft model that is the target itself, and an EAGLE head that is the target's only layer, guess right nearly always,
if the KV of their own layers is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Daemon
from tests.vllm import tiny_families
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.test_model_families import PATIENCE
from tests.vllm.tiny_model import prompt

CHUNK, TOKENS = 64, 48
LENGTHS = (5 * CHUNK + 7, 8 * CHUNK + 30, 14 * CHUNK + 33)
METHODS = {"ngram": 0, "draft_model": 0, "eagle": 1}  # chunks at the end of what is there that no hit has


class Setup(NamedTuple):
    plain: Engine  # no speculation, no cache
    engine: Engine
    drops: int
    stores_all: bool


@pytest.fixture(scope="module", params=METHODS)
def setup(
    request: pytest.FixtureRequest,
    shared_daemon: Daemon,
    model: Path,
    reference: Engine,
    folder: Path,
    make_engine: Callable[..., Engine],
) -> Iterator[Setup]:
    method, path, plain = request.param, model, reference
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    elif method == "draft_model":
        speculation["model"] = str(model)
    else:
        path, head = tiny_families.eagle(folder / "eagle")
        speculation["model"] = str(head)
        plain = make_engine(path=path, connector=False)
    engine = make_engine(
        path=path,
        daemon=shared_daemon,
        options=PATIENCE | {"kvkeep.store_generated": method == "ngram"},
        engine={"speculative_config": speculation},
    )
    if plain is not reference:
        plain.ready()
    yield Setup(plain, engine.ready(), METHODS[method], method == "ngram")
    for started in {engine, plain} - {reference}:
        started.close()


def accepted(engine: Engine, prompts: list[list[int]], **arguments: Any) -> tuple[list[dict[str, Any]], float]:
    """Answers, and which part of the drafts was right."""
    names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
    before = engine.ask("metrics")
    answers = engine.generate(prompts, **arguments)
    after = engine.ask("metrics")
    right, drafted = (after.get(name, 0) - before.get(name, 0) for name in names)
    assert drafted, "nothing was drafted"
    return answers, right / drafted


def test_a_hit_changes_neither_what_is_said_nor_how_much_is_guessed_right(setup: Setup) -> None:
    assert setup.engine.ask("report")["on"], setup.engine.tail()
    prompts = [prompt(100 + length, length) for length in LENGTHS]
    wanted = setup.plain.generate(prompts, max_tokens=TOKENS)
    cold, rate = accepted(setup.engine, prompts, max_tokens=TOKENS)
    assert_same_outputs(cold, wanted)
    assert setup.engine.ask("forget_local")
    before = setup.engine.external_hits()
    warm, warm_rate = accepted(setup.engine, prompts, max_tokens=TOKENS)
    assert_same_outputs(warm, wanted)
    assert setup.engine.external_hits() - before == sum((n // CHUNK - setup.drops) * CHUNK for n in LENGTHS)
    assert warm_rate >= rate - 0.02
    assert_nothing_held(setup.engine.ask("settle"))


def test_a_conversation_goes_on_with_what_was_guessed_right(setup: Setup) -> None:
    """With n-gram everything is stored, also what was drafted and accepted, and nothing that was rejected."""
    first = prompt(7, 3 * CHUNK) + prompt(7, 9) * 6  # repeats itself, so that there is something to guess
    answers, _ = accepted(setup.engine, [first], max_tokens=2 * CHUNK)
    second = first + answers[0]["tokens"] + prompt(8, 20)
    wanted = setup.plain.generate([second], max_tokens=TOKENS)
    assert setup.engine.ask("forget_local")
    before = setup.engine.external_hits()
    got, _ = accepted(setup.engine, [second], max_tokens=TOKENS)
    assert_same_outputs(got, wanted)
    stored = len(first) + (2 * CHUNK - 1) * setup.stores_all
    assert setup.engine.external_hits() - before == (stored // CHUNK - setup.drops) * CHUNK
    assert_nothing_held(setup.engine.ask("settle"))
