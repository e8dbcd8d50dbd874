"""Real engines with LoRA adapters: what one computed with an adapter is served only with that content."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Daemon
from tests.vllm import tiny_adapter
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs, difference
from tests.vllm.tiny_model import prompt

CHUNK = 64
PATIENT = {"kvkeep.lookup_deadline_ms": 20_000.0}  # an adapter's first request waits so long for its files to be read
LORA = {"enable_lora": True, "max_lora_rank": tiny_adapter.RANK, "max_loras": 2}


class Trio(NamedTuple):
    first: Engine
    second: Engine
    plain: Engine  # without kvkeep
    adapters: dict[str, tuple[str, int, str] | None]  # name -> LoRARequest; "base" = none
    folder: Path


@pytest.fixture(scope="module")
def trio(make_engine: Callable[..., Engine], shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    folder = tmp_path_factory.mktemp("adapters")
    adapters: dict[str, tuple[str, int, str] | None] = {"base": None}
    for number, name in enumerate("AB", 1):
        adapters[name] = (name, number, str(tiny_adapter.build(folder / name, seed=number)))
    engines = [make_engine(daemon=shared_daemon, engine=LORA, options=PATIENT) for _ in range(2)]
    engines.append(make_engine(connector=False, engine=LORA))
    return Trio(*(engine.ready() for engine in engines), adapters, folder)


def hits_of(engine: Engine, prompts: list[list[int]], **more: Any) -> tuple[int, list[dict[str, Any]]]:
    before = engine.external_hits()
    answers = engine.generate(prompts, **more)
    return engine.external_hits() - before, answers


def test_each_adapter_is_served_what_was_computed_with_it(trio: Trio) -> None:
    prompts = [prompt(100, 4 * CHUNK + 5)]
    wanted = {name: trio.plain.generate(prompts, adapter=adapter) for name, adapter in trio.adapters.items()}
    for one, other in (("base", "A"), ("base", "B"), ("A", "B")):  # else nothing here could fail
        assert difference(wanted[one][0], wanted[other][0]) > 0.01
    trio.first.generate([prompt(1, 8)], adapter=trio.adapters["A"])  # both adapters are known from here on
    trio.first.generate([prompt(1, 8)], adapter=trio.adapters["B"])
    for name in ("A", "B", "base"):
        hits, answers = hits_of(trio.first, prompts, adapter=trio.adapters[name])
        assert hits == 0, name
        assert_same_outputs(answers, wanted[name])
        trio.first.ask("settle")
    for name in ("base", "B", "A"):
        hits, answers = hits_of(trio.second, prompts, adapter=trio.adapters[name])
        assert hits == 4 * CHUNK, name
        assert_same_outputs(answers, wanted[name])
    for engine in (trio.first, trio.second):
        report = engine.ask("settle")
        assert report["guard"] == {}
        assert_nothing_held(report)


def test_an_adapter_that_is_newer_than_the_engine_is_not_cached(trio: Trio) -> None:
    """The engine may have read others under that path before."""
    late = ("late", 50, str(tiny_adapter.build(trio.folder / "late", seed=50)))
    prompts = [prompt(200, 2 * CHUNK + 5)]
    wanted = trio.plain.generate(prompts, adapter=late)
    stored = trio.first.ask("settle")["counters"]["chunks_stored"]
    for _ in range(2):
        assert trio.first.ask("forget_local")
        hits, answers = hits_of(trio.first, prompts, adapter=late)
        assert hits == 0
        assert_same_outputs(answers, wanted)
    assert trio.first.ask("settle")["counters"]["chunks_stored"] == stored
    assert trio.first.log.read_text().count("requests with adapter 'late'") == 1


def test_the_same_name_with_other_content_never_hits(
    trio: Trio, make_engine: Callable[..., Engine], shared_daemon: Daemon
) -> None:
    """The same name, the same path, and files of which one engine read the old and one reads the new."""
    prompts = [prompt(300, 4 * CHUNK + 5)]
    adapter = trio.adapters["B"]
    assert adapter is not None
    old = trio.plain.generate(prompts, adapter=adapter)
    trio.first.generate(prompts, adapter=adapter)
    trio.first.ask("settle")
    hits, _ = hits_of(trio.second, prompts, adapter=adapter)
    assert hits == 4 * CHUNK
    shutil.rmtree(adapter[2])
    tiny_adapter.build(Path(adapter[2]), seed=99)

    trusting = PATIENT | {"kvkeep.trust_new_adapters": True}
    later = make_engine(daemon=shared_daemon, engine=LORA, options=trusting).ready()
    hits, answers = hits_of(later, prompts, adapter=adapter)
    assert hits == 0
    assert difference(answers[0], old[0]) > 0.01
    later.ask("settle")

    # the first engine still has the old content in its memory: right answers, and no bytes of either
    assert trio.first.ask("forget_local")
    stored = trio.first.ask("report")["counters"]["chunks_stored"]
    hits, answers = hits_of(trio.first, prompts, adapter=adapter)
    assert hits == 0
    assert_same_outputs(answers, old)
    assert trio.first.ask("settle")["counters"]["chunks_stored"] == stored
    assert "its files changed" in trio.first.log.read_text()

    assert later.ask("forget_local")
    hits, again = hits_of(later, prompts, adapter=adapter)
    assert hits == 4 * CHUNK
    assert hits_of(later, prompts, adapter=trio.adapters["A"])[0] == 0
    assert difference(again[0], old[0]) > 0.01
    later.close()
