"""The ``kvkeep.*`` keys of an engine's own extra configuration, parsed once and then trusted.

A key that we do not know is an error, so that a typing mistake is seen and not silently ignored.  Keys without the
prefix belong to somebody else and are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "kvkeep."


class OptionError(ValueError):
    """One sentence: key, value, what is allowed."""


def parse(
    known: Mapping[str, object], ranges: Mapping[str, tuple[float, float]], extra: Mapping[Any, object], where: str
) -> dict[str, Any]:
    """The options among ``extra``, by name.  ``known``: their defaults, which also say their types.  Raises
    OptionError."""
    values: dict[str, Any] = {}
    for key, value in extra.items():
        if not isinstance(key, str) or not key.startswith(PREFIX):
            continue
        name = key[len(PREFIX) :]
        if name not in known:
            names = ", ".join(PREFIX + one for one in known)
            raise OptionError(f"unknown option {key!r} in {where}: the options are {names}")
        values[name] = _checked(name, value, type(known[name]), ranges)
    return values


def _checked(name: str, value: object, wanted: type, ranges: Mapping[str, tuple[float, float]]) -> object:
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise OptionError(f"{PREFIX}{name} is {value!r}: it must be of type {wanted.__name__}")
    if name in ranges:
        low, high = ranges[name]
        if not low <= value <= high:  # type: ignore[operator]
            raise OptionError(f"{PREFIX}{name} is {value!r}: it must be between {low} and {high}")
    return value
