"""Control's own memory.  What its books do not explain is held by RPC connections, and is taken back from them.

libzmq bounds neither the bytes of a message whose end has not come nor those of replies that a peer does not read (see
ipc/server.py), and shows neither.  What can be seen is how much memory the process has that is no file and no shared
memory: some at the start, so much for each entry, handle and connection, and the rest, which should not grow.

    within ROOM_BYTES ──grown beyond, also after malloc gave back what it could──► BUSY_LOOKS at who is busy ◄───┐
        ▲                                                                              ▼                         │
        │                                                  the busiest are cut ──still beyond, BUSY_CUTS times───┘
        │                                                                              ▼ still beyond
        └──── it is not theirs: this much is accepted ◄──still beyond── all connections are cut

Busy are those on which bytes wait at that moment: whoever makes the memory grow mostly is, a client that behaves rarely
is.  The clients behind cut connections attach again, so that nothing stays theirs that they do not know of.

What is accepted sinks again as soon as less is held.  An attacker may come back, but never holds more than this, and
what arrives between two looks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable

from kvkeep.shm.layout import PAGE

ROOM_BYTES = 128 << 20  # requests and replies that are on their way, and what the books leave out
ENTRY_BYTES = 128  # index, order and states of a chunk
ADAPTER_BYTES = 24  # ... and what is known of it for each L2 adapter
HANDLE_BYTES = 2048  # of a lookup or a store
CONNECTION_BYTES = 32 << 10  # of libzmq, with empty queues
LOOK_S = 0.25
GROWING_BYTES = 8 << 20  # since the last look, then the next one is
LOOK_SOON_S = 0.05
BUSY_LOOKS, BUSY_LOOK_S = 10, 0.001
BUSY_CUTS = 3
SETTLE_S = 0.05  # after a cut: libzmq's thread has to free what it held
TELL_S = 60.0  # so long a cut is a reason in the health

log = logging.getLogger("kvkeep.memory")


class OwnMemory:
    """Bytes of this process that are in memory, and neither of a file nor shared.  The file stays open: this is asked
    often, also by a daemon that is idle."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def __call__(self) -> int:
        _, resident, shared, *_ = os.pread(self._fd, 256, 0).split()
        return (int(resident) - int(shared)) * PAGE


def give_back() -> None:
    """Have malloc give back what nobody uses, where it is able to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MemoryGuard:
    """``explained``: bytes that the books explain.  ``note_busy`` looks which connections are; ``cut(only_busy)`` ends
    connections, and says how many."""

    def __init__(
        self,
        *,
        explained: Callable[[], int],
        note_busy: Callable[[], None],
        cut: Callable[[bool], int],
        counters: Counter[str],
        measure: Callable[[], int] | None = None,
        give_back: Callable[[], None] = give_back,
    ) -> None:
        self._explained, self._note_busy, self._cut, self._counters = explained, note_busy, cut, counters
        self._measure, self._give_back = measure or OwnMemory(), give_back
        self._most_explained = 0  # memory of handles that ended mostly stays with the process
        self._accepted = self._last = self._rest()
        self._busy_looks = self._cuts = 0  # since it was too much
        self._next = 0.0
        self._told_until = 0.0
        self.reason = ""  # for the health

    def next_look(self) -> float:
        return self._next

    def look(self, now: float) -> None:
        """Does nothing before its time."""
        if now < self._next:
            return
        if now >= self._told_until:
            self.reason = ""
        rest = self._rest()
        self._accepted = min(self._accepted, rest)
        if rest - self._accepted > ROOM_BYTES:
            self._give_back()
            rest = self._rest()
        if rest - self._accepted > ROOM_BYTES:
            self._relieve(rest, now)
        else:
            self._busy_looks = self._cuts = 0
            self._next = now + (LOOK_SOON_S if rest - self._last > GROWING_BYTES else LOOK_S)
        self._last = rest

    def _rest(self) -> int:
        self._most_explained = max(self._most_explained, self._explained())
        return self._measure() - self._most_explained

    def _relieve(self, rest: int, now: float) -> None:
        if self._cuts > BUSY_CUTS:
            log.info("%d MiB more than the books explain are held, not by RPC connections", rest >> 20)
            self._accepted, self._cuts = rest, 0
            self._next = now + LOOK_S
            return
        if self._cuts < BUSY_CUTS and self._busy_looks < BUSY_LOOKS:
            self._note_busy()
            self._busy_looks += 1
            self._next = now + BUSY_LOOK_S
            return
        ended = self._cut(self._cuts < BUSY_CUTS)
        self._cuts += 1
        self._busy_looks = 0
        self._next = now + SETTLE_S
        if not ended:
            return
        self._counters["rpc_connections_cut"] += ended
        self._told_until = now + TELL_S
        self.reason = (
            f"{self._counters['rpc_connections_cut']} RPC connections were cut so far, as requests without an end or "
            "replies that nobody reads filled the memory"
        )
        log.warning("%d MiB more than the books explain are held: cut %d RPC connections", rest >> 20, ended)
