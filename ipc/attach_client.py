"""The client side of the attach socket: `connect`.  The story is in attach.py."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
import weakref

import msgspec

from kvkeep.ipc.attach_frames import ARENA_FDS, HEADER, AttachRefused, check_path, frame
from kvkeep.ipc.messages import MAX_ATTACH_FRAME_BYTES, AttachMessage, Hello, Refused, Welcome, decode_attach

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # of this process, those that still wait included
MAX_FDS = 8  # room for what a broken peer may send; anything but 0 or 3 is refused


def connect(path: str, hello: Hello, deadline_s: float) -> tuple[socket.socket, Welcome, list[int]]:
    """Attach: returns the connection (keep it open, it is the lease), the Welcome and the descriptors,
    which are the caller's to close.  Raises AttachRefused, TimeoutError, or another OSError; nothing is
    left open then."""
    until = time.monotonic() + deadline_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _sockets.add(sock)
    fds: list[int] = []
    try:
        _connect(sock, path, until)
        _wait_for(sock, until)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have refused us unheard: read why
            sock.sendall(frame(hello))
        reply = _receive(sock, until, fds)
        if isinstance(reply, Refused):
            raise AttachRefused(reply.code, reply.message)
        if not isinstance(reply, Welcome):
            raise ConnectionError(f"the peer at {path} answered {type(reply).__name__}, not Welcome: not a kvkeepd?")
        expected = ARENA_FDS if hello.want_arena else 0
        if len(fds) != expected:
            raise ConnectionError(f"the daemon at {path} passed {len(fds)} descriptors, not {expected}")
        if reply.version not in hello.versions:
            raise AttachRefused("version", f"the daemon chose protocol {reply.version}, which was not offered")
        sock.setblocking(False)
        return sock, reply, fds
    except BaseException:
        sock.close()
        for fd in fds:
            os.close(fd)
        raise


def _connect(sock: socket.socket, path: str, until: float) -> None:
    check_path(path)
    while True:
        _wait_for(sock, until)
        try:
            sock.connect(path)
            return
        except BlockingIOError:  # the backlog is full: a Unix socket does not queue the caller
            time.sleep(0.005)


def _receive(sock: socket.socket, until: float, fds: list[int]) -> AttachMessage:
    """One frame; descriptors that come along are put into ``fds`` at once, so that they are never lost."""
    inbox = bytearray()
    need = HEADER.size
    while len(inbox) < need:
        _wait_for(sock, until)
        data, ancillary, flags, _ = sock.recvmsg(
            need - len(inbox), socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", payload[: len(payload) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise ConnectionError("descriptors were lost on the way (too many open files?); raise RLIMIT_NOFILE")
        if not data:
            raise ConnectionResetError("the daemon closed the connection during the handshake")
        inbox += data
        if need == HEADER.size and len(inbox) == need:
            (length,) = HEADER.unpack(inbox)
            if length > MAX_ATTACH_FRAME_BYTES:
                raise ConnectionError(f"a frame of {length} bytes is over the limit: not a kvkeepd?")
            need += length
    try:
        return decode_attach(bytes(inbox[HEADER.size :]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectionError(f"the peer's answer is not readable: {error}") from None


def _wait_for(sock: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the daemon did not answer the attach in time")
    sock.settimeout(left)


def _in_fork() -> None:
    """A child must not keep its parent's lease alive: the daemon would not see the parent die."""
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_in_fork)
