"""The RPC socket, daemon side: a ZeroMQ ROUTER on ``ipc://`` that always answers.

A message that is not a request (wrong number of frames, a request id that is not 8 bytes, a body that does not decode,
an unknown op) gets an error reply to its sender and touches nobody else.  Frame size, queue lengths and the work per
round are bounded.  A peer that does not read loses its replies; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import typing
from collections.abc import Callable

import msgspec
import zmq

from kvkeep.ipc import descriptors
from kvkeep.ipc.messages import (
    MAX_MESSAGE_BYTES,
    REQUEST_ID_BYTES,
    AnyReply,
    AnyRequest,
    Error,
    ErrorCode,
    decode_request,
    encode,
)

log = logging.getLogger("kvkeep.rpc")

PAUSE_S = 0.25
BACKLOG = 64  # whoever waits here when the door is closed is let in all the same
CLOSED = ".closed"  # the socket's name while it is
ROUND_LIMIT = 64  # requests per round of the control loop, so that timers and other sockets get their turn
_OPS = frozenset(op.__struct_config__.tag for op in typing.get_args(AnyRequest))

Handler = Callable[[bytes, bytes, AnyRequest], AnyReply | None]


class RpcServer:
    """``handle(identity, request id, request)`` returns the reply, or None if it will call `send` itself, once."""

    def __init__(self, path: str, handle: Handler, *, epoch: int, mode: int = 0o660, gid: int | None = None) -> None:
        self._handle = handle
        self._epoch = epoch
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 16)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, 32)
        self.socket.setsockopt(zmq.SNDHWM, 256)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED)  # readable after each connection
        self._path = path
        self._closed_until: float | None = None
        for file in (path, path + CLOSED):
            if os.path.lexists(file):
                os.unlink(file)  # left by a killed daemon; the run directory is locked by us
        before = os.umask(0o777 & ~mode)
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(path, -1, gid)
        self.requests = 0
        self.malformed = 0

    def connected(self) -> None:
        """`monitor` is readable.  Closes the door before descriptors run out; those who are connected stay."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.monitor.recv_multipart(zmq.NOBLOCK)
        if self._closed_until is None and descriptors.scarce():
            left = descriptors.left()
            log.warning("%d descriptors are left: no new RPC connections for now; raise LimitNOFILE", left)
            self._move(self._path, self._path + CLOSED)  # an unbind would end the connections that there are
            self._closed_until = time.monotonic() + PAUSE_S

    def next_deadline(self) -> float | None:
        return self._closed_until

    def expire(self, now: float) -> None:
        """Open the door again, if that is possible."""
        if self._closed_until is not None and now >= self._closed_until:
            self._closed_until = now + PAUSE_S
            if not descriptors.scarce():
                self._closed_until = None
                self._move(self._path + CLOSED, self._path)

    def _move(self, path: str, to: str) -> None:
        try:
            os.rename(path, to)
        except OSError as e:
            log.error("cannot rename %s: %s", path, e.strerror)

    def service(self) -> bool:
        """Answer what has arrived, up to ROUND_LIMIT.  True = there may be more."""
        for _ in range(ROUND_LIMIT):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # an empty receive raises, which costs
                return False
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self.requests += 1
            identity = frames[0]
            request_id = frames[1] if len(frames) > 1 else b""
            reply: AnyReply | None
            if len(frames) != 3 or len(request_id) != REQUEST_ID_BYTES:
                reply = self._refuse(
                    f"a request is 2 frames, a request id of {REQUEST_ID_BYTES} bytes and a body; "
                    f"this had {len(frames) - 1} and an id of {len(request_id)} bytes"
                )
                request_id = request_id[:REQUEST_ID_BYTES]
            else:
                try:
                    request = decode_request(frames[2])
                except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as e:
                    reply = self._undecodable(frames[2], e)
                else:
                    reply = self._handle(identity, request_id, request)
            if reply is not None:
                self.send(identity, request_id, reply)
        return True

    def send(self, identity: bytes, request_id: bytes, reply: AnyReply) -> None:
        try:
            self.socket.send_multipart((identity, request_id, encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # it is gone, or it does not read: its problem alone

    def _refuse(self, why: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> Error:
        self.malformed += 1
        return Error(code.value, why, self._epoch)

    def _undecodable(self, body: bytes, error: Exception) -> Error:
        try:
            head = msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, RecursionError, ValueError):
            head = None
        if isinstance(head, list) and head and isinstance(head[0], str) and head[0] not in _OPS:
            return self._refuse(f"unknown operation {head[0][:32]!r}", ErrorCode.UNKNOWN_OP)
        return self._refuse(f"the body is not a request of protocol version 1: {str(error)[:200]}")

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path + CLOSED)
        self.socket.disable_monitor()
        self.monitor.close(0)  # or the term below would wait for it
        self.socket.close(0)
        self._context.term()
