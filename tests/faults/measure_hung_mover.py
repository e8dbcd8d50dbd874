"""Does a hung mover slow down what control does for others?  python -m tests.faults.measure_hung_mover

One daemon, one client that looks up chunks of L1 all the time, another that keeps giving its mover loads and stores at
a fixed pace. Blocks alternate: the mover works, the mover is stopped (SIGSTOP, and continued after the block, before
its heartbeat is missed). Prints the latencies of both kinds of block and the ratio of their 99th percentiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.daemon.l2_helpers import adapter, attach, chain, payload, register, row, store, stored

SIZE = 65536
LENGTH = 16
PACE_S = 0.02  # between two rounds of the load


class Pressure:
    """A client that looks for chunks that only L2 has, and stores new ones, at a fixed pace."""

    def __init__(self, daemon: Daemon) -> None:
        self.rounds = 0
        self.longest = 0.0
        self._end = threading.Event()
        self._daemon = daemon
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with Client.attach(self._daemon.run_dir, name="pressure", deadline_s=60) as kv:
            ns = register(kv, SIZE)
            data = [payload(key, SIZE) for key in chain(7, 4)]
            number = 1_000_000
            while not self._end.wait(PACE_S):
                began = time.monotonic()
                with kv.lookup(ns, chain(500 + self.rounds % 20, LENGTH), wait_s=0.01, deadline_s=2):
                    pass
                kv.store(ns, chain(number, 4), data, deadline_s=1)
                number, self.rounds = number + 1, self.rounds + 1
                self.longest = max(self.longest, time.monotonic() - began)

    def end(self) -> None:
        self._end.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "a client is stuck"


def prepare(daemon: Daemon, kv: Client) -> None:
    """Chains that only L2 has."""
    ns = register(kv, SIZE)
    for number in range(20):
        store(kv, ns, chain(500 + number, LENGTH), SIZE)
        stored(kv, LENGTH * (number + 1))
    for number in range(20):
        kv.delete(ns, chain(500 + number, LENGTH), l1_only=True)


def measure(daemon: Daemon, blocks: int, seconds: float) -> dict[str, object]:
    """``blocks`` pairs of blocks of so many seconds."""
    latencies: dict[str, list[float]] = {"working": [], "stopped": []}
    pairs: list[float] = []
    with attach(daemon) as kv, attach(daemon) as fast:
        prepare(daemon, kv)
        ns, keys = register(fast, SIZE), chain(1, LENGTH)
        pressure = Pressure(daemon)
        try:
            for number in range(blocks):
                p99 = {}
                for kind in ("working", "stopped") if number % 2 else ("stopped", "working"):
                    store(fast, ns, keys, SIZE)  # if it was evicted
                    pid = row(kv)["pid"]
                    if kind == "stopped":
                        os.kill(pid, signal.SIGSTOP)
                    block = []
                    until = time.monotonic() + seconds
                    while time.monotonic() < until:
                        began = time.perf_counter()
                        with fast.lookup(ns, keys) as found:
                            block.append(time.perf_counter() - began)
                            assert found.ready == LENGTH, "L1 has them"
                        time.sleep(0.0005)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                    latencies[kind] += block
                    p99[kind] = percentile(block, 99)
                    settle(kv)
                pairs.append(p99["stopped"] / p99["working"])
        finally:
            pressure.end()
    us = {k: {p: round(percentile(v, p) * 1e6, 1) for p in (50, 90, 99)} for k, v in latencies.items()}
    return {
        "lookups": {kind: len(all_) for kind, all_ in latencies.items()},
        "us": us,
        "ratio_p99": round(us["stopped"][99] / us["working"][99], 3),
        "ratio_p50": round(us["stopped"][50] / us["working"][50], 3),
        "ratio_p99_of_pairs_median": round(statistics.median(pairs), 3),
        "pressure_rounds": pressure.rounds,
        "pressure_longest_s": round(pressure.longest, 3),
    }


def settle(kv: Client) -> None:
    """The mover works again, and what was queued is done."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        about = row(kv)
        if about["phase"] == "serving" and about["breaker"] == "closed" and about["bytes_queued"] == 0:
            return
        time.sleep(0.02)


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15, help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each block; below the 10 s of the heartbeat")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvk-hung-") as root:
        name = unique_name("hung")
        daemon = Daemon(Path(root) / name, name, adapter(type="fs", base_path=f"{root}/fs", capacity_gb=0.5), l1_mib=64)
        try:
            print(json.dumps(measure(daemon.start(), args.blocks, args.seconds)))
        finally:
            daemon.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
