"""What the worker half tells vLLM of loads that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvkeep.ipc.vllm.copies import LoadEnd
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadJob, LoadReport
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.worker import WorkerHalf

SHAPE: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=32)


class Ended:
    """Copy threads, of which one load has just ended."""

    def __init__(self, end: LoadEnd) -> None:
        self.loads = [end]

    def take_ended(self) -> tuple[list[LoadEnd], list[Any]]:
        loads, self.loads = self.loads, []
        return loads, []


@pytest.mark.parametrize(
    ("specs", "blocks", "bad", "keeps"),
    [
        ([FULL], ((1, 2, 3, 4),), (3, 4), True),
        ([FULL, WINDOW], ((1, 2, 3, 4), (ABSENT, ABSENT, 5, 6)), (3, 4, 5, 6), False),
        ([WINDOW], ((ABSENT, 1, 2, 3),), (2, 3), False),  # what is before the good part's end has no blocks
    ],
)
def test_the_good_part_of_a_load_is_kept_only_where_it_can_be_gone_on_from(
    specs: list[Any], blocks: BlockTable, bad: tuple[int, ...], keeps: bool
) -> None:
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    worker = WorkerHalf(SimpleNamespace(), config, Options(), Guard(print))  # type: ignore[arg-type]
    job = LoadJob("r", 1, 0, 2, blocks, 0)
    worker.copies = Ended(LoadEnd(job, bad, True, LoadFailure.INVALID, good_chunks=1))  # type: ignore[assignment]
    finished, failed = worker.take_finished_loads(set())
    assert finished == {"r"}
    assert failed == (set() if keeps else {"r"})
    assert worker.take_invalid_blocks() == (set(bad) if keeps else set())
    report = worker.take_report()
    assert report is not None
    assert report.loads == [LoadReport("r", LoadFailure.INVALID, True, int(keeps))]
