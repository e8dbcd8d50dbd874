"""The fs adapter passes the suite, on real files, with and without O_DIRECT, O_TMPFILE, striping and sharing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.l2.adapter import Adapter, Key
from kvkeep.l2.fs import FsAdapter
from kvkeep.l2.fs_io import PAGE, FileIO
from tests.l2.conformance import AdapterConformance, Medium


class NamedTemps(FileIO):
    """A file system without O_TMPFILE."""

    def open(self, path: str, flags: int, *, dir_fd: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return super().open(path, flags, dir_fd=dir_fd)


def file_of(adapter: Adapter, key: Key) -> Path:
    assert isinstance(adapter, FsAdapter)
    root, name = adapter._place(key)
    return Path(root.path, "objects", name.hex()[:2], name.hex())


def flip(path: Path, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)


class FsMedium(Medium):
    def __init__(self, base: Path, io: Callable[[], FileIO] = FileIO, roots: int = 1, **config: Any) -> None:
        self.paths = [str(base / f"root{n}") for n in range(roots)]
        self.io, self.config = io, config

    def adapter(self, capacity: int) -> FsAdapter:
        config = {"type": "fs", "base_path": self.paths, "capacity_gb": capacity / (1 << 30), **self.config}
        return FsAdapter(config, self.io())

    def flip(self, adapter: Adapter, key: Key, part: str, at: int) -> None:
        flip(file_of(adapter, key), at + (PAGE if part == "payload" else 0))

    def vanish(self, adapter: Adapter, key: Key) -> bool:
        file_of(adapter, key).unlink()
        return True


class TestFs(AdapterConformance):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return FsMedium(tmp_path)


class TestFsOtherwise(AdapterConformance):
    """Everything the other way round: tmpfs, striped, shared, page cache, named temporaries, one thread."""

    @pytest.fixture
    def medium(self) -> Iterator[Medium]:
        with tempfile.TemporaryDirectory(prefix="kvk-test-", dir="/dev/shm") as base:
            yield FsMedium(Path(base), NamedTemps, 3, shared=True, direct_io="off", io_threads=1)
