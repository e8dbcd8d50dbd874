"""No exception of ours reaches the engine; each kind is logged once and all are counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class Guard:
    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()

    def say(self, sentence: str) -> None:
        """To the operator; each one once."""
        with self._lock:
            self.counters[sentence] += 1
            first = self.counters[sentence] == 1
        if first:
            self._log(f"kvkeep: {sentence}")

    def note(self, where: str, error: BaseException) -> None:
        kind = f"{where}: {type(error).__name__}"
        with self._lock:
            self.counters[kind] += 1
            first = self.counters[kind] == 1
        if first:
            place = _innermost(error)
            self._log(f"kvkeep: {kind} ({error}) at {place}; the request goes on without the cache (logged once)")


def _innermost(error: BaseException) -> str:
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "?"
