"""A real vLLM engine on a GPU says the same with what it loads as with what it computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import BFLOAT16_TOLERANCE, assert_nothing_held, assert_same_outputs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.32 with CUDA: vllm is not installed"
)

COLD_START_S = 400.0  # the first engine compiles, and captures graphs; the others find what it compiled
# Captured graphs in all of them, since what is compared should be computed by the same kernels; of few sizes.
SETTINGS: dict[str, Any] = {
    "engine": {
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "block_size": 16,
        "max_num_seqs": 4,
        "enforce_eager": False,
    }
}
PROMPTS = [[2 + (17 * n + 31 * k) % 500 for n in range(length)] for k, length in enumerate((70, 500, 1024, 1999))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_model.build(folder / "model", wide=True, spread=0.05)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    name = unique_name("gpu")
    made = Daemon(folder / name, name, l1_mib=2048)
    yield made.start()
    made.remove()


@pytest.mark.timeout(1500)
def test_an_engine_loads_what_it_stored_and_what_another_stored(folder: Path, model: Path, daemon: Daemon) -> None:
    with Engine(folder / "reference.log", model, connector=False, **SETTINGS) as engine:
        wanted = engine.ready(COLD_START_S).generate(PROMPTS)
    options = {"kvkeep.run_dir": str(daemon.run_dir)}
    for number in range(2):
        with Engine(folder / f"engine-{number}.log", model, options=options, **SETTINGS) as engine:
            engine.ready(COLD_START_S)
            assert_same_outputs(engine.generate(PROMPTS), wanted, BFLOAT16_TOLERANCE)
            assert engine.ask("forget_local")
            before = engine.external_hits()
            assert_same_outputs(engine.generate(PROMPTS), wanted, BFLOAT16_TOLERANCE)
            assert engine.external_hits() - before >= sum(len(prompt) // 64 * 64 - 64 for prompt in PROMPTS)
            assert_nothing_held(engine.ask("settle"))
            series = {name: value for name, _, value in engine.ask("series")}
            assert series["vllm:kvkeep_arena_pinned_bytes"] > 0
            daemon.restart()  # while nothing runs; the next engine, and this one, find it again
            assert_same_outputs(engine.generate(PROMPTS), wanted, BFLOAT16_TOLERANCE)
        log = (folder / f"engine-{number}.log").read_text()
        assert "cache off for this engine" not in log
        assert "kvkeep: load" not in log
        assert "kvkeep: store" not in log
