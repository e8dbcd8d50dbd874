"""What a restart costs: a killed daemon's arena comes back, and a new one is there at once whatever its size.

    warm/<entries>   SIGKILL with so many sealed entries, and a new daemon at once: seconds from its exec to the first
                     hit, with checked bytes, of a client that attached again by itself.  ``kept``: share of the entries
                     that are found after it, by the daemon's count and by looking up every chain (the smaller one).
                     ``after_a_pause``: the same with two seconds between kill and start.
    cold/<size>      no arena yet: seconds from exec until a client has attached and pinged.  The memory is reserved
                     after that, in the background.

The reference of a warm start is a cold start of the same arena, in the same run: the difference is the adoption, and
the client's pause between two attempts to attach.  The reference of a cold start is a bare Python process that imports
numpy and zmq and ends.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvkeep.bench.chains import SMALL_SHARD, arena_for, content, fill, manifest
from kvkeep.bench.common import BenchError, Daemon, Report, arguments, percentiles, require_memory, run
from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.messages import HASH_BYTES

POPULATIONS = {"100k": (100_000, "value <= 1"), "1m": (1_000_000, "value <= 3")}
COLD_GIB = (1, 16)
COLD_BAR = "value <= 0.5"
RUNS = {"warm": 5, "cold": 10}
HIT_S = 60.0
PAUSE_S = 2.0
META_BYTES = 256 << 20  # more than the metadata of 16 GiB with its default number of entries
MEMORY_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    return run("restart", measure, arguments("restart", __doc__ or "", argv))


def measure(args: argparse.Namespace) -> None:
    report = Report(args, "restart; seconds from exec, p50")
    logging.getLogger("kvkeep.client").setLevel(logging.ERROR)  # that the daemon is gone now and then is no news here
    sizes = {"64MiB": 64 << 20} if args.quick else {f"{gib}GiB": gib << 30 for gib in COLD_GIB}
    for label, size in sizes.items():
        if report.wanted(args, f"cold/{label}"):
            _cold(report, label, size, 2 if args.quick else RUNS["cold"])
    populations = {"1k": (1000, "")} if args.quick else POPULATIONS
    for label, (entries, bar) in populations.items():
        if report.wanted(args, f"warm/{label}"):
            _warm(report, args, label, entries, bar, 2 if args.quick else RUNS["warm"])


def _cold(report: Report, label: str, size: int, runs: int) -> None:
    name = f"cold/{label}"
    need = size + META_BYTES
    if problem := require_memory(need):
        report.missing(name, "s", problem)
        return
    starts, bare = [], []
    for _ in range(runs):
        bare.append(bare_python())
        starts.append(cold_start(size))
        wait_for_memory(need)
    p50, p99 = percentiles(starts)
    reference, _ = percentiles(bare)
    report.case(
        name,
        p50,
        "s",
        reference=reference,
        reference_name="python that imports numpy and zmq",
        bar=COLD_BAR,
        p99=p99,
        runs=runs,
    )


def cold_start(size: int, *flags: str) -> float:
    """Seconds from the exec of a daemon without an arena until a client has attached and pinged."""
    with Daemon(size, *flags) as daemon:
        began = daemon.start()
        client = daemon.attach(arena=False)
        took = time.monotonic() - began
        daemon.kill()  # at once: it is just about to take all that memory
        client.close()
        return took


def wait_for_memory(need: int) -> None:
    """Until what the last daemon had is free again."""
    until = time.monotonic() + MEMORY_S
    while problem := require_memory(need):
        if time.monotonic() > until:
            raise BenchError(problem)
        time.sleep(0.01)


def bare_python() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import numpy, zmq"], check=True, cwd="/")
    return time.monotonic() - began


class _Restart(NamedTuple):
    first_hit: float
    counted: int  # entries, by the daemon's own account
    found: int  # by looking every chain up


def _warm(report: Report, args: argparse.Namespace, label: str, entries: int, bar: str, runs: int) -> None:
    name = f"warm/{label}"
    size, flag = arena_for(entries)
    if problem := require_memory(size):
        report.missing(name, "s", problem)
        return
    restarts: list[_Restart] = []
    later: list[_Restart] = []
    cold: list[float] = []
    with Daemon(size, flag) as daemon:
        daemon.start()
        with daemon.attach() as client:
            report.note(f"filling {entries} entries")
            daemon.wait_reserved(client)
            namespace = client.register(manifest("restart"), shard_bytes=SMALL_SHARD)
            chains = fill(client, namespace, entries, np.random.default_rng(args.seed))
            before = int(client.stats()["l1"]["entries"])
            for i in range(runs):
                chain = chains[i % len(chains)]
                restarts.append(_restart(daemon, client, namespace, chain, chains))
                later.append(_restart(daemon, client, namespace, chain, chains, pause_s=PAUSE_S))
                if not require_memory(size):
                    cold.append(cold_start(size, flag))
    p50, p99 = percentiles([restart.first_hit for restart in restarts])
    kept = min(min(restart.counted, restart.found) for restart in restarts + later) / before
    report.case(
        name,
        p50,
        "s",
        reference=percentiles(cold)[0] if cold else None,
        reference_name="cold start of the same arena",
        bar=bar,
        kept=kept,
        entries=before,
        after_a_pause=percentiles([restart.first_hit for restart in later])[0],
        p99=p99,
        runs=runs,
    )


def _restart(
    daemon: Daemon, client: Client, namespace: Namespace, chain: bytes, chains: list[bytes], pause_s: float = 0.0
) -> _Restart:
    """Kill, start, and look for ``chain`` until it is there; then for all of them."""
    epoch, wanted = client.epoch, content(chain)
    got = np.zeros_like(wanted)
    daemon.kill()
    time.sleep(pause_s)
    began = daemon.start()
    until = began + HIT_S
    while True:
        with client.lookup(namespace, chain) as found:
            if found.ready == len(got) and all(client.retrieve(found, got)):
                first_hit = time.monotonic() - began
                break
        if time.monotonic() > until:
            raise BenchError(f"no hit within {HIT_S:g} s of the restart: {client.state}")
        daemon.must_run()
        time.sleep(0.001)
    if not (got == wanted).all() or client.epoch <= epoch:
        raise BenchError("the bytes retrieved after the restart are not the ones stored before it")
    hits = 0
    for each in chains:
        with client.lookup(namespace, each) as found:
            hits += found.ready
    if hits > sum(map(len, chains)) // HASH_BYTES:
        raise BenchError(f"{hits} chunks found, more than were stored")
    return _Restart(first_hit, int(client.stats()["l1"]["entries"]), hits)
