"""Many requests at once: send them all, take the replies in any order, wait once.

For requests that do not depend on each other (`STORE` of unrelated keys, their `COMMIT`s).  A reply that comes after
the deadline is given back: nobody else knows of the handle in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeep.ipc import messages as m
from kvkeep.ipc.client_rpc import Answer, Attachment, Channel, Sink

if TYPE_CHECKING:
    from kvkeep.ipc.client_session import Session

WINDOW = 64  # requests on the way; well below the socket's high-water mark


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
    """One answer per request, in order.  Only for requests with exactly one reply (not a LOOKUP that waits).  Who asks
    for something that must be given back does it in an `Attachment.exchange`."""
    session.check_process()
    bodies = [m.encode(request) for request in requests]
    channel = None
    with attachment.exchange():
        if attachment.alive and not attachment.hung:
            channel = session.channel(attachment)
        if channel is None:
            return [Answer()] * len(requests)
        return _ask(session, channel, bodies, deadline_s)


def _ask(session: Session, channel: Channel, bodies: Sequence[bytes], deadline_s: float) -> list[Answer]:
    until, attachment = time.monotonic() + deadline_s, channel.attachment
    wave = _Wave(session, attachment, len(bodies))
    ids: list[bytes | None] = []
    for i, body in enumerate(bodies):
        if i >= WINDOW:
            channel.wait(lambda: wave.arrived > len(ids) - WINDOW, until)
        in_time = time.monotonic() < until or not i
        ids.append(channel.post(body, wave.sink(i)) if in_time else None)
        if ids[-1] is None:
            break
    posted = sum(request_id is not None for request_id in ids)
    channel.wait(lambda: wave.arrived == posted, until)
    wave.end()
    late = [request_id for request_id in ids if request_id is not None and request_id in channel.sinks]
    for request_id in late:
        channel.forget(request_id)
    if late and attachment.alive:
        session.late(attachment, f"{len(late)} of {len(bodies)} requests", deadline_s)
    ids += [None] * (len(bodies) - len(ids))
    return [
        Answer(session.examine(attachment, reply) if reply is not None else None, request_id is not None)
        for reply, request_id in zip(wave.replies, ids, strict=True)
    ]
