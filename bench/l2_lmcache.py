"""`bench l2 --peer lmcache`: the `fs` adapter beside LMCache's `fs` and `fs_native`, which are driven directly.

    <peer>/<way>/store/<size>    ours as value, the peer as reference: the same objects, to folders side by side
    <peer>/<way>/load/<size>

    direct   both with O_DIRECT       cache   both through the page cache, from which loads then come

Neither calls fsync.  Our directory is full, so that each store evicts; what the peer stored is removed between rounds,
which is not measured.  LMCache's adapter classes run in this process, on objects of the same shared memory; they get
the keys in tasks of 16 MiB, all at once, and are waited for on their event descriptors, as its server does.  Ours runs
in its mover process, fed over its channel as by the daemon.  What was loaded is compared with what was stored, on both
sides.  With LMCache 0.5.6; `pip install --no-deps lmcache==0.5.6 sortedcontainers aiofile aiofiles`, and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import select
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench.common import BenchError, Report
from kvkeep.bench.l2_common import FULL, KINDS, MIB, Rounds, Way, aligned, medium_of, runs_of, split
from kvkeep.bench.l2_mover import Arena, Fed

SIZES_MIB = (1, 4, 32)
RUNS = 10
PEERS = ("fs", "fs_native")
WAYS = {"direct": "on", "cache": "off"}  # ours: direct_io
TASK_BYTES = 16 * MIB
WAIT_S = 60.0
BAR = "ratio >= 1"
_ADAPTERS = "lmcache.v1.distributed.l2_adapters."


def measure(report: Report, args: argparse.Namespace, folder: Path, nbytes: int) -> None:
    content = aligned(np.random.default_rng(args.seed).bytes(nbytes))
    with contextlib.closing(Arena(content)) as arena:
        for peer in PEERS:
            for way, direct in WAYS.items():
                for mib in (1,) if args.quick else SIZES_MIB:
                    names = (f"{peer}/{way}/store/{mib}MiB", f"{peer}/{way}/load/{mib}MiB")
                    if report.wanted(args, *names):
                        with (
                            medium_of(KINDS["fs"], folder, content) as config,
                            Fed({**config, "direct_io": direct}, arena) as ours,
                            LMCache(peer, folder / "lmcache", arena, way == "direct") as theirs,
                        ):
                            _compare(report, args, names, ours, theirs, arena, mib * MIB)


def _compare(
    report: Report,
    args: argparse.Namespace,
    names: tuple[str, str],
    ours: Fed,
    theirs: LMCache,
    arena: Arena,
    size: int,
) -> None:
    rng = np.random.default_rng(args.seed)
    keys: list[bytes] = []
    stores: dict[str, Way] = {"ours": lambda: ours.store(keys, size), "plain": lambda: theirs.store(keys, size)}
    loads: dict[str, Way] = {"ours": lambda: ours.load(keys, size), "plain": lambda: theirs.load(keys, size)}
    rounds = Rounds(arena.half, runs_of(args, RUNS))
    for _ in range(FULL):
        ours.store(split(rng.bytes(32 * (arena.half // size))), size)
    for _ in rounds:
        keys[:] = split(rng.bytes(32 * (arena.half // size)))
        rounds.take("store", stores)
        for who, load in loads.items():
            arena.target[:] = bytes(arena.half)
            load()
            if arena.target != arena.source:
                raise BenchError(f"{names[1]}: {who}: what was loaded is not what was stored")
        rounds.take("load", loads)
        theirs.drop(keys)
    for name, what in zip(names, ("store", "load"), strict=True):
        rounds.case(report, name, what, f"lmcache {theirs.version}, {theirs.type}", BAR)


class _Object:
    """What the adapters use of LMCache's MemoryObj."""

    def __init__(self, view: memoryview) -> None:
        self.byte_array = view


class LMCache:
    """Context manager: one of its adapters on a folder of its own."""

    def __init__(self, peer: str, folder: Path, arena: Arena, direct: bool) -> None:
        self.type = peer
        self._folder, self._arena = folder, arena
        config = {"base_path": str(folder), "use_odirect": direct}
        try:
            module = importlib.import_module(f"{_ADAPTERS}{peer}_l2_adapter")
            self._key: Any = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
            self.version = importlib.metadata.version("lmcache")
        except ImportError as error:
            raise BenchError(f"--peer lmcache cannot be imported here ({error}); see bench/l2_lmcache.py") from None
        folder.mkdir()
        self._adapter: Any
        if peer == "fs":
            self._adapter = module.FSL2Adapter(module.FSL2AdapterConfig.from_dict(config))
        else:
            self._adapter = module._create_fs_native_l2_adapter(module.FSNativeL2AdapterConfig.from_dict(config))

    def __enter__(self) -> LMCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._adapter.close()
        shutil.rmtree(self._folder)

    def store(self, keys: Sequence[bytes], size: int) -> float:
        fd = self._adapter.get_store_event_fd()
        began = time.perf_counter()
        open_tasks = {self._adapter.submit_store_task(*part) for part in self._parts(keys, size, self._arena.source)}
        while open_tasks:
            _wait(fd)
            for task, result in self._adapter.pop_completed_store_tasks().items():
                if not result.is_successful():
                    raise BenchError(f"lmcache {self.type}: a store failed")
                open_tasks.discard(task)
        return time.perf_counter() - began

    def load(self, keys: Sequence[bytes], size: int) -> float:
        fd = self._adapter.get_load_event_fd()
        began = time.perf_counter()
        open_tasks = {
            self._adapter.submit_load_task(*part): len(part[0]) for part in self._parts(keys, size, self._arena.target)
        }
        while open_tasks:
            _wait(fd)
            for task, count in list(open_tasks.items()):
                if (found := self._adapter.query_load_result(task)) is not None:
                    if len(found.get_indices_list()) != count:
                        raise BenchError(f"lmcache {self.type}: not everything was loaded")
                    del open_tasks[task]
        return time.perf_counter() - began

    def drop(self, keys: Sequence[bytes]) -> None:
        self._adapter.delete([self._named(key) for key in keys])
        for path in self._folder.iterdir():
            path.unlink()

    def _parts(self, keys: Sequence[bytes], size: int, memory: memoryview) -> Iterator[tuple[list[Any], list[Any]]]:
        most = max(1, TASK_BYTES // size)
        for start in range(0, len(keys), most):
            objects = range(start, min(len(keys), start + most))
            yield (
                [self._named(keys[i]) for i in objects],
                [_Object(memory[i * size : (i + 1) * size]) for i in objects],
            )

    def _named(self, key: bytes) -> Any:
        return self._key(chunk_hash=key, model_name="bench", kv_rank=0)


def _wait(fd: int) -> None:
    if not select.select([fd], [], [], WAIT_S)[0]:
        raise BenchError(f"lmcache did not answer within {WAIT_S:g} s")
    os.read(fd, 8)
