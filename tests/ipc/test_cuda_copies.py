"""Copies of a GPU: the bytes of a CPU engine, in the order that the engine's stream asks for, over when they are said
to be."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvkeep.ipc.vllm.cuda import lane, pins
from kvkeep.ipc.vllm.cuda.descriptors import Copies, cut, of_section
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable
from kvkeep.ipc.vllm.memory import PlaneShape, Section
from kvkeep.ipc.vllm.places import Place
from tests.ipc.conftest import eventually
from tests.ipc.cuda_rig import BLOCKS, FakeArena, Model, Task

PIECE, HALF = 4096, 256  # instead of hundreds of megabytes
CHUNK = ((3, 4, 5, 9), (7, 8))
PER_CHUNK = (4, 2)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(lane, "HALF_BYTES", HALF)


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.close()


def extents(model: Model, arena: FakeArena, count: int, first: int = 0) -> list[np.ndarray]:
    size = model.memory.bytes_of(CHUNK)
    return [arena.data[first + n * size : first + (n + 1) * size] for n in range(count)]


def attach(model: Model, arena: FakeArena) -> None:
    """With everything pinned that can be."""
    model.client.watch(arena)
    eventually(lambda: model.memory.levels().pinned >= arena.ready)


def random_table(rng: random.Random) -> BlockTable:
    tables = []
    for count in PER_CHUNK:
        ids = rng.sample(range(BLOCKS), count)
        if rng.random() < 0.5:
            start = rng.randrange(BLOCKS - count)
            ids = list(range(start, start + count))
        tables.append(tuple(ABSENT if rng.random() < 0.2 else block for block in ids))
    return tuple(tables)


@pytest.mark.parametrize("pinned", ["nothing", "half", "everything"])
@pytest.mark.parametrize(("order", "padding"), [("LB", 0), ("LB", 32), ("BL", 0), ("BL", 16)])
def test_a_gpu_fills_extents_and_blocks_as_a_cpu_does(order: str, padding: int, pinned: str, seed: int) -> None:
    rng = random.Random(seed)
    model, twin = Model(order, padding, seed), Model(order, padding, seed)
    arena = FakeArena(4 * PIECE)
    arena.ready = {"nothing": 0, "half": 2 * PIECE, "everything": 4 * PIECE}[pinned]
    if pinned != "nothing":
        attach(model, arena)
    count = 4 * PIECE // model.memory.bytes_of(CHUNK)
    for _ in range(5):
        tables = [random_table(rng) for _ in range(count)]
        views = extents(model, arena, count)
        arena.data[:] = 0xAA
        model.memory.gather_all(views, tables, model.memory.fence())
        wanted = [np.zeros_like(view) for view in views]
        twin.cpu.gather_all(wanted, tables)
        assert all(np.array_equal(view, right) for view, right in zip(views, wanted, strict=True))
        tables = [random_table(rng) for _ in range(count)]
        model.memory.scatter_all(views, tables, model.memory.fence())
        twin.cpu.scatter_all(wanted, tables)
        if disjoint(tables):
            assert model.contents() == twin.contents()
        for memory, right in zip(model.memories, twin.memories, strict=True):
            memory[:] = right
    assert model.driver.moved
    assert bool(model.driver.own) == (pinned != "everything")  # staging memory
    model.close()
    twin.close()


def disjoint(tables: list[BlockTable]) -> bool:
    for group in range(len(PER_CHUNK)):
        ids = [block for table in tables for block in table[group] if block != ABSENT]
        if len(ids) != len(set(ids)):
            return False
    return True


def test_of_a_long_prompt_no_byte_is_described_twice_and_none_is_missing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, layers, page = 2048, 80, 4096
    ids = rng.permutation(blocks * 2)[:blocks]
    place = Place(PlaneShape(layers, page), 2 * blocks, 1 << 40, 2 * blocks * page, page, None)
    section = Section(0, 0, place.shape, ids.tolist(), 512)
    copies = of_section(section, place)
    ends = np.append(copies.host[1:], 512 + layers * blocks * page)
    assert np.array_equal(copies.host + copies.sizes, ends)
    assert copies.host[0] == 512
    layer, position = divmod((copies.host - 512) // page, blocks)
    assert np.array_equal(copies.device, (1 << 40) + layer * place.layer_stride + ids[position] * page)


def test_blocks_that_follow_each_other_are_one_copy_a_layer() -> None:
    place = Place(PlaneShape(3, 64), 32, 0, 32 * 64, 64, None)
    copies = of_section(Section(0, 0, place.shape, [4, 5, 6, ABSENT, 7, 20], 0), place)
    assert copies.sizes.tolist() == [192, 64, 64] * 3
    assert copies.device.tolist()[:3] == [256, 448, 1280]
    assert copies.host.tolist()[:4] == [0, 256, 320, 384]


def test_cut_copies_cross_no_border_and_cover_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        at, rows = 0, []
        for _ in range(rng.randrange(1, 10)):
            at += rng.randrange(50)
            rows.append((at, rng.randrange(10_000), rng.randrange(1, 300)))
            at += rows[-1][2]
        origin, step = rng.randrange(20), rng.choice([7, 64, 100])
        whole = Copies(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))
        short = cut(whole, origin, step)
        assert ((short.host - origin) // step == (short.host + short.sizes - 1 - origin) // step).all()
        assert bytes_of(short) == bytes_of(whole)


def bytes_of(copies: Copies) -> list[tuple[int, int]]:
    return [
        (host + n, device + n)
        for host, device, size in zip(*(column.tolist() for column in copies), strict=True)
        for n in range(size)
    ]


def test_a_block_that_is_not_there_is_refused_before_the_gpu_hears_of_it(model: Model) -> None:
    arena = FakeArena(PIECE)
    for bad in (BLOCKS, -2):
        with pytest.raises(ValueError, match="block ids"):
            model.memory.scatter_all(extents(model, arena, 1), [((1, 2, 3, bad), (4, 5))], model.memory.fence())
    assert (model.driver.submitted, model.memory.problem) == (0, "")
    with pytest.raises(ValueError, match="bytes"):
        model.memory.gather_all([arena.data[:10]], [CHUNK], model.memory.fence())


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_waits_for_the_step_that_computes_its_blocks(model: Model, pinned: bool) -> None:
    arena = FakeArena(PIECE)
    if pinned:
        attach(model, arena)
    (view,) = extents(model, arena, 1)
    model.driver.compute_busy = True
    fence = model.memory.fence()
    storing = Task(model.memory.gather_all, [view], [CHUNK], fence)
    eventually(lambda: model.driver.submitted)
    assert (model.driver.moved, storing.over) == (0, False)
    for memory in model.memories:  # the step computes its KV only now
        memory[:] = np.random.default_rng(99).integers(0, 256, memory.size, dtype=np.uint8)
    fence.complete()
    while not storing.over:
        model.driver.run()
    wanted = np.zeros_like(view)
    model.cpu.gather(wanted, CHUNK)
    assert np.array_equal(view, wanted)
    assert storing.join().error is None


@pytest.mark.parametrize("pinned", [True, False])
def test_a_load_waits_for_those_who_still_read_its_blocks(model: Model, pinned: bool) -> None:
    arena = FakeArena(PIECE)
    if pinned:
        attach(model, arena)
    twin = Model()
    before = model.contents()
    (view,) = extents(model, arena, 1)
    view[:] = np.random.default_rng(7).integers(0, 256, view.size, dtype=np.uint8)
    model.driver.compute_busy = True
    fence = model.memory.fence()
    loading = Task(model.memory.scatter_all, [view], [CHUNK], fence)
    eventually(lambda: model.driver.submitted)
    time.sleep(0.05)  # what does not wait would have gone on
    assert (model.contents(), loading.over) == (before, False)
    fence.complete()
    while not loading.over:
        model.driver.run()
    assert loading.join().error is None
    twin.cpu.scatter(view, CHUNK)
    assert model.contents() == twin.contents() != before
    twin.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_is_over_only_when_its_last_byte_has_landed(model: Model, pinned: bool) -> None:
    arena = FakeArena(2 * PIECE)
    if pinned:
        attach(model, arena)
    model.driver.held = True
    loading = Task(model.memory.scatter_all, extents(model, arena, 4), [CHUNK] * 4, model.memory.fence())
    eventually(lambda: model.driver.submitted)
    while not loading.over:
        outstanding = model.driver.submitted - model.driver.moved
        assert not (outstanding and loading.over)
        model.driver.run()
    assert loading.join().error is None
    assert model.driver.moved == model.driver.submitted


def test_an_error_is_raised_only_when_nothing_is_moved_any_more(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = FakeArena(2 * PIECE)
    arena.ready = PIECE
    attach(model, arena)
    model.driver.held = True
    views = extents(model, arena, 1) + extents(model, arena, 1, first=PIECE)  # one is pinned, the other is not
    monkeypatch.setattr(model.driver, "pinned_memory", broken)
    loading = Task(model.memory.scatter_all, views, [CHUNK, ((10, 11, 12, 13), (14, 15))], model.memory.fence())
    eventually(lambda: model.driver.submitted and len(model.driver.streams[0].ops) > 2)  # it drains
    assert (loading.over, model.driver.moved) == (False, 0)
    model.driver.run()
    assert str(loading.join().error) == "out of pinned memory"
    assert model.driver.moved == model.driver.submitted > 0


def broken(size: int) -> np.ndarray:
    raise RuntimeError("out of pinned memory")


@pytest.mark.parametrize("when", ["a copy is submitted", "a stream breaks", "a fence is taken"])
def test_after_an_error_of_cuda_nothing_is_copied_any_more(model: Model, when: str) -> None:
    arena = FakeArena(PIECE)
    views, error = extents(model, arena, 1), RuntimeError("CUDA error: an illegal memory access\nlong text")
    model.memory.scatter_all(views, [CHUNK], model.memory.fence())
    assert model.memory.problem == ""
    fence = model.memory.fence()
    if when == "a copy is submitted":
        model.driver.fail_copy = error
    elif when == "a fence is taken":
        model.driver.fail_fence = error
        with pytest.raises(RuntimeError, match="illegal"):
            model.memory.fence()
    else:
        model.driver.held = True
        loading = Task(model.memory.scatter_all, views, [CHUNK], fence)
        before = model.driver.submitted
        eventually(lambda: model.driver.submitted > before or model.driver.streams[-1].ops)
        while not loading.over:
            model.driver.break_streams(error)
        assert loading.error is error
    with pytest.raises(RuntimeError, match="illegal"):
        model.memory.scatter_all(views, [CHUNK], fence)
    assert model.memory.problem == "a copy of the GPU failed: RuntimeError: CUDA error: an illegal memory access"
    submitted = model.driver.submitted
    with pytest.raises(RuntimeError, match="a copy of the GPU failed"):
        model.memory.gather_all(views, [CHUNK], fence)
    assert model.driver.submitted == submitted
