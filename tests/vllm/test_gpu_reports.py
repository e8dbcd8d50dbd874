"""What the scheduler half learns of a worker's GPU: how much of the arena is pinned, and that nothing can be copied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvkeep.ipc.vllm import devices
from kvkeep.ipc.vllm.copies import CopyThreads
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.memory import Levels, UnknownLayout
from kvkeep.ipc.vllm.metadata import (
    KVKeepMetadata,
    KVKeepWorkerMetadata,
    LoadFailure,
    LoadJob,
    LoadReport,
    NamespaceSpec,
    StoreEnd,
    StoreJob,
    StoreReport,
)
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.scheduler import SchedulerHalf
from kvkeep.ipc.vllm.worker import WorkerHalf
from tests.ipc.conftest import eventually
from tests.ipc.cuda_rig import FakeArena, Model
from tests.vllm.fake_client import FakeClient, FakeDaemon
from tests.vllm.test_identity import engine
from tests.vllm.test_pages import engine_memory

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")


class Worker:
    def __init__(self) -> None:
        self.model, self.said = Model(), list[str]()
        config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC)])
        self.half = WorkerHalf(SimpleNamespace(), config, Options(), Guard(self.said.append))  # type: ignore[arg-type]
        self.half._memory = self.model.memory
        self.half.copies = CopyThreads(
            FakeClient(FakeDaemon()),
            self.model.memory,
            shard=0,
            load_threads=1,
            deadline_s=5.0,
            log=self.half._guard.note,
        )

    def step(self, metadata: KVKeepMetadata | None = None) -> KVKeepWorkerMetadata | None:
        """As vLLM goes through one."""
        metadata = metadata or KVKeepMetadata()
        self.half.start_loads(metadata, computes=True)
        self.half.start_stores(metadata)
        self.half.take_finished_loads(set())
        return self.half.take_report()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    made.step()  # which tells the levels
    yield made
    made.half.close()
    made.model.close()


def test_levels_are_told_when_they_change_and_only_then(worker: Worker) -> None:
    assert worker.step() is None
    arena = FakeArena(1 << 16)
    worker.model.client.watch(arena)
    eventually(lambda: worker.model.memory.levels().pinned)
    report = worker.step()
    assert report is not None
    assert report.levels == {0: Levels(1 << 16, 1 << 16)}
    assert worker.step() is None


def test_jobs_that_cannot_be_ordered_behind_the_engine_are_reported_as_failed(worker: Worker) -> None:
    worker.model.driver.fail_fence = ILLEGAL
    spec = NamespaceSpec({}, 1, 1, 64, 0)
    load = LoadJob("r", 1, 0, 1, ((1, 2, 3, 4), (5, 6)), 0)
    store = StoreJob(7, b"h" * 32, 0, ((1, 2, 3, 4), (5, 6)), 0)
    report = worker.step(KVKeepMetadata(loads=(load,), stores=(store,), namespace=spec))
    assert report is not None
    assert report.loads == [LoadReport("r", LoadFailure.ERROR, False)]
    assert report.stores == [StoreReport(7, StoreEnd.FAILED)]
    assert worker.half.take_invalid_blocks() == {1, 2, 3, 4, 5, 6}
    assert "illegal memory access" in report.problem
    assert worker.step() is None, "it is told once"


def scheduler(said: list[str]) -> SchedulerHalf:
    vllm_config, kv = engine(Path("/nowhere"))
    vllm_config.lora_config = vllm_config.kv_events_config = None
    half = SchedulerHalf(vllm_config, kv, Options(), Guard(said.append), said.append)
    half.lookups = half.stores = object()  # type: ignore[assignment]
    return half


def test_levels_of_all_ranks_are_added_up() -> None:
    half = scheduler([])
    both = KVKeepWorkerMetadata(levels={0: Levels(1, 10)}).aggregate(KVKeepWorkerMetadata(levels={1: Levels(2, 10)}))
    half.on_output(both)  # type: ignore[arg-type]
    half.on_output(KVKeepWorkerMetadata(levels={1: Levels(10, 10)}))
    stats = half.tally.take()
    assert stats is not None
    assert stats.data["set"] == {"arena_bytes": 20, "arena_pinned_bytes": 11}


def test_a_gpu_that_failed_turns_the_cache_off_with_one_line() -> None:
    said: list[str] = []
    half = scheduler(said)
    half._facts = object()  # type: ignore[assignment]
    sick = KVKeepWorkerMetadata(problem="a copy of the GPU failed: X").aggregate(KVKeepWorkerMetadata(problem="Y"))
    for _ in range(2):
        half.on_output(sick)  # type: ignore[arg-type]
    assert said == ["kvkeep: cache off for this engine: a copy of the GPU failed: X"]
    assert half.active() is None


@pytest.mark.parametrize(
    ("device", "hip", "sleeps", "sentence"),
    [
        ("xpu", None, False, "the KV memory is on a xpu: this version supports CPUs and NVIDIA GPUs"),
        ("cuda", "6.4", False, "the KV memory is on a ROCm GPU: this version supports CPUs and NVIDIA GPUs"),
        ("cuda", None, True, "enable_sleep_mode is on: falling asleep takes the KV memory away while it is copied"),
        ("cuda", None, False, "cuda cannot be copied from: .*"),  # this torch has no CUDA
    ],
)
def test_devices_that_are_not_supported_are_refused_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, sleeps: bool, sentence: str
) -> None:
    views, config = engine_memory("LB")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(devices.places, "_device", lambda caches: torch.device(device))
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    with pytest.raises(UnknownLayout) as raised:
        devices.open_memory(vllm_config, config, views, print)
    assert re.fullmatch(sentence, str(raised.value))
