"""How fast payload moves through the client library: store and retrieve, beside a plain copy.

    store      `Client.store`: ask for extents, copy from a private buffer into the arena, commit
    retrieve   `Client.retrieve`: ask for the extents, copy out of the arena, validate, confirm

Each call moves 128 MiB, as a prompt's worth of KV does; a round is four calls of each client, one after the other,
each of another chain.  (Rounds of one call, 25 ms, measured how two clients begin and end together.)  The reference is
``np.copyto``, shard by shard, between the same private buffer and a mapping of shared memory of the same kind and size,
all of it faulted in before.  Rounds of calls and of plain copies alternate; with two clients, two processes do the same
thing at the same time, both for the calls and for the plain copies, and the bandwidth is all bytes over the time from
the first start to the last end.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import posix_ipc

from kvkeep.bench.chains import fresh_chain, manifest
from kvkeep.bench.common import BenchError, Daemon, Report, arguments, require_memory, run
from kvkeep.ipc.client import Client, Namespace

MIB = 1 << 20
SHARD_MIB = (1, 4, 32)
CLIENTS = (1, 2)
CALL_BYTES = 128 * MIB
CALLS = 4  # a round
RUNS = 40
WARM_UP = 3
BARS = {1: "ratio >= 0.8", 32: "ratio >= 0.9"}
SLACK_S = 0.002  # between saying "go" and the moment to go
ANSWER_S = 120.0

Pipe: TypeAlias = "Connection[Any, Any]"
Bytes = npt.NDArray[np.uint8]


class _Plan(NamedTuple):
    run_dir: str
    shard_bytes: int
    call_bytes: int
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    return run("data", measure, arguments("data", __doc__ or "", argv))


def measure(args: argparse.Namespace) -> None:
    call_bytes = 4 * MIB if args.quick else CALL_BYTES
    runs = 3 if args.quick else RUNS
    report = Report(args, f"payload, {call_bytes // MIB} MiB a call; GB/s, p50 (p99: 99 % of the rounds were faster)")
    for clients in CLIENTS:
        for mib in (1,) if args.quick else SHARD_MIB:
            names = [f"{op}/{mib}MiB/{clients}" for op in ("store", "retrieve")]
            if not report.wanted(args, *names):
                continue
            arena = (clients * CALLS + 2) * call_bytes
            if problem := require_memory(arena + clients * (CALLS + 2) * call_bytes):
                for name in names:
                    report.missing(name, "GB/s_p50", problem)
                continue
            with ExitStack() as stack:
                daemon = stack.enter_context(Daemon(arena, "--l1-slab-mb=32" if mib == 32 else "--l1-slab-mb=4"))
                daemon.start()
                with daemon.attach("bench-watch", arena=False) as client:
                    daemon.wait_reserved(client)
                plans = [_Plan(str(daemon.run_dir), mib * MIB, call_bytes, args.seed + i) for i in range(clients)]
                team = stack.enter_context(_Team(plans))
                _cases(report, args, team, mib, names, call_bytes * CALLS * clients, runs)


def _cases(
    report: Report, args: argparse.Namespace, team: _Team, mib: int, names: list[str], size: int, runs: int
) -> None:
    for op, name in zip(("store", "retrieve"), names, strict=True):
        if not report.wanted(args, name):
            continue
        speeds: dict[str, list[float]] = {op: [], f"plain_{op}": []}
        for i in range(WARM_UP + runs):
            for what, found in speeds.items():
                seconds = team.together(what)
                if i >= WARM_UP:
                    found.append(size / seconds / 1e9)
        (p50, p1), (plain, plain_p1) = (np.percentile(found, (50, 1)).tolist() for found in speeds.values())
        report.case(
            name,
            p50,
            "GB/s_p50",
            reference=plain,
            reference_name="np.copyto, same memory, same processes",
            bar=BARS.get(mib, ""),
            p99=p1,
            reference_p99=plain_p1,
            runs=runs,
            round_bytes=size,
        )


class _Team:
    """The client processes.  `together` has all of them do one thing at one moment."""

    def __init__(self, plans: list[_Plan]) -> None:
        context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Pipe]] = []
        for plan in plans:
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs, plan), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def __enter__(self) -> _Team:
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def together(self, what: str) -> float:
        """Seconds from the first start to the last end."""
        for _, pipe in self._members:
            pipe.send(what)
        self._answers()  # all are prepared
        at = time.monotonic() + SLACK_S
        for _, pipe in self._members:
            pipe.send(at)
        spans = self._answers()
        return float(max(end for _, end in spans) - min(begin for begin, _ in spans))

    def _answers(self) -> list[Any]:
        answers = []
        for _, pipe in self._members:
            if not pipe.poll(ANSWER_S):
                raise BenchError(f"a client process did not answer for {ANSWER_S:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise BenchError("a client process ended") from None
        for answer in answers:
            if isinstance(answer, str) and answer:
                raise BenchError(answer)
        return answers

    def __exit__(self, *_: object) -> None:
        processes = [process for process, _ in self._members]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)


# ---- in the client process -------------------------------------------------------------------------------------------


def _member(pipe: Pipe, plan: _Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Client.attach(plan.run_dir, name="bench-data") as client, contextlib.suppress(EOFError):
            worker = _Worker(client, plan)
            pipe.send("")
            while True:
                prepare, act = worker.jobs[pipe.recv()]
                prepare()
                pipe.send("")
                at = pipe.recv()
                while time.monotonic() < at:
                    pass
                begin = time.monotonic()
                problem = act()
                end = time.monotonic()
                pipe.send(problem or (begin, end))
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")


class _Worker:
    def __init__(self, client: Client, plan: _Plan) -> None:
        self._client = client
        self._rng = np.random.default_rng(plan.seed)
        self._shards = plan.call_bytes // plan.shard_bytes
        self._namespace: Namespace = client.register(manifest("data"), shard_bytes=plan.shard_bytes)
        shape = (self._shards, plan.shard_bytes)
        self._source: Bytes = np.frombuffer(self._rng.bytes(plan.call_bytes), np.uint8).reshape(shape).copy()
        self._target: Bytes = np.full(shape, 1, np.uint8)
        self._shared: Bytes = _shared_memory(CALLS * plan.call_bytes).reshape(CALLS, *shape)
        self._chains: list[bytes] = []
        self.jobs: dict[str, tuple[Callable[[], None], Callable[[], str]]] = {
            "store": (self._make_room, self._store),
            "retrieve": (self._find, self._retrieve),
            "plain_store": (_nothing, self._plain_store),
            "plain_retrieve": (_nothing, self._plain_retrieve),
        }

    def _make_room(self) -> None:
        for chain in self._chains:
            self._client.delete(self._namespace, chain)
        self._chains = [fresh_chain(self._rng, self._shards) for _ in range(CALLS)]

    def _store(self) -> str:
        for chain in self._chains:
            stored = self._client.store(self._namespace, chain, self._source, deadline_s=20).stored
            if stored != self._shards:
                return f"only {stored} of {self._shards} chunks were stored"
        return ""

    def _find(self) -> None:
        if not self._chains:
            self._make_room()
            self._store()
        self._target[:, 0] = self._source[:, 0] ^ 1
        self._found = [self._client.lookup(self._namespace, chain) for chain in self._chains]

    def _retrieve(self) -> str:
        for found in self._found:
            good = self._client.retrieve(found, self._target, deadline_s=20)
            if len(good) != self._shards or not all(good):
                return f"{good.count(True)} of {self._shards} chunks were retrieved"
        right = bool((self._target[:, 0] == self._source[:, 0]).all())
        return "" if right else "other bytes were retrieved than had been stored"

    def _plain_store(self) -> str:
        for room in self._shared:
            for here, there in zip(self._source, room, strict=True):
                np.copyto(there, here)
        return ""

    def _plain_retrieve(self) -> str:
        for room in self._shared:
            for here, there in zip(self._target, room, strict=True):
                np.copyto(here, there)
        return ""


def _nothing() -> None:
    pass


def _shared_memory(size: int) -> Bytes:
    """Shared memory as the arena's, in nobody's name any more, every page of it there."""
    segment = posix_ipc.SharedMemory(None, posix_ipc.O_CREX, mode=0o600, size=size)
    segment.unlink()
    array = np.frombuffer(mmap.mmap(segment.fd, size), np.uint8)
    segment.close_fd()
    array[:] = 1
    return array
