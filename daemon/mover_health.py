"""What is known of one mover and its medium, for people: what is wrong with it (`Health`), and numbers (`Figures`).

A reason why health is degraded lasts

    cannot be opened       until it is open              left alone   until the circuit is closed again (breaker.py)
    is still being opened  until it is open              full         until a store has worked
    some jobs failed       for TROUBLE_S after the last of them, or until the medium works again after it was left alone

Nothing is decided here: the mover tells what happened, and whether it is given jobs is the mover's and its breaker's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from kvkeep.daemon.breaker import Breaker
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code

TROUBLE_S = 10.0  # a failure is a reason for this long: longer than status is usually asked for
LONG_START_S = 15.0  # an adapter that opens for longer than this is a reason to say so
TOTALS = (
    "chunks_stored",
    "bytes_stored",
    "chunks_loaded",
    "bytes_loaded",
    "chunks_touched",
    "finds",
    "stores_shed",
    "jobs_late",
)
_ILLS = j.FAULTS | {Code.CORRUPT}  # worth a word in the health


class Health:
    """``who``: the mover and the adapter's label, as reasons name them.  Times are of time.monotonic()."""

    def __init__(self, who: str, breaker: Breaker, now: float) -> None:
        """It is being opened."""
        self.trouble = ""  # what the adapter said when it could not be opened
        self._who = who
        self._breaker = breaker
        self._opening_since: float | None = now  # None = it is open
        self._fault = ""  # the last; "" = no answer
        self._full = ""
        self._ill, self._ill_until = "", 0.0  # what failed lately

    @property
    def fault(self) -> str:
        """Of those that opened the circuit, the last."""
        return self._fault or "no answer in time"

    # ---- what happens ------------------------------------------------------------------------------------------------

    def opening(self, now: float) -> None:
        """A new process is to open it."""
        self._opening_since = now

    def opened(self) -> None:
        self.trouble, self._opening_since = "", None

    def answered(self, job: j.AnyJob, seen: Set[int], answer: j.Answer, now: float) -> None:
        """A job that took the medium was answered, with these codes."""
        if isinstance(job, j.Probe):
            self._fault = answer.detail or self._fault
            return
        if seen & j.FAULTS:
            self._fault = answer.detail or (os.strerror(answer.errno) if answer.errno else "")
        if seen & _ILLS:
            self._fell_ill(job, answer.detail or self._fault, now)
        if isinstance(job, j.Put):
            if Code.NO_SPACE in seen:
                self._full = answer.detail or "the medium is full"
            elif Code.OK in seen:
                self._full = ""

    def late(self, job: j.AnyJob, now: float) -> None:
        """A job is overdue."""
        self._fault = ""
        if not isinstance(job, j.Probe | j.Measure | j.Manage):
            self._fell_ill(job, "no answer in time", now)

    def recovered(self) -> None:
        """It works again after it was left alone."""
        self._ill_until = 0.0

    def _fell_ill(self, job: j.AnyJob, how: str, now: float) -> None:
        what = {j.Put: "stores", j.Get: "loads", j.Drop: "removals"}.get(type(job), "lookups")
        self._ill, self._ill_until = f"some {what} failed: {how or 'nobody knows why'}", now + TROUBLE_S

    # ---- what it says ------------------------------------------------------------------------------------------------

    def next_end(self, now: float) -> float | None:
        """When a reason ends by itself; None = none does."""
        return self._ill_until if now < self._ill_until else None

    def reasons(self, now: float) -> list[str]:
        """Why health is degraded; empty when all is well."""
        found = []
        if self.trouble:
            found.append(self.trouble)
        elif self._opening_since is not None and now - self._opening_since > LONG_START_S:
            found.append("it is still being opened")
        if not self._breaker.closed:
            found.append(f"left alone, it does not work: {self.fault}")
        if self._full:
            found.append(f"stores fail: {self._full}")
        if self._breaker.closed and now < self._ill_until:
            found.append(self._ill)
        return [f"{self._who}: {reason}" for reason in found]


class Figures:
    """Counted since the daemon started, over all processes of the mover."""

    def __init__(self) -> None:
        self.usage = j.Usage(0, 0, 0)  # of the medium, as last told
        self.adapter: dict[str, int] = {}  # the adapter's own counters, as last told
        self.failures: Counter[str] = Counter()  # chunks, by what went wrong
        self.totals: Counter[str] = Counter()  # TOTALS, counted by whoever makes the jobs

    def answered(self, answer: j.Answer) -> None:
        if answer.usage is not None:
            self.usage = answer.usage
        if answer.counters is not None:
            self.adapter = answer.counters

    def ended(self, job: j.AnyJob, codes: Sequence[int]) -> None:
        """A job is over, with one code per chunk.  That somebody else is at a chunk just now is no failure; nor is it
        one of the medium that it does not have what was asked for, or was asked too late."""
        if isinstance(job, j.Measure | j.Probe | j.Manage):
            return
        asking = isinstance(job, j.Find | j.Touch)
        for code in codes:
            if (code in j.FAULTS) if asking else (code not in (Code.OK, Code.BUSY)):
                self.failures[Code(code).name.lower()] += 1

    def row(self) -> dict[str, Any]:
        """For the status document."""
        return {
            "bytes_used": self.usage.bytes_used,
            "bytes_limit": self.usage.bytes_limit,
            "objects": self.usage.objects,
            "failures": dict(self.failures),
            "adapter": self.adapter,
            **{name: self.totals[name] for name in TOTALS},
        }
