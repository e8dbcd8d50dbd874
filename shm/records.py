"""Checksums over fixed-size records, many at a time.

An adoption verifies a million records in a fraction of a second, so the sum must be a numpy expression.  Each 64-bit
word is folded onto itself (a bijection, so that a flipped high bit reaches the low bits), multiplied by its own odd
constant, and added up modulo 2**64.  Any change of one word changes the sum; two changed words collide with a chance of
about 2**-32 or less.  This guards against torn and stray writes, not against an adversary: whoever can write the
metadata is the daemon itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def _odd_constants(count: int) -> U64:
    """Fixed odd multipliers from the splitmix64 sequence (Steele, Lea, Flood 2014)."""
    out, state, mask = [], 0x6B766B656570, (1 << 64) - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append((z ^ (z >> 31)) | 1)
    return np.array(out, dtype=np.uint64)


_CONSTANTS = _odd_constants(64)
_FOLD = np.uint64(29)


def word_sums(words: U64) -> U64:
    """Sum of each row of ``words`` (rows, k <= 64) as u64; an all-zero record does not sum to zero."""
    folded = words ^ (words >> _FOLD)
    sums: U64 = folded @ _CONSTANTS[: words.shape[1]]
    return sums + np.uint64(0x6B766B656570)
