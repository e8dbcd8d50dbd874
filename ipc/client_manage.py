"""Management calls: what is asked of a daemon beside the data path (ping, stats, clear, pin, …).

Unlike a data-path call, which answers with a miss, one of these is answered by the daemon or raises:

    Unavailable     there is no daemon, or it did not answer within the deadline
    Denied          this client may not ask for that
    ProtocolError   the daemon refused, for the reason it gives, or its answer is not one to this request
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvkeep.ipc import messages as m
from kvkeep.ipc.arguments import carried, seconds
from kvkeep.ipc.client_session import Session
from kvkeep.ipc.errors import Denied, ProtocolError, Unavailable
from kvkeep.ipc.namespace import Namespace

MANAGEMENT_S = 10.0
CLEAR_S = 60.0  # longer than the daemon takes to answer what reaches L2


class Dropped(int):
    """How many chunks left L1, with what became of L2."""

    in_use: int = 0  # chunks that stay in L1 because they are being used; they go to L2 no more
    l2: tuple[dict[str, Any], ...] = ()  # per adapter: name, label, state ("removed", "under way", "remembered"), …
    problem: str = ""  # what is remembered would not survive a restart of the daemon, because …

    @classmethod
    def of(cls, reply: m.Ok) -> Dropped:
        dropped = cls(reply.count)
        if reply.detail:
            report = msgspec.json.decode(reply.detail, type=dict[str, Any])
            dropped.in_use, dropped.l2 = int(report.get("in_use", 0)), tuple(report.get("l2", ()))
            dropped.problem = str(report.get("problem", ""))
        return dropped


class Management:
    def __init__(self, session: Session) -> None:
        self._session = session

    def ask(self, expected: type[Any], kind: type[m.Request], *fields: Any, deadline_s: float = MANAGEMENT_S) -> Any:
        """A request of this ``kind``, with the ``fields`` that follow lease and epoch.  Returns an ``expected``."""
        session = self._session
        session.check_process()
        attachment = session.attachment
        if attachment is None:
            raise Unavailable(session.state)
        request = kind(attachment.lease, attachment.epoch, *fields)
        carried(request)
        deadline_s = seconds("deadline_s", deadline_s)
        with attachment.exchange():
            reply = session.call(attachment, request, deadline_s)  # type: ignore[arg-type]
            if isinstance(reply, expected):
                return reply
        if reply is None:
            raise Unavailable(f"the daemon did not answer {kind.__name__} within {deadline_s:g} s: {session.state}")
        if isinstance(reply, m.Error):
            if reply.code == m.ErrorCode.DENIED.value:
                raise Denied(reply.message)
            raise ProtocolError(reply.message, reply.code)
        raise ProtocolError(f"the daemon answered {kind.__name__} with {type(reply).__name__}")

    def document(self, kind: type[m.Request], *fields: Any, deadline_s: float = MANAGEMENT_S) -> dict[str, Any]:
        """The same for a request that is answered with a JSON object."""
        document = msgspec.json.decode(self.ask(m.Document, kind, *fields, deadline_s=deadline_s).json)
        if not isinstance(document, dict):
            raise ProtocolError(f"the daemon's document is a {type(document).__name__}, not an object")
        return document


def id_of(namespace: int | Namespace) -> int:
    if isinstance(namespace, Namespace):
        if not namespace.id:
            raise Unavailable(f"{namespace!r} is not registered with a daemon now")
        return namespace.id
    return namespace
