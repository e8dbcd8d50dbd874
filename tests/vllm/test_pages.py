from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.ipc.vllm import places
from kvkeep.ipc.vllm.cuda.memory import CudaMemory
from kvkeep.ipc.vllm.groups import ABSENT
from kvkeep.ipc.vllm.pages import Pages, Plane, UnknownLayout, from_vllm, runs
from tests.ipc.fake_cuda import FakeDriver

LAYERS, BLOCKS, HEADS, SLOTS, CONTENT = 3, 20, 2, 4, 8
PAGE = HEADS * SLOTS * CONTENT * 4


def content(layer: int, block: int) -> np.ndarray:
    """What a page holds: a function of where it is."""
    return np.random.default_rng(layer * 1000 + block).integers(0, 256, PAGE, dtype=np.uint8)


def engine_memory(order: str, *, padding: int = 0) -> tuple[dict[str, torch.Tensor], Any]:
    """What vLLM would register for a layer-outermost ("LB") or a block-outermost ("BL") layout."""
    stride = PAGE + padding
    layer_stride, block_stride = (stride * BLOCKS, stride) if order == "LB" else (stride, stride * LAYERS)
    raw = torch.zeros(64 + stride * BLOCKS * LAYERS, dtype=torch.int8)
    floats = raw[64:].view(torch.float32)
    names = [f"layer.{n}" for n in range(LAYERS)]
    views = {}
    for n, name in enumerate(names):
        strides = (block_stride // 4, SLOTS * CONTENT, CONTENT, 1)
        views[name] = torch.as_strided(
            floats, (BLOCKS, HEADS, SLOTS, CONTENT), strides, floats.storage_offset() + n * layer_stride // 4
        )
        for block in range(BLOCKS):
            views[name][block] = torch.from_numpy(content(n, block).view(np.float32).reshape(HEADS, SLOTS, CONTENT))
    tensor = SimpleNamespace(layers=names, layer_stride=layer_stride, block_stride=block_stride, offset=0)
    spec = SimpleNamespace(page_size_bytes=stride, block_size=SLOTS)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=names)
    return views, SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[group])


@pytest.mark.parametrize("order", ["LB", "BL"])
@pytest.mark.parametrize("padding", [0, 64])
def test_a_chunk_comes_back_into_other_blocks_byte_for_byte(order: str, padding: int) -> None:
    views, config = engine_memory(order, padding=padding)
    pages = from_vllm(views, config)
    source, target = random.Random(3).sample(range(BLOCKS), 8)[:4], [1, 2, 17, 9]
    extent = np.zeros(pages.bytes_of(((0,) * 4,)), np.uint8)
    pages.gather(extent, (source,))
    pages.scatter(extent, (target,))
    for layer, view in enumerate(views.values()):
        for old, new in zip(source, target, strict=True):
            # a source block that is also a target was overwritten: compare with its content
            assert np.array_equal(view[new].numpy().reshape(-1).view(np.uint8), content(layer, old))


def test_the_extent_does_not_depend_on_how_the_engine_lays_its_memory_out() -> None:
    extents = []
    for order in ("LB", "BL"):
        pages = from_vllm(*engine_memory(order))
        extent = np.zeros(pages.bytes_of(((0,) * 3,)), np.uint8)
        pages.gather(extent, ([4, 5, 11],))
        extents.append(extent.tobytes())
    assert extents[0] == extents[1]


def test_a_partial_load_leaves_the_blocks_before_it_alone() -> None:
    views, config = engine_memory("LB")
    pages = from_vllm(views, config)
    extent = np.zeros(pages.bytes_of(((0,) * 4,)), np.uint8)
    pages.gather(extent, ([0, 1, 2, 3],))
    pages.scatter(extent, ([ABSENT, ABSENT, 10, 11],))
    wanted = list(range(BLOCKS))
    wanted[10:12] = [2, 3]
    for block, origin in enumerate(wanted):
        assert np.array_equal(views["layer.1"][block].numpy().reshape(-1).view(np.uint8), content(1, origin))


def test_several_planes_follow_each_other_in_the_extent() -> None:
    memory = np.arange(2 * 6 * 4 + 6 * 8, dtype=np.uint8)
    pages = Pages([[Plane(memory[:48].reshape(2, 6, 4)), Plane(memory[48:].reshape(1, 6, 8))]], [16])
    extent = np.zeros(pages.bytes_of(((0,) * 2,)), np.uint8)
    pages.gather(extent, ([1, 4],))
    wanted = [memory[4:8], memory[16:20], memory[28:32], memory[40:44], memory[56:64], memory[80:88]]
    assert np.array_equal(extent, np.concatenate(wanted))


def test_consecutive_blocks_are_one_copy() -> None:
    assert list(runs([3, 4, 5, 9, 8, 7, 8])) == [(0, 3, 3), (3, 9, 1), (4, 8, 1), (5, 7, 2)]


def test_on_a_gpu_the_identity_tells_how_kernels_see_a_page() -> None:
    """Whether as one block or as several smaller ones, the bytes of a page are ordered otherwise.  On a CPU the
    backend's name and the instruction set say as much, and the identity stays what it was."""
    views, config = engine_memory("LB")
    split = {name: view.reshape(2 * BLOCKS, HEADS, SLOTS // 2, CONTENT) for name, view in views.items()}
    turned = {name: view.reshape(BLOCKS, SLOTS, HEADS, CONTENT) for name, view in views.items()}
    mixed = split | {"layer.1": views["layer.1"]}
    found = []
    for registered in (views, split, turned, mixed):
        memory = CudaMemory(places.from_vllm(registered, config), FakeDriver(), print)
        found.append(memory.describe())
        memory.close()
        assert from_vllm(registered, config).describe() == [
            {"block_size": SLOTS, "planes": [{"layers": LAYERS, "page_bytes": PAGE}]}
        ]
    kernels = [groups[0]["kernels"] for groups in found]
    one, two, other = [1, HEADS, SLOTS, CONTENT], [2, HEADS, SLOTS // 2, CONTENT], [1, SLOTS, HEADS, CONTENT]
    assert kernels == [[[one]], [[two]], [[other]], [[two, one, two]]]


def test_an_extent_of_another_size_is_refused() -> None:
    pages = from_vllm(*engine_memory("LB"))
    with pytest.raises(ValueError, match="bytes"):
        pages.gather(np.zeros(10, np.uint8), ([1],))


def test_memory_that_does_not_lie_as_described_is_refused() -> None:
    views, config = engine_memory("LB")
    views["layer.1"] = views["layer.2"]
    with pytest.raises(UnknownLayout, match=r"layer\.1 does not start"):
        from_vllm(views, config)


def test_pages_in_pieces_are_refused() -> None:
    views, config = engine_memory("LB")
    views["layer.0"] = views["layer.0"][:, :, ::2]
    with pytest.raises(UnknownLayout, match="not one run"):
        from_vllm(views, config)


def test_a_layer_without_memory_is_refused() -> None:
    views, config = engine_memory("LB")
    views["draft.0"] = views["layer.0"]
    with pytest.raises(UnknownLayout, match=r"draft\.0"):
        from_vllm(views, config)
    del views["draft.0"], views["layer.2"]
    with pytest.raises(UnknownLayout, match=r"layer\.2"):
        from_vllm(views, config)
