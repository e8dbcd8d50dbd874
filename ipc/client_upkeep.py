"""What the session's thread does for others: giving handles back, and asking a silent daemon whether it is there."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque

import zmq

from kvkeep.ipc import messages as m
from kvkeep.ipc.client_rpc import Attachment, Channel

log = logging.getLogger("kvkeep.client")

PING_S = (1.0, 10.0)


class Returns:
    """Requests that give something back, for those who must not wait: finalizers, stray replies, an open breaker.

    `give_back` takes no lock and never fails: it is called by finalizers, in any thread, at interpreter shutdown.
    """

    def __init__(self, wake_fd: int, counters: dict[str, int]) -> None:
        self.closed = False
        self._wake_fd, self._counters = wake_fd, counters
        self._pid = os.getpid()
        self._queue: deque[tuple[Attachment, bytes]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def give_back(self, attachment: Attachment, request: m.AnyRequest) -> None:
        if attachment.alive and not self.closed and os.getpid() == self._pid:
            with attachment.exchange():  # what is not given back now is never
                self._queue.append((attachment, m.encode(request)))
                with contextlib.suppress(OSError):
                    os.eventfd_write(self._wake_fd, 1)

    def give_back_reply(self, attachment: Attachment, reply: m.AnyReply) -> None:
        """What a reply that nobody waits for has brought."""
        handle = getattr(reply, "handle", 0) or getattr(reply, "pin", 0)
        if not handle or reply.epoch != attachment.epoch:
            return
        self._counters["given_back"] += 1
        kind = m.Abort if isinstance(reply, m.StoreReply) else m.Unpin if isinstance(reply, m.Pinned) else m.Release
        self.give_back(attachment, kind(attachment.lease, attachment.epoch, handle))

    def flush(self, attachment: Attachment, channel: Channel) -> None:
        """Send what can be sent now."""
        while self._queue:
            owner, body = self._queue.popleft()
            if owner is attachment and channel.post(body) is None:
                self._queue.appendleft((owner, body))
                return

    def clear(self) -> None:
        self._queue.clear()


class Ping:
    """Asks a silent daemon, with growing patience, until it answers."""

    def __init__(self, channel: Channel, body: bytes) -> None:
        self._channel, self._body = channel, body
        self._patience = PING_S[0]
        self._next = 0.0

    def due_in_ms(self) -> int:
        return max(0, int((self._next - time.monotonic()) * 1000) + 1)

    def send_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._patience
        self._patience = min(self._patience * 2, PING_S[1])
        self._channel.post(self._body, self._answered)

    def _answered(self, reply: m.AnyReply) -> bool:
        attachment = self._channel.attachment
        if attachment.hung:
            attachment.hung = False
            log.warning("the daemon at %s answers again", attachment.endpoint)
        self._patience, self._next = PING_S[0], 0.0
        return True


_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def zmq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One for all clients of this process; a fork makes its own."""
    context = _contexts.get(os.getpid())
    if context is None:
        context = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, 65536)
        context = _contexts.setdefault(os.getpid(), context)
    return context


def clear(eventfd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(eventfd)
