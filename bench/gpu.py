"""How fast a GPU stores into the arena and loads from it, beside a plain loop of torch's pinned copies.

    pin      the arena is pinned in pieces, in the background, as in a worker, which pauses for half of the time;
             GB/s with the pauses, the GPU memory that it takes (tables of the driver's), and the slowest of small
             kernels that are launched meanwhile
    store    `reserve`, copies from the GPU into the arena, `commit`: what a store thread does, with one thread
    load     `lookup`, `open_read`, copies to the GPU by two threads, validation: what a load does

The KV memory is that of a model with 32 layers and blocks of 16 tokens; a chunk of 256 tokens has 512 pages, and the
page decides how large it is.  Blocks are scattered over the KV memory, so no two pages are one copy.  Each call moves
256 MiB.  The reference is ``tensor.copy_(…, non_blocking=True)`` chunk by chunk between one run of GPU memory and
pinned memory of torch's own, as good as it gets; rounds of all of them alternate.  "unpinned" is an arena that is not
pinned: through staging memory.

p50 and p99 are of the calls; GB/s is of the p50.  Needs an NVIDIA GPU and torch with CUDA, and uses vLLM's copy
operator if vLLM is there.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from kvkeep.bench.chains import fresh_chain, manifest
from kvkeep.bench.common import BenchError, Daemon, Report, arguments, percentiles, require_memory, run
from kvkeep.ipc.client import Client
from kvkeep.ipc.vllm.groups import BlockTable
from kvkeep.ipc.vllm.memory import Bytes, KVMemory, PlaneShape
from kvkeep.ipc.vllm.places import Place, Places

MIB = 1 << 20
CHUNK_MIB = (1, 8, 32)
LAYERS, BLOCKS_PER_CHUNK = 32, 16
CALL_BYTES = 256 * MIB
ARENA_BYTES = 8 << 30
RUNS, WARM_UP = 30, 3
THREADS = 2  # of a load
DEADLINE_S = 20.0
PIN_S = 120.0
BAR = "ratio >= 0.8"


def main(argv: Sequence[str] | None = None) -> int:
    return run("gpu", measure, arguments("gpu", __doc__ or "", argv))


def measure(args: argparse.Namespace) -> None:
    report = Report(args, f"GPU, {CALL_BYTES // MIB} MiB a call; GB/s of the p50 (p50 and p99 in ms)")
    sizes = CHUNK_MIB[:1] if args.quick else CHUNK_MIB
    names = ["pin", *(f"{op}/{mib}MiB{how}" for mib in sizes for how in ("", "/unpinned") for op in ("store", "load"))]
    arena = ARENA_BYTES // (16 if args.quick else 1)
    problem = missing() or require_memory(arena + 2 * CALL_BYTES)
    if problem:
        for name in names:
            if report.wanted(args, name):
                report.missing(name, "GB/s", problem)
        return
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(arena, "--l1-slab-mb=32"))
        daemon.start()
        with daemon.attach("bench-watch", arena=False) as client:
            daemon.wait_reserved(client)
        _pin(report, args, daemon, arena)
        for mib in sizes:
            _copies(report, args, daemon, mib, runs=3 if args.quick else RUNS)


def missing() -> str:
    """Why this machine cannot; empty = it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.hip or not torch.cuda.is_available():
        return "there is no NVIDIA GPU that torch can use"
    return ""


def _memory(mib: int) -> tuple[Any, Callable[[], KVMemory]]:
    """KV memory for two calls' chunks, and what makes a CudaMemory of it."""
    import torch

    from kvkeep.ipc.vllm.cuda.driver import TorchDriver
    from kvkeep.ipc.vllm.cuda.memory import CudaMemory

    page = mib * MIB // (LAYERS * BLOCKS_PER_CHUNK)
    blocks = 2 * CALL_BYTES // (LAYERS * page)
    device = torch.device("cuda", torch.cuda.current_device())
    kv = torch.randint(0, 256, (LAYERS, blocks, page), dtype=torch.uint8, device=device)
    place = Place(PlaneShape(LAYERS, page), blocks, kv.data_ptr(), blocks * page, page, kv.untyped_storage())
    return kv, lambda: CudaMemory(Places([[place]], [16], device), TorchDriver(device), _fail)


