"""Where vLLM has put the KV of each layer.

vLLM allocates one buffer and places the page of layer l, block b at ``offset + l * layer_stride + b * block_stride``.
What is inside a page (heads, slots, K and V, packing, dtype) does not matter here: the identity names it, and whoever
loads a page has the same identity.  All we need is that the bytes of a page are one run, at a known address, on the CPU
or on a GPU.  Planes of different groups may overlie each other, since a block belongs to one group at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.ipc.vllm.memory import PlaneShape, UnknownLayout

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor


@dataclass(frozen=True)
class Place:
    """Of one plane: the page of layer l, block b has `shape.page_bytes` bytes at address + l * layer_stride + b *
    block_stride.  All of them are inside `storage`."""

    shape: PlaneShape
    blocks: int
    address: int
    layer_stride: int  # bytes, as is
    block_stride: int
    storage: Any  # torch.UntypedStorage; keeps the memory
    seen_as: tuple[tuple[int, ...], ...] = ()  # by kernels: into how many a block is split, and the shape of each; one
    # for each layer, or for all


@dataclass(frozen=True)
class Places:
    by_group: list[list[Place]]
    block_sizes: list[int]  # tokens
    device: Any  # torch.device, of all of it


def from_vllm(kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> Places:
    """Find the planes in what vLLM registers, and check that the memory really lies as the config says.
    Raises UnknownLayout."""
    groups = kv_cache_config.kv_cache_groups
    group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
    places: list[list[Place]] = [[] for _ in groups]
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
        places[owner].append(_place(tensor, kv_caches, page_bytes, kv_cache_config.num_blocks))
    unplaced = set(kv_caches) - seen
    if unplaced:
        raise UnknownLayout(f"KV memory of layer {min(unplaced)} is not described by the KV cache config")
    return Places(places, [group.kv_cache_spec.block_size for group in groups], _device(kv_caches))


def _device(kv_caches: dict[str, torch.Tensor]) -> torch.device:
    devices = {str(view.device): view.device for view in kv_caches.values()}
    if len(devices) != 1:
        raise UnknownLayout(f"the KV memory is on {', '.join(sorted(devices)) or 'no device'}: it must be on one")
    return next(iter(devices.values()))


def _place(tensor: KVCacheTensor, kv_caches: dict[str, torch.Tensor], page_bytes: int, blocks: int) -> Place:
    import torch

    views = [kv_caches[name] for name in tensor.layers]
    if not all(isinstance(view, torch.Tensor) for view in views):
        raise UnknownLayout("a layer registers a list of tensors (recurrent state)")
    storage = views[0].untyped_storage()
    address = views[0].data_ptr()
    for index, (name, view) in enumerate(zip(tensor.layers, views, strict=True)):
        _check_view(name, view, address + index * tensor.layer_stride, tensor.block_stride, page_bytes, blocks)
    base = address - storage.data_ptr()
    end = base + (len(views) - 1) * tensor.layer_stride + (blocks - 1) * tensor.block_stride + page_bytes
    if base < 0 or end > storage.nbytes():
        raise UnknownLayout(f"pages reach byte {end} of an allocation of {storage.nbytes()} bytes")
    shape = PlaneShape(len(views), page_bytes)
    seen_as = tuple((view.shape[0] // blocks, *view.shape[1:]) for view in views)
    if len(set(seen_as)) == 1:
        seen_as = seen_as[:1]
    return Place(shape, blocks, address, tensor.layer_stride, tensor.block_stride, storage, seen_as)


def _check_view(name: str, view: torch.Tensor, at: int, block_stride: int, page_bytes: int, blocks: int) -> None:
    """The page of a block must be one run of bytes that starts where the config says."""
    if view.data_ptr() != at:
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
