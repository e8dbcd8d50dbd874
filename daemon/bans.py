"""What one adapter must not be asked for and not be given: namespaces and chunks that were cleared.

A ban begins with the clear or delete, before anything else happens, and ends when the adapter is known to have none of
it any more.  In between nothing of it is served from there, whatever the medium still holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
EVERYTHING = b""  # stands for all namespaces


class Bans:
    """Namespaces are digests.  Every `add` needs its own `remove`."""

    def __init__(self) -> None:
        self._spaces: Counter[bytes] = Counter()
        self._keys: dict[bytes, Counter[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._spaces or self._keys)

    @property
    def spaces(self) -> list[bytes]:
        return list(self._spaces)

    @property
    def chunks(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, namespace: bytes, keys: Iterable[bytes] | None = None) -> None:
        """``keys`` None = all of the namespace."""
        if keys is None:
            self._spaces[namespace] += 1
        else:
            self._keys.setdefault(namespace, Counter()).update(keys)

    def remove(self, namespace: bytes, keys: Iterable[bytes] | None = None) -> None:
        if keys is None:
            self._spaces[namespace] -= 1
            self._spaces = +self._spaces
            return
        held = self._keys[namespace]
        for key in keys:
            held[key] -= 1
            if not held[key]:
                del held[key]
        if not held:
            del self._keys[namespace]

    def all_of(self, namespace: bytes) -> bool:
        return EVERYTHING in self._spaces or namespace in self._spaces

    def keys_of(self, namespace: bytes) -> Set[bytes]:
        """Single chunks of it, besides `all_of`."""
        held = self._keys.get(namespace)
        return held.keys() if held is not None else frozenset()

    def of(self, namespace: bytes, keys: U64) -> npt.NDArray[np.bool_] | None:
        """For each of the keys (n, 4): is it banned?  None = none of them is."""
        if not self:
            return None
        if self.all_of(namespace):
            return np.ones(len(keys), dtype=bool)
        held = self.keys_of(namespace)
        if not held:
            return None
        return np.fromiter((key.tobytes() in held for key in keys), dtype=bool, count=len(keys))
