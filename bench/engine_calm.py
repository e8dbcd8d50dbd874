"""How much of the machine others use, so that a round in which they disturbed is not counted."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LOOK_S = 1.0
WAIT_S = 900.0


class Used(NamedTuple):
    """Seconds of CPU so far."""

    at: float
    machine: float  # by everybody, what a hypervisor took away included
    ours: float  # by this process and its descendants, also those that have ended

    @staticmethod
    def now() -> Used:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        ours = sum(map(_ticks, descendants(os.getpid())))
        return Used(time.monotonic(), (user + nice + system + irq + softirq + steal) * TICK_S, ours * TICK_S)


def others_since(before: Used) -> float:
    """Percent of all CPUs that others used."""
    now = Used.now()
    took = max(1e-9, now.at - before.at) * (os.cpu_count() or 1)
    return max(0.0, 100 * (now.machine - before.machine - (now.ours - before.ours)) / took)


def wait_calm(percent: float) -> bool:
    """Until others use less than this for a second; False if that did not happen in a quarter of an hour."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        before = Used.now()
        time.sleep(LOOK_S)
        if others_since(before) < percent:
            return True
    return False


def descendants(root: int) -> list[int]:
    """This process, its children, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))  # of itself, and of children that it has waited for
