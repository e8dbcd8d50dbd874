"""Lookups that wait for chunks: until somebody else has written them, or L2 has had its say, or the deadline.

    begin ─┬─► parked under the RESERVED entry that it needs next ──sealed or given up: wake──┐
           │        ▲                                                                         ▼
           │        └─────────────── it is blocked again ◄─────────────────────────────── look again ──► answered
           │                                                                             ▲    │
           └─► with the prefetch controller, which looks for what L1 lacks ──look_again──┘    │
                    ▲                                                                         │
                    └─────────────── L2 may have what is still missing ◄──────────────────────┘

A lookup that waits was answered ``pending``.  It gets exactly one more answer, a `LookupDone` and a write to its
client's eventfd, unless its handle ends before (`end`).  At the deadline, which it has from the beginning, it looks a
last time and is answered with what there is.

The record of a lookup that waits belongs to its handle: it waits for as long as ``handle.waiting is waiting``, and for
so long its owner pays for the hashes (``held_chunks``).  Here are the ways to find it: by the entry that it is parked
under (each of these is in ``arena.watch``), and by deadline.  In the heap of deadlines a record may outlive its lookup.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvkeep.daemon.sessions import LookupHandle, Session, distinct
from kvkeep.ipc import messages as m
from kvkeep.shm.arena import Arena, Prefix

U64 = npt.NDArray[np.uint64]
Send = Callable[[bytes, bytes, m.AnyReply], None]

_DEADLINES = 1024  # in the heap before it is looked through for those that are over
_NO_KEYS = np.empty((0, 4), dtype=np.uint64)


@dataclass(eq=False)
class Waiting:
    """A LOOKUP that waits."""

    handle: LookupHandle
    identity: bytes
    request_id: bytes
    keys: U64
    deadline: float
    on: int = -1  # the RESERVED entry it is parked under; -1 = none, or finished
    missed: set[bytes] = field(default_factory=set)  # chunks that L2 was asked for on its behalf, or could not give


class Prefetch(Protocol):
    """What may have what L1 lacks: see prefetch_controller.py."""

    @property
    def available(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def begin(self, waiting: Waiting) -> bool: ...

    def join(self, waiting: Waiting, entry: int) -> None: ...


class WaitingLookups:
    def __init__(
        self,
        arena: Arena,
        *,
        epoch: int,
        send: Send,
        notify: Callable[[Session], None],
        drop: Callable[[LookupHandle], object],
    ) -> None:
        """``drop`` ends the handle of a lookup that found nothing."""
        self.prefetch: Prefetch | None = None
        self._arena = arena
        self._counters = arena.counters
        self._epoch = epoch
        self._send, self._notify, self._drop = send, notify, drop
        self._parked: dict[int, dict[Waiting, None]] = {}  # by the entry that they wait for
        self._parked_count = 0
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._deadlines_limit = _DEADLINES

    @property
    def count(self) -> int:
        return self._parked_count + (self.prefetch.waiting if self.prefetch is not None else 0)

    # ---- one lookup --------------------------------------------------------------------------------------------------

    def may_help(self, prefix: Prefix, keys: U64) -> bool:
        """There is something to wait for: what comes next is being written, or L2 may have it."""
        if prefix.blocked_by >= 0:
            return True
        return self.prefetch is not None and self.prefetch.available and distinct(keys[:, 0])

    def begin(self, waiting: Waiting, blocked_by: int) -> None:
        """Its handle has what is there.  ``blocked_by``: the RESERVED entry that comes next, -1 = none."""
        handle = waiting.handle
        handle.waiting = waiting
        if handle.owner is not None:
            handle.owner.held_chunks += len(waiting.keys)
        self._schedule(waiting)
        if blocked_by >= 0:
            self._park(waiting, blocked_by)
        elif self.prefetch is not None:
            self.prefetch.begin(waiting)

    def end(self, handle: LookupHandle) -> None:
        """The handle is over or answered: it waits for nothing any more."""
        waiting, handle.waiting = handle.waiting, None
        if waiting is not None:
            self._detach(waiting)
            if handle.owner is not None:
                handle.owner.held_chunks -= len(waiting.keys)
            waiting.keys = _NO_KEYS  # its deadline may lie in the heap for a while yet

    def _park(self, waiting: Waiting, entry: int) -> None:
        waiting.on = entry
        self._parked.setdefault(entry, {})[waiting] = None
        self._parked_count += 1
        self._arena.watch.add(entry)
        if self.prefetch is not None:
            self.prefetch.join(waiting, entry)

    def _detach(self, waiting: Waiting) -> None:
        others = self._parked.get(waiting.on, {})
        if waiting in others:
            del others[waiting]
            self._parked_count -= 1
            if not others:
                del self._parked[waiting.on]
                self._arena.watch.discard(waiting.on)

    # ---- looking again -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look again for those who wait for an entry that was sealed or given up meanwhile."""
        while self._arena.settled:
            settled, self._arena.settled = self._arena.settled, []
            for entry in settled:
                self._arena.watch.discard(entry)
                woken = self._parked.pop(entry, {})
                self._parked_count -= len(woken)
                for waiting in woken:
                    self.look_again(waiting)

    def look_again(self, waiting: Waiting) -> None:
        self._look_again(waiting, time.monotonic() >= waiting.deadline)

    def _look_again(self, waiting: Waiting, final: bool) -> None:
        """Take what is there now, and answer unless there is something to wait for."""
        handle = waiting.handle
        waiting.on = -1
        if handle.waiting is not waiting or handle.owner is None:
            return  # released, or its owner died
        had = len(handle.references)
        prefix = self._arena.prefix(handle.namespace, waiting.keys)
        if len(prefix.entries) > had:
            new = prefix.entries[had:]
            if distinct(prefix.entries):
                self._arena.touch(handle.namespace, prefix.entries)
                handle.references.extend(new)
                handle.owner.held_chunks += len(new)
                self._counters["lookup_chunks_hit"] += len(new)
        if prefix.blocked_by >= 0 and not final:
            self._park(waiting, prefix.blocked_by)
            return
        incomplete = not final and len(handle.references) < len(waiting.keys)
        if incomplete and self.prefetch is not None and distinct(waiting.keys[:, 0]) and self.prefetch.begin(waiting):
            return
        self._answer(waiting, handle.owner)

    def _answer(self, waiting: Waiting, owner: Session) -> None:
        handle = waiting.handle
        self.end(handle)
        ready = len(handle.references)
        if not ready:
            self._drop(handle)
        self._send(waiting.identity, waiting.request_id, m.LookupDone(self._epoch, handle.id if ready else 0, ready))
        self._notify(owner)

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            waiting = heapq.heappop(self._deadlines)[2]
            if waiting.handle.waiting is waiting:
                self._detach(waiting)
                self._look_again(waiting, final=True)

    def _schedule(self, waiting: Waiting) -> None:
        heapq.heappush(self._deadlines, (waiting.deadline, waiting.handle.id, waiting))
        if len(self._deadlines) > self._deadlines_limit:  # most may be over already
            self._deadlines = [item for item in self._deadlines if item[2].handle.waiting is item[2]]
            heapq.heapify(self._deadlines)
            self._deadlines_limit = max(_DEADLINES, 2 * len(self._deadlines))
