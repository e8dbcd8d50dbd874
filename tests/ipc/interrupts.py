"""Interrupts at chosen points: a KeyboardInterrupt where CPython would run a signal handler that raises one.

CPython looks for signals when a function begins and when a call of C has returned (and at the end of a loop's body).  A
profile function hears of the first two, and what it raises comes from there.  So a test can interrupt a call at its
first point, its second, …, until it ends without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

TESTS = str(Path(__file__).parent.parent)


def interrupted(call: Callable[[], object], point: int) -> bool:
    """Run it, interrupted at its ``point``-th point, from 0 on.  False = it has no more than that many."""
    left = point

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and not frame.f_code.co_filename.startswith(TESTS):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # one may come in a finalizer
    try:
        sys.setprofile(profile)
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        sys.unraisablehook = hook
    return left < 0


def at_every_point(call: Callable[[], object], limit: int = 10_000) -> Iterator[int]:
    """Yields after each interrupted run of ``call``; whoever asks looks whether all is well."""
    for point in range(limit):
        if not interrupted(call, point):
            return
        yield point
    pytest.fail(f"more than {limit} points")
