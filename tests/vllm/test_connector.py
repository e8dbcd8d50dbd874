"""What vLLM sees of the connector: nothing raises, and a refused engine runs as if it were not there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

import kvkeep.ipc.vllm
from kvkeep.ipc.vllm.connector import KVKeepConnector
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import KVKeepMetadata, WorkerFacts
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.scheduler import SchedulerHalf
from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_same_outputs
from tests.vllm.test_identity import engine
from tests.vllm.tiny_model import prompt

ENTRY_POINTS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "register_kv_caches": (({},), None),
    "get_handshake_metadata": ((), None),
    "start_load_kv": ((None,), None),
    "wait_for_layer_load": (("l",), None),
    "save_kv_layer": (("l", None, None), None),
    "wait_for_save": ((), None),
    "get_transfer_results": (({"r"},), KVConnectorTransferResults()),
    "get_block_ids_with_load_errors": ((), set()),
    "build_connector_worker_meta": ((), None),
    "handle_preemptions": ((None,), None),
    "bind_gpu_block_pool": ((None,), None),
    "set_xfer_handshake_metadata": (({},), None),
    "on_new_request": ((None,), None),
    "get_num_new_matched_tokens": ((None, 0), (0, False)),
    "update_state_after_alloc": ((None, None, 0), None),
    "build_connector_meta": ((None,), KVKeepMetadata()),
    "update_connector_output": ((SimpleNamespace(kv_connector_worker_meta=None),), None),
    "request_finished": ((None, []), (False, None)),
    "request_finished_all_groups": ((None, ([],)), (False, None)),
    "get_external_cache_hit_sources": ((None, 0), {}),
    "get_kv_connector_stats": ((), None),
    "take_events": ((), ()),
    "has_pending_push_work": ((), False),
    "has_pending_block_frees": ((), False),
    "shutdown": ((), None),
}


def connector(role: KVConnectorRole, extra: dict[str, Any]) -> KVKeepConnector:
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, kv_load_failure_policy="recompute", is_kv_producer=True, is_kv_consumer=True
    )
    return KVKeepConnector(SimpleNamespace(kv_transfer_config=transfer), role, SimpleNamespace())


@pytest.mark.parametrize(
    ("attn_metadata", "arguments", "rests"),
    [
        (None, {}, True),  # either model runner, in a step that computes nothing
        ({"layer": 1}, {}, False),  # V1, in the forward's context
        (None, {"num_tokens": 3, "request_ids": ["r"]}, False),  # V2, after the forward, outside its context
    ],
)
def test_only_a_step_without_a_forward_rests_while_loads_are_under_way(
    attn_metadata: object, arguments: dict[str, Any], rests: bool
) -> None:
    made = connector(KVConnectorRole.SCHEDULER, {"kvkeep.no_such_option": 1})
    computes: list[bool] = []
    made.worker = SimpleNamespace(start_loads=lambda _, **said: computes.append(said["computes"]))  # type: ignore
    made.bind_connector_metadata(KVKeepMetadata())
    made.start_load_kv(SimpleNamespace(attn_metadata=attn_metadata), **arguments)
    assert computes == [not rests]


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_refused_engine_gets_neutral_answers(role: KVConnectorRole) -> None:
    refused = connector(role, {"kvkeep.no_such_option": 1})
    for name, (arguments, answer) in ENTRY_POINTS.items():
        assert getattr(refused, name)(*arguments) == answer, name
    assert refused.reset_cache() is True
    assert refused.guard.counters == {}


class Broken:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise ZeroDivisionError(name)


def test_no_exception_of_ours_reaches_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    broken = connector(KVConnectorRole.WORKER, {"kvkeep.no_such_option": 1})
    broken.scheduler = broken.worker = Broken()  # type: ignore[assignment]
    broken.bind_connector_metadata(KVKeepMetadata())
    for name, (arguments, answer) in ENTRY_POINTS.items():
        for _ in range(2):
            assert getattr(broken, name)(*arguments) == answer, name
    assert broken.reset_cache() is False  # not done: the caller must know
    assert broken.guard.counters["wait_for_save: ZeroDivisionError"] == 2


def test_a_configuration_that_we_do_not_understand_turns_the_cache_off(caplog: pytest.LogCaptureFixture) -> None:
    strange = connector(KVConnectorRole.SCHEDULER, {})  # a config without any of the fields we read
    assert strange.scheduler is None
    assert sum(strange.guard.counters.values()) == 1
    assert strange.get_num_new_matched_tokens(None, 0) == (0, False)  # type: ignore[arg-type]


def test_what_only_the_workers_refuse_is_told_by_the_scheduler_half() -> None:
    """vLLM shows the scheduler half one layer's spec where the layers of a group differ."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec, "b": replace(spec, head_size=16)})
    told: list[str] = []
    vllm_config, kv = engine(Path("/nowhere"))
    vllm_config.lora_config = vllm_config.kv_events_config = None
    vllm_config.kv_transfer_config = connector(KVConnectorRole.WORKER, {})._kv_transfer_config
    half = SchedulerHalf(vllm_config, kv, Options(), Guard(told.append), told.append)
    kv.kv_cache_groups[0].kv_cache_spec = mixed
    facts = KVKeepConnector(vllm_config, KVConnectorRole.WORKER, kv).get_handshake_metadata()
    assert isinstance(facts, WorkerFacts)
    half.set_facts([facts])
    assert "UniformTypeKVCacheSpecs" in told[0]
    assert half.lookups is None


