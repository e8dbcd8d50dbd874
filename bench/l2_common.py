"""What the parts of `bench l2` share: the adapters that are measured, the medium they lie on, and taking turns."""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvkeep.bench.common import BenchError, Report
from kvkeep.bench.l2_plain import prewrite

MIB = 1 << 20
DATA = 512 * MIB
LESS_DATA = 192 * MIB  # of a serde, and through a daemon
QUICK_DATA = 8 * MIB
WARM_UP = 2
SLICE = 32 * MIB  # of a store, in the mover: what an fdatasync of raw_block covers
SLAB_OF_32_MIB = 1 << 30  # a smaller medium has slabs that such an object does not fit into
FULL = 3  # times a round's bytes: the limit of an adapter that is measured full
OVERWRITE = "plain pwrite, O_DIRECT, written blocks"
NEW_FILES = "plain pwrite, O_DIRECT, new files"
READ = "plain pread, O_DIRECT"


class Kind(NamedTuple):
    """An adapter as it is measured."""

    type: str
    options: dict[str, str]
    depth: int  # objects in flight: of fs by its threads, of raw_block by its queue
    sync: str  # "": never, "object": after each, "slice": after SLICE bytes
    full: bool = False  # each store evicts: what was stored is not dropped, the limit is reached before the first round

    def sync_bytes(self, size: int) -> int:
        return {"": 0, "object": size, "slice": SLICE}[self.sync]


KINDS = {
    "fs": Kind("fs", {}, 12, "", full=True),
    "raw_block": Kind("raw_block", {}, 32, "slice"),
    "fs_empty": Kind("fs", {}, 12, ""),
    "fs_sync": Kind("fs", {"fsync": "data"}, 12, "object", full=True),
    "raw_block_nosync": Kind("raw_block", {"durability": "none"}, 32, ""),
}
Way = Callable[[], float]


class Rounds:
    """Takes turns: what is compared is measured one after the other, another one first each time."""

    def __init__(self, nbytes: int, runs: int) -> None:
        self._nbytes, self._runs = nbytes, runs
        self._found: dict[str, dict[str, list[float]]] = {}
        self._at = 0

    @property
    def total(self) -> int:
        return WARM_UP + self._runs

    def __iter__(self) -> Iterator[int]:
        for at in range(self.total):
            self._at = at
            yield at

    def take(self, what: str, ways: dict[str, Way]) -> None:
        names = list(ways)
        turn = self._at % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = ways[name]()
            if self._at >= WARM_UP:
                self._found.setdefault(what, {}).setdefault(name, []).append(self._nbytes / seconds / 1e9)

    def case(
        self, report: Report, case: str, what: str, reference: str, bar: str = "", beside: str = "plain", **fields: Any
    ) -> None:
        """``ours`` beside ``plain``, or another; what else was measured is a field."""
        found = {name: np.array(values) for name, values in self._found[what].items()}
        ours = found.pop("ours")
        plain = found.pop(beside)
        low, high = np.percentile(ours / plain, (10, 90))
        for name, values in found.items():
            fields |= {name: float(np.median(values)), f"ratio_{name}": float(np.median(ours) / np.median(values))}
        report.case(
            case,
            float(np.median(ours)),
            "GB/s_p50",
            reference=float(np.median(plain)),
            reference_name=reference,
            bar=bar,
            low=float(low),
            high=float(high),
            runs=self._runs,
            **fields,
        )


@contextlib.contextmanager
def working_folder(parent: str, need: int) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvkeep-bench-", dir=parent or None))
    except OSError as error:
        raise BenchError(f"--dir {parent}: {error.strerror}") from None
    try:
        there = os.statvfs(folder)
        if (free := there.f_bavail * there.f_frsize) < need:
            raise BenchError(f"{folder} has {free / 2**30:.1f} GiB free, {need / 2**30:.1f} are needed: set --dir")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def medium(folder: Path) -> str:
    """Its file system, in words."""
    best, words = "", "an unknown file system"
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            device, point, kind, options, *_ = line.split()
            if folder.resolve().is_relative_to(point) and len(point) >= len(best):
                discards = " with discard" if "discard" in options.split(",") else ""
                best, words = point, f"{kind} ({device}){discards}"
    return words


@contextlib.contextmanager
def medium_of(kind: Kind, folder: Path, content: memoryview, need: int = 0) -> Iterator[dict[str, Any]]:
    """The configuration of an adapter with room for ``need`` bytes; nothing is left of it afterwards."""
    place = folder / "medium"
    room = max(2 * (need or len(content)), SLAB_OF_32_MIB if len(content) >= DATA else 0) + 64 * MIB
    if kind.full and not need:
        room = FULL * len(content)
    try:
        if kind.type == "fs":
            yield {"type": "fs", "base_path": str(place), "capacity_gb": room / 2**30, **kind.options}
            return
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, room)
            prewrite(fd, content, room - MIB, MIB)  # all but what shows the adapter that the file is free
        finally:
            os.close(fd)
        yield {"type": "raw_block", "path": str(place), "size_gb": room / 2**30, **kind.options}
    finally:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def aligned(content: bytes) -> memoryview:
    """In memory that O_DIRECT takes."""
    view = memoryview(mmap.mmap(-1, len(content)))
    view[:] = content
    return view


def runs_of(args: argparse.Namespace, runs: int) -> int:
    return 2 if args.quick else args.runs or runs


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]
