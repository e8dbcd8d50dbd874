"""KV memory of a CPU engine: numpy views of it, copied by whatever thread asks.

Block ids that follow each other are copied in one np.copyto for all layers of a plane; it releases the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvkeep.ipc.vllm import places
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable
from kvkeep.ipc.vllm.memory import Bytes, KVMemory, PlaneShape, UnknownLayout

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Pages", "Plane", "UnknownLayout", "from_vllm", "runs"]


@dataclass(frozen=True)
class Plane:
    pages: Bytes  # [layers, blocks, page bytes], a view of the engine's memory

    @property
    def shape(self) -> PlaneShape:
        return PlaneShape(self.pages.shape[0], self.pages.shape[2])

    @classmethod
    def at(cls, place: places.Place) -> Plane:
        import torch

        memory: Bytes = torch.empty(0, dtype=torch.uint8).set_(place.storage).numpy()
        first = place.address - memory.ctypes.data
        shape = (place.shape.layers, place.blocks, place.shape.page_bytes)
        return cls(as_strided(memory[first:], shape=shape, strides=(place.layer_stride, place.block_stride, 1)))


class Pages(KVMemory):
    """Stateless after construction."""

    def __init__(self, planes: Sequence[Sequence[Plane]], block_sizes: Sequence[int]) -> None:
        super().__init__([[plane.shape for plane in group] for group in planes], block_sizes)
        self._planes = tuple(tuple(group) for group in planes)

    @classmethod
    def at(cls, found: places.Places) -> Pages:
        return cls([[Plane.at(place) for place in group] for group in found.by_group], found.block_sizes)

    def gather_all(self, extents: Sequence[Bytes], tables: Sequence[BlockTable], after: Any = None) -> None:
        for extent, blocks in zip(extents, tables, strict=True):
            self.gather(extent, blocks)

    def scatter_all(self, extents: Sequence[Bytes], tables: Sequence[BlockTable], after: Any = None) -> None:
        for extent, blocks in zip(extents, tables, strict=True):
            self.scatter(extent, blocks)

    def gather(self, extent: Bytes, blocks: BlockTable) -> None:
        """One chunk."""
        for ids, dense, pages in self._views(extent, blocks):
            for position, block, run in runs(ids):
                np.copyto(dense[:, position : position + run], pages[:, block : block + run])
            for position, _, run in runs(ids, absent=True):  # else another chunk's bytes would lie there
                dense[:, position : position + run] = 0

    def scatter(self, extent: Bytes, blocks: BlockTable) -> None:
        """One chunk."""
        for ids, dense, pages in self._views(extent, blocks):
            for position, block, run in runs(ids):
                np.copyto(pages[:, block : block + run], dense[:, position : position + run])

    def _views(self, extent: Bytes, blocks: BlockTable) -> Iterator[tuple[Sequence[int], Bytes, Bytes]]:
        self.check(extent, blocks)
        for section in self.sections(blocks):
            yield section.ids, section.dense(extent), self._planes[section.group][section.plane].pages


def runs(block_ids: Sequence[int], *, absent: bool = False) -> Iterator[tuple[int, int, int]]:
    """(position, first block id, length) of each run of consecutive ids; ``absent``: of those that are absent."""
    for step, group in itertools.groupby(
        enumerate(block_ids), lambda pair: None if pair[1] == ABSENT else pair[1] - pair[0]
    ):
        if (step is None) == absent:
            members = list(group)
            position, block = members[0]
            yield position, block, len(members)


def from_vllm(kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> Pages:
    """Raises UnknownLayout."""
    return Pages.at(places.from_vllm(kv_caches, kv_cache_config))
