"""The engine's paged KV memory, seen as opaque bytes.

vLLM allocates one buffer and places the page of layer l, block b at ``offset + l * layer_stride + b * block_stride``.
What is inside a page (heads, slots, K and V, packing, dtype) does not matter here: the identity names it, and whoever
loads a page has the same identity.  All we need is that the bytes of a page are one run.

A *plane* is a set of layers with equal strides: a strided view [layer, block, byte].  One chunk's extent holds the
planes one after another, each as a dense [layer, block of the chunk, byte]::

    extent  | plane 0: layer 0: b0 b1 .. | layer 1: b0 b1 .. | ... | plane 1: ... |

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

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
    """All planes of one rank.  Stateless after construction; any thread may copy."""

    def __init__(self, planes: Sequence[Plane]) -> None:
        if not planes:
            raise UnknownLayout("the engine has no KV memory")
        self._planes = tuple(planes)
        self.blocks = int(planes[0].pages.shape[1])
        self.page_bytes = sum(plane.block_bytes for plane in planes)  # of one block, all layers

    def shard_bytes(self, blocks_per_chunk: int) -> int:
        return self.page_bytes * blocks_per_chunk

    def gather(self, extent: Bytes, block_ids: Sequence[int]) -> None:
        """Copy the blocks of one chunk into its extent."""
        for dense, pages in self._sections(extent, len(block_ids)):
            for position, block, run in runs(block_ids):
                np.copyto(dense[:, position : position + run], pages[:, block : block + run])

    def scatter(self, extent: Bytes, block_ids: Sequence[int], skip: int = 0) -> None:
        """Copy an extent into the blocks of one chunk, all but the first `skip`, which are not in `block_ids`."""
        for dense, pages in self._sections(extent, skip + len(block_ids)):
            for position, block, run in runs(block_ids):
                position += skip
                np.copyto(pages[:, block : block + run], dense[:, position : position + run])

    def _sections(self, extent: Bytes, blocks: int) -> Iterator[tuple[Bytes, Bytes]]:
        if extent.nbytes != self.shard_bytes(blocks):
            raise ValueError(f"an extent of {extent.nbytes} bytes, {self.shard_bytes(blocks)} were expected")
        start = 0
        for plane in self._planes:
            layers, _, page = plane.pages.shape
            end = start + blocks * plane.block_bytes
            yield extent[start:end].reshape(layers, blocks, page), plane.pages
            start = end

    def describe(self) -> list[dict[str, int]]:
        """For the identity: how an extent is filled.  Strides of the engine's own memory are not part of it."""
        return [{"layers": plane.pages.shape[0], "page_bytes": plane.pages.shape[2]} for plane in self._planes]


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first block id, length) of each run of consecutive ids."""
    for _, group in itertools.groupby(enumerate(block_ids), lambda pair: pair[1] - pair[0]):
        members = list(group)
        position, block = members[0]
        yield position, block, len(members)


def from_vllm(kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> Pages:
    """Build the planes from what vLLM registers, and check that the memory really lies as the config says."""
    page_bytes = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    blocks = kv_cache_config.num_blocks
    planes, seen = [], set()
    for tensor in kv_cache_config.kv_cache_tensors:
        missing = [name for name in tensor.layers if name not in kv_caches]
        if missing:
            raise UnknownLayout(f"layer {missing[0]} has no registered KV memory")
        views = [kv_caches[name] for name in tensor.layers]
        seen.update(tensor.layers)
        memory = _storage(views[0])
        base = views[0].data_ptr() - memory.ctypes.data
        for index, (name, view) in enumerate(zip(tensor.layers, views, strict=True)):
            _check_view(name, view, memory, base + index * tensor.layer_stride, tensor.block_stride, page_bytes, blocks)
        end = base + (len(views) - 1) * tensor.layer_stride + (blocks - 1) * tensor.block_stride + page_bytes
        if base < 0 or end > memory.nbytes:
            raise UnknownLayout(f"pages reach byte {end} of an allocation of {memory.nbytes} bytes")
        shape, strides = (len(views), blocks, page_bytes), (tensor.layer_stride, tensor.block_stride, 1)
        planes.append(Plane(as_strided(memory[base:], shape=shape, strides=strides)))
    unplaced = set(kv_caches) - seen
    if unplaced:
        raise UnknownLayout(f"KV memory of layer {min(unplaced)} is not described by the KV cache config")
    return Pages(planes)


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
