"""raw_block after a power cut: what was not flushed is lost, torn or there, in any mixture, and never wrong.

A shim between adapter and medium keeps the history of writes and flushes.  A cut at any point of it leaves every write
before the last flush, and of the later ones a random part, some of them torn at a sector.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvkeep.l2.adapter import Item, Outcome
from kvkeep.l2.raw_block import RawBlockAdapter
from kvkeep.l2.raw_io import Engine, Finished, Meanwhile, Transfer
from tests.l2.conformance import content, get, key, view

SECTOR = 512
LENGTHS = (3000, 9000, 70_000, 300_000)
Event = tuple[int, bytes]  # offset (-1 = flush, -2 = mark), bytes


class Recorder(Engine):
    """Passes everything on, and remembers it."""

    name = "recorder"

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.events: list[Event] = []

    def run(
        self,
        write: bool,
        transfers: Sequence[Transfer],
        finished: Finished | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[int]:
        if write:
            for offset, pieces in transfers:
                data = b"".join(ctypes.string_at(address, length) for address, length in pieces)
                self.events.append((offset, data))
        return self.inner.run(write, transfers, finished, meanwhile)

    def sync(self) -> int:
        self.events.append((-1, b""))
        return self.inner.sync()

    def close(self) -> None:
        self.inner.close()


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


def adapter_on(path: Path, durability: str, wrap: Callable[[Engine], Engine] | None = None) -> RawBlockAdapter:
    config = {"type": "raw_block", "path": str(path), "size_gb": 24 / 1024, "durability": durability}
    return RawBlockAdapter(config, wrap)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: many images are written."""
    made = Path(tempfile.mkdtemp(prefix="kvk-test-power-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def lived(folder: Path, durability: str, steps: int) -> tuple[bytes, list[Event], list[tuple[int, str, int]]]:
    """A life on a fresh medium: the image at its start, the history, and (events so far, what was said, number)."""
    path = folder / "kv.raw"
    first = adapter_on(path, durability)
    first.open()
    first.close()
    image = path.read_bytes()
    recorders: list[Recorder] = []

    def wrap(inner: Engine) -> Engine:
        recorders.append(Recorder(inner))
        return recorders[0]

    adapter = adapter_on(path, durability, wrap)
    adapter.open()
    acknowledged: list[tuple[int, str, int]] = []
    chance = random.Random(7)
    number, there = 0, []
    for _ in range(steps):
        batch = list(range(number, number + chance.randint(1, 6)))
        number = batch[-1] + 1
        results = adapter.store([Item(key(n), view(content(key(n), length_of(n))), 0) for n in batch])
        for n, result in zip(batch, results, strict=True):
            if result.outcome == Outcome.OK:
                acknowledged.append((len(recorders[0].events), "stored", n))
                there.append(n)
        if chance.random() < 0.3:
            n = there.pop(chance.randrange(len(there)))
            acknowledged.append((len(recorders[0].events), "going", n))
            adapter.delete([key(n)])
            acknowledged.append((len(recorders[0].events), "deleted", n))
    lost_to_eviction = {n for n, held in zip(there, adapter.lookup([key(n) for n in there]), strict=True) if not held}
    assert not lost_to_eviction, "the test's medium is too small for its steps"
    adapter.close()
    return image, recorders[0].events, acknowledged


def cut(image: bytes, events: list[Event], at: int, chance: random.Random) -> bytes:
    """The medium after the power went before event ``at``."""
    medium = bytearray(image)
    flushed = max((i for i in range(at) if events[i][0] == -1), default=0)
    for i, (offset, data) in enumerate(events[: at + 1]):
        if offset < 0:
            continue
        fate = chance.random()
        if i < flushed or (i < at and fate < 0.5):
            medium[offset : offset + len(data)] = data
        elif fate < 0.8:  # torn: some sectors came, not always the first ones; the last of them may be noise
            for start in range(0, len(data), SECTOR):
                if chance.random() < 0.5:
                    medium[offset + start : offset + start + SECTOR] = data[start : start + SECTOR]
            if chance.random() < 0.2:
                start = chance.randrange(0, len(data), SECTOR)
                medium[offset + start : offset + start + SECTOR] = chance.randbytes(SECTOR)
    return bytes(medium)


@pytest.mark.parametrize("durability", ["data", "none"])
def test_a_power_cut_leaves_each_object_valid_or_absent(folder: Path, durability: str) -> None:
    image, events, acknowledged = lived(folder, durability, steps=30)
    chance = random.Random(11)
    path = folder / "kv.raw"
    for _ in range(40):
        at = chance.randrange(1, len(events))
        path.write_bytes(cut(image, events, at, chance))
        adapter = adapter_on(path, durability)
        adapter.open()
        listed = {int.from_bytes(one.chunk, "little") for one, _ in adapter.list(b"", 10_000).objects}
        # `get` holds every OK against the oracle.
        good = {n for n in listed if get(adapter, key(n), length=length_of(n)) == [Outcome.OK]}
        if durability == "data":
            stored = {n for done, what, n in acknowledged if what == "stored" and done <= at}
            going = {n for done, what, n in acknowledged if what == "going" and done <= at}
            assert stored - going <= good, f"acknowledged and durable, and lost by a cut at event {at}"
        assert adapter.usage().objects == len(good)
        adapter.check_integrity()
        fresh = key(10_000)
        assert adapter.store([Item(fresh, view(content(fresh)), 0)])[0].outcome == Outcome.OK
        assert get(adapter, fresh) == [Outcome.OK]
        adapter.close()


def test_a_payload_is_flushed_before_its_header_and_both_before_the_answer(folder: Path) -> None:
    _, events, acknowledged = lived(folder, "data", steps=8)
    seal = b"KVKEEPR1"
    headers = [i for i, (offset, data) in enumerate(events) if offset >= 0 and data.startswith(seal)]
    assert len(headers) == len([1 for _, what, _ in acknowledged if what == "stored"])
    for i in headers:
        payload = max(j for j in range(i) if events[j][0] == events[i][0] + 4096)
        assert any(events[j][0] == -1 for j in range(payload, i)), "a header could be durable before its payload"
    for done, what, _ in acknowledged:
        if what == "stored":
            last = max(i for i in headers if i < done)
            assert any(events[j][0] == -1 for j in range(last, done)), "acknowledged before it was durable"
