"""Reading an adapter's JSON configuration strictly: known keys, right types, sane ranges, one sentence otherwise."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping

from kvkeep.l2.adapter import AdapterError

MOST_GIB = 1e9  # of a medium: in bytes it still fits into 64 bits
_EVERYWHERE = ("type", "name", "serde", "module_path", "class_name")  # read by the registry and the mover


class Options:
    """Each reader takes one key; `done` refuses the keys that nobody took."""

    def __init__(self, what: str, config: Mapping[str, object], ignore: Iterable[str] = _EVERYWHERE) -> None:
        self.what = what
        self._config = config
        self._known = set(ignore)

    def has(self, key: str) -> bool:
        self._known.add(key)
        return key in self._config

    def take(self, key: str, default: object = None) -> object:
        self._known.add(key)
        return self._config.get(key, default)

    def number(
        self, key: str, default: float, *, least: float = 0.0, most: float = float("inf"), above: float | None = None
    ) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.wrong(key, value, "a number")
        low = f"above {above:g}" if above is not None else f"{least:g} or more"
        limits = low if most == float("inf") else f"{low} and at most {most:g}"
        if not (least <= value <= most) or (above is not None and value <= above):
            raise self.wrong(key, value, f"a number, {limits}")
        return float(value)

    def gib(self, key: str, default: float = 0.0, *, least: float = 0.0, above: float | None = None) -> int:
        """Bytes, from a number of GiB.  The default, also 0, if it is not given."""
        if not self.has(key):
            return int(default * (1 << 30))
        return int(self.number(key, default, least=least, most=MOST_GIB, above=above) * (1 << 30))

    def count(self, key: str, default: int, *, least: int = 0, most: int = 1 << 62) -> int:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def choice(self, key: str, default: str, allowed: Iterable[str]) -> str:
        value = self.take(key, default)
        names = list(allowed)
        if not isinstance(value, str) or value not in names:
            raise self.wrong(key, value, "one of " + ", ".join(names) + nearest(str(value), names))
        return value

    def checked(self, key: str, default: str, check: Callable[[str], object]) -> str:
        """A text that ``check`` takes; it raises ValueError with the rest of a sentence."""
        value = self.text(key, default)
        try:
            check(value)
        except ValueError as problem:
            raise AdapterError(f"{self.what}: '{key}': {problem}") from None
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.take(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, "a text that is not empty")
        return value

    def path(self, key: str) -> str:
        return self.absolute(key, self.text(key))

    def absolute(self, key: str, path: str) -> str:
        """A relative one would be looked for where the daemon happened to be started."""
        if not os.path.isabs(path):
            raise AdapterError(f"{self.what}: '{key}' has the relative path {path!r}; give it from the root: '/…'")
        return path

    def table(self, key: str) -> Mapping[str, object]:
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return value

    def wrong(self, key: str, value: object, wanted: str) -> AdapterError:
        if key not in self._config:
            return AdapterError(f"{self.what}: '{key}' is missing; it is {wanted}")
        return AdapterError(f"{self.what}: '{key}' is {value!r}; it must be {wanted}")

    def done(self) -> None:
        for key in self._config:
            if key not in self._known:
                known = ", ".join(sorted(self._known.difference(_EVERYWHERE[1:])))
                hint = nearest(key, self._known)
                raise AdapterError(f"{self.what}: there is no option '{key}'{hint}; the options are {known}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is beyond all floats
        return False


def parse_json(text: str) -> object:
    """ValueError also for a key that is there twice: nobody can mean both."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} is there twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=once)


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f" (did you mean '{close[0]}'?)" if close else ""
