"""DEBUG lines by which one chunk can be followed: each names the chunks by the first 12 digits of their hash.

    sealed: 3 chunks: 0a1b2c3d4e5f …          put l2-0/7: …          stored by l2-0/7: …
    asked l2-0/9 for lookup 1234: …           get l2-0/10 for lookup 1234: …
    loaded by l2-0/10 for lookup 1234: …      evicted: …       deleted: …       left with its last reader: …

l2-0/7 is job 7 of the mover l2-0, which says in its own log how long it took.  Costs nothing when DEBUG is off.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

PER_LINE = 64
DIGITS = 12


def chunks(log: logging.Logger, what: str, keys: npt.NDArray[np.uint64]) -> None:
    """``keys`` is (n, 4).  Make it only if `on`."""
    for start in range(0, len(keys), PER_LINE):
        part = keys[start : start + PER_LINE]
        log.debug("%s: %d chunks: %s", what, len(part), " ".join(key.tobytes().hex()[:DIGITS] for key in part))


def on(log: logging.Logger) -> bool:
    return log.isEnabledFor(logging.DEBUG)
