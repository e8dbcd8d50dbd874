"""Prompts with images: equal tokens and another image are another prompt from the image on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.conftest import Daemon
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs, difference
from tests.vllm.tiny_model import IMAGE_TOKEN, IMAGE_TOKENS, prompt

CHUNK = 64
ONE_IMAGE = {"limit_mm_per_prompt": {"image": 1}, "mm_processor_cache_gb": 0}


class Pair(NamedTuple):
    engine: Engine
    plain: Engine  # without kvkeep


@pytest.fixture(scope="module")
def pair(make_engine: Callable[..., Engine], shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tiny_model.idefics3(tmp_path_factory.mktemp("idefics3"))
    with_cache = make_engine(path=path, daemon=shared_daemon, engine=ONE_IMAGE)
    plain = make_engine(path=path, connector=False, engine=ONE_IMAGE)
    return Pair(with_cache.ready(), plain.ready())


def with_image(seed: int, before: int, after: int) -> list[int]:
    """Tokens before and after an image, which vLLM makes `IMAGE_TOKENS` of."""
    words = [10 + token % 500 for token in prompt(seed, before + after)]  # none of them of an image
    return [*words[:before], IMAGE_TOKEN, *words[before:]]


def ask(pair: Pair, one: list[int], image: int, **more: Any) -> tuple[int, list[dict[str, Any]]]:
    """Hits from outside, and the answers; what is stored afterwards is seen by the next call."""
    assert pair.engine.ask("forget_local")
    before = pair.engine.external_hits()
    answers = pair.engine.generate([one], images=[image], **more)
    pair.engine.ask("settle")
    return pair.engine.external_hits() - before, answers


@pytest.mark.parametrize("before", [5, CHUNK - IMAGE_TOKENS // 2, CHUNK, 2 * CHUNK + 9])
def test_another_image_shares_what_comes_before_it_and_nothing_else(pair: Pair, before: int) -> None:
    one = with_image(100 + before, before, 3 * CHUNK)
    length = len(one) - 1 + IMAGE_TOKENS
    wanted = {image: pair.plain.generate([one], images=[image]) for image in (1, 2)}
    assert difference(wanted[2][0], wanted[1][0]) > 0.01  # else nothing here could fail
    whole, shared = length // CHUNK * CHUNK, before // CHUNK * CHUNK
    for image, hits in ((1, 0), (2, shared), (1, whole), (2, whole)):
        found, answers = ask(pair, one, image)
        assert found == hits
        assert_same_outputs(answers, wanted[image])
    report = pair.engine.ask("settle")
    assert_nothing_held(report)
    assert report["guard"] == {}


def test_a_salt_keeps_equal_images_apart(pair: Pair) -> None:
    one = with_image(1000, 10, 3 * CHUNK)
    for salt, hits in (("a", 0), ("b", 0), ("a", 3 * CHUNK)):
        assert ask(pair, one, 1, salts=[salt])[0] == hits


def test_an_image_is_what_the_user_names_it(pair: Pair) -> None:
    """vLLM then looks at no pixel; who lets strangers name images gives each tenant a salt."""
    one = with_image(2000, 10, 3 * CHUNK)
    for name, hits in (("x", 0), ("y", 0), ("x", 3 * CHUNK)):
        assert ask(pair, one, 1, image_names=[name])[0] == hits
