"""One DEALER socket of a client, and what it is attached to.

A `Channel` belongs to the thread that made it and to one `Attachment` (one epoch of one daemon).  Its lock is there for
the rare second user: the session's thread that drains it, or another thread that polls a pending lookup.

Replies come back in any order.  The one that is waited for ends the wait; one with a sink (a pending lookup) goes
there; any other is *stray*: its request was given up.  A stray reply that carries a handle hands it back, or the daemon
would count references and reservations that nobody knows of.

Every wait ends at its deadline, or at once when the attachment ends.

A signal handler may raise (Ctrl-C) anywhere in here: half a message is sent then, or half a reply taken, or the lock
stays taken, or a handle has come that nobody knows of.  None of this is repaired.  Whoever sends does it in an
`Exchange`, which ends the attachment: the daemon drops all that it holds for it, and the client attaches again.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from kvkeep.ipc.client_arena import Arena
from kvkeep.ipc.messages import REQUEST_ID_BYTES, AnyReply, Error, ErrorCode, LookupReply, Welcome, decode_reply

HIGH_WATER = 256  # messages each way; a daemon that hangs must not cost the client memory
MAX_REPLY_BYTES = 64 << 20
MAX_DEADLINE_S = 3600.0  # whatever a caller says
MOMENT_MS = 1  # longer waits go through a poller that also sees the attachment end
TURN_S = 0.02  # of one of several that wait in a channel

INTERRUPTED = "a call was interrupted"

Sink = Callable[[AnyReply], bool]  # True = this was the last reply for it; called under the channel's lock


class Attachment:
    """One attach: the lease, the mapping, and whether it is still good.  Ends once, for all who hold it."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, arena: Arena | None, event_fd: int, endpoint: str
    ) -> None:
        self.sock = sock
        self.welcome = welcome
        self.lease = welcome.lease
        self.epoch = welcome.epoch
        self.mapped = arena is not None
        self.arena = arena  # None again when it is over
        self.event_fd = event_fd  # -1 = none
        self.endpoint = endpoint
        self.alive = True
        self.why = ""  # it ended
        self.hung = False  # the breaker: a deadline expired, and no answer has come since
        self.doubted = False  # a deadline expired that was too short to tell; a ping will
        self.down_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable from the end on
        self._pid = os.getpid()

    def end(self, why: str) -> None:
        """The first reason counts.  Takes no lock, wakes all who wait; in a fork only the fork forgets it."""
        if self.alive:
            self.alive, self.why = False, why
        if os.getpid() == self._pid:
            os.eventfd_write(self.down_fd, 1)  # each time: a signal may have interrupted the first

    def exchange(self) -> Exchange:
        return Exchange(self)

    def __del__(self) -> None:
        for fd in (getattr(self, "down_fd", -1), self.event_fd):
            if fd >= 0:
                os.close(fd)


class Exchange:
    """``with attachment.exchange():`` around a request, its reply, and the making of the object that owns what came.
    What raises in there ends the attachment, see the module; what may raise for other reasons stays out."""

    __slots__ = ("_attachment",)

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._attachment.end(f"{INTERRUPTED} ({kind.__name__})")


class Answer(NamedTuple):
    reply: AnyReply | None = None  # None = no usable answer in time
    sent: bool = False  # whether the request left this process


