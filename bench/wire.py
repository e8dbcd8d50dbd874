"""The wire of `lmcache server`: the same client beside that server and beside kvkeepd, call by call in turn.

    lookup_new/<tokens>  LOOKUP of tokens that nobody has sent before, and QUERY_PREFETCH_STATUS: a miss
    store/<tokens>       PREPARE_STORE and COMMIT_STORE of all chunks, which are new; nothing is copied
    lookup/<tokens>      LOOKUP and QUERY_PREFETCH_STATUS of another request with these tokens: a hit
    retrieve/<tokens>    PREPARE_RETRIEVE and COMMIT_RETRIEVE of all chunks
    start                from the exec of the server until it has answered a PING

One client, an engine-driven worker and scheduler in one, with objects of 4 KiB and chunks of 256 tokens: what is
measured is what the calls cost, with what the client needs to pack the tokens.  `lmcache server` runs with its segment
in shared memory; it must be installed for ``--peer-python``.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvkeep.bench.common import BenchError, Daemon, Report, arguments, percentiles, run
from kvkeep.bench.engine_process import LMCacheServer, free_ports, has_module, version_of
from kvkeep.ipc.lmcache.wire import Op

CHUNK = 256
TOKENS = (2048, 32768, 131072)
OPERATIONS = ("lookup_new", "store", "lookup", "retrieve")
RUNS, WARM_UP, STARTS = 40, 4, 3
L1_BYTES = 512 << 20
CALL_S = 30.0
START_S = 180.0
SLOWER = "ratio <= 1"
AT_MOST_HALF = "ratio <= 0.5"
START_BAR = "ratio <= 0.2"
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def main(argv: Sequence[str] | None = None) -> int:
    peer = ("--peer-python", {"metavar": "PATH", "default": sys.executable, "help": "interpreter that has lmcache"})
    return run("wire", measure, arguments("wire", __doc__ or "", argv, peer))


def measure(args: argparse.Namespace) -> None:
    report = Report(args, "the wire of lmcache server; times are milliseconds, p50")
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder, contextlib.ExitStack() as stack:
        peer = has_module(args.peer_python, "lmcache")
        name = f"lmcache {version_of(args.peer_python, 'lmcache')}" if peer else ""
        if report.wanted(args, "start"):
            _starts(report, args, Path(folder), name)
        sides = {"kvkeep": stack.enter_context(_Caller(stack.enter_context(_kvkeepd())))}
        if peer:
            server = stack.enter_context(LMCacheServer(args.peer_python, Path(folder), L1_BYTES)).ready()
            sides["lmcache"] = stack.enter_context(_Caller(server.port))
        source = random.Random(args.seed)
        for tokens in TOKENS:
            names = [f"{what}/{tokens}" for what in OPERATIONS]
            if not report.wanted(args, *names):
                continue
            times = _rounds(sides, tokens, source, 2 if args.quick else RUNS)
            for what, case in zip(OPERATIONS, names, strict=True):
                if report.wanted(args, case):
                    _case(report, case, times, what, name, "" if what == "lookup_new" else _bar(tokens))


def _bar(tokens: int) -> str:
    return AT_MOST_HALF if tokens == max(TOKENS) else SLOWER


def _case(report: Report, case: str, times: dict[tuple[str, str], list[float]], what: str, peer: str, bar: str) -> None:
    p50, p99 = percentiles(times["kvkeep", what])
    theirs = times.get(("lmcache", what))
    reference = percentiles(theirs)[0] if theirs else None
    report.case(
        case, p50, "ms_p50", reference=reference, reference_name=peer, bar=bar if theirs else "", p99=p99,
        runs=len(times["kvkeep", what]),
    )  # fmt: skip


def _rounds(
    sides: dict[str, _Caller], tokens: int, source: random.Random, runs: int
) -> dict[tuple[str, str], list[float]]:
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(WARM_UP + runs):
        said = [source.randrange(1 << 17) for _ in range(tokens)]
        order = list(sides.items())
        source.shuffle(order)
        for side, caller in order:
            for what, took in caller.request(said, f"{tokens}-{number}"):
                if number >= WARM_UP:
                    times.setdefault((side, what), []).append(took * 1000)
    return times


class _Caller:
    """The client: LMCache's own packs its payloads in the same way."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._uid = 0
        self.call(
            Op.REGISTER,
            {
                "instance_id": 1,
                "model_name": "bench",
                "world_size": 1,
                "block_size": 16,
                "num_layers": 1,
                "hidden_dim_size": 4,
                "dtype_str": "float16",
                "use_mla": False,
                "num_physical_slots": CHUNK,
            },
        )

    def call(self, op: Op, *payloads: Any) -> Any:
        self._uid += 1
        self._socket.send_multipart([_encode(self._uid), _encode(int(op)), *map(_encode, payloads)])
        if not self._socket.poll(round(CALL_S * 1000)):
            raise BenchError(f"{op.name} was not answered within {CALL_S:g} s")
        uid, answered, *rest = self._socket.recv_multipart()
        if _decode(uid) != self._uid or _decode(answered) != op:
            raise BenchError(f"{op.name} was refused: {_decode(answered)!r}")
        return _decode(rest[0]) if rest else None

    def request(self, said: list[int], name: str) -> Iterator[tuple[str, float]]:
        """What an engine does with these tokens twice: each call, and its seconds."""
        chunks = len(said) // CHUNK
        first, second = self._key(said, f"{name}-first"), self._key(said, f"{name}-second")
        yield "lookup_new", self._timed(lambda: self._lookup(first, 0))
        worker = first | {"worker_id": 0}
        yield "store", self._timed(lambda: self._store(worker, chunks))
        self.call(Op.END_SESSION, first["request_id"])
        yield "lookup", self._timed(lambda: self._lookup(second, chunks))
        worker = second | {"worker_id": 0}
        yield "retrieve", self._timed(lambda: self._retrieve(worker, chunks))
        self.call(Op.END_SESSION, second["request_id"])

    def _lookup(self, key: dict[str, Any], wanted: int) -> None:
        self.call(Op.LOOKUP, key, 1)
        while (found := self.call(Op.QUERY, key["request_id"])) is None:
            pass
        if found != wanted:
            raise BenchError(f"a lookup found {found} chunks, not {wanted}")

    def _store(self, key: dict[str, Any], wanted: int) -> None:
        slots = self.call(Op.PREPARE_STORE, key, 1)["context"]["slots"]
        if len(slots) != wanted or self.call(Op.COMMIT_STORE, key, 1, b"") is not True:
            raise BenchError(f"a store got {len(slots)} slots, not {wanted}, or was not committed")

    def _retrieve(self, key: dict[str, Any], wanted: int) -> None:
        slots = self.call(Op.PREPARE_RETRIEVE, key, 1)["context"].get("slots", ())
        if len(slots) != wanted or self.call(Op.COMMIT_RETRIEVE, key, 1) is not True:
            raise BenchError(f"a retrieve got {len(slots)} slots, not {wanted}")

    def _key(self, said: list[int], request: str) -> dict[str, Any]:
        return {
            "model_name": "bench",
            "world_size": 1,
            "worker_id": None,
            "token_ids": said,
            "start": 0,
            "end": len(said),
            "request_id": request,
            "cache_salt": "",
            "request_configs": None,
            "num_kv_readers": 1,
        }

    @staticmethod
    def _timed(do: Callable[[], None]) -> float:
        began = time.perf_counter()
        do()
        return time.perf_counter() - began

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def _kvkeepd() -> Iterator[int]:
    """Its port."""
    (port,) = free_ports(1)
    with Daemon(L1_BYTES, f"--port={port}", f"--chunk-size={CHUNK}") as daemon:
        daemon.start()
        with daemon.attach(arena=False) as client:
            daemon.wait_reserved(client)
        _first_answer(port, daemon.must_run)
        yield port


