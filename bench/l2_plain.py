"""The plain loops that L2 is compared with: threads that pread and pwrite whole objects with O_DIRECT, nothing else.

    overwrite   pwrite into one file whose blocks have all been written before
    create      a new file for each object: open, pwrite, close
    read        pread from the one file
    read_files  open, pread, close

With ``sync_bytes`` there is an fdatasync after so many bytes (of the file just written in `create`), by the thread that
wrote the last of them while the others go on, so that as much is durable as with the adapter beside it.

The threads exist before the clock starts, and take objects from one queue.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

STEP = 8 << 20


class Plain:
    """Context manager.  ``source`` and ``target`` are page-aligned and as long as all objects together."""

    def __init__(self, folder: Path, source: memoryview, target: memoryview) -> None:
        self._folder, self._source, self._target = folder, source, target
        self._fd = -1

    def __enter__(self) -> Plain:
        self._fd = os.open(self._folder / "plain", os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        prewrite(self._fd, self._source, len(self._source))
        (self._folder / "files").mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def overwrite(self, size: int, depth: int, sync_bytes: int = 0) -> float:
        group = max(1, sync_bytes // size)
        written = itertools.count(1)

        def work(i: int) -> None:
            whole(os.pwrite(self._fd, self._source[i * size : (i + 1) * size], i * size), size)
            if sync_bytes and next(written) % group == 0:
                os.fdatasync(self._fd)

        return together(len(self._source) // size, depth, work)

    def create(self, size: int, depth: int, sync_bytes: int = 0) -> float:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC

        def work(i: int) -> None:
            fd = os.open(self._file(i), flags, 0o600)
            try:
                whole(os.pwrite(fd, self._source[i * size : (i + 1) * size], 0), size)
                if sync_bytes:
                    os.fdatasync(fd)
            finally:
                os.close(fd)

        return together(len(self._source) // size, depth, work)

    def read(self, size: int, depth: int) -> float:
        def work(i: int) -> None:
            whole(os.preadv(self._fd, [self._target[i * size : (i + 1) * size]], i * size), size)

        return together(len(self._source) // size, depth, work)

    def read_files(self, size: int, depth: int) -> float:
        def work(i: int) -> None:
            fd = os.open(self._file(i), os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                whole(os.preadv(fd, [self._target[i * size : (i + 1) * size]], 0), size)
            finally:
                os.close(fd)

        return together(len(self._source) // size, depth, work)

    def remove_files(self) -> None:
        for path in (self._folder / "files").iterdir():
            path.unlink()

    def _file(self, i: int) -> Path:
        return self._folder / "files" / f"{i}"


def prewrite(fd: int, source: memoryview, length: int, start: int = 0) -> None:
    """Every block of ``fd`` from ``start`` to ``length`` gets content, so that no later write has to find space."""
    for at in range(start, length, STEP):
        count = min(STEP, length - at)
        whole(os.pwrite(fd, source[:count], at), count)
    os.fsync(fd)


def whole(done: int, size: int) -> None:
    if done != size:
        raise OSError(f"{done} of {size} bytes were moved")


def together(count: int, depth: int, work: Callable[[int], None]) -> float:
    """``work`` for 0..count by ``depth`` threads: the seconds.  Raises what the first of them raised."""
    queue = iter(range(count))  # next() of it is atomic
    go = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        go.wait()
        try:
            for i in queue:
                work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(depth, count))]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    go.set()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise errors[0]
    return seconds
