"""Parallelism as vLLM's own configuration states it: who shares a namespace, who does not, and who is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from kvkeep.ipc.vllm import identity
from tests.vllm.test_identity import digest, engine

Configure = Callable[..., Any]


@pytest.fixture
def configure(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """configure(**sizes) -> VllmConfig.  Making one changes the environment, which engines of other tests inherit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = dict(os.environ)
    transfer = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both"}

    def make(**sizes: int) -> Any:
        args = EngineArgs(model=str(model), dtype="float32", enforce_eager=True, kv_transfer_config=transfer, **sizes)
        return args.create_engine_config()

    yield make
    os.environ.clear()
    os.environ.update(before)


def replica(config: Any, rank: int) -> Any:
    """What vLLM makes of the configuration in the engine process of a data-parallel rank of a dense model."""
    config.parallel_config.data_parallel_rank_local = config.parallel_config.data_parallel_index = rank
    config.parallel_config.reconfigure_for_independent_dp_rank()
    config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{rank}"
    return config


def test_data_parallel_replicas_are_one_namespace_and_other_tensor_parallel_sizes_are_others(
    configure: Configure, tmp_path: Path
) -> None:
    _, kv = engine(tmp_path)
    replicas = [replica(configure(data_parallel_size=2), rank) for rank in (0, 1)]
    assert [identity.refusal(config, kv) for config in replicas] == ["", ""]
    alone = digest(configure(), kv)
    assert [digest(config, kv) for config in replicas] == [alone, alone]
    wider = [replica(configure(data_parallel_size=2, tensor_parallel_size=2), rank) for rank in (0, 1)]
    assert digest(wider[0], kv) == digest(wider[1], kv) == digest(configure(tensor_parallel_size=2), kv)
    assert digest(wider[0], kv) != alone


def test_pipeline_parallelism_is_refused_in_one_sentence(configure: Configure, tmp_path: Path) -> None:
    _, kv = engine(tmp_path)
    sentence = "pipeline_parallel_size is 2: this version supports 1"
    assert identity.refusal(configure(pipeline_parallel_size=2), kv) == sentence