def _starts(report: Report, args: argparse.Namespace, folder: Path, peer: str) -> None:
    ours, theirs = [], []
    for _ in range(1 if args.quick else STARTS):
        (port,) = free_ports(1)
        with Daemon(L1_BYTES, f"--port={port}") as daemon:
            began = daemon.start()
            ours.append(_first_answer(port, daemon.must_run) - began)
        if peer:
            began = time.monotonic()
            with LMCacheServer(args.peer_python, folder, L1_BYTES) as server:
                theirs.append(_first_answer(server.port, server.must_run) - began)
    reference = percentiles(theirs)[0] if theirs else None
    report.case(
        "start", percentiles(ours)[0], "s", reference=reference, reference_name=peer, bar=START_BAR if theirs else "",
        runs=len(ours),
    )  # fmt: skip


def _first_answer(port: int, still_runs: Callable[[], None]) -> float:
    """The moment at which a PING was answered."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.reconnect_ivl, socket.reconnect_ivl_max = 0, 5, 5
    try:
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([_encode(1), _encode(int(Op.PING)), _encode(None)])
        until = time.monotonic() + START_S
        while not socket.poll(20):
            still_runs()
            if time.monotonic() > until:
                raise BenchError(f"no answer to a PING within {START_S:g} s")
        return time.monotonic()
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main())