class Channel:
    def __init__(
        self,
        attachment: Attachment,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        stray: Callable[[Attachment, AnyReply], None],
        late: Callable[[Attachment, str, float], None],
        counters: dict[str, int],
    ) -> None:
        self.attachment = attachment
        self.lock = threading.Lock()
        self.owner = threading.current_thread()
        self.closed = False
        self.sinks: dict[bytes, Sink] = {}
        self._unanswered = 0  # requests without a sink whose reply has not come yet
        self._forgotten: set[bytes] = set()  # requests that lost their sink, likewise
        self._stray, self._late, self._counters = stray, late, counters
        self._last_id = 0
        sock = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.RECONNECT_IVL, 20),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.MAXMSGSIZE, MAX_REPLY_BYTES),
            (zmq.RCVTIMEO, MOMENT_MS),
        ):
            sock.setsockopt(option, value)
        sock.connect(attachment.endpoint)
        self.socket = sock

    def call(self, body: bytes, deadline_s: float) -> Answer:
        """Send and wait.  When the deadline was the reason for no reply, `late` was told."""
        deadline_s = min(deadline_s, MAX_DEADLINE_S)
        until = time.monotonic() + deadline_s
        if not self.lock.acquire(timeout=max(deadline_s, 0.0)):
            return Answer()
        try:
            request_id, reply = self._next_id(), None
            sent = self._usable() and self._send(request_id, body, until)
            if sent:
                self._unanswered += 1
                reply = self._await(request_id, until)
            if reply is None and self._usable() and time.monotonic() >= until:
                self._late(self.attachment, f"{_tag(body)} of {len(body)} bytes", deadline_s)
            return Answer(reply, sent)
        finally:
            self.lock.release()

    def post(self, body: bytes, sink: Sink | None = None) -> bytes | None:
        """Send without waiting: the request id, or None if it could not be sent now."""
        if not self.lock.acquire(timeout=0.05):
            return None
        try:
            request_id = self._next_id()
            if sink is not None:
                self.sinks[request_id] = sink
            # a fresh socket needs a moment to connect
            until = time.monotonic() + (0.05 if self._last_id == 1 else 0.0)
            if self._usable() and self._send(request_id, body, until):
                self._unanswered += sink is None
                return request_id
            self.sinks.pop(request_id, None)
            return None
        finally:
            self.lock.release()

    def forget(self, request_id: bytes) -> None:
        """The sink is not interested any more: the reply will be a stray.  Takes no lock: finalizers call it."""
        if self.sinks.pop(request_id, None) is not None:
            self._forgotten.add(request_id)

    @property
    def expects_strays(self) -> bool:
        return self._unanswered > 0 or bool(self._forgotten)

    @property
    def orphaned(self) -> bool:
        """Of a thread that has ended, and nothing comes for anybody any more."""
        return not self.owner.is_alive() and not self.sinks and not self.expects_strays

    def drain(self) -> None:
        """Take what has arrived.  Does nothing if the channel is in use: its user takes it."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            while self._usable():
                try:
                    frames = self.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.ZMQError:
                    return
                self._take(frames, b"")
        finally:
            self.lock.release()

    def wait_a_moment(self) -> None:
        """Take what has arrived, or the first that comes within a millisecond: cheaper than `wait`."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self._usable():
                self._take(self.socket.recv_multipart(), b"")
        except zmq.ZMQError:
            pass
        finally:
            self.lock.release()
        self.drain()

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Take replies until ``done()``, the deadline, or the end of the attachment.  Shares the lock now and then."""
        while not done() and self._usable():
            left = until - time.monotonic()
            if left <= 0:
                return
            self.drain()
            if done():
                return
            if not self.lock.acquire(timeout=min(left, 5 * TURN_S)):
                continue
            try:
                if self._usable():
                    self._ready(zmq.POLLIN, min(until, time.monotonic() + TURN_S))
            finally:
                self.lock.release()

    def close(self, wait_s: float = 0.0) -> bool:
        """False = in use; its user closes it when it sees that the attachment has ended."""
        if not self.lock.acquire(timeout=wait_s):
            return False
        self.closed = True
        self.sinks.clear()
        self.socket.close(0)
        self.lock.release()
        return True

    # ---- under the lock ----------------------------------------------------------------------------------------------

    def _usable(self) -> bool:
        return not self.closed and self.attachment.alive

    def _next_id(self) -> bytes:
        self._last_id += 1
        return self._last_id.to_bytes(REQUEST_ID_BYTES, "little")

    def _send(self, request_id: bytes, body: bytes, until: float) -> bool:
        while True:
            try:
                self.socket.send(request_id, zmq.SNDMORE | zmq.NOBLOCK)
                break
            except zmq.Again:  # not connected yet, or the queue of a hung daemon is full
                if not self._ready(zmq.POLLOUT, until):
                    return False
            except zmq.ZMQError:
                return False
        try:
            self.socket.send(body, zmq.NOBLOCK)
        except zmq.ZMQError:  # half a message: the socket is of no use any more
            self.closed = True
            self.socket.close(0)
            return False
        return True

    def _await(self, request_id: bytes, until: float) -> AnyReply | None:
        fast = until - time.monotonic() > MOMENT_MS / 1000
        while True:
            if not fast and not self._ready(zmq.POLLIN, until):
                return None
            try:
                frames = self.socket.recv_multipart(0 if fast else zmq.NOBLOCK)
            except zmq.Again:
                fast = False
                continue
            except zmq.ZMQError:
                return None
            found, reply = self._take(frames, request_id)
            if found:
                return reply

    def _take(self, frames: list[bytes], wanted: bytes) -> tuple[bool, AnyReply | None]:
        """Route one message.  (True, reply) = it is the wanted one; a reply of None could not be read."""
        reply: AnyReply | None = None
        if len(frames) == 2:
            try:
                reply = decode_reply(frames[1])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass
        if reply is None:
            self._counters["protocol_errors"] += 1
        if len(frames) != 2:
            return False, None
        request_id = frames[0]
        if request_id == wanted:
            self._unanswered -= 1
            return True, reply
        sink = self.sinks.get(request_id)
        if sink is not None:
            unreadable = Error(ErrorCode.BAD_REQUEST.value, "the answer was not readable", self.attachment.epoch)
            if sink(unreadable if reply is None else reply):
                self.sinks.pop(request_id, None)
        else:
            if request_id in self._forgotten:
                if not (isinstance(reply, LookupReply) and reply.pending and not reply.handle):  # else more follows
                    self._forgotten.discard(request_id)
            else:
                self._unanswered = max(0, self._unanswered - 1)
            self._counters["stray_replies"] += 1
            if reply is not None:
                self._stray(self.attachment, reply)
        return False, None

    def _ready(self, events: int, until: float) -> bool:
        """False = the deadline, or the end of the attachment."""
        poller = zmq.Poller()
        poller.register(self.socket, events)
        poller.register(self.attachment.down_fd, zmq.POLLIN)
        connection = self.attachment.sock.fileno()
        if connection >= 0:  # its end is noticed here too: the session's thread may be the one that waits
            poller.register(connection, zmq.POLLIN)
        left = max(0.0, until - time.monotonic())
        ready = dict(poller.poll(math.ceil(left * 1000)))
        return self.socket in ready and self.attachment.alive


def _tag(body: bytes) -> str:
    """The operation, out of an encoded request: [fixarray][fixstr] tag ..."""
    return body[2 : 2 + (body[1] & 31)].decode("ascii", "replace") if len(body) > 2 else "a request"
