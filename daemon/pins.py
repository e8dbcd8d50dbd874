"""What administrators keep in L1: prefixes, each for a time, however much else wants the room.

A pin owns one reference on each of its chunks, until UNPIN or its end, whoever asked for it and however that one ends.
Nothing here looks at all pins for one of them: their bytes are counted as they come and go, and their ends lie in a
heap.  The end of one that was unpinned may lie there for a while yet.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.daemon.sessions import References

END_STEP = 256  # per round of the control loop
_ENDS = 1024  # of unpinned ones in the heap, or as many as there are pins, before it is looked through


@dataclass(eq=False)
class Pinned:
    references: References
    nbytes: int
    expires: float


class Pins:
    def __init__(self) -> None:
        self.nbytes = 0  # of all pins; what is pinned twice counts twice
        self._pins: dict[int, Pinned] = {}
        self._ends: list[tuple[float, int]] = []
        self._ids = itertools.count(secrets.randbits(48))

    def __len__(self) -> int:
        return len(self._pins)

    def held(self) -> Iterator[References]:
        return (pinned.references for pinned in self._pins.values())

    def add(self, references: References, nbytes: int, expires: float) -> int:
        """Takes over ``references``, on ``nbytes`` bytes of chunks.  Returns the pin's id."""
        pin = next(self._ids)
        self._pins[pin] = Pinned(references, nbytes, expires)
        self.nbytes += nbytes
        heapq.heappush(self._ends, (expires, pin))
        if len(self._ends) > 2 * len(self._pins) + _ENDS:
            self._ends = [(pinned.expires, pin) for pin, pinned in self._pins.items()]
            heapq.heapify(self._ends)
        return pin

    def remove(self, pin: int) -> int | None:
        """Returns how many references went; None = there is no such pin (any more)."""
        pinned = self._pins.pop(pin, None)
        if pinned is None:
            return None
        self.nbytes -= pinned.nbytes
        return pinned.references.trim(0)

    def next_end(self) -> float | None:
        return self._ends[0][0] if self._ends else None

    def end(self, now: float) -> None:
        """Remove those whose time is over; if they are very many, the others in the next round."""
        for _ in range(END_STEP):
            if not self._ends or self._ends[0][0] > now:
                return
            self.remove(heapq.heappop(self._ends)[1])
