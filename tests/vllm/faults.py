"""Stands between the connector and its client: counts what is sent, and breaks what a test asks it to break."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any


class Faults:
    """All settings are plain attributes; 0 or False = no fault."""

    def __init__(self, attach: Callable[[Any, str], Any]) -> None:
        self._attach = attach
        self._lock = threading.Lock()  # loads come from several threads
        self._owed = 0.0  # the share of a fault that has not happened yet
        self.sent: Counter[str] = Counter()
        self.fail_loads = 0.0  # share of reads that give wrong bytes and say so
        self.lie_about_loads = False  # failed loads say that they are right: nothing protects the engine then
        self.refuse_loads = 0.0  # share of reads that are not opened
        self.slow_loads_s = 0.0  # before a read is opened
        self.slow_stores_s = 0.0  # between reservation and copy
        self.refuse_when = ""  # while this file exists, rank 1 opens no read: reaches ranks in processes of their own
        self.raise_in = ""  # name of a client call that raises
        self.strike: dict[str, Any] = {}  # see `reach`; once
        self.strike_when = ""  # this file holds the strike, and goes with it: reaches ranks in processes of their own

    def attach(self, options: Any, label: str) -> Any:
        return _Client(self, self._attach(options, label), label)

    def reach(self, point: str, label: str) -> None:
        """Here a strike hits that is aimed at this point, {"at": point, "signal": number, "pid": whom, "who": label}:
        no pid = this process; no label = whoever comes first.

        "open_read": before a read is opened; "load": a chunk of it has been copied; "reserve": before a reservation;
        "store": a chunk of it has been copied."""
        strike = self.strike
        with contextlib.suppress(FileNotFoundError):
            if self.strike_when:
                with open(self.strike_when) as file:
                    strike = json.load(file)
        with self._lock:
            if strike.get("at") != point or not label.endswith(strike.get("who", "")):
                return
            if strike is self.strike:
                self.strike = {}
            else:
                try:
                    os.unlink(self.strike_when)
                except FileNotFoundError:  # another rank was first
                    return
        os.kill(strike.get("pid") or os.getpid(), strike["signal"])

    def note(self, call: str) -> None:
        self.sent[call] += 1
        if self.raise_in == call:
            raise RuntimeError(f"injected into {call}")

    def happens(self, share: float) -> bool:
        """Evenly spread, not drawn: a share of 0.01 is every hundredth time, so that a test knows how often it was."""
        with self._lock:
            self._owed += share
            if self._owed < 1 - 1e-9:
                return False
            self._owed -= 1
            return True


class _Client:
    def __init__(self, faults: Faults, inner: Any, label: str) -> None:
        self._faults, self._inner, self._label = faults, inner, label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def register(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.note("register")
        return self._inner.register(*args, **kwargs)

    def begin_lookup(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.note("begin_lookup")
        return self._inner.begin_lookup(*args, **kwargs)

    def open_read(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.note("open_read")
        self._faults.reach("open_read", self._label)
        time.sleep(self._faults.slow_loads_s)
        if self._faults.happens(self._faults.refuse_loads):
            return None
        if self._label.endswith(" 1") and os.path.exists(self._faults.refuse_when):
            return None
        reading = self._inner.open_read(*args, **kwargs)
        if reading is not None and self._faults.happens(self._faults.fail_loads):
            return _Garbage(reading, lie=self._faults.lie_about_loads)
        return _Struck(reading, lambda: self._faults.reach("load", self._label)) if reading is not None else None

    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.note("reserve")
        self._faults.reach("reserve", self._label)
        reservation = self._inner.reserve(*args, **kwargs)
        time.sleep(self._faults.slow_stores_s)
        return _Struck(reservation, lambda: self._faults.reach("store", self._label))


class _Struck:
    """A read or a reservation that does something after each copy."""

    def __init__(self, inner: Any, after: Callable[[], None]) -> None:
        self._inner, self._after = inner, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextlib.contextmanager
    def copying(self) -> Iterator[bool]:
        with self._inner.copying() as allowed:
            yield allowed
            if allowed:
                self._after()

    def __enter__(self) -> _Struck:
        self._inner.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        self._inner.__exit__(*about)


class _Garbage:
    """A read whose bytes are wrong from the second chunk on (all of them if there is only one), and that notices."""

    def __init__(self, inner: Any, *, lie: bool) -> None:
        self._inner, self._lie = inner, lie
        self._good = 1 if len(inner.views) > 1 else 0
        self.views = [view if n < self._good else view ^ 0x5A for n, view in enumerate(inner.views)]

    def validate(self) -> list[bool]:
        return [fine and (self._lie or n < self._good) for n, fine in enumerate(self._inner.validate())]

    def copying(self) -> Any:
        return self._inner.copying()

    def confirm(self, *, wait: bool = True) -> None:
        self._inner.confirm(wait=wait)
