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

LIMIT = 10_000
TESTS = str(Path(__file__).parent.parent)


def interrupted(call: Callable[[], object], point: int, *, outside: tuple[str, ...] = ()) -> bool:
    """Run it, interrupted at its ``point``-th point, from 0 on.  False = it has no more than that many.
    ``outside``: files whose points do not count, beside those of the tests."""
    left, outside = point, (*outside, TESTS)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        begun = event == "call" and frame.f_code.co_name != "__del__"  # else the finalizer would be lost, as it may be
        if (begun or event == "c_return") and not frame.f_code.co_filename.startswith(outside):
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


def at_every_point(call: Callable[[], object], *, outside: tuple[str, ...] = ()) -> Iterator[int]:
    """Yields after each interrupted run of ``call``; whoever asks looks whether all is well."""
    for point in range(LIMIT):
        if not interrupted(call, point, outside=outside):
            return
        yield point
    pytest.fail(f"more than {LIMIT} points")
