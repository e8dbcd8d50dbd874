"""The stats page: one JSON document in the meta segment, for readers that must not cost the control loop anything.

A seqlock: the writer makes the sequence odd, writes length and bytes, and makes it even again; a reader copies and
retries if the sequence was odd or has moved.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvkeep.shm.layout import STATS_BYTES, STATS_OFFSET

_HEADER = 16  # u64 sequence, u64 length


def write_stats(page: npt.NDArray[np.uint8], document: bytes) -> bool:
    """``page`` is the STATS_BYTES at STATS_OFFSET.  False if the document does not fit (the page stays as it was)."""
    if len(document) > len(page) - _HEADER:
        return False
    header = page[:_HEADER].view(np.uint64)
    sequence = int(header[0]) | 1
    header[0] = sequence
    header[1] = len(document)
    page[_HEADER : _HEADER + len(document)] = np.frombuffer(document, dtype=np.uint8)
    header[0] = sequence + 1
    return True


def read_stats(meta: npt.NDArray[np.uint8], tries: int = 100) -> bytes:
    """The document in a mapped meta segment (all of it, from offset 0); b"" if none was written or it never stands
    still."""
    page = meta[STATS_OFFSET : STATS_OFFSET + STATS_BYTES]
    header = page[:_HEADER].view(np.uint64)
    for _ in range(tries):
        before, length = int(header[0]), int(header[1])
        if before and not before & 1 and length <= STATS_BYTES - _HEADER:
            document = page[_HEADER : _HEADER + length].tobytes()
            if int(header[0]) == before:
                return document
        elif not before:
            return b""
        time.sleep(0.0005)
    return b""
