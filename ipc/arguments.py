"""What callers pass, checked at the border: a ValueError is one sentence with the value, the limit and the fix.

Checks come before the first request: what raises in an `Attachment.exchange` ends the attachment.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat, SupportsIndex

import msgspec

MIN_WHOLE, MAX_WHOLE = -(2**63), 2**63 - 1  # what a message can carry


def whole(what: str, value: SupportsIndex, least: int = MIN_WHOLE, most: int = MAX_WHOLE) -> int:
    """An int, or what numpy has for one."""
    if type(value) is int and least <= value <= most:
        return value  # each call asks several times
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} is {value!r} ({type(value).__name__}); it must be a whole number") from None
    if not least <= number <= most:
        limit = f"at most {most}" if number > most else f"{least} or more" if least != 1 else "positive"
        raise ValueError(f"{what} is {number}; it must be {limit}")
    return number


def seconds(what: str, value: SupportsFloat) -> float:
    """How long something may take: negative is 0, infinite is as long as it ever may."""
    if type(value) is float and value >= 0:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {value!r} ({type(value).__name__}); it must be a number of seconds") from None
    if number != number:
        raise ValueError(f"{what} is not a number (NaN); give seconds, or math.inf for as long as it may take")
    return max(number, 0.0)


def carried(request: msgspec.Struct) -> None:
    """Whether all whole numbers of a request can be sent."""
    for name in request.__struct_fields__:
        value: Any = getattr(request, name)
        if isinstance(value, int):
            whole(name, value)


def text(what: str, value: str, most: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r} ({type(value).__name__}); it must be a str")
    if len(value) > most:
        raise ValueError(f"{what} has {len(value)} characters, the limit is {most}; use a shorter one")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {value!r}, with a lone surrogate; use real Unicode text") from None
    return value
