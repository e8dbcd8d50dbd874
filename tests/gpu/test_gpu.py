"""What a fake GPU cannot tell: that CUDA takes what the driver gives it, and orders, pins and waits as we think."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.ipc.client import Client
from kvkeep.ipc.vllm.cuda import lane, pins
from kvkeep.ipc.vllm.cuda.driver import CudaError, TorchDriver, _driver_batched_copy, _vllm_batched_copy
from kvkeep.ipc.vllm.cuda.memory import CudaMemory
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable
from kvkeep.ipc.vllm.memory import PlaneShape
from kvkeep.ipc.vllm.pages import Pages, Plane
from kvkeep.ipc.vllm.places import Place, Places
from tests.conftest import Daemon
from tests.ipc.conftest import at_epoch, eventually, hashes
from tests.ipc.cuda_rig import Task

LAYERS, BLOCKS, PAGE, PER_CHUNK = 8, 512, 16384, 16
CHUNK_BYTES = LAYERS * PAGE * PER_CHUNK  # 2 MiB
MIB = 1 << 20
ROOT = Path(__file__).parents[2]
BUSY_CYCLES = 1 << 29  # of a kernel that does nothing: some tenths of a second


class Gpu:
    """KV memory on the GPU, [layer, block, byte], with and without a pinned arena behind it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kv = torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8, device=self.device)
        place = Place(
            PlaneShape(LAYERS, PAGE), BLOCKS, self.kv.data_ptr(), BLOCKS * PAGE, PAGE, self.kv.untyped_storage()
        )
        self.said: list[str] = []
        self.driver = TorchDriver(self.device)
        self.memory = CudaMemory(Places([[place]], [16], self.device), self.driver, self.said.append)

    def on_cpu(self) -> Pages:
        """A copy of what is there now."""
        return Pages([[Plane(self.kv.cpu().numpy())]], [16])

    def close(self) -> None:
        self.memory.close()
        eventually(lambda: self.memory.levels().pinned == 0 or self.said)
        torch.cuda.synchronize()
        assert self.said == []


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    made = Gpu()
    yield made
    made.close()


@pytest.fixture
def arena() -> Callable[..., Any]:
    """arena(bytes) -> what `CudaMemory.use` would be told of, in shared memory that nobody else has."""
    import mmap

    from kvkeep.ipc.client_arena import Guard

    def make(size: int) -> Any:
        return SimpleNamespace(data=np.frombuffer(mmap.mmap(-1, size), np.uint8), guard=Guard(), reserved=lambda: size)

    return make


def pin(gpu: Gpu, arena: Any) -> None:
    gpu.memory._pinner.watch(arena)
    eventually(lambda: gpu.memory.levels().pinned == arena.data.nbytes or gpu.said)
    assert gpu.said == []


def tables(rng: random.Random, count: int) -> list[BlockTable]:
    """Disjoint ones; partly of blocks that follow each other, partly not."""
    ids = list(range(BLOCKS))
    if rng.random() < 0.5:
        rng.shuffle(ids)
    made = [ids[n * PER_CHUNK : (n + 1) * PER_CHUNK] for n in range(count)]
    return [(tuple(ABSENT if rng.random() < 0.1 else block for block in table),) for table in made]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpu_fills_extents_and_blocks_as_a_cpu_does(
    gpu: Gpu, arena: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, pinned: bool, seed: int
) -> None:
    rng, count = random.Random(seed), 16
    monkeypatch.setattr(pins, "PIECE_BYTES", 5 * MIB)  # borders inside extents
    monkeypatch.setattr(lane, "HALF_BYTES", MIB)
    one = arena(count * CHUNK_BYTES + 3 * 4096)
    if pinned:
        pin(gpu, one)
    views = [one.data[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES] for n in range(count)]
    for _ in range(5):
        blocks = tables(rng, count)
        cpu, wanted = gpu.on_cpu(), [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(count)]
        cpu.gather_all(wanted, blocks)
        gpu.memory.gather_all(views, blocks, gpu.memory.fence())
        assert all(np.array_equal(view, right) for view, right in zip(views, wanted, strict=True))
        blocks = tables(rng, count)
        cpu.scatter_all(wanted, blocks)
        gpu.memory.scatter_all(views, blocks, gpu.memory.fence())
        assert np.array_equal(gpu.kv.cpu().numpy(), cpu._planes[0][0].pages)


