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
UNANSWERED_S = 0.5  # a ping that takes longer opens the breaker


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
    """Asks a daemon that let a deadline expire whether it is there: one that is hung with growing patience until it
    answers, one that is only doubted once."""

    def __init__(self, channel: Channel, body: bytes) -> None:
        self._channel, self._body = channel, body
        self._patience = PING_S[0]
        self._next = 0.0
        self._asked = 0.0  # since when a doubted daemon has not answered; 0 = it was not asked

    def due_in_ms(self) -> int | None:
        """Until there is something to do for `step`; None = nothing."""
        attachment = self._channel.attachment
        if not (attachment.hung or attachment.doubted):
            return None
        due = self._next if attachment.hung else self._asked and self._asked + UNANSWERED_S
        return max(0, int((due - time.monotonic()) * 1000) + 1)

    def step(self) -> bool:
        """Ask if it is time to.  True = a doubted daemon did not answer: it hangs."""
        attachment, now = self._channel.attachment, time.monotonic()
        if attachment.hung:
            if now >= self._next:
                self._next = now + self._patience
                self._patience = min(self._patience * 2, PING_S[1])
                self._channel.post(self._body, self._answered)
        elif attachment.doubted:
            if self._asked:
                return now >= self._asked + UNANSWERED_S
            self._asked = now
            self._channel.post(self._body, self._answered)
        return False

    def _answered(self, reply: m.AnyReply) -> bool:
        attachment = self._channel.attachment
        if attachment.hung:
            attachment.hung = False
            log.warning("the daemon at %s answers again", attachment.endpoint)
        attachment.doubted = False
        self._patience, self._next, self._asked = PING_S[0], 0.0, 0.0
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
