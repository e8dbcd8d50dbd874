"""A real mover process, fed by the benchmark with the jobs that the daemon would give it.

Jobs have the daemon's sizes: stores of up to 64 MiB, at most PUTS of them open, loads of 16 MiB.  The clock runs from
the first job to the last answer.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvkeep.bench.common import BenchError
from kvkeep.daemon.loads import GET_BYTES, GET_CHUNKS
from kvkeep.daemon.movers import Mover, Phase
from kvkeep.daemon.store_controller import PUTS
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code

WAIT_S = 60.0
CLOSE_S = 10.0
NAMESPACE = bytes(32)


class Arena:
    """Shared memory as the daemon's, every page of it there: what is stored, and as much for what is loaded."""

    def __init__(self, content: memoryview) -> None:
        self.half = len(content)
        self.fd = os.memfd_create("kvkeep-bench", os.MFD_CLOEXEC)
        os.posix_fallocate(self.fd, 0, 2 * self.half)
        view = memoryview(mmap.mmap(self.fd, 2 * self.half))
        self.source, self.target = view[: self.half], view[self.half :]
        self.source[:] = content
        self.target[:] = bytes(self.half)

    def close(self) -> None:
        os.close(self.fd)


class Fed:
    """Context manager: the process runs and serves inside."""

    def __init__(self, config: dict[str, Any], arena: Arena, manifest: bytes = b"") -> None:
        self._arena = arena
        self._mover = Mover(
            0,
            config,
            data_fd=arena.fd,
            data_bytes=2 * arena.half,
            lease_fd=arena.fd,
            log_level="error",
            log_format="text",
        )
        self._mover.manifest_of = lambda _: manifest
        self._poll = select.poll()

    def __enter__(self) -> Fed:
        self._mover.start()
        for fd in self._mover.filenos():
            self._poll.register(fd, select.POLLIN)
        try:
            self._pump(lambda: self._mover.phase is Phase.SERVING, "serve")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.stop(time.monotonic() + CLOSE_S)
        self._mover.close()

    def store(self, keys: Sequence[bytes], size: int) -> float:
        """Seconds.  Object i lies at i * size in the source."""
        most = min(j.MAX_CHUNKS, max(1, j.MAX_CHUNK_BYTES // size))

        def job(start: int, stop: int) -> j.AnyJob:
            where = _where(keys, start, stop, size, 0)
            return j.Put(self._mover.next_id(), time.monotonic() + WAIT_S, *where, b"")

        return self._all(job, len(keys), most, PUTS)

    def load(self, keys: Sequence[bytes], size: int) -> float:
        """Seconds.  Object i goes to i * size in the target."""
        most = min(GET_CHUNKS, max(1, GET_BYTES // size))

        def job(start: int, stop: int) -> j.AnyJob:
            where = _where(keys, start, stop, size, self._arena.half)
            return j.Get(self._mover.next_id(), time.monotonic() + WAIT_S, *where)

        return self._all(job, len(keys), most, len(keys))

    def drop(self, keys: Sequence[bytes]) -> None:
        def job(start: int, stop: int) -> j.AnyJob:
            until = time.monotonic() + WAIT_S
            return j.Drop(self._mover.next_id(), until, NAMESPACE, 1, b"".join(keys[start:stop]))

        self._all(job, len(keys), j.MAX_CHUNKS, 1)

    def _all(self, job: Callable[[int, int], j.AnyJob], count: int, most: int, at_once: int) -> float:
        """Everything in jobs of at most ``most`` objects, ``at_once`` of them open."""
        codes: list[int] = []
        began = time.perf_counter()
        for start in range(0, count, most):
            if self._mover.open_jobs >= at_once:
                self._pump(lambda: self._mover.open_jobs < at_once, "answer")
            self._mover.submit(job(start, min(count, start + most)), codes.extend)
        self._pump(lambda: not self._mover.open_jobs, "answer")
        seconds = time.perf_counter() - began
        if bad := [code for code in codes if code != Code.OK]:
            raise BenchError(f"{len(bad)} of {count} objects failed: {Code(bad[0]).name}")
        return seconds

    def _pump(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            self._poll.poll(100)
            self._mover.on_child()
            self._mover.receive()
            if time.monotonic() > until:
                trouble = "; ".join(self._mover.reasons()) or "nothing is known to be wrong"
                raise BenchError(f"the mover did not {what} within {WAIT_S:g} s: {trouble}")


def _where(
    keys: Sequence[bytes], start: int, stop: int, size: int, base: int
) -> tuple[bytes, int, bytes, int, int, bytes]:
    offsets = (base + np.arange(start, stop, dtype="<u8") * size).astype("<u8").tobytes()
    return NAMESPACE, 1, b"".join(keys[start:stop]), size, size, offsets
