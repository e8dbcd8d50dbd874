"""Takes KV blocks away from an engine in this process, so that it preempts requests."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Scarcity:
    """`leave` makes memory small for good; `tighten`, before each step, lets two running requests not both go on."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._pool = scheduler, scheduler.kv_cache_manager.block_pool
        self._kept: list[Any] = []
        self._squeezed: list[Any] = []
        self._preemptions: Counter[str] = Counter()

    def leave(self, count: int) -> None:
        """So many blocks free; 0 = all."""
        self._pool.free_blocks(self._kept)
        self._kept = self._pool.get_new_blocks(self._pool.get_num_free_blocks() - count) if count else []

    def tighten(self, times: int) -> int:
        """Keep no block free while two requests run, until one is preempted.  How many times are left."""
        if self._preempted() and self._squeezed:
            times -= 1
            self.loosen()
        elif times and len(self._scheduler.running) > 1:
            self._squeezed += self._pool.get_new_blocks(self._pool.get_num_free_blocks())
        else:
            self.loosen()
        return times

    def loosen(self) -> None:
        self._pool.free_blocks(self._squeezed)
        self._squeezed = []

    def _preempted(self) -> bool:
        """Since the last call."""
        now = {name: request.num_preemptions for name, request in self._scheduler.requests.items()}
        more = any(count > self._preemptions[name] for name, count in now.items())
        self._preemptions = Counter(now)
        return more
