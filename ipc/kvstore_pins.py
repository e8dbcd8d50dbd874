"""Pins of a key/value store: references that its client holds on whole values, each for a time.

A pin is a lookup that is not released.  The daemon counts it for the client's lease, so it ends with `unpin`, with its
time, with the client (closed or killed) and with the daemon, whichever comes first.  Pins of one key are counted.

One thread per store, started by the first pin, ends those whose time is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.ipc.client_lookup import Lookup


@dataclass
class _Pin:
    holds: Sequence[Lookup]
    nbytes: int  # of the arena
    count: int
    expires: float

    @property
    def alive(self) -> bool:
        return all(hold.alive for hold in self.holds)

    def release(self) -> None:
        for hold in self.holds:
            hold.release()


class Pins:
    """Thread-safe.  Keys are their 32-byte hashes."""

    def __init__(self) -> None:
        self._pins: dict[bytes, _Pin] = {}
        # Callers enter the lock, not the condition: a signal that interrupts the latter's Python code leaves it locked.
        self._lock = threading.RLock()  # `abandon` may come as a finalizer in the thread that has it
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(pin.nbytes for pin in self._pins.values() if pin.alive)

    def __len__(self) -> int:
        """Keys that are pinned now."""
        with self._lock:
            return sum(pin.alive for pin in self._pins.values())

    def again(self, key: bytes, ttl_s: float) -> bool:
        """One more pin on a key that is pinned already.  False = it is not, or the daemon restarted since."""
        with self._lock:
            pin = self._pins.get(key)
            if pin is None or not pin.alive:
                return False
            pin.count += 1
            pin.expires = max(pin.expires, time.monotonic() + ttl_s)
            return True

    def add(self, key: bytes, holds: Sequence[Lookup], nbytes: int, ttl_s: float) -> bool:
        """Takes ``holds`` over.  False = closed; they are released."""
        fresh = _Pin(holds, nbytes, 1, time.monotonic() + ttl_s)
        with self._lock:
            old = None if self._closed else self._pins.get(key)
            if not self._closed:
                if old is not None and old.alive:  # another thread was faster: its count, our time
                    fresh.count += old.count
                    fresh.expires = max(fresh.expires, old.expires)
                self._pins[key] = fresh
                if self._thread is None:
                    thread = threading.Thread(target=self._expire, name="kvkeep-pins", daemon=True)
                    thread.start()
                    self._thread = thread
                self._changed.notify()
            closed = self._closed
        if old is not None:
            old.release()
        if closed:
            fresh.release()
        return not closed

    def drop(self, key: bytes) -> bool:
        """One pin less.  False = there was none."""
        with self._lock:
            pin = self._pins.get(key)
            if pin is None:
                return False
            alive = pin.alive
            pin.count -= 1
            if pin.count <= 0 or not alive:
                del self._pins[key]
                over: _Pin | None = pin
            else:
                over = None
        if over is not None:
            over.release()
        return alive

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pins = list(self._pins.values())
            self._pins.clear()
            self._changed.notify()
        for pin in pins:
            pin.release()

    def abandon(self) -> None:
        """For a finalizer, which must not wait: the lookups give themselves back."""
        with self._lock:
            self._closed = True
            self._pins.clear()
            self._changed.notify()

    def _expire(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                over = [key for key, pin in self._pins.items() if pin.expires <= now or not pin.alive]
                ended = [self._pins.pop(key) for key in over]
                if not ended:
                    following = min((pin.expires for pin in self._pins.values()), default=None)
                    self._changed.wait(None if following is None else min(following - now, threading.TIMEOUT_MAX))
            for pin in ended:
                pin.release()