@pytest.mark.parametrize("find", [_vllm_batched_copy, _driver_batched_copy])
def test_both_ways_to_copy_in_batches_copy(gpu: Gpu, find: Callable[[], Any]) -> None:
    batched = find()
    if batched is None:
        pytest.skip("it is not there: no vLLM with CUDA, or a driver before CUDA 12.8")
    host = torch.empty(PAGE * 4, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    sources = np.array([gpu.kv[n, 3 * n].data_ptr() for n in range(4)])
    targets = host.data_ptr() + np.arange(4) * PAGE
    with torch.cuda.stream(stream):
        batched(targets, sources, np.full(4, PAGE), False, stream.cuda_stream)
    stream.synchronize()
    for n in range(4):
        assert torch.equal(host[n * PAGE : (n + 1) * PAGE], gpu.kv[n, 3 * n].cpu())


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_wait_for_the_engine_s_stream(gpu: Gpu, arena: Callable[..., Any], pinned: bool) -> None:
    one, blocks = arena(2 * CHUNK_BYTES), [(tuple(range(PER_CHUNK)),)]
    if pinned:
        pin(gpu, one)
    stored, loaded = one.data[:CHUNK_BYTES], one.data[CHUNK_BYTES:]
    gpu.memory.gather_all([stored], blocks, gpu.memory.fence())  # all that is made once is there
    torch.cuda._sleep(BUSY_CYCLES)
    gpu.kv[:, :PER_CHUNK] = 7  # the step computes it after a while
    gpu.memory.gather_all([stored], blocks, gpu.memory.fence())
    assert (stored == 7).all()
    loaded[:] = 9
    torch.cuda._sleep(BUSY_CYCLES)
    seen = gpu.kv[:, :PER_CHUNK].clone()  # by a step that reads the blocks before they are given to the load
    gpu.memory.scatter_all([loaded], blocks, gpu.memory.fence())
    assert bool((gpu.kv[:, :PER_CHUNK] == 9).all())
    assert bool((seen == 7).all())


def test_who_waits_for_the_gpu_leaves_the_interpreter_to_others(gpu: Gpu, arena: Callable[..., Any]) -> None:
    one, blocks = arena(CHUNK_BYTES), [(tuple(range(PER_CHUNK)),)]
    gpu.memory.gather_all([one.data], blocks, gpu.memory.fence())
    torch.cuda._sleep(BUSY_CYCLES)
    fence, done = gpu.memory.fence(), threading.Event()

    def store() -> None:
        gpu.memory.gather_all([one.data], blocks, fence)
        done.set()

    thread = threading.Thread(target=store)
    thread.start()
    rounds = 0
    while not done.is_set():
        rounds += 1
    thread.join()
    assert rounds > 10_000


def test_pinning_and_capturing_a_graph_do_not_disturb_each_other(
    gpu: Gpu, arena: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "PIECE_BYTES", 4 * MIB)
    one = arena(256 * MIB)
    x = torch.ones(1024, device=gpu.device)
    for _ in range(3):
        x.mul_(1)
    torch.cuda.synchronize()
    gpu.memory._pinner.watch(one)
    graphs = 0
    while gpu.memory.levels().pinned < one.data.nbytes and not gpu.said:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        graph.replay()
        graphs += 1
    torch.cuda.synchronize()
    assert gpu.said == []
    assert graphs
    assert float(x[0]) == 1 + graphs


def test_memory_that_is_pinned_already_is_an_error_and_no_more(gpu: Gpu, arena: Callable[..., Any]) -> None:
    one = arena(MIB)
    pin(gpu, one)

    def again() -> None:
        gpu.driver.enter_thread()
        gpu.driver.register(int(one.data.ctypes.data), MIB)

    error = Task(again).join().error  # in a thread of its own, as ours are: CUDA's last error is a thread's
    assert isinstance(error, CudaError)
    assert "cudaHostRegister failed with code" in str(error)
    assert float(torch.ones(1, device=gpu.device).sum()) == 1  # no error is left behind for the engine


def test_a_thread_of_ours_has_a_context_and_a_stream_that_nobody_else_has(gpu: Gpu) -> None:
    """In threads in which nothing of CUDA was called before; torch's streams are 32 of each priority, in turns."""
    handles: list[int] = []

    def enter() -> None:
        gpu.driver.enter_thread()
        stream = gpu.driver.stream()
        stream.record().wait()
        handles.append(stream._stream.cuda_stream)
        streams.append(stream)  # else the next one may get the same handle

    streams: list[Any] = []
    for _ in range(40):
        assert Task(enter).join().error is None
    assert len(set(handles)) == 40
    assert not set(handles) & {torch.cuda.Stream().cuda_stream for _ in range(64)}
    streams.clear()  # they are destroyed, and what is copied afterwards does not mind
    extent = np.zeros(CHUNK_BYTES, np.uint8)
    gpu.memory.gather_all([extent], [(tuple(range(PER_CHUNK)),)], gpu.memory.fence())
    assert np.array_equal(extent.reshape(LAYERS, PER_CHUNK, PAGE), gpu.kv[:, :PER_CHUNK].cpu().numpy())


def test_no_gpu_memory_is_taken(gpu: Gpu, arena: Callable[..., Any]) -> None:
    one, blocks = arena(CHUNK_BYTES), [(tuple(range(PER_CHUNK)),)]
    gpu.memory.gather_all([one.data], blocks, gpu.memory.fence())  # the stream, and staging memory
    torch.cuda.synchronize()
    reserved, (free, _) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    for pinned in (False, True):
        if pinned:
            pin(gpu, one)
        gpu.memory.gather_all([one.data], blocks, gpu.memory.fence())
        gpu.memory.scatter_all([one.data], blocks, gpu.memory.fence())
    assert torch.cuda.memory_reserved() == reserved
    assert free - torch.cuda.mem_get_info()[0] <= 16 * MIB  # page tables of the driver, if anything


def test_a_daemon_that_is_killed_under_copies_costs_nothing_but_misses(
    make_daemon: Callable[..., Daemon], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "PIECE_BYTES", 32 * MIB)
    daemon = make_daemon(l1_mib=256)
    blocks: BlockTable = (tuple(range(PER_CHUNK)),)
    with Client.attach(daemon.run_dir) as kv:
        eventually(lambda: kv.stats()["l1"]["bytes_ready"] == kv.stats()["l1"]["bytes_total"])
        gpu.memory.use(kv)
        eventually(lambda: 0 < gpu.memory.levels().arena == gpu.memory.levels().pinned)
        namespace = kv.register({"model": "m"}, shard_bytes=CHUNK_BYTES)
        with kv.reserve(namespace, hashes(8)) as reservation:
            with reservation.copying():
                gpu.memory.gather_all(reservation.views, [blocks] * 8, gpu.memory.fence())
            assert len(reservation.commit()) == 8
        for epoch in (2, 3):
            reading = kv.open_read(kv.lookup(namespace, hashes(8)).hand_over(), 0, 0, 8)
            assert reading is not None
            torch.cuda._sleep(BUSY_CYCLES)  # the copy stands still while the daemon goes
            fence = gpu.memory.fence()
            killer = threading.Timer(0.05, daemon.kill)
            killer.start()
            with reading.copying() as allowed:
                assert allowed
                targets: list[BlockTable] = [
                    (tuple(range((n + 1) * PER_CHUNK, (n + 2) * PER_CHUNK)),) for n in range(8)
                ]
                gpu.memory.scatter_all(reading.views, targets, fence)
            killer.join()
            for n in range(8):
                assert torch.equal(gpu.kv[:, (n + 1) * PER_CHUNK : (n + 2) * PER_CHUNK], gpu.kv[:, :PER_CHUNK])
            del reading
            daemon.start()
            at_epoch(kv, epoch)
            eventually(lambda: 0 < gpu.memory.levels().arena == gpu.memory.levels().pinned)
        assert gpu.memory.problem == ""
    eventually(lambda: gpu.memory.levels().pinned == 0)
    assert gpu.said == []


def test_a_broken_context_is_noticed_and_ends_in_a_sentence() -> None:
    """In a process of its own, as nothing on the GPU works in it afterwards."""
    import subprocess
    import sys

    script = """
import numpy as np, torch
from tests.gpu.test_gpu import Gpu, PER_CHUNK, CHUNK_BYTES
gpu = Gpu()
extent = np.zeros(CHUNK_BYTES, np.uint8)
blocks = [(tuple(range(PER_CHUNK)),)]
gpu.memory.gather_all([extent], blocks, gpu.memory.fence())
fence = gpu.memory.fence()
index = torch.tensor([1 << 40], device="cuda")
torch.zeros(1, device="cuda")[index]  # a device-side assertion
for _ in range(2):
    try:
        gpu.memory.gather_all([extent], blocks, fence)
    except Exception as error:
        print("raised", type(error).__name__)
print("problem:", gpu.memory.problem)
gpu.memory.close()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "problem: a copy of the GPU failed" in ran.stdout, (ran.stdout, ran.stderr)