def _fail(sentence: str) -> None:
    raise BenchError(sentence)


def _pin(report: Report, args: argparse.Namespace, daemon: Daemon, arena: int) -> None:
    if not report.wanted(args, "pin"):
        return
    _, make = _memory(1)
    with _attached(daemon, make()) as (client, memory):
        free, began = _free_gpu_bytes(), time.monotonic()
        longest = _use_pinned(memory, client)
        seconds, taken = time.monotonic() - began, free - _free_gpu_bytes()
    report.case(
        "pin",
        arena / seconds / 1e9,
        "GB/s",
        seconds=seconds,
        arena_bytes=arena,
        gpu_bytes=taken,
        longest_kernel_ms=longest * 1e3,
    )


def _free_gpu_bytes() -> int:
    """Pinning takes tables of the driver's, where it likes to have them."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


@contextlib.contextmanager
def _attached(daemon: Daemon, memory: KVMemory) -> Iterator[tuple[Client, KVMemory]]:
    """A client for this memory alone: what is pinned is unpinned when its client has gone."""
    try:
        with daemon.attach() as client:
            yield client, memory
    finally:
        memory.close()


def _use_pinned(memory: KVMemory, client: Client) -> float:
    """Seconds that the slowest of many small kernels took meanwhile, from its launch to its end."""
    import torch

    memory.use(client)
    small: Any = torch.ones(1, device="cuda")
    longest, until = 0.0, time.monotonic() + PIN_S
    while (levels := memory.levels()) is None or not 0 < levels.arena == levels.pinned:
        began = time.monotonic()
        if began > until:
            raise BenchError(f"the arena was not pinned within {PIN_S:g} s: {levels}")
        small.add_(1)
        torch.cuda.synchronize()
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.0005)
    return longest


def _copies(report: Report, args: argparse.Namespace, daemon: Daemon, mib: int, runs: int) -> None:
    kv, make = _memory(mib)
    plain = _Plain(mib)
    for how in ("", "/unpinned"):
        names = [f"{op}/{mib}MiB{how}" for op in ("store", "load")]
        if not report.wanted(args, *names):
            continue
        with ThreadPoolExecutor(THREADS) as pool, _attached(daemon, make()) as (client, memory):
            if not how:
                _use_pinned(memory, client)
            ours = _Ours(client, memory, kv, mib, args.seed, pool)
            _rounds(report, args, names, ours, plain, runs)
            ours.forget()


def _rounds(report: Report, args: argparse.Namespace, names: list[str], ours: _Ours, plain: _Plain, runs: int) -> None:
    found: dict[str, list[float]] = {"store": [], "load": [], "plain_store": [], "plain_load": []}
    for i in range(WARM_UP + runs):
        for what, call in (
            ("store", ours.store),
            ("plain_store", plain.store),
            ("load", ours.load),
            ("plain_load", plain.load),
        ):
            seconds = call()
            if i >= WARM_UP:
                found[what].append(seconds)
        if i == 0:
            ours.must_be_right()
    for op, name in zip(("store", "load"), names, strict=True):
        if not report.wanted(args, name):
            continue
        (p50, p99), (reference, reference_p99) = percentiles(found[op]), percentiles(found[f"plain_{op}"])
        report.case(
            name,
            CALL_BYTES / p50 / 1e9,
            "GB/s",
            reference=CALL_BYTES / reference / 1e9,
            reference_name="tensor.copy_ chunk by chunk, pinned memory of torch's own",
            bar=BAR if not name.endswith("unpinned") else "",
            p50_ms=p50 * 1e3,
            p99_ms=p99 * 1e3,
            reference_p99_ms=reference_p99 * 1e3,
            runs=runs,
            call_bytes=CALL_BYTES,
        )


class _Ours:
    """One chain a round: stored from the first half of the KV memory's blocks, loaded into the second."""

    def __init__(
        self, client: Client, memory: KVMemory, kv: Any, mib: int, seed: int, pool: ThreadPoolExecutor
    ) -> None:
        self._client, self._memory, self._kv, self._pool = client, memory, kv, pool
        self._rng = np.random.default_rng(seed)
        self._chunks = CALL_BYTES // (mib * MIB)
        self._namespace = client.register(manifest(f"gpu-{mib}"), shard_bytes=mib * MIB)
        self._at_once = memory.at_once(mib * MIB)
        blocks = self._rng.permutation(self._chunks * BLOCKS_PER_CHUNK * 2)
        tables = [(tuple(ids.tolist()),) for ids in blocks.reshape(-1, BLOCKS_PER_CHUNK)]
        self._sources: list[BlockTable] = list(tables[: self._chunks])
        self._targets: list[BlockTable] = list(tables[self._chunks :])
        self._chain = b""  # the one that is there

    def store(self) -> float:
        self.forget()  # so that nothing is evicted while the time is taken
        self._chain = fresh_chain(self._rng, self._chunks)
        began = time.monotonic()
        fence = self._memory.fence()
        with self._client.reserve(self._namespace, self._chain, deadline_s=DEADLINE_S) as reservation:
            if len(reservation.granted) != self._chunks:
                raise BenchError(f"only {len(reservation.granted)} of {self._chunks} chunks were granted")
            for piece in self._pieces():
                with reservation.copying():
                    self._memory.gather_all(reservation.views[piece], self._sources[piece], fence)
            reservation.commit(deadline_s=DEADLINE_S)
        return time.monotonic() - began

    def load(self) -> float:
        began = time.monotonic()
        fence = self._memory.fence()
        handle = self._client.lookup(self._namespace, self._chain, deadline_s=DEADLINE_S).hand_over()
        reading = self._client.open_read(handle, 0, 0, self._chunks, deadline_s=DEADLINE_S)
        if reading is None:
            raise BenchError("what was just stored is not there")
        views: list[Bytes] = reading.views

        def copy(piece: slice) -> None:
            with reading.copying():
                self._memory.scatter_all(views[piece], self._targets[piece], fence)

        list(self._pool.map(copy, self._pieces()))
        good = all(reading.validate())
        seconds = time.monotonic() - began
        reading.confirm()
        if not good:
            raise BenchError("a chunk was replaced while it was loaded")
        return seconds

    def forget(self) -> None:
        if self._chain:
            self._client.delete(self._namespace, self._chain)

    def must_be_right(self) -> None:
        for source, target in zip(self._sources, self._targets, strict=True):
            if not bool((self._kv[:, list(source[0])] == self._kv[:, list(target[0])]).all()):
                raise BenchError("other bytes were loaded than had been stored")

    def _pieces(self) -> Iterator[slice]:
        for at in range(0, self._chunks, self._at_once):
            yield slice(at, min(at + self._at_once, self._chunks))


class _Plain:
    def __init__(self, mib: int) -> None:
        import torch

        self._torch: Any = torch
        shape = (CALL_BYTES // (mib * MIB), mib * MIB)
        self._gpu: Any = torch.ones(shape, dtype=torch.uint8, device="cuda")
        self._host: Any = torch.ones(shape, dtype=torch.uint8, pin_memory=True)

    def store(self) -> float:
        return self._timed(self._host, self._gpu)

    def load(self) -> float:
        return self._timed(self._gpu, self._host)

    def _timed(self, targets: Any, sources: Any) -> float:
        self._torch.cuda.synchronize()
        began = time.monotonic()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        self._torch.cuda.synchronize()
        return time.monotonic() - began
