"""What SGLang's storage metrics ask for: pages and bandwidth of each transfer since they last asked."""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any

MAX_KEPT = 1024  # transfers, if nobody asks


class Meter:
    """Any thread may call anything."""

    def __init__(self) -> None:
        self._loaded: deque[tuple[int, float]] = deque(maxlen=MAX_KEPT)  # pages, GB/s
        self._stored: deque[tuple[int, float]] = deque(maxlen=MAX_KEPT)

    def add(self, what: str, pages: int, page_bytes: int, seconds: float) -> None:
        if pages:
            rate = pages * page_bytes / 1e9 / max(seconds, 1e-9)
            (self._loaded if what == "loaded" else self._stored).append((pages, rate))

    def take(self) -> Any:
        """A `StorageMetrics` of SGLang's."""
        metrics = importlib.import_module("sglang.srt.observability.metrics_collector").StorageMetrics()
        for transfers, pages, rates in (
            (self._loaded, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._stored, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            for _ in range(len(transfers)):
                count, rate = transfers.popleft()
                pages.append(count)
                rates.append(rate)
        return metrics
