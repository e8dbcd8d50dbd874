"""A circuit breaker: after some failures in a row a medium is left alone, and asked by a probe whether it works again.

In a row means: without a success of the same kind of job in between.  That something is there can often be told without
the medium, so a lookup that works says nothing of loads that fail.

CLOSED --FAILURES failures in a row--> OPEN --pause over: probe()--> HALF_OPEN --it worked--> CLOSED
                                         ^                              |
                                         +--it failed, pause doubled----+   (probe_at_once: pause over)
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable

FAILURES = 3
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0


class Circuit(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    def __init__(self) -> None:
        self.circuit = Circuit.CLOSED
        self.opened = 0  # times, for the statistics
        self.probe_at = 0.0  # while OPEN: when to probe
        self.failed_probes = 0  # in a row
        self._failures: Counter[Hashable] = Counter()  # in a row, by kind of job
        self._pause = PAUSE_FIRST_S

    @property
    def closed(self) -> bool:
        return self.circuit is Circuit.CLOSED

    def success(self, kind: Hashable) -> None:
        """A job got an answer that speaks for the medium."""
        if self.closed:
            self._failures.pop(kind, None)

    def failure(self, kind: Hashable, now: float) -> bool:
        """A job failed by a fault of the medium, or got no answer.  True = the circuit is open from now on."""
        self._failures[kind] += 1
        if self.closed and self._failures.total() >= FAILURES:
            self._open(now)
            self.opened += 1
            return True
        return False

    def probing(self) -> None:
        self.circuit = Circuit.HALF_OPEN

    def probed(self, works: bool, now: float) -> None:
        if works:
            self.reset()
        elif not self.closed:
            self.failed_probes += 1
            self._pause = min(PAUSE_MAX_S, self._pause * 2)
            self._open(now)

    def reset(self) -> None:
        self.circuit = Circuit.CLOSED
        self._failures.clear()
        self.failed_probes = 0
        self._pause = PAUSE_FIRST_S

    def probe_at_once(self, now: float) -> None:
        """There is reason to hope; if not, the pauses go on growing from where they were."""
        self.circuit, self.probe_at = Circuit.OPEN, now

    def _open(self, now: float) -> None:
        self.circuit = Circuit.OPEN
        self.probe_at = now + self._pause
