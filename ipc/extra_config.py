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
    known: Mapping[str, object],
    ranges: Mapping[str, tuple[float, float]],
    extra: Mapping[Any, object],
    where: str,
    *,
    prefix: str = PREFIX,
) -> dict[str, Any]:
    """The options among ``extra``, by name.  ``known``: their defaults, which also say their types.  ``prefix``: of the
    keys that are ours.  Raises OptionError."""
    values: dict[str, Any] = {}
    for key, value in extra.items():
        if not isinstance(key, str) or not key.startswith(prefix):
            continue
        name = key[len(prefix) :]
        if name not in known:
            names = ", ".join(prefix + one for one in known)
            raise OptionError(f"unknown option {key!r} in {where}: the options are {names}")
        values[name] = _checked(prefix + name, value, type(known[name]), ranges.get(name))
    return values


def _checked(key: str, value: object, wanted: type, between: tuple[float, float] | None) -> object:
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise OptionError(f"{key} is {value!r}: it must be of type {wanted.__name__}")
    if between is not None:
        low, high = between
        if not low <= value <= high:  # type: ignore[operator]
            raise OptionError(f"{key} is {value!r}: it must be between {low} and {high}")
    return value
