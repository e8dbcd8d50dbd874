"""What every fault test ends with: the daemon's own account of itself adds up, and its log holds no surprise."""

from __future__ import annotations

import re
from typing import Any

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.faults.processes import eventually

_SURPRISE = re.compile(r"internal error|Traceback|AssertionError|admitting a client failed", re.I)


def surprises(daemon: Daemon) -> list[str]:
    return [line for line in daemon.output().splitlines() if _SURPRISE.search(line)]


def assert_at_rest(daemon: Daemon, kv: Client, *, within_s: float = 10.0) -> dict[str, Any]:
    """References = reservations = 0, the integrity check passes, nothing unexpected was logged.  Returns the stats."""

    def resting() -> bool:
        l1 = kv.stats()["l1"]
        return not (l1["references"] or l1["reserved_bytes"] or l1["lookups_waiting"])

    eventually(resting, within_s, say=lambda: kv.stats())
    answer = kv.check()
    assert answer == {"ok": True, "problem": ""}
    assert surprises(daemon) == []
    stats = kv.stats()
    assert (stats["health"], stats["reasons"]) == ("ok", [])
    return stats
