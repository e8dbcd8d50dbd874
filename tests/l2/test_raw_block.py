"""raw_block on a file: everything that every adapter must do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.l2.adapter import Adapter, Key
from kvkeep.l2.raw_block import RawBlockAdapter
from tests.l2.conformance import AdapterConformance, Medium


class Checked(RawBlockAdapter):
    """Looks for lost and doubly used slots whenever it is closed."""

    def close(self) -> None:
        self.check_integrity()
        super().close()


class RawFile(Medium):
    def __init__(self, folder: Path, io: str, durability: str) -> None:
        self.path, self.io, self.durability = folder / "kv.raw", io, durability
        self.size = 0

    def adapter(self, capacity: int) -> Adapter:
        if self.size and capacity != self.size:
            raise NotImplementedError
        self.size = capacity
        return Checked({
            "type": "raw_block", "path": str(self.path), "size_gb": capacity / (1 << 30),
            "io": self.io, "durability": self.durability,
        })  # fmt: skip

    def flip(self, adapter: Adapter, key: Key, part: str, at: int) -> None:
        assert isinstance(adapter, RawBlockAdapter)
        offset = adapter.slot_of(key)
        assert offset is not None
        offset += at if part == "header" else adapter.geometry.block + at
        fd = os.open(self.path, os.O_RDWR)
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ 4]), offset)
        os.fsync(fd)
        os.close(fd)


@pytest.fixture(params=["auto-data", "threads-none"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> RawFile:
    return RawFile(tmp_path, *request.param.split("-"))


class TestRawBlock(AdapterConformance):
    pass
