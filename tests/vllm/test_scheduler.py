"""The scheduler half: whatever one request meets, what others hold ends."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest

from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import KVKeepWorkerMetadata, LoadReport, StoreEnd, StoreReport
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.scheduler import SchedulerHalf
from tests.vllm.bench import CHUNK, Bench, Request
from tests.vllm.test_identity import engine


class Unexpected(Exception):
    pass


def raises(*_: Any, **__: Any) -> Any:
    raise Unexpected


def half_of(bench: Bench) -> SchedulerHalf:
    vllm_config, kv = engine(Path("/nowhere"))
    vllm_config.lora_config = vllm_config.kv_events_config = None
    half = SchedulerHalf(vllm_config, kv, Options(), Guard(print), print)
    half.lookups, half.stores = bench.lookups, bench.stores
    return half


def test_a_request_whose_pin_goes_wrong_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    half, request = half_of(bench), bench.add(Request("a", 2 * CHUNK))
    bench.put(request, 2)
    assert bench.lookups.matched_tokens(request, 0, bench.active)  # type: ignore[arg-type]
    assert bench.daemon.references() == 1
    monkeypatch.setattr(half, "_pin", raises)
    with contextlib.suppress(Unexpected):
        half.on_finished(request)  # type: ignore[arg-type]
    gc.collect()
    assert (bench.daemon.references(), bench.lookups.held()) == (0, 0)
    assert bench.stores._progress == {}


def test_a_report_that_goes_wrong_does_not_lose_the_ones_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    half = half_of(bench)
    loading, storing = bench.add(Request("a", 2 * CHUNK)), bench.add(Request("b", 2 * CHUNK, prompt="other"))
    bench.put(loading, 2)
    tokens = bench.lookups.matched_tokens(loading, 0, bench.active) or 0  # type: ignore[arg-type]
    bench.lookups.after_alloc(loading, bench.blocks_of(loading), tokens, 0)  # type: ignore[arg-type]
    (job,) = bench.step(storing, 2 * CHUNK)
    monkeypatch.setattr(bench.lookups, "_learn", raises)
    report = KVKeepWorkerMetadata([LoadReport("a", None, True)], [StoreReport(job.job_id, StoreEnd.DONE, 2)])
    with contextlib.suppress(Unexpected):
        half.on_output(report)
    assert not bench.stores.pending()
