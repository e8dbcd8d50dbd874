"""What the control plane costs: lookup, store+commit and retrieve+confirm of whole prompts, beside a bare ZeroMQ echo.

Every call is the client library's own, in the state a long-running daemon is in: full of other chunks, and each call on
another chain than the one before, so that nothing of it is in a cache.  Chunks have 256 tokens.

    lookup             `Client.lookup`: the references are taken; they are released outside the measured time
    store_commit       `Client.reserve` and `Reservation.commit` of a chain that is new (and deleted again, unmeasured)
    retrieve_confirm   `Client.open_read` and `Reading.confirm` of a chain looked up before, unmeasured
    lookup_evicting    p99 of lookup while another process stores new chains into a full arena, beside its p99 at rest

No payload is copied here (see `bench data`).  The echo gets the same request bytes and gives the same number of reply
bytes, once for a lookup, twice for the pairs.  Calls and echoes alternate one by one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvkeep.bench.chains import CHUNK_TOKENS, FILL_CHAIN, SMALL_SHARD, arena_for, fill, fresh_chain, manifest
from kvkeep.bench.common import BenchError, Daemon, Report, arguments, percentiles, require_memory, run
from kvkeep.bench.echo import Echo
from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client, Namespace

TOKENS = (2048, 8192, 32768, 131072)
POPULATIONS = {"100k": 100_000, "1m": 1_000_000}
RUNS = {"lookup": 1000, "store_commit": 300, "retrieve_confirm": 500}
LOOKUP_BAR = {"100k": "ratio <= 5", "1m": "ratio <= 8"}
WARM_UP = 20
REFERENCE = "zeromq echo, same bytes"

# Storing while we look up: a chunked prefill of 8,192 tokens at a time.  The pace is more than memory allows one node
# to store (10,000 chunks of 1 MiB are 10 GB in a second); faster than that would measure who gets the CPU.
STORE_CHUNKS = 32
STORE_PACE = 10_000  # chunks per second
HOT_CHAINS = 32
PHASES = 10
PHASE_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    return run("control", measure, arguments("control", __doc__ or "", argv))


def measure(args: argparse.Namespace) -> None:
    report = Report(args, "control plane, chunk 256; times are microseconds, p50")
    populations = {"1k": 1000} if args.quick else POPULATIONS
    for label, entries in populations.items():
        names = [f"{op}/{tokens}/{label}" for tokens in TOKENS for op in RUNS]
        evicting = f"lookup_evicting/131072/{label}"
        with_evicting = entries == max(populations.values())
        if not report.wanted(args, *names, *([evicting] if with_evicting else [])):
            continue
        size, flag = arena_for(entries)
        if problem := require_memory(size):
            for name in names:
                report.missing(name, "us_p50", problem)
            continue
        # only a full arena evicts here, so that what is measured at rest is at rest
        with Daemon(size, flag, "--eviction-trigger-watermark=1.0") as daemon, Echo(str(daemon.run_dir.parent)) as echo:
            daemon.start()
            with daemon.attach() as client:
                report.note(f"filling {entries} entries")
                daemon.wait_reserved(client)
                bench = _Bench(client, echo, np.random.default_rng(args.seed), entries)
                for tokens in TOKENS:
                    for op, runs in RUNS.items():
                        name = f"{op}/{tokens}/{label}"
                        if report.wanted(args, name):
                            _one(report, bench, name, op, tokens // CHUNK_TOKENS, 5 if args.quick else runs, label)
                if with_evicting and report.wanted(args, evicting):
                    _evicting(report, bench, daemon, evicting, args)


class _Bench:
    """The filled arena, and each operation as an iterator of (its seconds, the echo's seconds)."""

    def __init__(self, client: Client, echo: Echo, rng: np.random.Generator, entries: int) -> None:
        self.client, self.echo, self.rng = client, echo, rng
        self.namespace: Namespace = client.register(manifest("control"), shard_bytes=SMALL_SHARD)
        self.chains = [c for c in fill(client, self.namespace, entries, rng) if len(c) == FILL_CHAIN * m.HASH_BYTES]

    def some(self, chunks: int) -> bytes:
        """The first chunks of a chain that is there."""
        return self.chains[int(self.rng.integers(len(self.chains)))][: chunks * m.HASH_BYTES]

    def lookup(self, chunks: int) -> Iterator[tuple[float, float]]:
        echo = self._echoes((self._lookup(chunks), m.encode(m.LookupReply(self.client.epoch, 1 << 56, chunks))))
        while True:
            chain = self.some(chunks)
            begin = time.perf_counter()
            found = self.client.lookup(self.namespace, chain)
            took = time.perf_counter() - begin
            if found.ready != chunks:
                raise BenchError(f"a lookup of {chunks} chunks that are there found {found.ready}")
            found.release()
            yield took, echo()

    def store_commit(self, chunks: int) -> Iterator[tuple[float, float]]:
        head, epoch, space, handle = self._head(), self.client.epoch, self.namespace.id, 1 << 56
        chain = bytes(chunks * m.HASH_BYTES)
        echo = self._echoes(
            (
                m.encode(m.Store(*head, space, 0, chain)),
                m.encode(m.StoreReply(epoch, handle, SMALL_SHARD, bytes(chunks), bytes(8 * chunks))),
            ),
            (m.encode(m.Commit(*head, handle, bytes(chunks))), m.encode(m.CommitReply(epoch, bytes(chunks)))),
        )
        while True:
            chain = fresh_chain(self.rng, chunks)
            begin = time.perf_counter()
            reservation = self.client.reserve(self.namespace, chain)
            outcome = reservation.commit()
            took = time.perf_counter() - begin
            if len(outcome) != chunks or any(outcome):
                raise BenchError(f"a new chain of {chunks} chunks was not stored whole: {len(outcome)} outcomes")
            self.client.delete(self.namespace, chain)
            yield took, echo()

    def retrieve_confirm(self, chunks: int) -> Iterator[tuple[float, float]]:
        head, epoch, handle = self._head(), self.client.epoch, 1 << 56
        words = (bytes(8 * chunks), bytes(4 * chunks), bytes(4 * chunks), bytes(8 * chunks))
        echo = self._echoes(
            (m.encode(m.Retrieve(*head, handle, 0, 0, chunks)), m.encode(m.Extents(epoch, SMALL_SHARD, *words))),
            (m.encode(m.Confirm(*head, handle, 0)), m.encode(m.Ok(epoch, chunks))),
        )
        while True:
            handle = self.client.lookup(self.namespace, self.some(chunks)).hand_over()
            begin = time.perf_counter()
            reading = self.client.open_read(handle, 0, 0, chunks)
            if reading is None:
                raise BenchError("a chunk that is referenced could not be read")
            reading.confirm()
            took = time.perf_counter() - begin
            yield took, echo()

    def _head(self) -> tuple[bytes, int]:
        return bytes(16), self.client.epoch

    def _lookup(self, chunks: int) -> bytes:
        return m.encode(m.Lookup(*self._head(), self.namespace.id, bytes(chunks * m.HASH_BYTES), 1, 0))

    def _echoes(self, *pairs: tuple[bytes, bytes]) -> Callable[[], float]:
        for request, reply in pairs:
            self.echo.prepare(request, reply)
        requests = [request for request, _ in pairs]
        return lambda: sum(self.echo.call(request) for request in requests)


def _one(report: Report, bench: _Bench, name: str, op: str, chunks: int, runs: int, label: str) -> None:
    pairs: Iterator[tuple[float, float]] = getattr(bench, op)(chunks)
    for _ in range(min(WARM_UP, runs)):
        next(pairs)
    times = np.array([next(pairs) for _ in range(runs)]) * 1e6
    p50, p99 = percentiles(times[:, 0])
    echo_p50, echo_p99 = percentiles(times[:, 1])
    report.case(
        name,
        p50,
        "us_p50",
        reference=echo_p50,
        reference_name=REFERENCE,
        bar=LOOKUP_BAR.get(label, "") if op == "lookup" and chunks == FILL_CHAIN else "",
        p99=p99,
        reference_p99=echo_p99,
        runs=runs,
    )


# ---- lookups while another client makes the arena evict --------------------------------------------------------------


def _evicting(report: Report, bench: _Bench, daemon: Daemon, name: str, args: argparse.Namespace) -> None:
    hot = bench.chains[:HOT_CHAINS]
    phases, seconds = (1, 0.2) if args.quick else (PHASES, PHASE_S)
    times: dict[bool, list[float]] = {False: [], True: []}
    stored = evicted = 0
    busy = 0.0
    with _storer(str(daemon.run_dir), args.seed) as storer:
        _lookups(bench, hot, 0.1)  # the least recent chunks go first: these are not the ones
        storer.send("fill")  # until the arena is full and the first chunks had to go
        storer.recv()
        for evicting in (False, True) * phases:
            if evicting:
                before = bench.client.stats()["counters"]["entries_evicted"]
                storer.send("store")
                time.sleep(0.05)
            times[evicting] += _lookups(bench, hot, seconds)
            if evicting:
                storer.send("rest")
                chunks, took = storer.recv()
                stored, busy = stored + chunks, busy + took
                evicted += bench.client.stats()["counters"]["entries_evicted"] - before
    p50, p99 = percentiles(np.array(times[True]) * 1e6)
    idle_p50, idle_p99 = percentiles(np.array(times[False]) * 1e6)
    report.case(
        name,
        p99,
        "us_p99",
        reference=idle_p99,
        reference_name="the same lookup at rest, p99",
        bar="ratio <= 2",
        p50=p50,
        reference_p50=idle_p50,
        runs=len(times[True]),
        stored_per_s=round(stored / busy),
        evicted_per_s=round(evicted / busy),
        store_chunks=STORE_CHUNKS,
    )


def _lookups(bench: _Bench, hot: list[bytes], seconds: float) -> list[float]:
    times: list[float] = []
    until = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < until:
        found = bench.client.lookup(bench.namespace, hot[len(times) % len(hot)])
        times.append(time.perf_counter() - begin)
        if found.ready != FILL_CHAIN:
            raise BenchError(f"a chain in constant use lost chunks to eviction: {found.ready} of {FILL_CHAIN} are left")
        found.release()
    return times


@contextmanager
def _storer(run_dir: str, seed: int) -> Iterator[Connection[Any, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_store_on_demand, args=(theirs, run_dir, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join(5)


def _store_on_demand(pipe: Connection[Any, Any], run_dir: str, seed: int) -> None:
    """The other client: "fill" stores until the arena is full, "store" stores at the pace until "rest"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rng = np.random.default_rng((seed, 1))
    payload = np.zeros((STORE_CHUNKS, SMALL_SHARD), np.uint8)
    with Client.attach(run_dir, name="bench-storer") as client:
        namespace = client.register(manifest("control"), shard_bytes=SMALL_SHARD)
        while True:
            order = pipe.recv()
            begin, chunks = time.monotonic(), 0
            while not pipe.poll() if order == "store" else not client.stats()["counters"]["entries_evicted"]:
                chunks += client.store(namespace, fresh_chain(rng, STORE_CHUNKS), payload).stored
                ahead = begin + chunks / STORE_PACE - time.monotonic()
                if order == "store" and ahead > 0:
                    time.sleep(ahead)
            if order == "store":
                pipe.recv()
            pipe.send((chunks, time.monotonic() - begin))
