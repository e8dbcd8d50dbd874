"""The attach socket, both sides: who may use the daemon, which protocol, which memory, and for how long.

A client connects to ``attach.sock``, says `Hello`, and gets `Welcome` (with file descriptors by SCM_RIGHTS)
or `Refused`.  An admitted connection then stays open and silent: it *is* the lease.  When it ends, however
it ends, the client is gone, and `closed` is called.  There is no heartbeat: an idle or stopped client is
alive.

    accepted ──Hello──► admitted ──EOF, error, drop(), >64 KiB of noise──► closed(lease) once
        └──bad frame, refused, late, displaced──► gone; `admit` saw nothing or refused, `closed` is not called

Invariants of the server side (`AttachListener`)
  * Nothing blocks, and no peer can make `service` raise, spin, or keep more than one frame of memory.
  * ``admit`` is called at most once a connection; ``closed`` exactly once per admitted connection, except
    after `close`, which ends the listener without telling (the daemon is going away, leases outlive it).
  * Descriptors of an `Admission` are sent and closed here, whatever happens.
  * Full table or no descriptors left: the oldest connection that has not said Hello makes room for the
    newest, so idle connections cannot lock out a client that speaks.

The client side is `connect` in attach_client.py.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvkeep.ipc.attach_client import connect
from kvkeep.ipc.attach_frames import HEADER, AttachRefused, check_path, frame
from kvkeep.ipc.messages import (
    MAX_ATTACH_FRAME_BYTES,
    SUPPORTED_VERSIONS,
    AttachMessage,
    Hello,
    Refused,
    Welcome,
    decode_attach,
)

log = logging.getLogger("kvkeep.attach")

BACKLOG = 4096  # the kernel caps it at net.core.somaxconn
ACCEPTS_PER_SERVICE = 64
EVENTS_PER_SERVICE = 128
MAX_NOISE_BYTES = 64 * 1024  # after the handshake
ACCEPT_PAUSE_S = 0.1  # when out of descriptors and nobody can be displaced

_UCRED = struct.Struct("iII")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Credentials(NamedTuple):
    """SO_PEERCRED: who connected, as this process sees them (pid 0: from a foreign pid namespace)."""

    pid: int
    uid: int
    gid: int


class Admission(NamedTuple):
    """The yes to a Hello.  ``fds`` change hands: they are sent and then closed in any case."""

    welcome: Welcome
    fds: tuple[int, ...]


class _Connection:
    __slots__ = ("inbox", "lease_id", "noise", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.lease_id: int | None = None  # not None = admitted
        self.noise = 0


class AttachListener:
    """The server side.  Control polls `fileno`, calls `service` when it is readable, and `expire` at
    `next_deadline`."""

    def __init__(
        self,
        path: str,
        *,
        admit: Callable[[Hello, Credentials], Admission | Refused],
        closed: Callable[[int], None],
        skewed: Callable[[Refused], object] = lambda refused: None,
        mode: int = 0o660,
        gid: int | None = None,
        max_connections: int = 4096,
        handshake_s: float = 2.0,
    ) -> None:
        """``skewed`` is told of a client that was refused for its version, which `admit` is not asked about."""
        self._path = path
        self._admit = admit
        self._closed = closed
        self._skewed = skewed
        self._max = max_connections
        self._handshake_s = handshake_s
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._waiting: dict[int, float] = {}  # descriptor -> handshake deadline, oldest first
        self._leases: dict[int, int] = {}  # lease id -> descriptor
        self._paused_until: float | None = None
        self._socket = _bind(path, mode, gid)
        self._inode = os.stat(path).st_ino
        self._epoll = select.epoll()
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def __len__(self) -> int:
        return len(self._connections)

    def service(self) -> None:
        """Handle what is ready.  Bounded; call again while `fileno` is readable."""
        listening = self._socket.fileno()
        for fd, _ in self._epoll.poll(0, EVENTS_PER_SERVICE):
            if fd == listening:
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                self._read(connection)

    def next_deadline(self) -> float | None:
        """time.monotonic() at which `expire` has something to do."""
        first = next(iter(self._waiting.values()), None)
        if first is None or self._paused_until is None:
            return first if self._paused_until is None else self._paused_until
        return min(first, self._paused_until)

    def expire(self, now: float) -> None:
        """Drop connections whose Hello is late."""
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        while self._waiting:
            fd, deadline = next(iter(self._waiting.items()))
            if deadline > now:
                break
            late = f"no Hello within {self._handshake_s:g} s of connecting; connect again and send it at once"
            self._refuse(self._connections[fd], Refused("bad_request", late))

    def hang_up(self, lease_id: int) -> None:
        """The client sees the end of its connection, as if the daemon had gone: its calls end at once, it finishes its
        copies, closes its side, and attaches again.  Until it has closed, the lease is what it was."""
        fd = self._leases.get(lease_id)
        if fd is not None:
            with contextlib.suppress(OSError):  # it has closed already
                self._connections[fd].sock.shutdown(socket.SHUT_WR)

    def drop(self, lease_id: int) -> None:
        """End an admitted connection from our side; `closed` is called as for any other end."""
        fd = self._leases.get(lease_id)
        if fd is not None:
            self._end(self._connections[fd])

    def close(self) -> None:
        """Stop.  Clients see EOF; `closed` is not called any more.  The socket file is removed if it is
        still ours."""
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._waiting.clear()
        self._leases.clear()
        self._epoll.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    # ---- connections ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_SERVICE):
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    if not self._displace():
                        self._pause(error)
                        return
                    continue
                return  # EAGAIN, or a peer that gave up already
            sock.setblocking(False)
            if len(self._connections) >= self._max and not self._displace():
                full = f"{self._max} connections are open, the limit; raise --max-clients or stop some"
                _send(sock, Refused("limit", full))
                sock.close()
                continue
            connection = _Connection(sock)
            self._connections[sock.fileno()] = connection
            self._waiting[sock.fileno()] = time.monotonic() + self._handshake_s
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
            self._read(connection)  # the Hello is mostly here already

    def _displace(self) -> bool:
        """Make room: the oldest connection that has not said Hello goes."""
        fd = next(iter(self._waiting), None)
        if fd is None:
            return False
        self._end(self._connections[fd])
        return True

    def _pause(self, error: OSError) -> None:
        """Level-triggered readiness would spin on a connection that cannot be accepted: look away for a
        moment."""
        log.warning("cannot accept clients for %g s: %s; raise LimitNOFILE", ACCEPT_PAUSE_S, error.strerror)
        self._epoll.unregister(self._socket.fileno())
        self._paused_until = time.monotonic() + ACCEPT_PAUSE_S

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(MAX_NOISE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
        elif connection.lease_id is not None:
            connection.noise += len(data)
            if connection.noise > MAX_NOISE_BYTES:
                log.warning("lease %d sent %d bytes after its Hello: dropped", connection.lease_id, connection.noise)
                self._end(connection)
        else:
            connection.inbox += data
            self._handshake(connection)

    def _handshake(self, connection: _Connection) -> None:
        inbox = connection.inbox
        if len(inbox) < HEADER.size:
            return
        (length,) = HEADER.unpack_from(inbox)
        if length > MAX_ATTACH_FRAME_BYTES:
            limit = f"a frame of {length} bytes is over the limit of {MAX_ATTACH_FRAME_BYTES}"
            self._refuse(connection, Refused("bad_request", limit))
            return
        if len(inbox) < HEADER.size + length:
            return
        connection.noise = len(inbox) - HEADER.size - length
        try:
            hello = decode_attach(bytes(inbox[HEADER.size : HEADER.size + length]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(connection, Refused("bad_request", f"the first frame is not a Hello: {error}"))
            return
        if not isinstance(hello, Hello):
            self._refuse(connection, Refused("bad_request", f"a client says Hello, not {type(hello).__name__}"))
            return
        common = set(hello.versions) & set(SUPPORTED_VERSIONS)
        if not common:
            refused = Refused("version", _skew(hello.versions))
            self._skewed(refused)
            self._refuse(connection, refused)
            return
        self._decide(connection, hello, max(common))

    def _decide(self, connection: _Connection, hello: Hello, version: int) -> None:
        try:
            answer = self._admit(hello, credentials_of(connection.sock))
        except Exception:  # our bug must not cost the other clients their daemon
            log.exception("admitting a client failed")
            self._refuse(connection, Refused("internal", "the daemon failed to admit this client; see its log"))
            return
        if isinstance(answer, Refused):
            self._refuse(connection, answer)
            return
        welcome, fds = answer
        connection.lease_id = welcome.lease_id
        connection.inbox = bytearray()
        fd = connection.sock.fileno()
        del self._waiting[fd]
        self._leases[welcome.lease_id] = fd
        try:
            sent = _send(connection.sock, msgspec.structs.replace(welcome, version=version), fds)
        finally:
            for passed in fds:
                os.close(passed)
        if not sent:
            self._end(connection)

    def _refuse(self, connection: _Connection, refused: Refused) -> None:
        _send(connection.sock, refused)
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """The only way out of the tables."""
        fd = connection.sock.fileno()
        del self._connections[fd]
        self._waiting.pop(fd, None)
        connection.sock.close()  # leaves the epoll by itself
        if connection.lease_id is not None:
            del self._leases[connection.lease_id]
            self._closed(connection.lease_id)


# ---- small parts -------------------------------------------------------------------------------------------


def _bind(path: str, mode: int, gid: int | None) -> socket.socket:
    check_path(path)
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, f"{path} exists and is not a socket; remove it or choose --run-dir")
        os.unlink(path)  # left by a killed daemon; the lock on the run directory says that it is dead
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o777)  # nobody connects before the group is right
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(path, -1, gid)
        os.chmod(path, mode)
        sock.setblocking(False)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def credentials_of(sock: socket.socket) -> Credentials:
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def _skew(versions: tuple[int, ...]) -> str:
    ours = ", ".join(map(str, SUPPORTED_VERSIONS))
    theirs = ", ".join(map(str, versions[:16])) or "none"
    side = "client" if versions and max(versions) < min(SUPPORTED_VERSIONS) else "daemon"
    return f"the client speaks protocol {theirs}, this daemon {ours}; upgrade the {side}"


def _send(sock: socket.socket, message: AttachMessage, fds: tuple[int, ...] = ()) -> bool:
    """All or nothing, without waiting: one small frame always fits into the buffer of a peer that behaves."""
    data = frame(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        return sock.sendmsg([data], rights, socket.MSG_NOSIGNAL) == len(data)
    except OSError:
        return False


__all__ = ["Admission", "AttachListener", "AttachRefused", "Credentials", "connect", "frame"]
