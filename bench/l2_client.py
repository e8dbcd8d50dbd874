"""L2 through a real daemon: a client stores until L2 has it; another daemon, whose L1 is empty, finds it there.

    <adapter>/client_store/4MiB      from the call until the daemon says that L2 has all of it
    <adapter>/client_load/4MiB       a lookup that waits for L2, until all of it can be read from L1

The first includes the copy into L1, neither includes the copy out of it; what comes back is compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep.bench.chains import CHUNK_TOKENS, fresh_chain
from kvkeep.bench.common import BenchError, Daemon, Report
from kvkeep.bench.l2_common import KINDS, MIB, OVERWRITE, READ, Kind, Rounds, aligned, medium_of, runs_of
from kvkeep.bench.l2_plain import Plain
from kvkeep.ipc.client import Client, Namespace

CLIENT_MIB = 4
CLIENT_RUNS = 5
MANIFEST = {"model": "kvkeep-bench/l2", "kv_dtype": "bfloat16", "chunk_tokens": CHUNK_TOKENS}
WAIT_S = 60.0

Buffers = npt.NDArray[np.uint8]


def clients(report: Report, args: argparse.Namespace, folder: Path, content: memoryview) -> None:
    folder.mkdir()
    size = CLIENT_MIB * MIB // (4 if args.quick else 1)
    target = aligned(bytes(len(content)))
    for name in ("fs", "raw_block"):
        names = (f"{name}/client_store/{size // MIB}MiB", f"{name}/client_load/{size // MIB}MiB")
        if report.wanted(args, *names):
            with Plain(folder, content, target) as plain:
                _client(report, args, names, KINDS[name], folder, content, plain, size)
            shutil.rmtree(folder)
            folder.mkdir()


def _client(
    report: Report,
    args: argparse.Namespace,
    names: tuple[str, str],
    kind: Kind,
    folder: Path,
    content: memoryview,
    plain: Plain,
    size: int,
) -> None:
    """Stores into one daemon; then one that starts with an empty L1 and finds in L2 what was stored."""
    count = len(content) // size
    buffers = np.frombuffer(content, np.uint8).reshape(count, size)
    rng = np.random.default_rng(args.seed)
    rounds = Rounds(len(content), runs_of(args, CLIENT_RUNS))
    with (
        medium_of(kind, folder, content, (rounds.total + 1) * len(content)) as config,
        # L2 may hold a quarter of L1 for stores, and as much for loads; the chunks of one round are all in L1.
        Daemon(5 * len(content) + 64 * MIB, f"--l2-adapter={json.dumps(config)}") as daemon,
    ):
        daemon.start()
        with daemon.attach() as client:
            _wait_serving(daemon, client)
            namespace = client.register(MANIFEST, shard_bytes=size)
            chains = []
            for _ in rounds:
                chains.append(fresh_chain(rng, count))
                rounds.take(
                    "store",
                    {
                        "ours": lambda: _store(client, namespace, chains[-1], buffers),
                        "plain": lambda: plain.overwrite(size, kind.depth, kind.sync_bytes(size)),
                    },
                )
        daemon.kill()
        with Daemon(daemon.l1_bytes, f"--l2-adapter={json.dumps(config)}") as empty:
            empty.start()
            with empty.attach() as client:
                _wait_serving(empty, client)
                namespace = client.register(MANIFEST, shard_bytes=size)
                for at in rounds:
                    rounds.take(
                        "load",
                        {
                            "ours": partial(_load, client, namespace, chains[at], buffers),
                            "plain": lambda: plain.read(size, kind.depth),
                        },
                    )
    rounds.case(report, names[0], "store", OVERWRITE, depth=min(kind.depth, count))
    rounds.case(report, names[1], "load", READ, depth=min(kind.depth, count))


def _wait_serving(daemon: Daemon, client: Client) -> None:
    until = time.monotonic() + WAIT_S
    while not all(row["phase"] == "serving" for row in client.stats()["l2"]):
        daemon.must_run()
        if time.monotonic() > until:
            raise BenchError(f"L2 did not serve within {WAIT_S:g} s: {daemon.log()}")
        time.sleep(0.02)
    daemon.wait_reserved(client)


def _store(client: Client, namespace: Namespace, chain: bytes, buffers: Buffers) -> float:
    """Seconds from the call until L2 has all of it."""
    count = len(chain) // 32
    before = client.stats()["l2"][0]["chunks_stored"]
    began = time.perf_counter()
    result = client.store(namespace, chain, buffers, deadline_s=WAIT_S)
    if result.stored != count:
        raise BenchError(f"only {result.stored} of {count} chunks were stored: {result.outcome[:1]}")
    while client.stats()["l2"][0]["chunks_stored"] < before + count:
        if time.perf_counter() - began > WAIT_S:
            raise BenchError(f"L2 did not have {count} chunks within {WAIT_S:g} s: {client.stats()['l2'][0]}")
        time.sleep(0.001)
    return time.perf_counter() - began


def _load(client: Client, namespace: Namespace, chain: bytes, buffers: Buffers) -> float:
    """Seconds of the lookup.  Then what it found is read and compared; with its last reader it leaves L1 again."""
    began = time.perf_counter()
    with client.lookup(namespace, chain, wait_s=WAIT_S, deadline_s=WAIT_S) as found:
        seconds = time.perf_counter() - began
        target = np.zeros_like(buffers)
        good = client.retrieve(found, target[: found.ready]) if found.ready else []
        if good.count(True) != len(buffers) or not np.array_equal(target, buffers):
            raise BenchError(f"{good.count(True)} of {len(buffers)} chunks came back from L2")
    return seconds