def test_a_dropped_store_never_makes_vllm_compute_a_request_again() -> None:
    assert connector(KVConnectorRole.SCHEDULER, {"kvkeep.x": 1}).requires_kv_delivery is False


def test_the_plugin_registers_the_name_and_may_be_called_twice() -> None:
    kvkeep.ipc.vllm.register()
    kvkeep.ipc.vllm.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVKeepConnector") is KVKeepConnector


def test_the_plugin_module_imports_nothing_heavy() -> None:
    code = "import sys, kvkeep.ipc.vllm; print(sorted({'torch', 'vllm', 'numpy', 'zmq'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_engine_whose_blocks_do_not_fit_the_chunk_says_so_once_and_runs(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, reference: Engine
) -> None:
    engine = make_engine(daemon=shared_daemon, options={"kvkeep.chunk_tokens": 100}, policy="fail").ready()
    prompts = [prompt(1, 300)]
    assert_same_outputs(engine.generate(prompts), reference.generate(prompts))
    report = engine.ask("report")
    assert (report["on"], report["sent"], report["guard"]) == (False, {}, {})
    log = engine.log.read_text()
    assert log.count("kvkeep: cache off for this engine: a chunk of 100 tokens is not a multiple") == 1
    assert log.count("kv_load_failure_policy is 'fail'") == 1


def test_an_engine_in_several_processes_is_served_and_gives_its_blocks_back_when_idle(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, reference: Engine
) -> None:
    engine = make_engine(daemon=shared_daemon, multiprocessing=True).ready()
    prompts = [prompt(50 + n, 200 + n) for n in range(4)]
    wanted = reference.generate(prompts)
    assert_same_outputs(engine.generate(prompts), wanted)
    until = time.monotonic() + 20  # nobody sends a request meanwhile: the idle engine must drain its stores by itself
    while not engine.ask("reset_prefix_cache"):
        assert time.monotonic() < until, "blocks stay pinned in an idle engine"
        time.sleep(0.02)
    assert_same_outputs(engine.generate(prompts), wanted)
    assert engine.external_hits() == 4 * 192
    ours = {(name, *labels.values()): value for name, labels, value in engine.ask("series") if "kvkeep" in name}
    assert sum(value for (name, *_), value in ours.items() if name == "vllm:kvkeep_loaded_tokens_total") == 4 * 192
    assert sum(value for (name, *_), value in ours.items() if name == "vllm:kvkeep_stored_tokens_total") == 4 * 192
