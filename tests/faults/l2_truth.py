"""What lies on a medium of L2, read by the tests themselves: the adapters' own accounts are what is being judged.

`fs` is walked.  Of `raw_block` the headers of all slots are read; where nothing was ever evicted or removed they are
exactly the objects.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import Unavailable
from kvkeep.l2.adapter import Key
from kvkeep.l2.raw_layout import SLOT_HEADER_BYTES, Geometry, Head, unpack_slot_header
from kvkeep.l2.record import HEADER_BYTES, payload_checksum, unpack
from tests.conftest import Daemon

PAGE = 4096


class Truth(NamedTuple):
    objects: dict[Key, bytes]  # with a digest of header and payload as they lie there
    nbytes: int  # as the adapter is to count them

    @property
    def chunks(self) -> set[bytes]:
        return {key.chunk for key in self.objects}


def fs_truth(root: Path) -> Truth:
    """Every file must be whole, and hold what its header says."""
    objects: dict[Key, bytes] = {}
    nbytes = 0
    for path in (root / "objects").glob("*/*"):
        data = path.read_bytes()
        header = unpack(data[:HEADER_BYTES])
        assert header is not None, f"{path} has its name and no header"
        assert payload_checksum(data[PAGE : PAGE + header.stored_bytes]) == header.checksum, f"{path} is not whole"
        objects[header.key] = blake3(data).digest()
        nbytes += path.stat().st_blocks * 512
    return Truth(objects, nbytes)


def raw_truth(path: Path, *, evicting: bool = False) -> Truth:
    """Nothing, if the mover was killed before it had formatted the file.

    ``evicting``: a slot is written again, payload first, while it still has the header of the object that was evicted
    from it; if the mover is killed just then, there is a header without its payload, which belongs to nobody."""
    objects: dict[Key, bytes] = {}
    sequences: dict[Key, int] = {}
    nbytes = 0
    if not path.exists():
        return Truth({}, 0)
    with path.open("rb") as file:
        for slot in raw_slots(path):
            header = os.pread(file.fileno(), slot.payload - slot.header, slot.header)
            payload = os.pread(file.fileno(), slot.nbytes, slot.payload)
            if payload_checksum(payload) != slot.checksum:
                assert evicting, f"the slot at {slot.header} is not whole"
                continue
            nbytes += 0 if slot.key in sequences else slot.charge
            if sequences.get(slot.key, -1) < slot.sequence:
                sequences[slot.key] = slot.sequence
                objects[slot.key] = blake3(header + payload).digest()
    return Truth(objects, nbytes)


class Slot(NamedTuple):
    key: Key
    header: int  # offset in the file
    payload: int  # offset in the file
    nbytes: int  # of the payload
    checksum: int
    sequence: int
    charge: int  # bytes that it counts as


def raw_slots(path: Path) -> list[Slot]:
    """Every slot with a header that verifies."""
    found: list[Slot] = []
    with path.open("rb") as file:
        start = file.read(PAGE)
        geometry = Geometry.unpack(start)
        if geometry is None:
            assert not any(start), f"{path} has no superblock of ours"
            return []
        for slab in range(geometry.slabs):
            for slot, (at, head) in enumerate(_slots(file.fileno(), geometry, slab)):
                data = os.pread(file.fileno(), SLOT_HEADER_BYTES, at)
                header = unpack_slot_header(data, geometry, slab, slot, head.generation)
                if header is not None:
                    charge = geometry.slab_bytes // geometry.slots(head.blocks)
                    where = (header.key, at, at + geometry.block, header.stored_bytes)
                    found.append(Slot(*where, header.checksum, header.sequence, charge))
    return found


def _slots(fd: int, geometry: Geometry, slab: int) -> Iterator[tuple[int, Head]]:
    """Offsets of the slots of a slab that has a class."""
    heads = [
        Head.unpack(os.pread(fd, geometry.block, at), geometry, slab)
        for at in (geometry.slab_offset(slab), geometry.foot_offset(slab))
    ]
    head = max((h for h in heads if h is not None and h.blocks), key=lambda h: h.generation, default=None)
    if head is not None:
        for slot in range(geometry.slots(head.blocks)):
            yield geometry.slot_offset(slab, slot, head.blocks), head


def fs_bytes(root: Path) -> int:
    """Blocks of everything that was in the directory at one moment, though files come and go: what two walks both met
    was there between them.  (One walk may count a file that went, and then the one that took its room.)"""
    before, after = _walk(root), _walk(root)
    return sum(nbytes for file, nbytes in before.items() if file in after)


def _walk(root: Path) -> dict[tuple[str, int], int]:
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            try:
                about = os.lstat(path)
            except FileNotFoundError:
                continue
            found[path, about.st_ino] = about.st_blocks * 512
    return found


class Watch:
    """Samples until `end`: no level ever holds more than its limit.  Through any number of restarts.

    ``media`` gives, for each, a name, the bytes on it now, and the most that there may be."""

    def __init__(self, daemon: Daemon, media: Callable[[], list[tuple[str, int, int]]], pause_s: float = 0.02) -> None:
        self._daemon, self._media, self._pause_s = daemon, media, pause_s
        self.samples = 0
        self.highest: dict[str, float] = {}  # share of its limit
        self.broken: list[str] = []
        self.problem: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Client.attach(self._daemon.run_dir, name="watch", deadline_s=60) as kv:
                while not self._end.is_set() and self._daemon.run_dir.exists():  # a test may fail before `end`
                    self._sample(kv)
                    time.sleep(self._pause_s)
        except BaseException as e:
            self.problem = e

    def _sample(self, kv: Client) -> None:
        self._see(self._media())
        try:
            document = kv.stats()
        except Unavailable:
            return
        l1 = document["l1"]
        self._see([("l1", l1["bytes_used"], l1["bytes_total"])])
        self._see([("loading", l1["bytes_loading"], max(l1["bytes_total"] // 4, 1))])
        storing = sum(row["bytes_storing"] for row in document["l2"])
        self._see([("storing", storing, l1["bytes_total"] // 4)])
        self._see([(f"{row['name']} counted", row["bytes_used"], row["bytes_limit"]) for row in document["l2"]])
        self.samples += 1

    def _see(self, found: list[tuple[str, int, int]]) -> None:
        for name, nbytes, limit in found:
            if limit:
                self.highest[name] = max(self.highest.get(name, 0.0), nbytes / limit)
            if nbytes > limit and (limit or not name.endswith("counted")):  # before a mover is ready it has no limit
                self.broken.append(f"{name}: {nbytes} of at most {limit} bytes")

    def end(self) -> dict[str, float]:
        """The highest share of each limit."""
        self._end.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "the watch is stuck"
        if self.problem is not None:
            raise self.problem
        assert not self.broken, f"{len(self.broken)} times: {self.broken[:5]}"
        assert self.samples
        return {name: round(share, 3) for name, share in sorted(self.highest.items())}
