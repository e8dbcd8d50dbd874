"""The RPC socket, daemon side: a ZeroMQ ROUTER on ``ipc://`` that always answers.

A message that is not a request (wrong number of frames, a request id that is not 8 bytes, a body that does not decode,
an unknown op) gets an error reply to its sender and touches nobody else.  Frame size, queue lengths and the work per
round are bounded: of a message of very many frames some are dropped each round.  A peer that does not read loses its
replies; nobody waits for it.

What libzmq does not bound is the bytes: it keeps an unfinished message, however many frames have come, and as many
unread replies as SNDHWM says, however large.  Neither can be seen here, so whoever sees the memory grow (see
daemon/memory.py) has the connections ended: `cut`.  Requests and replies that were on their way are lost with them, so
the clients behind must attach again, or what they asked for would stay theirs unknown to them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import time
import typing
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from kvkeep.ipc import descriptors
from kvkeep.ipc.attach import credentials_of
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
ROUND_LIMIT = 64  # requests per round of the control loop, so that timers and other sockets get their turn,
ROUND_S = 0.005  # ... or fewer, if they take so long
REQUEST_FRAMES = 3  # the peer's identity, which ROUTER puts first, the request id, the body
DROP_LIMIT = 4096  # frames of a longer message that are dropped per round: a few milliseconds
REPLIES_QUEUED = 128  # per peer; more than are lost to a burst that libzmq's thread is late for
_MONITOR_EVENT = struct.Struct("=Hi")  # which, and the descriptor of the connection
_WAITING_BYTES = (0x541B, 0x5411)  # SIOCINQ, SIOCOUTQ: sent to us and not yet read, sent by us and not yet read
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
        self.socket.setsockopt(zmq.SNDHWM, REPLIES_QUEUED)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connections: dict[int, tuple[int, int]] = {}  # by descriptor, as far as `monitor` was read: see _which
        self._busy: Counter[int] = Counter()  # how often each of them was
        self._dropping = False  # the rest of a message of too many frames is still to be received
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
        self._note_connections()
        if self._closed_until is None and descriptors.scarce():
            left = descriptors.left()
            log.warning("%d descriptors are left: no new RPC connections for now; raise LimitNOFILE", left)
            self._move(self._path, self._path + CLOSED)  # an unbind would end the connections that there are
            self._closed_until = time.monotonic() + PAUSE_S

    @property
    def connections(self) -> int:
        return len(self._connections)

    def _note_connections(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event, fd = _MONITOR_EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                self._connections.pop(fd, None)
                self._busy.pop(fd, None)
                if event == zmq.EVENT_ACCEPTED:
                    with contextlib.suppress(OSError):  # it has ended already
                        self._connections[fd] = _which(fd)

    def note_busy(self) -> None:
        """Look which connections have bytes waiting, for us or for the peer, at this moment."""
        self._note_connections()
        self._busy.update(fd for fd, which in self._connections.items() if _has_bytes_waiting(fd, which))

    def cut(self, *, only_busy: bool) -> list[int]:
        """End the connections; ``only_busy``, those that `note_busy` found so by far the most since the last cut.
        Returns the peer's pid for each that ended."""
        self._note_connections()
        enough = max(self._busy.values(), default=0) / 2
        chosen = [fd for fd in self._connections if not only_busy or self._busy[fd] > enough]
        self._busy.clear()
        pids = [_end(fd, self._connections[fd]) for fd in chosen]
        return [pid for pid in pids if pid is not None]

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
        """Answer what has arrived, for one round.  True = there may be more."""
        if self._dropping:
            self._drop_frames()
            return True
        until = time.monotonic() + ROUND_S
        for _ in range(ROUND_LIMIT):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # an empty receive raises, which costs
                return False
            try:
                frames = self._receive()
            except zmq.Again:
                return False
            self._answer(frames)
            if self._dropping or time.monotonic() > until:
                break
        return True

    def _receive(self) -> list[bytes]:
        """One message.  If it has more frames than a request, the first of them; the others are `_dropping`."""
        frames = [self.socket.recv(zmq.NOBLOCK)]
        while self.socket.getsockopt(zmq.RCVMORE):
            if len(frames) == REQUEST_FRAMES:
                self._dropping = True  # nothing else can be received before
                break
            frames.append(self.socket.recv(zmq.NOBLOCK))
        return frames

    def _drop_frames(self) -> None:
        receive = self.socket.recv
        for _ in range(DROP_LIMIT):
            if not receive(zmq.NOBLOCK, copy=False).more:  # three times as fast as to copy, and to ask for RCVMORE
                self._dropping = False
                return

    def _answer(self, frames: list[bytes]) -> None:
        self.requests += 1
        identity = frames[0]
        request_id = frames[1] if len(frames) > 1 else b""
        reply: AnyReply | None
        if len(frames) != REQUEST_FRAMES or self._dropping or len(request_id) != REQUEST_ID_BYTES:
            reply = self._refuse(
                f"a request is 2 frames, a request id of {REQUEST_ID_BYTES} bytes and a body; this had "
                f"{len(frames) - 1}{' and more' * self._dropping} and an id of {len(request_id)} bytes"
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


def _end(fd: int, which: tuple[int, int]) -> int | None:
    """End a connection of libzmq's, which notices and closes its descriptor.  The peer's pid; None = it is gone."""
    try:
        own = os.dup(fd)  # stays what it is, whatever libzmq's thread does meanwhile
    except OSError:
        return None
    try:
        if _which(own) != which:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=own)
        try:
            with contextlib.suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            return credentials_of(connection).pid
        finally:
            connection.detach()  # or it would close, later, whatever has the number by then
    finally:
        os.close(own)


def _has_bytes_waiting(fd: int, which: tuple[int, int]) -> bool:
    try:
        return _which(fd) == which and any(
            struct.unpack("i", fcntl.ioctl(fd, queue, bytes(4)))[0] for queue in _WAITING_BYTES
        )
    except OSError:  # libzmq has just closed it
        return False


def _which(fd: int) -> tuple[int, int]:
    """What a descriptor stands for: its number may stand for something else later."""
    about = os.fstat(fd)
    return about.st_dev, about.st_ino
