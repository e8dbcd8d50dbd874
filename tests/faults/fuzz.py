"""Hostile input for the two sockets, made from a seed."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
import typing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvkeep.ipc import messages as m
from tests.faults.oracle import chain
from tests.faults.raw import Raw, dial, hello

NOBODY = 65534
_INTS = (0, 1, -1, 2, 64, 65, 255, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
_FLOATS = (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, 1.0)
_OPS = tuple(typing.get_args(m.AnyRequest))
MANIFESTS = (
    b"",
    b"{}",
    b"[1]",
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":1e999}',
    b'{"a":"\\ud800"}',
    b"\xff\xfe",
    b"{" * 8000,
    b"[" * 16000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b'{"a":' + b"9" * 5000 + b"}",
    b'"' + b"x" * 16000 + b'"',
    b"x" * 16128,
    b"x" * 16129,
)


class Fuzzer:
    """Requests that are wrong in some way, and some that are right but unfriendly."""

    def __init__(self, rng: random.Random, raw: Raw, namespaces: list[int], stolen: list[bytes]) -> None:
        self.rng, self.raw, self.namespaces, self.stolen = rng, raw, namespaces, stolen
        self.handles = [0, 1, -1, 2**63]

    def integer(self) -> int:
        return self.rng.choice(_INTS) if self.rng.random() < 0.7 else self.rng.randint(-10, 70)

    def hashes(self) -> bytes:
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return chain(("fuzz", rng.randrange(4)), rng.randint(1, 40))
        if kind < 0.5:
            packed = chain(("fuzz", rng.randrange(4)), 20)
            return packed + packed[: 32 * rng.randint(1, 20)]  # duplicates
        if kind < 0.6:
            return rng.randbytes(rng.randint(0, 200))
        if kind < 0.65:
            return bytes(32) * rng.randint(1, 100)
        if kind < 0.7:
            return rng.randbytes(32 * rng.choice((m.MAX_CHUNKS, m.MAX_CHUNKS + 1, 1000)))
        few = [chain(("few", i), 1) for i in range(6)]
        return b"".join(rng.sample(few, rng.randint(1, 6)))

    def field(self, name: str, kind: str) -> Any:
        rng = self.rng
        if name == "lease":
            other = rng.choice((b"", bytes(16), rng.randbytes(16), rng.randbytes(1000), *self.stolen))
            return self.raw.lease if rng.random() < 0.85 else other
        if name == "epoch":
            return self.raw.epoch if rng.random() < 0.9 else self.integer()
        if name == "namespace":
            return rng.choice(self.namespaces) if rng.random() < 0.8 else self.integer()
        if name in ("handle", "pin"):
            return rng.choice(self.handles[-30:]) if rng.random() < 0.8 else self.integer()
        if name == "hashes":
            return self.hashes()
        if name == "manifest":
            return rng.choice(MANIFESTS)
        if name in ("results", "checksums"):
            return rng.randbytes(rng.choice((0, 1, 5, 8, 40, 1000)))
        if "float" in kind:
            return rng.choice(_FLOATS)
        if name == "wait_ms":
            return rng.choice((0, 0, 1, 20, -1, 2**63))
        return self.integer()

    def request(self) -> Any:
        """Valid structure, hostile values."""
        op = self.rng.choice(_OPS)
        if op in (m.Clear, m.Check) and self.rng.random() < 0.8:
            op = m.Lookup
        return op(**{f.name: self.field(f.name, str(f.type)) for f in msgspec.structs.fields(op)})

    def frames(self) -> list[bytes]:
        rng = self.rng
        request_id = rng.randbytes(8)
        kind = rng.random()
        if kind < 0.65:
            try:
                return [request_id, m.encode(self.request())]
            except OverflowError:
                return [request_id, b"\x90"]
        if kind < 0.70:
            body = bytearray(m.encode(self.request_encodable()))
            for _ in range(rng.randint(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            return [request_id, bytes(body)]
        if kind < 0.75:
            body = m.encode(self.request_encodable())
            return [request_id, body[: rng.randrange(len(body))]]
        if kind < 0.80:  # wrong arity
            items = msgspec.msgpack.decode(m.encode(self.request_encodable()))
            items = items[: rng.randrange(len(items))] if rng.random() < 0.5 else [*items, 1, b"x", None]
            return [request_id, msgspec.msgpack.encode(items)]
        if kind < 0.85:
            op = rng.choice(("EXEC", "", "ping", "PING\0", "x" * 5000, "__reduce__"))
            return [request_id, msgspec.msgpack.encode([op, self.raw.lease, self.raw.epoch])]
        if kind < 0.90:
            return [request_id, rng.randbytes(rng.randint(0, 300))]
        if kind < 0.93:  # announced sizes that no message has
            mark = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb"))
            return [request_id, mark + struct.pack(">I", rng.choice((10**6, 2**31, 2**32 - 1))) + rng.randbytes(20)]
        if kind < 0.95:
            return [request_id, rng.choice((b"\x91", b"\x81\xa1a")) * 20000]
        return [rng.randbytes(rng.choice((0, 1, 7, 8, 9, 300))) for _ in range(rng.randint(1, 6))]

    def request_encodable(self) -> Any:
        while True:
            request = self.request()
            try:
                m.encode(request)
            except OverflowError:
                continue
            return request


def drop_rights(root_only: bool = True) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def rpc_fuzzer(link: Connection, run_dir: str, seed: int, stolen: list[bytes]) -> None:
    """Until told to stop: bursts of hostile messages, and exactly one reply to each of them."""
    drop_rights()
    rng = random.Random(seed)
    done = {"sent": 0, "replies": 0, "unanswered": 0, "extra": 0, "internal": []}
    while not link.poll():
        with Raw(Path(run_dir), name="fuzz") as raw:
            namespaces = [raw.register(shard_bytes=4096), raw.register(shard_bytes=16384, shards=3)]
            fuzzer = Fuzzer(rng, raw, namespaces, stolen)
            for _ in range(rng.randint(1, 30)):
                if link.poll():
                    break
                burst = rng.randint(1, 40)
                for _ in range(burst):
                    raw.dealer.send_multipart(fuzzer.frames())
                done["sent"] += burst
                pending = burst
                while pending:
                    if not raw.dealer.poll(15_000):
                        done["unanswered"] += pending
                        break
                    frames = raw.dealer.recv_multipart()
                    reply = m.decode_reply(frames[-1])
                    if isinstance(reply, m.LookupDone):
                        continue
                    pending -= 1
                    done["replies"] += 1
                    if handle := getattr(reply, "handle", 0) or getattr(reply, "pin", 0):
                        fuzzer.handles.append(handle)
                    if isinstance(reply, m.Error) and reply.code == "internal":
                        done["internal"].append(reply.message)
            while raw.dealer.poll(20):
                done["extra"] += not isinstance(m.decode_reply(raw.dealer.recv_multipart()[-1]), m.LookupDone)
    link.recv()
    link.send(done)


def attach_frame(rng: random.Random) -> bytes:
    """What a hostile client says first."""
    good = m.encode(hello())
    kind = rng.randrange(9)
    if kind == 0:
        return rng.randbytes(rng.randint(0, 5000))
    if kind == 1:
        return struct.pack("<I", rng.choice((2**32 - 1, 65537, 2**31))) + good
    if kind == 2:
        frame = struct.pack("<I", len(good)) + good
        return frame[: rng.randrange(len(frame))]
    if kind == 3:
        body = bytearray(good)
        for _ in range(rng.randint(1, 5)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return struct.pack("<I", len(body)) + body
    if kind == 4:
        changes: Any = rng.choice(
            (
                {"versions": ()},
                {"versions": (2**40, -5)},
                {"versions": tuple(range(9000))},
                {"name": "n" * 60000},
                {"name": "\0\n\x1b[2J'\"" * 20},
                {"previous_lease": rng.choice((2**63, -1, 1, 2, 3))},
                {"abi": rng.choice((0, -1, 2**63))},
                {"want_arena": False},
            )
        )
        body = m.encode(hello(**changes))
        return struct.pack("<I", len(body)) + body
    if kind == 5:
        body = m.encode(m.Refused("denied", "no")) if rng.random() < 0.5 else b"\x91" * 60000
        return struct.pack("<I", len(body)) + body
    if kind == 6:
        body = b"\x82\xa4type\xa5hello\xa8versions\xdd" + struct.pack(">I", rng.choice((10**6, 2**32 - 1)))
        return struct.pack("<I", len(body)) + body
    if kind == 7:
        return struct.pack("<I", len(good)) + good + rng.randbytes(rng.choice((1, 1000, 70_000)))
    return struct.pack("<I", 0)


def attach_fuzzer(link: Connection, run_dir: str, seed: int) -> None:
    drop_rights()
    rng = random.Random(seed)
    done = {"connections": 0}
    kept: list[socket.socket] = []
    while not link.poll():
        try:
            sock = dial(Path(run_dir) / "attach.sock")
        except OSError:
            time.sleep(0.01)
            continue
        done["connections"] += 1
        try:
            frame = attach_frame(rng)
            while frame:
                cut = rng.randint(1, len(frame)) if rng.random() < 0.3 else len(frame)
                sock.sendall(frame[:cut])
                frame = frame[cut:]
            if rng.random() < 0.5:
                sock.settimeout(0.05)
                sock.recv(4096)
        except OSError:
            pass
        if rng.random() < 0.1:
            kept.append(sock)
            if len(kept) > 50:
                kept.pop(0).close()
        else:
            sock.close()
    link.recv()
    link.send(done)


def zmtp_peer(path: Path) -> socket.socket:
    """A DEALER by hand, after its handshake: one file descriptor, no library."""
    sock = dial(path)
    sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
    heard = b""
    while len(heard) < 66 or len(heard) < 66 + heard[65]:  # its greeting, its READY
        more = sock.recv(4096)
        if not more:
            raise ConnectionResetError("the RPC socket refused the handshake")
        heard += more
    return sock


def zmtp_frames(*frames: bytes) -> bytes:
    out = []
    for i, frame in enumerate(frames):
        more = i < len(frames) - 1
        if len(frame) < 256:
            out.append(bytes([more, len(frame)]) + frame)
        else:
            out.append(bytes([more | 2]) + struct.pack(">Q", len(frame)) + frame)
    return b"".join(out)


__all__ = ["MANIFESTS", "NOBODY", "attach_fuzzer", "drop_rights", "rpc_fuzzer", "zmq", "zmtp_frames", "zmtp_peer"]
