"""How fast L2 stores and loads, beside a plain O_DIRECT loop on the same medium.

    <adapter>/store/<size>           a real mover process writes objects from shared memory ...
    <adapter>/load/<size>            ... and reads them into it
    <adapter>+<serde>/…/4MiB         the same through a serde, on bytes like KV; no bar
    (how fast a serde alone encodes and decodes: `kvkeep bench serde`)
    <adapter>/client_store/4MiB      a client stores into a daemon, until L2 has it
    <adapter>/client_load/4MiB       L1 is empty: a lookup that waits for L2, until all of it can be read

Adapters: `fs` and `raw_block` as they are by default (no fsync; payload durable before it is acknowledged), `fs_sync`
("fsync": "data") and `raw_block_nosync` ("durability": "none").

The reference is a loop of threads that pwrites or preads objects of the same size, as many at a time as the adapter
has in flight (``depth``), with as many fdatasyncs, into a file whose blocks have all been written before.  So is the
medium of the adapters: raw_block's own file has been prewritten, and the directory of `fs` is full, as it is for all
but the first hours of its life, so that each store evicts.  `fs_empty` is a directory that still grows: it needs a new
file for each object, for which a file system (and what lies under it, if it was told to discard) has to find space, so
beside it there is a plain loop that makes new files too; ``new_files`` in the others.  Everything alternates within
one run; ``low`` and ``high`` are the ratios' 10th and 90th percentile by round.

The medium is where ``--dir`` is.  ``--peer lmcache`` compares with LMCache's `fs` and `fs_native` instead (see
bench/l2_lmcache.py), if it can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench.common import BenchError, Report, arguments, require_memory, run
from kvkeep.bench.l2_client import clients
from kvkeep.bench.l2_common import (
    DATA,
    FULL,
    KINDS,
    LESS_DATA,
    MIB,
    NEW_FILES,
    OVERWRITE,
    QUICK_DATA,
    READ,
    Kind,
    Rounds,
    Way,
    aligned,
    medium,
    medium_of,
    runs_of,
    split,
    working_folder,
)
from kvkeep.bench.l2_mover import Arena, Fed
from kvkeep.bench.l2_plain import Plain
from kvkeep.bench.serde import made

SIZES_MIB = (1, 4, 32)
SERDE_MIB = 4
RUNS = 10
SERDE_RUNS = 5
BAR = "ratio >= 0.85"
SERDES: tuple[tuple[str, ...], ...] = (("zstd",), ("fp8",), ("aesgcm",), ("fp8", "zstd"))


def main(argv: Sequence[str] | None = None) -> int:
    more: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--dir", {"default": "", "metavar": "DIR", "help": "on the medium to measure (default: TMPDIR)"}),
        ("--peer", {"default": "", "choices": ("lmcache",), "help": "compare with this instead"}),
        ("--runs", {"type": int, "default": 0, "help": f"rounds of each case (default: {RUNS})"}),
    )
    return run("l2", measure, arguments("l2", __doc__ or "", argv, *more))


def measure(args: argparse.Namespace) -> None:
    size = QUICK_DATA if args.quick else DATA
    if problem := require_memory(4 * size):
        raise BenchError(problem)
    with working_folder(args.dir, 10 * size) as folder:
        report = Report(args, f"L2 on {medium(folder)}, {size // MIB} MiB a round; GB/s, p50")
        if args.peer:
            from kvkeep.bench import l2_lmcache

            l2_lmcache.measure(report, args, folder, size)
            return
        content = aligned(np.random.default_rng(args.seed).bytes(size))
        sizes = (1,) if args.quick else SIZES_MIB
        adapters(report, args, folder / "adapters", content, sizes)
        less = min(size, LESS_DATA)
        serdes(report, args, folder / "serdes", less)
        clients(report, args, folder / "clients", content[:less])


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapters(report: Report, args: argparse.Namespace, folder: Path, content: memoryview, sizes: Sequence[int]) -> None:
    folder.mkdir()
    arena = Arena(content)
    with Plain(folder, arena.source, arena.target) as plain, contextlib.closing(arena):
        for name, kind in KINDS.items():
            for mib in sizes:
                names = (f"{name}/store/{mib}MiB", f"{name}/load/{mib}MiB")
                if report.wanted(args, *names):
                    report.note(f"{name}, {mib} MiB")
                    with medium_of(kind, folder, content) as config, Fed(config, arena) as fed:
                        _adapter(report, args, names, kind, fed, plain, arena, mib * MIB)


def _adapter(
    report: Report,
    args: argparse.Namespace,
    names: tuple[str, str],
    kind: Kind,
    fed: Fed,
    plain: Plain,
    arena: Arena,
    size: int,
) -> None:
    depth, sync, files = kind.depth, kind.sync_bytes(size), kind.type == "fs"
    rng = np.random.default_rng(args.seed)
    keys: list[bytes] = []
    stores: dict[str, Way] = {
        "ours": lambda: fed.store(keys, size),
        "plain": lambda: plain.overwrite(size, depth, sync),
    }
    loads: dict[str, Way] = {"ours": lambda: fed.load(keys, size), "plain": lambda: plain.read(size, depth)}
    if files:
        stores["new_files"] = lambda: plain.create(size, depth, sync)
        loads["files"] = lambda: plain.read_files(size, depth)
    rounds = Rounds(arena.half, runs_of(args, RUNS))
    for _ in range(FULL if kind.full else 0):
        keys[:] = split(rng.bytes(32 * (arena.half // size)))
        fed.store(keys, size)
    for _ in rounds:
        keys[:] = split(rng.bytes(32 * (arena.half // size)))
        rounds.take("store", stores)
        arena.target[:] = bytes(arena.half)
        rounds.take("load", loads)
        fed.load(keys, size)
        if arena.target != arena.source:
            raise BenchError(f"{names[1]}: what was loaded is not what was stored")
        if not kind.full:
            fed.drop(keys)
        plain.remove_files()
    fields: dict[str, Any] = {"depth": min(depth, arena.half // size), "sync": kind.sync or "no"}
    growing = files and not kind.full
    reference = NEW_FILES if growing else OVERWRITE
    rounds.case(report, names[0], "store", reference, BAR, "new_files" if growing else "plain", **fields)
    rounds.case(report, names[1], "load", READ, BAR, **fields)


# ---- serdes ----------------------------------------------------------------------------------------------------------


def serdes(report: Report, args: argparse.Namespace, folder: Path, nbytes: int) -> None:
    folder.mkdir()
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"bench:{os.urandom(32).hex()}\n")
    chains = {"+".join(chain): [_serde(name, keys) for name in chain] for chain in SERDES[: 2 if args.quick else None]}
    size = SERDE_MIB * MIB // (4 if args.quick else 1)
    arena: Arena | None = None
    for label, chain in chains.items():
        for kind in ("fs", "raw_block"):
            names = [f"{kind}+{label}/{what}/{size // MIB}MiB" for what in ("store", "load")]
            if not report.wanted(args, *names):
                continue
            if arena is None:
                arena = Arena(memoryview(made(args.seed, "bfloat16", nbytes).tobytes()))
            with (
                medium_of(KINDS[kind], folder, arena.source) as config,
                Fed({**config, "serde": chain}, arena, b'{"kv_dtype":"bfloat16"}') as fed,
            ):
                _serdes(report, args, names, fed, arena, size, "fp8" in label)
    if arena is not None:
        arena.close()


def _serdes(
    report: Report, args: argparse.Namespace, names: list[str], fed: Fed, arena: Arena, size: int, lossy: bool
) -> None:
    rng = np.random.default_rng(args.seed)
    rounds = Rounds(arena.half, runs_of(args, SERDE_RUNS))
    for _ in rounds:
        keys = split(rng.bytes(32 * (arena.half // size)))
        copy = {"plain": lambda: _copy(arena)}
        rounds.take("store", {"ours": partial(fed.store, keys, size), **copy})
        rounds.take("load", {"ours": partial(fed.load, keys, size), **copy})
        fed.load(keys, size)
        if not lossy and arena.target != arena.source:
            raise BenchError(f"{names[1]}: what was loaded is not what was stored")
        fed.drop(keys)
    for name, what in zip(names, ("store", "load"), strict=True):
        rounds.case(report, name, what, "copy of the same bytes, one thread")


def _copy(arena: Arena) -> float:
    began = time.perf_counter()
    arena.target[:] = arena.source
    return time.perf_counter() - began


def _serde(name: str, keys: Path) -> object:
    return {"type": name, "key_file": str(keys)} if name == "aesgcm" else name
