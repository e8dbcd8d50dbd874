"""The engine's paged KV memory, seen as opaque bytes.

vLLM allocates one buffer and places the page of layer l, block b at ``offset + l * layer_stride + b * block_stride``.
What is inside a page (heads, slots, K and V, packing, dtype) does not matter here: the identity names it, and whoever
loads a page has the same identity.  All we need is that the bytes of a page are one run.

A *plane* is a set of layers of one KV cache group with equal strides: a strided view [layer, block, byte].  Planes of
different groups may overlie each other, since a block belongs to one group at a time.  One chunk's extent holds the
groups one after another, of each its planes, each as a dense [layer, block of the chunk, byte]::

    extent  | group 0: plane 0: layer 0: b0 b1 .. | layer 1: b0 b1 .. | ... | plane 1: ... | group 1: ... |

Block ids that follow each other are copied in one np.copyto for all layers of a plane; it releases the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvkeep.ipc.vllm.groups import ABSENT, BlockTable

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

Bytes = NDArray[np.uint8]


class UnknownLayout(Exception):
    """One sentence: what about the KV memory we do not understand."""


@dataclass(frozen=True)
class Plane:
    pages: Bytes  # [layers, blocks, page bytes], a view of the engine's memory

    @property
    def block_bytes(self) -> int:
        return int(self.pages.shape[0] * self.pages.shape[2])


class Pages:
    """All planes of one rank, by group.  Stateless after construction; any thread may copy."""

    def __init__(self, planes: Sequence[Sequence[Plane]], block_sizes: Sequence[int]) -> None:
        """``block_sizes``: tokens of a block, per group."""
        if not planes or not all(planes):
            raise UnknownLayout("a KV cache group has no KV memory")
        self._planes = tuple(tuple(of_group) for of_group in planes)
        self._block_sizes = tuple(block_sizes)
        self.block_bytes = tuple(sum(plane.block_bytes for plane in group) for group in self._planes)  # all layers

    def gather(self, extent: Bytes, blocks: BlockTable) -> None:
        """Copy the blocks of one chunk into its extent; what is absent becomes zeros."""
        for ids, dense, pages in self._sections(extent, blocks):
            for position, block, run in runs(ids):
                np.copyto(dense[:, position : position + run], pages[:, block : block + run])
            for position, _, run in runs(ids, absent=True):  # else another chunk's bytes would lie there
                dense[:, position : position + run] = 0

    def scatter(self, extent: Bytes, blocks: BlockTable) -> None:
        """Copy an extent into the blocks of one chunk, those that are not absent."""
        for ids, dense, pages in self._sections(extent, blocks):
            for position, block, run in runs(ids):
                np.copyto(pages[:, block : block + run], dense[:, position : position + run])

    def bytes_of(self, blocks: BlockTable) -> int:
        return sum(size * len(ids) for size, ids in zip(self.block_bytes, blocks, strict=True))

    def _sections(self, extent: Bytes, blocks: BlockTable) -> Iterator[tuple[Sequence[int], Bytes, Bytes]]:
        if extent.nbytes != self.bytes_of(blocks):
            raise ValueError(f"an extent of {extent.nbytes} bytes, {self.bytes_of(blocks)} were expected")
        start = 0
        for planes, ids in zip(self._planes, blocks, strict=True):
            for plane in planes:
                layers, _, page = plane.pages.shape
                end = start + len(ids) * plane.block_bytes
                yield ids, extent[start:end].reshape(layers, len(ids), page), plane.pages
                start = end

    def describe(self) -> list[dict[str, object]]:
        """For the identity: how an extent is filled.  Strides of the engine's own memory are not part of it."""
        return [
            {
                "block_size": size,
                "planes": [{"layers": p.pages.shape[0], "page_bytes": p.pages.shape[2]} for p in planes],
            }
            for planes, size in zip(self._planes, self._block_sizes, strict=True)
        ]


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
    """Build the planes from what vLLM registers, and check that the memory really lies as the config says."""
    groups = kv_cache_config.kv_cache_groups
    group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
    planes: list[list[Plane]] = [[] for _ in groups]
    seen: set[str] = set()
    for tensor in kv_cache_config.kv_cache_tensors:
        missing = [name for name in tensor.layers if name not in kv_caches]
        if missing:
            raise UnknownLayout(f"layer {missing[0]} has no registered KV memory")
        owners = {group_of.get(name, -1) for name in tensor.layers}
        if len(owners) != 1 or -1 in owners:
            raise UnknownLayout(f"layer {tensor.layers[0]} has KV memory that is not that of one KV cache group")
        seen.update(tensor.layers)
        (owner,) = owners
        page_bytes = groups[owner].kv_cache_spec.page_size_bytes
        planes[owner].append(_plane(tensor, kv_caches, page_bytes, kv_cache_config.num_blocks))
    unplaced = set(kv_caches) - seen
    if unplaced:
        raise UnknownLayout(f"KV memory of layer {min(unplaced)} is not described by the KV cache config")
    return Pages(planes, [group.kv_cache_spec.block_size for group in groups])


