"""Beside another connector, as vLLM's MultiConnector combines them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK, BLOCK = 64, 32


def combined(daemon: Daemon, folder: Path, *, ours_first: bool) -> dict[str, Any]:
    options = {"kvkeep.run_dir": str(daemon.run_dir), "kvkeep.chunk_tokens": CHUNK, "kvkeep.min_hit": 0}
    ours = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, other] if ours_first else [other, ours]},
    }


@pytest.mark.parametrize("ours_first", [True, False], ids=["first", "second"])
def test_beside_another_connector_answers_are_right_and_nothing_is_held(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, reference: Engine, tmp_path: Path, ours_first: bool
) -> None:
    transfer = combined(shared_daemon, tmp_path, ours_first=ours_first)
    engine = make_engine(engine={"kv_transfer_config": transfer}).ready()
    assert engine.ask("report")["on"], engine.tail()
    prompts = [prompt(100 + 10 * ours_first + n, 4 * CHUNK + 9 * n) for n in range(4)]
    wanted = reference.generate(prompts)
    assert_same_outputs(engine.generate(prompts), wanted)
    assert engine.ask("forget_local")
    before = engine.external_hits()
    assert_same_outputs(engine.generate(prompts), wanted)
    ours = sum(len(one) // CHUNK * CHUNK for one in prompts)
    theirs = sum((len(one) - 1) // BLOCK * BLOCK for one in prompts)  # all but the last token, in whole blocks
    assert engine.external_hits() - before == (ours if ours_first else theirs)
    report = engine.ask("settle")
    assert_nothing_held(report)
    assert report["guard"] == {}
    assert report["counters"].get("loaded_tokens", 0) == (ours if ours_first else 0)
