"""Many requests at once: send them all, take the replies in any order, wait once.

For requests that do not depend on each other (`STORE` of unrelated keys, their `COMMIT`s).  A reply that comes after
the deadline is given back: nobody else knows of the handle in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.ipc import messages as m
from kvkeep.ipc.client_rpc import Attachment, Sink

if TYPE_CHECKING:
    from kvkeep.ipc.client_session import Session

WINDOW = 64  # requests on the way; well below the socket's high-water mark


class Answer(NamedTuple):
    reply: m.AnyReply | None = None  # None = no usable answer in time
    sent: bool = False  # whether the request left this process


class _Wave:
    """The replies of one `ask_all`.  Sinks may run in the session's thread, also while this one gives up."""

    def __init__(self, session: Session, attachment: Attachment, count: int) -> None:
        self._session, self._attachment = session, attachment
        self._lock = threading.Lock()
        self._over = False
        self.replies: list[m.AnyReply | None] = [None] * count
        self.arrived = 0

    def sink(self, i: int) -> Sink:
        def take(reply: m.AnyReply) -> bool:
            with self._lock:
                if not self._over:
                    self.replies[i] = reply
                    self.arrived += 1
                    return True
            self._session.returns.give_back_reply(self._attachment, reply)
            return True

        return take

    def end(self) -> None:
        with self._lock:
            self._over = True


def ask_all(
    session: Session, attachment: Attachment, requests: Sequence[m.AnyRequest], deadline_s: float
) -> list[Answer]:
    """One answer per request, in order.  Only for requests with exactly one reply (not a LOOKUP that waits)."""
    session.check_process()
    until = time.monotonic() + deadline_s
    channel = None if attachment.hung or not attachment.alive else session.channel(attachment)
    if channel is None:
        return [Answer()] * len(requests)
    wave = _Wave(session, attachment, len(requests))
    ids: list[bytes | None] = []
    try:
        for i, request in enumerate(requests):
            if i >= WINDOW:
                channel.wait(lambda: wave.arrived > len(ids) - WINDOW, until)
            in_time = time.monotonic() < until or not i
            ids.append(channel.post(m.encode(request), wave.sink(i)) if in_time else None)
            if ids[-1] is None:
                break
        posted = sum(request_id is not None for request_id in ids)
        channel.wait(lambda: wave.arrived == posted, until)
    finally:
        wave.end()
        late = [request_id for request_id in ids if request_id is not None and request_id in channel.sinks]
        for request_id in late:
            channel.forget(request_id)
        if late:
            session.wake()
    if late and attachment.alive:
        session.late(attachment, f"{len(late)} of {len(requests)} requests", deadline_s)
    ids += [None] * (len(requests) - len(ids))
    return [
        Answer(session.examine(attachment, reply) if reply is not None else None, request_id is not None)
        for reply, request_id in zip(wave.replies, ids, strict=True)
    ]
