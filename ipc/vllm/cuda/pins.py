"""Pinning the arena, so that the GPU copies straight to and from it: one thread, one `Registration` per attachment.

    attached ──▶ pin piece by piece, as the daemon reserves the memory ──▶ rest
                    └───────── detached, replaced, or closed ────────────────┴─▶ wait for the copies ─▶ unpin ─▶ forget

Pinning is slow (GBs per second), and the driver may hold up other calls, those of other processes too, for as long as
one takes.  So it is done in pieces, each followed by a pause as long as it took: no more than half of the time goes to
it.  Extents that are not in pinned pieces yet are copied through staging memory.  If a piece cannot be pinned, the
rest stays unpinned until the next attachment, with one log line.

A piece is unpinned when the arena's guard is revoked and no copy runs: the copy threads hold the guard around each copy
of the GPU.  The mapping is held until then, and so is never taken away under the driver.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvkeep.ipc.vllm.cuda.driver import Driver
from kvkeep.ipc.vllm.memory import Bytes, Levels

PIECE_BYTES = 256 << 20
RESERVE_POLL_S = 0.2  # while the daemon has not reserved the next piece
IDLE_POLL_S = 0.02
CLOSE_S = 0.2  # how long close() waits; unpinning a large arena goes on after it
GIB = 1 << 30

_stuck: list[Registration] = []  # what could not be unpinned is never unmapped


class PinnedRun(NamedTuple):
    """A run of memory of which every piece is a registration of its own."""

    address: int
    piece_bytes: int


class Registration:
    """The data segment of one attachment.  `run` belongs to the pin thread; `covers` may be asked by any thread that
    holds the arena's guard."""

    def __init__(self, driver: Driver, arena: Any, warn: Callable[[str], None]) -> None:
        """``arena``: a client_arena.Arena.  Its mapping is held, not the arena, whose lease ends with it."""
        self.data: Bytes = arena.data
        self._guard, self._reserved = arena.guard, arena.reserved
        self._driver, self._warn = driver, warn
        self.address = int(self.data.ctypes.data)
        self.pinned_run = PinnedRun(self.address, PIECE_BYTES)
        self._pinned = bytearray(-(-self.data.nbytes // PIECE_BYTES))  # a flag per piece
        self.pinned_bytes = 0
        self._over = threading.Event()

    def covers(self, address: int, size: int) -> bool:
        """Whether the GPU may copy to and from these bytes."""
        first = address - self.address
        if first < 0 or first + size > self.data.nbytes:
            return False
        step = self.pinned_run.piece_bytes
        return 0 not in self._pinned[first // step : (first + size - 1) // step + 1]

    def end(self) -> None:
        self._over.set()

    def run(self) -> None:
        if self._guard.revoked:  # its end came before us
            return
        try:
            self._pin()
        except Exception as error:
            self._warn(
                f"{self.pinned_bytes / GIB:.1f} of {self.data.nbytes / GIB:.1f} GiB of the arena are pinned, the rest "
                f"is copied more slowly: {error}; a limit on locked memory may be the reason"
            )
        self._over.wait()  # whatever happened: copies go on as long as the attachment does
        self._unpin()

    def _pin(self) -> None:
        for piece in range(len(self._pinned)):
            start, size = self._extent(piece)
            while self._reserved() < start + size:  # pinning what is not there would take it from the daemon
                if self._over.wait(RESERVE_POLL_S):
                    return
            if self._over.is_set():
                return
            began = time.monotonic()
            self._driver.register(self.address + start, size)
            took = time.monotonic() - began
            self.pinned_bytes += size
            self._pinned[piece] = 1
            self._over.wait(took)

    def _unpin(self) -> None:
        if not self.pinned_bytes:
            return
        self._guard.revoke()  # it is, unless we are closed before the client's thread came to it
        while self._guard.running:
            time.sleep(IDLE_POLL_S)
        for piece, pinned in enumerate(self._pinned):
            if pinned:
                start, size = self._extent(piece)
                self._pinned[piece] = 0
                try:
                    self._driver.unregister(self.address + start)
                    self.pinned_bytes -= size
                except Exception as error:
                    self._warn(f"a part of the arena stays pinned and mapped: {error}")

    def _extent(self, piece: int) -> tuple[int, int]:
        start = piece * self.pinned_run.piece_bytes
        return start, min(self.pinned_run.piece_bytes, self.data.nbytes - start)


class Pinner:
    def __init__(self, driver: Driver, warn: Callable[[str], None]) -> None:
        self._driver, self._warn = driver, warn
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Registration | None] = queue.SimpleQueue()
        self._wanted: Registration | None = None  # of the attachment that there is
        self._current: Registration | None = None  # that the thread is at; an older one while it is being unpinned
        self._over = False
        self._arena_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvkeep-pin", daemon=True)
        self._thread.start()

    def watch(self, arena: Any) -> None:
        """The arena of the attachment that has begun, or None: it is over.  Any thread; the same one twice is once, and
        one that is told of after its end changes nothing: another may have begun."""
        if arena is not None and arena.guard.revoked:
            return
        with self._lock:
            if self._wanted is not None and arena is not None and self._wanted.data is arena.data:
                return
            if self._wanted is not None:
                self._wanted.end()
                self._wanted = None
            self._arena_bytes = arena.data.nbytes if arena is not None else 0
            if arena is not None and not self._over:
                self._wanted = Registration(self._driver, arena, self._warn)
                self._queue.put(self._wanted)

    def pinned_at(self, address: int, size: int) -> PinnedRun | None:
        """The arena that these bytes are in, if the GPU may copy to and from them for as long as the
        caller holds the arena's guard; else None."""
        current = self._current
        return current.pinned_run if current is not None and current.covers(address, size) else None

    def levels(self) -> Levels:
        current = self._current
        return Levels(current.pinned_bytes if current is not None else 0, self._arena_bytes)

    def close(self) -> None:
        """Begin to unpin everything, after the last copy, and wait a moment for it."""
        self._end()
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _end(self) -> None:
        with self._lock:
            self._over = True
            if self._wanted is not None:
                self._wanted.end()
                self._wanted = None

    def _run(self) -> None:
        try:
            self._driver.enter_thread()
        except Exception as error:
            self._warn(f"nothing of the arena is pinned, so copies are slower: {error}")
            self._end()
        while (registration := self._queue.get()) is not None:
            self._current = registration
            registration.run()
            self._current = None
            if registration.pinned_bytes:
                _stuck.append(registration)
            del registration  # and with it the mapping
