"""A client of `lmcache server` made of a DEALER and msgpack, and a worker that maps the segment it is told."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from tests.conftest import Daemon

CHUNK = 16
SHAPE = [2, 3, CHUNK, 8]  # planes, layers, slots, hidden
BYTES = 2 * 3 * CHUNK * 8 * 2
OPS = {
    "lookup": 8,
    "query": 9,
    "wait": 10,
    "free": 12,
    "end_session": 13,
    "register": 14,
    "unregister": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "clear": 20,
    "chunk_size": 21,
    "ping": 22,
    "allocations": 23,
    "noop": 24,
    "experimental": 32,
}
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Refused(Exception):
    """The reply names another operation: the real client raises with what stands there."""


class Peer:
    """One connection.  Every call must be answered within ``patience_s``."""

    def __init__(self, url: str, patience_s: float = 20.0) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(url)
        self.patience_s = patience_s
        self._uid = 0

    def send(self, op: int | str, *payloads: Any) -> int:
        self._uid += 1
        self.socket.send_multipart([encode(self._uid), encode(op), *map(encode, payloads)])
        return self._uid

    def receive(self) -> tuple[int, Any, Any]:
        if not self.socket.poll(self.patience_s * 1000):
            raise AssertionError(f"no answer within {self.patience_s:g} s")
        uid, op, *rest = self.socket.recv_multipart()
        return decode(uid), decode(op), decode(rest[0]) if rest else None

    def call(self, name: str, *payloads: Any) -> Any:
        uid = self.send(OPS[name], *payloads)
        got, op, value = self.receive()
        assert got == uid
        if op != OPS[name]:
            raise Refused(op)
        return value

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def url_of(daemon: Daemon) -> str:
    """Where the gateway listens, once it does."""
    path, until = daemon.run_dir / "lmcache.url", time.monotonic() + 20
    while time.monotonic() < until:
        if path.exists():
            with Peer(path.read_text().strip(), 0.5) as peer:
                try:
                    if peer.call("noop") == "OK":
                        return path.read_text().strip()
                except AssertionError:
                    pass
        time.sleep(0.02)
    raise AssertionError(f"no gateway:\n{daemon.output()}")


def key(tokens: list[int], request: str, start: int = 0, end: int | None = None, **more: Any) -> dict[str, Any]:
    whole = len(tokens) // CHUNK * CHUNK
    fields = {"model_name": "org/m", "world_size": 1, "worker_id": None, "cache_salt": "", "num_kv_readers": 1}
    fields |= {"token_ids": tokens, "start": start, "end": whole if end is None else end, "request_id": request}
    return fields | {"request_configs": None} | more


class Worker(Peer):
    """One rank."""

    def __init__(self, url: str, instance: int, *, rank: int = 0, ranks: int = 1, **more: Any) -> None:
        super().__init__(url)
        self.instance, self.rank, self.ranks = instance, rank, ranks
        self.registration = {
            "instance_id": instance,
            "model_name": "org/m",
            "world_size": ranks,
            "block_size": 4,
            "num_layers": SHAPE[1],
            "hidden_dim_size": SHAPE[3],
            "dtype_str": "bfloat16",
            "use_mla": False,
            "num_physical_slots": CHUNK,
        } | more
        self.register()

    def register(self) -> None:
        where = self.call("register", self.registration)
        with Path(f"/dev/shm{where['shm_name']}").open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), where["pool_size"])

    def key(
        self, tokens: list[int], request: str, start: int = 0, end: int | None = None, **more: Any
    ) -> dict[str, Any]:
        return key(tokens, request, start, end, worker_id=self.rank, world_size=self.ranks, **more)

    def view(self, slot: dict[str, Any]) -> np.ndarray[Any, Any]:
        assert slot["length"] == BYTES
        assert slot["shape"] == SHAPE
        assert slot["dtype"] == "bfloat16"
        return np.frombuffer(self.memory, np.uint8, slot["length"], slot["offset"])

    def fill(self, tokens: list[int], slots: list[dict[str, Any]], chunks: list[int]) -> None:
        for slot, chunk in zip(slots, chunks, strict=True):
            self.view(slot)[:] = content(tokens, chunk, self.rank)

    def store(self, tokens: list[int], request: str, start: int = 0, end: int | None = None, **more: Any) -> int:
        """How many chunks were written."""
        where = self.key(tokens, request, start, end, **more)
        context = self.call("prepare_store", where, self.instance)["context"]
        if not context.get("slots"):
            return 0
        self.fill(tokens, context["slots"], [start // CHUNK + i for i in context["chunk_indices"]])
        assert self.call("commit_store", where, self.instance, b"") is True
        return len(context["slots"])

    def retrieve(self, tokens: list[int], request: str, start: int = 0, end: int | None = None, **more: Any) -> bool:
        """Whether it could; what came must be right."""
        where = self.key(tokens, request, start, end, **more)
        answer = self.call("prepare_retrieve", where, self.instance)
        if not answer["success"]:
            return False
        for i, slot in enumerate(answer["context"]["slots"]):
            assert (self.view(slot) == content(tokens, start // CHUNK + i, self.rank)).all()
        assert len(answer["context"]["slots"]) == (where["end"] - start) // CHUNK
        assert self.call("commit_retrieve", where, self.instance) is True
        return True


def content(tokens: list[int], chunk: int, rank: int) -> np.ndarray[Any, Any]:
    """Depends on all tokens up to the end of the chunk."""
    seed = hash((tuple(tokens[: (chunk + 1) * CHUNK]), rank)) % (1 << 32)
    return np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)


def look_up(peer: Peer, tokens: list[int], request: str, **more: Any) -> int:
    """Chunks that are there."""
    assert peer.call("lookup", key(tokens, request, **more), 1) is None
    until = time.monotonic() + 20
    while (found := peer.call("query", request)) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return int(found)
