"""Pins that requests asked for: their prompts stay in L1 for a time, whatever else wants the room.

A pin is a management call that may wait for the daemon, and it covers only what is stored already, while a request
may end before its last chunk is in.  So pins are made in a thread that lives while there are some to make, and tried
again a few times until the whole prompt is there; then what is there is pinned.  The daemon ends pins by itself,
limits their bytes and decides who may pin; what it refuses is logged once.

The same prompt is pinned once however many requests ask, and again when half of its time is over or if only a part of
it was there.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvkeep.ipc.errors import Denied
from kvkeep.ipc.messages import HASH_BYTES

MAX_QUEUED = 1024
MAX_HELD = 65_536
TRIES, PAUSE_S = 5, 1.0


@dataclass
class _Wish:
    namespace: Any  # kvkeep.ipc.client.Namespace
    hashes: bytes  # of the prompt's chunks, from the root
    ttl_s: float
    tries: int = 0


@dataclass
class _Held:
    pin: int
    ends: float
    whole: bool  # else what is stored meanwhile is worth another try


class Pinner:
    def __init__(self, client: Any, log: Callable[[str, BaseException], None], *, pause_s: float = PAUSE_S) -> None:
        self._client, self._log, self._pause_s = client, log, pause_s
        self._changed = threading.Condition()
        self._wishes: list[tuple[float, int, _Wish]] = []  # a heap: when to try
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._held: dict[tuple[bytes, int, bytes], _Held] = {}  # by `_name`; the thread's
        self.dropped = 0

    def ask(self, namespace: Any, hashes: bytes, ttl_s: float) -> None:
        """The engine's thread.  Returns at once."""
        if hashes and ttl_s > 0:
            self._put(_Wish(namespace, hashes, ttl_s), time.monotonic())

    def close(self) -> None:
        """What is not pinned yet is not pinned; what is stays until its time is over."""
        with self._changed:
            self._closed = True
            self._wishes.clear()
            self._changed.notify_all()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _put(self, wish: _Wish, at: float) -> None:
        with self._changed:
            if self._closed or len(self._wishes) >= MAX_QUEUED:
                self.dropped += 1
                return
            heapq.heappush(self._wishes, (at, next(self._numbers), wish))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvkeep-pins", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while (wish := self._next()) is not None:
            done = False
            try:
                done = self._pin(wish)
            except Denied as error:
                self._log("pin", error)
                done = True  # it will not change its mind
            except Exception as error:
                self._log("pin", error)
            wish.tries += 1
            if not done and wish.tries < TRIES:
                self._put(wish, time.monotonic() + self._pause_s)

    def _next(self) -> _Wish | None:
        with self._changed:
            while self._wishes:
                left = self._wishes[0][0] - time.monotonic()
                if left <= 0:
                    return heapq.heappop(self._wishes)[2]
                self._changed.wait(left)
            self._thread = None
            return None

    def _pin(self, wish: _Wish) -> bool:
        name, now = self._name(wish), time.monotonic()
        before = self._held.get(name)
        if before is not None and before.whole and before.ends - now > wish.ttl_s / 2:
            return True
        pin, count = self._client.pin(wish.namespace, wish.hashes, ttl_s=wish.ttl_s)
        whole = count * HASH_BYTES >= len(wish.hashes)
        if not whole and wish.tries < TRIES - 1:
            if pin:
                self._client.unpin(pin)
            return False
        if pin:
            self._hold(name, _Held(pin, now + wish.ttl_s, whole), now)
        if before is not None and before.ends > now:
            self._client.unpin(before.pin)
        return True

    def _name(self, wish: _Wish) -> tuple[bytes, int, bytes]:
        """Of a pin: the last chunk's hash stands for all before it, in one namespace of one daemon."""
        return wish.namespace.digest, self._client.epoch, wish.hashes[-HASH_BYTES:]

    def _hold(self, name: tuple[bytes, int, bytes], held: _Held, now: float) -> None:
        if len(self._held) >= MAX_HELD:
            self._held = {key: other for key, other in self._held.items() if other.ends > now}
        if len(self._held) < MAX_HELD:
            self._held[name] = held
