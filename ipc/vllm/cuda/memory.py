"""The KV memory of a GPU: planes at device addresses, one `Lane` per copy thread, and the pinned arena."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.ipc.vllm.cuda import descriptors
from kvkeep.ipc.vllm.cuda.driver import Driver, Event
from kvkeep.ipc.vllm.cuda.lane import Lane, Work
from kvkeep.ipc.vllm.cuda.pins import Pinner
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable
from kvkeep.ipc.vllm.memory import Bytes, KVMemory, Levels
from kvkeep.ipc.vllm.places import Places

AT_ONCE_BYTES = 64 << 20  # some ms of copying: what a load may be late by, and enough to keep the GPU's copies going


class CudaMemory(KVMemory):
    """Any thread may copy.  The first error of CUDA's is the last: `problem`."""

    def __init__(self, found: Places, driver: Driver, warn: Callable[[str], None]) -> None:
        super().__init__([[place.shape for place in group] for group in found.by_group], found.block_sizes)
        self._places = found.by_group
        self._driver = driver
        self._pinner = Pinner(driver, warn)
        self._lanes = threading.local()
        self._problem = ""

    def describe(self) -> list[dict[str, object]]:
        """Also how the kernels see a page: a backend may split blocks, and order what is in them, as the GPU likes."""
        groups = super().describe()
        for group, places in zip(groups, self._places, strict=True):
            group["kernels"] = [[list(seen) for seen in place.seen_as] for place in places]
        return groups

    def gather_all(self, extents: Sequence[Bytes], tables: Sequence[BlockTable], after: Event) -> None:
        self._run(Lane.store, self._work(extents, tables), after)
        for extent, blocks in zip(extents, tables, strict=True):
            self._clear_absent(extent, blocks)

    def scatter_all(self, extents: Sequence[Bytes], tables: Sequence[BlockTable], after: Event) -> None:
        self._run(Lane.load, self._work(extents, tables), after)

    def at_once(self, extent_bytes: int) -> int:
        return max(1, AT_ONCE_BYTES // max(1, extent_bytes))

    def fence(self) -> Event:
        try:
            return self._driver.fence()
        except Exception as error:
            self._fail(error)
            raise

    @property
    def problem(self) -> str:
        return self._problem

    def levels(self) -> Levels:
        return self._pinner.levels()

    def use(self, client: Any) -> None:
        client.watch_arena(self._pinner.watch)

    def close(self) -> None:
        self._pinner.close()

    def _work(self, extents: Sequence[Bytes], tables: Sequence[BlockTable]) -> Work:
        """Raises ValueError for what is not the GPU's fault."""
        work = []
        for extent, blocks in zip(extents, tables, strict=True):
            self.check(extent, blocks)
            parts = [
                descriptors.of_section(section, self._places[section.group][section.plane])
                for section in self.sections(blocks)
            ]
            work.append((extent, descriptors.joined(parts)))
        return work

    def _run(self, how: Callable[[Lane, Work, Event], None], work: Work, after: Event) -> None:
        if self._problem:
            raise RuntimeError(self._problem)
        try:
            lane: Lane | None = getattr(self._lanes, "lane", None)
            if lane is None:
                lane = self._lanes.lane = Lane(self._driver, self._pinner.pinned_at)
            how(lane, work, after)
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0]
        self._problem = self._problem or f"a copy of the GPU failed: {type(error).__name__}: {text}"

    def _clear_absent(self, extent: Bytes, blocks: BlockTable) -> None:
        """Else another chunk's bytes would lie there."""
        for section in self.sections(blocks):
            if ABSENT in section.ids:
                absent = [position for position, block in enumerate(section.ids) if block == ABSENT]
                section.dense(extent)[:, absent] = 0
