"""The protocol by hand, for tests that must say what no well-behaved client says."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from kvkeep.ipc import messages as m
from kvkeep.ipc.attach import connect
from kvkeep.shm.layout import ABI_VERSION


def hello(**changes: Any) -> m.Hello:
    return m.Hello(**{"versions": (1,), "name": "raw", "abi": ABI_VERSION, **changes})


class Raw:
    """One attach connection and one DEALER, without a thread, without checks."""

    def __init__(self, run_dir: Path, *, arena: bool = True, name: str = "raw", deadline_s: float = 10.0) -> None:
        self.run_dir = run_dir
        self.sock, self.welcome, self.fds = connect(
            str(run_dir / "attach.sock"), hello(want_arena=arena, name=name), deadline_s
        )
        self.lease, self.epoch = self.welcome.lease, self.welcome.epoch
        self.context = zmq.Context()
        self.dealer = self.new_dealer()
        self._ids = itertools.count(1)

    def new_dealer(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(f"ipc://{self.run_dir}/rpc.sock")
        return dealer

    def send(self, kind: type[m.Request], *fields: Any) -> bytes:
        request_id = next(self._ids).to_bytes(8, "little")
        self.dealer.send_multipart((request_id, m.encode(kind(self.lease, self.epoch, *fields))))
        return request_id

    def send_body(self, body: bytes) -> bytes:
        request_id = next(self._ids).to_bytes(8, "little")
        self.dealer.send_multipart((request_id, body))
        return request_id

    def receive(self, timeout_s: float = 10.0) -> tuple[bytes, Any]:
        if not self.dealer.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"no reply within {timeout_s} s")
        request_id, body = self.dealer.recv_multipart()
        return request_id, m.decode_reply(body)

    def call(self, kind: type[m.Request], *fields: Any, timeout_s: float = 10.0) -> Any:
        """The reply to this request; others are thrown away."""
        wanted = self.send(kind, *fields)
        until = time.monotonic() + timeout_s
        while True:
            request_id, reply = self.receive(max(0.0, until - time.monotonic()))
            if request_id == wanted:
                return reply

    def register(self, manifest: bytes = b'{"model":"raw"}', shard_bytes: int = 4096, shards: int = 1) -> int:
        reply = self.call(m.Register, manifest, shard_bytes, shards)
        assert isinstance(reply, m.Registered), reply
        return reply.namespace

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.sock.close()
        self.context.destroy(linger=0)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(str(path))
    return sock
