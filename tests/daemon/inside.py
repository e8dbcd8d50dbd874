"""An engine with its administration in this process, over an arena in ordinary memory: to look at single steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from kvkeep.daemon.admin import Admin
from kvkeep.daemon.engine import Engine
from kvkeep.daemon.sessions import Session
from kvkeep.ipc import messages as m
from kvkeep.ipc.attach import Credentials
from tests.shm.helpers import Memory

EPOCH = 1


class Inside:
    def __init__(self, *, units: int = 64, capacity: int = 1024) -> None:
        self.arena = Memory(units=units, capacity=capacity).arena()
        self.replies: list[Any] = []
        self.engine = Engine(
            self.arena, epoch=EPOCH, send=lambda *reply: self.replies.append(reply), notify=lambda session: None
        )
        self.admin = Admin(self.engine, name="inside", version="0", admin_uids=())
        self._leases = 0

    def attach(self) -> Session:
        self._leases += 1
        session = Session(
            self._leases,
            self._leases.to_bytes(16, "little"),
            Credentials(os.getpid(), os.geteuid(), os.getegid()),
            f"client-{self._leases}",
            True,
        )
        self.engine.open_session(session)
        return session

    def call(self, session: Session, kind: type[m.Request], *fields: Any) -> Any:
        return self.engine.handle(b"peer", bytes(8), kind(session.token, EPOCH, *fields))  # type: ignore[arg-type]

    def register(self, session: Session, *, shard_bytes: int = 4096) -> int:
        return int(self.call(session, m.Register, b"{}", shard_bytes, 1).namespace)

    def store(self, session: Session, namespace: int, keys: np.ndarray) -> None:
        stored = self.call(session, m.Store, namespace, 0, keys.tobytes(), 0)
        sealed = self.call(session, m.Commit, stored.handle, b"\x01" * len(keys), b"")
        assert set(sealed.outcomes) == {0}


def work_of(call: Callable[[], object]) -> int:
    """How many lines of Python ``call`` executes: what it costs, on any machine."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