def _plane(tensor: KVCacheTensor, kv_caches: dict[str, torch.Tensor], page_bytes: int, blocks: int) -> Plane:
    views = [kv_caches[name] for name in tensor.layers]
    memory = _storage(views[0])
    base = views[0].data_ptr() - memory.ctypes.data
    for index, (name, view) in enumerate(zip(tensor.layers, views, strict=True)):
        _check_view(name, view, memory, base + index * tensor.layer_stride, tensor.block_stride, page_bytes, blocks)
    end = base + (len(views) - 1) * tensor.layer_stride + (blocks - 1) * tensor.block_stride + page_bytes
    if base < 0 or end > memory.nbytes:
        raise UnknownLayout(f"pages reach byte {end} of an allocation of {memory.nbytes} bytes")
    shape, strides = (len(views), blocks, page_bytes), (tensor.layer_stride, tensor.block_stride, 1)
    return Plane(as_strided(memory[base:], shape=shape, strides=strides))


def _storage(view: torch.Tensor) -> Bytes:
    import torch

    if not isinstance(view, torch.Tensor):
        raise UnknownLayout("a layer registers a list of tensors (recurrent state)")
    if view.device.type != "cpu":
        raise UnknownLayout(f"the KV memory is on {view.device.type}: only CPU engines are supported in this version")
    whole: Bytes = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).numpy()
    return whole


def _check_view(
    name: str, view: torch.Tensor, memory: Bytes, at: int, block_stride: int, page_bytes: int, blocks: int
) -> None:
    """The page of a block must be one run of bytes that starts where the config says."""
    if view.data_ptr() != memory.ctypes.data + at:
        raise UnknownLayout(f"layer {name} does not start where the KV cache config says")
    pieces, rest = divmod(view.shape[0], blocks)  # kernels may see a block as several smaller ones
    stride = view.stride(0) * view.element_size()
    if rest or pieces < 1 or stride * pieces != block_stride:
        raise UnknownLayout(
            f"layer {name} has {view.shape[0]} blocks {stride} bytes apart, not {blocks} x {block_stride}"
        )
    used = pieces * view[0].numel() * view.element_size()
    dense = sorted(zip(view.stride()[1:], view.shape[1:], strict=True), reverse=True)
    step = view[0].numel()
    for axis_stride, size in dense:
        step //= size
        if size > 1 and axis_stride != step:
            raise UnknownLayout(f"a page of layer {name} is not one run of bytes (strides {tuple(view.stride())})")
    if used > page_bytes or (pieces > 1 and stride != view[0].numel() * view.element_size()):
        raise UnknownLayout(f"a page of layer {name} has {used} bytes, the KV cache config says {page_bytes}")
