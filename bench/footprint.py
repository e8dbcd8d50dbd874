"""What the daemon costs at rest: memory, CPU, and the time to start.

    rss_mb             memory of the process without the arena's pages, right after the start (RssAnon + RssFile)
    bytes_per_entry    growth of its private memory (RssAnon) from none to a million entries, per entry: what an entry
                       costs beyond its record in the shared table
    idle_cpu_percent   of one core, with a client attached and a million entries, over at least 20 s without a request
    start_seconds      from exec until a client has attached and pinged, with 1 GiB of L1

The references are a bare Python process that imports numpy and zmq, the record in the shared table, and that same bare
process asleep.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvkeep.bench.chains import SMALL_SHARD, arena_for, fill, manifest
from kvkeep.bench.common import BenchError, Daemon, Report, arguments, percentiles, require_memory, run
from kvkeep.bench.restart import bare_python, cold_start
from kvkeep.ipc.client import Client
from kvkeep.shm.layout import ENTRY_BYTES

ENTRIES = (100_000, 1_000_000)
IDLE_S = 24.0
SETTLE_S = 2.0
START_RUNS = 10
START_BYTES = 1 << 30
BARE = "python that imports numpy and zmq"


def main(argv: Sequence[str] | None = None) -> int:
    return run("footprint", measure, arguments("footprint", __doc__ or "", argv))


def measure(args: argparse.Namespace) -> None:
    report = Report(args, "footprint of the daemon")
    if report.wanted(args, "start_seconds"):
        runs = 2 if args.quick else START_RUNS
        size = (64 << 20) if args.quick else START_BYTES
        pairs = [(bare_python(), cold_start(size)) for _ in range(runs)]
        p50, p99 = percentiles([start for _, start in pairs])
        bare, _ = percentiles([bare for bare, _ in pairs])
        report.case(
            "start_seconds", p50, "s", reference=bare, reference_name=BARE, bar="value <= 0.5", p99=p99, runs=runs
        )
    if report.wanted(args, "rss_mb", "bytes_per_entry", "idle_cpu_percent"):
        _at_rest(report, args)


def _at_rest(report: Report, args: argparse.Namespace) -> None:
    populations = (500, 1000) if args.quick else ENTRIES
    per_entry: dict[str, float] = {}
    for entries in populations:
        last = entries == populations[-1]
        size, flag = arena_for(entries)
        if problem := require_memory(size):
            for name, unit in (("rss_mb", "MB"), ("bytes_per_entry", "B"), ("idle_cpu_percent", "%")):
                report.missing(name, unit, problem)
            return
        with Daemon(size, flag) as daemon, _sleeping_python() as bare:
            daemon.start()
            with daemon.attach() as client:
                if last:
                    _resident(report, daemon, bare)
                per_entry[f"with_{entries}"] = _growth(report, daemon, client, entries, args.seed)
                if not last:
                    continue
                report.case(
                    "bytes_per_entry",
                    per_entry[f"with_{entries}"],
                    "B",
                    reference=float(ENTRY_BYTES),
                    reference_name="its record in the shared table",
                    bar="value <= 300",
                    entries=entries,
                    **per_entry,
                )
                if report.wanted(args, "idle_cpu_percent"):
                    _idle(report, daemon, bare, entries, 0.5 if args.quick else IDLE_S)


def _resident(report: Report, daemon: Daemon, bare: int) -> None:
    memory = _private_memory(daemon.pid)
    report.case(
        "rss_mb",
        sum(memory) / 1e6,
        "MB",
        reference=sum(_private_memory(bare)) / 1e6,
        reference_name=BARE,
        bar="value <= 60",
        anonymous_mb=memory[0] / 1e6,
        file_mb=memory[1] / 1e6,
        torch_loaded=_maps_name(daemon.pid, "torch"),
    )


def _growth(report: Report, daemon: Daemon, client: Client, entries: int, seed: int) -> float:
    """Bytes of private memory per entry that filling an arena of this capacity adds."""
    report.note(f"filling {entries} entries")
    daemon.wait_reserved(client)
    namespace = client.register(manifest("footprint"), shard_bytes=SMALL_SHARD)
    time.sleep(SETTLE_S / 4)
    start = _private_memory(daemon.pid)[0]
    fill(client, namespace, entries, np.random.default_rng(seed))
    time.sleep(SETTLE_S / 4)
    there = int(client.stats()["l1"]["entries"])
    if there != entries:
        raise BenchError(f"{there} entries are in the arena, {entries} were stored")
    return (_private_memory(daemon.pid)[0] - start) / entries


def _idle(report: Report, daemon: Daemon, bare: int, entries: int, seconds: float) -> None:
    report.note(f"resting {seconds:g} s")
    time.sleep(min(SETTLE_S, seconds))
    begin, before, bare_before = time.monotonic(), _cpu_seconds(daemon.pid), _cpu_seconds(bare)
    time.sleep(seconds)
    took = time.monotonic() - begin
    report.case(
        "idle_cpu_percent",
        100 * (_cpu_seconds(daemon.pid) - before) / took,
        "%",
        reference=100 * (_cpu_seconds(bare) - bare_before) / took,
        reference_name=f"{BARE}, asleep",
        bar="value <= 0.2",
        seconds=took,
        entries=entries,
        clients=1,
    )


@contextmanager
def _sleeping_python() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import numpy, zmq, sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _private_memory(pid: int) -> tuple[int, int]:
    """(RssAnon, RssFile) in bytes.  The arena's pages are RssShmem."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    anonymous, mapped = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    return anonymous, mapped


def _maps_name(pid: int, name: str) -> bool:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        return name in file.read()


def _cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond (the usual fields of /proc count in ticks of 10 ms)."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e9
